//! Tests of jobs on a real model. Their frames and samples must equal those of `ltx2 generate` with the job's sidecar,
//! also in a batch, after a resume, and with several processes.

use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::chat::{Answer, ChatServer};
use crate::support::{self, needs};
use ltx2::config::{Config, load};
use ltx2::runtime::processes::{Group, Launch, Timeouts};
use ltx2::serve::device::{GeneratedVideo, JobBatch, JobDevice, RunError, StepProgress, Stop};
use ltx2::serve::id::{Ids, VideoId};
use ltx2::serve::job::{AcceptedJob, JobPhase, JobState, VideoProperties};
use ltx2::serve::job_config::JobConfig;
use ltx2::serve::jobs::{Caller, Jobs};
use ltx2::serve::model_device::{factory_together, follow};
use ltx2::serve::store::FileStore;
use ltx2::serve::worker::Worker;
use serde_json::{Map, Value};

/// Returns the configuration of a server with the smallest test model.
fn config(state: &Path, set: &[&str]) -> Config {
    let own = [
        format!("runtime.compile_cache={}", support::programs().display()),
        format!("serve.state={}", state.display()),
        "serve.checkpoint=0s".into(),
    ];
    let set = own.into_iter().chain(set.iter().map(|s| (*s).to_string())).collect();
    // In a process that a test has started, the programs are already in the compile cache.
    let is_member = std::env::var_os("LTX2_TEST_MEMBER").is_some();
    let tiny = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny.yml");
    let files = vec![if is_member { tiny } else { support::tiny() }.to_string()];
    load(&ltx2::config::CliOverrides { files, set, ..Default::default() }).expect("a configuration").config
}

/// A device, with the state folder that contains its input files.
struct Server {
    state: tempfile::TempDir,
    device: Box<dyn JobDevice>,
    set: Vec<String>,
    ids: Ids,
}

impl Server {
    fn start(set: &[&str]) -> Self {
        Server::start_together(set, None)
    }

    fn start_together(set: &[&str], group: Option<Arc<Group>>) -> Self {
        let state = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(state.path().join("inputs")).expect("a folder");
        let device = factory_together(config(state.path(), set), None, group)().expect("a device");
        let set = set.iter().map(|s| (*s).to_string()).collect();
        Server { state, device, set, ids: Ids::after(None) }
    }

    /// Creates a job with the settings `set`, which override the server's, the shape key `shape` and the input files
    /// `inputs`.
    fn job(&self, shape: &str, set: &[&str], inputs: &[&str]) -> Arc<AcceptedJob> {
        let all: Vec<&str> = self.set.iter().map(String::as_str).chain(set.iter().copied()).collect();
        let mut config = config(self.state.path(), &all);
        // Input files have the paths that the store would give them.
        let names = inputs.iter().map(|name| (self.state.path().join("inputs").join(name), *name));
        for (path, name) in names {
            let path = path.display().to_string();
            let request = &mut config.request;
            request.images.iter_mut().filter(|i| i.path == path).for_each(|i| i.path = name.into());
            request.audio.iter_mut().filter(|a| a.path == path).for_each(|a| a.path = name.into());
            request.video.iter_mut().filter(|v| **v == path).for_each(|v| *v = name.into());
            request.reference_videos.iter_mut().filter(|v| v.path == path).for_each(|v| v.path = name.into());
        }
        Arc::new(AcceptedJob {
            id: self.ids.next().expect("an id"),
            created_at: 0,
            owner: String::new(),
            model: "tiny".into(),
            config: JobConfig::new(&config).expect("JSON"),
            expected: None,
            fields: Map::new(),
            seconds: None,
            user: None,
            metadata: Map::new(),
            warnings: Vec::new(),
            remixed_from: None,
            inputs: inputs.iter().map(|name| (*name).into()).collect(),
            body_sha256: String::new(),
            idempotency_key: None,
            traceparent: None,
            shape: shape.into(),
            batch_key: String::new(),
        })
    }

    /// Copies an input file to the folder where the store keeps input files; returns its path there.
    fn gives(&self, file: &Path) -> String {
        let name = file.file_name().and_then(|name| name.to_str()).expect("a name");
        let kept = self.state.path().join("inputs").join(name);
        std::fs::copy(file, &kept).expect("copied");
        kept.display().to_string()
    }

    fn run(&mut self, order: &JobBatch) -> Vec<Box<dyn GeneratedVideo>> {
        self.device.run(order, &mut |_| ControlFlow::Continue(())).expect("runs")
    }

    /// Runs a job and writes its video.
    fn make(&mut self, job: &Arc<AcceptedJob>) -> Video {
        let made = self.run(&order(std::slice::from_ref(job))).pop().expect("a video");
        Video::write(made)
    }
}

fn order(jobs: &[Arc<AcceptedJob>]) -> JobBatch {
    JobBatch { jobs: jobs.to_vec(), steps: None, resume: false }
}

/// A video that has been written.
struct Video {
    folder: tempfile::TempDir,
    produced: VideoProperties,
}

impl Video {
    fn write(mut made: Box<dyn GeneratedVideo>) -> Video {
        let folder = tempfile::tempdir().expect("a folder");
        let produced = made.write(folder.path()).expect("written");
        Video { folder, produced }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn hashes(&self) -> [&str; 2] {
        [&self.produced.frames_sha256, &self.produced.samples_sha256]
    }

    fn sidecar(&self) -> Value {
        serde_json::from_slice(&std::fs::read(self.path("video.json")).expect("a sidecar")).expect("JSON")
    }

    /// Checks that `ltx2 generate` with the sidecar gives the same frames and samples.
    fn assert_matches_generate(&self) {
        let again = self.path("again.mp4");
        let ran = support::ltx2().args(["generate", "-c"]).arg(self.path("video.json")).arg("-o").arg(&again).output();
        let ran = ran.expect("the binary runs");
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        let sidecar = std::fs::read(self.path("again.json")).expect("a sidecar");
        let sidecar: Value = serde_json::from_slice(&sidecar).expect("JSON");
        let hashes = ["frames", "samples"].map(|key| sidecar["sha256"][key].as_str().unwrap_or_default().to_string());
        assert_eq!(hashes.each_ref().map(String::as_str), self.hashes());
        if self.produced.timings["videos_together"] == 1 {
            assert_eq!(self.sidecar()["programs"], sidecar["programs"], "programs are the job's own");
        }
    }
}

/// The test enables XLA's newer fusion emitters, as users do: with the older ones, the order of summation depends on
/// the batch size.
#[needs(cpu)]
fn job_matches_generate_alone_and_in_a_batch() {
    let mut member = Command::new(std::env::current_exe().expect("a path"));
    member.args(["nano::child_process_runs_its_role", "--exact", "--nocapture", "--test-threads", "1"]);
    member.env("LTX2_TEST_MEMBER", "batches").env("XLA_FLAGS", "");
    let out = member.output().expect("starts");
    assert!(out.status.success(), "{}\n{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
}

fn compare_alone_and_in_a_batch() {
    let mut server = Server::start(&["serve.max_batch=2"]);
    let prompts = [["request.prompt=a red ball", "request.seed=3"], ["request.prompt=rain", "request.seed=4"]];
    let jobs = prompts.map(|set| server.job("small", &set, &[]));
    let alone = jobs.each_ref().map(|job| server.make(job));
    alone[0].assert_matches_generate();
    let produced = &alone[0].produced;
    assert_eq!((produced.width, produced.height, produced.num_frames, produced.fps), (64, 96, 9, 24.0));
    assert!(produced.timings["denoise"]["total"].as_f64().is_some_and(|s| s > 0.0), "{}", produced.timings);
    let names = ["video.mp4", "video.json", "thumb.jpg", "sprite.jpg", "audio.wav"];
    let bytes: u64 = names.iter().map(|name| alone[0].path(name).metadata().expect("a file").len()).sum();
    assert_eq!(produced.bytes, bytes);
    let size = |name: &str| image_size(&alone[0].path(name));
    assert_eq!((size("thumb.jpg"), size("sprite.jpg")), ([64, 96], [5 * 64, 5 * 96]));
    let sound = ltx2::media::read_wav(&alone[0].path("audio.wav")).expect("a WAV file");
    assert!(sound.samples().iter().any(|sample| *sample != 0.0));
    assert_eq!(sound.len(), (9 * sound.rate() as usize).div_ceil(24), "as long as the video");
    assert_ne!(alone[0].hashes(), alone[1].hashes());

    let together: Vec<Video> = server.run(&order(&jobs)).into_iter().map(Video::write).collect();
    for (alone, together) in alone.iter().zip(&together) {
        assert_eq!(together.hashes(), alone.hashes(), "a neighbour changes no bit");
        assert_eq!(together.produced.timings["videos_together"], 2);
    }
    together[1].assert_matches_generate();

    // Previews of both videos arrive after each step, and change no bit.
    let shown: Arc<Mutex<Vec<(VideoId, usize)>>> = Arc::default();
    let all = Arc::clone(&shown);
    server.device.send_previews(Arc::new(move |id, preview| {
        assert_eq!((preview.frames, preview.columns, preview.width, preview.height), (2, 2, 64 / 8, 96 / 8));
        assert!(preview.jpeg.starts_with(&[0xff, 0xd8]) && preview.at.steps == 3);
        all.lock().expect("previews").push((id.clone(), preview.at.step));
    }));
    let jobs = prompts.map(|set| server.job("small", &[set[0], set[1], "output.preview_every=1"], &[]));
    let again: Vec<Video> = server.run(&order(&jobs)).into_iter().map(Video::write).collect();
    for ((job, alone), again) in jobs.iter().zip(&alone).zip(&again) {
        assert_eq!(again.hashes(), alone.hashes(), "previews change no bit");
        let shown = shown.lock().expect("previews");
        let steps: Vec<usize> = shown.iter().filter(|(id, _)| *id == job.id).map(|(_, step)| *step).collect();
        assert_eq!(steps, [1, 2, 3]);
    }
}

fn image_size(path: &Path) -> [usize; 2] {
    let bytes = std::fs::read(path).expect("an image");
    // The frame header of a JPEG contains the height and then the width.
    let at = bytes.windows(2).position(|pair| pair == [0xff, 0xc0]).expect("a baseline JPEG");
    let word = |at: usize| usize::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]));
    [word(at + 7), word(at + 5)]
}

/// The operator's configuration has the chat server; a job only requests the enhancement.
#[needs(cpu)]
fn enhanced_job_equals_job_with_the_enhanced_prompt() {
    let chat = ChatServer::start([Answer::Text("A blue ball.")]);
    let keys = chat.keys("enhance.timeout=20");
    let mut server = Server::start(&keys.each_ref().map(String::as_str));
    let asked = server.job("small", &["request.prompt=a ball", "request.enhance_prompt=true", "request.seed=3"], &[]);
    let enhanced = server.make(&asked);
    assert_eq!(enhanced.produced.enhanced_prompt.as_deref(), Some("A blue ball."));
    let sidecar = enhanced.sidecar();
    assert_eq!(sidecar["config"]["request"]["prompt"], "A blue ball.");
    let recorded = serde_json::json!([{"prompt": "a ball", "enhanced": "A blue ball.", "seed": 3}]);
    assert_eq!(sidecar["enhancement"]["prompts"], recorded);
    let plain = server.make(&server.job("small", &["request.prompt=A blue ball.", "request.seed=3"], &[]));
    assert_eq!((plain.hashes(), &plain.produced.enhanced_prompt), (enhanced.hashes(), &None));
    assert_eq!(chat.requests().len(), 1, "only a job that requests it is enhanced");

    // A failure names neither the address nor the answer, and the next job can run.
    chat.answer(Answer::Raw("500 Internal Server Error", "secret".into()));
    let failed = server.device.run(&order(std::slice::from_ref(&asked)), &mut |_| ControlFlow::Continue(()));
    let Err(RunError::Job(failure)) = failed else { panic!("the job succeeded") };
    assert_eq!(failure.code, "enhancement_failed");
    assert!(!failure.message.contains("secret") && !failure.message.contains("127.0.0.1"), "{}", failure.message);

    // Only the job whose prompt failed asks again when the jobs of its batch run one by one.
    let refused = Answer::Raw("500 Internal Server Error", "secret".into());
    chat.answers([Answer::Text("A blue ball."), refused, Answer::Text("A dog.")]);
    let jobs = ["a ball", "a dog"].map(|prompt| {
        let prompt = format!("request.prompt={prompt}");
        server.job("small", &[&prompt, "request.enhance_prompt=true", "request.seed=3"], &[])
    });
    chat.requests();
    let failed = server.device.run(&order(&jobs), &mut |_| ControlFlow::Continue(()));
    assert!(matches!(failed, Err(RunError::Job(failure)) if failure.code == "enhancement_failed"));
    assert_eq!(chat.requests().len(), 2);
    assert_eq!(server.make(&jobs[0]).hashes(), enhanced.hashes());
    assert!(chat.requests().is_empty(), "the answer is kept");
    assert_eq!(server.make(&jobs[1]).produced.enhanced_prompt.as_deref(), Some("A dog."));

    // A job that waits for the chat server can be cancelled.
    chat.answer(Answer::Silence(Duration::from_secs(15)));
    let (since, mut reports) = (Instant::now(), 0);
    let ended = server.device.run(&order(&[asked]), &mut |moment| {
        reports += usize::from(moment.stage == JobPhase::PromptEnhancer);
        if reports == 3 { ControlFlow::Break(Stop::Cancelled) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(ended, Err(RunError::Stopped(Stop::Cancelled))), "the job was not cancelled");
    assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
}

/// The chat server answers neither in time nor with an error.
#[needs(cpu)]
fn job_finishes_before_an_earlier_job_whose_chat_server_is_silent() {
    let chat = ChatServer::start([Answer::Silence(Duration::from_secs(300))]);
    let keys = chat.keys("enhance.timeout=300");
    let keys = keys.each_ref().map(String::as_str);
    // Creates the jobs only.
    let server = Server::start(&keys);
    let enhanced = server.job("small", &["request.prompt=a ball", "request.enhance_prompt=true"], &[]);
    let plain = server.job("small", &["request.prompt=a cube"], &[]);
    drop(server);
    let state = tempfile::tempdir().expect("a folder");
    let settings = config(state.path(), &keys);
    let store = Arc::new(FileStore::open(state.path()).expect("a store"));
    let jobs = Jobs::open(store, settings.serve.clone()).expect("jobs");
    let worker = Worker::start(&jobs, Box::new(factory_together(settings, None, None)), Vec::new()).expect("threads");
    let anyone = Caller { name: String::new(), sees_all: true };
    for job in [&enhanced, &plain] {
        let ticket = jobs.admit(&anyone).expect("a place");
        jobs.submit(ticket, AcceptedJob::clone(job)).expect("submitted");
    }
    let state_of = |job: &AcceptedJob| jobs.get(&anyone, &job.id).expect("a job").record.state;
    let since = Instant::now();
    while !state_of(&plain).is_terminal() {
        assert!(since.elapsed() < Duration::from_secs(240), "the job waits for the chat server of another one");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!((state_of(&plain), state_of(&enhanced)), (JobState::Completed, JobState::Queued));
    assert_eq!(chat.requests().len(), 1);
    jobs.drain();
    worker.join().expect("stops");
}

/// The device uses the answer to the queued job.
#[needs(cpu)]
fn prepared_job_asks_its_chat_server_once() {
    let chat = ChatServer::start([Answer::Text("A blue ball.")]);
    let keys = chat.keys("enhance.timeout=20");
    let mut server = Server::start(&keys.each_ref().map(String::as_str));
    let job = server.job("small", &["request.prompt=a ball", "request.enhance_prompt=true"], &[]);
    let preparer = server.device.preparer().expect("asks chat servers");
    preparer.prepare(&job, Path::new("none"), &|| true);
    assert_eq!(chat.requests().len(), 1);
    chat.answer(Answer::Text("A red ball."));
    assert_eq!(server.make(&job).produced.enhanced_prompt.as_deref(), Some("A blue ball."));
    assert!(chat.requests().is_empty());
    // The answer to a job that is cancelled is not waited for.
    chat.answer(Answer::Silence(Duration::from_secs(15)));
    let since = Instant::now();
    preparer.prepare(&server.job("small", &["request.enhance_prompt=true"], &[]), Path::new("none"), &|| false);
    assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
}

#[needs(cpu)]
fn failed_video_write_can_be_retried() {
    let mut server = Server::start(&[]);
    let job = server.job("small", &["output.audio=false"], &[]);
    let mut made = server.run(&order(&[job])).pop().expect("a video");
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().join("job");
    std::fs::write(&place, "a file").expect("written");
    let failure = made.write(&place).expect_err("no folder");
    assert_eq!(failure.code, "internal");
    assert!(!failure.message.contains('/'), "{failure}");
    std::fs::remove_file(&place).expect("removed");
    std::fs::create_dir(&place).expect("a folder");
    let produced = made.write(&place).expect("written");
    let video = Video { folder, produced };
    assert_eq!(video.produced.num_frames, 9);
    let mp4 = std::fs::read(place.join("video.mp4")).expect("a video");
    let has = |name: &[u8]| mp4.windows(4).any(|word| word == name);
    assert!(has(b"avc1") && !has(b"mp4a"), "the sound track is left out");
}

/// Runs a batch and stops it with `why` at a stage and step. Returns the progress reports until then.
fn stop_at(server: &mut Server, order: &JobBatch, stage: JobPhase, step: usize, why: Stop) -> Vec<StepProgress> {
    let mut told = Vec::new();
    let ended = server.device.run(order, &mut |moment| {
        told.push(moment);
        if (moment.stage, moment.step) == (stage, step) { ControlFlow::Break(why) } else { ControlFlow::Continue(()) }
    });
    match ended {
        Err(RunError::Stopped(stopped)) => assert_eq!(stopped, why),
        Ok(_) => panic!("{stage:?} {step}: the run continued; {told:?}"),
        Err(other) => panic!("{stage:?} {step}: {other:?}"),
    }
    told
}

#[needs(cpu)]
fn cancelled_job_stops_after_the_current_program() {
    // Before its first video, a new device runs one step per device call.
    let mut server = Server::start(&[]);
    let job = server.job("small", &["request.seed=3"], &[]);
    let steps = server.state.path().join("steps.safetensors");
    let order = JobBatch { jobs: vec![job.clone()], steps: Some(steps.clone()), resume: false };
    let moments =
        [(JobPhase::TextEncoder, 0), (JobPhase::Denoise, 1), (JobPhase::VideoDecoder, 0), (JobPhase::AudioDecoder, 0)];
    for (stage, step) in moments {
        let told = stop_at(&mut server, &order, stage, step, Stop::Cancelled);
        assert_eq!(told.last().map(|moment| moment.stage), Some(stage), "nothing comes behind it");
        assert!(!steps.exists(), "{stage:?}: nothing is kept");
    }
    server.make(&job).assert_matches_generate();
}

/// When the server drains, it saves the finished steps, and another process resumes after them.
#[needs(cpu)]
fn drained_job_resumes_at_its_step() {
    let set = ["pipeline=two_stage", "request.height=64"];
    let mut undisturbed: Option<Video> = None;
    for (stage, step) in [(JobPhase::Denoise, 1), (JobPhase::Refine, 0), (JobPhase::Refine, 1)] {
        // Before its first video, a new device runs one step per device call.
        let mut server = Server::start(&set);
        let job = server.job("two", &["request.seed=3"], &[]);
        let steps = server.state.path().join("steps.safetensors");
        let first = JobBatch { jobs: vec![job.clone()], steps: Some(steps.clone()), resume: false };
        stop_at(&mut server, &first, stage, step, Stop::Draining);
        let mut began = Vec::new();
        let again = JobBatch { resume: true, ..first };
        let made = server.device.run(&again, &mut |moment| {
            began.push((moment.stage, moment.step));
            ControlFlow::Continue(())
        });
        let video = Video::write(made.expect("runs").pop().expect("a video"));
        let with_steps = |(stage, _): &&(JobPhase, usize)| matches!(stage, JobPhase::Denoise | JobPhase::Refine);
        assert_eq!(began.iter().find(with_steps), Some(&(stage, step)), "earlier steps were run again");
        let undisturbed = undisturbed.get_or_insert_with(|| server.make(&job));
        assert_eq!(video.hashes(), undisturbed.hashes(), "{stage:?} {step}");
        assert!(video.produced.warnings.is_empty());
    }
    let mut server = Server::start(&set);
    let job = server.job("two", &["request.seed=3"], &[]);
    let steps = server.state.path().join("steps.safetensors");
    // The checkpoint of another request is not used, and the client receives a warning.
    let first = JobBatch { jobs: vec![job.clone()], steps: Some(steps.clone()), resume: false };
    stop_at(&mut server, &first, JobPhase::Denoise, 1, Stop::Draining);
    let other = server.job("two", &["request.seed=4"], &[]);
    let made = server.run(&JobBatch { jobs: vec![other], steps: Some(steps), resume: true });
    let warnings = Video::write(made.into_iter().next().expect("a video")).produced.warnings;
    assert!(warnings.len() == 1 && warnings[0].contains("another model or release"), "{warnings:?}");
}

/// Runs in a child process: a server that another test kills, or one of the two processes of a server.
#[needs(member)]
fn child_process_runs_its_role() {
    let role = std::env::var("LTX2_TEST_MEMBER").expect("a role");
    let parts: Vec<&str> = role.split_whitespace().collect();
    match parts[..] {
        ["batches"] => compare_alone_and_in_a_batch(),
        ["alone", state] => {
            let mut server = Server::start(&[]);
            let jobs = vec![server.job("small", &["request.seed=3", "sampler.steps=6"], &[])];
            server.run(&JobBatch { jobs, steps: Some(Path::new(state).join("steps.safetensors")), resume: false });
        }
        [role, coordinator] => {
            let launch = Launch {
                id: usize::from(role == "follows"),
                count: 2,
                coordinator: coordinator.into(),
                how: "test".into(),
            };
            let timeouts = Timeouts { start: Duration::from_secs(300), lost: Duration::from_secs(60) };
            let end = |message: &str| {
                eprintln!("error: {message}");
                std::process::exit(1)
            };
            let group = Arc::new(Group::join(&launch, timeouts, Box::new(end)).expect("joins"));
            match role {
                "follows" => {
                    let state = tempfile::tempdir().expect("a folder");
                    follow(&config(state.path(), &[]), &group).expect("follows");
                }
                _ => leads(&group),
            }
            group.finish();
        }
        _ => panic!("{role}"),
    }
}

/// Runs as process 0: generates a video from an image, cancels a job, generates two more videos, and prints the
/// results.
fn leads(group: &Arc<Group>) {
    let mut server = Server::start_together(&[], Some(group.clone()));
    let image = server.gives(Path::new("tests/fixtures/images/shapes.png"));
    let set = format!("request.images=[{{path: {image}, frame: 0, strength: 1.0, crf: 0}}]");
    let given = server.job("image", &["pipeline=image_to_video", &set], &["shapes.png"]);
    let jobs = [4, 3, 5].map(|seed| server.job("small", &[&format!("request.seed={seed}")], &[]));
    let mut keys = Vec::new();
    // The output starts with a newline, because the current line contains the name of the test.
    println!("\nmade {}", server.make(&given).hashes().join(" "));
    for (n, job) in jobs.iter().enumerate() {
        if n == 0 {
            stop_at(&mut server, &order(std::slice::from_ref(job)), JobPhase::Denoise, 1, Stop::Cancelled);
            println!("cancelled");
        } else {
            println!("made {}", server.make(job).hashes().join(" "));
        }
        keys.push(group.served_keys().expect("process 0 serves the store"));
    }
    println!("keys {keys:?}");
}

/// Both CPU processes compute the entire video, so they only have to synchronize.
#[needs(cpu)]
fn two_processes_form_one_server() {
    let mut server = Server::start(&[]);
    let image = server.gives(Path::new("tests/fixtures/images/shapes.png"));
    let set = format!("request.images=[{{path: {image}, frame: 0, strength: 1.0, crf: 0}}]");
    let given = server.job("image", &["pipeline=image_to_video", &set], &["shapes.png"]);
    let jobs = [3, 5].map(|seed| server.job("small", &[&format!("request.seed={seed}")], &[]));
    let jobs = [given].into_iter().chain(jobs);
    let want: Vec<String> = jobs.map(|job| format!("made {}", server.make(&job).hashes().join(" "))).collect();
    // The processes find the programs in the compile cache.
    drop(server);

    let place =
        ltx2::runtime::processes::store::StoreServer::start("127.0.0.1:0").expect("listens").address().to_string();
    let start = |role: &str| {
        let mut member = Command::new(std::env::current_exe().expect("a path"));
        member.args(["nano::child_process_runs_its_role", "--exact", "--nocapture", "--test-threads", "1"]);
        member.env("LTX2_TEST_MEMBER", format!("{role} {place}")).env("LTX2_REHEARSE_PROCESSES", "1");
        Ends(member.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().expect("starts"))
    };
    let (mut first, mut second) = (start("leads"), start("follows"));
    let said: Vec<String> =
        BufReader::new(first.0.stdout.take().expect("piped")).lines().map_while(Result::ok).collect();
    assert!(first.0.wait().expect("ends").success(), "{said:#?}");
    assert!(second.0.wait().expect("ends").success(), "the other ends with it");
    let made: Vec<&String> = said.iter().filter(|line| line.starts_with("made ")).collect();
    assert_eq!(made, want.iter().collect::<Vec<_>>());
    assert!(said.contains(&"cancelled".to_string()), "{said:#?}");
    let keys = said.iter().find_map(|line| line.strip_prefix("keys [")).expect("keys");
    let keys: Vec<usize> =
        keys.trim_end_matches(']').split(", ").map(|count| count.parse().expect("a number")).collect();
    // A job uses many gather operations. Each has three keys in the coordination store until it completes, and one
    // process may be one gather ahead of the other.
    let [least, most] = [keys.iter().min(), keys.iter().max()].map(|count| *count.expect("a count"));
    assert!(keys.len() == 3 && most - least <= 3, "keys of the store grow: {keys:?}");
}

struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[needs(cpu)]
fn killed_job_resumes_at_its_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let _ = support::tiny();
    let mut member = Command::new(std::env::current_exe().expect("a path"));
    member.args(["nano::child_process_runs_its_role", "--exact", "--nocapture", "--test-threads", "1"]);
    member.env("LTX2_TEST_MEMBER", format!("alone {}", folder.path().display()));
    member.env("LTX2_FAILPOINT", "step 3").stdout(Stdio::null()).stderr(Stdio::piped());
    let mut member = Ends(member.spawn().expect("starts"));
    let lines = BufReader::new(member.0.stderr.take().expect("piped")).lines().map_while(Result::ok);
    let mut said = Vec::new();
    let is_there = lines.inspect(|line| said.push(line.clone())).any(|line| line == "at step 3");
    assert!(is_there, "{said:#?}");
    // Dropping the guard kills the process during the fourth step.
    drop(member);

    let mut server = Server::start(&[]);
    let job = server.job("small", &["request.seed=3", "sampler.steps=6"], &[]);
    let steps = Some(folder.path().join("steps.safetensors"));
    let mut began = None;
    let made = server.device.run(&JobBatch { jobs: vec![job.clone()], steps, resume: true }, &mut |moment| {
        if moment.stage == JobPhase::Denoise {
            began.get_or_insert(moment.step);
        }
        ControlFlow::Continue(())
    });
    let video = Video::write(made.expect("runs").pop().expect("a video"));
    assert_eq!((began, video.produced.warnings.len()), (Some(3), 0));
    assert_eq!(server.device.figures().resumed, 1);
    assert_eq!(video.hashes(), server.make(&job).hashes());
    video.assert_matches_generate();
}

/// Returns how many times the denoising program had been loaded when the video was generated.
fn loaded(video: &Video) -> u64 {
    let program = &video.sidecar()["timings"]["programs"]["denoise"];
    ["compiles", "cache_hits"].iter().filter_map(|key| program[*key].as_u64()).sum()
}

#[needs(cpu)]
fn shapes_are_loaded_and_evicted() {
    let mut server = Server::start(&[]);
    let (tall, low) = (server.job("tall", &[], &[]), server.job("low", &["request.height=64"], &[]));
    server.device.warm(&order(std::slice::from_ref(&tall))).expect("warms");
    let first = server.make(&tall);
    let other = server.make(&low);
    assert_eq!([first.produced.height, other.produced.height], [96, 64]);
    other.assert_matches_generate();
    let back = server.make(&tall);
    assert_eq!(back.hashes(), first.hashes());
    assert_eq!([loaded(&first), loaded(&other), loaded(&back)], [1, 2, 2], "a loaded program is loaded once");
    server.device.evict("tall");
    let again = server.make(&tall);
    assert_eq!((again.hashes(), loaded(&again)), (first.hashes(), 3), "the evicted shape is loaded again");
    let kept = server.make(&low);
    assert_eq!((kept.hashes(), loaded(&kept)), (other.hashes(), 3), "no other shape is loaded");
}

#[needs(cpu)]
fn lora_job_leaves_the_model_unchanged() {
    let mut server = Server::start(&[]);
    let plain = server.job("small", &[], &[]);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/lora/ic_tiny_a_plain.safetensors");
    let with = |strength: f64| format!("model.loras=[{{path: {path}, strength: {strength}}}]");
    let [one, two] = [1.0, 4.0].map(|strength| server.job("small", &[&with(strength)], &[]));
    let before = server.make(&plain);
    let merged = [server.make(&one), server.make(&two)];
    assert_ne!(merged[0].hashes(), before.hashes());
    assert_ne!(merged[0].hashes(), merged[1].hashes());
    merged[1].assert_matches_generate();
    assert_eq!(server.make(&plain).hashes(), before.hashes());
}

/// Returns the number of compiles and cache hits, and the bytes loaded.
fn set_up(video: &Video) -> [u64; 2] {
    let timings = &video.sidecar()["timings"];
    let programs = timings["programs"].as_object().expect("programs").values();
    let made = programs.flat_map(|program| [&program["compiles"], &program["cache_hits"]]).filter_map(Value::as_u64);
    let spans = timings["timeline"].as_array().expect("spans").iter().filter(|span| span["work"] == "load");
    [made.sum(), spans.filter_map(|span| span["bytes"].as_u64()).sum()]
}

#[needs(cpu)]
fn added_loras_are_switched_without_compiling_or_reading_weights() {
    if !support::full() {
        return;
    }
    let mut server = Server::start(&["model.lora_merge=exact"]);
    let with = |file: &str, strength: f64, apply: &str| {
        let path = format!("{}/tests/fixtures/lora/{file}.safetensors", env!("CARGO_MANIFEST_DIR"));
        format!("model.loras=[{{path: {path}, strength: {strength}, apply: {apply}}}]")
    };
    let plain = server.job("small", &[], &[]);
    let before = server.make(&plain);
    let [one, other, stronger] = [("ic_tiny_a_plain", 1.0), ("ic_tiny_a", 0.5), ("ic_tiny_a", 2.0)]
        .map(|(file, strength)| server.job("added", &[&with(file, strength, "add")], &[]));
    let first = server.make(&one);
    assert_ne!(first.hashes(), before.hashes());
    first.assert_matches_generate();
    assert_eq!(first.sidecar()["config"]["model"]["loras"][0]["apply"], "add");
    let [programs, matrices] = set_up(&first);
    let weights = before.sidecar()["timings"]["parameter_bytes"].as_u64().expect("bytes");
    assert!(matrices > 0 && 4 * matrices < weights, "{matrices} of {weights} bytes");
    let mut seen = vec![first.hashes().map(String::from)];
    for job in [&other, &stronger, &other] {
        let video = server.make(job);
        let [now, bytes] = set_up(&video);
        assert_eq!(now, programs, "nothing is compiled");
        assert!(bytes > 0 && 4 * bytes < matrices, "{bytes} of {matrices} bytes: only the matrices of the LoRA");
        seen.push(video.hashes().map(String::from));
    }
    assert!(seen[1] != seen[0] && seen[2] != seen[1] && seen[3] == seen[1], "{seen:?}");
    // The weights were never changed.
    let again = server.make(&plain);
    assert_eq!((again.hashes(), set_up(&again)), (before.hashes(), [programs, 0]));

    // A warm-up with one LoRA compiles the programs for all LoRAs of its rank.
    let mut warm = Server::start(&["model.lora_merge=exact"]);
    let [one, other] = ["ic_tiny_a_plain", "ic_tiny_a"].map(|file| warm.job("added", &[&with(file, 1.0, "add")], &[]));
    warm.device.warm(&order(&[other])).expect("warms");
    let figures = warm.device.figures();
    assert!(figures.compiled + figures.cached > 0);
    assert_eq!(warm.make(&one).hashes(), first.hashes());
    let figures = warm.device.figures();
    assert_eq!((figures.compiled, figures.cached), (0, 0), "nothing is compiled for the first request");
}

#[needs(cpu)]
fn served_loras_are_checked_before_the_server_is_ready() {
    let state = tempfile::tempdir().expect("a folder");
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/lora");
    // A LoRA of a block that the model does not have.
    let unfit = state.path().join("unfit.safetensors");
    let mut bytes = std::fs::read(fixtures.join("ic_tiny_a_plain.safetensors")).expect("a file");
    let places: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(b"transformer_blocks.0.")).collect();
    places.iter().for_each(|at| bytes[at + "transformer_blocks.".len()] = b'9');
    std::fs::write(&unfit, bytes).expect("written");
    for (path, said) in [(fixtures.join("merged.safetensors"), "merged.safetensors"), (unfit, "transformer_blocks.9.")]
    {
        let set = format!("serve.loras={{style: {{path: {}}}}}", path.display());
        let refused = factory_together(config(state.path(), &[&set]), None, None)().err().map(|e| e.to_string());
        assert!(refused.as_ref().is_some_and(|error| error.contains(said)), "{said}: {refused:?}");
    }
}

#[needs(cpu)]
fn image_and_audio_jobs_match_generate() {
    let mut server = Server::start(&[]);
    let image = server.gives(Path::new("tests/fixtures/images/shapes.png"));
    let set = format!("request.images=[{{path: {image}, frame: 0, strength: 1.0, crf: 0}}]");
    let job = server.job("image", &["pipeline=image_to_video", &set], &["shapes.png"]);
    let video = server.make(&job);
    let request = &video.sidecar()["config"]["request"];
    assert_eq!(request["images"][0]["path"], image.as_str(), "the sidecar records the path");
    video.assert_matches_generate();

    let sound = server.gives(Path::new("tests/fixtures/sounds/tone_u8.wav"));
    let set = format!("request.audio={{path: {sound}}}");
    server.make(&server.job("sound", &["pipeline=audio_to_video", &set], &["tone_u8.wav"])).assert_matches_generate();

    // A job fails if its input file is not an image, and later jobs are not affected.
    std::fs::write(server.state.path().join("inputs/shapes.png"), "no image").expect("written");
    match server.device.run(&order(&[job]), &mut |_| ControlFlow::Continue(())) {
        Err(RunError::Job(failure)) => {
            assert!(failure.code == "invalid_image" && !failure.message.contains('/'), "{failure:?}");
        }
        other => panic!("{:?}", other.map(|made| made.len())),
    }
    server.make(&server.job("small", &[], &[]));
}

/// Writes a safetensors file with zeros of the shapes that the tiny model needs; returns its path.
fn text_embeddings(path: &Path) -> String {
    let bytes = vec![0; 4 * 64 * 32];
    let view = |channels: usize| {
        let own = &bytes[..4 * 64 * channels];
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![64, channels], own).expect("a tensor")
    };
    let tensors = [("video_context", view(32)), ("audio_context", view(16))];
    std::fs::write(path, safetensors::serialize(tensors, None).expect("bytes")).expect("written");
    path.display().to_string()
}

/// The operator sets the text embeddings and the codec. The EXR files equal those of `ltx2 generate`.
#[needs(cpu, ffmpeg, full)]
fn hdr_job_writes_preview_video_and_exr_archive() {
    let folder = tempfile::tempdir().expect("a folder");
    let clip = folder.path().join("clip.mp4");
    let byte = |(f, y, x, c)| ((f * 13 + y * 3 + x * 5 + c * 70) % 256) as u8;
    let frames = ltx2::media::Frames::new(ndarray::Array4::from_shape_fn((17, 100, 128, 3), byte)).expect("frames");
    ltx2::media::write_mp4(&clip, &frames, 24.0, None, &ltx2::media::Mp4Options::default()).expect("a video");
    let embeddings = format!("request.text_embeddings={}", text_embeddings(&folder.path().join("scene.safetensors")));
    let tiny = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models");
    let (model, upsampler) = (format!("model.path={tiny}/tiny_2_3"), format!("model.upsampler={tiny}/upsampler_plain"));
    let set = [
        &*model,
        &upsampler,
        &embeddings,
        "request={width: 128, height: 128, num_frames: 17, max_sequence_length: 64}",
        "runtime={dtype: f32, xla_flags: {xla_backend_optimization_level: 0}}",
        "serve.pipelines=[hdr]",
        "guidance.video={cfg: 1, stg: 0, modality: 1, rescale: 0}",
        "output.hdr_codec=av1",
    ];
    let mut server = Server::start(&set);
    let reference = format!("request.reference_videos=[{{path: {}}}]", server.gives(&clip));
    let lora = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/lora/hdr_tiny_2_3.safetensors");
    let lora = format!("model.loras=[{{path: {lora}}}]");
    let own = ["pipeline=hdr", "output.audio=false", &*reference, &*lora];
    let made = server.make(&server.job("hdr", &own, &["clip.mp4"]));
    let names = ["video.mp4", "video.json", "thumb.jpg", "sprite.jpg", "video_hdr.mp4", "video_exr.zip"];
    let mut left: Vec<_> =
        std::fs::read_dir(made.folder.path()).expect("a folder").map(|e| e.expect("a file").file_name()).collect();
    left.sort();
    let mut wanted = names;
    wanted.sort_unstable();
    assert_eq!(left, wanted);
    let bytes: u64 = names.iter().map(|name| made.path(name).metadata().expect("a file").len()).sum();
    assert_eq!((made.produced.bytes, &made.produced.warnings[..]), (bytes, &[][..]));
    let mut archive =
        zip::ZipArchive::new(std::fs::File::open(made.path("video_exr.zip")).expect("a file")).expect("an archive");
    assert_eq!(archive.len(), 17);
    made.assert_matches_generate();
    let again: Value = serde_json::from_slice(&std::fs::read(made.path("again.json")).expect("a file")).expect("JSON");
    assert_eq!(again["sha256"]["hdr"], made.sidecar()["sha256"]["hdr"]);
    for frame in [0, 16] {
        let name = format!("frame_{frame:05}.exr");
        let mut packed = Vec::new();
        std::io::Read::read_to_end(&mut archive.by_name(&name).expect("a frame"), &mut packed).expect("bytes");
        assert_eq!(packed, std::fs::read(made.path(&format!("again_exr/{name}"))).expect("a file"));
    }
}
