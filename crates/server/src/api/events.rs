//! Server-sent events: a stream for one video, and a stream for all videos of the caller.
//!
//! | event | data |
//! |---|---|
//! | `video` | the complete video object: at the start of the stream, and at each state transition |
//! | `progress` | id, progress, phase, step, steps, queue_position, eta_s |
//! | `preview` | id, phase, step, steps, frames, columns, width, height, fps, image: only with `?previews=true` |
//! | `queue` | the object of `GET /v1/queue`: at the start of the stream, and when running or queued videos change |
//! | `deleted` | the id of a removed video |
//! | `shutdown` | an empty object: the server is shutting down |
//!
//! A client that reads slowly misses intermediate events but always receives the latest state.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::Extension;
use axum::extract::{ConnectInfo, RawQuery, State};
use axum::http::{HeaderValue, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;

use super::App;
use super::guard::About;
use super::videos::{Id, queue_object};
use crate::device::PreviewImage;
use crate::error::ApiError;
use crate::id::VideoId;
use crate::job::{JobState, Progress, Snapshot};
use crate::jobs::{Caller, ListQuery};
use crate::listen::ended;
use crate::objects;
use crate::query::parameters;
use crate::streams::{StreamOwner, StreamPermit, StreamRefusal};

/// Time that clients wait before they reconnect.
const RETRY: Duration = Duration::from_secs(2);
/// Interval between keep-alive comments, which prevent proxies from closing an idle connection.
const COMMENT: Duration = Duration::from_secs(15);
/// Minimum interval between two updates of a queue stream.
const UPDATE_INTERVAL: Duration = Duration::from_millis(100);
/// Page size for listing the videos that were created since the last update of a queue stream.
const PAGE_SIZE: usize = 100;

/// Sending end of an event stream. It counts against the limits in [`crate::streams`] until it is dropped.
struct EventStream {
    app: Arc<App>,
    to: mpsc::Sender<Result<Event, Infallible>>,
    ending: watch::Receiver<bool>,
    _permit: StreamPermit,
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.app.metrics.stream(-1);
    }
}

/// Next action of an event stream.
enum StreamAction {
    Change,
    /// The client disconnected, or the watched video was removed.
    End,
    Shutdown,
}

impl EventStream {
    /// Opens an event stream and returns it with its HTTP response. Fails if too many streams are open.
    fn open(app: &Arc<App>, client: StreamOwner) -> Result<(EventStream, Response), ApiError> {
        let place = app.streams.enter(client).map_err(|refused| {
            let (status, message) = match refused {
                StreamRefusal::Full => (503, "too many event streams are open; retry later".into()),
                StreamRefusal::Share(own) => {
                    (429, format!("this client already has {own} open event streams; close some of them"))
                }
            };
            ApiError::new(status, "too_many_streams", message).retry_after(5)
        })?;
        let (to, from) = mpsc::channel(4);
        app.metrics.stream(1);
        let stream = EventStream { app: Arc::clone(app), to, ending: app.ending.clone(), _permit: place };
        let events = Sse::new(ReceiverStream::new(from)).keep_alive(KeepAlive::new().interval(COMMENT));
        let mut response = events.into_response();
        let headers = response.headers_mut();
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        // Tells nginx not to buffer the response.
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        Ok((stream, response))
    }

    /// Sends an event. Returns whether the client is connected.
    async fn send(&self, event: Event) -> bool {
        self.to.send(Ok(event)).await.is_ok()
    }

    async fn event(&self, name: &str, data: &Value) -> bool {
        let id = self.app.events.fetch_add(1, Ordering::Relaxed);
        self.send(Event::default().id(id.to_string()).event(name).data(data.to_string())).await
    }

    async fn shutdown(&self) {
        self.event("shutdown", &json!({})).await;
    }

    /// Waits until the watched value changes or the stream must end.
    async fn next<T>(&mut self, changes: &mut watch::Receiver<T>) -> StreamAction {
        tokio::select! {
            () = ended(&mut self.ending) => StreamAction::Shutdown,
            () = self.to.closed() => StreamAction::End,
            changed = changes.changed() => if changed.is_ok() { StreamAction::Change } else { StreamAction::End },
        }
    }
}

pub(super) async fn of_video(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Id(id): Id,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let previews = wants_previews(query.as_deref())?;
    let changes = app.jobs.watch(&caller, &id)?;
    let (stream, mut response) = EventStream::open(&app, StreamOwner::from_caller(&caller, Some(peer)))?;
    response.extensions_mut().insert(About(id.to_string()));
    tokio::spawn(stream_video(stream, changes, previews));
    Ok(response)
}

/// Returns the job's state, number of starts and batch size. If one of these changes, a `video` event is sent. For
/// other changes, a `progress` event is sent.
fn milestone(snapshot: &Snapshot) -> (JobState, u32, usize) {
    (snapshot.record.state, snapshot.record.attempts, snapshot.record.batch)
}

/// Returns whether the query of an event stream asks for previews.
fn wants_previews(query: Option<&str>) -> Result<bool, ApiError> {
    match parameters(query, &["previews"])?.first().map(|(_, value)| value.as_str()) {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(_) => Err(ApiError::field("invalid_value", "previews", "previews: must be true or false")),
    }
}

/// Returns whether two snapshots of a job have the same preview.
fn is_same_preview(one: &Snapshot, other: &Snapshot) -> bool {
    match (&one.preview, &other.preview) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        (one, other) => one.is_none() && other.is_none(),
    }
}

async fn stream_video(mut stream: EventStream, mut changes: watch::Receiver<Snapshot>, previews: bool) {
    let mut snapshot = changes.borrow_and_update().clone();
    if !stream.send(Event::default().retry(RETRY)).await || !stream.event("video", &objects::video(&snapshot)).await {
        return;
    }
    if let Some(preview) = objects::preview(&snapshot).filter(|_| previews)
        && !stream.event("preview", &preview).await
    {
        return;
    }
    while !snapshot.record.state.is_terminal() {
        match stream.next(&mut changes).await {
            StreamAction::Change => {}
            StreamAction::End => return,
            StreamAction::Shutdown => return stream.shutdown().await,
        }
        let now = changes.borrow_and_update().clone();
        let is_new = !is_same_preview(&now, &snapshot);
        let sent = match milestone(&now) == milestone(&snapshot) {
            true if is_new && now.progress == snapshot.progress => true,
            true => stream.event("progress", &objects::progress(&now)).await,
            false => stream.event("video", &objects::video(&now)).await,
        };
        let preview = if previews && is_new { objects::preview(&now) } else { None };
        let sent = match preview {
            Some(preview) if sent => stream.event("preview", &preview).await,
            _ => sent,
        };
        if !sent {
            return;
        }
        snapshot = now;
    }
}

pub(super) async fn of_queue(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let previews = wants_previews(query.as_deref())?;
    let (stream, response) = EventStream::open(&app, StreamOwner::from_caller(&caller, Some(peer)))?;
    tokio::spawn(stream_queue(stream, caller, previews));
    Ok(response)
}

/// State of a job in the last event that a stream sent about it.
#[derive(Clone, PartialEq)]
struct SentState {
    milestone: (JobState, u32, usize),
    progress: Progress,
    position: Option<usize>,
    /// Preview of the event, if the stream sends previews.
    preview: Option<Arc<PreviewImage>>,
}

impl SentState {
    fn from_snapshot(snapshot: &Snapshot, previews: bool) -> Self {
        let Snapshot { progress, queue_position, .. } = snapshot;
        let preview = snapshot.preview.clone().filter(|_| previews);
        SentState { milestone: milestone(snapshot), progress: progress.clone(), position: *queue_position, preview }
    }

    /// Returns whether only the preview differs.
    fn is_preview_of(&self, before: &SentState) -> bool {
        SentState { preview: None, ..self.clone() } == SentState { preview: None, ..before.clone() }
    }
}

/// State of a queue stream: the jobs in the events that it has sent.
struct QueueState {
    caller: Caller,
    /// Whether the stream sends previews.
    previews: bool,
    sent: BTreeMap<VideoId, SentState>,
    /// Newest job about which an event was sent.
    newest: Option<VideoId>,
    queue: Value,
}

impl QueueState {
    /// Returns the events that have occurred since the previous call.
    fn round(&mut self, app: &App) -> Vec<(&'static str, Value)> {
        let mut events = Vec::new();
        let (running, waiting) = app.jobs.queue(&self.caller);
        // Built from the same job lists as the other events, so that the queue contains only jobs that the client
        // knows.
        let mut queue = queue_object(app, &running, &waiting, app.jobs.stopping(&self.caller));
        let mut now: BTreeMap<VideoId, Snapshot> =
            running.into_iter().chain(waiting).map(|job| (job.accepted.id.clone(), job)).collect();
        // Find the jobs that were both created and ended since the previous update.
        let mut query = ListQuery { after: self.newest.clone(), limit: PAGE_SIZE, descending: false, state: None };
        loop {
            let page = app.jobs.list(&self.caller, &query);
            query.after = page.jobs.last().map(|job| job.accepted.id.clone());
            for job in page.jobs {
                now.entry(job.accepted.id.clone()).or_insert(job);
            }
            if !page.has_more {
                break;
            }
        }
        let gone: Vec<VideoId> = self.sent.keys().filter(|id| !now.contains_key(id)).cloned().collect();
        for id in gone {
            self.sent.remove(&id);
            match app.jobs.get(&self.caller, &id) {
                Ok(ended) => events.push(("video", objects::video(&ended))),
                Err(_) => events.push(("deleted", json!({"id": id}))),
            }
        }
        for (id, job) in &now {
            let sent = SentState::from_snapshot(job, self.previews);
            match self.sent.get(id) {
                Some(before) if *before == sent => continue,
                Some(before) if sent.is_preview_of(before) => {}
                Some(before) if before.milestone == sent.milestone => events.push(("progress", objects::progress(job))),
                _ => events.push(("video", objects::video(job))),
            }
            if sent.preview != self.sent.get(id).and_then(|before| before.preview.clone()) {
                events.extend(objects::preview(job).filter(|_| self.previews).map(|data| ("preview", data)));
            }
            if !job.record.state.is_terminal() {
                self.sent.insert(id.clone(), sent);
            }
        }
        self.newest = now.into_keys().next_back().max(self.newest.take());
        let eta = queue["eta_s"].take();
        if queue != self.queue {
            self.queue = queue.clone();
            queue["eta_s"] = eta;
            events.push(("queue", queue));
        }
        events
    }
}

async fn stream_queue(mut stream: EventStream, caller: Caller, previews: bool) {
    let mut changes = stream.app.jobs.version();
    changes.mark_unchanged();
    let newest = ListQuery { after: None, limit: 1, descending: true, state: None };
    let newest = stream.app.jobs.list(&caller, &newest).jobs.first().map(|job| job.accepted.id.clone());
    let mut board = QueueState { caller, previews, sent: BTreeMap::new(), newest, queue: Value::Null };
    if !stream.send(Event::default().retry(RETRY)).await {
        return;
    }
    loop {
        let since = Instant::now();
        let events = board.round(&stream.app);
        let took = since.elapsed();
        for (name, data) in events {
            if !stream.event(name, &data).await {
                return;
            }
        }
        // Limits updates to ten per second, and to fewer if a long queue makes an update slow.
        tokio::time::sleep(UPDATE_INTERVAL.max(20 * took)).await;
        match stream.next(&mut changes).await {
            StreamAction::Change => {}
            StreamAction::End => return,
            StreamAction::Shutdown => return stream.shutdown().await,
        }
    }
}
