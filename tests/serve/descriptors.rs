//! Tests of the limit on open files: idle client connections leave enough file descriptors for jobs, and a job that
//! cannot open a file waits.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ltx2::serve::descriptors::Descriptors;
use ltx2::serve::job::{JobPhase, JobState};
use ltx2::serve::jobs::JobTiming;
use ltx2::serve::store::FileStore;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use crate::figures::{FORM, form, large_png};
use crate::load::run_in_separate_process;
use crate::scripted::{Server, anyone, files, quick_folder, settings, until};
use crate::site::{Client, Site, body};
use crate::support::needs;

/// Runs the server in a child process until stdin closes.
#[needs(member)]
fn server_process_runs_until_stdin_closes() {
    let Some(state) = std::env::var_os("LTX2_SERVE_STATE").map(PathBuf::from) else { return };
    let site = Site::at(state, &[], Default::default());
    println!("address {}", site.address);
    std::io::stdin().lines().for_each(drop);
    assert_eq!(site.end(), 0);
}

/// A server in a child process, with a limit that `ulimit` sets.
struct Process {
    child: Child,
    address: SocketAddr,
}

impl Process {
    fn start(state: &Path, limit: &str) -> Self {
        let mut command = Command::new("sh");
        command
            .args(["-c", &format!("{limit} && exec \"$0\" \"$@\"")])
            .arg(std::env::current_exe().expect("this binary"));
        command.args(["descriptors::server_process_runs_until_stdin_closes", "--exact"]);
        command.env("LTX2_TEST_MEMBER", "1").env("LTX2_SERVE_STATE", state);
        command.env_remove("LTX2_TEST_LOG").env_remove("LTX2_REQUIRE");
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok);
        let address = lines.find_map(|line| line.split("address ").nth(1)?.trim().parse().ok()).expect("an address");
        // Reads the remaining output, so that the process does not block when it writes more.
        std::thread::spawn(move || lines.for_each(drop));
        Process { child, address }
    }

    fn figure(&self, name: &str) -> usize {
        let text = Client::to(self.address).get("/metrics").text();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name} in {text}"))
    }

    fn end(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().expect("the process ends").success());
    }
}

/// With idle connections and the usual limit of 1,024 open files, jobs complete, requests are answered, and the probes
/// report a healthy server. If the soft limit can be raised, all connections stay open. Otherwise the oldest ones are
/// closed, and 256 file descriptors are reserved for jobs.
#[needs(nothing)]
fn idle_connections_leave_files_for_jobs() {
    // This process also holds the client's end of each connection.
    Descriptors::raise();
    files();
    for (limit, idle, stay) in [("ulimit -S -n 1024", 1000, true), ("ulimit -n 1024", 2000, false)] {
        let state = quick_folder();
        let server = Process::start(&state.path().join("state"), limit);
        let mut client = Client::to(server.address);
        let begun = client.send("POST", "/v1/videos", Some(&body("steps=60 ms=20 every=1"))).json();
        let id = begun["id"].as_str().expect("an id");
        let streams: Vec<TcpStream> =
            (0..idle).map(|_| TcpStream::connect(server.address).expect("a connection")).collect();
        let held = server.figure("ltx2_http_connections");
        assert_eq!(held >= idle, stay, "{limit}: {held} connections");
        let open = server.figure("ltx2_process_open_fds");
        assert!(stay || (600..=768).contains(&open), "{limit}: {open} open files");
        for path in ["/health", "/ready"] {
            let answer = Client::to(server.address).get(path);
            assert_eq!(answer.status, 200, "{limit}: {}", answer.text());
        }
        let later = Client::to(server.address).send("POST", "/v1/videos", Some(&body("steps=1")));
        assert_eq!(later.status, 200, "{limit}: {}", later.text());
        let later = later.json()["id"].as_str().expect("an id").to_string();
        let since = Instant::now();
        for id in [id, &later] {
            let path = format!("/v1/videos/{id}");
            while Client::to(server.address).get(&path).json()["status"] != "completed" {
                let video = Client::to(server.address).get(&path).json();
                assert!(since.elapsed() < Duration::from_secs(60) && video["status"] != "failed", "{limit}: {video}");
                std::thread::sleep(Duration::from_millis(20));
            }
            assert_eq!(Client::to(server.address).get(&format!("{path}/content")).status, 200, "{limit}");
        }
        eprintln!("measured: {held} of {idle} idle connections are held after {limit}, and both videos are made");
        drop(streams);
        server.end();
    }
}

/// Slow downloads, uploads and idle connections together need more than 768 of 1,024 open files. A download or upload
/// whose file would be in the reserve gets 503, such a connection is closed, and jobs complete.
#[needs(nothing)]
fn slow_clients_leave_files_for_jobs() {
    const CLIENTS: usize = 450;
    // The reserve starts at 768. Jobs use a few of its descriptors.
    const MOST: usize = 768 + 64;
    Descriptors::raise();
    files();
    let folder = quick_folder();
    let state = folder.path().join("state");
    let server = Process::start(&state, "ulimit -n 1024");
    let create = |prompt: &str| {
        let answer = Client::to(server.address).send("POST", "/v1/videos", Some(&body(prompt)));
        answer.json()["id"].as_str().expect("an id").to_string()
    };
    // Polls would need a connection.
    let has_video = |id: &str| state.join("jobs").join(id).join("video.json").exists();
    let open = || std::fs::read_dir(format!("/proc/{}/fd", server.child.id())).expect("its files").count();
    let check = |what: &str| {
        for _ in 0..30 {
            let open = open();
            assert!(open <= MOST, "{what}: {open} open files");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let connect = || {
        let clients: Vec<Client> = (0..CLIENTS).map(|_| Client::to(server.address)).collect();
        until("all to be accepted", || open() >= CLIENTS);
        clients
    };

    let done = create("steps=1 bytes=16777216");
    until("the first video", || {
        Client::to(server.address).get(&format!("/v1/videos/{done}")).json()["status"] == "completed"
    });
    let id = create("steps=150 ms=20 every=1");
    let mut readers = connect();
    let mut other = readers.pop().expect("a client");
    let path = format!("/v1/videos/{done}/content?variant=audio");
    readers.iter_mut().for_each(|client| client.head("GET", &path, &[], None).expect("sent"));
    let mut counts = [0, 0];
    readers.retain_mut(|client| {
        let status = client.answer_head().expect("a head").status;
        assert!([200, 503].contains(&status), "{status}");
        counts[usize::from(status == 503)] += 1;
        status == 200
    });
    check("downloads");
    assert!(counts.iter().all(|count| *count > 100), "{counts:?} downloads are accepted and rejected");
    let form = form("a", &large_png(1 << 14));
    let texts = other.send("POST", "/v1/videos", Some(&body("steps=1"))).status;
    let forms =
        other.roundtrip("POST", "/v1/videos", &[("content-type", FORM)], Some(&form)).expect("an answer").status;
    assert!([200, 503].contains(&texts) && [200, 503].contains(&forms), "{texts}, {forms}");
    let idle: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(server.address).expect("a connection")).collect();
    check("idle connections");
    until("the video beside downloads", || has_video(&id));
    drop((readers, other, idle));

    until("all to be closed", || open() < 100);
    let id = create("steps=50 ms=20 every=1");
    let mut senders = connect();
    for client in &mut senders {
        client.head("POST", "/v1/videos", &[("content-type", FORM)], Some(60_000)).expect("sent");
        client.stream().write_all(&form[..4096]).expect("sent");
    }
    until("the uploads", || open() > 700);
    check("uploads");
    until("the video beside uploads", || has_video(&id));
    eprintln!("measured: {counts:?} slow downloads are accepted and rejected after ulimit -n 1024");
    drop(senders);
    server.end();
}

/// Guard that sets this process's limit of open files to 0. Open files stay open, but no other file can be opened.
struct NoFilesGuard(Rlimit);

impl NoFilesGuard {
    fn begin() -> Self {
        let before = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), maximum: before.maximum }).expect("a lower limit");
        assert_eq!(std::fs::File::open("/dev/null").err().and_then(|error| error.raw_os_error()), Some(24));
        NoFilesGuard(before)
    }
}

impl Drop for NoFilesGuard {
    fn drop(&mut self) {
        let before = Rlimit { current: self.0.current, maximum: self.0.maximum };
        setrlimit(Resource::Nofile, before).expect("the limit of before");
    }
}

#[needs(member)]
fn jobs_wait_while_no_file_can_be_opened() {
    files();
    let state = quick_folder();
    let pace = JobTiming { patience: Duration::from_secs(30), ..JobTiming::default() };
    let store = Arc::new(FileStore::open(state.path()).expect("a store"));
    let server = Server::with(store, settings(), pace);
    let state_of = |id| server.jobs.get(&anyone(), id).expect("a job");
    let running = server.send("fault=hang");
    server.until("the job to run", |_| state_of(&running).record.state == JobState::InProgress);
    let waiting = server.send("a");
    let nothing = NoFilesGuard::begin();
    // The running video finishes and waits until it can be written. A request to cancel another one must be retried.
    server.log.released.store(true, Ordering::Release);
    server.until("encoding", |_| state_of(&running).progress.stage == JobPhase::Encoding);
    let refused = server.jobs.cancel(&anyone(), &waiting).expect_err("no file");
    assert_eq!((refused.status, refused.code, refused.retry_after), (503, "busy", Some(2)));
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!([&running, &waiting].map(|id| state_of(id).record.state), [JobState::InProgress, JobState::Queued]);
    drop(nothing);
    for id in [&running, &waiting] {
        assert_eq!(server.wait(id).record.state, JobState::Completed);
    }
    // A job is retried if the device cannot open a file.
    let short = server.send("fault=files_once");
    assert_eq!(server.wait(&short).record.state, JobState::Completed);
    server.stop().expect("drained");
}

#[needs(nothing)]
fn jobs_wait_for_open_files() {
    run_in_separate_process("descriptors::jobs_wait_while_no_file_can_be_opened");
}

#[needs(member)]
fn probes_fail_while_no_file_can_be_opened() {
    let site = Site::new(&[]);
    let mut client = site.client();
    assert_eq!(client.get("/health").status, 200);
    let id = site.create("steps=1");
    site.wait(&id);
    let nothing = NoFilesGuard::begin();
    for path in ["/health", "/ready"] {
        let answer = client.get(path);
        assert_eq!((answer.status, &answer.json()["status"]), (503, &json!("out_of_files")), "{}", answer.text());
    }
    assert_eq!(client.get("/live").status, 200);
    for (method, path) in [("GET", format!("/v1/videos/{id}/content")), ("POST", "/v1/videos".into())] {
        let answer = client.send(method, &path, (method == "POST").then(|| body("steps=1")).as_ref());
        assert_eq!((answer.error().0, answer.error().1.as_str()), (503, "busy"), "{method}: {}", answer.text());
        assert!(answer.header("retry-after").is_some());
    }
    drop(nothing);
    assert_eq!(client.get("/health").status, 200);
    assert_eq!(client.get(&format!("/v1/videos/{id}/content")).status, 200);
    site.end();
}

#[needs(nothing)]
fn probes_report_exhausted_open_files() {
    run_in_separate_process("descriptors::probes_fail_while_no_file_can_be_opened");
}
