//! Search for the fastest layout and mesh among all combinations of the shipped layouts' rules: pruned by a lower bound
//! where that suffices, compiled where it does not.
//!
//! Layouts are taken in waves, the shipped ones first, by estimated cost; those whose lower bound (`mod@bound`) exceeds the
//! fastest so far are pruned. Then single rules of the fastest are changed (`tune::candidates`) until no change gains.
//! Compiled modules are stored, so an interrupted search resumes. The order depends on the request alone, so a repeated
//! search has the same result.

mod bound;
mod space;
mod text;

use crate::pipeline::setup;
use crate::request;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::candidates::candidates;
use super::case_result::CaseResult;
use super::compile_report::CompileReport;
use super::compiler::{CompileTask, Compiler, write_layout};
use super::diagnose::MIN_GAIN;
use super::error::{Result, TuneError};
use super::options::Options;
use crate::analysis::Chip;
use crate::config::presets::LAYOUTS;
use crate::config::{Case, CliOverrides, Config, LayoutSource, load, read_layout_source};
use crate::nn::{Build, Layout, Lowering};
use crate::pipeline::compile::needed;
use crate::pipeline::programs::{ProgramKind, Programs};
use crate::runtime::{OpenTarget, Target, device_bytes};

pub use bound::{Bound, bound};
pub(crate) use space::{Extent, Point, composed, mesh_name, meshes};
pub use space::{parts, placed};
pub(crate) use text::{best_layout, summary};

#[derive(Clone, Debug)]
pub(crate) struct SearchRequest {
    /// Configuration with overrides, the shape among them; without layout and mesh.
    pub(crate) given: CliOverrides,
    /// Arguments that give a child the same.
    pub(crate) settings: Vec<String>,
    pub(crate) target: String,
    /// Video size as `WIDTHxHEIGHTxFRAMES`, where given.
    pub(crate) shape: Option<String>,
    /// The loop whose steps are to be fast.
    pub(crate) program: ProgramKind,
    /// Whether only layouts that fit into device memory, beside a run's other components, may win.
    pub(crate) fit: bool,
    pub(crate) layers: usize,
    pub(crate) budget: usize,
    /// Seconds after which no compilation is begun.
    pub(crate) seconds: u64,
    pub(crate) timeout: u64,
    /// Seed of the order among equals.
    pub(crate) seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PruneReason {
    /// Contradictory rules, or sizes that do not divide.
    Invalid,
    /// Parameters larger than device memory.
    TooLarge,
    /// Same program as another layout's.
    Duplicate,
    /// Lower bound above the fastest.
    Slower,
    /// Budget or time used up.
    OverBudget,
}

#[derive(Clone, Debug)]
pub(crate) struct SearchResult {
    pub(crate) rows: Vec<CaseResult>,
    pub(crate) winner: Option<Winner>,
    /// Layouts that were not compiled, by reason: name, and lower bound of the cost where known.
    pub(crate) pruned: BTreeMap<PruneReason, Vec<(String, Option<f64>)>>,
    /// Shipped layouts beyond the budget that could be faster.
    pub(crate) undecided: Vec<String>,
    /// Whether costs are milliseconds; else received bytes.
    pub(crate) timed: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Winner {
    pub(crate) row: usize,
    pub(crate) source: LayoutSource,
}

/// Programs per wave. Fixed, because pruning depends on earlier waves and must not depend on the number of workers.
const WAVE: usize = 4;

struct Bounded {
    point: Point,
    bound: f64,
    guess: f64,
    order: [u8; 8],
}

/// Searches for the fastest layout. Layout files, modules and results are kept in `options.folder`.
///
/// # Errors
/// Invalid target, configuration or shape; a memory limit for a target of unknown memory.
pub(crate) fn search(request: &SearchRequest, options: &Options) -> Result<SearchResult> {
    let target = options.predicted_on(request.target.parse()?);
    let config = load(&request.given)?.config;
    if request.fit && target.chip().is_none() {
        return Err(TuneError::Capacity(request.target.clone()));
    }
    let mut compiler = Compiler::open(options)?;
    let machine = compiler.machine(&target).map_err(TuneError::Base)?;
    let mut state = SearchState::new(request, options, &config, &machine, compiler)?;
    let started = Instant::now();
    let limit = Duration::from_secs(request.seconds);
    let (shipped, others) = state.space()?;
    state.all(shipped, &|| started.elapsed() < limit)?;
    state.all(others, &|| started.elapsed() < limit)?;
    state.changes(&|| started.elapsed() < limit)?;
    Ok(state.result())
}

struct SearchState<'a> {
    request: &'a SearchRequest,
    options: &'a Options,
    compiler: Compiler<'a>,
    capacity: Option<i64>,
    chip: Option<Chip>,
    target: Target,
    programs: Programs,
    /// Build of programs, but for the layout.
    build: Build,
    extent: Extent,
    /// Floating-point operations of a step's matmuls, over all devices.
    matmul_flops: f64,
    seen: BTreeSet<String>,
    spent: usize,
    rows: Vec<(CaseResult, Point)>,
    pruned: BTreeMap<PruneReason, Vec<(String, Option<f64>)>>,
    undecided: Vec<String>,
}

impl<'a> SearchState<'a> {
    fn new(
        request: &'a SearchRequest,
        options: &'a Options,
        config: &Config,
        machine: &OpenTarget,
        compiler: Compiler<'a>,
    ) -> Result<Self> {
        let said = |e: crate::pipeline::PipelineError| TuneError::Base(e.to_string());
        let platform = machine.target.platform().name();
        let config = Config { layout: "replicated".into(), mesh: None, ..config.clone() };
        let config = setup::resolve(&config, platform, 1);
        let build = setup::build_for(&config, 1, &machine.toolchain()).map_err(said)?;
        let programs = Programs::of(&config, None).map_err(said)?;
        // On one device, in a lowering that writes every matmul.
        let plain = Build { lowering: Lowering::default(), layout: Layout::default(), ..build.clone() };
        let alone = programs.network(request.program, &plain).map_err(said)?;
        let extent = Extent {
            devices: machine.devices.len(),
            videos: config.request.num_videos,
            branches: request::branches(&config).len(),
        };
        Ok(SearchState {
            request,
            options,
            compiler,
            capacity: machine.capacity,
            chip: machine.target.chip(),
            target: machine.target.clone(),
            programs,
            build,
            extent,
            matmul_flops: alone.program.dot_flops,
            seen: BTreeSet::new(),
            spent: 0,
            rows: Vec::new(),
            pruned: BTreeMap::new(),
            undecided: Vec::new(),
        })
    }

    /// Shipped layouts on every mesh whose axes they use, and layouts composed of their rules.
    fn space(&mut self) -> Result<(Vec<Bounded>, Vec<Bounded>)> {
        let meshes = meshes(self.extent);
        let mut shipped = Vec::new();
        for (name, _) in LAYOUTS {
            let source = read_layout_source(name)?;
            let on = |mesh| placed(format!("{name} {}", mesh_name(mesh)), Some(name.to_string()), &source, mesh);
            shipped.extend(meshes.iter().filter_map(on));
        }
        let others: Vec<Point> = meshes.iter().flat_map(composed).collect();
        let shipped = self.opened(shipped);
        let others = self.opened(others);
        Ok((shipped, others))
    }

    /// Points that could win, the most promising first.
    fn opened(&mut self, points: Vec<Point>) -> Vec<Bounded> {
        let mut open: Vec<Bounded> = points.into_iter().filter_map(|p| self.open(p)).collect();
        open.sort_by(|a, b| a.guess.total_cmp(&b.guess).then(a.order.cmp(&b.order)));
        open
    }

    fn open(&mut self, point: Point) -> Option<Bounded> {
        let mut leave = |why: PruneReason, label: &str, bound| {
            self.pruned.entry(why).or_default().push((label.to_string(), bound));
            None
        };
        let parts = parts(&point);
        // Of an unknown chip, the cost of repeating work on several devices is unknown.
        if self.chip.is_none() && parts < self.extent.devices {
            return leave(PruneReason::Invalid, &point.label, None);
        }
        let Ok(layout) = point.source.on(point.mesh.clone()) else {
            return leave(PruneReason::Invalid, &point.label, None);
        };
        let build = Build { layout: layout.clone(), ..self.build.clone() };
        let network = match self.programs.network(self.request.program, &build) {
            Ok(network) if network.notes.is_empty() || point.shipped.is_some() => network,
            _ => return leave(PruneReason::Invalid, &point.label, None),
        };
        let mut beside = 0;
        if let Some(capacity) = self.capacity.filter(|_| self.request.fit) {
            // A layout that another program of the run cannot take is no layout of a run.
            let Ok(others) = self.programs.parameters(&build) else {
                return leave(PruneReason::Invalid, &point.label, None);
            };
            // The loop's own are among its arguments; what else reads of its component is not.
            let own: usize = network.params.iter().map(|p| device_bytes(&network.program, p)).sum();
            beside = (others.values().sum::<usize>() - own) as i64;
            if needed(&network) + beside > capacity {
                return leave(PruneReason::TooLarge, &point.label, None);
            }
        }
        if !self.seen.insert(network.program.hash()) {
            return leave(PruneReason::Duplicate, &point.label, None);
        }
        let blocks = self.programs.layers();
        let bound = bound(&network, &layout, self.chip.as_ref(), self.matmul_flops, parts, blocks);
        tracing::debug!("{}: at least {:.3}, perhaps {:.3}", point.label, bound.cost(), bound.guess());
        let words = Sha256::digest(format!("{} {}", self.request.seed, point.label).as_bytes());
        let order = std::array::from_fn(|i| words[i]);
        Some(Bounded { point: Point { beside, ..point }, bound: bound.cost(), guess: bound.guess(), order })
    }

    fn best(&self) -> f64 {
        self.fastest().map_or(f64::INFINITY, |n| self.rows[n].0.cost().unwrap_or(f64::INFINITY))
    }

    fn fastest(&self) -> Option<usize> {
        let may = |row: &CaseResult, point: &Point| {
            let fits = |report: &CompileReport| !self.request.fit || report.fits_beside(point.beside);
            row.error.is_none() && row.report.as_ref().is_some_and(fits)
        };
        let all = self.rows.iter().enumerate().filter(|(_, (row, point))| may(row, point));
        let cost = |row: &CaseResult| row.cost().unwrap_or(f64::INFINITY);
        all.min_by(|a, b| cost(&a.1.0).total_cmp(&cost(&b.1.0))).map(|(n, _)| n)
    }

    /// Compiles a list in order, wave by wave, pruning what cannot be faster than the fastest so far.
    fn all(&mut self, mut list: Vec<Bounded>, time: &dyn Fn() -> bool) -> Result<()> {
        loop {
            let best = self.best();
            let (open, slow): (Vec<Bounded>, Vec<Bounded>) = list.into_iter().partition(|o| o.bound < best);
            self.leave(PruneReason::Slower, slow);
            if open.is_empty() {
                return Ok(());
            }
            let room = self.request.budget.saturating_sub(self.spent).min(WAVE);
            if room == 0 || !time() {
                let shipped = open.iter().filter(|o| o.point.shipped.is_some());
                self.undecided.extend(shipped.map(|o| o.point.label.clone()));
                self.leave(PruneReason::OverBudget, open);
                return Ok(());
            }
            let mut open = open.into_iter();
            let wave = open.by_ref().take(room).map(|o| o.point).collect();
            list = open.collect();
            self.compile(wave)?;
        }
    }

    fn leave(&mut self, why: PruneReason, list: Vec<Bounded>) {
        if !list.is_empty() {
            let all = list.into_iter().map(|o| (o.point.label, Some(o.bound)));
            self.pruned.entry(why).or_default().extend(all);
        }
    }

    /// Compiles single-rule changes of the fastest until none gains.
    fn changes(&mut self, time: &dyn Fn() -> bool) -> Result<()> {
        let mut from = None;
        while let Some(best) = self.fastest().filter(|n| from != Some(*n)) {
            from = Some(best);
            let (row, point) = self.rows[best].clone();
            let Some(report) = &row.report else { break };
            // Rules are identified by their lines in the file that was compiled.
            let source = match &row.case.layout {
                Some(name) => read_layout_source(name)?,
                None => point.source.clone(),
            };
            let changed = candidates(&source, report, MIN_GAIN)
                .into_iter()
                .filter_map(|c| placed(format!("{}, {}", point.label, c.change), None, &c.layout, &point.mesh));
            let changed: Vec<Point> = changed.collect();
            let open = self.opened(changed);
            self.all(open, time)?;
        }
        Ok(())
    }

    /// Compiles points, or reads their stored modules; a result each.
    fn compile(&mut self, points: Vec<Point>) -> Result<()> {
        let mut tasks = Vec::new();
        let mut layouts = Vec::new();
        for point in &points {
            let (task, layout) = self.task(point)?;
            tasks.push(task);
            layouts.push(layout);
        }
        self.spent += tasks.len();
        let all = self.compiler.compile(&tasks, &self.options.workers(), self.request.timeout)?;
        let compiler = tasks.first().and_then(|task| self.compiler.version(&task.target));
        for ((point, layout), compiled) in points.into_iter().zip(layouts).zip(all) {
            let case = Case {
                layout: Some(layout),
                mesh: Some(mesh_name(&point.mesh)),
                shape: self.request.shape.clone(),
                target: Some(self.request.target.clone()),
                ..Case::default()
            };
            let (label, report, error) = (point.label.clone(), compiled.report(), compiled.error);
            let compiler = compiler.clone();
            self.rows
                .push((CaseResult { case, label, precision: None, report, measured: None, error, compiler }, point));
        }
        Ok(())
    }

    /// Compilation of a point, and the layout's name: a shipped one's, or a file named by its contents.
    fn task(&self, point: &Point) -> Result<(CompileTask, String)> {
        let q = self.request;
        let layout = match &point.shipped {
            Some(name) => name.clone(),
            None => write_layout(&self.options.folder, &point.source)?.to_string_lossy().into_owned(),
        };
        let mesh = mesh_name(&point.mesh);
        let mut command: Vec<String> = ["-q", "compile", "--json", "-", "--target"].map(str::to_string).into();
        command.extend([q.target.clone(), "--program".into(), q.program.flag().into()]);
        command.extend(self.options.chip_arguments());
        command.extend(["--layers".to_string(), q.layers.to_string()]);
        command.extend(q.settings.iter().cloned());
        command.extend(["--layout".to_string(), layout.clone(), "--mesh".into(), mesh.clone()]);
        let mut given = q.given.clone();
        given.flag("layout", "layout", Some(layout.clone()));
        given.mesh = Some(mesh);
        let (label, target, program) = (point.label.clone(), self.target.clone(), q.program);
        Ok((CompileTask { label, given, target, program, layers: Some(q.layers), command }, layout))
    }

    fn result(self) -> SearchResult {
        let winner = self.fastest().map(|row| Winner { row, source: self.rows[row].1.source.clone() });
        let rows = self.rows.into_iter().map(|(row, _)| row).collect();
        SearchResult { rows, winner, pruned: self.pruned, undecided: self.undecided, timed: self.chip.is_some() }
    }
}
