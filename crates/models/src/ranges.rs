//! Allowed ranges of the numbers in a model's `config.json` files, checked before anything is derived from a number.
//! Within these ranges no size overflows, no table on the host becomes far larger than for a published model, and no
//! program takes seconds to build.

use serde_json::Value;

use super::{ComponentConfigError, families};
use ltx2_nn::Heads;

/// Allowed values of a key, both bounds included.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Range {
    Whole(u64, u64),
    Real(f64, f64),
}

impl Range {
    fn contains(self, value: f64) -> bool {
        match self {
            Range::Whole(least, most) => (least as f64..=most as f64).contains(&value),
            Range::Real(least, most) => (least..=most).contains(&value),
        }
    }

    fn text(self) -> String {
        let real = |x: f64| if x == 0.0 || (1e-3..1e6).contains(&x) { x.to_string() } else { format!("{x:e}") };
        match self {
            Range::Whole(least, most) => format!("{least} to {most}"),
            Range::Real(least, most) => format!("{} to {}", real(least), real(most)),
        }
    }
}

/// Allowed numbers of features, of channels, or of rows of a weight table.
pub(crate) const WIDTH: Range = Range::Whole(1, 1 << 16);
pub(crate) const HEADS: Range = Range::Whole(1, 1 << 10);
pub(crate) const HEAD_DIM: Range = Range::Whole(1, 1 << 12);
pub(crate) const LAYERS: Range = Range::Whole(1, 1 << 8);
/// Allowed numbers of blocks of a stage; 0 is allowed.
const BLOCKS: Range = Range::Whole(0, 1 << 6);
/// Allowed patch sizes, factors and window sizes along one axis.
const SMALL: Range = Range::Whole(1, 1 << 6);
const KERNEL: Range = Range::Whole(1, 1 << 10);
/// Allowed numbers of pixels, frames or samples per latent.
const RATIO: Range = Range::Whole(1, MAX_RATIO as u64);
/// Allowed sampling rates in Hz.
const RATE: Range = Range::Whole(1, 192_000);
const HOP: Range = Range::Whole(1, 1 << 16);
const POSITIONS: Range = Range::Whole(1, 1 << 20);
pub(crate) const EPS: Range = Range::Real(0.0, 1.0);
pub(crate) const THETA: Range = Range::Real(1e-3, 1e15);
pub(crate) const FACTOR: Range = Range::Real(1e-6, 1e6);

/// Maximum length of a list of numbers.
const MAX_ENTRIES: usize = 64;

/// Maximum total width of the heads of an attention layer.
const MAX_WIDTH: usize = 1 << 15;

/// Maximum number of pixels, frames or mel frames per latent along one axis.
pub(crate) const MAX_RATIO: usize = 1 << 12;

/// Maximum number of audio samples that a vocoder generates per spectrogram frame.
pub(crate) const MAX_SAMPLES: usize = 1 << 16;

/// Maximum number of convolutions in a vocoder's generator.
pub(crate) const MAX_CONVOLUTIONS: usize = 1 << 9;

/// Space-separated keys that share a range, and the range.
pub(crate) type Row = (&'static str, Range);

/// Ranges of the numeric keys of each component, except for the text encoder's, which its [families] list. A range also
/// applies to the elements of a list, and to keys of the same name in nested objects.
const TABLE: [(&str, &[Row]); 8] = [
    (
        "transformer",
        &[
            ("in_channels out_channels audio_in_channels audio_out_channels", WIDTH),
            ("cross_attention_dim audio_cross_attention_dim caption_channels", WIDTH),
            ("patch_size patch_size_t audio_patch_size audio_patch_size_t", SMALL),
            ("num_attention_heads audio_num_attention_heads", HEADS),
            ("attention_head_dim audio_attention_head_dim", HEAD_DIM),
            ("num_layers", LAYERS),
            ("vae_scale_factors audio_scale_factor", RATIO),
            ("pos_embed_max_pos audio_pos_embed_max_pos base_height base_width", POSITIONS),
            ("audio_sampling_rate", RATE),
            ("audio_hop_length", HOP),
            ("causal_offset", Range::Whole(0, 1 << 10)),
            ("norm_eps", EPS),
            ("rope_theta", THETA),
            ("timestep_scale_multiplier cross_attn_timestep_scale_multiplier", FACTOR),
        ],
    ),
    (
        "connectors",
        &[
            ("caption_channels video_hidden_dim audio_hidden_dim", WIDTH),
            ("text_proj_in_factor", Range::Whole(1, (1 << 8) + 1)),
            ("video_connector_num_attention_heads audio_connector_num_attention_heads", HEADS),
            ("video_connector_attention_head_dim audio_connector_attention_head_dim", HEAD_DIM),
            ("video_connector_num_layers audio_connector_num_layers", LAYERS),
            (
                "video_connector_num_learnable_registers audio_connector_num_learnable_registers",
                Range::Whole(1, 1 << 12),
            ),
            ("connector_rope_base_seq_len", POSITIONS),
            ("rope_theta", THETA),
        ],
    ),
    (
        "vae",
        &[
            ("in_channels out_channels", Range::Whole(1, 1 << 8)),
            ("latent_channels block_out_channels decoder_block_out_channels", WIDTH),
            ("layers_per_block decoder_layers_per_block", BLOCKS),
            ("upsample_factor patch_size patch_size_t", SMALL),
            ("spatial_compression_ratio temporal_compression_ratio", RATIO),
            ("resnet_norm_eps", EPS),
            ("scaling_factor", FACTOR),
        ],
    ),
    (
        "audio_vae",
        &[
            ("base_channels latent_channels", Range::Whole(1, 1 << 12)),
            ("in_channels output_channels ch_mult num_res_blocks", SMALL),
            ("resolution", Range::Whole(1, 1 << 16)),
            ("attn_resolutions", Range::Whole(0, 1 << 16)),
            ("sample_rate", RATE),
            ("mel_hop_length", HOP),
            ("mel_bins", Range::Whole(4, 1 << 10)),
        ],
    ),
    (
        "vocoder",
        &[
            ("in_channels hidden_channels", WIDTH),
            ("out_channels", SMALL),
            ("upsample_kernel_sizes upsample_factors resnet_kernel_sizes resnet_dilations", KERNEL),
            ("antialias_ratio", SMALL),
            ("antialias_kernel_size", KERNEL),
            ("leaky_relu_negative_slope", EPS),
            ("input_sampling_rate output_sampling_rate", RATE),
            ("filter_length window_length hop_length", Range::Whole(1, 1 << 12)),
            ("num_mel_channels", Range::Whole(1, 1 << 10)),
        ],
    ),
    (
        "latent_upsampler",
        &[
            ("in_channels mid_channels", WIDTH),
            ("num_blocks_per_stage", BLOCKS),
            ("dims", Range::Whole(1, 3)),
            ("rational_spatial_scale", FACTOR),
        ],
    ),
    (
        "diffusion_decoder",
        &[
            ("out_channels", Range::Whole(1, 1 << 8)),
            ("latent_channels decoder_stage_channels decoder_t_emb_dim", WIDTH),
            ("patch_size decoder_stage_kernels decoder_stage5_kernel", SMALL),
            ("decoder_upsample_strides decoder_upsample_channel_reductions decoder_stage_depths", SMALL),
            ("decoder_head_dim", HEAD_DIM),
            ("decoder_num_inference_steps", Range::Whole(1, 1 << 8)),
            ("spatial_compression_ratio temporal_compression_ratio", RATIO),
            ("scaling_factor decoder_timestep_scale_multiplier", FACTOR),
        ],
    ),
    (
        "duration_head",
        &[
            ("video_cross_attention_dim audio_cross_attention_dim pooler_hidden_dim mlp_hidden_dim", WIDTH),
            ("num_queries", Range::Whole(1, 1 << 12)),
            ("num_pooler_heads", HEADS),
        ],
    ),
];

/// Ranges of the keys of `scheduler_config.json`.
const SCHEDULER: [Row; 4] = [
    ("num_train_timesteps", Range::Whole(1, 1_000_000)),
    ("base_image_seq_len max_image_seq_len", Range::Whole(1, 1 << 31)),
    ("shift base_shift max_shift", Range::Real(-100.0, 100.0)),
    ("shift_terminal", Range::Real(0.0, 1.0)),
];

fn range_of(component: &str, key: &str) -> Option<Range> {
    let rows = match component {
        "scheduler" => &SCHEDULER,
        _ => TABLE.iter().find(|(name, _)| *name == component).map_or(&[][..], |(_, rows)| rows),
    };
    let mut rows = rows.iter().chain(families::of(component).iter().flat_map(|family| family.ranges));
    rows.find(|(keys, _)| keys.split(' ').any(|own| own == key)).map(|(_, range)| *range)
}

/// Returns the upper bound of an integer key of a component's `config.json`; `None` for other keys.
pub fn largest(component: &str, key: &str) -> Option<u64> {
    match range_of(component, key)? {
        Range::Whole(_, most) => Some(most),
        Range::Real(..) => None,
    }
}

/// Checks the numbers and list lengths of the keys for which `read` is true. Returns an error for the first number or
/// length out of range.
pub fn check(component: &'static str, json: &Value, read: impl Fn(&str) -> bool) -> Result<(), ComponentConfigError> {
    let mut own = json.as_object().into_iter().flatten().filter(|(key, _)| read(key));
    own.try_for_each(|(key, value)| check_value(component, key, key, value))
}

fn check_value(component: &'static str, path: &str, key: &str, value: &Value) -> Result<(), ComponentConfigError> {
    let range = range_of(component, key);
    match (value, range) {
        (Value::Number(number), Some(range)) if number.as_f64().is_none_or(|value| !range.contains(value)) => {
            Err(out_of_range(component, path, number, range.text()))
        }
        (Value::Array(list), Some(_)) if list.len() > MAX_ENTRIES => {
            Err(out_of_range(component, &format!("{path} length"), list.len(), format!("at most {MAX_ENTRIES}")))
        }
        (Value::Array(list), Some(_)) => {
            let mut each = list.iter().enumerate();
            each.try_for_each(|(i, value)| check_value(component, &format!("{path}[{i}]"), key, value))
        }
        (Value::Object(map), _) => {
            let mut each = map.iter();
            each.try_for_each(|(key, value)| check_value(component, &format!("{path}.{key}"), key, value))
        }
        _ => Ok(()),
    }
}

/// Checks the total width of attention heads; `keys` are the config keys of the number of heads and of the head
/// dimension.
pub(crate) fn check_heads(component: &'static str, keys: [&str; 2], heads: Heads) -> Result<(), ComponentConfigError> {
    let width = heads.count.saturating_mul(heads.dim);
    check_at_most(component, &keys.join(" * "), width, MAX_WIDTH)
}

/// Checks a derived number against a maximum. `key` is the expression of config keys that gives the number.
pub(crate) fn check_at_most(
    component: &'static str,
    key: &str,
    value: usize,
    most: usize,
) -> Result<(), ComponentConfigError> {
    if value <= most { Ok(()) } else { Err(out_of_range(component, key, value, format!("at most {most}"))) }
}

fn out_of_range(component: &'static str, key: &str, value: impl ToString, range: String) -> ComponentConfigError {
    ComponentConfigError::OutOfRange { component, key: key.into(), value: value.to_string(), range }
}

/// Returns whether a key has a range.
pub(crate) fn has_range(component: &str, key: &str) -> bool {
    range_of(component, key).is_some()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::assert_covers;
    use crate::transformer::TransformerConfig;
    use crate::{audio_vae, connectors, diffusion_decoder, duration_head, upsampler, vocoder};

    #[test]
    fn every_numeric_key_has_a_range() {
        assert_covers::<TransformerConfig>("transformer");
        assert_covers::<connectors::ConnectorsConfig>("connectors");
        assert_covers::<crate::video_vae::VideoVaeConfig>("vae");
        assert_covers::<audio_vae::AudioVaeConfig>("audio_vae");
        assert_covers::<vocoder::GeneratorConfig>("vocoder");
        assert_covers::<upsampler::config::UpsamplerConfigFile>("latent_upsampler");
        assert_covers::<diffusion_decoder::config::DiffusionDecoderFile>("diffusion_decoder");
        assert_covers::<duration_head::config::DurationHeadFile>("duration_head");
    }

    #[test]
    fn out_of_range_numbers_are_reported_by_key() {
        let error = |component, json: Value| check(component, &json, |_| true).unwrap_err().to_string();
        assert_eq!(
            error("vae", json!({"block_out_channels": [8, 0]})),
            "block_out_channels[1] = 0 is out of range: it must be 1 to 65536"
        );
        assert_eq!(
            error("text_encoder", json!({"rope_parameters": {"full_attention": {"factor": 0.0}}})),
            "rope_parameters.full_attention.factor = 0.0 is out of range: it must be 1e-6 to 1e6"
        );
        assert_eq!(
            error("vocoder", json!({"upsample_factors": vec![2; 65]})),
            "upsample_factors length = 65 is out of range: it must be at most 64"
        );
        assert_eq!(
            error("transformer", json!({"num_layers": u64::MAX})),
            "num_layers = 18446744073709551615 is out of range: it must be 1 to 256"
        );
        let heads = check_heads("transformer", ["count", "dim"], Heads { count: 1024, dim: 4096 });
        let said = "count * dim = 4194304 is out of range: it must be at most 32768";
        assert_eq!(heads.unwrap_err().to_string(), said);
        // Keys for which `read` is false are not checked.
        assert!(check("transformer", &json!({"num_layers": 0, "other": 0}), |key| key != "num_layers").is_ok());
    }
}
