//! Diagnosis of a program's collectives: the reason of each, and compiled single-rule changes that remove them.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::candidates::{Candidate, candidates};
use super::compile_report::CompileReport;
use super::compiler::{CompileTask, Compiler, write_layout};
use super::difference::{Difference, difference};
use super::error::{Result, TuneError};
use super::options::Options;
use crate::config::{AUTO, CliOverrides, Config, LayoutSource, load, read_layout_source};
use crate::pipeline::compile::{resolved, unmatched_patterns};
use crate::pipeline::layouts::{Comparison, Devices, compare, mesh_name, rules_text, with_rules};
use crate::pipeline::programs::{ProgramKind, warn_once};
use crate::runtime::Target;

#[derive(Clone, Debug)]
pub(crate) struct DiagnoseRequest {
    /// Configuration with overrides; layout and mesh among them.
    pub(crate) given: CliOverrides,
    /// Arguments that give a child the same, without the layout.
    pub(crate) settings: Vec<String>,
    pub(crate) target: String,
    /// Chip that times are predicted with, in place of the target's.
    pub(crate) chip: Option<crate::analysis::Chip>,
    pub(crate) program: ProgramKind,
    pub(crate) layers: usize,
    /// Number, from 1, of the only collective to remove.
    pub(crate) collective: Option<usize>,
    pub(crate) budget: usize,
    pub(crate) timeout: u64,
}

/// Changes that are compiled unless the user says otherwise.
pub(crate) const BUDGET: usize = 6;

/// Minimum gain of a suggestion, as a fraction of the step.
pub(crate) const MIN_GAIN: f64 = 0.01;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TradeOff {
    /// Neither memory nor new collectives.
    None,
    Memory,
    /// Other collectives instead of those removed.
    #[serde(rename = "exchanges")]
    OtherCollectives,
}

/// Compiled change of the layout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct Suggestion {
    pub(crate) change: String,
    #[serde(rename = "price")]
    pub(crate) trade_off: TradeOff,
    /// Number of tensor families that it reaches.
    pub(crate) families: usize,
    /// Milliseconds per step of all blocks before and after; received bytes where the chip is unknown.
    pub(crate) cost: [f64; 2],
    /// Bytes of collectives per block before and after.
    pub(crate) block_bytes: [f64; 2],
    pub(crate) difference: Difference,
    /// Numbers, from 1, of the collectives that the change targets.
    pub(crate) collectives: Vec<usize>,
    pub(crate) layout: String,
}

impl Suggestion {
    /// Gain as a fraction of the step.
    pub(crate) fn gain(&self) -> f64 {
        1.0 - self.cost[1] / self.cost[0]
    }
}

/// Estimates of the layout and of shipped ones on the same devices, for the diagnosed program. Nothing is compiled for them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct ShippedLayouts {
    /// Estimated milliseconds of a step; received bytes where the chip is unknown.
    pub(crate) estimate: f64,
    /// Fastest shipped layout on any mesh of the devices.
    pub(crate) fastest: EstimatedLayout,
    /// Rules of shipped layouts that the layout lacks and that would make it faster, the best first.
    pub(crate) additions: Vec<EstimatedLayout>,
    /// All in words: a faster layout, and rules that are missing.
    pub(crate) lines: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct EstimatedLayout {
    /// Name of a shipped layout.
    pub(crate) layout: String,
    pub(crate) mesh: String,
    /// Rules that are added to the diagnosed layout; empty of the shipped layout itself.
    pub(crate) rules: Vec<String>,
    /// Milliseconds of a step; received bytes where the chip is unknown.
    pub(crate) estimate: f64,
}

impl From<&Comparison> for ShippedLayouts {
    fn from(found: &Comparison) -> Self {
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
    /// Report of the unchanged program; rules name the requested layout file.
    pub(crate) base: CompileReport,
    /// Changes that gain, the largest gain first; of equal ones that of fewer families.
    pub(crate) suggestions: Vec<Suggestion>,
    /// Compiled changes below the minimum gain, with their gain.
    pub(crate) no_gain: Vec<(String, f64)>,
    /// Changes that are invalid, fail to compile or do not fit, with the reason.
    pub(crate) rejected: Vec<(String, String)>,
    pub(crate) not_compiled: Vec<String>,
    /// `None`: the program or layout cannot be estimated.
    pub(crate) shipped: Option<ShippedLayouts>,
}

/// Diagnoses a program. Layout files of the changes, modules and results are kept in `options.folder`.
///
/// # Errors
/// Invalid configuration or layout; a program that does not compile unchanged.
pub(crate) fn diagnose(request: &DiagnoseRequest, options: &Options) -> Result<Diagnosis> {
    let target = Target::of(&request.target, request.chip.as_ref())?;
    let mut compiler = Compiler::open(options)?;
    let mut config = load(&request.given)?.config;
    let mut request = request.clone();
    if config.layout == AUTO {
        let machine = compiler.machine(&target).map_err(TuneError::Base)?;
        config = resolved(&config, &machine)?;
        // The mesh that was decided; one that was given stays.
        let mesh = config.placement(machine.devices.len())?.mesh;
        request.given.mesh = Some(mesh_name(&mesh));
        if let Some(at) = request.settings.iter().position(|word| word == "--mesh") {
            request.settings.drain(at..at + 2);
        }
        request.settings.extend(["--mesh".to_string(), mesh_name(&mesh)]);
    }
    let asked = read_layout_source(&config.layout)?;
    let request = &request;
    let jobs = Jobs { request, options, target };
    // A copy named by its contents, so that equal layouts are compiled once whatever their files are called.
    let (source, path) = jobs.write(&asked)?;
    let task = jobs.task(&path, &config.layout);
    let compiled = compiler.compile(std::slice::from_ref(&task), &[None], request.timeout)?;
    let base = compiled.into_iter().next().expect("a result of each task");
    let unchanged = base.key;
    let compared = compared(&config, request, &jobs.target);
    let base = base.report.ok_or_else(|| {
        let faster = compared.as_ref().and_then(Comparison::faster);
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
            return Err(TuneError::Base(format!("--collective {number}: there are 1 to {count}")));
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
        // A program that cannot be written, or is the same, is known without compiling.
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
    name_as_asked(&mut diagnosis.base, &asked, &source);
    diagnosis.base.layout = config.layout;
    Ok(diagnosis)
}

fn no_report(error: Option<String>) -> String {
    error.unwrap_or_else(|| "the compiler returned no report".into())
}

/// The layout compared with the shipped ones by the diagnosed program; `None`: it cannot be estimated.
fn compared(config: &Config, request: &DiagnoseRequest, target: &Target) -> Option<Comparison> {
    let (toolchain, count, capacity) = target.described();
    let chip = target.chip();
    let devices = Devices { toolchain: &toolchain, count, capacity, chip: chip.as_ref() };
    compare(config, devices, Some(request.program)).unwrap_or_else(|why| {
        tracing::debug!("the layout is not compared with the shipped ones: {why}");
        None
    })
}

/// Rules that the layout lacks as candidates. Their bound is what they save by estimates, where these are times.
fn additions(found: &Comparison, source: &LayoutSource, base: &CompileReport) -> Vec<Candidate> {
    let worth = found.additions.iter().filter(|addition| found.is_timed() && addition.saved >= MIN_GAIN);
    worth
        .map(|addition| Candidate {
            change: rules_text(&addition.lacking.rules),
            layout: with_rules(source, &addition.lacking.rules),
            bound: addition.saved * base.whole_cost(),
            families: 1,
            collectives: Vec::new(),
        })
        .collect()
}

fn suggestion(candidate: &Candidate, base: &CompileReport, f: &CompileReport) -> Suggestion {
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

/// Trade-off: a kind of collective that grows by more than the minimum gain, else memory.
fn trade_off(base: &CompileReport, f: &CompileReport, difference: &Difference) -> TradeOff {
    let least = MIN_GAIN * base.collectives.per_step_bytes;
    let grown = difference.by_kind().into_iter().any(|(_, bytes)| bytes > least);
    match (grown, f.device_bytes() as f64 > base.device_bytes() as f64 * (1.0 + MIN_GAIN)) {
        (true, _) => TradeOff::OtherCollectives,
        (false, true) => TradeOff::Memory,
        (false, false) => TradeOff::None,
    }
}

/// Replaces the file and lines of the copy by those of the requested layout.
fn name_as_asked(base: &mut CompileReport, asked: &LayoutSource, copy: &LayoutSource) {
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

struct Jobs<'a> {
    request: &'a DiagnoseRequest,
    options: &'a Options,
    target: Target,
}

impl Jobs<'_> {
    /// Writes a layout and reads it back, with the line numbers of its copy.
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
