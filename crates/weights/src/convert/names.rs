//! Tensor names and configuration of a converted file: those of Lightricks' files, which other programs read too.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::checkpoint::{Checkpoint, read_json};
use crate::component::Component;
use crate::error::WeightsError;
use crate::keys::{SingleFileKeys, TRANSFORMER, is_projection, is_projection_name, lightricks};
use crate::packed::GEMMA_CONFIG;
use crate::text_encoders::{LANGUAGE_MODEL, tensor_name};
use crate::{derived, gguf_model, official, quantization};

use super::CONFIG;

/// Class of the only component of diffusers whose names and configuration can be converted.
const CLASS: &str = "LTX2VideoTransformer3DModel";

/// Keys of diffusers' configuration of the transformer, and of Lightricks' header.
const KEYS: [(&str, &str); 23] = [
    ("in_channels", "in_channels"),
    ("out_channels", "out_channels"),
    ("num_attention_heads", "num_attention_heads"),
    ("attention_head_dim", "attention_head_dim"),
    ("cross_attention_dim", "cross_attention_dim"),
    ("audio_in_channels", "audio_in_channels"),
    ("audio_out_channels", "audio_out_channels"),
    ("audio_num_attention_heads", "audio_num_attention_heads"),
    ("audio_attention_head_dim", "audio_attention_head_dim"),
    ("audio_cross_attention_dim", "audio_cross_attention_dim"),
    ("num_layers", "num_layers"),
    ("norm_eps", "norm_eps"),
    ("caption_channels", "caption_channels"),
    ("timestep_scale_multiplier", "timestep_scale_multiplier"),
    ("rope_type", "rope_type"),
    ("ff_bias", "ff_bias"),
    ("audio_ff_bias", "audio_ff_bias"),
    ("use_prompt_adaln_single", "use_prompt_adaln_single"),
    ("use_keyframes_abs_pos_embedding", "use_keyframes_abs_pos_embedding"),
    ("rope_theta", "positional_embedding_theta"),
    ("cross_attn_timestep_scale_multiplier", "av_ca_timestep_scale_multiplier"),
    ("gated_attn", "apply_gated_attention"),
    ("cross_attn_mod", "cross_attention_adaln"),
];

/// Tensors of a new file, and the header key and value of its configuration.
type Named = (Checkpoint, Option<(&'static str, Value)>);

/// Returns the tensors under Lightricks' names, and the header's configuration if the file has none.
///
/// # Errors
/// Returns an error for a folder of diffusers other than the transformer's, a configuration that Lightricks' header
/// cannot state, diffusers' names without a configuration, and a GGUF file that is neither LTX's transformer nor
/// Gemma 3.
pub(super) fn official(input: &Path, tensors: Checkpoint) -> Result<Named, WeightsError> {
    if let Some(path) = config_file(input, &tensors) {
        let mut config = read_json(&path)?;
        quantization::take(&path, &mut config)?;
        return match config["model_type"] == "gemma3" {
            true => {
                let name =
                    |key: &str| tensor_name(key).strip_prefix(LANGUAGE_MODEL).map(|rest| format!("model.{rest}"));
                let tensors = tensors.renamed(|key| Some(name(key).unwrap_or_else(|| key.into())))?;
                Ok((tensors, Some((GEMMA_CONFIG, config))))
            }
            false => diffusers(&path, &config, &tensors),
        };
    }
    if let Some(architecture) = tensors.architecture().filter(|kind| !gguf_model::is_transformer(kind)) {
        if !gguf_model::is_text_encoder(architecture) {
            let why = "only LTX's transformer (\"ltxv\") and Gemma 3 (\"gemma3\") can be converted";
            return Err(gguf_model::refused(&tensors, architecture, why));
        }
        let config = gguf_model::text_encoder_config(&tensors)?;
        return Ok((gguf_model::text_encoder(tensors)?, config.map(|config| (GEMMA_CONFIG, config))));
    }
    let mut derived = gguf_model::transformer_config(&tensors)?;
    let keys = SingleFileKeys::new(tensors.names());
    let is_diffusers = |key: &&str| key.starts_with("transformer_blocks.") && keys.map(key).is_none();
    if let Some(key) = tensors.names().find(is_diffusers) {
        let reason = "is a name of diffusers, but there is no config.json next to the file; pass the folder \
                      `transformer` with its config.json";
        return Err(WeightsError::Config { path: tensors.path().into(), key: key.into(), reason: reason.into() });
    }
    if let Some(config) = &mut derived {
        let is_connectors = |(component, name)| (component == Component::Connectors).then_some(name);
        let connectors = tensors.renamed(|key| keys.map(key).and_then(is_connectors))?;
        if connectors.names().any(|name| !is_projection_name(name)) {
            derived::add_connector_keys(&mut config["transformer"], &connectors)?;
        }
    }
    let tensors = tensors.renamed(|key| {
        let is_bare = !key.starts_with(TRANSFORMER) && !is_projection(key);
        Some(match keys.map(key) {
            Some((Component::Transformer | Component::Connectors, _)) if is_bare => format!("{TRANSFORMER}{key}"),
            _ => key.into(),
        })
    })?;
    Ok((tensors, derived.map(|config| (CONFIG, config))))
}

/// Returns the path of the `config.json` in the folder of the tensors. `None`: the folder contains no `config.json`, or
/// the tensors do not need it.
fn config_file(input: &Path, tensors: &Checkpoint) -> Option<PathBuf> {
    let is_stated = [CONFIG, GEMMA_CONFIG].iter().any(|key| tensors.metadata(key).is_some());
    let is_lightricks = |key: &str| key.starts_with(TRANSFORMER) || key.starts_with("patchify_proj.");
    if is_stated || tensors.architecture().is_some() || tensors.names().any(is_lightricks) {
        return None;
    }
    let folder = if input.is_dir() { input } else { input.parent()? };
    Some(folder.join("config.json")).filter(|path| path.is_file())
}

fn diffusers(path: &Path, own: &Value, tensors: &Checkpoint) -> Result<Named, WeightsError> {
    let refused = |key: &str, reason: String| WeightsError::Config { path: path.into(), key: key.into(), reason };
    if own["_class_name"] != CLASS {
        let key = ["_class_name", "model_type"].into_iter().find(|key| own[*key].is_string()).unwrap_or("_class_name");
        let is = own.get(key).map_or("missing".into(), Value::to_string);
        let reason = format!(
            "is {is}, but only the folders of {CLASS} and of Gemma 3 can be converted, because other programs read single \
             files with Lightricks' names; convert Lightricks' file of this component"
        );
        return Err(refused(key, reason));
    }
    let tensors = tensors.renamed(|key| Some(format!("{TRANSFORMER}{}", lightricks(Component::Transformer, key))))?;
    let mut config = derived::transformer_config(&tensors)?;
    let header = &mut config["transformer"];
    for (key, name) in KEYS {
        if let Some(value) = own.get(key).filter(|value| !value.is_null()) {
            header[name] = value.clone();
        }
    }
    let number = |key: &str, default: u64| own.get(key).cloned().unwrap_or_else(|| default.into());
    header["positional_embedding_max_pos"] =
        json!([number("pos_embed_max_pos", 20), number("base_height", 2048), number("base_width", 2048)]);
    header["audio_positional_embedding_max_pos"] = json!([number("audio_pos_embed_max_pos", 20)]);
    if own["rope_double_precision"] == false {
        header["frequencies_precision"] = json!("float32");
    }
    // The header has no keys for some values, which are the same in all published models.
    let read = official::component_config(path, &config, Component::Transformer, &tensors)?;
    let is_other = |(key, value): &(&String, &Value)| match own.get(*key) {
        Some(own) if own.is_number() && value.is_number() => own.as_f64() != value.as_f64(),
        Some(own) => own != *value,
        None => false,
    };
    if let Some((key, value)) = read.as_object().into_iter().flatten().find(is_other) {
        let reason = format!("is {}, but programs that read Lightricks' single files assume {value}", own[key]);
        return Err(refused(key, reason));
    }
    Ok((tensors, Some((CONFIG, config))))
}
