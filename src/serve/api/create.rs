//! Requests that make videos.

use std::sync::Arc;

use axum::Extension;
use axum::body::Bytes;
use axum::extract::{FromRequest, Multipart, Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use sha2::{Digest, Sha256};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::errors::internal;
use super::guard::{SMALL_BODY, traceparent};
use super::videos::{Id, answer};
use super::{App, BODY_PATIENCE, blocking};
use crate::serve::error::ApiError;
use crate::serve::fields::{Endpoint, Source, source_video};
use crate::serve::form::Form;
use crate::serve::health::Condition;
use crate::serve::id::VideoId;
use crate::serve::job::{Accepted, Snapshot, State as JobState};
use crate::serve::jobs::{Caller, Submitted, Waiter};
use crate::serve::store::Variant;
use crate::serve::traffic::Traffic;

/// Endpoints that take a request into the queue.
#[derive(Clone, Debug)]
pub(super) enum RequestKind {
    Create,
    /// The same, whose client waits.
    Sync,
    /// Of a finished video.
    Remix(VideoId),
    Edit,
    Extend,
}

impl RequestKind {
    /// Endpoint and source: what belongs to a request beside its body.
    fn name(&self) -> String {
        match self {
            RequestKind::Create => "create".into(),
            RequestKind::Sync => "sync".into(),
            RequestKind::Remix(source) => format!("remix of {source}"),
            RequestKind::Edit => "edit".into(),
            RequestKind::Extend => "extend".into(),
        }
    }
}

pub(super) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    submit(&app, caller, request, RequestKind::Create).await.map(|(video, _)| accepted(&video))
}

pub(super) async fn edit(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    submit(&app, caller, request, RequestKind::Edit).await.map(|(video, _)| accepted(&video))
}

pub(super) async fn extend(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    submit(&app, caller, request, RequestKind::Extend).await.map(|(video, _)| accepted(&video))
}

pub(super) async fn remix(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
    request: Request,
) -> Result<Response, ApiError> {
    submit(&app, caller, request, RequestKind::Remix(id)).await.map(|(video, _)| accepted(&video))
}

/// The answer to a request that was taken.
fn accepted(snapshot: &Snapshot) -> Response {
    let mut response = answer(snapshot);
    if let Ok(place) = HeaderValue::from_str(&format!("/v1/videos/{}", snapshot.accepted.id)) {
        response.headers_mut().insert(header::LOCATION, place);
    }
    response
}

/// A finished video of the caller's, as it was asked for.
fn finished(app: &App, caller: &Caller, id: &VideoId) -> Result<Arc<Accepted>, ApiError> {
    let source = app.jobs.get(caller, id)?;
    match source.record.state {
        JobState::Completed => Ok(source.accepted),
        JobState::Failed => Err(ApiError::new(404, "video_failed", "the video failed: there is nothing to begin with")),
        _ => Err(ApiError::new(404, "video_not_ready", "the video is not finished yet")),
    }
}

/// Refuses a request that lacks the source it names, or a model to wait for.
fn check_ready(app: &App, caller: &Caller, kind: &RequestKind) -> Result<(), ApiError> {
    match kind {
        RequestKind::Remix(source) => finished(app, caller, source).map(drop),
        RequestKind::Sync if app.health.now() == Condition::Starting => {
            let message = "the model is not loaded yet; POST /v1/videos takes videos into the queue meanwhile";
            Err(ApiError::new(503, "starting", message).retry_after(10))
        }
        _ => Ok(()),
    }
}

/// Takes a request into the queue: its body is read where there is a place, then it gets the place, then its fields are read. What
/// is refused leaves nothing behind; what came before under the same idempotency key is answered whatever is full, or gone. A
/// client of [`RequestKind::Sync`] is one that waits.
pub(super) async fn submit(
    app: &Arc<App>,
    caller: Caller,
    request: Request,
    kind: RequestKind,
) -> Result<(Snapshot, Option<Waiter>), ApiError> {
    let key = idempotency_key(request.headers())?;
    let trace = traceparent(request.headers());
    let is_new = !key.as_ref().is_some_and(|key| app.jobs.is_named(&caller, key));
    if is_new {
        check_ready(app, &caller, &kind)?;
        let (jobs, asking) = (Arc::clone(&app.jobs), caller.clone());
        blocking(move || jobs.check_place(&asking)).await.inspect_err(|error| app.metrics.refused(error.code))?;
    }
    let traffic = request.extensions().get::<Arc<Traffic>>().cloned();
    if let Some(traffic) = &traffic {
        let limit = app.serve.body_limit.0;
        traffic.limit(limit);
        let length = request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
        if length.is_some_and(|length| length.parse::<u64>().is_ok_and(|bytes| bytes > limit)) {
            let message = format!("the body may have {limit} bytes");
            return Err(ApiError::new(413, "body_too_large", message).should_retry(false));
        }
    }
    let room = room(app, request.headers()).await?;
    let form = read(app, request).await;
    let mut form = form.map_err(|error| traffic.and_then(|traffic| traffic.fault()).unwrap_or(error))?;
    form.body_sha256 = hex::encode(Sha256::digest(format!("{}\0{}", kind.name(), form.body_sha256)));
    // Files of not more requests at once than leave threads for other endpoints. What has none, or repeats another, does not
    // wait for them.
    let entry = match is_new && form.has_files() {
        true => Some(places(&app.entries, 1).await?),
        false => None,
    };
    let app = Arc::clone(app);
    blocking(move || {
        let submitted = enter(&app, &caller, form, &kind, key, trace);
        // What it had in memory is gone.
        drop((room, entry));
        submitted
    })
    .await
}

/// The job of a form; that of the request that came before with the same key.
fn enter(
    app: &App,
    caller: &Caller,
    form: Form,
    kind: &RequestKind,
    key: Option<String>,
    trace: Option<String>,
) -> Result<(Snapshot, Option<Waiter>), ApiError> {
    let waits = matches!(kind, RequestKind::Sync);
    let waiter = |snapshot: Snapshot| {
        let waiter = waits.then(|| app.jobs.waiter(&snapshot));
        (snapshot, waiter)
    };
    if let Some(key) = &key
        && let Some(before) = app.jobs.replayed(caller, key, &form.body_sha256, waits)?
    {
        return Ok(waiter(before));
    }
    check_ready(app, caller, kind)?;
    let source = match kind {
        RequestKind::Remix(source) => Some(finished(app, caller, source)?),
        RequestKind::Edit | RequestKind::Extend => {
            source_video(&form)?.map(|id| finished(app, caller, &id)).transpose()?
        }
        RequestKind::Create | RequestKind::Sync => None,
    };
    let ticket = app.jobs.admit(caller).inspect_err(|error| app.metrics.refused(error.code))?;
    let video = source.as_ref().map(|source| app.jobs.folder(&source.id).join(Variant::Video.file()));
    let file = source.as_deref().zip(video.as_ref()).map(|(accepted, video)| Source { accepted, video });
    let endpoint = match (kind, &source) {
        (RequestKind::Remix(_), Some(source)) => Endpoint::Remix(source),
        (RequestKind::Edit, _) => Endpoint::Edit(file),
        (RequestKind::Extend, _) => Endpoint::Extend(file),
        _ => Endpoint::Create,
    };
    let mut accepted = app.fields.accept(form, endpoint, caller)?;
    accepted.idempotency_key = key;
    accepted.traceparent = trace;
    if app.serve.log_prompts {
        tracing::info!("{}: {}", accepted.id, accepted.prompt());
    }
    let ticket = if waits { ticket.waits() } else { ticket };
    let submitted = app.jobs.submit(ticket, accepted).inspect_err(|error| app.metrics.refused(error.code))?;
    let (Submitted::New(snapshot) | Submitted::Again(snapshot)) = submitted;
    Ok(waiter(snapshot))
}

/// Holds as many bytes as a body may have of those that are in memory, or on their way to files, at once. A short one waits for
/// none: 1,024 connections have but 64 MiB of such.
async fn room(app: &App, headers: &HeaderMap) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    let bytes = length.unwrap_or(app.serve.body_limit.0);
    if bytes <= SMALL_BODY {
        return Ok(None);
    }
    let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX);
    places(&app.bodies, kib).await.map(Some)
}

/// Places of those that there are, once they are free.
async fn places(all: &Arc<Semaphore>, count: u32) -> Result<OwnedSemaphorePermit, ApiError> {
    let free = tokio::time::timeout(BODY_PATIENCE, Arc::clone(all).acquire_many_owned(count)).await;
    let busy = |_| ApiError::new(503, "busy", "too many requests are read at once").retry_after(2);
    free.map_err(busy)?.map_err(internal)
}

/// A key of the client's by which a request that is sent twice is one.
fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    let legal = |text: &&str| (1..=128).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
    let key = value.to_str().ok().filter(legal);
    let why = "Idempotency-Key: 1 to 128 characters of ASCII without spaces";
    key.map(|key| Some(key.to_string())).ok_or_else(|| ApiError::field("invalid_value", "Idempotency-Key", why))
}

/// The fields of a body, which is JSON or a form.
async fn read(app: &App, request: Request) -> Result<Form, ApiError> {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match essence.as_str() {
        "application/json" => {
            let bytes = Bytes::from_request(request, &()).await;
            let bytes = bytes.map_err(|_| ApiError::new(400, "invalid_json", "the body ended early"))?;
            // Text of megabytes takes its time.
            tokio::task::spawn_blocking(move || Form::json(&bytes)).await.map_err(internal)?
        }
        "multipart/form-data" => {
            let form = Multipart::from_request(request, &()).await;
            let why = "the form has no boundary: send `multipart/form-data; boundary=…`";
            Form::multipart(form.map_err(|_| ApiError::new(400, "invalid_multipart", why))?, &app.tmp, app.files).await
        }
        _ => {
            let why = "send the fields as application/json or multipart/form-data";
            Err(ApiError::new(415, "unsupported_media_type", why).should_retry(false))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_repeated_requests_are_short_and_plain() {
        let mut headers = HeaderMap::new();
        assert_eq!(idempotency_key(&headers), Ok(None));
        headers.insert("idempotency-key", HeaderValue::from_static("a-1"));
        assert_eq!(idempotency_key(&headers), Ok(Some("a-1".into())));
        for bad in ["", "a b", &"x".repeat(129)] {
            headers.insert("idempotency-key", HeaderValue::from_str(bad).expect("a value"));
            assert_eq!(idempotency_key(&headers).expect_err(bad).param.as_deref(), Some("Idempotency-Key"));
        }
    }
}
