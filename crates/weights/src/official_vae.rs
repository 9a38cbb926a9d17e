//! Conversion of the video VAE's block lists to the diffusers configuration.

use serde_json::{Map, Value, json};

use super::error::WeightsError;
use super::section::Section;

/// A resolution change between two stages.
struct Change {
    kind: &'static str,
    multiplier: u64,
    residual: bool,
}

/// A block list: stages of residual blocks, with resolution changes between them.
struct BlockList {
    layers: Vec<u64>,
    noise: Vec<bool>,
    changes: Vec<Change>,
}

/// Supported block parameters.
const READ: [&str; 4] = ["num_layers", "inject_noise", "multiplier", "residual"];

fn blocks(s: Section, key: &str, encoder: bool) -> Result<BlockList, WeightsError> {
    let list =
        s.get(key).and_then(Value::as_array).ok_or_else(|| s.error(key, "is missing or not a list of blocks"))?;
    let (mut layers, mut noise, mut changes) = (vec![], vec![], vec![]);
    for (i, block) in list.iter().enumerate() {
        let name = block.get(0).and_then(Value::as_str).unwrap_or_default();
        let wrong = |reason: String| s.error(key, format!("is invalid: entry {i} {reason}: {block}"));
        if block.as_array().is_some_and(|parts| parts.len() > 2) {
            return Err(wrong("has more than a name and parameters".into()));
        }
        // A bare number means `num_layers`.
        let params = block.get(1).unwrap_or(&Value::Null);
        if let Some(name) = params.as_object().into_iter().flat_map(|p| p.keys()).find(|k| !READ.contains(&k.as_str()))
        {
            return Err(wrong(format!("has an unknown parameter `{name}`")));
        }
        let flag = |k: &str| match params.get(k).map_or(Some(false), Value::as_bool) {
            Some(value) => Ok(value),
            None => Err(wrong(format!("has the parameter {k} {}, not true or false", params[k]))),
        };
        let multiplier = match params.get("multiplier") {
            None => {
                if encoder {
                    2
                } else {
                    1
                }
            }
            Some(given) => given
                .as_u64()
                .ok_or_else(|| wrong(format!("has the parameter multiplier {given}, not a whole number")))?,
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
                layers.push(count.ok_or_else(|| wrong("has no num_layers".into()))?);
                noise.push(flag("inject_noise")?);
            }
            (_, Some(kind), 1) if multiplier > 0 => {
                changes.push(Change { kind, multiplier, residual: flag("residual")? })
            }
            _ => {
                let want = if i % 2 == 0 { "res_x" } else { "a resolution change" };
                return Err(s.error(key, format!("is invalid: entry {i} is {block}, expected {want}")));
            }
        }
    }
    if layers.len() != changes.len() + 1 {
        return Err(s.error(key, "does not end with res_x"));
    }
    Ok(BlockList { layers, noise, changes })
}

/// Returns whether the video VAE has the diffusion decoder.
pub(super) fn is_diffusion(s: Section) -> bool {
    s.get("_class_name").is_some_and(|class| *class == DIFFUSION)
}

/// Class of a video VAE with the diffusion decoder.
pub(super) const DIFFUSION: &str = "CausalDiffusionVAE";

/// Derives `vae/config.json` from the header's `vae` section. With the diffusion decoder, the convolutional decoder's
/// lists are empty.
pub(super) fn video(s: Section) -> Result<Value, WeightsError> {
    if let Some(class) = s.get("_class_name").filter(|c| *c != "CausalVideoAutoencoder" && *c != DIFFUSION) {
        return Err(s.error("_class_name", format!("is {class}, which is not supported")));
    }
    let diffusion = is_diffusion(s);
    let mut config = encoder(s, if diffusion { s.sub("encoder") } else { s })?;
    config.extend(if diffusion { no_decoder() } else { decoder(s)? });
    Ok(Value::Object(config))
}

fn width(s: Section, key: &str, value: &Value) -> Result<u64, WeightsError> {
    value.as_u64().ok_or_else(|| s.error(key, format!("is {value}, not a whole number")))
}

fn kinds(list: &BlockList) -> Vec<&'static str> {
    list.changes.iter().map(|c| c.kind).collect()
}

/// Derives the encoder's configuration keys and those that encoder and decoder share. `e` is the section with the
/// encoder's keys: the VAE's section, or a subsection of it.
fn encoder(s: Section, e: Section) -> Result<Map<String, Value>, WeightsError> {
    for section in [s, e] {
        for (key, want) in [("dims", json!(3)), ("norm_layer", json!("pixel_norm")), ("scaling_factor", json!(1.0))] {
            section.require(key, want)?;
        }
    }
    let nested = is_diffusion(s);
    let list = blocks(e, if nested { "blocks" } else { "encoder_blocks" }, true)?;
    let own = e.get("out_channels").filter(|_| nested).cloned();
    let latent = own.unwrap_or_else(|| s.or("latent_channels", 128));
    // The encoder starts at the latent width; a stage has the width after the preceding resolution change.
    let mut channels = width(s, "latent_channels", &latent)?;
    let mut widths = vec![];
    for change in &list.changes {
        channels = channels.saturating_mul(change.multiplier);
        widths.push(channels);
    }
    let doublings = |kind| list.changes.iter().filter(|c| c.kind == kind || c.kind == "spatiotemporal").count();
    let patch = e.or("patch_size", 4);
    let growth = |kind| 2u64.saturating_pow(doublings(kind) as u32);
    let spatial = width(e, "patch_size", &patch)?.saturating_mul(growth("spatial"));
    let config = json!({
        "_class_name": "AutoencoderKLLTX2Video",
        "in_channels": e.or("in_channels", 3),
        "latent_channels": latent,
        "block_out_channels": widths,
        "down_block_types": vec!["LTX2VideoDownBlock3D"; list.changes.len()],
        "layers_per_block": list.layers,
        "downsample_type": kinds(&list),
        "spatio_temporal_scaling": vec![true; list.changes.len()],
        "patch_size": patch,
        "patch_size_t": 1,
        "resnet_norm_eps": 1e-6,
        "scaling_factor": 1.0,
        "encoder_causal": true,
        "encoder_spatial_padding_mode": padding(s, e, "encoder", "zeros"),
        "spatial_compression_ratio": spatial,
        "temporal_compression_ratio": growth("temporal"),
    });
    Ok(config.as_object().cloned().unwrap_or_default())
}

/// Returns the padding mode of the encoder or decoder: the mode of this half or of the complete VAE, whichever is set,
/// or else `default`.
fn padding(s: Section, part: Section, half: &str, default: &str) -> Value {
    let one = s.get(&format!("{half}_spatial_padding_mode"));
    let of_part = part.get("spatial_padding_mode");
    let first = if is_diffusion(s) { of_part.or(one) } else { one.or(of_part) };
    first.cloned().unwrap_or_else(|| default.into())
}

fn decoder(s: Section) -> Result<Map<String, Value>, WeightsError> {
    let list = blocks(s, "decoder_blocks", false)?;
    // The list is ordered from the frames to the latents, as are diffusers' lists except `upsample_type`.
    let mut channels = width(s, "decoder_base_channels", &s.or("decoder_base_channels", 128))?;
    let mut widths = vec![];
    for change in &list.changes {
        channels = channels.saturating_mul(change.multiplier);
        widths.push(channels);
    }
    let mut upsampling = kinds(&list);
    upsampling.reverse();
    let config = json!({
        "out_channels": s.or("out_channels", 3),
        "decoder_block_out_channels": widths,
        "decoder_layers_per_block": list.layers,
        "decoder_spatio_temporal_scaling": vec![true; list.changes.len()],
        "decoder_inject_noise": list.noise,
        "upsample_type": upsampling,
        "upsample_factor": list.changes.iter().map(|c| c.multiplier).collect::<Vec<_>>(),
        "upsample_residual": list.changes.iter().map(|c| c.residual).collect::<Vec<_>>(),
        "timestep_conditioning": s.or("timestep_conditioning", false),
        "decoder_causal": s.or("causal_decoder", false),
        "decoder_spatial_padding_mode": padding(s, s, "decoder", "reflect"),
    });
    Ok(config.as_object().cloned().unwrap_or_default())
}

fn no_decoder() -> Map<String, Value> {
    ["decoder_block_out_channels", "decoder_layers_per_block"].map(|key| (key.into(), json!([]))).into_iter().collect()
}
