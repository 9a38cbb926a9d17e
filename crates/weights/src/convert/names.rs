//! Tensor names and configuration of a converted file: those of Lightricks' files, which other programs read too.

use std::path::Path;

use serde_json::{Value, json};

use crate::checkpoint::{Checkpoint, read_json};
use crate::component::Component;
use crate::error::WeightsError;
use crate::keys::{SingleFileKeys, TRANSFORMER, is_projection, lightricks};
use crate::{gguf_model, official, quantization};

/// Class of the only component whose diffusers names and configuration can be converted.
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

/// Returns the tensors under Lightricks' names, and the header's `config` if the file has none.
///
/// # Errors
/// Returns an error for a folder of diffusers other than the transformer's, a configuration that Lightricks' header
/// cannot state, and a GGUF file other than the transformer's.
pub(super) fn official(input: &Path, tensors: Checkpoint) -> Result<(Checkpoint, Option<Value>), WeightsError> {
    let config = input.join("config.json");
    if config.is_file() {
        return diffusers(&config, &tensors);
    }
    let derived = gguf_model::transformer_config(&tensors)?;
    let keys = SingleFileKeys::new(tensors.names());
    let tensors = tensors.renamed(|key| {
        let is_bare = !key.starts_with(TRANSFORMER) && !is_projection(key);
        Some(match keys.map(key) {
            Some((Component::Transformer | Component::Connectors, _)) if is_bare => format!("{TRANSFORMER}{key}"),
            _ => key.into(),
        })
    })?;
    Ok((tensors, derived))
}

fn diffusers(path: &Path, tensors: &Checkpoint) -> Result<(Checkpoint, Option<Value>), WeightsError> {
    let mut own = read_json(path)?;
    quantization::take(path, &mut own)?;
    let refused = |key: &str, reason: String| WeightsError::Config { path: path.into(), key: key.into(), reason };
    if own["_class_name"] != CLASS {
        let reason = format!(
            "is {}, but only the folder of {CLASS} can be converted, because other programs read single files with \
             Lightricks' names; convert Lightricks' file of this component",
            own["_class_name"]
        );
        return Err(refused("_class_name", reason));
    }
    let tensors = tensors.renamed(|key| Some(format!("{TRANSFORMER}{}", lightricks(Component::Transformer, key))))?;
    let mut config = gguf_model::derived_config(&tensors)?;
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
        let reason = format!("is {}, but a single file with Lightricks' names means {value}", own[key]);
        return Err(refused(key, reason));
    }
    Ok((tensors, Some(config)))
}
