//! A compiled program with the names of its arguments, and the results of a run.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::error::RuntimeError;
use super::sharded_tensor::ShardedTensor;
use super::turn::Turn;
use super::watch::Pace;
use crate::hlo::{Argument, Mesh, Output, Program};
use crate::pjrt::{Executable as Compiled, LoadedExecutable};
use crate::tensor::Tensor;

/// Origin of an executable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutableOrigin {
    Compiled,
    CacheHit,
}

impl fmt::Display for ExecutableOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ExecutableOrigin::Compiled => "compiled",
            ExecutableOrigin::CacheHit => "cache hit",
        })
    }
}

/// A compiled program with the names of its arguments and results.
pub struct Executable {
    pub(super) name: Arc<str>,
    pub(super) loaded: LoadedExecutable,
    pub(super) arguments: Vec<Argument>,
    pub(super) results: Vec<Output>,
    pub(super) mesh: Mesh,
    pub(super) hash: String,
    pub(super) origin: ExecutableOrigin,
    pub(super) compile_time: Duration,
    /// Its entry in the compile cache, where it is still to be written.
    pub(super) turn: Option<Turn>,
    /// Time that an execution takes.
    pub(super) pace: Arc<Pace>,
}

impl Executable {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The same compiled program for one of equal text, whose arguments and results may have other logical dimensions.
    #[must_use]
    pub(crate) fn written_as(&self, program: &Program) -> Executable {
        Executable {
            name: self.name.clone(),
            loaded: self.loaded.clone(),
            arguments: program.arguments.clone(),
            results: program.results.clone(),
            mesh: self.mesh.clone(),
            hash: self.hash.clone(),
            origin: self.origin,
            compile_time: self.compile_time,
            turn: self.turn.clone(),
            pace: self.pace.clone(),
        }
    }

    pub(crate) fn hash(&self) -> &str {
        &self.hash
    }

    /// Compiled, or loaded from the compile cache.
    pub fn origin(&self) -> ExecutableOrigin {
        self.origin
    }

    /// Time the compile took, or loading it from the compile cache.
    pub(crate) fn compile_time(&self) -> Duration {
        self.compile_time
    }

    pub fn arguments(&self) -> &[Argument] {
        &self.arguments
    }

    pub(crate) fn results(&self) -> &[Output] {
        &self.results
    }

    pub(crate) fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The compiled form, for its memory and its optimized program.
    pub fn compiled(&self) -> &Compiled {
        &self.loaded
    }
}

/// The results of a run, by name.
pub struct Outputs {
    pub(super) named: HashMap<String, ShardedTensor>,
}

impl Outputs {
    /// A result on the devices.
    pub fn get(&self, name: &str) -> Option<&ShardedTensor> {
        self.named.get(name)
    }

    /// A result copied to the host.
    ///
    /// # Errors
    /// No such result; the plugin's message.
    pub fn tensor(&self, name: &str) -> Result<Tensor, RuntimeError> {
        let found = self.named.get(name).ok_or_else(|| RuntimeError::Missing {
            program: "outputs".into(),
            name: name.into(),
            ty: "any".into(),
        })?;
        found.download()
    }

    /// Every result, in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &ShardedTensor)> {
        let sorted: BTreeMap<&str, &ShardedTensor> = self.named.iter().map(|(n, d)| (n.as_str(), d)).collect();
        sorted.into_iter()
    }

    /// Waits until every result is there.
    ///
    /// # Errors
    /// Error of the program on the device.
    pub(crate) fn wait(&self) -> Result<(), RuntimeError> {
        self.named.values().try_for_each(ShardedTensor::wait)
    }

    pub(crate) fn take(&mut self, name: &str) -> Option<ShardedTensor> {
        self.named.remove(name)
    }
}
