//! LTX-2.5 models on the command line.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Output;

use crate::crash_safety::kill_at;
use crate::support::drawn::{distilled_2_5, with_diffusion_decoder};
use crate::support::single_file::{TINY, TINY_2_5, combined_parts, header_2_5, write};
use crate::support::{self, QUICK, full, needs};
use ltx2::weights::{Component, ModelSource, Overrides};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;
use tempfile::TempDir;

fn open(path: &Path) -> ModelSource {
    ModelSource::open(path.to_str().expect("UTF-8"), &Overrides::default()).expect("opens")
}

fn check(arguments: &[&str]) -> Output {
    support::ltx2().arg("check").args(arguments).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Complete LTX-2.5 model.
const WHOLE_2_5: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/tiny_2_5");

/// Settings of the smallest runs.
const SMALL: [&str; 6] = [
    QUICK,
    "runtime.platform=cpu",
    "runtime.dtype=f32",
    "request.width=64",
    "request.height=64",
    "request.max_sequence_length=128",
];

/// A single transformer file has the configuration and tensors of the folder, with and without the published key
/// prefix.
#[needs(nothing)]
fn transformer_file_equals_its_diffusers_folder() {
    let dir = TempDir::new().expect("a folder");
    let folder = open(Path::new(TINY_2_5));
    let want = folder.config(Component::Transformer).expect("its own");
    let prefixed = combined_parts(TINY_2_5, &[Component::Transformer]);
    let bare: BTreeMap<_, _> = prefixed
        .iter()
        .map(|(key, tensor)| {
            (key.strip_prefix("model.diffusion_model.").expect("a prefix").to_string(), tensor.clone())
        })
        .collect();
    for tensors in [prefixed, bare] {
        let file = dir.path().join("ltx-2.5-22b-dev-transformer-bf16.safetensors");
        write(&file, &tensors, Some(&header_2_5()));
        let single = open(&file);
        for (key, value) in single.config(Component::Transformer).expect("derived").as_object().expect("an object") {
            let same = |want: &Value| value == want || value.as_f64().zip(want.as_f64()).is_some_and(|(a, b)| a == b);
            assert!(same(&want[key]), "{key}: {value}, not {}", want[key]);
        }
        let names = |s: &ModelSource| {
            let tensors = s.checkpoint(Component::Transformer).expect("weights");
            tensors.names().map(|n| (n.to_string(), tensors.shape(n).map(<[usize]>::to_vec))).collect::<Vec<_>>()
        };
        assert_eq!(names(&single), names(&folder));

        let checked = check(&[file.to_str().expect("UTF-8")]);
        let said = text(&checked.stdout);
        let count = format!("ok: {} tensors", tensors.len());
        let line = |part: &str| said.lines().find(|line| line.starts_with(part)).unwrap_or_else(|| panic!("{said}"));
        assert!(said.contains("LTX-2.5") && line("transformer ").contains(&count), "{said}");
        for part in ["diffusion_decoder", "duration_head", "temporal_latent_upsampler", "text_encoder", "connectors"] {
            assert!(line(part).ends_with("absent"), "{said}");
        }
        let base = "needs text_encoder, tokenizer, connectors, vae, audio_vae, vocoder";
        assert_eq!(line("text_to_video"), format!("text_to_video: {base}"));
        let two = "needs text_encoder, tokenizer, connectors, latent_upsampler, vae, audio_vae, vocoder";
        assert_eq!(line("two_stage"), format!("two_stage: {two}"));
        assert_eq!(line("dfr"), format!("dfr: {two}"));
        assert_eq!(line("model.decoder"), "model.decoder auto: needs diffusion_decoder, or vae with a decoder");
        let auto = "--num-frames auto: needs text_encoder, tokenizer, connectors, duration_head";
        assert_eq!(line("--num-frames"), auto);
        let rounds = two.replace("latent_upsampler", "latent_upsampler, temporal_latent_upsampler");
        assert_eq!(line("--temporal"), format!("--temporal-rounds: {rounds}"));
        let stderr = text(&checked.stderr);
        assert!(checked.status.code() == Some(1) && stderr.contains("incomplete: missing text_encoder"), "{stderr}");
    }
}

#[needs(nothing)]
fn missing_component_tensors_are_listed() {
    let dir = TempDir::new().expect("a folder");
    let file = dir.path().join("all.safetensors");
    let mut tensors = combined_parts(TINY_2_5, &[Component::Transformer]);
    let some = tensors["model.diffusion_model.keyframes_abs_pos_embedding"].clone();
    tensors.insert("vae.decoder.conv_in_x_t.weight".into(), some);
    write(&file, &tensors, Some(&header_2_5()));
    let checked = check(&[file.to_str().expect("UTF-8"), "--json"]);
    let said: Value = serde_json::from_slice(&checked.stdout).expect("JSON");
    assert_eq!(said["version"], "2.5");
    let part = |name: &str| [&said["parts"][name]["state"], &said["parts"][name]["tensors"]].map(Value::to_string);
    let missing = &said["parts"]["diffusion_decoder"]["missing"];
    assert!(missing.as_array().is_some_and(|names| names.contains(&"decoder.conv_in.weight".into())), "{missing}");
    assert_eq!(part("transformer")[0], "\"ok\"");
    assert_eq!(said["pipelines"]["hq"]["ready"], false);
    assert_eq!(said["pipelines"]["text_to_video"], said["text_to_video"]);
}

/// The first LTX-2.5 files lack the keyframe embedding. Zeros replace it without effect, so only requests that generate
/// keyframes are rejected.
#[needs(nothing)]
fn transformer_without_keyframe_embedding_is_accepted() {
    let dir = TempDir::new().expect("a folder");
    let file = dir.path().join("all.safetensors");
    let mut tensors = combined_parts(TINY_2_5, &[Component::Transformer]);
    tensors.remove("model.diffusion_model.keyframes_abs_pos_embedding").expect("the embedding");
    write(&file, &tensors, Some(&header_2_5()));
    let model = file.to_str().expect("UTF-8");
    let said: Value = serde_json::from_slice(&check(&[model, "--json"]).stdout).expect("JSON");
    assert_eq!((&said["version"], &said["parts"]["transformer"]["state"]), (&"2.5".into(), &"ok".into()), "{said}");
    let notes = said["unverified"].to_string();
    assert!(notes.contains("all.safetensors: `keyframes_abs_pos_embedding` is missing"), "{notes}");
    // Any other missing tensor is an error.
    tensors.remove("model.diffusion_model.proj_out.weight").expect("a weight");
    write(&file, &tensors, Some(&header_2_5()));
    let said: Value = serde_json::from_slice(&check(&[model, "--json"]).stdout).expect("JSON");
    assert_eq!(said["parts"]["transformer"]["missing"], serde_json::json!(["proj_out.weight"]));
}

/// `model.decoder: auto` depends on which decoders are present; neither `check` nor a run replaces a damaged one.
#[needs(nothing)]
fn check_and_dry_run_agree_on_automatic_choices() {
    let dir = TempDir::new().expect("a folder");
    let (whole, some) = (dir.path().join("whole"), dir.path().join("some"));
    for folder in [&whole, &some] {
        std::fs::create_dir(folder).expect("a folder");
    }
    let whole = with_diffusion_decoder(&whole);
    // The same model without a duration head, and with a decoder without weights.
    let some = with_diffusion_decoder(&some);
    std::fs::remove_file(Path::new(&some).join("duration_head")).expect("a link");
    std::fs::remove_file(Path::new(&some).join("diffusion_decoder/diffusion_pytorch_model.safetensors"))
        .expect("a file");
    let said = |model: &str| text(&check(&[model]).stdout);
    for (model, decoder, frames) in [
        (&whole[..], "diffusion (with reference: diffusers, conv); both are present", "ready"),
        (
            &some,
            "diffusion (with reference: diffusers, conv); both are present; diffusion_decoder is unusable: replace it, or set \
             model.decoder to conv",
            "needs duration_head; with reference: diffusers, auto means 121 frames",
        ),
    ] {
        let said = said(model);
        for line in [format!("model.decoder auto: {decoder}"), format!("--num-frames auto: {frames}")] {
            assert!(said.lines().any(|own| own == line), "no '{line}': {said}");
        }
    }
    let dry_run = |more: &[&str]| {
        let set = SMALL.iter().flat_map(|pair| ["--set", pair]).chain(more.iter().copied());
        let base = ["generate", "--dry-run", "-m", &some, "-p", "a ball", "--num-frames", "9"];
        let out = support::ltx2().args(base).args(["--stg-scale", "0"]).args(set).output().expect("the binary runs");
        (out.status.code(), text(&out.stderr))
    };
    let conv = ["--set", "model.decoder=conv"];
    let checked = said(&some);
    assert!(checked.lines().any(|line| line == "text_to_video: needs diffusion_decoder"), "{checked}");
    let (code, stderr) = dry_run(&[]);
    assert!(code == Some(1) && stderr.contains("diffusion_decoder: no weights"), "{stderr}");
    let verdict = |more: &[&str]| {
        let set = ["--set", "request.num_frames=9", "--set", "guidance.video.stg=0", "--set", "guidance.audio.stg=0"];
        let out = check(&[&[&some[..], "--json"], &set[..], more].concat());
        let said: Value = serde_json::from_slice(&out.stdout).expect("JSON");
        (out.status.code(), said["request"]["ready"].clone(), said["request"]["error"].to_string())
    };
    let (code, ready, error) = verdict(&[]);
    assert!(code == Some(1) && ready == false && error.contains("diffusion_decoder: no weights"), "{error}");
    assert_eq!((dry_run(&conv).0, verdict(&conv)), (Some(0), (Some(0), true.into(), "null".into())));
    let older = said(TINY);
    assert!(!older.contains("auto"), "an older model has no such choice: {older}");
    let json: Value = serde_json::from_slice(&check(&[&whole, "--json"]).stdout).expect("JSON");
    assert_eq!(json["decoder_auto"], serde_json::json!({"official": "diffusion", "diffusers": "conv"}));
    assert_eq!(json["num_frames_auto"]["ready"], true);
    assert_eq!(json["temporal_rounds"]["missing"], serde_json::json!(["temporal_latent_upsampler"]));
}

/// A single error line states the file, the key and the fix, before anything else is read.
#[needs(nothing)]
fn gemma_3_text_encoder_is_rejected() {
    let encoder = format!("{TINY}/text_encoder");
    let checked = check(&[TINY_2_5, "--text-encoder", &encoder]);
    let said = text(&checked.stderr);
    assert_eq!(checked.status.code(), Some(1), "{said}");
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    let cure = "use LTX-2.5's own text encoder, text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors";
    for words in [&format!("{encoder}/config.json: `model_type` = gemma3"), "is the transformer of LTX-2.5", cure] {
        assert!(errors.len() == 1 && errors[0].contains(words), "{said}");
    }
}

/// Runs every preset on a random model, both passes of two-stage presets, each with the preset's sampler.
#[needs(cpu, full)]
fn every_preset_runs() {
    let dir = TempDir::new().expect("a folder");
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_string();
    let succeed = |arguments: &[&str]| {
        let out = support::ltx2().args(arguments).output().expect("the binary runs");
        assert!(out.status.success(), "{arguments:?}: {}", text(&out.stderr));
    };
    succeed(&["init", "--preset", "nano_2_5", "--seed", "3", &path("model")]);
    let model = format!("model.path={}", path("model"));
    let mut seen = Vec::new();
    let presets = [
        ("nano_2_5", "text_to_video", "euler", None),
        ("ltx2_5", "text_to_video", "euler", None),
        ("ltx2_5_two_stage", "two_stage", "euler", Some(Value::Null)),
        ("ltx2_5_distilled", "distilled", "euler_ancestral", Some("euler".into())),
        ("ltx2_5_hq", "hq", "res_2s", Some(Value::Null)),
        ("ltx2_5_dfr", "dfr", "euler", Some(Value::Null)),
    ];
    for (preset, pipeline, first, second) in presets {
        let out = path(&format!("{preset}.mp4"));
        let mut set = [&[&model[..], "request.num_frames=9"], &SMALL[..]].concat();
        set.extend((!matches!(pipeline, "distilled" | "dfr")).then_some("sampler.steps=2"));
        set.extend((pipeline == "dfr").then_some("dfr.temporal_rounds=1"));
        set.extend(["text_to_video", "two_stage"].contains(&pipeline).then_some("guidance.stg_blocks=[1]"));
        let set = set.into_iter().flat_map(|pair| ["--set", pair]);
        succeed(&["generate", "-c", preset, "-p", "a ball", "-o", &out].into_iter().chain(set).collect::<Vec<_>>());
        let file = std::fs::read_to_string(path(&format!("{preset}.json"))).expect("a sidecar");
        let sidecar: Value = serde_json::from_str(&file).expect("JSON");
        let config = &sidecar["config"];
        assert_eq!([&config["pipeline"], &config["sampler"]["kind"]], [pipeline, first], "{preset}");
        assert_eq!(config["conditioning"]["crf"], 18, "{preset}");
        assert_eq!(sidecar["programs"].get("refine").is_some(), second.is_some(), "{preset}");
        for program in ["keyframe_upsampler", "temporal_upsampler", "round_prepare", "round"] {
            assert_eq!(sidecar["programs"].get(program).is_some(), pipeline == "dfr", "{preset}: {program}");
        }
        if let Some(second) = second {
            assert_eq!(config["two_stage"]["sampler"], second, "{preset}");
        }
        seen.push(sidecar["sha256"].to_string());
    }
    assert_eq!(seen.len(), 6);
    assert_eq!(seen[0], seen[1], "of the same sizes the small model's own preset is LTX-2.5's");
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 5, "{seen:?}");
}

/// The sidecar records the predicted number of frames, so repeating the run does not predict it again.
#[needs(cpu, full)]
fn predicted_frame_count_is_recorded_in_sidecar() {
    let dir = TempDir::new().expect("a folder");
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_string();
    let run = |arguments: &[&str]| support::ltx2().args(arguments).output().expect("the binary runs");
    let made = run(&["init", "--preset", "nano_2_5", "--seed", "3", &path("model")]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    // The prediction is at least 1 s; at 8 frames per second that is few frames.
    let model = format!("model.path={}", path("model"));
    let set = [&[&model[..], "request.frame_rate=8", "sampler.steps=1"], &SMALL[..]].concat();
    let set: Vec<&str> = set.into_iter().flat_map(|pair| ["--set", pair]).collect();
    let common = ["generate", "-c", "nano_2_5", "-p", "a ball", "--num-frames", "auto"];
    let first = run(&[&common[..], &["-o", &path("first.mp4")], &set].concat());
    let said = text(&first.stderr);
    assert!(first.status.success() && said.contains("the duration head predicts"), "{said}");
    let sidecar = |name: &str| -> Value {
        serde_json::from_str(&std::fs::read_to_string(path(name)).expect("a sidecar")).expect("JSON")
    };
    let own = sidecar("first.json");
    let frames = own["config"]["request"]["num_frames"].as_u64().expect("a number");
    assert!(frames % 8 == 1 && (9..=153).contains(&frames) && said.contains(&format!(": {frames} frames")), "{said}");
    let again = run(&["generate", "-c", &path("first.json"), "-o", &path("second.mp4")]);
    let said = text(&again.stderr);
    assert!(again.status.success() && !said.contains("the duration head predicts"), "{said}");
    assert!(own["sha256"]["frames"].is_string());
    assert_eq!(sidecar("second.json")["sha256"], own["sha256"]);

    let prompts = path("prompts.txt");
    std::fs::write(&prompts, "a ball\na cat\n").expect("written");
    let two = run(&[&["generate", "-c", "nano_2_5", "--prompts", &prompts, "--num-frames", "auto"], &set[..]].concat());
    assert!(!two.status.success() && text(&two.stderr).contains("auto is for one prompt"), "{}", text(&two.stderr));
}

/// Each invalid request gives a single error line, before a device is opened.
#[needs(nothing)]
fn unsupported_dfr_requests_are_rejected() {
    let refused = |arguments: &[&str], code: i32, words: &[&str]| {
        let common = ["generate", "-p", "a ball", "--set", "runtime.platform=cpu", "--set", "request.num_frames=25"];
        let small =
            ["--set", "request.width=64", "--set", "request.height=64", "--set", "request.max_sequence_length=64"];
        let out = support::ltx2().args(common).args(small).args(arguments).output().expect("the binary runs");
        let said = text(&out.stderr);
        let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
        assert!(errors.len() == 1 && words.iter().all(|word| errors[0].contains(word)), "{arguments:?}: {said}");
        assert_eq!(out.status.code(), Some(code), "{said}");
    };
    let dfr = |model: &'static str| ["-c", "ltx2_5_dfr", "-m", model];
    let with = |set: &'static str| [&dfr(WHOLE_2_5)[..], &["--set", set]].concat();
    // The model has no temporal upsampler.
    let words = ["temporal latent upsampler", "model.temporal_upsampler", "--temporal-upsampler"];
    refused(&with("dfr.temporal_rounds=1"), 1, &words);
    refused(&with("dfr.temporal_rounds=3"), 2, &["'dfr.temporal_rounds' must be a whole number from 0 to 2, not 3"]);
    refused(&with("request.num_frames=1"), 2, &["request.num_frames = 1: the pipeline dfr needs at least 9 frames"]);
    refused(&with("request.width=96"), 2, &["request.width", "multiple of 64"]);
    refused(&with("conditioning.generated_keyframes=1"), 2, &["dfr generates its own"]);
    refused(&with("dfr.sigmas=[0.5, 0.9]"), 2, &["dfr.sigmas", "noise levels must decrease, but 0.9 follows 0.5"]);
    refused(&dfr(TINY), 2, &["pipeline = dfr: this transformer has no keyframe embedding"]);
    let other = ["-c", "ltx2_5_distilled", "-m", WHOLE_2_5, "--temporal-rounds", "1"];
    refused(&other, 2, &["dfr.temporal_rounds = 1", "only the pipeline dfr has temporal rounds"]);
}

/// A run that loads one component at a time gives the same result as one that keeps all loaded, and so does a repeat
/// from its sidecar. `bench` times the same programs. A LoRA of another model version is rejected before anything is
/// compiled.
#[needs(cpu, full)]
fn run_with_offloading_matches_resident_run() {
    let dir = TempDir::new().expect("a folder");
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_string();
    std::fs::create_dir(path("model")).expect("a folder");
    let set = distilled_2_5(&with_diffusion_decoder(Path::new(&path("model"))));
    let set: Vec<&str> = set.iter().flat_map(|pair| ["--set", pair]).collect();
    let run = |arguments: &[&str]| {
        let out = support::ltx2().args(arguments).output().expect("the binary runs");
        assert!(out.status.success(), "{arguments:?}: {}", text(&out.stderr));
        (text(&out.stdout), text(&out.stderr))
    };
    let sidecar = |name: &str| -> Value {
        serde_json::from_str(&std::fs::read_to_string(path(name)).expect("a sidecar")).expect("JSON")
    };
    let generate = |name: &str, residency: &str| {
        let (out, more) = (path(&format!("{name}.mp4")), format!("runtime.residency={residency}"));
        let base = ["generate", "-v", "-c", "ltx2_5_distilled", "-o", &out, "--set", &more];
        (run(&[&base[..], &set].concat()).1, sidecar(&format!("{name}.json")))
    };
    let bytes = |made: &Value| made["timings"]["parameter_bytes"].as_u64().expect("a number");
    let (said, all) = generate("resident", "resident");
    assert!(!said.contains("is evicted from the devices") && all["sha256"]["frames"].is_string(), "{said}");
    assert!(all["programs"].get("diffusion_decoder").is_some() && all["programs"].get("refine").is_some(), "{all}");
    let (said, turns) = generate("in_turn", "in_turn");
    assert_eq!(turns["sha256"], all["sha256"]);
    assert!(bytes(&turns) < bytes(&all), "{} of {} bytes", bytes(&turns), bytes(&all));
    for part in ["text_encoder", "transformer"] {
        assert!(said.contains(&format!("{part} is evicted from the devices")), "{part}: {said}");
    }
    run(&["generate", "-c", &path("in_turn.json"), "-o", &path("again.mp4")]);
    let again = sidecar("again.json");
    assert_eq!([&again["sha256"], &again["programs"]], [&all["sha256"], &all["programs"]]);

    let bench = [&["bench", "-c", "ltx2_5_distilled", "--runs", "1", "--json", "-"], &set[..]].concat();
    let (json, _) = run(&bench);
    let report: Value = serde_json::from_str(&json).expect("JSON");
    let timed = report["programs"].as_object().expect("programs");
    for (name, hash) in all["programs"].as_object().expect("programs") {
        let found = timed.values().find(|p| p["program"]["hash"] == *hash);
        assert!(found.is_some_and(|p| p["median"].as_f64() > Some(0.0)), "{name} is not timed: {json}");
    }
    assert!(timed["denoise_step"]["median"].as_f64() > Some(0.0), "{json}");

    let lora = path("older.safetensors");
    let pair = [("transformer.proj_in.lora_A.weight", [1, 2]), ("transformer.proj_in.lora_B.weight", [20, 1])];
    let view = |shape: [usize; 2]| TensorView::new(Dtype::BF16, shape.to_vec(), &[0; 40][..2 * shape[0] * shape[1]]);
    let views = pair.map(|(name, shape)| (name, view(shape).expect("a tensor")));
    let version = [("model_version".to_string(), "2.3.0".to_string())].into();
    std::fs::write(&lora, safetensors::serialize(views, Some(version)).expect("bytes")).expect("written");
    let out = path("no.mp4");
    let arguments = [&["generate", "-c", "ltx2_5_distilled", "-o", &out, "--lora", &lora], &set[..]].concat();
    let refused = support::ltx2().args(arguments).output().expect("the binary runs");
    let said = text(&refused.stderr);
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(refused.status.code() == Some(1) && errors.len() == 1, "{said}");
    assert!(errors[0].contains("older.safetensors") && errors[0].contains("is a LoRA of LTX-2.3"), "{said}");
}

/// Images and generated keyframes must lie within the video, whose length is only known after the prompt is encoded.
#[needs(nothing)]
fn plan_lists_minimum_predicted_frames() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("out.mp4");
    let plan = |more: &[&str]| -> Value {
        let set = SMALL.iter().chain(&["request.frame_rate=8"]).flat_map(|pair| ["--set", pair]);
        let base = ["generate", "-m", WHOLE_2_5, "--pipeline", "distilled", "-p", "a ball", "--num-frames", "auto"];
        let own = ["--dry-run", "--json", "-o", out.to_str().expect("UTF-8")];
        let done = support::ltx2().args(base).args(own).args(set).args(more).output().expect("the binary runs");
        assert!(done.status.success(), "{more:?}: {}", text(&done.stderr));
        serde_json::from_slice(&done.stdout).expect("JSON")
    };
    // The prediction is at least one second, which is 9 frames.
    let image = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/images/frame.png");
    for (more, least) in [
        (&[][..], Value::Null),
        (&["--num-generated-keyframes", "3"], Value::Null),
        (&["--num-generated-keyframes", "20"], 25.into()),
        (&["--image", image, "30", "1"], 33.into()),
    ] {
        assert_eq!(plan(more)["least_frames"], least, "{more:?}");
    }
}

#[needs(cpu)]
fn keyframes_are_generated_for_predicted_length() {
    let folder = TempDir::new().expect("a folder");
    let out = folder.path().join("out.mp4");
    let run = |more: &[&str]| {
        let set = SMALL.iter().chain(&["request.frame_rate=8"]).flat_map(|pair| ["--set", pair]);
        let base = ["generate", "-m", WHOLE_2_5, "--pipeline", "distilled", "-p", "a ball", "--num-frames", "auto"];
        let own = ["--num-generated-keyframes", "3", "-o", out.to_str().expect("UTF-8")];
        let mut command = support::ltx2();
        command.args(base).args(own).args(set).args(more);
        command
    };
    let planned = run(&["--dry-run"]).output().expect("the binary runs");
    assert!(planned.status.success(), "{}", text(&planned.stderr));
    if !full() {
        // After the prediction the keyframes are placed, and the first program of that length is compiled.
        let cache = format!("runtime.compile_cache={}", folder.path().display());
        return kill_at("compile prepare", &mut run(&["--set", &cache]));
    }
    let made = run(&[]).output().expect("the binary runs");
    assert!(made.status.success() && out.exists(), "{}", text(&made.stderr));
}
