//! Files with linear maps for previews: fitted sums that are stored between runs, and maps that users pass.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use ndarray::{Array2, Axis as Dim, Ix1, Ix2, Ix3};
use sha2::{Digest, Sha256};

use super::latent_map::{CellSize, LatentMap, MapStatistics};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::output::tensors::{fixed, write_with};
use crate::tensor::Tensor;
use crate::weights::Checkpoint;

/// Version of the stored format and of the meaning of the sums.
const FORMAT: &str = "1";

/// File with the sums of one decoder.
#[derive(Clone, Debug)]
pub(crate) struct MapFile {
    path: PathBuf,
    /// Hash of the decoder's weights and configuration.
    key: String,
    cell: CellSize,
}

impl MapFile {
    /// Returns the file for the decoder with the hash `key` in `folder`; it need not exist.
    pub(crate) fn new(folder: &Path, key: &str, cell: CellSize) -> Self {
        MapFile { path: folder.join(format!("preview-{key}.safetensors")), key: key.into(), cell }
    }

    /// Reads the sums. `None`: there is no file.
    ///
    /// # Errors
    /// Returns an error if the file is damaged, or if it belongs to another decoder or another version of this program.
    pub(crate) fn read(&self) -> Result<Option<MapStatistics>> {
        if !self.path.exists() {
            return Ok(None);
        }
        let fail = |why: &str| PipelineError::File { path: self.path.clone(), reason: why.into() };
        let file = Checkpoint::open(&self.path)?;
        let says = |key: &str| file.metadata(key).unwrap_or_default();
        if says("format") != FORMAT || says("decoder") != self.key {
            return Err(fail("belongs to another decoder or version"));
        }
        let cells = says("cells").parse().map_err(|_| fail("the number of cells is missing or invalid"))?;
        let sums = |name: &str| -> Result<Array2<f64>> { fixed::<_, Ix2>(f64_values(file.get(name)?.to_tensor()?)) };
        let read = MapStatistics { cell: self.cell, cells, gram: sums("gram")?, cross: sums("cross")? };
        let empty = MapStatistics::new(self.cell);
        if (read.gram.dim(), read.cross.dim()) != (empty.gram.dim(), empty.cross.dim()) {
            return Err(fail("the sums have the wrong shape"));
        }
        if says("sha256") != checksum(&read) {
            return Err(fail("the checksum does not match: the file is damaged"));
        }
        Ok(Some(read))
    }

    /// Writes the sums. Replaces an existing file.
    pub(crate) fn write(&self, sums: &MapStatistics) -> Result<()> {
        let about = [
            ("format", FORMAT.to_string()),
            ("decoder", self.key.clone()),
            ("cells", sums.cells.to_string()),
            ("sha256", checksum(sums)),
        ];
        let about: HashMap<String, String> = about.map(|(key, value)| (key.to_string(), value)).into();
        let tensors = [("gram", &sums.gram), ("cross", &sums.cross)];
        let tensors = tensors.map(|(name, values)| (name.to_string(), Tensor::F64(values.clone().into_dyn())));
        write_with(&self.path, &tensors, Some(about), true)
    }
}

fn f64_values(tensor: Tensor) -> ndarray::ArrayD<f64> {
    match tensor {
        Tensor::F64(values) => values,
        other => other.to_f32().mapv_into_any(f64::from),
    }
}

fn checksum(sums: &MapStatistics) -> String {
    let mut hash = Sha256::new().chain_update(sums.cells.to_le_bytes());
    for value in sums.gram.iter().chain(&sums.cross) {
        hash.update(value.to_le_bytes());
    }
    hex::encode(hash.finalize())
}

/// Reads a map from a safetensors file: `weight [k, channels, outputs]` and `bias [outputs]`. `k` is 1 (only the cell)
/// or 7 (the cell, then its neighbours: previous and next frame, above, below, left, right). The outputs are rows,
/// columns and RGB values in -1..1.
///
/// # Errors
/// Returns an error if the file cannot be read, or if the shape of a tensor does not match the model.
pub(crate) fn read_map(path: &Path, cell: CellSize) -> Result<LatentMap> {
    let file = Checkpoint::open(path)?;
    let tensor = |name: &str| -> Result<Tensor> { Ok(file.get(name)?.to_tensor()?) };
    let fail = |what: &str, got: &[usize], want: String| PipelineError::File {
        path: path.into(),
        reason: format!("{what} has the shape {got:?}; previews of this model need {want}"),
    };
    let (weight, bias) = (tensor("weight")?.into_f32(), tensor("bias")?.into_f32());
    let (shape, outputs) = (weight.shape().to_vec(), cell.outputs());
    if !matches!(shape[..], [1 | 7, channels, width] if channels == cell.channels && width == outputs) {
        return Err(fail("weight", &shape, format!("[1 or 7, {}, {outputs}]", cell.channels)));
    }
    if bias.shape() != [outputs] {
        return Err(fail("bias", bias.shape(), format!("[{outputs}]")));
    }
    let weight = fixed::<_, Ix3>(weight)?;
    let parts: Vec<_> = weight.axis_iter(Dim(0)).collect();
    let weight = ndarray::concatenate(Dim(0), &parts).map_err(|e| PipelineError::Bug(e.to_string()))?;
    Ok(LatentMap { cell, weight, bias: fixed::<_, Ix1>(bias)? })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::pipeline::output::tensors;
    use ndarray::ArrayD;

    const CELL: CellSize = CellSize { channels: 2, pixels: 32, frames: 8 };

    fn sums() -> MapStatistics {
        let mut sums = MapStatistics::new(CELL);
        sums.gram.indexed_iter_mut().for_each(|((i, j), v)| *v = (i * j) as f64 / 3.0);
        sums.cells = 5;
        sums
    }

    #[test]
    fn stored_sums_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let file = MapFile::new(&folder.path().join("new"), "abc", CELL);
        assert_eq!(file.read().unwrap(), None);
        file.write(&sums()).unwrap();
        assert_eq!(file.read().unwrap(), Some(sums()));
    }

    #[test]
    fn damaged_and_foreign_files_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let file = MapFile::new(folder.path(), "abc", CELL);
        file.write(&sums()).unwrap();
        let bytes = std::fs::read(&file.path).unwrap();
        let mut changed = bytes.clone();
        *changed.last_mut().unwrap() ^= 1;
        for (damaged, why) in [(&bytes[..bytes.len() - 8], ""), (&changed, "checksum"), (b"text".as_slice(), "")] {
            std::fs::write(&file.path, damaged).unwrap();
            let error = file.read().unwrap_err().to_string();
            assert!(error.contains("preview-abc.safetensors") && error.contains(why), "{error}");
        }
        std::fs::write(&file.path, bytes).unwrap();
        let other = MapFile { key: "other".into(), ..file.clone() };
        assert!(other.read().unwrap_err().to_string().contains("another decoder"));
        let wider = MapFile { cell: CellSize { channels: 3, ..CELL }, ..file };
        assert!(wider.read().unwrap_err().to_string().contains("wrong shape"));
    }

    #[test]
    fn map_with_wrong_shape_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("map.safetensors");
        let write = |weight: &[usize], bias: &[usize]| {
            let tensor = |shape: &[usize]| Tensor::F32(ArrayD::from_elem(shape, 0.5));
            tensors::write(&path, &[("weight".into(), tensor(weight)), ("bias".into(), tensor(bias))]).unwrap();
            read_map(&path, CELL)
        };
        assert_eq!(write(&[1, 2, 48], &[48]).unwrap().weight.dim(), (2, 48));
        assert_eq!(write(&[7, 2, 48], &[48]).unwrap().weight.dim(), (14, 48));
        let error = write(&[3, 2, 48], &[48]).unwrap_err().to_string();
        assert!(error.contains("weight has the shape [3, 2, 48]") && error.contains("[1 or 7, 2, 48]"), "{error}");
        assert!(write(&[1, 2, 48], &[3]).unwrap_err().to_string().contains("bias has the shape [3]"));
    }
}
