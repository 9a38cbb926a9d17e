//! Writing a model in the diffusers layout: a component's folder appears whole or not at all.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::Component;
use super::error::WeightsError;
use crate::hlo::DType;
use crate::tensor::Tensor;

/// The size diffusers cuts shards at.
pub(crate) const SHARD_BYTES: u64 = 5_000_000_000;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorSpec {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
}

impl TensorSpec {
    fn bytes(&self) -> u64 {
        self.shape.iter().map(|d| *d as u64).product::<u64>() * self.dtype.size() as u64
    }
}

/// Writes one component; nothing is visible before [`ComponentWriter::finish`].
///
/// The tensors are declared first, because a safetensors file begins with all names and offsets, then given one by
/// one in the same order, so that a model larger than the memory can be written.
pub(crate) struct ComponentWriter {
    target: PathBuf,
    staging: TempDir,
    folder: PathBuf,
    shards: Vec<Vec<TensorSpec>>,
    names: Vec<String>,
    index_name: String,
    at: (usize, usize),
    out: Option<BufWriter<File>>,
}

impl ComponentWriter {
    /// Begins `model/component` with its configuration.
    ///
    /// # Errors
    /// The folder exists, or cannot be written.
    pub(crate) fn create(
        model: &Path,
        component: Component,
        config: &Value,
        tensors: Vec<TensorSpec>,
        shard_bytes: u64,
    ) -> Result<Self, WeightsError> {
        let target = model.join(component.folder());
        if target.exists() {
            return Err(WeightsError::Exists { path: target });
        }
        fs::create_dir_all(model).map_err(WeightsError::io(model, "cannot create"))?;
        let staging = tempfile::Builder::new()
            .prefix(&format!(".{}.", component.folder()))
            .tempdir_in(model)
            .map_err(WeightsError::io(model, "cannot create a temporary folder"))?;
        // A temporary folder is private to its owner; the folder inside it gets the usual permissions.
        let folder = staging.path().join(component.folder());
        fs::create_dir(&folder).map_err(WeightsError::io(&folder, "cannot create"))?;
        write_json(&folder.join(component.config_file()), config)?;
        let stem = component.weights_stem().unwrap_or("model");
        let mut shards: Vec<Vec<TensorSpec>> = vec![];
        let mut size = 0;
        for tensor in tensors {
            let bytes = tensor.bytes();
            match shards.last_mut() {
                Some(shard) if size + bytes <= shard_bytes => shard.push(tensor),
                _ => {
                    shards.push(vec![tensor]);
                    size = 0;
                }
            }
            size += bytes;
        }
        let count = shards.len();
        let name = |i: usize| format!("{stem}-{:05}-of-{count:05}.safetensors", i + 1);
        let names = if count == 1 { vec![format!("{stem}.safetensors")] } else { (0..count).map(name).collect() };
        let index_name = format!("{stem}.safetensors.index.json");
        Ok(ComponentWriter { target, staging, folder, shards, names, index_name, at: (0, 0), out: None })
    }

    /// Writes the next declared tensor.
    ///
    /// # Errors
    /// It is not the one declared at this place, or the disk refuses.
    pub(crate) fn write(&mut self, name: &str, tensor: &Tensor) -> Result<(), WeightsError> {
        let (shard, item) = self.at;
        let path = self.target.clone();
        let Some(spec) = self.shards.get(shard).and_then(|s| s.get(item)) else {
            return Err(WeightsError::Write { path, reason: format!("tensor `{name}` was not declared") });
        };
        if (spec.name.as_str(), spec.dtype, spec.shape.as_slice()) != (name, tensor.dtype(), tensor.shape()) {
            let reason = format!(
                "tensor `{name}` ({} {:?}) is not the declared `{}` ({} {:?})",
                tensor.dtype(),
                tensor.shape(),
                spec.name,
                spec.dtype,
                spec.shape
            );
            return Err(WeightsError::Write { path, reason });
        }
        let file = self.folder.join(&self.names[shard]);
        let failed = || WeightsError::io(&file, "cannot write");
        let mut out = match self.out.take() {
            Some(out) => out,
            None => {
                let mut out = BufWriter::with_capacity(1 << 20, File::create(&file).map_err(failed())?);
                out.write_all(&header(&self.shards[shard])).map_err(failed())?;
                out
            }
        };
        out.write_all(&tensor.bytes()).map_err(failed())?;
        if item + 1 == self.shards[shard].len() {
            out.flush().map_err(failed())?;
            self.at = (shard + 1, 0);
        } else {
            self.at = (shard, item + 1);
            self.out = Some(out);
        }
        Ok(())
    }

    /// Writes the index of a sharded component and moves the folder to its name, which it returns.
    ///
    /// # Errors
    /// Declared tensors were not given, or the disk refuses.
    pub(crate) fn finish(self) -> Result<PathBuf, WeightsError> {
        if let Some(spec) = self.shards.get(self.at.0).and_then(|s| s.get(self.at.1)) {
            let reason = format!("tensor `{}` was declared and not written", spec.name);
            return Err(WeightsError::Write { path: self.target, reason });
        }
        if self.shards.len() > 1 {
            let mut map = Map::new();
            for (shard, file) in self.shards.iter().zip(&self.names) {
                map.extend(shard.iter().map(|t| (t.name.clone(), Value::from(file.as_str()))));
            }
            let total: u64 = self.shards.iter().flatten().map(TensorSpec::bytes).sum();
            let index = json!({"metadata": {"total_size": total}, "weight_map": map});
            write_json(&self.folder.join(&self.index_name), &index)?;
        }
        fs::rename(&self.folder, &self.target).map_err(WeightsError::io(&self.target, "cannot rename into place"))?;
        drop(self.staging);
        Ok(self.target)
    }
}

/// A file's length field and header. Padded so that the data begin at a multiple of 64 bytes, which readers allow and
/// copies to a device like.
fn header(tensors: &[TensorSpec]) -> Vec<u8> {
    let mut map = Map::new();
    // What diffusers and transformers ask for before they load a file.
    map.insert("__metadata__".into(), json!({"format": "pt"}));
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

/// Writes a component whose tensors `make` gives one at a time; returns its folder.
pub(crate) fn write_component<E: From<WeightsError>>(
    model: &Path,
    component: Component,
    config: &Value,
    tensors: Vec<TensorSpec>,
    mut make: impl FnMut(&TensorSpec) -> Result<Tensor, E>,
) -> Result<PathBuf, E> {
    let mut writer = ComponentWriter::create(model, component, config, tensors.clone(), SHARD_BYTES)?;
    for spec in &tensors {
        writer.write(&spec.name, &make(spec)?)?;
    }
    Ok(writer.finish()?)
}

/// Writes a JSON file under a temporary name and renames it.
pub(crate) fn write_json(path: &Path, value: &Value) -> Result<(), WeightsError> {
    let failed = || WeightsError::io(path, "cannot write");
    let mut part = path.as_os_str().to_os_string();
    part.push(".part");
    let part = PathBuf::from(part);
    fs::write(&part, format!("{value:#}\n")).map_err(failed())?;
    fs::rename(&part, path).map_err(failed())
}
