//! Models with unsupported or inconsistent contents: torchao-quantized weights, block-scaled weights, tokens without
//! embeddings.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Output;

use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::single_file::{TINY, TensorData, combined, header, read, write};
use crate::support::{self, full, needs};

/// Configuration of a short run.
const RUN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny.yml");

type Tensors = BTreeMap<String, TensorData>;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn path(p: &Path) -> &str {
    p.to_str().expect("UTF-8")
}

fn ltx2(arguments: &[&str]) -> Output {
    support::ltx2().args(arguments).output().expect("the binary runs")
}

/// Creates tiny_a in a new folder of `dir` from links, except for copies of `parts` with each part's tensors in one
/// file.
fn model_with_copied_parts(dir: &Path, name: &str, parts: &[&str]) -> PathBuf {
    let model = dir.join(name);
    fs::create_dir(&model).expect("a folder");
    for entry in fs::read_dir(TINY).expect("a folder").map(|e| e.expect("an entry")) {
        let own = parts.iter().any(|part| entry.file_name() == **part);
        let target = model.join(entry.file_name());
        if !own {
            symlink(entry.path(), target).expect("a link");
            continue;
        }
        fs::create_dir(&target).expect("a folder");
        let weights = |file: &Path| path(file).contains(".safetensors");
        let files = fs::read_dir(entry.path()).expect("a folder").map(|e| e.expect("a file").path());
        for file in files.filter(|file| !weights(file)) {
            fs::copy(&file, target.join(file.file_name().expect("a name"))).expect("copied");
        }
    }
    model
}

fn tensors_of(part: &str) -> Tensors {
    let files = fs::read_dir(Path::new(TINY).join(part)).expect("a folder").map(|e| e.expect("a file").path());
    files.filter(|file| file.extension().is_some_and(|e| e == "safetensors")).flat_map(|file| read(&file)).collect()
}

fn weights_file(model: &Path, part: &str) -> PathBuf {
    let stem = if part == "text_encoder" { "model" } else { "diffusion_pytorch_model" };
    model.join(part).join(format!("{stem}.safetensors"))
}

/// Converts a weight to 8-bit floats with scales of this shape.
fn narrow(tensors: &mut Tensors, key: &str, scales: &[usize]) {
    let (dtype, shape, bytes) = tensors.get_mut(key).expect("there");
    (*dtype, *bytes) = (Dtype::F8_E4M3, vec![0x38; shape.iter().product()]);
    let ones = vec![1f32.to_le_bytes(); scales.iter().product()].concat();
    tensors.insert(format!("{key}_scale"), (Dtype::F32, scales.to_vec(), ones));
}

/// Runs `check`, a dry run and a run of a model; returns exit code and output of each. The run's plugin does not exist,
/// so a model without errors fails with that.
fn verdicts(dir: &Path, model: &[&str]) -> [(Option<i32>, String); 3] {
    let plugin = dir.join("pjrt_cpu_plugin.so");
    fs::write(&plugin, "no library").expect("written");
    let out = dir.join("out.mp4");
    let run = ["generate", "-c", RUN, "-o", path(&out)];
    let dry = [&run[..], &["--dry-run", "--model"]].concat();
    let run = [&run[..], &["--platform", path(&plugin), "--model"]].concat();
    let said = [vec!["check"], dry, run].map(|command| {
        let done = ltx2(&[&command[..], model].concat());
        (done.status.code(), format!("{}{}", text(&done.stdout), text(&done.stderr)))
    });
    assert!(!out.exists());
    said
}

fn refused(dir: &Path, model: &[&str], words: &[&str]) {
    for (code, said) in verdicts(dir, model) {
        assert_eq!(code, Some(1), "{said}");
        words.iter().for_each(|word| assert!(said.contains(word), "`{word}` is not in: {said}"));
        assert!(!said.contains("pjrt_cpu_plugin.so"), "looked for a device first: {said}");
    }
}

fn accepted(dir: &Path, model: &[&str]) {
    let [check, dry, run] = verdicts(dir, model);
    assert_eq!((check.0, dry.0), (Some(0), Some(0)), "{}{}", check.1, dry.1);
    assert!(run.1.contains("pjrt_cpu_plugin.so"), "{}", run.1);
}

#[needs(cpu)]
fn block_scaled_fp8_weights_are_rejected_before_compiling() {
    let dir = TempDir::new().expect("a folder");
    let name = "transformer_blocks.1.attn1.to_q.weight";
    let file = dir.path().join("ltx-2-tiny-dev.safetensors");
    let encoder = format!("{TINY}/text_encoder");
    for (i, (scales, is_read)) in
        [(&[][..], true), (&[32, 1], true), (&[2, 2], false), (&[8, 4], false)].iter().enumerate()
    {
        let model = model_with_copied_parts(dir.path(), &i.to_string(), &["transformer"]);
        let mut tensors = tensors_of("transformer");
        assert_eq!(tensors[name].1, [32, 32]);
        narrow(&mut tensors, name, scales);
        write(&weights_file(&model, "transformer"), &tensors, None);
        let key = format!("model.diffusion_model.{name}");
        let mut tensors = combined();
        narrow(&mut tensors, &key, scales);
        write(&file, &tensors, Some(&header()));
        let single = [path(&file), "--text-encoder", &encoder];
        let forms = [(&[path(&model)][..], name), (&single, &key)];
        // The folder and the file in turn; in the full test both.
        for (model, key) in forms.into_iter().enumerate().filter(|(n, _)| full() || *n == i % 2).map(|(_, form)| form) {
            if *is_read {
                accepted(dir.path(), model);
                continue;
            }
            let had =
                format!("`{key}_scale` has shape {scales:?}, but 8-bit weights need one scale, or one for each of 32");
            refused(dir.path(), model, &[&had, "use bf16 weights"]);
        }
    }
}

/// Token ids without an embedding would read other rows.
#[needs(cpu)]
fn tokens_without_embeddings_are_rejected_before_compiling() {
    let dir = TempDir::new().expect("a folder");
    let model = model_with_copied_parts(dir.path(), "model", &["tokenizer"]);
    accepted(dir.path(), &[path(&model)]);
    let file = model.join("tokenizer/tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&file).expect("a file")).expect("JSON");
    tokenizer["model"]["vocab"]["beyond"] = json!(400);
    fs::write(&file, tokenizer.to_string()).expect("written");
    let config = model.join("text_encoder/config.json");
    let words = [
        "tokenizer/tokenizer.json: token ids reach 400, but the text encoder of ",
        path(&config),
        "a vocab_size of 400",
    ];
    refused(dir.path(), &[path(&model)], &words);
    let random = ltx2(&["generate", "-c", RUN, "--dry-run", "--weights", "random", "--model", path(&model)]);
    let said = text(&random.stderr);
    assert!(random.status.code() == Some(1) && words.iter().all(|word| said.contains(word)), "{said}");
}

/// Quantizes a weight to 8-bit integers with a scale per row; returns integers, scales and the dequantized weight.
fn quantized((dtype, shape, bytes): &TensorData) -> (TensorData, TensorData, TensorData) {
    assert_eq!(*dtype, Dtype::BF16);
    let values: Vec<f32> = bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect();
    let (mut numbers, mut scales, mut restored) = (vec![], vec![], vec![]);
    for row in values.chunks_exact(shape[1]) {
        let scale = row.iter().fold(1e-5f32, |most, v| most.max(v.abs())) / 127.0;
        scales.extend(scale.to_le_bytes());
        for value in row {
            let number = (value / scale).round_ties_even().clamp(-128.0, 127.0);
            numbers.push((number as i8).cast_unsigned());
            restored.extend(bf16::from_f32(number * scale).to_le_bytes());
        }
    }
    let (numbers, scales) = ((Dtype::I8, shape.clone(), numbers), (Dtype::F32, vec![shape[0], 1], scales));
    (numbers, scales, (Dtype::BF16, shape.clone(), restored))
}

/// Returns the metadata of a weight as torchao 0.18 writes it.
fn form(shape: &[usize]) -> String {
    let data = json!({"act_quant_kwargs": null, "block_size": [1, shape[1]],
        "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}});
    json!({"_type": "Int8Tensor", "_data": data, "_tensor_data_names": ["qdata", "scale"]}).to_string()
}

/// Writes a component of both models: linear layers as torchao's 8-bit integers, and dequantized.
fn write_both(part: &str, torchao: &Path, plain: &Path) {
    let (mut narrow, mut wide) = (Tensors::new(), Tensors::new());
    let mut metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    for (name, tensor) in tensors_of(part) {
        let is_linear = tensor.1.len() == 2 && !name.contains("embed_tokens");
        let Some(module) = name.strip_suffix(".weight").filter(|_| is_linear) else {
            narrow.insert(name.clone(), tensor.clone());
            wide.insert(name, tensor);
            continue;
        };
        let (numbers, scales, restored) = quantized(&tensor);
        narrow.insert(format!("{module}._weight_qdata"), numbers);
        narrow.insert(format!("{module}._weight_scale"), scales);
        metadata.insert(name.clone(), form(&tensor.1));
        wide.insert(name, restored);
    }
    let count = metadata.len() - 1;
    assert!(count > 20, "{count} weights of {part}");
    let names: Vec<&String> = metadata.keys().filter(|name| *name != "format").collect();
    metadata.insert("tensor_names".into(), json!(names).to_string());
    let views = narrow.iter().map(|(k, (d, s, b))| (k, TensorView::new(*d, s.clone(), b).expect("a tensor")));
    let bytes = safetensors::serialize(views, Some(metadata)).expect("bytes");
    fs::write(weights_file(torchao, part), bytes).expect("written");
    write(&weights_file(plain, part), &wide, None);
    let file = torchao.join(part).join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&file).expect("a file")).expect("JSON");
    let kind = json!({"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"group_size": null,
        "granularity": {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}, "set_inductor_config": true}});
    config["quantization_config"] = json!({"quant_method": "torchao", "quant_type": {"default": kind},
        "quant_type_kwargs": {}, "include_input_output_embeddings": false, "modules_to_not_convert": null,
        "untie_embedding_weights": false});
    fs::write(&file, config.to_string()).expect("written");
}

#[needs(cpu)]
fn torchao_int8_weights_match_dequantized_weights() {
    let dir = TempDir::new().expect("a folder");
    let parts = ["transformer", "text_encoder"];
    let models = ["torchao", "plain"].map(|name| model_with_copied_parts(dir.path(), name, &parts));
    parts.iter().for_each(|part| write_both(part, &models[0], &models[1]));
    let hashes = [&models[0], &models[1], Path::new(TINY)].map(|model| {
        let checked = ltx2(&["check", path(model)]);
        let said = text(&checked.stdout);
        assert!(checked.status.success() && said.contains("text_to_video: ready"), "{said}{}", text(&checked.stderr));
        let out = TempDir::new().expect("a folder");
        let mp4 = out.path().join("a.mp4");
        let done = ltx2(&["generate", "-c", support::tiny(), "--model", path(model), "-o", path(&mp4)]);
        assert!(done.status.success(), "{}", text(&done.stderr));
        let sidecar = fs::read(mp4.with_extension("json")).expect("a sidecar");
        let sidecar: Value = serde_json::from_slice(&sidecar).expect("JSON");
        assert!(["frames", "samples"].iter().all(|part| sidecar["sha256"][part].is_string()), "{sidecar}");
        sidecar["sha256"].clone()
    });
    assert_eq!(hashes[0], hashes[1], "the same numbers");
    assert_ne!(hashes[0], hashes[2], "rounded ones");
}
