//! LoRAs as SGLang's clients know them: a list, and no state that one client changes for all.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::App;
use crate::serve::error::ApiError;

pub(super) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let adapters: Vec<Value> = app.serve.loras.keys().map(|name| json!({"nickname": name, "path": null})).collect();
    Json(json!({"loaded_adapters": adapters, "active": []}))
}

pub(super) async fn refuse() -> ApiError {
    let message = "a LoRA belongs to a request here: give its name as the field `lora`; /v1/list_loras lists them";
    ApiError { param: Some("lora".into()), ..ApiError::new(400, "unsupported", message).should_retry(false) }
}
