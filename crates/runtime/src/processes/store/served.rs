//! HTTP server of the key-value store, run by process 0 for the others.

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
use ltx2_pjrt::{KvError, KvStore};

/// The server's only path.
pub(super) const PATH: &str = "/value";

/// Query parameters of a request.
#[derive(Serialize, Deserialize)]
struct StoreRequest {
    key: String,
    /// Milliseconds to wait for the key.
    #[serde(default)]
    wait: u64,
    /// Whether to replace an existing value.
    #[serde(default)]
    replace: bool,
}

/// The values, and a notification for requests that wait for a key. Threads of this process wait on the store directly.
#[derive(Default)]
struct SharedValues {
    values: MemoryStore,
    changed: Notify,
}

/// HTTP server of a key-value store. It stops when it is dropped.
pub struct StoreServer {
    shared: Arc<SharedValues>,
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl StoreServer {
    /// Starts the server at an address; port 0 selects a free port.
    ///
    /// # Errors
    /// Returns an error if the server cannot listen at the address.
    pub fn start(address: &str) -> std::io::Result<StoreServer> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(SharedValues::default());
        let (stop, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let router = Router::new()
            .route(PATH, get(read))
            .route(PATH, put(write))
            .route(PATH, delete(remove))
            // No size limit, because the plugin's device descriptions and autotuning results may be large.
            .layer(DefaultBodyLimit::disable())
            .with_state(shared.clone());
        let serve = async move {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            // No graceful shutdown, because requests that wait for a key would delay it.
            tokio::spawn(axum::serve(listener, router).into_future());
            let _ = stopped.await;
            std::io::Result::Ok(())
        };
        let thread = std::thread::Builder::new().name("store".into()).spawn(move || {
            if let Err(e) = runtime.block_on(serve) {
                tracing::error!("the key-value store server stopped: {e}");
            }
        })?;
        Ok(StoreServer { shared, address, stop: Some(stop), thread: Some(thread) })
    }

    /// Returns the address that the server listens at, with the actual port if port 0 was requested.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the number of keys.
    pub fn keys(&self) -> usize {
        self.shared.values.keys()
    }

    /// Returns the store, for use in this process.
    pub fn store(&self) -> Arc<dyn KvStore> {
        self.shared.clone()
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread was asked to stop; a panicked thread counts as stopped.
            let _ = thread.join();
        }
    }
}

impl KvStore for SharedValues {
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

async fn read(State(shared): State<Arc<SharedValues>>, Query(request): Query<StoreRequest>) -> Response {
    let end = Instant::now() + Duration::from_millis(request.wait);
    loop {
        // Subscribe to changes before reading the store, so that a write between the read and the wait is not missed.
        let changed = shared.changed.notified();
        if let Ok(value) = shared.values.try_get(&request.key) {
            return value.into_response();
        }
        if timeout_at(end, changed).await.is_err() {
            return StatusCode::NOT_FOUND.into_response();
        }
    }
}

async fn write(
    State(shared): State<Arc<SharedValues>>,
    Query(request): Query<StoreRequest>,
    value: Bytes,
) -> StatusCode {
    let done = match request.replace {
        true => shared.set(&request.key, &value),
        false => shared.put(&request.key, &value),
    };
    if done.is_ok() { StatusCode::NO_CONTENT } else { StatusCode::CONFLICT }
}

async fn remove(State(shared): State<Arc<SharedValues>>, Query(request): Query<StoreRequest>) -> StatusCode {
    if shared.remove(&request.key).is_ok() { StatusCode::NO_CONTENT } else { StatusCode::CONFLICT }
}
