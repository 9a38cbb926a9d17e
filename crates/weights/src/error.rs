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
    /// An operation of the file system failed.
    #[error("{}: {action}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operation that failed, such as `cannot open`.
        action: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
    /// No model, component or LoRA was found for a path or a name in the Hugging Face cache.
    #[error("model `{name}` not found: {reason}{}", download_advice(command.as_deref()))]
    NotFound {
        /// The path, `org/name` or `org/name/file` that was requested.
        name: String,
        /// Searched locations, and advice for a name that cannot be downloaded.
        reason: String,
        /// Command that downloads it. `None`: the name is that of a local path.
        command: Option<String>,
    },
    /// A folder contains no weights that can be loaded.
    #[error("{}: no weights: {reason}", path.display())]
    NoWeights {
        /// The folder that was searched.
        path: PathBuf,
        /// Description of the folder's contents, and advice on what to do.
        reason: String,
    },
    /// A file is in another format, or its safetensors header is damaged.
    #[error("{}: not a safetensors file: {reason}", path.display())]
    NotSafetensors {
        /// The file that was opened as safetensors.
        path: PathBuf,
        /// The detected format, or the problem with the header.
        reason: String,
    },
    /// The header of a GGUF file is damaged or has an unsupported version.
    #[error("{}: damaged or unsupported GGUF file: {reason}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// Description of the problem with the header.
        reason: String,
    },
    /// The size or modification time of an open file has changed.
    #[error("{}: changed while it was in use (it had {was} bytes, now {is}); restart the program", path.display())]
    Changed {
        /// The path under which the file was opened.
        path: PathBuf,
        /// Size in bytes when the file was opened.
        was: u64,
        /// Current size in bytes; equal to `was` if only the modification time changed.
        is: u64,
    },
    /// A safetensors file ends before its header or its last tensor does.
    #[error("{}: truncated: the header requires {want} bytes, the file has {got}; download the file again", path.display())]
    Truncated {
        /// The incomplete file.
        path: PathBuf,
        /// Minimum file size in bytes: the end of the header or of the last tensor.
        want: u64,
        /// Actual file size in bytes.
        got: u64,
    },
    /// A safetensors file continues after its last tensor.
    #[error("{}: {} bytes after the last tensor: the header accounts for {want} bytes, the file has {got}; download the file again", path.display(), got - want)]
    Trailing {
        /// The damaged file.
        path: PathBuf,
        /// End of the last tensor in bytes, the size that the file should have.
        want: u64,
        /// Actual file size in bytes.
        got: u64,
    },
    /// A shard that an index lists does not exist.
    #[error("{}: shard `{shard}` is missing; it contains `{key}` and {others} more tensors; download the shard", index.display())]
    MissingShard {
        /// The index, `….safetensors.index.json`.
        index: PathBuf,
        /// File name of the shard, as in the index.
        shard: String,
        /// One of the tensors that the index places in the shard.
        key: String,
        /// Number of other tensors that the index places in the shard.
        others: usize,
    },
    /// A shard lacks a tensor that the index places in it.
    #[error("{}: tensor `{key}` is not in `{shard}`, where the index places it; download both files again",
        index.display())]
    IndexMismatch {
        /// The index, `….safetensors.index.json`.
        index: PathBuf,
        /// File name of the shard, as in the index.
        shard: String,
        /// Name of the tensor, as in the index.
        key: String,
    },
    /// Two files, or two spellings of a name, contain the same tensor.
    #[error("{}: tensor `{key}` is defined twice (also as `{other}` in {})", path.display(), other_path.display())]
    Duplicate {
        /// The file that contains one of the two tensors.
        path: PathBuf,
        /// Name of the tensor in `path`.
        key: String,
        /// The file, index or folder that contains the other tensor.
        other_path: PathBuf,
        /// Name of the tensor in `other_path`.
        other: String,
    },
    /// A checkpoint lacks a tensor that is read.
    #[error("{}: tensor `{key}` is missing", path.display())]
    MissingTensor {
        /// The file, index or folder of the checkpoint.
        path: PathBuf,
        /// Name of the tensor; if the reader renames tensors, the name after renaming.
        key: String,
    },
    /// A tensor has an unsupported element type.
    #[error("{}: tensor `{key}` is {dtype}, expected {want}; use the bf16 file of the same component", path.display())]
    WrongDtype {
        /// The safetensors file that contains the tensor.
        path: PathBuf,
        /// Name of the tensor in the file.
        key: String,
        /// Element type as the file spells it, in lower case.
        dtype: String,
        /// The supported element types, as text.
        want: &'static str,
    },
    /// A tensor does not have the required shape.
    #[error("{}: tensor `{key}` has shape {got:?}, but the model's configuration requires {want:?}", path.display())]
    Shape {
        /// The safetensors file that contains the tensor.
        path: PathBuf,
        /// Name of the tensor in the file.
        key: String,
        /// Shape of the tensor.
        got: Vec<usize>,
        /// Required shape.
        want: Vec<usize>,
    },
    /// An operation on a tensor does not support its shape.
    #[error("{}: tensor `{key}` has shape {got:?}: {reason}", path.display())]
    UnsupportedShape {
        /// The safetensors file that contains the tensor.
        path: PathBuf,
        /// Name of the tensor in the file.
        key: String,
        /// Shape of the tensor.
        got: Vec<usize>,
        /// Description of the shapes that the operation supports.
        reason: String,
    },
    /// 8-bit weights have dequantization scales that are neither per row nor per tensor.
    #[error("{}: {scales}", path.display())]
    Scales {
        /// The file with the scales.
        path: PathBuf,
        /// The unsupported scales, with the number of rows of their weight.
        scales: Misscaled,
    },
    /// Tensors of a component are missing, unknown, or differ in shape or type from what its configuration implies.
    #[error("{}: the tensors of the {component} do not match its configuration: {summary}", path.display())]
    Mismatch {
        /// The file, index or folder of the component's checkpoint.
        path: PathBuf,
        /// The component whose tensors were compared with its configuration.
        component: Component,
        /// One-line summary of the [`ValidationReport`](crate::ValidationReport).
        summary: String,
    },
    /// A file in Lightricks' layout contains a tensor that no component reads.
    #[error("{}: tensor `{key}`{} not read by any part of LTX-2.0, LTX-2.3 or LTX-2.5: the model may be newer than this program",
        path.display(), if *others > 0 { format!(" and {others} more are") } else { " is".into() })]
    Unread {
        /// The single file or text encoder file.
        path: PathBuf,
        /// Name of the first unread tensor in the file.
        key: String,
        /// Number of further unread tensors.
        others: usize,
    },
    /// The model version is not supported.
    #[error("{}: {mark} is unknown to this program, which supports LTX-2.0, LTX-2.3 and LTX-2.5; a newer model needs \
             a newer ltx2", path.display())]
    Newer {
        /// The weight file, `model_index.json`, or the configuration of a component.
        path: PathBuf,
        /// The unknown entry: key and value in a configuration or header, or the key in `model_index.json`.
        mark: String,
    },
    /// A component and the transformer belong to different model versions, which tensor shapes do not reveal.
    #[error("{}: {found}, but {} is the transformer of LTX-{wants}: {advice}", path.display(), transformer.display())]
    Pairing {
        /// The file, or the configuration, of the component that does not match the transformer.
        path: PathBuf,
        /// The version field of `path`, and the version that it identifies.
        found: String,
        /// The transformer's configuration, or the single file that contains it.
        transformer: PathBuf,
        /// Model version of the transformer.
        wants: Version,
        /// What to use instead.
        advice: String,
    },
    /// A weight is quantized in a form that is not supported. `reason` is a predicate.
    #[error("{}: tensor `{key}` {reason}; {}", path.display(), unquantized_hint(key))]
    Quantized {
        /// The file that contains the tensor.
        path: PathBuf,
        /// Name of the first weight in an unsupported form, or of its scales.
        key: String,
        /// Format of the weight, and the problem with it.
        reason: String,
    },
    /// A component's tensors and its configuration belong to different model versions.
    #[error("{}: the {component} has `{tensor}` of LTX-{has}, but {} describes LTX-{wants}; use weights and configuration of the same model", path.display(), config.display())]
    Generation {
        /// The file, index or folder of the component's checkpoint.
        path: PathBuf,
        /// The component with tensors and configuration of different versions.
        component: Component,
        /// The tensor that identifies the model version of the weights.
        tensor: &'static str,
        /// Model version of the weights.
        has: Version,
        /// Path of the configuration; the text `the file's header` for a single file.
        config: PathBuf,
        /// Model version that the configuration describes.
        wants: Version,
    },
    /// A weight contains an infinity or NaN.
    #[error("{}: tensor `{key}` is {value} at {index:?}; the file is damaged or was made by a failed conversion", path.display())]
    NonFinite {
        /// The safetensors file that contains the tensor.
        path: PathBuf,
        /// Name of the tensor in the file.
        key: String,
        /// Index of the first non-finite value along each dimension.
        index: Vec<usize>,
        /// The value: an infinity or NaN.
        value: f64,
    },
    /// A configuration or an index is not JSON, or not in the expected form.
    #[error("{}: {reason}", path.display())]
    Json {
        /// The configuration or index.
        path: PathBuf,
        /// The parser's message, the detected format, or the part with an unexpected form.
        reason: String,
    },
    /// A configuration key has an unsupported value. `reason` is a predicate, such as `is 3, not a list`.
    #[error("{}: `{key}` {reason}", path.display())]
    Config {
        /// The configuration file, or the checkpoint whose header contains the configuration.
        path: PathBuf,
        /// The key, with dots between levels (`config.vae.…` in headers), or the name or name prefix of a tensor.
        key: String,
        /// Description of the problem with `key`, which precedes it in the message.
        reason: String,
    },
    /// Several files in a folder could be the requested component.
    #[error("{}: {} files could be the {component} ({}): specify one of them{}, or select it by a part of its name with \
             `model.variant` or --variant", path.display(), files.len(), files.join(", "), how_to_specify(*component))]
    Ambiguous {
        /// The folder that was searched.
        path: PathBuf,
        /// The component.
        component: Component,
        /// The files, relative to the folder.
        files: Vec<String>,
    },
    /// No file has the name parts that `model.variant` requests.
    #[error("{}: no file matches `model.variant` = {variant}{}", path.display(), choices(files))]
    NoVariant {
        /// The folder that was searched.
        path: PathBuf,
        /// The requested variant.
        variant: String,
        /// The files, or the variants, that the folder contains.
        files: Vec<String>,
    },
    /// A model lacks a component that is needed.
    #[error("{}: contains no {component}{}", path.display(), override_hint(*component, command.as_deref()))]
    NoComponent {
        /// The file or folder that was searched.
        path: PathBuf,
        /// The missing component.
        component: Component,
        /// Command that downloads the complete model. `None`: the model is not from the Hugging Face cache.
        command: Option<String>,
    },
    /// A LoRA cannot be read or does not fit the model. `reason` is a predicate, such as `is not part of a LoRA`.
    #[error("{}: `{key}` {reason}", path.display())]
    Lora {
        /// The LoRA file.
        path: PathBuf,
        /// Name of the tensor, or key of the header's metadata.
        key: String,
        /// Description of the problem with `key`, which precedes it in the message.
        reason: String,
    },
    /// The folder of a component to write already exists.
    #[error("{}: already exists; choose another folder, or remove this one", path.display())]
    Exists {
        /// The component's folder in the model to write.
        path: PathBuf,
    },
    /// The bytes do not form a valid host tensor.
    #[error("{}: tensor `{key}`: {source}", path.display())]
    Tensor {
        /// The safetensors file that contains the tensor.
        path: PathBuf,
        /// Name of the tensor in the file.
        key: String,
        /// Reason why the host tensor cannot be created.
        source: TensorError,
    },
}

/// Dequantization scales that are neither one per row nor one for all rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misscaled {
    /// The file that contains the scales; not part of the `Display` text.
    pub file: PathBuf,
    /// Name of the scales in the file.
    pub name: String,
    /// Shape of the scales.
    pub shape: Vec<usize>,
    /// Number of rows of the weight.
    pub rows: usize,
}

impl fmt::Display for Misscaled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Misscaled { name, shape, rows, .. } = self;
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

fn download_advice(command: Option<&str>) -> String {
    command.map_or(String::new(), |command| format!("; pass a path, or download it with `{command}`"))
}

fn how_to_specify(component: Component) -> String {
    component.override_key().map_or(String::new(), |key| format!(" as `model.{key}` or --{}", key.replace('_', "-")))
}

fn choices(files: &[String]) -> String {
    match files {
        [] => ", and there are no files to select by it; remove it".into(),
        files => format!("; available: {}", files.join(", ")),
    }
}

/// Returns advice on what to use instead of a quantized tensor that cannot be read. Only layers of transformers,
/// connectors and text encoders are published in quantized forms, and can be quantized by `ltx2 convert`.
fn unquantized_hint(key: &str) -> &'static str {
    let has_forms = ["transformer_blocks.", "transformer_1d_blocks.", ".self_attn.", ".mlp."];
    match has_forms.iter().any(|part| key.contains(part)) {
        true => {
            "use the bf16 file of the same component, one of its published fp8, int8-convrot, nvfp4 or GGUF files, or a \
             file that `ltx2 convert --weights int8-convrot` writes from the bf16 file"
        }
        false => "use the bf16 file of the same component",
    }
}

fn override_hint(component: Component, command: Option<&str>) -> String {
    if let Some(command) = command {
        let key = component
            .override_key()
            .map_or(String::new(), |key| format!("; for a file of your own, set `model.{key}`"));
        return format!("; `{command}` downloads what is missing{key}");
    }
    match component.override_key() {
        Some(key) => {
            let what = match component {
                Component::TextEncoder => {
                    "the folder or file of Gemma-3-12B (`ltx2 pull google/gemma-3-12b-it-qat-q4_0-unquantized`), or to \
                     LTX-2.5's own text encoder"
                }
                Component::Connectors => "their file, such as ltx-2-19b-embeddings_connector_dev_bf16.safetensors",
                _ => "its file or folder",
            };
            format!(": set `model.{key}` in the YAML or --{} to {what}", key.replace('_', "-"))
        }
        None => format!(" (looked for `{}`)", component.folder()),
    }
}
