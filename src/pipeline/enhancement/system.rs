//! The system prompt, which tells the language model how to enhance prompts.

use std::path::PathBuf;

use sha2::{Digest, Sha256};

use crate::config::Config;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::plan::origin::Origin;
use crate::text_file;
use crate::weights::Component;

const TEXT_TO_VIDEO: &str = include_str!("../../../prompts/t2v.txt");
const IMAGE_TO_VIDEO: &str = include_str!("../../../prompts/i2v.txt");

/// A system prompt and its source.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SystemPrompt {
    pub(super) text: String,
    /// File, or the name of the built-in prompt.
    pub(super) source: String,
}

impl SystemPrompt {
    /// Returns the system prompt of a run: the file of `enhance.system`, a file of the model, or the built-in prompt.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or is empty.
    pub(super) fn read(config: &Config, origin: &Origin) -> Result<Self> {
        let (name, _) = built_in(config);
        let file = match &config.enhance.system {
            Some(path) => Some(PathBuf::from(path)),
            None => model_folders(origin).into_iter().map(|folder| folder.join(name)).find(|file| file.is_file()),
        };
        let Some(path) = file else {
            return Ok(SystemPrompt::built_in(config));
        };
        let wrong = |reason: String| PipelineError::File { path: path.clone(), reason };
        let text = text_file::read(&path).map_err(|error| wrong(format!("cannot read the system prompt: {error}")))?;
        match text.trim() {
            "" => Err(wrong("the system prompt is empty; write one, or remove the file or enhance.system".into())),
            text => Ok(SystemPrompt { text: text.into(), source: path.display().to_string() }),
        }
    }

    /// Returns the built-in system prompt for the inputs of a run.
    pub(super) fn built_in(config: &Config) -> Self {
        let (name, text) = built_in(config);
        SystemPrompt { text: text.trim().into(), source: format!("built-in {name}") }
    }

    pub(super) fn sha256(&self) -> String {
        hex::encode(Sha256::digest(&self.text))
    }
}

/// Returns the built-in system prompt for a request, and the name of the file with which a model's folder overrides it.
fn built_in(config: &Config) -> (&'static str, &'static str) {
    match config.request.images.is_empty() {
        true => ("enhance_t2v.txt", TEXT_TO_VIDEO),
        false => ("enhance_i2v.txt", IMAGE_TO_VIDEO),
    }
}

/// Returns the folders of the model in which system prompts are looked up.
fn model_folders(origin: &Origin) -> Vec<PathBuf> {
    let Origin::Files(source) = origin else { return Vec::new() };
    source.folder(Component::TextEncoder).into_iter().chain([source.path().to_path_buf()]).collect()
}
