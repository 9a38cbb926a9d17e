//! Request bodies with limits on size and rate, and response bodies that count the bytes sent.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::Response;
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep};

use super::access::Line;
use super::connection::{Connection, ConnectionLimits};
use super::traffic::{BodyAbort, ExchangeState};

/// Maximum time for which the server reads and discards the unread rest of a request body before it closes the
/// connection.
const DRAIN: Duration = Duration::from_secs(5);
/// Maximum number of bytes of a request body that are discarded.
const DRAIN_BYTES: u64 = 64 << 20;

/// Request body that enforces a maximum size and a minimum rate while it is read.
pub(super) struct LimitedBody {
    inner: Option<Incoming>,
    traffic: Arc<ExchangeState>,
    limits: ConnectionLimits,
    /// Timer for the current interval in which the rate is measured, and the number of bytes received before the
    /// interval.
    timer: Option<(Pin<Box<Sleep>>, u64)>,
}

impl LimitedBody {
    pub(super) fn new(inner: Incoming, limits: ConnectionLimits) -> (Self, Arc<ExchangeState>) {
        let traffic = Arc::new(ExchangeState {
            left: Mutex::default(),
            cut: Mutex::default(),
            begun: AtomicBool::new(false),
            limit: AtomicU64::new(u64::MAX),
            rate: AtomicU64::new(0),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
        });
        (LimitedBody { inner: Some(inner), traffic: Arc::clone(&traffic), limits, timer: None }, traffic)
    }

    fn cut(&mut self, cut: BodyAbort) -> io::Error {
        *self.traffic.cut.lock().unwrap_or_else(PoisonError::into_inner) = Some(cut);
        match cut {
            BodyAbort::Slow => io::ErrorKind::TimedOut.into(),
            BodyAbort::Long => io::Error::other("the request body exceeds the limit"),
        }
    }

    /// Polls the rate timer. Returns ready when the rate during an interval is below the minimum.
    fn poll_timeout(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let window = self.limits.body_window;
        let (received, rate) = (self.traffic.received(), self.traffic.rate.load(Ordering::Relaxed));
        let (end, before) = self.timer.get_or_insert_with(|| (Box::pin(tokio::time::sleep(window)), received));
        loop {
            ready!(end.as_mut().poll(context));
            if ((received - *before) as f64) < rate as f64 * window.as_secs_f64() {
                return Poll::Ready(());
            }
            *before = received;
            end.as_mut().reset(Instant::now() + window);
        }
    }
}

impl hyper::body::Body for LimitedBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.traffic.begun.store(true, Ordering::Relaxed);
        let Some(inner) = self.inner.as_mut() else { return Poll::Ready(None) };
        match Pin::new(inner).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                let bytes = frame.data_ref().map_or(0, Bytes::len) as u64;
                let all = self.traffic.received.fetch_add(bytes, Ordering::Relaxed) + bytes;
                if all > self.traffic.limit.load(Ordering::Relaxed) {
                    return Poll::Ready(Some(Err(self.cut(BodyAbort::Long))));
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(io::Error::other(error)))),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => {
                ready!(self.poll_timeout(cx));
                Poll::Ready(Some(Err(self.cut(BodyAbort::Slow))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(hyper::body::Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.as_ref().map(hyper::body::Body::size_hint).unwrap_or_default()
    }
}

impl Drop for LimitedBody {
    fn drop(&mut self) {
        let left = self.inner.take().filter(|inner| !inner.is_end_stream());
        *self.traffic.left.lock().unwrap_or_else(PoisonError::into_inner) = left;
    }
}

/// Reads and discards the rest of a request body, up to [`DRAIN_BYTES`] bytes and for at most [`DRAIN`].
pub(super) async fn drain(traffic: &ExchangeState) {
    let left = traffic.left.lock().unwrap_or_else(PoisonError::into_inner).take();
    let slow = *traffic.cut.lock().unwrap_or_else(PoisonError::into_inner) == Some(BodyAbort::Slow);
    let Some(mut body) = left.filter(|_| !slow) else { return };
    let mut bytes = 0;
    let all = async {
        while bytes < DRAIN_BYTES {
            let frame = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await;
            let Some(Ok(frame)) = frame else { break };
            bytes += frame.data_ref().map_or(0, Bytes::len) as u64;
        }
    };
    // If the body takes longer, the connection closes and the client may lose the response.
    let _ = tokio::time::timeout(DRAIN, all).await;
}

/// Response body. Dropping it marks the connection as idle.
pub(super) struct Answer {
    inner: Body,
    connection: Arc<Connection>,
    traffic: Arc<ExchangeState>,
    /// Access log line, which is written when this body is dropped.
    line: Option<Arc<Line>>,
}

impl Answer {
    pub(super) fn new(
        response: Response,
        connection: Arc<Connection>,
        traffic: Arc<ExchangeState>,
    ) -> hyper::Response<Answer> {
        let line = response.extensions().get::<Arc<Line>>().cloned();
        response.map(|inner| Answer { inner, connection, traffic, line })
    }
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        if let Some(Ok(frame)) = &polled {
            let bytes = frame.data_ref().map_or(0, Bytes::len) as u64;
            self.traffic.sent.fetch_add(bytes, Ordering::Relaxed);
        }
        Poll::Ready(polled)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.connection.answered();
        if let Some(line) = &self.line {
            line.write();
        }
    }
}
