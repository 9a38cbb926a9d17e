//! Several processes of a run without devices: they join, compare programs, and exit together. The test binary starts
//! itself once per process.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{self, needs};
use ltx2::config::Config;
use ltx2::pipeline::PipelineError;
use ltx2::pipeline::processes::together;
use ltx2::pjrt::end_process;
use ltx2::runtime::processes::store::StoreServer;
use ltx2::runtime::processes::{Group, Launch, Timeouts};
use ltx2_base::atomic_file::write_atomically;

/// Time after which a process counts as lost in these tests. Heartbeats are twenty times as frequent.
const LOST: Duration = Duration::from_secs(4);
/// Time after which a process counts as hanging, even on a busy machine.
const HANGS: Duration = Duration::from_secs(120);

/// A member process; `role` selects its behavior.
#[needs(member)]
fn member_process_runs_its_role() {
    let role = std::env::var("LTX2_TEST_MEMBER").expect("a role");
    let parts: Vec<&str> = role.split_whitespace().collect();
    let [role, id, count, coordinator, start] = parts[..] else { panic!("{role}") };
    let launch = Launch {
        id: id.parse().unwrap(),
        count: count.parse().unwrap(),
        coordinator: coordinator.into(),
        how: "test".into(),
    };
    let end = |message: &str| {
        eprintln!("error: {message}");
        end_process(1)
    };
    let timeouts = Timeouts { start: Duration::from_secs(start.parse().unwrap()), lost: LOST };
    let leave = |message: String| -> ! {
        eprintln!("error: {message}");
        end_process(1)
    };
    if role == "writes" {
        let mut config = Config::default();
        let launched = &mut config.runtime.distributed;
        launched.coordinator = Some(coordinator.into());
        (launched.process_id, launched.num_processes) = (Some(launch.id), Some(launch.count));
        launched.timeout = LOST.as_secs();
        let path = PathBuf::from(std::env::var_os("LTX2_TEST_FOLDER").expect("a folder")).join("out.mp4");
        let done = together(&config.runtime.distributed, |group| {
            eprintln!("joined as {} of a run", group.expect("a group").id());
            write_atomically(&path, &[0; 1 << 16]).map_err(PipelineError::from)
        });
        panic!("{done:?}");
    }
    let group = Group::join(&launch, timeouts, Box::new(end)).unwrap_or_else(|e| leave(e.to_string()));
    eprintln!("joined as {} of {} here, {}", group.local_rank(), group.hosts().len(), group.describe());
    match role {
        "works" => {
            assert_eq!(group.all_gather(&format!("text {id}")).unwrap()[1], "text 1");
            assert!(group.ensure_same_program("denoise", "abc", "def", true).unwrap());
            assert!(
                !group.ensure_same_program("vocoder", "abc", "def", id != "1").unwrap(),
                "process 1 has no cached executable"
            );
            group.finish();
        }
        "differs" => {
            let text = if id == "2" { "0123" } else { "4567" };
            match group.ensure_same_program("denoise", text, "def", true) {
                Ok(_) => group.finish(),
                Err(error) => {
                    group.fail(&format!("failed: {error}"));
                    leave(error.to_string());
                }
            }
        }
        "fails" if id == "1" => {
            group.fail("failed: model.safetensors: tensor 'x' is missing");
            leave("model.safetensors: tensor 'x' is missing".into());
        }
        // Like a process whose devices wait for a peer: only its watchdog can terminate it.
        _ => std::thread::sleep(Duration::from_secs(120)),
    }
}

/// A started process and its output.
struct Member(Child);

impl Member {
    /// Waits for the process to exit. Returns its exit code (`None` after a signal) and stderr.
    fn ended(mut self, within: Duration) -> (Option<i32>, String) {
        let started = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().expect("waits") {
                let mut text = String::new();
                self.0.stderr.take().expect("piped").read_to_string(&mut text).expect("UTF-8");
                return (status.code(), text);
            }
            assert!(started.elapsed() < within, "a process is still there after {within:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn signal(&self, name: &str) {
        let done = Command::new("kill").args([name, &self.0.id().to_string()]).status().expect("kill runs");
        assert!(done.success());
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Cleans up after a failed test; errors for processes that have exited are ignored.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns an address that was free a moment ago.
fn place() -> String {
    StoreServer::start("127.0.0.1:0").expect("listens").address().to_string()
}

fn command(role: &str, id: usize, count: usize, place: &str, patience: u64) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.args(["processes::member_process_runs_its_role", "--exact", "--nocapture", "--test-threads", "1"]);
    command.env("LTX2_TEST_MEMBER", format!("{role} {id} {count} {place} {patience}"));
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn start(role: &str, id: usize, count: usize, place: &str, patience: u64) -> Member {
    Member(command(role, id, count, place, patience).spawn().expect("starts"))
}

fn run(role: &str, count: usize) -> Vec<Member> {
    let place = place();
    // Process 0 starts last: the others wait for it.
    let mut all: Vec<Member> = (0..count).rev().map(|id| start(role, id, count, &place, 60)).collect();
    all.reverse();
    all
}

/// Waits until all have joined.
fn joined(members: &mut [Member]) {
    for member in members {
        let text = line(member);
        assert!(text.starts_with("joined as "), "{text}");
    }
}

/// Returns the next line of a process's output.
fn line(member: &mut Member) -> String {
    let stderr = member.0.stderr.as_mut().expect("piped");
    let mut text = Vec::new();
    while !text.ends_with(b"\n") {
        let mut byte = [0];
        assert_eq!(stderr.read(&mut byte).expect("reads"), 1, "{}", String::from_utf8_lossy(&text));
        text.push(byte[0]);
    }
    String::from_utf8(text).expect("UTF-8")
}

#[needs(nothing)]
fn all_processes_exit_successfully() {
    for (id, member) in run("works", 3).into_iter().enumerate() {
        let (code, text) = member.ended(HANGS);
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains(&format!("joined as {id} of 3 here, process {id} of 3 on ")), "{text}");
    }
}

#[needs(nothing)]
fn program_mismatch_error_has_both_hashes() {
    for member in run("differs", 3) {
        let (code, text) = member.ended(HANGS);
        assert_eq!(code, Some(1), "{text}");
        let named = text.lines().any(|line| {
            line.contains("process 2 (")
                && line.contains(
                    ") runs program 'denoise' 0123 with options def, but process 0 runs program 'denoise' 4567 with options def",
                )
        });
        assert!(named, "{text}");
    }
}

#[needs(nothing)]
fn partial_file_is_removed_when_a_peer_is_killed() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = place();
    let mut writes = command("writes", 0, 2, &place, 60);
    writes.env("LTX2_TEST_FOLDER", folder.path()).env("LTX2_FAILPOINT", "write out.mp4");
    let mut writes = Member(writes.spawn().expect("starts"));
    let mut other = start("waits", 1, 2, &place, 60);
    let names = || -> Vec<String> {
        let entries = std::fs::read_dir(folder.path()).expect("a folder");
        entries.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
    };
    let (joined, at) = (line(&mut writes), line(&mut writes));
    assert!(joined.starts_with("joined as 0 of "), "{joined}");
    assert_eq!(at, "at write out.mp4\n");
    let half = names();
    assert!(half.len() == 1 && half[0].starts_with(".ltx2-"), "a partial file exists: {half:?}");
    other.0.kill().expect("killed");
    let (code, text) = writes.ended(LOST + HANGS);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("error: process 1 ("), "{text}");
    assert_eq!(names(), [""; 0], "nothing is left");
}

#[needs(nothing)]
fn killed_process_stops_all_and_is_reported() {
    for lost in [1, 0] {
        let mut members = run("waits", 3);
        joined(&mut members);
        let mut killed = members.remove(lost);
        killed.0.kill().expect("killed");
        for member in members {
            let (code, text) = member.ended(LOST + HANGS);
            assert_eq!(code, Some(1), "{text}");
            let named = format!("error: process {lost} (");
            assert!(text.contains(&named) && text.contains(" has not answered "), "{text}");
            assert!(text.contains("for 4 s: it died or hangs"), "{text}");
            assert_eq!(text.lines().filter(|line| line.starts_with("error:")).count(), 1, "{text}");
        }
    }
}

#[needs(nothing)]
fn suspended_process_stops_all_and_exits_on_resume() {
    let mut members = run("waits", 3);
    joined(&mut members);
    let stopped = members.remove(2);
    stopped.signal("-STOP");
    for member in members {
        let (code, text) = member.ended(LOST + HANGS);
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains("error: process 2 ("), "{text}");
    }
    stopped.signal("-CONT");
    let (code, text) = stopped.ended(LOST + HANGS);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("error: process 0 ("), "{text}");
}

#[needs(nothing)]
fn failure_is_reported_by_all_processes() {
    for (id, member) in run("fails", 3).into_iter().enumerate() {
        let (code, text) = member.ended(HANGS);
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains("model.safetensors: tensor 'x' is missing"), "{text}");
        assert_eq!(text.contains("error: process 1 ("), id != 1, "{text}");
    }
}

#[needs(nothing)]
fn missing_process_is_reported() {
    let place = place();
    let members = [start("works", 0, 3, &place, 3), start("works", 2, 3, &place, 3)];
    for member in members {
        let (code, text) = member.ended(HANGS);
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains("process 1 of 3 did not register within "), "{text}");
    }
    let (code, text) = start("works", 1, 2, &place, 1).ended(HANGS);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("process 0 did not respond within 1 s: the key-value store at "), "{text}");
}

#[needs(nothing)]
fn contradictory_launch_options_are_reported() {
    let first = place();
    let twice = [start("waits", 0, 2, &first, 60), start("waits", 1, 2, &first, 60)];
    let (mut twice, place) = (twice, first);
    joined(&mut twice);
    let (code, text) = start("waits", 1, 2, &place, 60).ended(HANGS);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("process 1 is already registered (pid "), "{text}");

    let place = self::place();
    for member in [start("works", 0, 2, &place, 60), start("works", 1, 3, &place, 60)] {
        let (code, text) = member.ended(HANGS);
        assert_eq!(code, Some(1), "{text}");
        assert!(
            text.contains("expects 3 processes, process 0 expects 2; pass the same --num-processes to all processes"),
            "{text}"
        );
    }
}

/// Starts `ltx2 generate` as process `id` of two on the CPU.
fn generate(id: usize, place: &str, more: &[&str]) -> Member {
    generate_in(Path::new("."), id, place, more)
}

/// Same as [`generate`], with a working directory.
fn generate_in(folder: &Path, id: usize, place: &str, more: &[&str]) -> Member {
    let mut command = support::ltx2();
    command.current_dir(folder);
    command.args([
        "generate",
        "-c",
        "nano_2_0",
        "--platform",
        "cpu",
        "--prompt",
        "a lighthouse",
        "--coordinator",
        place,
    ]);
    command.args(["--num-processes", "2", "--process-id", &id.to_string()]);
    Member(command.args(more).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts"))
}

#[needs(nothing)]
fn request_mismatch_is_reported_before_loading() {
    // Neither the model nor the dump folder can be opened, and trying to would be an error.
    let both = |seeds: [&str; 2]| {
        let place = place();
        let members = [0, 1].map(|id| {
            let more = ["--model", "no/such/model", "--seed", seeds[id], "--dump", "/dev/null/unwritten.safetensors"];
            generate(id, &place, &more)
        });
        members.map(|member| member.ended(HANGS))
    };
    for (code, text) in both(["3", "4"]) {
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains(") has request.seed = 4, process 0 has 3"), "{text}");
        assert!(!text.contains("no/such/model") && !text.contains("/dev/null"), "{text}");
    }
    // With equal requests they are opened.
    assert!(both(["3", "3"]).iter().any(|(code, text)| *code == Some(1) && text.contains("/dev/null")));
}

/// Both processes have the same configuration, but the file that it names differs, or only one process has it.
#[needs(nothing)]
fn different_lora_files_are_reported_before_loading() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/lora");
    let both = |second: Option<&str>| {
        let (place, folders) = (place(), [0, 1].map(|_| tempfile::tempdir().expect("a folder")));
        for (folder, file) in folders.iter().zip([Some("plain"), second]) {
            let Some(file) = file else { continue };
            let from = fixtures.join(format!("{file}.safetensors"));
            std::fs::copy(from, folder.path().join("style.safetensors")).expect("copied");
        }
        let more = ["--model", "no/such/model", "--lora", "style.safetensors"];
        let members = [0, 1].map(|id| generate_in(folders[id].path(), id, &place, &more));
        members.map(|member| member.ended(HANGS))
    };
    for (second, why) in [(Some("wide"), "v2:"), (None, "No such file")] {
        for (code, text) in both(second) {
            assert_eq!(code, Some(1), "{text}");
            let said = "style.safetensors: the LoRA file of process 1";
            assert!(text.contains(said) && text.contains(why) && text.contains("copy the same file"), "{text}");
            assert!(!text.contains("no/such/model"), "{text}");
        }
    }
    assert!(both(Some("plain")).iter().any(|(_, text)| text.contains("no/such/model")));
}

#[needs(nothing)]
fn missing_process_id_is_an_error() {
    let mut command = support::ltx2();
    command.args(["generate", "-c", "nano", "--prompt", "a", "--coordinator", "localhost:1"]);
    let done = command.output().expect("runs");
    let text = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(2), "{text}");
    assert!(text.contains("cannot infer the process id; pass --process-id N"), "{text}");
}
