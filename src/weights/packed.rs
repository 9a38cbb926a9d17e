//! A text encoder in one file, as Lightricks publish LTX-2.5's: weights, the text projections of the connectors, the
//! tokenizer's files as tensors of bytes, and the configuration in the header.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::checkpoint::{Checkpoint, TensorView};
use super::component::Component;
use super::error::WeightsError;
use super::keys::{self, SingleFileKeys};
use super::newer::refuse_repack;

/// Where the header has the configuration.
const CONFIG: &str = "gemma_config";
/// The tensor whose bytes are `tokenizer.json`.
const TOKENIZER: &str = "tokenizer_json";
/// Beginning of the names of tensors whose bytes are another of the tokenizer's files.
const ASSET: &str = "hf_asset__";
/// Beginnings of what no prompt is read with: images and sound.
const INERT: [&str; 4] = ["vision_model.", "multi_modal_projector.", "audio_projector.", "lm_head."];

/// The files of a tokenizer.
#[derive(Debug)]
pub(crate) enum TokenizerFiles {
    /// A folder with `tokenizer.json`.
    Folder(PathBuf),
    /// In the file of a text encoder: `tokenizer.json` as bytes, and `tokenizer_config.json` where it is there.
    Packed { file: PathBuf, tokenizer: TensorView, config: Option<TensorView> },
}

/// A file of a text encoder.
#[derive(Debug)]
pub(super) struct PackedTextEncoder {
    checkpoint: Checkpoint,
    /// As `text_encoder/config.json`.
    pub(super) config: Value,
}

impl PackedTextEncoder {
    /// Opens a file.
    ///
    /// # Errors
    /// A file without the configuration in its header, or with weights that others quantised.
    pub(super) fn open(path: &Path) -> Result<Self, WeightsError> {
        let checkpoint = Checkpoint::open(path)?;
        refuse_repack(&checkpoint)?;
        let path = path.to_path_buf();
        let Some(text) = checkpoint.metadata(CONFIG) else {
            return Err(WeightsError::NoComponent { path, component: Component::TextEncoder });
        };
        let wrong = |reason| WeightsError::Config { path, key: CONFIG.into(), reason };
        let config: Value =
            serde_json::from_str(text).map_err(|e| wrong(format!("in the header's metadata is not JSON: {e}")))?;
        Ok(PackedTextEncoder { checkpoint, config })
    }

    pub(super) fn path(&self) -> &Path {
        self.checkpoint.path()
    }

    /// The text encoder's tensors, as [`keys::gemma`] names them.
    pub(super) fn weights(&self) -> Result<Checkpoint, WeightsError> {
        self.checkpoint.renamed(|key| key.starts_with("model.").then(|| keys::gemma(key)))
    }

    /// The connectors' text projections, by their names in diffusers.
    pub(super) fn projections(&self) -> Result<Checkpoint, WeightsError> {
        let names = SingleFileKeys::new([]);
        self.checkpoint.renamed(|key| names.rename(Component::Connectors, key).filter(|_| keys::is_projection(key)))
    }

    /// The tokenizer; none without one.
    pub(super) fn tokenizer(&self) -> Result<Option<TokenizerFiles>, WeightsError> {
        let bytes = |key: &str| self.checkpoint.contains(key).then(|| self.checkpoint.get(key)).transpose();
        let Some(tokenizer) = bytes(TOKENIZER)? else { return Ok(None) };
        let config = bytes(&format!("{ASSET}tokenizer_config.json"))?;
        Ok(Some(TokenizerFiles::Packed { file: self.path().to_path_buf(), tokenizer, config }))
    }

    /// Refuses tensors that nothing reads.
    ///
    /// # Errors
    /// The first such tensor.
    pub(super) fn refuse_unread(&self) -> Result<(), WeightsError> {
        let read = |key: &str| {
            key.starts_with("model.") || key == TOKENIZER || key.starts_with(ASSET) || keys::is_projection(key)
        };
        let inert = |key: &str| INERT.iter().any(|start| key.starts_with(start));
        let mut unread = self.checkpoint.names().filter(|key| !read(key) && !inert(key));
        let Some(key) = unread.next().map(String::from) else { return Ok(()) };
        Err(WeightsError::Unread { path: self.path().to_path_buf(), key, others: unread.count() })
    }
}
