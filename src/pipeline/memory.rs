//! Memory that a run needs on each device, planned beside the first load: from the programs as they are written and
//! compiled, against what the device says is free.

use super::setup;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Instant;

use super::compile::needed;
use super::error::{PipelineError, Result};
use super::executor::Executor;
use super::programs::{ProgramKind, Programs, parameters};
use super::residency::{Keep, work};
use crate::config::{Chain, Config, NumFrames, Residency, Tiling, shipped_layouts};
use crate::models::Network;
use crate::nn::Build;
use crate::runtime::processes::Group;
use crate::runtime::{SpanKind, device_bytes};

/// The part of free memory that is not planned with: allocators leave gaps, and results of one program wait for the next.
const SPARE: f64 = 0.03;

/// The part of usable memory up to which all parameters are loaded beside compilation: what programs need is not known by
/// then, and compilers try kernels on the device.
const ROOMY: f64 = 0.7;

/// The same where all programs come from the compile cache.
const ROOMY_CACHED: f64 = 0.92;

/// Bytes of one program on a device.
#[derive(Clone, Debug)]
struct Need {
    program: ProgramKind,
    /// The components whose parameters it reads.
    components: Vec<&'static str>,
    /// Everything but parameters; none where that is unknown.
    work: Option<usize>,
    /// Of that, arguments and results.
    io: usize,
}

/// Bytes of a run on each device, by program and component.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    needs: Vec<Need>,
    /// Parameters of each component, in bytes; twice where two passes have their own.
    components: BTreeMap<&'static str, usize>,
    /// Bytes of a device that may be used, where that is known.
    limit: Option<usize>,
}

/// Arguments and results that are no parameters, in bytes on a device.
fn io(network: &Network) -> usize {
    let parameters: usize = network.params.iter().map(|p| device_bytes(&network.program, p)).sum();
    usize::try_from(needed(network)).unwrap_or(0).saturating_sub(parameters)
}

/// Usable bytes of each device, as the devices report them. Processes that run together have one number, or they
/// would run their programs in different orders.
fn free(executor: &Executor, group: Option<&Arc<Group>>) -> Result<Option<usize>> {
    let engine = executor.engine();
    let memory = engine.devices().iter().filter_map(|d| d.memory().ok());
    // Parameters of earlier requests are counted with the run's own.
    let loaded = executor.parameter_bytes_of_device() as i64;
    let own = memory.filter_map(|m| Some(m.limit? - m.in_use + loaded)).min();
    let own = own.map(|bytes| (bytes as f64 * (1.0 - SPARE)) as usize);
    match group {
        Some(group) => {
            let all = group.all_gather(&own.unwrap_or(usize::MAX).to_string())?;
            Ok(all.iter().filter_map(|text| text.parse().ok()).min().filter(|bytes| *bytes < usize::MAX))
        }
        None if engine.has_peers() => Ok(None),
        None => Ok(own),
    }
}

impl Plan {
    /// Writes and compiles every program of a run, and begins to load what they read.
    pub(crate) fn of(
        config: &Config,
        programs: &Programs,
        executor: &mut Executor,
        build: &Build,
        group: Option<&Arc<Group>>,
    ) -> Result<Self> {
        let write = |kind: ProgramKind| {
            let since = Instant::now();
            let network = executor.accepted(kind.name(), build, |build| programs.network(kind, build))?;
            executor.engine().timeline().add(SpanKind::Program, kind.name(), since, None);
            Ok((kind, Arc::new(network)))
        };
        let networks = programs.kinds().map(write).collect::<Result<Vec<_>>>()?;
        let mut components = parameters(networks.iter().map(|(_, network)| &**network));
        components.iter_mut().filter(|(c, _)| executor.differs_by_pass(c)).for_each(|(_, bytes)| *bytes *= 2);
        let limit = match config.runtime.memory_limit {
            Some(gib) => Some((gib * f64::from(1 << 30)) as usize),
            None => free(executor, group)?,
        };
        let all = components.values().sum::<usize>() as f64;
        let engine = executor.engine();
        let are_cached = || networks.iter().all(|(kind, network)| engine.is_cached(kind.name(), &network.program));
        let takes = limit.map_or(0.0, |limit| all / limit as f64);
        let has_room = takes <= ROOMY || takes <= ROOMY_CACHED && are_cached();
        let has_room = has_room && config.runtime.residency != Residency::InTurn;
        executor.load_ahead(networks.iter().map(|(_, network)| network.clone()), has_room);
        executor.compile_all(networks.iter().map(|(kind, network)| (kind.name(), &**network)))?;
        let mut needs = Vec::new();
        for (program, network) in &networks {
            let compiled = executor.compile(program.name(), network)?;
            let mut components: Vec<_> = network.params.iter().map(|p| p.component).collect();
            components.dedup();
            needs.push(Need { program: *program, components, work: work(network, &compiled), io: io(network) });
        }
        Ok(Plan { needs, components, limit })
    }

    /// Bytes with every component loaded.
    fn all(&self) -> usize {
        self.components.values().sum::<usize>() + self.needs.iter().filter_map(|n| n.work).max().unwrap_or(0)
    }

    /// Bytes of a program alone, as far as they are known.
    fn alone(&self, need: &Need) -> usize {
        need.work.unwrap_or(0) + need.components.iter().filter_map(|c| self.components.get(c)).sum::<usize>()
    }

    /// The program that needs most, loaded alone.
    fn largest(&self) -> Option<(&Need, usize)> {
        self.needs.iter().map(|n| (n, self.alone(n))).max_by_key(|(_, bytes)| *bytes)
    }

    /// Components that stay on the devices; none where the run has no room.
    fn keep(&self, residency: Residency) -> Option<Keep> {
        let least = self.largest().map_or(0, |(_, bytes)| bytes);
        let limit = self.limit.unwrap_or(usize::MAX);
        match residency {
            Residency::Auto | Residency::Resident if self.all() <= limit => Some(Keep::All),
            Residency::Auto if least <= limit => Some(Keep::Most(limit)),
            Residency::InTurn if least <= limit => Some(Keep::OneComponent),
            _ => None,
        }
    }

    /// A line a program, and sums.
    pub(crate) fn table(&self) -> String {
        let mut text = String::from("memory a device           parameters GiB   beside them\n");
        for need in &self.needs {
            let (name, parameters) = (need.program.name(), gib(self.alone(need) - need.work.unwrap_or(0)));
            let work = need.work.map_or("unknown".to_string(), |work| format!("{:.3}", gib(work)));
            // Writing to a String cannot fail.
            let _ = writeln!(text, "  {name:<24}{parameters:>14.3}{work:>14}");
        }
        let _ = writeln!(text, "  {:<24}{:>14.3}", "all loaded", gib(self.all()));
        let _ =
            writeln!(text, "  {:<24}{:>14.3}", "one component at a time", gib(self.largest().map_or(0, |(_, b)| b)));
        let free = self.limit.map_or("not known here".to_string(), |bytes| format!("{:.3}", gib(bytes)));
        let _ = write!(text, "  {:<24}{free:>14}", "may be used");
        text
    }
}

fn gib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// Plans a run and decides what stays on its devices.
///
/// # Errors
/// Too little memory, with the cheapest change that fits; what is wrong with a program.
pub(crate) fn plan(
    config: &Config,
    programs: &Programs,
    executor: &mut Executor,
    build: &Build,
    group: Option<&Arc<Group>>,
) -> Result<Keep> {
    let plan = Plan::of(config, programs, executor, build, group)?;
    tracing::debug!("{}", plan.table());
    let residency = config.runtime.residency;
    match plan.keep(residency) {
        Some(keep) => Ok(keep),
        None => Err(PipelineError::TooLarge(shortage(&plan, config, executor, build))),
    }
}

/// Tilings that are proposed, as they are set, with their overlaps: the default, and one of the diffusion decoder.
const TILINGS: [(&str, usize, usize); 2] = [("", 64, 24), ("overlap: 160, frame_overlap: 40", 160, 40)];

/// Message of a run that does not fit: the missing bytes, and the cheapest change that fits.
fn shortage(plan: &Plan, config: &Config, executor: &Executor, build: &Build) -> String {
    let limit = plan.limit.unwrap_or(usize::MAX);
    let have = format!("{:.2} GiB a device may be used", gib(limit));
    if config.runtime.residency == Residency::Resident && plan.keep(Residency::Auto).is_some() {
        let all = gib(plan.all());
        return format!("all parts together need {all:.2} GiB a device, {have}: set runtime.residency to auto");
    }
    let Some((need, bytes)) = plan.largest() else { return have };
    let (name, work) =
        (need.program.name(), need.work.map_or("unknown".to_string(), |work| format!("{:.2}", gib(work))));
    let what = format!("{name} needs {:.2} GiB a device ({work} of them beside its parameters), {have}", gib(bytes));
    // Candidates, the cheapest first; what they need is estimate from this plan, not compiled.
    let tiled = TILINGS.into_iter().filter(|_| config.runtime.tiling.is_none()).map(|(set, overlap, frame_overlap)| {
        let tiling = Tiling { overlap, frame_overlap, ..Tiling::default() };
        (format!("--set 'runtime.tiling={{{set}}}'"), changed(config, |c| c.runtime.tiling = Some(tiling)))
    });
    let layouts = shipped_layouts().filter(|l| *l != config.layout).map(|layout| {
        let change = changed(config, |c| (c.layout, c.mesh) = (layout.into(), None));
        (format!("--layout {layout}"), change)
    });
    // Numbers that the model does not take are refused before any program is written.
    let frames = (1..config.clip_frames().unwrap_or(1)).rev().map(|n| match &config.request.chain {
        Some(chain) => {
            let chain = Some(Chain { clip: n, ..chain.clone() });
            (format!("--set request.chain.clip={n}"), changed(config, |c| c.request.chain = chain))
        }
        None => (format!("--num-frames {n}"), changed(config, |c| c.request.num_frames = NumFrames::Count(n))),
    });
    let found = tiled
        .chain(layouts)
        .chain(frames)
        .find(|(_, change)| estimate(plan, change, executor, build).is_some_and(|bytes| bytes <= limit));
    match found {
        Some((change, _)) => format!("{what}: {change} would fit, as far as can be told without compiling it"),
        None => format!("{what}: no smaller tiles, shipped layout or number of frames fits; take more devices"),
    }
}

fn changed(config: &Config, change: impl FnOnce(&mut Config)) -> Config {
    let mut config = config.clone();
    change(&mut config);
    config
}

/// Bytes of a changed configuration's largest program alone: its parameters, and the work of today's program in the
/// proportion of the arguments and results that are not parameters.
fn estimate(plan: &Plan, config: &Config, executor: &Executor, build: &Build) -> Option<usize> {
    let engine = executor.engine();
    let new = setup::build_for(config, engine.devices().len(), engine.toolchain()).ok()?;
    if new.layout.mesh.devices() != build.layout.mesh.devices() {
        return None;
    }
    let programs = Programs::of(config, None).ok()?;
    let each = plan.needs.iter().map(|need| {
        let network = programs.network(need.program, &new).ok()?;
        let own: usize = parameters([&network]).values().sum();
        let ratio = io(&network) as f64 / need.io.max(1) as f64;
        Some(own + (need.work.unwrap_or(0) as f64 * ratio) as usize)
    });
    each.collect::<Option<Vec<_>>>()?.into_iter().max()
}
