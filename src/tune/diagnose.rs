//! Diagnoses a program's collectives: finds the reason for each, and compiles changes of one layout rule that remove
//! them.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::candidates::{LayoutVariant, candidates};
use super::compile_report::CompileReport;
use super::compiler::{CaseCompiler, CompileTask, write_layout};
use super::difference::{Difference, difference};
use super::error::{Result, TuneError};
use super::options::TuneOptions;
use crate::config::{AUTO, CliOverrides, Config, LayoutSource, load, read_layout_source};
use crate::pipeline::plan::layouts::{LayoutComparison, RankingDevices, compare, mesh_name, rules_text, with_rules};
use crate::pipeline::plan::resolved::ResolvedConfig;
use crate::pipeline::programs::build::{ProgramKind, warn_once};
use crate::pipeline::programs::compile::{planned, unmatched_patterns};
use crate::runtime::Target;

#[derive(Clone, Debug)]
pub(crate) struct DiagnoseRequest {
    /// Configuration and its command-line overrides, including layout and mesh.
    pub(crate) given: CliOverrides,
    /// Arguments that give a child process the same configuration, except for the layout.
    pub(crate) settings: Vec<String>,
    pub(crate) target: String,
    /// Chip for which times are predicted; `None`: the target's chip.
    pub(crate) chip: Option<crate::analysis::Chip>,
    pub(crate) program: ProgramKind,
    pub(crate) layers: usize,
    /// Number (from 1) of the collective that changes must remove; `None`: changes may remove any collective.
    pub(crate) collective: Option<usize>,
    pub(crate) budget: usize,
    pub(crate) timeout: u64,
}

/// Default maximum number of changes to compile.
pub(crate) const BUDGET: usize = 6;

/// Minimum cost saved by a suggestion, as a fraction of the step.
pub(crate) const MIN_GAIN: f64 = 0.01;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TradeOff {
    /// Needs no additional memory and no other collectives.
    None,
    Memory,
    /// Replaces the removed collectives with other collectives.
    #[serde(rename = "exchanges")]
    OtherCollectives,
}

/// A layout change that was compiled and makes the step faster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Suggestion {
    pub(crate) change: String,
    #[serde(rename = "price")]
    pub(crate) trade_off: TradeOff,
    /// Number of tensor families (groups of similar tensors) that the change affects.
    pub(crate) families: usize,
    /// Milliseconds per step with all blocks, before and after the change; received bytes if the chip is unknown.
    pub(crate) cost: [f64; 2],
    /// Output bytes of one block's collectives, before and after the change.
    pub(crate) block_bytes: [f64; 2],
    pub(crate) difference: Difference,
    /// Numbers (from 1) of the collectives that the change is meant to remove.
    pub(crate) collectives: Vec<usize>,
    pub(crate) layout: String,
}

impl Suggestion {
    /// Returns the cost saved, as a fraction of the step.
    pub(crate) fn gain(&self) -> f64 {
        1.0 - self.cost[1] / self.cost[0]
    }
}

/// Cost estimates of the layout and of shipped layouts on the same devices. They need no compilation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct ShippedLayouts {
    /// Estimated milliseconds per step of the diagnosed layout; received bytes if the chip is unknown.
    pub(crate) estimate: f64,
    /// Fastest shipped layout, with its fastest mesh on these devices.
    pub(crate) fastest: EstimatedLayout,
    /// Rules of shipped layouts that are missing in the diagnosed layout and would make it faster, best first.
    pub(crate) additions: Vec<EstimatedLayout>,
    /// The findings as text: a faster shipped layout, and missing rules.
    pub(crate) lines: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct EstimatedLayout {
    /// Name of a shipped layout.
    pub(crate) layout: String,
    pub(crate) mesh: String,
    /// Rules that would be added to the diagnosed layout; empty for the shipped layout itself.
    pub(crate) rules: Vec<String>,
    /// Estimated milliseconds per step; received bytes if the chip is unknown.
    pub(crate) estimate: f64,
}

impl From<&LayoutComparison> for ShippedLayouts {
    fn from(found: &LayoutComparison) -> Self {
        let best = found.fastest();
        let additions = found.additions.iter().map(|a| EstimatedLayout {
            layout: a.lacking.shipped.into(),
            mesh: mesh_name(&a.estimate.mesh),
            rules: a.lacking.rules.iter().map(ToString::to_string).collect(),
            estimate: found.per_step(&a.estimate),
        });
        ShippedLayouts {
            estimate: found.per_step(&found.own),
            fastest: EstimatedLayout {
                layout: best.layout.clone(),
                mesh: mesh_name(&best.mesh),
                rules: Vec::new(),
                estimate: found.per_step(best),
            },
            additions: additions.collect(),
            lines: found.lines(),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Diagnosis {
    /// Report on the unchanged program. Its rules refer to lines of the requested layout file.
    pub(crate) base: CompileReport,
    /// Changes that save time, the largest saving first. Of equal savings, a change of fewer families comes first.
    pub(crate) suggestions: Vec<Suggestion>,
    /// Compiled changes that save less than [`MIN_GAIN`], each with the saved fraction.
    pub(crate) no_gain: Vec<(String, f64)>,
    /// Changes that are invalid, fail to compile or do not fit into device memory, each with the reason.
    pub(crate) rejected: Vec<(String, String)>,
    pub(crate) not_compiled: Vec<String>,
    /// Comparison with shipped layouts; `None` if the program or the layout cannot be estimated.
    pub(crate) shipped: Option<ShippedLayouts>,
}

/// Diagnoses a program. Writes the changed layouts, modules and results to `options.folder`.
///
/// # Errors
/// Returns an error if the configuration or layout is invalid, or if the unchanged program does not compile.
pub(crate) fn diagnose(request: &DiagnoseRequest, options: &TuneOptions) -> Result<Diagnosis> {
    let target = Target::parse(&request.target, request.chip.as_ref())?;
    let mut compiler = CaseCompiler::open(options)?;
    let mut config = ResolvedConfig::from(&load(&request.given)?.config);
    let mut request = request.clone();
    if config.layout == AUTO {
        let machine = compiler.machine(&target).map_err(TuneError::Base)?;
        config = planned(&config, None, &machine)?.config;
        // Keep the mesh that `auto` chose for the unchanged layout; a mesh that was set explicitly is the same anyway.
        let mesh = config.placement(machine.devices.len())?.mesh;
        request.given.mesh = Some(mesh_name(&mesh));
        if let Some(at) = request.settings.iter().position(|word| word == "--mesh") {
            request.settings.drain(at..at + 2);
        }
        request.settings.extend(["--mesh".to_string(), mesh_name(&mesh)]);
    }
    let asked = read_layout_source(&config.layout)?;
    let request = &request;
    let jobs = DiagnoseJobs { request, options, target };
    // Copy the layout to a file named after a hash of its contents, so that equal layouts are compiled once.
    let (source, path) = jobs.write(&asked)?;
    let task = jobs.task(&path, &config.layout);
    let compiled = compiler.compile(std::slice::from_ref(&task), &[None], request.timeout)?;
    let base = compiled.into_iter().next().expect("every task has a result");
    let unchanged = base.key;
    let compared = compared(&config, request, &jobs.target);
    let base = base.report.ok_or_else(|| {
        let faster = compared.as_ref().and_then(LayoutComparison::faster);
        TuneError::Base([no_report(base.error)].into_iter().chain(faster).collect::<Vec<_>>().join("; "))
    })?;
    let machine = compiler.machine(&jobs.target).map_err(TuneError::Base)?;
    warn_once(unmatched_patterns(&config, &machine)?);
    let mut all = candidates(&source, &base, MIN_GAIN);
    all.extend(compared.iter().flat_map(|found| additions(found, &source, &base)));
    all.sort_by(|a, b| b.bound.total_cmp(&a.bound));
    if let Some(number) = request.collective {
        if number == 0 || number > base.collectives.list.len() {
            let count = base.collectives.list.len();
            return Err(TuneError::Base(format!("--collective {number}: must be 1 to {count}")));
        }
        all.retain(|c| c.collectives.contains(&(number - 1)));
    }
    let (suggestions, no_gain, rejected, not_compiled) = (vec![], vec![], vec![], vec![]);
    let shipped = compared.as_ref().map(ShippedLayouts::from);
    let mut diagnosis = Diagnosis { base, suggestions, no_gain, rejected, not_compiled, shipped };
    let (mut chosen, mut tasks) = (Vec::new(), Vec::new());
    for candidate in all {
        let (_, path) = jobs.write(&candidate.layout)?;
        let task = jobs.task(&path, &candidate.change);
        // A change that cannot be built, or that gives the same program, is not compiled.
        match compiler.key(&task)? {
            Err(why) => diagnosis.rejected.push((candidate.change, why)),
            Ok(key) if Some(&key) == unchanged.as_ref() => diagnosis.no_gain.push((candidate.change, 0.0)),
            Ok(_) if tasks.len() == request.budget => diagnosis.not_compiled.push(candidate.change),
            Ok(_) => {
                tasks.push(task);
                chosen.push(candidate);
            }
        }
    }
    let compiled = compiler.compile(&tasks, &options.workers(), request.timeout)?;
    for (candidate, compiled) in chosen.iter().zip(compiled) {
        match compiled.report {
            None => diagnosis.rejected.push((candidate.change.clone(), no_report(compiled.error))),
            Some(f) if !f.fits() => {
                diagnosis.rejected.push((candidate.change.clone(), "does not fit into device memory".into()))
            }
            Some(f) => {
                let suggestions = suggestion(candidate, &diagnosis.base, &f);
                match suggestions.gain() >= MIN_GAIN {
                    true => diagnosis.suggestions.push(suggestions),
                    false => diagnosis.no_gain.push((candidate.change.clone(), suggestions.gain())),
                }
            }
        }
    }
    diagnosis.suggestions.sort_by(|a, b| b.gain().total_cmp(&a.gain()).then(a.families.cmp(&b.families)));
    restore_rule_places(&mut diagnosis.base, &asked, &source);
    diagnosis.base.layout.clone_from(&config.layout);
    Ok(diagnosis)
}

fn no_report(error: Option<String>) -> String {
    error.unwrap_or_else(|| "the compiler returned no report".into())
}

/// Compares the layout with the shipped layouts for the diagnosed program; `None` if costs cannot be estimated.
fn compared(config: &Config, request: &DiagnoseRequest, target: &Target) -> Option<LayoutComparison> {
    let (toolchain, count, capacity) = target.described();
    let chip = target.chip();
    let devices = RankingDevices { toolchain: &toolchain, count, capacity, chip: chip.as_ref() };
    compare(config, devices, Some(request.program)).unwrap_or_else(|why| {
        tracing::debug!("cannot compare the layout with the shipped layouts: {why}");
        None
    })
}

/// Returns layout variants that add rules found in shipped layouts but missing from this one, if the estimated saving
/// is at least `MIN_GAIN`; `bound` is that saving. Returns an empty list if times cannot be estimated.
fn additions(found: &LayoutComparison, source: &LayoutSource, base: &CompileReport) -> Vec<LayoutVariant> {
    let worth = found.additions.iter().filter(|addition| found.is_timed() && addition.saved >= MIN_GAIN);
    worth
        .map(|addition| LayoutVariant {
            change: rules_text(&addition.lacking.rules),
            layout: with_rules(source, &addition.lacking.rules),
            bound: addition.saved * base.whole_cost(),
            families: 1,
            collectives: Vec::new(),
        })
        .collect()
}

fn suggestion(candidate: &LayoutVariant, base: &CompileReport, f: &CompileReport) -> Suggestion {
    let difference = difference(base, f);
    Suggestion {
        change: candidate.change.clone(),
        trade_off: trade_off(base, f, &difference),
        families: candidate.families,
        cost: [base.whole_cost(), f.whole_cost()],
        block_bytes: [base.collectives.per_layer_bytes, f.collectives.per_layer_bytes],
        difference,
        collectives: candidate.collectives.iter().map(|n| n + 1).collect(),
        layout: candidate.layout.to_yaml(&[]),
    }
}

/// Classifies the trade-off of a change: [`TradeOff::OtherCollectives`] if the bytes of any kind of collective grow by
/// more than the fraction [`MIN_GAIN`] of all collectives' bytes; otherwise [`TradeOff::Memory`] if the needed device
/// memory grows by more than the fraction [`MIN_GAIN`].
fn trade_off(base: &CompileReport, f: &CompileReport, difference: &Difference) -> TradeOff {
    let least = MIN_GAIN * base.collectives.per_step_bytes;
    let grown = difference.by_kind().into_iter().any(|(_, bytes)| bytes > least);
    match (grown, f.device_bytes() as f64 > base.device_bytes() as f64 * (1.0 + MIN_GAIN)) {
        (true, _) => TradeOff::OtherCollectives,
        (false, true) => TradeOff::Memory,
        (false, false) => TradeOff::None,
    }
}

/// Rewrites rule locations from the file and lines of the copied layout to those of the requested layout file.
fn restore_rule_places(base: &mut CompileReport, asked: &LayoutSource, copy: &LayoutSource) {
    let places = |s: &LayoutSource| -> Vec<String> {
        let all = s.rules.iter().chain(&s.storage).chain(s.overrides.iter().flat_map(|e| &e.rules));
        all.map(|r| r.place.clone()).collect()
    };
    let names: Vec<(String, String)> = places(copy).into_iter().zip(places(asked)).collect();
    let rename = |rule: &mut String| {
        let own = names.iter().find(|(own, _)| rule.strip_prefix(own.as_str()).is_some_and(|r| r.starts_with(": ")));
        if let Some((own, asked)) = own {
            *rule = format!("{asked}{}", &rule[own.len()..]);
        }
    };
    base.collectives.list.iter_mut().filter_map(|e| e.rule.as_mut()).flatten().for_each(rename);
    base.tensors.iter_mut().flat_map(|t| &mut t.rules).for_each(rename);
}

struct DiagnoseJobs<'a> {
    request: &'a DiagnoseRequest,
    options: &'a TuneOptions,
    target: Target,
}

impl DiagnoseJobs<'_> {
    /// Writes a layout and reads it back, so that its rules have the line numbers of the written file.
    fn write(&self, layout: &LayoutSource) -> Result<(LayoutSource, PathBuf)> {
        let path = write_layout(&self.options.folder, layout)?;
        Ok((read_layout_source(&path.to_string_lossy())?, path))
    }

    fn task(&self, layout: &Path, label: &str) -> CompileTask {
        let q = self.request;
        let layout = layout.to_string_lossy().into_owned();
        let mut command: Vec<String> = ["-q", "compile", "--json", "-", "--target"].map(str::to_string).into();
        command.extend([q.target.clone(), "--program".into(), q.program.flag().into()]);
        command.extend(["--layers".to_string(), q.layers.to_string()]);
        command.extend(q.settings.iter().cloned());
        command.extend(["--layout".to_string(), layout.clone()]);
        let mut given = q.given.clone();
        given.flags.retain(|f| f.path != "layout");
        given.flag("layout", "layout", Some(layout));
        let (target, program, layers) = (self.target.clone(), q.program, Some(q.layers));
        CompileTask { label: label.into(), given, target, program, layers, command }
    }
}
