//! Starts, runs and stops a server, as a process or within a test.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use super::api::{self, App, STREAMS};
use super::auth::Keys;
use super::descriptors::Descriptors;
use super::device::{JobBatch, JobDevice};
use super::generator::Generator;
use super::health::{Health, HealthState};
use super::id::Ids;
use super::inputs::InputStore;
use super::jobs::Jobs;
use super::listen::{self, ConnectionLimits, Connections};
use super::metrics::{Metrics, ObservedDevice, ObservedState, ObservedStore};
use super::settings::{Drain, Serve};
use super::store::{FileStore, JobStore};
use super::streams::Streams;
use super::worker::{Factory, Status, Worker};

/// How a server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerEnd {
    /// All work was finished or saved.
    Drained,
    /// The device thread still runs a compilation or a step of a cancelled video, whose end loses nothing.
    Left,
    /// The drain timeout expired, or a second signal arrived: the device thread still runs a video.
    Cut,
    /// The device or a thread failed.
    Failed,
}

impl ServerEnd {
    /// Returns the exit code of the process.
    pub fn code(self) -> u8 {
        match self {
            ServerEnd::Drained | ServerEnd::Left => 0,
            ServerEnd::Failed => 1,
            ServerEnd::Cut => 130,
        }
    }
}

/// Maximum number of threads for blocking work such as disk access.
const BLOCKING: usize = 64;
/// Polling interval while the server waits for its threads to finish.
const LOOK: Duration = Duration::from_millis(5);
/// Maximum time that a draining server waits for work whose end loses nothing.
const GRACE: Duration = Duration::from_millis(300);

/// Server options that are not part of the configuration.
#[derive(Clone, Debug, Default)]
pub struct ServerOptions {
    /// API key from the environment, which is valid in addition to the keys in the key file.
    pub key: Option<String>,
    /// Connection limits.
    pub limits: ConnectionLimits,
    /// Minimum time without progress before the device counts as stuck. `None`: 30 seconds.
    pub patience: Option<Duration>,
}

/// Reason why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The options are invalid: exit code 2.
    #[error("{0}")]
    Usage(String),
    /// I/O error of a folder, socket or thread.
    #[error("{what}: {source}")]
    Io {
        /// Description of the failed operation.
        what: String,
        /// The error.
        source: io::Error,
    },
}

impl StartError {
    fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| StartError::Io { what, source }
    }
}

/// A running server.
pub struct Server {
    app: Arc<App>,
    runtime: Runtime,
    address: SocketAddr,
    metrics_address: Option<SocketAddr>,
    state: PathBuf,
    /// Flag that ends the event streams when it is set to true. Connections end later, through `closing`.
    ending: watch::Sender<bool>,
    closing: watch::Sender<bool>,
    worker: Worker,
    listeners: Vec<tokio::task::JoinHandle<()>>,
}

impl Server {
    /// Starts a server: listens for connections, loads the stored jobs, and loads the model in the background.
    /// `generator` receives the server's store of input files and returns the interface of the model. `factory` creates
    /// the device.
    ///
    /// # Errors
    /// Returns an error if the settings are invalid, the state folder is in use, or an address cannot be bound.
    pub fn start(
        settings: Serve,
        options: ServerOptions,
        generator: impl FnOnce(Arc<InputStore>) -> Arc<dyn Generator>,
        factory: Factory,
    ) -> Result<Server, StartError> {
        let keys = Arc::new(keys(&settings, &options)?);
        let wanted = address(&settings.listen, "serve.listen")?;
        let figures = settings.metrics_listen.as_deref();
        let figures = figures.map(|place| self::address(place, "serve.metrics_listen")).transpose()?;
        for (flag, place) in [("--listen", Some(wanted)), ("--metrics-listen", figures)] {
            if let Some(place) = place.filter(|place| !place.ip().is_loopback() && !keys.needed() && !settings.insecure)
            {
                let why = "other machines could use the server without a key; pass --api-key-file or --insecure";
                return Err(StartError::Usage(format!("{flag} {place}: {why}")));
            }
        }
        let files = Descriptors::raise();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .max_blocking_threads(BLOCKING)
            .thread_name("http")
            .enable_all()
            .build()
            .map_err(StartError::io("cannot start threads"))?;
        let listener = bind(&runtime, wanted)?;
        let address = listener.local_addr().map_err(StartError::io("--listen"))?;
        let (ending, streams_end) = watch::channel(false);
        let (closing, connections_end) = watch::channel(false);
        let connections = Arc::<Connections>::default();
        let opened = ServerParts { keys, address, files, ending: streams_end, connections: Arc::clone(&connections) };
        let app = Arc::new(open_app(settings, &options, opened, generator)?);
        let mut metrics_address = None;
        let mut listeners = Vec::new();
        if let Some(place) = figures {
            let listener = bind(&runtime, place)?;
            let bound = listener.local_addr().map_err(StartError::io("--metrics-listen"))?;
            metrics_address = Some(bound);
            let router = api::metrics_router(Arc::clone(&app), bound);
            let own = Arc::<Connections>::default();
            let ends = connections_end.clone();
            listeners.push(runtime.spawn(listen::serve(listener, router, options.limits, files, own, ends)));
        }
        let router = api::router(Arc::clone(&app)).map_err(StartError::Usage)?;
        let warm = app.generator.warm_up(&app.ids).map_err(StartError::Usage)?;
        let serving = listen::serve(listener, router, options.limits, files, connections, connections_end);
        listeners.push(runtime.spawn(serving));
        let worker = start_worker(&app, factory, warm)?;
        runtime.spawn(update_health(worker.status(), Arc::clone(&app.health)));
        let state = state_folder(app.settings.state.as_deref())?;
        Ok(Server { app, runtime, address, metrics_address, state, ending, closing, worker, listeners })
    }

    /// Returns the address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the address of the separate metrics listener; `None` if the metrics have no separate listener.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics_address
    }

    /// Returns the path of the state folder.
    pub fn state(&self) -> &Path {
        &self.state
    }

    /// Returns the names of the served model.
    pub fn names(&self) -> &[String] {
        &self.app.model.names
    }

    /// Returns the number of API keys.
    pub fn keys(&self) -> usize {
        self.app.keys.count()
    }

    /// Returns the server's jobs.
    pub fn jobs(&self) -> &Arc<Jobs> {
        &self.app.jobs
    }

    /// Reads the key file again and returns the number of keys.
    ///
    /// # Errors
    /// Returns an error if the file is invalid. The current keys then remain in use.
    pub fn reread_keys(&self) -> Result<usize, String> {
        self.app.keys.reread()
    }

    /// Returns the server's health.
    pub fn health(&self) -> &Arc<Health> {
        &self.app.health
    }

    /// Waits until the warm-up shapes are compiled and loaded.
    ///
    /// # Errors
    /// Returns an error if the device fails or `longest` expires.
    pub fn wait_ready(&self, longest: Duration) -> Result<(), String> {
        let mut condition = self.app.health.watch();
        let known = async {
            tokio::time::timeout(longest, condition.wait_for(|now| *now != HealthState::Starting))
                .await
                .map_err(|_| "timed out waiting for the model to become ready".to_string())?
                .map(|now| now.clone())
                .map_err(|error| error.to_string())
        };
        match self.runtime.block_on(known)? {
            HealthState::Failed(why) => Err(self.app.health.failure().unwrap_or(why)),
            _ => Ok(()),
        }
    }

    /// Returns whether the device has failed, so that the server can only exit.
    pub fn has_failed(&self) -> bool {
        matches!(&*self.worker.status().borrow(), Status::Failed(_))
    }

    /// Stops accepting videos, and stops or finishes the running video according to `serve.drain`. Other requests are
    /// still answered.
    pub fn drain(&self) {
        self.app.jobs.drain();
        self.ending.send_replace(true);
    }

    /// Returns whether the device is still starting.
    pub fn is_starting(&self) -> bool {
        matches!(&*self.worker.status().borrow(), Status::Starting)
    }

    /// Drains the server, waits for running work, and returns the exit code. Stops waiting as soon as `hurry` returns
    /// true.
    pub fn end(self, hurry: impl Fn() -> bool) -> u8 {
        self.end_unless_compiling(hurry, || false).code()
    }

    /// Drains the server like [`Server::end`], but does not wait for work whose end loses nothing: compilations, which
    /// cannot be interrupted, and the current step of videos that were all cancelled. `compiles` returns whether the
    /// device is only compiling; the running video then returns to the queue.
    pub fn end_unless_compiling(self, hurry: impl Fn() -> bool, compiles: impl Fn() -> bool) -> ServerEnd {
        self.drain();
        let until = Instant::now().checked_add(self.app.settings.drain_timeout.duration());
        // Check both threads, because one may have failed while the other hangs.
        let mut needless_since = None;
        while !self.worker.is_over() {
            let is_cancelled = self.app.jobs.runs_only_cancelled();
            let is_needless = is_cancelled || self.app.settings.drain == Drain::Checkpoint && compiles();
            let since = *needless_since.get_or_insert_with(Instant::now);
            if !is_needless {
                needless_since = None;
            }
            if is_needless && since.elapsed() >= GRACE {
                match is_cancelled {
                    true => tracing::info!("not waiting for the current step of a cancelled video"),
                    false => tracing::warn!("not waiting for a running compilation; the running video is queued again"),
                }
                self.app.jobs.requeue_running();
                self.runtime.shutdown_background();
                return ServerEnd::Left;
            }
            if hurry() || until.is_some_and(|until| Instant::now() >= until) {
                self.runtime.shutdown_background();
                if is_cancelled {
                    return ServerEnd::Left;
                }
                tracing::warn!("stopping without waiting for the running video; it resumes at the next start");
                return ServerEnd::Cut;
            }
            std::thread::sleep(LOOK);
        }
        self.closing.send_replace(true);
        let end = match self.worker.join() {
            Ok(()) => ServerEnd::Drained,
            Err(why) => {
                self.app.health.fail(&why);
                ServerEnd::Failed
            }
        };
        let ends = async {
            for listener in self.listeners {
                // A listener that panicked counts as stopped.
                let _ = listener.await;
            }
        };
        self.runtime.block_on(ends);
        self.runtime.shutdown_timeout(Duration::from_secs(1));
        end
    }
}

/// Parts of a server that are created before its jobs are loaded.
struct ServerParts {
    keys: Arc<Keys>,
    address: SocketAddr,
    files: Descriptors,
    ending: watch::Receiver<bool>,
    connections: Arc<Connections>,
}

/// Loads the stored jobs and creates the state that the endpoints share.
fn open_app(
    settings: Serve,
    options: &ServerOptions,
    opened: ServerParts,
    generator: impl FnOnce(Arc<InputStore>) -> Arc<dyn Generator>,
) -> Result<App, StartError> {
    let state = state_folder(settings.state.as_deref())?;
    let files = FileStore::open(&state).map_err(StartError::io(format!("--state {}", state.display())))?;
    let (inputs, tmp) = (files.inputs(), files.temporaries());
    let failed = StartError::io(format!("cannot create the folder of input files {}", inputs.display()));
    let generator = generator(Arc::new(InputStore::open(inputs).map_err(failed)?));
    let model = generator.model();
    let metrics = Arc::new(Metrics::new(&model.platform, &model.preset, settings.queue));
    let observed = ObservedState::new(Arc::clone(&metrics));
    let store: Arc<dyn JobStore> = Arc::new(ObservedStore::new(Arc::new(files), Arc::clone(&observed)));
    let jobs =
        Jobs::open(Arc::clone(&store), settings.clone()).map_err(StartError::io("cannot load the stored jobs"))?;
    let ids = Ids::after(jobs.last_id().as_ref());
    let [bodies, entries] = App::places(&settings);
    Ok(App {
        openapi: api::openapi(opened.keys.needed(), &generator.request_schema()),
        settings,
        jobs,
        ids,
        generator,
        model,
        store,
        tmp,
        keys: opened.keys,
        metrics,
        observed,
        health: Arc::new(options.patience.map_or_else(Health::default, Health::new)),
        connections: opened.connections,
        bound: opened.address,
        created: now(),
        files: opened.files,
        ending: opened.ending,
        streams: Streams::new(STREAMS),
        bodies,
        entries,
        events: AtomicU64::new(1),
    })
}

/// Starts the worker threads.
fn start_worker(app: &Arc<App>, factory: Factory, warm: Vec<JobBatch>) -> Result<Worker, StartError> {
    let observed = Arc::clone(&app.observed);
    let observed = || -> Result<Box<dyn JobDevice>, String> { Ok(Box::new(ObservedDevice::new(factory()?, observed))) };
    Worker::start(&app.jobs, Box::new(observed), warm).map_err(StartError::io("cannot start threads"))
}

/// Sets the health of the server whenever the status of the worker threads changes.
async fn update_health(mut status: watch::Receiver<Status>, health: Arc<Health>) {
    loop {
        match &*status.borrow_and_update() {
            Status::Starting => {}
            Status::Ready => health.ready(),
            Status::Drained => return,
            Status::Failed(why) => return health.fail(why),
        }
        if status.changed().await.is_err() {
            return;
        }
    }
}

fn keys(settings: &Serve, options: &ServerOptions) -> Result<Keys, StartError> {
    Keys::open(settings.api_key_file.as_deref().map(Path::new), options.key.as_deref()).map_err(StartError::Usage)
}

fn address(text: &str, key: &str) -> Result<SocketAddr, StartError> {
    let wrong = || StartError::Usage(format!("{key}: {text}: expected an address and a port, such as 127.0.0.1:8000"));
    let text = text.strip_prefix("localhost").map_or(text.to_string(), |port| format!("127.0.0.1{port}"));
    text.parse().map_err(|_| wrong())
}

fn bind(runtime: &Runtime, address: SocketAddr) -> Result<TcpListener, StartError> {
    runtime.block_on(TcpListener::bind(address)).map_err(StartError::io(format!("cannot listen on {address}")))
}

/// Returns the state folder: `state` (the setting `serve.state`) if it is set, otherwise `ltx2/serve` in the user's state
/// folder.
///
/// # Errors
/// Returns an error if `state` is not set and neither `XDG_STATE_HOME` nor `HOME` is an absolute path.
pub fn state_folder(state: Option<&str>) -> Result<PathBuf, StartError> {
    if let Some(state) = state {
        return std::path::absolute(state).map_err(StartError::io("--state"));
    }
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let states = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")));
    let missing = || {
        StartError::Usage("no state folder: XDG_STATE_HOME and HOME are not absolute paths; pass --state DIR".into())
    };
    states.map(|states| states.join("ltx2/serve")).ok_or_else(missing)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
