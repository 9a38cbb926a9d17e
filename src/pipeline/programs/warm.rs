//! Implements `ltx2 warm`: fills the compile cache with every program of a configuration, compiled on the devices that
//! will run them. Reads no weights and runs no program.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::build::ProgramKind;
use super::executor::Executor;
use crate::atomic_file::check_writable;
use crate::config::{Config, WeightSource};
use crate::hlo::Program;
use crate::models::Network;
use crate::nn::Param;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::plan::origin::Weights;
use crate::pipeline::plan::run_plan::RunPlan;
use crate::pipeline::plan::setup;
use crate::pipeline::session::SessionDevices;
use crate::runtime::processes::Group;
use crate::runtime::{CompiledProgram, Engine, ExecutableOrigin, random_programs};

/// A program in the compile cache.
#[derive(Clone, Debug, serde::Serialize)]
pub struct WarmedProgram {
    pub program: String,
    pub hash: String,
    /// Whether the program was compiled by this call; `false` if it was loaded from the cache.
    pub compiled: bool,
    /// Time of compiling or loading in seconds.
    pub seconds: f64,
    /// Path of the program's file in the cache.
    pub path: PathBuf,
}

/// Compiles every program that `generate` runs for a configuration, or loads it from the compile cache. In a
/// multi-process run, every process must call this function; each returns its own programs.
///
/// # Errors
/// Returns an error if the compile cache is disabled or the plugin cannot serialize programs, if the configuration, the
/// model or the layout is invalid, or if the compiler fails.
pub fn warm(config: &Config, group: Option<&Arc<Group>>) -> Result<Vec<WarmedProgram>> {
    let Some(folder) = config.compile_cache() else {
        let message = "runtime.compile_cache is off: set it to a folder for the compiled programs";
        return Err(PipelineError::Usage(message.into()));
    };
    check_writable(&folder.join("entry"))
        .map_err(|source| PipelineError::Output { key: "runtime.compile_cache", source })?;
    let mut plan = RunPlan::of_programs(config, None)?;
    let SessionDevices { engine, build, .. } = SessionDevices::open(&mut plan, group, setup::engine_options(config))?;
    let programs = &plan.programs;
    // No weights are drawn here. The programs that draw them take the seed as an input, so its value does not matter.
    let mut executor = Executor::new(engine, Weights::Random(config.model.weights_seed));
    let write = |kind: ProgramKind| {
        let network = executor.accepted(kind.name(), &build, |build| programs.network(kind, build))?;
        Ok((kind.name(), network))
    };
    let networks = programs.kinds().map(write).collect::<Result<Vec<_>>>()?;
    executor.compile_all(networks.iter().map(|(name, network)| (*name, network)))?;
    let mut warmed = Vec::new();
    for (name, network) in &networks {
        let compiled = executor.compile(name, network)?;
        warmed.push(WarmedProgram::find(executor.engine(), &network.program, &compiled, &folder)?);
    }
    let draws = if config.model.weights == WeightSource::Random { weights(&networks)? } else { Vec::new() };
    let noise = programs.noise()?.into_iter().map(|program| ("noise", program));
    for (name, program) in noise.chain(draws.into_iter().map(|program| ("random weights", program))) {
        let compiled = executor.compile_program(name, &program)?;
        warmed.push(WarmedProgram::find(executor.engine(), &program, &compiled, &folder)?);
    }
    // The two passes may use the same program.
    let mut seen = HashSet::new();
    warmed.retain(|program: &WarmedProgram| seen.insert(program.hash.clone()));
    Ok(warmed)
}

impl WarmedProgram {
    fn find(engine: &Engine, program: &Program, compiled: &CompiledProgram, folder: &Path) -> Result<Self> {
        let name = compiled.name();
        let path = engine.cache_file(name, program).ok_or_else(|| {
            let folder = folder.display();
            PipelineError::Input(format!(
                "{name} was compiled but not stored in {folder}: later runs will compile it again"
            ))
        })?;
        let (hash, seconds) = (compiled.hash().to_owned(), compiled.compile_time().as_secs_f64());
        let compiled = compiled.origin() == ExecutableOrigin::Compiled;
        Ok(WarmedProgram { program: name.into(), hash, compiled, seconds, path })
    }
}

/// Returns the programs that draw random weights. The programs of each network draw only the parameters that no earlier
/// network reads.
fn weights(networks: &[(&str, Network)]) -> Result<Vec<Program>> {
    let mut seen = HashSet::new();
    let mut all = Vec::new();
    for (_, network) in networks {
        let new: Vec<&Param> = network.params.iter().filter(|param| seen.insert(&param.name)).collect();
        all.extend(random_programs(&network.program, &new)?.into_iter().map(|random| random.program));
    }
    Ok(all)
}
