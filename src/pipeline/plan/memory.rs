//! Plans the memory of a run while its parameters load: compares the memory that its programs need with the memory that
//! the devices and the host report as free. Uses the compiler's figures or, before a program is compiled, the sizes of
//! its arguments and results.

use super::setup;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use super::layouts::needed;
use super::residency::{Keep, work};
use super::resolved::ResolvedConfig;
use super::run_plan::RunPlan;
use super::stream::{Misfit, StreamSearch};
use crate::config::{Chain, Config, NumFrames, Residency, Tiling, WeightStreaming, WeightType, shipped_layouts};
use crate::host;
use crate::models::Network;
use crate::nn::{Build, Streaming};
use crate::pipeline::error::{PipelineError, Result, one_line};
use crate::pipeline::programs::build::{ProgramKind, Programs, added_matrices, parameters};
use crate::pipeline::programs::executor::{Executor, MemoryOutcome, ParameterMemories};
use crate::runtime::processes::Group;
use crate::runtime::{Engine, Footprint, MemoryPhase, RuntimeError, SpanKind, device_bytes};

/// Fraction of the free memory that is kept in reserve, because allocators fragment and the results of a program stay
/// in memory until the next program runs.
const SPARE: f64 = 0.03;

/// Bytes of the host's free memory that are kept in reserve for the plugin, its compiler and the staging memory of loads:
/// a run without streaming takes 5.6 GiB (H200).
const HOST_SPARE: usize = 6 << 30;

/// Smallest fraction of the host's free memory that is kept in reserve.
const HOST_SPARE_FRACTION: f64 = 0.1;

/// If all parameters take at most this fraction of the usable memory, they are loaded during compilation. The rest is
/// left for the programs, whose needs are not known yet, and for compilers that try kernels on the device.
const PRELOAD_FRACTION: f64 = 0.7;

/// Value used instead of [`PRELOAD_FRACTION`] if all programs come from the compile cache.
const PRELOAD_FRACTION_CACHED: f64 = 0.92;

/// Memory that one program needs on a device, in bytes.
#[derive(Clone, Debug)]
pub(super) struct Need {
    pub(super) program: ProgramKind,
    /// Components whose parameters the program reads.
    pub(super) components: BTreeSet<&'static str>,
    /// Bytes of everything except parameters. `None`: unknown, e.g. because the program is not compiled yet.
    pub(super) work: Option<usize>,
    /// Bytes of arguments and results, without parameters.
    pub(super) io: usize,
}

impl Need {
    /// Returns the memory need of a program that has not been compiled; `work` is unknown.
    fn for_program(program: ProgramKind, network: &Network) -> Self {
        let components = network.params.iter().map(|p| p.component).collect();
        Need { program, components, work: None, io: io(network) }
    }

    /// Returns the memory that the program needs in addition to its weights, in bytes. Before compilation, this is the
    /// size of the other arguments and of the results.
    fn work_bytes(&self) -> usize {
        self.work.unwrap_or(self.io)
    }
}

/// Usable memory for each device, in bytes. `None`: unknown.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::pipeline) struct Limits {
    /// Memory of the device.
    pub(in crate::pipeline) device: Option<usize>,
    /// Memory of the host that pinned parameters may take.
    pub(in crate::pipeline) host: Option<usize>,
}

/// Memory that a run needs, by program and by component.
#[derive(Clone, Debug)]
pub(crate) struct MemoryPlan {
    config: ResolvedConfig,
    pub(super) needs: Vec<Need>,
    /// Bytes of parameters by component.
    pub(super) components: BTreeMap<&'static str, Footprint>,
    /// Components for whose parameters the two passes have different LoRAs, so that the run has two copies of them. The
    /// copy for the inactive pass is evicted first when memory is short.
    by_pass: BTreeSet<&'static str>,
    /// Memory of the inactive pass's LoRA matrices if `components` counts only one set.
    other_matrices: Footprint,
    pub(super) limits: Limits,
}

/// A plan that fits in memory. It determines which parameters stay on the devices and which are streamed.
#[derive(Clone, Debug)]
pub(crate) struct FittedPlan {
    plan: Rc<MemoryPlan>,
    pub(crate) keep: Keep,
    /// Weights that are streamed from host memory. `None`: no weights are streamed.
    pub(crate) streaming: Option<Streaming>,
    /// Description of the choice of streamed weights, for the log.
    pub(crate) choice: Rc<str>,
    /// Memory (device or host) of each parameter that the programs read; empty unless the memory plan chooses it
    /// (`runtime.stream: auto`).
    pub(crate) memories: Rc<ParameterMemories>,
}

/// Returns the bytes of a program's arguments and results per device, without parameters.
pub(in crate::pipeline) fn io(network: &Network) -> usize {
    let parameters: usize = network.params.iter().map(|p| device_bytes(&network.program, p)).sum();
    usize::try_from(needed(network)).unwrap_or(0).saturating_sub(parameters)
}

/// Returns the usable bytes of each device of this process: the minimum over its devices. `None`: no device reports
/// them. `loaded`: memory of the parameters that are already loaded. It counts as usable, because the needs of the run
/// include it.
fn usable_device_bytes(engine: &Engine, loaded: Footprint) -> Option<usize> {
    let memory = engine.devices().iter().filter_map(|d| d.memory().ok());
    let own = memory.filter_map(|m| Some(m.limit? - m.in_use + loaded.device as i64)).min();
    own.map(|bytes| (bytes as f64 * (1.0 - SPARE)) as usize)
}

/// Returns the free host memory in bytes, divided by the processes on this host. `None`: unknown.
fn free_for_process(group: Option<&Arc<Group>>) -> Option<usize> {
    let processes = group.map_or(1, |group| {
        let hosts = group.hosts();
        hosts.iter().filter(|host| hosts.get(group.id()) == Some(*host)).count()
    });
    Some(usize::try_from(host::free_memory()?).unwrap_or(usize::MAX) / processes.max(1))
}

/// Returns the bytes of host memory that parameters may take for each device of a run with `devices` devices. `None`:
/// unknown.
fn free_host(engine: &Engine, loaded: Footprint, devices: usize, group: Option<&Arc<Group>>) -> Option<usize> {
    let free = free_for_process(group)?;
    let spare = HOST_SPARE.max((free as f64 * HOST_SPARE_FRACTION) as usize);
    Some(free.saturating_sub(spare) / engine.local_devices(devices).max(1) + loaded.host)
}

/// Returns the usable bytes of each CPU device of a run with `devices` devices, which share the host's memory. `None`:
/// unknown.
fn free_on_cpu(engine: &Engine, loaded: Footprint, devices: usize, group: Option<&Arc<Group>>) -> Option<usize> {
    let each = free_for_process(group)? / engine.local_devices(devices).max(1);
    Some((each as f64 * (1.0 - SPARE)) as usize + loaded.device)
}

/// Returns `runtime.memory_limit` in bytes.
fn configured_limit(config: &Config) -> Option<usize> {
    config.runtime.memory_limit.map(|gib| (gib * f64::from(1 << 30)) as usize)
}

impl Limits {
    /// Returns the usable memory of devices that are not opened. `capacity`: bytes of each device.
    pub(in crate::pipeline) fn of_capacity(config: &Config, capacity: Option<i64>) -> Self {
        let capacity = capacity.and_then(|bytes| usize::try_from(bytes).ok());
        Limits { device: capacity.into_iter().chain(configured_limit(config)).min(), host: None }
    }

    /// Returns the usable memory. In a multi-process run, this is the minimum over all processes: with different limits,
    /// the processes would run different programs.
    pub(in crate::pipeline) fn new(
        config: &Config,
        engine: &Engine,
        loaded: Footprint,
        build: &Build,
        group: Option<&Arc<Group>>,
    ) -> Result<Self> {
        let devices = build.layout.mesh.devices();
        let host = free_host(engine, loaded, devices, group);
        let configured = configured_limit(config);
        let device = configured.or_else(|| match engine.spec().is_host {
            true => free_on_cpu(engine, loaded, devices, group),
            false => usable_device_bytes(engine, loaded),
        });
        let Some(group) = group else {
            // Without a group, the limits of the other processes are unknown.
            let here = |limit: Option<usize>| limit.filter(|_| !engine.has_peers());
            return Ok(Limits { device: configured.or(here(device)), host: here(host) });
        };
        let least = |own: Option<usize>| -> Result<Option<usize>> {
            let all = group.all_gather(&own.unwrap_or(usize::MAX).to_string())?;
            Ok(all.iter().filter_map(|text| text.parse().ok()).min().filter(|bytes| *bytes < usize::MAX))
        };
        Ok(Limits { device: least(device)?, host: least(host)? })
    }
}

/// The programs of a run, built with one choice of which weights are streamed.
pub(super) struct BuiltRun {
    pub(super) build: Build,
    networks: Vec<(ProgramKind, Arc<Network>)>,
    pub(super) memory: MemoryPlan,
}

impl BuiltRun {
    /// Builds every program of a run. The memory plan has no compiled figures yet.
    pub(super) fn new(plan: &RunPlan, executor: &mut Executor, build: Build, limits: Limits) -> Result<Self> {
        let RunPlan { config, programs, .. } = plan;
        let write = |kind: ProgramKind| {
            let since = Instant::now();
            let network = executor.accepted(kind.name(), &build, |build| programs.network(kind, build))?;
            executor.engine().timeline().add(SpanKind::Program, kind.name(), since, None);
            Ok((kind, Arc::new(network)))
        };
        let networks = programs.kinds().map(write).collect::<Result<Vec<_>>>()?;
        let each = networks.iter().map(|(kind, network)| (*kind, &**network));
        let mut memory = MemoryPlan::for_programs(config, each, limits);
        memory.by_pass = memory.components.keys().copied().filter(|c| executor.differs_by_pass(c)).collect();
        if executor.has_two_sets_of_added_loras() {
            memory.other_matrices = added_matrices(networks.iter().map(|(_, network)| &**network));
        }
        Ok(BuiltRun { build, networks, memory })
    }

    /// Starts to load the parameters of the programs.
    fn load_ahead(&self, executor: &mut Executor) {
        let engine = executor.engine();
        let are_cached = || self.networks.iter().all(|(kind, network)| engine.is_cached(kind.name(), &network.program));
        let all = self.memory.parameters();
        let fits = |fraction: f64| {
            let within =
                |bytes: usize, limit: Option<usize>| limit.is_some_and(|limit| bytes as f64 <= fraction * limit as f64);
            within(all.device, self.memory.limits.device)
                && (all.host == 0 || within(all.host, self.memory.limits.host))
        };
        let has_room = fits(PRELOAD_FRACTION) || fits(PRELOAD_FRACTION_CACHED) && are_cached();
        // On a CPU, loading would compete with the compiler for the cores.
        let has_room =
            has_room && !executor.engine().spec().is_host && self.memory.config.runtime.residency != Residency::InTurn;
        executor.load_ahead(self.networks.iter().map(|(_, network)| network.clone()), has_room);
    }

    /// Compiles the programs and records how much memory each needs. Does not compile them again if earlier compilations
    /// show that they do not fit.
    fn compile(&mut self, executor: &mut Executor, loads: bool, group: Option<&Arc<Group>>) -> Result<()> {
        let known = self.recall(executor)?;
        if known && self.memory.keep(self.memory.config.runtime.residency).is_none() {
            return Ok(());
        }
        if loads {
            self.load_ahead(executor);
        }
        let mut compiled = self.compile_all(executor);
        let is_too_large = compiled.as_ref().is_err_and(PipelineError::is_out_of_device_memory);
        // Loaded parameters take memory in which the compiler times kernels.
        if is_too_large && executor.unload() {
            compiled = self.compile_all(executor);
        }
        if let Err(PipelineError::Runtime(RuntimeError::OutOfMemory { name, is_host: false, source, .. })) = &compiled
            && let Some((_, network)) = self.networks.iter().find(|(kind, _)| kind.name() == name)
        {
            let (source, usable) = (source.clone(), self.memory.limits.device);
            executor.remember(network.program.hash(), MemoryOutcome::OutOfMemory { source, usable });
        }
        let works = largest_needs(group, compiled?)?;
        for (need, ((_, network), work)) in self.memory.needs.iter_mut().zip(self.networks.iter().zip(works)) {
            need.work = work;
            executor.remember(network.program.hash(), MemoryOutcome::Compiled(work));
        }
        Ok(())
    }

    /// Compiles the programs and returns how much memory each needs besides its parameters.
    fn compile_all(&self, executor: &mut Executor) -> Result<Vec<Option<usize>>> {
        executor.compile_all(self.networks.iter().map(|(kind, network)| (kind.name(), &**network)))?;
        let each = self.networks.iter();
        each.map(|(kind, network)| Ok(work(network, &*executor.compile(kind.name(), network)?))).collect()
    }

    /// Records the memory needs of programs that were compiled earlier. Returns whether the needs of all programs are
    /// known.
    ///
    /// # Errors
    /// Returns the error of a compilation that ran out of memory.
    fn recall(&mut self, executor: &Executor) -> Result<bool> {
        let (mut known, limit) = (true, self.memory.limits.device);
        for (need, (kind, network)) in self.memory.needs.iter_mut().zip(&self.networks) {
            match executor.outcome(&network.program.hash()) {
                Some(MemoryOutcome::Compiled(work)) => need.work = *work,
                Some(MemoryOutcome::OutOfMemory { source, usable }) if !has_grown(limit, *usable) => {
                    return Err(RuntimeError::from(source.clone()).during(MemoryPhase::Compile, kind.name()).into());
                }
                Some(MemoryOutcome::OutOfMemory { .. }) | None => known = false,
            }
        }
        Ok(known)
    }

    /// Returns component and memory of each parameter.
    pub(super) fn memories(&self) -> ParameterMemories {
        let all = self.networks.iter().flat_map(|(_, network)| network.params.iter().map(move |p| (network, p)));
        all.map(|(network, p)| {
            let memory = network.program.argument(&p.name).map(|argument| argument.memory).unwrap_or_default();
            (p.name.clone(), (p.component, memory))
        })
        .collect()
    }

    fn hashes(&self) -> impl Iterator<Item = String> {
        self.networks.iter().map(|(_, network)| network.program.hash())
    }

    /// Returns the program of the kind `kind`. `None`: the run does not execute it.
    pub(super) fn network(&self, kind: ProgramKind) -> Option<&Network> {
        self.networks.iter().find(|(own, _)| *own == kind).map(|(_, network)| &**network)
    }
}

/// Returns whether the usable memory has grown enough that a compilation that ran out of memory may now succeed.
fn has_grown(now: Option<usize>, before: Option<usize>) -> bool {
    now.zip(before).is_some_and(|(now, before)| now as f64 * (1.0 - SPARE) > before as f64)
}

/// Returns for each program the largest need of all processes, so that all make the same decisions. `None`: unknown.
fn largest_needs(group: Option<&Arc<Group>>, own: Vec<Option<usize>>) -> Result<Vec<Option<usize>>> {
    let Some(group) = group else { return Ok(own) };
    let invalid =
        |e: serde_json::Error| PipelineError::Bug(format!("cannot exchange memory needs with another process: {e}"));
    let all = group.all_gather(&serde_json::to_string(&own).map_err(invalid)?)?;
    let all = all.iter().map(|text| serde_json::from_str::<Vec<Option<usize>>>(text));
    let all = all.collect::<std::result::Result<Vec<_>, _>>().map_err(invalid)?;
    let largest = |i: usize| all.iter().map(|each| each.get(i).copied().flatten()).max().flatten();
    Ok((0..own.len()).map(largest).collect())
}

impl MemoryPlan {
    /// Plans the memory of programs that have not been compiled.
    pub(in crate::pipeline) fn for_programs<'n>(
        config: &Config,
        networks: impl IntoIterator<Item = (ProgramKind, &'n Network)> + Clone,
        limits: Limits,
    ) -> Self {
        let components = parameters(networks.clone().into_iter().map(|(_, network)| network));
        let needs = networks.into_iter().map(|(program, network)| Need::for_program(program, network)).collect();
        MemoryPlan {
            config: config.into(),
            needs,
            components,
            by_pass: BTreeSet::new(),
            other_matrices: Footprint::default(),
            limits,
        }
    }

    /// Returns the memory that all parameters of the run take.
    fn parameters(&self) -> Footprint {
        let copies = self.by_pass.iter().filter_map(|component| self.components.get(component));
        self.components.values().chain(copies).chain([&self.other_matrices]).copied().sum()
    }

    /// Returns the bytes that the run needs if all parameters stay on the devices.
    fn all(&self) -> usize {
        self.parameters().device + self.needs.iter().map(Need::work_bytes).max().unwrap_or(0)
    }

    /// Returns the memory of the parameters that a program reads.
    fn own_parameters(&self, need: &Need) -> Footprint {
        need.components.iter().filter_map(|c| self.components.get(c)).copied().sum()
    }

    /// Returns the bytes that a program needs on a device if only its own parameters are loaded.
    pub(super) fn alone(&self, need: &Need) -> usize {
        need.work_bytes() + self.own_parameters(need).device
    }

    /// If the parameters of some program do not fit in host memory, returns the program with the largest parameters and
    /// their bytes. `None`: the parameters of each program fit.
    fn host_shortage(&self) -> Option<(&Need, usize)> {
        let limit = self.limits.host.unwrap_or(usize::MAX);
        let each = self.needs.iter().map(|need| (need, self.own_parameters(need).host));
        each.max_by_key(|(_, bytes)| *bytes).filter(|(_, bytes)| *bytes > limit)
    }

    /// Returns the program that needs the most memory if only its own parameters are loaded, and the bytes that it
    /// needs.
    pub(super) fn largest(&self) -> Option<(&Need, usize)> {
        self.needs.iter().map(|n| (n, self.alone(n))).max_by_key(|(_, bytes)| *bytes)
    }

    /// Returns the program to which an error refers. `name`: name of a program, or of components whose parameters the
    /// program reads. If no program matches, returns the one that needs the most memory.
    fn need_of(&self, name: &str) -> Option<&Need> {
        let is_meant =
            |need: &&Need| need.program.name() == name || name.split(", ").any(|c| need.components.contains(c));
        self.needs.iter().filter(is_meant).max_by_key(|need| self.alone(need)).or(self.largest().map(|(need, _)| need))
    }

    /// Returns the bytes of a program and of the parameters that stay on the devices while it runs.
    fn tried(&self, need: &Need, keep: Option<Keep>) -> usize {
        let alone = self.alone(need);
        match keep {
            Some(Keep::All) => self.all(),
            Some(Keep::Most(bytes)) => bytes.max(alone),
            Some(Keep::OneComponent) | None => alone,
        }
    }

    /// Describes how many bytes a program needs and how many are usable.
    fn needed(&self, need: &Need, keep: Option<Keep>, known: Option<usize>) -> String {
        let (alone, tried) = (self.alone(need), self.tried(need, keep));
        let mut text = format!("{} needs {:.2} GiB per device", need.program.name(), gib(alone));
        if tried > alone {
            text += &format!(" and {:.2} GiB together with the parameters that stay loaded", gib(tried));
        }
        text + &usable_text(known)
    }

    /// Adds to an out-of-memory error how much memory is needed and usable, and the cheapest change after which the run
    /// should fit. Returns other errors unchanged. `keep`: the parameters that stay on the devices; `None`: not decided
    /// yet.
    fn explain(&self, error: PipelineError, keep: Option<Keep>, executor: &Executor, build: &Build) -> PipelineError {
        let PipelineError::Runtime(RuntimeError::OutOfMemory { during, name, is_host, source }) = &error else {
            return error;
        };
        if *is_host {
            let (weights, said) = (gib(self.parameters().host), one_line(source));
            let free = usable_text(self.limits.host);
            return PipelineError::TooLarge(format!(
                "{during} {name}: out of pinned host memory: streamed weights take {weights:.2} GiB per device{free}: {}; \
                 plugin error: {said}",
                self.host_memory_hint()
            ));
        }
        let Some(need) = self.need_of(name) else { return error };
        let (alone, least) = (self.alone(need), self.largest().map_or(0, |(_, bytes)| bytes));
        // The attempt ran out of memory, whatever limit the device reported.
        let tried = self.tried(need, keep);
        let too_much = (tried as f64 * (1.0 - SPARE)) as usize;
        // Bytes that were usable before anything was loaded.
        let known = [self.limits.device, usable_device_bytes(executor.engine(), executor.footprint())]
            .into_iter()
            .flatten()
            .min();
        let turns = tried > alone && least <= too_much.min(known.unwrap_or(usize::MAX));
        let change = match turns {
            true => Some("--set runtime.residency=in_turn".to_string()),
            false => self.cheapest(executor, build, |one| match one == need.program {
                true => too_much.min(known.unwrap_or(usize::MAX)),
                false => known.unwrap_or(usize::MAX),
            }),
        };
        let would = if need.work.is_some() { WOULD_FIT } else { NEEDS_LESS };
        let change = change.map_or_else(|| NOTHING_FITS.into(), |change| format!("{change} {would}"));
        out_of_memory_error(error, &self.needed(need, keep, known), &change)
    }

    /// Decides which parameters stay on the devices. `None`: the run does not fit in memory.
    pub(super) fn keep(&self, residency: Residency) -> Option<Keep> {
        if self.host_shortage().is_some() {
            return None;
        }
        let least = self.largest().map_or(0, |(_, bytes)| bytes);
        let limit = self.limits.device.unwrap_or(usize::MAX);
        match residency {
            Residency::Auto | Residency::Resident if self.all() <= limit => Some(Keep::All),
            Residency::Auto if least <= limit => Some(Keep::Most(limit)),
            Residency::InTurn if least <= limit => Some(Keep::OneComponent),
            _ => None,
        }
    }

    /// Formats the plan as a table with one line per program, followed by totals.
    pub(crate) fn table(&self) -> String {
        let mut text = String::from("memory per device         parameters GiB     other GiB      host GiB\n");
        for need in &self.needs {
            let (name, own) = (need.program.name(), self.own_parameters(need));
            let work = need.work.map_or("unknown".to_string(), |work| format!("{:.3}", gib(work)));
            let (device, host) = (gib(own.device), gib(own.host));
            // Writing to a String cannot fail.
            let _ = writeln!(text, "  {name:<24}{device:>14.3}{work:>14}{host:>14.3}");
        }
        let least = self.largest().map_or(0, |(_, bytes)| bytes);
        let _ = writeln!(text, "  {:<24}{:>14.3}{:>28.3}", "all loaded", gib(self.all()), gib(self.parameters().host));
        let _ = writeln!(text, "  {:<24}{:>14.3}", "one component at a time", gib(least));
        let known = |bytes: Option<usize>| bytes.map_or("unknown".to_string(), |bytes| format!("{:.3}", gib(bytes)));
        let _ = write!(text, "  {:<24}{:>14}{:>28}", "usable", known(self.limits.device), known(self.limits.host));
        text
    }
}

/// Adds to an out-of-memory error how much memory is needed and what to change. Returns other errors unchanged.
fn out_of_memory_error(error: PipelineError, needs: &str, change: &str) -> PipelineError {
    let PipelineError::Runtime(RuntimeError::OutOfMemory { during, name, source, .. }) = &error else { return error };
    let what = if *during == MemoryPhase::Load { "parameters of " } else { "" };
    let said = one_line(source);
    PipelineError::TooLarge(format!(
        "{during} {what}{name}: out of device memory: {needs}: {change}; plugin error: {said}"
    ))
}

/// Adds to an out-of-memory error how much memory is needed and usable, for a program that is run by itself. Returns
/// other errors unchanged.
pub(in crate::pipeline) fn explain_single_run(
    error: PipelineError,
    network: &Network,
    executor: &Executor,
) -> PipelineError {
    let parameters: usize = network.params.iter().map(|p| device_bytes(&network.program, p)).sum();
    let hash = network.program.hash();
    let compiled = executor.new_programs().iter().find(|program| program.hash() == hash);
    let (least, work_bytes) = match compiled.and_then(|compiled| work(network, compiled)) {
        Some(work) => ("", work),
        None => ("at least ", io(network)),
    };
    let free = usable_text(usable_device_bytes(executor.engine(), executor.footprint()));
    let needs = format!("the program needs {least}{:.2} GiB per device{free}", gib(parameters + work_bytes));
    out_of_memory_error(
        error,
        &needs,
        "use a smaller input, or more devices and a layout that shards it (--layout, --mesh)",
    )
}

fn usable_text(known: Option<usize>) -> String {
    match known {
        Some(bytes) => format!("; {:.2} GiB are usable", gib(bytes)),
        None => "; free memory is unknown".into(),
    }
}

pub(super) fn gib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// Plans the memory of a run: decides which parameters stay on the devices and, with `runtime.stream: auto`, which are
/// streamed from host memory, whatever an earlier plan decided. Compiles every program and starts to load the parameters.
/// `build`: options of the last plan.
///
/// # Errors
/// Returns an error if a program cannot be compiled, or if the run does not fit in memory. In the second case, the
/// error suggests the cheapest change after which the run should fit.
pub(crate) fn plan(
    plan: &RunPlan,
    executor: &mut Executor,
    build: &Build,
    group: Option<&Arc<Group>>,
) -> Result<FittedPlan> {
    let limits = Limits::new(&plan.config, executor.engine(), executor.footprint(), build, group)?;
    let (residency, before) = (plan.config.runtime.residency, build.streaming);
    let mut search = StreamSearch::new(plan, executor);
    let mut built = BuiltRun::new(plan, executor, search.first(build), limits)?;
    // Do not compile programs whose parameters, arguments and results alone do not fit.
    if built.memory.keep(residency).is_none() {
        match (search.next(&built, Misfit::Parameters, executor)?, search.all_streamed()) {
            (Some(next), _) => built = next,
            (None, Some(least)) => {
                return Err(PipelineError::TooLarge(least.memory.shortage(executor, &least.build)));
            }
            (None, None) => return Err(PipelineError::TooLarge(built.memory.shortage(executor, &built.build))),
        }
    }
    // Programs compiled before this request; others may use them.
    let mut shared: BTreeSet<String> = built.hashes().filter(|hash| executor.has_program(hash)).collect();
    let mut is_tight = false;
    loop {
        // Load later if parameters of another choice are loaded: they take the memory, and are needed if this choice
        // does not fit.
        let has_room = built.build.streaming == before || executor.footprint() == Footprint::default();
        let loads = has_room && !is_tight;
        let compiled = built.compile(executor, loads, group);
        let misfit = match &compiled {
            Ok(()) => built.memory.keep(residency).is_none().then_some(Misfit::Compiled),
            Err(error) => error.is_out_of_device_memory().then_some(Misfit::OutOfMemory),
        };
        if let Err(PipelineError::Runtime(RuntimeError::OutOfMemory { name, .. })) = &compiled {
            search.failed(name);
            is_tight = true;
        }
        if let Some(misfit) = misfit
            && let Some(next) = search.next(&built, misfit, executor)?
        {
            executor.stop_load();
            let is_unused = |hash: &String| !shared.contains(hash) && next.hashes().all(|other| other != *hash);
            executor.discard(built.hashes().filter(is_unused).collect());
            shared.extend(next.hashes().filter(|hash| executor.has_program(hash)));
            built = next;
            continue;
        }
        let BuiltRun { build, memory, .. } = &built;
        // After a failed compilation, the plan only knows the arguments and results of the programs.
        compiled.map_err(|error| memory.explain(error, None, executor, build))?;
        tracing::debug!("{}", memory.table());
        let Some(keep) = memory.keep(residency) else {
            return Err(PipelineError::TooLarge(memory.shortage(executor, build)));
        };
        let (choice, memories) = (search.describe(&built, executor).into(), Rc::new(search.memories(&built)));
        return Ok(FittedPlan { keep, streaming: build.streaming, choice, memories, plan: Rc::new(built.memory) });
    }
}

/// Checks that all parameters of a run on a CPU fit in the free memory together, for commands that keep all of them
/// loaded. Compiles nothing.
///
/// # Errors
/// Returns an error if they do not fit.
pub(crate) fn check_on_cpu(
    plan: &RunPlan,
    executor: &mut Executor,
    build: &Build,
    group: Option<&Arc<Group>>,
) -> Result<()> {
    if !executor.engine().spec().is_host {
        return Ok(());
    }
    let limits = Limits::new(&plan.config, executor.engine(), executor.footprint(), build, group)?;
    let needed = BuiltRun::new(plan, executor, build.clone(), limits)?.memory.all();
    match limits.device.filter(|limit| needed > *limit) {
        None => Ok(()),
        Some(limit) => Err(PipelineError::TooLarge(format!(
            "all components together need at least {:.2} GiB per device; {:.2} GiB per device are usable: measure a smaller \
             model, or use a GPU or TPU",
            gib(needed),
            gib(limit)
        ))),
    }
}

impl FittedPlan {
    /// Returns the bytes of host memory that parameters may take for each device. `None`: unknown.
    pub(crate) fn host_limit(&self) -> Option<usize> {
        self.plan.limits.host
    }

    /// Returns whether the host's memory holds all parameters that are streamed.
    pub(crate) fn fits_host(&self) -> bool {
        self.plan.limits.host.is_none_or(|limit| self.plan.parameters().host <= limit)
    }

    /// Returns a function that describes the memory needs of a program or component. Its result is printed if a plugin
    /// aborts the process.
    pub(crate) fn needs(&self, executor: &Executor) -> impl Fn(&str) -> Option<String> + Send + Sync + use<> {
        let known = [self.plan.limits.device, usable_device_bytes(executor.engine(), executor.footprint())]
            .into_iter()
            .flatten()
            .min();
        let of = |need: &Need| {
            let turns = self.plan.tried(need, Some(self.keep)) > self.plan.alone(need);
            let change = if turns { "--set runtime.residency=in_turn" } else { "fewer frames or more devices" };
            let needed = self.plan.needed(need, Some(self.keep), known);
            format!("{needed}; other processes may be using part of the device memory. To use less memory: {change}")
        };
        let told: Vec<_> =
            self.plan.needs.iter().map(|need| (need.program.name(), need.components.clone(), of(need))).collect();
        let largest = self.plan.largest().map(|(need, _)| of(need));
        move |what| {
            let loaded = what.strip_prefix("loading ");
            let is_meant = |(program, components, _): &&(&str, BTreeSet<&str>, String)| {
                *program == what || loaded.is_some_and(|component| components.contains(component))
            };
            told.iter().find(is_meant).map(|(_, _, text)| text.clone()).or_else(|| largest.clone())
        }
    }

    /// Adds the plan's figures to an out-of-memory error. Returns other errors unchanged.
    pub(crate) fn explain(&self, error: PipelineError, executor: &Executor, build: &Build) -> PipelineError {
        self.plan.explain(error, Some(self.keep), executor, build)
    }
}

/// Tilings that an error can suggest, as (YAML, overlap, frame overlap): the default tiling, and one with an overlap
/// that is large enough for the diffusion decoder.
const TILINGS: [(&str, usize, usize); 2] = [("", 64, 24), ("overlap: 160, frame_overlap: 40", 160, 40)];

const WOULD_FIT: &str = "would fit (estimated without compiling)";
/// Used instead of [`WOULD_FIT`] if the needs of the program are not known.
const NEEDS_LESS: &str = "needs less (estimated without compiling)";
const NOTHING_FITS: &str =
    "smaller tiles, other shipped layouts and fewer frames would not fit either; use more devices";

impl MemoryPlan {
    /// Describes why a run does not fit in memory: the bytes needed, the bytes usable, and the cheapest change that
    /// fits.
    fn shortage(&self, executor: &Executor, build: &Build) -> String {
        if let Some((need, bytes)) = self.host_shortage() {
            let (name, bytes, free) = (need.program.name(), gib(bytes), gib(self.limits.host.unwrap_or(0)));
            return format!(
                "{name}: streamed weights need {bytes:.2} GiB of host memory per device, but only {free:.2} GiB are \
                 usable: {}",
                self.host_memory_hint()
            );
        }
        let limit = self.limits.device.unwrap_or(usize::MAX);
        let have = format!("{:.2} GiB per device are usable", gib(limit));
        if self.config.runtime.residency == Residency::Resident && self.keep(Residency::Auto).is_some() {
            let all = gib(self.all());
            return format!(
                "all components together need {all:.2} GiB per device; {have}: set runtime.residency to auto"
            );
        }
        let Some((need, bytes)) = self.largest() else { return have };
        let what = self.describe(need, bytes);
        match self.cheapest(executor, build, |_| limit) {
            Some(change) if need.work.is_some() => format!("{what}: {change} {WOULD_FIT}"),
            Some(change) => format!("{what}: {change} {NEEDS_LESS}"),
            None => format!("{what}: {NOTHING_FITS}"),
        }
    }

    /// Proposes changes after which the run needs less host memory.
    fn host_memory_hint(&self) -> String {
        let runtime = &self.config.runtime;
        let narrow = (runtime.weights == WeightType::Bf16).then_some("set runtime.weights to int8");
        let more = (runtime.stream == WeightStreaming::On).then_some("increase runtime.resident_blocks");
        let changes = [Some("use a host with more memory"), narrow, more];
        changes.into_iter().flatten().collect::<Vec<_>>().join(", or ")
    }

    /// Describes how many bytes a program needs and how many are usable.
    pub(super) fn describe(&self, need: &Need, bytes: usize) -> String {
        let (least, work) = match need.work {
            Some(work) => ("", format!("{:.2} GiB", gib(work))),
            None => ("at least ", format!("at least {:.2} GiB", gib(need.io))),
        };
        let have = match self.limits.device {
            Some(bytes) => format!("{:.2} GiB per device are usable", gib(bytes)),
            None => "free memory is unknown".into(),
        };
        format!(
            "{} needs {least}{:.2} GiB per device ({work} without its parameters); {have}",
            need.program.name(),
            gib(bytes)
        )
    }

    /// Returns the GiB of host memory that all parameters take for each device.
    pub(super) fn host_gib(&self) -> f64 {
        gib(self.parameters().host)
    }

    /// Returns the flags of the cheapest change after which each program, with only its own parameters loaded, needs at
    /// most `limit` bytes. The changed programs are not compiled; their needs are estimated from this plan.
    fn cheapest(&self, executor: &Executor, build: &Build, limit: impl Fn(ProgramKind) -> usize) -> Option<String> {
        let fits = |change: &Config| {
            let needs = self.estimate(change, executor, build);
            needs.is_some_and(|needs| needs.into_iter().all(|(program, bytes)| bytes <= limit(program)))
        };
        candidates(&self.config).find(|(_, change)| fits(change)).map(|(flags, _)| flags)
    }

    /// Estimates the bytes that each program of a changed configuration needs with only its own parameters loaded: the
    /// bytes of its parameters, plus the other bytes of the current program, scaled by the ratio of the sizes of
    /// arguments and results.
    fn estimate(&self, config: &Config, executor: &Executor, build: &Build) -> Option<Vec<(ProgramKind, usize)>> {
        let engine = executor.engine();
        let new = setup::build_for(config, engine.devices().len(), engine.toolchain()).ok()?;
        // With `runtime.stream: auto`, this plan has decided which weights are streamed.
        let new = Build { streaming: new.streaming.or(build.streaming), ..new };
        if new.layout.mesh.devices() != build.layout.mesh.devices() {
            return None;
        }
        let programs = Programs::from_config(config, None).ok()?;
        let each = self.needs.iter().map(|need| {
            let network = programs.network(need.program, &new).ok()?;
            let own: usize = parameters([&network]).values().map(|of| of.device).sum();
            let ratio = io(&network) as f64 / need.io.max(1) as f64;
            Some((need.program, own + (need.work_bytes() as f64 * ratio) as usize))
        });
        each.collect()
    }
}

/// Returns configurations that need less memory, with the flags that select them; the cheapest change comes first.
fn candidates(config: &Config) -> impl Iterator<Item = (String, Config)> {
    let streamed = [WeightStreaming::On].into_iter().filter(|_| config.runtime.stream == WeightStreaming::Off);
    let streamed =
        streamed.map(|stream| ("--set runtime.stream=auto".into(), changed(config, |c| c.runtime.stream = stream)));
    let tiled = TILINGS.into_iter().filter(|_| config.runtime.tiling.is_none()).map(|(set, overlap, frame_overlap)| {
        let tiling = Tiling { overlap, frame_overlap, ..Tiling::default() };
        (format!("--set 'runtime.tiling={{{set}}}'"), changed(config, |c| c.runtime.tiling = Some(tiling)))
    });
    let layouts = shipped_layouts().filter(|l| *l != config.layout).map(|layout| {
        let change = changed(config, |c| (c.layout, c.mesh) = (layout.into(), None));
        (format!("--layout {layout}"), change)
    });
    // Frame counts that the model does not support are rejected before their programs are built, so it is cheap to try
    // all.
    let frames = (1..config.clip_frames().unwrap_or(1)).rev().map(|n| match &config.request.chain {
        Some(chain) => {
            let chain = Some(Chain { clip: n, ..chain.clone() });
            (format!("--set request.chain.clip={n}"), changed(config, |c| c.request.chain = chain))
        }
        None => (format!("--num-frames {n}"), changed(config, |c| c.request.num_frames = NumFrames::Count(n))),
    });
    let narrow = [WeightType::Int8].into_iter().filter(|_| config.runtime.weights == WeightType::Bf16);
    let narrow =
        narrow.map(|form| ("--set runtime.weights=int8".to_string(), changed(config, |c| c.runtime.weights = form)));
    streamed.chain(tiled).chain(layouts).chain(frames).chain(narrow)
}

fn changed(config: &Config, change: impl FnOnce(&mut Config)) -> Config {
    let mut config = config.clone();
    change(&mut config);
    config
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hlo::{Builder, DType, Type};
    use crate::nn::{Axis, Init, Param, Source};

    /// Parameters are in the order of the program's arguments, so those of a component are not necessarily adjacent.
    #[test]
    fn component_is_counted_once_per_program() {
        let b = Builder::new("encode");
        let ty = Type::new(DType::F32, [4]);
        let read = [("text_encoder", "a"), ("connectors", "b"), ("text_encoder", "c")].map(|(component, name)| {
            let param = Param {
                component,
                name: name.into(),
                ty: ty.clone(),
                axes: vec![Axis::Replicated],
                source: Source::Stack { keys: vec![name.into()], shape: vec![4] },
                init: Init::normal(1.0),
            };
            (b.argument(name, ty.clone()), param)
        });
        let sum = read.iter().map(|(value, _)| value.clone()).reduce(|x, y| &x + &y).expect("three");
        let program = b.finish(&[("y", &sum)]).expect("builds");
        let params = read.map(|(_, param)| param).into();
        let network = Network { program, params, placements: Vec::new(), notes: Vec::new() };
        let need = Need::for_program(ProgramKind::TextEncoder, &network);
        assert_eq!(need.components.into_iter().collect::<Vec<_>>(), ["connectors", "text_encoder"]);
    }

    #[test]
    fn streamed_weights_must_fit_in_host_memory() {
        let plan = |host| MemoryPlan {
            config: ResolvedConfig::from(&Config::default()),
            needs: vec![Need {
                program: ProgramKind::Denoise,
                components: ["transformer"].into(),
                work: Some(1),
                io: 1,
            }],
            components: [("transformer", Footprint { device: 5, host: 60 })].into(),
            by_pass: BTreeSet::new(),
            other_matrices: Footprint::default(),
            limits: Limits { device: Some(100), host: Some(host) },
        };
        assert_eq!(plan(60).keep(Residency::Auto), Some(Keep::All));
        assert_eq!(plan(59).keep(Residency::Auto), None);
        let (program, bytes) = plan(59).host_shortage().map(|(need, bytes)| (need.program, bytes)).expect("too large");
        assert_eq!((program, bytes), (ProgramKind::Denoise, 60));
    }

    #[test]
    fn failed_compilations_are_repeated_with_more_memory() {
        assert_eq!([99, 100, 103, 104].map(|now| has_grown(Some(now), Some(100))), [false, false, false, true]);
        assert!(!has_grown(Some(100), None) && !has_grown(None, Some(100)));
    }

    #[test]
    fn inactive_pass_weights_are_evicted_before_rejecting() {
        let need = |program, components: &[&'static str], work| Need {
            program,
            components: components.iter().copied().collect(),
            work: Some(work),
            io: 1,
        };
        let needs = vec![
            need(ProgramKind::TextEncoder, &["text_encoder"], 5),
            need(ProgramKind::Denoise, &["transformer"], 10),
        ];
        let on_device = |device| Footprint { device, host: 0 };
        let components = [("text_encoder", on_device(60)), ("transformer", on_device(100))].into();
        let plan = |limit| MemoryPlan {
            config: ResolvedConfig::from(&Config::default()),
            needs: needs.clone(),
            components: BTreeMap::clone(&components),
            by_pass: ["transformer"].into(),
            other_matrices: Footprint::default(),
            limits: Limits { device: Some(limit), host: None },
        };
        assert_eq!(plan(0).all(), 270);
        assert_eq!(plan(270).keep(Residency::Auto), Some(Keep::All));
        assert_eq!(plan(269).keep(Residency::Auto), Some(Keep::Most(269)));
        // The transformer of one pass needs 100 bytes, and its program 10 more.
        assert_eq!(plan(110).keep(Residency::Auto), Some(Keep::Most(110)));
        assert_eq!(plan(109).keep(Residency::Auto), None);
        assert_eq!(plan(110).keep(Residency::InTurn), Some(Keep::OneComponent));
    }
}
