//! Compares a run with the sidecar of an earlier run.

use std::path::{Component, Path, PathBuf};

use serde_json::{Map, Value, json};

use super::differences::{difference, short};
use super::hashes;
use crate::config::{AUTO, Config, Sidecar};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::model::OpenModel;
use crate::pipeline::plan::videos::{Job, sidecar_path};
use crate::weights::fingerprint::SAMPLED;

/// Config keys that do not affect the results of a run.
const IGNORED_KEYS: [&str; 13] = [
    "/output",
    // Requests are compared with enhanced prompts.
    "/request/enhance_prompt",
    "/enhance",
    "/sampler/progress_every",
    "/runtime/distributed",
    "/runtime/compile_cache",
    "/runtime/residency",
    "/runtime/stream",
    "/runtime/resident_blocks",
    "/runtime/memory_limit",
    "/runtime/visible_devices",
    "/runtime/libtpu_init_args",
    "/runtime/watchdog",
];

/// Config keys that can be `auto`. A sidecar records the value to which `auto` was resolved.
const AUTO_KEYS: [&str; 4] = ["/layout", "/conditioning/h264", "/request/num_frames", "/runtime/layers"];

/// Returns the effective configuration of a job, with null for all keys that do not affect the result.
pub(in crate::pipeline) fn numbers(config: &Config, job: &Job) -> Value {
    let mut own = config.effective(&job.prompt, job.seed);
    clear(&mut own);
    own
}

fn clear(config: &mut Value) {
    for key in IGNORED_KEYS {
        if let Some(value) = config.pointer_mut(key) {
            *value = Value::Null;
        }
    }
}

/// Adds the keys that `tree` lacks, with their default values. Sidecars of earlier releases lack newer keys.
fn fill(tree: &mut Value, defaults: &Value) {
    let (Value::Object(tree), Value::Object(defaults)) = (tree, defaults) else { return };
    for (key, default) in defaults {
        fill(tree.entry(key).or_insert_with(|| default.clone()), default);
    }
}

/// Describes the first key in which a job's request differs from the configuration that a sidecar records, with both
/// values.
fn request_difference(recorded: &Value, config: &Config, job: &Job) -> Option<String> {
    let (mut own, mut recorded) = (numbers(config, job), recorded.clone());
    fill(&mut recorded, &Config::default().effective("", 0));
    clear(&mut recorded);
    for key in AUTO_KEYS {
        let is_open = own.pointer(key).is_some_and(|value| value == AUTO);
        if let (Some(own), Some(recorded)) = (own.pointer_mut(key).filter(|_| is_open), recorded.pointer(key)) {
            *own = recorded.clone();
        }
    }
    if config.layout == AUTO && config.mesh.is_none() {
        own["mesh"] = recorded["mesh"].clone();
    }
    let (key, recorded, own) = difference(&recorded, &own, "")?;
    Some(format!("{key} was {}, is now {}", short(&recorded), short(&own)))
}

/// Returns whether `path` is the input file that a sidecar records as `recorded`. Recorded paths can be relative to the
/// working directory of the recorded run; `path` is absolute.
fn is_same_file(recorded: &str, path: &str) -> bool {
    let given = |part: &Component| !matches!(part, Component::CurDir | Component::ParentDir);
    let relative: PathBuf = Path::new(recorded).components().skip_while(|part| !given(part)).collect();
    recorded == path || Path::new(recorded).is_relative() && Path::new(path).ends_with(relative)
}

/// Returns a line of text for each input file whose hash differs from the recorded hash. Ignores files that the sidecar
/// does not record.
fn input_differences(recorded: &Value, inputs: &Map<String, Value>) -> Vec<String> {
    let Value::Object(recorded) = recorded else { return Vec::new() };
    let changed = inputs.iter().filter_map(|(path, hash)| {
        let known: Vec<&Value> =
            recorded.iter().filter(|(key, _)| is_same_file(key, path)).map(|(_, hash)| hash).collect();
        let was = known.first().filter(|_| !known.contains(&hash))?;
        let text = |hash: &Value| hash.as_str().unwrap_or_default().to_string();
        Some(format!("{path} has changed: its hash was {}, is now {}", text(was), text(hash)))
    });
    changed.collect()
}

/// Result of comparing the model that a sidecar records with the model of this run.
#[derive(Debug, PartialEq)]
enum ModelMatch {
    Same,
    /// The models cannot be compared: the sidecar was written by an earlier release, whose fingerprint does not cover
    /// the weights.
    Unknown,
    Differs(String),
}

/// Compares the model that a sidecar records with [`OpenModel::identity`]. Only components that both runs read are
/// compared.
fn compare_models(recorded: &Value, own: &Value) -> ModelMatch {
    let of = |tree: &Value, key: &str| tree[key].as_str().unwrap_or_default().to_string();
    let is_random = |tree: &Value| tree["weights"] == "random";
    if recorded.is_null() {
        return ModelMatch::Unknown;
    }
    if is_random(recorded) != is_random(own) {
        let name = |tree: &Value| if is_random(tree) { "random" } else { "file" };
        return ModelMatch::Differs(format!("model.weights was {}, is now {}", name(recorded), name(own)));
    }
    if let (Value::Object(recorded), Value::Object(parts)) = (&recorded["parts"], &own["parts"]) {
        let changed = parts.iter().filter(|(part, hash)| recorded.get(*part).is_some_and(|other| other != *hash));
        let changed: Vec<&str> = changed.map(|(part, _)| part.as_str()).collect();
        return match changed.is_empty() {
            true => ModelMatch::Same,
            false => ModelMatch::Differs(format!("{}: changed components: {}", of(own, "path"), changed.join(", "))),
        };
    }
    match (of(recorded, "fingerprint"), of(own, "fingerprint")) {
        (was, is) if was == is => ModelMatch::Same,
        (was, _) if !is_random(own) && !was.starts_with(SAMPLED) => ModelMatch::Unknown,
        (was, is) => ModelMatch::Differs(format!("{}: the fingerprint was {was}, is now {is}", of(own, "path"))),
    }
}

/// Returns a line of text for each version that differs from the recorded one. Ignores versions that are missing on
/// either side.
fn version_differences(recorded: &Value, own: &Value) -> Vec<String> {
    let all = ["ltx2", "pjrt", "platform"].into_iter();
    let text =
        |tree: &Value, key: &str| tree[key].as_str().map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "));
    let changed = all.filter_map(|key| {
        let (was, is) = (text(recorded, key)?, text(own, key)?);
        (was != is).then(|| format!("{key} was {was}, is now {is}"))
    });
    changed.collect()
}

/// Logs a warning, in one line, if versions differ from those that the sidecar records.
pub(in crate::pipeline) fn warn_of_versions(sidecar: &Sidecar, own: &Value) {
    let changed = version_differences(&sidecar.versions, own);
    if !changed.is_empty() {
        tracing::warn!("{}: the result may differ: {}", sidecar.file, changed.join("; "));
    }
}

/// If the run repeats a sidecar, compares its inputs and its model with those that the sidecar records.
///
/// # Errors
/// Returns an error that lists the differences; with `--allow-changed-inputs`, they are logged as warnings instead. If
/// the ltx2 version differs, or if the user selected another model, a warning is logged.
pub(in crate::pipeline) fn check_rerun(config: &Config, sidecar: Option<&Sidecar>, model: &OpenModel) -> Result<()> {
    let Some(sidecar) = sidecar else { return Ok(()) };
    warn_of_versions(sidecar, &json!({"ltx2": env!("CARGO_PKG_VERSION")}));
    let mut changed = input_differences(&sidecar.inputs, &hashes::of_given(config)?);
    match compare_models(&sidecar.model, &model.identity(config)?) {
        ModelMatch::Same => {}
        ModelMatch::Unknown => tracing::warn!(
            "{}: the model fingerprint does not cover the weights (written by an earlier release); the model is not compared",
            sidecar.file
        ),
        ModelMatch::Differs(why) if sidecar.uses_other_model => {
            tracing::warn!("{}: this run uses a model other than that of the sidecar: {why}", sidecar.file);
        }
        ModelMatch::Differs(why) => changed.push(why),
    }
    if sidecar.allows_changes || changed.is_empty() {
        changed.iter().for_each(|why| tracing::warn!("{}: {why}", sidecar.file));
        return Ok(());
    }
    let reason =
        format!("{}; restore the recorded inputs and model, or run with --allow-changed-inputs", changed.join("; "));
    Err(PipelineError::File { path: sidecar.file.clone().into(), reason })
}

/// Result of comparing an existing video with the job that would generate it.
pub(in crate::pipeline) enum ExistingVideo {
    /// The request, the inputs and the model are the same.
    Same,
    /// The request, the inputs or the model differ. Contains a description of the first difference.
    Differs(String),
    /// The video's sidecar is missing or cannot be read.
    NoSidecar,
}

/// Reads the sidecar of a video, with the form of layers that replaced `runtime.layers: auto`. `None`: the sidecar is
/// missing or cannot be read.
fn read(video: &Path) -> Option<Value> {
    let sidecar: Value = serde_json::from_slice(&std::fs::read(sidecar_path(video)).ok()?).ok()?;
    sidecar["config"].is_object().then(|| with_form(sidecar))
}

/// Replaces `runtime.layers: auto` in a sidecar's configuration by the form that the sidecar records.
fn with_form(mut sidecar: Value) -> Value {
    let form = sidecar["layers"]["form"].take();
    match sidecar["config"].pointer_mut("/runtime/layers") {
        Some(layers) if *layers == AUTO && form.is_string() => *layers = form,
        _ => {}
    }
    sidecar
}

/// Returns whether the sidecar of a video records the same request as a job. Does not compare the inputs and the model.
pub(in crate::pipeline) fn has_request(video: &Path, config: &Config, job: &Job) -> bool {
    read(video).is_some_and(|sidecar| request_difference(&sidecar["config"], config, job).is_none())
}

/// Compares an existing video with a job, using the video's sidecar. Opens the model if `model` is `None` and the
/// comparison needs it.
pub(in crate::pipeline) fn compare(
    path: &Path,
    config: &Config,
    job: &Job,
    model: &mut Option<OpenModel>,
) -> Result<ExistingVideo> {
    let Some(sidecar) = read(path) else { return Ok(ExistingVideo::NoSidecar) };
    if let Some(why) = request_difference(&sidecar["config"], config, job) {
        return Ok(ExistingVideo::Differs(why));
    }
    if let Some(why) = input_differences(&sidecar["inputs"], &hashes::of_given(config)?).into_iter().next() {
        return Ok(ExistingVideo::Differs(why));
    }
    let model = match model {
        Some(model) => model,
        None => model.insert(OpenModel::from_config(config)?),
    };
    Ok(match compare_models(&sidecar["model"], &model.identity(config)?) {
        ModelMatch::Same => ExistingVideo::Same,
        ModelMatch::Unknown => ExistingVideo::Differs(
            "model.fingerprint of the sidecar does not cover the weights (written by an earlier release)".into(),
        ),
        ModelMatch::Differs(why) => ExistingVideo::Differs(why),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(seed: u64) -> Job {
        Job { index: 0, prompt: "a".into(), seed }
    }

    #[test]
    fn request_difference_quotes_key_and_both_values() {
        let config = Config::default();
        let recorded = config.effective("a", 10);
        assert_eq!(request_difference(&recorded, &config, &job(10)), None);
        let why = request_difference(&recorded, &config, &job(11));
        assert_eq!(why.as_deref(), Some("request.seed was 10, is now 11"));
        // Different output paths, and keys that the sidecar does not have yet, do not count as differences.
        let mut other = config.clone();
        other.output.path = Some("x.mp4".into());
        assert_eq!(request_difference(&recorded, &other, &job(10)), None);
        let mut earlier = recorded.clone();
        earlier["request"].as_object_mut().expect("a map").remove("frame_rate");
        assert_eq!(request_difference(&earlier, &config, &job(10)), None);
        // `layout: auto` matches any recorded layout.
        let mut open = config.clone();
        open.layout = AUTO.into();
        let mut chosen = recorded.clone();
        (chosen["layout"], chosen["mesh"]) = (json!("replicated"), json!({"context": 2}));
        assert_eq!(request_difference(&chosen, &open, &job(10)), None);
        // The same holds for `runtime.layers: auto`, but not for another form by name.
        let looped = with_form(json!({"config": recorded, "layers": {"form": "loop"}}))["config"].take();
        assert_eq!(request_difference(&looped, &config, &job(10)), None);
        let mut unrolled = config.clone();
        unrolled.runtime.layers = crate::config::LayerForm::Unrolled;
        let why = request_difference(&looped, &unrolled, &job(10));
        assert_eq!(why.as_deref(), Some("runtime.layers was \"loop\", is now \"unrolled\""));
        let named = Config { layout: "ring".into(), ..config.clone() };
        assert!(request_difference(&chosen, &named, &job(10)).is_some(), "another layout by name");
    }

    #[test]
    fn changed_inputs_are_reported_and_new_ones_are_not() {
        let recorded = json!({"images/a.png": "01", "../b.wav": "02", "/abs/c.png": "03"});
        let now = |a: &str, b: &str, c: &str| {
            let all = json!({"/w/images/a.png": a, "/b.wav": b, "/abs/c.png": c, "/new.png": "09"});
            input_differences(&recorded, all.as_object().expect("a map"))
        };
        assert_eq!(now("01", "02", "03"), [""; 0]);
        assert_eq!(now("07", "02", "03"), ["/w/images/a.png has changed: its hash was 01, is now 07"]);
        assert_eq!((now("01", "x", "03").len(), now("01", "02", "x").len()), (1, 1));
        assert!(!is_same_file("a.png", "/w/ba.png") && !is_same_file("/w/a.png", "/v/w/a.png"));
    }

    #[test]
    fn changed_versions_are_reported_and_plugin_paths_are_not() {
        let recorded = json!({"ltx2": "0.1.0", "plugin": "/a.so", "pjrt": "0.90", "platform": "PJRT C\n1"});
        let own =
            |ltx2: &str, platform: &str| json!({"ltx2": ltx2, "plugin": "/b.so", "pjrt": "0.90", "platform": platform});
        assert_eq!(version_differences(&recorded, &own("0.1.0", "PJRT C\n1")), [""; 0]);
        let both = ["ltx2 was 0.1.0, is now 0.2.0", "platform was PJRT C 1, is now PJRT C 2"];
        assert_eq!(version_differences(&recorded, &own("0.2.0", "PJRT C\n2")), both);
        assert_eq!(version_differences(&Value::Null, &own("0.2.0", "2")), [""; 0], "of an earlier release");
        assert_eq!(version_differences(&recorded, &json!({"ltx2": "0.1.0"})), [""; 0]);
    }

    #[test]
    fn models_are_compared_by_shared_components() {
        let model = |vae: &str, fingerprint: &str| json!({"path": "m", "fingerprint": fingerprint, "parts": {"vae": vae, "vocoder": "1"}});
        let mut fewer = model("1", "v2:a");
        fewer["parts"].as_object_mut().expect("a map").remove("vae");
        assert_eq!(compare_models(&model("1", "v2:b"), &fewer), ModelMatch::Same);
        let other = ModelMatch::Differs("m: changed components: vae".into());
        assert_eq!(compare_models(&model("1", "v2:a"), &model("2", "v2:b")), other);
        // This fingerprint has the old format, which covers only headers and not the weights.
        let old = json!({"path": "m", "fingerprint": "ab"});
        assert_eq!(compare_models(&old, &model("1", "v2:a")), ModelMatch::Unknown);
        let random = |seed: &str| json!({"path": "nano", "weights": "random", "fingerprint": seed});
        assert_eq!(compare_models(&random("a"), &random("a")), ModelMatch::Same);
        assert!(matches!(compare_models(&random("a"), &random("b")), ModelMatch::Differs(_)));
        let file = ModelMatch::Differs("model.weights was random, is now file".into());
        assert_eq!(compare_models(&random("a"), &model("1", "v2:a")), file);
    }
}
