//! A connection: its limits, and what it is at.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use tokio::sync::Notify;

/// Limits of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// From a connection's or a request's first byte to the end of its headers.
    pub headers: Duration,
    /// Bytes of headers.
    pub header_bytes: usize,
    /// Time over which the rate of a body (`serve.min_upload_rate`) is judged. Its whole duration is not limited.
    pub body_window: Duration,
    /// Without progress of a write.
    pub write: Duration,
    /// Between two requests.
    pub idle: Duration,
    /// Connections at once.
    pub connections: usize,
    /// For downloads under way when the server ends.
    pub farewell: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            headers: Duration::from_secs(10),
            header_bytes: 16 << 10,
            body_window: Duration::from_secs(10),
            write: Duration::from_secs(60),
            idle: Duration::from_secs(75),
            connections: 1024,
            farewell: Duration::from_secs(10),
        }
    }
}

/// States of a connection.
pub(super) const HEADERS: u8 = 0;
pub(super) const HANDLING: u8 = 1;
pub(super) const IDLE: u8 = 2;

/// A connection, as others see it.
#[derive(Debug, Default)]
pub(super) struct Connection {
    pub(super) at: AtomicU8,
    /// Tells it to end, for another that waits.
    pub(super) evicted: Notify,
    /// Whether it was told so.
    pub(super) is_leaving: AtomicBool,
    /// Reader that waits without a timer while a request is handled.
    pub(super) reader: Mutex<Option<Waker>>,
}

impl Connection {
    /// Its answer was sent to the end.
    pub(super) fn answered(&self) {
        self.at.store(IDLE, Ordering::Release);
        // Its patience begins now.
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}
