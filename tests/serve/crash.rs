//! Tests that kill a server at any point in time. At the next start, each acknowledged job must exist exactly once and
//! be complete.
//!
//! The server is this test binary in a child process, which reads commands from stdin.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use ltx2::config::{Seconds, Serve};
use ltx2::media::probe_clip;
use ltx2::serve::id::{Ids, VideoId};
use ltx2::serve::job::{JobState, Record};
use ltx2::serve::jobs::{Jobs, ListQuery};
use ltx2::serve::store::{FileStore, JobStore, STEPS};

use crate::scripted::{Server, anyone, files, frames_of, quick_folder, request, settings};
use crate::support::{full, needs};

/// Fail points of the store, of writing files and of the device, each with an action of the test that reaches it.
const MOMENTS: [(&str, CrashAction); 23] = [
    ("create request.json", CrashAction::Create),
    ("create folder", CrashAction::Create),
    ("create done", CrashAction::Create),
    ("begin order.json", CrashAction::Batch),
    ("record in_progress", CrashAction::Create),
    ("recorded in_progress", CrashAction::Create),
    ("step 2", CrashAction::Create),
    ("write steps.safetensors", CrashAction::Create),
    ("rename steps.safetensors", CrashAction::Batch),
    ("rename thumb.jpg", CrashAction::Create),
    ("write video.mp4", CrashAction::Create),
    ("rename video.mp4", CrashAction::Batch),
    ("write video.json", CrashAction::Create),
    ("rename video.json", CrashAction::Batch),
    ("record completed", CrashAction::Create),
    ("recorded completed", CrashAction::Batch),
    ("record failed", CrashAction::Cancel),
    ("recorded failed", CrashAction::Cancel),
    ("remove before", CrashAction::Delete),
    ("remove moved", CrashAction::Delete),
    ("empty trash", CrashAction::Delete),
    ("remove moved", CrashAction::Expire),
    ("empty trash", CrashAction::Expire),
];
/// Number of times that a full test run kills the server at a random time.
const RANDOM: usize = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CrashAction {
    Create,
    Batch,
    Cancel,
    Delete,
    Expire,
}

fn crash_settings(keep: f64) -> Serve {
    Serve { max_batch: Some(3), keep: Seconds(keep), ..settings() }
}

/// Runs the server in a child process.
#[needs(member)]
fn server_process_obeys_commands_from_stdin() {
    let Some(state) = std::env::var_os("LTX2_SERVE_STATE").map(PathBuf::from) else { return };
    let keep = std::env::var("LTX2_SERVE_KEEP").ok().and_then(|text| text.parse().ok()).unwrap_or(3600.0);
    let started = Instant::now();
    let server = Server::start(&state, crash_settings(keep));
    println!("ready {}", started.elapsed().as_millis());
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let id = VideoId::parse(rest);
        match (word, id) {
            ("send", _) => println!("sent {} {rest}", server.send(rest)),
            ("cancel", Some(id)) => println!("cancelled {id} {:?}", server.jobs.cancel(&anyone(), &id).map(drop)),
            ("delete", Some(id)) => println!("deleted {id} {:?}", server.jobs.delete(&anyone(), &id)),
            ("sweep", _) => {
                server.jobs.sweep();
                println!("swept");
            }
            ("drain", _) => break,
            _ => println!("unknown command {line}"),
        }
    }
    server.stop().expect("drained");
}

/// A server in a child process.
struct Process {
    child: Child,
    orders: ChildStdin,
    said: Receiver<String>,
    sent: Vec<(VideoId, String)>,
    deleted: BTreeSet<VideoId>,
    cancelled: BTreeSet<VideoId>,
    /// The last video that the server was told to delete.
    deleting: Option<VideoId>,
}

impl Process {
    fn start(state: &Path, failpoint: Option<&str>, keep: f64) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this binary"));
        command.args(["crash::server_process_obeys_commands_from_stdin", "--exact"]);
        command.env("LTX2_TEST_MEMBER", "1").env("LTX2_SERVE_STATE", state).env("LTX2_SERVE_KEEP", keep.to_string());
        command.env_remove("LTX2_TEST_LOG").env_remove("LTX2_REQUIRE");
        let made = state.join("made");
        if !made.exists() {
            std::fs::create_dir(&made).expect("a folder");
            files()
                .iter()
                .for_each(|(variant, bytes)| std::fs::write(made.join(variant.file()), bytes).expect("written"));
        }
        command.env("LTX2_SERVE_FILES", made);
        if let Some(moment) = failpoint {
            command.env("LTX2_FAILPOINT", moment);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("starts");
        let (sender, said) = channel();
        let streams: [Box<dyn std::io::Read + Send>; 2] =
            [Box::new(child.stdout.take().expect("piped")), Box::new(child.stderr.take().expect("piped"))];
        for stream in streams {
            let sender = sender.clone();
            std::thread::spawn(move || {
                // This thread runs until the process exits.
                BufReader::new(stream).lines().map_while(Result::ok).all(|line| sender.send(line).is_ok())
            });
        }
        let orders = child.stdin.take().expect("piped");
        let empty = BTreeSet::new();
        let mut process =
            Process { child, orders, said, sent: Vec::new(), deleted: empty.clone(), cancelled: empty, deleting: None };
        process.hear(Duration::from_secs(60), |line| line.contains("ready "));
        process
    }

    fn tell(&mut self, order: &str) {
        // The process may have been killed and no longer read its commands.
        drop(writeln!(self.orders, "{order}"));
    }

    /// Records output lines until one satisfies `is_so`. Returns false if none does within `time`.
    fn hear(&mut self, time: Duration, is_so: impl Fn(&str) -> bool) -> bool {
        let until = Instant::now() + time;
        while let Ok(line) = self.said.recv_timeout(until.saturating_duration_since(Instant::now())) {
            let mut words = line.splitn(3, ' ');
            let (word, id, rest) = (words.next(), words.next().and_then(VideoId::parse), words.next());
            match (word, id, rest) {
                (Some("sent"), Some(id), Some(prompt)) => self.sent.push((id, prompt.into())),
                (Some("deleted"), Some(id), Some("Ok(())")) => drop(self.deleted.insert(id)),
                (Some("cancelled"), Some(id), Some("Ok(())")) => drop(self.cancelled.insert(id)),
                _ => {}
            }
            if is_so(&line) {
                return true;
            }
        }
        false
    }

    /// Kills the process and records its remaining output.
    fn kill(&mut self) {
        self.child.kill().expect("is killed");
        assert_eq!(self.child.wait().expect("is gone").signal(), Some(9), "the process ended before the kill");
        self.hear(Duration::from_secs(5), |_| false);
    }

    /// Starts a server with the state of the killed process and checks that it finds everything that was acknowledged.
    fn check(&self, state: &Path, moment: &str) {
        let folder = |id: &VideoId| state.join("jobs").join(id.as_str());
        // Checks the files in the state in which the killed process left them.
        for entry in std::fs::read_dir(state.join("jobs")).expect("jobs").map(|entry| entry.expect("one").path()) {
            let Ok(text) = std::fs::read(entry.join("job.json")) else { continue };
            let record: Record = serde_json::from_slice(&text).expect("a whole record");
            if record.state == JobState::Completed {
                is_whole(&entry, moment);
            }
        }
        let server = Server::start(state, crash_settings(3600.0));
        for (id, prompt) in &self.sent {
            if self.deleted.contains(id) {
                assert!(server.jobs.get(&anyone(), id).is_err(), "{moment}: {id} was deleted");
                continue;
            }
            if self.deleting.as_ref() == Some(id) && server.jobs.get(&anyone(), id).is_err() {
                continue;
            }
            let job = server.wait(id);
            assert_eq!(job.accepted.prompt(), prompt, "{moment}");
            let expected = if self.cancelled.contains(id) { JobState::Failed } else { JobState::Completed };
            assert_eq!(job.record.state, expected, "{moment}: {:?}", job.record);
            if let Some(produced) = &job.record.produced {
                assert_eq!(produced.frames_sha256, frames_of(&job.accepted), "{moment}");
                is_whole(&folder(id), moment);
            }
        }
        // No job exists twice, and there is at most one job whose creation was not acknowledged.
        let all =
            server.jobs.list(&anyone(), &ListQuery { after: None, limit: 10_000, descending: false, state: None });
        let prompts: Vec<&str> = all.jobs.iter().map(|job| job.accepted.prompt()).collect();
        let known: BTreeSet<&str> = prompts.iter().copied().collect();
        assert_eq!(known.len(), prompts.len(), "{moment}: {prompts:?}");
        let kept = self.sent.iter().filter(|(id, _)| !self.deleted.contains(id)).count();
        let least = kept - usize::from(self.deleting.as_ref().is_some_and(|id| !self.deleted.contains(id)));
        assert!((least..=kept + 1).contains(&prompts.len()), "{moment}: {} of {kept}", prompts.len());
        all.jobs.iter().for_each(|job| drop(server.wait(&job.accepted.id)));
        server.stop().expect("drained");
        let damaged = std::fs::read_dir(state.join("damaged")).expect("damaged").count();
        assert_eq!(damaged, 0, "{moment}: nothing is damaged");
        let left = all.jobs.iter().any(|job| folder(&job.accepted.id).join(STEPS).exists());
        assert!(!left, "{moment}: steps are left");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn is_whole(folder: &Path, moment: &str) {
    for (variant, bytes) in files() {
        assert_eq!(&std::fs::read(folder.join(variant.file())).expect("a file"), bytes, "{moment}: {}", variant.file());
    }
    let clip = probe_clip(&folder.join("video.mp4"), Path::new("no-ffmpeg")).expect("a video");
    assert_eq!(clip.frames, 9, "{moment}");
}

/// Kills a server at a fail point that the action `deed` reaches, and checks the next start.
fn kill_at_fail_point(moment: &str, deed: CrashAction) {
    let state = quick_folder();
    files();
    if !matches!(deed, CrashAction::Create | CrashAction::Batch) {
        // Generates a video without a fail point, so that the action has a finished video.
        let mut before = Process::start(state.path(), None, 3600.0);
        before.tell("send n=done");
        assert!(before.hear(Duration::from_secs(60), |line| line.starts_with("sent")));
        let id = before.sent[0].0.clone();
        let record = state.path().join("jobs").join(id.as_str()).join("job.json");
        crate::scripted::until("the video to be completed", || {
            std::fs::read_to_string(&record).is_ok_and(|text| text.contains("completed"))
        });
        before.tell("drain");
        assert!(before.child.wait().expect("ends").success());
    }
    // An expired video is removed in the same way as a deleted one.
    let keep = if deed == CrashAction::Expire { 0.4 } else { 3600.0 };
    let mut process = Process::start(state.path(), Some(moment), keep);
    let done = done_id(state.path());
    match deed {
        CrashAction::Create => process.tell("send n=0 steps=4"),
        CrashAction::Batch => {
            process.tell("send n=0 steps=40 ms=5 every=1000");
            (1..4).for_each(|n| process.tell(&format!("send n={n} key=k steps=4")));
        }
        CrashAction::Cancel => {
            process.tell("send n=0 steps=100000 ms=5 every=1000");
            assert!(process.hear(Duration::from_secs(60), |line| line.starts_with("sent")));
            let id = process.sent[0].0.clone();
            process.tell(&format!("cancel {id}"));
        }
        CrashAction::Delete => process.tell(&format!("delete {}", done.clone().expect("one that is finished"))),
        CrashAction::Expire => {
            std::thread::sleep(Duration::from_millis(500));
            process.tell("sweep");
        }
    }
    let is_there = process.hear(Duration::from_secs(60), |line| line == format!("at {moment}"));
    assert!(is_there, "the server never was at {moment}");
    process.kill();
    if let Some(id) = done {
        match deed {
            // The server did not acknowledge the deletion, but the fail point shows that the video was removed.
            CrashAction::Delete | CrashAction::Expire if moment != "remove before" => {
                process.deleted.insert(id.clone());
            }
            _ => {}
        }
        process.sent.push((id, "n=done".into()));
    }
    if deed == CrashAction::Cancel {
        let id = process.sent[0].0.clone();
        match moment {
            "recorded failed" => drop(process.cancelled.insert(id)),
            // Otherwise the job would run for minutes.
            _ => shorten(state.path(), &mut process),
        }
    }
    process.check(state.path(), moment);
}

fn done_id(state: &Path) -> Option<VideoId> {
    let entry = std::fs::read_dir(state.join("jobs")).expect("jobs").next()?.expect("one");
    VideoId::parse(&entry.file_name().to_string_lossy())
}

/// Shortens the stored request of a long job.
fn shorten(state: &Path, process: &mut Process) {
    let (id, prompt) = process.sent[0].clone();
    let path = state.join("jobs").join(id.as_str()).join("request.json");
    let text = std::fs::read_to_string(&path).expect("a request");
    std::fs::write(&path, text.replace("steps=100000", "steps=2")).expect("written");
    process.sent[0].1 = prompt.replace("steps=100000", "steps=2");
}

#[needs(nothing)]
fn kill_at_fail_point_loses_no_acknowledged_job() {
    // By default, tests one fail point of each kind. Full test runs test all.
    let some =
        ["create folder", "recorded in_progress", "rename steps.safetensors", "write video.mp4", "record completed"];
    for (moment, deed) in MOMENTS {
        if full() || some.contains(&moment) || (moment, deed) == ("remove moved", CrashAction::Delete) {
            kill_at_fail_point(moment, deed);
        }
    }
}

/// A job during which the server is killed is retried once and then fails. The server continues with other jobs.
#[needs(nothing)]
fn job_fails_after_two_server_kills() {
    let state = quick_folder();
    let moment = "recorded in_progress";
    let mut id = None;
    for attempt in [1, 2] {
        let mut process = Process::start(state.path(), Some(moment), 3600.0);
        if attempt == 1 {
            process.tell("send n=0 steps=4");
        }
        crate::scripted::until("the job to run", || {
            let Some(found) = done_id(state.path()) else { return false };
            let record = state.path().join("jobs").join(found.as_str()).join("job.json");
            id = Some(found);
            let Ok(text) = std::fs::read(record) else { return false };
            let record: Record = serde_json::from_slice(&text).expect("a whole record");
            (record.state, record.attempts) == (JobState::InProgress, attempt)
        });
        process.kill();
    }
    let id = id.expect("the job");
    let server = Server::start(state.path(), crash_settings(3600.0));
    let job = server.jobs.get(&anyone(), &id).expect("the job");
    let code = job.record.failure.as_ref().map(|failure| failure.code.as_str());
    assert_eq!((job.record.state, code), (JobState::Failed, Some("crashed")));
    assert_eq!(server.wait(&server.send("n=1 steps=4")).record.state, JobState::Completed);
    server.stop().expect("drained");
}

/// Kills the server at random times while it creates, cancels, deletes and runs jobs.
#[needs(nothing)]
fn kill_at_random_time_loses_no_acknowledged_job() {
    files();
    for kill in 0..if full() { RANDOM } else { 3 } {
        let state = quick_folder();
        let mut process = Process::start(state.path(), None, 3600.0);
        let part = (kill as f64 * 0.618_034).fract();
        let until = Instant::now() + Duration::from_millis(10 + (part * 400.0) as u64);
        let mut n = 0;
        while Instant::now() < until {
            process.tell(&format!("send n={n} key={} steps=3 ms=1", n % 2));
            process.hear(Duration::from_secs(10), |line| line.starts_with("sent"));
            if n % 5 == 4 {
                let id = process.sent[n - 2].0.clone();
                process.tell(&format!("delete {id}"));
                process.deleting = Some(id);
                process.hear(Duration::from_secs(10), |line| line.starts_with("deleted"));
            }
            n += 1;
        }
        process.kill();
        process.check(state.path(), &format!("kill {kill} after {n} jobs"));
    }
}

#[needs(nothing)]
fn a_thousand_jobs_load_within_two_seconds() {
    let state = quick_folder();
    let ids = Ids::after(None);
    let sent: Vec<VideoId> = {
        let store = FileStore::open(state.path()).expect("a store");
        let send = |n: usize| {
            let job = request(&ids, &format!("n={n}"));
            store.create(&job).expect("created");
            job.id
        };
        (0..1000).map(send).collect()
    };
    let started = Instant::now();
    let store = Arc::new(FileStore::open(state.path()).expect("a store"));
    let jobs = Jobs::open(store, settings()).expect("jobs");
    let took = started.elapsed();
    let waits: Vec<VideoId> = jobs.queue(&anyone()).1.iter().map(|job| job.accepted.id.clone()).collect();
    assert_eq!(waits, sent, "in the order of their ids");
    eprintln!("1000 jobs are loaded after {took:?}");
    assert!(took < Duration::from_secs(2), "{took:?}");
}
