//! Memory that a run needs on each device, planned beside the first load: from the programs as they are written and
//! compiled, against what the device says is free.

use super::setup;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use super::error::{PipelineError, Result, one_line};
use super::executor::Executor;
use super::layouts::needed;
use super::programs::{ProgramKind, Programs, parameters};
use super::residency::{Keep, work};
use crate::config::{Chain, Config, NumFrames, Residency, Tiling, shipped_layouts};
use crate::models::Network;
use crate::nn::Build;
use crate::runtime::processes::Group;
use crate::runtime::{During, RuntimeError, SpanKind, device_bytes};

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
    components: BTreeSet<&'static str>,
    /// Everything but parameters; none where that is unknown.
    work: Option<usize>,
    /// Of that, arguments and results.
    io: usize,
}

impl Need {
    /// A program that is not compiled.
    fn of(program: ProgramKind, network: &Network) -> Self {
        let components = network.params.iter().map(|p| p.component).collect();
        Need { program, components, work: None, io: io(network) }
    }

    /// Bytes beside parameters, as far as they are known: arguments and results before it is compiled.
    fn beside(&self) -> usize {
        self.work.unwrap_or(self.io)
    }
}

/// Bytes of a run on each device, by program and component.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Configuration of the run.
    config: Config,
    needs: Vec<Need>,
    /// Parameters of each component, in bytes.
    components: BTreeMap<&'static str, usize>,
    /// Bytes of those that each of two passes has for itself: the other pass' leave where there is no room.
    of_other_pass: usize,
    /// Bytes of a device that may be used, where that is known.
    limit: Option<usize>,
}

/// A plan that is kept, and the parameters that stay on the devices by it.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    plan: Rc<Plan>,
    pub(crate) keep: Keep,
}

/// Arguments and results that are no parameters, in bytes on a device.
fn io(network: &Network) -> usize {
    let parameters: usize = network.params.iter().map(|p| device_bytes(&network.program, p)).sum();
    usize::try_from(needed(network)).unwrap_or(0).saturating_sub(parameters)
}

/// Usable bytes of each device of this process, as the devices report them.
fn free_here(executor: &Executor) -> Option<usize> {
    let memory = executor.engine().devices().iter().filter_map(|d| d.memory().ok());
    // Parameters of earlier requests are counted with the run's own.
    let loaded = executor.parameter_bytes_of_device() as i64;
    let own = memory.filter_map(|m| Some(m.limit? - m.in_use + loaded)).min();
    own.map(|bytes| (bytes as f64 * (1.0 - SPARE)) as usize)
}

/// Usable bytes of each device. Processes that run together have one number, or they would run their programs in different
/// orders.
fn free(executor: &Executor, group: Option<&Arc<Group>>) -> Result<Option<usize>> {
    let (engine, own) = (executor.engine(), free_here(executor));
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
        let components = parameters(networks.iter().map(|(_, network)| &**network));
        let of_other_pass =
            components.iter().filter(|(c, _)| executor.differs_by_pass(c)).map(|(_, bytes)| bytes).sum();
        let limit = match config.runtime.memory_limit {
            Some(gib) => Some((gib * f64::from(1 << 30)) as usize),
            None => free(executor, group)?,
        };
        let all = (components.values().sum::<usize>() + of_other_pass) as f64;
        let engine = executor.engine();
        let are_cached = || networks.iter().all(|(kind, network)| engine.is_cached(kind.name(), &network.program));
        let takes = limit.map_or(0.0, |limit| all / limit as f64);
        let has_room = takes <= ROOMY || takes <= ROOMY_CACHED && are_cached();
        let has_room = has_room && config.runtime.residency != Residency::InTurn;
        executor.load_ahead(networks.iter().map(|(_, network)| network.clone()), has_room);
        let needs = networks.iter().map(|(program, network)| Need::of(*program, network));
        let mut plan = Plan { config: config.clone(), needs: needs.collect(), components, of_other_pass, limit };
        if let Err(error) = plan.compile(&networks, executor) {
            // What programs need beside their arguments and results is not known yet.
            return Err(plan.explain(error, None, executor, build));
        }
        Ok(plan)
    }

    /// Compiles the programs, which says what they need.
    fn compile(&mut self, networks: &[(ProgramKind, Arc<Network>)], executor: &mut Executor) -> Result<()> {
        executor.compile_all(networks.iter().map(|(kind, network)| (kind.name(), &**network)))?;
        for (need, (program, network)) in self.needs.iter_mut().zip(networks) {
            need.work = work(network, &*executor.compile(program.name(), network)?);
        }
        Ok(())
    }

    /// Bytes with every component loaded.
    fn all(&self) -> usize {
        self.components.values().sum::<usize>()
            + self.of_other_pass
            + self.needs.iter().filter_map(|n| n.work).max().unwrap_or(0)
    }

    /// Bytes of a program alone, as far as they are known.
    fn alone(&self, need: &Need) -> usize {
        need.beside() + need.components.iter().filter_map(|c| self.components.get(c)).sum::<usize>()
    }

    /// The program that needs most, loaded alone.
    fn largest(&self) -> Option<(&Need, usize)> {
        self.needs.iter().map(|n| (n, self.alone(n))).max_by_key(|(_, bytes)| *bytes)
    }

    /// The program that an error is about: by its name, by that of a component that it reads, else the largest.
    fn need_of(&self, name: &str) -> Option<&Need> {
        let is_meant =
            |need: &&Need| need.program.name() == name || name.split(", ").any(|c| need.components.contains(c));
        self.needs.iter().filter(is_meant).max_by_key(|need| self.alone(need)).or(self.largest().map(|(need, _)| need))
    }

    /// Bytes of a program with what stays on the devices.
    fn tried(&self, need: &Need, keep: Option<Keep>) -> usize {
        let alone = self.alone(need);
        match keep {
            Some(Keep::All) => self.all(),
            Some(Keep::Most(bytes)) => bytes.max(alone),
            Some(Keep::OneComponent) | None => alone,
        }
    }

    /// Bytes of a program, and those that may be used, in words.
    fn needed(&self, need: &Need, keep: Option<Keep>, known: Option<usize>) -> String {
        let (alone, tried) = (self.alone(need), self.tried(need, keep));
        let mut text = format!("{} needs {:.2} GiB a device", need.program.name(), gib(alone));
        if tried > alone {
            text += &format!(" and {:.2} with what stays loaded", gib(tried));
        }
        text + &may_be_used(known)
    }

    /// An error of too little memory in the plan's words: what is needed, what is free, the cheapest change that fits. Others
    /// stay as they are. `keep` is what stays on the devices, none before that is decided.
    fn explain(&self, error: PipelineError, keep: Option<Keep>, executor: &Executor, build: &Build) -> PipelineError {
        let PipelineError::Runtime(RuntimeError::OutOfMemory { name, .. }) = &error else { return error };
        let Some(need) = self.need_of(name) else { return error };
        let (alone, least) = (self.alone(need), self.largest().map_or(0, |(_, bytes)| bytes));
        // What was tried took more than there is, whatever the devices say.
        let tried = self.tried(need, keep);
        let too_much = (tried as f64 * (1.0 - SPARE)) as usize;
        // As it was before anything was loaded.
        let known = [self.limit, free_here(executor)].into_iter().flatten().min();
        let turns = tried > alone && least <= too_much.min(known.unwrap_or(usize::MAX));
        let change = match turns {
            true => Some("--set runtime.residency=in_turn".to_string()),
            false => self.cheapest(executor, build, |one| match one == need.program {
                true => too_much.min(known.unwrap_or(usize::MAX)),
                false => known.unwrap_or(usize::MAX),
            }),
        };
        let would =
            if need.work.is_some() { WOULD_FIT } else { "needs less, as far as can be told without compiling it" };
        let change = change.map_or_else(|| NOTHING_FITS.into(), |change| format!("{change} {would}"));
        too_little(error, &self.needed(need, keep, known), &change)
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
            let (name, parameters) = (need.program.name(), gib(self.alone(need) - need.beside()));
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

/// An error of too little memory with what is needed and what to change. Others stay as they are.
fn too_little(error: PipelineError, needs: &str, change: &str) -> PipelineError {
    let PipelineError::Runtime(RuntimeError::OutOfMemory { during, name, source }) = &error else { return error };
    let what = if *during == During::Load { "parameters of " } else { "" };
    let said = one_line(source);
    PipelineError::TooLarge(format!(
        "{during} {what}{name}: a device has too little memory: {needs}: {change}; the plugin says: {said}"
    ))
}

/// An error of a program that runs by itself: of too little memory with what it needs and what is free. Others stay as they are.
pub(super) fn explain_alone(error: PipelineError, network: &Network, executor: &Executor) -> PipelineError {
    let parameters: usize = network.params.iter().map(|p| device_bytes(&network.program, p)).sum();
    let hash = network.program.hash();
    let compiled = executor.made().iter().find(|program| program.hash() == hash);
    let (least, beside) = match compiled.and_then(|compiled| work(network, compiled)) {
        Some(work) => ("", work),
        None => ("at least ", io(network)),
    };
    let free = may_be_used(free_here(executor));
    let needs = format!("it needs {least}{:.2} GiB a device{free}", gib(parameters + beside));
    too_little(error, &needs, "take a smaller input, or more devices and a layout that splits it (--layout, --mesh)")
}

fn may_be_used(known: Option<usize>) -> String {
    match known {
        Some(bytes) => format!(", {:.2} GiB may be used", gib(bytes)),
        None => ", what is free is not known".into(),
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
) -> Result<Planned> {
    let plan = Plan::of(config, programs, executor, build, group)?;
    tracing::debug!("{}", plan.table());
    match plan.keep(config.runtime.residency) {
        Some(keep) => Ok(Planned { plan: Rc::new(plan), keep }),
        None => Err(PipelineError::TooLarge(plan.shortage(executor, build))),
    }
}

impl Planned {
    /// Bytes of each program and component in words, for a process that a plugin aborts.
    pub(crate) fn needs(&self, executor: &Executor) -> impl Fn(&str) -> Option<String> + Send + Sync + use<> {
        let known = [self.plan.limit, free_here(executor)].into_iter().flatten().min();
        let of = |need: &Need| {
            let turns = self.plan.tried(need, Some(self.keep)) > self.plan.alone(need);
            let change = if turns { "--set runtime.residency=in_turn" } else { "fewer frames or more devices" };
            let needed = self.plan.needed(need, Some(self.keep), known);
            format!("{needed} unless other processes hold some of it; less is needed with {change}")
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

    /// An error of a run by this plan; of too little memory in the plan's words.
    pub(crate) fn explain(&self, error: PipelineError, executor: &Executor, build: &Build) -> PipelineError {
        self.plan.explain(error, Some(self.keep), executor, build)
    }
}

/// Tilings that are proposed, as they are set, with their overlaps: the default, and one of the diffusion decoder.
const TILINGS: [(&str, usize, usize); 2] = [("", 64, 24), ("overlap: 160, frame_overlap: 40", 160, 40)];

const WOULD_FIT: &str = "would fit, as far as can be told without compiling it";
const NOTHING_FITS: &str = "no smaller tiles, shipped layout or number of frames fits; take more devices";

impl Plan {
    /// Message of a run that does not fit: the missing bytes, and the cheapest change that fits.
    fn shortage(&self, executor: &Executor, build: &Build) -> String {
        let limit = self.limit.unwrap_or(usize::MAX);
        let have = format!("{:.2} GiB a device may be used", gib(limit));
        if self.config.runtime.residency == Residency::Resident && self.keep(Residency::Auto).is_some() {
            let all = gib(self.all());
            return format!("all parts together need {all:.2} GiB a device, {have}: set runtime.residency to auto");
        }
        let Some((need, bytes)) = self.largest() else { return have };
        let (name, work) =
            (need.program.name(), need.work.map_or("unknown".to_string(), |work| format!("{:.2}", gib(work))));
        let what =
            format!("{name} needs {:.2} GiB a device ({work} of them beside its parameters), {have}", gib(bytes));
        match self.cheapest(executor, build, |_| limit) {
            Some(change) => format!("{what}: {change} {WOULD_FIT}"),
            None => format!("{what}: {NOTHING_FITS}"),
        }
    }

    /// The cheapest change, as flags, with which each program alone fits into its `limit` of bytes; what it needs is an estimate from
    /// this plan, not compiled.
    fn cheapest(&self, executor: &Executor, build: &Build, limit: impl Fn(ProgramKind) -> usize) -> Option<String> {
        let fits = |change: &Config| {
            let needs = self.estimate(change, executor, build);
            needs.is_some_and(|needs| needs.into_iter().all(|(program, bytes)| bytes <= limit(program)))
        };
        candidates(&self.config).find(|(_, change)| fits(change)).map(|(flags, _)| flags)
    }

    /// Bytes of each of a changed configuration's programs alone: its parameters, and the work of today's program in the
    /// proportion of the arguments and results that are not parameters.
    fn estimate(&self, config: &Config, executor: &Executor, build: &Build) -> Option<Vec<(ProgramKind, usize)>> {
        let engine = executor.engine();
        let new = setup::build_for(config, engine.devices().len(), engine.toolchain()).ok()?;
        if new.layout.mesh.devices() != build.layout.mesh.devices() {
            return None;
        }
        let programs = Programs::of(config, None).ok()?;
        let each = self.needs.iter().map(|need| {
            let network = programs.network(need.program, &new).ok()?;
            let own: usize = parameters([&network]).values().sum();
            let ratio = io(&network) as f64 / need.io.max(1) as f64;
            Some((need.program, own + (need.beside() as f64 * ratio) as usize))
        });
        each.collect()
    }
}

/// Configurations that need less, the cheapest first, each with the flags that make it.
fn candidates(config: &Config) -> impl Iterator<Item = (String, Config)> {
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
    tiled.chain(layouts).chain(frames)
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

    /// Parameters come in the order of a program's arguments, where those of a component may be on both sides of another's.
    #[test]
    fn a_component_s_parameters_count_once() {
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
        let need = Need::of(ProgramKind::TextEncoder, &network);
        assert_eq!(need.components.into_iter().collect::<Vec<_>>(), ["connectors", "text_encoder"]);
    }

    #[test]
    fn the_other_pass_s_weights_leave_before_a_run_is_refused() {
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
        let components = [("text_encoder", 60), ("transformer", 100)].into();
        let plan = |limit| Plan {
            config: Config::default(),
            needs: needs.clone(),
            components: BTreeMap::clone(&components),
            of_other_pass: 100,
            limit: Some(limit),
        };
        assert_eq!(plan(0).all(), 270);
        assert_eq!(plan(270).keep(Residency::Auto), Some(Keep::All));
        assert_eq!(plan(269).keep(Residency::Auto), Some(Keep::Most(269)));
        // One transformer and its work.
        assert_eq!(plan(110).keep(Residency::Auto), Some(Keep::Most(110)));
        assert_eq!(plan(109).keep(Residency::Auto), None);
        assert_eq!(plan(110).keep(Residency::InTurn), Some(Keep::OneComponent));
    }
}
