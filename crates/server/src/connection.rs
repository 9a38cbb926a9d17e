//! State and limits of one connection.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use tokio::sync::Notify;

/// Timeouts and size limits of connections.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Timeout for receiving the headers, measured from the start of the connection or the first byte of a later
    /// request.
    pub headers: Duration,
    /// Maximum size of the headers in bytes.
    pub header_bytes: usize,
    /// Interval over which a body must reach the minimum rate (`serve.min_upload_rate`). The total duration of an
    /// upload is not limited.
    pub body_window: Duration,
    /// Timeout for a write that makes no progress.
    pub write: Duration,
    /// Timeout for the next request on an idle connection.
    pub idle: Duration,
    /// Maximum number of open connections.
    pub connections: usize,
    /// Maximum time that the server waits at shutdown for open responses to finish.
    pub shutdown_grace: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        ConnectionLimits {
            headers: Duration::from_secs(10),
            header_bytes: 16 << 10,
            body_window: Duration::from_secs(10),
            write: Duration::from_secs(60),
            idle: Duration::from_secs(75),
            connections: 1024,
            shutdown_grace: Duration::from_secs(10),
        }
    }
}

/// Values of [`Connection::at`]: reading headers, handling a request, and idle.
pub(super) const HEADERS: u8 = 0;
pub(super) const HANDLING: u8 = 1;
pub(super) const IDLE: u8 = 2;

/// State of a connection, shared by its stream, its requests and the listener.
#[derive(Debug, Default)]
pub(super) struct Connection {
    pub(super) at: AtomicU8,
    /// Notification that the connection must close to free a slot for another.
    pub(super) evicted: Notify,
    /// Whether the connection has been selected for eviction.
    pub(super) is_leaving: AtomicBool,
    /// Waker of the task that reads from the connection. Reading has no timeout while a request is handled, so the task
    /// must be woken to start the idle timeout.
    pub(super) reader: Mutex<Option<Waker>>,
}

impl Connection {
    /// Marks the connection as idle after its response has been sent.
    pub(super) fn answered(&self) {
        self.at.store(IDLE, Ordering::Release);
        // Wakes the reader, which then starts the idle timeout.
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}
