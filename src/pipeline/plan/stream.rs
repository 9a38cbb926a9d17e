//! Decides for `runtime.stream: auto` whether weights are streamed from host memory and, if so, how many transformer
//! blocks stay in device memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::layouts::{RankingDevices, step_ms};
use super::memory::{BuiltRun, Limits, MemoryPlan, Need, gib};
use super::residency::Keep;
use super::run_plan::RunPlan;
use super::setup;
use crate::config::{Config, WeightStreaming};
use crate::models::Network;
use crate::nn::{Build, Streaming};
use crate::pipeline::error::Result;
use crate::pipeline::programs::build::{ProgramKind, Programs};
use crate::pipeline::programs::executor::{Executor, ParameterMemories};
use crate::runtime::platforms::PlatformSpec;
use crate::runtime::processes::Group;
use crate::runtime::{Engine, Footprint, platforms};
use crate::weights::Component;

/// Divisor that sets the granularity: the number of resident blocks is a multiple of 1/`PARTS` of all blocks, so that
/// small changes of the free memory do not change the programs.
const PARTS: usize = 8;

/// Estimated number of layers whose weights a program prefetches. With all blocks of LTX-2.0 streamed, temporaries grow by
/// the weights of 1.5 blocks for `denoise` and of 4.1 for `prepare` (benchmarks/2026-11-29-h200/stream.txt).
const PREFETCHED_LAYERS: usize = 3;

/// Estimated size of a program's temporaries, without prefetched weights, relative to its largest matmul result. For
/// `denoise` of LTX-2.0 at 768x512x121, the compiler reports 2.0 without a GPU and 3.7 on an H200.
const TEMPORARIES: f64 = 3.0;

/// Maximum number of choices that a search compiles. A transformer takes minutes to compile.
const MAX_COMPILES: usize = 3;

/// Reason why a choice of streamed weights does not fit in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pipeline) enum Misfit {
    /// Parameters, arguments and results alone do not fit, so no program was compiled.
    Parameters,
    /// The compiled programs need too much memory.
    Compiled,
    /// The compiler ran out of memory, so the needs of a program are unknown.
    OutOfMemory,
}

/// Bounds the choices of a search, so that it compiles at most [`MAX_COMPILES`].
#[derive(Default)]
pub(in crate::pipeline) struct SearchBound {
    compiled: usize,
}

impl SearchBound {
    /// Returns the largest number of resident blocks to try next. `None`: no other choice is left. `tried`: resident
    /// blocks of the choice that does not fit; `None`: no weights are streamed.
    pub(in crate::pipeline) fn next(
        &mut self,
        config: &Config,
        blocks: usize,
        tried: Option<usize>,
        misfit: Misfit,
    ) -> Option<usize> {
        self.compiled += usize::from(misfit != Misfit::Parameters);
        if tried == Some(0) || tried.is_some() && config.runtime.resident_blocks.is_some() {
            return None;
        }
        Some(match misfit {
            // The last attempt needs the least memory.
            _ if self.compiled + 1 >= MAX_COMPILES => 0,
            Misfit::OutOfMemory => tried.unwrap_or(blocks) / 2,
            Misfit::Parameters | Misfit::Compiled => tried.map_or(blocks, |tried| tried - 1),
        })
    }
}

/// Search for the largest number of resident blocks with which a run fits in memory. Uses the compiler's figures of the
/// programs that are already compiled.
pub(super) struct StreamSearch<'a> {
    plan: &'a RunPlan,
    is_auto: bool,
    bound: SearchBound,
    /// The run with all layers streamed. `None`: not built yet.
    all_streamed: Option<BuiltRun>,
    /// Bytes that each compiled program needs besides its parameters and prefetched weights.
    temporaries: BTreeMap<ProgramKind, usize>,
    /// Reason why the run without streamed weights does not fit. `None`: not known yet.
    why: Option<String>,
}

impl<'a> StreamSearch<'a> {
    pub(super) fn new(plan: &'a RunPlan, executor: &Executor) -> Self {
        StreamSearch {
            plan,
            is_auto: is_auto(&plan.config, &executor.engine().spec()),
            bound: SearchBound::default(),
            all_streamed: None,
            temporaries: BTreeMap::new(),
            why: None,
        }
    }

    /// Returns the build options for the first choice. With `runtime.stream: auto`, the first choice streams no
    /// weights, even if an earlier request needed streamed weights.
    pub(super) fn first(&self, build: &Build) -> Build {
        Build { streaming: build.streaming.filter(|_| !self.is_auto), ..build.clone() }
    }

    /// Records that a program ran out of device memory when it was compiled.
    pub(super) fn failed(&mut self, program: &str) {
        self.why.get_or_insert_with(|| format!("{program} ran out of device memory when it was compiled"));
    }

    /// Builds the run again with fewer weights in device memory than `tried`, which does not fit. `None`: it cannot fit,
    /// or the configuration does not allow other choices.
    pub(super) fn next(
        &mut self,
        tried: &BuiltRun,
        misfit: Misfit,
        executor: &mut Executor,
    ) -> Result<Option<BuiltRun>> {
        if !self.is_auto {
            return Ok(None);
        }
        let RunPlan { config, programs, .. } = self.plan;
        for need in &tried.memory.needs {
            let Some(work) = need.work else { continue };
            self.temporaries.insert(need.program, work.saturating_sub(prefetched_bytes(programs, &tried.memory, need)));
        }
        if self.why.is_none() {
            self.why = tried.memory.largest().map(|(need, bytes)| tried.memory.describe(need, bytes));
        }
        let build = |resident: usize| Build { streaming: Some(setup::streamed(resident)), ..tried.build.clone() };
        let all_streamed = match self.all_streamed.take() {
            Some(built) => built,
            None => BuiltRun::new(self.plan, executor, build(0), tried.memory.limits)?,
        };
        let resident = tried.build.streaming.map(|streaming| streaming.resident);
        let most = self.bound.next(config, programs.layers(), resident, misfit);
        let network = |kind| all_streamed.network(kind);
        let resident =
            most.and_then(|most| choose(config, programs, &all_streamed.memory, network, &self.temporaries, most));
        if resident == Some(0) {
            return Ok(Some(all_streamed));
        }
        self.all_streamed = Some(all_streamed);
        resident.map(|resident| BuiltRun::new(self.plan, executor, build(resident), tried.memory.limits)).transpose()
    }

    /// Returns the run with all layers streamed. `None`: [`StreamSearch::next`] has not built this run, or has returned
    /// it.
    pub(super) fn all_streamed(&self) -> Option<&BuiltRun> {
        self.all_streamed.as_ref()
    }

    /// Returns component and memory of each parameter that the run reads; empty unless `runtime.stream` is `auto`,
    /// because otherwise the memory of a parameter never changes.
    pub(super) fn memories(&self, built: &BuiltRun) -> ParameterMemories {
        if self.is_auto { built.memories() } else { ParameterMemories::new() }
    }

    /// Describes the choice for the log.
    pub(super) fn describe(&self, built: &BuiltRun, executor: &Executor) -> String {
        let RunPlan { config, programs, .. } = self.plan;
        let network = |kind| built.network(kind);
        let why = self.why.as_deref().unwrap_or_default();
        let resident = built.build.streaming.map(|streaming| streaming.resident);
        let step = || predict(config, programs, network, &built.build, &executor.engine().toolchain().kind);
        describe(programs, &built.memory, resident, why, step)
    }
}

/// Returns whether the memory plan decides which weights are streamed: `runtime.stream` is `auto`, and the platform can
/// stream weights in the configured form of layers.
pub(super) fn is_auto(config: &Config, spec: &PlatformSpec) -> bool {
    config.runtime.stream == WeightStreaming::Auto && spec.streams_weights && !setup::loops_instead(config, spec)
}

/// Describes a choice for the log. `resident`: number of resident transformer blocks; `None`: no weights are streamed.
/// `why`: the program that does not fit without streaming. `step`: returns the predicted time of a step.
fn describe(
    programs: &Programs,
    memory: &MemoryPlan,
    resident: Option<usize>,
    why: &str,
    step: impl FnOnce() -> Option<f64>,
) -> String {
    let Some(resident) = resident else { return "runtime.stream: auto: all weights stay in device memory".into() };
    let step = step().map_or(String::new(), |ms| format!("; predicted step: at least {ms:.0} ms"));
    format!(
        "runtime.stream: auto: streaming weights from host memory ({:.2} GiB per device), because {why}; {resident} of {} \
         transformer blocks stay in device memory{step}",
        memory.host_gib(),
        programs.layers(),
    )
}

/// All programs of a run.
pub(in crate::pipeline) type Networks = Vec<(ProgramKind, Network)>;

/// Choice of the weights to stream, made without compiling.
pub(in crate::pipeline) enum StreamChoice {
    /// No weights are streamed: as far as is known without compiling, all programs fit.
    Resident,
    /// All layers are streamed, except this many transformer blocks.
    Streamed(usize),
    /// No choice fits.
    DoesNotFit,
}

/// A [`StreamChoice`] made before compilation, and the memory figures behind it.
pub(in crate::pipeline) struct Decision {
    pub(in crate::pipeline) choice: StreamChoice,
    /// Description of the program that needs the most memory without streaming.
    why: String,
    /// Memory plan and programs with all layers streamed. `None`: nothing needs to be streamed.
    pub(in crate::pipeline) streamed: Option<(MemoryPlan, Networks)>,
}

impl Decision {
    /// Decides which weights a run streams if `runtime.stream` is `auto`. `build`: options without streaming.
    ///
    /// # Errors
    /// Returns an error if a program cannot be built.
    pub(in crate::pipeline) fn new(
        config: &Config,
        programs: &Programs,
        build: &Build,
        limits: Limits,
    ) -> Result<Self> {
        let (memory, _) = built(config, programs, build, limits)?;
        let why = memory.largest().map(|(need, bytes)| memory.describe(need, bytes)).unwrap_or_default();
        if memory.keep(config.runtime.residency).is_some() {
            return Ok(Decision { choice: StreamChoice::Resident, why, streamed: None });
        }
        let build = Build { streaming: Some(setup::streamed(0)), ..build.clone() };
        let (memory, networks) = built(config, programs, &build, limits)?;
        let network = |kind| find(&networks, kind);
        let resident = choose(config, programs, &memory, network, &BTreeMap::new(), programs.layers());
        let choice = resident.map_or(StreamChoice::DoesNotFit, StreamChoice::Streamed);
        Ok(Decision { choice, why, streamed: Some((memory, networks)) })
    }

    /// Returns the weights that are streamed. `None`: no weights are streamed.
    pub(in crate::pipeline) fn streaming(&self) -> Option<Streaming> {
        match self.choice {
            StreamChoice::Streamed(resident) => Some(setup::streamed(resident)),
            StreamChoice::Resident | StreamChoice::DoesNotFit => None,
        }
    }
}

fn built(config: &Config, programs: &Programs, build: &Build, limits: Limits) -> Result<(MemoryPlan, Networks)> {
    let write = |kind| Ok((kind, programs.network(kind, build)?));
    let networks = programs.kinds().map(write).collect::<Result<Networks>>()?;
    let each = networks.iter().map(|(kind, network)| (*kind, network));
    Ok((MemoryPlan::for_programs(config, each, limits), networks))
}

/// Returns the program of the kind `kind`. `None`: the run does not execute it.
pub(in crate::pipeline) fn find(networks: &Networks, kind: ProgramKind) -> Option<&Network> {
    networks.iter().find(|(own, _)| *own == kind).map(|(_, network)| network)
}

/// Chooses, before any program is compiled, which weights a run on opened devices streams, and logs the choice of
/// `runtime.stream: auto`. All processes of a run make the same choice.
pub(in crate::pipeline) fn initial(
    plan: &RunPlan,
    engine: &Engine,
    build: &Build,
    group: Option<&Arc<Group>>,
) -> Result<Option<Streaming>> {
    let RunPlan { config, programs, .. } = plan;
    if !is_auto(config, &engine.spec()) {
        return Ok(build.streaming);
    }
    let limits = Limits::new(config, engine, Footprint::default(), build, group)?;
    let decision = Decision::new(config, programs, build, limits)?;
    let streaming = decision.streaming();
    let (Some(Streaming { resident, .. }), Some(all_streamed)) = (streaming, decision.streamed) else {
        return Ok(None);
    };
    let build = Build { streaming, ..build.clone() };
    let (memory, networks) = if resident == 0 { all_streamed } else { built(config, programs, &build, limits)? };
    let network = |kind| find(&networks, kind);
    let step = || predict(config, programs, network, &build, &engine.toolchain().kind);
    tracing::info!("{}", describe(programs, &memory, Some(resident), &decision.why, step));
    Ok(streaming)
}

/// Returns the number of transformer blocks that should stay in device memory, at most `most`. `None`: no choice fits.
/// `runtime.resident_blocks` is chosen regardless of `most`. `all_streamed`: the memory of the run with all layers
/// streamed, whose programs `network` returns. `temporaries`: bytes that compiled programs need besides their parameters
/// and prefetched weights.
pub(in crate::pipeline) fn choose<'n>(
    config: &Config,
    programs: &Programs,
    all_streamed: &MemoryPlan,
    network: impl Fn(ProgramKind) -> Option<&'n Network>,
    temporaries: &BTreeMap<ProgramKind, usize>,
    most: usize,
) -> Option<usize> {
    let (blocks, residency) = (programs.layers(), config.runtime.residency);
    let choices: Vec<usize> = match config.runtime.resident_blocks {
        Some(resident) => vec![resident.min(blocks)],
        None => (0..=PARTS).rev().map(|part| blocks * part / PARTS).filter(|resident| *resident <= most).collect(),
    };
    // Estimates the memory of the run with `resident` transformer blocks in device memory.
    let keep = |resident: usize| {
        let mut memory = all_streamed.clone();
        if let Some(of) = memory.components.get_mut(Component::Transformer.folder()) {
            let moved = of.host * resident / blocks;
            *of = Footprint { device: of.device + moved, host: of.host - moved };
        }
        let work = |need: &Need| {
            let estimated = || need.io + network(need.program).map_or(0, estimate);
            Some(
                temporaries.get(&need.program).copied().unwrap_or_else(estimated)
                    + prefetched_bytes(programs, &memory, need),
            )
        };
        let works: Vec<_> = memory.needs.iter().map(work).collect();
        memory.needs.iter_mut().zip(works).for_each(|(need, work)| need.work = work);
        memory.keep(residency)
    };
    let find = |is: fn(Option<Keep>) -> bool| choices.iter().copied().find(|resident| is(keep(*resident)));
    let found = find(|kept| kept == Some(Keep::All)).or_else(|| find(|kept| kept.is_some()));
    // An estimate may be too high, so the last choice is compiled unless its parameters alone do not fit.
    found.or_else(|| choices.last().copied().filter(|_| all_streamed.keep(residency).is_some()))
}

/// Describes, without compiling, how much memory a run needs on each device of a kind, and which weights
/// `runtime.stream` moves to host memory.
///
/// # Errors
/// Returns an error if the devices or the model do not support the configuration.
pub(crate) fn describe_fit(config: &Config, devices: RankingDevices) -> Result<String> {
    let mut plan = RunPlan::of_programs(config, None)?;
    plan.place(devices)?;
    let RunPlan { config, programs, .. } = &plan;
    let limits = Limits::of_capacity(config, devices.capacity);
    let build = setup::build_for(config, devices.count, devices.toolchain)?;
    let memory = estimated(config, programs, &build, limits)?;
    let Some((need, bytes)) = memory.largest() else { return Ok(String::new()) };
    let usable = limits.device.map_or(String::new(), |bytes| format!(" of {:.2} GiB", gib(bytes)));
    let text = format!("memory: {} needs about {:.2} GiB{usable} per device", need.program.name(), gib(bytes));
    if memory.keep(config.runtime.residency).is_some() {
        return Ok(text);
    }
    if !is_auto(config, &platforms::spec_by_name(&devices.toolchain.platform)) {
        return Ok(format!("{text}, which does not fit"));
    }
    let Decision { choice, streamed, .. } = Decision::new(config, programs, &build, limits)?;
    let host = streamed.map_or(0.0, |(memory, _)| memory.host_gib());
    let blocks = programs.layers();
    Ok(match choice {
        StreamChoice::Resident => format!("{text}; whether this fits is known after compiling"),
        StreamChoice::Streamed(resident) => format!(
            "{text}; runtime.stream: auto keeps {resident} of {blocks} transformer blocks in device memory and streams the \
             weights of other layers from host memory ({host:.1} GiB with all blocks)"
        ),
        StreamChoice::DoesNotFit => format!("{text}, which does not fit even with runtime.stream"),
    })
}

/// Returns the memory plan of a run with estimated temporaries.
fn estimated(config: &Config, programs: &Programs, build: &Build, limits: Limits) -> Result<MemoryPlan> {
    let (mut memory, networks) = built(config, programs, build, limits)?;
    let works: Vec<_> =
        memory.needs.iter().zip(&networks).map(|(need, (_, network))| need.io + estimate(network)).collect();
    memory.needs.iter_mut().zip(works).for_each(|(need, work)| need.work = Some(work));
    Ok(memory)
}

/// Returns whether a run is estimated to fit in four fifths of the device's memory without streamed weights. The rest is
/// for temporaries that the estimate misses: with the chosen form of layers, weights cannot be streamed later.
///
/// # Errors
/// Returns an error if a program cannot be built.
pub(super) fn fits_unstreamed(config: &Config, programs: &Programs, build: &Build, limits: Limits) -> Result<bool> {
    let limits = Limits { device: limits.device.map(|bytes| bytes / 5 * 4), ..limits };
    Ok(estimated(config, programs, build, limits)?.keep(config.runtime.residency).is_some())
}

/// Returns the estimated bytes of weights that a program prefetches.
fn prefetched_bytes(programs: &Programs, memory: &MemoryPlan, need: &Need) -> usize {
    let layers = programs.stacked(need.program).ok().and_then(|stacks| stacks.first().copied()).unwrap_or(1);
    let streamed: usize = need.components.iter().filter_map(|c| memory.components.get(c)).map(|of| of.host).sum();
    PREFETCHED_LAYERS.min(layers) * streamed / layers.max(1)
}

/// Estimates the bytes of a program's temporaries on one device from its largest matmul result; 0 without matmuls.
fn estimate(network: &Network) -> usize {
    let results = network.program.work.matmuls.iter().map(|matmul| matmul.bytes[2]);
    (results.fold(0.0, f64::max) * TEMPORARIES) as usize
}

/// Predicts the milliseconds of a step of the first denoising loop on devices of a kind. `None`: the run has no
/// denoising loop, or the chip is unknown.
fn predict<'n>(
    config: &Config,
    programs: &Programs,
    network: impl Fn(ProgramKind) -> Option<&'n Network>,
    build: &Build,
    device_kind: &str,
) -> Option<f64> {
    let chip = setup::chip(config, device_kind).ok()?;
    let (kind, _) = programs.loops(config.sampler.steps).into_iter().next()?;
    Some(step_ms(network(kind)?, build, &chip, programs.layers()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of resident blocks that is chosen for the LTX-2.0 preset with `gib` GiB of device memory.
    fn chosen(gib: f64, set: &[&str], temporaries: &[(ProgramKind, f64)], most: usize) -> Option<usize> {
        let bytes = |gib: f64| (gib * f64::from(1 << 30)) as usize;
        let config = Config::load("ltx2", set.iter().copied()).expect("loads");
        let programs = Programs::from_config(&config, None).expect("programs");
        let build = setup::build(&config, 1, "cuda", "NVIDIA H200").expect("a build");
        let build = Build { streaming: Some(setup::streamed(0)), ..build };
        let write = |kind| (kind, programs.network(kind, &build).expect("builds"));
        let networks: Vec<_> = programs.kinds().map(write).collect();
        let each = networks.iter().map(|(kind, network)| (*kind, network));
        let limits = Limits { device: Some(bytes(gib)), host: None };
        let memory = MemoryPlan::for_programs(&config, each, limits);
        let network = |kind| find(&networks, kind);
        let temporaries = temporaries.iter().map(|(kind, gib)| (*kind, bytes(*gib))).collect();
        choose(&config, &programs, &memory, network, &temporaries, most)
    }

    #[test]
    fn as_many_blocks_stay_as_fit_together_with_all_other_weights() {
        // The transformer takes 35.2 GiB, and its program about 3 GiB more.
        assert_eq!(chosen(80.0, &[], &[], 48), Some(48));
        let few = chosen(20.0, &[], &[], 48).expect("fits");
        assert!((12..=24).contains(&few), "{few}");
        assert_eq!(chosen(1.0, &[], &[], 48), None);
        assert_eq!(chosen(20.0, &["runtime.resident_blocks=7"], &[], 0), Some(7));
        // A compiled program needs more than estimated.
        let more = chosen(20.0, &[], &[(ProgramKind::Denoise, 12.0)], few - 1).expect("fits");
        assert!(more < few, "{more} of {few}");
        // Estimates do not allow more than the bound.
        assert_eq!(chosen(80.0, &[], &[], 24), Some(24));
    }

    /// Returns the maximum number of resident blocks in each choice of a search in which no choice fits. The first of
    /// `misfits` is the misfit of the run without streamed weights, the others are those of the choices.
    fn bounds(set: &[&str], misfits: &[Misfit]) -> Vec<usize> {
        let config = Config::load("ltx2", set.iter().copied()).expect("loads");
        let (mut bound, mut tried, mut all) = (SearchBound::default(), None, Vec::new());
        for misfit in misfits {
            let Some(most) = bound.next(&config, 48, tried, *misfit) else { break };
            all.push(most);
            tried = Some(most);
        }
        all
    }

    #[test]
    fn search_compiles_at_most_three_choices() {
        use Misfit::{Compiled, OutOfMemory, Parameters};
        assert_eq!(bounds(&[], &[OutOfMemory; 9]), [24, 0]);
        assert_eq!(bounds(&[], &[Compiled; 9]), [48, 0]);
        // The run without streamed weights was not compiled.
        assert_eq!(bounds(&[], &[&[Parameters][..], &[OutOfMemory; 9]].concat()), [48, 24, 0]);
        assert_eq!(bounds(&[], &[&[Parameters][..], &[Compiled; 9]].concat()), [48, 47, 0]);
        assert_eq!(bounds(&["runtime.resident_blocks=7"], &[OutOfMemory; 9]), [24]);
    }

    /// Benchmarks identify a program by the hash of its text, so the choice must change the text.
    #[test]
    fn program_depends_on_the_choice_of_streamed_weights() {
        let hash = |gib: usize| {
            let config = Config::load("ltx2", std::iter::empty::<&str>()).expect("loads");
            let programs = Programs::from_config(&config, None).expect("programs");
            let build = setup::build(&config, 1, "cuda", "NVIDIA H200").expect("a build");
            let limits = Limits { device: Some(gib << 30), host: None };
            let streaming = Decision::new(&config, &programs, &build, limits).expect("a decision").streaming();
            let network = programs.network(ProgramKind::Denoise, &Build { streaming, ..build }).expect("builds");
            (streaming.is_some(), network.program.hash())
        };
        let [(whole, one), (few, other)] = [hash(139), hash(20)];
        assert!(!whole && few && one != other);
    }

    #[test]
    fn memory_fit_is_described_without_devices() {
        let target: crate::runtime::Target = "cuda:h200:1x1x1".parse().expect("a target");
        let (toolchain, count, capacity) = target.described();
        let describe = |set: &[&str]| {
            let config = Config::load("ltx2", set.iter().copied()).expect("loads");
            describe_fit(&config, RankingDevices { toolchain: &toolchain, count, capacity, chip: None })
                .expect("a text")
        };
        let whole = describe(&[]);
        assert!(
            whole.starts_with("memory: denoise needs about 3") && whole.ends_with(" GiB of 139.70 GiB per device"),
            "{whole}"
        );
        let few = chosen(15.0, &[], &[], 48).expect("fits");
        let streamed = describe(&["runtime.memory_limit=15"]);
        assert!(
            streamed.contains(&format!("; runtime.stream: auto keeps {few} of 48 transformer blocks")),
            "{streamed}"
        );
        let off = describe(&["runtime.memory_limit=15", "runtime.stream=off"]);
        assert!(off.ends_with(" of 15.00 GiB per device, which does not fit"), "{off}");
        let none = describe(&["runtime.memory_limit=1"]);
        assert!(none.ends_with(", which does not fit even with runtime.stream"), "{none}");
    }
}
