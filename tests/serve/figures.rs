//! Benchmarks of the server on a scripted device, without a model. Each compares the measured overhead to a goal. `make
//! serve-load` runs these tests alone, writes their table, and fails if a goal is missed, as does a test that is run
//! alone.

use std::io::Cursor;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ltx2::serve::device::{
    BatchWatch, Figures as DeviceFigures, GeneratedVideo, JobBatch, JobDevice, RunError, StepProgress,
};
use ltx2::serve::error::Failure;
use ltx2::serve::job::{JobPhase, VideoProperties};
use ltx2::serve::server::{Server, ServerOptions};
use ltx2::serve::store::Variant;
use serde_json::{Value, json};

use crate::load::run_in_separate_process;
use crate::scripted;
use crate::site::{Client, Events, started};
use crate::support::harness::note_figure as note;
use crate::support::needs;

/// Measured times in milliseconds, sorted.
struct Times(Vec<f64>);

impl Times {
    fn from_durations(times: impl IntoIterator<Item = Duration>) -> Self {
        let mut ms: Vec<f64> = times.into_iter().map(|time| time.as_secs_f64() * 1e3).collect();
        ms.sort_by(f64::total_cmp);
        assert!(!ms.is_empty());
        Times(ms)
    }

    fn at(&self, share: f64) -> f64 {
        self.0[((self.0.len() - 1) as f64 * share).round() as usize]
    }

    /// Records the median and the 99th percentile together with their goals.
    fn note(&self, what: &str, median: f64, most: f64) {
        let (p50, p99) = (self.at(0.5), self.at(0.99));
        let figure = format!("{p50:.2} ms, {p99:.2} ms ({} times)", self.0.len());
        note(what, &format!("median {median} ms, 99 % {most} ms"), &figure, p50 < median && p99 < most);
    }
}

/// Times that the device and its videos record.
#[derive(Default)]
struct Log {
    /// Start and end of each batch.
    runs: Mutex<Vec<(Instant, Instant)>>,
    /// End of each denoising step.
    steps: Mutex<Vec<Instant>>,
    /// Time that writing each video took.
    writes: Mutex<Vec<Duration>>,
}

/// A device whose steps have a fixed duration and which records their times.
struct Timed {
    log: Arc<Log>,
}

/// Returns the number after `name=` in a prompt such as `steps=4 ms=20`.
fn number(prompt: &str, name: &str) -> Option<f64> {
    prompt.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
}

impl JobDevice for Timed {
    fn warm(&mut self, _: &JobBatch) -> Result<(), RunError> {
        Ok(())
    }

    fn run(&mut self, order: &JobBatch, watch: BatchWatch) -> Result<Vec<Box<dyn GeneratedVideo>>, RunError> {
        let begun = Instant::now();
        let prompt = order.jobs[0].prompt();
        let steps = number(prompt, "steps").unwrap_or(1.0) as usize;
        let pause = Duration::from_secs_f64(number(prompt, "ms").unwrap_or(0.0) / 1e3);
        let mut ended = Ok(());
        for step in 0..steps {
            std::thread::sleep(pause);
            self.log.steps.lock().unwrap().push(Instant::now());
            if let ControlFlow::Break(stop) = watch(StepProgress { stage: JobPhase::Denoise, step: step + 1, steps }) {
                ended = Err(RunError::Stopped(stop));
                break;
            }
        }
        self.log.runs.lock().unwrap().push((begun, Instant::now()));
        ended?;
        Ok(order.jobs.iter().map(|_| Box::new(Written(Arc::clone(&self.log))) as _).collect())
    }

    fn evict(&mut self, _: &str) {}

    fn figures(&mut self) -> DeviceFigures {
        DeviceFigures::default()
    }
}

/// A small video that records how long writing it takes.
struct Written(Arc<Log>);

impl GeneratedVideo for Written {
    fn keep(&mut self, _: &Path) {}

    fn write(&mut self, folder: &Path) -> Result<VideoProperties, Failure> {
        let begun = Instant::now();
        let mut bytes = 0;
        for (variant, contents) in scripted::files() {
            std::fs::write(folder.join(variant.file()), contents)
                .map_err(|e| Failure::new("internal", e.to_string()))?;
            bytes += contents.len() as u64;
        }
        std::fs::write(folder.join(Variant::Sidecar.file()), "{}")
            .map_err(|e| Failure::new("internal", e.to_string()))?;
        self.0.writes.lock().unwrap().push(begun.elapsed());
        Ok(VideoProperties {
            width: 32,
            height: 32,
            num_frames: 9,
            fps: 24.0,
            bytes,
            frames_sha256: String::new(),
            samples_sha256: String::new(),
            timings: Value::Null,
            enhanced_prompt: None,
            warnings: Vec::new(),
        })
    }
}

/// A server with the timed device.
struct Bench {
    server: Server,
    log: Arc<Log>,
    _folder: tempfile::TempDir,
}

impl Bench {
    fn start() -> Self {
        let folder = scripted::quick_folder();
        let log = Arc::new(Log::default());
        let own = Arc::clone(&log);
        let keys = ["queue=2000", "queue_per_key=2000"];
        let server = started(&folder.path().join("state"), &keys, ServerOptions::default(), Timed { log: own });
        Bench { server, log, _folder: folder }
    }

    fn to(&self) -> SocketAddr {
        self.server.address()
    }

    fn connection(&self) -> Client {
        Client::to(self.to())
    }

    fn end(self) {
        assert_eq!(self.server.end(|| false), 0);
    }
}

/// Returns a request for a video of the smallest size.
fn request(prompt: &str) -> Value {
    json!({"prompt": prompt, "size": "64x64", "num_frames": 9})
}

/// Creates a video and returns its id.
fn create(client: &mut Client, prompt: &str) -> String {
    let answer = client.send("POST", "/v1/videos", Some(&request(prompt)));
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["id"].as_str().expect("an id").into()
}

/// Waits until a video has ended. Returns its events with their arrival times.
fn followed(to: SocketAddr, id: &str) -> Vec<(Instant, String, Value)> {
    Events::open(Client::to(to), &format!("/v1/videos/{id}/events"))
        .map(|(name, data)| (Instant::now(), name, data))
        .collect()
}

/// Returns a PNG of about `bytes` bytes that cannot be compressed.
pub fn large_png(bytes: usize) -> Vec<u8> {
    let side = ((bytes / 3) as f64).sqrt() as u32;
    let mut state = 1u32;
    let noise = image::RgbImage::from_fn(side, side, |_, _| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        image::Rgb([(state >> 24) as u8, (state >> 16) as u8, (state >> 8) as u8])
    });
    let mut png = Cursor::new(Vec::new());
    noise.write_to(&mut png, image::ImageFormat::Png).expect("a PNG");
    png.into_inner()
}

/// Content type of [`form`].
pub const FORM: &str = "multipart/form-data; boundary=b";

/// Returns a form with a prompt and an image.
pub fn form(prompt: &str, image: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, value) in [("prompt", prompt), ("size", "64x64"), ("num_frames", "9")] {
        body.extend(format!("--b\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n").bytes());
    }
    body.extend(b"--b\r\nContent-Disposition: form-data; name=\"input_reference\"; filename=\"a.png\"\r\n\r\n");
    body.extend(image);
    body.extend(b"\r\n--b--\r\n");
    body
}

#[needs(full)]
fn create_latency_meets_goal() {
    let bench = Bench::start();
    let mut connection = bench.connection();
    let mut timed = |send: &mut dyn FnMut(&mut Client)| {
        let begun = Instant::now();
        send(&mut connection);
        begun.elapsed()
    };
    let texts = (0..300).map(|at| timed(&mut |c| drop(create(c, &format!("text {at}")))));
    Times::from_durations(texts.collect::<Vec<_>>()).note("create, text only", 10.0, 30.0);
    let image = large_png(4 << 20);
    assert!(image.len() > 3 << 20, "{} bytes", image.len());
    let images = (0..40).map(|at| {
        let body = form(&format!("image {at}"), &image);
        timed(&mut |c| {
            let answer = c.roundtrip("POST", "/v1/videos", &[("content-type", FORM)], Some(&body)).expect("an answer");
            assert_eq!(answer.status, 200, "{}", answer.text());
        })
    });
    Times::from_durations(images.collect::<Vec<_>>()).note("create, with a PNG of 4 MiB", 150.0, 400.0);
    bench.end();
}

#[needs(full)]
fn poll_latency_meets_goal() {
    let bench = Bench::start();
    let id = create(&mut bench.connection(), "steps=100000 ms=1");
    let path = format!("/v1/videos/{id}");
    // Four connections send a total of a thousand requests per second for five seconds.
    let (sender, times) = channel();
    std::thread::scope(|scope| {
        for at in 0..4 {
            let (sender, path, mut connection) = (sender.clone(), &path, bench.connection());
            scope.spawn(move || {
                let begun = Instant::now() + Duration::from_millis(at);
                for turn in 0..1250 {
                    let due = begun + Duration::from_millis(4 * turn);
                    std::thread::sleep(due.saturating_duration_since(Instant::now()));
                    let asked = Instant::now();
                    assert_eq!(connection.get(path).status, 200);
                    sender.send(asked.elapsed()).expect("heard");
                }
            });
        }
    });
    drop(sender);
    Times::from_durations(times).note("poll, at 1,000 polls per second", 1.0, 5.0);
    bench.connection().send("DELETE", &path, None);
    bench.end();
}

/// Each of four threads polls a running job over eight connections: it sends eight requests, reads the responses, and
/// starts again immediately.
#[needs(full)]
fn poll_throughput_meets_goal() {
    const GOAL: f64 = 12_000.0;
    let bench = Bench::start();
    let id = create(&mut bench.connection(), "steps=100000 ms=1");
    let path = format!("/v1/videos/{id}");
    let begun = Instant::now();
    let poll = || {
        let mut connections: Vec<Client> = (0..8).map(|_| bench.connection()).collect();
        let mut count = 0;
        while begun.elapsed() < Duration::from_secs(5) {
            connections.iter_mut().for_each(|connection| connection.head("GET", &path, &[], None).expect("sent"));
            for connection in &mut connections {
                assert_eq!(connection.answer(false).expect("an answer").status, 200);
            }
            count += connections.len();
        }
        count
    };
    let count: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(poll)).collect();
        threads.into_iter().map(|thread| thread.join().expect("polled")).sum()
    });
    let rate = count as f64 / begun.elapsed().as_secs_f64();
    let figure = format!("{rate:.0} per second ({count} polls)");
    note("polls of a running job, over 32 connections", &format!("{GOAL} per second"), &figure, rate >= GOAL);
    bench.connection().send("DELETE", &path, None);
    bench.end();
}

#[needs(full)]
fn event_latency_meets_goals() {
    let bench = Bench::start();
    let mut first = Vec::new();
    let id = create(&mut bench.connection(), "steps=200 ms=20");
    for _ in 0..100 {
        let connection = bench.connection();
        let asked = Instant::now();
        let begun = Events::open(connection, &format!("/v1/videos/{id}/events")).next().expect("an event");
        assert_eq!(begun.0, "video", "the first event is the whole object");
        first.push(asked.elapsed());
    }
    Times::from_durations(first).note("event stream: request to first byte", 5.0, 50.0);
    let id = {
        let last = followed(bench.to(), &id);
        assert_eq!(last.last().expect("an event").2["status"], "completed");
        bench.log.steps.lock().unwrap().clear();
        create(&mut bench.connection(), "steps=100 ms=20")
    };
    let heard = followed(bench.to(), &id);
    let steps = bench.log.steps.lock().unwrap().clone();
    let late = heard.iter().filter(|(_, name, data)| name == "progress" && data["step"].as_u64().unwrap_or(0) > 0);
    let late: Vec<Duration> = late
        .map(|(when, _, data)| when.duration_since(steps[data["step"].as_u64().unwrap_or(1) as usize - 1]))
        .collect();
    assert!(late.len() >= 90, "{} of 100 steps were told", late.len());
    Times::from_durations(late).note("event stream: end of a step to its event", 5.0, 50.0);
    bench.end();
}

#[needs(full)]
fn cancel_latency_meets_goal() {
    let bench = Bench::start();
    let mut connection = bench.connection();
    let cancel = |connection: &mut Client, id: &str| {
        let asked = Instant::now();
        let answer = connection.send("POST", &format!("/v1/videos/{id}/cancel"), None);
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (200, &"cancelled".into()));
        (asked, asked.elapsed())
    };
    let running = create(&mut connection, "steps=100000 ms=50");
    let queued: Vec<String> = (0..100).map(|at| create(&mut connection, &format!("waits {at}"))).collect();
    Times::from_durations(queued.iter().map(|id| cancel(&mut connection, id).1).collect::<Vec<_>>()).note(
        "cancel a queued video",
        5.0,
        20.0,
    );
    cancel(&mut connection, &running);
    scripted::until("the cancelled video to leave the device", || bench.log.runs.lock().unwrap().len() == 1);
    let mut stops = Vec::new();
    for at in 0..30 {
        let id = create(&mut connection, &format!("steps=100000 ms=50 at {at}"));
        std::thread::sleep(Duration::from_millis(60 + at * 3));
        let (asked, _) = cancel(&mut connection, &id);
        scripted::until("the cancelled video to leave the device", || {
            bench.log.runs.lock().unwrap().len() == at as usize + 2
        });
        stops.push(bench.log.runs.lock().unwrap().last().expect("a run").1.duration_since(asked));
    }
    Times::from_durations(stops).note(
        "cancel a running video (steps of 50 ms): request to idle device",
        50.0 / 2.0 + 10.0,
        100.0,
    );
    bench.end();
}

#[needs(full)]
fn request_overhead_and_device_idle_time_meet_goals() {
    let bench = Bench::start();
    let mut connection = bench.connection();
    let mut times = Vec::new();
    for at in 0..200 {
        bench.log.runs.lock().unwrap().clear();
        bench.log.writes.lock().unwrap().clear();
        let begun = Instant::now();
        let id = create(&mut connection, &format!("steps=2 ms=5 alone {at}"));
        let (done, _, data) = followed(bench.to(), &id).pop().expect("an event");
        assert_eq!(data["status"], "completed");
        let run = bench.log.runs.lock().unwrap()[0];
        let write = bench.log.writes.lock().unwrap()[0];
        times.push(done.duration_since(begun).saturating_sub(run.1.duration_since(run.0)).saturating_sub(write));
    }
    Times::from_durations(times).note(
        "overhead of a request: sent to completed, without device and file writing time",
        20.0,
        60.0,
    );
    bench.log.runs.lock().unwrap().clear();
    let hold = create(&mut connection, "steps=10 ms=50 first");
    let ids: Vec<String> = (0..200).map(|at| create(&mut connection, &format!("ms=5 {at}"))).collect();
    for id in [&hold].into_iter().chain(&ids) {
        followed(bench.to(), id);
    }
    let runs = bench.log.runs.lock().unwrap().clone();
    let idle = runs.windows(2).map(|pair| pair[1].0.duration_since(pair[0].1));
    Times::from_durations(idle.collect::<Vec<_>>()).note(
        "device idle time between queued videos of one size",
        5.0,
        20.0,
    );
    bench.end();
}

#[needs(full)]
fn start_and_shutdown_times_meet_goals() {
    let mut starts = Vec::new();
    let mut ends = Vec::new();
    for at in 0..10 {
        let begun = Instant::now();
        let bench = Bench::start();
        starts.push(begun.elapsed());
        let mut connection = bench.connection();
        let id = create(&mut connection, &format!("steps=100000 ms=50 {at}"));
        scripted::until("the job to run", || {
            connection.get(&format!("/v1/videos/{id}")).json()["status"] == "in_progress"
        });
        let asked = Instant::now();
        bench.end();
        ends.push(asked.elapsed());
    }
    Times::from_durations(starts).note("start to ready, without loading a model", 200.0, 1000.0);
    Times::from_durations(ends).note("shutdown (steps of 50 ms): request to exit", 550.0, 2100.0);
}

/// Returns the resident memory of this process in bytes.
fn resident() -> f64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    text.split_whitespace().nth(1).and_then(|pages| pages.parse::<f64>().ok()).expect("pages") * 4096.0
}

#[needs(full)]
fn memory_growth_over_a_thousand_videos_meets_goal() {
    run_in_separate_process("figures::memory_grows_by_less_than_two_percent_in_this_process");
}

#[needs(member)]
fn memory_grows_by_less_than_two_percent_in_this_process() {
    ltx2::pjrt::limit_heaps();
    let bench = Bench::start();
    let make = |count: usize| {
        let mut connection = bench.connection();
        for at in 0..count {
            let id = create(&mut connection, &format!("flat {at}"));
            let path = format!("/v1/videos/{id}");
            scripted::until("the video to be completed", || connection.get(&path).json()["status"] == "completed");
            // Keeps the number of stored videos constant, because their memory is not measured here.
            connection.send("DELETE", &path, None);
        }
    };
    let used = || {
        // Clears the lists of the test, which would otherwise grow.
        *bench.log.steps.lock().unwrap() = Vec::new();
        *bench.log.runs.lock().unwrap() = Vec::new();
        *bench.log.writes.lock().unwrap() = Vec::new();
        resident()
    };
    make(40);
    let early = used();
    make(960);
    let late = used();
    let grown = (late / early - 1.0) * 100.0;
    let figure = format!("{:.1} MB after 40, {:.1} MB after 1,000: {grown:+.2} %", early / 1e6, late / 1e6);
    note("memory growth over 1,000 videos", "within 2 % of that after 40", &figure, grown < 2.0);
    bench.end();
}
