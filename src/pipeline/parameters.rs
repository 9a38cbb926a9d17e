//! The parameters of a model's parts, and whether files hold them.

use super::configs::ModelConfigs;
use super::error::Result;
use super::origin::Weights;
use super::program_table::{ProgramKind, TABLE};
use crate::hlo::{DType, Type};
use crate::nn::{Axis, Build, Init, Param, Source};
use crate::weights::{Checkpoint, Component, ValidationReport, validate};

/// Every parameter that any program of a part declares, and what only the host reads.
///
/// # Errors
/// Errors of the configuration.
pub fn parameters(configs: &ModelConfigs, part: Component) -> Result<Vec<Param>> {
    let build = Build::new(DType::F32);
    let component = part.folder();
    let mut params: Vec<Param> = Vec::new();
    for row in TABLE.iter().filter(|row| row.part == part) {
        let Some(alone) = row.alone.as_ref() else { continue };
        if row.kind == ProgramKind::VideoDecoder && !configs.has_video_decoder()? {
            continue;
        }
        params.extend((alone.smallest)(configs, &build)?.params.into_iter().filter(|p| p.component == component));
    }
    if let Some(length) = configs.statistics_length(part)? {
        // As a model of random weights has them.
        let init = [("latents_mean", Init::normal(0.0)), ("latents_std", Init { mean: 1.0, std: 0.0 })];
        params.extend(init.map(|(name, init)| Param {
            component,
            name: format!("{component}.{name}"),
            ty: Type::new(DType::F32, vec![length]),
            axes: vec![Axis::Channels],
            source: Source::Stack { keys: vec![name.into()], shape: vec![length] },
            init,
        }));
    }
    Ok(params)
}

/// Refuses files that lack a parameter of a part, or hold a tensor that it does not read, from headers alone.
///
/// # Errors
/// The first differences, naming the file.
pub(crate) fn check_files(
    configs: &ModelConfigs,
    weights: &Weights,
    parts: impl IntoIterator<Item = Component>,
) -> Result<()> {
    let Weights::Files(source) = weights else { return Ok(()) };
    source.refuse_unread()?;
    for part in parts {
        let checkpoint = source.checkpoint(part)?;
        compare(configs, part, &checkpoint)?.into_result(part, &checkpoint)?;
    }
    Ok(())
}

/// Compares a part's checkpoint with its parameters, from headers alone.
pub(crate) fn compare(configs: &ModelConfigs, part: Component, checkpoint: &Checkpoint) -> Result<ValidationReport> {
    let params = parameters(configs, part)?;
    Ok(validate(checkpoint, part, params.iter().flat_map(|p| p.source.tensors())))
}
