//! Tests of LTX-2.5 models in each supported layout, and of components that do not match them.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::*;
use super::official::official_config;
use super::{diffusers_folder, fails, open, open_with, put, safetensors};

type Tensors<'a> = Vec<(&'a str, &'a str, &'a [usize])>;

/// Returns the tensors of the transformer and the connectors, as in the transformer's file.
fn transformer() -> Tensors<'static> {
    vec![
        ("model.diffusion_model.patchify_proj.weight", "BF16", &[4, 2]),
        ("model.diffusion_model.audio_patchify_proj.weight", "BF16", &[4, 2]),
        ("model.diffusion_model.keyframes_abs_pos_embedding", "BF16", &[1, 4]),
        ("model.diffusion_model.prompt_adaln_single.linear.weight", "BF16", &[8, 4]),
        ("model.diffusion_model.transformer_blocks.0.ff.net.0.proj.weight", "BF16", &[16, 4]),
        ("model.diffusion_model.video_embeddings_connector.learnable_registers", "BF16", &[128, 8]),
        ("model.diffusion_model.audio_embeddings_connector.learnable_registers", "BF16", &[128, 8]),
    ]
}

const PROJECTIONS: [(&str, &str, &[usize]); 4] = [
    ("text_embedding_projection.video_aggregate_embed.weight", "BF16", &[8, 392]),
    ("text_embedding_projection.video_aggregate_embed.bias", "BF16", &[8]),
    ("text_embedding_projection.audio_aggregate_embed.weight", "BF16", &[8, 392]),
    ("text_embedding_projection.audio_aggregate_embed.bias", "BF16", &[8]),
];

/// Returns the tensors of the text encoder's file: weights, unused modules, text projections and the tokenizer's files.
fn text_encoder() -> Tensors<'static> {
    let own: Tensors = vec![
        ("model.embed_tokens.weight", "BF16", &[16, 8]),
        ("model.layers.0.layer_scalar", "BF16", &[1]),
        ("vision_model.patch.weight", "BF16", &[4]),
        ("multi_modal_projector.weight", "BF16", &[4]),
        ("audio_projector.weight", "BF16", &[4]),
        ("tokenizer_json", "U8", &[2]),
        ("hf_asset__tokenizer_config.json", "I8", &[2]),
        ("hf_asset__chat_template.jinja", "U8", &[2]),
    ];
    [own, PROJECTIONS.to_vec()].concat()
}

/// Returns `config` in the header of the transformer's file.
fn config() -> Value {
    let keys = json!({
        "caption_proj_before_connector": true, "caption_projection_first_linear": false,
        "caption_projection_second_linear": false, "caption_proj_input_norm": false, "cross_attention_adaln": true,
        "apply_gated_attention": true, "ff_bias": false, "use_keyframes_abs_pos_embedding": true,
        "text_encoder_norm_type": "PER_TOKEN_RMS", "causal_temporal_positioning": true,
    });
    let mut config = json!({"transformer": official_config()["transformer"].clone()});
    config["transformer"].as_object_mut().expect("an object").extend(keys.as_object().expect("an object").clone());
    config
}

fn header(config: &Value) -> Value {
    let source = json!({"ltx_version": "2.5.0", "gemma_version": "gemma4-12b-ltx-v1"});
    json!({"config": config.to_string(), "model_version": "2.5.0", "gemma_source_checkpoint": source.to_string()})
}

/// Returns the header of the text encoder's file.
fn gemma(version: Option<&str>) -> Value {
    let config = json!({"model_type": "gemma4_unified", "gemma_version": version, "text_config": {"hidden_size": 8}});
    json!({"format": "pt", "gemma_config": config.to_string()})
}

const OWN: Option<&str> = Some("gemma4-12b-ltx-v1");

/// Writes and opens a LoRA with this header metadata.
fn lora(folder: &Path, version: Value) -> LoraFile {
    let pair: [(&str, &str, &[usize]); 2] = [
        ("transformer.proj_in.lora_A.weight", "BF16", &[1, 2]),
        ("transformer.proj_in.lora_B.weight", "BF16", &[4, 1]),
    ];
    let file = put(folder.join("lora.safetensors"), safetensors(&pair, version));
    LoraFile::open(file.to_str().expect("utf-8")).expect("a LoRA")
}

/// Writes a repository of split files; returns the transformer's file.
pub(super) fn split(root: &Path) -> PathBuf {
    let write = |file: &str, tensors: &[(&str, &str, &[usize])], header: Value| {
        put(root.join(file), safetensors(tensors, header))
    };
    let part = |section: &str, values: Value| header(&json!({section: values}));
    let (vae, sound) = (&official_config()["vae"], &official_config()["audio_vae"]);
    write("text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors", &text_encoder(), gemma(OWN));
    let mut quantized = text_encoder();
    quantized[0].1 = "F8_E4M3";
    write("text_encoders/gemma4-12b-with-proj-ltx-2.5-comfy-int8-convrot.safetensors", &quantized, gemma(OWN));
    let decoder = json!({"_class_name": "CausalDiffusionVAE", "model_output_type": "x0", "decoder": {}, "encoder": {}});
    let bare: [(&str, &str, &[usize]); 3] = [
        ("encoder.conv_in.conv.weight", "BF16", &[4]),
        ("decoder.conv_in_x_t.weight", "BF16", &[4]),
        ("per_channel_statistics.mean-of-means", "BF16", &[128]),
    ];
    write("vae/ltx-2.5-video-vae-bf16.safetensors", &bare, part("vae", decoder));
    let conv: [(&str, &str, &[usize]); 3] = [
        ("encoder.down_blocks.8.res_blocks.0.conv1.conv.weight", "BF16", &[4]),
        ("decoder.up_blocks.0.res_blocks.0.conv1.conv.weight", "BF16", &[4]),
        ("per_channel_statistics.std-of-means", "BF16", &[128]),
    ];
    write("vae/ltx-2.5-video-vae-conv-bf16.safetensors", &conv, part("vae", vae.clone()));
    let audio: [(&str, &str, &[usize]); 3] = [
        ("audio_vae.decoder.x.weight", "BF16", &[4]),
        ("vocoder.vocoder.conv_pre.weight", "BF16", &[16, 128, 7]),
        ("vocoder.bwe_generator.conv_pre.weight", "BF16", &[16, 128, 7]),
    ];
    let vocoder = json!({"audio_vae": sound, "vocoder": {"vocoder": {"resblock": "AMP1", "stereo": true,
        "activation": "snakebeta"}, "bwe": {}}});
    write("vae/ltx-2.5-audio-vae-bf16.safetensors", &audio, header(&vocoder));
    let head: [(&str, &str, &[usize]); 5] = [
        ("duration_head.video_input_proj.weight", "BF16", &[4, 2]),
        ("duration_head.audio_input_proj.weight", "BF16", &[4, 2]),
        ("duration_head.attention_pooler.query_tokens", "BF16", &[1, 4]),
        ("duration_head.mlp_hidden.weight", "BF16", &[4, 4]),
        ("duration_head.mlp_out.weight", "BF16", &[1, 4]),
    ];
    write("model_patches/ltx-2.5-duration-head-bf16.safetensors", &head, json!({"model_version": "2.5.0"}));
    let up = |grown: &'static [usize]| -> Tensors<'static> {
        vec![("initial_conv.weight", "BF16", &[32, 4, 3, 3, 3]), ("upsampler.0.weight", "BF16", grown)]
    };
    let folder = "latent_upscale_models/ltx-2.5-latent";
    write(&format!("{folder}-spatial-upscaler-x2-bf16-1.0.safetensors"), &up(&[128, 32, 3, 3]), Value::Null);
    write(&format!("{folder}-temporal-upscaler-x2-bf16-1.0.safetensors"), &up(&[64, 32, 3, 3, 3]), Value::Null);
    write("diffusion_models/ltx-2.5-22b-dev-transformer-bf16.safetensors", &transformer(), header(&config()))
}

fn with_text_encoder(model: &Path, encoder: &Path) -> Result<ModelSource, WeightsError> {
    open_with(model, &Overrides { text_encoder: encoder.to_str().map(String::from), ..Overrides::default() })
}

/// Writes those files of a diffusers folder that identify LTX-2.5.
fn folder(root: &Path) {
    diffusers_folder(root);
    let transformer = json!({"use_prompt_embeddings": false, "cross_attn_mod": true, "ff_bias": false,
        "use_keyframes_abs_pos_embedding": true});
    put(root.join("transformer/config.json"), transformer.to_string());
    put(root.join("text_encoder/config.json"), json!({"model_type": "gemma4_unified"}).to_string());
    put(root.join("connectors/config.json"), json!({"per_modality_projections": true}).to_string());
    put(
        root.join("diffusion_decoder/config.json"),
        json!({"_class_name": "LTX2VideoDiffusionDecoderModel"}).to_string(),
    );
    put(root.join("duration_head/config.json"), json!({"_class_name": "LTX2DurationHead"}).to_string());
}

#[test]
fn either_config_marker_identifies_ltx_2_5() {
    let version = |keys: Value| {
        let mut config = json!({"use_prompt_embeddings": false, "cross_attn_mod": true});
        config.as_object_mut().expect("an object").extend(keys.as_object().expect("an object").clone());
        Version::of_transformer(&config)
    };
    assert_eq!(version(json!({})), Some(Version::V2_3));
    assert_eq!(version(json!({"ff_bias": true, "use_keyframes_abs_pos_embedding": false})), Some(Version::V2_3));
    assert_eq!(version(json!({"ff_bias": false})), Some(Version::V2_5));
    assert_eq!(version(json!({"use_keyframes_abs_pos_embedding": true})), Some(Version::V2_5));
    assert_eq!(version(json!({"cross_attn_mod": false, "ff_bias": false})), None);
}

#[test]
fn diffusers_folder_is_recognized_as_ltx_2_5() {
    let dir = TempDir::new().expect("dir");
    folder(dir.path());
    let source = open(dir.path()).expect("opens");
    assert_eq!(source.version().expect("known"), Version::V2_5);
    for part in [Component::DiffusionDecoder, Component::DurationHead] {
        assert!(source.has(part), "{part}");
    }
    assert!(!source.has(Component::TemporalUpsampler));
    // The keyframe embedding or the missing biases of the video stream identify the tensors of LTX-2.5.
    let tensors = |rest: &[(&str, &str, &[usize])]| {
        let prompt = ("prompt_adaln.linear.weight", "BF16", &[8, 4][..]);
        let file = dir.path().join("transformer/diffusion_pytorch_model.safetensors");
        put(file, safetensors(&[&[prompt], rest].concat(), Value::Null));
        open(dir.path()).expect("opens").checkpoint(Component::Transformer)
    };
    fails(tensors(&[]), &["`prompt_adaln.linear.weight` of LTX-2.3", "config.json describes LTX-2.5"]);
    tensors(&[("keyframes_abs_pos_embedding", "BF16", &[1, 4])]).expect("the marker");
    let ff = [
        ("transformer_blocks.0.ff.net.0.proj.weight", "BF16", &[4][..]),
        ("transformer_blocks.0.audio_ff.net.0.proj.bias", "BF16", &[4]),
    ];
    tensors(&ff).expect("biases of sound alone");
    put(
        dir.path().join("transformer/config.json"),
        json!({"use_prompt_embeddings": false, "cross_attn_mod": true}).to_string(),
    );
    put(dir.path().join("text_encoder/config.json"), json!({"model_type": "gemma3"}).to_string());
    fails(tensors(&ff), &["net.0.proj.weight without a bias` of LTX-2.5", "config.json describes LTX-2.3"]);
}

#[test]
fn split_files_open_as_one_model() {
    let dir = TempDir::new().expect("dir");
    let file = split(dir.path());
    let source = open(&file).expect("opens");
    assert_eq!(source.version().expect("known"), Version::V2_5);
    source.refuse_unread().expect("all of it is known");
    for part in Component::ALL {
        assert!(source.has(part), "{part}");
    }
    let config = source.config(Component::Transformer).expect("derived");
    assert_eq!([&config["ff_bias"], &config["audio_ff_bias"]], [&json!(false), &json!(true)]);
    assert_eq!(config["use_keyframes_abs_pos_embedding"], json!(true));
    // Connector blocks and text projections come from different files.
    let connectors = source.checkpoint(Component::Connectors).expect("joined");
    assert!(
        connectors.contains("video_connector.learnable_registers") && connectors.contains("video_text_proj_in.bias")
    );
    assert_eq!(connectors.files().count(), 2);
    let config = source.config(Component::Connectors).expect("derived");
    assert_eq!([&config["per_modality_projections"], &config["proj_bias"]], [&json!(true); 2]);
    assert_eq!(config["text_proj_in_factor"], json!(49));
    let encoder = source.checkpoint(Component::TextEncoder).expect("there");
    let names: Vec<&str> = encoder.names().collect();
    assert_eq!(names, ["language_model.model.embed_tokens.weight", "language_model.model.layers.0.layer_scalar"]);
    assert_eq!(source.config(Component::TextEncoder).expect("in the header")["model_type"], json!("gemma4_unified"));
    match source.tokenizer().expect("packed") {
        TokenizerFiles::Packed { tokenizer, config, .. } => {
            assert_eq!((tokenizer.size(), config.map(|c| c.size())), (2, Some(2)));
        }
        files => panic!("{files:?}"),
    }
    // The convolutional VAE has its own decoder; the other file contains the diffusion decoder.
    let has = |part: Component, name: &str| source.checkpoint(part).expect("there").contains(name);
    assert!(has(Component::Vae, "decoder.mid_block.resnets.0.conv1.conv.weight"));
    assert!(has(Component::Vae, "encoder.mid_block.resnets.0.conv1.conv.weight") && has(Component::Vae, "latents_std"));
    assert!(has(Component::DiffusionDecoder, "decoder.conv_in_x_t.weight"));
    assert!(has(Component::Vocoder, "vocoder.conv_in.weight") && has(Component::DurationHead, "mlp_out.weight"));
    let temporal = source.config(Component::TemporalUpsampler).expect("told");
    assert_eq!([&temporal["spatial_upsample"], &temporal["temporal_upsample"]], [&json!(false), &json!(true)]);
    assert_eq!(source.fingerprint(Component::TemporalUpsampler).expect("readable").len(), 64);

    // The repository itself can be opened if it contains a single transformer.
    assert_eq!(open(dir.path()).expect("one transformer").path(), file);
}

#[test]
fn error_for_transformer_alone_names_the_missing_files() {
    let dir = TempDir::new().expect("dir");
    let file = split(dir.path());
    let elsewhere = TempDir::new().expect("dir");
    let alone = elsewhere.path().join("alone.safetensors");
    // Keys without a prefix, as other programs save them.
    let bare: Tensors = transformer()
        .into_iter()
        .map(|(key, dtype, shape)| (key.rsplit_once("model.").expect("prefixed").1, dtype, shape))
        .collect();
    put(alone.clone(), safetensors(&bare, header(&config())));
    let source = open(&alone).expect("opens");
    assert_eq!(source.version().expect("known"), Version::V2_5);
    assert!(source.checkpoint(Component::Transformer).expect("there").contains("proj_in.weight"));
    let cure = ["alone.safetensors", "`text_embedding_projection`", "gemma4-12b-with-proj-ltx-2.5-bf16.safetensors"];
    fails(source.checkpoint(Component::Connectors), &cure);
    fails(source.require([Component::TextEncoder]), &["contains no text encoder", "--text-encoder"]);
    let encoder = dir.path().join("text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors");
    let source = with_text_encoder(&alone, &encoder).expect("opens");
    assert!(source.checkpoint(Component::Connectors).expect("joined").contains("audio_text_proj_in.weight"));
    // A text encoder file is recognized by its header.
    fails(with_text_encoder(&alone, &file), &["dev-transformer-bf16.safetensors", "contains no text encoder"]);
    let extra = [text_encoder(), vec![("dream_head.weight", "BF16", &[1][..])]].concat();
    let extra = put(dir.path().join("extra.safetensors"), safetensors(&extra, gemma(OWN)));
    let source = with_text_encoder(&alone, &extra).expect("opens");
    fails(source.refuse_unread(), &["extra.safetensors", "`dream_head.weight` is not read"]);
}

#[test]
fn single_file_with_all_components_opens() {
    let dir = TempDir::new().expect("dir");
    let rest: Tensors = vec![
        ("vae.encoder.conv_in.conv.weight", "BF16", &[4]),
        ("vae.decoder.conv_in_x_t.weight", "BF16", &[4]),
        ("vae.per_channel_statistics.mean-of-means", "BF16", &[128]),
        ("duration_head.mlp_out.weight", "BF16", &[1, 4]),
    ];
    let mut config = config();
    config["vae"] = json!({"_class_name": "CausalDiffusionVAE"});
    let file = dir.path().join("ltx-2.5-22b-pt-bf16.safetensors");
    put(file.clone(), safetensors(&[transformer(), PROJECTIONS.to_vec(), rest].concat(), header(&config)));
    let source = open(&file).expect("opens");
    assert_eq!(source.version().expect("known"), Version::V2_5);
    source.refuse_unread().expect("all of it is known");
    assert_eq!(source.config(Component::Transformer).expect("derived")["vae_scale_factors"], json!([8, 32, 32]));
    assert_eq!(source.config(Component::Connectors).expect("derived")["text_proj_in_factor"], json!(49));
    assert!(source.has(Component::DiffusionDecoder) && source.has(Component::DurationHead));
    // A Gemma folder whose configuration states that the text encoder was trained for this model.
    let encoder = dir.path().join("ltx-2.5-22b-gemma4-12b");
    put(encoder.join("config.json"), json!({"model_type": "gemma4_unified", "gemma_version": OWN}).to_string());
    with_text_encoder(&file, &encoder).expect("goes with it");
}

#[test]
fn mismatched_text_encoder_is_refused() {
    let dir = TempDir::new().expect("dir");
    folder(&dir.path().join("model"));
    let (model, file) = (dir.path().join("model"), split(&dir.path().join("files")));
    let encoder = dir.path().join("encoder");
    let give = "use LTX-2.5's own text encoder, text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors";
    for (config, said) in [
        (json!({"model_type": "gemma3"}), "`model_type` = gemma3 is the text encoder of LTX-2.0 and LTX-2.3"),
        (json!({"model_type": "gemma4_unified"}), "`gemma_version` is missing, as in a stock Gemma 4"),
        (
            json!({"model_type": "gemma4_unified", "gemma_version": "v9"}),
            "`gemma_version` is \"v9\", not gemma4-12b-ltx-v1",
        ),
        (json!({"model_type": "gemma4"}), "`model_type` = gemma4 is a Gemma 4 of another size"),
        (json!({"model_type": "t5"}), "`model_type` = t5 is not Gemma 4, the text encoder of LTX-2.5"),
    ] {
        put(encoder.join("config.json"), config.to_string());
        for (model, place) in [(&model, "transformer/config.json"), (&file, "dev-transformer-bf16.safetensors")] {
            let words = ["encoder/config.json", said, place, "is the transformer of LTX-2.5", give, "--text-encoder"];
            fails(with_text_encoder(model, &encoder), &words);
        }
    }
    let stock = put(dir.path().join("stock.safetensors"), safetensors(&text_encoder(), gemma(None)));
    fails(with_text_encoder(&file, &stock), &["stock.safetensors", "`gemma_version` is missing", give]);
    put(model.join("text_encoder/config.json"), json!({"model_type": "gemma3"}).to_string());
    fails(open(&model), &["text_encoder/config.json", "gemma3 is the text encoder of LTX-2.0 and LTX-2.3", give]);

    // LTX-2.5's text encoder with an older model.
    let older = dir.path().join("older");
    diffusers_folder(&older);
    put(encoder.join("config.json"), json!({"model_type": "gemma4_unified", "gemma_version": OWN}).to_string());
    let words = ["gemma4_unified is the text encoder of LTX-2.5", "is the transformer of LTX-2.0", "use Gemma-3-12B"];
    fails(with_text_encoder(&older, &encoder), &words);
    put(encoder.join("config.json"), json!({"model_type": "llama"}).to_string());
    let words = [
        "`model_type` = llama is not Gemma 3, the text encoder of LTX-2.0 and LTX-2.3",
        "google/gemma-3-12b-it",
        "gemma_3_12B_it.safetensors",
    ];
    fails(with_text_encoder(&older, &encoder), &words);
}

#[test]
fn connectors_and_loras_of_other_model_versions_are_refused() {
    let dir = TempDir::new().expect("dir");
    let (model, older) = (dir.path().join("model"), dir.path().join("older"));
    folder(&model);
    folder(&older);
    put(
        older.join("transformer/config.json"),
        json!({"use_prompt_embeddings": false, "cross_attn_mod": true}).to_string(),
    );
    put(older.join("text_encoder/config.json"), json!({"model_type": "gemma3"}).to_string());
    let connectors = |model: &Path, version: Value| {
        let file = model.join("connectors/diffusion_pytorch_model.safetensors");
        put(file, safetensors(&[("video_text_proj_in.weight", "BF16", &[8, 8])], version));
        open(model).expect("opens").checkpoint(Component::Connectors)
    };
    let said = |version: &str| json!({"model_version": version});
    let words = |other: &str, own: &str| {
        let (holds, is) = (format!("holds connectors of LTX-{other}"), format!("is the transformer of LTX-{own}"));
        [
            "connectors/diffusion_pytorch_model.safetensors".into(),
            holds,
            is,
            "use the transformer and connectors".into(),
        ]
    };
    let refused = |model: &Path, version: &str, words: [String; 4]| {
        fails(connectors(model, said(version)), &words.each_ref().map(String::as_str));
    };
    refused(&model, "2.3.0", words("2.3", "2.5"));
    refused(&older, "2.5.0", words("2.5", "2.3"));
    for (model, header) in [(&model, said("2.5.0")), (&model, Value::Null), (&older, said("2.3")), (&older, said("v"))]
    {
        connectors(model, header).expect("goes with it");
    }
    // A text encoder file with the text projections of an older model.
    let mut header = gemma(OWN);
    header["model_version"] = json!("2.3.0");
    let encoder = put(dir.path().join("mixed.safetensors"), safetensors(&text_encoder(), header));
    let source = with_text_encoder(&split(&dir.path().join("files")), &encoder).expect("opens");
    fails(source.checkpoint(Component::Connectors), &["mixed.safetensors", "holds connectors of LTX-2.3"]);

    let lora = |version| lora(dir.path(), version);
    let marker = [("keyframes_abs_pos_embedding", "BF16", &[1, 4][..]), ("proj_in.weight", "BF16", &[4, 2])];
    put(model.join("transformer/diffusion_pytorch_model.safetensors"), safetensors(&marker, Value::Null));
    let (model, older) = (open(&model).expect("opens"), open(&older).expect("opens"));
    let is =
        ["lora.safetensors", "is a LoRA of LTX-2.3", "is the transformer of LTX-2.5", "trained on this model version"];
    fails(lora(said("2.3.0")).check(&model), &is);
    fails(lora(said("2.5.0")).check(&older), &["is a LoRA of LTX-2.5", "is the transformer of LTX-2.3"]);
    for (model, header) in [(&model, said("2.5.0")), (&model, Value::Null), (&older, said("2.3.0"))] {
        lora(header).check(model).expect("goes with it");
    }
}

/// Each warning contains the file and the missing key. The reference implementations load such files without a warning.
#[test]
fn files_without_version_fields_cause_warnings() {
    let dir = TempDir::new().expect("dir");
    let model = dir.path().join("model");
    folder(&model);
    let connectors = |version: Value| {
        let file = model.join("connectors/diffusion_pytorch_model.safetensors");
        put(file, safetensors(&[("video_text_proj_in.weight", "BF16", &[8, 8])], version));
    };
    connectors(Value::Null);
    let marker = [("keyframes_abs_pos_embedding", "BF16", &[1, 4][..]), ("proj_in.weight", "BF16", &[4, 2])];
    put(model.join("transformer/diffusion_pytorch_model.safetensors"), safetensors(&marker, Value::Null));
    let lines = || open(&model).expect("opens").unverified().expect("readable");
    let said = lines();
    let has = |line: &str, words: [&str; 3]| assert!(words.iter().all(|word| line.contains(word)), "{line}");
    assert_eq!(said.len(), 2, "{said:?}");
    has(&said[0], ["text_encoder/config.json: a text encoder without `gemma_version`", "cannot be verified", "noise"]);
    has(&said[1], ["model.safetensors: connectors without `model_version`", "cannot be verified", "noise"]);
    connectors(json!({"model_version": "2.5.0"}));
    assert_eq!(lines(), said[..1]);
    let own = json!({"model_type": "gemma4_unified", "gemma_version": OWN});
    put(model.join("text_encoder/config.json"), own.to_string());
    assert_eq!(lines(), [""; 0]);
    // Split files contain all version fields.
    let whole = open(&split(&dir.path().join("files"))).expect("opens");
    assert_eq!(whole.unverified().expect("readable"), [""; 0]);

    let lora = |version| lora(dir.path(), version);
    let source = open(&model).expect("opens");
    let line = lora(Value::Null).unverified(&source).expect("a warning");
    has(&line, ["lora.safetensors: a LoRA without `model_version`", "cannot be verified as LTX-2.5's", "noise"]);
    assert_eq!(lora(json!({"model_version": "2.5.0"})).unverified(&source), None);
    // Older models have no version fields to verify.
    let keys = json!({"use_prompt_embeddings": false, "cross_attn_mod": true});
    put(model.join("transformer/config.json"), keys.to_string());
    put(model.join("text_encoder/config.json"), json!({"model_type": "gemma3"}).to_string());
    let older = open(&model).expect("opens");
    assert_eq!((older.unverified().expect("readable"), lora(Value::Null).unverified(&older)), (Vec::new(), None));
}

#[test]
fn quantized_weights_without_a_stated_format_are_refused() {
    let dir = TempDir::new().expect("dir");
    let words = |key: &str, dtype: &str| format!("`{key}` is {dtype}, without a `comfy_quant` tensor");
    let model = |more: (&'static str, &'static str, &'static [usize])| {
        let file = dir.path().join("repack.safetensors");
        open(&put(file, safetensors(&[transformer(), vec![more]].concat(), header(&config()))))
    };
    let block = "model.diffusion_model.transformer_blocks.0.attn1.to_q";
    let weight: &str = Box::leak(format!("{block}.weight").into_boxed_str());
    let marked: &str = Box::leak(format!("{block}.comfy_quant").into_boxed_str());
    for dtype in ["I8", "U8"] {
        let why = words(weight, &dtype.to_lowercase());
        fails(model((weight, dtype, &[4])), &["repack.safetensors", &why, "use the bf16 file"]);
    }
    fails(model((marked, "U8", &[4])), &["repack.safetensors", marked, "is not JSON"]);
    let encoder = [text_encoder(), vec![("model.layers.0.mlp.up_proj.weight", "I8", &[4][..])]].concat();
    let encoder = put(dir.path().join("int8.safetensors"), safetensors(&encoder, gemma(OWN)));
    let why = words("model.layers.0.mlp.up_proj.weight", "i8");
    fails(with_text_encoder(&split(dir.path()), &encoder), &["int8.safetensors", &why]);
}

/// Lightricks' 15 tensors become diffusers' 19; query, key and value are each a third of the rows.
#[test]
fn duration_head_attention_is_split() {
    let dir = TempDir::new().expect("dir");
    let mut tensors: Tensors = vec![
        ("duration_head.attention_pooler.cross_attn.in_proj_weight", "F32", &[6, 2]),
        ("duration_head.attention_pooler.cross_attn.in_proj_bias", "F32", &[6]),
        ("duration_head.attention_pooler.cross_attn.out_proj.weight", "F32", &[2, 2]),
        ("duration_head.attention_pooler.cross_attn.out_proj.bias", "F32", &[2]),
        ("duration_head.attention_pooler.query_tokens", "F32", &[1, 2]),
        ("duration_head.video_input_proj.weight", "F32", &[2, 5]),
        ("duration_head.audio_input_proj.weight", "F32", &[2, 3]),
        ("duration_head.mlp_hidden.weight", "F32", &[7, 2]),
    ];
    let mut bytes = safetensors(&tensors, Value::Null);
    let start = bytes.len() - 4 * tensors.iter().map(|(_, _, shape)| shape.iter().product::<usize>()).sum::<usize>();
    bytes[start..].iter_mut().zip(0..).for_each(|(byte, at)| *byte = at);
    let file = put(dir.path().join("head.safetensors"), &bytes);
    let model = split(&dir.path().join("files"));
    let overrides = |file: &Path| Overrides { duration_head: file.to_str().map(String::from), ..Overrides::default() };
    let source = open_with(&model, &overrides(&file)).expect("opens");
    let head = source.checkpoint(Component::DurationHead).expect("weights");
    let names: Vec<&str> = head.names().filter(|name| name.starts_with("attention_pooler.")).collect();
    let mut want = vec!["attention_pooler.query_tokens".to_string()];
    for map in ["k", "out", "q", "v"] {
        want.extend(["bias", "weight"].map(|kind| format!("attention_pooler.to_{map}.{kind}")));
    }
    assert_eq!(names, want);
    for (at, name) in ["q", "k", "v"].into_iter().enumerate() {
        let view = head.get(&format!("attention_pooler.to_{name}.weight")).expect("a part");
        let part = &bytes[start + 16 * at..][..16];
        assert_eq!((view.shape(), view.read().expect("bytes")), (&[2, 2][..], part.to_vec()), "{name}");
    }
    let config = source.config(Component::DurationHead).expect("derived");
    for (key, value) in [
        ("video_cross_attention_dim", 5),
        ("audio_cross_attention_dim", 3),
        ("pooler_hidden_dim", 2),
        ("num_queries", 1),
        ("mlp_hidden_dim", 7),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    tensors[0].2 = &[5, 2];
    let file = put(dir.path().join("odd.safetensors"), safetensors(&tensors, Value::Null));
    let head = open_with(&model, &overrides(&file)).expect("opens").checkpoint(Component::DurationHead);
    fails(head, &["odd.safetensors", "in_proj_weight", "[5, 2]", "divided equally"]);
}
