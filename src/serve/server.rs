//! A server from its start to its end, in a process of its own or within a test.

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
use super::device::Device;
use super::fields::Fields;
use super::health::{Condition, Health};
use super::id::Ids;
use super::inputs::Inputs;
use super::jobs::Jobs;
use super::listen::{self, Connections, Limits};
use super::metrics::{Metrics, ObservedDevice, ObservedStore, Pulse};
use super::store::{FileStore, JobStore};
use super::streams::Streams;
use super::warm;
use super::worker::{Factory, Status, Worker};
use crate::config::{Drain, Loaded, Serve};

/// Exit codes of a server.
const DRAINED: u8 = 0;
const FAILED: u8 = 1;
/// Of a server whose work was not done in time.
pub const CUT: u8 = 130;
/// Threads that wait for disks.
const BLOCKING: usize = 64;
/// Between two looks at the threads that end.
const LOOK: Duration = Duration::from_millis(5);
/// How long a compilation is all that is waited for, before a draining server leaves it.
const COMPILES: Duration = Duration::from_millis(300);

/// Options of a server that are no part of its configuration.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A key beside those of the file, as the environment gives it.
    pub key: Option<String>,
    /// Limits of connections.
    pub limits: Limits,
    /// How long the device may stand before the server is ill; nothing for half a minute.
    pub patience: Option<Duration>,
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// For the user to mend: exit code 2.
    #[error("{0}")]
    Usage(String),
    /// A folder, a port.
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
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
    /// Ends streams; then, connections.
    ending: watch::Sender<bool>,
    closing: watch::Sender<bool>,
    worker: Worker,
    listeners: Vec<tokio::task::JoinHandle<()>>,
}

impl Server {
    /// Starts to listen, reads the jobs that are there, and begins to load the model, which goes on behind this.
    ///
    /// # Errors
    /// A configuration that cannot be served, a folder that is in use, a port.
    pub fn start(loaded: Loaded, options: Options, factory: Factory) -> Result<Server, StartError> {
        let serve = loaded.config.serve.clone();
        let keys = Arc::new(keys(&serve, &options)?);
        let wanted = address(&serve.listen, "serve.listen")?;
        let figures = serve.metrics_listen.as_deref();
        let figures = figures.map(|place| self::address(place, "serve.metrics_listen")).transpose()?;
        for (flag, place) in [("--listen", Some(wanted)), ("--metrics-listen", figures)] {
            if let Some(place) = place.filter(|place| !place.ip().is_loopback() && !keys.needed() && !serve.insecure) {
                let why = "other machines could use the server without a key; give --api-key-file, or --insecure";
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
            .map_err(StartError::io("threads"))?;
        let listener = bind(&runtime, wanted)?;
        let address = listener.local_addr().map_err(StartError::io("--listen"))?;
        let (ending, streams_end) = watch::channel(false);
        let (closing, connections_end) = watch::channel(false);
        let connections = Arc::<Connections>::default();
        let opened = Opened { keys, address, files, ending: streams_end, connections: Arc::clone(&connections) };
        let app = Arc::new(open_app(loaded, &options, opened)?);
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
        app.fields.warm_shapes().map_err(StartError::Usage)?;
        let serving = listen::serve(listener, router, options.limits, files, connections, connections_end);
        listeners.push(runtime.spawn(serving));
        // What a warm-up starts from is made first, which takes its time.
        let worker = begin_work(&app, factory)?;
        runtime.spawn(tell_health(worker.status(), Arc::clone(&app.health)));
        let state = state_folder(&serve)?;
        Ok(Server { app, runtime, address, metrics_address, state, ending, closing, worker, listeners })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where its figures are alone.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics_address
    }

    /// Folder of its jobs.
    pub fn state(&self) -> &Path {
        &self.state
    }

    /// Names of its model.
    pub fn names(&self) -> &[String] {
        &self.app.names
    }

    /// Number of its keys.
    pub fn keys(&self) -> usize {
        self.app.keys.count()
    }

    /// All jobs that it has.
    pub fn jobs(&self) -> &Arc<Jobs> {
        &self.app.jobs
    }

    /// Reads the file of keys again.
    ///
    /// # Errors
    /// A file that is wrong: the keys stay as they were.
    pub fn reread_keys(&self) -> Result<usize, String> {
        self.app.keys.reread()
    }

    /// Whether it can do its work.
    pub fn health(&self) -> &Arc<Health> {
        &self.app.health
    }

    /// Waits until the model is warm.
    ///
    /// # Errors
    /// Why it is not.
    pub fn wait_ready(&self, longest: Duration) -> Result<(), String> {
        let mut condition = self.app.health.watch();
        let known = async {
            tokio::time::timeout(longest, condition.wait_for(|now| *now != Condition::Starting))
                .await
                .map_err(|_| "the model is not ready in time".to_string())?
                .map(|now| now.clone())
                .map_err(|error| error.to_string())
        };
        match self.runtime.block_on(known)? {
            Condition::Failed(why) => Err(self.app.health.failure().unwrap_or(why)),
            _ => Ok(()),
        }
    }

    /// Whether the device failed: the server has nothing left to do.
    pub fn has_failed(&self) -> bool {
        matches!(&*self.worker.status().borrow(), Status::Failed(_))
    }

    /// Takes no more videos, ends what runs as the configuration says, and answers what is asked meanwhile.
    pub fn drain(&self) {
        self.app.jobs.drain();
        self.ending.send_replace(true);
    }

    /// Whether the device is still built and warmed, which no video waits for.
    pub fn is_starting(&self) -> bool {
        matches!(&*self.worker.status().borrow(), Status::Starting)
    }

    /// Drains, waits for the end, and gives the exit code. `hurry` is asked whether to wait no longer.
    pub fn end(self, hurry: impl Fn() -> bool) -> u8 {
        self.end_or_leave(hurry, || false)
    }

    /// The same, which leaves the device's thread where `compiles` says that it only compiles, and nothing that is not kept would be
    /// lost: nothing can stop a compilation. The running video is queued again.
    pub fn end_or_leave(self, hurry: impl Fn() -> bool, compiles: impl Fn() -> bool) -> u8 {
        self.drain();
        let until = Instant::now() + self.app.serve.drain_timeout.duration();
        // One thread may have failed while another hangs.
        let mut compiles_since = None;
        while !self.worker.is_over() {
            let is_left = self.app.serve.drain == Drain::Checkpoint && compiles();
            let since = *compiles_since.get_or_insert_with(Instant::now);
            if !is_left {
                compiles_since = None;
            }
            if is_left && since.elapsed() >= COMPILES {
                tracing::warn!("a compilation is not waited for: the running video is queued again");
                self.app.jobs.requeue_running();
                self.runtime.shutdown_background();
                return DRAINED;
            }
            if hurry() || Instant::now() >= until {
                tracing::warn!("the running video is left as it is: the next start goes on with it");
                self.runtime.shutdown_background();
                return CUT;
            }
            std::thread::sleep(LOOK);
        }
        self.closing.send_replace(true);
        let code = match self.worker.join() {
            Ok(()) => DRAINED,
            Err(why) => {
                self.app.health.fail(&why);
                FAILED
            }
        };
        let ends = async {
            for listener in self.listeners {
                // One that panicked has ended, too.
                let _ = listener.await;
            }
        };
        self.runtime.block_on(ends);
        self.runtime.shutdown_timeout(Duration::from_secs(1));
        code
    }
}

/// Parts of a server that are there before its jobs are.
struct Opened {
    keys: Arc<Keys>,
    address: SocketAddr,
    files: Descriptors,
    ending: watch::Receiver<bool>,
    connections: Arc<Connections>,
}

/// Reads the jobs that are there, and puts together what endpoints share.
fn open_app(loaded: Loaded, options: &Options, opened: Opened) -> Result<App, StartError> {
    let serve = loaded.config.serve.clone();
    let state = state_folder(&serve)?;
    let files = FileStore::open(&state).map_err(StartError::io(format!("--state {}", state.display())))?;
    let (inputs, tmp) = (files.inputs(), files.temporaries());
    let metrics = Metrics::new(api::platform(&loaded.config.runtime.platform), loaded.preset(), serve.queue);
    let metrics = Arc::new(metrics);
    let pulse = Pulse::new(Arc::clone(&metrics));
    let store: Arc<dyn JobStore> = Arc::new(ObservedStore::new(Arc::new(files), Arc::clone(&pulse)));
    let jobs = Jobs::open(Arc::clone(&store), serve.clone()).map_err(StartError::io("the jobs"))?;
    let ids = Ids::behind(jobs.last_id().as_ref());
    let inputs = Arc::new(Inputs::open(inputs).map_err(StartError::io("the inputs"))?);
    let fields = Arc::new(Fields::new(loaded.clone(), inputs, ids));
    let [bodies, entries] = App::places(&serve);
    Ok(App {
        names: fields.model_names(),
        loaded,
        serve,
        jobs,
        fields,
        store,
        tmp,
        keys: opened.keys,
        metrics,
        pulse,
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

/// Starts the threads of device and finisher.
fn begin_work(app: &Arc<App>, factory: Factory) -> Result<Worker, StartError> {
    let warm = warm::orders(&app.fields).map_err(StartError::Usage)?;
    let pulse = Arc::clone(&app.pulse);
    let observed = || -> Result<Box<dyn Device>, String> { Ok(Box::new(ObservedDevice::new(factory()?, pulse))) };
    Worker::start(&app.jobs, Box::new(observed), warm).map_err(StartError::io("threads"))
}

/// Tells probes how the device's threads are.
async fn tell_health(mut status: watch::Receiver<Status>, health: Arc<Health>) {
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

fn keys(serve: &Serve, options: &Options) -> Result<Keys, StartError> {
    Keys::open(serve.api_key_file.as_deref().map(Path::new), options.key.as_deref()).map_err(StartError::Usage)
}

fn address(text: &str, key: &str) -> Result<SocketAddr, StartError> {
    let wrong = || StartError::Usage(format!("{key}: {text}: give an address and a port, such as 127.0.0.1:8000"));
    let text = text.strip_prefix("localhost").map_or(text.to_string(), |port| format!("127.0.0.1{port}"));
    text.parse().map_err(|_| wrong())
}

fn bind(runtime: &Runtime, address: SocketAddr) -> Result<TcpListener, StartError> {
    runtime.block_on(TcpListener::bind(address)).map_err(StartError::io(format!("cannot listen on {address}")))
}

/// The folder of a server's jobs: the one that is given, else the user's.
///
/// # Errors
/// None is given, and the user has no home.
pub fn state_folder(serve: &Serve) -> Result<PathBuf, StartError> {
    if let Some(state) = &serve.state {
        return std::path::absolute(state).map_err(StartError::io("--state"));
    }
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let states = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")));
    let missing = || StartError::Usage("--state: give a folder: neither XDG_STATE_HOME nor HOME is set".into());
    states.map(|states| states.join("ltx2/serve")).ok_or_else(missing)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
