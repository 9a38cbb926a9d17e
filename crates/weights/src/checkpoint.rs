//! Safetensors checkpoints: tensors are found by name, and their data stays on disk until it is read.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{self, Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde_json::Value;

use super::error::{Misscaled, WeightsError};
use ltx2_base::file_kind;
use ltx2_base::text_file;
use ltx2_stablehlo::DType;

mod e5m2;
mod eight_bits;
mod find;
mod raw_bytes;
mod rows;
mod torchao;
mod view;

use eight_bits::EightBits;
use find::{FLASHPACK, Found, find_weights, is_flashpack};
pub use view::TensorView;

/// Maximum header size of the format in bytes; prevents a damaged length field from allocating all memory.
const MAX_HEADER: u64 = 100_000_000;

/// One open file. It is not memory-mapped, because access to a mapping of a truncated file would crash the process.
#[derive(Debug)]
struct Shard {
    path: PathBuf,
    file: File,
    size: u64,
    /// Modification time, if the file system provides it.
    written: Option<SystemTime>,
    header: Metadata,
    /// Offset of the tensor data.
    data: u64,
}

/// Location and storage form of a tensor: its shard and the byte range in it.
#[derive(Clone, Debug)]
struct Entry {
    shard: usize,
    key: Arc<str>,
    dtype: Dtype,
    shape: Arc<[usize]>,
    range: Range<u64>,
    /// Tensor of factors by which the rows are multiplied: one per row, or one for all. `None`: no factors.
    factors: Option<Box<Entry>>,
    /// Storage form of 8-bit values that are read as another type. `None`: values are read as stored.
    eight_bits: Option<EightBits>,
}

/// The tensors of one or several safetensors files; cheap to clone.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    origin: PathBuf,
    shards: Vec<Arc<Shard>>,
    tensors: Arc<BTreeMap<String, Entry>>,
}

impl Shard {
    fn open(path: &Path) -> Result<Self, WeightsError> {
        let file = File::open(path).map_err(WeightsError::io(path, "cannot open"))?;
        let about = file.metadata().map_err(WeightsError::io(path, "cannot read its size"))?;
        let (got, written) = (about.len(), about.modified().ok());
        let bad = |reason: String| WeightsError::NotSafetensors { path: path.to_path_buf(), reason };
        if got < 8 {
            return Err(bad(match got {
                0 => "the file is empty, possibly an unfinished download; download it again".into(),
                _ => format!("the file has {got} bytes, fewer than the length field of the header (8)"),
            }));
        }
        let read = |into: &mut [u8], at| file.read_exact_at(into, at).map_err(WeightsError::io(path, "cannot read"));
        let mut length = [0; 8];
        read(&mut length, 0)?;
        let length = u64::from_le_bytes(length);
        let mut start = vec![0; got.min(file_kind::SIGNATURE_BYTES as u64) as usize];
        read(&mut start, 0)?;
        // In every safetensors file, a brace follows the length field.
        let is_foreign = length > MAX_HEADER || start.get(8) != Some(&b'{');
        if let Some(kind) = file_kind::kind(&start).filter(|_| is_foreign) {
            return Err(bad(format!("the file is {kind}")));
        }
        if length > MAX_HEADER {
            return Err(bad(
                "the file is in another format or damaged: the first 8 bytes are not a valid header length".into(),
            ));
        }
        let data = 8 + length;
        let mut header = vec![0; length.min(got - 8) as usize];
        read(&mut header, 8)?;
        if data > got {
            return Err(match header.first() {
                Some(b'{') => WeightsError::Truncated { path: path.to_path_buf(), want: data, got },
                _ => bad("no JSON header after the first 8 bytes".into()),
            });
        }
        let header: Metadata = serde_json::from_slice(&header).map_err(|e| bad(format!("damaged header: {e}")))?;
        // `Metadata` has checked that tensors are contiguous, so the end of the last one is the end of the file.
        let want = data.checked_add(header.data_len() as u64).ok_or_else(|| bad("sizes overflow".into()))?;
        let path = path.to_path_buf();
        match want.cmp(&got) {
            std::cmp::Ordering::Greater => Err(WeightsError::Truncated { path, want, got }),
            std::cmp::Ordering::Less => Err(WeightsError::Trailing { path, want, got }),
            std::cmp::Ordering::Equal => Ok(Shard { path, file, size: got, written, header, data }),
        }
    }

    /// Returns an error if the open file has changed. A new file under the same path does not matter.
    fn check(&self) -> Result<(), WeightsError> {
        let about = self.file.metadata().map_err(WeightsError::io(&self.path, "cannot read its size"))?;
        match about.len() == self.size && about.modified().ok() == self.written {
            true => Ok(()),
            false => Err(WeightsError::Changed { path: self.path.clone(), was: self.size, is: about.len() }),
        }
    }
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
        let meta = fs::metadata(path).map_err(WeightsError::io(path, "cannot open"))?;
        if is_flashpack(path) {
            return Err(WeightsError::NotSafetensors { path: path.to_path_buf(), reason: FLASHPACK.into() });
        }
        let found = if meta.is_dir() { find_weights(path)? } else { Found::File(path.to_path_buf()) };
        let checkpoint = match found {
            Found::File(file) if file.extension().is_some_and(|e| e == "json") => Self::open_index(&file)?,
            Found::File(file) => Self::open_files(&file, std::slice::from_ref(&file))?,
            Found::Shards(files) => Self::open_files(path, &files)?,
        };
        Ok(checkpoint.with_torchao_weights()?.with_e5m2_weights())
    }

    /// Collects the tensors of several files; a duplicate name is an error.
    fn open_files(origin: &Path, files: &[PathBuf]) -> Result<Self, WeightsError> {
        let mut checkpoint = Checkpoint { origin: origin.to_path_buf(), shards: vec![], tensors: Arc::default() };
        for file in files {
            let shard = checkpoint.add(Shard::open(file)?);
            for key in checkpoint.shards[shard].header.offset_keys() {
                if let Some(other) = checkpoint.tensors.get(&key) {
                    let other_path = checkpoint.shards[other.shard].path.clone();
                    return Err(WeightsError::Duplicate { path: file.clone(), other: key.clone(), key, other_path });
                }
                checkpoint.insert(shard, &key)?;
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
            let shard = checkpoint.add(Shard::open(&path)?);
            for key in keys {
                if checkpoint.shards[shard].header.info(key).is_none() {
                    let (index, shard) = (index.to_path_buf(), file.to_string());
                    return Err(WeightsError::IndexMismatch { index, shard, key: key.into() });
                }
                checkpoint.insert(shard, key)?;
            }
        }
        Ok(checkpoint)
    }

    fn add(&mut self, shard: Shard) -> usize {
        self.shards.push(Arc::new(shard));
        self.shards.len() - 1
    }

    fn insert(&mut self, shard: usize, key: &str) -> Result<(), WeightsError> {
        let s = &self.shards[shard];
        let info = s.header.info(key).ok_or_else(|| self.missing(key))?;
        let entry = Entry {
            shard,
            key: key.into(),
            dtype: info.dtype,
            shape: info.shape.as_slice().into(),
            range: s.data + info.data_offsets.0 as u64..s.data + info.data_offsets.1 as u64,
            factors: None,
            eight_bits: None,
        };
        Arc::make_mut(&mut self.tensors).insert(key.to_string(), entry);
        Ok(())
    }

    fn missing(&self, key: &str) -> WeightsError {
        WeightsError::MissingTensor { path: self.origin.clone(), key: key.into() }
    }

    /// Returns the checkpoint with renamed tensors; `rename` returns the new name, or `None` to omit a tensor.
    ///
    /// # Errors
    /// Returns an error if two tensors get the same name.
    pub fn renamed(&self, rename: impl Fn(&str) -> Option<String>) -> Result<Self, WeightsError> {
        let mut tensors: BTreeMap<String, Entry> = BTreeMap::new();
        for (key, entry) in self.tensors.iter() {
            let Some(name) = rename(key) else { continue };
            if let Some(other) = tensors.insert(name, entry.clone()) {
                return Err(WeightsError::Duplicate {
                    path: self.shards[entry.shard].path.clone(),
                    key: key.clone(),
                    other_path: self.shards[other.shard].path.clone(),
                    other: other.key.to_string(),
                });
            }
        }
        Ok(Checkpoint { origin: self.origin.clone(), shards: self.shards.clone(), tensors: Arc::new(tensors) })
    }

    /// Combines these tensors with those of `other`.
    ///
    /// # Errors
    /// Returns an error if both contain a tensor of the same name.
    pub(super) fn joined(&self, other: &Checkpoint) -> Result<Self, WeightsError> {
        let mut joined = self.clone();
        let tensors = Arc::make_mut(&mut joined.tensors);
        for (name, entry) in other.tensors.iter() {
            let entry = entry.behind(self.shards.len());
            if let Some(own) = tensors.insert(name.clone(), entry.clone()) {
                return Err(WeightsError::Duplicate {
                    path: self.shards[own.shard].path.clone(),
                    key: own.key.to_string(),
                    other_path: other.origin.clone(),
                    other: entry.key.to_string(),
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

    /// Whether there is a tensor of this name; renamed tensors have their new names.
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
        let count: usize = entry.shape.iter().product();
        if count != 1 && (count != rows || entry.shape[0] != rows) {
            let scales = Misscaled { name: entry.key.to_string(), shape: entry.shape.to_vec(), rows };
            return Err(WeightsError::Scales { path: self.shards[entry.shard].path.clone(), scales });
        }
        self.get_float(&format!("{name}_scale")).map(Some)
    }

    /// Returns a tensor's dimensions, outermost first. `None`: there is no such tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|e| &*e.shape)
    }

    /// Returns a tensor's element type as the file spells it, in lower case, including unsupported types such as
    /// `f8_e8m0`.
    pub(crate) fn dtype_name(&self, name: &str) -> Option<String> {
        self.tensors.get(name).map(|e| e.dtype.to_string().to_lowercase())
    }

    /// Iterates over all tensors by name: name, element type as the file spells it, and shape.
    pub fn headers(&self) -> impl Iterator<Item = (&str, String, &[usize])> {
        self.tensors.iter().map(|(name, e)| (name.as_str(), e.dtype.to_string().to_lowercase(), &*e.shape))
    }

    /// Returns a tensor of any element type that the host supports.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing or has an unsupported element type, or if its file has changed since
    /// it was opened.
    pub fn get(&self, name: &str) -> Result<TensorView, WeightsError> {
        self.view(self.tensors.get(name).ok_or_else(|| self.missing(name))?)
    }

    fn view(&self, entry: &Entry) -> Result<TensorView, WeightsError> {
        let shard = &self.shards[entry.shard];
        shard.check()?;
        let dtype = known(entry.dtype).ok_or_else(|| self.wrong_dtype(entry, "a supported number type"))?;
        Ok(TensorView {
            key: entry.key.clone(),
            dtype,
            shape: entry.shape.clone(),
            shard: shard.clone(),
            range: entry.range.clone(),
            factors: entry.factors.as_deref().map(|factors| self.view(factors).map(Box::new)).transpose()?,
            eight_bits: entry.eight_bits.as_ref().map(|form| form.try_map(|points| self.view(points))).transpose()?,
        })
    }

    /// Returns a tensor that must be floating point, as weights are.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing or not floating point.
    pub fn get_float(&self, name: &str) -> Result<TensorView, WeightsError> {
        let entry = self.tensors.get(name).ok_or_else(|| self.missing(name))?;
        if !known(entry.dtype).is_some_and(DType::is_float) {
            return Err(self.wrong_dtype(entry, "bf16, f16, f32 or f8_e4m3"));
        }
        self.get(name)
    }

    fn wrong_dtype(&self, entry: &Entry, want: &'static str) -> WeightsError {
        WeightsError::WrongDtype {
            path: self.shards[entry.shard].path.clone(),
            key: entry.key.to_string(),
            dtype: entry.dtype.to_string().to_lowercase(),
            want,
        }
    }

    /// Returns a value of the files' free-form header metadata.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.shards.iter().find_map(|s| s.header.metadata().as_ref()?.get(key).map(String::as_str))
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
