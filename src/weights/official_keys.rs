//! Keys of the configuration inside Lightricks' single files: those that are read, those that change no result and why, and
//! an error for any other, so that a newer model does not run as an older one.

use std::path::Path;

use serde_json::Value;

use super::error::WeightsError;
use super::official_vae;
use super::section::Section;

/// A key that nothing reads, the values it may have, and why it changes no result with them.
type Inert = (&'static str, fn(&Value) -> bool, &'static str);

/// A section of the configuration, by the way to it, and its keys.
struct Keys {
    section: &'static [&'static str],
    read: &'static [&'static str],
    inert: &'static [Inert],
}

const TRAINING: &str = "training's";
const INITIAL: &str = "of weights before training";
const TENSORS: &str = "the tensors tell it";
const CLASS: &str = "an option of the class it grew from, which has no code in it";
const SPECTROGRAM: &str = "of the spectrogram that sound is encoded from";

const fn any(key: &'static str, why: &'static str) -> Inert {
    (key, |_| true, why)
}

const fn on(key: &'static str, why: &'static str) -> Inert {
    (key, |value| *value == true, why)
}

const fn off(key: &'static str, why: &'static str) -> Inert {
    (key, |value| value.is_null() || *value == false, why)
}

fn is_per_token_rms(value: &Value) -> bool {
    value.as_str().is_some_and(|name| name.eq_ignore_ascii_case("per_token_rms"))
}

/// Of LTX-2.0's vocoder, and of either half of LTX-2.3's.
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
const KEYS: [Keys; 12] = [
    Keys {
        section: &[],
        read: &["transformer", "vae", "audio_vae", "vocoder", "scheduler"],
        inert: &[any("duration_head", TENSORS)],
    },
    Keys {
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
            any("attention_type", "the training code's choice of kernel"),
            any("norm_num_groups", CLASS),
            any("num_embeds_ada_norm", CLASS),
            on("causal_temporal_positioning", "positions of frames are causal in every model"),
            any("connector_num_learnable_registers", TENSORS),
            any("connector_learnable_registers_std", INITIAL),
            ("text_encoder_norm_type", is_per_token_rms, "LTX-2.3 and LTX-2.5 normalise so, LTX-2.0 does not have the key"),
        ],
    },
    Keys {
        section: &["vae"],
        read: &[
            "causal_decoder", "decoder_base_channels", "decoder_blocks", "decoder_spatial_padding_mode", "dims",
            "encoder_blocks", "encoder_spatial_padding_mode", "in_channels", "latent_channels", "norm_layer",
            "out_channels", "patch_size", "scaling_factor", "spatial_padding_mode", "timestep_conditioning",
        ],
        inert: &[
            any("latent_log_var", "the mean is read alone"),
            any("encoder_base_channels", TENSORS),
            off("use_quant_conv", CLASS),
            off("normalize_latent_channels", CLASS),
        ],
    },
    Keys { section: &["audio_vae"], read: &["model", "preprocessing", "variables"], inert: &[] },
    Keys { section: &["audio_vae", "model"], read: &["params"], inert: &[any("target", TRAINING)] },
    Keys {
        section: &["audio_vae", "model", "params"],
        read: &["ddconfig", "sampling_rate"],
        inert: &[any("embed_dim", CLASS), any("lossconfig", TRAINING), any("monitor", TRAINING)],
    },
    Keys {
        section: &["audio_vae", "model", "params", "ddconfig"],
        read: &[
            "attn_resolutions", "causality_axis", "ch", "ch_mult", "double_z", "in_channels", "mel_bins",
            "mid_block_add_attention", "norm_type", "num_res_blocks", "out_ch", "resolution", "z_channels",
        ],
        inert: &[
            any("dropout", TRAINING),
            ("attn_type", |value| *value == "vanilla", "the kind that every model has, where it has attention"),
            off("downsample_time", CLASS),
            on("resamp_with_conv", "sizes change by convolutions in every model"),
        ],
    },
    Keys {
        section: &["audio_vae", "preprocessing"],
        read: &["stft", "mel"],
        inert: &[any("audio", SPECTROGRAM)],
    },
    Keys {
        section: &["audio_vae", "preprocessing", "stft"],
        read: &["hop_length", "causal"],
        inert: &[
            ("filter_length", |value| *value == 1024, "the window of sound that every model is given"),
            any("win_length", SPECTROGRAM),
        ],
    },
    Keys {
        section: &["audio_vae", "preprocessing", "mel"],
        read: &["n_mel_channels"],
        inert: &[any("mel_fmin", SPECTROGRAM), any("mel_fmax", SPECTROGRAM)],
    },
    Keys { section: &["audio_vae", "variables"], read: &["mel_bins"], inert: &[] },
    Keys {
        section: &["scheduler"],
        read: &[
            "base_image_seq_len", "base_shift", "max_image_seq_len", "max_shift", "num_train_timesteps", "shift",
            "shift_terminal", "time_shift_type", "use_dynamic_shifting",
        ],
        inert: &[
            any("shifting", TRAINING),
            any("base_resolution", TRAINING),
            any("sampler", "sampler.kind and sampler.sigma_shift decide"),
        ],
    },
];

/// LTX-2.0's vocoder, whose keys are the section's own.
const PLAIN: [Keys; 1] = [Keys { section: &["vocoder"], read: &GENERATOR, inert: &[] }];

/// LTX-2.3's vocoder of two stages.
const EXTENDED: [Keys; 3] = [
    Keys { section: &["vocoder"], read: &["vocoder", "bwe"], inert: &[] },
    Keys { section: &["vocoder", "vocoder"], read: &GENERATOR, inert: &[] },
    Keys {
        section: &["vocoder", "bwe"],
        read: &["input_sampling_rate", "hop_length", "n_fft", "num_mels"],
        inert: &[
            off("apply_final_activation", "the second stage has none"),
            any("win_size", "the window is as long as the transform"),
        ],
    },
];

/// The video VAE with the diffusion decoder, whose halves are sections of their own.
const DIFFUSION: [Keys; 3] = [
    Keys {
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
        inert: &[any("latent_log_var", "the mean is read alone"), off("normalize_latent_channels", CLASS)],
    },
    Keys {
        section: &["vae", "encoder"],
        read: &["blocks", "dims", "in_channels", "norm_layer", "out_channels", "patch_size", "spatial_padding_mode"],
        inert: &[any("latent_log_var", "the mean is read alone"), any("base_channels", TENSORS)],
    },
    Keys { section: &["vae", "decoder"], read: &DECODER, inert: &[] },
];

/// Of the diffusion decoder.
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

/// A latent upsampler's file, whose configuration has no sections.
const UPSAMPLER: Keys = Keys {
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

impl Keys {
    /// Refuses a key that is neither read nor known to change no result. Those that begin with `_` say what the file was
    /// saved by; the classes among them are looked at elsewhere.
    fn check(&self, path: &Path, config: &Value, more: &[&str]) -> Result<(), WeightsError> {
        let refused = |way: &[&str], reason: String| {
            let key = [&["config"], way].concat().join(".");
            Err(WeightsError::Config { path: path.to_path_buf(), key, reason })
        };
        let short = |value: &Value| value.to_string().chars().take(60).collect::<String>();
        let section = self.section.iter().try_fold(config, |values, name| values.get(name));
        let Some(section) = section.filter(|values| !values.is_null()) else { return Ok(()) };
        let Some(values) = section.as_object() else {
            return refused(self.section, format!("is {}, not a section of keys", short(section)));
        };
        let known = |key: &str| key.starts_with('_') || self.read.contains(&key) || more.contains(&key);
        for (key, value) in values.iter().filter(|(key, _)| !known(key)) {
            let reason = match self.inert.iter().find(|(name, ..)| name == key) {
                Some((_, may, _)) if may(value) => continue,
                Some(_) => "which no code computes",
                None => "a key that this program does not know: the model may be newer than it",
            };
            let way: Vec<&str> = self.section.iter().copied().chain([key.as_str()]).collect();
            return refused(&way, format!("is {}, {reason}", short(value)));
        }
        Ok(())
    }
}

/// Refuses keys of a header's `config` that nothing reads.
///
/// # Errors
/// The first such key, with its value.
pub(super) fn refuse_unread(path: &Path, config: &Value) -> Result<(), WeightsError> {
    let extended = config.get("vocoder").and_then(|v| v.get("bwe")).is_some();
    let vocoder: &[Keys] = if extended { &EXTENDED } else { &PLAIN };
    let vae = Section::new(path, config, "vae");
    let diffusion = official_vae::is_diffusion(vae);
    let read = KEYS.iter().filter(|keys| !(diffusion && keys.section == ["vae"]));
    read.into_iter().try_for_each(|keys| keys.check(path, config, &[]))?;
    // Its decoder's keys may stand among the VAE's own.
    let more: &[&str] = if vae.get("decoder").is_none() { &DECODER } else { &[] };
    DIFFUSION.iter().filter(|_| diffusion).try_for_each(|keys| keys.check(path, config, more))?;
    vocoder.iter().try_for_each(|keys| {
        let second = keys.section.ends_with(&["bwe"]);
        keys.check(path, config, if second { &GENERATOR } else { &[] })
    })
}

/// The same for a latent upsampler's file.
///
/// # Errors
/// The first such key, with its value.
pub(super) fn refuse_unread_of_upsampler(path: &Path, config: &Value) -> Result<(), WeightsError> {
    UPSAMPLER.check(path, config, &[])
}

/// The keys that are read and are no sections, with the way to them.
#[cfg(test)]
pub(super) fn read() -> impl Iterator<Item = Vec<&'static str>> {
    let all = || KEYS.iter().chain(&PLAIN);
    let ways = all().flat_map(|keys| keys.read.iter().map(|key| [keys.section, &[*key]].concat()));
    ways.filter(move |way| all().all(|keys| keys.section != way))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every reason is one, and no key is listed twice.
    #[test]
    fn each_key_is_listed_once_and_inert_ones_say_why() {
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
