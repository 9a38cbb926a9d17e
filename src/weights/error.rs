//! Errors of a model's files. Every message is one line that names the file and the key.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::Component;
use super::version::Version;
use crate::tensor::TensorError;

/// An error of the weights layer.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("{}: {action}: {source}", path.display())]
    Io { path: PathBuf, action: &'static str, source: io::Error },
    #[error("model `{name}` not found: {looked}")]
    NotFound { name: String, looked: String },
    /// A folder holds nothing that can be loaded.
    #[error("{}: no weights: {reason}", path.display())]
    NoWeights { path: PathBuf, reason: String },
    #[error("{}: not a safetensors file: {reason}", path.display())]
    NotSafetensors { path: PathBuf, reason: String },
    #[error("{}: was written to while it was in use: it had {was} bytes, now {is}; start again", path.display())]
    Changed { path: PathBuf, was: u64, is: u64 },
    #[error("{}: truncated: its header asks for {want} bytes, the file has {got}; download it again", path.display())]
    Truncated { path: PathBuf, want: u64, got: u64 },
    #[error("{}: {} bytes after the last tensor: its header ends at {want} bytes, the file has {got}", path.display(), got - want)]
    Trailing { path: PathBuf, want: u64, got: u64 },
    #[error("{}: shard `{shard}` is missing; `{key}` and {others} more tensors are in it", index.display())]
    MissingShard { index: PathBuf, shard: String, key: String, others: usize },
    #[error("{}: tensor `{key}` should be in `{shard}`, which does not have it", index.display())]
    IndexMismatch { index: PathBuf, shard: String, key: String },
    /// Two files, or two spellings, give the same tensor.
    #[error("{}: tensor `{key}` is given twice (also as `{other}` in {})", path.display(), other_path.display())]
    Duplicate { path: PathBuf, key: String, other_path: PathBuf, other: String },
    #[error("{}: tensor `{key}` is missing", path.display())]
    MissingTensor { path: PathBuf, key: String },
    /// An element type the program has no use for.
    #[error("{}: tensor `{key}` is {dtype}, {want} is needed; quantised weights are not read, use the bf16 files", path.display())]
    WrongDtype { path: PathBuf, key: String, dtype: String, want: &'static str },
    #[error("{}: tensor `{key}` has shape {got:?}, the model's configuration asks for {want:?}", path.display())]
    Shape { path: PathBuf, key: String, got: Vec<usize>, want: Vec<usize> },
    /// Scales of 8-bit weights for other parts than rows.
    #[error("{}: {scales}", path.display())]
    Scales { path: PathBuf, scales: Misscaled },
    #[error("{}: the tensors of the {component} do not fit its configuration: {summary}", path.display())]
    Mismatch { path: PathBuf, component: Component, summary: String },
    #[error("{}: tensor `{key}`{} not read by any part of LTX-2.0, LTX-2.3 or LTX-2.5: the model may be newer than this program",
        path.display(), if *others > 0 { format!(" and {others} more are") } else { " is".into() })]
    Unread { path: PathBuf, key: String, others: usize },
    /// A model of a generation that is not run.
    #[error("{}: {mark} is of no generation that this program knows; it runs LTX-2.0, LTX-2.3 and LTX-2.5: a model that \
             is newer needs a newer ltx2", path.display())]
    Newer { path: PathBuf, mark: String },
    /// A part of one generation beside a transformer of another, which no shape tells.
    #[error("{}: {what}, but {} is the transformer of LTX-{wants}: {cure}", path.display(), transformer.display())]
    Pairing { path: PathBuf, what: String, transformer: PathBuf, wants: Version, cure: &'static str },
    /// A file that others quantised.
    #[error("{}: tensor `{key}` is {dtype}: a quantised repack (int8-convrot, nvfp4), whose layout is not read; use the \
             bf16 file of the same part", path.display())]
    Repack { path: PathBuf, key: String, dtype: String },
    /// Tensors of one generation under a configuration of the other.
    #[error("{}: the {component} has `{tensor}` of LTX-{has}, but {} describes LTX-{wants}; take both from one model", path.display(), config.display())]
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
    /// A key of a configuration has a value this program cannot use.
    #[error("{}: `{key}`: {reason}", path.display())]
    Config { path: PathBuf, key: String, reason: String },
    #[error("{}: no {component} here{}", path.display(), how_to_give(*component))]
    NoComponent { path: PathBuf, component: Component },
    /// A LoRA that cannot be read or does not fit.
    #[error("{}: `{key}`: {reason}", path.display())]
    Lora { path: PathBuf, key: String, reason: String },
    #[error("{}: already exists; give another folder or remove it", path.display())]
    Exists { path: PathBuf },
    /// A written tensor that differs from its declaration.
    #[error("{}: {reason}", path.display())]
    Write { path: PathBuf, reason: String },
    /// The bytes are no host tensor.
    #[error("{}: tensor `{key}`: {source}", path.display())]
    Tensor { path: PathBuf, key: String, source: TensorError },
}

/// Dequantization scales that are neither one number nor one a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misscaled {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    /// Rows of the weight.
    pub(crate) rows: usize,
}

impl fmt::Display for Misscaled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Misscaled { name, shape, rows } = self;
        write!(
            f,
            "`{name}` has shape {shape:?}, where 8-bit weights have one scale or one for each of {rows} rows; use bf16 \
             weights, or weights quantized per tensor or per row"
        )
    }
}

impl WeightsError {
    /// An [`WeightsError::Io`] for `path`, for use in `map_err`.
    pub(super) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| WeightsError::Io { path, action, source }
    }
}

fn how_to_give(component: Component) -> String {
    match component.override_key() {
        Some(key) => {
            let what = if component == Component::TextEncoder {
                "the folder of Gemma-3-12B (config.json, safetensors, tokenizer.json), or LTX-2.5's own"
            } else {
                "its file or folder"
            };
            format!(": give {what} as `model.{key}` in the YAML or by --{}", key.replace('_', "-"))
        }
        None => format!(" (looked for `{}`)", component.folder()),
    }
}
