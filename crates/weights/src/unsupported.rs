//! Detection of unsupported models: newer versions, which must not run as older ones, and weights that are quantized in
//! unrecognized forms.

use std::path::Path;

use serde_json::Value;

use super::Component;
use super::checkpoint::Checkpoint;
use super::error::WeightsError;
use super::version::Version;

/// The newest supported version below 2.5. Of later versions, only 2.5 is supported.
const LAST_BEFORE_2_5: (u64, u64) = (2, 3);

/// Metadata key of the model version.
pub(super) const VERSION: &str = "model_version";

/// Supported classes of components in the diffusers layout.
const CLASSES: [(Component, &[&str]); 10] = [
    (Component::Connectors, &["LTX2TextConnectors"]),
    (Component::Transformer, &["LTX2VideoTransformer3DModel"]),
    (Component::Scheduler, &["FlowMatchEulerDiscreteScheduler"]),
    (Component::LatentUpsampler, &["LTX2LatentUpsamplerModel"]),
    (Component::TemporalUpsampler, &["LTX2LatentUpsamplerModel"]),
    (Component::DurationHead, &["LTX2DurationHead"]),
    (Component::DiffusionDecoder, &["LTX2VideoDiffusionDecoderModel"]),
    (Component::Vae, &["AutoencoderKLLTX2Video"]),
    (Component::AudioVae, &["AutoencoderKLLTX2Audio"]),
    (Component::Vocoder, &["LTX2Vocoder", "LTX2VocoderWithBWE"]),
];

/// Supported diffusers pipelines in `model_index.json`.
const PIPELINES: [&str; 9] = [
    "LTX2Pipeline",
    "LTX2ConditionPipeline",
    "LTX2DFRPipeline",
    "LTX2DFRTemporalRefinePipeline",
    "LTX2HDRPipeline",
    "LTX2ImageToVideoPipeline",
    "LTX2InContextPipeline",
    "LTX2LatentUpsamplePipeline",
    "LTX2VideoDiffusionDecodePipeline",
];

/// Entries of `model_index.json` that are not components: they rewrite prompts and are not used by this program.
const UNUSED: [&str; 2] = ["processor", "prompt_enhancer"];

fn refused(path: &Path, mark: String) -> WeightsError {
    WeightsError::Newer { path: path.to_path_buf(), mark }
}

/// Returns an error if the header of a single file specifies an unsupported model version.
pub(super) fn refuse_file(checkpoint: &Checkpoint) -> Result<(), WeightsError> {
    let Some(version) = checkpoint.metadata(VERSION) else { return Ok(()) };
    let numbers = Version::numbers(version);
    match numbers <= LAST_BEFORE_2_5 || numbers == (2, 5) {
        true => Ok(()),
        false => Err(refused(checkpoint.path(), format!("`{VERSION}` {version} in the header"))),
    }
}

/// Returns an error if a component's configuration has an unsupported class.
pub(super) fn refuse_config(path: &Path, component: Component, config: &Value) -> Result<(), WeightsError> {
    let known = CLASSES.iter().find(|(of, _)| *of == component).map_or(&[][..], |(_, classes)| classes);
    refuse_class(path, config, known)
}

fn refuse_class(path: &Path, config: &Value, known: &[&str]) -> Result<(), WeightsError> {
    let class = config.get("_class_name").and_then(Value::as_str);
    match class.filter(|class| !known.is_empty() && !known.contains(class)) {
        Some(class) => Err(refused(path, format!("`_class_name` = {class}"))),
        None => Ok(()),
    }
}

/// Returns an error if `model_index.json` has an unsupported pipeline or an unknown entry.
pub(super) fn refuse_index(path: &Path, index: &Value) -> Result<(), WeightsError> {
    refuse_class(path, index, &PIPELINES)?;
    for (key, value) in index.as_object().into_iter().flatten() {
        let absent = value.as_array().map_or(value.is_null(), |entry| entry.iter().all(Value::is_null));
        let known = key.starts_with('_') || UNUSED.contains(&&key[..]) || Component::from_folder(key).is_some();
        if !absent && !known {
            return Err(refused(path, format!("`{key}`")));
        }
    }
    Ok(())
}

/// Returns an error for the first weight that is not floating point, or whose scales are not: it is quantized in a form
/// that is not recognized.
pub(super) fn reject_unrecognized_quantization(checkpoint: &Checkpoint) -> Result<(), WeightsError> {
    let is_unknown = |key: &str| match key.strip_suffix("_scale").filter(|weight| weight.ends_with(".weight")) {
        Some(weight) => checkpoint.contains(weight) && !checkpoint.is_float(key),
        None => key.ends_with(".weight") && !checkpoint.is_float(key),
    };
    let Some((key, dtype, _)) = checkpoint.headers().find(|(key, ..)| is_unknown(key)) else { return Ok(()) };
    let scales = checkpoint.dtype_name(&format!("{key}_scale"));
    let unmarked = "without a `comfy_quant` tensor that states its format";
    let reason = match (&*dtype, scales.as_deref()) {
        ("f8_e8m0", _) => "is f8_e8m0, as the scales of mxfp8 weights are; mxfp8 is not supported".into(),
        ("u8" | "f4", Some("f8_e8m0")) => {
            format!("is {dtype} with scales of f8_e8m0, as mxfp4 weights are; mxfp4 is not supported")
        }
        ("i8", _) => format!("is i8, {unmarked} (int8 or int8-convrot)"),
        _ => format!("is {dtype}, {unmarked}"),
    };
    Err(WeightsError::Quantized { path: checkpoint.file_of(key).to_path_buf(), key: key.into(), reason })
}
