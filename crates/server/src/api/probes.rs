//! Liveness, health, readiness, metrics and version endpoints.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::{App, blocking};
use crate::health::HealthState;
use crate::metrics::MeasuredValues;

pub(super) async fn live() -> Response {
    status(200, "live", None)
}

pub(super) async fn health(State(app): State<Arc<App>>) -> Response {
    match ill(&app).await {
        Some((word, reason)) => status(503, word, Some(reason)),
        None => status(200, "ok", None),
    }
}

pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    if app.jobs.is_draining() {
        return status(503, "draining", Some("the server is shutting down".into()));
    }
    match ill(&app).await {
        Some((word, reason)) => status(503, word, Some(reason)),
        None => status(200, "ready", None),
    }
}

/// Returns the reason why the server cannot generate videos now; `None` if it can generate videos.
async fn ill(app: &Arc<App>) -> Option<(&'static str, String)> {
    match app.health.now() {
        HealthState::Starting => Some(("starting", "the model is loading and its programs are compiling".into())),
        HealthState::Failed(why) => Some(("device_failed", why)),
        HealthState::Ready => {
            if let Some(stage) = app.observed.stuck(app.health.patience()) {
                let stage = json!(stage);
                return Some((
                    "stuck",
                    format!(
                        "the device has made no progress for too long; current stage: {}",
                        stage.as_str().unwrap_or("work")
                    ),
                ));
            }
            let app = Arc::clone(app);
            // `lack` reads the file system.
            blocking(move || Ok(lack(&app))).await.unwrap_or(None)
        }
    }
}

/// Returns the resource that is exhausted (disk space or file descriptors); `None` if neither is.
fn lack(app: &App) -> Option<(&'static str, String)> {
    if app.jobs.lacks_room() {
        let why = "the disk is full (serve.min_free, serve.disk): requests fail with 507 until space is free";
        return Some(("insufficient_storage", why.into()));
    }
    app.files.shortage().map(|why| ("out_of_files", why))
}

fn status(code: u16, word: &str, reason: Option<String>) -> Response {
    let mut body = json!({"status": word});
    if let Some(reason) = reason {
        body["reason"] = reason.into();
    }
    let code = StatusCode::from_u16(code).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
    let mut response = (code, Json(body)).into_response();
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Returns the metrics in the OpenMetrics text format.
pub(super) async fn metrics(State(asked): State<Arc<App>>) -> Response {
    // Measuring the size of folders and the free disk space blocks.
    let text = tokio::task::spawn_blocking(move || {
        asked.observed.settle();
        asked.metrics.text(MeasuredValues { connections: asked.connections.count(), usage: asked.store.usage() })
    });
    let Ok(text) = text.await else { return StatusCode::INTERNAL_SERVER_ERROR.into_response() };
    let mut response = text.into_response();
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

pub(super) async fn version(State(app): State<Arc<App>>) -> Response {
    let body = json!({
        "name": "ltx2",
        "version": env!("CARGO_PKG_VERSION"),
        "platform": app.model.platform,
        "model": app.model.names.first(),
        "pipeline": app.model.pipeline,
    });
    Json(body).into_response()
}
