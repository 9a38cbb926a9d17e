//! A server that is killed at any moment: what it has acknowledged is there at the next start, once, and whole.
//!
//! The server is this binary again, in a process of its own; it is told what to do line by line.

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
use ltx2::serve::job::{Record, State};
use ltx2::serve::jobs::{Jobs, ListQuery};
use ltx2::serve::store::{FileStore, JobStore, STEPS};

use crate::scripted::{Server, anyone, files, frames_of, quick_folder, request, settings};
use crate::support::{full, needs};

/// Moments of the store, of writing and of the device, each with what is done to come to it.
const MOMENTS: [(&str, Deed); 23] = [
    ("create request.json", Deed::Create),
    ("create folder", Deed::Create),
    ("create done", Deed::Create),
    ("begin order.json", Deed::Batch),
    ("record in_progress", Deed::Create),
    ("recorded in_progress", Deed::Create),
    ("step 2", Deed::Create),
    ("write steps.safetensors", Deed::Create),
    ("rename steps.safetensors", Deed::Batch),
    ("rename thumb.jpg", Deed::Create),
    ("write video.mp4", Deed::Create),
    ("rename video.mp4", Deed::Batch),
    ("write video.json", Deed::Create),
    ("rename video.json", Deed::Batch),
    ("record completed", Deed::Create),
    ("recorded completed", Deed::Batch),
    ("record failed", Deed::Cancel),
    ("recorded failed", Deed::Cancel),
    ("remove before", Deed::Delete),
    ("remove moved", Deed::Delete),
    ("empty trash", Deed::Delete),
    ("remove moved", Deed::Expire),
    ("empty trash", Deed::Expire),
];
/// Kills at random times, in full.
const RANDOM: usize = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    Create,
    Batch,
    Cancel,
    Delete,
    Expire,
}

fn own_settings(keep: f64) -> Serve {
    Serve { max_batch: Some(3), keep: Seconds(keep), ..settings() }
}

/// The process of a server.
#[needs(member)]
fn a_server_that_is_told_what_to_do() {
    let Some(state) = std::env::var_os("LTX2_SERVE_STATE").map(PathBuf::from) else { return };
    let keep = std::env::var("LTX2_SERVE_KEEP").ok().and_then(|text| text.parse().ok()).unwrap_or(3600.0);
    let started = Instant::now();
    let server = Server::start(&state, own_settings(keep));
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
            _ => println!("what is {line}?"),
        }
    }
    server.stop().expect("drained");
}

/// A server in a process of its own.
struct Process {
    child: Child,
    orders: ChildStdin,
    said: Receiver<String>,
    sent: Vec<(VideoId, String)>,
    deleted: BTreeSet<VideoId>,
    cancelled: BTreeSet<VideoId>,
    /// The last one that it was told to delete.
    deleting: Option<VideoId>,
}

impl Process {
    fn start(state: &Path, failpoint: Option<&str>, keep: f64) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this binary"));
        command.args(["crash::a_server_that_is_told_what_to_do", "--exact"]);
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
                // It ends with the process.
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
        // One that was killed hears nothing.
        drop(writeln!(self.orders, "{order}"));
    }

    /// Notes what it says until a line is so; false where it does not come to that.
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

    /// Kills it, and hears the rest of what it has said.
    fn kill(&mut self) {
        self.child.kill().expect("is killed");
        assert_eq!(self.child.wait().expect("is gone").signal(), Some(9), "it had ended before");
        self.hear(Duration::from_secs(5), |_| false);
    }

    /// A later start finds what was acknowledged.
    fn check(&self, state: &Path, moment: &str) {
        let folder = |id: &VideoId| state.join("jobs").join(id.as_str());
        // On the disk, as the killed one left it.
        for entry in std::fs::read_dir(state.join("jobs")).expect("jobs").map(|entry| entry.expect("one").path()) {
            let Ok(text) = std::fs::read(entry.join("job.json")) else { continue };
            let record: Record = serde_json::from_slice(&text).expect("a whole record");
            if record.state == State::Completed {
                is_whole(&entry, moment);
            }
        }
        let server = Server::start(state, own_settings(3600.0));
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
            let expected = if self.cancelled.contains(id) { State::Failed } else { State::Completed };
            assert_eq!(job.record.state, expected, "{moment}: {:?}", job.record);
            if let Some(produced) = &job.record.produced {
                assert_eq!(produced.frames_sha256, frames_of(&job.accepted), "{moment}");
                is_whole(&folder(id), moment);
            }
        }
        // None twice, and of those that nobody was told of at most the last.
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

/// A server killed at a moment, with what led there.
fn killed_at(moment: &str, deed: Deed) {
    let state = quick_folder();
    files();
    if !matches!(deed, Deed::Create | Deed::Batch) {
        // One that is finished, made without a fail point.
        let mut before = Process::start(state.path(), None, 3600.0);
        before.tell("send n=done");
        assert!(before.hear(Duration::from_secs(60), |line| line.starts_with("sent")));
        let id = before.sent[0].0.clone();
        let record = state.path().join("jobs").join(id.as_str()).join("job.json");
        crate::scripted::until("it to be made", || {
            std::fs::read_to_string(&record).is_ok_and(|text| text.contains("completed"))
        });
        before.tell("drain");
        assert!(before.child.wait().expect("ends").success());
    }
    // What goes for its age is as if it had been deleted.
    let keep = if deed == Deed::Expire { 0.4 } else { 3600.0 };
    let mut process = Process::start(state.path(), Some(moment), keep);
    let done = done_id(state.path());
    match deed {
        Deed::Create => process.tell("send n=0 steps=4"),
        Deed::Batch => {
            process.tell("send n=0 steps=40 ms=5 every=1000");
            (1..4).for_each(|n| process.tell(&format!("send n={n} key=k steps=4")));
        }
        Deed::Cancel => {
            process.tell("send n=0 steps=100000 ms=5 every=1000");
            assert!(process.hear(Duration::from_secs(60), |line| line.starts_with("sent")));
            let id = process.sent[0].0.clone();
            process.tell(&format!("cancel {id}"));
        }
        Deed::Delete => process.tell(&format!("delete {}", done.clone().expect("one that is finished"))),
        Deed::Expire => {
            std::thread::sleep(Duration::from_millis(500));
            process.tell("sweep");
        }
    }
    let is_there = process.hear(Duration::from_secs(60), |line| line == format!("at {moment}"));
    assert!(is_there, "the server never was at {moment}");
    process.kill();
    if let Some(id) = done {
        match deed {
            // Whether it was moved is not said yet, but where it stopped tells.
            Deed::Delete | Deed::Expire if moment != "remove before" => drop(process.deleted.insert(id.clone())),
            _ => {}
        }
        process.sent.push((id, "n=done".into()));
    }
    if deed == Deed::Cancel {
        let id = process.sent[0].0.clone();
        match moment {
            "recorded failed" => drop(process.cancelled.insert(id)),
            // It would run for minutes.
            _ => shorten(state.path(), &mut process),
        }
    }
    process.check(state.path(), moment);
}

fn done_id(state: &Path) -> Option<VideoId> {
    let entry = std::fs::read_dir(state.join("jobs")).expect("jobs").next()?.expect("one");
    VideoId::parse(&entry.file_name().to_string_lossy())
}

/// Makes the request of a long job a short one.
fn shorten(state: &Path, process: &mut Process) {
    let (id, prompt) = process.sent[0].clone();
    let path = state.join("jobs").join(id.as_str()).join("request.json");
    let text = std::fs::read_to_string(&path).expect("a request");
    std::fs::write(&path, text.replace("steps=100000", "steps=2")).expect("written");
    process.sent[0].1 = prompt.replace("steps=100000", "steps=2");
}

#[needs(nothing)]
fn killed_at_a_moment_nothing_acknowledged_is_lost() {
    // Each kind of moment; in full every one.
    let some =
        ["create folder", "recorded in_progress", "rename steps.safetensors", "write video.mp4", "record completed"];
    for (moment, deed) in MOMENTS {
        if full() || some.contains(&moment) || (moment, deed) == ("remove moved", Deed::Delete) {
            killed_at(moment, deed);
        }
    }
}

/// A job during which its process is killed is tried again, and not a third time: the server goes on with the others.
#[needs(nothing)]
fn a_job_during_which_its_process_is_killed_twice_has_crashed() {
    let state = quick_folder();
    let moment = "recorded in_progress";
    let mut id = None;
    for attempt in [1, 2] {
        let mut process = Process::start(state.path(), Some(moment), 3600.0);
        if attempt == 1 {
            process.tell("send n=0 steps=4");
        }
        crate::scripted::until("it to run", || {
            let Some(found) = done_id(state.path()) else { return false };
            let record = state.path().join("jobs").join(found.as_str()).join("job.json");
            id = Some(found);
            let Ok(text) = std::fs::read(record) else { return false };
            let record: Record = serde_json::from_slice(&text).expect("a whole record");
            (record.state, record.attempts) == (State::InProgress, attempt)
        });
        process.kill();
    }
    let id = id.expect("the job");
    let server = Server::start(state.path(), own_settings(3600.0));
    let job = server.jobs.get(&anyone(), &id).expect("it is there");
    let code = job.record.failure.as_ref().map(|failure| failure.code.as_str());
    assert_eq!((job.record.state, code), (State::Failed, Some("crashed")));
    assert_eq!(server.wait(&server.send("n=1 steps=4")).record.state, State::Completed);
    server.stop().expect("drained");
}

/// At random times, while jobs are sent, cancelled, deleted and made.
#[needs(nothing)]
fn killed_at_any_time_nothing_acknowledged_is_lost() {
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
fn a_thousand_jobs_are_there_within_two_seconds() {
    let state = quick_folder();
    let ids = Ids::behind(None);
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
    eprintln!("1000 jobs are there after {took:?}");
    assert!(took < Duration::from_secs(2), "{took:?}");
}
