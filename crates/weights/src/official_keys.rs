//! Keys of the configuration inside Lightricks' single files: those that are read, and those that are known to have no
//! effect, with the reason. Any other key is an error, so that a newer model does not run as an older one.

use std::path::Path;

use serde_json::Value;

use super::error::WeightsError;
use super::official_vae;
use super::section::Section;

/// A key that is not read, a predicate for its accepted values, and the reason why these values have no effect.
type IgnoredKey = (&'static str, fn(&Value) -> bool, &'static str);

/// The keys of one section of the configuration; `section` is the path of the section.
struct SectionKeys {
    section: &'static [&'static str],
    read: &'static [&'static str],
    inert: &'static [IgnoredKey],
}

const TRAINING: &str = "only used in training";
const INITIAL: &str = "initial values of weights";
const TENSORS: &str = "derived from the tensors";
const CLASS: &str = "an unused option of the base class";
const SPECTROGRAM: &str = "spectrogram for the audio encoder";

const fn any(key: &'static str, why: &'static str) -> IgnoredKey {
    (key, |_| true, why)
}

const fn on(key: &'static str, why: &'static str) -> IgnoredKey {
    (key, |value| *value == true, why)
}

const fn off(key: &'static str, why: &'static str) -> IgnoredKey {
    (key, |value| value.is_null() || *value == false, why)
}

fn is_per_token_rms(value: &Value) -> bool {
    value.as_str().is_some_and(|name| name.eq_ignore_ascii_case("per_token_rms"))
}

/// Keys of LTX-2.0's vocoder, and of both stages of LTX-2.3's vocoder.
const GENERATOR: [&str; 11] = [
    "resblock",
    "stereo",
    "upsample_initial_channel",
    "upsample_kernel_sizes",
    "upsample_rates",
    "resblock_kernel_sizes",
    "resblock_dilation_sizes",
    "use_bias_at_final",
    "use_tanh_at_final",
    "activation",
    "output_sampling_rate",
];

#[rustfmt::skip]
const KEYS: [SectionKeys; 12] = [
    SectionKeys {
        section: &[],
        read: &["transformer", "vae", "audio_vae", "vocoder", "scheduler"],
        inert: &[any("duration_head", TENSORS)],
    },
    SectionKeys {
        section: &["transformer"],
        read: &[
            "activation_fn", "apply_gated_attention", "attention_bias", "attention_head_dim", "audio_attention_head_dim",
            "audio_connector_attention_head_dim", "audio_connector_num_attention_heads", "audio_connector_num_layers",
            "audio_cross_attention_dim", "audio_ff_bias", "audio_in_channels", "audio_num_attention_heads",
            "audio_out_channels", "audio_positional_embedding_max_pos", "av_ca_timestep_scale_multiplier",
            "av_cross_ada_norm", "caption_channels", "caption_proj_before_connector", "caption_proj_input_norm",
            "caption_projection_first_linear", "caption_projection_second_linear", "connector_apply_gated_attention",
            "connector_attention_head_dim", "connector_ff_bias", "connector_norm_output", "connector_num_attention_heads",
            "connector_num_layers", "connector_positional_embedding_max_pos", "cross_attention_adaln",
            "cross_attention_dim", "cross_attention_norm", "double_self_attention", "ff_bias", "frequencies_precision",
            "in_channels", "norm_elementwise_affine", "norm_eps", "num_attention_heads", "num_layers",
            "num_vector_embeds", "only_cross_attention", "out_channels", "positional_embedding_max_pos",
            "positional_embedding_theta", "positional_embedding_type", "qk_norm", "rope_type", "share_ff",
            "standardization_norm", "timestep_scale_multiplier", "upcast_attention", "use_audio_video_cross_attention",
            "use_embeddings_connector", "use_keyframes_abs_pos_embedding", "use_linear_projection",
            "use_middle_indices_grid", "use_prompt_adaln_single",
        ],
        inert: &[
            any("dropout", TRAINING),
            any("attention_type", "kernel choice of the training code"),
            any("norm_num_groups", CLASS),
            any("num_embeds_ada_norm", CLASS),
            on("causal_temporal_positioning", "positions of frames are causal in every model"),
            any("connector_num_learnable_registers", TENSORS),
            any("connector_learnable_registers_std", INITIAL),
            ("text_encoder_norm_type", is_per_token_rms, "normalization of LTX-2.3 and LTX-2.5; LTX-2.0 lacks the key"),
        ],
    },
    SectionKeys {
        section: &["vae"],
        read: &[
            "causal_decoder", "decoder_base_channels", "decoder_blocks", "decoder_spatial_padding_mode", "dims",
            "encoder_blocks", "encoder_spatial_padding_mode", "in_channels", "latent_channels", "norm_layer",
            "out_channels", "patch_size", "scaling_factor", "spatial_padding_mode", "timestep_conditioning",
        ],
        inert: &[
            any("latent_log_var", "only the mean is used"),
            any("encoder_base_channels", TENSORS),
            off("use_quant_conv", CLASS),
            off("normalize_latent_channels", CLASS),
        ],
    },
    SectionKeys { section: &["audio_vae"], read: &["model", "preprocessing", "variables"], inert: &[] },
    SectionKeys { section: &["audio_vae", "model"], read: &["params"], inert: &[any("target", TRAINING)] },
    SectionKeys {
        section: &["audio_vae", "model", "params"],
        read: &["ddconfig", "sampling_rate"],
        inert: &[any("embed_dim", CLASS), any("lossconfig", TRAINING), any("monitor", TRAINING)],
    },
    SectionKeys {
        section: &["audio_vae", "model", "params", "ddconfig"],
        read: &[
            "attn_resolutions", "causality_axis", "ch", "ch_mult", "double_z", "in_channels", "mel_bins",
            "mid_block_add_attention", "norm_type", "num_res_blocks", "out_ch", "resolution", "z_channels",
        ],
        inert: &[
            any("dropout", TRAINING),
            ("attn_type", |value| *value == "vanilla", "the only attention type of published models"),
            off("downsample_time", CLASS),
            on("resamp_with_conv", "every model resizes with convolutions"),
        ],
    },
    SectionKeys {
        section: &["audio_vae", "preprocessing"],
        read: &["stft", "mel"],
        inert: &[any("audio", SPECTROGRAM)],
    },
    SectionKeys {
        section: &["audio_vae", "preprocessing", "stft"],
        read: &["hop_length", "causal"],
        inert: &[
            ("filter_length", |value| *value == 1024, "window size of every published model"),
            any("win_length", SPECTROGRAM),
        ],
    },
    SectionKeys {
        section: &["audio_vae", "preprocessing", "mel"],
        read: &["n_mel_channels"],
        inert: &[any("mel_fmin", SPECTROGRAM), any("mel_fmax", SPECTROGRAM)],
    },
    SectionKeys { section: &["audio_vae", "variables"], read: &["mel_bins"], inert: &[] },
    SectionKeys {
        section: &["scheduler"],
        read: &[
            "base_image_seq_len", "base_shift", "max_image_seq_len", "max_shift", "num_train_timesteps", "shift",
            "shift_terminal", "time_shift_type", "use_dynamic_shifting",
        ],
        inert: &[
            any("shifting", TRAINING),
            any("base_resolution", TRAINING),
            any("sampler", "set by sampler.kind and sampler.sigma_shift"),
        ],
    },
];

/// Keys of LTX-2.0's vocoder, which are directly in the `vocoder` section.
const PLAIN: [SectionKeys; 1] = [SectionKeys { section: &["vocoder"], read: &GENERATOR, inert: &[] }];

/// Keys of LTX-2.3's two-stage vocoder.
const EXTENDED: [SectionKeys; 3] = [
    SectionKeys { section: &["vocoder"], read: &["vocoder", "bwe"], inert: &[] },
    SectionKeys { section: &["vocoder", "vocoder"], read: &GENERATOR, inert: &[] },
    SectionKeys {
        section: &["vocoder", "bwe"],
        read: &["input_sampling_rate", "hop_length", "n_fft", "num_mels"],
        inert: &[
            off("apply_final_activation", "the second stage has no final activation"),
            any("win_size", "the window is as long as the transform"),
        ],
    },
];

/// Keys of the video VAE with the diffusion decoder, whose encoder and decoder have their own sections.
const DIFFUSION: [SectionKeys; 3] = [
    SectionKeys {
        section: &["vae"],
        read: &[
            "decoder",
            "dims",
            "encoder",
            "encoder_spatial_padding_mode",
            "latent_channels",
            "model_output_type",
            "norm_layer",
            "scaling_factor",
        ],
        inert: &[any("latent_log_var", "only the mean is used"), off("normalize_latent_channels", CLASS)],
    },
    SectionKeys {
        section: &["vae", "encoder"],
        read: &["blocks", "dims", "in_channels", "norm_layer", "out_channels", "patch_size", "spatial_padding_mode"],
        inert: &[any("latent_log_var", "only the mean is used"), any("base_channels", TENSORS)],
    },
    SectionKeys { section: &["vae", "decoder"], read: &DECODER, inert: &[] },
];

/// Keys of the diffusion decoder.
const DECODER: [&str; 14] = [
    "default_num_inference_steps",
    "head_dim",
    "in_channels",
    "na_head_dim",
    "out_channels",
    "patch_size",
    "stage5_channels",
    "stage5_kernel",
    "stage_channels",
    "stage_depths",
    "stage_kernels",
    "t_emb_dim",
    "timestep_scale_multiplier",
    "upsamples",
];

/// Keys of a latent upsampler's file, whose configuration has no sections.
const UPSAMPLER: SectionKeys = SectionKeys {
    section: &[],
    read: &[
        "in_channels",
        "mid_channels",
        "num_blocks_per_stage",
        "dims",
        "spatial_upsample",
        "temporal_upsample",
        "spatial_scale",
        "rational_resampler",
    ],
    inert: &[],
};

impl SectionKeys {
    /// Returns an error for a key that is neither read nor known to have no effect. Keys that begin with `_` describe
    /// the program that saved the file and are ignored; classes among them are checked elsewhere. `more` lists
    /// additional known keys.
    fn check(&self, path: &Path, config: &Value, more: &[&str]) -> Result<(), WeightsError> {
        let refused = |way: &[&str], reason: String| {
            let key = [&["config"], way].concat().join(".");
            Err(WeightsError::Config { path: path.to_path_buf(), key, reason })
        };
        let short = |value: &Value| value.to_string().chars().take(60).collect::<String>();
        let section = self.section.iter().try_fold(config, |values, name| values.get(name));
        let Some(section) = section.filter(|values| !values.is_null()) else { return Ok(()) };
        let Some(values) = section.as_object() else {
            return refused(self.section, format!("is {}, not an object", short(section)));
        };
        let known = |key: &str| key.starts_with('_') || self.read.contains(&key) || more.contains(&key);
        for (key, value) in values.iter().filter(|(key, _)| !known(key)) {
            let reason = match self.inert.iter().find(|(name, ..)| name == key) {
                Some((_, may, _)) if may(value) => continue,
                Some(_) => format!("is {}, which is not supported", short(value)),
                None => format!("is an unknown key (value {}); the model may be newer than this program", short(value)),
            };
            let way: Vec<&str> = self.section.iter().copied().chain([key.as_str()]).collect();
            return refused(&way, reason);
        }
        Ok(())
    }
}

/// Returns an error for the first unknown key of a header's `config`, with its value.
pub(super) fn reject_unknown_keys(path: &Path, config: &Value) -> Result<(), WeightsError> {
    let extended = config.get("vocoder").and_then(|v| v.get("bwe")).is_some();
    let vocoder: &[SectionKeys] = if extended { &EXTENDED } else { &PLAIN };
    let vae = Section::new(path, config, "vae");
    let diffusion = official_vae::is_diffusion(vae);
    let read = KEYS.iter().filter(|keys| !(diffusion && keys.section == ["vae"]));
    read.into_iter().try_for_each(|keys| keys.check(path, config, &[]))?;
    // The decoder's keys may be directly in the VAE's section.
    let more: &[&str] = if vae.get("decoder").is_none() { &DECODER } else { &[] };
    DIFFUSION.iter().filter(|_| diffusion).try_for_each(|keys| keys.check(path, config, more))?;
    vocoder.iter().try_for_each(|keys| {
        let second = keys.section.ends_with(&["bwe"]);
        keys.check(path, config, if second { &GENERATOR } else { &[] })
    })
}

/// Returns an error for an unknown key, like [`reject_unknown_keys`], in the file of a latent upsampler.
pub(super) fn reject_unknown_upsampler_keys(path: &Path, config: &Value) -> Result<(), WeightsError> {
    UPSAMPLER.check(path, config, &[])
}

/// Iterates over the paths of all keys that are read and are not sections.
#[cfg(test)]
pub(super) fn read() -> impl Iterator<Item = Vec<&'static str>> {
    let all = || KEYS.iter().chain(&PLAIN);
    let ways = all().flat_map(|keys| keys.read.iter().map(|key| [keys.section, &[*key]].concat()));
    ways.filter(move |way| all().all(|keys| keys.section != way))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reasons are not empty, and no key is listed twice.
    #[test]
    fn keys_are_listed_once_and_unused_keys_have_reasons() {
        for keys in KEYS.iter().chain(&PLAIN).chain(&EXTENDED).chain(&DIFFUSION).chain([&UPSAMPLER]) {
            assert!(keys.inert.iter().all(|(.., why)| why.len() > 5), "{:?}", keys.section);
            let mut all: Vec<&str> = keys.read.iter().copied().chain(keys.inert.iter().map(|(key, ..)| *key)).collect();
            let count = all.len();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), count, "{:?}", keys.section);
        }
    }
}
