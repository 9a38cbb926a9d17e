//! Tests of the Dockerfile, and of the script that runs its steps without Docker.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::support::needs;

/// Returns the instructions of the Dockerfile, each with its stage. Continuation lines are joined.
fn instructions() -> Vec<(String, String)> {
    let text = fs::read_to_string("container/Dockerfile").expect("the recipe").replace("\\\n", "");
    let mut stage = String::new();
    let lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    let named = lines.map(|line| {
        if let Some((_, name)) = line.strip_prefix("FROM ").and_then(|rest| rest.split_once(" AS ")) {
            stage = name.into();
        }
        (stage.clone(), line.to_string())
    });
    named.collect()
}

/// Returns the script's steps for a target as tuples of stage, action and instruction.
fn listed(target: &str) -> Vec<(String, String, String)> {
    let done = Command::new("python3").args(["container/steps.py", target, "--list"]).output().expect("python3 runs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let text = String::from_utf8(done.stdout).expect("text");
    let rows = text.lines().map(|line| {
        let mut parts = line.splitn(3, '\t').map(String::from);
        let mut next = || parts.next().expect("three columns");
        (next(), next(), next())
    });
    rows.collect()
}

/// The script runs all instructions of the Dockerfile in order, except those that only change the system in the image.
#[needs(nothing)]
fn container_script_skips_only_system_steps_of_dockerfile() {
    for target in ["cpu", "cuda"] {
        let stages = ["build", "base", target];
        let wanted: Vec<(String, String)> = instructions()
            .into_iter()
            .filter(|(stage, line)| stages.contains(&stage.as_str()) && !line.starts_with("FROM "))
            .collect();
        let rows = listed(target);
        let got: Vec<(String, String)> = rows.iter().map(|(stage, _, line)| (stage.clone(), line.clone())).collect();
        assert_eq!(got, wanted, "{target}");
        let run = |line: &str| rows.iter().find(|(_, _, own)| own.contains(line)).map(|(_, done, _)| done.as_str());
        assert_eq!(run("cargo install"), Some("run"));
        assert_eq!(run(&format!("plugin install {target}")), Some("run"));
        let left_out: Vec<&String> = rows.iter().filter(|r| r.1.starts_with("left out")).map(|r| &r.2).collect();
        let allowed = ["RUN apt-get ", "RUN useradd ", "RUN chown "];
        assert!(left_out.iter().all(|line| allowed.iter().any(|a| line.starts_with(a))), "{left_out:?}");
    }
}

/// The image runs as an unprivileged user, has a health check, and stores its state in a volume.
#[needs(nothing)]
fn image_has_user_health_check_and_volume() {
    for target in ["cpu", "cuda"] {
        let own: Vec<String> = listed(target).into_iter().map(|(_, _, line)| line).collect();
        let last = |word: &str| own.iter().rfind(|line| line.starts_with(word)).cloned().unwrap_or_default();
        assert_eq!(last("USER "), "USER ltx2", "{target}");
        assert_eq!(own.last(), Some(&"USER ltx2".to_string()), "nothing runs as root behind the user");
        assert!(last("HEALTHCHECK ").ends_with("CMD curl -sf http://127.0.0.1:8000/health"), "{target}");
        assert!(last("VOLUME ").contains("\"/state\""), "{target}");
        let entry = last("ENTRYPOINT ");
        assert!(entry.contains("\"serve\"") && entry.contains("\"--state\", \"/state\""), "{entry}");
    }
    // The build context contains no model, build folder or plugin from this machine.
    let ignored = fs::read_to_string(".dockerignore").expect("a list");
    assert!(["target", "plugins", "models", ".git"].iter().all(|name| ignored.lines().any(|line| line == *name)));
}

/// A step fails if it runs a program that the image does not contain, even if this machine has the program.
#[needs(nothing)]
fn dockerfile_steps_cannot_use_programs_missing_from_image() {
    let dir = tempfile::tempdir().expect("a folder");
    let binary = dir.path().join("ltx2");
    let run = |script: &str| {
        fs::write(&binary, format!("#!/bin/sh\n{script}\nexit 1\n")).expect("written");
        fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).expect("a program");
        let mut steps = Command::new("python3");
        let done = steps.args(["container/steps.py", "cpu", "--binary"]).arg(&binary).output().expect("python3 runs");
        assert!(!done.status.success(), "the script fails");
        format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr))
    };
    let said = run("python3 --version");
    assert!(said.contains("python3: not found") || said.contains("python3: command not found"), "{said}");
    // Programs that the image installs are available.
    let said = run("curl --version && echo curl is there");
    assert!(said.contains("curl is there"), "{said}");
}

/// The steps produce a server that passes the image's health check and generates a video, which survives a restart.
#[needs(cpu, full)]
fn dockerfile_steps_produce_a_working_server() {
    let done = Command::new("python3")
        .args(["container/steps.py", "cpu", "--binary", env!("CARGO_BIN_EXE_ltx2")])
        .output()
        .expect("python3 runs");
    let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success() && said.contains("kept it over a restart"), "{said}");
}
