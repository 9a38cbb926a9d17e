//! SGLang-compatible LoRA endpoints. They only list LoRAs: each request selects its own, so that no client can change
//! the LoRAs of another.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::App;
use crate::error::ApiError;

pub(super) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let adapters: Vec<Value> = app.model.loras.iter().map(|name| json!({"nickname": name, "path": null})).collect();
    Json(json!({"loaded_adapters": adapters, "active": []}))
}

pub(super) async fn refuse() -> ApiError {
    let message = "LoRAs are selected per request: set the field `lora` to a name that /v1/list_loras lists";
    ApiError { param: Some("lora".into()), ..ApiError::new(400, "unsupported", message).should_retry(false) }
}
