//! `compile`: a program of a configuration, compiled for devices that need not be there, and what the compiler made of
//! it.

use super::layouts::{self, Devices, needed};
use super::setup;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::error::{PipelineError, Result};
use super::executor::warn_refused;
use super::programs::{ProgramKind, Programs, warn_once};
use crate::analysis::{self, Module, Predicted, Report};
use crate::config::{Config, is_shipped_layout, shipped_layouts};
use crate::hlo::Mesh;
use crate::media::write_atomically;
use crate::models::Network;
use crate::nn::{Build, Placement};
use crate::pjrt::discover::Platform;
use crate::pjrt::{CompiledMemory, Error};
use crate::runtime::{
    CompileKey, CompileOutcome, Compiled, EngineOptions, ModuleStore, OpenTarget, RuntimeError, StoredModule, Target,
};

/// Blocks of the reduced program that stands for one that does not fit.
const REDUCED: usize = 2;

/// Program to compile, and the devices to compile it for.
#[derive(Clone, Debug)]
pub struct CompileOptions<'a> {
    pub target: Target,
    pub kind: ProgramKind,
    /// Blocks of the transformer; all if not given.
    pub layers: Option<usize>,
    /// Folder for the program and what the compiler made of it.
    pub dump: Option<&'a Path>,
    /// Compile cache that the program is kept in; it is compiled for that.
    pub save: Option<&'a Path>,
    /// Optimized modules: one that is there is analysed in place of compiling, one that is not is added.
    pub modules: Option<&'a ModuleStore>,
}

/// A program in the compile cache.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
pub(crate) struct Saved {
    pub(crate) path: PathBuf,
    /// The file's size.
    pub(crate) bytes: usize,
}

/// A compiled program's figures, on one device.
pub struct Compilation {
    pub kind: ProgramKind,
    /// Hash of all that the module depends on, where modules are stored.
    pub(crate) key: Option<CompileKey>,
    /// Its hash: a run of the same configuration on the same devices executes this program.
    pub hash: String,
    /// Folder or preset of the model.
    pub(crate) model: String,
    /// How it is spread over the devices.
    pub(crate) layout: String,
    pub(crate) mesh: Mesh,
    /// Blocks of the transformer that were compiled.
    pub(crate) layers: usize,
    pub memory: Memory,
    /// Bytes of arguments and results on a device with all blocks, and their number.
    pub(crate) whole: (i64, usize),
    /// Collectives, work, copies, time.
    pub report: Report,
    /// Where tensors were placed.
    pub(crate) placements: Vec<Placement>,
    /// Dimensions that the layout could not split, and why nothing was saved.
    pub(crate) notes: Vec<String>,
    /// Seconds the compiler took.
    pub seconds: f64,
    /// Where it was kept.
    pub(crate) saved: Option<Saved>,
    /// Why the whole program does not fit; the figures are then a reduced one's.
    pub(crate) shortage: Option<Shortage>,
}

impl Compilation {
    /// Time of a step with all blocks, where the chip is known: each block that was not compiled as those that were.
    pub fn predicted_all(&self) -> Option<Predicted> {
        let more = self.whole.1 as f64 - self.layers as f64;
        Some(self.report.predicted?.with(more, &self.report.predicted_layer?))
    }
}

/// Bytes on a device.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
pub struct Memory {
    pub(crate) arguments: i64,
    /// Results, those that take over arguments included.
    pub(crate) outputs: i64,
    /// Everything between.
    pub temporaries: i64,
    /// Machine code.
    pub(crate) generated_code: i64,
    /// Results that take over arguments.
    pub(crate) aliased: i64,
    /// Bytes that a run needs at once.
    pub(crate) total: i64,
    /// Bytes of the device; none for a CPU.
    pub(crate) capacity: Option<i64>,
}

impl Memory {
    fn of(m: CompiledMemory, capacity: Option<i64>) -> Self {
        Memory {
            arguments: m.arguments,
            outputs: m.outputs,
            temporaries: m.temporaries,
            generated_code: m.generated_code,
            aliased: m.aliased,
            total: m.arguments + m.outputs - m.aliased + m.temporaries + m.generated_code,
            capacity,
        }
    }
}

/// A program that is larger than the device.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
pub(crate) struct Shortage {
    /// Bytes a device needs at least.
    pub(crate) needed: i64,
    /// Bytes it has.
    pub(crate) capacity: i64,
    /// Parts of the sum, in words.
    pub(crate) what: String,
    /// Shipped layouts whose arguments and results fit on as many such devices, with their bytes.
    pub(crate) fitting: Vec<(String, i64)>,
}

impl std::fmt::Display for Shortage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let gib = |bytes: i64| bytes as f64 / f64::from(1 << 30);
        write!(f, "{} need {:.2} GiB a device, it has {:.2}; ", self.what, gib(self.needed), gib(self.capacity))?;
        let fitting: Vec<String> =
            self.fitting.iter().map(|(name, bytes)| format!("{name} ({:.2} GiB)", gib(*bytes))).collect();
        match fitting.is_empty() {
            true => f.write_str("no shipped layout fits on these devices: take more of them"),
            false => write!(f, "of the shipped layouts these would fit: {}", fitting.join(", ")),
        }
    }
}

/// Files that [`CompileOptions::dump`] has written of a program: it, its optimized module, and that as text.
pub(crate) fn dump_files(folder: &Path, kind: ProgramKind) -> [PathBuf; 3] {
    ["mlir", "optimized.pb", "optimized.txt"].map(|suffix| folder.join(format!("{}.{suffix}", kind.name())))
}

/// Compiles a program of a configuration, or takes its module from [`CompileOptions::modules`], and analyses it. One that
/// does not fit is not kept.
///
/// # Errors
/// Errors of configuration, model or layout; the compiler's message, also of an earlier compilation. A program
/// that does not fit is no error here: see `Compilation::shortage`.
pub fn compile(config: &Config, options: &CompileOptions) -> Result<Compilation> {
    let programs = Programs::of(config, options.layers)?;
    programs.check_headers(config, options.kind)?;
    let machine = if options.save.is_some() { options.target.open_present() } else { options.target.open() };
    let machine = machine.map_err(RuntimeError::from)?;
    let config = &resolved(config, &machine)?;
    if tracing::enabled!(tracing::Level::WARN) {
        warn_once(unmatched_patterns(config, &machine)?);
    }
    Job { config, options, machine: &machine, compiles: true, refused: false }.compilation(&programs)
}

/// Patterns of a configuration's layout that name no tensor of its programs, a line each; of a shipped layout none.
///
/// # Errors
/// Errors of configuration, model or layout.
pub(crate) fn unmatched_patterns(config: &Config, machine: &OpenTarget) -> Result<Vec<String>> {
    if is_shipped_layout(&config.layout) {
        return Ok(Vec::new());
    }
    let build = setup::build_for(config, machine.devices.len(), &machine.toolchain())?;
    Programs::of(config, None)?.unmatched(&build)
}

/// Analysis of stored modules alone, see [`compile`]; nothing is compiled.
///
/// # Errors
/// Those of [`compile`]; [`PipelineError::NotCompiled`] where there is no module.
pub fn analyse(config: &Config, options: &CompileOptions, machine: &OpenTarget) -> Result<Compilation> {
    let programs = Programs::of(config, options.layers)?;
    Job { config: &resolved(config, machine)?, options, machine, compiles: false, refused: false }
        .compilation(&programs)
}

/// Key of a configuration's compiled program: hashes of all that it depends on.
///
/// # Errors
/// Errors of configuration, model or layout; a plugin that cannot be read.
pub(crate) fn key(
    config: &Config,
    options: &CompileOptions,
    machine: &OpenTarget,
    modules: &ModuleStore,
) -> Result<CompileKey> {
    let job = Job { config: &resolved(config, machine)?, options, machine, compiles: false, refused: false };
    let network = job.network(&Programs::of(config, options.layers)?)?;
    job.key(&network, modules)
}

/// The configuration with `layout: auto` decided for a target's devices.
///
/// # Errors
/// Those of [`layouts::resolve`].
pub(crate) fn resolved(config: &Config, machine: &OpenTarget) -> Result<Config> {
    let (toolchain, chip) = (machine.toolchain(), machine.target.chip());
    let count = machine.devices.len();
    layouts::resolve(config, Devices { toolchain: &toolchain, count, capacity: machine.capacity, chip: chip.as_ref() })
}

struct Job<'a> {
    config: &'a Config,
    options: &'a CompileOptions<'a>,
    machine: &'a OpenTarget,
    /// Whether a program without a module is compiled.
    compiles: bool,
    /// Whether the compiler refused attention's kernel, so that programs are written without.
    refused: bool,
}

struct Made {
    module: StoredModule,
    key: Option<CompileKey>,
    executable: Option<Compiled>,
}

impl Job<'_> {
    fn compilation(&self, programs: &Programs) -> Result<Compilation> {
        let (options, machine) = (self.options, self.machine);
        let network = self.network(programs)?;
        let needed = needed(&network);
        match machine.capacity.filter(|capacity| needed > *capacity) {
            None => match self.run(programs, &network, options.save) {
                Err(e) if is_out_of_memory(&e) => {
                    let what =
                        format!("arguments and results of {} (and temporaries beside them)", options.kind.name());
                    tracing::debug!("{e}");
                    self.reduced(Shortage { needed, capacity: machine.capacity.unwrap_or(0), what, fitting: vec![] })
                }
                Err(e) => match self.build(self.config)?.without_refused_kernel() {
                    Some(_) if !self.refused => match (Job { refused: true, ..*self }).compilation(programs) {
                        Ok(without) => {
                            warn_refused(options.kind.name(), &e);
                            Ok(without)
                        }
                        Err(_) => Err(e),
                    },
                    _ => Err(e),
                },
                Ok(done) => match machine.capacity.filter(|capacity| done.memory.total > *capacity) {
                    None => Ok(done),
                    Some(capacity) => {
                        let what = format!("arguments, results and temporaries of {}", options.kind.name());
                        let needed = done.memory.total;
                        Ok(Compilation {
                            shortage: Some(Shortage { needed, capacity, what, fitting: self.fitting()? }),
                            ..done
                        })
                    }
                },
            },
            Some(capacity) => {
                let what = format!("arguments and results of {} alone", options.kind.name());
                self.reduced(Shortage { needed, capacity, what, fitting: self.fitting()? })
            }
        }
    }

    /// The program, spread over all devices.
    fn network(&self, programs: &Programs) -> Result<Network> {
        let (config, target) = (self.config, &self.machine.target);
        let (slices, named) = (target.slices(), config.slices()?);
        if slices != named && target.platform() == Platform::Tpu {
            let message = format!("{target} has {slices} slice(s), the mesh dcn.data = {named}");
            return Err(PipelineError::Usage(format!("{message}: give --mesh dcn.data={slices},…")));
        }
        let build = self.build(config)?;
        let (used, all) = (build.layout.mesh.devices(), self.machine.devices.len());
        if used < all {
            let message =
                format!("layout {} uses {used} of the {all} devices of {target}; give a --mesh", config.layout);
            return Err(PipelineError::Usage(message));
        }
        programs.network(self.options.kind, &build)
    }

    fn build(&self, config: &Config) -> Result<Build> {
        let build = setup::build_for(config, self.machine.devices.len(), &self.machine.toolchain())?;
        Ok(build.without_refused_kernel().filter(|_| self.refused).unwrap_or(build))
    }

    fn engine_options(&self, save: Option<&Path>) -> EngineOptions {
        EngineOptions { compile_cache: save.map(Path::to_path_buf), ..setup::engine_options(self.config) }
    }

    fn key(&self, network: &Network, modules: &ModuleStore) -> Result<CompileKey> {
        let key = modules.key(self.machine, &network.program, &self.engine_options(None));
        Ok(key.map_err(RuntimeError::from)?)
    }

    /// The module of a program, stored or compiled, with its key; the executable where it was compiled now.
    fn module(&self, network: &Network, save: Option<&Path>) -> Result<Made> {
        let compiled = || self.compiled(network, save);
        let Some(modules) = self.options.modules else {
            let (module, executable) = compiled()?;
            return Ok(Made { module, key: None, executable: Some(executable) });
        };
        let key = self.key(network, modules)?;
        let path = modules.path(&key);
        match modules.get(&key).map_err(RuntimeError::from)? {
            Some(CompileOutcome::Module(module)) if save.is_none() => {
                if self.compiles {
                    tracing::info!("{} is not compiled: its module is {}", self.options.kind.name(), path.display());
                }
                return Ok(Made { module, key: Some(key), executable: None });
            }
            Some(CompileOutcome::Failure(message)) => {
                return Err(PipelineError::Refused { message, key: Box::new(key), path });
            }
            _ if !self.compiles => return Err(PipelineError::NotCompiled(Box::new(key))),
            _ => {}
        }
        let made = compiled();
        let outcome = match &made {
            Ok((module, _)) => Some(CompileOutcome::Module(module.clone())),
            Err(PipelineError::Runtime(RuntimeError::Plugin(refusal) | RuntimeError::Flag { source: refusal, .. })) => {
                Some(CompileOutcome::Failure(refusal.to_string()))
            }
            Err(_) => None,
        };
        outcome.map_or(Ok(()), |outcome| modules.put(&key, &outcome)).map_err(RuntimeError::from)?;
        let (module, executable) = made?;
        Ok(Made { module, key: Some(key), executable: Some(executable) })
    }

    fn compiled(&self, network: &Network, save: Option<&Path>) -> Result<(StoredModule, Compiled)> {
        let started = Instant::now();
        let fail = |e: Error| PipelineError::from(RuntimeError::from(e));
        let compiled = self.machine.compile(&network.program, &self.engine_options(save))?;
        let seconds = started.elapsed().as_secs_f64();
        let (optimized, memory) = (compiled.optimized_program().map_err(fail)?, compiled.memory().map_err(fail)?);
        Ok((StoredModule { optimized, memory, seconds }, compiled))
    }

    /// Compiles or takes what was, reads the result, and keeps it where it fits.
    fn run(&self, programs: &Programs, network: &Network, save: Option<&Path>) -> Result<Compilation> {
        let (kind, program) = (self.options.kind, &network.program);
        let dump = self.options.dump.map(|folder| dump_files(folder, kind));
        // Programs that are compiled twice, without a kernel or with fewer blocks, are written twice.
        let write = |file: &PathBuf, bytes: &[u8]| write_atomically(file, bytes);
        if let Some([text, ..]) = &dump {
            write(text, program.text.as_bytes())?;
        }
        let Made { module: StoredModule { optimized, memory, seconds }, key, executable } =
            self.module(network, save)?;
        let memory = Memory::of(memory, self.machine.capacity);
        let keep = |(folder, executable): (&Path, Compiled)| -> std::result::Result<Saved, RuntimeError> {
            let options = self.machine.known_options(program, &self.engine_options(save));
            let entry = self.machine.cache(folder)?.entry(kind.name(), program, &options);
            Ok(Saved { bytes: entry.save(&executable)?, path: entry.path().into() })
        };
        let fits = memory.capacity.is_none_or(|capacity| memory.total <= capacity);
        let mut notes = network.notes.clone();
        let module = Module::decode(&optimized.format, &optimized.bytes)
            .map_err(|e| PipelineError::Input(format!("the optimized program cannot be read: {e}")))?;
        let complete = self.machine.is_present() || !module.is_bound_to_device();
        if save.is_some() && !complete {
            notes.push(
                "not saved: cuDNN chooses and builds its kernels on the GPU itself, and an executable made without one \
                 does not run there; the first run there compiles and keeps it"
                    .into(),
            );
        }
        let saved = save.zip(executable).filter(|_| fits && complete).map(keep).transpose()?;
        if let Some([_, optimized_bytes, listing]) = &dump {
            write(optimized_bytes, &optimized.bytes)?;
            write(listing, module.listing().as_bytes())?;
        }
        let stacked = programs.stacked(kind)?;
        let chip = self.options.target.chip();
        Ok(Compilation {
            kind,
            key,
            hash: program.hash(),
            layout: self.config.layout.clone(),
            model: programs.origin.clone(),
            mesh: program.mesh.clone(),
            layers: programs.layers(),
            memory,
            whole: self.whole(programs, network)?,
            report: analysis::report(&module, &program.mesh.axes, &stacked, chip.as_ref()),
            placements: network.placements.clone(),
            notes,
            seconds,
            saved,
            shortage: None,
        })
    }

    /// Arguments and results of the program with all blocks, and their number; it is written, not compiled.
    fn whole(&self, programs: &Programs, network: &Network) -> Result<(i64, usize)> {
        let all = Programs::of(self.config, None)?;
        if all.layers() == programs.layers() {
            return Ok((needed(network), all.layers()));
        }
        let network = all.network(self.options.kind, &self.build(self.config)?)?;
        Ok((needed(&network), all.layers()))
    }

    /// Compiles a program of fewer blocks instead.
    fn reduced(&self, shortage: Shortage) -> Result<Compilation> {
        let shortage =
            if shortage.fitting.is_empty() { Shortage { fitting: self.fitting()?, ..shortage } } else { shortage };
        if !self.options.kind.has_blocks() || self.options.layers.is_some_and(|n| n <= REDUCED) {
            return Err(PipelineError::TooLarge(shortage.to_string()));
        }
        let build = self.build(self.config)?;
        let programs = Programs::of(self.config, Some(REDUCED))?;
        let network = programs.network(self.options.kind, &build)?;
        let done = self.run(&programs, &network, None)?;
        Ok(Compilation { shortage: Some(shortage), ..done })
    }

    /// The shipped layouts, on their own meshes, whose arguments and results fit.
    fn fitting(&self) -> Result<Vec<(String, i64)>> {
        let capacity = self.machine.capacity.unwrap_or(i64::MAX);
        let programs = Programs::of(self.config, self.options.layers)?;
        let mut found = Vec::new();
        for layout in shipped_layouts() {
            let config = Config { layout: layout.into(), mesh: None, ..self.config.clone() };
            let build = self.build(&config);
            // A mesh that these devices do not make up, or a size that does not fit it, is no offer.
            let Some(network) = build.ok().and_then(|b| programs.network(self.options.kind, &b).ok()) else { continue };
            let needed = needed(&network);
            if needed <= capacity && network.program.devices() == self.machine.devices.len() {
                found.push((layout.to_string(), needed));
            }
        }
        found.sort_by_key(|(_, bytes)| *bytes);
        Ok(found)
    }
}

/// Whether the compiler says so, now or in an earlier compilation.
fn is_out_of_memory(error: &PipelineError) -> bool {
    let message = match error {
        PipelineError::Runtime(RuntimeError::Plugin(e)) => e.to_string(),
        PipelineError::Refused { message, .. } => message.clone(),
        _ => return false,
    };
    ["RESOURCE_EXHAUSTED", "Ran out of memory", "out of memory"].iter().any(|words| message.contains(words))
}
