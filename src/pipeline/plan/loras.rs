//! The LoRAs of a configuration, and the passes to which each applies.

use std::sync::Arc;

use super::origin::Weights;
use crate::config;
use crate::pipeline::error::{PipelineError, Result};
use crate::weights::{LoraFile, MergeOrder, ModelSource, ScaledLora};

/// Opened LoRA files, with the strength of each and the passes (1 or 2) to which it applies.
#[derive(Clone, Debug, Default)]
pub struct Loras {
    files: Vec<(ScaledLora, Vec<u8>)>,
    pub(in crate::pipeline) order: MergeOrder,
}

/// Returns whether the two passes use different LoRAs or strengths. Compares only paths and strengths and does not open
/// the files.
pub(in crate::pipeline) fn differ_by_pass(model: &config::Model) -> bool {
    let [first, second] = [1, 2].map(|pass| {
        let active = model.loras.iter().filter(|l| l.strength != 0.0 && l.stages.contains(&pass));
        active.map(|l| (&l.path, l.strength.to_bits())).collect::<Vec<_>>()
    });
    first != second
}

impl Loras {
    /// Opens the LoRA files of a configuration.
    ///
    /// # Errors
    /// Returns an error if a file cannot be opened or is not a LoRA.
    pub fn open(model: &config::Model) -> Result<Self> {
        let order = model.lora_merge;
        let each = model.loras.iter().map(|entry| {
            let file = Arc::new(LoraFile::open(&entry.path)?);
            if let Some(warning) = file.unused_alpha(order) {
                tracing::warn!("{warning}");
            }
            Ok((ScaledLora { file, strength: entry.strength }, entry.stages.clone()))
        });
        Ok(Loras { files: each.collect::<Result<_>>()?, order })
    }

    /// Checks that the model has every tensor that the LoRAs of any pass update; see [`check`].
    pub(crate) fn check(&self, weights: &Weights) -> Result<()> {
        let all: Vec<ScaledLora> = self.files.iter().map(|(lora, _)| lora.clone()).collect();
        check(&all, weights)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Logs a warning for each LoRA file whose metadata does not confirm that it was trained for the model's version.
    pub(in crate::pipeline) fn warn_of_unverified(&self, model: &ModelSource) {
        let lines = self.files.iter().filter_map(|(lora, _)| lora.file.unverified(model));
        lines.for_each(|line| tracing::warn!("{line}"));
    }

    /// Returns the LoRAs that apply to a pass (1 or 2).
    pub(crate) fn of_pass(&self, pass: u8) -> Vec<ScaledLora> {
        self.files.iter().filter(|(_, passes)| passes.contains(&pass)).map(|(lora, _)| lora.clone()).collect()
    }
}

/// Checks that the model has every tensor that the LoRAs update.
///
/// # Errors
/// Returns an error if the weights are random, or if the model does not have a tensor or has it with another shape. The
/// error quotes file, key and shapes.
pub(in crate::pipeline) fn check(loras: &[ScaledLora], weights: &Weights) -> Result<()> {
    let Some(first) = loras.first() else { return Ok(()) };
    match weights {
        Weights::Files(source) => Ok(loras.iter().try_for_each(|lora| lora.file.check(source))?),
        Weights::Random(_) => {
            let file = first.file.path().display();
            let message = format!(
                "{file}: LoRAs need weights from files, but model.weights is random; set model.weights to file"
            );
            Err(PipelineError::Input(message))
        }
    }
}
