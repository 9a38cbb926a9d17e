//! Endpoints that submit video jobs.

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
use crate::error::ApiError;
use crate::form::Form;
use crate::generator::{Endpoint, SourceVideo};
use crate::health::HealthState;
use crate::id::VideoId;
use crate::job::{AcceptedJob, JobState, Snapshot};
use crate::jobs::{Caller, Submitted, Waiter};
use crate::store::Variant;
use crate::traffic::ExchangeState;

/// Endpoint that received the request.
#[derive(Clone, Debug)]
pub(super) enum RequestKind {
    Create,
    /// Same as `Create`, but the response is the finished video.
    Sync,
    /// A remix, which repeats the request of the finished video with this id, with some fields changed.
    Remix(VideoId),
    Edit,
    Extend,
}

impl RequestKind {
    /// Returns the endpoint's name and, for a remix, the id of the source video. This text is hashed together with the
    /// body, so that an idempotency key applies to one endpoint and one source.
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

/// Builds the response to a submitted job, with a `Location` header.
fn accepted(snapshot: &Snapshot) -> Response {
    let mut response = answer(snapshot);
    if let Ok(place) = HeaderValue::from_str(&format!("/v1/videos/{}", snapshot.accepted.id)) {
        response.headers_mut().insert(header::LOCATION, place);
    }
    response
}

/// Returns the request of a finished video; fails if the caller may not see the video or the video is not finished.
fn finished(app: &App, caller: &Caller, id: &VideoId) -> Result<Arc<AcceptedJob>, ApiError> {
    let source = app.jobs.get(caller, id)?;
    match source.record.state {
        JobState::Completed => Ok(source.accepted),
        JobState::Failed => {
            Err(ApiError::new(404, "video_failed", "the source video failed, so it cannot be used as input"))
        }
        _ => Err(ApiError::new(404, "video_not_ready", "the source video is not finished yet")),
    }
}

/// Rejects a remix of an unfinished video, and a synchronous request while the model loads.
fn check_ready(app: &App, caller: &Caller, kind: &RequestKind) -> Result<(), ApiError> {
    match kind {
        RequestKind::Remix(source) => finished(app, caller, source).map(drop),
        RequestKind::Sync if app.health.now() == HealthState::Starting => {
            let message = "the model is still loading; retry later, or queue the video with POST /v1/videos";
            Err(ApiError::new(503, "starting", message).retry_after(10))
        }
        _ => Ok(()),
    }
}

/// Submits a request as a job: checks for a free queue slot, reads the body, reserves the slot, then validates the
/// fields. A rejected request leaves no files behind. A request with an idempotency key that was used before returns
/// the earlier job, even if the queue is full or the source video has been removed. For [`RequestKind::Sync`], a
/// [`Waiter`] is returned too.
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
    let traffic = request.extensions().get::<Arc<ExchangeState>>().cloned();
    if let Some(traffic) = &traffic {
        let limit = app.settings.body_limit.0;
        traffic.limit(limit);
        let length = request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
        if length.is_some_and(|length| length.parse::<u64>().is_ok_and(|bytes| bytes > limit)) {
            let message = format!("the request body exceeds the limit of {limit} bytes");
            return Err(ApiError::new(413, "body_too_large", message).should_retry(false));
        }
    }
    let room = room(app, request.headers()).await?;
    let form = read(app, request).await;
    let mut form = form.map_err(|error| traffic.and_then(|traffic| traffic.fault()).unwrap_or(error))?;
    form.body_sha256 = hex::encode(Sha256::digest(format!("{}\0{}", kind.name(), form.body_sha256)));
    // Limit how many requests decode files concurrently, so that threads remain for other endpoints. Requests without
    // files and requests whose idempotency key already has a job do not wait.
    let entry = match is_new && form.has_files() {
        true => Some(places(&app.entries, 1).await?),
        false => None,
    };
    let app = Arc::clone(app);
    blocking(move || {
        let submitted = enter(&app, &caller, form, &kind, key, trace);
        // The body is no longer in memory, so release the permits of this request to other requests.
        drop((room, entry));
        submitted
    })
    .await
}

/// Creates a job from a form, or returns the earlier job with the same idempotency key.
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
            app.generator.source_video(&form)?.map(|id| finished(app, caller, &id)).transpose()?
        }
        RequestKind::Create | RequestKind::Sync => None,
    };
    let ticket = app.jobs.admit(caller).inspect_err(|error| app.metrics.refused(error.code))?;
    let video = source.as_ref().map(|source| app.jobs.folder(&source.id).join(Variant::Video.file()));
    let file = source.as_deref().zip(video.as_ref()).map(|(accepted, video)| SourceVideo { accepted, video });
    let endpoint = match (kind, &source) {
        (RequestKind::Remix(_), Some(source)) => Endpoint::Remix(source),
        (RequestKind::Edit, _) => Endpoint::Edit(file),
        (RequestKind::Extend, _) => Endpoint::Extend(file),
        _ => Endpoint::Create,
    };
    let mut accepted = app.generator.accept(form, endpoint, caller, &app.ids)?;
    accepted.idempotency_key = key;
    accepted.traceparent = trace;
    if app.settings.log_prompts {
        tracing::info!("{}: {}", accepted.id, accepted.prompt());
    }
    let ticket = if waits { ticket.waits() } else { ticket };
    let submitted = app.jobs.submit(ticket, accepted).inspect_err(|error| app.metrics.refused(error.code))?;
    let (Submitted::New(snapshot) | Submitted::Again(snapshot)) = submitted;
    Ok(waiter(snapshot))
}

/// Reserves memory for a body from the budget that all requests share (`App::bodies`). Bodies of at most [`SMALL_BODY`]
/// bytes need no reservation: on 1,024 connections they use at most 64 MiB.
async fn room(app: &App, headers: &HeaderMap) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    let bytes = length.unwrap_or(app.settings.body_limit.0);
    if bytes <= SMALL_BODY {
        return Ok(None);
    }
    let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX);
    places(&app.bodies, kib).await.map(Some)
}

/// Acquires `count` permits of a semaphore; fails with 503 after [`BODY_PATIENCE`].
async fn places(all: &Arc<Semaphore>, count: u32) -> Result<OwnedSemaphorePermit, ApiError> {
    let free = tokio::time::timeout(BODY_PATIENCE, Arc::clone(all).acquire_many_owned(count)).await;
    let busy = |_| ApiError::new(503, "busy", "too many requests are being processed; retry later").retry_after(2);
    free.map_err(busy)?.map_err(internal)
}

/// Returns the value of the `Idempotency-Key` header. Requests with the same key create only one job.
fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    let legal = |text: &&str| (1..=128).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
    let key = value.to_str().ok().filter(legal);
    let why = "Idempotency-Key: must be 1 to 128 ASCII characters without spaces";
    key.map(|key| Some(key.to_string())).ok_or_else(|| ApiError::field("invalid_value", "Idempotency-Key", why))
}

/// Reads the request body and parses it as JSON or as a multipart form.
async fn read(app: &App, request: Request) -> Result<Form, ApiError> {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match essence.as_str() {
        "application/json" => {
            let bytes = Bytes::from_request(request, &()).await;
            let bytes = bytes
                .map_err(|_| ApiError::new(400, "invalid_json", "the connection closed before the end of the body"))?;
            // Parsing megabytes of JSON on this thread would block the event loop.
            tokio::task::spawn_blocking(move || Form::json(&bytes)).await.map_err(internal)?
        }
        "multipart/form-data" => {
            let form = Multipart::from_request(request, &()).await;
            let why = "the Content-Type has no boundary: send `multipart/form-data; boundary=…`";
            let form = form.map_err(|_| ApiError::new(400, "invalid_multipart", why))?;
            Form::multipart(form, &app.tmp, app.files, &|name| app.generator.takes_file(name)).await
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
    fn idempotency_key_is_limited_to_128_ascii_characters() {
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
