//! LTX-2.5's diffusion decoder in Lightricks' files: conversion of its configuration and tensors to the diffusers
//! layout.

use serde_json::{Value, json};

use super::checkpoint::Checkpoint;
use super::error::WeightsError;
use super::section::Section;

/// Upsampling after a stage: the factors of frames, rows and columns, and the divisor of the channel count.
type UpsampleFactors = ([u64; 3], u64);

/// Derives `diffusion_decoder/config.json` from the header's `vae` section, with the training code's defaults.
pub(super) fn config(s: Section) -> Result<Value, WeightsError> {
    let d = if s.get("decoder").is_some() { s.sub("decoder") } else { s };
    let list = |key: &str, default: Value| {
        let given = d.or(key, default);
        given.as_array().cloned().ok_or_else(|| d.error(key, format!("is {given}, not a list")))
    };
    let channels = list("stage_channels", json!([1024, 512, 256, 256, 128]))?;
    let stages = channels.len().saturating_sub(1);
    // The kernel of the last stage is under a separate key, `stage5_kernel`.
    let mut kernels = list("stage_kernels", json!([[3, 7, 7], [3, 7, 7], [3, 5, 5], [3, 5, 5], [3, 3, 3]]))?;
    kernels.truncate(stages);
    let default = json!([[[1, 2, 2], 2], [[2, 1, 1], 2], [[2, 2, 2], 1], [[2, 2, 2], 2]]);
    let upsamples: Vec<UpsampleFactors> = serde_json::from_value(Value::Array(list("upsamples", default)?))
        .map_err(|e| d.error("upsamples", format!("is not a list of strides and reductions: {e}")))?;
    if let Some(width) = d.get("stage5_channels").filter(|width| Some(*width) != channels.last()) {
        return Err(d.error("stage5_channels", format!("is {width}, but must equal the last entry of stage_channels")));
    }
    let patch = d.or("patch_size", 4);
    let side = patch.as_u64().ok_or_else(|| d.error("patch_size", format!("is {patch}, not a whole number")))?;
    let ratio = |axis: usize| upsamples.iter().fold(1, |all: u64, (stride, _)| all.saturating_mul(stride[axis]));
    Ok(json!({
        "_class_name": "LTX2VideoDiffusionDecoderModel",
        "out_channels": d.or("out_channels", 3),
        "latent_channels": d.get("in_channels").cloned().unwrap_or_else(|| s.or("latent_channels", 128)),
        "patch_size": patch,
        "scaling_factor": 1.0,
        "decoder_head_dim": d.get("head_dim").cloned().unwrap_or_else(|| d.or("na_head_dim", 64)),
        "decoder_stage_channels": channels,
        "decoder_stage_depths": d.or("stage_depths", json!([4, 6, 4, 2, 8])),
        "decoder_stage_kernels": kernels,
        "decoder_upsample_strides": upsamples.iter().map(|(stride, _)| stride).collect::<Vec<_>>(),
        "decoder_upsample_channel_reductions": upsamples.iter().map(|(_, shrink)| shrink).collect::<Vec<_>>(),
        "decoder_stage5_kernel": d.or("stage5_kernel", json!([3, 7, 7])),
        "decoder_t_emb_dim": d.or("t_emb_dim", 384),
        "decoder_timestep_scale_multiplier": d.or("timestep_scale_multiplier", 1.0),
        "decoder_model_output_type": s.or("model_output_type", "v"),
        "decoder_num_inference_steps": d.or("default_num_inference_steps", 2),
        "spatial_compression_ratio": side.saturating_mul(ratio(1)),
        "temporal_compression_ratio": ratio(0),
    }))
}

/// Static gates of a block, and the layers whose outputs they scale.
const GATES: [(&str, &str); 3] =
    [("gate_msa", "attn.to_out.0"), ("gate_mlp", "mlp.w_down"), ("gate_ctx", "context_proj")];

/// Converts the decoder's tensors: splits fused query-key-value tensors and folds static gates into the preceding
/// layers.
pub(super) fn tensors(mut all: Checkpoint) -> Result<Checkpoint, WeightsError> {
    for name in all.names().map(String::from).collect::<Vec<_>>() {
        let Some((block, leaf)) = name.rsplit_once('.') else { continue };
        // Scales are split with their weight.
        if let Some(attention) = block.strip_suffix(".qkv").filter(|_| !leaf.ends_with("_scale")) {
            all.split_rows(&name, &["to_q", "to_k", "to_v"].map(|part| format!("{attention}.{part}.{leaf}")))?;
        }
        let Some((_, layer)) = GATES.iter().find(|(gate, _)| *gate == leaf) else { continue };
        let layers = ["weight", "bias"].map(|leaf| format!("{block}.{layer}.{leaf}"));
        let known: Vec<String> = layers.into_iter().filter(|layer| all.contains(layer)).collect();
        known.iter().try_for_each(|layer| all.scale_rows(layer, &name))?;
        // A gate without its layer stays and is reported as an unknown tensor.
        if !known.is_empty() {
            all.remove(&name);
        }
    }
    Ok(all)
}
