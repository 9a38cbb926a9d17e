//! Models of generations that this program does not run, told by what only they have, so that none runs as an older one.

use std::path::Path;

use serde_json::Value;

use super::Component;
use super::checkpoint::Checkpoint;
use super::error::WeightsError;
use super::version::KEYFRAMES;

/// The newest generation that is run.
const NEWEST: (u64, u64) = (2, 3);
/// A tensor that LTX-2.5's transformer adds.
const KEYFRAMES_TENSOR: &str = "keyframes_abs_pos_embedding";

/// A generation after [`NEWEST`], and what it would need.
struct Newer {
    name: &'static str,
    needs: &'static str,
}

const V2_5: Newer = Newer {
    name: "of LTX-2.5",
    needs: "it would need a transformer that marks keyframes, the text encoder Gemma 4, and the decoders of that model",
};
const UNKNOWN: Newer =
    Newer { name: "of no generation that this program knows", needs: "a model that is newer needs a newer ltx2" };

/// Classes of components in diffusers' layout.
const CLASSES: [(Component, &[&str]); 7] = [
    (Component::Connectors, &["LTX2TextConnectors"]),
    (Component::Transformer, &["LTX2VideoTransformer3DModel"]),
    (Component::Scheduler, &["FlowMatchEulerDiscreteScheduler"]),
    (Component::LatentUpsampler, &["LTX2LatentUpsamplerModel"]),
    (Component::Vae, &["AutoencoderKLLTX2Video"]),
    (Component::AudioVae, &["AutoencoderKLLTX2Audio"]),
    (Component::Vocoder, &["LTX2Vocoder", "LTX2VocoderWithBWE"]),
];

/// Pipelines of diffusers that a folder of LTX-2.0 or LTX-2.3 is saved by.
const PIPELINES: [&str; 6] = [
    "LTX2Pipeline",
    "LTX2ConditionPipeline",
    "LTX2HDRPipeline",
    "LTX2ImageToVideoPipeline",
    "LTX2InContextPipeline",
    "LTX2LatentUpsamplePipeline",
];

/// Entries of a folder's index beside the components: what prompts are rewritten with, which no run asks for.
const UNUSED: [&str; 2] = ["processor", "prompt_enhancer"];

/// Entries that only LTX-2.5 has.
const PARTS_OF_2_5: [&str; 3] = ["diffusion_decoder", "duration_head", "temporal_latent_upsampler"];

fn refused(path: &Path, mark: String, newer: &Newer) -> WeightsError {
    WeightsError::Newer { path: path.to_path_buf(), mark, generation: newer.name, needs: newer.needs }
}

/// Refuses a single file of a newer generation, by its header.
///
/// # Errors
/// As said, with the mark.
pub(super) fn refuse_file(checkpoint: &Checkpoint, config: &Value) -> Result<(), WeightsError> {
    let path = checkpoint.path();
    if let Some(version) = checkpoint.metadata("model_version") {
        let number = version.trim_start_matches(|c: char| !c.is_ascii_digit());
        let mut numbers = number.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
        let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if found > NEWEST {
            let newer = if found == (2, 5) { V2_5 } else { UNKNOWN };
            return Err(refused(path, format!("`model_version` {version} in its header"), &newer));
        }
    }
    let flag = |section: &str, key: &str| config.get(section).and_then(|s| s.get(key));
    if flag("transformer", KEYFRAMES) == Some(&Value::Bool(true)) {
        return Err(refused(path, format!("`config.transformer.{KEYFRAMES}` = true"), &V2_5));
    }
    if let Some(class) = flag("vae", "_class_name").filter(|class| *class == "CausalDiffusionVAE") {
        return Err(refused(path, format!("`config.vae._class_name` = {class}"), &V2_5));
    }
    Ok(())
}

/// Refuses the tensors of a newer transformer.
///
/// # Errors
/// As said, with the tensor.
pub(super) fn refuse_tensors(component: Component, tensors: &Checkpoint) -> Result<(), WeightsError> {
    match component == Component::Transformer && tensors.contains(KEYFRAMES_TENSOR) {
        true => Err(refused(tensors.path(), format!("tensor `{KEYFRAMES_TENSOR}`"), &V2_5)),
        false => Ok(()),
    }
}

/// Refuses the configuration of a newer component.
///
/// # Errors
/// As said, with key and value.
pub(super) fn refuse_config(path: &Path, component: Component, config: &Value) -> Result<(), WeightsError> {
    if component == Component::Transformer && config.get(KEYFRAMES) == Some(&Value::Bool(true)) {
        return Err(refused(path, format!("`{KEYFRAMES}` = true"), &V2_5));
    }
    let family = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    if component == Component::TextEncoder && family.starts_with("gemma4") {
        return Err(refused(path, format!("`model_type` = {family}"), &V2_5));
    }
    let known = CLASSES.iter().find(|(of, _)| *of == component).map_or(&[][..], |(_, classes)| classes);
    refuse_class(path, config, known)
}

fn refuse_class(path: &Path, config: &Value, known: &[&str]) -> Result<(), WeightsError> {
    let class = config.get("_class_name").and_then(Value::as_str);
    match class.filter(|class| !known.is_empty() && !known.contains(class)) {
        Some(class) => Err(refused(path, format!("`_class_name` = {class}"), &UNKNOWN)),
        None => Ok(()),
    }
}

/// Refuses a folder whose index names a pipeline or parts of a newer model.
///
/// # Errors
/// As said, with the entry.
pub(super) fn refuse_index(path: &Path, index: &Value) -> Result<(), WeightsError> {
    refuse_class(path, index, &PIPELINES)?;
    for (key, value) in index.as_object().into_iter().flatten() {
        let absent = value.as_array().map_or(value.is_null(), |entry| entry.iter().all(Value::is_null));
        let known = key.starts_with('_') || UNUSED.contains(&&key[..]) || Component::from_folder(key).is_some();
        if !absent && !known {
            let newer = if PARTS_OF_2_5.contains(&&key[..]) { V2_5 } else { UNKNOWN };
            return Err(refused(path, format!("`{key}`"), &newer));
        }
    }
    Ok(())
}
