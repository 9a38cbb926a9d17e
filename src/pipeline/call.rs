//! A compiled program with its inputs on the devices.

use std::rc::Rc;

use super::error::Result;
use super::executor::{Executor, Inputs};
use crate::models::Network;
use crate::runtime::{Executable, Outputs, ShardedTensor};
use crate::tensor::Tensor;

/// A compiled program with everything it reads on the devices; it can be run any number of times.
pub struct Call<'a> {
    program: Rc<Executable>,
    inputs: Inputs<'a>,
}

impl<'a> Call<'a> {
    /// A network made ready, with `given` copied to the devices beside `inputs`.
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

    /// The compiled program.
    pub(crate) fn program(&self) -> &Executable {
        &self.program
    }

    /// An input by name.
    pub(crate) fn input(&self, name: &str) -> Option<&ShardedTensor> {
        self.inputs.get(name)
    }

    /// Runs it; the results may still be computed when this returns.
    ///
    /// # Errors
    /// The plugin's message.
    pub fn run(&self, executor: &Executor) -> Result<Outputs> {
        executor.run(&self.program, &self.inputs)
    }
}
