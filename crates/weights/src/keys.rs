//! Mapping of tensor names from Lightricks' single files to the names that this program
//! uses, which are those of the diffusers layout.
//!
//! Rules match complete dotted segments, which distinguishes `adaln_single` from `prompt_adaln_single`.

use super::{Checkpoint, Component, WeightsError};

/// Prefix of the transformer and the connectors in a single file.
pub(super) const TRANSFORMER: &str = "model.diffusion_model.";
/// Prefix of the text projections in a single file.
const PROJECTION: &str = "text_embedding_projection.";

/// Key prefixes that occur only in files whose transformer or connectors have no prefix.
const UNPREFIXED: [&str; 3] = ["patchify_proj.", "video_embeddings_connector.", "audio_embeddings_connector."];

/// Renamed name segments of the transformer: single-file name, diffusers name.
const TRANSFORMER_SEGMENTS: &[(&str, &str)] = &[
    ("patchify_proj", "proj_in"),
    ("audio_patchify_proj", "audio_proj_in"),
    ("adaln_single", "time_embed"),
    ("audio_adaln_single", "audio_time_embed"),
    ("prompt_adaln_single", "prompt_adaln"),
    ("audio_prompt_adaln_single", "audio_prompt_adaln"),
    ("av_ca_video_scale_shift_adaln_single", "av_cross_attn_video_scale_shift"),
    ("av_ca_audio_scale_shift_adaln_single", "av_cross_attn_audio_scale_shift"),
    ("av_ca_a2v_gate_adaln_single", "av_cross_attn_video_a2v_gate"),
    ("av_ca_v2a_gate_adaln_single", "av_cross_attn_audio_v2a_gate"),
    ("scale_shift_table_a2v_ca_video", "video_a2v_cross_attn_scale_shift_table"),
    ("scale_shift_table_a2v_ca_audio", "audio_a2v_cross_attn_scale_shift_table"),
    ("q_norm", "norm_q"),
    ("k_norm", "norm_k"),
];

/// Renamed segments of the connectors and text projections.
const CONNECTOR_SEGMENTS: &[(&str, &str)] = &[
    ("video_embeddings_connector", "video_connector"),
    ("audio_embeddings_connector", "audio_connector"),
    ("transformer_1d_blocks", "transformer_blocks"),
    ("q_norm", "norm_q"),
    ("k_norm", "norm_k"),
    ("aggregate_embed", "text_proj_in"),
    ("video_aggregate_embed", "video_text_proj_in"),
    ("audio_aggregate_embed", "audio_text_proj_in"),
];

/// Renamed segments of the duration head.
const DURATION_SEGMENTS: &[(&str, &str)] = &[("out_proj", "to_out")];

/// Renamed segments of both VAEs.
const VAE_SEGMENTS: &[(&str, &str)] = &[
    ("res_blocks", "resnets"),
    ("last_time_embedder", "time_embedder"),
    ("last_scale_shift_table", "scale_shift_table"),
];

/// Renamed segments of the diffusion decoder.
const DIFFUSION_SEGMENTS: &[(&str, &str)] = &[("q_norm", "norm_q"), ("k_norm", "norm_k")];

/// Renamed sequences of segments of the diffusion decoder.
const DIFFUSION_SPANS: &[(&str, &str)] = &[
    (".attn.proj.", ".attn.to_out.0."),
    (".t_embedder.mlp.0.", ".t_embedder.timestep_embedder.linear_1."),
    (".t_embedder.mlp.2.", ".t_embedder.timestep_embedder.linear_2."),
];

/// Renamed segments of the vocoder.
const VOCODER_SEGMENTS: &[(&str, &str)] = &[
    ("ups", "upsamplers"),
    ("resblocks", "resnets"),
    ("conv_pre", "conv_in"),
    ("conv_post", "conv_out"),
    ("act_post", "act_out"),
];

/// Mapping of the tensor names of a single file to diffusers names.
#[derive(Clone, Copy, Debug)]
pub struct SingleFileKeys {
    /// Prefix of the transformer and the connectors; empty if the file contains nothing else.
    transformer: &'static str,
    /// Whether the video decoder in the file is the diffusion decoder.
    diffusion: bool,
    /// Index of the video encoder's last block, which diffusers calls the middle block.
    encoder_middle: usize,
}

impl SingleFileKeys {
    /// Examines all keys of a file. The mapping depends on the prefix, the kind of video decoder, and the number of
    /// video encoder blocks.
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a str>) -> Self {
        let mut names = SingleFileKeys { transformer: TRANSFORMER, diffusion: false, encoder_middle: 0 };
        for key in keys {
            let vae = video_vae(key);
            let block = vae.and_then(|key| key.strip_prefix("encoder.down_blocks.")?.split('.').next()?.parse().ok());
            names.encoder_middle = names.encoder_middle.max(block.unwrap_or(0));
            names.diffusion |= vae.is_some_and(|key| key.starts_with("decoder.conv_in_x_t."));
            if UNPREFIXED.iter().any(|start| key.starts_with(start)) {
                names.transformer = "";
            }
        }
        names
    }

    /// Returns the component of a key and its diffusers name. `None`: no component reads the key.
    pub fn map(&self, key: &str) -> Option<(Component, String)> {
        if let Some(rest) = key.strip_prefix(PROJECTION) {
            // ComfyUI saves LTX-2.0's only projection under a shorter name.
            let long = format!("aggregate_embed.{rest}");
            let rest = if matches!(rest, "weight" | "bias") { &long } else { rest };
            return Some((Component::Connectors, segments(rest, CONNECTOR_SEGMENTS)));
        }
        if let Some(rest) = video_vae(key) {
            return match self.diffusion && rest.starts_with("decoder.") {
                true => Some((Component::DiffusionDecoder, diffusion(rest))),
                false => Some((Component::Vae, self.vae(rest)?)),
            };
        }
        if let Some(rest) = key.strip_prefix("duration_head.") {
            return Some((Component::DurationHead, segments(rest, DURATION_SEGMENTS).replace("cross_attn.", "")));
        }
        if let Some(rest) = key.strip_prefix("audio_vae.") {
            let name = if rest.starts_with("per_channel_statistics.") { statistics(rest)? } else { rest.to_string() };
            return Some((Component::AudioVae, name));
        }
        // Only the first `vocoder.` is a prefix: LTX-2.3 has `vocoder.vocoder.` and `vocoder.bwe_generator.`.
        if let Some(rest) = key.strip_prefix("vocoder.") {
            let name = segments(rest, VOCODER_SEGMENTS).replace(".downsample.lowpass.", ".downsample.");
            return Some((Component::Vocoder, name));
        }
        if let Some(rest) = key.strip_prefix(self.transformer) {
            let first = rest.split_once('.').map_or(rest, |(first, _)| first);
            return Some(if matches!(first, "video_embeddings_connector" | "audio_embeddings_connector") {
                (Component::Connectors, segments(rest, CONNECTOR_SEGMENTS))
            } else {
                (Component::Transformer, segments(rest, TRANSFORMER_SEGMENTS))
            });
        }
        None
    }

    /// Returns the name of `key` in `component`. `None`: the key belongs to another component.
    pub fn rename(&self, component: Component, key: &str) -> Option<String> {
        let (owner, name) = self.map(key)?;
        // The encoder and the diffusion decoder share the latent statistics.
        let shared = self.diffusion && owner == Component::Vae && name.starts_with("latents_");
        (owner == component || shared && component == Component::DiffusionDecoder).then_some(name)
    }

    fn vae(&self, key: &str) -> Option<String> {
        if key.starts_with("per_channel_statistics.") {
            return statistics(key);
        }
        let mut parts = key.splitn(4, '.');
        let (half, list, number) = (parts.next()?, parts.next().unwrap_or(""), parts.next().unwrap_or(""));
        let block = number.parse::<usize>().ok().zip(parts.next());
        // The file lists stages and resolution changes alternately; diffusers nests the changes in the stages.
        let name = match (half, list, block) {
            ("encoder", "down_blocks", Some((n, rest))) if n % 2 == 1 => {
                format!("encoder.down_blocks.{}.downsamplers.0.{rest}", n / 2)
            }
            ("encoder", "down_blocks", Some((n, rest))) if n == self.encoder_middle => {
                format!("encoder.mid_block.{rest}")
            }
            ("encoder", "down_blocks", Some((n, rest))) => format!("encoder.down_blocks.{}.{rest}", n / 2),
            ("decoder", "up_blocks", Some((0, rest))) => format!("decoder.mid_block.{rest}"),
            ("decoder", "up_blocks", Some((n, rest))) if n % 2 == 1 => {
                format!("decoder.up_blocks.{}.upsamplers.0.{rest}", n / 2)
            }
            ("decoder", "up_blocks", Some((n, rest))) => format!("decoder.up_blocks.{}.{rest}", n / 2 - 1),
            _ => key.to_string(),
        };
        Some(segments(&name, VAE_SEGMENTS))
    }
}

/// Returns a key of the video VAE without its prefix, which files with only the VAE may lack. `None`: the key does not
/// belong to the video VAE.
fn video_vae(key: &str) -> Option<&str> {
    let bare = ["encoder.", "decoder.", "per_channel_statistics."];
    key.strip_prefix("vae.").or_else(|| bare.iter().any(|start| key.starts_with(start)).then_some(key))
}

fn diffusion(key: &str) -> String {
    let spans = |key: String, (from, to): &(&str, &str)| key.replace(from, to);
    DIFFUSION_SPANS.iter().fold(segments(key, DIFFUSION_SEGMENTS), spans)
}

/// Splits the duration head's fused query, key and value tensor, as stored in Lightricks' files.
///
/// # Errors
/// Returns an error if the number of rows is not divisible by three.
pub(super) fn split_attention(mut head: Checkpoint) -> Result<Checkpoint, WeightsError> {
    for kind in ["weight", "bias"] {
        let whole = format!("attention_pooler.in_proj_{kind}");
        if head.contains(&whole) {
            head.split_rows(&whole, &["q", "k", "v"].map(|part| format!("attention_pooler.to_{part}.{kind}")))?;
        }
    }
    Ok(head)
}

/// Returns whether the connectors' tensor with this diffusers name belongs to a text projection.
pub(super) fn is_projection_name(name: &str) -> bool {
    name.contains("text_proj_in.")
}

/// Returns whether a key of a file belongs to the connectors' text projections.
pub(super) fn is_projection(key: &str) -> bool {
    key.starts_with(PROJECTION)
}

/// Returns the diffusers name of a latent statistic. `None`: a statistic that this program does not use.
fn statistics(key: &str) -> Option<String> {
    match key.strip_prefix("per_channel_statistics.")? {
        "mean-of-means" => Some("latents_mean".into()),
        "std-of-means" => Some("latents_std".into()),
        _ => None,
    }
}

/// Returns Lightricks' name of a module of the transformer or the connectors, without a prefix: the inverse of
/// [`SingleFileKeys::map`].
pub(super) fn lightricks(component: Component, module: &str) -> String {
    let rules = if component == Component::Connectors { CONNECTOR_SEGMENTS } else { TRANSFORMER_SEGMENTS };
    let inverse: Vec<(&str, &str)> = rules.iter().map(|(from, to)| (*to, *from)).collect();
    segments(module, &inverse)
}

fn segments(key: &str, rules: &[(&str, &str)]) -> String {
    let renamed = key.split('.').map(|s| rules.iter().find(|(from, _)| *from == s).map_or(s, |(_, to)| to));
    renamed.collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unread_statistics_and_foreign_keys_are_dropped() {
        let keys = SingleFileKeys::new([]);
        for key in ["vae.per_channel_statistics.channel", "audio_vae.per_channel_statistics.mean-of-stds", "other.x"] {
            assert_eq!(keys.map(key), None, "{key}");
        }
        assert_eq!(keys.rename(Component::Vae, "vocoder.conv_pre.bias"), None);
    }

    #[test]
    fn last_encoder_block_becomes_the_middle_block() {
        let keys = ["vae.encoder.down_blocks.0.res_blocks.0.conv1.conv.weight", "vae.encoder.down_blocks.2.x"];
        let map = SingleFileKeys::new(keys);
        assert_eq!(map.rename(Component::Vae, keys[1]).as_deref(), Some("encoder.mid_block.x"));
    }
}
