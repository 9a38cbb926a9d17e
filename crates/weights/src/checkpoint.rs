//! Safetensors checkpoints: tensors are found by name, and their data stays on disk until it is read.

use std::collections::BTreeMap;
use std::fs;
use std::path::{self, Path, PathBuf};
use std::sync::Arc;

use safetensors::Dtype;
use serde_json::Value;

use super::error::{Misscaled, WeightsError};
use ltx2_base::file_kind;
use ltx2_base::text_file;
use ltx2_stablehlo::DType;

mod comfy;
mod e5m2;
mod find;
mod gguf;
mod gguf_types;
mod raw_bytes;
mod rows;
mod shard;
mod torchao;
mod view;

pub(crate) use comfy::{MARKER, METADATA as QUANTIZATION_METADATA};
use find::{FLASHPACK, WeightFiles, find_weights, is_flashpack};
pub(super) use find::{is_shard, variant_parts, variants};
use shard::ShardFile;
pub use view::TensorView;
use view::decoder::NumberDecoder;
pub(crate) use view::decoder::widen;

/// Replaces the quantized values and scales of one format by tensors with the names of unquantized weights.
type Restore = fn(&mut Checkpoint) -> Result<(), WeightsError>;

/// Formats that safetensors headers do not describe. The order matters: an earlier format may store its values in a
/// later one.
const FORMATS: [Restore; 3] = [torchao::restore, comfy::restore, e5m2::restore];

/// A tensor of a file, of any element type.
#[derive(Clone, Debug)]
struct TensorEntry {
    /// Element type as the file spells it, in lower case, or the name of the quantization format.
    type_name: String,
    /// Whether host tensors support the element type. If not, the view must not be read.
    is_known: bool,
    view: TensorView,
}

impl TensorEntry {
    /// Sets the decoder, the type of the decoded values, and the name of the format.
    fn decode(&mut self, type_name: &str, dtype: DType, decoder: Arc<dyn NumberDecoder>) {
        self.type_name = type_name.into();
        self.is_known = true;
        (self.view.dtype, self.view.decoder) = (dtype, Some(decoder));
    }

    /// Returns the number of elements per row, at least 1.
    fn columns(&self) -> usize {
        self.view.shape.iter().skip(1).product::<usize>().max(1)
    }
}

/// The tensors of one or several safetensors or GGUF files; cheap to clone.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    origin: PathBuf,
    shards: Vec<Arc<ShardFile>>,
    tensors: Arc<BTreeMap<String, TensorEntry>>,
}

impl Checkpoint {
    /// Opens a weight file, an index, or a folder that contains either.
    ///
    /// In a folder, the names `diffusion_pytorch_model` and `model` are tried first, without a variant, then with the
    /// variants `bf16` and `fp16`; an index takes precedence over a weight file. Otherwise the folder must contain
    /// exactly one index, one safetensors file, or one complete set of shards without an index.
    ///
    /// # Errors
    /// Returns an error if there are no weights, or if a file is missing, truncated, not safetensors, or different from
    /// its index.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        Self::open_variant(path, None)
    }

    /// Opens weights like [`Checkpoint::open`]; in a folder, `variant` is tried before the other variants.
    pub(super) fn open_variant(path: &Path, variant: Option<&str>) -> Result<Self, WeightsError> {
        let mut checkpoint = Self::unrestored(path, variant)?;
        FORMATS.iter().try_for_each(|restore| restore(&mut checkpoint))?;
        Ok(checkpoint)
    }

    /// Opens a file to inspect its header. Quantized weights are not decoded: their types are those of the stored
    /// codes.
    pub(super) fn headers_only(path: &Path) -> Result<Self, WeightsError> {
        Self::unrestored(path, None)
    }

    fn unrestored(path: &Path, variant: Option<&str>) -> Result<Self, WeightsError> {
        let meta = fs::metadata(path).map_err(WeightsError::io(path, "cannot open"))?;
        if is_flashpack(path) {
            return Err(WeightsError::NotSafetensors { path: path.to_path_buf(), reason: FLASHPACK.into() });
        }
        let found = if meta.is_dir() { find_weights(path, variant)? } else { WeightFiles::File(path.to_path_buf()) };
        match found {
            WeightFiles::File(file) if file.extension().is_some_and(|e| e == "json") => Self::open_index(&file),
            WeightFiles::File(file) => Self::open_files(&file, std::slice::from_ref(&file)),
            WeightFiles::Shards(files) => Self::open_files(path, &files),
        }
    }

    /// Collects the tensors of several files; a duplicate name is an error.
    fn open_files(origin: &Path, files: &[PathBuf]) -> Result<Self, WeightsError> {
        let mut checkpoint = Checkpoint { origin: origin.to_path_buf(), shards: vec![], tensors: Arc::default() };
        for file in files {
            for (key, entry) in checkpoint.add(file)? {
                let path = file.clone();
                if let Some(other) = Arc::make_mut(&mut checkpoint.tensors).insert(key.clone(), entry) {
                    let other_path = other.view.shard.path.clone();
                    return Err(WeightsError::Duplicate { path, other: key.clone(), key, other_path });
                }
            }
        }
        Ok(checkpoint)
    }

    fn open_index(index: &Path) -> Result<Self, WeightsError> {
        let bad = |reason: &str| WeightsError::Json { path: index.to_path_buf(), reason: reason.into() };
        let json = read_json(index)?;
        let map = json.get("weight_map").and_then(Value::as_object).ok_or_else(|| bad("no `weight_map` object"))?;
        let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (key, file) in map {
            let file = file.as_str().ok_or_else(|| bad("`weight_map` does not map tensors to file names"))?;
            shards.entry(file).or_default().push(key);
        }
        let folder = index.parent().unwrap_or(Path::new(""));
        let mut checkpoint = Checkpoint { origin: index.to_path_buf(), shards: vec![], tensors: Arc::default() };
        for (file, keys) in shards {
            // The index is untrusted: it may only refer to files in its own folder.
            if !Path::new(file).components().all(|p| matches!(p, path::Component::Normal(_))) {
                return Err(bad(&format!("shard `{file}` is outside the folder of the index")));
            }
            let path = folder.join(file);
            let missing = || WeightsError::MissingShard {
                index: index.to_path_buf(),
                shard: file.into(),
                key: keys[0].into(),
                others: keys.len() - 1,
            };
            if !path.exists() {
                return Err(missing());
            }
            let mut entries = checkpoint.add(&path)?;
            for key in keys {
                let Some(entry) = entries.remove(key) else {
                    let (index, shard) = (index.to_path_buf(), file.to_string());
                    return Err(WeightsError::IndexMismatch { index, shard, key: key.into() });
                };
                checkpoint.put(key, entry);
            }
        }
        Ok(checkpoint)
    }

    /// Opens a file of the checkpoint and returns its tensors by name.
    fn add(&mut self, path: &Path) -> Result<BTreeMap<String, TensorEntry>, WeightsError> {
        let mut shard = ShardFile::open(path)?;
        if shard.start()?.starts_with(gguf::MAGIC) {
            let (shard, entries) = gguf::open(path, shard)?;
            self.shards.push(shard);
            return Ok(entries);
        }
        let (header, data) = shard.safetensors_header()?;
        let shard = Arc::new(shard);
        self.shards.push(shard.clone());
        let entry = |key: String| {
            let info = header.info(&key)?;
            let (start, end) = info.data_offsets;
            let view = TensorView {
                key: key.as_str().into(),
                dtype: known(info.dtype).unwrap_or(DType::U8),
                shape: info.shape.as_slice().into(),
                shard: shard.clone(),
                range: data + start as u64..data + end as u64,
                first: 0,
                decoder: None,
            };
            let type_name = info.dtype.to_string().to_lowercase();
            Some((key, TensorEntry { type_name, is_known: known(info.dtype).is_some(), view }))
        };
        Ok(header.offset_keys().into_iter().filter_map(entry).collect())
    }

    fn put(&mut self, key: &str, entry: TensorEntry) {
        Arc::make_mut(&mut self.tensors).insert(key.to_string(), entry);
    }

    pub(crate) fn remove(&mut self, name: &str) {
        Arc::make_mut(&mut self.tensors).remove(name);
    }

    fn entry(&self, name: &str) -> Result<&TensorEntry, WeightsError> {
        self.tensors.get(name).ok_or_else(|| self.missing(name))
    }

    /// Returns the names of the tensors with this element type.
    fn names_of(&self, type_name: &str) -> Vec<String> {
        let tensors = self.tensors.iter().filter(|(_, entry)| entry.type_name == type_name);
        tensors.map(|(name, _)| name.clone()).collect()
    }

    fn missing(&self, key: &str) -> WeightsError {
        WeightsError::MissingTensor { path: self.origin.clone(), key: key.into() }
    }

    /// Returns the checkpoint with renamed tensors; `rename` returns the new name, or `None` to omit a tensor.
    ///
    /// # Errors
    /// Returns an error if two tensors get the same name.
    pub fn renamed(&self, rename: impl Fn(&str) -> Option<String>) -> Result<Self, WeightsError> {
        let mut tensors: BTreeMap<String, TensorEntry> = BTreeMap::new();
        for (key, entry) in self.tensors.iter() {
            let Some(name) = rename(key) else { continue };
            if let Some(other) = tensors.insert(name, entry.clone()) {
                return Err(WeightsError::Duplicate {
                    path: entry.view.shard.path.clone(),
                    key: key.clone(),
                    other_path: other.view.shard.path.clone(),
                    other: other.view.key.to_string(),
                });
            }
        }
        Ok(Checkpoint { origin: self.origin.clone(), shards: self.shards.clone(), tensors: Arc::new(tensors) })
    }

    /// Returns a checkpoint with the tensors of both checkpoints.
    ///
    /// # Errors
    /// Returns an error if both contain a tensor of the same name.
    pub(super) fn joined(&self, other: &Checkpoint) -> Result<Self, WeightsError> {
        let mut joined = self.clone();
        let tensors = Arc::make_mut(&mut joined.tensors);
        for (name, entry) in other.tensors.iter() {
            if let Some(own) = tensors.insert(name.clone(), entry.clone()) {
                return Err(WeightsError::Duplicate {
                    path: own.view.shard.path.clone(),
                    key: own.view.key.to_string(),
                    other_path: other.origin.clone(),
                    other: entry.view.key.to_string(),
                });
            }
        }
        joined.shards.extend(other.shards.iter().cloned());
        Ok(joined)
    }

    /// Returns the path of the file, or of the index.
    pub fn path(&self) -> &Path {
        &self.origin
    }

    /// Returns the path of the file that contains a tensor; the path of the checkpoint if it has no such tensor.
    pub(crate) fn file_of(&self, name: &str) -> &Path {
        self.tensors.get(name).map_or(&self.origin, |entry| &entry.view.shard.path)
    }

    /// Iterates over the files, each with its size in bytes.
    #[cfg(test)]
    pub fn files(&self) -> impl Iterator<Item = (&Path, u64)> {
        self.shards.iter().map(|s| (&*s.path, s.size))
    }

    /// Iterates over the names of all tensors, in sorted order; renamed tensors have their new names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Returns whether there is a tensor of this name; renamed tensors have their new names.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns the dequantization scales of the 8-bit weight `name`, one per row or one for all: the tensor
    /// `….weight_scale`, as in Lightricks' files. `None`: the weight has no scales.
    ///
    /// # Errors
    /// Returns an error if there is neither one scale nor one per row (for example, one per block), or if the scales
    /// are not floating point.
    pub fn scales_of(&self, name: &str) -> Result<Option<TensorView>, WeightsError> {
        let Some(entry) = self.tensors.get(&format!("{name}_scale")) else { return Ok(None) };
        let rows = self.shape(name).and_then(|shape| shape.first()).copied().unwrap_or(1);
        let count: usize = entry.view.shape.iter().product();
        if count != 1 && (count != rows || entry.view.shape[0] != rows) {
            let (file, name) = (entry.view.shard.path.clone(), entry.view.key.to_string());
            let scales = Misscaled { file: file.clone(), name, shape: entry.view.shape.to_vec(), rows };
            return Err(WeightsError::Scales { path: file, scales });
        }
        self.get_float(&format!("{name}_scale")).map(Some)
    }

    /// Returns a tensor's dimensions, outermost first. `None`: the checkpoint has no such tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|e| &*e.view.shape)
    }

    /// Returns a tensor's element type as the file spells it, in lower case, including unsupported types such as
    /// `f8_e8m0`.
    pub(crate) fn dtype_name(&self, name: &str) -> Option<String> {
        self.tensors.get(name).map(|e| e.type_name.clone())
    }

    /// Iterates over all tensors by name: name, element type as the file spells it, and shape.
    pub fn headers(&self) -> impl Iterator<Item = (&str, String, &[usize])> {
        self.tensors.iter().map(|(name, e)| (name.as_str(), e.type_name.clone(), &*e.view.shape))
    }

    /// Returns a tensor of any element type that the host supports.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing or has an unsupported element type, or if its file has changed since
    /// it was opened.
    pub fn get(&self, name: &str) -> Result<TensorView, WeightsError> {
        let entry = self.entry(name)?;
        entry.view.shard.check()?;
        if !entry.is_known {
            return Err(self.wrong_dtype(entry, "a supported number type"));
        }
        Ok(entry.view.clone())
    }

    /// Returns a floating-point tensor, such as a weight.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing or not floating point.
    pub fn get_float(&self, name: &str) -> Result<TensorView, WeightsError> {
        let entry = self.entry(name)?;
        if !self.is_float(name) {
            return Err(self.wrong_dtype(entry, "bf16, f16, f32 or f8_e4m3"));
        }
        self.get(name)
    }

    /// Returns whether there is a tensor of this name whose values are floating point.
    pub(crate) fn is_float(&self, name: &str) -> bool {
        self.tensors.get(name).is_some_and(|entry| entry.is_known && entry.view.dtype.is_float())
    }

    fn wrong_dtype(&self, entry: &TensorEntry, want: &'static str) -> WeightsError {
        WeightsError::WrongDtype {
            path: entry.view.shard.path.clone(),
            key: entry.view.key.to_string(),
            dtype: entry.type_name.clone(),
            want,
        }
    }

    /// Returns the architecture in a GGUF file's metadata; empty if the file does not state one. `None`: the checkpoint
    /// is not a GGUF file.
    pub(crate) fn architecture(&self) -> Option<&str> {
        self.metadata(gguf::ARCHITECTURE)
    }

    /// Returns a value of the files' free-form header metadata.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.shards.iter().find_map(|s| s.metadata.get(key).map(String::as_str))
    }
}

fn known(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::BOOL => DType::Bool,
        Dtype::I8 => DType::I8,
        Dtype::I16 => DType::I16,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        Dtype::U8 => DType::U8,
        Dtype::U16 => DType::U16,
        Dtype::U32 => DType::U32,
        Dtype::U64 => DType::U64,
        Dtype::F8_E4M3 => DType::F8E4M3FN,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        _ => return None,
    })
}

pub(super) fn read_json(path: &Path) -> Result<Value, WeightsError> {
    let text = fs::read(path).map_err(WeightsError::io(path, "cannot read"))?;
    serde_json::from_slice(text_file::unmarked(&text)).map_err(|e| {
        let foreign = file_kind::non_json_kind(&text);
        let reason = foreign.map_or_else(|| format!("not JSON: {e}"), |kind| format!("not JSON: the file is {kind}"));
        WeightsError::Json { path: path.to_path_buf(), reason }
    })
}
