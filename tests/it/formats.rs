//! Whole runs from quantized files give the bits of runs from the dequantized models, for all generations. What these
//! runs cover is listed in docs/reference/formats.md.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::newer_layouts::sharded_latents;
use crate::support::passes::scattered;
use crate::support::single_file::{TensorData, combined_parts, header, header_2_3, header_2_5, read};
use crate::support::{
    Case, cases, cpu, dumped, dumping, full, generate, link_parts, ltx2, needs, plain, quick, request,
};
use crate::{lora, quantized};
use half::f16;
use ltx2::config::{Config, Runtime, WeightType};
use ltx2::hlo::{DType, F8};
use ltx2::models::families;
use ltx2::nn::{Build, Quantization};
use ltx2::pipeline::Runner;
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::plan::setup;
use ltx2::pipeline::programs::executor::Executor;
use ltx2::pjrt::Client;
use ltx2::pjrt::discover::Platform;
use ltx2::runtime::Engine;
use ltx2::tensor::Tensor;
use ltx2::weights::{Checkpoint, Component, LoraFile, ModelSource, Overrides, ScaledLora, VersionFields};
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

/// Number of matrices that are stored in each format, by component and generation.
#[derive(Default)]
struct Coverage(BTreeMap<Cell, usize>);

/// Format, folder of the component, and generation.
type Cell = (&'static str, &'static str, &'static str);

impl Coverage {
    fn count(&self, format: &'static str, part: Component, generation: &'static str) -> usize {
        self.0.get(&(format, part.folder(), generation)).copied().unwrap_or_default()
    }

    /// Returns the index of the format that the fewest matrices of a component have, and counts it. Of equally rare
    /// formats, it is one with the largest blocks. `formats`: index, format, and size of a block of each candidate.
    fn choose(
        &mut self,
        part: Component,
        generation: &'static str,
        formats: impl Iterator<Item = (usize, &'static str, usize)>,
    ) -> Option<usize> {
        let (chosen, format, _) =
            formats.min_by_key(|(_, format, block)| (self.count(format, part, generation), Reverse(*block)))?;
        *self.0.entry((format, part.folder(), generation)).or_default() += 1;
        Some(chosen)
    }
}

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

/// Stores the matrices of a component, each in the rarest format that fits.
fn quantized_part(
    model: &str,
    part: Component,
    generation: &'static str,
    formats: &'static [Format],
    coverage: &mut Coverage,
) -> Quantized {
    let mut file = Quantized::default();
    for (name, tensor) in tensors_of(&Path::new(model).join(part.folder())) {
        let Some(matrix) = matrix(&name, &tensor) else {
            file.tensors.insert(name, tensor);
            continue;
        };
        let all = formats.iter().enumerate().map(|(i, format)| (i, format.label, format.columns));
        let fitting = all.filter(|(.., columns)| matrix.shape[1].is_multiple_of(*columns));
        let chosen = coverage.choose(part, generation, fitting).expect("a format");
        (formats[chosen].write)(&mut file, &matrix);
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

/// Returns the values of the wide models' tensors: small pseudo-random numbers, and about 1 for scales.
fn wide_values(name: &str, shape: &[usize]) -> TensorData {
    let values = scattered(name, shape).to_f32();
    let values = match shape {
        [_, columns] => values / (*columns as f32).sqrt(),
        _ => values * 0.1 + 1.0,
    };
    (Dtype::F32, shape.to_vec(), Tensor::F32(values).bytes().into_owned())
}

/// Writes a copy of a model in which some matrices of the text encoder and the connectors have rows of whole blocks of
/// every format. The text encoder has only what a GGUF file can state, and LTX-2.5's states its version.
fn wide_model(model: &str, generation: &str, folder: &Path) -> PathBuf {
    let config = |part: Component| -> Value {
        let file = Path::new(model).join(part.folder()).join("config.json");
        serde_json::from_slice(&fs::read(file).expect("a file")).expect("JSON")
    };
    let [transformer, mut connectors, mut encoder] = PARTS.map(config);
    let text = encoder["text_config"].as_object_mut().expect("an object");
    text.insert("intermediate_size".into(), 256.into());
    let layers = if generation == "2.5" {
        let pattern = ["sliding_attention", "sliding_attention", "full_attention"];
        text.insert("layer_types".into(), pattern.repeat(5).into());
        let full = &text["per_layer_config"]["1"];
        let full = json!({"2": full, "5": full, "8": full, "11": full, "14": full});
        text.insert("per_layer_config".into(), full);
        15
    } else {
        text.remove("layer_types");
        text.insert("query_pre_attn_scalar".into(), text["head_dim"].clone());
        31
    };
    text.insert("num_hidden_layers".into(), layers.into());
    let columns = text["hidden_size"].as_u64().expect("a size") as usize * (layers + 1);
    connectors["text_proj_in_factor"] = (layers + 1).into();
    if let Some(version) = VersionFields::for_transformer(&transformer) {
        encoder[VersionFields::GEMMA] = version.gemma_version.into();
    }
    let network = families::text_encoder(&encoder).expect("valid").program(None, 1, 8, &Build::new(DType::F32));
    let params = network.expect("builds").params;
    let wide = folder.join(generation);
    model_with(model, &wide, |part| {
        let mut tensors = tensors_of(&Path::new(model).join(part.folder()));
        if part == Component::TextEncoder {
            let all = params.iter().flat_map(|param| param.source.tensors());
            tensors = all.map(|(name, shape)| (name.to_string(), wide_values(name, shape))).collect();
        }
        for (name, tensor) in tensors.iter_mut().filter(|(name, _)| name.ends_with("text_proj_in.weight")) {
            *tensor = wide_values(name, &[tensor.1[0], columns]);
        }
        Quantized { tensors, ..Quantized::default() }
    });
    for (part, config) in [(PARTS[1], connectors), (PARTS[2], encoder)] {
        fs::write(wide.join(part.folder()).join("config.json"), config.to_string()).expect("written");
    }
    wide
}

/// Returns the header's configuration of Lightricks' file of a model.
fn config(generation: &str) -> Value {
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
    config
}

/// Converts two files of a model with `ltx2 convert`: Lightricks' file to `form`, and that of the text encoder to
/// int8-convrot. Returns the new files, and files with the same values in f32.
fn both_converted(model: &Path, generation: &str, form: &str, folder: &Path) -> [ModelFiles; 2] {
    let encoder = model.join("text_encoder");
    let stated = fs::read_to_string(encoder.join("config.json")).expect("a file");
    let originals = [
        (combined_parts(model.to_str().expect("UTF-8"), &PARTS[..2]), ("config", config(generation).to_string()), form),
        (tensors_of(&encoder), ("gemma_config", stated), "int8-convrot"),
    ];
    let [[narrow, wide], [narrow_encoder, wide_encoder]] = originals.map(|(tensors, (key, config), form)| {
        let metadata = HashMap::from([(key.to_string(), config)]);
        let [original, narrow, wide] =
            ["original", "converted", "f32"].map(|name| folder.join(format!("{generation} {key} {name}.safetensors")));
        Quantized { tensors, metadata: metadata.clone() }.write(&original);
        let done = ltx2().arg("convert").args([&original, &narrow]).args(["--weights", form]).output().expect("runs");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success() && !said.contains("(0 layers quantized"), "{said}");
        Quantized { tensors: dequantized(&narrow), metadata }.write(&wide);
        [narrow, wide]
    });
    let files = |model_file, encoder| ModelFiles {
        model: model_file,
        parts: Some(model.to_path_buf()),
        text_encoder: Some(encoder),
    };
    [files(narrow, narrow_encoder), files(wide, wide_encoder)]
}

/// Returns the bytes of GGUF's string.
fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// A tensor of a GGUF file: type, shape in the model, and bytes.
type GgufTensor = (u32, Vec<usize>, Vec<u8>);

/// Writes a GGUF file with metadata of texts and numbers. Tensors that are not whole blocks are stored with another
/// shape, as ComfyUI-GGUF's converter does.
fn write_gguf(path: &Path, metadata: &Value, tensors: &BTreeMap<String, GgufTensor>) {
    let entry = |(key, value): (&String, &Value)| {
        let value = match (value.as_str(), value.as_u64()) {
            (Some(value), _) => [8u32.to_le_bytes().to_vec(), text(value)].concat(),
            (_, Some(whole)) => [4, whole as u32].map(u32::to_le_bytes).concat(),
            _ => [6u32.to_le_bytes(), (value.as_f64().expect("a number") as f32).to_le_bytes()].concat(),
        };
        [text(key), value].concat()
    };
    let mut keys: Vec<Vec<u8>> = metadata.as_object().expect("an object").iter().map(entry).collect();
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

/// Writes a GGUF file whose matrices have the types that `choose` returns (`None`: f32), and one with the same values
/// in f32.
fn both_types(
    files: [PathBuf; 2],
    metadata: &Value,
    tensors: Tensors,
    mut choose: impl FnMut(&str, &Matrix) -> Option<usize>,
) -> [PathBuf; 2] {
    let types = tensors.into_iter().map(|(name, tensor)| {
        let matrix = matrix(&name, &tensor);
        let Some((matrix, chosen)) = matrix.and_then(|matrix| choose(&name, &matrix).map(|chosen| (matrix, chosen)))
        else {
            let plain = values(&tensor).iter().flat_map(|v| v.to_le_bytes()).collect();
            return (name, (0, tensor.1, plain));
        };
        let (_, kind, block, bytes, scales) = GGUF[chosen];
        let mut codes = random(matrix.values.len() / block * bytes);
        for block in codes.chunks_exact_mut(bytes) {
            scales.iter().for_each(|at| block[*at..at + 2].copy_from_slice(&f16::from_f32(0.0005).to_le_bytes()));
        }
        (name, (kind, tensor.1, codes))
    });
    write_gguf(&files[0], metadata, &types.collect());
    let plain = dequantized(&files[0]).into_iter().map(|(name, (_, shape, bytes))| (name, (0, shape, bytes)));
    write_gguf(&files[1], metadata, &plain.collect());
    files
}

/// Returns llama.cpp's name of a tensor of Gemma 3.
fn llama_cpp(name: &str) -> String {
    let (module, leaf) = name.strip_prefix("language_model.model.").and_then(|name| name.rsplit_once('.')).expect(name);
    let layer = module.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
    let (layer, module) = layer.map_or((String::new(), module), |(layer, module)| (format!("blk.{layer}."), module));
    let own = match module {
        "embed_tokens" => "token_embd",
        "norm" => "output_norm",
        "input_layernorm" => "attn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "post_attention_layernorm" => "post_attention_norm",
        "pre_feedforward_layernorm" => "ffn_norm",
        "post_feedforward_layernorm" => "post_ffw_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        other => panic!("{other}"),
    };
    format!("{layer}{own}.{leaf}")
}

/// Returns the metadata of a GGUF file of Gemma 3.
fn gguf_metadata(encoder: &Value) -> Value {
    let text = &encoder["text_config"];
    let mut all =
        json!({"general.architecture": "gemma3", "gemma3.rope.freq_base": 1e6, "gemma3.rope.scaling.factor": 8.0});
    for (key, value) in [
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("block_count", "num_hidden_layers"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.key_length", "head_dim"),
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("attention.sliding_window", "sliding_window"),
    ] {
        all[format!("gemma3.{key}")] = text[value].clone();
    }
    all
}

/// Writes GGUF files of the transformer with the connectors, and of Gemma 3, each with all types and with the same values
/// in f32. llama.cpp's converter, unlike ComfyUI-GGUF's, stores only rows of whole blocks. `number` distinguishes the
/// files.
fn both_gguf(
    model: &Path,
    generation: &'static str,
    folder: &Path,
    number: usize,
    coverage: &mut Coverage,
) -> [ModelFiles; 2] {
    let names =
        |kind: &str| ["types", "f32"].map(|name| folder.join(format!("{generation} {kind} {number} {name}.gguf")));
    let fitting = |size: usize| {
        let all = GGUF.iter().enumerate().map(|(i, (label, _, block, ..))| (i, *label, *block));
        all.filter(move |(.., block)| size.is_multiple_of(*block))
    };
    // Without a configuration, sizes that do not follow from the tensors would be those of the published models.
    let metadata = json!({"general.architecture": "ltxv", "config": config(generation).to_string()});
    let tensors = combined_parts(model.to_str().expect("UTF-8"), &PARTS[..2]);
    let bare = |name: String| name.trim_start_matches("model.diffusion_model.").to_string();
    let tensors = tensors.into_iter().map(|(name, tensor)| (bare(name), tensor)).collect();
    let models = both_types(names("model"), &metadata, tensors, |name, matrix| {
        let part = if name.contains("connector") || name.contains("projection.") { PARTS[1] } else { PARTS[0] };
        coverage.choose(part, generation, fitting(matrix.values.len()))
    });
    let encoder = model.join("text_encoder");
    let config: Value = serde_json::from_slice(&fs::read(encoder.join("config.json")).expect("a file")).expect("JSON");
    let encoders = (config["model_type"] == "gemma3").then(|| {
        let tensors = tensors_of(&encoder).into_iter().map(|(name, tensor)| (llama_cpp(&name), tensor)).collect();
        both_types(names("encoder"), &gguf_metadata(&config), tensors, |_, matrix| {
            coverage.choose(PARTS[2], generation, fitting(matrix.shape[1]))
        })
    });
    [0, 1].map(|i| ModelFiles {
        model: models[i].clone(),
        parts: Some(model.to_path_buf()),
        text_encoder: encoders.as_ref().map(|files| files[i].clone()),
    })
}

/// Writes GGUF files of LTX-2.0's tiny transformer and connectors: with matrices of whole blocks in Q8_0, and with the
/// same values in f32.
pub(crate) fn q8_0_transformer(folder: &Path) -> [PathBuf; 2] {
    let (generation, model) = MODELS[0];
    let metadata = json!({"general.architecture": "ltxv", "config": config(generation).to_string()});
    let tensors = combined_parts(model, &PARTS[..2]).into_iter();
    let bare = tensors.map(|(name, tensor)| (name.trim_start_matches("model.diffusion_model.").to_string(), tensor));
    let files = ["q8_0.gguf", "f32.gguf"].map(|name| folder.join(name));
    both_types(files, &metadata, bare.collect(), |_, matrix| matrix.shape[1].is_multiple_of(GGUF[0].2).then_some(0))
}

/// The files of a model.
struct ModelFiles {
    /// Model that a run opens.
    model: PathBuf,
    /// Folder of the components that a single file lacks.
    parts: Option<PathBuf>,
    /// Text encoder; `None`: that of `parts`, or of the model.
    text_encoder: Option<PathBuf>,
}

impl From<&PathBuf> for ModelFiles {
    fn from(model: &PathBuf) -> Self {
        ModelFiles { model: model.clone(), parts: None, text_encoder: None }
    }
}

/// Runs a generation's request on a model with a LoRA.
fn run(client: &Client, generation: &str, files: &ModelFiles, lora: Option<&Arc<LoraFile>>) -> Vec<Tensor> {
    let path = |path: PathBuf| path.to_str().expect("UTF-8").to_string();
    let part = |name: &str| files.parts.as_ref().map(|parts| path(parts.join(name)));
    let overrides = Overrides {
        text_encoder: files.text_encoder.clone().map(path).or_else(|| part("text_encoder")),
        tokenizer: part("tokenizer"),
        vae: part("vae"),
        audio_vae: part("audio_vae"),
        vocoder: part("vocoder"),
        ..Overrides::default()
    };
    let source = Arc::new(ModelSource::open(files.model.to_str().expect("UTF-8"), &overrides).expect("a model"));
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

/// Returns whether the values of each tensor are finite and not all equal.
fn is_result(tensors: &[Tensor]) -> bool {
    tensors
        .iter()
        .map(Tensor::to_f32)
        .all(|t| t.iter().all(|v| v.is_finite()) && t.iter().any(|v| v != &t.as_slice().expect("dense")[0]))
}

#[needs(cpu)]
fn runs_from_quantized_files_equal_runs_from_dequantized_files() {
    let (client, dir, mut coverage) = (cpu(8), tempfile::tempdir().expect("a folder"), Coverage::default());
    for (generation, model) in MODELS {
        let model = wide_model(model, generation, dir.path());
        let path = model.to_str().expect("UTF-8");
        let form = if generation == "2.0" { "fp8" } else { "int8" };
        let mut pairs = vec![
            both(path, generation, &FORMATS, dir.path(), &mut coverage).each_ref().map(ModelFiles::from),
            both_converted(&model, generation, form, dir.path()),
        ];
        let lacks = |coverage: &Coverage| {
            let each = GGUF.iter().flat_map(|(label, ..)| PARTS[..2].iter().map(move |part| (*label, *part)));
            each.into_iter().any(|(label, part)| coverage.count(label, part, generation) == 0)
        };
        while lacks(&coverage) {
            pairs.push(both_gguf(&model, generation, dir.path(), pairs.len(), &mut coverage));
        }
        for files in pairs {
            let [got, want] = files.each_ref().map(|files| run(&client, generation, files, None));
            assert!(is_result(&want), "{generation}");
            assert!(got == want, "{}", files[0].model.display());
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
    let files = both(model, generation, &FORMATS[IN_F32], dir.path(), &mut Coverage::default());
    let path = dir.path().join("lora.safetensors");
    let lora = lora::of_modules(&path, &lora::model(Path::new(model)), "diffusion_model", &lora::MODULES);
    let files = files.each_ref().map(ModelFiles::from);
    let [got, want] = files.each_ref().map(|files| run(&client, generation, files, Some(&lora)));
    assert!(got == want);
    assert!(got != run(&client, generation, &files[0], None), "the LoRA has an effect");
}

/// Each device reads its shard of a quantized weight.
#[needs(cpu)]
fn sharded_pass_from_quantized_files_equals_pass_from_dequantized_files() {
    let (client, dir) = (cpu(8), tempfile::tempdir().expect("a folder"));
    let (generation, model) = MODELS[1];
    let files = both(model, generation, &FORMATS, dir.path(), &mut Coverage::default());
    let [got, want] = files.map(|file| sharded_latents(&client, file.to_str().expect("UTF-8"), "tensor-sequence"));
    assert!(got.as_ref().into_iter().eq(want.as_ref()));
}

/// `runtime.weights` quantizes the values of a file, whatever its format.
#[needs(cpu)]
fn quantized_files_are_requantized_like_dequantized_files() {
    let (client, dir) = (cpu(1), tempfile::tempdir().expect("a folder"));
    let fp8 = quantized::build(DType::F32, Quantization::Fp8);
    let int8 = quantized::looped(DType::F32, quantized::INTEGERS);
    for (name, build) in [("tiny_v2_5", int8), ("tiny_a", fp8)].into_iter().take(if full() { 2 } else { 1 }) {
        let case = quantized::case(name);
        let files =
            both(case.model.to_str().expect("UTF-8"), name, &FORMATS[IN_F32], dir.path(), &mut Coverage::default());
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
        write_gguf(
            &gguf,
            &json!({"general.architecture": "ltxv"}),
            &[("a.weight".to_string(), (kind, vec![2, 256], random(512)))].into(),
        );
        refused(&gguf, &name.to_lowercase());
    }
}

/// Compares docs/reference/formats.md with what the runs cover, or writes it.
fn assert_page_is_current(coverage: &Coverage) {
    let mut page = "# Formats\n\nGenerated by `make reference`; do not edit.\n\nFor each format, `cargo test --test it formats` stores \
                    matrices of a small model in it, and requires each tensor of a run, from prompt to frames and audio, to equal \
                    the run from the dequantized model in every bit. The table lists the generations. The host decodes weights, so the \
                    platform does not matter; these runs used the CPU. Of the files that `ltx2 convert` writes, \
                    the same test runs a transformer in fp8 (2.0) or int8 (2.3, 2.5) with a text encoder in int8-convrot. GGUF files of \
                    Gemma 4 are rejected. Video and audio autoencoders are tested only in bf16.\n\n\
                    | format | transformer | connectors | text encoder |\n|---|---|---|---|\n"
        .to_string();
    let gguf = GGUF.map(|(label, ..)| label);
    for label in FORMATS.iter().map(|format| format.label).chain(gguf) {
        let kind = if gguf.contains(&label) { "GGUF " } else { "" };
        let cell = |part: Component| {
            let covered = MODELS.map(|(generation, _)| generation);
            let covered = covered.into_iter().filter(|generation| coverage.count(label, part, generation) > 0);
            covered.collect::<Vec<_>>().join(", ")
        };
        let [transformer, connectors, text_encoder] = PARTS.map(cell);
        assert!(!transformer.is_empty(), "no run covers {label}");
        writeln!(page, "| {kind}{label} | {transformer} | {connectors} | {text_encoder} |").unwrap();
    }
    let names = |all: &[&str]| all.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    writeln!(
        page,
        "\nRefused, with an error that names the format: ComfyUI's {}; torchao's {}; GGUF's {}.\n\nOn the devices, \
         `runtime.weights` selects the type of the blocks' linear layers:\n\n| `runtime.weights` | {} |\n|---{}|",
        names(&REFUSED_MARKERS),
        names(&REFUSED_TORCHAO),
        names(&REFUSED_GGUF.map(|(name, _)| name)),
        Platform::names(" | "),
        "|---".repeat(Platform::ALL.len())
    )
    .unwrap();
    for weights in [WeightType::Bf16, WeightType::Fp8, WeightType::Int8, WeightType::Int8Convrot] {
        let config = Config { runtime: Runtime { weights, ..Runtime::default() }, ..Config::default() };
        let cells = Platform::ALL.into_iter().rev().map(|one| match setup::build(&config, 1, one.name(), "") {
            Ok(_) => "supported",
            Err(error) if error.to_string().contains("runtime.weights: ") => "refused",
            Err(error) => panic!("{}: {error}", one.name()),
        });
        let cells: Vec<&str> = cells.collect();
        let weights = serde_json::to_value(weights).unwrap();
        writeln!(page, "| `{}` | {} |", weights.as_str().unwrap(), cells.join(" | ")).unwrap();
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
