//! A device that does as prompts say, without a model, and a server of jobs around it.
//!
//! A prompt is words `name=value`, and other words, which mean nothing: `steps=8 ms=5`. A fault has the step it comes at:
//! `fault=device at=3`. What a fault can be, [`Fault`] says.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use ltx2::config::{Config, Serve};
use ltx2::media::{self, Audio, Frames, Mp4Options, WavFormat};
use ltx2::serve::device::{Device, Figures, Made, Moment, Order, RunError, Stop, Watch};
use ltx2::serve::error::Failure;
use ltx2::serve::id::{Ids, VideoId};
use ltx2::serve::job::{Accepted, JobPhase, Produced, Snapshot};
use ltx2::serve::jobs::{Caller, Jobs, Pace, Submitted};
use ltx2::serve::store::{FileStore, JobStore, Variant};
use ltx2::serve::worker::{Status, Worker};
use ndarray::{Array2, Array4};
use serde_json::json;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::support::needs;

/// Value of a word of a prompt.
fn word<T: std::str::FromStr>(prompt: &str, name: &str) -> Option<T> {
    let value = prompt.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))?;
    value.parse().ok()
}

/// Runs of the device, for tests to look at.
#[derive(Debug, Default)]
pub struct Log {
    /// Ids of each order, with the step that it began with.
    pub orders: Mutex<Vec<(Vec<VideoId>, usize)>>,
    pub evicted: Mutex<Vec<String>>,
    pub warmed: Mutex<Vec<String>>,
    /// Times between the end of a run and the start of the next.
    pub idle: Mutex<Vec<Duration>>,
    ended: Mutex<Option<Instant>>,
    /// Whether a device that hangs goes on.
    pub released: AtomicBool,
    /// Whether a device has found no open file.
    lacked: AtomicBool,
}

/// The scripted device.
pub struct ScriptedDevice {
    log: Arc<Log>,
}

impl ScriptedDevice {
    pub fn new(log: Arc<Log>) -> Self {
        ScriptedDevice { log }
    }
}

impl Device for ScriptedDevice {
    fn warm(&mut self, order: &Order) -> Result<(), RunError> {
        let job = &order.jobs[0];
        self.log.warmed.lock().unwrap().push(job.shape.clone());
        match word::<String>(job.prompt(), "warm").as_deref() {
            Some("large") => Err(RunError::Job(Failure::new("too_large", "it needs 90 GiB of 80 GiB"))),
            _ => Ok(()),
        }
    }

    fn run(&mut self, order: &Order, watch: Watch) -> Result<Vec<Box<dyn Made>>, RunError> {
        if let Some(ended) = self.log.ended.lock().unwrap().take() {
            self.log.idle.lock().unwrap().push(ended.elapsed());
        }
        let result = self.run_order(order, watch);
        *self.log.ended.lock().unwrap() = Some(Instant::now());
        result
    }

    fn evict(&mut self, shape: &str) {
        self.log.evicted.lock().unwrap().push(shape.into());
    }

    fn figures(&mut self) -> Figures {
        Figures::default()
    }
}

impl ScriptedDevice {
    fn run_order(&self, order: &Order, watch: Watch) -> Result<Vec<Box<dyn Made>>, RunError> {
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
        let mut tell = |stage, step, steps| match watch(Moment { stage, step, steps }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(stop) => Err(RunError::Stopped(stop)),
        };
        let keep = |step: usize| {
            if let Some(path) = &order.steps {
                // Steps that cannot be kept are no fault of the video's.
                let _ = media::write_atomically(path, format!("{identity}\n{step}").as_bytes());
            }
        };
        let paused = word::<String>(&script, "pause");
        // Stages that a script names are told, and last until the test goes on.
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
        pass(JobPhase::TextEncoder, true, &mut tell)?;
        for step in first..steps {
            for job in &order.jobs {
                self.fault(job.prompt(), step)?;
            }
            reach(&format!("step {step}"));
            std::thread::sleep(pause);
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
        Ok(order.jobs.iter().map(|job| Box::new(ScriptedMade { job: Arc::clone(job), tries: 0 }) as _).collect())
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

    /// Until the test goes on.
    fn wait(&self) {
        while !self.log.released.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Tells of a moment.
type Tell<'a> = dyn FnMut(JobPhase, usize, usize) -> Result<(), RunError> + 'a;

/// As the program's own fail points: stops for good where `LTX2_FAILPOINT` names this moment.
pub fn reach(moment: &str) {
    if std::env::var("LTX2_FAILPOINT").is_ok_and(|asked| asked == moment) {
        eprintln!("at {moment}");
        loop {
            std::thread::park();
        }
    }
}

/// A video of the device.
struct ScriptedMade {
    job: Arc<Accepted>,
    tries: usize,
}

/// Those that are the same for every video, in the order in which they are written.
const FILES_MADE: [Variant; 4] = [Variant::Thumbnail, Variant::Spritesheet, Variant::Audio, Variant::Video];

/// Files that are the same for every video.
pub fn files() -> &'static [(Variant, Vec<u8>); 4] {
    static FILES: OnceLock<[(Variant, Vec<u8>); 4]> = OnceLock::new();
    FILES.get_or_init(|| {
        let read = |path: &Path| std::fs::read(path).expect("a file");
        // A process that is started for a moment gets what another has made.
        if let Some(made) = std::env::var_os("LTX2_SERVE_FILES").map(PathBuf::from) {
            return FILES_MADE.map(|variant| (variant, read(&made.join(variant.file()))));
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

/// Stands for the SHA-256 of a job's frames: it depends on what was asked for alone.
pub fn frames_of(job: &Accepted) -> String {
    hex::encode(Sha256::digest(format!("{} {}", job.prompt(), job.config.request.seed)))
}

impl Made for ScriptedMade {
    fn keep(&mut self, _: &Path) {}

    fn write(&mut self, folder: &Path) -> Result<Produced, Failure> {
        self.tries += 1;
        std::thread::sleep(Duration::from_secs_f64(word(self.job.prompt(), "write_ms").unwrap_or(0.0) / 1000.0));
        match word::<String>(self.job.prompt(), "write").as_deref() {
            Some("panic") => panic!("the finisher's thread panics"),
            Some("full") => return Err(Failure::new("storage_full", "the disk is full")),
            Some("full_once") if self.tries == 1 => return Err(Failure::new("storage_full", "the disk is full")),
            _ => {}
        }
        let full = |error: media::Error| {
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
                // What stands behind a WAV's samples is read by nobody.
                contents.resize(contents.len() + size, 7);
            }
            bytes += contents.len() as u64;
            media::write_atomically(&folder.join(variant.file()), &contents).map_err(full)?;
        }
        let (frames, samples) = (frames_of(&self.job), hex::encode(Sha256::digest(b"silence")));
        let sidecar = json!({"seed": self.job.config.request.seed, "sha256": {"frames": frames, "samples": samples},
            "timings": {"total": 1.0}});
        let text = sidecar.to_string();
        media::write_atomically(&folder.join(Variant::Sidecar.file()), text.as_bytes()).map_err(full)?;
        Ok(Produced {
            width: 32,
            height: 32,
            num_frames: 9,
            fps: 24.0,
            bytes: bytes + text.len() as u64,
            frames_sha256: frames,
            samples_sha256: samples,
            timings: sidecar["timings"].clone(),
            warnings: Vec::new(),
        })
    }
}

/// Who asks, on a server without keys.
pub fn anyone() -> Caller {
    Caller { name: String::new(), sees_all: true }
}

/// A request; those of one prompt's `shape=` and `key=` are made together.
pub fn request(ids: &Ids, prompt: &str) -> Accepted {
    let mut config = Config::default();
    config.request.prompt = Some(prompt.into());
    config.request.seed = word(prompt, "seed").unwrap_or(7);
    let text = |name| word::<String>(prompt, name).unwrap_or_default();
    Accepted {
        id: ids.next().expect("an id"),
        created_at: 1_800_000_000,
        owner: text("owner"),
        model: "scripted".into(),
        config,
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

/// Settings of a small server on any disk.
pub fn settings() -> Serve {
    let mut settings = Serve::default();
    settings.min_free.0 = 0;
    settings.queue = 1000;
    settings.queue_per_key = 1000;
    settings
}

/// A folder on a disk that takes no time, where there is one.
pub fn quick_folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.expect("a folder")
}

/// Jobs and their threads.
pub struct Server {
    pub jobs: Arc<Jobs>,
    pub ids: Ids,
    pub log: Arc<Log>,
    worker: Worker,
}

impl Server {
    pub fn start(state: &Path, settings: Serve) -> Self {
        let since = Instant::now();
        // A process that another test starts has this one's files until it runs its own program.
        let store = loop {
            match FileStore::open(state) {
                Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy && since.elapsed().as_secs() < 5 => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                other => break other.expect("a store"),
            }
        };
        Server::with(Arc::new(store), settings, Pace::default())
    }

    pub fn with(store: Arc<dyn JobStore>, settings: Serve, pace: Pace) -> Self {
        let jobs = Jobs::open_at(store, settings, pace).expect("jobs");
        Server::of(jobs, Vec::new())
    }

    pub fn of(jobs: Arc<Jobs>, warm: Vec<Order>) -> Self {
        // They are made once a process, which takes longer than some runs: none waits for them.
        files();
        let log = Arc::new(Log::default());
        let ids = Ids::behind(jobs.last_id().as_ref());
        let device = ScriptedDevice::new(Arc::clone(&log));
        let worker = Worker::start(&jobs, Box::new(move || Ok(Box::new(device))), warm).expect("threads");
        Server { jobs, ids, log, worker }
    }

    /// Sends a request.
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

    /// Waits until it is so; not for ever.
    pub fn until(&self, what: &str, is_so: impl Fn(&Jobs) -> bool) {
        until(what, || is_so(&self.jobs));
    }

    /// Waits for the end of a job.
    pub fn wait(&self, id: &VideoId) -> Snapshot {
        self.until(&format!("{id} to end"), |jobs| jobs.get(&anyone(), id).expect("a job").record.state.is_terminal());
        self.get(id)
    }

    pub fn status(&self) -> Status {
        self.worker.status().borrow().clone()
    }

    /// Drains it, and waits for its end.
    pub fn stop(self) -> Result<(), String> {
        self.jobs.drain();
        self.worker.join()
    }

    /// Waits for its end.
    pub fn join(self) -> Result<(), String> {
        self.worker.join()
    }
}

/// Waits until it is so; not for ever.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(60), "waited a minute for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Files of a folder, with their sizes.
pub fn listed(folder: &Path) -> BTreeMap<String, u64> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|e| (e.file_name().to_string_lossy().into_owned(), e.metadata().map_or(0, |m| m.len()))).collect()
}

/// The device makes a video as the server's own recovery reads it.
#[needs(nothing)]
fn the_scripted_video_is_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    let job = Arc::new(request(&Ids::behind(None), "a"));
    let produced = ScriptedMade { job, tries: 0 }.write(folder.path()).expect("written");
    let clip = media::probe_clip(&folder.path().join("video.mp4"), Path::new("no-ffmpeg")).expect("a video");
    assert_eq!((clip.width, clip.height, clip.frames), (produced.width, produced.height, produced.num_frames));
    assert_eq!(listed(folder.path()).values().sum::<u64>(), produced.bytes);
}
