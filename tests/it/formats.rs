//! Whole runs from quantized files give the bits of runs from the dequantized models, for all generations. What these
//! runs cover is listed in docs/reference/formats.md.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::newer_layouts::sharded_latents;
use crate::support::single_file::{self, TensorData, combined_parts, header, header_2_3, header_2_5, read};
use crate::support::{Case, cases, cpu, dumped, dumping, generate, link_parts, needs, plain, quick, request};
use crate::{lora, quantized};
use half::f16;
use ltx2::hlo::{DType, F8};
use ltx2::nn::Quantization;
use ltx2::pipeline::Runner;
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::programs::executor::Executor;
use ltx2::pjrt::Client;
use ltx2::runtime::{Engine, platforms};
use ltx2::tensor::Tensor;
use ltx2::weights::quantize::QuantizedForm;
use ltx2::weights::{Checkpoint, Component, Conversion, LoraFile, ModelSource, Overrides, ScaledLora, VersionFields};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

type Tensors = BTreeMap<String, TensorData>;

/// A matrix `NAME.weight` to store in a format.
struct Matrix {
    name: String,
    shape: [usize; 2],
    values: Vec<f32>,
}

/// A file to write.
#[derive(Default)]
struct Quantized {
    tensors: Tensors,
    metadata: HashMap<String, String>,
}

/// A format of safetensors files.
struct Format {
    label: &'static str,
    /// Divisor of the number of columns.
    columns: usize,
    write: fn(&mut Quantized, &Matrix),
}

const FORMATS: [Format; 9] = [
    Format {
        label: "fp8 with `weight_scale` and `input_scale`, Lightricks",
        columns: 1,
        write: |file, m| {
            file.fp8(m, false);
            file.add(m, "input_scale", Dtype::F32, &[], 1f32.to_le_bytes());
        },
    },
    Format { label: "fp8 with one scale per row", columns: 1, write: |file, m| file.fp8(m, true) },
    Format {
        label: "`float8_e4m3fn`, ComfyUI",
        columns: 1,
        write: |file, m| {
            file.fp8(m, false);
            file.mark(m, &json!({"format": "float8_e4m3fn"}));
        },
    },
    Format {
        label: "`float8_e5m2`, ComfyUI",
        columns: 1,
        write: |file, m| {
            let scale = m.largest(0..m.values.len()) / 57344.0;
            let codes: Vec<u8> = m.values.iter().map(|v| (f16::from_f32(v / scale).to_bits() >> 8) as u8).collect();
            file.add(m, "weight", Dtype::F8_E5M2, &m.shape, codes);
            file.add(m, "weight_scale", Dtype::F32, &[], scale.to_le_bytes());
            file.mark(m, &json!({"format": "float8_e5m2"}));
        },
    },
    Format {
        label: "`int8_tensorwise`, ComfyUI",
        columns: 1,
        write: |file, m| {
            file.int8(m, "weight", "weight_scale");
            file.mark(m, &json!({"format": "int8_tensorwise"}));
        },
    },
    Format {
        label: "`int8_tensorwise` with `convrot`, ComfyUI and Lightricks",
        columns: 256,
        write: |file, m| {
            file.int8(m, "weight", "weight_scale");
            file.mark(m, &json!({"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}));
        },
    },
    Format {
        label: "`nvfp4`, ComfyUI and Lightricks",
        columns: 16,
        write: |file, m| {
            let [rows, columns] = m.shape;
            let tiles = [rows.next_multiple_of(128), (columns / 16).next_multiple_of(4)];
            file.add(m, "weight", Dtype::U8, &[rows, columns / 2], random(rows * columns / 2));
            // e4m3 codes of 0.5 to 1.75.
            let scales: Vec<u8> = random(tiles[0] * tiles[1]).iter().map(|code| 0x30 + (code & 15)).collect();
            file.add(m, "weight_scale", Dtype::F8_E4M3, &tiles, scales);
            file.add(m, "weight_scale_2", Dtype::F32, &[], 0.03f32.to_le_bytes());
            file.mark(m, &json!({"format": "nvfp4"}));
        },
    },
    Format {
        label: "`Int8WeightOnlyConfig`, torchao",
        columns: 1,
        write: |file, m| {
            file.int8(m, "_weight_qdata", "_weight_scale");
            file.state(
                m,
                &json!({"_type": "Int8Tensor", "_data": {"act_quant_kwargs": null,
            "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}}),
            );
        },
    },
    Format {
        label: "`Float8WeightOnlyConfig`, torchao",
        columns: 1,
        write: |file, m| {
            file.fp8_as(m, true, "_weight_qdata", "_weight_scale");
            file.state(m, &json!({"_type": "Float8Tensor", "_data": {"act_quant_kwargs": null}}));
        },
    },
];

/// GGUF's types: name, number, elements and bytes of a block, and offsets of its f16 scales.
const GGUF: [(&str, u32, usize, usize, &[usize]); 12] = [
    ("Q8_0", 8, 32, 34, &[0]),
    ("Q4_0", 2, 32, 18, &[0]),
    ("Q4_1", 3, 32, 20, &[0, 2]),
    ("Q5_0", 6, 32, 22, &[0]),
    ("Q5_1", 7, 32, 24, &[0, 2]),
    ("Q2_K", 10, 256, 84, &[80, 82]),
    ("Q3_K", 11, 256, 110, &[108]),
    ("Q4_K", 12, 256, 144, &[0, 2]),
    ("Q5_K", 13, 256, 176, &[0, 2]),
    ("Q6_K", 14, 256, 210, &[208]),
    ("IQ4_NL", 20, 32, 18, &[0]),
    ("IQ4_XS", 23, 256, 136, &[0]),
];

/// Formats of ComfyUI, types of torchao, and types of GGUF with their numbers, that are refused.
const REFUSED_MARKERS: [&str; 3] = ["mxfp8", "convrot_w4a4", "asym_w4a8_int8"];
const REFUSED_TORCHAO: [&str; 2] = ["Int4Tensor", "AffineQuantizedTensor"];
const REFUSED_GGUF: [(&str, u32); 10] = [
    ("IQ1_S", 19),
    ("IQ1_M", 29),
    ("IQ2_XXS", 16),
    ("IQ2_XS", 17),
    ("IQ2_S", 22),
    ("IQ3_XXS", 18),
    ("IQ3_S", 21),
    ("TQ1_0", 34),
    ("TQ2_0", 35),
    ("MXFP4", 39),
];

/// Pseudo-random bytes.
fn random(count: usize) -> Vec<u8> {
    (0..count as u32).map(|i| (i.wrapping_add(7).wrapping_mul(2_654_435_761) >> 23) as u8).collect()
}

impl Matrix {
    fn largest(&self, range: std::ops::Range<usize>) -> f32 {
        self.values[range].iter().fold(1e-6, |most, v| most.max(v.abs()))
    }
}

impl Quantized {
    fn add(&mut self, m: &Matrix, leaf: &str, dtype: Dtype, shape: &[usize], bytes: impl AsRef<[u8]>) {
        self.tensors.insert(format!("{}.{leaf}", m.name), (dtype, shape.to_vec(), bytes.as_ref().to_vec()));
    }

    fn mark(&mut self, m: &Matrix, conf: &Value) {
        let text = conf.to_string();
        self.add(m, "comfy_quant", Dtype::U8, &[text.len()], text);
    }

    fn state(&mut self, m: &Matrix, conf: &Value) {
        self.metadata.insert(format!("{}.weight", m.name), conf.to_string());
    }

    fn fp8(&mut self, m: &Matrix, by_row: bool) {
        self.fp8_as(m, by_row, "weight", "weight_scale");
    }

    fn fp8_as(&mut self, m: &Matrix, by_row: bool, weight: &str, weight_scale: &str) {
        let [rows, columns] = m.shape;
        let step = if by_row { columns } else { rows * columns };
        let scales: Vec<f32> = (0..m.values.len()).step_by(step).map(|i| m.largest(i..i + step) / F8::MAX).collect();
        let codes: Vec<u8> = m.values.iter().enumerate().map(|(i, v)| F8::from_f32(v / scales[i / step]).0).collect();
        self.add(m, weight, Dtype::F8_E4M3, &m.shape, codes);
        let shape: &[usize] = if by_row { &[rows, 1] } else { &[] };
        self.add(m, weight_scale, Dtype::F32, shape, bytemuck::cast_slice(&scales));
    }

    fn int8(&mut self, m: &Matrix, weight: &str, weight_scale: &str) {
        let [rows, columns] = m.shape;
        let scales: Vec<f32> = (0..rows).map(|row| m.largest(row * columns..(row + 1) * columns) / 127.0).collect();
        let codes = m.values.iter().enumerate().map(|(i, v)| ((v / scales[i / columns]).round() as i8).cast_unsigned());
        self.add(m, weight, Dtype::I8, &m.shape, codes.collect::<Vec<_>>());
        self.add(m, weight_scale, Dtype::F32, &[rows, 1], bytemuck::cast_slice(&scales));
    }

    fn write(&self, path: &Path) {
        let views = self.tensors.iter();
        let views = views.map(|(k, (d, s, b))| (k, TensorView::new(*d, s.clone(), b).expect("a tensor")));
        let bytes = safetensors::serialize(views, Some(self.metadata.clone())).expect("bytes");
        fs::write(path, bytes).expect("written");
    }
}

/// Returns the values of a stored tensor that is bf16 or f32.
fn values((dtype, shape, bytes): &TensorData) -> Vec<f32> {
    let dtype = if *dtype == Dtype::BF16 { DType::BF16 } else { DType::F32 };
    Tensor::from_bytes(dtype, shape, bytes).expect("a tensor").to_f32().into_iter().collect()
}

fn matrix(name: &str, tensor: &TensorData) -> Option<Matrix> {
    let (name, &[rows, columns]) = (name.strip_suffix(".weight")?, &tensor.1[..]) else { return None };
    Some(Matrix { name: name.into(), shape: [rows, columns], values: values(tensor) })
}

/// The components whose matrices are stored in each format, with the generations of the models.
type Coverage = BTreeMap<(&'static str, &'static str), BTreeSet<&'static str>>;

const PARTS: [Component; 3] = [Component::Transformer, Component::Connectors, Component::TextEncoder];

/// A model of each generation.
const MODELS: [(&str, &str); 3] = [
    ("2.0", "tests/fixtures/models/tiny_a"),
    ("2.3", "tests/fixtures/models/tiny_2_3"),
    ("2.5", "tests/fixtures/models/tiny_2_5"),
];

/// Returns the tensors of a component's folder.
fn tensors_of(folder: &Path) -> Tensors {
    let files = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    files.filter(|file| file.extension().is_some_and(|e| e == "safetensors")).flat_map(|file| read(&file)).collect()
}

/// Writes a copy of a model whose parts have other tensors.
fn model_with(model: &str, folder: &Path, mut tensors: impl FnMut(Component) -> Quantized) {
    fs::create_dir(folder).expect("a folder");
    link_parts(model, folder);
    for part in PARTS {
        let (from, to) = (Path::new(model).join(part.folder()), folder.join(part.folder()));
        if !from.exists() {
            continue;
        }
        fs::remove_file(&to).expect("a link");
        fs::create_dir(&to).expect("a folder");
        fs::copy(from.join("config.json"), to.join("config.json")).expect("copied");
        tensors(part).write(&to.join(format!("{}.safetensors", part.weights_stem().expect("weights"))));
    }
}

/// Stores the matrices of a component, each in the least used format that fits.
fn quantized_part(
    model: &str,
    part: Component,
    generation: &'static str,
    formats: &'static [Format],
    coverage: &mut Coverage,
) -> Quantized {
    let (mut file, mut uses) = (Quantized::default(), vec![0; formats.len()]);
    for (name, tensor) in tensors_of(&Path::new(model).join(part.folder())) {
        let Some(matrix) = matrix(&name, &tensor) else {
            file.tensors.insert(name, tensor);
            continue;
        };
        let fits = |i: &usize| matrix.shape[1].is_multiple_of(formats[*i].columns);
        let chosen = (0..formats.len()).filter(fits).min_by_key(|i| uses[*i]).expect("a format");
        uses[chosen] += 1;
        let format = &formats[chosen];
        (format.write)(&mut file, &matrix);
        coverage.entry((format.label, part.folder())).or_default().insert(generation);
    }
    file
}

/// Returns the tensors of a file in f32.
fn dequantized(path: &Path) -> Tensors {
    let file = Checkpoint::open(path).expect("opens");
    let is_scale = |name: &&str| name.ends_with(".weight_scale") || name.ends_with(".input_scale");
    let wide = |name: &str| {
        let view = file.get_float(name).expect("floats");
        let mut wide = view.to_tensor().expect("readable").to_f32();
        if let Some(scales) = file.scales_of(name).expect("supported").filter(|_| view.dtype() == DType::F8E4M3FN) {
            let scales: Vec<f32> = scales.to_tensor().expect("readable").to_f32().into_iter().collect();
            let scales = scales.iter().cycle();
            wide.outer_iter_mut().zip(scales).for_each(|(mut row, scale)| row *= *scale);
        }
        let bytes = wide.iter().flat_map(|v| v.to_le_bytes()).collect();
        (name.to_string(), (Dtype::F32, view.shape().to_vec(), bytes))
    };
    file.names().filter(|name| !is_scale(name)).map(wide).collect()
}

/// Writes two models to a folder: one with the formats, and one with the same values in f32.
fn both(
    model: &str,
    generation: &'static str,
    formats: &'static [Format],
    folder: &Path,
    coverage: &mut Coverage,
) -> [PathBuf; 2] {
    let [narrow, wide] = ["quantized", "f32"].map(|name| folder.join(format!("{generation} {name}")));
    model_with(model, &narrow, |part| quantized_part(model, part, generation, formats, coverage));
    let file = |part: Component| Quantized { tensors: dequantized(&narrow.join(part.folder())), ..Default::default() };
    model_with(model, &wide, file);
    [narrow, wide]
}

/// Writes two of Lightricks' files to a folder: one that is converted to `form`, and one with the same values in f32.
fn both_converted(model: &str, config: &Value, form: QuantizedForm, folder: &Path) -> [PathBuf; 2] {
    let [original, narrow, wide] =
        ["original", "converted", "f32"].map(|name| folder.join(format!("{} {name}.safetensors", form.name())));
    single_file::write(&original, &single_file::combined_of(model), Some(config));
    let conversion = Conversion::plan(&original, Some(form)).expect("layers");
    conversion.write(fs::File::create(&narrow).expect("a file"), &narrow, &|_| {}).expect("written");
    assert!(conversion.quantized > 0);
    single_file::write(&wide, &dequantized(&narrow), Some(config));
    [narrow, wide]
}

/// Returns the bytes of GGUF's string.
fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// A tensor of a GGUF file: type, shape in the model, and bytes.
type GgufTensor = (u32, Vec<usize>, Vec<u8>);

/// Writes a GGUF file. Tensors that are not whole blocks are stored with another shape, as ComfyUI-GGUF's converter does.
fn write_gguf(path: &Path, config: &Value, tensors: &BTreeMap<String, GgufTensor>) {
    let texts = [("general.architecture", "ltxv"), ("config", &config.to_string())];
    let mut keys: Vec<Vec<u8>> =
        texts.iter().map(|(key, value)| [text(key), 8u32.to_le_bytes().to_vec(), text(value)].concat()).collect();
    let (mut infos, mut data) = (Vec::new(), Vec::new());
    for (name, (kind, shape, bytes)) in tensors {
        let block = GGUF.iter().find(|(_, id, ..)| id == kind).map_or(1, |(_, _, block, ..)| *block);
        let mut stored = shape.clone();
        if !shape.last().is_none_or(|columns| columns.is_multiple_of(block)) {
            stored = vec![shape.iter().product::<usize>() / block, block];
            let key = [text(&format!("comfy.gguf.orig_shape.{name}")), [9u32, 5].map(u32::to_le_bytes).concat()];
            let sizes = shape.iter().flat_map(|size| (*size as i32).to_le_bytes()).collect();
            keys.push([key.concat(), (shape.len() as u64).to_le_bytes().to_vec(), sizes].concat());
        }
        infos.extend([text(name), (stored.len() as u32).to_le_bytes().to_vec()].concat());
        stored.iter().rev().for_each(|size| infos.extend((*size as u64).to_le_bytes()));
        infos.extend([&kind.to_le_bytes()[..], &(data.len() as u64).to_le_bytes()].concat());
        data.extend_from_slice(bytes);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    let counts = [tensors.len() as u64, keys.len() as u64].map(u64::to_le_bytes).concat();
    let mut file = [&b"GGUF\x03\0\0\0"[..], &counts, &keys.concat(), &infos].concat();
    file.resize(file.len().next_multiple_of(32), 0);
    fs::write(path, [file, data].concat()).expect("written");
}

/// Writes GGUF files of the transformer and the connectors: with all types, and with the same values in f32.
fn both_gguf(model: &str, generation: &'static str, folder: &Path, coverage: &mut Coverage) -> [PathBuf; 2] {
    let [narrow, wide] = ["types", "f32"].map(|name| folder.join(format!("{generation} {name}.gguf")));
    let (mut tensors, mut uses) = (BTreeMap::new(), [0; GGUF.len()]);
    for (name, tensor) in combined_parts(model, &PARTS[..2]) {
        let name = name.trim_start_matches("model.diffusion_model.").to_string();
        let plain = || values(&tensor).iter().flat_map(|v| v.to_le_bytes()).collect();
        let Some(matrix) = matrix(&name, &tensor) else {
            tensors.insert(name, (0, tensor.1.clone(), plain()));
            continue;
        };
        let fits = |i: &usize| matrix.values.len().is_multiple_of(GGUF[*i].2);
        let Some(chosen) = (0..GGUF.len()).filter(fits).min_by_key(|i| uses[*i]) else {
            tensors.insert(name, (0, tensor.1.clone(), plain()));
            continue;
        };
        uses[chosen] += 1;
        let (label, kind, block, bytes, scales) = GGUF[chosen];
        let mut codes = random(matrix.values.len() / block * bytes);
        for block in codes.chunks_exact_mut(bytes) {
            scales.iter().for_each(|at| block[*at..at + 2].copy_from_slice(&f16::from_f32(0.0005).to_le_bytes()));
        }
        let part = if name.contains("connector") || name.contains("projection.") { PARTS[1] } else { PARTS[0] };
        coverage.entry((label, part.folder())).or_default().insert(generation);
        tensors.insert(name, (kind, tensor.1, codes));
    }
    // Without a configuration, sizes that do not follow from the tensors would be those of the published models.
    let mut config = match generation {
        "2.0" => header(),
        "2.3" => header_2_3(),
        _ => header_2_5(),
    };
    if generation == "2.5" {
        let sizes = json!({"connector_num_layers": 1, "connector_attention_head_dim": 10, "audio_connector_attention_head_dim": 6});
        let transformer = config["transformer"].as_object_mut().expect("an object");
        transformer.extend(sizes.as_object().expect("an object").clone());
    }
    write_gguf(&narrow, &config, &tensors);
    let plain = dequantized(&narrow).into_iter().map(|(name, (_, shape, bytes))| (name, (0, shape, bytes))).collect();
    write_gguf(&wide, &config, &plain);
    [narrow, wide]
}

/// Returns a folder with the other components of single files. LTX-2.5's own text encoder states its version.
fn other_parts(model: &str, generation: &str, folder: &Path) -> PathBuf {
    let parts = folder.join(format!("{generation} parts"));
    fs::create_dir(&parts).expect("a folder");
    link_parts(model, &parts);
    let read =
        |path: &str| -> Value { serde_json::from_slice(&fs::read(parts.join(path)).expect("a file")).expect("JSON") };
    let mut config = read("text_encoder/config.json");
    if let Some(version) = VersionFields::for_transformer(&read("transformer/config.json")) {
        config[VersionFields::GEMMA] = version.gemma_version.into();
    }
    let encoder = parts.join("text_encoder");
    fs::remove_file(&encoder).expect("a link");
    fs::create_dir(&encoder).expect("a folder");
    fs::write(encoder.join("config.json"), config.to_string()).expect("written");
    let weights = Path::new(model).join("text_encoder/model.safetensors");
    fs::copy(weights, encoder.join("model.safetensors")).expect("copied");
    parts
}

/// Runs a generation's request on a model with a LoRA; other components are those of `parts`.
fn run(
    client: &Client,
    generation: &str,
    model: &Path,
    parts: Option<&Path>,
    lora: Option<&Arc<LoraFile>>,
) -> Vec<Tensor> {
    let part = |name: &str| parts.map(|parts| parts.join(name).to_str().expect("UTF-8").to_string());
    let overrides = Overrides {
        text_encoder: part("text_encoder"),
        tokenizer: part("tokenizer"),
        vae: part("vae"),
        audio_vae: part("audio_vae"),
        vocoder: part("vocoder"),
        ..Overrides::default()
    };
    let source = Arc::new(ModelSource::open(model.to_str().expect("UTF-8"), &overrides).expect("a model"));
    let mut executor = Executor::new(Engine::new(client.clone(), quick()), source.clone());
    let loras: Vec<ScaledLora> =
        lora.map(|file| ScaledLora { file: file.clone(), strength: 0.5 }).into_iter().collect();
    executor.set_loras(&loras).expect("fits");
    let mut model = OpenModel::open(&source).expect("complete");
    // As in the other tests of these requests, whose programs are in the compile cache.
    model.configs = model.configs.with_vocoder_clamp(false);
    let mut runner = Runner::new(model, executor, plain(DType::F32));
    let case =
        |name: &str| -> Case { cases("pipeline").into_iter().find(|case| case.name.ends_with(name)).expect("a case") };
    let request = match generation {
        "2.0" => request(&case("/tiny_a_cfg"), &runner.model),
        "2.3" => request(&case("/tiny_2_3_guided"), &runner.model),
        _ => crate::pipeline_2_5::guided(&runner.model),
    };
    let made = generate(&mut runner, &request, &dumping(None));
    ["prompt_embeds", "latents.video", "latents.audio", "video", "audio"].map(|name| dumped(&made, name).clone()).into()
}

/// Whether the values of each tensor are finite and not all equal.
fn is_result(tensors: &[Tensor]) -> bool {
    tensors
        .iter()
        .map(Tensor::to_f32)
        .all(|t| t.iter().all(|v| v.is_finite()) && t.iter().any(|v| v != &t.as_slice().expect("dense")[0]))
}

#[needs(cpu)]
fn runs_from_quantized_files_equal_runs_from_dequantized_files() {
    let (client, dir, mut coverage) = (cpu(8), tempfile::tempdir().expect("a folder"), Coverage::new());
    for (generation, model) in MODELS {
        let parts = other_parts(model, generation, dir.path());
        let parts = Some(parts.as_path());
        let mut pairs = vec![
            (both(model, generation, &FORMATS, dir.path(), &mut coverage), None),
            (both_gguf(model, generation, dir.path(), &mut coverage), parts),
        ];
        match generation {
            "2.0" => pairs.push((both_converted(model, &header(), QuantizedForm::Fp8, dir.path()), parts)),
            "2.3" => pairs.push((both_converted(model, &header_2_3(), QuantizedForm::Int8, dir.path()), parts)),
            _ => {}
        }
        for (files, parts) in pairs {
            let [got, want] = files.each_ref().map(|file| run(&client, generation, file, parts, None));
            assert!(is_result(&want), "{generation}");
            assert!(got == want, "{}", files[0].display());
        }
    }
    check_refused(dir.path());
    assert_page_is_current(&coverage);
}

/// Formats whose values are not those of 8-bit floats, which are used unchanged with `runtime.weights: fp8`, and are read
/// as f32, so that they are rounded at the same places as a file of f32.
const IN_F32: std::ops::Range<usize> = 3..7;

/// A LoRA is merged into the dequantized weights.
#[needs(cpu)]
fn lora_on_quantized_model_equals_lora_on_dequantized_model() {
    let (client, dir) = (cpu(8), tempfile::tempdir().expect("a folder"));
    let (generation, model) = MODELS[0];
    let files = both(model, generation, &FORMATS[IN_F32], dir.path(), &mut Coverage::new());
    let path = dir.path().join("lora.safetensors");
    let lora = lora::of_modules(&path, &lora::model(Path::new(model)), "diffusion_model", &lora::MODULES);
    let [got, want] = files.each_ref().map(|file| run(&client, generation, file, None, Some(&lora)));
    assert!(got == want);
    assert!(got != run(&client, generation, &files[0], None, None), "the LoRA has an effect");
}

/// Each device reads its shard of a quantized weight.
#[needs(cpu)]
fn sharded_pass_from_quantized_files_equals_pass_from_dequantized_files() {
    let (client, dir) = (cpu(8), tempfile::tempdir().expect("a folder"));
    let (generation, model) = MODELS[1];
    let files = both(model, generation, &FORMATS, dir.path(), &mut Coverage::new());
    let [got, want] = files.map(|file| sharded_latents(&client, file.to_str().expect("UTF-8"), "tensor-sequence"));
    assert!(got.as_ref().into_iter().eq(want.as_ref()));
}

/// `runtime.weights` quantizes the values of a file, whatever its format.
#[needs(cpu)]
fn quantized_files_are_requantized_like_dequantized_files() {
    let (client, dir) = (cpu(1), tempfile::tempdir().expect("a folder"));
    let fp8 = quantized::build(DType::F32, Quantization::Fp8);
    let int8 = quantized::looped(DType::F32, quantized::INTEGERS);
    for (name, build) in [("tiny_a", fp8), ("tiny_v2_5", int8)] {
        let case = quantized::case(name);
        let files = both(case.model.to_str().expect("UTF-8"), name, &FORMATS[IN_F32], dir.path(), &mut Coverage::new());
        let [got, want] = files.map(|file| {
            let source = lora::model(&file);
            quantized::run(&client, &case, &source, source.clone().into(), &build)
        });
        assert!(got == want, "{name}");
    }
}

/// Fails unless a file with one matrix is refused with an error that contains `word`.
fn refused(file: &Path, word: &str) {
    let error = Checkpoint::open(file).expect_err(word).to_string();
    assert!(error.contains(word) && error.contains("not supported"), "{word}: {error}");
}

/// Checks that the formats that the page lists as refused are refused.
fn check_refused(folder: &Path) {
    let m = Matrix { name: "a".into(), shape: [2, 256], values: vec![1.0; 512] };
    let [safetensors, gguf] = ["a.safetensors", "a.gguf"].map(|name| folder.join(name));
    let file = |write: &dyn Fn(&mut Quantized)| {
        let mut file = Quantized::default();
        write(&mut file);
        file.write(&safetensors);
    };
    for name in REFUSED_MARKERS {
        file(&|file| {
            file.add(&m, "weight", Dtype::U8, &[2, 256], random(512));
            file.mark(&m, &json!({"format": name}));
        });
        refused(&safetensors, name);
    }
    for name in REFUSED_TORCHAO {
        file(&|file| {
            file.int8(&m, "_weight_qdata", "_weight_scale");
            file.state(&m, &json!({"_type": name}));
        });
        refused(&safetensors, name);
    }
    for (name, kind) in REFUSED_GGUF {
        write_gguf(&gguf, &json!({}), &[("a.weight".to_string(), (kind, vec![2, 256], random(512)))].into());
        refused(&gguf, &name.to_lowercase());
    }
}

/// Compares docs/reference/formats.md with what the runs cover, or writes it.
fn assert_page_is_current(coverage: &Coverage) {
    let mut page = "# Formats\n\nGenerated by `make reference`; do not edit.\n\nFor each format, `cargo test --test it formats` stores \
                    matrices of a small model in it, and requires each tensor of a run, from prompt to frames and audio, to equal \
                    the run from the dequantized model in every bit. The table lists the generations. The host decodes weights, so the \
                    platform does not matter; these runs used the CPU. Video and audio autoencoders are read in bf16, f16 and f32.\n\n\
                    | format | transformer | connectors | text encoder |\n|---|---|---|---|\n"
        .to_string();
    let gguf = GGUF.map(|(label, ..)| label);
    for label in FORMATS.iter().map(|format| format.label).chain(gguf) {
        let kind = if gguf.contains(&label) { "GGUF " } else { "" };
        let cell = |part: Component| {
            let covered = coverage.get(&(label, part.folder()));
            covered.map_or(String::new(), |all| all.iter().copied().collect::<Vec<_>>().join(", "))
        };
        let [transformer, connectors, text_encoder] = PARTS.map(cell);
        assert!(!transformer.is_empty(), "no run covers {label}");
        writeln!(page, "| {kind}{label} | {transformer} | {connectors} | {text_encoder} |").unwrap();
    }
    let names = |all: &[&str]| all.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    writeln!(
        page,
        "\nRefused, with an error that names the format: ComfyUI's {}; torchao's {}; GGUF's {}.\n\nOn the devices, \
         `runtime.weights` selects the type of the blocks' linear layers:\n\n| `runtime.weights` | CPU | CUDA | TPU |\n|---|---|---|---|",
        names(&REFUSED_MARKERS),
        names(&REFUSED_TORCHAO),
        names(&REFUSED_GGUF.map(|(name, _)| name))
    )
    .unwrap();
    for weights in ["bf16", "fp8", "int8", "int8-convrot"] {
        let [on_gpu, on_tpu] = match weights {
            "int8-convrot" => ["timed on a GPU by `scripts/gpu/pipelines.sh`", "compiled by `make test-full`"],
            _ => ["run on a GPU by `make test-gpu`", "compiled by `make test-tpu`"],
        };
        let verified = [("cpu", "run"), ("cuda", on_gpu), ("tpu", on_tpu)];
        let cells = verified.map(|(platform, how)| {
            let unrolls = (platforms::spec_by_name(platform).lowering)("").unroll_layers;
            if weights == "fp8" && !unrolls { "refused" } else { how }
        });
        writeln!(page, "| `{weights}` | {} |", cells.join(" | ")).unwrap();
    }
    let path = Path::new("docs/reference/formats.md");
    if std::env::var_os("LTX2_WRITE_REFERENCE").is_some() {
        fs::write(path, &page).unwrap();
    }
    assert!(
        fs::read_to_string(path).unwrap_or_default() == page,
        "docs/reference/formats.md is not current: run `make reference`"
    );
}
