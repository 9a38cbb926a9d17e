//! Model endpoints. Clients and the web page build their input forms from the responses.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde::Serialize;
use serde_json::{Value, json};

use super::App;
use crate::serve::error::ApiError;
use crate::serve::fields::Card as Offer;

/// OpenAI's model object, extended by the server's limits and options.
#[derive(Serialize)]
struct Card<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    #[serde(flatten)]
    offer: Offer,
}

fn card<'a>(app: &App, id: &'a str) -> Card<'a> {
    Card { id, object: "model", created: app.created, owned_by: "ltx2", offer: app.fields.card() }
}

pub(super) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let cards: Vec<Card> = app.names.iter().map(|name| card(&app, name)).collect();
    Json(json!({"object": "list", "data": cards}))
}

pub(super) async fn get(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let known = app.names.iter().find(|known| name.as_ref().is_ok_and(|name| **known == name.0));
    let missing = || ApiError::new(404, "model_not_found", "no such model; /v1/models lists the models");
    known.map(|name| Json(json!(card(&app, name)))).ok_or_else(missing)
}
