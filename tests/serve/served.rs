//! Tests of `ltx2 serve` on the command line, with the smallest test model. The
//! frames and samples of a request must equal those of `ltx2 generate` with its sidecar.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use base64::Engine;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};

use crate::figures::{FORM, form, large_png};
use crate::scripted::until;
use crate::site::Client;
use crate::support::standin::{Fault, INTERNAL, Standin};
use crate::support::{self, needs};

/// Timeout for each wait. It is long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// A server process, which is killed on drop.
pub struct Served {
    pub process: Child,
    pub address: SocketAddr,
    /// Lines of the server's log.
    lines: Receiver<String>,
    state: PathBuf,
}

impl Served {
    pub fn start(state: &Path, more: &[&str], failpoint: Option<&str>) -> Self {
        Served::start_with(state, more, |serve| serve.envs(failpoint.map(|point| ("LTX2_FAILPOINT", point))))
    }

    pub fn start_with(state: &Path, more: &[&str], prepare: impl FnOnce(&mut Command) -> &mut Command) -> Self {
        Served::start_on(support::tiny(), state, more, prepare)
    }

    /// Starts a server with the configuration `config`, which is a preset or a file.
    pub fn start_on(
        config: &str,
        state: &Path,
        more: &[&str],
        prepare: impl FnOnce(&mut Command) -> &mut Command,
    ) -> Self {
        let mut serve = support::ltx2();
        serve.args(["serve", "-c", config, "--listen", "127.0.0.1:0", "--min-free", "0", "--checkpoint", "0s"]);
        serve.arg("--state").arg(state).args(more).stdout(Stdio::null()).stderr(Stdio::piped());
        prepare(&mut serve);
        let mut process = serve.spawn().expect("starts");
        let said = BufReader::new(process.stderr.take().expect("piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || said.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let mut served = Served { process, address: ([127, 0, 0, 1], 0).into(), lines, state: state.into() };
        let line = served.says("http://");
        let address = line.split("http://").nth(1).and_then(|rest| rest.split(": ").next()).expect("an address");
        served.address = address.parse().unwrap_or_else(|_| panic!("an address in {line}"));
        let since = Instant::now();
        while served.get("/ready").0 != 200 {
            assert!(since.elapsed() < PATIENCE, "the server is not ready");
            assert!(
                served.process.try_wait().expect("waits").is_none(),
                "{:?}",
                served.lines.iter().collect::<Vec<_>>()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        served
    }

    /// Waits for a log line that contains `words` and returns the line.
    pub fn says(&self, words: &str) -> String {
        let mut said = Vec::new();
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            if line.contains(words) {
                return line;
            }
            said.push(line);
        }
        panic!("'{words}' is not in {said:#?}");
    }

    pub fn get(&self, path: &str) -> (u16, Value) {
        let answer = Client::to(self.address).get(path);
        (answer.status, serde_json::from_slice(&answer.body).unwrap_or_default())
    }

    pub fn create(&self, body: &Value) -> String {
        let answer = Client::to(self.address).send("POST", "/v1/videos", Some(body));
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["id"].as_str().expect("an id").into()
    }

    fn create_by_form(&self, fields: &[(&str, &str)]) -> String {
        let part = |(name, value): &(&str, &str)| {
            format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
        };
        let body: String = fields.iter().map(part).chain(["--b--\r\n".into()]).collect();
        let kind = [("content-type", "multipart/form-data; boundary=b")];
        let answer = Client::to(self.address).roundtrip("POST", "/v1/videos", &kind, Some(body.as_bytes()));
        let answer = answer.expect("an answer");
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["id"].as_str().expect("an id").into()
    }

    /// Waits until a video has ended and returns its object.
    pub fn wait(&self, id: &str) -> Value {
        let since = Instant::now();
        loop {
            let (_, video) = self.get(&format!("/v1/videos/{id}"));
            if video["status"] == "completed" || video["status"] == "failed" {
                return video;
            }
            assert!(since.elapsed() < PATIENCE, "the video has not finished in time: {video}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn file(&self, id: &str, name: &str) -> PathBuf {
        self.state.join("jobs").join(id).join(name)
    }

    /// Returns the hashes of a video's frames and samples, after checking that the sidecar reproduces them.
    fn hashes(&self, id: &str) -> Value {
        let read =
            |path: &Path| -> Value { serde_json::from_slice(&std::fs::read(path).expect("a sidecar")).expect("JSON") };
        let folder = tempfile::tempdir().expect("a folder");
        let (sidecar, again) = (self.file(id, "video.json"), folder.path().join("again.mp4"));
        let ran = support::ltx2().args(["generate", "-c"]).arg(&sidecar).arg("-o").arg(&again).output();
        let ran = ran.expect("the binary runs");
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        let hashes = read(&sidecar)["sha256"].clone();
        assert_eq!(hashes, read(&folder.path().join("again.json"))["sha256"]);
        hashes
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.process.id().to_string()]).status().expect("kill runs");
        assert!(sent.success());
    }

    fn code(&mut self) -> Option<i32> {
        self.process.wait().expect("the process ends").code()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[needs(cpu)]
fn requests_match_generate_from_their_sidecars() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut served = Served::start(&folder.path().join("state"), &[], None);
    let body = json!({"prompt": "a red ball", "size": "64x96", "num_frames": 9, "seed": 7});
    let by_json = served.create(&body);
    let fields = [("prompt", "a red ball"), ("size", "64x96"), ("num_frames", "9"), ("seed", "7")];
    let by_form = served.create_by_form(&fields);
    let video = served.wait(&by_json);
    assert_eq!((&video["status"], &video["seed"], &video["num_frames"]), (&json!("completed"), &json!(7), &json!(9)));
    assert_eq!(served.wait(&by_form)["status"], "completed");
    let hashes = served.hashes(&by_json);
    let sidecar = std::fs::read(served.file(&by_form, "video.json")).expect("a sidecar");
    let sidecar: Value = serde_json::from_slice(&sidecar).expect("JSON");
    assert_eq!(sidecar["sha256"], hashes, "a form is what JSON is");
    for (variant, kind) in [("video", "video/mp4"), ("spritesheet", "image/jpeg"), ("audio", "audio/wav")] {
        let answer = Client::to(served.address).get(&format!("/v1/videos/{by_json}/content?variant={variant}"));
        assert_eq!((answer.status, answer.header("content-type")), (200, Some(kind)));
        assert!(answer.body.len() > 100, "{variant}");
    }
    served.signal("-TERM");
    assert_eq!(served.code(), Some(0));
}

#[needs(cpu)]
fn video_resumes_after_server_is_killed() {
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state");
    // The warm-up runs only one step, so it is the video that reaches `step 2`.
    let served = Served::start(&state, &[], Some("step 2"));
    let body = json!({"prompt": "rain", "size": "64x96", "num_frames": 9, "seed": 8, "steps": 4});
    let id = served.create(&body);
    served.says("at step 2");
    assert!(served.file(&id, "steps.safetensors").exists());
    served.signal("-KILL");
    drop(served);

    let served = Served::start(&state, &[], None);
    let video = served.wait(&id);
    assert_eq!((&video["status"], &video["attempts"]), (&json!("completed"), &json!(2)), "{video}");
    let hashes = served.hashes(&id);
    let undisturbed = served.create(&body);
    assert_eq!(served.wait(&undisturbed)["attempts"], 1);
    assert_eq!(served.hashes(&undisturbed), hashes);
}

#[needs(cpu)]
fn hung_device_stops_server_and_next_start_resumes() {
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state");
    // The warm-up runs one step, and the video then runs two.
    let hangs = Standin::new().execution("denoise", 4, &Fault::Hang);
    let soon = ["--set", "runtime.watchdog=2"];
    let mut served = Served::start_with(&state, &soon, |serve| hangs.give(serve));
    let body = json!({"prompt": "rain", "seed": 8, "steps": 4});
    let id = served.create(&body);
    served.says("the server resumes its unfinished jobs");
    let said = served.says("has not finished after");
    assert!(said.contains("denoise") && said.contains("the execution on device 0"), "{said}");
    assert!(said.contains("runtime.watchdog: 2"), "{said}");
    assert_eq!(served.code(), Some(1), "the server does not wait for the device");
    assert!(served.file(&id, "steps.safetensors").exists() && !served.file(&id, "video.mp4").exists());
    drop(served);

    // The warm-up runs one step, and the video resumes with its last two steps. Any further step would fail.
    let no_more = Standin::new().execution("denoise", 4, &Fault::Fail(INTERNAL, "a step too many"));
    let served = Served::start_with(&state, &[], |serve| no_more.give(serve));
    let video = served.wait(&id);
    assert_eq!((&video["status"], &video["attempts"]), (&json!("completed"), &json!(2)), "{video}");
    // The hashes equal those of an uninterrupted run.
    served.hashes(&id);
}

/// While the file size limit (`ulimit -f`) is too low, requests get 507 and a finished video waits to be written. No
/// restart is needed once the limit is raised.
#[needs(cpu)]
fn file_size_limit_rejects_requests_and_delays_video() {
    let folder = tempfile::tempdir().expect("a folder");
    let served = Served::start(&folder.path().join("state"), &[], None);
    let process = Pid::from_raw(i32::try_from(served.process.id()).expect("an id"));
    let limit = |bytes| prlimit(process, Resource::Fsize, Rlimit { current: bytes, maximum: None }).expect("a limit");
    let id = served.create(&json!({"prompt": "rain", "size": "64x96", "num_frames": 9, "seed": 8, "steps": 40}));
    let path = format!("/v1/videos/{id}");
    until("the job to run", || served.get(&path).1["status"] == "in_progress");
    limit(Some(512));
    let image = large_png(1 << 15);
    let url = format!("data:image/png;base64,{}", base64::engine::general_purpose::STANDARD.encode(&image));
    let kind = [("content-type", FORM)];
    let mut client = Client::to(served.address);
    for answer in [
        client.roundtrip("POST", "/v1/videos", &kind, Some(&form("a", &image))).expect("an answer"),
        client.send("POST", "/v1/videos", Some(&json!({"prompt": "a", "input_reference": url}))),
        client.send("POST", "/v1/videos", Some(&json!({"prompt": "a"}))),
    ] {
        assert_eq!((answer.error().0, answer.error().1.as_str()), (507, "insufficient_storage"), "{}", answer.text());
    }
    until("the job to be encoded", || served.get(&path).1["phase"] == "encoding");
    std::thread::sleep(Duration::from_millis(700));
    let (_, video) = served.get(&path);
    assert_eq!((&video["status"], served.file(&id, "video.mp4").exists()), (&json!("in_progress"), false), "{video}");
    limit(None);
    assert_eq!(served.wait(&id)["status"], "completed");
}

/// If a video cannot be written after its last step, its results are kept in the job's folder until the job is deleted.
/// Only the log contains their path.
#[needs(cpu)]
fn results_of_failed_video_are_kept_with_its_job() {
    for (moment, name, wanted) in [
        ("decode audio", "video.mp4.kept.latents.safetensors", &["frames", "latents.audio", "latents.video"][..]),
        ("rename video.mp4", "video.mp4.kept.safetensors", &["audio", "frames", "latents.audio", "latents.video"]),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let served = Served::start(&folder.path().join("state"), &[], Some(&format!("fail {moment}")));
        let id = served.create(&json!({"prompt": "rain", "size": "64x96", "num_frames": 9, "seed": 8}));
        let video = served.wait(&id);
        assert_eq!((&video["status"], &video["error"]["code"]), (&json!("failed"), &json!("internal")), "{video}");
        let told = video.to_string();
        assert!(!told.contains("kept") && !told.contains(folder.path().to_str().expect("UTF-8")), "{told}");
        let file = served.file(&id, name);
        let line = served.says(" kept in ");
        assert!(line.contains(file.to_str().expect("UTF-8")), "{moment}: {line}");
        let tensors = ltx2::pipeline::output::tensors::read(&file).expect("tensors");
        assert_eq!(tensors.keys().collect::<Vec<_>>(), wanted, "{moment}");
        assert_eq!(tensors["frames"].shape(), [9, 96, 64, 3], "{moment}");
        assert!(!served.file(&id, "video.mp4").exists(), "{moment}");
        let answer = Client::to(served.address).send("DELETE", &format!("/v1/videos/{id}"), None);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let since = Instant::now();
        while file.exists() {
            assert!(since.elapsed() < PATIENCE, "{moment}: the file stays");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
