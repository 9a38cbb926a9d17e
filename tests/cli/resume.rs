//! An interrupted run that is resumed gives the same bytes as an uninterrupted one, in every phase and with every
//! sampler; and a video that cannot be written is kept as tensors.

use ltx2::pipeline::phase::Phase;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::drawn::{distilled_2_5, with_diffusion_decoder};
use crate::support::{self, full, needs};
use ltx2::config::{CliOverrides, ProgressEvery, load};
use ltx2::media::{Frames, write_png_frames};
use ltx2::pipeline::generate::{FinishedVideo, Observer, generate};
use ltx2::pipeline::output::denoise_checkpoint;
use ltx2::pipeline::plan::options::GenerateOptions;
use ltx2::pipeline::plan::videos::Job;
use ndarray::Array4;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Interrupts the run after a number of steps of a phase; records the first step of each phase.
#[derive(Default)]
struct Ends {
    at: Option<(Phase, usize)>,
    first: Vec<(Phase, usize)>,
}

impl Observer for Ends {
    fn progress(&mut self, _: &[Job], phase: Phase, done: usize, _: usize) -> ControlFlow<()> {
        let has_steps = matches!(phase, Phase::Denoise | Phase::Refine | Phase::Round);
        if has_steps && self.first.iter().all(|(known, _)| *known != phase) {
            self.first.push((phase, done));
        }
        if self.at == Some((phase, done)) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn finished(&mut self, _: &FinishedVideo, _: &str) {}
}

#[derive(Clone, Copy)]
struct Run<'a> {
    file: &'a str,
    set: &'a [String],
    output: &'a Path,
    every: Option<usize>,
    resume: bool,
}

/// Hashes of frames and samples, or the error; and the first step of each phase.
type Outcome = (Result<[String; 2], String>, Vec<(Phase, usize)>);

impl Run<'_> {
    fn run(&self, at: Option<(Phase, usize)>) -> Outcome {
        let given = CliOverrides { files: vec![self.file.into()], set: self.set.to_vec(), ..CliOverrides::default() };
        let mut config = load(&given).expect("a configuration").config;
        config.output.path = self.output.to_str().map(String::from);
        config.sampler.progress_every = ProgressEvery::Steps(1);
        let options = GenerateOptions {
            force: true,
            checkpoint_every: self.every,
            resume: self.resume,
            ..GenerateOptions::default()
        };
        let mut ends = Ends { at, ..Ends::default() };
        let made = generate(&config, options, None, &mut ends).map_err(|e| e.to_string());
        let hashes = made.map(|m| [m[0].frames_sha256.clone(), m[0].samples_sha256.clone()]);
        (hashes, ends.first)
    }
}

fn settings(pipeline: &str, more: &[&str]) -> Vec<String> {
    let cache = format!("runtime.compile_cache={}", support::programs().display());
    let pipeline = format!("pipeline={pipeline}");
    let base = [&cache, &pipeline, "sampler.steps=4"];
    base.iter().chain(more).map(|s| (*s).to_string()).collect()
}

#[needs(cpu)]
fn interrupted_run_resumes_to_identical_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let output: PathBuf = folder.path().join("out.mp4");
    // Pipeline, sampler, phase and step of the interruption, checkpoint interval, and the step that the run resumes
    // from.
    let cases: [(&str, &str, Phase, usize, usize, usize); 9] = [
        ("two_stage", "euler", Phase::Refine, 2, 1, 2),
        ("text_to_video", "res_2s", Phase::Denoise, 2, 1, 2),
        ("hq", "res_2s", Phase::Denoise, 2, 1, 2),
        ("two_stage", "euler", Phase::Denoise, 1, 1, 1),
        ("hq", "res_2s", Phase::Refine, 1, 1, 1),
        ("text_to_video", "euler", Phase::Denoise, 3, 2, 3),
        ("text_to_video", "euler_ancestral", Phase::Denoise, 2, 1, 2),
        ("text_to_video", "cfg_pp", Phase::Denoise, 2, 1, 2),
        ("text_to_video", "gradient_estimation", Phase::Denoise, 2, 1, 2),
    ];
    // Two cases in `make test`: a second pass, and a sampler with two evaluations and noise for each step.
    let tried = if full() { cases.len() } else { 2 };
    for (pipeline, sampler, phase, at, every, from) in cases.into_iter().take(tried) {
        let run = Run {
            file: support::tiny(),
            // Half the height of two passes is a whole number of latents.
            set: &settings(
                pipeline,
                &[
                    &format!("sampler.kind={sampler}"),
                    if pipeline == "text_to_video" { "request.height=96" } else { "request.height=64" },
                ],
            ),
            output: &output,
            every: Some(every),
            resume: false,
        };
        goes_on(run, phase, at, from);
    }
}

/// The checkpoint contains the state of the step cache: a run interrupted before or after a skipped step skips the same
/// steps as an uninterrupted one. The sidecar lists them, including those of a pass that was finished before.
#[needs(cpu)]
fn resumed_run_skips_the_same_steps() {
    let folder = tempfile::tempdir().expect("a folder");
    let output: PathBuf = folder.path().join("out.mp4");
    let cache = "sampler.cache={kind: adaptive, threshold: 9, warmup_steps: 2, last_steps: 0, max_skips: 1}";
    let timings = || {
        let text = std::fs::read_to_string(output.with_extension("json")).expect("a sidecar");
        serde_json::from_str::<Value>(&text).expect("JSON")["timings"].clone()
    };
    let skipped = || timings()["skipped_steps"].clone();
    let computed = || timings()["denoise"]["computed_steps"].clone();
    let first = json!({"pass": "denoise", "steps": [2], "total": 4});
    let one = settings("text_to_video", &["request.height=96", cache]);
    let run = |set| Run { file: support::tiny(), set, output: &output, every: Some(1), resume: false };
    for at in [2, 3] {
        goes_on(run(&one), Phase::Denoise, at, at);
        assert_eq!(skipped(), json!([first]), "interrupted after {at} steps");
        assert_eq!(computed(), 1, "the last step, without the skipped one and the saved ones");
    }
    assert!(run(&one).run(None).0.is_ok());
    assert_eq!((skipped(), computed()), (json!([first]), 3.into()), "not interrupted");
    if full() {
        let second = "two_stage.cache={kind: fixed, steps: [1]}";
        let two = settings("two_stage", &["request.height=64", cache, second]);
        goes_on(run(&two), Phase::Refine, 2, 2);
        assert_eq!(skipped(), json!([first, {"pass": "refine", "steps": [1], "total": 3}]));
    }
}

/// Interrupts a clip after the first one, in each pass. The checkpoint includes the end of the previous clip, from
/// which the interrupted clip starts.
#[needs(cpu)]
fn interrupted_chain_resumes_within_its_clip() {
    let folder = tempfile::tempdir().expect("a folder");
    let output: PathBuf = folder.path().join("out.mp4");
    let chain =
        ["request.chain={clip: 17, overlap: 9}", "request.num_frames=33", "request.height=64", "request.width=96"];
    let run = |set| Run { file: "tests/fixtures/tiny_video.yml", set, output: &output, every: Some(1), resume: false };
    // Three clips with two steps each. Half the width is a whole number of latents. In the second pass, the checkpoint
    // holds the clip's own end of the first pass, too, with which the next clip starts.
    let upsampler = "model.upsampler=tests/fixtures/models/upsampler_rational";
    let two = settings("two_stage", &[&chain[..3], &["request.width=128", "sampler.steps=2", upsampler]].concat());
    goes_on(run(&two), Phase::Refine, 4, 4);
    if full() {
        goes_on(run(&two), Phase::Denoise, 3, 3);
        let one = settings("text_to_video", &[&chain[..], &["sampler.steps=2"]].concat());
        goes_on(run(&one), Phase::Denoise, 3, 3);
    }
}

/// Ancestral steps, the second pass and the diffusion decoder continue one noise sequence, also after a resume.
#[needs(cpu, full)]
fn interrupted_ltx_2_5_run_resumes_to_identical_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    std::fs::create_dir(&model).expect("a folder");
    let (set, output) = (distilled_2_5(&with_diffusion_decoder(&model)), folder.path().join("out.mp4"));
    let run = Run { file: "ltx2_5_distilled", set: &set, output: &output, every: Some(1), resume: false };
    for (phase, at) in [(Phase::Denoise, 3), (Phase::Refine, 1)] {
        goes_on(run, phase, at, at);
    }
    let lora = "dfr.detailing_lora={path: tests/fixtures/lora/ic_tiny_2_5.safetensors}".to_string();
    let detailing = [&set[..], &[lora]].concat();
    for set in [&set, &detailing] {
        for (phase, at) in [(Phase::Denoise, 2), (Phase::Refine, 1)] {
            goes_on(Run { file: "ltx2_5_dfr", set, ..run }, phase, at, at);
        }
    }
}

/// Interrupts a run with checkpoints after `at` steps of a phase; resumed, it must continue from step `from` and give
/// the same bytes as an uninterrupted run.
fn goes_on(kept: Run, phase: Phase, at: usize, from: usize) {
    let (what, steps) =
        (format!("{} {:?}, {phase:?} after {at}", kept.file, kept.set), denoise_checkpoint::path_of(kept.output));
    let (whole, _) = Run { every: None, ..kept }.run(None);
    let whole = whole.unwrap_or_else(|e| panic!("{what}: {e}"));
    assert!(!steps.exists(), "{what}: a checkpoint without --checkpoint-every");

    let (ended, _) = kept.run(Some((phase, at)));
    assert!(ended.is_err_and(|e| e.starts_with("interrupted after")), "{what}");
    assert!(steps.exists(), "{what}: no checkpoint was written");

    let (same, began) = Run { resume: true, ..kept }.run(None);
    assert_eq!(same.as_ref(), Ok(&whole), "{what}");
    assert_eq!(began.first(), Some(&(phase, from)), "{what}: earlier steps were run again");
    assert!(!steps.exists(), "{what}: the checkpoint is removed after the run");
}

/// Rewrites a checkpoint as if another release, whose version is part of the key, had written it.
fn rewrite_as_another_release(path: &Path) {
    let bytes = std::fs::read(path).expect("the steps");
    let (length, rest) = bytes.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("eight bytes"));
    let (header, tensors) = rest.split_at(usize::try_from(length).expect("a length"));
    let mut header: Value = serde_json::from_slice(header).expect("a header");
    let about = &mut header["__metadata__"];
    let mut known: Value = serde_json::from_str(about["request"].as_str().expect("a request")).expect("JSON");
    assert_eq!(known["release"], env!("CARGO_PKG_VERSION"));
    known["release"] = "0.0.9".into();
    let known = known.to_string();
    about["identity"] = hex::encode(Sha256::digest(&known)).into();
    about["request"] = known.into();
    let header = header.to_string();
    let padded = format!("{header:width$}", width = header.len().next_multiple_of(8));
    let length = (padded.len() as u64).to_le_bytes();
    std::fs::write(path, [&length[..], padded.as_bytes(), tensors].concat()).expect("written");
}

#[needs(cpu)]
fn checkpoint_of_another_model_or_release_is_rejected() {
    let folder = tempfile::tempdir().expect("a folder");
    let (output, model) = (folder.path().join("out.mp4"), folder.path().join("model"));
    let copied = Command::new("cp").args(["-r", "tests/fixtures/models/tiny_a"]).arg(&model).status();
    assert!(copied.expect("cp runs").success());
    let set = settings("text_to_video", &[&format!("model.path={}", model.display())]);
    let kept = Run { file: support::tiny(), set: &set, output: &output, every: Some(1), resume: false };
    assert!(kept.run(Some((Phase::Denoise, 2))).0.is_err());
    let resumed = || Run { resume: true, ..kept }.run(None);
    let refused = || resumed().0.expect_err("the run resumes");
    let weights = model.join("vae/diffusion_pytorch_model.safetensors");
    let whole = std::fs::read(&weights).expect("weights");
    let mut other = whole.clone();
    *other.last_mut().expect("bytes") ^= 1;
    std::fs::write(&weights, other).expect("written");
    let said = refused();
    assert!(said.contains("holds the steps of another request, model or release: model"), "{said}");
    std::fs::write(&weights, whole).expect("written");

    let path = denoise_checkpoint::path_of(&output);
    let steps = std::fs::read(&path).expect("the steps");
    rewrite_as_another_release(&path);
    let said = refused();
    assert!(said.contains("model or release: release was \"0.0.9\", is now "), "{said}");
    assert!(!output.exists());
    std::fs::write(&path, steps).expect("written");
    let (made, began) = resumed();
    assert!(made.is_ok() && began.first() == Some(&(Phase::Denoise, 2)), "{made:?} {began:?}");
}

#[needs(cpu)]
fn checkpoint_of_another_request_is_rejected() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = folder.path().join("out.mp4");
    let image_file = folder.path().join("first.png");
    let drawn = std::fs::read("tests/fixtures/images/shapes.png").expect("an image");
    std::fs::write(&image_file, [&drawn[..], b"a"].concat()).expect("written");
    let image = format!("request.images=[{{path: {}, frame: 0, strength: 1.0, crf: 0}}]", image_file.display());
    // The programs of `serve::nano`.
    let set = settings("image_to_video", &[&image]);
    let kept = Run { file: support::tiny(), set: &set, output: &output, every: Some(1), resume: false };
    assert!(kept.run(Some((Phase::Denoise, 2))).0.is_err());
    let other = settings("image_to_video", &[&image, "request.seed=11"]);
    let message = |set: &[String]| {
        let made = Run { set, resume: true, ..kept }.run(None).0;
        assert!(made.is_err(), "the run resumes: {made:?}");
        made.unwrap_err()
    };
    let said = message(&other);
    assert!(said.contains("holds the steps of another request"), "{said}");
    assert!(said.contains(": request.seed was 10, is now 11; repeat that run's request"), "{said}");
    // Another form of layers rounds differently.
    let unrolled = message(&settings("image_to_video", &[&image, "runtime.layers=unrolled"]));
    assert!(unrolled.contains(": runtime.layers was \"auto\", is now \"unrolled\"; repeat that"), "{unrolled}");
    // The log shows that nothing is compiled.
    let mut command = support::ltx2();
    command.args(["generate", "-c", support::tiny(), "--resume", "-o"]).arg(&output);
    command.args(other.iter().flat_map(|pair| ["--set", pair])).env("LTX2_LOG", "info,ltx2_runtime::engine=debug");
    let refused = command.output().expect("the binary runs");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("holds the steps of another request"), "{said}");
    assert!(!said.contains("hash="), "{said}");
    // Replace the image by another file with the same size and modification time.
    let file = || std::fs::OpenOptions::new().write(true).open(&image_file).expect("the image");
    let was = file().metadata().and_then(|m| m.modified()).expect("a time");
    std::fs::write(&image_file, [&drawn[..], b"b"].concat()).expect("written");
    file().set_modified(was).expect("the time it had");
    let said = message(&set);
    assert!(said.contains("holds the steps of another request") && said.contains("first.png was "), "{said}");
    std::fs::write(&image_file, [&drawn[..], b"a"].concat()).expect("written");

    let path = denoise_checkpoint::path_of(&output);
    let bytes = std::fs::read(&path).expect("the steps");
    std::fs::write(&path, &bytes[..bytes.len() / 2]).expect("cut");
    assert!(message(&set).contains("truncated"), "{}", message(&set));
    assert!(!output.exists());
    // The same contents with another modification time are accepted.
    std::fs::write(&path, &bytes).expect("whole");
    file().set_modified(was + std::time::Duration::from_secs(9)).expect("a later time");
    let (made, began) = Run { set: &set, resume: true, ..kept }.run(None);
    assert!(made.is_ok() && began.first() == Some(&(Phase::Denoise, 2)), "{made:?} {began:?}");
}

/// Covers input audio, input video, reference videos, and audio-only runs, with the programs of `sounds` and
/// `given_video`. Three cases run by default, each with three runs of one second; the others only in full test runs.
#[needs(cpu)]
fn interrupted_runs_with_input_files_resume_identically() {
    const VIDEO: &str = "tests/fixtures/tiny_video.yml";
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_string();
    let pixel = |(f, y, x, c): (usize, usize, usize, usize)| (f * 12 + y + x + 40 * c) as u8;
    let frames = Frames::new(Array4::from_shape_fn((20, 64, 96, 3), pixel)).expect("frames");
    write_png_frames(Path::new(&path("source")), &frames).expect("written");
    let video = format!("request.video={}", path("source"));
    let sound = "request.audio={path: tests/fixtures/sounds/tone_u8.wav}";
    let reference = format!("request.reference_videos=[{{path: {}}}]", path("source"));
    let lora = "model.loras=[{path: tests/fixtures/lora/ic_tiny_a_plain.safetensors}]";
    let alone = ["request.num_frames=9", "request.width=64", "request.height=64"];
    let retake = ["request.num_frames=17", "request.retake={from: 0.3, to: 0.5}"];
    let cases: [(&str, &str, Vec<&str>, Phase, bool); 7] = [
        (VIDEO, "extend", vec![&video, "request.extend={seconds: 0.3, overlap: 9}"], Phase::Denoise, true),
        (support::tiny(), "audio_to_video", vec![sound], Phase::Denoise, true),
        (VIDEO, "text_to_audio", alone.to_vec(), Phase::Denoise, true),
        (VIDEO, "retake", [&[&*video], &retake[..]].concat(), Phase::Denoise, false),
        (VIDEO, "video_to_audio", vec![&video], Phase::Denoise, false),
        (support::tiny(), "in_context", vec![&reference, lora, "request.height=64"], Phase::Denoise, false),
        (support::tiny(), "in_context", vec![&reference, lora, "request.height=64"], Phase::Refine, false),
    ];
    let cache = format!("runtime.compile_cache={}", support::programs().display());
    for (file, pipeline, more, phase, by_default) in &cases {
        if !by_default && !full() {
            continue;
        }
        let own = [&cache, &format!("pipeline={pipeline}")].map(String::from);
        let set: Vec<String> = own.into_iter().chain(more.iter().map(|pair| (*pair).to_string())).collect();
        let output = PathBuf::from(path(if *pipeline == "text_to_audio" { "out.wav" } else { "out.mp4" }));
        let run = Run { file, set: &set, output: &output, every: Some(1), resume: false };
        goes_on(run, *phase, 1, 1);
        if *pipeline == "extend" {
            // Overwriting a frame changes neither the size nor the modification time of its folder.
            assert!(run.run(Some((*phase, 1))).0.is_err_and(|e| e.starts_with("interrupted after")));
            write_png_frames(Path::new(&path("source")), &frames.part(1..20)).expect("written");
            let other = Run { resume: true, ..run }.run(None).0.expect_err("another video");
            assert!(other.contains("holds the steps of another request"), "{other}");
            write_png_frames(Path::new(&path("source")), &frames).expect("written");
            std::fs::remove_file(denoise_checkpoint::path_of(&output)).expect("removed");
        }
    }
}

/// Replaces the output folder by a file when the last phase begins.
struct Takes(PathBuf);

impl Observer for Takes {
    fn progress(&mut self, _: &[Job], _: Phase, done: usize, total: usize) -> ControlFlow<()> {
        if done == total && self.0.is_dir() {
            std::fs::remove_dir_all(&self.0).expect("removed");
            std::fs::write(&self.0, "a file").expect("written");
        }
        ControlFlow::Continue(())
    }

    fn finished(&mut self, _: &FinishedVideo, _: &str) {}
}

/// The first of two videos is finished. Resuming generates the second, with its audio and frames at the original paths.
#[needs(cpu)]
fn resume_writes_remaining_videos_to_original_paths() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("prompts.txt"), "a lighthouse\na harbour\n").expect("written");
    let run = |resume: bool| {
        let mut run = support::ltx2();
        run.args(["generate", "-c", support::tiny(), "--steps", "1", "--prompts"]).arg(path("prompts.txt"));
        run.arg("-o")
            .arg(path("videos"))
            .arg("--save-audio")
            .arg(path("sounds"))
            .arg("--save-frames")
            .arg(path("frames"));
        run.args(resume.then_some("--resume"));
        let ran = run.output().expect("runs");
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert!(ran.status.success(), "{said}");
        said
    };
    let names = |name: &str| {
        let all = std::fs::read_dir(path(name)).expect("a folder");
        let mut names: Vec<String> = all.map(|e| e.expect("one").file_name().to_string_lossy().into()).collect();
        names.sort();
        names
    };
    run(false);
    let whole = ["videos", "sounds", "frames"].map(names);
    assert_eq!(whole.each_ref().map(Vec::len), [4, 2, 2], "{whole:?}");
    let (video, sound) = (path("videos").join(&whole[0][3]), path("sounds").join(&whole[1][1]));
    let made = std::fs::read(&sound).expect("the sound");
    let finished = || {
        let mut files = vec![path("videos").join(&whole[0][1]), path("videos").join(&whole[0][0])];
        files.push(path("sounds").join(&whole[1][0]));
        files.extend((0..9).map(|n| path("frames").join(&whole[2][0]).join(format!("frame_{n:05}.png"))));
        files.into_iter().map(|file| std::fs::read(file).expect("a file")).collect::<Vec<_>>()
    };
    let first = finished();
    std::fs::remove_file(&video).expect("removed");
    std::fs::remove_file(&sound).expect("removed");
    std::fs::remove_dir_all(path("frames").join(&whole[2][1])).expect("removed");
    let said = run(true);
    assert!(said.contains(&format!("{} is finished: nothing to resume", whole[0][1])), "{said}");
    assert_eq!(["videos", "sounds", "frames"].map(names), whole);
    assert_eq!(std::fs::read(&sound).expect("the sound"), made, "the same bytes");
    assert!(finished() == first, "the finished video's files are as they were");
}

#[needs(cpu)]
fn unwritable_video_is_kept_as_tensors() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().join("videos");
    std::fs::create_dir(&place).expect("a folder");
    let output = format!("output.path={}", place.join("out.mp4").display());
    let set = settings("text_to_video", &["sampler.steps=1", &output]);
    let config = load(&CliOverrides { files: vec![support::tiny().into()], set, ..CliOverrides::default() })
        .expect("a configuration")
        .config;
    let said =
        generate(&config, GenerateOptions::default(), None, &mut Takes(place)).expect_err("not written").to_string();
    let (error, _) = said.split_once("; the frames, audio samples and latents are kept in ").expect("the place");
    let kept = support::kept_file(&said);
    assert!(error.contains("videos"), "{error}");
    let tensors = ltx2::pipeline::output::tensors::read(Path::new(kept)).expect("tensors");
    assert_eq!(tensors["frames"].shape(), [9, 96, 64, 3]);
    assert_eq!(tensors["audio"].shape()[0], 2);
    assert!(tensors.contains_key("latents.video") && tensors.contains_key("latents.audio"));
    std::fs::remove_file(kept).expect("removed");
}
