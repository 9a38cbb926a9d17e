//! Models in temporary folders: every way they can be right or damaged.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::*;
use crate::hlo::DType;
use crate::tensor::Tensor;

/// A safetensors file's bytes; every tensor is filled with zeros.
fn safetensors(tensors: &[(&str, &str, &[usize])], metadata: Value) -> Vec<u8> {
    let mut header = Map::new();
    if metadata.is_object() {
        header.insert("__metadata__".into(), metadata);
    }
    let mut at = 0;
    for (name, dtype, shape) in tensors {
        let size = match *dtype {
            "F32" | "I32" => 4,
            "I8" | "F8_E5M2" => 1,
            _ => 2,
        };
        let end = at + shape.iter().product::<usize>() * size;
        header.insert((*name).into(), json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}));
        at = end;
    }
    let text = Value::Object(header).to_string();
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes.resize(bytes.len() + at, 0);
    bytes
}

fn put(path: PathBuf, bytes: impl AsRef<[u8]>) -> PathBuf {
    fs::create_dir_all(path.parent().expect("a parent")).expect("folder");
    fs::write(&path, bytes).expect("file");
    path
}

fn message<T: std::fmt::Debug>(result: Result<T, WeightsError>) -> String {
    let text = result.expect_err("an error").to_string();
    assert!(!text.contains('\n'), "one line: {text}");
    text
}

/// The message of a result that must fail, after checking that it holds every part.
fn fails<T: std::fmt::Debug>(result: Result<T, WeightsError>, parts: &[&str]) {
    let text = message(result);
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
}

#[test]
fn one_file_is_read_without_copying() {
    let dir = TempDir::new().expect("dir");
    let mut bytes = safetensors(&[("a.weight", "F32", &[2, 2]), ("b", "BF16", &[3])], json!({"note": "x"}));
    let start = bytes.len() - 22;
    bytes[start..start + 4].copy_from_slice(&1.5f32.to_le_bytes());
    let path = put(dir.path().join("m.safetensors"), bytes);
    let checkpoint = Checkpoint::open(&path).expect("opens");
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a.weight", "b"]);
    assert_eq!((checkpoint.len(), checkpoint.bytes(), checkpoint.metadata("note")), (2, 22, Some("x")));
    let view = checkpoint.get_float("a.weight").expect("there");
    drop(checkpoint);
    assert_eq!((view.dtype(), view.shape(), view.file()), (DType::F32, [2, 2].as_slice(), path.as_path()));
    assert_eq!(view.to_tensor().expect("f32").to_f32()[[0, 0]], 1.5);
    fails(view.expect_shape(&[4]), &["m.safetensors", "a.weight", "[2, 2]", "[4]"]);
}

#[test]
fn damaged_files_are_named() {
    let dir = TempDir::new().expect("dir");
    let whole = safetensors(&[("w", "F32", &[4])], Value::Null);
    let open = |bytes: &[u8]| Checkpoint::open(&put(dir.path().join("x.safetensors"), bytes));
    fails(open(b""), &["x.safetensors", "0 bytes"]);
    fails(open(b"<html>not a model</html>"), &["not a safetensors file"]);
    fails(open(&whole[..20]), &["truncated", "the file has 20"]);
    let want = format!("asks for {} bytes, the file has {}", whole.len(), whole.len() - 5);
    fails(open(&whole[..whole.len() - 5]), &["truncated", &want]);
    fails(open(&[&whole[..], b"xy"].concat()), &["2 bytes after the last tensor"]);
    let mut garbled = whole.clone();
    garbled[12] = b'\n';
    fails(open(&garbled), &["x.safetensors", "damaged header"]);
    fails(Checkpoint::open(&dir.path().join("none.safetensors")), &["none.safetensors", "cannot open"]);
}

#[test]
fn a_file_that_changes_while_it_is_open_is_an_error() {
    let dir = TempDir::new().expect("dir");
    let whole = safetensors(&[("w", "F32", &[4])], Value::Null);
    let path = put(dir.path().join("x.safetensors"), &whole);
    let checkpoint = Checkpoint::open(&path).expect("opens");
    // Another file under its name, or none: the one that was opened is still whole.
    put(dir.path().join("y"), b"other");
    fs::rename(dir.path().join("y"), &path).expect("renamed");
    assert_eq!(checkpoint.get("w").expect("there").bytes().len(), 16);

    let path = put(dir.path().join("z.safetensors"), &whole);
    let checkpoint = Checkpoint::open(&path).expect("opens");
    fs::OpenOptions::new().write(true).open(&path).and_then(|f| f.set_len(20)).expect("cut short");
    fails(checkpoint.get("w"), &["z.safetensors", "while it was in use", &format!("{} bytes, now 20", whole.len())]);

    // Written anew in its place, to the same size: other weights of the same model.
    let path = put(dir.path().join("rewritten.safetensors"), &whole);
    let checkpoint = Checkpoint::open(&path).expect("opens");
    let before = fs::metadata(&path).and_then(|about| about.modified()).expect("a time");
    let mut other = whole.clone();
    let last = other.len() - 1;
    other[last] ^= 1;
    // File systems tell times apart in steps of some milliseconds.
    while fs::metadata(&path).and_then(|about| about.modified()).expect("a time") == before {
        put(path.clone(), &other);
    }
    fails(checkpoint.get("w"), &["rewritten.safetensors", "while it was in use"]);
    assert!(Checkpoint::open(&path).expect("opens").get("w").is_ok(), "it is a model as good as the first");
}

#[test]
fn huge_offsets_are_an_error_not_a_panic() {
    let dir = TempDir::new().expect("dir");
    let mut header = Map::new();
    let part = 1u64 << 60;
    for i in 0..15u64 {
        let info = json!({"dtype": "U8", "shape": [part], "data_offsets": [i * part, (i + 1) * part]});
        header.insert(format!("t{i:02}"), info);
    }
    header.insert("z".into(), json!({"dtype": "U8", "shape": [part - 1], "data_offsets": [15 * part, u64::MAX]}));
    let text = Value::Object(header).to_string();
    let bytes = [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    fails(Checkpoint::open(&put(dir.path().join("x.safetensors"), bytes)), &["x.safetensors"]);
}

#[test]
fn a_header_of_a_million_tensors_is_read_and_one_that_claims_more_than_the_format_allows_is_not() {
    let dir = TempDir::new().expect("dir");
    let tensor = |i: usize| format!("\"t{i}\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}");
    let text = format!("{{{}}}", (0..1_000_000).map(tensor).collect::<Vec<_>>().join(","));
    let bytes = [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let checkpoint = Checkpoint::open(&put(dir.path().join("x.safetensors"), bytes)).expect("opens");
    assert_eq!(checkpoint.names().count(), 1_000_000);
    let claims = [&(1u64 << 60).to_le_bytes()[..], b"{}"].concat();
    fails(Checkpoint::open(&put(dir.path().join("y.safetensors"), claims)), &["y.safetensors"]);
}

#[test]
fn element_types_are_checked_when_a_weight_is_asked_for() {
    let dir = TempDir::new().expect("dir");
    let bytes = safetensors(&[("f", "BF16", &[1]), ("q", "I8", &[4]), ("e", "F8_E5M2", &[4])], Value::Null);
    let checkpoint = Checkpoint::open(&put(dir.path().join("x.safetensors"), bytes)).expect("opens");
    assert!(checkpoint.get("q").is_ok());
    fails(checkpoint.get_float("q"), &["x.safetensors", "`q` is i8", "bf16, f16, f32 or f8_e4m3"]);
    fails(checkpoint.get("e"), &["`e` is f8_e5m2"]);
    fails(checkpoint.get("gone"), &["x.safetensors", "`gone` is missing"]);
}

/// Two shards and their index.
fn sharded(dir: &Path, index: Value) -> PathBuf {
    put(dir.join("model-00001-of-00002.safetensors"), safetensors(&[("a", "F32", &[1])], Value::Null));
    put(dir.join("model-00002-of-00002.safetensors"), safetensors(&[("b", "F32", &[2])], Value::Null));
    put(dir.join("model.safetensors.index.json"), index.to_string())
}

#[test]
fn shards_are_found_through_their_index() {
    let dir = TempDir::new().expect("dir");
    let map = |b: &str| json!({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": b}});
    sharded(dir.path(), map("model-00002-of-00002.safetensors"));
    let checkpoint = Checkpoint::open(dir.path()).expect("opens");
    assert_eq!((checkpoint.shape("a"), checkpoint.shape("b")), (Some([1].as_slice()), Some([2].as_slice())));
    assert_eq!(checkpoint.files().count(), 2);
    sharded(dir.path(), map("model-00001-of-00002.safetensors"));
    fails(Checkpoint::open(dir.path()), &["index.json", "`b`", "model-00001-of-00002", "does not have it"]);
    sharded(dir.path(), map("model-00003-of-00003.safetensors"));
    fails(Checkpoint::open(dir.path()), &["index.json", "shard `model-00003-of-00003.safetensors` is missing", "`b`"]);
    sharded(dir.path(), map("../other.safetensors"));
    fails(Checkpoint::open(dir.path()), &["outside the folder"]);
    put(dir.path().join("model.safetensors.index.json"), "{");
    fails(Checkpoint::open(dir.path()), &["index.json", "not JSON"]);
}

#[test]
fn a_folder_s_weights_are_picked_by_name() {
    let dir = TempDir::new().expect("dir");
    fails(Checkpoint::open(dir.path()), &["no safetensors file"]);
    put(dir.path().join("pytorch_model.bin"), "x");
    fails(Checkpoint::open(dir.path()), &["only pickled weights"]);
    let file = |name: &str, tensor: &str| {
        put(dir.path().join(name), safetensors(&[(tensor, "F32", &[1])], Value::Null));
    };
    let first = || Checkpoint::open(dir.path()).expect("opens").names().next().map(String::from);
    file("one.safetensors", "one");
    assert_eq!(first().as_deref(), Some("one"));
    file("two.safetensors", "two");
    fails(Checkpoint::open(dir.path()), &["one.safetensors, two.safetensors", "name one of them"]);
    file("diffusion_pytorch_model.bf16.safetensors", "bf16");
    assert_eq!(first().as_deref(), Some("bf16"));
    file("diffusion_pytorch_model.safetensors", "plain");
    assert_eq!(first().as_deref(), Some("plain"));
}

fn no_cache() -> HubCache {
    HubCache::at("/nonexistent/hub")
}

fn diffusers_folder(root: &Path) {
    put(root.join("model_index.json"), "{}");
    put(root.join("transformer/config.json"), json!({"num_layers": 2}).to_string());
    put(root.join("scheduler/scheduler_config.json"), json!({"shift": 1.0}).to_string());
    put(root.join("text_encoder/config.json"), json!({"model_type": "gemma3"}).to_string());
    put(root.join("tokenizer/tokenizer.json"), "{}");
    let weights = safetensors(&[("proj_in.weight", "BF16", &[4, 2])], Value::Null);
    put(root.join("transformer/diffusion_pytorch_model.safetensors"), weights);
    let gemma = safetensors(&[("model.language_model.norm.weight", "BF16", &[4])], Value::Null);
    put(root.join("text_encoder/model.safetensors"), gemma);
}

#[test]
fn a_diffusers_folder_gives_its_parts() {
    let dir = TempDir::new().expect("dir");
    diffusers_folder(dir.path());
    let name = dir.path().to_str().expect("utf-8");
    let source = ModelSource::open_in(name, &Overrides::default(), &no_cache()).expect("opens");
    assert_eq!(source.version().expect("known"), Version::V2_0);
    assert_eq!(source.config(Component::Scheduler).expect("there")["shift"], 1.0);
    assert!(source.checkpoint(Component::Transformer).expect("there").contains("proj_in.weight"));
    let encoder = source.checkpoint(Component::TextEncoder).expect("there");
    assert!(encoder.contains("language_model.model.norm.weight"));
    assert_eq!(source.tokenizer().expect("there"), dir.path().join("tokenizer/tokenizer.json"));
    source.require([Component::Transformer, Component::TextEncoder, Component::Tokenizer]).expect("there");
    fails(source.config(Component::Vae), &["video VAE", "`model.vae`", "--vae"]);
    fails(source.checkpoint(Component::Connectors), &["no connectors here", "looked for `connectors`"]);
    fails(source.checkpoint(Component::Scheduler), &["no scheduler"]);

    let before = source.fingerprint().expect("readable");
    assert_eq!((before.len(), before.clone()), (64, source.fingerprint().expect("readable")));
    put(dir.path().join("transformer/config.json"), json!({"num_layers": 3}).to_string());
    assert_ne!(before, source.fingerprint().expect("readable"));

    put(dir.path().join("transformer/config.json"), "{\"num_layers\": 2,}");
    fails(source.config(Component::Transformer), &["transformer/config.json", "not JSON", "line 1"]);
    put(dir.path().join("transformer/config.json"), json!({"use_prompt_embeddings": false}).to_string());
    fails(source.version(), &["use_prompt_embeddings", "neither LTX-2.0 nor LTX-2.3"]);
    let v23 = json!({"use_prompt_embeddings": false, "cross_attn_mod": true});
    put(dir.path().join("transformer/config.json"), v23.to_string());
    assert_eq!(source.version().expect("known").to_string(), "2.3");
}

#[test]
fn a_missing_model_says_where_it_was_looked_for() {
    let open = |name: &str| ModelSource::open_in(name, &Overrides::default(), &no_cache());
    fails(open("./no-such-folder"), &["./no-such-folder", "no such file or folder"]);
    fails(open("Org/Name"), &["Org/Name", "/nonexistent/hub/models--Org--Name", "hf download Org/Name"]);
}

#[cfg(unix)]
#[test]
fn the_hub_cache_is_followed_through_its_links() {
    use std::os::unix::fs::symlink;
    let dir = TempDir::new().expect("dir");
    let repo = dir.path().join("hub/models--Org--Name");
    let snapshot = repo.join("snapshots/abc");
    diffusers_folder(&snapshot);
    let file = snapshot.join("transformer/diffusion_pytorch_model.safetensors");
    fs::create_dir_all(repo.join("blobs")).expect("folder");
    fs::rename(&file, repo.join("blobs/1234")).expect("rename");
    symlink("../../../blobs/1234", &file).expect("link");
    put(repo.join("refs/main"), "abc\n");
    fs::create_dir_all(repo.join("snapshots/old")).expect("folder");

    let home = dir.path().as_os_str().to_os_string();
    let hub = HubCache::from_vars(|key| (key == "HF_HOME").then(|| home.clone()));
    let open = |name: &str| ModelSource::open_in(name, &Overrides::default(), &hub);
    let source = open("Org/Name").expect("opens");
    assert_eq!(source.path(), snapshot);
    assert_eq!(source.checkpoint(Component::Transformer).expect("linked").len(), 1);
    fails(open("Org/Other"), &["models--Org--Other", "from HF_HOME"]);
    fails(open("Org/Name/ltx.safetensors"), &["ltx.safetensors", "download it again"]);
    fs::remove_file(repo.join("blobs/1234")).expect("remove");
    source.checkpoint(Component::Transformer).expect("opened before, and mapped");
    fails(
        open("Org/Name").expect("opens").checkpoint(Component::Transformer),
        &["diffusion_pytorch_model.safetensors"],
    );
    fs::remove_file(repo.join("refs/main")).expect("remove");
    fails(open("Org/Name"), &["refs/main", "does not hold one snapshot"]);
    fs::remove_dir(repo.join("snapshots/old")).expect("remove");
    open("Org/Name").expect("one snapshot needs no ref");
}

#[test]
fn cache_variables_have_the_hub_s_order() {
    let hub = |vars: &[(&str, &str)]| {
        let cache = HubCache::from_vars(|k| vars.iter().find(|(n, _)| *n == k).map(|(_, v)| (*v).into()));
        message(cache.resolve("o/n"))
    };
    assert!(hub(&[("HOME", "/h")]).contains("/h/.cache/huggingface/hub/models--o--n"));
    assert!(hub(&[("HF_HOME", "/x"), ("HOME", "/h")]).contains("/x/hub/models--o--n"));
    assert!(hub(&[("HF_HOME", "/x"), ("HF_HUB_CACHE", "/y")]).contains("/y/models--o--n"));
}

/// The header's `config` of a small LTX-2.0 file, with the keys that differ from the defaults.
fn official_config() -> Value {
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

const SINGLE: [(&str, &str, &[usize]); 7] = [
    ("model.diffusion_model.patchify_proj.weight", "BF16", &[4, 2]),
    ("model.diffusion_model.video_embeddings_connector.learnable_registers", "BF16", &[128, 8]),
    ("model.diffusion_model.audio_embeddings_connector.learnable_registers", "BF16", &[64, 8]),
    ("text_embedding_projection.aggregate_embed.weight", "BF16", &[8, 24]),
    ("vae.per_channel_statistics.mean-of-means", "BF16", &[128]),
    ("vae.per_channel_statistics.channel", "BF16", &[128]),
    ("vocoder.conv_pre.weight", "BF16", &[16, 128, 7]),
];

fn single_file(dir: &Path, name: &str, config: &Value) -> Result<ModelSource, WeightsError> {
    let bytes = safetensors(&SINGLE, json!({"config": config.to_string()}));
    let path = put(dir.join(name), bytes);
    ModelSource::open_in(path.to_str().expect("utf-8"), &Overrides::default(), &no_cache())
}

#[test]
fn a_single_file_gives_diffusers_names_and_configurations() {
    let dir = TempDir::new().expect("dir");
    let source = single_file(dir.path(), "ltx-2-19b-dev.safetensors", &official_config()).expect("opens");
    assert_eq!(source.version().expect("known"), Version::V2_0);
    assert!(source.checkpoint(Component::Transformer).expect("there").contains("proj_in.weight"));
    source.refuse_unread().expect("statistics of training are no error");
    let newer = [&SINGLE[..], &[("duration_head.proj.weight", "BF16", &[2])]].concat();
    let bytes = safetensors(&newer, json!({"config": official_config().to_string()}));
    let path = put(dir.path().join("newer.safetensors"), bytes);
    let newer = ModelSource::open_in(path.to_str().expect("utf-8"), &Overrides::default(), &no_cache()).expect("opens");
    fails(newer.refuse_unread(), &["newer.safetensors", "`duration_head.proj.weight` is not read"]);
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
    fails(source.checkpoint(Component::AudioVae), &["no audio VAE here", "`model.audio_vae`", "--audio-vae"]);
    fails(source.config(Component::TextEncoder), &["ltx-2-19b-dev", "`model.text_encoder`", "--text-encoder"]);
    fails(source.require([Component::Transformer, Component::TextEncoder]), &["no text encoder here", "Gemma-3"]);
    fails(source.tokenizer(), &["--tokenizer"]);
    assert_eq!(source.fingerprint().expect("readable").len(), 64);
    let distilled = single_file(dir.path(), "ltx-2-19b-distilled.safetensors", &official_config()).expect("opens");
    assert_eq!(distilled.config(Component::Scheduler).expect("derived")["shift_terminal"], Value::Null);
}

#[test]
fn a_text_encoder_from_elsewhere_brings_its_tokenizer() {
    let dir = TempDir::new().expect("dir");
    let model =
        put(dir.path().join("m.safetensors"), safetensors(&SINGLE, json!({"config": official_config().to_string()})));
    let gemma = dir.path().join("gemma");
    put(gemma.join("config.json"), "{}");
    put(gemma.join("tokenizer.json"), "{}");
    put(gemma.join("model.safetensors"), safetensors(&[("model.norm.weight", "BF16", &[4])], Value::Null));
    let open = |encoder: &Path| {
        let overrides = Overrides { text_encoder: encoder.to_str().map(String::from), ..Overrides::default() };
        ModelSource::open_in(model.to_str().expect("utf-8"), &overrides, &no_cache())
    };
    let source = open(&gemma).expect("opens");
    source.require([Component::TextEncoder, Component::Tokenizer]).expect("there");
    assert_eq!(source.tokenizer().expect("there"), gemma.join("tokenizer.json"));
    let encoder = source.checkpoint(Component::TextEncoder).expect("there");
    assert!(encoder.contains("language_model.model.norm.weight"));
    fails(open(&gemma.join("model.safetensors")), &["model.safetensors", "no text encoder here", "the folder"]);

    let whole = dir.path().join("diffusers");
    diffusers_folder(&whole);
    let source = open(&whole).expect("opens");
    assert_eq!(source.folder(Component::TextEncoder).expect("there"), whole.join("text_encoder"));
    assert_eq!(source.tokenizer().expect("there"), whole.join("tokenizer/tokenizer.json"));
}

/// An upsampler of one file is what its header says, and where that is silent what its tensors are.
#[test]
fn an_upsampler_file_tells_what_it_is() {
    let dir = TempDir::new().expect("dir");
    let ends = [("initial_conv.weight", &[32, 4, 3, 3, 3][..]), ("res_blocks.1.conv1.weight", &[32, 32, 3, 3, 3])];
    let config = |name: &str, conv: (&str, &[usize]), header: Value| {
        let tensors: Vec<_> = ends.iter().chain([&conv]).map(|(name, shape)| (*name, "BF16", *shape)).collect();
        let header = if header.is_null() { header } else { json!({"config": header.to_string()}) };
        let file = put(dir.path().join(name), safetensors(&tensors, header));
        let overrides = Overrides { upsampler: file.to_str().map(String::from), ..Overrides::default() };
        let source = ModelSource::open_in(dir.path().to_str().expect("utf-8"), &overrides, &no_cache())?;
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
fn single_files_that_no_code_computes_are_refused() {
    let dir = TempDir::new().expect("dir");
    let path = put(dir.path().join("bare.safetensors"), safetensors(&SINGLE, Value::Null));
    let bare = ModelSource::open_in(path.to_str().expect("utf-8"), &Overrides::default(), &no_cache());
    fails(bare, &["bare.safetensors", "`config`", "is missing"]);
    let with = |section: &str, key: &str, value: Value| {
        let mut config = official_config();
        config[section][key] = value;
        single_file(dir.path(), "x.safetensors", &config).expect("opens")
    };
    let source = with("transformer", "caption_proj_before_connector", json!(true));
    fails(source.version(), &["config.transformer.caption_projection_first_linear", "neither"]);
    let source = with("transformer", "qk_norm", json!("layer_norm"));
    fails(source.config(Component::Transformer), &["config.transformer.qk_norm", "layer_norm"]);
    let source = with("vae", "_class_name", json!("CausalDiffusionVAE"));
    fails(source.config(Component::Vae), &["config.vae._class_name", "CausalDiffusionVAE"]);
    let source = with("vae", "decoder_blocks", json!([["res_x", {"num_layers": 1}], ["attn", {}], ["res_x", 1]]));
    fails(source.config(Component::Vae), &["config.vae.decoder_blocks", "entry 1", "attn"]);
    let source = with("vocoder", "resblock", json!("2"));
    fails(source.config(Component::Vocoder), &["config.vocoder.resblock"]);
}

#[test]
fn the_2_3_video_vae_and_vocoder_are_derived() {
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
    let path = put(dir.path().join("x.safetensors"), safetensors(&tensors, json!({"config": config.to_string()})));
    let source =
        ModelSource::open_in(path.to_str().expect("utf-8"), &Overrides::default(), &no_cache()).expect("opens");
    assert_eq!(source.version().expect("known"), Version::V2_3);
    let vocoder = source.config(Component::Vocoder).expect("derived");
    assert_eq!((&vocoder["final_act_fn"], &vocoder["bwe_final_act_fn"]), (&Value::Null, &Value::Null));
    assert_eq!(vocoder["_class_name"], "LTX2VocoderWithBWE");
    assert_eq!((&vocoder["window_length"], &vocoder["hop_length"]), (&json!(512), &json!(80)));
    // The file above lacks the VAE's tensors; beside this one's VAE everything is LTX-2.0's.
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

#[test]
fn differences_to_the_declaration_are_listed() {
    let dir = TempDir::new().expect("dir");
    let tensors: [(&str, &str, &[usize]); 4] =
        [("a", "F32", &[2]), ("b", "F32", &[2, 3]), ("q", "I8", &[2]), ("statistics", "F32", &[1])];
    let path = put(dir.path().join("x.safetensors"), safetensors(&tensors, Value::Null));
    let checkpoint = Checkpoint::open(&path).expect("opens");
    let declared: [(&str, &[usize]); 6] =
        [("a", &[2]), ("b", &[3, 2]), ("q", &[2]), ("c.0", &[1]), ("c.1", &[1]), ("c.1", &[1])];
    let report = validate(&checkpoint, Component::Vae, declared);
    assert_eq!((report.matched, report.bytes), (1, 8));
    assert_eq!(report.missing, ["c.0", "c.1"]);
    assert_eq!(report.extra, ["statistics"]);
    assert_eq!(report.lines().len(), 5);
    let text = "2 missing (c.0, c.1); 1 mis-shaped (b: file [2, 3], model [3, 2]); 1 not floating point (q: i8); \
                1 that nothing reads (statistics)";
    assert_eq!(report.to_string(), text);
    fails(report.into_result(Component::Vae, &checkpoint), &["x.safetensors", "the video VAE", text]);
    let names: [(&str, &str, &[usize]); 5] = [
        ("a.weight", "F32", &[2]),
        ("a.weight_scale", "F32", &[]),
        ("a.input_scale", "F32", &[]),
        ("encoder.a", "F32", &[2]),
        ("encoders", "F32", &[1]),
    ];
    let path = put(dir.path().join("y.safetensors"), safetensors(&names, Value::Null));
    let checkpoint = Checkpoint::open(&path).expect("opens");
    let declared: [(&str, &[usize]); 1] = [("a.weight", &[2])];
    let report = validate(&checkpoint, Component::AudioVae, declared);
    assert_eq!((&report.extra[..], report.inert), (&["encoders".to_string()][..], 2));
    let why = ["y.safetensors", "1 that nothing reads (encoders)"];
    fails(report.into_result(Component::AudioVae, &checkpoint), &why);
}

#[test]
fn the_first_number_that_is_not_finite_is_found() {
    let dir = TempDir::new().expect("dir");
    let mut bytes = safetensors(&[("w", "BF16", &[2, 3])], Value::Null);
    let path = put(dir.path().join("x.safetensors"), &bytes);
    check_finite(&Checkpoint::open(&path).expect("opens").get("w").expect("there")).expect("zeros are finite");
    let at = bytes.len() - 4;
    bytes[at..at + 2].copy_from_slice(&half::bf16::NEG_INFINITY.to_le_bytes());
    let path = put(dir.path().join("y.safetensors"), &bytes);
    let view = Checkpoint::open(&path).expect("opens").get("w").expect("there");
    fails(check_finite(&view), &["y.safetensors", "`w` is -inf at [1, 1]"]);
    let position = |t: Tensor| first_non_finite(t.dtype(), &t.bytes());
    assert_eq!(position(ndarray::arr1(&[1.0f32, f32::MAX, f32::NAN]).into()), Some(2));
    assert_eq!(position(ndarray::arr1(&[f64::MAX, f64::INFINITY]).into()), Some(1));
    assert_eq!(position(ndarray::arr1(&[half::f16::MAX, half::f16::MIN]).into()), None);
    assert_eq!(position(ndarray::arr1(&[-1i32]).into()), None);
}

fn specs() -> Vec<TensorSpec> {
    let spec = |name: &str, dtype, shape: &[usize]| TensorSpec { name: name.into(), dtype, shape: shape.to_vec() };
    vec![spec("a.weight", DType::F32, &[8, 4]), spec("b", DType::BF16, &[5]), spec("c", DType::F32, &[3])]
}

fn make(spec: &TensorSpec) -> Tensor {
    let values = ndarray::ArrayD::from_shape_fn(spec.shape.clone(), |at| {
        ndarray::Dimension::slice(&at).iter().sum::<usize>() as f32 - 1.5
    });
    Tensor::F32(values).cast(spec.dtype).expect("float")
}

#[test]
fn a_written_component_reads_back() {
    let dir = TempDir::new().expect("dir");
    let model = dir.path().join("new/model");
    let config = json!({"width": 4});
    let write =
        || write_component::<WeightsError>(&model, Component::Transformer, &config, specs(), |spec| Ok(make(spec)));
    let folder = write().expect("written");
    assert_eq!(folder, model.join("transformer"));
    let source =
        ModelSource::open_in(model.to_str().expect("utf-8"), &Overrides::default(), &no_cache()).expect("opens");
    assert_eq!(source.config(Component::Transformer).expect("there"), config);
    let checkpoint = source.checkpoint(Component::Transformer).expect("there");
    for spec in specs() {
        assert_eq!(checkpoint.get(&spec.name).expect("there").to_tensor().expect("host"), make(&spec));
    }
    assert_eq!(checkpoint.files().next().map(|f| (f.1 - 128 - 10 - 12) % 64), Some(0), "data begin at 64 bytes");
    fails(write(), &["transformer", "already exists"]);
    assert_eq!(fs::read_dir(&model).expect("folder").count(), 1, "no temporary folder is left");
}

#[test]
fn a_sharded_component_reads_back() {
    let dir = TempDir::new().expect("dir");
    let mut writer =
        ComponentWriter::create(dir.path(), Component::TextEncoder, &json!({}), specs(), 130).expect("created");
    for spec in specs() {
        writer.write(&spec.name, &make(&spec)).expect("written");
    }
    let folder = writer.finish().expect("renamed");
    assert!(folder.join("model-00002-of-00002.safetensors").is_file());
    let checkpoint = Checkpoint::open(&folder).expect("opens");
    assert_eq!((checkpoint.files().count(), checkpoint.len()), (2, 3));
    assert!(checkpoint.path().ends_with("model.safetensors.index.json"));
}

#[test]
fn an_unfinished_component_leaves_nothing() {
    let dir = TempDir::new().expect("dir");
    let create = || ComponentWriter::create(dir.path(), Component::Vae, &json!({}), specs(), 1 << 20).expect("created");
    let mut writer = create();
    fails(writer.write("b", &make(&specs()[1])), &["`b` (bf16 [5])", "declared `a.weight` (f32 [8, 4])"]);
    writer.write("a.weight", &make(&specs()[0])).expect("written");
    fails(writer.finish(), &["`b` was declared and not written"]);
    drop(create());
    assert_eq!(fs::read_dir(dir.path()).expect("folder").count(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// A damaged file is an error or a file, never a panic; what opens can be read to its last byte.
    #[test]
    fn damaged_files_never_panic(cut in 0usize..400, flips in prop::collection::vec((0usize..400, any::<u8>()), 0..6)) {
        let mut bytes = safetensors(&[("a.weight", "F32", &[2, 3]), ("b", "BF16", &[7])], json!({"k": "v"}));
        for (at, value) in flips {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        bytes.truncate(cut.max(1));
        read_everything(&bytes);
    }

    /// Headers of arbitrary sizes and offsets.
    #[test]
    fn arbitrary_headers_never_panic(
        infos in prop::collection::vec((any::<u64>(), prop::collection::vec(any::<u64>(), 0..4), any::<u64>()), 0..4),
        length in prop::option::of(any::<u64>()),
        tail in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let mut header = Map::new();
        for (i, (from, shape, to)) in infos.into_iter().enumerate() {
            header.insert(format!("t{i}"), json!({"dtype": "F32", "shape": shape, "data_offsets": [from, to]}));
        }
        let text = Value::Object(header).to_string();
        let mut bytes = length.unwrap_or(text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.as_bytes());
        bytes.extend(tail);
        read_everything(&bytes);
    }
}

fn read_everything(bytes: &[u8]) {
    let dir = TempDir::new().expect("dir");
    let path = put(dir.path().join("x.safetensors"), bytes);
    match Checkpoint::open(&path) {
        Err(e) => assert!(e.to_string().contains("x.safetensors")),
        Ok(checkpoint) => {
            for name in checkpoint.names() {
                if let Ok(view) = checkpoint.get(name) {
                    let _ = first_non_finite(view.dtype(), view.bytes());
                }
            }
        }
    }
}
