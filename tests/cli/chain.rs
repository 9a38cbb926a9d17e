//! Videos of several clips (`--chain`): outputs, memory use, and rejected requests.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use ltx2::media::{read_clip, read_png_frames, read_sound, read_wav};
use serde_json::Value;

use crate::crash_safety::kill_at;
use crate::support::{self, full, needs};

const CONFIG: &str = "tests/fixtures/tiny_video.yml";
/// Clips of 17 frames that overlap by 9.
const CHAIN: [&str; 7] =
    ["--chain", "--set", "request.chain.clip=17", "--set", "request.chain.overlap=9", "--width", "96"];

fn run(config: &str, out: &Path, more: &[&str]) -> (Option<i32>, String) {
    let out = out.to_str().expect("UTF-8");
    let arguments = [&["generate", "-c", config, "-o", out, "--force"], more].concat();
    let made = support::ltx2().args(arguments).output().expect("the binary runs");
    (made.status.code(), String::from_utf8_lossy(&made.stderr).into_owned())
}

fn hashes(video: &Path) -> Value {
    let sidecar = fs::read_to_string(video.with_extension("json")).expect("a sidecar");
    serde_json::from_str::<Value>(&sidecar).expect("JSON")["sha256"].clone()
}

fn makes(config: &str, out: &Path, more: &[&str]) -> Value {
    let (code, said) = run(config, out, more);
    assert_eq!(code, Some(0), "{more:?}: {said}");
    serde_json::from_str(&fs::read_to_string(out.with_extension("json")).expect("a sidecar")).expect("JSON")
}

#[needs(cpu)]
fn chained_video_has_requested_length_and_is_repeatable() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let text = |name: &str| path(name).to_str().expect("UTF-8").to_string();
    let (frames, sound) = (text("frames"), text("sound.wav"));
    // 1.3 s is 31 frames; the nearest valid number is 33, which is three clips.
    let asked = [&CHAIN[..], &["--height", "64", "--seconds", "1.3", "--save-frames", &frames, "--save-audio", &sound]];
    let prompts = ["--set", "request.chain.prompts=[\"a blue ball\"]"];
    let sidecar = makes(CONFIG, &path("a.mp4"), &[&asked.concat()[..], &prompts].concat());
    let request = &sidecar["config"]["request"];
    assert_eq!((&request["num_frames"], &request["chain"]["overlap"]), (&Value::from(33), &Value::from(9)));
    let (frames, sound) =
        (read_png_frames(&path("frames")).expect("frames"), read_wav(&path("sound.wav")).expect("a WAV"));
    assert_eq!((frames.count(), frames.width(), frames.height()), (33, 96, 64));
    assert_eq!(sidecar["sha256"]["frames"], Value::from(frames.sha256()));
    assert_eq!(sound.len(), 33 * sound.rate() as usize / 24);
    // Steps and progress lines count all clips together.
    assert_eq!(sidecar["timings"]["denoise"]["steps"], Value::from(6));
    let again = makes(&text("a.json"), &path("b.mp4"), &[]);
    assert_eq!(again["sha256"], sidecar["sha256"]);
    // The prompt of the second clip has an effect.
    let other = makes(CONFIG, &path("c.mp4"), &asked.concat());
    assert_ne!(other["sha256"], sidecar["sha256"]);
    // Only finished files remain.
    let mut left: Vec<_> =
        fs::read_dir(folder.path()).expect("a folder").map(|entry| entry.expect("one").file_name()).collect();
    left.sort();
    assert_eq!(left, ["a.json", "a.mp4", "b.json", "b.mp4", "c.json", "c.mp4", "frames", "sound.wav"]);
}

/// Kills the run while it writes a clip's file, before it renames the file, and after all clips are saved.
#[needs(cpu)]
fn killed_chain_resumes_to_identical_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let out = path("out.mp4");
    let run = |out: &Path, more: &[&str]| {
        let mut run = support::ltx2();
        run.args(["generate", "-c", CONFIG, "-o"]).arg(out).args(CHAIN).args(["--height", "64", "--num-frames", "33"]);
        run.args(more).stdout(Stdio::null());
        run
    };
    assert!(run(&path("whole.mp4"), &[]).stderr(Stdio::null()).status().expect("runs").success());
    let (bytes, whole) = (fs::read(path("whole.mp4")).expect("a video"), hashes(&path("whole.mp4")));
    let names = || {
        let names = fs::read_dir(folder.path()).expect("a folder").map(|entry| entry.expect("one").file_name());
        let mut names: Vec<_> = names.filter_map(|name| name.into_string().ok()).collect();
        names.retain(|name| !name.starts_with(".ltx2-"));
        names.sort();
        names
    };
    let moments = [
        // Before the second clip has saved a step: it starts from the end of the first one, which the clip's file holds.
        ("clip 2", 1),
        ("write out.mp4.clip_0001.safetensors", 1),
        ("rename out.mp4.clip_0002.safetensors", 2),
        ("rename out.mp4", 3),
        ("rename out.json", 3),
    ];
    for (moment, clips) in moments {
        // Only in full test runs.
        if (moment.contains("clip_000") || moment == "rename out.mp4") && !full() {
            continue;
        }
        kill_at(moment, &mut run(&out, &["--checkpoint-every", "1"]));
        let kept = names().iter().filter(|name| name.contains(".clip_")).count();
        assert_eq!((kept, out.exists()), (clips, moment == "rename out.json"), "{moment}");
        let resumed = |more: &[&str]| {
            let ended = run(&out, &[&["--resume"], more].concat()).stderr(Stdio::piped()).output().expect("runs");
            (ended.status.code(), String::from_utf8_lossy(&ended.stderr).into_owned())
        };
        // A video without a sidecar may belong to another program, so --force is required.
        let is_there = out.exists();
        if is_there {
            let (code, said) = resumed(&[]);
            assert!(code == Some(2) && said.contains("has no sidecar"), "{moment}: {said}");
        }
        let (code, said) = resumed(if is_there { &["--force"] } else { &[] });
        assert_eq!(code, Some(0), "{moment}: {said}");
        assert!(said.contains(&format!("resuming with clip {}", clips + 1)), "{moment}: {said}");
        assert_eq!(hashes(&out), whole, "{moment}");
        assert_eq!(fs::read(&out).expect("a video"), bytes, "{moment}");
        assert_eq!(names(), ["out.json", "out.mp4", "whole.json", "whole.mp4"], "{moment}");
        [&out, &out.with_extension("json")].into_iter().for_each(|file| fs::remove_file(file).expect("removed"));
    }

    // Clips of another request are rejected, and so is a new run that would overwrite them; --force replaces them.
    let clip = |at: usize| path(&format!("out.mp4.clip_000{at}.safetensors"));
    kill_at("write out.mp4.clip_0002.safetensors", &mut run(&out, &["--checkpoint-every", "1"]));
    let other = run(&out, &["--resume", "--seed", "77"]).stderr(Stdio::piped()).output().expect("runs");
    let said = String::from_utf8_lossy(&other.stderr);
    assert_eq!(other.status.code(), Some(1), "{said}");
    assert!(said.contains("out.mp4.") && said.contains("holds the steps of another request"), "{said}");
    assert!(said.contains("request.seed was "), "{said}");
    let other = ["--checkpoint-every", "1", "--seed", "77"];
    let anew = run(&out, &other).stderr(Stdio::piped()).output().expect("runs");
    let said = String::from_utf8_lossy(&anew.stderr);
    assert_eq!(anew.status.code(), Some(2), "{said}");
    assert!(said.contains("error: --checkpoint-every: ") && said.contains("resume that run with --resume"), "{said}");
    let other = ["--checkpoint-every", "1", "--seed", "77", "--force"];
    kill_at("write out.mp4.clip_0001.safetensors", &mut run(&out, &other));
    assert!(clip(0).exists() && !clip(1).exists(), "a clip of the run before is left");
}

/// The frames are large enough that keeping half of the additional ones in memory would be detected.
#[needs(cpu, full)]
fn memory_does_not_grow_with_number_of_clips() {
    let folder = tempfile::tempdir().expect("a folder");
    let peak = |frames: &str| {
        let chain = ["--height", "256", "--width", "384", "--set", "sampler.steps=1", "--num-frames", frames];
        // With a single malloc arena: otherwise the amount of retained free memory varies with the threads.
        let out = folder.path().join("x.mp4");
        let given = [&["generate", "-c", CONFIG, "-o", out.to_str().expect("UTF-8"), "--force"], &CHAIN[..5], &chain];
        let mut run = support::ltx2();
        let made = run.env("MALLOC_ARENA_MAX", "1").args(given.concat()).output().expect("the binary runs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let json = fs::read_to_string(out.with_extension("json")).expect("a sidecar");
        let sidecar: Value = serde_json::from_str(&json).expect("JSON");
        sidecar["timings"]["peak_memory_bytes"].as_u64().expect("a peak") as f64 / 1e6
    };
    // The first run may compile.
    peak("25");
    let [short, long] = [peak("49"), peak("169")];
    let added = 120.0 * 384.0 * 256.0 * 3.0 / 1e6;
    eprintln!("peak memory: {short:.1} MB with 5 clips, {long:.1} MB with 20, whose frames are {added:.1} MB more");
    assert!(long < short + added / 2.0, "{short} and {long} MB");
}

#[needs(cpu, ffmpeg)]
fn chained_video_is_encoded_by_ffmpeg() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("a.mp4");
    let frames = folder.path().join("frames");
    let save = ["--height", "64", "--num-frames", "33", "--save-frames", frames.to_str().expect("UTF-8")];
    let (code, said) = run(CONFIG, &out, &[&CHAIN[..], &save].concat());
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("encoding with ffmpeg"), "{said}");
    let (made, written) =
        (read_clip(&out, Path::new("ffmpeg")).expect("a video"), read_png_frames(&frames).expect("frames"));
    assert_eq!(made.data().dim(), written.data().dim());
    // Frames from random weights are noise, and 4:2:0 subsampling loses its colors. Each encoded frame must still be
    // closest to its own original.
    for n in 0..made.count() {
        let of = |m: usize| (made.part(n..n + 1).to_video() - written.part(m..m + 1).to_video()).mapv(|v| v * v).sum();
        let nearest = (0..written.count()).min_by(|a, b| of(*a).total_cmp(&of(*b)));
        assert_eq!(nearest, Some(n), "frame {n}: {} from its own", of(n));
    }
    let sound = read_sound(&out, Path::new("ffmpeg"), None).expect("readable").expect("a sound");
    // ffmpeg decodes the last AAC packet of 1,024 samples completely.
    let frames = 33 * sound.rate() as usize / 24;
    assert!((frames..frames + 1024).contains(&sound.len()), "{} of {frames}", sound.len());
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 3, "the video, its sidecar, frames");
}

#[needs(nothing)]
fn unsupported_chain_options_are_rejected() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("a.mp4");
    for (more, why) in [
        (
            &["--dump", "d.safetensors"][..],
            "--dump is not supported for a video of several clips; remove this setting or --chain (request.chain)",
        ),
        (&["--pipeline", "text_to_audio"], "this pipeline does not support chained clips; remove --chain"),
        (
            &["--set", "request.chain.overlap=17"],
            "request.chain.overlap = 17 (--set): must be less than request.chain.clip (17)",
        ),
        (&["--audio", "a.wav", "--pipeline", "audio_to_video"], "this pipeline does not support chained clips"),
    ] {
        let (code, said) = run(CONFIG, &out, &[&CHAIN[..], &["--height", "64", "--num-frames", "33"], more].concat());
        let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!((code, errors.len()), (Some(2), 1), "{more:?}: {said}");
        assert!(errors[0].contains(why), "{more:?}: {said}");
    }
    let one = ["--height", "64", "--num-frames", "17"];
    let (code, said) = run(CONFIG, &out, &[&CHAIN[..], &one].concat());
    assert_eq!(code, Some(2), "{said}");
    assert!(
        said.contains("17 frames fit in one clip of up to 17; remove request.chain, or generate a longer video"),
        "{said}"
    );
}

/// The plan lists the tokens per clip, because only single clips are denoised.
#[needs(nothing)]
fn plan_lists_clips_and_tokens_per_clip() {
    let asked =
        ["generate", "-m", "ltx2", "--width", "256", "--height", "128", "--num-frames", "241", "--chain", "--dry-run"];
    let planned = support::ltx2().args(asked).output().expect("the binary runs");
    let said = String::from_utf8_lossy(&planned.stdout).into_owned() + &String::from_utf8_lossy(&planned.stderr);
    assert!(planned.status.success(), "{said}");
    for line in [
        "241 frames at 24 per second",
        "clips      3 of 121 frames each",
        "tokens     512 video (16 x 4 x 8), 126 audio",
    ] {
        assert!(said.contains(line), "{said}");
    }
}
