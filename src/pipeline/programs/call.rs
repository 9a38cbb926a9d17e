//! Compiled programs whose inputs have been uploaded.

use std::rc::Rc;

use super::executor::{Executor, Inputs};
use crate::models::Network;
use crate::pipeline::error::Result;
use crate::runtime::{CompiledProgram, Outputs, ShardedTensor};
use crate::tensor::Tensor;

/// A compiled program with all of its inputs on the devices; it can run any number of times.
pub struct Call<'a> {
    program: Rc<CompiledProgram>,
    inputs: Inputs<'a>,
}

impl<'a> Call<'a> {
    /// Compiles a network, loads its parameters, and uploads the host tensors `given`; `inputs` are already on the
    /// devices.
    pub(crate) fn new(
        executor: &mut Executor,
        name: &str,
        network: &Network,
        inputs: Inputs<'a>,
        given: impl IntoIterator<Item = (String, Tensor)>,
    ) -> Result<Self> {
        let program = executor.prepare(name, network)?;
        let inputs = executor.give_all(&program, inputs, given)?;
        Ok(Call { program, inputs })
    }

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
        executor.run(&self.program, &self.inputs)
    }
}
