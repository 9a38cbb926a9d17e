//! A text encoder in a single file, as published for LTX-2.5: weights, the connectors' text projections, the
//! tokenizer's files as byte tensors, and the configuration in the header; or a GGUF file of Gemma 3.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::checkpoint::{Checkpoint, TensorView};
use super::component::Component;
use super::error::WeightsError;
use super::gguf_model;
use super::keys::{self, SingleFileKeys};
use super::unsupported::refuse_repack;

/// Metadata key of the configuration.
const CONFIG: &str = "gemma_config";
/// Tensor whose bytes are `tokenizer.json`.
const TOKENIZER: &str = "tokenizer_json";
/// Name prefix of tensors whose bytes are other tokenizer files.
const ASSET: &str = "hf_asset__";
/// Name prefixes of modules that text prompts do not use: the image modules, the audio modules and the language model
/// head.
const INERT: [&str; 4] = ["vision_model.", "multi_modal_projector.", "audio_projector.", "lm_head."];

/// The files of a tokenizer.
#[derive(Debug)]
pub enum TokenizerFiles {
    /// A folder with `tokenizer.json`.
    Folder(PathBuf),
    /// Stored in a text encoder file: the bytes of `tokenizer.json` and, if present, of `tokenizer_config.json`.
    Packed {
        /// The text encoder file.
        file: PathBuf,
        /// Tensor whose bytes are `tokenizer.json`.
        tokenizer: TensorView,
        /// Tensor whose bytes are `tokenizer_config.json`. `None`: the file does not contain it.
        config: Option<TensorView>,
    },
}

/// An open text encoder file.
#[derive(Debug)]
pub(super) struct PackedTextEncoder {
    checkpoint: Checkpoint,
    /// Contents of `text_encoder/config.json`.
    pub(super) config: Value,
}

impl PackedTextEncoder {
    /// Opens a text encoder file.
    ///
    /// # Errors
    /// Returns an error if the header has no configuration, or if the weights are in a quantized repack's layout.
    pub(super) fn open(path: &Path) -> Result<Self, WeightsError> {
        let checkpoint = Checkpoint::open(path)?;
        refuse_repack(&checkpoint)?;
        if let Some(config) = gguf_model::text_encoder_config(&checkpoint)? {
            return Ok(PackedTextEncoder { checkpoint: gguf_model::text_encoder(checkpoint)?, config });
        }
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

    /// Returns the text encoder's tensors, renamed by [`keys::gemma`].
    pub(super) fn weights(&self) -> Result<Checkpoint, WeightsError> {
        self.checkpoint.renamed(|key| key.starts_with("model.").then(|| keys::gemma(key)))
    }

    /// Returns the connectors' text projections under diffusers names.
    pub(super) fn projections(&self) -> Result<Checkpoint, WeightsError> {
        let names = SingleFileKeys::new([]);
        self.checkpoint.renamed(|key| names.rename(Component::Connectors, key).filter(|_| keys::is_projection(key)))
    }

    /// Returns the tokenizer, if the file contains one.
    pub(super) fn tokenizer(&self) -> Result<Option<TokenizerFiles>, WeightsError> {
        let bytes = |key: &str| self.checkpoint.contains(key).then(|| self.checkpoint.get(key)).transpose();
        let Some(tokenizer) = bytes(TOKENIZER)? else { return Ok(None) };
        let config = bytes(&format!("{ASSET}tokenizer_config.json"))?;
        Ok(Some(TokenizerFiles::Packed { file: self.path().to_path_buf(), tokenizer, config }))
    }

    /// Returns an error for the first tensor that is neither read nor known to be unused.
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
