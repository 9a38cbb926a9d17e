//! The LoRAs of a configuration, and the passes to which each applies.

use std::sync::Arc;

use super::origin::Weights;
use crate::config::{self, ConfigError, ConfigErrorKind, LoraApply, missing_lora};
use crate::nn::AddedLoras;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::programs::configs::ModelConfigs;
use crate::pipeline::programs::parameters::parameters;
use crate::weights::lora_add::{self, LoraRanks};
use crate::weights::{Component, LoraFile, MergeOrder, ModelSource, ScaledLora};

/// Opened LoRA files, with the strength of each and the passes (1 or 2) to which it applies.
#[derive(Clone, Debug, Default)]
pub struct Loras {
    files: Vec<PassLora>,
    pub(in crate::pipeline) order: MergeOrder,
}

#[derive(Clone, Debug)]
struct PassLora {
    lora: ScaledLora,
    passes: Vec<u8>,
    apply: LoraApply,
}

/// LoRAs that apply to one pass.
#[derive(Clone, Debug, Default)]
pub(in crate::pipeline) struct ActiveLoras {
    /// LoRAs that are merged into the weights.
    pub(in crate::pipeline) merged: Vec<ScaledLora>,
    /// LoRAs that programs add at run time.
    pub(in crate::pipeline) added: Vec<ScaledLora>,
}

impl ActiveLoras {
    /// Returns the LoRA matrices that the transformer's programs have; `None` if no LoRAs are added.
    pub(in crate::pipeline) fn in_programs(&self) -> Option<AddedLoras> {
        added_loras(self.added.iter().map(|lora| lora.file.largest_rank()))
    }
}

/// Returns the LoRA matrices for LoRAs with these largest ranks; `None` if there are no LoRAs.
fn added_loras(ranks: impl IntoIterator<Item = usize>) -> Option<AddedLoras> {
    let rank = lora_add::program_rank(ranks)?;
    Some(AddedLoras { component: Component::Transformer.folder(), rank })
}

/// Returns whether the two passes apply different LoRAs or strengths in the given way. Compares only paths and strengths
/// and does not open the files.
pub(in crate::pipeline) fn differ_by_pass(model: &config::Model, apply: LoraApply) -> bool {
    let [first, second] = [1, 2].map(|pass| {
        let own = model.loras.iter().filter(|l| l.apply == apply);
        let active = own.filter(|l| l.strength != 0.0 && l.stages.contains(&pass));
        active.map(|l| (&l.path, l.strength.to_bits())).collect::<Vec<_>>()
    });
    first != second
}

impl Loras {
    /// Opens the LoRA files of a configuration, and warns if alphas are ignored.
    ///
    /// # Errors
    /// Returns an error if a file cannot be opened or is not a LoRA.
    pub fn open(model: &config::Model) -> Result<Self> {
        let read = |entry: &config::Lora| {
            if let Some(why) = missing_lora(&entry.path) {
                return Err(ConfigError::value(ConfigErrorKind::Missing, "model.loras", &entry.path, why).into());
            }
            let file = Arc::new(LoraFile::open(&entry.path)?);
            let lora = ScaledLora { file, strength: entry.strength };
            Ok(PassLora { lora, passes: entry.stages.clone(), apply: entry.apply })
        };
        let files = model.loras.iter().map(read).collect::<Result<_>>()?;
        let loras = Loras { files, order: model.lora_merge };
        let warnings = loras.files.iter().filter_map(|own| own.lora.file.unused_alpha(loras.order));
        warnings.for_each(|warning| tracing::warn!("{warning}"));
        Ok(loras)
    }

    /// Returns the LoRA matrices that the transformer's programs of the first and of the second pass have. Opens only
    /// LoRAs that are added and whose ranks are not in `known`.
    ///
    /// # Errors
    /// Returns an error if a file cannot be opened or is not a LoRA.
    pub(crate) fn in_programs(model: &config::Model, known: &LoraRanks) -> Result<[Option<AddedLoras>; 2]> {
        let added = model.loras.iter().filter(|entry| entry.apply == LoraApply::Add);
        let ranks = added.map(|entry| Ok((&entry.stages, known.largest(&entry.path)?))).collect::<Result<Vec<_>>>()?;
        Ok([1, 2]
            .map(|pass| added_loras(ranks.iter().filter(|(stages, _)| stages.contains(&pass)).map(|(_, rank)| *rank))))
    }

    /// Checks the LoRAs of both passes; see [`check`]. Also checks that a model with random weights has every tensor that
    /// the LoRAs update.
    pub(crate) fn check(&self, weights: &Weights, configs: &ModelConfigs) -> Result<()> {
        [1, 2].into_iter().try_for_each(|pass| check(&self.of_pass(pass), weights))?;
        if self.is_empty() || matches!(weights, Weights::Files(_)) {
            return Ok(());
        }
        let params = parameters(configs, Component::Transformer)?;
        let tensors = params.iter().flat_map(|param| param.source.tensors());
        let shapes = tensors.map(|(name, shape)| (name.to_string(), shape.to_vec())).collect();
        Ok(self.files.iter().try_for_each(|own| own.lora.file.check_shapes(&shapes))?)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Logs a warning for each LoRA file whose metadata does not confirm that it was trained for the model's version.
    pub(in crate::pipeline) fn warn_of_unverified(&self, model: &ModelSource) {
        let lines = self.files.iter().filter_map(|own| own.lora.file.unverified(model));
        lines.for_each(|line| tracing::warn!("{line}"));
    }

    /// Returns the LoRAs that apply to a pass (1 or 2).
    pub(in crate::pipeline) fn of_pass(&self, pass: u8) -> ActiveLoras {
        let of = |apply| {
            let own = self.files.iter().filter(|own| own.apply == apply && own.passes.contains(&pass));
            own.map(|own| own.lora.clone()).collect()
        };
        ActiveLoras { merged: of(LoraApply::Merge), added: of(LoraApply::Add) }
    }
}

/// Checks that the model has every tensor that the LoRAs update, and that programs can add the LoRAs that are not merged.
///
/// # Errors
/// Returns an error if LoRAs are to be merged into random weights, if the model's files do not have a tensor or have it
/// with another shape, or if a LoRA that is to be added updates more than linear layers of transformer blocks. The error
/// quotes file, key and shapes.
pub(in crate::pipeline) fn check(loras: &ActiveLoras, weights: &Weights) -> Result<()> {
    let ActiveLoras { merged, added } = loras;
    match (weights, merged.first()) {
        (Weights::Files(source), _) => merged.iter().chain(added).try_for_each(|lora| lora.file.check(source))?,
        (Weights::Random(_), Some(first)) => {
            let file = first.file.path().display();
            let message = format!(
                "{file}: a merge of LoRAs needs weights from files, but model.weights is random; set model.weights to \
                 file, or apply: add for this LoRA"
            );
            return Err(PipelineError::Input(message));
        }
        (Weights::Random(_), None) => {}
    }
    Ok(added.iter().try_for_each(|lora| lora_add::check(&lora.file))?)
}
