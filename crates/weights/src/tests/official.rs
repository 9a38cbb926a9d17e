//! Tests of loading Lightricks' single files.

use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::*;
use super::{diffusers_folder, fails, open, open_with, put, safetensors, tokenizer};

/// Returns `config` in the header of a small LTX-2.0 file, with the keys that differ from the defaults.
pub(super) fn official_config() -> Value {
    json!({
        "transformer": {
            "num_layers": 2, "apply_gated_attention": false, "positional_embedding_max_pos": [20, 2048, 2048],
            "frequencies_precision": "float64", "rope_type": "split", "caption_channels": 8,
        },
        "vae": {
            "latent_channels": 128,
            "encoder_blocks": [
                ["res_x", {"num_layers": 4}], ["compress_space_res", {"multiplier": 2}],
                ["res_x", {"num_layers": 6}], ["compress_time_res", {"multiplier": 2}],
                ["res_x", {"num_layers": 6}], ["compress_all_res", {"multiplier": 2}],
                ["res_x", {"num_layers": 2}], ["compress_all_res", {"multiplier": 2}],
                ["res_x", {"num_layers": 2}],
            ],
            "decoder_blocks": [
                ["res_x", {"num_layers": 5, "inject_noise": false}],
                ["compress_all", {"residual": true, "multiplier": 2}],
                ["res_x", {"num_layers": 5}], ["compress_all", {"residual": true, "multiplier": 2}],
                ["res_x", {"num_layers": 5}], ["compress_all", {"residual": true, "multiplier": 2}],
                ["res_x", {"num_layers": 5}],
            ],
        },
        "audio_vae": {"model": {"params": {"ddconfig": {"mel_bins": 64, "attn_resolutions": []}}}},
        "vocoder": {"stereo": true},
    })
}

pub(super) const SINGLE: [(&str, &str, &[usize]); 7] = [
    ("model.diffusion_model.patchify_proj.weight", "BF16", &[4, 2]),
    ("model.diffusion_model.video_embeddings_connector.learnable_registers", "BF16", &[128, 8]),
    ("model.diffusion_model.audio_embeddings_connector.learnable_registers", "BF16", &[64, 8]),
    ("text_embedding_projection.aggregate_embed.weight", "BF16", &[8, 24]),
    ("vae.per_channel_statistics.mean-of-means", "BF16", &[128]),
    ("vae.per_channel_statistics.channel", "BF16", &[128]),
    ("vocoder.conv_pre.weight", "BF16", &[16, 128, 7]),
];

pub(super) fn file_of(
    dir: &Path,
    name: &str,
    tensors: &[(&str, &str, &[usize])],
    config: &Value,
) -> Result<ModelSource, WeightsError> {
    open(&put(dir.join(name), safetensors(tensors, json!({"config": config.to_string()}))))
}

fn single_file(dir: &Path, name: &str, config: &Value) -> Result<ModelSource, WeightsError> {
    file_of(dir, name, &SINGLE, config)
}

#[test]
fn single_file_is_converted_to_diffusers_layout() {
    let dir = TempDir::new().expect("dir");
    let source = single_file(dir.path(), "ltx-2-19b-dev.safetensors", &official_config()).expect("opens");
    assert_eq!(source.version().expect("known"), Version::V2_0);
    assert!(source.checkpoint(Component::Transformer).expect("there").contains("proj_in.weight"));
    source.refuse_unread().expect("statistics of training are no error");
    let newer = [&SINGLE[..], &[("dream_head.proj.weight", "BF16", &[2])]].concat();
    let newer = file_of(dir.path(), "newer.safetensors", &newer, &official_config()).expect("opens");
    fails(newer.refuse_unread(), &["newer.safetensors", "`dream_head.proj.weight` is not read"]);
    let has = |component, key: &str, want: Value| {
        let config = source.config(component).expect("derived");
        assert_eq!(config[key], want, "{key}");
    };
    has(Component::Transformer, "num_layers", json!(2));
    has(Component::Transformer, "vae_scale_factors", json!([8, 32, 32]));
    has(Component::Transformer, "cross_attn_timestep_scale_multiplier", json!(1000));
    has(Component::Transformer, "rope_double_precision", json!(true));
    has(Component::Connectors, "text_proj_in_factor", json!(3));
    has(Component::Connectors, "audio_connector_num_learnable_registers", json!(64));
    has(Component::Vae, "block_out_channels", json!([256, 512, 1024, 2048]));
    has(Component::Vae, "layers_per_block", json!([4, 6, 6, 2, 2]));
    has(Component::Vae, "decoder_block_out_channels", json!([256, 512, 1024]));
    has(Component::Vae, "downsample_type", json!(["spatial", "temporal", "spatiotemporal", "spatiotemporal"]));
    has(Component::Vae, "upsample_residual", json!([true, true, true]));
    has(Component::Vae, "decoder_spatial_padding_mode", json!("reflect"));
    has(Component::Vocoder, "final_act_fn", json!("tanh"));
    has(Component::Vocoder, "in_channels", json!(128));
    has(Component::Scheduler, "use_dynamic_shifting", json!(true));
    fails(source.checkpoint(Component::AudioVae), &["contains no audio VAE", "`model.audio_vae`", "--audio-vae"]);
    fails(source.config(Component::TextEncoder), &["ltx-2-19b-dev", "`model.text_encoder`", "--text-encoder"]);
    fails(source.require([Component::Transformer, Component::TextEncoder]), &["contains no text encoder", "Gemma-3"]);
    fails(source.tokenizer(), &["--tokenizer"]);
    assert_eq!(source.fingerprint(Component::Transformer).expect("readable").len(), 64);
    let distilled = single_file(dir.path(), "ltx-2-19b-distilled.safetensors", &official_config()).expect("opens");
    assert_eq!(distilled.config(Component::Scheduler).expect("derived")["shift_terminal"], Value::Null);
}

#[test]
fn text_encoder_override_includes_tokenizer() {
    let dir = TempDir::new().expect("dir");
    let model =
        put(dir.path().join("m.safetensors"), safetensors(&SINGLE, json!({"config": official_config().to_string()})));
    let gemma = dir.path().join("gemma");
    put(gemma.join("config.json"), "{}");
    put(gemma.join("tokenizer.json"), "{}");
    put(gemma.join("model.safetensors"), safetensors(&[("model.norm.weight", "BF16", &[4])], Value::Null));
    let beside = |encoder: &Path| {
        let overrides = Overrides { text_encoder: encoder.to_str().map(String::from), ..Overrides::default() };
        open_with(&model, &overrides)
    };
    let source = beside(&gemma).expect("opens");
    source.require([Component::TextEncoder, Component::Tokenizer]).expect("there");
    assert_eq!(tokenizer(&source), gemma);
    let encoder = source.checkpoint(Component::TextEncoder).expect("there");
    assert!(encoder.contains("language_model.model.norm.weight"));
    let words = ["model.safetensors", "`gemma_config` is missing", "not those of Gemma 3", "google/gemma-3-12b-it"];
    fails(beside(&gemma.join("model.safetensors")), &words);

    let whole = dir.path().join("diffusers");
    diffusers_folder(&whole);
    let source = beside(&whole).expect("opens");
    assert_eq!(source.folder(Component::TextEncoder).expect("there"), whole.join("text_encoder"));
    assert_eq!(tokenizer(&source), whole.join("tokenizer"));
}

/// The header determines the configuration of an upsampler file; tensor shapes supply missing keys.
#[test]
fn upsampler_config_is_derived_from_header_and_shapes() {
    let dir = TempDir::new().expect("dir");
    let ends = [("initial_conv.weight", &[32, 4, 3, 3, 3][..]), ("res_blocks.1.conv1.weight", &[32, 32, 3, 3, 3])];
    let config = |name: &str, conv: (&str, &[usize]), header: Value| {
        let tensors: Vec<_> = ends.iter().chain([&conv]).map(|(name, shape)| (*name, "BF16", *shape)).collect();
        let header = if header.is_null() { header } else { json!({"config": header.to_string()}) };
        let file = put(dir.path().join(name), safetensors(&tensors, header));
        let overrides = Overrides { upsampler: file.to_str().map(String::from), ..Overrides::default() };
        let source = open_with(dir.path(), &overrides)?;
        assert!(source.has(Component::LatentUpsampler));
        source.config(Component::LatentUpsampler)
    };
    diffusers_folder(dir.path());
    let spatial = config("a.safetensors", ("upsampler.0.weight", &[128, 32, 3, 3]), Value::Null).expect("told");
    let want = json!({"_class_name": "LTX2LatentUpsamplerModel", "in_channels": 4, "mid_channels": 32,
        "num_blocks_per_stage": 2, "dims": 3, "spatial_upsample": true, "temporal_upsample": false,
        "rational_spatial_scale": 2.0, "use_rational_resampler": false});
    assert_eq!(spatial, want);
    let temporal = config("b.safetensors", ("upsampler.0.weight", &[64, 32, 3, 3, 3]), Value::Null).expect("told");
    assert_eq!([&temporal["spatial_upsample"], &temporal["temporal_upsample"]], [&json!(false), &json!(true)]);
    let both = config("c.safetensors", ("upsampler.0.weight", &[256, 32, 3, 3, 3]), Value::Null).expect("told");
    assert_eq!([&both["spatial_upsample"], &both["temporal_upsample"]], [&json!(true), &json!(true)]);
    let rational: (&str, &[usize]) = ("upsampler.conv.weight", &[288, 32, 3, 3]);
    let broken = config("d.safetensors", rational, json!({"spatial_scale": 1.5, "rational_resampler": true}));
    assert_eq!(broken.expect("told")["rational_spatial_scale"], json!(1.5));
    fails(config("e.safetensors", rational, Value::Null), &["e.safetensors", "config.spatial_scale", "9 times"]);
}

#[test]
fn unsupported_single_files_are_refused() {
    let dir = TempDir::new().expect("dir");
    let path = put(dir.path().join("bare.safetensors"), safetensors(&SINGLE, Value::Null));
    fails(open(&path), &["bare.safetensors", "`config`", "is missing"]);
    let with = |section: &str, key: &str, value: Value| {
        let mut config = official_config();
        config[section][key] = value;
        single_file(dir.path(), "x.safetensors", &config).expect("opens")
    };
    let source = with("transformer", "caption_proj_before_connector", json!(true));
    fails(source.version(), &["config.transformer.caption_projection_first_linear", "neither"]);
    let source = with("transformer", "qk_norm", json!("layer_norm"));
    fails(source.config(Component::Transformer), &["config.transformer.qk_norm", "layer_norm"]);
    let source = with("vae", "_class_name", json!("OtherVideoAutoencoder"));
    fails(source.config(Component::Vae), &["config.vae._class_name", "OtherVideoAutoencoder"]);
    let source = with("vae", "decoder_blocks", json!([["res_x", {"num_layers": 1}], ["attn", {}], ["res_x", 1]]));
    fails(source.config(Component::Vae), &["config.vae.decoder_blocks", "entry 1", "attn"]);
    for wrong in [json!("2"), json!(1)] {
        let source = with("vocoder", "resblock", wrong);
        fails(source.config(Component::Vocoder), &["config.vocoder.resblock", "only \"1\" and \"AMP1\""]);
    }
    // A value of the wrong type is an error instead of the default.
    let source = with("vocoder", "use_tanh_at_final", json!("false"));
    fails(source.config(Component::Vocoder), &["config.vocoder.use_tanh_at_final", "not true or false"]);
    let source = with("transformer", "frequencies_precision", json!("bfloat16"));
    fails(source.config(Component::Transformer), &["config.transformer.frequencies_precision", "bfloat16"]);
    let source = with("transformer", "cross_attention_adaln", json!(1));
    fails(source.config(Component::Transformer), &["config.transformer.cross_attention_adaln", "not true or false"]);
    for (block, said) in [
        (json!(["res_x", {"num_layers": 1, "inject_noise": "yes"}]), "inject_noise \"yes\", not true or false"),
        (json!(["res_x", {"num_layers": 1, "zoom": 3}]), "an unknown parameter `zoom`"),
        (json!(["res_x", {"num_layers": 1}, 5]), "more than a name and parameters"),
        (json!(["res_x", {"num_layers": 1, "multiplier": 2.0}]), "multiplier 2.0, not a whole number"),
    ] {
        let source = with("vae", "decoder_blocks", json!([block]));
        fails(source.config(Component::Vae), &["config.vae.decoder_blocks", "entry 0 has ", said]);
    }
    let source = with("transformer", "connector_positional_embedding_max_pos", json!(4096));
    fails(source.config(Component::Connectors), &["config.transformer.connector_positional_embedding_max_pos"]);
    let source = with("transformer", "attention_head_dim", json!("64"));
    fails(source.config(Component::Connectors), &["config.transformer.attention_head_dim", "not a whole number"]);
}

#[test]
fn ltx_2_3_vae_and_vocoder_configs_are_derived() {
    let dir = TempDir::new().expect("dir");
    let mut config = official_config();
    for (key, value) in [
        ("caption_proj_before_connector", true),
        ("caption_projection_first_linear", false),
        ("caption_projection_second_linear", false),
        ("caption_proj_input_norm", false),
        ("cross_attention_adaln", true),
        ("apply_gated_attention", true),
    ] {
        config["transformer"][key] = json!(value);
    }
    config["vae"]["spatial_padding_mode"] = json!("zeros");
    config["vae"]["encoder_blocks"][7] = json!(["compress_all_res", {"multiplier": 1}]);
    config["vae"]["decoder_blocks"] = json!([
        ["res_x", {"num_layers": 4}], ["compress_space", {"multiplier": 2}], ["res_x", {"num_layers": 6}],
        ["compress_time", {"multiplier": 2}], ["res_x", {"num_layers": 4}], ["compress_all", {"multiplier": 1}],
        ["res_x", {"num_layers": 2}], ["compress_all", {"multiplier": 2}], ["res_x", {"num_layers": 2}],
    ]);
    let part = |factors: Value| {
        json!({"resblock": "AMP1", "stereo": true, "activation": "snakebeta",
        "use_tanh_at_final": false, "use_bias_at_final": false, "upsample_rates": factors})
    };
    let mut bwe = part(json!([6, 5, 2, 2, 2]));
    for (key, value) in [("n_fft", 512), ("hop_length", 80), ("num_mels", 64), ("output_sampling_rate", 48000)] {
        bwe[key] = json!(value);
    }
    config["vocoder"] = json!({"vocoder": part(json!([5, 2, 2, 2, 2, 2])), "bwe": bwe});
    let tensors: [(&str, &str, &[usize]); 3] = [
        ("model.diffusion_model.patchify_proj.weight", "BF16", &[4, 2]),
        ("vocoder.vocoder.conv_pre.weight", "BF16", &[16, 128, 7]),
        ("vocoder.bwe_generator.conv_pre.weight", "BF16", &[16, 128, 7]),
    ];
    let source = file_of(dir.path(), "x.safetensors", &tensors, &config).expect("opens");
    assert_eq!(source.version().expect("known"), Version::V2_3);
    let vocoder = source.config(Component::Vocoder).expect("derived");
    assert_eq!((&vocoder["final_act_fn"], &vocoder["bwe_final_act_fn"]), (&Value::Null, &Value::Null));
    assert_eq!(vocoder["_class_name"], "LTX2VocoderWithBWE");
    assert_eq!((&vocoder["window_length"], &vocoder["hop_length"]), (&json!(512), &json!(80)));
    // The file above lacks the VAE's tensors. The next file has the VAE configuration of LTX-2.3 and otherwise that of
    // LTX-2.0.
    fails(source.config(Component::Vae), &["no video VAE"]);
    for section in ["transformer", "vocoder"] {
        config[section] = official_config()[section].clone();
    }
    let vae =
        single_file(dir.path(), "y.safetensors", &config).expect("opens").config(Component::Vae).expect("derived");
    assert_eq!(vae["block_out_channels"], json!([256, 512, 1024, 1024]));
    assert_eq!(vae["decoder_block_out_channels"], json!([256, 512, 512, 1024]));
    assert_eq!(vae["decoder_layers_per_block"], json!([4, 6, 4, 2, 2]));
    assert_eq!(vae["upsample_type"], json!(["spatiotemporal", "spatiotemporal", "temporal", "spatial"]));
    assert_eq!(vae["upsample_factor"], json!([2, 2, 1, 2]));
    assert_eq!(vae["decoder_spatial_padding_mode"], "zeros");
    assert_eq!((&vae["spatial_compression_ratio"], &vae["temporal_compression_ratio"]), (&json!(32), &json!(8)));
}
