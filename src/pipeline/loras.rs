//! The LoRAs of a configuration, by pass.

use std::sync::Arc;

use super::error::{PipelineError, Result};
use super::origin::Weights;
use crate::config;
use crate::weights::{Lora, LoraFile, MergeOrder, ModelSource};

/// Opened files, each with its strength and the passes it holds for.
#[derive(Clone, Debug, Default)]
pub struct Loras {
    files: Vec<(Lora, Vec<u8>)>,
    /// How they are merged.
    pub(super) order: MergeOrder,
}

/// Whether a configuration gives the two passes different LoRAs. Which tensors they update is in the files alone.
pub(super) fn differ_by_pass(model: &config::Model) -> bool {
    let [first, second] = [1, 2].map(|pass| {
        let active = model.loras.iter().filter(|l| l.strength != 0.0 && l.stages.contains(&pass));
        active.map(|l| (&l.path, l.strength.to_bits())).collect::<Vec<_>>()
    });
    first != second
}

impl Loras {
    /// Opens the files.
    ///
    /// # Errors
    /// The first that cannot be used, by name.
    pub fn open(model: &config::Model) -> Result<Self> {
        let order = model.lora_merge;
        let each = model.loras.iter().map(|entry| {
            let file = Arc::new(LoraFile::open(&entry.path)?);
            if let Some(warning) = file.unused_alpha(order) {
                tracing::warn!("{warning}");
            }
            Ok((Lora { file, strength: entry.strength }, entry.stages.clone()))
        });
        Ok(Loras { files: each.collect::<Result<_>>()?, order })
    }

    /// Checks that the weights have every tensor that a LoRA of any pass updates.
    ///
    /// # Errors
    /// Those of [`check`].
    pub(crate) fn check(&self, weights: &Weights) -> Result<()> {
        let all: Vec<Lora> = self.files.iter().map(|(lora, _)| lora.clone()).collect();
        check(&all, weights)
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Says of which files nothing tells that they are the model's generation's.
    pub(super) fn warn_of_unverified(&self, model: &ModelSource) {
        let lines = self.files.iter().filter_map(|(lora, _)| lora.file.unverified(model));
        lines.for_each(|line| tracing::warn!("{line}"));
    }

    /// Those of a pass, counted from 1.
    pub(crate) fn of_pass(&self, pass: u8) -> Vec<Lora> {
        self.files.iter().filter(|(_, passes)| passes.contains(&pass)).map(|(lora, _)| lora.clone()).collect()
    }
}

/// Checks that the weights have every tensor that these LoRAs update.
///
/// # Errors
/// Random weights; a tensor that the model lacks or has in another shape, with file, key and shapes.
pub(super) fn check(loras: &[Lora], weights: &Weights) -> Result<()> {
    let Some(first) = loras.first() else { return Ok(()) };
    match weights {
        Weights::Files(source) => Ok(loras.iter().try_for_each(|lora| lora.file.check(source))?),
        Weights::Random(_) => {
            let file = first.file.path().display();
            let message = format!("{file}: a LoRA updates weights of files; model.weights is random");
            Err(PipelineError::Input(message))
        }
    }
}
