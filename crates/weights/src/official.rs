//! Conversion of the configuration inside Lightricks' single files to the configurations of the diffusers layout.
//!
//! The header's `config` describes the network with the keys of the training code. Missing keys get the training code's
//! defaults. Values for which there is neither a key nor a default (the number of projected text layers, the number of
//! registers) are derived from tensor shapes.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::checkpoint::Checkpoint;
use super::error::WeightsError;
use super::section::Section;
use super::version::Version;
use super::{Component, official_diffusion, official_vae};

/// Keys that identify the text path of LTX-2.3, each with its value in LTX-2.3.
pub(super) const PROJECTION_FIRST: [(&str, bool); 4] = [
    ("caption_proj_before_connector", true),
    ("caption_projection_first_linear", false),
    ("caption_projection_second_linear", false),
    ("caption_proj_input_norm", false),
];

/// Returns whether captions are projected before the connectors (LTX-2.3) or in the transformer (LTX-2.0).
fn projects_first(t: Section) -> Result<bool, WeightsError> {
    let given: Vec<_> = PROJECTION_FIRST.iter().filter(|(k, _)| t.get(k).is_some()).collect();
    if given.is_empty() {
        return Ok(false);
    }
    for (key, want) in PROJECTION_FIRST {
        match t.get(key) {
            None => {
                return Err(t.error(
                    key,
                    "is missing, while other caption keys are present: the model is neither LTX-2.0 nor LTX-2.3 nor LTX-2.5",
                ));
            }
            Some(got) if *got != want => {
                return Err(
                    t.error(key, format!("is {got}, but must be {want} (LTX-2.3, LTX-2.5) or missing (LTX-2.0)"))
                );
            }
            Some(_) => {}
        }
    }
    Ok(true)
}

/// Returns a component's model version according to the header. `None`: the header does not state one.
pub(super) fn version(path: &Path, config: &Value, component: Component) -> Option<Version> {
    let newer = |yes: bool| Some(if yes { Version::V2_3 } else { Version::V2_0 });
    let (t, vocoder) = (Section::new(path, config, "transformer"), Section::new(path, config, "vocoder"));
    match component {
        // A header that matches no model version is reported when its configuration is read.
        Component::Transformer if t.values.is_some() => projects_first(t).ok().map(|first| match first {
            true => Version::since_2_3(&config["transformer"]),
            false => Version::V2_0,
        }),
        Component::Connectors if t.values.is_some() => projects_first(t).ok().and_then(newer),
        Component::Vocoder if vocoder.values.is_some() => newer(vocoder.get("bwe").is_some()),
        _ => None,
    }
}

/// Derives a component's diffusers configuration from the header's `config`.
///
/// `tensors` contains the component's tensors under diffusers names; only their shapes are read.
pub(super) fn component_config(
    path: &Path,
    config: &Value,
    component: Component,
    tensors: &Checkpoint,
) -> Result<Value, WeightsError> {
    match component {
        Component::Transformer => transformer(path, config),
        Component::Connectors => connectors(path, config, tensors),
        Component::Vae => official_vae::video(Section::new(path, config, "vae")),
        Component::AudioVae => audio_vae(Section::new(path, config, "audio_vae")),
        Component::Vocoder => vocoder(Section::new(path, config, "vocoder"), tensors),
        Component::DiffusionDecoder => official_diffusion::config(Section::new(path, config, "vae")),
        Component::DurationHead => duration_head(path, tensors),
        Component::TemporalUpsampler => upsampler(path, config, tensors),
        Component::Scheduler => Ok(scheduler(path, Section::new(path, config, "scheduler"))),
        Component::LatentUpsampler => upsampler(path, config, tensors),
        Component::TextEncoder | Component::Tokenizer => {
            Err(WeightsError::NoComponent { path: path.to_path_buf(), component, command: None })
        }
    }
}

/// Returns an error for a transformer with unsupported options.
fn require_known_transformer(t: Section) -> Result<(), WeightsError> {
    for (key, want) in [
        ("_class_name", json!("AVTransformer3DModel")),
        ("activation_fn", json!("gelu-approximate")),
        ("attention_bias", json!(true)),
        ("qk_norm", json!("rms_norm")),
        ("positional_embedding_type", json!("rope")),
        ("standardization_norm", json!("rms_norm")),
        ("norm_elementwise_affine", json!(false)),
        ("use_audio_video_cross_attention", json!(true)),
        ("av_cross_ada_norm", json!(true)),
        ("share_ff", json!(false)),
        ("use_middle_indices_grid", json!(true)),
        ("num_vector_embeds", Value::Null),
        ("use_linear_projection", json!(false)),
        ("only_cross_attention", json!(false)),
        ("cross_attention_norm", json!(true)),
        ("double_self_attention", json!(false)),
        ("upcast_attention", json!(false)),
        ("use_embeddings_connector", json!(true)),
        ("connector_norm_output", json!(true)),
        ("connector_ff_bias", json!(true)),
    ] {
        t.require(key, want)?;
    }
    Ok(())
}

fn transformer(path: &Path, config: &Value) -> Result<Value, WeightsError> {
    let t = Section::new(path, config, "transformer");
    if t.values.is_none() {
        return Err(t.error("*", "is missing in the header's metadata"));
    }
    require_known_transformer(t)?;
    let streams = [
        video_stream(t, Section::new(path, config, "vae"))?,
        audio_stream(t, Section::new(path, config, "audio_vae"))?,
        both_streams(t, projects_first(t)?)?,
    ];
    let entries = streams.iter().filter_map(Value::as_object).flatten();
    Ok(Value::Object(entries.map(|(k, v)| (k.clone(), v.clone())).collect()))
}

fn video_stream(t: Section, vae: Section) -> Result<Value, WeightsError> {
    // A file without the convolutional VAE does not state the compression factors; they are the same in all published
    // models.
    let factors = match vae.values {
        Some(_) if !official_vae::is_diffusion(vae) => official_vae::video(vae)?,
        _ => json!({"temporal_compression_ratio": 8, "spatial_compression_ratio": 32}),
    };
    let spatial = &factors["spatial_compression_ratio"];
    let positions = "positional_embedding_max_pos";
    Ok(json!({
        "_class_name": "LTX2VideoTransformer3DModel",
        "in_channels": t.or("in_channels", 128),
        "out_channels": t.or("out_channels", 128),
        "patch_size": 1,
        "patch_size_t": 1,
        "num_attention_heads": t.or("num_attention_heads", 32),
        "attention_head_dim": t.or("attention_head_dim", 128),
        "cross_attention_dim": t.or("cross_attention_dim", 4096),
        "vae_scale_factors": [factors["temporal_compression_ratio"], spatial, spatial],
        "pos_embed_max_pos": t.entry(positions, 0, json!([20, 2048, 2048]))?,
        "base_height": t.entry(positions, 1, json!([20, 2048, 2048]))?,
        "base_width": t.entry(positions, 2, json!([20, 2048, 2048]))?,
        "gated_attn": t.flag("apply_gated_attention", false)?,
        "cross_attn_mod": t.flag("cross_attention_adaln", false)?,
    }))
}

fn audio_stream(t: Section, vae: Section) -> Result<Value, WeightsError> {
    let audio = audio_vae(vae)?;
    let levels = audio["ch_mult"].as_array().map_or(3, Vec::len).max(1);
    Ok(json!({
        "audio_in_channels": t.or("audio_in_channels", 128),
        "audio_out_channels": t.or("audio_out_channels", 128),
        "audio_patch_size": 1,
        "audio_patch_size_t": 1,
        "audio_num_attention_heads": t.or("audio_num_attention_heads", 32),
        "audio_attention_head_dim": t.or("audio_attention_head_dim", 64),
        "audio_cross_attention_dim": t.or("audio_cross_attention_dim", 2048),
        "audio_scale_factor": 2u64.saturating_pow(levels as u32 - 1),
        "audio_pos_embed_max_pos": t.entry("audio_positional_embedding_max_pos", 0, json!([20]))?,
        "audio_sampling_rate": audio["sample_rate"],
        "audio_hop_length": audio["mel_hop_length"],
        "audio_gated_attn": t.flag("apply_gated_attention", false)?,
        "audio_cross_attn_mod": t.flag("cross_attention_adaln", false)?,
    }))
}

/// Derives the keys that video and audio share; `first` is the result of [`projects_first`].
fn both_streams(t: Section, first: bool) -> Result<Value, WeightsError> {
    Ok(json!({
        "num_layers": t.or("num_layers", 48),
        "activation_fn": "gelu-approximate",
        "qk_norm": "rms_norm_across_heads",
        "norm_elementwise_affine": false,
        "norm_eps": t.or("norm_eps", 1e-6),
        "caption_channels": t.or("caption_channels", 3840),
        "attention_bias": true,
        "attention_out_bias": true,
        "rope_theta": t.or("positional_embedding_theta", 10000.0),
        "rope_double_precision": t.choice("frequencies_precision", ["float32", "float64"])? == 1,
        "causal_offset": 1,
        "timestep_scale_multiplier": t.or("timestep_scale_multiplier", 1000),
        // The training code's default is 1, but every published model has 1000: in a file that lost the key, 1 would
        // silently decouple sound from frames.
        "cross_attn_timestep_scale_multiplier": t.or("av_ca_timestep_scale_multiplier", 1000),
        "rope_type": t.or("rope_type", "split"),
        "use_prompt_embeddings": !first,
        "perturbed_attn": first,
        "ff_bias": t.or("ff_bias", true),
        "audio_ff_bias": t.or("audio_ff_bias", true),
        "use_prompt_adaln_single": t.or("use_prompt_adaln_single", true),
        "use_keyframes_abs_pos_embedding": t.or("use_keyframes_abs_pos_embedding", false),
    }))
}

fn connectors(path: &Path, config: &Value, tensors: &Checkpoint) -> Result<Value, WeightsError> {
    let t = Section::new(path, config, "transformer");
    let first = projects_first(t)?;
    let caption = t.or("caption_channels", 3840);
    let width = caption
        .as_u64()
        .filter(|c| *c > 0)
        .ok_or_else(|| t.error("caption_channels", "is not a positive whole number"))?;
    let projection = if first { "video_text_proj_in" } else { "text_proj_in" };
    let shape = |name: &str| {
        tensors
            .shape(name)
            .ok_or_else(|| WeightsError::MissingTensor { path: path.to_path_buf(), key: name.to_string() })
    };
    let weight = shape(&format!("{projection}.weight"))?;
    let stacked = weight.get(1).map_or(0, |w| *w as u64);
    if stacked % width != 0 || stacked == 0 {
        return Err(t.error(
            "caption_channels",
            format!("is {width}, but the {stacked} columns of {projection}.weight are not a multiple of {width}"),
        ));
    }
    let registers =
        |stream: &str| shape(&format!("{stream}_connector.learnable_registers")).map(|s| s.first().copied());
    let heads = t.or("connector_num_attention_heads", 30);
    let dim = t.or("connector_attention_head_dim", 128);
    let layers = t.or("connector_num_layers", 2);
    let gated = t.flag("connector_apply_gated_attention", false)?;
    let number = |key: &str, default: u64| {
        let given = t.or(key, default);
        given.as_u64().ok_or_else(|| t.error(key, format!("is {given}, not a whole number")))
    };
    Ok(json!({
        "_class_name": "LTX2TextConnectors",
        "caption_channels": caption,
        "text_proj_in_factor": stacked / width,
        "video_connector_num_attention_heads": heads,
        "video_connector_attention_head_dim": dim,
        "video_connector_num_layers": layers,
        "video_connector_num_learnable_registers": registers("video")?,
        "video_gated_attn": gated,
        "audio_connector_num_attention_heads": t.or("audio_connector_num_attention_heads", heads),
        "audio_connector_attention_head_dim": t.or("audio_connector_attention_head_dim", dim),
        "audio_connector_num_layers": t.or("audio_connector_num_layers", layers),
        "audio_connector_num_learnable_registers": registers("audio")?,
        "audio_gated_attn": gated,
        "connector_rope_base_seq_len": t.entry("connector_positional_embedding_max_pos", 0, json!([4096]))?,
        "rope_theta": 10000.0,
        "rope_double_precision": t.choice("frequencies_precision", ["float32", "float64"])? == 1,
        "causal_temporal_positioning": false,
        "rope_type": t.or("rope_type", "split"),
        "per_modality_projections": first,
        "video_hidden_dim": number("num_attention_heads", 32)?.saturating_mul(number("attention_head_dim", 128)?),
        "audio_hidden_dim":
            number("audio_num_attention_heads", 32)?.saturating_mul(number("audio_attention_head_dim", 64)?),
        "proj_bias": tensors.contains(&format!("{projection}.bias")),
    }))
}

fn audio_vae(s: Section) -> Result<Value, WeightsError> {
    let params = s.sub("model").sub("params");
    let dd = params.sub("ddconfig");
    let (stft, mel) = (s.sub("preprocessing").sub("stft"), s.sub("preprocessing").sub("mel"));
    let mel_bins = dd.get("mel_bins").or(mel.get("n_mel_channels")).or(s.sub("variables").get("mel_bins")).cloned();
    // An empty list of resolutions means no attention, which diffusers writes as null.
    let attention = match dd.get("attn_resolutions") {
        Some(Value::Array(list)) => (!list.is_empty()).then(|| json!(list)),
        Some(other) => return Err(dd.error("attn_resolutions", format!("is {other}, not a list"))),
        None => None,
    };
    Ok(json!({
        "_class_name": "AutoencoderKLLTX2Audio",
        "base_channels": dd.or("ch", 128),
        "output_channels": dd.or("out_ch", 2),
        "ch_mult": dd.or("ch_mult", json!([1, 2, 4])),
        "num_res_blocks": dd.or("num_res_blocks", 2),
        "attn_resolutions": attention,
        "in_channels": dd.or("in_channels", 2),
        "resolution": dd.or("resolution", 256),
        "latent_channels": dd.or("z_channels", 8),
        "norm_type": dd.or("norm_type", "pixel"),
        "causality_axis": dd.or("causality_axis", "height"),
        "dropout": 0.0,
        "mid_block_add_attention": dd.or("mid_block_add_attention", false),
        "sample_rate": params.or("sampling_rate", 16000),
        "mel_hop_length": stft.or("hop_length", 160),
        "is_causal": stft.or("causal", true),
        "mel_bins": mel_bins.unwrap_or(json!(64)),
        "double_z": dd.or("double_z", true),
    }))
}

/// Derives the configuration of one generator: LTX-2.0's vocoder, or one of the two stages of LTX-2.3's vocoder.
fn generator(s: Section, channels: usize, last: Value) -> Result<Map<String, Value>, WeightsError> {
    let antialias = s.choice("resblock", ["1", "AMP1"])? == 1;
    let act = if antialias { "snakebeta" } else { "leaky_relu" };
    s.require("stereo", json!(true))?;
    if antialias {
        s.require("activation", json!("snakebeta"))?;
    }
    let values = json!({
        "in_channels": channels,
        "hidden_channels": s.or("upsample_initial_channel", 1024),
        "out_channels": 2,
        "upsample_kernel_sizes": s.or("upsample_kernel_sizes", json!([16, 15, 8, 4, 4])),
        "upsample_factors": s.or("upsample_rates", json!([6, 5, 2, 2, 2])),
        "resnet_kernel_sizes": s.or("resblock_kernel_sizes", json!([3, 7, 11])),
        "resnet_dilations": s.or("resblock_dilation_sizes", json!([[1, 3, 5], [1, 3, 5], [1, 3, 5]])),
        "act_fn": act,
        "leaky_relu_negative_slope": 0.1,
        "antialias": antialias,
        "antialias_ratio": 2,
        "antialias_kernel_size": 12,
        "final_act_fn": last,
        "final_bias": s.or("use_bias_at_final", true),
    });
    Ok(object(values))
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => unreachable!("{other} is written as an object here"),
    }
}

fn vocoder(s: Section, tensors: &Checkpoint) -> Result<Value, WeightsError> {
    let channels = |name: &str| {
        let shape = tensors.shape(name).and_then(|s| s.get(1).copied());
        shape.ok_or_else(|| WeightsError::MissingTensor { path: s.path.to_path_buf(), key: name.into() })
    };
    // The training code clamps wherever it does not apply tanh.
    let tanh = |s: Section| s.flag("use_tanh_at_final", true);
    let bwe = s.sub("bwe");
    if bwe.values.is_none() {
        let mut config = Map::from_iter([("_class_name".into(), json!("LTX2Vocoder"))]);
        config.extend(generator(s, channels("conv_in.weight")?, json!(if tanh(s)? { "tanh" } else { "clamp" }))?);
        config.insert("output_sampling_rate".into(), s.or("output_sampling_rate", 24000));
        return Ok(Value::Object(config));
    }
    let first = s.sub("vocoder");
    let mut config = Map::from_iter([("_class_name".into(), json!("LTX2VocoderWithBWE"))]);
    // Clamping between the stages is set by `vocoder.stage1_clamp`, not by the model's configuration.
    let between = if tanh(first)? { json!("tanh") } else { Value::Null };
    config.extend(generator(first, channels("vocoder.conv_in.weight")?, between)?);
    let second = generator(bwe, channels("bwe_generator.conv_in.weight")?, Value::Null)?;
    config.extend(second.into_iter().map(|(k, v)| (format!("bwe_{k}"), v)));
    for (key, from, default) in [
        ("filter_length", "n_fft", 512),
        ("hop_length", "hop_length", 80),
        ("window_length", "n_fft", 512),
        ("num_mel_channels", "num_mels", 64),
        ("input_sampling_rate", "input_sampling_rate", 16000),
        ("output_sampling_rate", "output_sampling_rate", 48000),
    ] {
        config.insert(key.into(), bwe.or(from, default));
    }
    Ok(Value::Object(config))
}

/// Derives the scheduler's configuration. Single files do not describe the schedule with diffusers' keys; distilled
/// models are recognized by their file name.
fn scheduler(path: &Path, s: Section) -> Value {
    let name = path.file_name().map_or(String::new(), |name| name.to_string_lossy().to_lowercase());
    let distilled = name.contains("distilled");
    json!({
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "base_shift": s.or("base_shift", 0.95),
        "max_shift": s.or("max_shift", 2.05),
        "base_image_seq_len": s.or("base_image_seq_len", 1024),
        "max_image_seq_len": s.or("max_image_seq_len", 4096),
        "num_train_timesteps": s.or("num_train_timesteps", 1000),
        "shift": s.or("shift", 1.0),
        "time_shift_type": s.or("time_shift_type", "exponential"),
        "use_dynamic_shifting": s.or("use_dynamic_shifting", !distilled),
        "shift_terminal": s.or("shift_terminal", if distilled { Value::Null } else { json!(0.1) }),
    })
}

/// Derives the configuration of a duration head from tensor shapes. The number of attention heads, which shapes do not
/// reveal, is left to the default.
fn duration_head(path: &Path, tensors: &Checkpoint) -> Result<Value, WeightsError> {
    let sizes = |key: &str| match tensors.shape(key) {
        Some(&[out, inner]) => Ok([out, inner]),
        _ => Err(WeightsError::MissingTensor { path: path.to_path_buf(), key: key.into() }),
    };
    let [width, video] = sizes("video_input_proj.weight")?;
    Ok(json!({
        "_class_name": "LTX2DurationHead",
        "video_cross_attention_dim": video,
        "audio_cross_attention_dim": sizes("audio_input_proj.weight")?[1],
        "pooler_hidden_dim": width,
        "num_queries": sizes("attention_pooler.query_tokens")?[0],
        "mlp_hidden_dim": sizes("mlp_hidden.weight")?[0],
    }))
}

/// Derives the configuration of an upsampler. Keys that the header lacks are derived from tensor names and shapes.
fn upsampler(path: &Path, config: &Value, tensors: &Checkpoint) -> Result<Value, WeightsError> {
    let missing = |key: &str| WeightsError::MissingTensor { path: path.to_path_buf(), key: key.into() };
    let shape = |key: &str| tensors.shape(key).ok_or_else(|| missing(key));
    let first = shape("initial_conv.weight")?;
    let [mid, inner, kernel @ ..] = first else { return Err(missing("initial_conv.weight")) };
    let number = |name: &str| name.strip_prefix("res_blocks.")?.split('.').next()?.parse::<usize>().ok();
    let blocks = tensors.names().filter_map(number).max().map_or(0, |last| last.saturating_add(1));
    let rational = tensors.contains("upsampler.conv.weight");
    let grown = shape(if rational { "upsampler.conv.weight" } else { "upsampler.0.weight" })?;
    let times = grown.first().map_or(0, |out| out.checked_div(*mid).unwrap_or(0));
    let or = |key: &str, known: Value| config.get(key).filter(|v| !v.is_null()).cloned().unwrap_or(known);
    let scale = match (config.get("spatial_scale"), rational.then_some(times)) {
        (Some(given), _) => given.clone(),
        (None, None | Some(4)) => json!(2.0),
        (None, Some(16)) => json!(4.0),
        (None, Some(_)) => {
            return Err(WeightsError::Config {
                path: path.to_path_buf(),
                key: "config.spatial_scale".into(),
                reason: format!(
                    "is missing in the header's metadata and cannot be derived from an upsampler that outputs {times} times the channels"
                ),
            });
        }
    };
    Ok(json!({
        "_class_name": "LTX2LatentUpsamplerModel",
        "in_channels": or("in_channels", json!(inner)),
        "mid_channels": or("mid_channels", json!(mid)),
        "num_blocks_per_stage": or("num_blocks_per_stage", json!(blocks)),
        "dims": or("dims", json!(kernel.len())),
        "spatial_upsample": or("spatial_upsample", json!(rational || matches!(times, 4 | 8))),
        "temporal_upsample": or("temporal_upsample", json!(!rational && grown.len() == 5)),
        "rational_spatial_scale": scale,
        "use_rational_resampler": or("rational_resampler", json!(rational)),
    }))
}
