//! Runs a single component on given tensors, for comparisons with the reference implementation. Arguments and results
//! have the names that the reference implementation uses.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;

use super::ProgramKind;
use super::configs::ModelConfigs;
use super::executor::{Executor, Inputs};
use crate::models::Network;
use crate::nn::Build;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::plan::memory::explain_single_run;
use crate::tensor::Tensor;

/// Scalar arguments of a component of the reference implementation, by name.
pub(crate) type Scalars = BTreeMap<String, serde_json::Value>;

/// Inputs of a program, by name.
pub(in crate::pipeline) type NamedInputs = Vec<(String, Tensor)>;

/// A program with its inputs.
pub(in crate::pipeline) type Ready = (Network, NamedInputs);

/// Description of a program for `ltx2 run`, which runs it with the arguments of the reference implementation.
pub(crate) struct SingleRun {
    /// Help text of the command line: the input and output tensors.
    pub(crate) help: &'static str,
    /// Names of the scalar arguments, which the flag `--set` passes.
    pub(super) scalars: &'static [&'static str],
    /// Returns the program and its inputs, given the arguments.
    pub(super) inputs: fn(&mut ReferenceArguments) -> Result<Ready>,
    /// Returns the smallest program that declares all parameters of the component.
    pub(super) smallest: fn(&ModelConfigs, &Build) -> Result<Network>,
}

/// Arguments of a component: tensors, each of which can be taken once, and scalars.
pub(in crate::pipeline) struct ReferenceArguments<'a> {
    pub(crate) configs: &'a ModelConfigs,
    pub(crate) build: &'a Build,
    tensors: BTreeMap<String, Tensor>,
    scalars: &'a Scalars,
    known: Vec<&'static str>,
}

impl<'a> ReferenceArguments<'a> {
    /// Collects the arguments. Fails if a scalar's name is not in `known`.
    pub(crate) fn new(
        configs: &'a ModelConfigs,
        build: &'a Build,
        tensors: BTreeMap<String, Tensor>,
        scalars: &'a Scalars,
        known: &[&str],
    ) -> Result<Self> {
        if let Some(k) = scalars.keys().find(|k| !known.contains(&k.as_str())) {
            let all = if known.is_empty() { "none".into() } else { known.join(", ") };
            return Err(PipelineError::Input(format!("--set {k}: unknown argument; this component takes {all}")));
        }
        Ok(ReferenceArguments { configs, build, tensors, scalars, known: Vec::new() })
    }

    pub(crate) fn optional(&mut self, name: &'static str) -> Option<Tensor> {
        self.known.push(name);
        self.tensors.remove(name)
    }

    pub(crate) fn required(&mut self, name: &'static str) -> Result<Tensor> {
        self.optional(name).ok_or_else(|| PipelineError::Input(format!("input '{name}' is missing from --inputs")))
    }

    pub(crate) fn ranked(&mut self, name: &'static str, rank: usize) -> Result<Tensor> {
        let t = self.required(name)?;
        if t.shape().len() != rank {
            let message = format!("input '{name}' must have {rank} dimensions, but has shape {:?}", t.shape());
            return Err(PipelineError::Input(message));
        }
        Ok(t)
    }

    pub(crate) fn scalar<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let value = self.scalars.get(name).map(|v| serde_json::from_value(v.clone())).transpose();
        value.map_err(|e| PipelineError::Input(format!("--set {name}: {e}")))
    }

    /// Fails if a tensor was not taken, because the component does not use it.
    pub(crate) fn finish(self) -> Result<()> {
        match self.tensors.keys().next() {
            None => Ok(()),
            Some(name) => Err(PipelineError::Input(format!(
                "input '{name}' is unknown; this component takes {}",
                self.known.join(", ")
            ))),
        }
    }

    /// Returns the program and the input of a component whose only argument is a tensor of rank `N`.
    pub(super) fn only<const N: usize>(
        &mut self,
        name: &'static str,
        program: impl FnOnce(&ModelConfigs, [usize; N], &Build) -> Result<Network>,
    ) -> Result<Ready> {
        let tensor = self.ranked(name, N)?;
        let dims = std::array::from_fn(|i| tensor.shape()[i]);
        Ok((program(self.configs, dims, self.build)?, vec![(name.into(), tensor)]))
    }
}

/// Runs one component and returns its results. The names of `tensors` and `scalars` are the argument names of the
/// reference implementation.
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
    let single = kind.declaration().single_run.as_ref();
    let single = single.ok_or_else(|| PipelineError::Usage(format!("ltx2 run does not support program '{name}'")))?;
    let mut inputs = Vec::new();
    let build = &Build { added_loras: executor.added_loras(kind), ..build.clone() };
    let network = executor.accepted(name, build, |build| {
        let mut given = ReferenceArguments::new(configs, build, tensors.clone(), scalars, single.scalars)?;
        let (network, made) = (single.inputs)(&mut given)?;
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
