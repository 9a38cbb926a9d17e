//! Errors of model files. Every message is one line that contains the file and, if there is one, the key.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::Component;
use super::version::Version;
use crate::tensor::TensorError;

/// An error from reading, checking or writing model files.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("{}: {action}: {source}", path.display())]
    Io { path: PathBuf, action: &'static str, source: io::Error },
    #[error("model `{name}` not found: {looked}")]
    NotFound { name: String, looked: String },
    /// A folder contains no weights that can be loaded.
    #[error("{}: no weights: {reason}", path.display())]
    NoWeights { path: PathBuf, reason: String },
    #[error("{}: not a safetensors file: {reason}", path.display())]
    NotSafetensors { path: PathBuf, reason: String },
    #[error("{}: changed while it was in use (it had {was} bytes, now {is}); restart the program", path.display())]
    Changed { path: PathBuf, was: u64, is: u64 },
    #[error("{}: truncated: the header requires {want} bytes, the file has {got}; download the file again", path.display())]
    Truncated { path: PathBuf, want: u64, got: u64 },
    #[error("{}: {} bytes after the last tensor: the header accounts for {want} bytes, the file has {got}; download the file again", path.display(), got - want)]
    Trailing { path: PathBuf, want: u64, got: u64 },
    #[error("{}: shard `{shard}` is missing; it contains `{key}` and {others} more tensors; download the shard", index.display())]
    MissingShard { index: PathBuf, shard: String, key: String, others: usize },
    #[error("{}: tensor `{key}` is not in `{shard}`, where the index places it", index.display())]
    IndexMismatch { index: PathBuf, shard: String, key: String },
    /// Two files, or two spellings of a name, contain the same tensor.
    #[error("{}: tensor `{key}` is defined twice (also as `{other}` in {})", path.display(), other_path.display())]
    Duplicate { path: PathBuf, key: String, other_path: PathBuf, other: String },
    #[error("{}: tensor `{key}` is missing", path.display())]
    MissingTensor { path: PathBuf, key: String },
    /// A tensor has an unsupported element type.
    #[error("{}: tensor `{key}` is {dtype}, expected {want}; use the bf16 files, because other quantized weights are not supported", path.display())]
    WrongDtype { path: PathBuf, key: String, dtype: String, want: &'static str },
    #[error("{}: tensor `{key}` has shape {got:?}, but the model's configuration requires {want:?}", path.display())]
    Shape { path: PathBuf, key: String, got: Vec<usize>, want: Vec<usize> },
    /// Dequantization scales of 8-bit weights are not per row or per tensor.
    #[error("{}: {scales}", path.display())]
    Scales { path: PathBuf, scales: Misscaled },
    #[error("{}: the tensors of the {component} do not match its configuration: {summary}", path.display())]
    Mismatch { path: PathBuf, component: Component, summary: String },
    #[error("{}: tensor `{key}`{} not read by any part of LTX-2.0, LTX-2.3 or LTX-2.5: the model may be newer than this program",
        path.display(), if *others > 0 { format!(" and {others} more are") } else { " is".into() })]
    Unread { path: PathBuf, key: String, others: usize },
    /// The model version is not supported.
    #[error("{}: {mark} is unknown to this program, which supports LTX-2.0, LTX-2.3 and LTX-2.5; a newer model needs \
             a newer ltx2", path.display())]
    Newer { path: PathBuf, mark: String },
    /// A component and the transformer belong to different model versions, which tensor shapes do not reveal.
    #[error("{}: {what}, but {} is the transformer of LTX-{wants}: {cure}", path.display(), transformer.display())]
    Pairing { path: PathBuf, what: String, transformer: PathBuf, wants: Version, cure: &'static str },
    /// The file is a quantized repack.
    #[error("{}: tensor `{key}` is {dtype}: quantized repacks (int8-convrot, nvfp4) are not supported; use the \
             bf16 file of the same component", path.display())]
    Repack { path: PathBuf, key: String, dtype: String },
    /// A component's tensors and its configuration belong to different model versions.
    #[error("{}: the {component} has `{tensor}` of LTX-{has}, but {} describes LTX-{wants}; use weights and configuration of the same model", path.display(), config.display())]
    Generation {
        path: PathBuf,
        component: Component,
        tensor: &'static str,
        has: Version,
        config: PathBuf,
        wants: Version,
    },
    #[error("{}: tensor `{key}` is {value} at {index:?}; the file is damaged or was made by a failed conversion", path.display())]
    NonFinite { path: PathBuf, key: String, index: Vec<usize>, value: f64 },
    #[error("{}: {reason}", path.display())]
    Json { path: PathBuf, reason: String },
    /// A configuration key has an unsupported value. `reason` is a predicate, such as `is 3, not a list`.
    #[error("{}: `{key}` {reason}", path.display())]
    Config { path: PathBuf, key: String, reason: String },
    #[error("{}: contains no {component}{}", path.display(), override_hint(*component))]
    NoComponent { path: PathBuf, component: Component },
    /// A LoRA cannot be read or does not fit the model. `reason` is a predicate, such as `is not part of a LoRA`.
    #[error("{}: `{key}` {reason}", path.display())]
    Lora { path: PathBuf, key: String, reason: String },
    #[error("{}: already exists; choose another folder, or remove this one", path.display())]
    Exists { path: PathBuf },
    /// A written tensor differs from its declaration.
    #[error("{}: {reason}", path.display())]
    Write { path: PathBuf, reason: String },
    /// The bytes do not form a valid host tensor.
    #[error("{}: tensor `{key}`: {source}", path.display())]
    Tensor { path: PathBuf, key: String, source: TensorError },
}

/// Dequantization scales that are neither one per row nor one for all rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misscaled {
    pub name: String,
    pub shape: Vec<usize>,
    /// Number of rows of the weight.
    pub rows: usize,
}

impl fmt::Display for Misscaled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Misscaled { name, shape, rows } = self;
        write!(
            f,
            "`{name}` has shape {shape:?}, but 8-bit weights need one scale, or one for each of {rows} rows; use bf16 \
             weights, or weights quantized per tensor or per row"
        )
    }
}

impl WeightsError {
    /// Returns a closure for `map_err` that makes a [`WeightsError::Io`].
    pub(super) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| WeightsError::Io { path, action, source }
    }
}

fn override_hint(component: Component) -> String {
    match component.override_key() {
        Some(key) => {
            let what = if component == Component::TextEncoder {
                "the folder of Gemma-3-12B (config.json, safetensors, tokenizer.json), or to LTX-2.5's own text encoder"
            } else {
                "its file or folder"
            };
            format!(": set `model.{key}` in the YAML or --{} to {what}", key.replace('_', "-"))
        }
        None => format!(" (looked for `{}`)", component.folder()),
    }
}
