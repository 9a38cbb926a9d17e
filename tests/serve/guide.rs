//! Runs the commands in the server guide with a small model, in order and in one shell.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::scripted::until;
use crate::support::{self, full, needs};

/// Timeout in seconds for all commands together.
const SECONDS: u64 = 900;

/// Returns the fenced code blocks of a language on a page, except those that build an image.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let fence = format!("```{language}\n");
    let found =
        page.split(&fence).skip(1).filter_map(|rest| rest.split_once("\n```").map(|(block, _)| block.to_string()));
    found.filter(|block| !block.starts_with("make ")).collect()
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port()
}

/// Returns whether a file is an MP4.
fn is_video(file: &Path) -> bool {
    fs::read(file).is_ok_and(|bytes| bytes.get(4..8) == Some(b"ftyp"))
}

#[needs(cpu)]
fn serving_guide_commands_work() {
    let folder = tempfile::tempdir().expect("a folder");
    let page = fs::read_to_string("docs/guides/serving.md").expect("the guide");
    let port = free_port();
    let program = blocks(&page, "sh").join("\n").replace("localhost:8000", &format!("127.0.0.1:{port}"));
    assert!(program.matches("curl").count() > 10, "{program}");
    // Replaces what differs from a user's environment: the path of the program, the state folder and the model, which
    // is the toy model only in full test runs.
    let model = if full() { "assets/nano" } else { "tests/fixtures/models/tiny_2_3" };
    let program_on_path = format!(
        "#!/bin/sh\ncommand=$1\nshift\n\
         set -- --set runtime.compile_cache='{programs}' --set {quick} \"$@\"\n\
         [ $command = serve ] && set -- --listen 127.0.0.1:{port} --state '{state}' -m '{model}' --set sampler.steps=4 \"$@\"\n\
         exec '{binary}' $command \"$@\"\n",
        quick = support::QUICK,
        binary = env!("CARGO_BIN_EXE_ltx2"),
        state = folder.path().join("state").display(),
        programs = support::programs().display(),
        model = fs::canonicalize(model).expect("a model").display(),
    );
    fs::create_dir(folder.path().join("assets")).expect("a folder");
    std::os::unix::fs::symlink(fs::canonicalize(model).expect("a model"), folder.path().join("assets/nano"))
        .expect("a link");
    let wrapper = folder.path().join("ltx2");
    fs::write(&wrapper, program_on_path).expect("written");
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).expect("a mode");
    let prelude = format!("set -m\nPATH='{}':$PATH\n", folder.path().display());
    // Stops the server even if a command fails.
    let bounded =
        format!("{prelude}trap 'kill -KILL %1 2>/dev/null' EXIT\nset -e -o pipefail\n{program}\ntrap - EXIT\n");
    let script = folder.path().join("guide.sh");
    fs::write(&script, bounded).expect("written");
    let done = Command::new("timeout")
        .args([&format!("{SECONDS}"), "bash"])
        .arg(&script)
        .current_dir(folder.path())
        .output()
        .expect("bash runs");
    let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{:?}: {said}", done.status);
    for name in ["a.mp4", "again.mp4", "b.mp4", "c.mp4"] {
        assert!(is_video(&folder.path().join(name)), "{name}: {said}");
    }
    let sidecar: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.path().join("a.json")).expect("a sidecar")).expect("JSON");
    assert_eq!(sidecar["config"]["request"]["seed"], 7, "{sidecar}");
    // The downloaded sidecar contains no path and reproduces the video.
    assert!(!sidecar.to_string().contains(&folder.path().display().to_string()), "{sidecar}");
    let again = fs::read(folder.path().join("again.json")).expect("a sidecar");
    let again: serde_json::Value = serde_json::from_slice(&again).expect("JSON");
    assert!(sidecar["sha256"]["frames"].is_string());
    assert_eq!(again["sha256"], sidecar["sha256"]);
    let first: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.path().join("job.json")).expect("an answer")).expect("JSON");
    assert_eq!((&first["object"], &first["seed"]), (&"video".into(), &7.into()), "{first}");
    assert!(said.contains("event: progress") && said.contains("event: video"), "{said}");
    assert!(said.contains("\"video.deleted\"") && said.contains("ltx2_jobs_total{"), "{said}");
    // The port is free because the commands have stopped the server.
    until("the port to be free", || TcpListener::bind(("127.0.0.1", port)).is_ok());
}

/// Checks every flag of `ltx2 serve` that the documentation contains.
#[needs(nothing)]
fn documented_server_flags_exist() {
    let page = fs::read_to_string("docs/guides/serving.md").expect("the guide");
    let done = Command::new(env!("CARGO_BIN_EXE_ltx2")).args(["serve", "--help"]).output().expect("ltx2 runs");
    let help = String::from_utf8_lossy(&done.stdout).into_owned();
    let words = page.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
    let other = ["--gpus", "--test"];
    let named: Vec<&str> =
        words.filter(|word| word.starts_with("--") && word.len() > 3 && !other.contains(word)).collect();
    assert!(named.len() > 20, "{named:?}");
    let unknown: Vec<&&str> = named.iter().filter(|flag| !help.contains(**flag)).collect();
    assert!(unknown.is_empty(), "{unknown:?} are no flags of `ltx2 serve`");
}
