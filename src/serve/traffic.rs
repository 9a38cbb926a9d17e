//! The bytes of a request and its answer, counted.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use hyper::body::Incoming;

use super::error::ApiError;

/// Why a body ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// Less than the minimum rate arrived in a window.
    Slow,
    /// It is longer than it may be.
    Long,
}

/// A request's body, as its handlers and its connection share it.
#[derive(Debug)]
pub(super) struct Traffic {
    /// Left here by the handler that did not read to the end.
    pub(super) left: Mutex<Option<Incoming>>,
    pub(super) cut: Mutex<Option<Cut>>,
    pub(super) begun: AtomicBool,
    pub(super) limit: AtomicU64,
    /// Bytes a second that have to arrive.
    pub(super) rate: AtomicU64,
    pub(super) received: AtomicU64,
    pub(super) sent: AtomicU64,
}

impl Traffic {
    /// Bytes that came.
    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Bytes of the answer's body that were taken to be sent.
    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Bytes that the body may have.
    pub(super) fn limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    /// Bytes a second that the body must arrive at.
    pub(super) fn at_least(&self, rate: u64) {
        self.rate.store(rate, Ordering::Relaxed);
    }

    /// Whether anyone has asked for the body.
    pub(super) fn begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }

    /// Answer to a client whose body could not be read, where the body itself was at fault.
    pub(super) fn fault(&self) -> Option<ApiError> {
        let cut = *self.cut.lock().unwrap_or_else(PoisonError::into_inner);
        cut.map(|cut| match cut {
            Cut::Slow => {
                let rate = self.rate.load(Ordering::Relaxed);
                let why = format!("the body of the request came too slowly: at least {rate} bytes a second are needed");
                ApiError::new(408, "request_timeout", why)
            }
            Cut::Long => {
                let limit = self.limit.load(Ordering::Relaxed);
                ApiError::new(413, "body_too_large", format!("the body may have {limit} bytes")).should_retry(false)
            }
        })
    }
}
