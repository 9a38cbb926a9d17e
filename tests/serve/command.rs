//! Tests of starting and stopping `ltx2 serve` on the command line.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::scripted::quick_folder;
use crate::site::Client;
use crate::support::{copy_programs, needs};

fn serve(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ltx2"));
    command.args(["serve", "-c", "nano"]).args(arguments).env_remove("LTX2_API_KEY").stderr(Stdio::piped());
    command
}

/// Command-line errors are detected before a model is opened. The exit code is 2, and the one-line message says what to
/// do.
#[needs(nothing)]
fn command_line_errors_are_reported_before_start() {
    let state = quick_folder();
    let keys = state.path().join("keys");
    std::fs::write(&keys, "anna:key-of-anna").expect("written");
    let keys = keys.to_string_lossy().into_owned();
    let state = state.path().join("state").to_string_lossy().into_owned();
    for (arguments, said) in [
        (&["--listen", "0.0.0.0:0"][..], "--api-key-file"),
        (&["--listen", "nowhere"], "serve.listen"),
        (&["--api-key-file", &keys], "chmod 600"),
        (&["--api-key-file", "no/such/file"], "no/such/file"),
        (&["--cors-origin", "nonsense"], "serve.cors_origin"),
        (&["--body-limit", "12 MB"], "body_limit"),
        (&["--warm", "64x64"], "serve.warm"),
        (&["--warm", "65x64x9"], "--warm"),
        (&["--queue", "0"], "serve.queue"),
    ] {
        let listen = ["--listen", "127.0.0.1:0"];
        let mut command = serve(arguments);
        command.args(listen.iter().filter(|_| arguments[0] != "--listen")).args(["--state", &state]);
        let done = command.output().expect("the process runs");
        let text = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(text.contains(said) && text.lines().filter(|line| line.starts_with("error: ")).count() == 1, "{text}");
        assert!(!text.contains("key-of-anna"), "{text}");
    }
}

/// Starts a server with the toy model; returns its process, address and stderr.
fn start(state: &str, arguments: &[&str]) -> (Child, String, BufReader<std::process::ChildStderr>) {
    start_with(serve(arguments), state)
}

fn start_with(mut command: Command, state: &str) -> (Child, String, BufReader<std::process::ChildStderr>) {
    command.args(["--listen", "127.0.0.1:0", "--state", state, "--platform", "cpu", "--min-free", "0B"]);
    let mut child = command.spawn().expect("the process starts");
    let mut lines = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut line = String::new();
    while !line.contains("http://") {
        line.clear();
        assert!(lines.read_line(&mut line).expect("a line") > 0, "the server ended");
    }
    let address = line.split("http://").nth(1).and_then(|rest| rest.split(": ").next()).expect("an address");
    (child, address.to_string(), lines)
}

fn signal(child: &Child, signal: Signal) {
    let id = Pid::from_raw(i32::try_from(child.id()).expect("an id")).expect("no zero");
    kill_process(id, signal).expect("sent");
}

/// SIGHUP reloads the keys, and SIGTERM drains. A second server with the same state folder is rejected, and log lines
/// are JSON objects if requested.
#[needs(cpu)]
fn sighup_reloads_keys_and_sigterm_drains() {
    let folder = quick_folder();
    let state = folder.path().join("state").to_string_lossy().into_owned();
    let keys = folder.path().join("keys");
    let write = |text: &str| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::write(&keys, text).expect("written");
        std::fs::set_permissions(&keys, std::fs::Permissions::from_mode(0o600)).expect("a mode");
    };
    write("anna:key-of-anna");
    let file = keys.to_string_lossy().into_owned();
    let (mut child, address, lines) =
        start(&state, &["--warm", "none", "--api-key-file", &file, "--log-format", "json"]);
    let reader = std::thread::spawn(move || lines.lines().map_while(Result::ok).collect::<Vec<_>>());
    let address = address.parse().expect("an address");
    let ask = |key: &str| Client::to(address).with("authorization", &format!("Bearer {key}")).get("/v1/videos").status;
    assert_eq!((ask("key-of-anna"), ask("key-of-bert")), (200, 401));
    let second =
        serve(&["--listen", "127.0.0.1:0", "--state", &state, "--warm", "none"]).output().expect("the process runs");
    assert_eq!(second.status.code(), Some(1), "{}", String::from_utf8_lossy(&second.stderr));
    assert!(String::from_utf8_lossy(&second.stderr).contains("another server"));
    write("bert:key-of-bert");
    let since = Instant::now();
    signal(&child, Signal::HUP);
    crate::scripted::until("the keys", || ask("key-of-bert") == 200);
    assert_eq!(ask("key-of-anna"), 401);
    let reloaded = since.elapsed();
    let since = Instant::now();
    signal(&child, Signal::TERM);
    assert_eq!(child.wait().expect("the process ends").code(), Some(0));
    let ended = since.elapsed();
    assert!(ended < Duration::from_secs(20), "{ended:?}");
    eprintln!("measured: HUP reloads the keys in {reloaded:.2?}; TERM ends the server in {ended:.2?}");
    let lines = reader.join().expect("read");
    let objects: Vec<serde_json::Value> =
        lines.iter().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect();
    let access = objects.iter().find(|line| line["route"] == "/v1/videos" && line["key"] == "anna").expect("a line");
    assert_eq!((&access["status"], &access["method"]), (&serde_json::json!(200), &serde_json::json!("GET")));
    assert!(!lines.join("\n").contains("key-of-"));
}

/// Signals of terminals, pipes and resource limits are ignored unless they request an exit. Ctrl-C drains.
#[needs(cpu)]
fn server_ignores_signals_that_request_no_exit() {
    let folder = quick_folder();
    let state = folder.path().join("state").to_string_lossy().into_owned();
    let (mut child, address, lines) = start(&state, &["--warm", "none"]);
    let reader = std::thread::spawn(move || lines.lines().map_while(Result::ok).count());
    let address = address.parse().expect("an address");
    for ignored in [Signal::PIPE, Signal::HUP, Signal::XFSZ, Signal::WINCH, Signal::CHILD, Signal::CONT] {
        signal(&child, ignored);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(child.try_wait().expect("a state"), None, "{ignored:?}");
        assert_eq!(Client::to(address).get("/live").status, 200, "{ignored:?}");
    }
    let since = Instant::now();
    signal(&child, Signal::INT);
    assert_eq!(child.wait().expect("the process ends").code(), Some(0));
    eprintln!("measured: INT ends the server in {:.2?}", since.elapsed());
    assert!(reader.join().expect("read") > 0);
}

/// After two signals in quick succession, the server exits immediately with code 130. The next start finds its jobs.
#[needs(cpu)]
fn second_signal_stops_server_immediately() {
    let folder = quick_folder();
    let state = folder.path().join("state");
    let programs = format!("runtime.compile_cache={}", crate::support::programs().display());
    let more = ["--warm", "none", "--drain", "finish", "--drain-timeout", "300s", "--set", &programs];
    let (mut child, address, lines) = start(&state.to_string_lossy(), &more);
    let reader = std::thread::spawn(move || lines.lines().map_while(Result::ok).collect::<Vec<_>>());
    let mut client = Client::to(address.parse().expect("an address"));
    let body = serde_json::json!({"prompt": "a", "steps": 100, "seed": 7});
    let ids: Vec<String> = (0..2)
        .map(|_| client.send("POST", "/v1/videos", Some(&body)).json()["id"].as_str().expect("an id").to_string())
        .collect();
    crate::scripted::until("the job to run", || client.get("/v1/queue").json()["running"] != serde_json::json!([]));
    signal(&child, Signal::TERM);
    signal(&child, Signal::INT);
    let since = Instant::now();
    assert_eq!(child.wait().expect("the process ends").code(), Some(130));
    let ended = since.elapsed();
    assert!(ended < Duration::from_secs(5), "{ended:?}");
    eprintln!("measured: a second signal ends the server in {ended:.2?}");
    assert!(reader.join().expect("read").join("\n").contains("it resumes at the next start"));
    assert_eq!(waiting(&state), ids);
}

/// Returns the names of the queued jobs in the state folder of a stopped server.
fn waiting(state: &std::path::Path) -> Vec<String> {
    let mut settings = crate::scripted::settings();
    settings.state = Some(state.to_string_lossy().into_owned());
    let store = ltx2::serve::store::FileStore::open(state).expect("a store that nobody has");
    let jobs = ltx2::serve::jobs::Jobs::open(std::sync::Arc::new(store), settings).expect("jobs");
    jobs.queue(&crate::scripted::anyone()).1.iter().map(|job| job.accepted.id.to_string()).collect()
}

/// A compilation cannot be interrupted, so the server exits without waiting for it, both during warm-up and during a
/// video.
#[needs(cpu)]
fn signal_during_compilation_stops_server_within_a_second() {
    for (warm, point) in [("64x64x9", "at compile text_encoder"), ("none", "at compile denoise")] {
        let folder = quick_folder();
        let state = folder.path().join("state");
        let mut command = serve(&["--warm", warm]);
        let programs = folder.path().join("programs");
        copy_programs(&programs, &[point.trim_start_matches("at compile ")]);
        command.env("LTX2_COMPILE_CACHE", &programs).env("LTX2_FAILPOINT", point.trim_start_matches("at "));
        let (mut child, address, lines) = start_with(command, &state.to_string_lossy());
        let mut lines = lines.lines().map_while(Result::ok);
        let asked = (warm == "none").then(|| {
            let body = serde_json::json!({"prompt": "a", "steps": 2, "seed": 7});
            let mut client = Client::to(address.parse().expect("an address"));
            client.send("POST", "/v1/videos", Some(&body)).json()["id"].as_str().expect("an id").to_string()
        });
        assert!(lines.any(|line| line.contains(point)), "{point}");
        let since = Instant::now();
        signal(&child, Signal::TERM);
        let rest: Vec<String> = lines.collect();
        assert_eq!(child.wait().expect("the process ends").code(), Some(0), "{point}: {rest:#?}");
        let ended = since.elapsed();
        assert!(ended < Duration::from_secs(1), "{point}: {ended:?}");
        eprintln!("measured: TERM {point} ends the server in {ended:.2?}");
        assert_eq!(waiting(&state), Vec::from_iter(asked), "{point}");
    }
}

/// The plugin, and then the weights of the warm-up, are loaded.
#[needs(cpu)]
fn signal_during_load_stops_server_within_a_second() {
    for point in ["plugin load", "load transformer.proj_in.weight"] {
        let folder = quick_folder();
        let mut command = crate::support::ltx2();
        command.args(["serve", "-c", crate::support::tiny(), "--listen", "127.0.0.1:0", "--min-free", "0B", "--state"]);
        command.arg(folder.path().join("state")).env("LTX2_FAILPOINT", point);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the process starts");
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines().map_while(Result::ok);
        assert!(lines.any(|line| line == format!("at {point}")), "{point}");
        let since = Instant::now();
        signal(&child, Signal::TERM);
        let rest: Vec<String> = lines.collect();
        assert_eq!(child.wait().expect("the process ends").code(), Some(0), "{point}: {rest:#?}");
        let ended = since.elapsed();
        assert!(ended < Duration::from_secs(1), "{point}: {ended:?}");
        eprintln!("measured: TERM at {point} ends the server in {ended:.2?}");
    }
}

/// Only process 0 of several handles signals. If another process did, it could stop all of them.
#[needs(cpu)]
fn only_first_process_handles_signals() {
    let folder = quick_folder();
    let place =
        ltx2::runtime::processes::store::StoreServer::start("127.0.0.1:0").expect("listens").address().to_string();
    let member = |id: &str| {
        let state = folder.path().join(id).to_string_lossy().into_owned();
        let mut command =
            serve(&["--listen", "127.0.0.1:0", "--platform", "cpu", "--min-free", "0B", "--warm", "none"]);
        command.args(["--state", &state, "--coordinator", &place, "--num-processes", "2", "--process-id", id]);
        command.env("LTX2_REHEARSE_PROCESSES", "1").spawn().expect("the process starts")
    };
    let (mut first, mut second) = (member("0"), member("1"));
    let mut lines = BufReader::new(first.stderr.take().expect("a pipe")).lines().map_while(Result::ok);
    let address = lines.find_map(|line| Some(line.split("http://").nth(1)?.split(": ").next()?.to_string()));
    let address = address.expect("an address").parse().expect("an address");
    let rest = std::thread::spawn(move || lines.collect::<Vec<_>>());
    // When the server is ready, both processes have loaded the model.
    crate::scripted::until("the server to be ready", || Client::to(address).get("/ready").status == 200);
    signal(&second, Signal::TERM);
    signal(&second, Signal::INT);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(second.try_wait().expect("a state"), None);
    assert_eq!(Client::to(address).get("/ready").status, 200);
    signal(&first, Signal::TERM);
    assert_eq!(first.wait().expect("the process ends").code(), Some(0), "{:#?}", rest.join().expect("read"));
    assert_eq!(second.wait().expect("the process ends").code(), Some(0));
}

/// Only process 0 lists the LoRAs that requests may name. Their files are compared before the model is opened.
#[needs(cpu)]
fn server_does_not_start_if_a_process_has_another_lora_file() {
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/lora");
    let folder = quick_folder();
    let place =
        ltx2::runtime::processes::store::StoreServer::start("127.0.0.1:0").expect("listens").address().to_string();
    let member = |id: &str, file: &str, more: &[&str]| {
        let own = folder.path().join(id);
        std::fs::create_dir(&own).expect("a folder");
        std::fs::copy(fixtures.join(file), own.join("style.safetensors")).expect("copied");
        let mut command = serve(&["--listen", "127.0.0.1:0", "--platform", "cpu", "--min-free", "0B"]);
        command.args(["--warm", "none", "--state", "state"]).args(more).current_dir(own);
        command.args(["--coordinator", &place, "--num-processes", "2", "--process-id", id]);
        command.env("LTX2_REHEARSE_PROCESSES", "1").spawn().expect("the process starts")
    };
    let served = "serve.loras={style: {path: style.safetensors, apply: add}}";
    let members =
        [member("0", "ic_tiny_a.safetensors", &["--set", served]), member("1", "ic_tiny_a_plain.safetensors", &[])];
    for member in members {
        let done = member.wait_with_output().expect("the process ends");
        let text = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{text}");
        assert!(text.contains("style.safetensors: the LoRA file of process 1"), "{text}");
    }
}
