//! Tests that every config key has an effect in every pipeline: setting the key changes the resolved request or its
//! programs, or is rejected with an error.

use std::collections::BTreeMap;
use std::path::Path;

use ndarray::Array4;
use serde_json::{Value, json};

use super::origin::Origin;
use super::resolved::ResolvedConfig;
use super::setup;
use super::videos::output_paths;
use crate::config::{CliOverrides, Config, json_schema, load};
use crate::media::{Frames, write_png_frames};
use crate::pipeline::programs::build::{ProgramKind, Programs};
use crate::pipeline::programs::configs::{ModelConfigs, bos_rule};
use crate::request::{Shapes, resolve, sigmas};
use crate::sampling::sigmas::FlowMatch;
use crate::weights::Component;

const IMAGE: &str = "tests/fixtures/images/shapes.png";

/// Keys that change neither the request nor its programs, each with a word for the part of a run that it affects.
const ELSEWHERE: [(&str, &str); 43] = [
    ("request.enhance_prompt", "prompts"),
    ("enhance", "prompts"),
    ("model.path", "weights"),
    ("model.variant", "weights"),
    ("model.text_encoder", "weights"),
    ("model.tokenizer", "weights"),
    ("model.connectors", "weights"),
    ("model.vae", "weights"),
    ("model.audio_vae", "weights"),
    ("model.vocoder", "weights"),
    ("model.upsampler", "weights"),
    ("model.temporal_upsampler", "weights"),
    ("model.duration_head", "weights"),
    ("model.weights", "weights"),
    ("model.weights_seed", "weights"),
    ("model.loras", "weights"),
    ("model.ic_lora", "weights"),
    ("model.lora_merge", "weights"),
    ("dfr.detailing_lora.strength", "weights"),
    ("dfr.detailing_lora.apply", "weights"),
    ("sampler.progress_every", "progress"),
    ("conditioning.h264", "images"),
    ("mesh", "devices"),
    ("layout", "devices"),
    ("runtime.platform", "devices"),
    ("runtime.memory_fraction", "devices"),
    ("runtime.visible_devices", "devices"),
    ("runtime.libtpu_init_args", "devices"),
    ("runtime.residency", "memory"),
    ("runtime.stream", "memory"),
    ("runtime.resident_blocks", "memory"),
    ("runtime.memory_limit", "memory"),
    ("runtime.chip_file", "predictions"),
    ("runtime.compile_cache", "cache"),
    ("runtime.xla_flags", "compiler"),
    ("runtime.watchdog", "waits"),
    ("runtime.distributed", "processes"),
    ("output.sidecar", "files"),
    ("output.audio", "files"),
    ("output.preview_every", "files"),
    ("output.preview_decoder", "files"),
    ("request.video", "frames"),
    ("request.audio", "sound"),
];

/// Pairs of pipeline and key for which the key has no effect, because the scheduler configuration of the test models
/// already contains the official constants.
const SAME: [(&str, &str); 1] = [("hq", "sampler.sigma_shift")];

/// Returns the values to try for a key whose schema does not say which values are valid.
fn candidates(key: &str, folder: &Path) -> Option<Vec<Value>> {
    let file = |name: &str| json!(folder.join(name).to_str().expect("UTF-8"));
    Some(match key {
        "extends" => vec![json!("ltx2")],
        "output.path" => vec![json!("something.mp4"), json!("something.wav")],
        "layout" => vec![json!("replicated")],
        "model.path" => vec![json!("tests/fixtures/models/tiny_b")],
        "request.prompts" | "request.negative_prompt_file" => vec![file("text.txt")],
        "request.width" | "request.height" => vec![json!(128), json!(256)],
        "request.num_frames" => vec![json!(65), json!(25)],
        "request.max_sequence_length" => vec![json!(32), json!(64), json!(128)],
        "request.video" => vec![file("other")],
        "request.mask" => vec![json!(IMAGE)],
        "request.inpaint.region" | "request.inpaint.keep" => vec![json!([32, 0, 32, 32])],
        "request.dub.sound_seconds" => vec![json!(0.5)],
        "request.images" => vec![json!([{"path": IMAGE, "frame": 8}])],
        "request.reference_videos" => vec![json!([{"path": file("frames"), "strength": 0.5}])],
        "request.audio_latents" => vec![json!([{"path": "a.safetensors"}])],
        "request.chain.clip" => vec![json!(33)],
        "request.extend.overlap" => vec![json!(17)],
        "request.retake.to" | "request.audio.duration" => vec![json!(0.25)],
        "sampler.sigmas" | "two_stage.sigmas" | "dfr.sigmas" => vec![json!([0.8, 0.4])],
        "sampler.beta.shift" => vec![json!(1.5)],
        "sampler.cache.max_skips" | "two_stage.cache.max_skips" => vec![json!(2)],
        "sampler.cache.steps" | "two_stage.cache.steps" => vec![json!([2])],
        "guidance.stg_blocks" | "guidance.video.stg_blocks" | "guidance.audio.stg_blocks" => vec![json!([0, 2])],
        "guidance.video.by_sigma" | "guidance.audio.by_sigma" => {
            vec![json!([{"sigma": 1, "cfg": 2, "modality": 1, "stg": 0}])]
        }
        "two_stage.upsample" => vec![json!(["temporal_x2", "spatial_x2"])],
        "conditioning.reference_downscale_factor" | "conditioning.reference_temporal_scale_factor" => vec![json!(2)],
        "request.reference_video.path" | "request.reference_video.attention_mask" => vec![file("other")],
        "request.reference_videos[].path" | "request.reference_videos[].attention_mask" => vec![file("other")],
        "request.reference_video.preprocess" | "request.reference_videos[].preprocess" => vec![json!("gray")],
        "model.ic_lora.path" => vec![json!("tests/fixtures/lora/ic_tiny_a.safetensors")],
        "model.ic_lora" => vec![json!({"path": "tests/fixtures/lora/ic_tiny_a.safetensors"})],
        "dfr.detailing_lora.path" => vec![json!("tests/fixtures/lora/ic_tiny_2_5.safetensors")],
        "dfr.detailing_lora" => vec![json!({"path": "tests/fixtures/lora/ic_tiny_2_5.safetensors"})],
        "model.loras[].path" => vec![json!("tests/fixtures/lora/ic_tiny_a_plain.safetensors")],
        "model.loras[].stages" => vec![json!([2])],
        "model.loras" => vec![json!([{"path": "tests/fixtures/lora/ic_tiny_a.safetensors"}])],
        "mesh.data" | "mesh.cfg" | "mesh.fsdp" | "mesh.context" | "mesh.tensor" | "mesh.dcn.data" => vec![json!(2)],
        "runtime.platform" => vec![json!("cpu")],
        "runtime.visible_devices" => vec![json!([0])],
        "runtime.chip_file" => vec![json!("v6e")],
        "runtime.tiling.pixels" => vec![json!(128)],
        "runtime.tiling.frames" => vec![json!(96)],
        "runtime.tiling.overlap" => vec![json!(32)],
        "runtime.tiling.frame_overlap" => vec![json!(16)],
        _ => return None,
    })
}

/// Noise levels of a second stage that is long enough for a step cache.
const EIGHT_STEPS: &str = "two_stage.sigmas=[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]";

/// Returns the other settings that a key requires.
fn required_with(key: &str) -> &'static [&'static str] {
    match key {
        "request.chain.clip" => &["request.chain.overlap=9"],
        "request.chain.overlap" => &["request.chain.clip=33"],
        "request.chain.prompts" => &["request.chain={clip: 33, overlap: 9}"],
        "sampler.eta" | "sampler.noise_seed" | "sampler.step_noise" => &["sampler.kind=euler_ancestral"],
        "sampler.gamma" => &["sampler.kind=gradient_estimation"],
        "sampler.beta.alpha" | "sampler.beta.beta" | "sampler.beta.shift" => {
            &["sampler.steps=4", "sampler.schedule=beta"]
        }
        "sampler.cache.steps" | "sampler.cache.ratio" => &["sampler.cache.kind=fixed"],
        key if key.starts_with("sampler.cache.") && key != "sampler.cache.kind" => &["sampler.cache.kind=adaptive"],
        "two_stage.cache.steps" | "two_stage.cache.ratio" => &["two_stage.cache.kind=fixed", EIGHT_STEPS],
        "two_stage.cache.kind" => &[EIGHT_STEPS],
        key if key.starts_with("two_stage.cache.") => &["two_stage.cache.kind=adaptive", EIGHT_STEPS],
        "sampler.schedule" | "sampler.sigma_shift" => &["sampler.steps=4"],
        "guidance.apg.eta" | "guidance.apg.threshold" | "guidance.apg.momentum" => &["guidance.kind=legacy_apg"],
        "model.ic_lora.strength" | "model.ic_lora.apply" => {
            &["model.ic_lora.path=tests/fixtures/lora/ic_tiny_a.safetensors"]
        }
        "dfr.detailing_lora.strength" | "dfr.detailing_lora.apply" => {
            &["dfr.detailing_lora.path=tests/fixtures/lora/ic_tiny_2_5.safetensors"]
        }
        "runtime.activations" => &["runtime.weights=int8"],
        "dfr.sigmas" => &["dfr.temporal_rounds=1"],
        // With the official reference, prompts always begin with BOS.
        "text.bos" => &["reference=diffusers"],
        _ => &[],
    }
}

/// Returns an item for the list `key`, with only the required fields.
fn item(key: &str, folder: &Path) -> Option<Value> {
    let frames = folder.join("frames");
    Some(match key {
        "request.images" => json!({"path": IMAGE}),
        "request.reference_videos" => json!({"path": frames.to_str()}),
        "request.audio_latents" => json!({"path": "a.safetensors"}),
        "guidance.video.by_sigma" | "guidance.audio.by_sigma" => json!({"sigma": 0.5}),
        "model.loras" => json!({"path": "tests/fixtures/lora/ic_tiny_a.safetensors"}),
        _ => return None,
    })
}

fn followed(schema: &'static Value) -> &'static Value {
    schema["$ref"].as_str().map_or(schema, |r| followed(&json_schema()["$defs"][r.trim_start_matches("#/$defs/")]))
}

/// Returns the variants in `anyOf` of a schema, or the schema itself.
fn alternatives(schema: &'static Value) -> Vec<&'static Value> {
    let schema = followed(schema);
    schema["anyOf"].as_array().map_or(vec![schema], |all| all.iter().flat_map(alternatives).collect())
}

/// Collects all keys that have no subkeys, with the variants of their schemas. Fields of list items are written as
/// `list[].field`. Optional sections are included without variants.
fn walk(schema: &'static Value, path: &str, out: &mut Vec<(String, Vec<&'static Value>)>) {
    let options = alternatives(schema);
    let object = options.iter().find_map(|s| s["properties"].as_object());
    let items = options.iter().find_map(|s| s.get("items")).map(followed).filter(|s| s["properties"].is_object());
    let join = |key: &str| if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
    if let Some(properties) = object {
        if options.iter().any(|schema| schema["type"] == "null") {
            out.push((path.into(), Vec::new()));
        }
        properties.iter().for_each(|(key, inner)| walk(inner, &join(key), out));
        return;
    }
    out.push((path.into(), options));
    for (key, inner) in items.and_then(|s| s["properties"].as_object()).into_iter().flatten() {
        out.push((format!("{path}[].{key}"), alternatives(inner)));
    }
}

/// Returns values that the schema variants `options` permit.
fn by_schema(options: &[&'static Value]) -> Vec<Value> {
    let mut values = Vec::new();
    for schema in options {
        let words = |of: &str| schema[of].as_array().into_iter().flatten();
        values.extend(words("enum").filter(|v| !v.is_null()).cloned());
        for one in words("oneOf") {
            values.extend(one["enum"].as_array().into_iter().flatten().chain(one.get("const")).cloned());
        }
        values.extend(schema.get("const").cloned());
        let types = match &schema["type"] {
            Value::String(one) => vec![one.as_str()],
            many => many.as_array().into_iter().flatten().filter_map(Value::as_str).collect(),
        };
        let least = schema["minimum"].as_f64().unwrap_or(0.0);
        let most = schema["maximum"].as_f64().unwrap_or(f64::INFINITY);
        let within = |numbers: &[f64]| numbers.iter().copied().find(|n| *n >= least && *n <= most);
        for name in types {
            match name {
                "boolean" => values.extend([json!(true), json!(false)]),
                "integer" => values.extend(within(&[3.0, 2.0, 1.0, least]).map(|n| json!(n as u64))),
                "number" => values.extend(within(&[0.375, 1.5, least]).map(|n| json!(n))),
                "string" if values.is_empty() => values.push(json!("something")),
                "array" => values.extend(by_schema(&alternatives(&schema["items"])).first().map(|item| json!([item]))),
                "object" => values.push(json!({"xla_something": true})),
                _ => {}
            }
        }
    }
    values
}

/// A pipeline, with a minimal configuration for it.
struct PipelineCase {
    name: &'static str,
    /// Path of the base configuration, which the tested keys override. The file is a sidecar, because values in a
    /// sidecar are never rejected for having no effect.
    base: String,
    folder: tempfile::TempDir,
}

impl PipelineCase {
    fn new(name: &'static str, model: &str, request: Value, more: Value) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        for (part, shade) in [("frames", 0), ("other", 9)] {
            let frames = Frames::new(Array4::from_elem((25, 64, 64, 3), shade)).expect("frames");
            write_png_frames(&folder.path().join(part), &frames).expect("written");
        }
        std::fs::write(folder.path().join("text.txt"), "a line\n").expect("written");
        let path = |value: &Value| {
            let text = value.to_string().replace("FOLDER", folder.path().to_str().expect("UTF-8"));
            serde_json::from_str::<Value>(&text).expect("JSON")
        };
        let mut config = json!({
            "pipeline": name,
            "model": {"path": format!("tests/fixtures/models/{model}")},
            "request": path(&request),
            "guidance": {"stg_blocks": [1]},
        });
        merge(&mut config, more);
        let base = folder.path().join("base.json");
        std::fs::write(&base, json!({"config": config}).to_string()).expect("written");
        PipelineCase { name, base: base.to_str().expect("UTF-8").into(), folder }
    }

    fn load(&self, set: &[String]) -> Result<Config, String> {
        let given = CliOverrides { files: vec![self.base.clone()], set: set.to_vec(), ..CliOverrides::default() };
        let loaded = load(&given).map_err(|e| e.to_string())?;
        loaded.check_effect().map_err(|e| e.to_string())?;
        Ok(loaded.config)
    }
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            from.into_iter().for_each(|(key, value)| merge(into.entry(key).or_insert(Value::Null), value));
        }
        (into, from) => *into = from,
    }
}

/// Returns, as text, everything that a configuration determines except the programs: the resolved request with its
/// noise levels, all jobs, their output files, and whether prompts begin with BOS.
fn plan(config: &Config) -> Result<String, String> {
    let configs = ModelConfigs::from(Origin::find(config).map_err(|e| e.to_string())?).for_run(config);
    let sizes = configs.sizes().map_err(|e| e.to_string())?;
    let frames = config.request.num_frames.count().unwrap_or(25);
    let config = ResolvedConfig::with_frames(config, frames).map_err(|e| e.to_string())?;
    let jobs = config.jobs().map_err(|e| e.to_string())?;
    let request = resolve(&config, &sizes).map_err(|e| e.to_string())?;
    let shapes = Shapes::from_request(&sizes, &request.passes().0).map_err(|e| e.to_string())?;
    let scheduler = configs.origin().json(Component::Scheduler).map_err(|e| e.to_string())?.to_string();
    let scheduler = FlowMatch::from_json(&scheduler, Path::new("scheduler")).map_err(|e| e.to_string())?;
    let levels = sigmas(&config, &scheduler, &shapes).map_err(|e| e.to_string())?;
    let output = &config.output;
    let path = output.path.as_deref().map(Path::new);
    let videos = output_paths(path, &jobs, config.pipeline.extension()).map_err(|e| e.to_string())?;
    let files = (videos, &output.save_frames, &output.save_audio);
    Ok(format!("{request:?} {levels:?} {jobs:?} {files:?} {:?}", bos_rule(&config)))
}

/// Keys that change only programs, each with a program that it changes.
const OF_PROGRAMS: [(&str, ProgramKind); 8] = [
    ("runtime.dtype", ProgramKind::Denoise),
    ("runtime.numerics", ProgramKind::Denoise),
    ("runtime.attention", ProgramKind::Denoise),
    ("runtime.layers", ProgramKind::Denoise),
    ("runtime.weights", ProgramKind::Denoise),
    ("runtime.activations", ProgramKind::Denoise),
    ("vocoder.stage1_clamp", ProgramKind::Vocoder),
    ("model.decoder", ProgramKind::VideoDecoder),
];

fn program(config: &Config, kind: ProgramKind) -> Result<String, String> {
    // Use all blocks, because the first block is never quantized to 8 bits.
    let programs = Programs::from_config(config, None).map_err(|e| e.to_string())?;
    let mut build = setup::build(config, 1, "cpu", "").map_err(|e| e.to_string())?;
    // The matrices of the tiny test models have fewer rows than the default minimum for integer matmuls.
    build.lowering.min_integer_rows = 0;
    Ok(programs.network(kind, &build).map_err(|e| e.to_string())?.program.hash())
}

fn cases() -> Vec<PipelineCase> {
    let (prompt, none) = (
        |more: Value| {
            let mut request =
                json!({"prompt": "x", "max_sequence_length": 16, "width": 64, "height": 64, "num_frames": 49});
            merge(&mut request, more);
            request
        },
        json!({}),
    );
    let of_video = |more: Value| {
        let mut request = json!({"prompt": "x", "max_sequence_length": 16, "video": "FOLDER/frames"});
        merge(&mut request, more);
        request
    };
    let two = json!({"width": 128, "height": 128});
    let case = |name, request| PipelineCase::new(name, "tiny_2_3", request, none.clone());
    vec![
        case("text_to_video", prompt(json!({}))),
        PipelineCase::new("text_to_video", "tiny_a", prompt(json!({})), none.clone()),
        case("image_to_video", prompt(json!({"images": [{"path": IMAGE, "strength": 0.5}]}))),
        case("audio_to_video", prompt(json!({"audio": {"path": "a.wav"}}))),
        case("two_stage", prompt(two.clone())),
        PipelineCase::new("two_stage", "tiny_a", prompt(two.clone()), none.clone()),
        PipelineCase::new("audio_to_video", "tiny_a", prompt(json!({"audio": {"path": "a.wav"}})), none.clone()),
        PipelineCase::new("distilled", "tiny_2_5", prompt(two.clone()), none.clone()),
        PipelineCase::new(
            "image_to_video",
            "tiny_2_5",
            prompt(json!({"images": [{"path": IMAGE, "strength": 0.5}]})),
            none.clone(),
        ),
        case("distilled", prompt(two.clone())),
        case(
            "in_context",
            prompt(
                json!({"width": 128, "height": 128, "num_frames": 17, "reference_videos": [{"path": "FOLDER/frames"}]}),
            ),
        ),
        case("hq", prompt(two.clone())),
        case(
            "keyframes",
            prompt(
                json!({"width": 128, "height": 128, "images": [{"path": IMAGE}, {"path": IMAGE, "frame": 16, "strength": 0.5}]}),
            ),
        ),
        PipelineCase::new("dfr", "tiny_2_5", prompt(two), json!({"model": {"decoder": "auto"}})),
        case("retake", of_video(json!({"retake": {"from": 0.2, "to": 0.6}}))),
        case("extend", of_video(json!({"extend": {"seconds": 0.7, "overlap": 9}}))),
        case("inpaint", of_video(json!({"inpaint": {"region": [0, 0, 32, 64]}}))),
        case("dub_it", of_video(json!({"audio": {"path": "a.wav"}}))),
        case("video_to_audio", of_video(json!({}))),
        case("text_to_audio", prompt(json!({}))),
    ]
}

/// Configuration without the tested key, and the text that [`plan`] returns for it.
struct Baseline {
    config: Config,
    plan: Result<String, String>,
}

/// Configurations of a case, by the settings applied to it. `None`: the configuration is rejected.
type Baselines = BTreeMap<Vec<String>, Option<Baseline>>;

/// Returns whether setting a key changed the result: the results differ, or the new result is an error that mentions
/// the key.
fn differs(before: &Result<String, String>, after: &Result<String, String>, key: &str) -> bool {
    match (before, after) {
        (Ok(before), Ok(after)) => before != after,
        (_, Err(error)) => error.contains(key.rsplit('.').next().unwrap_or(key)),
        (Err(_), Ok(_)) => true,
    }
}

/// Tests a key in a pipeline. Returns a message if the key is accepted but has no effect.
fn fault(case: &PipelineCase, key: &str, options: &[&'static Value], known: &mut Baselines) -> Option<String> {
    let folder = case.folder.path();
    let is_elsewhere = ELSEWHERE
        .iter()
        .any(|(known, _)| key.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '['])));
    let (list, field) = key.split_once("[].").map_or((key, None), |(list, field)| (list, Some(field)));
    let values = match options {
        [] => vec![json!({})],
        _ => candidates(key, folder).unwrap_or_else(|| by_schema(options)),
    };
    if SAME.contains(&(case.name, key)) {
        return None;
    }
    if values.is_empty() {
        return Some("no value to try is known".into());
    }
    // As soon as one value of a sidecar is overridden, the sidecar's values without effect are dropped. Overriding the
    // seed makes this happen in both compared configurations.
    let more = ["request.seed=11"].iter().chain(required_with(key)).map(|pair| (*pair).to_string());
    let mut silent = Vec::new();
    for value in values {
        let pair = |value: &Value| format!("{list}={value}");
        let (base, set) = match (field, item(list, folder)) {
            (Some(field), Some(plain)) => {
                let mut own = plain.clone();
                own[field] = value.clone();
                (Some(pair(&json!([plain]))), pair(&json!([own])))
            }
            _ => (None, pair(&value)),
        };
        let config = match case.load(&more.clone().chain([set.clone()]).collect::<Vec<_>>()) {
            Ok(config) => config,
            // The error mentions the key, or the section or list that contains it.
            Err(error) if error.contains(list) || is_named(list, &error) => continue,
            Err(error)
                if required_with(key).iter().any(|pair| error.contains(pair.split('=').next().unwrap_or(pair))) =>
            {
                continue;
            }
            Err(error) => return Some(format!("{set}: the error does not mention the key: {error}")),
        };
        if is_elsewhere {
            return None;
        }
        let below: Vec<String> = more.clone().chain(base).collect();
        let before = known.entry(below).or_insert_with_key(|set| {
            let config = case.load(set).ok()?;
            Some(Baseline { plan: plan(&config), config })
        });
        let Some(before) = before else { return None };
        if json!(before.config) == json!(config) {
            continue;
        }
        let kind = OF_PROGRAMS.iter().find(|(own, _)| *own == key).map(|(_, kind)| *kind);
        let of_program = |kind| differs(&program(&before.config, kind), &program(&config, kind), key);
        if differs(&before.plan, &plan(&config), key) || kind.is_some_and(of_program) {
            return None;
        }
        silent.push(set);
    }
    (!silent.is_empty()).then(|| format!("these settings are accepted but have no effect: {}", silent.join(", ")))
}

/// Returns whether an error mentions a key by another name, or mentions the pipeline, which does not support the key.
fn is_named(key: &str, error: &str) -> bool {
    let section = key.rsplit_once('.').map_or(key, |(section, _)| section);
    let of_section = section.contains('.') && error.contains(section);
    let other = match key {
        "request.negative_prompt_file" => "request.negative_prompt",
        "extends" | "pipeline" | "reference" => "",
        // `request.reference_video` is another name for the only item of that list.
        "request.reference_video.attention_mask" if error.contains("request.reference_videos[0]") => "",
        key if ["request.images", "request.reference_video", "request.audio"]
            .iter()
            .any(|own| key.starts_with(own)) =>
        {
            "pipeline = "
        }
        _ => return of_section || key.starts_with("serve.") && error.contains("only ltx2 serve reads"),
    };
    error.contains(other)
}

#[test]
fn every_key_has_effect_or_is_rejected() {
    let mut keys = Vec::new();
    walk(json_schema(), "", &mut keys);
    assert!(keys.len() > 150, "{}", keys.len());
    for (known, _) in ELSEWHERE {
        assert!(keys.iter().any(|(key, _)| key.starts_with(known)), "{known} is not a key");
    }
    let cases: Vec<(usize, PipelineCase)> = cases().into_iter().enumerate().collect();
    // Each case tries a third of the keys, a different third than the next case; the full test tries all.
    let part = if std::env::var_os("LTX2_TEST_FULL").is_some() { 1 } else { 3 };
    let of_case = |(at, case): &(usize, PipelineCase)| -> Vec<String> {
        case.load(&[]).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        let mut known = Baselines::new();
        let of_key = |(key, options): &(String, Vec<&'static Value>)| {
            fault(case, key, options, &mut known).map(|why| format!("{} {key}: {why}", case.name))
        };
        keys.iter().skip(at % part).step_by(part).filter_map(of_key).collect()
    };
    let faults: Vec<String> = std::thread::scope(|scope| {
        let parts = cases.chunks(cases.len().div_ceil(4));
        let run = |part| scope.spawn(move || <[_]>::iter(part).flat_map(of_case).collect::<Vec<_>>());
        let started: Vec<_> = parts.map(run).collect();
        started.into_iter().flat_map(|thread| thread.join().expect("its keys are tried")).collect()
    });
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}
