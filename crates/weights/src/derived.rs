//! Derives configurations for files whose header has none: sizes come from the tensors, other values from the published
//! models.

use serde_json::{Value, json};

use super::checkpoint::Checkpoint;
use super::error::WeightsError;
use super::keys::{TRANSFORMER, is_projection_name};
use super::official::PROJECTION_FIRST;
use super::text_encoders::LANGUAGE_MODEL;
use super::version::KEYFRAMES;

/// Number of attention heads of LTX-2.0's connectors. Later connectors have attention gates, whose shape states the
/// number of heads.
const CONNECTOR_HEADS: usize = 30;

/// Returns the length of a list: the largest `N` in tensor names that start with `list` followed by `N`, plus 1.
fn count(tensors: &Checkpoint, list: &str) -> u64 {
    let number = |name: &str| name.strip_prefix(list)?.split('.').next()?.parse::<u64>().ok();
    tensors.names().filter_map(number).max().map_or(0, |last| last.saturating_add(1))
}

/// Returns one of a tensor's dimensions.
fn size(tensors: &Checkpoint, name: &str, axis: usize) -> Result<usize, WeightsError> {
    let missing = || WeightsError::MissingTensor { path: tensors.path().to_path_buf(), key: name.to_string() };
    tensors.shape(name).and_then(|shape| shape.get(axis)).copied().filter(|size| *size > 0).ok_or_else(missing)
}

/// Derives the `config` of a transformer with Lightricks' names from its tensors.
///
/// # Errors
/// Returns an error if tensors are missing.
pub(super) fn transformer_config(file: &Checkpoint) -> Result<Value, WeightsError> {
    let prefix = if file.contains("patchify_proj.weight") { "" } else { TRANSFORMER };
    let key = |name: &str| format!("{prefix}{name}");
    let size = |name: &str, axis: usize| size(file, &key(name), axis);
    let has = |name: &str| file.contains(&key(name));
    // Models before LTX-2.3 have no gates; their number of heads is that of the published model.
    let heads = |attention: &str, rows: usize, published: usize| {
        let gates = file.shape(&key(&format!("{attention}.to_gate_logits.weight"))).and_then(|shape| shape.first());
        let count = gates.copied().unwrap_or(published).max(1);
        [count, rows / count]
    };
    let (width, audio_width) = (size("patchify_proj.weight", 0)?, size("audio_patchify_proj.weight", 0)?);
    let [video, audio] =
        [heads("transformer_blocks.0.attn1", width, 32), heads("transformer_blocks.0.audio_attn1", audio_width, 32)];
    let first = !has("caption_projection.linear_1.weight");
    let mut config = json!({
        "in_channels": size("patchify_proj.weight", 1)?,
        "out_channels": size("proj_out.weight", 0)?,
        "num_attention_heads": video[0],
        "attention_head_dim": video[1],
        "cross_attention_dim": size("transformer_blocks.0.attn2.to_k.weight", 1)?,
        "audio_in_channels": size("audio_patchify_proj.weight", 1)?,
        "audio_out_channels": size("audio_proj_out.weight", 0)?,
        "audio_num_attention_heads": audio[0],
        "audio_attention_head_dim": audio[1],
        "audio_cross_attention_dim": size("transformer_blocks.0.audio_attn2.to_k.weight", 1)?,
        "num_layers": count(file, &key("transformer_blocks.")),
        "frequencies_precision": "float64",
        "apply_gated_attention": has("transformer_blocks.0.attn1.to_gate_logits.weight"),
        "cross_attention_adaln": has("prompt_adaln_single.linear.weight"),
        "ff_bias": has("transformer_blocks.0.ff.net.0.proj.bias"),
        "audio_ff_bias": has("transformer_blocks.0.audio_ff.net.0.proj.bias"),
        "use_keyframes_abs_pos_embedding": has(KEYFRAMES),
    });
    if first {
        for (key, value) in PROJECTION_FIRST {
            config[key] = value.into();
        }
    } else {
        config["caption_channels"] = size("caption_projection.linear_1.weight", 1)?.into();
    }
    Ok(json!({"transformer": config}))
}

/// Adds the connectors' keys that a transformer's section lacks, derived from the tensors of `connectors`, which have
/// diffusers names.
pub(super) fn add_connector_keys(section: &mut Value, connectors: &Checkpoint) -> Result<(), WeightsError> {
    let mut add = |key: &str, value: Value| {
        if section[key].is_null() {
            section[key] = value;
        }
    };
    for (prefix, stream) in [("", "video"), ("audio_", "audio")] {
        let blocks = format!("{stream}_connector.transformer_blocks.");
        let attention = format!("{blocks}0.attn1");
        let gates = connectors.shape(&format!("{attention}.to_gate_logits.weight")).and_then(|shape| shape.first());
        let heads = gates.copied().unwrap_or(CONNECTOR_HEADS).max(1);
        let width = size(connectors, &format!("{attention}.to_q.weight"), 0)?;
        add(&format!("{prefix}connector_num_layers"), count(connectors, &blocks).into());
        add(&format!("{prefix}connector_num_attention_heads"), heads.into());
        add(&format!("{prefix}connector_attention_head_dim"), (width / heads).into());
        add("connector_apply_gated_attention", gates.is_some().into());
    }
    add("frequencies_precision", "float64".into());
    if connectors.names().any(|name| is_projection_name(name) && name.starts_with("video_")) {
        PROJECTION_FIRST.into_iter().for_each(|(key, value)| add(key, value.into()));
    }
    Ok(())
}

/// Derives the `config.json` of a Gemma 3 from its tensors, whose names begin with [`LANGUAGE_MODEL`]. Values that do
/// not follow from tensor shapes are those of Gemma 3 12B, the text encoder of LTX-2.0 and LTX-2.3.
///
/// # Errors
/// Returns an error if a tensor is missing.
pub(super) fn gemma_3_config(weights: &Checkpoint) -> Result<Value, WeightsError> {
    let layer = |name: &str| format!("{LANGUAGE_MODEL}layers.0.{name}.weight");
    let (embeddings, head) =
        (format!("{LANGUAGE_MODEL}embed_tokens.weight"), size(weights, &layer("self_attn.q_norm"), 0)?);
    let heads = |name: &str| size(weights, &layer(name), 0).map(|rows| rows / head);
    let text = json!({
        "model_type": "gemma3_text",
        "vocab_size": size(weights, &embeddings, 0)?,
        "hidden_size": size(weights, &embeddings, 1)?,
        "intermediate_size": size(weights, &layer("mlp.gate_proj"), 0)?,
        "num_hidden_layers": count(weights, &format!("{LANGUAGE_MODEL}layers.")),
        "num_attention_heads": heads("self_attn.q_proj")?,
        "num_key_value_heads": heads("self_attn.k_proj")?,
        "head_dim": head,
        "query_pre_attn_scalar": head,
        "rms_norm_eps": 1e-6,
        "sliding_window": 1024,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    });
    Ok(json!({"model_type": "gemma3", "text_config": text}))
}
