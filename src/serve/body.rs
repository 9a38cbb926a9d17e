//! Bodies on their way: a request's, with limits of size and rate, and an answer's, counted.

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
use super::connection::{Connection, Limits};
use super::traffic::{Cut, Traffic};

/// How long what nobody wants of a body is read, before the connection is closed.
const DRAIN: Duration = Duration::from_secs(5);
/// Bytes of it.
const DRAIN_BYTES: u64 = 64 << 20;

/// A request's body with its limits.
pub(super) struct Asked {
    inner: Option<Incoming>,
    traffic: Arc<Traffic>,
    limits: Limits,
    /// End of the window over which the rate is judged, and the bytes that had come when it began.
    timer: Option<(Pin<Box<Sleep>>, u64)>,
}

impl Asked {
    pub(super) fn new(inner: Incoming, limits: Limits) -> (Self, Arc<Traffic>) {
        let traffic = Arc::new(Traffic {
            left: Mutex::default(),
            cut: Mutex::default(),
            begun: AtomicBool::new(false),
            limit: AtomicU64::new(u64::MAX),
            rate: AtomicU64::new(0),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
        });
        (Asked { inner: Some(inner), traffic: Arc::clone(&traffic), limits, timer: None }, traffic)
    }

    fn cut(&mut self, cut: Cut) -> io::Error {
        *self.traffic.cut.lock().unwrap_or_else(PoisonError::into_inner) = Some(cut);
        match cut {
            Cut::Slow => io::ErrorKind::TimedOut.into(),
            Cut::Long => io::Error::other("the body is too long"),
        }
    }

    /// Ready once less than the minimum rate arrived in a window.
    fn poll_patience(&mut self, context: &mut Context<'_>) -> Poll<()> {
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

impl hyper::body::Body for Asked {
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
                    return Poll::Ready(Some(Err(self.cut(Cut::Long))));
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(io::Error::other(error)))),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => {
                ready!(self.poll_patience(cx));
                Poll::Ready(Some(Err(self.cut(Cut::Slow))))
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

impl Drop for Asked {
    fn drop(&mut self) {
        let left = self.inner.take().filter(|inner| !inner.is_end_stream());
        *self.traffic.left.lock().unwrap_or_else(PoisonError::into_inner) = left;
    }
}

/// Reads what was left of a body, within bounds.
pub(super) async fn drain(traffic: &Traffic) {
    let left = traffic.left.lock().unwrap_or_else(PoisonError::into_inner).take();
    let slow = *traffic.cut.lock().unwrap_or_else(PoisonError::into_inner) == Some(Cut::Slow);
    let Some(mut body) = left.filter(|_| !slow) else { return };
    let mut bytes = 0;
    let all = async {
        while bytes < DRAIN_BYTES {
            let frame = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await;
            let Some(Ok(frame)) = frame else { break };
            bytes += frame.data_ref().map_or(0, Bytes::len) as u64;
        }
    };
    // A client that takes longer loses the answer.
    let _ = tokio::time::timeout(DRAIN, all).await;
}

/// An answer's body; its end leaves the connection idle.
pub(super) struct Answer {
    inner: Body,
    connection: Arc<Connection>,
    traffic: Arc<Traffic>,
    /// Written with the body's end.
    line: Option<Arc<Line>>,
}

impl Answer {
    pub(super) fn of(
        response: Response,
        connection: Arc<Connection>,
        traffic: Arc<Traffic>,
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
