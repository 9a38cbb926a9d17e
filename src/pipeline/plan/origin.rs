//! Finds the model that a configuration refers to: files on this machine, or the built-in configuration of a published
//! model.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::config::{Config, WeightSource, open_model};
use crate::models::presets::Preset;
use crate::pipeline::error::{PipelineError, Result};
use crate::weights::published::pull_command;
use crate::weights::quantize::QuantizedForm;
use crate::weights::{Component, HubCache, ModelSource, Version, WeightsError};

/// Source of a model's configurations.
#[derive(Clone)]
pub enum Origin {
    /// Files on this machine.
    Files(Arc<ModelSource>),
    /// Built-in configuration of a published model that is not on this machine.
    Preset(Preset),
}

impl Origin {
    /// Finds the model of a configuration: its files if they are on this machine, otherwise the built-in preset of that
    /// name.
    pub(crate) fn find(config: &Config) -> Result<Self> {
        match (files(config), Preset::named(&config.model.path)) {
            (Ok(source), _) => Ok(Origin::Files(source)),
            (Err(PipelineError::Weights(WeightsError::NotFound { .. })), Some(preset)) => Ok(Origin::Preset(preset)),
            (Err(error), _) => Err(error),
        }
    }

    /// Returns the JSON configuration of a component.
    pub(crate) fn json(&self, part: Component) -> Result<Value> {
        match self {
            Origin::Files(source) => Ok(source.config(part)?),
            Origin::Preset(preset) => preset
                .config(part.folder())
                .cloned()
                .ok_or_else(|| PipelineError::Input(format!("preset '{}' has no '{}'", preset.name, part.folder()))),
        }
    }

    /// Returns the path of the file from which a component's configuration is read, or the name of the preset.
    pub(crate) fn config_place(&self, part: Component) -> PathBuf {
        match self {
            Origin::Files(source) => source.config_path(part),
            Origin::Preset(preset) => PathBuf::from(preset.name),
        }
    }

    pub(crate) fn has(&self, part: Component) -> bool {
        match self {
            Origin::Files(source) => source.has(part),
            Origin::Preset(preset) => preset.config(part.folder()).is_some(),
        }
    }

    /// Returns whether the transformer's files lack the embedding that is added to the tokens of keyframes.
    pub(crate) fn lacks_keyframe_embedding(&self) -> bool {
        matches!(self, Origin::Files(source) if source.lacks_keyframe_embedding())
    }

    /// Returns the names of the linear weights of a component's layers that are not stored as int8-convrot; `None` if
    /// none of them are, or if the model has no files.
    pub(crate) fn non_convrot_weights(&self, part: Component) -> Option<BTreeSet<String>> {
        match self {
            Origin::Files(source) => source.non_convrot_weights(part),
            Origin::Preset(_) => None,
        }
    }

    /// Returns the path of the model, or the name of the preset.
    pub(crate) fn name(&self) -> String {
        match self {
            Origin::Files(source) => source.path().display().to_string(),
            Origin::Preset(preset) => preset.name.to_string(),
        }
    }

    /// Describes the model in one line. Fails if the model's version cannot be determined.
    pub(crate) fn describe(&self) -> Result<String> {
        Ok(match self {
            Origin::Files(source) => format!("{} (LTX-{})", self.name(), source.version()?),
            Origin::Preset(_) => format!("{}: not on this machine; using its published configuration", self.name()),
        })
    }

    /// Returns a SHA-256 hash over the components' configurations, the forms of their layers, and the seed.
    /// Two models with random weights are equal if their hashes are equal.
    pub(crate) fn random_fingerprint(&self, seed: u64, components: &BTreeSet<Component>) -> Result<String> {
        let mut hash = Sha256::new().chain_update(seed.to_le_bytes());
        for part in components.iter().filter(|p| **p != Component::Tokenizer) {
            hash.update(format!("{} {}\n", part.folder(), self.json(*part)?));
        }
        for others in CONVROT_COMPONENTS.iter().filter_map(|part| self.non_convrot_weights(*part)) {
            hash.update(QuantizedForm::Int8Convrot.name());
            others.iter().for_each(|name| hash.update(name));
        }
        Ok(hex::encode(hash.finalize()))
    }
}

/// Components whose layers int8-convrot quantizes.
pub(crate) const CONVROT_COMPONENTS: [Component; 3] =
    [Component::TextEncoder, Component::Connectors, Component::Transformer];

/// Returns the source of the model's configurations and the source of its parameters.
pub(crate) fn sources(config: &Config) -> Result<(Origin, Weights)> {
    match config.model.weights {
        WeightSource::Random => Ok((Origin::find(config)?, Weights::Random(config.model.weights_seed))),
        WeightSource::File => {
            let source = files(config)?;
            Ok((Origin::Files(source.clone()), Weights::Files(source)))
        }
    }
}

/// Returns the command that downloads a model, preferably for the preset of the configuration's pipeline.
pub(crate) fn download_command(config: &Config, model: &str) -> String {
    let versions = [Version::V2_0, Version::V2_3, Version::V2_5];
    pull_command(model, &versions.map(|version| config.pipeline.preset(version)))
}

/// Opens the model files of a configuration. If the model or a component must be downloaded, the error names the command
/// for the pipeline's preset.
fn files(config: &Config) -> Result<Arc<ModelSource>> {
    let opened = open_model(&config.model.path, &config.model.overrides()).map_err(|error| match error {
        WeightsError::NotFound { name, reason, command: Some(_) } => {
            let command = Some(download_command(config, &name));
            WeightsError::NotFound { name, reason, command }
        }
        other => other,
    })?;
    let path = &config.model.path;
    let is_downloaded = HubCache::is_name(path) && !Path::new(path).exists();
    Ok(Arc::new(if is_downloaded { opened.pulled_by(download_command(config, path)) } else { opened }))
}

/// Source of a model's parameters.
#[derive(Clone)]
pub enum Weights {
    /// The model's files.
    Files(Arc<ModelSource>),
    /// Random numbers, generated on the devices from this seed.
    Random(u64),
}

impl From<Arc<ModelSource>> for Weights {
    fn from(source: Arc<ModelSource>) -> Self {
        Weights::Files(source)
    }
}

impl Weights {
    /// Describes the element types of the transformer blocks' weights, and whether the file's header has quantization
    /// metadata.
    pub(crate) fn describe_blocks(&self) -> Result<String> {
        let Weights::Files(source) = self else { return Ok("random numbers".into()) };
        let checkpoint = source.checkpoint(Component::Transformer)?;
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        let is_block = |name: &str| name.starts_with("transformer_blocks.") && name.ends_with(".weight");
        for (_, dtype, _) in checkpoint.headers().filter(|(name, ..)| is_block(name)) {
            *counts.entry(dtype).or_default() += 1;
        }
        let mut parts: Vec<String> =
            counts.iter().map(|(dtype, count)| format!("{count} tensors of {dtype}")).collect();
        parts.extend(checkpoint.metadata(QUANTIZATION).map(|_| format!("'{QUANTIZATION}' in the header")));
        Ok(parts.join(", "))
    }
}

/// Key of the header's metadata that lists the quantized tensors.
const QUANTIZATION: &str = "_quantization_metadata";
