//! Searches for the fastest layout and mesh among all combinations of the shipped layouts' rules and user-supplied
//! layouts. Layouts that a lower bound excludes are pruned; the others are compiled.
//!
//! Layouts are compared by the time of all steps that a request runs, in all its loops and at all requested sizes, for
//! one batch size. They are compiled in waves of a few layouts: user-supplied layouts first, then shipped ones, then
//! combinations, each in order of increasing estimated cost. Layouts whose lower bound (`pipeline::plan::layouts`)
//! exceeds the cost of the fastest compiled layout are pruned. Then single rules of the fastest layout are changed
//! (`tune::candidates`) until no change makes it faster. Compiled modules are stored, so an interrupted search resumes.
//! The order depends only on the request, so repeating a search gives the same result.

mod result;
#[cfg(test)]
mod tests;
mod text;
mod workload;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::candidates::candidates;
use super::case_result::CaseResult;
use super::compile_report::GIB;
use super::compiler::{CaseCompiler, CompileResult, CompileTask, write_layout};
use super::diagnose::MIN_GAIN;
use super::error::{Result, TuneError};
use super::options::TuneOptions;
use crate::config::presets::LAYOUTS;
use crate::config::{Case, CliOverrides, LayoutSource, read_layout_source};
use crate::pipeline::PipelineError;
use crate::pipeline::plan::layouts::{Point, RankingDevices, composed, mesh_name, meshes, placed};
use crate::pipeline::programs::build::ProgramKind;
use crate::runtime::Target;

pub(crate) use result::SearchResult;
use result::{ComparedLoop, ComparisonBasis, PruneReason, PrunedLayout, TriedLayout};
pub(crate) use text::{best_layout, summary};
use workload::{WorkloadBatch, parts};

#[derive(Clone, Debug)]
pub(crate) struct SearchRequest {
    /// Configuration and its command-line overrides, without layout and mesh.
    pub(crate) given: CliOverrides,
    pub(crate) target: String,
    /// Video sizes as `WIDTHxHEIGHTxFRAMES`, one request per size. Empty: the configuration's size.
    pub(crate) shapes: Vec<String>,
    /// Batch sizes (videos generated together) to choose from. Empty: the configuration's batch size.
    pub(crate) videos: Vec<usize>,
    /// Loop whose steps are optimized; `None`: all loops of a request.
    pub(crate) program: Option<ProgramKind>,
    /// Layouts to try in addition to the shipped ones.
    pub(crate) layouts: Vec<String>,
    /// Whether the winner must fit into device memory together with the other components of a run.
    pub(crate) fit: bool,
    /// GiB of device memory that a run may use; `None`: only `fit` limits the memory.
    pub(crate) memory: Option<f64>,
    pub(crate) layers: usize,
    pub(crate) budget: usize,
    /// Seconds after which no further compilation starts.
    pub(crate) seconds: u64,
    pub(crate) timeout: u64,
    /// Seed that determines the order of layouts with equal cost.
    pub(crate) seed: u64,
    /// Command line to record in the resulting layout file.
    pub(crate) command: String,
}

/// Number of layouts that are compiled together. The number is fixed, because pruning depends on earlier waves and must
/// not depend on the number of workers.
const WAVE: usize = 4;

/// A layout and batch size that could be the fastest.
struct BoundedLayout {
    point: Point,
    batch: usize,
    /// For each program, the bytes per device of the run's other parameters, which the program does not use; empty if
    /// memory is not limited.
    other_parameters: Vec<i64>,
    /// Factor that converts the total time of all steps of all programs to the layout's cost.
    weight: f64,
    bound: f64,
    guess: f64,
    order: [u8; 8],
}

/// Searches for the fastest layout. Writes layout files, modules and results to `options.folder`.
pub(crate) fn search(request: &SearchRequest, options: &TuneOptions) -> Result<SearchResult> {
    let target = options.target(&request.target)?;
    if target.slices() > 1 {
        let why =
            "a search is for one slice; remove the slice count (slices generate separate videos: --mesh dcn.data=N)";
        return Err(PipelineError::Usage(format!("--target {}: {why}", request.target)).into());
    }
    if request.fit && target.chip().is_none() {
        return Err(TuneError::Capacity(request.target.clone()));
    }
    let mut compiler = CaseCompiler::open(options)?;
    let machine = compiler.machine(&target).map_err(TuneError::Base)?;
    let (toolchain, chip) = (machine.toolchain(), target.chip());
    let asked = request.memory.map(|gib| (gib * GIB) as i64);
    let limit = machine.capacity.filter(|_| request.fit).into_iter().chain(asked).min();
    let count = machine.devices.len();
    let devices = RankingDevices { toolchain: &toolchain, count, capacity: limit, chip: chip.as_ref() };
    let counts =
        if request.videos.is_empty() { vec![None] } else { request.videos.iter().copied().map(Some).collect() };
    let batches: Result<Vec<WorkloadBatch>> =
        counts.into_iter().map(|videos| WorkloadBatch::new(request, videos, devices)).collect();
    let batches = batches?;
    let (timed, per_video) = (devices.chip.is_some(), batches.iter().any(|batch| batch.extent.videos > 1));
    let comparison = ComparisonBasis { parts: parts(&batches), timed, per_video };
    let least = comparison.parts.len();
    if request.budget < least {
        let why =
            format!("--budget {}: each layout has {least} programs to compile; use at least {least}", request.budget);
        return Err(PipelineError::Usage(why).into());
    }
    let (seen, tried, pruned) = (BTreeMap::new(), Vec::new(), Vec::new());
    let spent = 0;
    let mut state =
        LayoutSearch { request, options, compiler, target, devices, batches, comparison, seen, spent, tried, pruned };
    let (started, limit) = (Instant::now(), Duration::from_secs(request.seconds));
    for list in state.space()? {
        state.all(list, &|| started.elapsed() < limit)?;
    }
    state.changes(&|| started.elapsed() < limit)?;
    Ok(state.result())
}

struct LayoutSearch<'a> {
    request: &'a SearchRequest,
    options: &'a TuneOptions,
    compiler: CaseCompiler<'a>,
    target: Target,
    /// Devices, with the memory limit if the search has one.
    devices: RankingDevices<'a>,
    batches: Vec<WorkloadBatch<'a>>,
    comparison: ComparisonBasis,
    /// Labels of layouts, by the hashes of their programs.
    seen: BTreeMap<String, String>,
    /// Number of programs requested so far.
    spent: usize,
    tried: Vec<TriedLayout>,
    pruned: Vec<PrunedLayout>,
}

impl LayoutSearch<'_> {
    /// Returns user-supplied layouts, shipped layouts, and combinations of shipped rules, each on every mesh whose axes
    /// the layout uses.
    fn space(&mut self) -> Result<[Vec<BoundedLayout>; 3]> {
        let shipped = LAYOUTS.iter().map(|(name, _)| *name);
        let own = self.request.layouts.iter().map(String::as_str);
        let names: Vec<&str> = own.chain(shipped).collect();
        let sources: std::result::Result<Vec<LayoutSource>, _> = names.iter().map(|n| read_layout_source(n)).collect();
        let sources = sources?;
        let (mut asked, mut named, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for n in 0..self.batches.len() {
            let meshes = meshes(self.batches[n].extent);
            for (name, source) in names.iter().zip(&sources) {
                let on = |mesh| placed(format!("{name} {}", mesh_name(mesh)), Some((*name).to_string()), source, mesh);
                let points: Vec<Point> = meshes.iter().filter_map(on).collect();
                let is_asked = self.request.layouts.iter().any(|own| own == name);
                if points.is_empty() && is_asked {
                    let why = format!(
                        "every mesh of {} devices has an axis that the layout does not use",
                        self.devices.count
                    );
                    self.pruned.push(PrunedLayout::new(*name, true, PruneReason::Invalid, why));
                }
                let list = if is_asked { &mut asked } else { &mut named };
                list.extend(points.into_iter().map(|point| (point, n)));
            }
            others.extend(meshes.iter().flat_map(composed).map(|point| (point, n)));
        }
        Ok([self.opened(asked, false), self.opened(named, false), self.opened(others, true)])
    }

    /// Returns the layouts that could be the fastest, lowest estimate first. If `composed` is true, the layouts are
    /// combinations of shipped rules; a layout in which a rule has no effect because a dimension is not divisible is
    /// then pruned, because the same layout without this rule is also in the list.
    fn opened(&mut self, points: Vec<(Point, usize)>, composed: bool) -> Vec<BoundedLayout> {
        let mut open = Vec::new();
        for (mut point, batch) in points {
            point.label += &self.batches[batch].suffix;
            match self.bounded(&point, batch, composed) {
                Ok(bounded) => open.push(bounded),
                Err((reason, why)) => {
                    self.pruned.push(PrunedLayout::new(&point.label, point.named.is_some(), reason, why))
                }
            }
        }
        open.sort_by(|a, b| a.guess.total_cmp(&b.guess).then(a.order.cmp(&b.order)));
        open
    }

    /// Estimates a layout's cost and computes a lower bound for it. `Err`: why the layout is not compiled: it is
    /// invalid, does not fit in device memory, or has the same programs as an earlier layout.
    fn bounded(
        &mut self,
        point: &Point,
        n: usize,
        composed: bool,
    ) -> std::result::Result<BoundedLayout, (PruneReason, String)> {
        let batch = &self.batches[n];
        let (mut bound, mut guess, mut weight, mut notes) = (0.0, 0.0, batch.weight, Vec::new());
        let (mut hashes, mut estimates) = (Vec::new(), Vec::new());
        for workload in &batch.workloads {
            let (estimate, networks) = workload.estimator.estimate(point).map_err(|why| (PruneReason::Invalid, why))?;
            notes.extend(networks.iter().map(|n| n.notes.first().cloned()));
            weight = batch.weight * estimate.runs as f64;
            bound += estimate.bound * batch.weight;
            guess += estimate.cost * batch.weight;
            hashes.extend(networks.iter().map(|n| n.program.hash()));
            estimates.push(estimate);
        }
        if composed && let Some(notes) = notes.into_iter().collect::<Option<Vec<String>>>() {
            return Err((PruneReason::Invalid, notes.into_iter().next().unwrap_or_default()));
        }
        let mut other_parameters = Vec::new();
        if let Some(limit) = self.devices.capacity {
            for (workload, estimate) in batch.workloads.iter().zip(&estimates) {
                // All programs of the run share one layout, so the layout must be valid for each of them.
                let all = workload.estimator.parameters(point).map_err(|why| (PruneReason::Invalid, why))?;
                let needed = all + estimate.values;
                if needed > limit {
                    let why = format!("needs {:.2} of {:.2} GiB", needed as f64 / GIB, limit as f64 / GIB);
                    return Err((PruneReason::TooLarge, why));
                }
                other_parameters.extend(estimate.parameters.iter().map(|own| all - own));
            }
        }
        // Check for duplicates after memory: if a layout does not fit, another one with the same programs in its loops
        // still may.
        let hash = format!("{weight} {}", hashes.join(" "));
        if let Some(other) = self.seen.get(&hash) {
            return Err((PruneReason::Duplicate, format!("same as {other}")));
        }
        self.seen.insert(hash, point.label.clone());
        tracing::debug!("{}: lower bound {bound:.3}, estimate {guess:.3}", point.label);
        let words = Sha256::digest(format!("{} {}", self.request.seed, point.label).as_bytes());
        let order = std::array::from_fn(|i| words[i]);
        Ok(BoundedLayout { point: point.clone(), batch: n, other_parameters, weight, bound, guess, order })
    }

    fn best(&self) -> f64 {
        self.fastest().and_then(|n| self.tried[n].cost).unwrap_or(f64::INFINITY)
    }

    fn fastest(&self) -> Option<usize> {
        let all = self.tried.iter().enumerate().filter(|(_, tried)| tried.may_win());
        all.min_by(|a, b| a.1.cost.unwrap_or(f64::MAX).total_cmp(&b.1.cost.unwrap_or(f64::MAX))).map(|(n, _)| n)
    }

    /// Compiles a list in order, wave by wave, and prunes layouts that cannot be faster than the fastest so far.
    fn all(&mut self, mut list: Vec<BoundedLayout>, time: &dyn Fn() -> bool) -> Result<()> {
        loop {
            let best = self.best();
            let (open, slow): (Vec<BoundedLayout>, Vec<BoundedLayout>) = list.into_iter().partition(|o| o.bound < best);
            self.leave(PruneReason::Slower, slow);
            if open.is_empty() {
                return Ok(());
            }
            let programs = self.comparison.parts.len();
            let room = (self.request.budget.saturating_sub(self.spent) / programs).min(WAVE);
            if room == 0 || !time() {
                self.leave(PruneReason::OverBudget, open);
                return Ok(());
            }
            let mut open = open.into_iter();
            let wave = open.by_ref().take(room).collect();
            list = open.collect();
            self.compile(wave)?;
        }
    }

    fn leave(&mut self, reason: PruneReason, list: Vec<BoundedLayout>) {
        let pruned = list.into_iter().map(|o| {
            let why = format!("at least {}", self.comparison.text(o.bound));
            PrunedLayout::new(&o.point.label, o.point.named.is_some(), reason, why)
        });
        self.pruned.extend(pruned);
    }

    /// Compiles variants of the fastest layout with one changed rule. Repeats this with the new fastest layout until no
    /// variant is faster.
    fn changes(&mut self, time: &dyn Fn() -> bool) -> Result<()> {
        let mut from = None;
        while let Some(best) = self.fastest().filter(|n| from != Some(*n)) {
            from = Some(best);
            let TriedLayout { point, batch, rows, .. } = self.tried[best].clone();
            // Reports identify rules by their lines in the compiled layout file, so read that file.
            let source = match rows.first().and_then(|row| row.case.layout.as_ref()) {
                Some(name) => read_layout_source(name)?,
                None => point.source.clone(),
            };
            let reports = rows.iter().filter_map(|row| row.report.as_ref());
            let changes = reports.flat_map(|report| candidates(&source, report, MIN_GAIN));
            let (mut changed, mut once) = (Vec::new(), BTreeSet::new());
            for change in changes.filter(|c| once.insert(c.change.clone())) {
                let label = format!("{}, {}", self.batches[batch].without_suffix(&point.label), change.change);
                changed.extend(placed(label, None, &change.layout, &point.mesh).map(|point| (point, batch)));
            }
            let open = self.opened(changed, false);
            self.all(open, time)?;
        }
        Ok(())
    }

    /// Compiles layouts, or reads their stored modules, and records a result for each.
    fn compile(&mut self, wave: Vec<BoundedLayout>) -> Result<()> {
        let mut tasks = Vec::new();
        let mut layouts = Vec::new();
        for BoundedLayout { point, batch, .. } in &wave {
            let layout = match &point.named {
                Some(name) => name.clone(),
                None => write_layout(&self.options.folder, &point.source)?.to_string_lossy().into_owned(),
            };
            tasks.extend(self.tasks(point, &self.batches[*batch], &layout));
            layouts.push(layout);
        }
        self.spent += tasks.len();
        let all = self.compiler.compile(&tasks, &self.options.workers(), self.request.timeout)?;
        let compiler = self.compiler.version(&self.target);
        let (mut all, parts) = (all.into_iter(), &self.comparison.parts);
        for (BoundedLayout { point, batch, other_parameters, weight, .. }, layout) in wave.into_iter().zip(layouts) {
            let of = &self.batches[batch];
            let row = |(n, (part, compiled)): (usize, (&ComparedLoop, CompileResult))| {
                let name = format!("{}{}", part.name, of.suffix);
                let case = Case {
                    layout: Some(layout.clone()),
                    mesh: Some(mesh_name(&point.mesh)),
                    shape: Some(name.trim_start_matches(", ").to_string()).filter(|name| !name.is_empty()),
                    target: Some(self.request.target.clone()),
                    ..Case::default()
                };
                let (label, report, error) = (point.label.clone(), compiled.report, compiled.error);
                let room = self.devices.capacity.map(|limit| limit - other_parameters[n]);
                let compiler = compiler.clone();
                CaseResult { case, label, precision: None, report, measured: None, error, compiler, room }
            };
            let compiled = parts.iter().zip(all.by_ref().take(parts.len()));
            let rows: Vec<CaseResult> = compiled.enumerate().map(row).collect();
            let costs = rows.iter().zip(parts).map(|(row, part)| Some(row.cost()? * part.steps as f64));
            let cost = costs.sum::<Option<f64>>().map(|sum| sum * weight);
            self.tried.push(TriedLayout { point, batch, rows, other_parameters, cost });
        }
        Ok(())
    }

    /// Returns the compile tasks of a layout: one for each loop at each size.
    fn tasks(&self, point: &Point, batch: &WorkloadBatch, layout: &str) -> Vec<CompileTask> {
        let (q, mesh) = (self.request, mesh_name(&point.mesh));
        let task = |(settings, given, kind): (&[String], &CliOverrides, ProgramKind)| {
            let mut command: Vec<String> = ["-q", "compile", "--json", "-", "--target"].map(str::to_string).into();
            command.extend([q.target.clone(), "--program".into(), kind.flag().into()]);
            command.extend(self.options.chip_arguments());
            command.extend(["--layers".to_string(), q.layers.to_string()]);
            command.extend(settings.iter().cloned());
            command.extend(["--layout".to_string(), layout.to_string(), "--mesh".into(), mesh.clone()]);
            let mut given = given.clone();
            given.flag("layout", "layout", Some(layout.to_string()));
            given.mesh = Some(mesh.clone());
            let (label, target, layers) = (point.label.clone(), self.target.clone(), Some(q.layers));
            CompileTask { label, given, target, program: kind, layers, command }
        };
        batch.each().map(task).collect()
    }

    fn result(self) -> SearchResult {
        let (winner, limit) = (self.fastest(), self.devices.capacity);
        SearchResult { comparison: self.comparison, tried: self.tried, winner, pruned: self.pruned, limit }
    }
}
