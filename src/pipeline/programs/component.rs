//! Runs a single component on given tensors, for comparisons with the reference implementation. Arguments and results
//! have the names that the reference implementation uses.

use std::collections::BTreeMap;

use super::component_inputs::ReferenceArguments;
pub(crate) use super::component_inputs::Scalars;
use super::configs::ModelConfigs;
use super::executor::{Executor, Inputs};
use super::program_table::ProgramKind;
use crate::models::Network;
use crate::nn::Build;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::plan::memory::explain_single_run;
use crate::tensor::Tensor;

/// Runs one component on `tensors` and `scalars`, whose names are the argument names of the reference implementation,
/// and returns its results.
///
/// # Errors
/// Returns an error if an input is missing, unknown or has the wrong shape, or if the model or the device fails.
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
    let alone = alone.ok_or_else(|| PipelineError::Usage(format!("program '{name}' cannot be run on its own")))?;
    let mut inputs = Vec::new();
    let network = executor.accepted(name, build, |build| {
        let mut given = ReferenceArguments::new(configs, build, tensors.clone(), scalars, alone.scalars)?;
        let (network, made) = (alone.inputs)(&mut given)?;
        given.finish()?;
        check_shapes(&network, &made)?;
        inputs = made;
        Ok(network)
    })?;
    let program = executor.prepare(name, &network).map_err(|e| explain_single_run(e, &network, executor))?;
    let inputs = executor.give_all(&program, Inputs::default(), inputs);
    let outputs = inputs.and_then(|inputs| executor.run(&program, &inputs));
    let outputs = outputs.map_err(|e| explain_single_run(e, &network, executor))?;
    network.program.results.iter().map(|r| Ok((r.name.clone(), outputs.tensor(&r.name)?))).collect()
}

/// Rejects inputs that have the wrong shape, before anything is compiled.
fn check_shapes(network: &Network, inputs: &[(String, Tensor)]) -> Result<()> {
    for (name, tensor) in inputs {
        if let Some(a) = network.program.arguments.iter().find(|a| a.name == *name)
            && a.logical_dims != tensor.shape()
        {
            let message =
                format!("input '{name}' has shape {:?}, but the model needs {:?}", tensor.shape(), a.logical_dims);
            return Err(PipelineError::Input(message));
        }
    }
    Ok(())
}
