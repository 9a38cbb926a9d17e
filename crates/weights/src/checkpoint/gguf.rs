//! The header of GGUF files: metadata, and the name, type, shape and offset of each tensor.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::gguf_types::{self, GgufType};
use super::shard::ShardFile;
use super::{TensorEntry, TensorView};
use crate::error::WeightsError;
use ltx2_stablehlo::DType;

/// First bytes of a GGUF file.
pub(super) const MAGIC: &[u8] = b"GGUF";
/// Metadata key of the model's architecture.
pub(super) const ARCHITECTURE: &str = "general.architecture";
/// Prefix of metadata keys for the original shapes of tensors that the writer had to reshape.
const ORIGINAL_SHAPE: &str = "comfy.gguf.orig_shape.";
/// Bytes read at a time.
const READ: usize = 1 << 18;
/// Maximum length of a name or key in bytes.
const MAX_NAME: u64 = 1 << 12;
/// Maximum length in bytes of a metadata string; longer strings are skipped.
const MAX_VALUE: u64 = 1 << 20;
/// Maximum number of dimensions of a tensor.
const MAX_DIMENSIONS: u32 = 8;
/// Maximum number of elements of a metadata array; longer arrays are skipped.
const MAX_KEPT: u64 = 64;

/// Metadata value types that are not numbers of a fixed size.
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// Reader of the header, from front to back. No allocation exceeds the size of the file, even if the header is damaged.
struct Reader<'a> {
    shard: &'a ShardFile,
    /// Offset of the next byte in the file.
    at: u64,
    buffer: Vec<u8>,
    /// Offset of the buffer in the file.
    start: u64,
}

impl Reader<'_> {
    fn bad(&self, reason: String) -> WeightsError {
        WeightsError::Gguf { path: self.shard.path.clone(), reason }
    }

    /// Returns the end of the next `count` bytes, if the file has them.
    fn end(&self, count: u64) -> Result<u64, WeightsError> {
        let (path, got) = (self.shard.path.clone(), self.shard.size);
        let end = self.at.checked_add(count).ok_or_else(|| self.bad("sizes in the header overflow".into()))?;
        if end <= got { Ok(end) } else { Err(WeightsError::Truncated { path, want: end, got }) }
    }

    fn skip(&mut self, count: u64) -> Result<(), WeightsError> {
        self.at = self.end(count)?;
        Ok(())
    }

    fn bytes(&mut self, count: u64) -> Result<&[u8], WeightsError> {
        let end = self.end(count)?;
        if self.at < self.start || end > self.start + self.buffer.len() as u64 {
            self.start = self.at;
            let size = count.max(READ as u64).min(self.shard.size - self.at);
            self.buffer.resize(size as usize, 0);
            self.shard.read_exact(self.start, &mut self.buffer)?;
        }
        let from = (self.at - self.start) as usize;
        self.at = end;
        Ok(&self.buffer[from..from + count as usize])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WeightsError> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N as u64)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32, WeightsError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, WeightsError> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self, most: u64) -> Result<String, WeightsError> {
        let length = self.u64()?;
        if length > most {
            return Err(self.bad(format!("a string has {length} bytes; at most {most} are allowed")));
        }
        Ok(String::from_utf8_lossy(self.bytes(length)?).into_owned())
    }

    /// Reads a metadata value as text. Skips long strings, long arrays and arrays of strings, and returns `None` for
    /// them.
    fn value(&mut self, kind: u32) -> Result<Option<String>, WeightsError> {
        Ok(Some(match kind {
            0 => self.array().map(|[byte]: [u8; 1]| byte)?.to_string(),
            1 => self.array().map(i8::from_le_bytes)?.to_string(),
            2 => self.array().map(u16::from_le_bytes)?.to_string(),
            3 => self.array().map(i16::from_le_bytes)?.to_string(),
            4 => self.u32()?.to_string(),
            5 => self.array().map(i32::from_le_bytes)?.to_string(),
            6 => self.array().map(f32::from_le_bytes)?.to_string(),
            7 => (self.array::<1>()? != [0]).to_string(),
            STRING => {
                let length = self.u64()?;
                self.at -= 8;
                if length > MAX_VALUE {
                    self.skip(8)?;
                    self.skip(length)?;
                    return Ok(None);
                }
                self.text(MAX_VALUE)?
            }
            ARRAY => return self.values(),
            10 => self.u64()?.to_string(),
            11 => self.array().map(i64::from_le_bytes)?.to_string(),
            12 => self.array().map(f64::from_le_bytes)?.to_string(),
            _ => return Err(self.bad(format!("a metadata value has the unknown type {kind}"))),
        }))
    }

    /// Reads an array. Returns a short array of numbers as a JSON list; `None` for other arrays.
    fn values(&mut self) -> Result<Option<String>, WeightsError> {
        let (kind, count) = (self.u32()?, self.u64()?);
        let size = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            STRING => {
                for _ in 0..count {
                    let length = self.u64()?;
                    self.skip(length)?;
                }
                return Ok(None);
            }
            _ => return Err(self.bad(format!("a metadata array has the unsupported element type {kind}"))),
        };
        if count > MAX_KEPT {
            self.skip(count.saturating_mul(size))?;
            return Ok(None);
        }
        let values = (0..count).map(|_| self.value(kind)).collect::<Result<Option<Vec<_>>, _>>()?;
        Ok(values.map(|values| format!("[{}]", values.join(","))))
    }
}

/// A tensor's entry in the header.
struct Info {
    name: String,
    /// Dimensions, outermost first.
    shape: Vec<usize>,
    kind: &'static GgufType,
    /// Offset from the start of the data.
    offset: u64,
}

impl Info {
    fn read(reader: &mut Reader) -> Result<Self, WeightsError> {
        let name = reader.text(MAX_NAME)?;
        let count = reader.u32()?;
        if count > MAX_DIMENSIONS {
            return Err(reader.bad(format!("tensor `{name}` has {count} dimensions, more than {MAX_DIMENSIONS}")));
        }
        let mut shape = (0..count).map(|_| reader.u64().map(|size| size as usize)).collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        let kind = reader.u32()?;
        let offset = reader.u64()?;
        let kind = gguf_types::find(kind).map_err(|kind| WeightsError::Config {
            path: reader.shard.path.clone(),
            key: name.clone(),
            reason: format!(
                "has the GGUF type {kind}, which is not supported; use a file of type {}",
                gguf_types::names()
            ),
        })?;
        Ok(Info { name, shape, kind, offset })
    }

    /// Returns the number of bytes of the codes. `None`: a dimension is 0, a row is not divisible into blocks, or the
    /// size overflows.
    fn size(&self) -> Option<u64> {
        let inner = self.shape.last().copied().unwrap_or(1);
        if self.shape.contains(&0) || !inner.is_multiple_of(self.kind.block) {
            return None;
        }
        let elements = self.shape.iter().try_fold(1u64, |all, size| all.checked_mul(*size as u64))?;
        (elements / self.kind.block as u64).checked_mul(self.kind.bytes as u64)
    }
}

/// Reads a file's header. Returns the shard including the metadata, and a map from tensor names to entries. In the
/// metadata, short arrays are JSON lists; longer arrays are omitted.
pub(super) fn open(
    path: &Path,
    mut shard: ShardFile,
) -> Result<(Arc<ShardFile>, BTreeMap<String, TensorEntry>), WeightsError> {
    let mut reader = Reader { shard: &shard, at: MAGIC.len() as u64, buffer: Vec::new(), start: 0 };
    let version = reader.u32()?;
    if !matches!(version, 2 | 3) {
        let reason =
            format!("version {version}, but only 2 and 3 are supported; convert the file with a current llama.cpp");
        return Err(reader.bad(reason));
    }
    let (tensors, values) = (reader.u64()?, reader.u64()?);
    let mut metadata = std::collections::HashMap::new();
    for _ in 0..values {
        let (key, kind) = (reader.text(MAX_NAME)?, reader.u32()?);
        if let Some(value) = reader.value(kind)? {
            metadata.insert(key, value);
        }
    }
    let mut infos = Vec::new();
    for _ in 0..tensors {
        infos.push(Info::read(&mut reader)?);
    }
    // `Checkpoint::architecture` recognizes GGUF files by this key.
    metadata.entry(ARCHITECTURE.to_string()).or_default();
    let number = |key: &str| metadata.get(key).and_then(|value: &String| value.parse::<u64>().ok());
    let alignment = number("general.alignment").unwrap_or(32);
    let bad = |reason: String| WeightsError::Gguf { path: path.to_path_buf(), reason };
    if !alignment.is_power_of_two() {
        return Err(bad(format!("`general.alignment` is {alignment}, not a power of two")));
    }
    if let Some(count) = number("split.count").filter(|count| *count > 1) {
        return Err(bad(format!(
            "is one of {count} parts of a model; merge the parts with `llama-gguf-split` of llama.cpp"
        )));
    }
    let data = reader.at.checked_next_multiple_of(alignment).ok_or_else(|| bad("sizes overflow".into()))?;
    let size = shard.size;
    shard.metadata = metadata;
    let shard = Arc::new(shard);
    let mut entries = BTreeMap::new();
    for info in infos {
        let wrong = |what: &str| bad(format!("tensor `{}` of shape {:?} {what}", info.name, info.shape));
        let bytes = info.size().ok_or_else(|| wrong(&format!("is not divisible into {} blocks", info.kind.name)))?;
        let start = data.checked_add(info.offset).filter(|start| start.checked_add(bytes).is_some());
        let start = start.ok_or_else(|| wrong("has an offset that overflows"))?;
        if start + bytes > size {
            return Err(WeightsError::Truncated { path: path.to_path_buf(), want: start + bytes, got: size });
        }
        let shape = match shard.metadata.get(&format!("{ORIGINAL_SHAPE}{}", info.name)) {
            Some(text) => {
                let shape: Option<Vec<usize>> = serde_json::from_str(text).ok();
                let elements = |shape: &[usize]| shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size));
                let fits = |shape: &Vec<usize>| elements(shape) == elements(&info.shape);
                shape.filter(fits).ok_or_else(|| wrong(&format!("cannot have the original shape {text}")))?
            }
            None => info.shape.clone(),
        };
        let view = TensorView {
            key: info.name.as_str().into(),
            dtype: info.kind.plain.unwrap_or(DType::F32),
            shape: shape.into(),
            shard: shard.clone(),
            range: start..start + bytes,
            decoder: info.kind.decoder(),
            first: 0,
        };
        let entry = TensorEntry { type_name: info.kind.name.into(), is_known: true, view };
        if entries.insert(info.name.clone(), entry).is_some() {
            return Err(bad(format!("tensor `{}` is defined twice", info.name)));
        }
    }
    Ok((shard, entries))
}
