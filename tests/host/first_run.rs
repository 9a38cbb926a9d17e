//! First commands of a new user: outside a checkout, without a plugin, and without arguments.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::needs;
use clap::Parser;
use ltx2::cli::Cli;
use tempfile::TempDir;

/// A copy of the program that finds no plugin, with an empty home folder.
struct FreshInstall {
    dir: TempDir,
}

impl FreshInstall {
    fn new() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
        // The search for plugins includes three folders above the program.
        let program = dir.path().join("a/b/c/d/ltx2");
        fs::create_dir_all(program.parent().expect("a folder")).expect("created");
        fs::hard_link(env!("CARGO_BIN_EXE_ltx2"), &program).expect("linked");
        for name in ["home", "work", "wheels"] {
            fs::create_dir(dir.path().join(name)).expect("created");
        }
        FreshInstall { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns a command in an empty folder. Plugins can only be installed from the folder `wheels`.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.path("a/b/c/d/ltx2"));
        command.args(arguments).current_dir(self.path("work")).env_clear().env("HOME", self.path("home"));
        command.env("PIP_CONFIG_FILE", "/dev/null").env("PIP_NO_INDEX", "1").env("PIP_FIND_LINKS", self.path("wheels"));
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("the program runs")
    }
}

fn stderr(out: &Output) -> String {
    String::from_utf8(out.stderr.clone()).expect("UTF-8")
}

const TOY_RUN: [&str; 7] = ["generate", "-c", "nano", "-p", "a red circle", "--platform", "cpu"];

#[needs(nothing)]
fn toy_model_is_found_outside_the_checkout() {
    let fresh = FreshInstall::new();
    let planned = fresh.run(&[&TOY_RUN[..], &["--dry-run"]].concat());
    assert_eq!(planned.status.code(), Some(0), "{}", stderr(&planned));
    let cache = fresh.path("home/.cache/ltx2");
    let folders: Vec<PathBuf> = fs::read_dir(&cache).expect("a cache").map(|e| e.expect("an entry").path()).collect();
    let [folder] = &folders[..] else { panic!("{folders:?}") };
    let unpacked = fs::read(folder.join("vae/diffusion_pytorch_model.safetensors")).expect("unpacked");
    assert!(unpacked == fs::read("assets/nano/vae/diffusion_pytorch_model.safetensors").expect("a file"));
    let checked = fresh.run(&["check", "assets/nano", "-c", "nano"]);
    assert_eq!(checked.status.code(), Some(0), "{}", stderr(&checked));

    let mut read_only = fresh.command(&[&TOY_RUN[..], &["--dry-run"]].concat());
    let failed = read_only.env("XDG_CACHE_HOME", "/dev/null").output().expect("runs");
    let message = "error: model `assets/nano` not found: cannot unpack the toy model: cannot ";
    let advice = "; set XDG_CACHE_HOME to a folder that can be written";
    let said = stderr(&failed);
    let last = said.lines().last().expect("a line");
    assert!(last.starts_with(message) && last.ends_with(advice) && last.contains("/dev/null/ltx2/nano-"), "{said}");
}

#[needs(nothing)]
fn missing_cpu_plugin_is_installed_unless_disabled() {
    let fresh = FreshInstall::new();
    let failed = fresh.run(&TOY_RUN);
    let said = stderr(&failed);
    let plugins = fresh.path("home/.local/share/ltx2/plugins");
    let announced = format!(
        "no cpu plugin found; downloading the pinned one (CPU of the host (63 MB, 202 MB unpacked)) to {} \
         (LTX2_PLUGIN_DOWNLOAD=off disables this)",
        plugins.display()
    );
    assert!(said.lines().any(|line| line == announced), "{said}");
    let error = said.lines().last().expect("a line");
    let start = "error: no cpu plugin found, and installing it failed: lammps-jax-pjrt-cpu==";
    assert!(error.starts_with(start) && error.contains("none of the 0 listed files is "), "{said}");
    assert_eq!(failed.status.code(), Some(1), "{said}");

    fs::remove_dir_all(&plugins).expect("the folder of the install");
    for (arguments, error) in [
        (&TOY_RUN[..], "error: no cpu plugin found: run `ltx2 plugin install cpu`, or set LTX2_PJRT_PLUGIN to a "),
        (&TOY_RUN[..5], "error: no usable platform; run `ltx2 plugin install cpu`: "),
    ] {
        let off = fresh.command(arguments).env("LTX2_PLUGIN_DOWNLOAD", "off").output().expect("runs");
        let said = stderr(&off);
        assert!(said.lines().last().is_some_and(|line| line.starts_with(error)), "{said}");
        assert_eq!((off.status.code(), plugins.exists()), (Some(1), false), "{said}");
        assert_eq!(said.matches("no cpu plugin found").count(), 1, "the reason is printed once: {said}");
    }
    let wrong = fresh.command(&["schema"]).env("LTX2_PLUGIN_DOWNLOAD", "no").output().expect("runs");
    assert_eq!(stderr(&wrong), "error: LTX2_PLUGIN_DOWNLOAD is 'no'; set it to on or off\n");
    assert_eq!(wrong.status.code(), Some(2));
    // A plugin file that is selected but missing is an error of its own.
    let named = fresh.command(&TOY_RUN).env("LTX2_PJRT_PLUGIN", "/no/such/cpu.so").output().expect("runs");
    assert!(stderr(&named).contains("error: no cpu plugin found: ") && !plugins.exists(), "{}", stderr(&named));
}

/// Returns the commands that `ltx2` prints without arguments.
fn first_steps(fresh: &FreshInstall) -> Vec<String> {
    let out = fresh.run(&[]);
    assert_eq!((out.status.code(), out.stdout.len()), (Some(2), 0));
    let said = stderr(&out);
    let program = fresh.path("a/b/c/d/ltx2").display().to_string();
    let lines = said.lines().filter_map(|line| line.trim_start().strip_prefix(&program)).map(str::to_string);
    lines.collect()
}

#[needs(nothing)]
fn three_commands_are_shown_without_arguments() {
    let fresh = FreshInstall::new();
    let starts_with = |commands: &[String], starts: [&str; 3]| {
        assert_eq!(commands.len(), 3, "{commands:?}");
        for (command, start) in commands.iter().zip(starts) {
            assert!(command.starts_with(start), "{commands:?}");
            let quoted: Vec<&str> = command.split('"').collect();
            let words = quoted[0].split_whitespace().chain(quoted.get(1).copied());
            // The purpose follows the command after two spaces.
            let words: Vec<&str> = words.take_while(|word| !["the", "plugins", "all"].contains(word)).collect();
            Cli::try_parse_from(["ltx2"].into_iter().chain(words)).expect("the command is valid");
        }
    };
    let toy = " generate -c nano -p \"";
    if ["/dev/nvidiactl", "/dev/accel0", "/dev/vfio/0"].iter().all(|device| !Path::new(device).exists()) {
        starts_with(&first_steps(&fresh), [" plugin install cpu ", toy, " doctor "]);
    }
    let repository = fresh.path("home/.cache/huggingface/hub/models--Lightricks--LTX-2");
    fs::create_dir_all(repository.join("snapshots")).expect("created");
    let model = fs::canonicalize("tests/fixtures/models/tiny_a").expect("a model");
    symlink(model, repository.join("snapshots/one")).expect("linked");
    let commands = first_steps(&fresh);
    starts_with(&commands, [" plugin install ", " generate -c ltx2 -p \"", toy]);
    assert!(commands[1].ends_with("a video by Lightricks/LTX-2"), "{commands:?}");
}

#[needs(nothing)]
fn doctor_ends_with_the_next_command() {
    let fresh = FreshInstall::new();
    let out = fresh.run(&["doctor"]);
    let said = String::from_utf8(out.stdout).expect("UTF-8");
    let next = format!("next: {} plugin install cpu", fresh.path("a/b/c/d/ltx2").display());
    assert_eq!((said.lines().last(), out.status.code()), (Some(&*next), Some(1)));
}

/// pip installs the program in `bin` of an environment, and plugins in its site-packages.
#[needs(nothing)]
fn plugin_in_the_environment_of_the_program_is_found() {
    let fresh = FreshInstall::new();
    let package = fresh.path("a/b/c/lib/python3.11/site-packages/lammps_jax_pjrt_cpu");
    fs::create_dir_all(&package).expect("created");
    let plugin = package.join("pjrt_c_api_cpu_plugin.so");
    fs::write(&plugin, "no code").expect("written");
    let out = fresh.run(&["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).expect("a report");
    let platforms = report["platforms"].as_array().expect("platforms");
    let cpu = platforms.iter().find(|platform| platform["platform"] == "cpu").expect("the CPU");
    assert_eq!(cpu["plugin"]["path"], plugin.to_str().expect("UTF-8"), "{cpu}");
    assert_eq!(cpu["plugin"]["origin"], "Python site-packages");
}

/// The prompt reaches the program unchanged: neither make nor the shell expands it. No `python3` is on the PATH.
#[needs(nothing)]
fn make_demo_passes_the_prompt_literally_and_needs_no_python() {
    let dir = tempfile::tempdir().expect("a folder");
    let stub = |name: &str, script: &str| {
        let path = dir.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
        path
    };
    stub("cargo", "exit 0");
    let program = stub("ltx2", "for word; do printf '%s\\n' \"$word\"; done >> \"$0.log\"");
    let prompt = "a \"red\" circle's $HOME $(shell touch ran) `touch ran`";
    let make = ["/usr/bin/make", "/bin/make", "/usr/local/bin/make"].into_iter().find(|path| Path::new(path).exists());
    let mut run = Command::new(make.expect("make is installed"));
    run.args(["-s", "demo"]).arg(format!("LTX2={}", program.display())).arg(format!("PROMPT={prompt}"));
    let out = run.env_clear().env("PATH", dir.path()).output().expect("make runs");
    assert!(out.status.success(), "{}", stderr(&out));
    let words = fs::read_to_string(dir.path().join("ltx2.log")).expect("the words");
    let wanted = ["plugin", "install", "cpu", "generate", "-c", "configs/nano.yml", "--prompt", prompt];
    assert_eq!(words.lines().take(8).collect::<Vec<_>>(), wanted);
    assert!(!Path::new("ran").exists());
}
