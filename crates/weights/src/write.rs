//! Writing of safetensors files, and of models in the diffusers layout; a component's folder is created atomically.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde_json::{Map, Value, json};

use super::Component;
use super::error::WeightsError;
use super::unsupported::VERSION;
use ltx2_base::{temporaries, threads};
use ltx2_stablehlo::DType;

/// Maximum shard size of diffusers in bytes.
pub const SHARD_BYTES: u64 = 5_000_000_000;
/// Bytes that a thread generates and writes at a time: a multiple of every element size.
pub(crate) const PIECE: usize = 16 << 20;

/// Name, type and shape of a tensor to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name in the safetensors header.
    pub name: String,
    /// Element type in the file.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    pub(crate) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

/// A safetensors file with a complete header, whose tensors are written in any order.
pub(crate) struct TensorFile<'a> {
    file: File,
    path: &'a Path,
    /// Offsets of the tensors in the file.
    starts: Vec<u64>,
}

impl<'a> TensorFile<'a> {
    /// Writes the header to an empty file and reserves space for the tensors. `path` is for error messages. Two tensors of
    /// the same name are an error.
    pub(crate) fn begin<'t>(
        file: File,
        path: &'a Path,
        tensors: impl IntoIterator<Item = &'t TensorSpec> + Clone,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, WeightsError> {
        let header = header(tensors.clone(), metadata);
        let mut end = header.len() as u64;
        let (mut starts, mut names) = (Vec::new(), BTreeSet::new());
        for tensor in tensors {
            if !names.insert(&tensor.name) {
                let [path, other_path] = [path, path].map(Path::to_path_buf);
                let [key, other] = [&tensor.name; 2].map(String::clone);
                return Err(WeightsError::Duplicate { path, key, other_path, other });
            }
            starts.push(end);
            end += tensor.bytes() as u64;
        }
        file.write_all_at(&header, 0)
            .and_then(|()| file.set_len(end))
            .map_err(WeightsError::io(path, "cannot write"))?;
        Ok(TensorFile { file, path, starts })
    }

    /// Writes bytes of a tensor at an offset in the tensor.
    pub(crate) fn write(&self, tensor: usize, offset: usize, bytes: &[u8]) -> Result<(), WeightsError> {
        let written = self.file.write_all_at(bytes, self.starts[tensor] + offset as u64);
        written.map_err(WeightsError::io(self.path, "cannot write"))
    }
}

/// A byte range of a tensor to write.
struct WriteChunk<'a> {
    file: &'a TensorFile<'a>,
    /// Index of the tensor in the file.
    index: usize,
    tensor: &'a TensorSpec,
    /// Offset of the range within the tensor.
    from: usize,
    size: usize,
}

/// Writes `model/component` on all cores: its configuration, and its tensors in shards of at most `shard_bytes`. `fill`
/// writes a tensor's little-endian bytes from a byte offset into a buffer, so that a model larger than memory can be
/// written. `version` is stored as `model_version` in the headers. The folder appears under its name only when it is
/// complete. Returns its path.
///
/// # Errors
/// Returns an error if the folder exists or a write fails, or the first error of `fill`.
pub fn write_component<E: From<WeightsError> + Send>(
    model: &Path,
    component: Component,
    config: &Value,
    tensors: &[TensorSpec],
    shard_bytes: u64,
    version: Option<&str>,
    fill: impl Fn(&TensorSpec, usize, &mut [u8]) -> Result<(), E> + Sync,
) -> Result<PathBuf, E> {
    let target = model.join(component.folder());
    if target.exists() {
        return Err(WeightsError::Exists { path: target }.into());
    }
    fs::create_dir_all(model).map_err(WeightsError::io(model, "cannot create"))?;
    let staging = tempfile::Builder::new()
        .prefix(&format!(".{}.", component.folder()))
        .tempdir_in(model)
        .map_err(WeightsError::io(model, "cannot create a temporary folder"))?;
    temporaries::note(staging.path());
    // The temporary folder is private to its owner; the folder inside gets default permissions.
    let folder = staging.path().join(component.folder());
    fs::create_dir(&folder).map_err(WeightsError::io(&folder, "cannot create"))?;
    write_json(&folder.join(component.config_file()), config)?;

    let shards = shards(tensors, shard_bytes);
    let stem = component.weights_stem().unwrap_or("model");
    let names: Vec<String> = match shards.len() {
        1 => vec![format!("{stem}.safetensors")],
        n => (1..=n).map(|i| format!("{stem}-{i:05}-of-{n:05}.safetensors")).collect(),
    };
    let paths: Vec<PathBuf> = names.iter().map(|name| folder.join(name)).collect();
    // diffusers and transformers check for the format before they load a file.
    let stated = [("format", Some("pt")), (VERSION, version)];
    let metadata = stated.into_iter().filter_map(|(key, value)| Some((key.to_string(), value?.to_string()))).collect();
    let mut files = Vec::new();
    for (shard, path) in shards.iter().zip(&paths) {
        let file = File::create(path).map_err(WeightsError::io(path, "cannot write"))?;
        files.push(TensorFile::begin(file, path, *shard, &metadata)?);
    }
    let mut pieces = Vec::new();
    for (shard, file) in shards.iter().zip(&files) {
        for (index, tensor) in shard.iter().enumerate() {
            pieces.extend((0..tensor.bytes()).step_by(PIECE).map(|from| {
                let size = PIECE.min(tensor.bytes() - from);
                WriteChunk { file, index, tensor, from, size }
            }));
        }
    }
    write_all(&pieces, fill)?;
    if shards.len() > 1 {
        let named = shards.iter().zip(&names);
        let map = named.flat_map(|(shard, file)| shard.iter().map(|t| (t.name.clone(), Value::from(file.as_str()))));
        let total: usize = tensors.iter().map(TensorSpec::bytes).sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": map.collect::<Map<_, _>>()});
        write_json(&folder.join(format!("{stem}.safetensors.index.json")), &index)?;
    }
    fs::rename(&folder, &target).map_err(WeightsError::io(&target, "cannot rename into place"))?;
    Ok(target)
}

/// Groups tensors into files; a tensor larger than a shard gets a separate file.
fn shards(tensors: &[TensorSpec], most: u64) -> Vec<&[TensorSpec]> {
    let (mut shards, mut first, mut size) = (Vec::new(), 0, 0);
    for (i, tensor) in tensors.iter().enumerate() {
        let bytes = tensor.bytes() as u64;
        if i > first && size + bytes > most {
            shards.push(&tensors[first..i]);
            (first, size) = (i, 0);
        }
        size += bytes;
    }
    shards.push(&tensors[first..]);
    shards
}

fn write_all<E: From<WeightsError> + Send>(
    pieces: &[WriteChunk],
    fill: impl Fn(&TensorSpec, usize, &mut [u8]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let buffers = Mutex::new(Vec::<Vec<u8>>::new());
    let lock = || buffers.lock().unwrap_or_else(PoisonError::into_inner);
    let written = threads::try_in_order(pieces, threads::cores(), |piece| {
        let mut buffer = lock().pop().unwrap_or_default();
        buffer.resize(PIECE, 0);
        let bytes = &mut buffer[..piece.size];
        fill(piece.tensor, piece.from, bytes)?;
        piece.file.write(piece.index, piece.from, bytes)?;
        lock().push(buffer);
        Ok(())
    });
    written.map(drop)
}

/// Returns the length field and the header of a file, padded so that the data starts at a multiple of 64 bytes: readers
/// allow this, and device transfers are faster.
fn header<'t>(tensors: impl IntoIterator<Item = &'t TensorSpec>, metadata: &BTreeMap<String, String>) -> Vec<u8> {
    let mut map = Map::new();
    map.insert("__metadata__".into(), json!(metadata));
    let mut offset = 0;
    for t in tensors {
        let end = offset + t.bytes();
        let dtype = t.dtype.name().to_uppercase();
        map.insert(t.name.clone(), json!({"dtype": dtype, "shape": t.shape, "data_offsets": [offset, end]}));
        offset = end;
    }
    let mut text = Value::Object(map).to_string().into_bytes();
    text.resize((8 + text.len()).next_multiple_of(64) - 8, b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);
    header
}

/// Writes a JSON file atomically.
pub fn write_json(path: &Path, value: &Value) -> Result<(), WeightsError> {
    let failed = || WeightsError::io(path, "cannot write");
    let mut part = path.as_os_str().to_os_string();
    part.push(".part");
    let part = PathBuf::from(part);
    temporaries::note(&part);
    fs::write(&part, format!("{value:#}\n")).map_err(failed())?;
    fs::rename(&part, path).map_err(failed())
}
