//! Where a configuration's model is read from: its files on this machine, or the configuration that this program
//! carries of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::error::{PipelineError, Result};
use crate::config::{Config, WeightSource};
use crate::models::presets::Preset;
use crate::weights::{Component, ModelSource, Overrides, WeightsError};

/// Source of a model's configurations.
#[derive(Clone)]
pub enum Origin {
    /// Files on this machine.
    Files(Arc<ModelSource>),
    /// The published configuration of a model whose files are not here.
    Preset(Preset),
}

impl Origin {
    /// The files of the model that a configuration names; a published one without files here has its preset.
    ///
    /// # Errors
    /// No such model, with where it was looked for.
    pub(crate) fn of(config: &Config) -> Result<Self> {
        match (files(config), Preset::named(&config.model.path)) {
            (Ok(source), _) => Ok(Origin::Files(source)),
            (Err(PipelineError::Weights(WeightsError::NotFound { .. })), Some(preset)) => Ok(Origin::Preset(preset)),
            (Err(error), _) => Err(error),
        }
    }

    /// A component's configuration.
    ///
    /// # Errors
    /// A component that is not there.
    pub(crate) fn json(&self, part: Component) -> Result<Value> {
        match self {
            Origin::Files(source) => Ok(source.config(part)?),
            Origin::Preset(preset) => preset
                .config(part.folder())
                .cloned()
                .ok_or_else(|| PipelineError::Input(format!("preset '{}' has no '{}'", preset.name, part.folder()))),
        }
    }

    /// Where a component's configuration is read from: a file, or a preset's name.
    pub(crate) fn config_place(&self, part: Component) -> PathBuf {
        match self {
            Origin::Files(source) => source.config_path(part),
            Origin::Preset(preset) => PathBuf::from(preset.name),
        }
    }

    /// Whether the model has a component.
    pub(crate) fn has(&self, part: Component) -> bool {
        match self {
            Origin::Files(source) => source.has(part),
            Origin::Preset(preset) => preset.config(part.folder()).is_some(),
        }
    }

    /// Whether the transformer's files lack the embedding of generated keyframes.
    pub(crate) fn lacks_keyframe_embedding(&self) -> bool {
        matches!(self, Origin::Files(source) if source.lacks_keyframe_embedding())
    }

    /// Where it lies, or what it is called.
    pub(crate) fn name(&self) -> String {
        match self {
            Origin::Files(source) => source.path().display().to_string(),
            Origin::Preset(preset) => preset.name.to_string(),
        }
    }

    /// One line for readers.
    ///
    /// # Errors
    /// A model whose generation cannot be told.
    pub(crate) fn describe(&self) -> Result<String> {
        Ok(match self {
            Origin::Files(source) => format!("{} (LTX-{})", self.name(), source.version()?),
            Origin::Preset(_) => format!("{}: not on this machine; its published configuration", self.name()),
        })
    }

    /// SHA-256 of the components' configurations and the seed of random weights: equal ones make equal models.
    ///
    /// # Errors
    /// A configuration that cannot be read.
    pub(crate) fn random_fingerprint(&self, seed: u64, components: &BTreeSet<Component>) -> Result<String> {
        let mut hash = Sha256::new().chain_update(seed.to_le_bytes());
        for part in components.iter().filter(|p| **p != Component::Tokenizer) {
            hash.update(format!("{} {}\n", part.folder(), self.json(*part)?));
        }
        Ok(hex::encode(hash.finalize()))
    }
}

/// Sources of a run's model configurations and of its parameters.
///
/// # Errors
/// No such model, with where it was looked for.
pub(crate) fn of_run(config: &Config) -> Result<(Origin, Weights)> {
    match config.model.weights {
        WeightSource::Random => Ok((Origin::of(config)?, Weights::Random(config.model.weights_seed))),
        WeightSource::File => {
            let source = files(config)?;
            Ok((Origin::Files(source.clone()), Weights::Files(source)))
        }
    }
}

/// The files of the model that a configuration names.
fn files(config: &Config) -> Result<Arc<ModelSource>> {
    let m = &config.model;
    let overrides = Overrides {
        text_encoder: m.text_encoder.clone(),
        tokenizer: m.tokenizer.clone(),
        vae: m.vae.clone(),
        audio_vae: m.audio_vae.clone(),
        vocoder: m.vocoder.clone(),
        upsampler: m.upsampler.clone(),
        temporal_upsampler: m.temporal_upsampler.clone(),
        duration_head: m.duration_head.clone(),
    };
    Ok(Arc::new(ModelSource::open(&m.path, &overrides)?))
}

/// Where parameters come from.
#[derive(Clone)]
pub enum Weights {
    /// A model's files.
    Files(Arc<ModelSource>),
    /// Random numbers made on the devices, drawn from a seed.
    Random(u64),
}

impl From<Arc<ModelSource>> for Weights {
    fn from(source: Arc<ModelSource>) -> Self {
        Weights::Files(source)
    }
}

impl Weights {
    /// Formats of the transformer's blocks in the files, and whether their header speaks of quantization.
    ///
    /// # Errors
    /// The transformer's files cannot be read.
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

/// Where a header says which tensors are quantized.
const QUANTIZATION: &str = "_quantization_metadata";
