//! One open weight file.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use safetensors::tensor::Metadata;

use crate::error::WeightsError;
use ltx2_base::file_kind;

/// Maximum header size of the format in bytes; prevents a damaged length field from allocating all memory.
const MAX_HEADER: u64 = 100_000_000;

/// One open file. It is not memory-mapped, because access to a mapping of a truncated file would crash the process.
#[derive(Debug)]
pub(super) struct ShardFile {
    pub(super) path: PathBuf,
    file: File,
    pub(super) size: u64,
    /// Modification time, if the file system provides it.
    written: Option<SystemTime>,
    /// Free-form metadata of the header.
    pub(super) metadata: HashMap<String, String>,
}

impl ShardFile {
    /// Opens a file; its metadata is empty.
    pub(super) fn open(path: &Path) -> Result<Self, WeightsError> {
        let file = File::open(path).map_err(WeightsError::io(path, "cannot open"))?;
        let about = file.metadata().map_err(WeightsError::io(path, "cannot read its size"))?;
        let (size, written) = (about.len(), about.modified().ok());
        Ok(ShardFile { path: path.to_path_buf(), file, size, written, metadata: HashMap::new() })
    }

    /// Reads the header of a safetensors file; also returns the offset of the tensor data.
    pub(super) fn safetensors_header(&mut self) -> Result<(Metadata, u64), WeightsError> {
        let got = self.size;
        let bad = |reason: String| WeightsError::NotSafetensors { path: self.path.clone(), reason };
        if got < 8 {
            return Err(bad(match got {
                0 => "the file is empty, possibly an unfinished download; download it again".into(),
                _ => format!("the file has {got} bytes, fewer than the length field of the header (8)"),
            }));
        }
        let start = self.start()?;
        let mut length = [0; 8];
        length.copy_from_slice(&start[..8]);
        let length = u64::from_le_bytes(length);
        // In every safetensors file, a brace follows the length field.
        let is_foreign = length > MAX_HEADER || start.get(8) != Some(&b'{');
        if let Some(kind) = file_kind::non_safetensors_kind(&start).filter(|_| is_foreign) {
            return Err(bad(format!("the file is {kind}")));
        }
        if length > MAX_HEADER {
            return Err(bad(
                "the file is in another format or damaged: the first 8 bytes are not a valid header length".into(),
            ));
        }
        let data = 8 + length;
        let mut header = vec![0; length.min(got - 8) as usize];
        self.read_exact(8, &mut header)?;
        if data > got {
            return Err(match header.first() {
                Some(b'{') => WeightsError::Truncated { path: self.path.clone(), want: data, got },
                _ => bad("no JSON header after the first 8 bytes".into()),
            });
        }
        let header: Metadata = serde_json::from_slice(&header).map_err(|e| bad(format!("damaged header: {e}")))?;
        // `Metadata` has checked that tensors are contiguous, so the end of the last one is the end of the file.
        let want = data.checked_add(header.data_len() as u64).ok_or_else(|| bad("sizes overflow".into()))?;
        let path = self.path.clone();
        match want.cmp(&got) {
            std::cmp::Ordering::Greater => return Err(WeightsError::Truncated { path, want, got }),
            std::cmp::Ordering::Less => return Err(WeightsError::Trailing { path, want, got }),
            std::cmp::Ordering::Equal => {}
        }
        self.metadata = header.metadata().clone().unwrap_or_default();
        Ok((header, data))
    }

    /// Returns the first bytes of the file, which identify its format.
    pub(super) fn start(&self) -> Result<Vec<u8>, WeightsError> {
        let mut start = vec![0; self.size.min(file_kind::SIGNATURE_BYTES as u64) as usize];
        self.read_exact(0, &mut start)?;
        Ok(start)
    }

    /// Reads bytes from the offset `at`. Does not check for changes of the file.
    pub(super) fn read_exact(&self, at: u64, into: &mut [u8]) -> Result<(), WeightsError> {
        self.file.read_exact_at(into, at).map_err(WeightsError::io(&self.path, "cannot read"))
    }

    /// Reads bytes from the offset `at`; returns an error if the file has changed since it was opened.
    pub(super) fn read(&self, at: u64, into: &mut [u8]) -> Result<(), WeightsError> {
        let read = self.read_exact(at, into);
        // A read during a change may return a mix of old and new data.
        self.check()?;
        read
    }

    /// Returns an error if the open file has changed. A new file under the same path does not matter.
    pub(super) fn check(&self) -> Result<(), WeightsError> {
        let about = self.file.metadata().map_err(WeightsError::io(&self.path, "cannot read its size"))?;
        match about.len() == self.size && about.modified().ok() == self.written {
            true => Ok(()),
            false => Err(WeightsError::Changed { path: self.path.clone(), was: self.size, is: about.len() }),
        }
    }
}
