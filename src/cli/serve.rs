//! `ltx2 serve`: serves video generation over HTTP.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use super::args::{ConfigArgs, ModelArgs, PlacementArgs, ProcessArgs, RerunArgs};
use super::generate::prepare_libtpu;
use super::numbers::whole;
use super::signals::{ReceivedSignal, listen};
use super::{ServerStopped, UsageError, log, print, tell};
use crate::config::{CliOverrides, Drain, LoadedConfig, LogFormat, load};
use crate::interrupts;
use crate::pipeline::plan::setup::check_flags;
use crate::pipeline::processes::together;
use crate::pjrt::end_process;
use crate::pjrt::limit_heaps;
use crate::runtime::processes::Group;
use crate::serve::health::HealthState;
use crate::serve::model_device::{factory_together, follow};
use crate::serve::server::{ServerEnd, ServerOptions, StartError, state_folder};
use crate::serve::start;
use crate::temporaries;

/// Interval at which the main thread checks for signals and the state of the server.
const LOOK: Duration = Duration::from_millis(20);
/// Environment variable with an API key, in addition to those of the key file.
const KEY_VARIABLE: &str = "LTX2_API_KEY";

/// Serves video generation over HTTP with an API compatible with OpenAI's /v1/videos.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(after_help = "Examples:
  ltx2 serve -c nano --warm 128x96x25
  ltx2 serve -c ltx2_3 -m LTX-2.3 --listen 0.0.0.0:8000 --api-key-file keys
  curl localhost:8000/v1/videos -F prompt=\"a red circle bounces on blue, low beeps\"

LTX2_API_KEY sets an additional API key. SIGTERM and Ctrl-C drain the server; a second one stops it immediately.")]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    keeping: KeepingArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    processes: ProcessArgs,
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    rerun: RerunArgs,
    /// Prints the merged configuration as YAML with the origin of each value, then exits
    #[arg(long)]
    print_config: bool,
}

/// Options for the listen address and client access.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Server")]
struct ServerArgs {
    /// Address and port to listen on; an address other than loopback requires API keys or --insecure [default:
    /// 127.0.0.1:8000]
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<String>,
    /// Allows clients on other machines without an API key
    #[arg(long)]
    insecure: bool,
    /// File of API keys, one name:key per line, mode 0600; a name*:key has access to the videos of every key; reloaded
    /// on SIGHUP
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<String>,
    /// Model name that clients may use; repeatable [default: the preset and the last component of the model path]
    #[arg(long, value_name = "NAME")]
    served_model_name: Vec<String>,
    /// Accepts any model name
    #[arg(long)]
    any_model: bool,
    /// Host name to accept in requests, in addition to loopback and the bound address; repeatable
    #[arg(long, value_name = "HOST")]
    allow_host: Vec<String>,
    /// Origin that may call the API from a browser (CORS); repeatable
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
    /// Separate address and port for /metrics
    #[arg(long, value_name = "ADDR:PORT")]
    metrics_listen: Option<String>,
    /// Format of log lines [default: text]
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
    /// Includes prompts in the log
    #[arg(long)]
    log_prompts: bool,
}

/// Limits of requests.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Limits")]
struct LimitArgs {
    /// Size to compile and run before the server reports ready, or `none`; repeatable [default: the configured size]
    #[arg(long, value_name = "WxHxF[@PIPELINE]")]
    warm: Vec<String>,
    /// Rejects sizes other than those of --warm
    #[arg(long)]
    only_warm: bool,
    /// Maximum number of queued videos [default: 64]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    queue: Option<u64>,
    /// Maximum number of queued videos per API key [default: 32]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    queue_per_key: Option<u64>,
    /// Maximum number of videos per batch [default: the batch size of the layout]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    max_batch: Option<u64>,
    /// Maximum number of sizes whose programs stay loaded [default: 8]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    max_shapes: Option<u64>,
    /// Maximum number of video tokens in the last stage [default: 32768]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    max_tokens: Option<u64>,
    /// Maximum number of frames per video [default: 289]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    max_frames: Option<u64>,
    /// Maximum number of denoising steps [default: 100]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    max_steps: Option<u64>,
    /// Maximum number of images per request [default: 8]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    max_images: Option<u64>,
    /// Maximum size of a request body, e.g. 32MiB
    #[arg(long, value_name = "BYTES")]
    body_limit: Option<String>,
    /// Minimum upload rate in bytes per second, checked every 10 s; 0B disables the check [default: 4KiB]
    #[arg(long, value_name = "BYTES")]
    min_upload_rate: Option<String>,
    /// Timeout of POST /v1/videos/sync [default: 600s]
    #[arg(long, value_name = "TIME")]
    sync_timeout: Option<String>,
}

/// Options of stored state and shutdown.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "State")]
struct KeepingArgs {
    /// Folder of the queue and the videos [default: ltx2/serve in the user's state folder]
    #[arg(long, value_name = "DIR")]
    state: Option<String>,
    /// How long to keep finished videos [default: 24h]
    #[arg(long, value_name = "TIME")]
    keep: Option<String>,
    /// Maximum disk space of finished videos [default: 20GiB]
    #[arg(long, value_name = "BYTES")]
    disk: Option<String>,
    /// Disk space to keep free [default: 2GiB]
    #[arg(long, value_name = "BYTES")]
    min_free: Option<String>,
    /// Denoising time between two checkpoints of a running video [default: 30s]
    #[arg(long, value_name = "TIME")]
    checkpoint: Option<String>,
    /// What to do with a running video at shutdown [default: checkpoint]
    #[arg(long, value_name = "MODE")]
    drain: Option<Drain>,
    /// Maximum time of the shutdown [default: 30s]
    #[arg(long, value_name = "TIME")]
    drain_timeout: Option<String>,
}

impl ServeArgs {
    fn load(&self) -> anyhow::Result<LoadedConfig> {
        let mut given = self.config.overrides();
        self.server.add(&mut given);
        self.limits.add(&mut given);
        self.keeping.add(&mut given);
        self.model.add(&mut given);
        self.placement.add(&mut given);
        self.processes.add(&mut given);
        given.allow_changed_inputs = self.rerun.allow_changed_inputs;
        let loaded = load(&given)?;
        loaded.check_server_effect()?;
        Ok(loaded)
    }
}

impl ServerArgs {
    fn add(&self, given: &mut CliOverrides) {
        given.flag("listen", "serve.listen", &self.listen);
        given.flag("insecure", "serve.insecure", self.insecure);
        given.flag("api-key-file", "serve.api_key_file", &self.api_key_file);
        given.flag("served-model-name", "serve.served_model_name", &self.served_model_name);
        given.flag("any-model", "serve.any_model", self.any_model);
        given.flag("allow-host", "serve.allow_host", &self.allow_host);
        given.flag("cors-origin", "serve.cors_origin", &self.cors_origin);
        given.flag("metrics-listen", "serve.metrics_listen", &self.metrics_listen);
        given.flag("log-format", "serve.log_format", self.log_format);
        given.flag("log-prompts", "serve.log_prompts", self.log_prompts);
    }
}

impl LimitArgs {
    fn add(&self, given: &mut CliOverrides) {
        given.flag("warm", "serve.warm", &self.warm);
        given.flag("only-warm", "serve.only_warm", self.only_warm);
        given.flag("queue", "serve.queue", self.queue);
        given.flag("queue-per-key", "serve.queue_per_key", self.queue_per_key);
        given.flag("max-batch", "serve.max_batch", self.max_batch);
        given.flag("max-shapes", "serve.max_shapes", self.max_shapes);
        given.flag("max-tokens", "serve.max_tokens", self.max_tokens);
        given.flag("max-frames", "serve.max_frames", self.max_frames);
        given.flag("max-steps", "serve.max_steps", self.max_steps);
        given.flag("max-images", "serve.max_images", self.max_images);
        given.flag("body-limit", "serve.body_limit", &self.body_limit);
        given.flag("min-upload-rate", "serve.min_upload_rate", &self.min_upload_rate);
        given.flag("sync-timeout", "serve.sync_timeout", &self.sync_timeout);
    }
}

impl KeepingArgs {
    fn add(&self, given: &mut CliOverrides) {
        given.flag("state", "serve.state", &self.state);
        given.flag("keep", "serve.keep", &self.keep);
        given.flag("disk", "serve.disk", &self.disk);
        given.flag("min-free", "serve.min_free", &self.min_free);
        given.flag("checkpoint", "serve.checkpoint", &self.checkpoint);
        given.flag("drain", "serve.drain", self.drain);
        given.flag("drain-timeout", "serve.drain_timeout", &self.drain_timeout);
    }
}

pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<()> {
    limit_heaps();
    let mut loaded = args.load()?;
    if args.print_config {
        return print(&loaded.to_yaml());
    }
    log::form(loaded.config.serve.log_format);
    let state = state_folder(loaded.config.serve.state.as_deref()).map_err(usage)?;
    loaded.config.serve.state = Some(state.to_string_lossy().into_owned());
    prepare_libtpu(&loaded.config);
    let config = loaded.config.clone();
    // Fails before the address is printed and clients connect.
    check_flags(&config)?;
    together(&config.runtime.distributed, |group| match group {
        Some(group) if group.id() > 0 => {
            log::only_warnings();
            // Ignore signals here: the first process receives them too and tells the others when to stop. If another
            // process exited earlier, the first process would fail.
            let _heard = Signals::listen()?;
            follow(&config, group).map_err(anyhow::Error::msg)
        }
        group => serve(loaded.clone(), group.cloned()),
    })
}

fn usage(error: StartError) -> anyhow::Error {
    match error {
        StartError::Usage(message) => UsageError(message).into(),
        other => other.into(),
    }
}

fn serve(loaded: LoadedConfig, group: Option<Arc<Group>>) -> anyhow::Result<()> {
    let signals = Signals::listen()?;
    let options = ServerOptions { key: std::env::var(KEY_VARIABLE).ok(), ..ServerOptions::default() };
    let (insecure, form) = (loaded.config.serve.insecure, loaded.config.serve.log_format);
    let factory = factory_together(loaded.config.clone(), loaded.sidecar().cloned(), group);
    let server = start(loaded, options, Box::new(factory)).map_err(usage)?;
    let keys = match (server.keys(), insecure) {
        (0, true) if !server.address().ip().is_loopback() => "no API key: anyone may use this server".into(),
        (0, _) => "no API key".into(),
        (1, _) => "1 API key".into(),
        (count, _) => format!("{count} API keys"),
    };
    let (address, names, state) = (server.address(), server.names().join(", "), server.state().display());
    let line = format!("http://{address}: {names}, {keys}, state in {state}");
    match form {
        LogFormat::Text => tell(line),
        LogFormat::Json => tracing::info!("{line}"),
    }
    let mut warm = false;
    while signals.count() == 0 && !server.has_failed() {
        if !warm && server.health().now() == HealthState::Ready {
            warm = true;
            tracing::info!("ready");
        }
        if signals.reread() {
            match server.reread_keys() {
                Ok(count) => tracing::info!("reloaded {count} API keys"),
                Err(why) => tracing::error!("cannot reload the API keys, keeping the old ones: {why}"),
            }
        }
        std::thread::sleep(LOOK);
    }
    if signals.count() > 0 {
        if server.is_starting() {
            tracing::info!("stopping before the first video; queued videos run after the next start");
            exit_without_device()
        }
        tracing::info!("draining; a second signal stops the server immediately");
    }
    let health = Arc::clone(server.health());
    match server.end_unless_compiling(|| signals.count() > 1, interrupts::only_compiles) {
        ServerEnd::Left => exit_without_device(),
        // A compilation may have begun after the last check.
        ServerEnd::Drained if interrupts::only_compiles() => exit_without_device(),
        ServerEnd::Drained => Ok(()),
        cut @ ServerEnd::Cut => {
            tell("error: the running video is unfinished; the next start resumes it");
            // The device thread still runs.
            end_process(cut.code().into())
        }
        failed @ ServerEnd::Failed => {
            let why = health.failure().unwrap_or_else(|| "a server thread failed".into());
            Err(ServerStopped { code: failed.code(), why }.into())
        }
    }
}

/// Exits the process without waiting for the device thread, whose work cannot be interrupted. First notifies the other
/// processes.
fn exit_without_device() -> ! {
    interrupts::exit_report();
    temporaries::remove_all();
    end_process(0)
}

/// Signals received so far.
#[derive(Clone, Default)]
struct Signals {
    /// Number of SIGINT and SIGTERM signals.
    ends: Arc<AtomicUsize>,
    /// Whether SIGHUP requested a reload of the keys.
    rereads: Arc<AtomicBool>,
}

impl Signals {
    /// Starts counting signals.
    fn listen() -> anyhow::Result<Self> {
        let signals = Signals::default();
        let heard = signals.clone();
        listen(true, move |signal| match signal {
            ReceivedSignal::End => drop(heard.ends.fetch_add(1, Ordering::SeqCst)),
            ReceivedSignal::Hangup => heard.rereads.store(true, Ordering::SeqCst),
        })?;
        Ok(signals)
    }

    fn count(&self) -> usize {
        self.ends.load(Ordering::SeqCst)
    }

    fn reread(&self) -> bool {
        self.rereads.swap(false, Ordering::SeqCst)
    }
}
