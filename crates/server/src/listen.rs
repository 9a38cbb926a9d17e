//! Serves HTTP/1.1 over TCP, with a timeout for every phase in which a client can be slow.
//!
//! `axum::serve` gives hyper no timer, and hyper's own timer has one limit for both headers and idle connections. So a
//! wrapper around the TCP stream enforces timeouts that depend on the connection's state.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Request};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, Sleep};
use tower::ServiceExt;

use super::body::{Answer, LimitedBody, drain};
pub use super::connection::ConnectionLimits;
use super::connection::{Connection, HANDLING, HEADERS, IDLE};
use super::descriptors::Descriptors;

/// The open connections of a listener.
#[derive(Debug, Default)]
pub struct Connections {
    open: Mutex<BTreeMap<u64, Arc<Connection>>>,
    last: AtomicU64,
}

impl Connections {
    /// Returns the number of open connections.
    pub fn count(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Arc<Connection>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self) -> (u64, Arc<Connection>) {
        let number = self.last.fetch_add(1, Ordering::Relaxed);
        let connection = Arc::<Connection>::default();
        self.lock().insert(number, Arc::clone(&connection));
        (number, connection)
    }

    /// Closes the oldest connection that is not handling a request, so that idle clients and clients that send headers
    /// slowly cannot block others. Returns whether a connection was closed.
    fn evict(&self) -> bool {
        let open = self.lock();
        let quiet = |connection: &&Arc<Connection>| {
            let is_at_work = connection.at.load(Ordering::Acquire) == HANDLING;
            !is_at_work && !connection.is_leaving.swap(true, Ordering::AcqRel)
        };
        let found = open.values().find(quiet);
        found.iter().for_each(|connection| connection.evicted.notify_one());
        found.is_some()
    }
}

/// Guard of an open connection. Dropping it removes the connection from the list and releases its permit.
struct ConnectionGuard {
    connections: Arc<Connections>,
    number: u64,
    _permit: OwnedSemaphorePermit,
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.connections.lock().remove(&self.number);
    }
}

/// Serves connections until `ending` is true, then waits up to [`ConnectionLimits::shutdown_grace`] for open responses
/// to finish.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: ConnectionLimits,
    files: Descriptors,
    connections: Arc<Connections>,
    mut ending: watch::Receiver<bool>,
) {
    let most = limits.connections.min(files.connection_limit());
    let places = Arc::new(Semaphore::new(most));
    loop {
        let accepted = tokio::select! {
            () = ended(&mut ending) => break,
            accepted = accept(&listener, &places, files, &connections) => accepted,
        };
        let Some((stream, peer, permit)) = accepted else { continue };
        let (number, connection) = connections.enter();
        let entered = ConnectionGuard { connections: Arc::clone(&connections), number, _permit: permit };
        tokio::spawn(answer(stream, peer, connection, router.clone(), limits, entered, ending.clone()));
    }
    drop(listener);
    // All permits are available once every connection has closed.
    let all = u32::try_from(most).unwrap_or(u32::MAX);
    if tokio::time::timeout(limits.shutdown_grace, places.acquire_many(all)).await.is_err() {
        tracing::warn!("shutdown timeout expired; closed {} open connections", connections.count());
    }
}

/// Accepts the next connection. If the maximum number of connections is open, closes one that handles no request and
/// waits up to a second for its permit. `None`: the connection was not accepted or was closed immediately.
async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
    files: Descriptors,
    connections: &Connections,
) -> Option<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    let (stream, peer) = match listener.accept().await {
        Ok(accepted) => accepted,
        Err(error) => {
            // The process is usually out of file descriptors; closing an idle connection frees one.
            connections.evict();
            tracing::warn!("cannot accept a connection: {error}");
            tokio::time::sleep(Duration::from_millis(100)).await;
            return None;
        }
    };
    if files.is_short(&stream) {
        // Frees a descriptor for the next connection.
        connections.evict();
        tracing::debug!("closed a new connection: the remaining file descriptors are reserved for jobs");
        return None;
    }
    let permit = match Arc::clone(places).try_acquire_owned() {
        Ok(permit) => permit,
        Err(_) => {
            connections.evict();
            let waited = tokio::time::timeout(Duration::from_secs(1), Arc::clone(places).acquire_owned()).await;
            waited.ok()?.ok()?
        }
    };
    // Server-sent events are small and must not be delayed.
    let _ = stream.set_nodelay(true);
    Some((stream, peer, permit))
}

async fn answer(
    stream: TcpStream,
    peer: SocketAddr,
    connection: Arc<Connection>,
    router: Router,
    limits: ConnectionLimits,
    entered: ConnectionGuard,
    mut ending: watch::Receiver<bool>,
) {
    let io = TokioIo::new(TimedStream::new(stream, Arc::clone(&connection), limits));
    let at = Arc::clone(&connection);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        at.at.store(HANDLING, Ordering::Release);
        handle(request, router.clone(), peer, limits, Arc::clone(&at))
    });
    let served = http1::Builder::new()
        .header_read_timeout(None)
        .max_header_size(limits.header_bytes)
        .serve_connection(io, service);
    let mut served = pin!(served);
    let mut ends = false;
    loop {
        tokio::select! {
            // The error of a slow or disconnected client is not logged.
            _ = served.as_mut() => break,
            () = connection.evicted.notified() => {
                // If a request has arrived since the eviction, the connection stays open until it is answered.
                if connection.at.load(Ordering::Acquire) != HANDLING {
                    break;
                }
                connection.is_leaving.store(false, Ordering::Release);
            }
            () = ended(&mut ending), if !ends => {
                ends = true;
                served.as_mut().graceful_shutdown();
            }
        }
    }
    drop(entered);
}

/// Handles a request. Before the response is sent, reads and discards the unread part of the request body: if the
/// connection closed while the client was still sending, the client would lose the response.
async fn handle(
    request: hyper::Request<Incoming>,
    router: Router,
    peer: SocketAddr,
    limits: ConnectionLimits,
    connection: Arc<Connection>,
) -> Result<hyper::Response<Answer>, Infallible> {
    let waits = request.headers().contains_key(hyper::header::EXPECT);
    let (parts, incoming) = request.into_parts();
    let (asked, state) = LimitedBody::new(incoming, limits);
    let mut request = Request::from_parts(parts, Body::new(asked));
    request.extensions_mut().insert(ConnectInfo(peer));
    request.extensions_mut().insert(Arc::clone(&state));
    let Ok(response) = router.oneshot(request).await;
    // If a client waits for `100 Continue` and the body was never polled, the client has not sent the body.
    if !waits || state.begun() {
        drain(&state).await;
    }
    Ok(Answer::new(response, connection, state))
}

/// Waits until the server shuts down or the sender is dropped.
pub(super) async fn ended(ending: &mut watch::Receiver<bool>) {
    let _ = ending.wait_for(|ends| *ends).await;
}

/// TCP stream with a timeout for a client that makes no progress.
struct TimedStream {
    inner: TcpStream,
    connection: Arc<Connection>,
    limits: ConnectionLimits,
    /// State of the connection for which the read timer was started.
    reading: u8,
    read: Pin<Box<Sleep>>,
    write: Pin<Box<Sleep>>,
    /// Whether the write timer is running.
    writing: bool,
}

impl TimedStream {
    fn new(inner: TcpStream, connection: Arc<Connection>, limits: ConnectionLimits) -> Self {
        let sleep = |time| Box::pin(tokio::time::sleep(time));
        let (read, write) = (sleep(limits.headers), sleep(limits.write));
        TimedStream { inner, connection, limits, reading: HEADERS, read, write, writing: false }
    }

    /// Applies the read timeout for the connection's state. Called when no data is available.
    fn poll_timeout(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let at = self.connection.at.load(Ordering::Acquire);
        if at != self.reading {
            self.reading = at;
            let time = if at == IDLE { self.limits.idle } else { self.limits.headers };
            self.read.as_mut().reset(Instant::now() + time);
        }
        // Request bodies have their own limits, and a client may wait for a response for any length of time.
        if at == HANDLING {
            let waker = context.waker().clone();
            *self.connection.reader.lock().unwrap_or_else(PoisonError::into_inner) = Some(waker);
            return Poll::Pending;
        }
        ready!(self.read.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    /// Updates the write timer after a poll of the stream: a pending write starts the timer, progress stops it.
    fn judge<T>(&mut self, context: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.writing = false;
            return polled;
        }
        if !self.writing {
            self.writing = true;
            self.write.as_mut().reset(Instant::now() + self.limits.write);
        }
        ready!(self.write.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for TimedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.inner).poll_read(cx, buffer) {
            Poll::Ready(result) => {
                // These are the first bytes of the next request.
                if self.connection.at.load(Ordering::Acquire) == IDLE {
                    self.connection.at.store(HEADERS, Ordering::Release);
                }
                Poll::Ready(result)
            }
            Poll::Pending => self.poll_timeout(cx),
        }
    }
}

impl AsyncWrite for TimedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.judge(cx, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write_vectored(cx, slices);
        self.judge(cx, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
