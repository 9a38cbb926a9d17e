//! Tests of folders of single files, with the file names of published repositories, and of variants.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::*;
use super::official::official_config;
use super::quantized::gguf;
use super::{diffusers_folder, fails, ltx2_5, open, open_with, put, safetensors, tokenizer};

type Tensors = Vec<(String, &'static str, &'static [usize])>;

fn write(path: PathBuf, tensors: &Tensors, config: Value) -> PathBuf {
    let tensors: Vec<_> = tensors.iter().map(|(name, dtype, shape)| (&**name, *dtype, *shape)).collect();
    let header = if config.is_null() { config } else { json!({"config": config.to_string()}) };
    put(path, safetensors(&tensors, header))
}

fn named(names: &[(&str, &'static [usize])], dtype: &'static str) -> Tensors {
    names.iter().map(|(name, shape)| (name.to_string(), dtype, *shape)).collect()
}

/// Returns the tensors and the configuration of a transformer's file without connectors.
fn transformer(version: Version, dtype: &'static str) -> (Tensors, Value) {
    let mut tensors = named(
        &[
            ("model.diffusion_model.patchify_proj.weight", &[4, 2]),
            ("model.diffusion_model.audio_patchify_proj.weight", &[4, 2]),
        ],
        dtype,
    );
    let mut config = json!({"transformer": official_config()["transformer"].clone()});
    if version == Version::V2_0 {
        tensors.extend(named(&[("model.diffusion_model.caption_projection.linear_1.weight", &[4, 8])], dtype));
    } else {
        tensors.extend(named(&[("model.diffusion_model.prompt_adaln_single.linear.weight", &[8, 4])], dtype));
        for (key, value) in [
            ("caption_proj_before_connector", true),
            ("caption_projection_first_linear", false),
            ("caption_projection_second_linear", false),
            ("caption_proj_input_norm", false),
            ("cross_attention_adaln", true),
        ] {
            config["transformer"][key] = value.into();
        }
    }
    (tensors, config)
}

fn blocks(prefix: &str) -> Tensors {
    let mut blocks = Tensors::new();
    for stream in ["video", "audio"] {
        let connector = format!("{prefix}{stream}_embeddings_connector");
        blocks.push((format!("{connector}.learnable_registers"), "BF16", &[128, 60]));
        blocks.push((format!("{connector}.transformer_1d_blocks.0.attn1.to_q.weight"), "BF16", &[60, 60]));
        blocks.push((format!("{connector}.transformer_1d_blocks.1.attn1.to_q.weight"), "BF16", &[60, 60]));
    }
    blocks
}

const ONE_PROJECTION: [(&str, &[usize]); 1] = [("text_embedding_projection.aggregate_embed.weight", &[8, 24])];
const TWO_PROJECTIONS: [(&str, &[usize]); 4] = [
    ("text_embedding_projection.video_aggregate_embed.weight", &[8, 7680]),
    ("text_embedding_projection.video_aggregate_embed.bias", &[8]),
    ("text_embedding_projection.audio_aggregate_embed.weight", &[8, 7680]),
    ("text_embedding_projection.audio_aggregate_embed.bias", &[8]),
];

/// Returns the tensors of ComfyUI's file of a Gemma 3 with one layer.
pub(super) fn gemma_3(dtype: &'static str) -> Tensors {
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let mut tensors = named(
        &[
            ("model.embed_tokens.weight", &[480, 24]),
            ("model.norm.weight", &[24]),
            ("vision_model.embeddings.patch_embedding.weight", &[4]),
            ("multi_modal_projector.mm_input_projection_weight", &[4]),
        ],
        "BF16",
    );
    tensors.push(("spiece_model".into(), "U8", &[5]));
    for (name, shape) in [
        ("self_attn.q_proj", &[32, 24]),
        ("self_attn.k_proj", &[16, 24]),
        ("self_attn.v_proj", &[16, 24]),
        ("self_attn.o_proj", &[24, 32]),
        ("mlp.gate_proj", &[40, 24]),
        ("mlp.up_proj", &[40, 24]),
        ("mlp.down_proj", &[24, 40]),
    ] {
        tensors.push((layer(name), dtype, shape));
    }
    for (name, shape) in [
        ("self_attn.q_norm", &[8][..]),
        ("self_attn.k_norm", &[8]),
        ("input_layernorm", &[24]),
        ("post_attention_layernorm", &[24]),
        ("pre_feedforward_layernorm", &[24]),
        ("post_feedforward_layernorm", &[24]),
    ] {
        tensors.push((layer(name), "BF16", shape));
    }
    tensors
}

/// Writes the video VAE and the audio VAE with the vocoder.
fn autoencoders(folder: &Path, video: &str, audio: &str) {
    let config = official_config();
    let tensors = named(
        &[
            ("encoder.conv_in.conv.weight", &[4]),
            ("decoder.conv_in.conv.weight", &[4]),
            ("per_channel_statistics.mean-of-means", &[128]),
        ],
        "BF16",
    );
    write(folder.join(video), &tensors, json!({"vae": config["vae"]}));
    let tensors = named(&[("audio_vae.decoder.x.weight", &[4]), ("vocoder.conv_pre.weight", &[16, 128, 7])], "BF16");
    write(folder.join(audio), &tensors, json!({"audio_vae": config["audio_vae"], "vocoder": config["vocoder"]}));
    // A preview decoder, which is not a component.
    let preview = named(&[("encoder.0.weight", &[4]), ("decoder.1.weight", &[4])], "BF16");
    write(folder.join("taeltx2_3.safetensors"), &preview, Value::Null);
}

/// Writes the files of Kijai/LTXV2_comfy and Comfy-Org/ltx-2, and returns the folder of the transformers.
fn ltx_2_0(root: &Path) -> PathBuf {
    let models = root.join("diffusion_models");
    for (name, dtype) in [
        ("ltx-2-19b-dev-fp8_transformer_only.safetensors", "F8_E4M3"),
        ("ltx-2-19b-dev_transformer_only_bf16.safetensors", "BF16"),
        ("ltx-2-19b-distilled_transformer_only_bf16.safetensors", "BF16"),
    ] {
        let (tensors, config) = transformer(Version::V2_0, dtype);
        write(models.join(name), &tensors, config);
    }
    for kind in ["dev", "distill"] {
        let tensors = [blocks("model.diffusion_model."), named(&ONE_PROJECTION, "BF16")].concat();
        let name = format!("text_encoders/ltx-2-19b-embeddings_connector_{kind}_bf16.safetensors");
        write(root.join(name), &tensors, Value::Null);
    }
    write(root.join("split_files/text_encoders/gemma_3_12B_it.safetensors"), &gemma_3("BF16"), Value::Null);
    write(
        root.join("split_files/text_encoders/gemma_3_12B_it_fp8_scaled.safetensors"),
        &gemma_3("F8_E4M3"),
        Value::Null,
    );
    autoencoders(&root.join("VAE"), "LTX2_video_vae_bf16.safetensors", "LTX2_audio_vae_bf16.safetensors");
    let lora = named(&[("diffusion_model.x.lora_A.weight", &[1, 2])], "BF16");
    write(root.join("loras/ltx-2-19b-distilled-lora-384.safetensors"), &lora, Value::Null);
    models
}

/// Writes the files of unsloth/LTX-2.3-GGUF and a Gemma folder. The transformer's file contains the connector blocks; a
/// separate file contains the text projections.
fn ltx_2_3(root: &Path) {
    let f32s = |name: &str, shape: &[u64]| (format!("{name}.weight"), shape.to_vec());
    let mut tensors = vec![
        f32s("patchify_proj", &[4096, 128]),
        f32s("proj_out", &[128, 4096]),
        f32s("audio_patchify_proj", &[2048, 128]),
        f32s("audio_proj_out", &[128, 2048]),
        f32s("transformer_blocks.0.attn2.to_k", &[4, 4096]),
        f32s("transformer_blocks.0.audio_attn2.to_k", &[4, 2048]),
        f32s("prompt_adaln_single.linear", &[8, 4]),
        ("transformer_blocks.0.ff.net.0.proj.bias".into(), vec![4]),
        ("transformer_blocks.0.audio_ff.net.0.proj.bias".into(), vec![4]),
        f32s("transformer_blocks.0.attn1.to_gate_logits", &[32, 4]),
        f32s("transformer_blocks.0.audio_attn1.to_gate_logits", &[32, 4]),
    ];
    for (name, _, shape) in blocks("") {
        tensors.push((name, shape.iter().map(|size| *size as u64).collect()));
    }
    for stream in ["video", "audio"] {
        tensors.push(f32s(
            &format!("{stream}_embeddings_connector.transformer_1d_blocks.0.attn1.to_gate_logits"),
            &[4, 60],
        ));
    }
    for name in ["ltx-2.3-22b-dev-Q4_K_M.gguf", "distilled-1.1/ltx-2.3-22b-distilled-1.1-Q4_K_M.gguf"] {
        let tensors: Vec<_> = tensors.iter().map(|(name, shape)| (&**name, 0, &shape[..], &[][..])).collect();
        let path = put(root.join(name), gguf(&[("general.architecture", "ltxv")], &tensors));
        fs::OpenOptions::new().write(true).open(path).and_then(|file| file.set_len(1 << 24)).expect("a sparse file");
    }
    for kind in ["dev", "distilled"] {
        let file = |part: &str| root.join(format!("{part}.safetensors"));
        let projections = file(&format!("text_encoders/ltx-2.3-22b-{kind}_embeddings_connectors"));
        write(projections, &named(&TWO_PROJECTIONS, "BF16"), Value::Null);
        let name = |part: &str| format!("ltx-2.3-22b-{kind}_{part}_vae.safetensors");
        autoencoders(&root.join("vae"), &name("video"), &name("audio"));
    }
    let gemma = root.join("text_encoders/gemma-3-12b-it");
    put(gemma.join("config.json"), json!({"model_type": "gemma3"}).to_string());
    put(gemma.join("tokenizer.json"), "{}");
}

/// A single file of LTX-2.3 uses the text encoder in the cache, unless it has another one or belongs to LTX-2.5.
#[test]
fn single_file_uses_gemma_3_of_the_cache() {
    let dir = TempDir::new().expect("dir");
    let hub = HubCache::at(dir.path());
    let put_in_cache = |repository: &str, file: &str, text: String| {
        let folder = dir.path().join(format!("models--{}", repository.replace('/', "--")));
        put(folder.join("refs/main"), "c0");
        put(folder.join("snapshots/c0").join(file), text)
    };
    let (tensors, config) = transformer(Version::V2_3, "BF16");
    let name = "ltx-2.3-22b-dev.safetensors";
    write(put_in_cache("Lightricks/LTX-2.3", name, String::new()), &tensors, config);
    let model = format!("Lightricks/LTX-2.3/{name}");
    let open = |overrides: &Overrides| ModelSource::open_in(&model, overrides, &hub).expect("opens");
    assert!(!open(&Overrides::default()).has(Component::TextEncoder));
    let text = json!({"model_type": "gemma3"}).to_string();
    let gemma = put_in_cache(published::GEMMA_3, "config.json", text.clone());
    put_in_cache(published::GEMMA_3, "tokenizer.json", "{}".into());
    let source = open(&Overrides::default());
    assert_eq!(source.folder(Component::TextEncoder).expect("there"), gemma.parent().expect("a folder"));
    assert!(source.has(Component::Tokenizer));
    let own = put(dir.path().join("own/config.json"), text);
    let own = own.parent().expect("a folder");
    let overrides = Overrides { text_encoder: own.to_str().map(String::from), ..Overrides::default() };
    assert_eq!(open(&overrides).folder(Component::TextEncoder).expect("there"), own);
    let newest = ltx2_5::split(&dir.path().join("2.5"));
    fs::remove_dir_all(dir.path().join("2.5/text_encoders")).expect("removed");
    let newest = ModelSource::open_in(newest.to_str().expect("UTF-8"), &Overrides::default(), &hub).expect("opens");
    assert!(!newest.has(Component::TextEncoder));
}

fn variant(words: &str) -> Overrides {
    Overrides { variant: Some(words.into()), ..Overrides::default() }
}

fn file_name(path: &Path) -> String {
    path.file_name().expect("a name").to_string_lossy().into_owned()
}

#[test]
fn ltx_2_0_folder_is_a_model() {
    let dir = TempDir::new().expect("dir");
    let models = ltx_2_0(dir.path());
    let listed = [
        "3 files could be the transformer (diffusion_models/ltx-2-19b-dev-fp8_transformer_only.safetensors",
        "diffusion_models/ltx-2-19b-distilled_transformer_only_bf16.safetensors",
        "--variant",
    ];
    fails(open(dir.path()), &listed);
    let unknown = ["no file matches `model.variant` = nvfp4", "available: diffusion_models/ltx-2-19b-dev-fp8"];
    fails(open_with(dir.path(), &variant("nvfp4")), &unknown);
    for (words, transformer, connectors, encoder) in [
        ("dev", "ltx-2-19b-dev_transformer_only_bf16", "connector_dev_bf16", "gemma_3_12B_it.safetensors"),
        (
            "distilled",
            "ltx-2-19b-distilled_transformer_only_bf16",
            "connector_distill_bf16",
            "gemma_3_12B_it.safetensors",
        ),
        ("fp8", "ltx-2-19b-dev-fp8_transformer_only", "connector_dev_bf16", "gemma_3_12B_it_fp8_scaled.safetensors"),
        (
            "ltx-2-19b-dev_transformer_only_bf16.safetensors",
            "ltx-2-19b-dev_transformer",
            "connector_dev_bf16",
            "it.safetensors",
        ),
    ] {
        let source = open_with(dir.path(), &variant(words)).expect("opens");
        assert!(file_name(source.path()).starts_with(transformer), "{words}: {}", source.path().display());
        assert_eq!(source.version().expect("known"), Version::V2_0);
        source.refuse_unread().expect("all of it is known");
        source.require(Component::ALL.into_iter().filter(|part| !part.is_optional())).expect("complete");
        let file = source.checkpoint(Component::Connectors).expect("there");
        assert!(file.path().to_string_lossy().contains(connectors), "{words}: {}", file.path().display());
        let place = source.config_path(Component::TextEncoder);
        assert!(place.to_string_lossy().ends_with(encoder), "{words}: {}", place.display());
        // The header of the transformer's file describes the connectors, whose file has no configuration.
        let config = source.config(Component::Connectors).expect("derived");
        assert_eq!((&config["text_proj_in_factor"], &config["video_connector_num_layers"]), (&json!(3), &json!(2)));
        assert!(matches!(source.tokenizer().expect("in the file"), TokenizerFiles::SentencePiece { .. }));
    }
    // The transformer's file, or its folder, stands for the repository.
    let file = models.join("ltx-2-19b-distilled_transformer_only_bf16.safetensors");
    for (path, words) in [(&file, None), (&models, Some("distilled")), (&file, Some("fp8"))] {
        let overrides = Overrides { variant: words.map(String::from), ..Overrides::default() };
        let source = open_with(path, &overrides).expect("opens");
        assert_eq!(source.path(), file);
        source.require([Component::TextEncoder, Component::Connectors, Component::Vae]).expect("there");
        let encoder = file_name(&source.config_path(Component::TextEncoder));
        assert_eq!(encoder.contains("fp8"), words == Some("fp8"), "{encoder}");
    }
    fails(open_with(&file, &variant("nvfp4")), &["no file matches `model.variant` = nvfp4", "VAE/LTX2_video_vae"]);
    fails(open_with(&file, &variant("fp8, nvfp4")), &["no file matches `model.variant` = fp8, nvfp4"]);
    // Connectors of the other training are not used.
    fs::remove_file(dir.path().join("text_encoders/ltx-2-19b-embeddings_connector_distill_bf16.safetensors"))
        .expect("removed");
    fails(open(&file).expect("opens").require([Component::Connectors]), &["contains no connectors", "--connectors"]);
}

#[test]
fn ltx_2_3_gguf_repository_is_a_model() {
    let dir = TempDir::new().expect("dir");
    ltx_2_3(dir.path());
    fails(
        open(dir.path()),
        &["2 files could be the transformer", "distilled-1.1/ltx-2.3-22b-distilled-1.1-Q4_K_M.gguf"],
    );
    for (path, words, kind) in [
        ("", Some("distilled"), "distilled"),
        ("", Some("dev, Q4_K_M"), "dev"),
        ("ltx-2.3-22b-dev-Q4_K_M.gguf", None, "dev"),
        ("distilled-1.1/ltx-2.3-22b-distilled-1.1-Q4_K_M.gguf", None, "distilled"),
    ] {
        let overrides = Overrides { variant: words.map(String::from), ..Overrides::default() };
        let source = open_with(&dir.path().join(path), &overrides).expect("opens");
        assert_eq!(source.version().expect("known"), Version::V2_3);
        assert!(file_name(source.path()).contains(kind));
        source.require(Component::ALL.into_iter().filter(|part| !part.is_optional())).expect("complete");
        assert!(file_name(&source.config_path(Component::Vae)).contains(kind));
        assert_eq!(tokenizer(&source), dir.path().join("text_encoders/gemma-3-12b-it"));
        let connectors = source.checkpoint(Component::Connectors).expect("joined");
        assert_eq!(connectors.files().count(), 2);
        let config = source.config(Component::Connectors).expect("derived");
        assert_eq!(
            (&config["video_connector_num_attention_heads"], &config["audio_gated_attn"]),
            (&json!(4), &json!(true))
        );
    }
}

#[test]
fn ambiguous_files_are_listed_and_selected_by_variant() {
    let dir = TempDir::new().expect("dir");
    let file = ltx2_5::split(dir.path());
    let distilled = file.with_file_name("ltx-2.5-22b-distilled-transformer-bf16.safetensors");
    fs::copy(&file, &distilled).expect("copied");
    let choices = ["2 files could be the transformer", "ltx-2.5-22b-dev-transformer-bf16.safetensors", "distilled"];
    fails(open(dir.path()), &choices);
    assert_eq!(open_with(dir.path(), &variant("distilled")).expect("opens").path(), distilled);
    let source = open_with(dir.path(), &variant("dev")).expect("opens");
    source.require(Component::ALL).expect("complete");
    let encoder = file_name(&source.config_path(Component::TextEncoder));
    assert_eq!(encoder, "gemma4-12b-with-proj-ltx-2.5-bf16.safetensors");
    // A component of which there are several files is an error when it is needed.
    let vae = dir.path().join("vae/ltx-2.5-audio-vae-bf16.safetensors");
    fs::copy(&vae, vae.with_file_name("another-audio-vae.safetensors")).expect("copied");
    let source = open(&file).expect("opens");
    source.require([Component::Vae, Component::TextEncoder]).expect("there");
    let words =
        ["2 files could be the audio VAE", "vae/another-audio-vae.safetensors", "`model.audio_vae`", "--audio-vae"];
    fails(source.require([Component::AudioVae]), &words);
    assert!(source.ambiguity(Component::AudioVae).is_some());
    // Files of another model version are not used.
    let old = named(&[("audio_vae.decoder.x.weight", &[4])], "BF16");
    write(vae.with_file_name("LTX2_audio_vae_bf16.safetensors"), &old, json!({"audio_vae": {}}));
    fs::remove_file(vae.with_file_name("another-audio-vae.safetensors")).expect("removed");
    assert_eq!(open(&file).expect("opens").config_path(Component::AudioVae), vae);
    // A damaged file of an optional component is an error when it is needed.
    let upsampler = dir.path().join("latent_upscale_models/ltx-2.5-latent-spatial-upscaler-x2-bf16-1.0.safetensors");
    put(upsampler, b"version https://git-lfs.github.com/spec/v1\n");
    let source = open(&file).expect("opens");
    assert!(!source.has(Component::LatentUpsampler));
    let words = ["spatial-upscaler-x2-bf16-1.0.safetensors", "git-LFS pointer"];
    fails(source.require([Component::LatentUpsampler]), &words);
    fails(source.config(Component::LatentUpsampler), &words);
    // A damaged file of another component is an error, not a missing component.
    put(vae, b"version https://git-lfs.github.com/spec/v1\n");
    fails(open(&file), &["ltx-2.5-audio-vae-bf16.safetensors", "git-LFS pointer"]);
}

#[test]
fn folder_named_checkpoints_does_not_make_its_parent_a_repository() {
    let dir = TempDir::new().expect("dir");
    let (tensors, config) = transformer(Version::V2_3, "BF16");
    let file = write(dir.path().join("checkpoints/LTX-2.3/ltx-2.3.safetensors"), &tensors, config);
    autoencoders(&dir.path().join("another_project/vae"), "video_vae.safetensors", "audio_vae.safetensors");
    fails(open(&file).expect("opens").require([Component::Vae]), &["ltx-2.3.safetensors", "no video VAE"]);
    // A `vae` folder next to it does: only such folders and the transformer's own folder are searched.
    autoencoders(&dir.path().join("vae/ltx"), "LTX23_video_vae.safetensors", "LTX23_audio_vae.safetensors");
    write(file.with_file_name("gemma_3_12B_it.safetensors"), &gemma_3("BF16"), Value::Null);
    let source = open(&file).expect("opens");
    source.require([Component::Vae, Component::AudioVae, Component::TextEncoder]).expect("there");
    assert_eq!(source.config_path(Component::Vae), dir.path().join("vae/ltx/LTX23_video_vae.safetensors"));
    // The requested folder is searched completely if there is no such folder next to it.
    fs::rename(dir.path().join("vae"), dir.path().join("checkpoints/other")).expect("moved");
    let source = open(&dir.path().join("checkpoints")).expect("opens");
    source.require([Component::Vae, Component::AudioVae, Component::TextEncoder]).expect("there");
    // A `vae` folder next to the file takes precedence.
    fs::rename(dir.path().join("checkpoints/other"), dir.path().join("vae")).expect("moved");
    autoencoders(&file.with_file_name("vae"), "video_vae.safetensors", "audio_vae.safetensors");
    let source = open(&file).expect("opens");
    assert_eq!(source.config_path(Component::Vae), file.with_file_name("vae").join("video_vae.safetensors"));
}

#[test]
fn relative_path_of_a_transformer_finds_its_repository() {
    const ALONE: &str = "LTX2_TEST_ALONE";
    const FILE: &str = "ltx-2-19b-distilled_transformer_only_bf16.safetensors";
    if std::env::var_os(ALONE).is_none() {
        // The current folder is that of the process, so the test runs in a child process.
        let dir = TempDir::new().expect("dir");
        let mut test = std::process::Command::new(std::env::current_exe().expect("this binary"));
        test.args(["--exact", "tests::split::relative_path_of_a_transformer_finds_its_repository"]).env(ALONE, "1");
        let output = test.current_dir(ltx_2_0(dir.path())).output().expect("runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    for path in [FILE, "./", ".", &format!("../diffusion_models/{FILE}")] {
        let overrides = if path.ends_with(FILE) { Overrides::default() } else { variant("distilled") };
        let source = open_with(Path::new(path), &overrides).expect("opens");
        source.require(Component::ALL.into_iter().filter(|part| !part.is_optional())).expect(path);
    }
}

#[test]
fn folder_of_single_files_may_contain_component_folders() {
    let dir = TempDir::new().expect("dir");
    ltx_2_0(dir.path());
    put(dir.path().join("text_encoder/config.json"), json!({"model_type": "gemma3"}).to_string());
    put(dir.path().join("tokenizer/tokenizer.json"), "{}");
    put(dir.path().join("tokenizer/tokenizer_config.json"), "{}");
    let source = open_with(dir.path(), &variant("distilled, bf16")).expect("opens");
    source.require([Component::Transformer, Component::Connectors, Component::Vae]).expect("there");
    // Without any transformer, the folder is an incomplete model.
    fs::remove_dir_all(dir.path().join("diffusion_models")).expect("removed");
    fails(open(dir.path()).expect("opens").require([Component::Transformer]), &["contains no transformer"]);
}

#[test]
fn ltx_video_files_are_ignored() {
    let dir = TempDir::new().expect("dir");
    let file = ltx_2_0(dir.path()).join("ltx-2-19b-distilled_transformer_only_bf16.safetensors");
    let upsampler = |name: &str, initial: &'static [usize]| {
        let tensors = named(&[("initial_conv.weight", initial), ("upsampler.0.weight", &[16, 4, 3, 3])], "BF16");
        write(dir.path().join("latent_upscale_models").join(name), &tensors, Value::Null)
    };
    for name in ["ltxv-spatial-upscaler-0.9.7.safetensors", "ltx-video_spatial_upscaler.safetensors"] {
        upsampler(name, &[4, 2, 3, 3, 3]);
    }
    upsampler("spatial_upscaler.safetensors", &[512, 1, 1, 1, 1]);
    assert!(!open(&file).expect("opens").has(Component::LatentUpsampler));
    let own = upsampler("ltx-2-spatial-upscaler-x2-1.0.safetensors", &[4, 2, 3, 3, 3]);
    assert_eq!(open(&file).expect("opens").config_path(Component::LatentUpsampler), own);
    let tensors: [(&str, &'static [usize]); 3] = [
        ("decoder.conv_in.conv.weight", &[4]),
        ("decoder.last_time_embedder.timestep_embedder.linear_1.weight", &[4]),
        ("per_channel_statistics.mean-of-means", &[128]),
    ];
    write(dir.path().join("vae/old_video_vae.safetensors"), &named(&tensors, "BF16"), Value::Null);
    for name in ["ltxv-2b-0.9.8-vae.safetensors", "ltx-video-2b-vae.safetensors"] {
        write(dir.path().join("vae").join(name), &named(&[tensors[0], tensors[2]], "BF16"), Value::Null);
    }
    let vae = open(&file).expect("opens").config_path(Component::Vae);
    assert_eq!(vae, dir.path().join("VAE/LTX2_video_vae_bf16.safetensors"));
}

#[test]
fn folders_with_a_configuration_are_searched() {
    let dir = TempDir::new().expect("dir");
    ltx_2_0(dir.path());
    let folder = dir.path().join("diffusion_models/LTX-2-dev");
    put(folder.join("config.json"), json!({"model_type": "ltx2"}).to_string());
    let file = folder.join("ltx-2-19b-tuned_transformer_only.safetensors");
    fs::copy(dir.path().join("diffusion_models/ltx-2-19b-dev_transformer_only_bf16.safetensors"), &file)
        .expect("copied");
    let source = open_with(dir.path(), &variant("tuned")).expect("opens");
    assert_eq!(source.path(), file);
    source.require([Component::TextEncoder, Component::Vae]).expect("there");
}

#[test]
fn folder_names_select_between_files_of_the_same_name() {
    let dir = TempDir::new().expect("dir");
    let (tensors, config) = transformer(Version::V2_3, "BF16");
    let file = write(dir.path().join("diffusion_models/model.safetensors"), &tensors, config);
    let vae = |folder: &str| {
        let folder = dir.path().join("vae").join(folder);
        autoencoders(&folder, "video_vae.safetensors", "audio_vae.safetensors");
        folder.join("video_vae.safetensors")
    };
    let chosen = || {
        let source = open(&file).expect("opens");
        source.require([Component::Vae]).map(|()| source.config_path(Component::Vae))
    };
    // `LTX-2` is the name of the family and of its first version.
    let family = vae("LTX-2");
    assert_eq!(chosen().expect("one"), family);
    let own = vae("ltx23");
    assert_eq!(chosen().expect("one fits"), own);
    vae("tuned");
    let choices =
        ["2 files could be the video VAE", "vae/ltx23/video_vae.safetensors", "vae/tuned/video_vae.safetensors"];
    fails(chosen(), &choices);
    fs::remove_dir_all(dir.path().join("vae/tuned")).expect("removed");
    // Of files whose names differ only in a version number, the latest is used.
    let later = own.with_file_name("video_vae-1.1.safetensors");
    fs::copy(&own, &later).expect("copied");
    assert_eq!(chosen().expect("the latest"), later);
}

#[test]
fn flat_folder_of_single_files_is_a_model() {
    let dir = TempDir::new().expect("dir");
    let (tensors, config) = transformer(Version::V2_3, "BF16");
    let file =
        write(dir.path().join("model.safetensors"), &[tensors, blocks("model.diffusion_model.")].concat(), config);
    write(dir.path().join("ltx-2.3_text_projection_bf16.safetensors"), &named(&TWO_PROJECTIONS, "BF16"), Value::Null);
    write(dir.path().join("gemma_3_12B_it.safetensors"), &gemma_3("BF16"), Value::Null);
    autoencoders(dir.path(), "LTX23_video_vae_bf16.safetensors", "LTX23_audio_vae_bf16.safetensors");
    let is_complete = |path: &Path| {
        let source = open(path).expect("opens");
        assert_eq!(source.path(), file);
        source.require(Component::ALL.into_iter().filter(|part| !part.is_optional())).expect("complete");
        source.refuse_unread().expect("all of it is known");
    };
    is_complete(dir.path());
    is_complete(&file);
    // A converted text encoder states its configuration in the header, as that of LTX-2.5 does.
    let config = open(&file).expect("opens").config(Component::TextEncoder).expect("derived");
    let encoder = gemma_3("BF16");
    let encoder: Vec<_> = encoder.iter().map(|(name, dtype, shape)| (&**name, *dtype, *shape)).collect();
    let stated = safetensors(&encoder, json!({"gemma_config": config.to_string()}));
    put(dir.path().join("gemma_3_12B_it.safetensors"), stated);
    is_complete(&file);
    // A file of projections without blocks anywhere.
    let (tensors, config) = transformer(Version::V2_3, "BF16");
    write(file.clone(), &tensors, config);
    let words = ["ltx-2.3_text_projection_bf16.safetensors", "`video_embeddings_connector`", "transformer's file"];
    fails(open(&file).expect("opens").checkpoint(Component::Connectors), &words);
    // Connectors of another model version.
    let old = [blocks(""), named(&[("text_embedding_projection.weight", &[8, 24])], "BF16")].concat();
    let old = write(dir.path().join("old/connectors.safetensors"), &old, Value::Null);
    let overrides = Overrides { connectors: old.to_str().map(String::from), ..Overrides::default() };
    let words = ["connectors.safetensors", "`text_proj_in.weight` of LTX-2.0", "model.safetensors describes LTX-2.3"];
    fails(open_with(&file, &overrides).expect("opens").checkpoint(Component::Connectors), &words);
}

#[test]
fn connectors_of_a_file_replace_those_of_a_folder() {
    let dir = TempDir::new().expect("dir");
    diffusers_folder(&dir.path().join("model"));
    let tensors = [blocks(""), named(&ONE_PROJECTION, "F8_E4M3")].concat();
    let file = write(dir.path().join("connectors.safetensors"), &tensors, Value::Null);
    let overrides = Overrides { connectors: file.to_str().map(String::from), ..Overrides::default() };
    let source = open_with(&dir.path().join("model"), &overrides).expect("opens");
    assert!(source.checkpoint(Component::Connectors).expect("there").contains("text_proj_in.weight"));
    // Nothing states the configuration, so it is that of the published model, with the sizes of the tensors.
    fails(source.config(Component::Connectors), &["connectors.safetensors", "24 columns", "not a multiple of 3840"]);
}

#[test]
fn transformer_without_config_gets_the_published_config() {
    let dir = TempDir::new().expect("dir");
    let tensors = named(
        &[
            ("model.diffusion_model.patchify_proj.weight", &[4096, 2]),
            ("model.diffusion_model.audio_patchify_proj.weight", &[2048, 2]),
            ("model.diffusion_model.proj_out.weight", &[2, 4096]),
            ("model.diffusion_model.audio_proj_out.weight", &[2, 2048]),
            ("model.diffusion_model.caption_projection.linear_1.weight", &[1, 3840]),
            ("model.diffusion_model.transformer_blocks.0.attn2.to_k.weight", &[1, 4096]),
            ("model.diffusion_model.transformer_blocks.0.audio_attn2.to_k.weight", &[1, 2048]),
            ("model.diffusion_model.transformer_blocks.0.ff.net.0.proj.bias", &[1]),
            ("model.diffusion_model.transformer_blocks.0.audio_ff.net.0.proj.bias", &[1]),
        ],
        "BF16",
    );
    let file = dir.path().join("ltx-2-19b-dev_transformer_only.safetensors");
    let source = open(&write(file.clone(), &tensors, Value::Null)).expect("opens");
    assert_eq!(source.version().expect("known"), Version::V2_0);
    let config = source.config(Component::Transformer).expect("derived");
    assert_eq!(json!([config["num_attention_heads"], config["attention_head_dim"]]), json!([32, 128]));
    // The configuration of autoencoders cannot be derived.
    let more = [tensors, named(&[("vae.per_channel_statistics.mean-of-means", &[128])], "BF16")].concat();
    fails(open(&write(file, &more, Value::Null)), &["transformer_only.safetensors", "`config` is missing"]);
}

#[test]
fn comfy_gemma_3_file_is_a_text_encoder() {
    let dir = TempDir::new().expect("dir");
    diffusers_folder(&dir.path().join("model"));
    let open = |tensors: &Tensors| {
        let file = write(dir.path().join("gemma_3_12B_it.safetensors"), tensors, Value::Null);
        open_with(
            &dir.path().join("model"),
            &Overrides { text_encoder: file.to_str().map(String::from), ..Overrides::default() },
        )
    };
    let mut scaled = gemma_3("F8_E4M3");
    for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
        scaled.push((format!("model.layers.0.self_attn.{name}.scale_weight"), "F32", &[]));
    }
    scaled.push(("scaled_fp8".into(), "F8_E4M3", &[2]));
    let prefixed = |(name, dtype, shape): (String, _, _)| match name.strip_prefix("model.") {
        Some(rest) => (format!("language_model.model.{rest}"), dtype, shape),
        None => (name, dtype, shape),
    };
    for tensors in [gemma_3("BF16"), gemma_3("BF16").into_iter().map(prefixed).collect(), scaled] {
        let source = open(&tensors).expect("opens");
        source.refuse_unread().expect("all tensors are read");
        let config = source.config(Component::TextEncoder).expect("derived");
        let text = &config["text_config"];
        assert_eq!(
            json!([text["vocab_size"], text["hidden_size"], text["num_attention_heads"], text["num_key_value_heads"]]),
            json!([480, 24, 4, 2])
        );
        assert_eq!(json!([text["head_dim"], text["intermediate_size"], text["num_hidden_layers"]]), json!([8, 40, 1]));
        let weights = source.checkpoint(Component::TextEncoder).expect("there");
        assert!(weights.contains("language_model.model.layers.0.mlp.up_proj.weight"));
        assert!(matches!(source.tokenizer().expect("in the file"), TokenizerFiles::SentencePiece { .. }));
        assert_eq!(source.fingerprint(Component::Tokenizer).expect("readable").len(), 64);
    }
    let mut gemma_4 = gemma_3("BF16");
    gemma_4.push(("model.layers.0.layer_scalar".into(), "BF16", &[1]));
    let words =
        ["gemma_3_12B_it.safetensors", "`gemma_config` is missing", "gemma4-12b-with-proj-ltx-2.5-bf16.safetensors"];
    fails(open(&gemma_4), &words);
}

#[test]
fn variant_selects_weights_of_a_diffusers_folder() {
    let dir = TempDir::new().expect("dir");
    diffusers_folder(dir.path());
    let folder = dir.path().join("transformer");
    let file = |name: &str, tensor: &str| put(folder.join(name), safetensors(&[(tensor, "BF16", &[4])], Value::Null));
    file("diffusion_pytorch_model.fp8.safetensors", "fp8.weight");
    file("diffusion_pytorch_model.int8-00001-of-00001.safetensors", "int8.weight");
    let index = |name: &str, tensor: &str, shard: &str| {
        put(folder.join(name), json!({"weight_map": {tensor: shard}}).to_string())
    };
    let shard = "diffusion_pytorch_model.int8-00001-of-00001.safetensors";
    index("diffusion_pytorch_model.safetensors.index.int8.json", "int8.weight", shard);
    for (words, tensor) in [(None, "proj_in.weight"), (Some("fp8"), "fp8.weight"), (Some("int8, fp8"), "int8.weight")] {
        let overrides = Overrides { variant: words.map(String::from), ..Overrides::default() };
        let source = open_with(dir.path(), &overrides).expect("opens");
        assert!(source.checkpoint(Component::Transformer).expect("there").contains(tensor), "{words:?}");
        // Components without the variant keep their weights.
        source.checkpoint(Component::TextEncoder).expect("there");
    }
    fails(open_with(dir.path(), &variant("nvfp4")), &["`model.variant` = nvfp4", "available: fp8, int8"]);
    let lone =
        write(dir.path().join("elsewhere/x.safetensors"), &transformer(Version::V2_0, "BF16").0, official_config());
    fails(open_with(&lone, &variant("fp8")), &["`model.variant` = fp8", "no files to select by it"]);
}
