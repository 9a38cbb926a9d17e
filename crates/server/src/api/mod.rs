//! HTTP endpoints.

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

use serde_json::Value;
use tokio::sync::{Semaphore, watch};

pub(super) use openapi::build as openapi;
pub(super) use router::{metrics_router, router};

use super::auth::Keys;
use super::descriptors::Descriptors;
use super::error::ApiError;
use super::generator::{Generator, ModelInfo};
use super::health::Health;
use super::id::Ids;
use super::jobs::Jobs;
use super::listen::Connections;
use super::metrics::{Metrics, ObservedState};
use super::settings::Serve;
use super::store::JobStore;
use super::streams::Streams;

/// Maximum number of open event streams.
pub(super) const STREAMS: usize = 256;
/// Size limit for all bodies that are processed concurrently, in multiples of `serve.body_limit`.
const BODIES: u64 = 8;
/// Maximum number of requests whose files are decoded and written concurrently.
const ENTRIES: usize = 16;
/// Maximum time that a request waits for a permit from [`App::bodies`] or [`App::entries`] before it fails with 503.
const BODY_PATIENCE: Duration = Duration::from_secs(10);

/// State shared by all endpoints.
pub(super) struct App {
    pub(super) settings: Serve,
    pub(super) jobs: Arc<Jobs>,
    pub(super) ids: Ids,
    pub(super) generator: Arc<dyn Generator>,
    pub(super) model: ModelInfo,
    /// The OpenAPI document.
    pub(super) openapi: Value,
    pub(super) store: Arc<dyn JobStore>,
    /// Folder for files that are being uploaded.
    pub(super) tmp: PathBuf,
    pub(super) keys: Arc<Keys>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) observed: Arc<ObservedState>,
    pub(super) health: Arc<Health>,
    pub(super) connections: Arc<Connections>,
    pub(super) bound: SocketAddr,
    pub(super) created: u64,
    /// The process's limit of open files.
    pub(super) files: Descriptors,
    /// Flag that becomes true at shutdown, which ends event streams and synchronous requests.
    pub(super) ending: watch::Receiver<bool>,
    pub(super) streams: Arc<Streams>,
    /// Permits for bodies that are being processed, one per KiB.
    pub(super) bodies: Arc<Semaphore>,
    /// Permits for requests whose files are being decoded and written.
    pub(super) entries: Arc<Semaphore>,
    /// Id of the next server-sent event.
    pub(super) events: AtomicU64,
}

impl App {
    /// Creates the semaphores [`App::bodies`] and [`App::entries`].
    pub(super) fn places(settings: &Serve) -> [Arc<Semaphore>; 2] {
        let kib = usize::try_from(BODIES * settings.body_limit.0.div_ceil(1024)).unwrap_or(Semaphore::MAX_PERMITS);
        [kib.min(Semaphore::MAX_PERMITS), ENTRIES].map(|places| Arc::new(Semaphore::new(places)))
    }

    /// Returns the route template that matches a path, as a metric label.
    fn route(&self, path: &str) -> &'static str {
        routes::ROUTES.iter().find(|route| route.path == path).map_or("other", |route| route.path)
    }
}

/// Runs blocking I/O on a thread of the blocking pool. A panic becomes an internal error.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(errors::internal)?
}
