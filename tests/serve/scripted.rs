//! A device without a model that is controlled by prompts, and a job server that uses it.
//!
//! A prompt consists of words `name=value`, such as `steps=8 ms=5`; other words are ignored. A word such as
//! `fault=device` causes a fault, and `at=3` sets the step at which it occurs. [`Fault`] lists the faults.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use ltx2::config::{Config, Serve};
use ltx2::media::{self, Audio, Frames, Mp4Options, WavFormat};
use ltx2::serve::device::{
    BatchWatch, Figures, GeneratedVideo, JobBatch, JobDevice, Preparer, PreviewImage, PreviewSink, RunError,
    StepProgress, Stop,
};
use ltx2::serve::error::Failure;
use ltx2::serve::id::{Ids, VideoId};
use ltx2::serve::job::{AcceptedJob, JobPhase, Snapshot, VideoProperties};
use ltx2::serve::job_config::JobConfig;
use ltx2::serve::jobs::{Caller, JobTiming, Jobs, Submitted};
use ltx2::serve::store::{FileStore, JobStore, Variant};
use ltx2::serve::worker::{Status, Worker};
use ltx2_base::atomic_file::{FileError, write_atomically};
use ndarray::{Array2, Array4};
use serde_json::json;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::support::needs;

/// Returns the value of the word `name=value` in a prompt.
fn word<T: std::str::FromStr>(prompt: &str, name: &str) -> Option<T> {
    let value = prompt.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))?;
    value.parse().ok()
}

/// Records of what the device has run.
#[derive(Debug, Default)]
pub struct Log {
    /// Video ids of each batch, and its first step.
    pub orders: Mutex<Vec<(Vec<VideoId>, usize)>>,
    pub evicted: Mutex<Vec<String>>,
    pub warmed: Mutex<Vec<String>>,
    /// Durations between the end of each run and the start of the next.
    pub idle: Mutex<Vec<Duration>>,
    ended: Mutex<Option<Instant>>,
    /// Set to true to make a hung device continue.
    pub released: AtomicBool,
    /// Whether the device has already simulated that no file can be opened.
    lacked: AtomicBool,
}

/// Preparation that lasts for the milliseconds of the word `asks=` in a prompt, unless the job is cancelled.
struct ScriptedPreparer;

impl Preparer for ScriptedPreparer {
    fn prepare(&self, job: &AcceptedJob, _: &Path, is_wanted: &dyn Fn() -> bool) {
        let pause = Duration::from_secs_f64(word(job.prompt(), "asks").unwrap_or(0.0) / 1000.0);
        let since = Instant::now();
        assert_ne!(word::<String>(job.prompt(), "preparation").as_deref(), Some("panics"));
        while since.elapsed() < pause && is_wanted() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

pub struct ScriptedDevice {
    log: Arc<Log>,
    previews: Option<PreviewSink>,
}

impl ScriptedDevice {
    pub fn new(log: Arc<Log>) -> Self {
        ScriptedDevice { log, previews: None }
    }
}

impl JobDevice for ScriptedDevice {
    fn warm(&mut self, order: &JobBatch) -> Result<(), RunError> {
        let job = &order.jobs[0];
        self.log.warmed.lock().unwrap().push(job.shape.clone());
        match word::<String>(job.prompt(), "warm").as_deref() {
            Some("large") => Err(RunError::Job(Failure::new("too_large", "it needs 90 GiB of 80 GiB"))),
            _ => Ok(()),
        }
    }

    fn run(&mut self, order: &JobBatch, watch: BatchWatch) -> Result<Vec<Box<dyn GeneratedVideo>>, RunError> {
        if let Some(ended) = self.log.ended.lock().unwrap().take() {
            self.log.idle.lock().unwrap().push(ended.elapsed());
        }
        let result = self.run_order(order, watch);
        *self.log.ended.lock().unwrap() = Some(Instant::now());
        result
    }

    fn send_previews(&mut self, sink: PreviewSink) {
        self.previews = Some(sink);
    }

    fn preparer(&mut self) -> Option<Arc<dyn Preparer>> {
        Some(Arc::new(ScriptedPreparer))
    }

    fn evict(&mut self, shape: &str) {
        self.log.evicted.lock().unwrap().push(shape.into());
    }

    fn figures(&mut self) -> Figures {
        Figures::default()
    }
}

impl ScriptedDevice {
    fn run_order(&self, order: &JobBatch, watch: BatchWatch) -> Result<Vec<Box<dyn GeneratedVideo>>, RunError> {
        let script = order.jobs[0].prompt().to_string();
        let steps = word(&script, "steps").unwrap_or(4);
        let pause = Duration::from_secs_f64(word(&script, "ms").unwrap_or(0.0) / 1000.0);
        let every: usize = word(&script, "every").unwrap_or(1);
        let identity = order.jobs.iter().map(|job| job.id.to_string()).collect::<Vec<_>>().join(" ");
        let kept = order.steps.as_ref().filter(|_| order.resume).and_then(|path| std::fs::read_to_string(path).ok());
        let kept = kept.and_then(|text| text.strip_prefix(&format!("{identity}\n"))?.parse().ok());
        let first: usize = kept.unwrap_or(0);
        let ids = order.jobs.iter().map(|job| job.id.clone()).collect();
        self.log.orders.lock().unwrap().push((ids, first));
        let mut tell = |stage, step, steps| match watch(StepProgress { stage, step, steps }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(stop) => Err(RunError::Stopped(stop)),
        };
        let keep = |step: usize| {
            if let Some(path) = &order.steps {
                // The video continues even if its checkpoint cannot be written.
                let _ = write_atomically(path, format!("{identity}\n{step}").as_bytes());
            }
        };
        let paused = word::<String>(&script, "pause");
        // A stage that the prompt contains in `pause=` is reported and then lasts until the test releases the device.
        let pass = |stage: JobPhase, is_usual: bool, tell: &mut Tell| -> Result<(), RunError> {
            let is_paused = serde_json::to_value(stage).is_ok_and(|name| name.as_str() == paused.as_deref());
            if is_usual || is_paused {
                tell(stage, 0, 0)?;
            }
            if is_paused {
                self.wait();
                tell(stage, 0, 0)?;
            }
            Ok(())
        };
        pass(JobPhase::Compiling, false, &mut tell)?;
        pass(JobPhase::Loading, false, &mut tell)?;
        pass(JobPhase::PromptEnhancer, false, &mut tell)?;
        pass(JobPhase::TextEncoder, true, &mut tell)?;
        for step in first..steps {
            for job in &order.jobs {
                self.fault(job.prompt(), step)?;
            }
            reach(&format!("step {step}"));
            std::thread::sleep(pause);
            self.preview(order, StepProgress { stage: JobPhase::Denoise, step: step + 1, steps });
            let told = tell(JobPhase::Denoise, step + 1, steps);
            if matches!(told, Err(RunError::Stopped(Stop::Draining))) || (step + 1) % every == 0 {
                keep(step + 1);
            }
            told?;
        }
        pass(JobPhase::Upsampler, false, &mut tell)?;
        pass(JobPhase::Refine, false, &mut tell)?;
        pass(JobPhase::VideoDecoder, true, &mut tell)?;
        pass(JobPhase::AudioDecoder, false, &mut tell)?;
        Ok(order.jobs.iter().map(|job| Box::new(ScriptedVideo { job: Arc::clone(job), tries: 0 }) as _).collect())
    }

    /// Sends a preview of the first job if its prompt contains `preview=KIB`, the size of the image in KiB.
    fn preview(&self, order: &JobBatch, at: StepProgress) {
        let Some(kib) = word::<usize>(order.jobs[0].prompt(), "preview") else { return };
        let sink = self.previews.as_ref().expect("a receiver of previews");
        let jpeg = vec![at.step as u8; kib << 10];
        sink(&order.jobs[0].id, PreviewImage { jpeg, frames: 4, columns: 2, width: 16, height: 12, fps: 3.0, at });
    }

    fn fault(&self, prompt: &str, step: usize) -> Result<(), RunError> {
        if word(prompt, "at").unwrap_or(0) != step {
            return Ok(());
        }
        match word::<String>(prompt, "fault").as_deref() {
            Some("not_finite") => Err(RunError::Job(Failure::new("not_finite", "values are not finite"))),
            Some("given") => {
                let why = "clip.mp4: the video is cut off";
                Err(RunError::Job(Failure::field("invalid_video", "input_video", why)))
            }
            Some("large") => Err(RunError::Job(Failure::field("too_large", "size", "it needs 90 GiB of 80 GiB"))),
            Some("files_once") if !self.log.lacked.swap(true, Ordering::AcqRel) => {
                Err(RunError::Job(Failure::out_of_files()))
            }
            Some("device") => Err(RunError::Device("the accelerator is gone".into())),
            Some("panic") => panic!("the device's thread panics"),
            Some("hang") => {
                self.wait();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Waits until the test releases the device.
    fn wait(&self) {
        while !self.log.released.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Callback that reports a stage, a step and the number of steps.
type Tell<'a> = dyn FnMut(JobPhase, usize, usize) -> Result<(), RunError> + 'a;

/// Blocks forever if `LTX2_FAILPOINT` is `moment`, as a fail point of the program would.
pub fn reach(moment: &str) {
    if std::env::var("LTX2_FAILPOINT").is_ok_and(|asked| asked == moment) {
        eprintln!("at {moment}");
        loop {
            std::thread::park();
        }
    }
}

/// A video that the scripted device has generated.
struct ScriptedVideo {
    job: Arc<AcceptedJob>,
    tries: usize,
}

/// Files whose contents are the same for every video, in the order in which they are written.
const WRITTEN_FILES: [Variant; 4] = [Variant::Thumbnail, Variant::Spritesheet, Variant::Audio, Variant::Video];

/// Returns the files whose contents are the same for every video.
pub fn files() -> &'static [(Variant, Vec<u8>); 4] {
    static FILES: OnceLock<[(Variant, Vec<u8>); 4]> = OnceLock::new();
    FILES.get_or_init(|| {
        let read = |path: &Path| std::fs::read(path).expect("a file");
        // A child process uses the files that its parent process has created.
        if let Some(made) = std::env::var_os("LTX2_SERVE_FILES").map(PathBuf::from) {
            return WRITTEN_FILES.map(|variant| (variant, read(&made.join(variant.file()))));
        }
        let folder = tempfile::tempdir().expect("a folder");
        let frames = Frames::new(Array4::from_shape_fn((9, 32, 32, 3), |(n, y, x, _)| (n * 20 + y + x) as u8)).unwrap();
        let audio = Audio::new(Array2::zeros((2, 16000)), 48000).unwrap();
        let (video, sound) = (folder.path().join("a.mp4"), folder.path().join("a.wav"));
        media::write_mp4(&video, &frames, 24.0, Some(&audio), &Mp4Options::default()).expect("a video");
        media::write_wav(&sound, &audio, WavFormat::Pcm16).expect("a sound");
        let jpeg = |size| {
            let mut bytes = Cursor::new(Vec::new());
            image::RgbImage::from_pixel(size, size, image::Rgb([9, 90, 200]))
                .write_to(&mut bytes, image::ImageFormat::Jpeg)
                .expect("an image");
            bytes.into_inner()
        };
        [
            (Variant::Thumbnail, jpeg(32)),
            (Variant::Spritesheet, jpeg(160)),
            (Variant::Audio, read(&sound)),
            (Variant::Video, read(&video)),
        ]
    })
}

/// Returns a substitute for the SHA-256 of a job's frames. It depends only on the request.
pub fn frames_of(job: &AcceptedJob) -> String {
    hex::encode(Sha256::digest(format!("{} {}", job.prompt(), job.config.summary().seed)))
}

impl GeneratedVideo for ScriptedVideo {
    fn keep(&mut self, _: &Path) {}

    fn write(&mut self, folder: &Path) -> Result<VideoProperties, Failure> {
        self.tries += 1;
        std::thread::sleep(Duration::from_secs_f64(word(self.job.prompt(), "write_ms").unwrap_or(0.0) / 1000.0));
        match word::<String>(self.job.prompt(), "write").as_deref() {
            Some("panic") => panic!("the finisher's thread panics"),
            Some("full") => return Err(Failure::new("storage_full", "the server's disk is full")),
            Some("full_once") if self.tries == 1 => {
                return Err(Failure::new("storage_full", "the server's disk is full"));
            }
            _ => {}
        }
        let full = |error: FileError| {
            if error.to_string().contains("(os error 24)") {
                return Failure::out_of_files();
            }
            let is_full = error.to_string().contains("No space left");
            Failure::new(if is_full { "storage_full" } else { "internal" }, error.to_string())
        };
        let size = word(self.job.prompt(), "bytes").unwrap_or(0);
        let mut bytes = 0;
        for (variant, contents) in files() {
            let mut contents = contents.clone();
            if *variant == Variant::Audio {
                // Programs that read WAV files ignore data after the samples.
                contents.resize(contents.len() + size, 7);
            }
            bytes += contents.len() as u64;
            write_atomically(&folder.join(variant.file()), &contents).map_err(full)?;
        }
        let hdr: Option<usize> = word(self.job.prompt(), "hdr");
        for variant in hdr.iter().flat_map(|_| [Variant::HdrVideo, Variant::Exr]) {
            let contents = vec![9; hdr.unwrap_or_default()];
            bytes += contents.len() as u64;
            write_atomically(&folder.join(variant.file()), &contents).map_err(full)?;
        }
        let (frames, samples) = (frames_of(&self.job), hex::encode(Sha256::digest(b"silence")));
        let sidecar = json!({"seed": self.job.config.summary().seed, "sha256": {"frames": frames, "samples": samples},
            "timings": {"total": 1.0}});
        let text = sidecar.to_string();
        write_atomically(&folder.join(Variant::Sidecar.file()), text.as_bytes()).map_err(full)?;
        Ok(VideoProperties {
            width: 32,
            height: 32,
            num_frames: 9,
            fps: 24.0,
            bytes: bytes + text.len() as u64,
            frames_sha256: frames,
            samples_sha256: samples,
            timings: sidecar["timings"].clone(),
            enhanced_prompt: None,
            warnings: Vec::new(),
        })
    }
}

/// Returns the caller of a server without API keys.
pub fn anyone() -> Caller {
    Caller { name: String::new(), sees_all: true }
}

/// Creates a request. Requests with the same words `shape=` and `key=` in their prompts can run in one batch.
pub fn request(ids: &Ids, prompt: &str) -> AcceptedJob {
    let mut config = Config::default();
    config.request.prompt = Some(prompt.into());
    config.request.seed = word(prompt, "seed").unwrap_or(7);
    if word::<f64>(prompt, "asks").is_some() {
        config.request.enhance_prompt = true;
        config.enhance.endpoint = Some("http://localhost:1/v1".into());
    }
    let text = |name| word::<String>(prompt, name).unwrap_or_default();
    AcceptedJob {
        id: ids.next().expect("an id"),
        created_at: 1_800_000_000,
        owner: text("owner"),
        model: "scripted".into(),
        config: JobConfig::new(&config).expect("JSON"),
        expected: None,
        fields: serde_json::Map::from_iter([("prompt".to_string(), json!(prompt))]),
        seconds: None,
        user: None,
        metadata: serde_json::Map::new(),
        warnings: Vec::new(),
        remixed_from: None,
        inputs: Vec::new(),
        body_sha256: hex::encode(Sha256::digest(prompt)),
        idempotency_key: word(prompt, "idempotency"),
        traceparent: None,
        shape: format!("shape{}", text("shape")),
        batch_key: word(prompt, "key")
            .map_or_else(|| prompt.to_string(), |key: String| format!("{key} {}", text("shape"))),
    }
}

/// Returns the settings of a small server, which do not depend on the free disk space.
pub fn settings() -> Serve {
    let mut settings = Serve::default();
    settings.min_free.0 = 0;
    settings.queue = 1000;
    settings.queue_per_key = 1000;
    settings
}

/// Creates a temporary folder, in memory if possible.
pub fn quick_folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.expect("a folder")
}

/// A job server on the scripted device, without HTTP.
pub struct Server {
    pub jobs: Arc<Jobs>,
    pub ids: Ids,
    pub log: Arc<Log>,
    worker: Worker,
}

impl Server {
    pub fn start(state: &Path, settings: Serve) -> Self {
        let since = Instant::now();
        // Another test may be starting a process, which holds this process's file lock until it calls exec.
        let store = loop {
            match FileStore::open(state) {
                Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy && since.elapsed().as_secs() < 5 => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                other => break other.expect("a store"),
            }
        };
        Server::with(Arc::new(store), settings, JobTiming::default())
    }

    pub fn with(store: Arc<dyn JobStore>, settings: Serve, pace: JobTiming) -> Self {
        let jobs = Jobs::open_at(store, settings, pace).expect("jobs");
        Server::with_jobs(jobs, Vec::new())
    }

    pub fn with_jobs(jobs: Arc<Jobs>, warm: Vec<JobBatch>) -> Self {
        // Creates the files in advance, because creating them takes longer than some runs.
        files();
        let log = Arc::new(Log::default());
        let ids = Ids::after(jobs.last_id().as_ref());
        let device = ScriptedDevice::new(Arc::clone(&log));
        let worker = Worker::start(&jobs, Box::new(move || Ok(Box::new(device))), warm).expect("threads");
        Server { jobs, ids, log, worker }
    }

    /// Submits a request with this prompt and returns the id of its job.
    pub fn send(&self, prompt: &str) -> VideoId {
        let ticket = self.jobs.admit(&Caller { name: word(prompt, "owner").unwrap_or_default(), sees_all: false });
        match self.jobs.submit(ticket.expect("a place"), request(&self.ids, prompt)).expect("taken") {
            Submitted::New(snapshot) => snapshot.accepted.id.clone(),
            Submitted::Again(snapshot) => panic!("{} again", snapshot.accepted.id),
        }
    }

    pub fn get(&self, id: &VideoId) -> Snapshot {
        self.jobs.get(&anyone(), id).expect("a job")
    }

    /// Waits until the condition holds for the server's jobs; panics after a timeout.
    pub fn until(&self, what: &str, is_so: impl Fn(&Jobs) -> bool) {
        until(what, || is_so(&self.jobs));
    }

    /// Waits until a job has ended.
    pub fn wait(&self, id: &VideoId) -> Snapshot {
        self.until(&format!("{id} to end"), |jobs| jobs.get(&anyone(), id).expect("a job").record.state.is_terminal());
        self.get(id)
    }

    pub fn status(&self) -> Status {
        self.worker.status().borrow().clone()
    }

    /// Drains the server and waits until it has stopped.
    pub fn stop(self) -> Result<(), String> {
        self.jobs.drain();
        self.worker.join()
    }

    /// Waits until the server has stopped.
    pub fn join(self) -> Result<(), String> {
        self.worker.join()
    }
}

/// Waits until the condition holds; panics after a timeout.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(60), "waited a minute for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the names and sizes of the files in a folder.
pub fn listed(folder: &Path) -> BTreeMap<String, u64> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|e| (e.file_name().to_string_lossy().into_owned(), e.metadata().map_or(0, |m| m.len()))).collect()
}

/// When the server recovers its jobs, it accepts the files of a scripted video.
#[needs(nothing)]
fn scripted_video_is_valid() {
    let folder = tempfile::tempdir().expect("a folder");
    let job = Arc::new(request(&Ids::after(None), "a"));
    let produced = ScriptedVideo { job, tries: 0 }.write(folder.path()).expect("written");
    let clip = media::probe_clip(&folder.path().join("video.mp4"), Path::new("no-ffmpeg")).expect("a video");
    assert_eq!((clip.width, clip.height, clip.frames), (produced.width, produced.height, produced.num_frames));
    assert_eq!(listed(folder.path()).values().sum::<u64>(), produced.bytes);
}
