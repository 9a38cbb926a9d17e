//! Endpoints of HTTP, a file for each of their kinds.

mod content;
mod create;
mod errors;
mod events;
mod guard;
mod lora;
mod models;
mod openapi;
mod page;
mod probes;
mod router;
mod routes;
mod sync;
mod videos;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tokio::sync::{Semaphore, watch};

pub(super) use probes::platform;
pub(super) use router::{metrics_router, router};

use super::auth::Keys;
use super::descriptors::Descriptors;
use super::error::ApiError;
use super::fields::Fields;
use super::health::Health;
use super::jobs::Jobs;
use super::listen::Connections;
use super::metrics::{Metrics, Pulse};
use super::store::JobStore;
use super::streams::Streams;
use crate::config::{Loaded, Serve};

/// Streams of events at once.
pub(super) const STREAMS: usize = 256;
/// Bodies of the longest that are read at once.
const BODIES: u64 = 8;
/// Bodies that are made into jobs at once: their images are decoded and written.
const ENTRIES: usize = 16;
/// How long another one waits for room.
const BODY_PATIENCE: Duration = Duration::from_secs(10);

/// State that all endpoints share.
pub(super) struct App {
    pub(super) loaded: Loaded,
    pub(super) serve: Serve,
    pub(super) jobs: Arc<Jobs>,
    pub(super) fields: Arc<Fields>,
    pub(super) store: Arc<dyn JobStore>,
    /// Folder of files that come.
    pub(super) tmp: PathBuf,
    pub(super) keys: Arc<Keys>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) pulse: Arc<Pulse>,
    pub(super) health: Arc<Health>,
    pub(super) connections: Arc<Connections>,
    pub(super) bound: SocketAddr,
    /// Names of the model, the first of which answers say.
    pub(super) names: Vec<String>,
    pub(super) created: u64,
    /// The limit of open files.
    pub(super) files: Descriptors,
    /// Whether streams are to end.
    pub(super) ending: watch::Receiver<bool>,
    pub(super) streams: Arc<Streams>,
    /// KiB of bodies that are read.
    pub(super) bodies: Arc<Semaphore>,
    /// Requests that are made into jobs.
    pub(super) entries: Arc<Semaphore>,
    /// Ids of events.
    pub(super) events: AtomicU64,
}

impl App {
    /// Places for bodies, and for requests that are made into jobs.
    pub(super) fn places(serve: &Serve) -> [Arc<Semaphore>; 2] {
        let kib = usize::try_from(BODIES * serve.body_limit.0.div_ceil(1024)).unwrap_or(Semaphore::MAX_PERMITS);
        [kib.min(Semaphore::MAX_PERMITS), ENTRIES].map(|places| Arc::new(Semaphore::new(places)))
    }

    /// The template of a route, for labels.
    fn route(&self, path: &str) -> &'static str {
        routes::ROUTES.iter().find(|route| route.path == path).map_or("other", |route| route.path)
    }
}

/// Runs what waits for disks on a thread that may.
///
/// # Errors
/// What it says; a panic of it.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(errors::internal)?
}
