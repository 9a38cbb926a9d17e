//! Model endpoints. Clients and the web page build their input forms from the responses.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use super::App;
use crate::error::ApiError;

/// Returns OpenAI's model object, extended by the pipelines, defaults and limits of requests.
fn card(app: &App, id: &str) -> Value {
    let mut card = json!({"id": id, "object": "model", "created": app.created, "owned_by": "ltx2"});
    if let (Value::Object(card), Value::Object(more)) = (&mut card, app.generator.card()) {
        card.extend(more);
    }
    card
}

pub(super) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let cards: Vec<Value> = app.model.names.iter().map(|name| card(&app, name)).collect();
    Json(json!({"object": "list", "data": cards}))
}

pub(super) async fn get(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let known = app.model.names.iter().find(|known| name.as_ref().is_ok_and(|name| **known == name.0));
    let missing = || ApiError::new(404, "model_not_found", "no such model; /v1/models lists the models");
    known.map(|name| Json(card(&app, name))).ok_or_else(missing)
}
