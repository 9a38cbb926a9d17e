//! Lists the parameters of a model's components and compares them with the files.

use super::configs::ModelConfigs;
use super::{PROGRAMS, ProgramKind};
use crate::hlo::{DType, Type};
use crate::nn::{Axis, Build, Init, Param, Source};
use crate::pipeline::error::Result;
use crate::pipeline::plan::origin::Weights;
use crate::weights::{Checkpoint, Component, ValidationReport, validate};

/// Returns every parameter that the programs of a component declare, and the component's latent statistics, which are
/// read only on the host.
///
/// # Errors
/// Returns an error if the component's configuration is invalid.
pub fn parameters(configs: &ModelConfigs, part: Component) -> Result<Vec<Param>> {
    let build = Build::new(DType::F32);
    let component = part.folder();
    let mut params: Vec<Param> = Vec::new();
    for program in PROGRAMS.iter().filter(|program| program.component == part) {
        let Some(single) = &program.single_run else { continue };
        if program.kind == ProgramKind::VideoDecoder && !configs.has_video_decoder()? {
            continue;
        }
        params.extend((single.smallest)(configs, &build)?.params.into_iter().filter(|p| p.component == component));
    }
    if let Some(length) = configs.statistics_length(part)? {
        // The values in a model with random weights.
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

/// Checks, by reading only headers, that the files contain every parameter of the components, and no tensor that is
/// never read.
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

/// Compares the tensors in a component's checkpoint with the declared parameters, by reading only headers.
pub(crate) fn compare(configs: &ModelConfigs, part: Component, checkpoint: &Checkpoint) -> Result<ValidationReport> {
    let params = parameters(configs, part)?;
    Ok(validate(checkpoint, part, params.iter().flat_map(|p| p.source.tensors())))
}
