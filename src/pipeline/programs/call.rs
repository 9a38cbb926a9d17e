//! Compiled programs whose inputs have been uploaded.

use std::rc::Rc;

use super::ProgramKind;
use super::executor::{Executor, Inputs};
use crate::models::Network;
use crate::pipeline::error::Result;
use crate::pipeline::runner::Runner;
use crate::runtime::{CompiledProgram, Outputs, ShardedTensor};
use crate::tensor::Tensor;

/// A compiled program with all of its inputs on the devices; it can run any number of times.
pub struct Call<'a> {
    program: Rc<CompiledProgram>,
    inputs: Inputs<'a>,
}

impl Runner {
    /// Compiles a network, loads its parameters, and uploads the host tensors `given`; `inputs` are already on the
    /// devices.
    pub(in crate::pipeline) fn call<'a>(
        &mut self,
        program: ProgramKind,
        network: &Network,
        inputs: Inputs<'a>,
        given: impl IntoIterator<Item = (String, Tensor)>,
    ) -> Result<Call<'a>> {
        let program = self.executor.prepare(program.name(), network)?;
        let inputs = self.executor.give_all(&program, inputs, given)?;
        Ok(Call { program, inputs })
    }
}

impl Call<'_> {
    pub(crate) fn program(&self) -> &CompiledProgram {
        &self.program
    }

    pub(crate) fn input(&self, name: &str) -> Option<&ShardedTensor> {
        self.inputs.get(name)
    }

    /// Starts the program and returns without waiting for its results.
    ///
    /// # Errors
    /// Returns an error if the plugin cannot run the program.
    pub fn run(&self, executor: &Executor) -> Result<Outputs> {
        executor.run_with(&self.program, |name| self.inputs.get(name))
    }
}
