//! The library used by an external crate: a folder outside the repository, with its own programs, layout and sampler.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{self, needs};
use ltx2::pjrt::discover::{self, Platform};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// External crate that depends on this repository by path. All such crates are built offline in one target folder.
struct ExternalCrate(tempfile::TempDir);

impl ExternalCrate {
    /// Creates a crate with these programs.
    fn new(programs: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        assert!(!folder.path().starts_with(ROOT), "outside the repository");
        let manifest = format!(
            "[package]\nname = \"stranger\"\nedition = \"2024\"\n\n[dependencies]\nltx2 = {{ path = {ROOT:?} }}\n\n\
             [profile.dev]\nopt-level = 1\ndebug = false\n\n[workspace]\n"
        );
        fs::create_dir_all(folder.path().join("src/bin")).expect("a folder");
        fs::write(folder.path().join("Cargo.toml"), manifest).expect("written");
        // Use the same dependency versions, so that none must be resolved.
        fs::copy(Path::new(ROOT).join("Cargo.lock"), folder.path().join("Cargo.lock")).expect("copied");
        for program in programs {
            let source = Path::new(ROOT).join(program);
            let name = source.file_name().expect("a file");
            fs::copy(&source, folder.path().join("src/bin").join(name)).expect("copied");
        }
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs a program in the crate's folder; returns its stdout.
    fn run(&self, program: &str, arguments: &[&str]) -> String {
        let plugin = discover::find(Platform::Cpu, None).found.remove(0).path;
        let done = Command::new(env!("CARGO"))
            .args(["run", "--offline", "--quiet", "--bin", program, "--"])
            .args(arguments)
            .current_dir(self.0.path())
            .env("CARGO_TARGET_DIR", Path::new(env!("CARGO_TARGET_TMPDIR")).join("stranger"))
            .env("LTX2_PJRT_PLUGIN", plugin.canonicalize().expect("a plugin"))
            .env("LTX2_COMPILE_CACHE", support::programs())
            .output()
            .expect("cargo runs");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).expect("text")
    }
}

/// The external program gives the same frames as `ltx2 generate` with the same layout, and runs its own sampler on that
/// layout.
#[needs(cpu, full)]
fn external_crate_uses_custom_layout_and_sampler() {
    let stranger =
        ExternalCrate::new(&["examples/generate.rs", "examples/sampler.rs", "tests/fixtures/stranger/heun.rs"]);
    let layout = "mesh: {cfg: 2}\nrules: {batch: [data], branch: [cfg]}\ncontext_parallel: {kind: gather_kv}\n";
    fs::write(stranger.path("mine.yml"), layout).expect("written");
    let model = format!("{ROOT}/assets/nano");
    let (prompt, size) = ("a red circle bounces on blue, low beeps", "128x96x25");
    let keys = ["layout=mine.yml", "runtime.platform=cpu"];
    let printed = stranger.run("generate", &[&["nano", &model, prompt, size, "out.mp4"][..], &keys].concat());
    let video = fs::read(stranger.path("out.mp4")).expect("a video");
    assert_eq!(&video[4..8], b"ftyp");

    let ours = stranger.path("ours.mp4");
    let mut command = support::ltx2();
    command
        .args(["generate", "-c", "nano", "-p", prompt, "--platform", "cpu", "--layout"])
        .arg(stranger.path("mine.yml"))
        .arg("-o")
        .arg(&ours);
    let done = command.output().expect("runs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let sidecar: serde_json::Value =
        serde_json::from_slice(&fs::read(ours.with_extension("json")).expect("a sidecar")).expect("JSON");
    assert_eq!(sidecar["sha256"]["frames"], printed.trim());

    let keys = ["request.width=64", "request.height=64", "request.num_frames=9", keys[0], keys[1]];
    let printed = stranger.run("sampler", &[&["nano", &model, "own.mp4"][..], &keys].concat());
    let samplers: Vec<&str> = printed.lines().filter_map(|line| Some(line.split_once(": ")?.0)).collect();
    assert_eq!(samplers, ["Euler", "AdamsBashforth"], "{printed}");

    // A program written from the documentation alone, with its own layout.
    fs::copy(Path::new(ROOT).join("tests/fixtures/stranger/mine.yml"), stranger.path("mine.yml")).expect("copied");
    let printed = [(); 2].map(|()| stranger.run("heun", &[&model]));
    assert_eq!(printed[0], printed[1], "a repeat");
    let distance =
        printed[0].lines().find_map(|line| line.strip_prefix("mean distance ")?.split(' ').next()?.parse().ok());
    assert!(distance.is_some_and(|d: f64| (0.1..3.0).contains(&d)), "{}", printed[0]);
    assert_eq!(&fs::read(stranger.path("out.mp4")).expect("a video")[4..8], b"ftyp");
}
