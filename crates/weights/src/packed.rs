//! A text encoder in a single file: LTX-2.5's, with the connectors' text projections, the tokenizer's files as byte
//! tensors and the configuration in the header; ComfyUI's Gemma 3, with a SentencePiece model as a byte tensor and
//! without a configuration; or a GGUF file of Gemma 3.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::checkpoint::{Checkpoint, TensorView};
use super::component::Component;
use super::error::WeightsError;
use super::keys::{self, SingleFileKeys};
use super::unsupported::reject_unrecognized_quantization;
use super::{gguf_model, text_encoders};

/// Metadata key of the configuration.
pub(super) const GEMMA_CONFIG: &str = "gemma_config";
/// Tensor whose bytes are `tokenizer.json`.
const TOKENIZER: &str = "tokenizer_json";
/// Tensor whose bytes are a SentencePiece model.
const SENTENCE_PIECE: &str = "spiece_model";
/// Name prefix of tensors whose bytes are other tokenizer files.
const ASSET: &str = "hf_asset__";
/// Name prefixes of modules that text prompts do not use: the image modules, the audio modules and the language model
/// head.
const INERT: [&str; 4] = ["vision_model.", "audio_projector.", "lm_head.", "language_model.lm_head."];

/// The files of a tokenizer.
#[derive(Debug)]
pub enum TokenizerFiles {
    /// A folder with `tokenizer.json`.
    Folder(PathBuf),
    /// Tokenizer files stored in a text encoder file: the bytes of `tokenizer.json` and, if present, of
    /// `tokenizer_config.json`.
    Packed {
        /// The text encoder file.
        file: PathBuf,
        /// Tensor whose bytes are `tokenizer.json`.
        tokenizer: TensorView,
        /// Tensor whose bytes are `tokenizer_config.json`. `None`: the file does not contain it.
        config: Option<TensorView>,
    },
    /// SentencePiece model (`tokenizer.model`) whose bytes are stored in a text encoder file.
    SentencePiece {
        /// The text encoder file.
        file: PathBuf,
        /// Tensor whose bytes are the model.
        model: TensorView,
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
    /// Returns an error if the file has neither a configuration nor the tensors of Gemma 3, or if the weights are
    /// quantized in an unrecognized form.
    pub(super) fn open(path: &Path) -> Result<Self, WeightsError> {
        let checkpoint = Checkpoint::open(path)?;
        reject_unrecognized_quantization(&checkpoint)?;
        if let Some(config) = gguf_model::text_encoder_config(&checkpoint)? {
            return Ok(PackedTextEncoder { checkpoint: gguf_model::text_encoder(checkpoint)?, config });
        }
        let wrong = |reason: String| {
            let (path, key) = (path.to_path_buf(), GEMMA_CONFIG.into());
            WeightsError::Config { path, key, reason }
        };
        let config = match checkpoint.metadata(GEMMA_CONFIG) {
            Some(text) => {
                serde_json::from_str(text).map_err(|e| wrong(format!("in the header's metadata is not JSON: {e}")))?
            }
            None => {
                let weights = text_model(&checkpoint)?;
                match text_encoders::derived_config(&weights)? {
                    Some(config) => config,
                    None if !weights.names().any(is_language_model) => {
                        let (path, component) = (path.to_path_buf(), Component::TextEncoder);
                        return Err(WeightsError::NoComponent { path, component, command: None });
                    }
                    None => {
                        return Err(wrong(
                            "is missing in the header's metadata, and the tensors are not those of Gemma 3; use \
                             ComfyUI's gemma_3_12B_it.safetensors, the folder of google/gemma-3-12b-it, or, for \
                             LTX-2.5, text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors"
                                .into(),
                        ));
                    }
                }
            }
        };
        Ok(PackedTextEncoder { checkpoint, config })
    }

    pub(super) fn path(&self) -> &Path {
        self.checkpoint.path()
    }

    /// Returns the text encoder's tensors, renamed by [`text_encoders::tensor_name`].
    pub(super) fn weights(&self) -> Result<Checkpoint, WeightsError> {
        text_model(&self.checkpoint)
    }

    /// Returns the connectors' text projections under diffusers names.
    pub(super) fn projections(&self) -> Result<Checkpoint, WeightsError> {
        let names = SingleFileKeys::new([]);
        self.checkpoint.renamed(|key| names.rename(Component::Connectors, key).filter(|_| keys::is_projection(key)))
    }

    /// Returns the tokenizer, if the file contains one.
    pub(super) fn tokenizer(&self) -> Result<Option<TokenizerFiles>, WeightsError> {
        let bytes = |key: &str| self.checkpoint.contains(key).then(|| self.checkpoint.get(key)).transpose();
        let file = self.path().to_path_buf();
        let Some(tokenizer) = bytes(TOKENIZER)? else {
            return Ok(bytes(SENTENCE_PIECE)?.map(|model| TokenizerFiles::SentencePiece { file, model }));
        };
        let config = bytes(&format!("{ASSET}tokenizer_config.json"))?;
        Ok(Some(TokenizerFiles::Packed { file, tokenizer, config }))
    }

    /// Returns an error for the first tensor that is neither read nor known to be unused.
    pub(super) fn refuse_unread(&self) -> Result<(), WeightsError> {
        let read = |key: &str| {
            let is_text = key.starts_with("model.") || key.starts_with(text_encoders::LANGUAGE_MODEL);
            is_text || matches!(key, TOKENIZER | SENTENCE_PIECE) || key.starts_with(ASSET) || keys::is_projection(key)
        };
        let inert =
            |key: &str| INERT.iter().chain(&text_encoders::NON_TEXT_MODULES).any(|start| key.starts_with(start));
        let mut unread = self.checkpoint.names().filter(|key| !read(key) && !inert(key));
        let Some(key) = unread.next().map(String::from) else { return Ok(()) };
        Err(WeightsError::Unread { path: self.path().to_path_buf(), key, others: unread.count() })
    }
}

fn is_language_model(name: &str) -> bool {
    let rest = name.strip_prefix(text_encoders::LANGUAGE_MODEL).unwrap_or_default();
    ["layers.", "embed_tokens.", "norm."].iter().any(|start| rest.starts_with(start))
}

/// Returns the tensors of the text model, renamed by [`text_encoders::tensor_name`].
fn text_model(file: &Checkpoint) -> Result<Checkpoint, WeightsError> {
    file.renamed(|key| {
        Some(text_encoders::tensor_name(key)).filter(|name| name.starts_with(text_encoders::LANGUAGE_MODEL))
    })
}
