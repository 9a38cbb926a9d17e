//! The `generate` command: a random model to a video with sound, repeated runs, several videos, and invalid input.

use ltx2::pipeline::plan::setup;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use crate::support::single_file::TINY;
use crate::support::{self, QUICK, full, needs};
use ltx2::config::{CliOverrides, load};
use ltx2::pipeline::programs::build::Programs;
use ltx2::sampling::SamplerKind;
use serde_json::Value;

const IMAGE: &str = "tests/fixtures/images/shapes.png";

pub(super) fn ltx2(arguments: &[&str]) -> Output {
    support::ltx2().args(arguments).output().expect("the binary runs")
}

pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn succeed(arguments: &[&str]) -> String {
    let out = ltx2(arguments);
    assert!(out.status.success(), "{arguments:?}: {}", text(&out.stderr));
    text(&out.stdout)
}

/// Runs a command that must exit with `code`; returns the last line of stderr.
pub(super) fn fail(code: i32, arguments: &[&str]) -> String {
    let out = ltx2(arguments);
    let stderr = text(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{arguments:?}: {stderr}");
    let errors: Vec<&str> = stderr.lines().filter(|l| l.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "one line says it: {stderr}");
    errors[0].to_string()
}

/// Returns whether a program of `--perf-json` was compiled or loaded from the cache exactly once.
fn loaded_once(program: &Value) -> bool {
    let count = |key: &str| program[key].as_u64().expect("a count");
    count("compiles") + count("cache_hits") == 1
}

/// Returns the arguments of a short run.
pub(super) fn short(out: &Path, more: &[&str]) -> Vec<String> {
    let out = out.to_str().expect("UTF-8");
    ["generate", "-c", support::tiny(), "-o", out].iter().chain(more).map(|s| (*s).to_string()).collect()
}

pub(super) fn refs(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).expect("a file")).expect("JSON")
}

/// Checks that the program hashes in a sidecar are those of the programs built from the configuration.
fn assert_written_programs_ran(written: &BTreeMap<&str, String>, ran: &Value, case: &str) {
    let ran = ran.as_object().expect("programs");
    let ran: BTreeMap<&str, String> =
        ran.iter().map(|(name, hash)| (name.as_str(), hash.as_str().expect("a hash").into())).collect();
    // Two stages may share a program. They encode conditioning images at two sizes, of which the sidecar lists one.
    let sized = |name: &str| name == "video_encoder";
    for (name, hash) in written.iter().filter(|(name, _)| !sized(name)) {
        assert!(ran.values().any(|ran| ran == hash), "{case}: {name} did not run: {ran:?}");
    }
    let known = |(name, hash): (&&str, &String)| sized(name) || written.get(name) == Some(hash);
    assert!(ran.iter().all(known), "{case}: {ran:?} ran, {written:?} were written");
}

/// Returns the sample rate from the header of a WAV file.
fn rate_of(wav: &str) -> u32 {
    let header = std::fs::read(wav).expect("sound");
    u32::from_le_bytes(header[24..28].try_into().expect("four bytes"))
}

/// Builds the programs of every preset on a small model, with input frames where the pipeline needs them. In the full
/// test they also run, and their program hashes must match.
#[allow(clippy::too_many_lines)] // One table of presets.
#[needs(cpu)]
fn every_preset_runs_at_small_size() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_string();
    succeed(&["init", "--preset", "nano_2_3", "--seed", "3", &path("nano_2_3")]);
    let models = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models");
    let image = |frame: usize, strength: f64| format!("{{path: {IMAGE}, frame: {frame}, strength: {strength}}}");
    let images = |all: &[String]| format!("request.images=[{}]", all.join(", "));
    let none = images(&[]);
    // Without a perturbed branch, an STG block that these models do not have is not an error.
    let [block, depth] = [1, 29].map(|block| format!("guidance.stg_blocks=[{block}]"));
    let cases: [(&str, &str, [String; 2]); 10] = [
        ("ltx2", "text_to_video", [none.clone(), depth.clone()]),
        ("ltx2_full_guidance", "text_to_video", [none.clone(), block.clone()]),
        ("ltx2_two_stage", "two_stage", [images(&[image(0, 1.0)]), block.clone()]),
        ("ltx2_two_stage", "keyframes", [images(&[image(0, 1.0), image(8, 0.5)]), block.clone()]),
        ("ltx2_distilled", "distilled", [none.clone(), depth.clone()]),
        ("ltx2_hq", "hq", [none.clone(), depth.clone()]),
        ("ltx2_3", "image_to_video", [images(&[image(8, 1.0)]), block.clone()]),
        ("ltx2_3_two_stage", "two_stage", [none.clone(), block]),
        ("ltx2_3_distilled", "distilled", [images(&[image(0, 0.9)]), depth.clone()]),
        ("ltx2_3_hq", "hq", [none, depth.clone()]),
    ];
    let mut denoising = Vec::new();
    for (n, (preset, pipeline, more)) in cases.iter().enumerate() {
        let (model, tokens) = match preset.starts_with("ltx2_3") {
            true => (format!("model.path={}", path("nano_2_3")), 128),
            false if ["text_to_video", "image_to_video"].contains(pipeline) => {
                (format!("model.path={models}/tiny_a"), 64)
            }
            false => (format!("model={{path: {models}/tiny_a, upsampler: {models}/upsampler_rational}}"), 64),
        };
        let mut set = vec![
            format!("pipeline={pipeline}"),
            model,
            "runtime.platform=cpu".into(),
            QUICK.into(),
            "request={width: 64, height: 64, num_frames: 9}".into(),
            format!("request.max_sequence_length={tokens}"),
        ];
        set.extend((*pipeline != "distilled").then(|| "sampler.steps=2".to_string()));
        set.extend(more.clone());
        set.extend((n == 8).then(|| "conditioning.h264=builtin".to_string()));

        let given = CliOverrides { files: vec![(*preset).into()], set: set.clone(), ..CliOverrides::default() };
        let config = load(&given).unwrap_or_else(|e| panic!("{preset} {pipeline}: {e}")).config;
        let kind = if *pipeline == "hq" { SamplerKind::Res2s } else { SamplerKind::Euler };
        assert_eq!(config.sampler.kind, kind, "{preset}");
        let programs = Programs::from_config(&config, None).expect("a model");
        let build = setup::build(&config, 1, "cpu", "").expect("a build");
        let hash = |kind| programs.network(kind, &build).expect("builds").program.hash();
        let hashes: BTreeMap<&str, String> = programs.kinds().map(|kind| (kind.name(), hash(kind))).collect();
        let two = hashes.contains_key("refine") && hashes.contains_key("upsampler");
        assert_eq!(two, !["text_to_video", "image_to_video"].contains(pipeline), "{preset} {pipeline}: {hashes:?}");
        assert_eq!(hashes.contains_key("video_encoder"), more[0].contains("path"), "{preset} {pipeline}");
        denoising.push(hashes["denoise"].clone());

        if full() {
            let (out, wav) = (path(&format!("{n}.mp4")), path(&format!("{n}.wav")));
            set.push(format!("output.save_audio={wav}"));
            // The command rejects STG blocks without a perturbed branch.
            let perturbs = config.guidance.video.stg.is_some_and(|stg| stg != 0.0);
            set.retain(|pair| perturbs || !pair.starts_with("guidance.stg_blocks"));
            let set = set.iter().flat_map(|s| ["--set", s]);
            let run = ["generate", "-c", preset, "-p", if n == 3 { "" } else { "a ball" }, "-o", &out];
            succeed(&run.into_iter().chain(set).collect::<Vec<_>>());
            let sidecar = json(Path::new(&path(&format!("{n}.json"))));
            assert_eq!(sidecar["config"]["pipeline"], *pipeline, "{preset}");
            assert_eq!(sidecar["config"]["sampler"]["kind"], serde_json::to_value(kind).expect("JSON"), "{preset}");
            let given = sidecar["config"]["request"]["images"].as_array().expect("a list");
            let strength = |image: &Value| image["strength"].as_f64().expect("a number");
            let written = |image: &Value| format!("frame: {}, strength: {}", image["frame"], strength(image));
            assert!(given.iter().all(|image| more[0].contains(&written(image))), "{preset}: {given:?}");
            assert_eq!(given.len(), more[0].matches("path").count(), "{preset}");
            assert_eq!(sidecar["inputs"], support::hashes_of(&[IMAGE][..given.len().min(1)]), "{preset}");
            if !given.is_empty() {
                let encoder = sidecar["config"]["conditioning"]["h264"].as_str().expect("a name");
                assert!(encoder != "auto" && (n != 8 || encoder == "builtin"), "{preset}: {encoder}");
                let version = sidecar["versions"]["h264"].as_str().expect("images go through an encoder");
                assert_eq!(version.starts_with("built in"), encoder == "builtin", "{version}");
            }
            assert_eq!(rate_of(&wav), if preset.starts_with("ltx2_3") { 48000 } else { 24000 }, "{preset}");
            assert_written_programs_ran(&hashes, &sidecar["programs"], &format!("{preset} {pipeline}"));
        }
    }
    // If two presets had the same denoising program, one would suffice.
    denoising.sort();
    denoising.dedup();
    assert!(denoising.len() >= 8, "{denoising:?}");
}

#[needs(cpu)]
fn video_with_sound_is_generated_and_repeated() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    let mut hashes = Vec::new();
    for name in ["a", "b", "c"] {
        let places = [
            ["--dump", "safetensors"],
            ["--perf-json", "times.json"],
            ["--save-audio", "wav"],
            ["--save-frames", "frames"],
        ];
        let places: Vec<String> = places
            .into_iter()
            .flat_map(|[flag, end]| [flag.into(), path(&format!("{name}.{end}")).display().to_string()])
            .collect();
        let video = path(&format!("{name}.mp4"));
        let stdout = succeed(&refs(&short(&video, &refs(&places))));
        assert_eq!(stdout.trim(), video.to_str().expect("UTF-8"), "stdout carries the path");
        hashes.push(json(&video.with_extension("json"))["sha256"].clone());
    }
    assert!(hashes.iter().all(|h| h == &hashes[0]), "three runs of one seed: {hashes:?}");
    let (dump, perf, wav, png) = (path("a.safetensors"), path("a.times.json"), path("a.wav"), path("a.frames"));
    let files =
        || [&path("a.mp4"), &path("a.json"), &dump, &perf, &wav].map(|file| std::fs::read(file).expect("a file"));
    let (first, frames) = (files(), ltx2::media::read_png_frames(&png).expect("frames"));
    succeed(&[
        "generate",
        "-c",
        path("a.json").to_str().expect("UTF-8"),
        "-o",
        path("again.mp4").to_str().expect("UTF-8"),
    ]);
    assert_eq!(json(&path("again.json"))["sha256"], hashes[0], "a run from the sidecar has the same output");
    assert!(files() == first, "the first run's files are as they were");
    assert!(ltx2::media::read_png_frames(&png).expect("frames") == frames);

    let perf = json(&perf);
    assert_eq!(perf["programs"]["text_encoder"]["executions"], 1, "both prompts in one execution");
    assert!(perf["programs"].as_object().expect("programs").values().all(loaded_once), "{perf}");
    let dumped = ltx2::weights::Checkpoint::open(&dump).expect("a dump");
    let mut names: Vec<&str> = dumped.names().collect();
    names.sort_unstable();
    let want = ["audio", "latents.audio", "latents.video", "negative_prompt_embeds", "noise.audio", "noise.video"];
    assert_eq!(names, [&want[..], &["prompt_embeds", "video"]].concat());
    assert_eq!(dumped.shape("video"), Some(&[1, 9, 3, 96, 64][..]));
    assert_eq!(std::fs::read_dir(&png).expect("frames").count(), 9);
    let sound = ltx2::media::read_wav(&wav).expect("sound");
    let raw = dumped.shape("audio").expect("samples")[2];
    assert_eq!(sound.len(), (9 * sound.rate() as usize).div_ceil(24), "as long as 9 frames");
    assert!(raw < sound.len(), "the decoder's {raw} samples are dumped as they are");
}

/// The container has the requested contents with either encoder: ffmpeg, or the built-in ones if ffmpeg is not on the
/// path.
#[needs(cpu, ffmpeg)]
fn mp4_has_requested_contents_with_either_encoder() {
    let dir = tempfile::tempdir().expect("a folder");
    for (name, hidden) in [("by_ffmpeg.mp4", false), ("by_us.mp4", true)] {
        let file = dir.path().join(name);
        let mut run = support::ltx2();
        run.args(short(&file, &[]));
        if hidden {
            run.env("PATH", dir.path());
        }
        let ran = run.output().expect("runs");
        assert!(ran.status.success(), "{}", text(&ran.stderr));
        let encoder = if hidden { "encoding with embedded" } else { "encoding with ffmpeg" };
        assert!(text(&ran.stderr).contains(encoder), "{name}: {}", text(&ran.stderr));
        let entries = "stream=codec_name,width,height,nb_read_frames,avg_frame_rate";
        let probe = ["-v", "error", "-count_frames", "-show_entries", entries, "-of", "csv=p=0"];
        let out = Command::new("ffprobe").args(probe).arg(&file).output().expect("ffprobe runs");
        let lines = text(&out.stdout);
        assert!(lines.contains("h264,64,96,24/1,9") && lines.contains("aac"), "{name}: {lines}");
    }
}

#[needs(cpu)]
fn device_noise_is_normal_and_repeatable() {
    let dir = tempfile::tempdir().expect("a folder");
    let run = |name: &str, more: &[&str]| {
        let (out, dump) = (dir.path().join(format!("{name}.mp4")), dir.path().join(format!("{name}.safetensors")));
        let own = ["--pipeline", "two_stage", "--height", "64", "--dump", dump.to_str().expect("UTF-8")];
        succeed(&refs(&short(&out, &[&own[..], more].concat())));
        let read = ltx2::pipeline::output::tensors::read(&dump).expect("a dump");
        let noise = |name: &str| read[name].to_f32();
        (noise("noise.video"), noise("stage_2.noise.video"), noise("stage_2.noise.audio"))
    };
    let device = ["--set", "sampler.noise=device"];
    let (first, second, sound) = run("a", &device);
    for all in [&second, &sound] {
        let (n, mean) = (all.len() as f32, all.mean().expect("numbers"));
        assert!(mean.abs() < 4.0 / n.sqrt() && (all.std(0.0) - 1.0).abs() < 4.0 / (2.0 * n).sqrt(), "{n} {mean}");
    }
    assert_eq!(run("b", &device).0, first, "the same numbers again");
    assert_ne!(run("c", &[&device[..], &["--seed", "11"]].concat()).0, first);
    assert_ne!(run("d", &["--dump-steps"]).0, first);
    // The dump contains the latents after each step; the last are the result.
    let steps = ltx2::pipeline::output::tensors::read(&dir.path().join("d.safetensors")).expect("a dump");
    assert!(steps.contains_key("step_0.latents.video") && steps.contains_key("stage_2.step_0.latents.audio"));
    assert_eq!(steps["stage_2.step_3.latents.video"], steps["latents.video"]);
    let both = first.len().min(second.len());
    assert_ne!(first.iter().take(both).collect::<Vec<_>>(), second.iter().take(both).collect::<Vec<_>>());
}

#[needs(cpu)]
fn several_videos_share_programs_and_weights() {
    let dir = tempfile::tempdir().expect("a folder");
    let prompts = dir.path().join("prompts.txt");
    std::fs::write(&prompts, "a red ball\n\na blue cube\n").expect("written");
    let (out, perf) = (dir.path().join("clips"), dir.path().join("perf.json"));
    let more = ["--prompts", prompts.to_str().expect("UTF-8"), "--num-videos", "2", "--seed", "5"];
    let more = [&more[..], &["--perf-json", perf.to_str().expect("UTF-8")]].concat();
    succeed(&refs(&short(&out, &more)));
    for name in ["0000_5.mp4", "0001_6.mp4", "0002_5.mp4", "0003_6.mp4"] {
        assert!(out.join(name).exists(), "{name}");
        assert!(out.join(name).with_extension("json").exists(), "{name}'s sidecar");
    }
    let perf = json(&perf);
    let last = perf["videos"].as_array().expect("videos").last().expect("four");
    assert!(last["programs"].as_object().expect("programs").values().all(loaded_once), "{last}");
    assert_eq!(last["programs"]["text_encoder"]["executions"], 4);
    let frames = |name: &str| json(&out.join(name))["sha256"]["frames"].clone();
    assert_ne!(frames("0000_5.json"), frames("0001_6.json"), "seeds differ");
    assert_ne!(frames("0000_5.json"), frames("0002_5.json"), "prompts differ");
}

#[needs(cpu)]
fn truncated_prompt_is_reported() {
    let dir = tempfile::tempdir().expect("a folder");
    let long = "x".repeat(300);
    let out = ltx2(&refs(&short(&dir.path().join("a.mp4"), &["--negative-prompt", "", "--prompt", &long])));
    assert!(out.status.success(), "{}", text(&out.stderr));
    // BOS, the leading space token and 300 letters need 302 tokens.
    assert!(text(&out.stderr).contains("the prompt is longer than 64 tokens"), "{}", text(&out.stderr));
}

#[needs(cpu)]
fn invalid_requests_give_one_error_line() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("a.mp4");
    let cases: [(i32, &[&str], &[&str]); 6] = [
        (2, &["--set", "request.width=100"], &["width", "96", "128"]),
        (2, &["--set", "request.num_frames=10"], &["num_frames", "9", "17"]),
        (1, &["--set", "model.path=no/such/model"], &["no/such/model"]),
        (2, &["--set", "sampler.stepz=3"], &["sampler.stepz", "did you mean 'steps'"]),
        (2, &["--set", "request.max_sequence_length=100"], &["100", "96", "104"]),
        (1, &["--set", "runtime.platform=/no/plugin.so"], &["/no/plugin.so"]),
    ];
    for (code, more, words) in cases {
        let line = fail(code, &refs(&short(&out, more)));
        for word in words {
            assert!(line.contains(word), "{more:?}: {line}");
        }
    }
    assert!(!out.exists(), "nothing is written");
}

#[needs(cpu)]
fn invalid_models_report_file_and_tensor() {
    let dir = tempfile::tempdir().expect("a folder");
    let model = dir.path().join("model");
    let copy = |from: &Path, to: &Path| {
        let status = Command::new("cp").arg("-r").arg(from).arg(to).status().expect("cp runs");
        assert!(status.success());
    };
    copy(Path::new(TINY), &model);
    let check = |model: &Path| ltx2(&["check", model.to_str().expect("UTF-8")]);
    let good = check(&model);
    assert!(good.status.success(), "{}", text(&good.stderr));
    assert!(text(&good.stdout).contains("text_to_video: ready"), "{}", text(&good.stdout));

    let weights = model.join("vocoder/diffusion_pytorch_model.safetensors");
    let bytes = std::fs::read(&weights).expect("weights");
    std::fs::write(&weights, &bytes[..bytes.len() - 100]).expect("written");
    let truncated = check(&model);
    assert_eq!(truncated.status.code(), Some(1));
    let said = text(&truncated.stdout);
    assert!(said.contains("vocoder") && said.contains("diffusion_pytorch_model.safetensors"), "{said}");

    std::fs::remove_dir_all(model.join("audio_vae")).expect("removed");
    let missing = check(&model);
    assert!(text(&missing.stdout).contains("audio_vae                 absent"), "{}", text(&missing.stdout));
    assert!(text(&missing.stdout).contains("text_to_video: needs audio_vae, vocoder"), "{}", text(&missing.stdout));

    // A checkpoint with integers instead of weights.
    let wrong = dir.path().join("wrong.safetensors");
    let ids = ltx2::tensor::Tensor::from(ndarray::Array1::<i64>::zeros(4));
    ltx2::pipeline::output::tensors::write(&wrong, &[("a".to_string(), ids)]).expect("written");
    let line = fail(1, &["generate", "-p", "x", "--model", wrong.to_str().expect("UTF-8")]);
    assert!(line.contains("wrong.safetensors"), "{line}");
}

#[needs(cpu)]
fn single_file_model_requires_text_encoder() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("ltx-2.safetensors");
    // The header of a combined checkpoint: a configuration and one tensor of each component.
    let config = serde_json::json!({"transformer": {}, "vae": {}, "audio_vae": {}, "vocoder": {}, "scheduler": {}});
    let keys =
        ["model.diffusion_model.patchify_proj.weight", "vae.decoder.conv_in.conv.weight", "vocoder.conv_pre.weight"];
    let data = [0u8; 4];
    let tensor = || safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![1], &data).expect("a view");
    let metadata = std::collections::HashMap::from([("config".to_string(), config.to_string())]);
    let bytes = safetensors::serialize(keys.iter().map(|k| (*k, tensor())), Some(metadata)).expect("bytes");
    std::fs::write(&file, bytes).expect("written");
    let line = fail(1, &["generate", "-p", "x", "--model", file.to_str().expect("UTF-8"), "--platform", "cpu"]);
    assert!(line.contains("--text-encoder"), "{line}");
}

#[needs(cpu)]
fn run_command_reports_unknown_missing_and_misshaped_inputs() {
    let dir = tempfile::tempdir().expect("a folder");
    let run = |tensors: &[(&str, Vec<usize>)]| {
        let file = dir.path().join("in.safetensors");
        let tensors: Vec<_> = tensors
            .iter()
            .map(|(n, s)| ((*n).to_string(), ltx2::tensor::Tensor::F32(ndarray::ArrayD::zeros(s.clone()))))
            .collect();
        ltx2::pipeline::output::tensors::write(&file, &tensors).expect("written");
        let out = dir.path().join("out.safetensors");
        let paths = [&file, &out].map(|p| p.to_str().expect("UTF-8"));
        let flags = ["run", "vocoder", "--platform", "cpu", "--model", TINY, "--inputs", paths[0], "-o", paths[1]];
        fail(2, &flags)
    };
    assert!(run(&[]).contains("input 'mel' is missing"));
    assert!(run(&[("mel", vec![1, 2, 5, 8]), ("mels", vec![1])]).contains("input 'mels' is unknown"));
    assert!(run(&[("mel", vec![1, 2, 5])]).contains("must have 4 dimensions"));
}

/// Two videos at a time, each on three devices; heads and widths are not divisible by three.

#[needs(cpu)]
fn videos_are_batched_over_the_data_axis() {
    let dir = tempfile::tempdir().expect("a folder");
    let (out, perf) = (dir.path().join("clips"), dir.path().join("perf.json"));
    // The programs of `it batches`, except the loop and the decoder.
    let more = ["--layout", "cfg", "--mesh", "data=2", "--num-videos", "3", "--seed", "5"];
    let more = [&more[..], &["--perf-json", perf.to_str().expect("UTF-8")]].concat();
    let run = ltx2(&refs(&short(&out, &more)));
    let (stdout, stderr) = (text(&run.stdout), text(&run.stderr));
    assert!(run.status.success(), "{stderr}");
    let names = ["0000_5", "0001_6", "0002_7"];
    let paths: Vec<String> = names.iter().map(|n| out.join(format!("{n}.mp4")).display().to_string()).collect();
    assert_eq!(stdout.lines().collect::<Vec<_>>(), paths);
    for said in ["videos 1 to 2 of 3 denoise 3/3 steps", "video 3 of 3 denoise 3/3 steps"] {
        assert!(stderr.contains(said), "{stderr}");
    }
    let videos = json(&perf)["videos"].as_array().expect("videos").clone();
    assert_eq!(videos.iter().map(|v| v["videos_together"].as_u64()).collect::<Vec<_>>(), [Some(2), Some(2), Some(1)]);
    let programs = videos[2]["programs"].as_object().expect("programs");
    assert_eq!(programs.len(), 7);
    assert!(programs.values().all(|p| loaded_once(p) && p["executions"] == 2), "{programs:?}");

    // A run from the sidecar of a video in a batch generates only this video, with bit-identical output.
    let sidecar = out.join("0001_6.json");
    let again = dir.path().join("again.mp4");
    succeed(&["generate", "-c", sidecar.to_str().expect("UTF-8"), "-o", again.to_str().expect("UTF-8")]);
    let (first, second) = (json(&sidecar), json(&again.with_extension("json")));
    assert_eq!(second["sha256"], first["sha256"]);
    assert_eq!(second["programs"], first["programs"]);
}
