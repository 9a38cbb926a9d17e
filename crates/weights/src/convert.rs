//! Converts model files to one safetensors file in which linear layers are bf16 or have a requested quantized form.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::checkpoint::{Checkpoint, MARKER, QUANTIZATION_METADATA, TensorView, is_shard};
use super::error::WeightsError;
use super::keys::TRANSFORMER;
use super::place::is_diffusers;
use super::quantize::{self, Quantized, QuantizedForm, quantized_blocks};
use super::text_encoders::{self, LANGUAGE_MODEL};
use super::unsupported::{VERSION, reject_unrecognized_quantization};
use super::validate::{check_finite, finite_tensor};
use super::write::{PIECE, TensorFile, TensorSpec};
use super::{lora, quantization};
use ltx2_base::{failpoint, threads};
use ltx2_stablehlo::DType;

mod names;

/// Name suffixes of the linear layers in the blocks of the transformer and of the connectors.
const LINEAR: [&str; 6] = [".to_q", ".to_k", ".to_v", ".to_out.0", ".net.0.proj", ".net.2"];
/// Levels of subfolders whose files an error lists.
const DEPTH: usize = 3;
/// Key of the header's configuration.
const CONFIG: &str = "config";
/// Maximum number of threads, which limits the memory use.
const WORKERS: usize = 16;

/// A planned conversion of a model file.
pub struct Conversion {
    /// The tensors of the new file, in order.
    tensors: Vec<(TensorSpec, Content)>,
    metadata: BTreeMap<String, String>,
    /// Number of layers that are quantized: their codes are computed from their values.
    pub quantized: usize,
    /// Number of layers whose codes are copied, because they already have the requested form.
    pub copied: usize,
    /// Number of layers that are not quantized, because the requested form does not support their number of columns.
    pub unsupported: usize,
}

/// Source of a tensor's bytes.
enum Content {
    /// The values of a tensor.
    Values(TensorView),
    Bytes(Vec<u8>),
    /// Codes that are computed from the values of a matrix.
    Codes(TensorView, QuantizedForm),
    /// Scales, which are written with the codes.
    Scales,
}

/// Conversion that is chosen for a tensor.
enum TensorConversion {
    /// The tensor is copied with these codes and scales, because it already has the requested form.
    Copy(TensorView, Option<TensorView>),
    Quantize,
    /// The tensor is not quantized, because the requested form does not support its number of columns.
    Unsupported,
    /// The tensor becomes bf16 if it is quantized, or if it is a linear layer and the target is bf16; otherwise it is
    /// copied.
    Keep,
}

/// The requested form of the linear layers of a file.
struct Target {
    /// `None`: bf16.
    form: Option<QuantizedForm>,
    /// Transformer blocks that the forms fp8 and int8 quantize; int8-convrot quantizes all blocks.
    blocks: Range<usize>,
}

/// Returns the JSON that states a layer's format to ComfyUI, with the spaces of Python's `json`.
fn marker(form: QuantizedForm) -> &'static str {
    match form {
        QuantizedForm::Fp8 => r#"{"format": "float8_e4m3fn"}"#,
        QuantizedForm::Int8 => r#"{"format": "int8_tensorwise"}"#,
        QuantizedForm::Int8Convrot => r#"{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}"#,
    }
}

/// Returns the index of the transformer block that a name without prefix belongs to.
fn block(name: &str) -> Option<usize> {
    name.strip_prefix("transformer_blocks.")?.split('.').next()?.parse().ok()
}

impl Target {
    /// Returns whether published files of the requested form quantize this weight.
    fn selects(&self, name: &str) -> bool {
        let Some(module) = name.strip_suffix(".weight") else { return false };
        if text_encoders::tensor_name(module)
            .strip_prefix(LANGUAGE_MODEL)
            .is_some_and(|rest| rest.starts_with("layers."))
        {
            return module.ends_with("_proj");
        }
        let Some(module) = module.strip_prefix(TRANSFORMER) else { return false };
        let all = !matches!(self.form, Some(QuantizedForm::Fp8 | QuantizedForm::Int8));
        let is_layer = match block(module) {
            Some(block) => all || self.blocks.contains(&block),
            None => all && module.contains("_embeddings_connector.transformer_1d_blocks."),
        };
        is_layer && LINEAR.iter().any(|end| module.ends_with(end))
    }

    fn decide(&self, source: &Checkpoint, name: &str) -> Result<TensorConversion, WeightsError> {
        let Some(form) = self.form else { return Ok(TensorConversion::Keep) };
        if let Some((codes, scales)) = source.codes(name, form)? {
            // Other programs read 8-bit floats with one scale only.
            let is_one = |scales: &TensorView| scales.shape().iter().product::<usize>() == 1;
            if form != QuantizedForm::Fp8 || scales.as_ref().is_none_or(is_one) {
                return Ok(TensorConversion::Copy(codes, scales));
            }
        }
        Ok(match source.shape(name) {
            Some([_, columns]) if self.selects(name) => match form.fits(*columns) {
                true => TensorConversion::Quantize,
                false => TensorConversion::Unsupported,
            },
            _ => TensorConversion::Keep,
        })
    }
}

impl Conversion {
    /// Plans the conversion of a file, or of a folder with one component, by reading only headers. Converts linear
    /// layers to `form`; `None`: bf16. The form determines which linear layers are converted, as in published files.
    /// Layers that already have the form are copied, other quantized tensors become bf16, and unquantized tensors are
    /// copied. The header keeps its metadata, except for the format.
    ///
    /// # Errors
    /// Returns an error if the input cannot be read, if its names cannot be converted to those of Lightricks' files, or if
    /// no layer would have the form.
    pub fn plan(input: &Path, form: Option<QuantizedForm>) -> Result<Self, WeightsError> {
        let none = |reason| Err(WeightsError::NoWeights { path: input.into(), reason });
        let name = input.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
        if is_diffusers(input) {
            let part = input.join("transformer");
            return none(format!("the folder has several components; convert one of them, such as {}", part.display()));
        }
        if input.is_file() && is_shard(&name) {
            return none("the file is one of several shards; pass their folder, or their index".into());
        }
        let nested = if weight_files(input, 0).is_empty() { weight_files(input, DEPTH) } else { vec![] };
        if !nested.is_empty() {
            return none(format!("the weights are in subfolders; pass one file: {}", nested.join(", ")));
        }
        let opened = Checkpoint::open(input)?;
        lora::refuse(&opened)?;
        reject_unrecognized_quantization(&opened)?;
        let metadata = metadata(&opened);
        let (source, config) = names::official(input, opened)?;
        let mut plan = Conversion { tensors: vec![], metadata, quantized: 0, copied: 0, unsupported: 0 };
        if let Some((key, config)) = config {
            plan.metadata.entry(key.into()).or_insert_with(|| config.to_string());
        }
        let last = source.names().filter_map(|name| block(name.strip_prefix(TRANSFORMER)?)).max();
        let target = Target { form, blocks: quantized_blocks(last.map_or(0, |last| last + 1)) };
        source.names().try_for_each(|name| plan.add(&source, name, &target))?;
        if let Some(form) = form.filter(|_| plan.quantized + plan.copied == 0) {
            let what = if plan.unsupported > 0 { " whose number of columns is a multiple of 256" } else { "" };
            let connectors = if form == QuantizedForm::Int8Convrot { ", connectors" } else { "" };
            let name = form.name();
            return none(format!(
                "nothing to convert to {name}: there are no linear layers of transformer blocks{connectors} or a text \
                 encoder{what}"
            ));
        }
        // Readers need each tensor to start at a multiple of the size of its elements.
        plan.tensors.sort_by(|(a, _), (b, _)| {
            let order = |spec: &TensorSpec| Reverse(spec.dtype.size());
            order(a).cmp(&order(b)).then_with(|| a.name.cmp(&b.name))
        });
        Ok(plan)
    }

    fn add(&mut self, source: &Checkpoint, name: &str, target: &Target) -> Result<(), WeightsError> {
        let (layer, leaf) = name.rsplit_once('.').unwrap_or(("", name));
        let weight = format!("{layer}.weight");
        if matches!(leaf, "weight_scale" | "input_scale") && source.contains(&weight) {
            let is_narrow =
                matches!(target.decide(source, &weight)?, TensorConversion::Copy(..) | TensorConversion::Quantize);
            let is_kept = match leaf {
                // Scales of a quantized weight are written with its codes.
                "weight_scale" => !is_narrow && !source.is_quantized(&weight),
                // Scales of activations belong to 8-bit floats.
                _ => is_narrow && target.form == Some(QuantizedForm::Fp8),
            };
            if !is_kept {
                return Ok(());
            }
        }
        let decision = target.decide(source, name)?;
        self.unsupported += usize::from(matches!(decision, TensorConversion::Unsupported));
        let (Some(form), TensorConversion::Copy(..) | TensorConversion::Quantize) = (target.form, &decision) else {
            let becomes_bf16 = source.is_quantized(name) || target.form.is_none() && target.selects(name);
            let view =
                if becomes_bf16 { source.dequantized(name)?.converted(DType::BF16) } else { source.get(name)? };
            self.push(name, view.dtype(), view.shape(), Content::Values(view.clone()));
            return Ok(());
        };
        let scales = format!("{name}_scale");
        match decision {
            TensorConversion::Copy(codes, stored) => {
                self.copied += 1;
                self.push(name, codes.dtype(), codes.shape(), Content::Values(codes.clone()));
                match stored {
                    Some(view) if form != QuantizedForm::Fp8 => {
                        self.push(&scales, view.dtype(), view.shape(), Content::Values(view.clone()));
                    }
                    stored => {
                        let scale = stored.map_or(Ok(1.0), |view| finite_tensor(&view).map(|t| t.to_f32().sum()))?;
                        self.push(&scales, DType::F32, &[], Content::Bytes(scale.to_le_bytes().into()));
                    }
                }
            }
            _ => {
                self.quantized += 1;
                let view = source.dequantized(name)?;
                let shape = view.shape().to_vec();
                self.push(name, form.dtype(), &shape, Content::Codes(view, form));
                // Other programs read one scale for 8-bit floats.
                let rows = [shape[0], 1];
                self.push(&scales, DType::F32, if form == QuantizedForm::Fp8 { &[] } else { &rows }, Content::Scales);
            }
        }
        let bytes = marker(form).as_bytes().to_vec();
        self.push(&format!("{layer}{MARKER}"), DType::U8, &[bytes.len()], Content::Bytes(bytes));
        Ok(())
    }

    fn push(&mut self, name: &str, dtype: DType, shape: &[usize], content: Content) {
        self.tensors.push((TensorSpec { name: name.into(), dtype, shape: shape.to_vec() }, content));
    }

    /// Iterates over the tensors of the new file.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorSpec> + Clone {
        self.tensors.iter().map(|(spec, _)| spec)
    }

    /// Returns the size of the tensors of the new file in bytes.
    pub fn bytes(&self) -> u64 {
        self.tensors().map(|spec| spec.bytes() as u64).sum()
    }

    /// Writes the new file to `file`, which is empty. `path` is for error messages. Several threads read parts of one
    /// tensor at a time; each needs memory for about 16 MiB of values. Calls `on_progress` with the byte count of each
    /// written part.
    ///
    /// # Errors
    /// Returns an error if the source cannot be read, contains non-finite values or has changed, or if a write fails.
    pub fn write(&self, file: File, path: &Path, on_progress: &(dyn Fn(u64) + Sync)) -> Result<(), WeightsError> {
        let by_name: BTreeMap<&str, usize> = self.tensors().enumerate().map(|(i, spec)| (&*spec.name, i)).collect();
        let file = TensorFile::begin(file, path, self.tensors(), &self.metadata)?;
        let write = |tensor: usize, offset: usize, bytes: &[u8]| {
            file.write(tensor, offset, bytes)?;
            on_progress(bytes.len() as u64);
            Ok::<_, WeightsError>(())
        };
        for (index, (spec, content)) in self.tensors.iter().enumerate() {
            match content {
                Content::Bytes(bytes) => write(index, 0, bytes)?,
                Content::Values(view) => drop(parts(view, 1, |offset, bytes| write(index, offset, &bytes))?),
                Content::Codes(view, form) => {
                    let scales = by_name[&*format!("{}_scale", spec.name)];
                    write_codes(view, *form, |tensor, offset, bytes| {
                        write(if tensor == Part::Codes { index } else { scales }, offset, bytes)
                    })?;
                }
                Content::Scales => {}
            }
            failpoint::reach("convert", &spec.name);
        }
        Ok(())
    }
}

/// The tensors of a quantized matrix.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Codes,
    Scales,
}

/// Quantizes a matrix; `write` gets codes and scales with their offsets in bytes.
fn write_codes(
    view: &TensorView,
    form: QuantizedForm,
    write: impl Fn(Part, usize, &[u8]) -> Result<(), WeightsError> + Sync,
) -> Result<(), WeightsError> {
    let (dtype, columns) = (view.dtype(), view.shape()[1]);
    if form == QuantizedForm::Fp8 {
        let largest = parts(view, columns, |_, values| Ok(quantize::largest_magnitude(dtype, &values)))?;
        let scale = quantize::scale(form, largest.into_iter().fold(0.0, f32::max));
        write(Part::Scales, 0, &scale.to_le_bytes())?;
        let codes = |offset: usize, values: Vec<u8>| {
            write(Part::Codes, offset / dtype.size(), &quantize::fp8_codes(dtype, scale, &values))
        };
        return parts(view, columns, codes).map(drop);
    }
    let rows = |offset: usize, values: Vec<u8>| {
        let Quantized { codes, scales } = quantize::quantize(form, dtype, columns, &values);
        let first = offset / dtype.size();
        write(Part::Codes, first, &codes)?;
        write(Part::Scales, first / columns * size_of::<f32>(), bytemuck::cast_slice(&scales))
    };
    parts(view, columns, rows).map(drop)
}

/// Reads a tensor in parts of whole rows on several threads, and returns the results in order. `work` gets the offset of
/// a part and its bytes.
fn parts<R: Send>(
    view: &TensorView,
    columns: usize,
    work: impl Fn(usize, Vec<u8>) -> Result<R, WeightsError> + Sync,
) -> Result<Vec<R>, WeightsError> {
    let row = (columns * view.dtype().size()).max(1);
    let step = (PIECE / row).max(1) * row;
    let offsets: Vec<usize> = (0..view.size()).step_by(step).collect();
    threads::try_in_order(&offsets, threads::cores().min(WORKERS), |&offset| {
        let mut bytes = vec![0; step.min(view.size() - offset)];
        view.read_at(offset, &mut bytes)?;
        check_finite(view, offset, &bytes)?;
        work(offset, bytes)
    })
}

/// Returns the paths of the weight files in a folder and in `depth` levels of subfolders.
fn weight_files(folder: &Path, depth: usize) -> Vec<String> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect();
    paths.sort();
    let is_weights = |path: &PathBuf| path.extension().is_some_and(|end| end == "safetensors" || end == "gguf");
    let found = paths.iter().flat_map(|path| match depth {
        _ if is_weights(path) => vec![path.display().to_string()],
        0 => vec![],
        _ => weight_files(path, depth - 1),
    });
    found.collect()
}

/// Returns the metadata of the new file: the source's metadata without the entries that describe its format.
fn metadata(source: &Checkpoint) -> BTreeMap<String, String> {
    let is_kept = |key: &str| match source.architecture() {
        Some(_) => matches!(key, CONFIG | VERSION),
        // torchao states the format of each tensor under its name.
        None => !matches!(key, QUANTIZATION_METADATA | quantization::KEY | "tensor_names") && !source.contains(key),
    };
    let kept = source.all_metadata().into_iter().filter(|(key, _)| is_kept(key));
    let mut metadata: BTreeMap<String, String> = kept.map(|(key, value)| (key.into(), value.into())).collect();
    metadata.insert("format".into(), "pt".into());
    metadata
}
