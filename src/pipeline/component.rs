//! One component on given tensors, for parity checks: the reference's argument names in, its results out.

use std::collections::BTreeMap;

use super::component_inputs::Given;
pub use super::component_inputs::Scalars;
use super::configs::ModelConfigs;
use super::error::{PipelineError, Result};
use super::executor::{Executor, Inputs};
use super::program_table::{ProgramKind, TABLE};
use crate::hlo::{DType, Type};
use crate::models::Network;
use crate::nn::{Axis, Build, Init, Param, Source};
use crate::tensor::Tensor;
use crate::weights::Component;

/// Runs one component.
///
/// # Errors
/// A missing, unknown or wrongly shaped input, by name; what is wrong with model or device.
pub fn run_component(
    kind: ProgramKind,
    configs: &ModelConfigs,
    executor: &mut Executor,
    tensors: BTreeMap<String, Tensor>,
    scalars: &Scalars,
    build: &Build,
) -> Result<Vec<(String, Tensor)>> {
    let name = kind.name();
    let alone = kind.row().alone.as_ref();
    let alone = alone.ok_or_else(|| PipelineError::Usage(format!("program '{name}' does not run alone")))?;
    let mut given = Given::new(configs, build, tensors, scalars, alone.scalars)?;
    let (network, inputs) = (alone.inputs)(&mut given)?;
    given.finish()?;
    check_shapes(&network, &inputs)?;
    let program = executor.prepare(name, &network)?;
    let inputs = executor.give_all(&program, Inputs::default(), inputs)?;
    let outputs = executor.run(&program, &inputs)?;
    network.program.results.iter().map(|r| Ok((r.name.clone(), outputs.tensor(&r.name)?))).collect()
}

/// Inputs whose shapes the program does not take, before anything is compiled.
fn check_shapes(network: &Network, inputs: &[(String, Tensor)]) -> Result<()> {
    for (name, tensor) in inputs {
        if let Some(a) = network.program.arguments.iter().find(|a| a.name == *name)
            && a.logical_dims != tensor.shape()
        {
            let message =
                format!("input '{name}' has shape {:?}, the model takes {:?}", tensor.shape(), a.logical_dims);
            return Err(PipelineError::Input(message));
        }
    }
    Ok(())
}

/// Every parameter that any program of a part declares, and what only the host reads.
///
/// # Errors
/// What is wrong with the configuration.
pub fn parameters(configs: &ModelConfigs, part: Component) -> Result<Vec<Param>> {
    let build = Build::new(DType::F32);
    let component = part.folder();
    let mut params: Vec<Param> = Vec::new();
    for alone in TABLE.iter().filter(|row| row.part == part).filter_map(|row| row.alone.as_ref()) {
        params.extend((alone.smallest)(configs, &build)?.params.into_iter().filter(|p| p.component == component));
    }
    if let Some(length) = configs.statistics_length(part)? {
        let init = [("latents_mean", Init::normal(0.1)), ("latents_std", Init { mean: 1.0, std: 0.05 })];
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
