//! Compiled programs with named arguments, and the results of a run.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::error::RuntimeError;
use super::sharded_tensor::ShardedTensor;
use super::thread_locks::EntryLock;
use super::watch::ExecutionTimes;
use ltx2_pjrt::{Executable as Compiled, LoadedExecutable};
use ltx2_stablehlo::{Argument, DeviceMesh, Program, ProgramOutput};
use ltx2_weights::tensor::Tensor;

/// Origin of an executable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutableOrigin {
    /// Compiled by this process.
    Compiled,
    /// Loaded from the compile cache.
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
pub struct CompiledProgram {
    pub(super) name: Arc<str>,
    pub(super) loaded: LoadedExecutable,
    pub(super) arguments: Vec<Argument>,
    pub(super) results: Vec<ProgramOutput>,
    pub(super) mesh: DeviceMesh,
    pub(super) hash: String,
    pub(super) origin: ExecutableOrigin,
    pub(super) compile_time: Duration,
    /// Lock on the compile-cache entry of the executable. The entry may still have to be written.
    pub(super) entry_lock: Option<EntryLock>,
    /// Expected execution time, for the watchdog.
    pub(super) execution_times: Arc<ExecutionTimes>,
}

impl CompiledProgram {
    /// Returns the name that was passed to [`Engine::compile`](crate::Engine::compile).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns this executable with the arguments and results of `program`, which has the same text but may have
    /// different logical dimensions.
    #[must_use]
    pub fn for_program(&self, program: &Program) -> CompiledProgram {
        CompiledProgram {
            name: self.name.clone(),
            loaded: self.loaded.clone(),
            arguments: program.arguments.clone(),
            results: program.results.clone(),
            mesh: self.mesh.clone(),
            hash: self.hash.clone(),
            origin: self.origin,
            compile_time: self.compile_time,
            entry_lock: self.entry_lock.clone(),
            execution_times: self.execution_times.clone(),
        }
    }

    /// Returns the SHA-256 of the program text, in hex.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Returns whether the executable was compiled or loaded from the compile cache.
    pub fn origin(&self) -> ExecutableOrigin {
        self.origin
    }

    /// Returns the time that compiling the executable, or loading it from the compile cache, took.
    pub fn compile_time(&self) -> Duration {
        self.compile_time
    }

    /// Returns the program's arguments in call order.
    pub fn arguments(&self) -> &[Argument] {
        &self.arguments
    }

    /// Returns the program's results in order.
    pub fn results(&self) -> &[ProgramOutput] {
        &self.results
    }

    /// Returns the mesh of devices that the program is partitioned over.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Returns the PJRT executable, for memory statistics and the optimized program.
    pub fn compiled(&self) -> &Compiled {
        &self.loaded
    }
}

/// The results of a run, by name.
pub struct Outputs {
    pub(super) named: HashMap<String, ShardedTensor>,
}

impl Outputs {
    /// Returns a result without copying it to the host; `None` if there is no result of that name.
    pub fn get(&self, name: &str) -> Option<&ShardedTensor> {
        self.named.get(name)
    }

    /// Copies a result to the host.
    ///
    /// # Errors
    /// Returns an error if there is no result of that name, or the plugin's error.
    pub fn tensor(&self, name: &str) -> Result<Tensor, RuntimeError> {
        let found = self.named.get(name).ok_or_else(|| RuntimeError::Missing {
            program: "outputs".into(),
            name: name.into(),
            ty: "no such result".into(),
        })?;
        found.download()
    }

    /// Returns all results, ordered by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &ShardedTensor)> {
        let sorted: BTreeMap<&str, &ShardedTensor> = self.named.iter().map(|(n, d)| (n.as_str(), d)).collect();
        sorted.into_iter()
    }

    /// Waits until all results are computed. Returns an error if the program failed on a device.
    pub fn wait(&self) -> Result<(), RuntimeError> {
        self.named.values().try_for_each(ShardedTensor::wait)
    }

    /// Removes and returns a result; `None` if there is no result of that name.
    pub fn take(&mut self, name: &str) -> Option<ShardedTensor> {
        self.named.remove(name)
    }
}
