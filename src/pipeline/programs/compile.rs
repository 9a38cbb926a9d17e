//! `ltx2 compile`: compiles a program of a configuration for devices that need not be present, and analyses the
//! optimized module.

use crate::pipeline::plan::layouts::{RankingDevices, needed};
use crate::pipeline::plan::memory::{Limits, io};
use crate::pipeline::plan::run_plan::RunPlan;
use crate::pipeline::plan::setup;
use crate::pipeline::plan::stream::{Decision, Misfit, SearchBound, StreamChoice, choose, find};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::build::{ProgramKind, Programs, warn_once};
use super::executor::warn_kernel_rejected;
use crate::analysis::{self, Module, Predicted, Report};
use crate::atomic_file::write_atomically;
use crate::config::{Config, WeightStreaming, is_shipped_layout, shipped_layouts};
use crate::hlo::DeviceMesh;
use crate::models::Network;
use crate::nn::{Build, Streaming, ValuePlacement};
use crate::pipeline::error::{PipelineError, Result};
use crate::pjrt::{CompiledMemory, PjrtError};
use crate::runtime::platforms::spec;
use crate::runtime::{
    CompileKey, CompileOutcome, Compiled, EngineOptions, ModuleStore, OpenTarget, RuntimeError, StoredModule, Target,
};
use crate::weights::Component;

/// Number of transformer blocks that are compiled if the program with all blocks does not fit in device memory.
const REDUCED: usize = 2;

/// Selects the program to compile, its target devices, and where the results are stored.
#[derive(Clone, Debug)]
pub struct ProgramCompileOptions<'a> {
    pub target: Target,
    pub kind: ProgramKind,
    /// Number of transformer blocks. `None`: all.
    pub layers: Option<usize>,
    /// Folder that receives the program, its optimized module, and a text listing of that module.
    pub dump: Option<&'a Path>,
    /// Folder of the compile cache in which the executable is saved. If this is set and the host has the target's GPUs,
    /// the program is compiled on these GPUs.
    pub save: Option<&'a Path>,
    /// Store of optimized modules. A stored module is analysed without compiling; a newly compiled module is added.
    pub modules: Option<&'a ModuleStore>,
}

/// An executable saved in the compile cache.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
pub(crate) struct Saved {
    pub(crate) path: PathBuf,
    /// Size of the file in bytes.
    pub(crate) bytes: usize,
}

/// A compiled program and its analysis; all sizes are per device.
pub struct Compilation {
    pub kind: ProgramKind,
    /// Hashes of everything that the optimized module depends on. `None`: no module store is used.
    pub(crate) key: Option<CompileKey>,
    /// Hash of the program. A run of the same configuration on the same devices executes a program with this hash.
    pub hash: String,
    /// Folder or preset of the model.
    pub(crate) model: String,
    /// Name or file of the layout.
    pub(crate) layout: String,
    pub(crate) mesh: DeviceMesh,
    /// Number of transformer blocks that were compiled.
    pub(crate) layers: usize,
    pub memory: Memory,
    /// Bytes of arguments and results per device for the program with all blocks, and the number of all blocks.
    pub(crate) whole: (i64, usize),
    /// Analysis of the module: collectives, operation counts, copies, predicted times.
    pub report: Report,
    pub(crate) placements: Vec<ValuePlacement>,
    /// Notes for the user: dimensions that the layout could not shard, and why the executable was not saved.
    pub(crate) notes: Vec<String>,
    /// Compilation time in seconds.
    pub seconds: f64,
    /// Entry in the compile cache. `None`: the executable was not saved.
    pub(crate) saved: Option<Saved>,
    /// Memory needed and available if the program does not fit in device memory. `None`: it fits. If the program with
    /// all blocks could not be compiled, the other fields describe a program with fewer blocks.
    pub(crate) shortage: Option<Shortage>,
}

impl Compilation {
    /// Returns the predicted time of a step with all blocks, extrapolated from the compiled blocks. `None`: the chip is
    /// unknown.
    pub fn predicted_all(&self) -> Option<Predicted> {
        let more = self.whole.1 as f64 - self.layers as f64;
        Some(self.report.predicted?.with(more, &self.report.predicted_layer?))
    }
}

/// Memory per device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
pub struct Memory {
    pub(crate) arguments: i64,
    /// Arguments in the memory of the host, which the other figures do not include.
    #[serde(default)]
    pub(crate) host_arguments: i64,
    /// Results, including those that reuse the memory of arguments.
    pub(crate) outputs: i64,
    /// Intermediate buffers.
    pub temporaries: i64,
    /// Machine code.
    pub(crate) generated_code: i64,
    /// Bytes of results that reuse the memory of arguments.
    pub(crate) aliased: i64,
    /// Memory needed to run the program: arguments, results, temporaries and machine code. Results that reuse the
    /// memory of arguments are counted once.
    pub(crate) total: i64,
    /// Memory capacity of the device; null for a CPU.
    pub(crate) capacity: Option<i64>,
}

impl Memory {
    fn from_compiled(m: CompiledMemory, capacity: Option<i64>) -> Self {
        Memory {
            arguments: m.arguments,
            host_arguments: m.host_arguments,
            outputs: m.outputs,
            temporaries: m.temporaries,
            generated_code: m.generated_code,
            aliased: m.aliased,
            total: m.arguments + m.outputs - m.aliased + m.temporaries + m.generated_code,
            capacity,
        }
    }
}

/// Memory needed and available for a program that does not fit in device memory.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
pub(crate) struct Shortage {
    /// Minimum number of bytes needed per device.
    pub(crate) needed: i64,
    /// Bytes available per device.
    pub(crate) capacity: i64,
    /// Text that says what `needed` includes.
    pub(crate) what: String,
    /// Names of the shipped layouts with which arguments and results fit on these devices, with the bytes per device.
    pub(crate) fitting: Vec<(String, i64)>,
}

impl std::fmt::Display for Shortage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let gib = |bytes: i64| bytes as f64 / f64::from(1 << 30);
        write!(
            f,
            "{} need {:.2} GiB per device, which has {:.2} GiB; ",
            self.what,
            gib(self.needed),
            gib(self.capacity)
        )?;
        let fitting: Vec<String> =
            self.fitting.iter().map(|(name, bytes)| format!("{name} ({:.2} GiB)", gib(*bytes))).collect();
        match fitting.is_empty() {
            true => f.write_str("no shipped layout fits on these devices; use more devices"),
            false => write!(f, "shipped layouts that would fit: {}", fitting.join(", ")),
        }
    }
}

/// Returns the paths of the three files that [`ProgramCompileOptions::dump`] requests: the program, its optimized
/// module, and a text listing of that module.
pub(crate) fn dump_files(folder: &Path, kind: ProgramKind) -> [PathBuf; 3] {
    ["mlir", "optimized.pb", "optimized.txt"].map(|suffix| folder.join(format!("{}.{suffix}", kind.name())))
}

/// Compiles a program of a configuration, or reads its optimized module from [`ProgramCompileOptions::modules`], and
/// analyses it. If the program does not fit in device memory, its executable is not saved.
///
/// # Errors
/// Returns an error if the configuration, the model or the layout is invalid, or if the compiler rejects the program,
/// now or in an earlier compilation. A transformer program that does not fit in device memory is compiled with fewer
/// blocks, and `Compilation::shortage` is set; any other program that does not fit is an error.
pub fn compile(config: &Config, options: &ProgramCompileOptions) -> Result<Compilation> {
    let mut plan = RunPlan::of_programs(config, options.layers)?;
    plan.programs.check_headers(config, options.kind)?;
    let machine = if options.save.is_some() { options.target.open_present() } else { options.target.open() };
    let machine = machine.map_err(RuntimeError::from)?;
    place(&mut plan, &machine)?;
    let RunPlan { config, programs, .. } = &plan;
    if tracing::enabled!(tracing::Level::WARN) {
        warn_once(unmatched_patterns(config, &machine)?);
    }
    CompileJob { config, options, machine: &machine, compiles: true, refused: false, streaming: None }
        .compilation(programs)
}

/// Returns a warning for each tensor pattern of the configuration's layout that matches no tensor of its programs; none
/// for a shipped layout.
pub(crate) fn unmatched_patterns(config: &Config, machine: &OpenTarget) -> Result<Vec<String>> {
    if is_shipped_layout(&config.layout) {
        return Ok(Vec::new());
    }
    let build = setup::build_for(config, machine.devices.len(), &machine.toolchain())?;
    Programs::from_config(config, None)?.unmatched(&build)
}

/// Same as [`compile`], but only analyses a stored module and never compiles.
///
/// # Errors
/// Returns the errors of [`compile`], or [`PipelineError::NotCompiled`] if no module is stored.
pub fn analyse(config: &Config, options: &ProgramCompileOptions, machine: &OpenTarget) -> Result<Compilation> {
    let RunPlan { config, programs, .. } = &planned(config, options.layers, machine)?;
    CompileJob { config, options, machine, compiles: false, refused: false, streaming: None }.compilation(programs)
}

/// Returns the key under which the module store holds a configuration's program: hashes of everything that the
/// optimized module depends on. With `runtime.stream: auto`, the program streams the weights that a benchmark of the
/// configuration streams.
pub(crate) fn key(
    config: &Config,
    options: &ProgramCompileOptions,
    machine: &OpenTarget,
    modules: &ModuleStore,
) -> Result<CompileKey> {
    let RunPlan { config, programs, .. } = &planned(config, options.layers, machine)?;
    let job = CompileJob { config, options, machine, compiles: false, refused: false, streaming: None };
    let decision = job.decision(programs)?;
    let job = CompileJob { streaming: decision.and_then(|decision| decision.streaming()), ..job };
    job.key(&job.network(programs)?, modules)
}

/// Plans the programs of a configuration for a target's devices.
pub(crate) fn planned(config: &Config, layers: Option<usize>, machine: &OpenTarget) -> Result<RunPlan> {
    let mut plan = RunPlan::of_programs(config, layers)?;
    place(&mut plan, machine)?;
    Ok(plan)
}

fn place(plan: &mut RunPlan, machine: &OpenTarget) -> Result<()> {
    let (toolchain, chip) = (machine.toolchain(), machine.target.chip());
    let count = machine.devices.len();
    plan.place(RankingDevices { toolchain: &toolchain, count, capacity: machine.capacity, chip: chip.as_ref() })
}

struct CompileJob<'a> {
    config: &'a Config,
    options: &'a ProgramCompileOptions<'a>,
    machine: &'a OpenTarget,
    /// Whether to compile the program if no optimized module is stored.
    compiles: bool,
    /// Whether the compiler has rejected the attention kernel; programs are then built without it.
    refused: bool,
    /// Weights that are streamed with `runtime.stream: auto`. `None`: no weights, or `runtime.stream` is not `auto`.
    streaming: Option<Streaming>,
}

struct BuiltModule {
    module: StoredModule,
    key: Option<CompileKey>,
    executable: Option<Compiled>,
}

impl CompileJob<'_> {
    /// Compiles the program as a run does: with `runtime.stream: auto`, streams weights if the run does not fit otherwise.
    fn compilation(&self, programs: &Programs) -> Result<Compilation> {
        let decision = self.decision(programs)?;
        let Some(Decision { choice: StreamChoice::Streamed(mut resident), streamed: Some((memory, networks)), .. }) =
            decision
        else {
            return self.attempt(programs);
        };
        let network = |kind| find(&networks, kind);
        let (mut temporaries, mut bound) = (BTreeMap::new(), SearchBound::default());
        loop {
            let job = CompileJob { streaming: Some(setup::streamed(resident)), ..*self };
            let mut done = job.attempt(programs)?;
            if done.shortage.is_none() {
                done.notes.push(format!(
                    "runtime.stream: auto: not all weights fit in device memory; {resident} of {} transformer blocks stay \
                     there, all other layers are streamed from host memory",
                    programs.layers()
                ));
                return Ok(done);
            }
            let is_compiled = done.layers == programs.layers();
            // Counts prefetched weights twice, so that the next choice needs less.
            if is_compiled {
                let own = network(self.options.kind).map_or(0, io);
                temporaries.insert(self.options.kind, own + usize::try_from(done.memory.temporaries).unwrap_or(0));
            }
            let misfit = if is_compiled { Misfit::Compiled } else { Misfit::OutOfMemory };
            let most = bound.next(self.config, programs.layers(), Some(resident), misfit);
            match most.and_then(|most| choose(self.config, programs, &memory, network, &temporaries, most)) {
                Some(fewer) => resident = fewer,
                None => return Ok(done),
            }
        }
    }

    /// Decides which weights the run streams. `None`: `runtime.stream` is not `auto`, or the platform cannot stream
    /// weights.
    fn decision(&self, programs: &Programs) -> Result<Option<Decision>> {
        if self.config.runtime.stream != WeightStreaming::Auto || !spec(self.machine.target.platform()).streams_weights
        {
            return Ok(None);
        }
        let limits = Limits::of_capacity(self.config, self.machine.capacity);
        Decision::new(self.config, programs, &self.build(self.config)?, limits).map(Some)
    }

    /// Returns the bytes that the program may use on each device.
    fn capacity(&self) -> Option<i64> {
        Limits::of_capacity(self.config, self.machine.capacity).device.map(|bytes| bytes as i64)
    }

    fn attempt(&self, programs: &Programs) -> Result<Compilation> {
        let (options, capacity) = (self.options, self.capacity());
        let network = self.network(programs)?;
        let needed = needed(&network);
        match capacity.filter(|capacity| needed > *capacity) {
            None => match self.run(programs, &network, options.save) {
                Err(e) if is_out_of_memory(&e) => {
                    let what = format!("arguments and results of {} (plus temporaries)", options.kind.name());
                    tracing::debug!("{e}");
                    self.reduced(Shortage { needed, capacity: capacity.unwrap_or(0), what, fitting: vec![] })
                }
                Err(e) => match self.build(self.config)?.without_attention_kernel() {
                    Some(_) if !self.refused => match (CompileJob { refused: true, ..*self }).attempt(programs) {
                        Ok(without) => {
                            warn_kernel_rejected(options.kind.name(), &e);
                            Ok(without)
                        }
                        Err(_) => Err(e),
                    },
                    _ => Err(e),
                },
                Ok(done) => match capacity.filter(|capacity| done.memory.total > *capacity) {
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

    /// Returns the program, sharded over all devices of the target.
    fn network(&self, programs: &Programs) -> Result<Network> {
        let (config, target) = (self.config, &self.machine.target);
        let (slices, named) = (target.slices(), config.slices()?);
        if slices != named && spec(target.platform()).has_slices {
            let message = format!("{target} has {slices} slice(s), but the mesh has dcn.data = {named}");
            return Err(PipelineError::Usage(format!("{message}; pass --mesh dcn.data={slices},…")));
        }
        let build = self.build(config)?;
        let (used, all) = (build.layout.mesh.devices(), self.machine.devices.len());
        if used < all {
            let message = format!(
                "layout {} uses {used} of the {all} devices of {target}; pass a --mesh that uses all of them",
                config.layout
            );
            return Err(PipelineError::Usage(message));
        }
        programs.network(self.options.kind, &build)
    }

    fn build(&self, config: &Config) -> Result<Build> {
        let build = setup::build_for(config, self.machine.devices.len(), &self.machine.toolchain())?;
        let build = build.without_attention_kernel().filter(|_| self.refused).unwrap_or(build);
        Ok(Build { streaming: self.streaming.or(build.streaming), ..build })
    }

    fn engine_options(&self, save: Option<&Path>) -> EngineOptions {
        EngineOptions { compile_cache: save.map(Path::to_path_buf), ..setup::engine_options(self.config) }
    }

    fn key(&self, network: &Network, modules: &ModuleStore) -> Result<CompileKey> {
        let key = modules.key(self.machine, &network.program, &self.engine_options(None));
        Ok(key.map_err(RuntimeError::from)?)
    }

    /// Reads the optimized module of a program from the store, or compiles the program.
    fn module(&self, network: &Network, save: Option<&Path>) -> Result<BuiltModule> {
        let compiled = || self.compiled(network, save);
        let Some(modules) = self.options.modules else {
            let (module, executable) = compiled()?;
            return Ok(BuiltModule { module, key: None, executable: Some(executable) });
        };
        let key = self.key(network, modules)?;
        let path = modules.path(&key);
        match modules.get(&key).map_err(RuntimeError::from)? {
            Some(CompileOutcome::Module(module)) if save.is_none() => {
                if self.compiles {
                    tracing::info!(
                        "{} is not recompiled: using the stored module {}",
                        self.options.kind.name(),
                        path.display()
                    );
                }
                return Ok(BuiltModule { module, key: Some(key), executable: None });
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
        Ok(BuiltModule { module, key: Some(key), executable: Some(executable) })
    }

    fn compiled(&self, network: &Network, save: Option<&Path>) -> Result<(StoredModule, Compiled)> {
        let target = &self.machine.target;
        tracing::info!("compiling {} for {target}", self.options.kind.name().replace('_', " "));
        let started = Instant::now();
        let fail = |e: PjrtError| PipelineError::from(RuntimeError::from(e));
        let compiled = self.machine.compile(&network.program, &self.engine_options(save))?;
        let seconds = started.elapsed().as_secs_f64();
        let (optimized, memory) = (compiled.optimized_program().map_err(fail)?, compiled.memory().map_err(fail)?);
        Ok((StoredModule { optimized, memory, seconds }, compiled))
    }

    /// Compiles the program or reads its stored module, analyses it, and saves the executable if it fits.
    fn run(&self, programs: &Programs, network: &Network, save: Option<&Path>) -> Result<Compilation> {
        let (kind, program) = (self.options.kind, &network.program);
        let dump = self.options.dump.map(|folder| dump_files(folder, kind));
        // Overwrites the files of an earlier attempt: a program may be compiled again without the attention kernel or
        // with fewer blocks.
        let write = |file: &PathBuf, bytes: &[u8]| write_atomically(file, bytes);
        if let Some([text, ..]) = &dump {
            write(text, program.text.as_bytes())?;
        }
        let BuiltModule { module: StoredModule { optimized, memory, seconds }, key, executable } =
            self.module(network, save)?;
        let memory = Memory::from_compiled(memory, self.capacity());
        let keep = |(folder, executable): (&Path, Compiled)| -> std::result::Result<Saved, RuntimeError> {
            let options = self.machine.known_options(program, &self.engine_options(save));
            let entry = self.machine.cache(folder)?.entry(kind.name(), program, &options);
            Ok(Saved { bytes: entry.save(&executable)?, path: entry.path().into() })
        };
        let fits = memory.capacity.is_none_or(|capacity| memory.total <= capacity);
        let mut notes = network.notes.clone();
        let module = Module::decode(&optimized.format, &optimized.bytes)
            .map_err(|e| PipelineError::Input(format!("cannot read the optimized module: {e}")))?;
        let complete = self.machine.is_present() || !module.is_bound_to_device();
        if save.is_some() && !complete {
            notes.push(
                "not saved: cuDNN builds its kernels on the GPU, so an executable compiled without a GPU does not run \
                 on a GPU; the first run on the GPU compiles and saves the program"
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
        let report = analysis::report(&module, &program.mesh.axes, &stacked, chip.as_ref());
        if let Some(chip) = chip.filter(|chip| report.step.host > 0.0 && chip.host_seconds(report.step.host).is_none())
        {
            notes.push(format!(
                "the predicted times exclude {:.2} GB of copies from host memory per step, because the bandwidth of the \
                 host link of chip {} is unknown; set host_bandwidth in a chip file",
                report.step.host / 1e9,
                chip.name
            ));
        }
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
            report,
            placements: network.placements.clone(),
            notes,
            seconds,
            saved,
            shortage: None,
        })
    }

    /// Returns the bytes of arguments and results of the program with all blocks, and the number of all blocks. Builds
    /// that program but does not compile it.
    fn whole(&self, programs: &Programs, network: &Network) -> Result<(i64, usize)> {
        let all = Programs::from_config(self.config, None)?;
        if all.layers() == programs.layers() {
            return Ok((needed(network), all.layers()));
        }
        let network = all.network(self.options.kind, &self.build(self.config)?)?;
        Ok((needed(&network), all.layers()))
    }

    /// Compiles a program with fewer blocks, because the program with all blocks does not fit in device memory.
    fn reduced(&self, shortage: Shortage) -> Result<Compilation> {
        let shortage =
            if shortage.fitting.is_empty() { Shortage { fitting: self.fitting()?, ..shortage } } else { shortage };
        let has_blocks = self.options.kind.declaration().component == Component::Transformer;
        if !has_blocks || self.options.layers.is_some_and(|n| n <= REDUCED) {
            return Err(PipelineError::TooLarge(shortage.to_string()));
        }
        let build = self.build(self.config)?;
        let programs = Programs::from_config(self.config, Some(REDUCED))?;
        let network = programs.network(self.options.kind, &build)?;
        let done = self.run(&programs, &network, None)?;
        Ok(Compilation { shortage: Some(shortage), ..done })
    }

    /// Returns the shipped layouts, on their default meshes, with which arguments and results fit, and the bytes per
    /// device.
    fn fitting(&self) -> Result<Vec<(String, i64)>> {
        let capacity = self.capacity().unwrap_or(i64::MAX);
        let programs = Programs::from_config(self.config, self.options.layers)?;
        let mut found = Vec::new();
        for layout in shipped_layouts() {
            let config = Config { layout: layout.into(), mesh: None, ..self.config.clone() };
            let build = self.build(&config);
            // Skip layouts whose mesh needs another number of devices, or whose mesh axes do not divide the sizes
            // evenly.
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

/// Returns whether the compiler ran out of memory, now or in an earlier compilation.
fn is_out_of_memory(error: &PipelineError) -> bool {
    let message = match error {
        PipelineError::Runtime(RuntimeError::Plugin(e)) => e.to_string(),
        PipelineError::Refused { message, .. } => message.clone(),
        _ => return false,
    };
    ["RESOURCE_EXHAUSTED", "Ran out of memory", "out of memory"].iter().any(|words| message.contains(words))
}
