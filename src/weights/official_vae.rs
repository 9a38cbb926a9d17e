//! The video VAE's block lists, as the configuration of the diffusers layout.

use serde_json::{Value, json};

use super::error::WeightsError;
use super::section::Section;

/// A change of resolution between two stages.
struct Change {
    kind: &'static str,
    multiplier: u64,
    residual: bool,
}

/// A list of blocks: stages of residual blocks with changes of resolution between them.
struct BlockList {
    layers: Vec<u64>,
    noise: Vec<bool>,
    changes: Vec<Change>,
}

/// Parameters of a block that are read.
const READ: [&str; 4] = ["num_layers", "inject_noise", "multiplier", "residual"];

fn blocks(s: Section, key: &str, encoder: bool) -> Result<BlockList, WeightsError> {
    let list = s.get(key).and_then(Value::as_array).ok_or_else(|| s.error(key, "is missing: no list of blocks"))?;
    let (mut layers, mut noise, mut changes) = (vec![], vec![], vec![]);
    for (i, block) in list.iter().enumerate() {
        let name = block.get(0).and_then(Value::as_str).unwrap_or_default();
        let wrong = |reason: String| s.error(key, format!("entry {i} {reason}: {block}"));
        if block.as_array().is_some_and(|parts| parts.len() > 2) {
            return Err(wrong("has more than a name and parameters".into()));
        }
        // A bare number stands for `num_layers`.
        let params = block.get(1).unwrap_or(&Value::Null);
        if let Some(name) = params.as_object().into_iter().flat_map(|p| p.keys()).find(|k| !READ.contains(&k.as_str()))
        {
            return Err(wrong(format!("has a parameter that this program does not know, `{name}`")));
        }
        let flag = |k: &str| match params.get(k).map_or(Some(false), Value::as_bool) {
            Some(value) => Ok(value),
            None => Err(wrong(format!("has {k} {}, not true or false", params[k]))),
        };
        let multiplier = match params.get("multiplier") {
            None => {
                if encoder {
                    2
                } else {
                    1
                }
            }
            Some(given) => {
                given.as_u64().ok_or_else(|| wrong(format!("has multiplier {given}, not a whole number")))?
            }
        };
        let kind = match name.strip_suffix("_res").filter(|_| encoder).unwrap_or(if encoder { "" } else { name }) {
            "compress_space" => Some("spatial"),
            "compress_time" => Some("temporal"),
            "compress_all" => Some("spatiotemporal"),
            _ => None,
        };
        match (name, kind, i % 2) {
            ("res_x", _, 0) => {
                let count = params.get("num_layers").unwrap_or(params).as_u64();
                layers.push(count.ok_or_else(|| s.error(key, format!("entry {i} has no num_layers: {block}")))?);
                noise.push(flag("inject_noise")?);
            }
            (_, Some(kind), 1) if multiplier > 0 => {
                changes.push(Change { kind, multiplier, residual: flag("residual")? })
            }
            _ => {
                let want = if i % 2 == 0 { "res_x" } else { "a change of resolution" };
                return Err(s.error(key, format!("entry {i} is {block}, where {want} is supported")));
            }
        }
    }
    if layers.len() != changes.len() + 1 {
        return Err(s.error(key, "does not end with res_x"));
    }
    Ok(BlockList { layers, noise, changes })
}

/// Whether the decoder is the one by diffusion.
pub(super) fn is_diffusion(s: Section) -> bool {
    s.get("_class_name").is_some_and(|class| *class == DIFFUSION)
}

/// The class of a video VAE whose decoder is the one by diffusion.
pub(super) const DIFFUSION: &str = "CausalDiffusionVAE";

/// `vae/config.json` from the header's `vae` section.
pub(super) fn video(s: Section) -> Result<Value, WeightsError> {
    if is_diffusion(s) {
        let cure = "the diffusion decoder, which no program runs yet: give the convolutional \
                    vae/ltx-2.5-video-vae-conv-bf16.safetensors as `model.vae`";
        return Err(s.error("_class_name", format!("is {DIFFUSION}, {cure}")));
    }
    if let Some(class) = s.get("_class_name").filter(|c| *c != "CausalVideoAutoencoder") {
        return Err(s.error("_class_name", format!("is {class}, only the convolutional VAE is supported")));
    }
    for (key, want) in [("dims", json!(3)), ("norm_layer", json!("pixel_norm")), ("scaling_factor", json!(1.0))] {
        s.require(key, want)?;
    }
    let encoder = blocks(s, "encoder_blocks", true)?;
    let decoder = blocks(s, "decoder_blocks", false)?;
    let latent = s.or("latent_channels", 128);
    let width = |v: &Value, key: &str| v.as_u64().ok_or_else(|| s.error(key, format!("is {v}, not a width")));
    // The encoder starts at the latent width; a stage's width is that after the change before it.
    let mut channels = width(&latent, "latent_channels")?;
    let mut encoder_channels = vec![];
    for change in &encoder.changes {
        channels *= change.multiplier;
        encoder_channels.push(channels);
    }
    // The decoder's list runs from the frame to the latent: so do diffusers' lists, except `upsample_type`.
    let mut channels = width(&s.or("decoder_base_channels", 128), "decoder_base_channels")?;
    let mut decoder_channels = vec![];
    for change in &decoder.changes {
        channels *= change.multiplier;
        decoder_channels.push(channels);
    }
    let kinds = |b: &BlockList| b.changes.iter().map(|c| c.kind).collect::<Vec<_>>();
    let doublings = |kind| encoder.changes.iter().filter(|c| c.kind == kind || c.kind == "spatiotemporal").count();
    let patch = s.or("patch_size", 4);
    let spatial = width(&patch, "patch_size")? << doublings("spatial");
    let padding = |half: &str, default: &str| {
        let one = format!("{half}_spatial_padding_mode");
        s.get(&one).or(s.get("spatial_padding_mode")).cloned().unwrap_or_else(|| default.into())
    };
    let mut upsampling = kinds(&decoder);
    upsampling.reverse();
    Ok(json!({
        "_class_name": "AutoencoderKLLTX2Video",
        "in_channels": s.or("in_channels", 3),
        "out_channels": s.or("out_channels", 3),
        "latent_channels": latent,
        "block_out_channels": encoder_channels,
        "down_block_types": vec!["LTX2VideoDownBlock3D"; encoder.changes.len()],
        "layers_per_block": encoder.layers,
        "downsample_type": kinds(&encoder),
        "spatio_temporal_scaling": vec![true; encoder.changes.len()],
        "decoder_block_out_channels": decoder_channels,
        "decoder_layers_per_block": decoder.layers,
        "decoder_spatio_temporal_scaling": vec![true; decoder.changes.len()],
        "decoder_inject_noise": decoder.noise,
        "upsample_type": upsampling,
        "upsample_factor": decoder.changes.iter().map(|c| c.multiplier).collect::<Vec<_>>(),
        "upsample_residual": decoder.changes.iter().map(|c| c.residual).collect::<Vec<_>>(),
        "timestep_conditioning": s.or("timestep_conditioning", false),
        "patch_size": patch,
        "patch_size_t": 1,
        "resnet_norm_eps": 1e-6,
        "scaling_factor": 1.0,
        "encoder_causal": true,
        "decoder_causal": s.or("causal_decoder", false),
        "encoder_spatial_padding_mode": padding("encoder", "zeros"),
        "decoder_spatial_padding_mode": padding("decoder", "reflect"),
        "spatial_compression_ratio": spatial,
        "temporal_compression_ratio": 1u64 << doublings("temporal"),
    }))
}
