//! The store that process 0 serves to the others, over HTTP.

use std::future::IntoFuture;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, put};
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout_at};

use super::memory::MemoryStore;
use crate::pjrt::{KvError, KvStore};

/// The one path there is.
pub(super) const PATH: &str = "/value";

/// Query of a request.
#[derive(Serialize, Deserialize)]
struct Request {
    key: String,
    /// Milliseconds to wait for the key.
    #[serde(default)]
    wait: u64,
    /// In place of the value there is.
    #[serde(default)]
    replace: bool,
}

/// Values, and a bell for those who wait from afar; threads of this process have the store's own.
#[derive(Default)]
struct Shared {
    values: MemoryStore,
    changed: Notify,
}

/// A store that others reach at an address, until this is dropped.
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens at an address; port 0 takes a free one.
    ///
    /// # Errors
    /// An address that cannot be listened at.
    pub fn start(address: &str) -> std::io::Result<Server> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared::default());
        let (stop, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let router = Router::new()
            .route(PATH, get(read))
            .route(PATH, put(write))
            .route(PATH, delete(remove))
            // Descriptions of devices and compilers' findings may be large.
            .layer(DefaultBodyLimit::disable())
            .with_state(shared.clone());
        let serve = async move {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            // Answers under way are not waited for: those who wait for a key would hold the end up.
            tokio::spawn(axum::serve(listener, router).into_future());
            let _ = stopped.await;
            std::io::Result::Ok(())
        };
        let thread = std::thread::Builder::new().name("store".into()).spawn(move || {
            if let Err(e) = runtime.block_on(serve) {
                tracing::error!("the store stopped: {e}");
            }
        })?;
        Ok(Server { shared, address, stop: Some(stop), thread: Some(thread) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Keys that are there.
    pub(crate) fn keys(&self) -> usize {
        self.shared.values.keys()
    }

    /// The store, for this process.
    pub(crate) fn store(&self) -> Arc<dyn KvStore> {
        self.shared.clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It was request to end; one that panicked has ended too.
            let _ = thread.join();
        }
    }
}

impl KvStore for Shared {
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KvError> {
        self.values.get(key, timeout)
    }

    fn try_get(&self, key: &str) -> Result<Vec<u8>, KvError> {
        self.values.try_get(key)
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        let put = self.values.put(key, value);
        self.changed.notify_waiters();
        put
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        let set = self.values.set(key, value);
        self.changed.notify_waiters();
        set
    }

    fn remove(&self, key: &str) -> Result<(), KvError> {
        self.values.remove(key)
    }
}

async fn read(State(shared): State<Arc<Shared>>, Query(request): Query<Request>) -> Response {
    let end = Instant::now() + Duration::from_millis(request.wait);
    loop {
        // Before the look, so that a value put after it rings.
        let changed = shared.changed.notified();
        if let Ok(value) = shared.values.try_get(&request.key) {
            return value.into_response();
        }
        if timeout_at(end, changed).await.is_err() {
            return StatusCode::NOT_FOUND.into_response();
        }
    }
}

async fn write(State(shared): State<Arc<Shared>>, Query(request): Query<Request>, value: Bytes) -> StatusCode {
    let done = match request.replace {
        true => shared.set(&request.key, &value),
        false => shared.put(&request.key, &value),
    };
    if done.is_ok() { StatusCode::NO_CONTENT } else { StatusCode::CONFLICT }
}

async fn remove(State(shared): State<Arc<Shared>>, Query(request): Query<Request>) -> StatusCode {
    if shared.remove(&request.key).is_ok() { StatusCode::NO_CONTENT } else { StatusCode::CONFLICT }
}
