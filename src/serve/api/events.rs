//! Streams of events: a video's, and those of all of a key's.
//!
//! | event | data |
//! |---|---|
//! | `video` | a whole video: at the start, and with every transition |
//! | `progress` | id, progress, phase, step, steps, queue_position, eta_s |
//! | `queue` | the object of `GET /v1/queue`: at the start, and when what runs or waits changes |
//! | `deleted` | the id of a video that was removed |
//! | `shutdown` | the server ends |
//!
//! Of what happens while a client does not read, it is told the latest.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;

use super::App;
use super::guard::About;
use super::videos::{Id, queue_object};
use crate::serve::error::ApiError;
use crate::serve::id::VideoId;
use crate::serve::job::{Progress, Snapshot, State as JobState};
use crate::serve::jobs::{Caller, ListQuery};
use crate::serve::listen::ended;
use crate::serve::objects;
use crate::serve::streams::{Client, Place, Refused};

/// Milliseconds after which a client comes again.
const RETRY: &str = "retry: 2000\n\n";
/// A line that says nothing, so that nobody in between takes the connection for dead.
const COMMENT: Duration = Duration::from_secs(15);
/// Between two rounds of a stream of many jobs.
const ROUND: Duration = Duration::from_millis(100);
/// Videos of a round that nobody has told of yet.
const NEW: usize = 100;

/// The sending end of a stream, with its place among the streams.
struct Stream {
    app: Arc<App>,
    to: mpsc::Sender<Result<Bytes, Infallible>>,
    ending: watch::Receiver<bool>,
    _place: Place,
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.app.metrics.stream(-1);
    }
}

/// Reasons for which a stream goes on or ends.
enum Next {
    Change,
    /// The client has gone, or what it watches has.
    End,
    Shutdown,
}

impl Stream {
    /// A new stream and its answer.
    fn open(app: &Arc<App>, client: Client) -> Result<(Stream, Response), ApiError> {
        let place = app.streams.enter(client).map_err(|refused| {
            let (status, message) = match refused {
                Refused::Full => (503, "too many streams of events are open".into()),
                Refused::Share(own) => {
                    (429, format!("this client has {own} open streams of events; close some of them"))
                }
            };
            ApiError::new(status, "too_many_streams", message).retry_after(5)
        })?;
        let (to, from) = mpsc::channel(4);
        app.metrics.stream(1);
        let stream = Stream { app: Arc::clone(app), to, ending: app.ending.clone(), _place: place };
        let mut response = Body::from_stream(ReceiverStream::new(from)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        // nginx would hold events back.
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        Ok((stream, response))
    }

    async fn write(&self, text: String) -> bool {
        self.to.send(Ok(Bytes::from(text))).await.is_ok()
    }

    async fn event(&self, name: &str, data: &Value) -> bool {
        let id = self.app.events.fetch_add(1, Ordering::Relaxed);
        self.write(format!("id: {id}\nevent: {name}\ndata: {data}\n\n")).await
    }

    async fn shutdown(&self) {
        self.event("shutdown", &json!({})).await;
    }

    /// Waits for a change, with a comment now and then.
    async fn next<T>(&mut self, changes: &mut watch::Receiver<T>) -> Next {
        loop {
            let news = async {
                tokio::select! {
                    () = ended(&mut self.ending) => Next::Shutdown,
                    () = self.to.closed() => Next::End,
                    changed = changes.changed() => if changed.is_ok() { Next::Change } else { Next::End },
                }
            };
            if let Ok(next) = tokio::time::timeout(COMMENT, news).await {
                return next;
            }
            if !self.write(":\n\n".into()).await {
                return Next::End;
            }
        }
    }
}

pub(super) async fn of_video(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Id(id): Id,
) -> Result<Response, ApiError> {
    let changes = app.jobs.watch(&caller, &id)?;
    let (stream, mut response) = Stream::open(&app, Client::of(&caller, Some(peer)))?;
    response.extensions_mut().insert(About(id.to_string()));
    tokio::spawn(tell_video(stream, changes));
    Ok(response)
}

/// State of a job whose change is worth its whole object.
fn milestone(snapshot: &Snapshot) -> (JobState, u32, usize) {
    (snapshot.record.state, snapshot.record.attempts, snapshot.record.batch)
}

async fn tell_video(mut stream: Stream, mut changes: watch::Receiver<Snapshot>) {
    let mut snapshot = changes.borrow_and_update().clone();
    if !stream.write(RETRY.into()).await || !stream.event("video", &objects::video(&snapshot)).await {
        return;
    }
    while !snapshot.record.state.is_terminal() {
        match stream.next(&mut changes).await {
            Next::Change => {}
            Next::End => return,
            Next::Shutdown => return stream.shutdown().await,
        }
        let now = changes.borrow_and_update().clone();
        let sent = match milestone(&now) == milestone(&snapshot) {
            true => stream.event("progress", &objects::progress(&now)).await,
            false => stream.event("video", &objects::video(&now)).await,
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
) -> Result<Response, ApiError> {
    let (stream, response) = Stream::open(&app, Client::of(&caller, Some(peer)))?;
    tokio::spawn(tell_queue(stream, caller));
    Ok(response)
}

/// State of a job as a stream's client knows it.
#[derive(Clone, PartialEq)]
struct Told {
    milestone: (JobState, u32, usize),
    progress: Progress,
    position: Option<usize>,
}

impl Told {
    fn of(snapshot: &Snapshot) -> Self {
        let Snapshot { progress, queue_position, .. } = snapshot;
        Told { milestone: milestone(snapshot), progress: progress.clone(), position: *queue_position }
    }
}

/// Jobs as a stream has told of them.
struct Board {
    caller: Caller,
    told: BTreeMap<VideoId, Told>,
    /// The newest job that was seen.
    newest: Option<VideoId>,
    queue: Value,
}

impl Board {
    /// Events since the last round.
    fn round(&mut self, app: &App) -> Vec<(&'static str, Value)> {
        let mut events = Vec::new();
        let (running, waiting) = app.jobs.queue(&self.caller);
        // Of the same moment as the jobs: it names none that was not told of.
        let mut queue = queue_object(app, &running, &waiting, app.jobs.stopping(&self.caller));
        let mut now: BTreeMap<VideoId, Snapshot> =
            running.into_iter().chain(waiting).map(|job| (job.accepted.id.clone(), job)).collect();
        // Those that came and ended between two rounds.
        let mut query = ListQuery { after: self.newest.clone(), limit: NEW, descending: false, state: None };
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
        let gone: Vec<VideoId> = self.told.keys().filter(|id| !now.contains_key(id)).cloned().collect();
        for id in gone {
            self.told.remove(&id);
            match app.jobs.get(&self.caller, &id) {
                Ok(ended) => events.push(("video", objects::video(&ended))),
                Err(_) => events.push(("deleted", json!({"id": id}))),
            }
        }
        for (id, job) in &now {
            let told = Told::of(job);
            match self.told.get(id) {
                Some(before) if *before == told => continue,
                Some(before) if before.milestone == told.milestone => events.push(("progress", objects::progress(job))),
                _ => events.push(("video", objects::video(job))),
            }
            if !job.record.state.is_terminal() {
                self.told.insert(id.clone(), told);
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

async fn tell_queue(mut stream: Stream, caller: Caller) {
    let mut changes = stream.app.jobs.version();
    changes.mark_unchanged();
    let newest = ListQuery { after: None, limit: 1, descending: true, state: None };
    let newest = stream.app.jobs.list(&caller, &newest).jobs.first().map(|job| job.accepted.id.clone());
    let mut board = Board { caller, told: BTreeMap::new(), newest, queue: Value::Null };
    if !stream.write(RETRY.into()).await {
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
        // At most ten rounds a second, whatever happens in between; fewer where a long queue makes them dear.
        tokio::time::sleep(ROUND.max(20 * took)).await;
        match stream.next(&mut changes).await {
            Next::Change => {}
            Next::End => return,
            Next::Shutdown => return stream.shutdown().await,
        }
    }
}
