//! Byte counters and limits for a request and its response.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use hyper::body::Incoming;

use super::error::ApiError;

/// Reason why a request body was not read completely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyAbort {
    /// The body arrived more slowly than the minimum rate.
    Slow,
    /// The body exceeds the maximum size.
    Long,
}

/// State of a request body and its response, shared by the handler and the connection.
#[derive(Debug)]
pub(super) struct ExchangeState {
    /// The rest of a request body that the handler did not read.
    pub(super) left: Mutex<Option<Incoming>>,
    pub(super) cut: Mutex<Option<BodyAbort>>,
    pub(super) begun: AtomicBool,
    pub(super) limit: AtomicU64,
    /// Minimum rate in bytes per second.
    pub(super) rate: AtomicU64,
    pub(super) received: AtomicU64,
    pub(super) sent: AtomicU64,
}

impl ExchangeState {
    /// Returns how many bytes of the request body have been received.
    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Returns how many bytes of the response body have been passed to the connection.
    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Sets the maximum size of the request body in bytes.
    pub(super) fn limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    /// Sets the minimum rate of the request body in bytes per second.
    pub(super) fn at_least(&self, rate: u64) {
        self.rate.store(rate, Ordering::Relaxed);
    }

    /// Returns whether reading of the request body has begun.
    pub(super) fn begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }

    /// Returns the error response if the request body was too slow or too large.
    pub(super) fn fault(&self) -> Option<ApiError> {
        let cut = *self.cut.lock().unwrap_or_else(PoisonError::into_inner);
        cut.map(|cut| match cut {
            BodyAbort::Slow => {
                let rate = self.rate.load(Ordering::Relaxed);
                let why = format!("the request body arrived too slowly; at least {rate} bytes per second are required");
                ApiError::new(408, "request_timeout", why)
            }
            BodyAbort::Long => {
                let limit = self.limit.load(Ordering::Relaxed);
                ApiError::new(413, "body_too_large", format!("the request body exceeds the limit of {limit} bytes"))
                    .should_retry(false)
            }
        })
    }
}
