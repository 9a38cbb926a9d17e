//! Tests of converted files; quantized layers have the bytes of comfy-kitchen 0.2.40 (`scripts/oracle/quantized.py`).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::*;
use super::quantized::{fixture, gguf};
use super::{fails, open, put, safetensors};
use crate::quantize::QuantizedForm;
use ltx2_stablehlo::DType;

const CONFIG: &str = r#"{"transformer":{}}"#;

fn model(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/models")).join(name)
}

/// Converts a file, and checks that the reported progress adds up to all bytes.
fn convert(input: &Path, output: &Path, form: Option<QuantizedForm>) -> Conversion {
    let plan = Conversion::plan(input, form).unwrap_or_else(|e| panic!("{e}"));
    let written = std::sync::atomic::AtomicU64::new(0);
    let count = |bytes| _ = written.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
    plan.write(File::create(output).expect("a file"), output, &count).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(written.into_inner(), plan.bytes());
    plan
}

/// Returns the type, shape and bytes of each stored tensor.
fn stored(file: &Path) -> BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(file).expect("a file");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    tensors.iter().map(|(name, t)| (name.to_string(), (t.dtype(), t.shape().to_vec(), t.data().to_vec()))).collect()
}

#[test]
fn converted_layers_have_comfy_kitchen_bytes() {
    let dir = TempDir::new().expect("dir");
    let (source, values) = (fixture("convert.safetensors"), stored(&fixture("convert_values.safetensors")));
    let given = stored(&source);
    for (form, layers) in [(QuantizedForm::Fp8, 1), (QuantizedForm::Int8, 1), (QuantizedForm::Int8Convrot, 3)] {
        let [first, again] = ["first", "again"].map(|name| dir.path().join(name));
        let plan = convert(&source, &first, Some(form));
        assert_eq!((plan.quantized, plan.copied, plan.unsupported), (layers, 0, 0));
        let got = stored(&first);
        let of_form =
            |(name, tensor): (&String, _)| Some((name.strip_prefix(&format!("{}/", form.name()))?.into(), tensor));
        let want: BTreeMap<String, _> = values.iter().filter_map(of_form).collect();
        for (name, tensor) in &got {
            let want = want.get(name).copied().or(given.get(name)).unwrap_or_else(|| panic!("{name}"));
            // The last bit of rotated values depends on the processor on which comfy-kitchen runs.
            if form == QuantizedForm::Int8Convrot && name.ends_with("_scale") {
                let [got, want] = [tensor, want].map(|(_, _, bytes)| bytemuck::pod_collect_to_vec::<u8, f32>(bytes));
                assert!(
                    got.iter().zip(&want).all(|(got, want)| (got / want - 1.0).abs() < 3e-7),
                    "{name}: {got:?} {want:?}"
                );
                continue;
            }
            assert_eq!(tensor, want, "{} {name}", form.name());
        }
        assert_eq!(got.len(), given.len() + 2 * layers, "{}", form.name());
        let file = Checkpoint::open(&first).expect("opens");
        assert_eq!(file.metadata("config"), Some(CONFIG));
        assert_eq!(file.names().count(), given.len() + usize::from(form == QuantizedForm::Fp8));
        // Layers that already have the requested form are copied.
        let plan = convert(&first, &again, Some(form));
        assert_eq!((plan.quantized, plan.copied), (0, layers));
        assert!(fs::read(&first).expect("a file") == fs::read(&again).expect("a file"), "{}", form.name());
    }
}

#[test]
fn quantized_tensors_become_bf16() {
    let dir = TempDir::new().expect("dir");
    let output = dir.path().join("bf16.safetensors");
    convert(&fixture("comfy.safetensors"), &output, None);
    let (file, values) =
        [output, fixture("comfy_values.safetensors")].map(|path| Checkpoint::open(&path).expect("opens")).into();
    assert_eq!(
        file.names().collect::<Vec<_>>(),
        ["convrot", "e4m3", "e5m2", "int8", "nvfp4"].map(|n| format!("{n}.weight"))
    );
    for name in ["convrot", "e4m3", "e5m2", "int8"] {
        let got = file.get(&format!("{name}.weight")).expect("there");
        assert_eq!(got.dtype(), DType::BF16, "{name}");
        let want = values.get(name).expect("a value").converted(DType::BF16);
        assert_eq!(got.read().expect("readable"), want.read().expect("readable"), "{name}");
    }
}

#[test]
fn fp8_conversion_keeps_activation_scales() {
    let dir = TempDir::new().expect("dir");
    let output = dir.path().join("fp8.safetensors");
    let plan = convert(&fixture("comfy.safetensors"), &output, Some(QuantizedForm::Fp8));
    assert_eq!((plan.quantized, plan.copied), (0, 1));
    let (got, given) = (stored(&output), stored(&fixture("comfy.safetensors")));
    for name in ["e4m3.weight", "e4m3.weight_scale", "e4m3.input_scale", "e4m3.comfy_quant"] {
        assert_eq!(got.get(name), given.get(name), "{name}");
    }
    assert_eq!((got.len(), got["int8.weight"].0), (8, safetensors::Dtype::BF16));
}

/// The tokenizer, the text projections and the configuration of a text encoder's file are copied.
#[test]
fn text_encoder_conversion_changes_only_linear_layers() {
    let dir = TempDir::new().expect("dir");
    let tensors: [(&str, &str, &[usize]); 5] = [
        ("model.layers.3.self_attn.q_proj.weight", "BF16", &[2, 256]),
        ("model.layers.3.input_layernorm.weight", "BF16", &[256]),
        ("model.embed_tokens.weight", "BF16", &[4, 256]),
        ("text_embedding_projection.video_aggregate_embed.weight", "BF16", &[2, 256]),
        ("tokenizer_json", "U8", &[5]),
    ];
    let metadata = json!({"gemma_config": "{}", "gemma_version": "a"});
    let input = put(dir.path().join("gemma.safetensors"), safetensors(&tensors, metadata));
    let output = dir.path().join("int8.safetensors");
    assert_eq!(convert(&input, &output, Some(QuantizedForm::Int8Convrot)).quantized, 1);
    let (got, given) = (stored(&output), stored(&input));
    assert_eq!(got.len(), given.len() + 2);
    assert_eq!(got["model.layers.3.self_attn.q_proj.weight"].0, safetensors::Dtype::I8);
    assert!(given.iter().all(|(name, tensor)| name.contains("q_proj") || got[name] == *tensor));
    let file = Checkpoint::open(&output).expect("opens");
    assert_eq!([file.metadata("gemma_config"), file.metadata("gemma_version")], [Some("{}"), Some("a")]);
}

/// The tensor names in the folder are those of Google's Gemma 3 repository.
#[test]
fn gemma_3_folder_becomes_one_file_with_config() {
    let dir = TempDir::new().expect("dir");
    let config = json!({"model_type": "gemma3", "text_config": {"num_hidden_layers": 1}});
    put(dir.path().join("config.json"), config.to_string());
    let tensors: [(&str, &str, &[usize]); 3] = [
        ("language_model.model.layers.0.self_attn.q_proj.weight", "BF16", &[2, 256]),
        ("language_model.model.norm.weight", "BF16", &[256]),
        ("vision_tower.x.weight", "BF16", &[4, 4]),
    ];
    put(dir.path().join("model.safetensors"), safetensors(&tensors, Value::Null));
    let output = dir.path().join("out/int8.safetensors");
    fs::create_dir(dir.path().join("out")).expect("a folder");
    assert_eq!(convert(dir.path(), &output, Some(QuantizedForm::Int8Convrot)).quantized, 1);
    let file = Checkpoint::open(&output).expect("opens");
    let names = ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "vision_tower.x.weight"];
    assert!(file.names().eq(names), "{:?}", file.names().collect::<Vec<_>>());
    assert_eq!(file.metadata("gemma_config"), Some(&*config.to_string()));
}

/// The published int8-convrot file has 1440 8-bit layers.
#[test]
fn int8_convrot_selects_the_layers_of_the_published_file() {
    let table = include_str!("../../../../tests/fixtures/keys_2.5.tsv");
    let mut names: Vec<String> = vec![];
    for line in table.lines().filter(|line| line.starts_with("model.diffusion_model.")) {
        let (name, shape) = (line.split('\t').next().expect("a name"), line.rsplit('\t').next().expect("a shape"));
        if !name.ends_with(".weight") || shape.split('x').count() != 2 {
            continue;
        }
        let Some((before, rest)) = name.split_once('{') else {
            names.push(name.into());
            continue;
        };
        let (range, after) = rest.split_once('}').expect("a closed range");
        let (first, last) = range.split_once('-').expect("a range");
        let numbers = first.parse::<usize>().expect("a number")..=last.parse().expect("a number");
        names.extend(numbers.map(|number| format!("{before}{number}{after}")));
    }
    let tensors: Vec<(&str, &str, &[usize])> = names.iter().map(|name| (&**name, "BF16", &[1, 256][..])).collect();
    let dir = TempDir::new().expect("dir");
    let path = put(dir.path().join("x.safetensors"), safetensors(&tensors, json!({"config": CONFIG})));
    let plan = Conversion::plan(&path, Some(QuantizedForm::Int8Convrot)).expect("a plan");
    assert_eq!((plan.quantized, plan.copied, plan.unsupported), (1440, 0, 0));
    let count = |part: &str| plan.tensors().filter(|spec| spec.dtype == DType::I8 && spec.name.contains(part)).count();
    let parts = [".transformer_blocks.47.", "video_embeddings_connector.", "audio_embeddings_connector."];
    assert_eq!(parts.map(count), [28, 48, 48]);
}

/// A NaN or infinite scale in an fp8 file is an error, like a non-finite value in a layer that is quantized.
#[test]
fn scales_of_copied_layers_are_checked() {
    let dir = TempDir::new().expect("dir");
    let name = "model.diffusion_model.transformer_blocks.1.attn1.to_q.weight";
    let scale = format!("{name}_scale");
    let tensors: [(&str, &str, &[usize]); 2] = [(name, "F8_E4M3", &[4, 32]), (&scale, "F32", &[])];
    for value in [f32::NAN, f32::INFINITY] {
        let mut bytes = safetensors(&tensors, json!({"config": CONFIG}));
        let end = bytes.len() - 4;
        bytes[end..].copy_from_slice(&value.to_le_bytes());
        let path = put(dir.path().join("x.safetensors"), bytes);
        let plan = Conversion::plan(&path, Some(QuantizedForm::Fp8)).map(|_| ());
        fails(plan, &["x.safetensors", &format!("`{scale}` is {value}"), "damaged"]);
    }
}

/// The source has a scale for a bf16 weight, left by an earlier quantization. The new file has only one scale, and its
/// header lacks the keys that describe the format of the source.
#[test]
fn stale_scale_is_not_duplicated_and_format_keys_are_dropped() {
    let dir = TempDir::new().expect("dir");
    let name = "model.diffusion_model.transformer_blocks.1.attn1.to_q.weight";
    let scale = format!("{name}_scale");
    let tensors: [(&str, &str, &[usize]); 2] = [(name, "BF16", &[4, 256]), (&scale, "F32", &[])];
    let metadata = json!({"config": CONFIG, "quantization_config": "{}", "_quantization_metadata": "{}", "kept": "a"});
    let input = put(dir.path().join("x.safetensors"), safetensors(&tensors, metadata));
    for form in QuantizedForm::ALL.map(Some).into_iter().chain([None]) {
        let output = dir.path().join("out.safetensors");
        let plan = convert(&input, &output, form);
        assert_eq!(plan.tensors().filter(|spec| spec.name == scale).count(), 1, "{form:?}");
        let file = Checkpoint::open(&output).expect("opens");
        let keys: Vec<&str> = file.all_metadata().into_keys().collect();
        assert_eq!(keys, ["config", "format", "kept"], "{form:?}");
    }
}

#[test]
fn diffusers_transformer_becomes_one_file_with_config() {
    let dir = TempDir::new().expect("dir");
    for (name, blocks) in [("tiny_a", 3), ("tiny_2_3", 3), ("dit_2_5", 2)] {
        let (folder, output) = (model(name).join("transformer"), dir.path().join(format!("{name}.safetensors")));
        let plan = convert(&folder, &output, Some(QuantizedForm::Int8));
        assert_eq!(plan.quantized, (blocks - 1) * 28, "{name}");
        let (of_folder, of_file) = (open(&model(name)).expect("opens"), open(&output).expect("opens"));
        let [want, got] = [&of_folder, &of_file].map(|s| s.config(Component::Transformer).expect("a configuration"));
        for (key, want) in want.as_object().expect("an object").iter().filter(|(key, _)| !key.starts_with('_')) {
            assert!(
                got[key] == *want || got[key].as_f64().is_some() && got[key].as_f64() == want.as_f64(),
                "{key}: {got}"
            );
        }
        let [want, got] = [&of_folder, &of_file].map(|s| s.checkpoint(Component::Transformer).expect("tensors"));
        assert!(want.names().eq(got.names()));
        // A file of the folder is converted as the folder.
        let stem = folder.join("diffusion_pytorch_model.safetensors");
        let weights = if stem.is_file() { stem } else { stem.with_extension("safetensors.index.json") };
        let by_file = dir.path().join("by_file.safetensors");
        convert(&weights, &by_file, Some(QuantizedForm::Int8));
        assert!(fs::read(&by_file).expect("a file") == fs::read(&output).expect("a file"), "{name}");
        let kept = |name: &&str| !name.contains("transformer_blocks.") || name.contains("transformer_blocks.0.");
        for name in want.names().filter(kept) {
            assert_eq!(want.get(name).unwrap().read().unwrap(), got.get(name).unwrap().read().unwrap(), "{name}");
        }
    }
}

#[test]
fn gguf_transformer_gets_names_and_config() {
    let dir = TempDir::new().expect("dir");
    let input = super::gguf_model::published(dir.path().join("x.gguf"), Version::V2_5);
    let plan = Conversion::plan(&input, Some(QuantizedForm::Int8Convrot)).expect("a plan");
    assert_eq!((plan.quantized, plan.copied), (3, 0));
    for (name, dtype) in
        [("transformer_blocks.0.ff.net.0.proj", DType::I8), ("prompt_adaln_single.linear", DType::BF16)]
    {
        let name = format!("model.diffusion_model.{name}.weight");
        let spec = plan.tensors().find(|spec| spec.name == name).expect("there");
        assert_eq!(spec.dtype, dtype, "{name}");
    }
}

#[test]
fn unusable_inputs_are_refused() {
    let dir = TempDir::new().expect("dir");
    let plan = |path: &Path, form| Conversion::plan(path, form).map(|_| ());
    let int8 = Some(QuantizedForm::Int8);
    fails(plan(&model("tiny_a"), int8), &["tiny_a: no weights", "several components", "tiny_a/transformer"]);
    fails(
        plan(&model("tiny_a/vae"), int8),
        &["config.json", "`_class_name` is \"AutoencoderKLLTX2Video\"", "LTX2VideoTransformer3DModel"],
    );
    let vae: [(&str, &str, &[usize]); 1] = [("vae.decoder.conv_in.conv.weight", "BF16", &[4, 2])];
    let path = put(dir.path().join("vae.safetensors"), safetensors(&vae, Value::Null));
    fails(plan(&path, int8), &["vae.safetensors", "int8: there are no linear layers of transformer blocks or a text"]);
    plan(&path, None).expect("nothing has to be quantized");
    fails(
        plan(&path, Some(QuantizedForm::Int8Convrot)),
        &["linear layers of transformer blocks, connectors or a text"],
    );
    fails(
        plan(&put(dir.path().join("wan.gguf"), gguf(&[("general.architecture", "wan")], &[])), None),
        &["wan.gguf", "is \"wan\" in this GGUF file", "only LTX's transformer (\"ltxv\") and Gemma 3 (\"gemma3\")"],
    );
    let split = dir.path().join("split");
    let part = put(split.join("split_files/vae/x.safetensors"), safetensors(&vae, Value::Null));
    fails(plan(&split, int8), &["split: no weights", "pass one file", part.to_str().expect("utf-8")]);
    let lora: [(&str, &str, &[usize]); 2] = [
        ("diffusion_model.transformer_blocks.1.attn1.to_q.lora_A.weight", "BF16", &[4, 32]),
        ("transformer_blocks.1.attn1.to_q.oft_r", "BF16", &[32, 4]),
    ];
    let path = put(dir.path().join("lora.safetensors"), safetensors(&lora, Value::Null));
    fails(plan(&path, None), &["lora.safetensors", "`diffusion_model.", "is part of a LoRA", "--lora"]);
    let bare: [(&str, &str, &[usize]); 1] = [("transformer_blocks.1.attn1.to_q.weight", "BF16", &[4, 32])];
    let path = put(dir.path().join("bare/x.safetensors"), safetensors(&bare, Value::Null));
    fails(plan(&path, None), &["x.safetensors", "`transformer_blocks.1.", "name of diffusers", "pass the folder"]);
    let path = put(dir.path().join("bare/x-00001-of-00002.safetensors"), safetensors(&bare, Value::Null));
    fails(plan(&path, None), &["x-00001-of-00002.safetensors", "one of several shards; pass their folder"]);
    put(dir.path().join("gemma4/config.json"), json!({"model_type": "gemma4_unified"}).to_string());
    let path = put(dir.path().join("gemma4/model.safetensors"), safetensors(&vae, Value::Null));
    fails(plan(&path, None), &["gemma4/config.json", "`model_type` is \"gemma4_unified\"", "of Gemma 3 can be"]);
    let name = "model.diffusion_model.transformer_blocks.1.attn1.to_q.weight";
    let layer: [(&str, &str, &[usize]); 1] = [(name, "BF16", &[4, 32])];
    let path = put(dir.path().join("x.safetensors"), safetensors(&layer, Value::Null));
    fails(plan(&path, Some(QuantizedForm::Int8Convrot)), &["nothing to convert to int8-convrot", "multiple of 256"]);
    let mut config: Value =
        serde_json::from_slice(&fs::read(model("tiny_a/transformer/config.json")).unwrap()).unwrap();
    config["causal_offset"] = json!(2);
    let folder = dir.path().join("transformer");
    put(folder.join("config.json"), config.to_string());
    fs::read_dir(model("tiny_a/transformer")).unwrap().flatten().filter(|e| e.file_name() != "config.json").for_each(
        |e| {
            fs::copy(e.path(), folder.join(e.file_name())).expect("copied");
        },
    );
    fails(
        plan(&folder, int8),
        &["config.json", "`causal_offset` is 2, but programs that read Lightricks' single files assume 1"],
    );
}
