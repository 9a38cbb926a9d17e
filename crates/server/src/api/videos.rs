//! Endpoints that read, list, cancel and delete videos, and the queue.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Path, RawQuery, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Value, json};

use super::guard::About;
use super::{App, blocking};
use crate::error::ApiError;
use crate::id::VideoId;
use crate::job::Snapshot;
use crate::jobs::Caller;
use crate::objects;
use crate::query::list_query;

/// Recommended interval between two polls, in milliseconds. OpenAI's client reads this value (`openai-poll-after-ms`)
/// once and keeps it.
const POLL_AFTER: &str = "1000";

/// Extractor for the video id in a path; responds with 404 if the id is malformed.
pub(super) struct Id(pub(super) VideoId);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let text = Path::<String>::from_request_parts(parts, state).await.ok();
        text.and_then(|text| VideoId::parse(&text)).map(Id).ok_or_else(ApiError::video_not_found)
    }
}

/// Builds the response that contains a video object.
pub(super) fn answer(snapshot: &Snapshot) -> Response {
    let mut response = Json(objects::video(snapshot)).into_response();
    response.extensions_mut().insert(About(snapshot.accepted.id.to_string()));
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if !snapshot.record.state.is_terminal() {
        headers.insert("openai-poll-after-ms", HeaderValue::from_static(POLL_AFTER));
    }
    response
}

pub(super) async fn get(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
) -> Result<Response, ApiError> {
    app.jobs.get(&caller, &id).map(|snapshot| answer(&snapshot))
}

pub(super) async fn cancel(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
) -> Result<Response, ApiError> {
    let jobs = Arc::clone(&app.jobs);
    blocking(move || jobs.cancel(&caller, &id)).await.map(|snapshot| answer(&snapshot))
}

pub(super) async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
) -> Result<Response, ApiError> {
    let (jobs, gone) = (Arc::clone(&app.jobs), id.clone());
    blocking(move || jobs.delete(&caller, &gone)).await?;
    let mut response = Json(json!({"id": id, "object": "video.deleted", "deleted": true})).into_response();
    response.extensions_mut().insert(About(id.to_string()));
    Ok(response)
}

pub(super) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    RawQuery(query): RawQuery,
) -> Result<Json<Value>, ApiError> {
    let page = app.jobs.list(&caller, &list_query(query.as_deref())?);
    Ok(Json(objects::list(&page.jobs, page.has_more)))
}

pub(super) async fn queue(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Json<Value> {
    let (running, waiting) = app.jobs.queue(&caller);
    Json(queue_object(&app, &running, &waiting, app.jobs.stopping(&caller)))
}

/// Builds the queue object of a caller. `stopping` lists cancelled jobs that still run on the device.
pub(super) fn queue_object(app: &App, running: &[Snapshot], waiting: &[Snapshot], stopping: Vec<VideoId>) -> Value {
    let ids = |jobs: &[Snapshot]| jobs.iter().map(|job| job.accepted.id.clone()).collect::<Vec<_>>();
    let mut on_device = ids(running);
    // A job that was cancelled after `running` was read is in both lists.
    on_device.extend(stopping.iter().filter(|id| running.iter().all(|job| job.accepted.id != **id)).cloned());
    let ends = running.iter().filter_map(|job| job.progress.eta_s).reduce(f64::max);
    json!({
        "object": "queue",
        "running": on_device,
        "stopping": stopping,
        "queued": ids(waiting),
        "limit": app.settings.queue,
        "eta_s": ends.map(|seconds| (seconds * 1000.0).round() / 1000.0),
    })
}
