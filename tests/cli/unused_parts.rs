//! A broken component of a model: commands that do not read it succeed, and commands that read it fail before they
//! compile.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::support::{self, full, needs};

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models");
const CONFIG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny_video.yml");

#[derive(Clone, Copy, Debug)]
enum Damage {
    NoWeights,
    KeyInvented,
    HeaderCut,
}

/// Creates the smallest model with a broken upsampler.
fn model(folder: &Path, damage: Damage) -> PathBuf {
    let model = folder.join(format!("{damage:?}"));
    let upsampler = model.join("latent_upsampler");
    fs::create_dir_all(&upsampler).expect("a folder");
    support::link_parts(&format!("{MODELS}/tiny_a"), &model);
    let [config, weights] = ["config.json", "diffusion_pytorch_model.safetensors"].map(|name| upsampler.join(name));
    let whole = Path::new(MODELS).join("upsampler_rational/latent_upsampler");
    let text = fs::read_to_string(whole.join("config.json")).expect("a configuration");
    let bytes = fs::read(whole.join("diffusion_pytorch_model.safetensors")).expect("weights");
    fs::write(&config, &text).expect("written");
    match damage {
        Damage::NoWeights => {}
        Damage::KeyInvented => {
            let mut keys: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            keys["invented_key"] = 1.into();
            fs::write(&config, keys.to_string()).expect("written");
            fs::write(&weights, bytes).expect("written");
        }
        Damage::HeaderCut => fs::write(&weights, &bytes[..40]).expect("written"),
    }
    model
}

fn run(folder: &Path, arguments: &[&str]) -> Output {
    let mut run = support::ltx2();
    // Log compilations.
    run.env("LTX2_LOG", "info,ltx2_runtime::engine=debug").current_dir(folder).args(arguments);
    run.output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns whether a program was compiled or loaded from the cache.
fn compiled(said: &str) -> bool {
    said.lines().any(|line| line.contains("program=") && line.contains("hash="))
}

#[needs(cpu)]
fn broken_upsampler_fails_only_commands_that_read_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let size = ["--width", "96", "--height", "64"];
    let set = ["--set", "request.width=96", "--set", "request.height=64", "--set", "request.num_frames=17"];
    let chain = ["--num-frames", "33", "--set", "request.chain={clip: 17, overlap: 9}"];
    for damage in [Damage::NoWeights, Damage::KeyInvented, Damage::HeaderCut] {
        let model = model(folder.path(), damage);
        let path = model.to_str().expect("UTF-8");
        let own = [&["-c", CONFIG, "-m", path][..], &size].concat();
        let generate = |out: &'static str| [&["generate"][..], &own, &["-o", out]].concat();
        let one = ["--num-frames", "17"];
        let mut commands = vec![
            [&["check", path, "-c", CONFIG][..], &set].concat(),
            [&generate("one.mp4")[..], &one, &["--dry-run"]].concat(),
        ];
        // The check is the same for every kind of damage.
        if matches!(damage, Damage::NoWeights) || full() {
            commands.push([&generate("one.mp4")[..], &one].concat());
            commands.push([&generate("two")[..], &one, &["--num-videos", "2"]].concat());
            commands.push([&generate("clips.mp4")[..], &chain].concat());
        }
        if full() {
            commands.push([&["bench"][..], &own, &one, &["--programs", "end-to-end", "--runs", "1"]].concat());
        }
        for command in &commands {
            let out = run(folder.path(), command);
            let said = text(&out.stderr);
            assert!(out.status.success(), "{damage:?}, {command:?}: {}{said}", text(&out.stdout));
            let runs = !["check", "--dry-run"].iter().any(|word| command.contains(word));
            assert_eq!(compiled(&said), runs, "{command:?}: {said}");
        }
        for name in ["one.mp4", "one.json", "clips.mp4", "clips.json", "two"].map(|name| folder.path().join(name)) {
            // Some commands were not run, so the file may not exist.
            let _ = if name.is_dir() { fs::remove_dir_all(&name) } else { fs::remove_file(&name) };
        }

        let larger = ["--width", "128", "--height", "64", "--num-frames", "17", "--pipeline", "two_stage"];
        let reads = [&["-c", CONFIG, "-m", path][..], &larger].concat();
        let set = ["request.width=128", "request.height=64", "request.num_frames=17", "pipeline=two_stage"];
        let set: Vec<&str> = set.into_iter().flat_map(|pair| ["--set", pair]).collect();
        for command in [
            [&["check", path, "-c", CONFIG][..], &set].concat(),
            [&["generate"][..], &reads, &["-o", "both.mp4", "--dry-run"]].concat(),
            [&["generate"][..], &reads, &["-o", "both.mp4"]].concat(),
            [&["bench"][..], &reads, &["--programs", "end-to-end", "--runs", "1"]].concat(),
        ] {
            let out = run(folder.path(), &command);
            let said = text(&out.stderr);
            let all = format!("{}{said}", text(&out.stdout));
            assert!(!out.status.success() && all.contains("latent_upsampler"), "{damage:?}, {command:?}: {all}");
            assert!(!compiled(&said), "{damage:?}, {command:?}: {said}");
        }
        assert!(!folder.path().join("both.mp4").exists(), "{damage:?}");
    }
}
