//! Where the exchanges of a program come from, and which change of one rule mends them: each change compiled.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::candidates::{Candidate, candidates};
use super::compile_report::CompileReport;
use super::compiler::{CompileTask, Compiler, write_layout};
use super::difference::{Difference, difference};
use super::error::{Result, TuneError};
use super::experiment::Options;
use crate::config::{Given, LayoutSource, load, read_layout_source};
use crate::pipeline::programs::ProgramKind;
use crate::runtime::Target;

/// What is asked.
#[derive(Clone, Debug)]
pub struct DiagnoseRequest {
    /// Configuration, `--set` and flags of the model; layout and mesh among them.
    pub given: Given,
    /// The command line that gives a child the same, without layout.
    pub settings: Vec<String>,
    /// The devices.
    pub target: String,
    /// The program.
    pub program: ProgramKind,
    /// Blocks that are compiled.
    pub layers: usize,
    /// Only changes that could end this exchange, by its number from 1.
    pub collective: Option<usize>,
    /// Changes that are compiled at most.
    pub budget: usize,
    /// Seconds for one of them.
    pub timeout: u64,
}

/// The part of a step that a change must gain to be advised.
pub const MIN_GAIN: f64 = 0.01;

/// What a change asks for what it gains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TradeOff {
    /// Nothing: no more memory, no exchange that was not there.
    None,
    /// Memory.
    Memory,
    /// Other exchanges in place of those that end.
    #[serde(rename = "exchanges")]
    OtherCollectives,
}

/// A change that was compiled.
#[derive(Clone, Debug, Serialize)]
pub struct Suggestion {
    /// The change, in the words of a layout file.
    pub change: String,
    /// What it asks for.
    #[serde(rename = "price")]
    pub trade_off: TradeOff,
    /// Families of tensors that it reaches.
    pub families: usize,
    /// Milliseconds of a step before and after; received bytes where the chip is unknown.
    pub cost: [f64; 2],
    /// Bytes of exchanges in a block before and after.
    pub block_bytes: [f64; 2],
    /// What changed.
    pub difference: Difference,
    /// The exchanges that it was looked for, by number from 1.
    pub collectives: Vec<usize>,
    /// The layout file.
    pub layout: String,
}

impl Suggestion {
    /// The part of a step that it gains.
    pub fn gain(&self) -> f64 {
        1.0 - self.cost[1] / self.cost[0]
    }
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Diagnosis {
    /// The program as it is; rules name the file that was asked about.
    pub base: CompileReport,
    /// Changes that gain, the best first: without a price before those for memory before those for other exchanges;
    /// among equals by the gain for each family that they reach, so that one change is not several.
    pub suggestions: Vec<Suggestion>,
    /// Changes that were compiled and gain too little, with the part of a step that they gain.
    pub no_gain: Vec<(String, f64)>,
    /// Changes that the layout or the compiler refuses, or that do not fit, with why.
    pub rejected: Vec<(String, String)>,
    /// Changes that were left for a larger budget.
    pub not_compiled: Vec<String>,
}

/// Answers. Layout files of the changes, modules and results are kept in `options.folder`.
///
/// # Errors
/// What is wrong with configuration or layout; a program that does not compile as it is.
pub fn diagnose(request: &DiagnoseRequest, options: &Options) -> Result<Diagnosis> {
    let target: Target = request.target.parse()?;
    let config = load(&request.given)?.config;
    let asked = read_layout_source(&config.layout)?;
    let mut compiler = Compiler::open(options)?;
    let jobs = Jobs { request, options, target };
    // A copy under the name of its contents, so that equal layouts are compiled once whatever their files are called.
    let (source, path) = jobs.write(&asked)?;
    let task = jobs.task(&path, &config.layout);
    let compiled = compiler.compile(std::slice::from_ref(&task), &[None], request.timeout)?;
    let no_figures = |error: Option<String>| error.unwrap_or_else(|| "no figures".into());
    let base = compiled.into_iter().next().unwrap_or_default();
    let base = base.report().ok_or_else(|| TuneError::Base(no_figures(base.error)))?;
    let mut all = candidates(&source, &base, MIN_GAIN);
    if let Some(number) = request.collective {
        if number == 0 || number > base.collectives.list.len() {
            let count = base.collectives.list.len();
            return Err(TuneError::Base(format!("--collective {number}: there are 1 to {count}")));
        }
        all.retain(|c| c.collectives.contains(&(number - 1)));
    }
    let not_compiled = all.split_off(all.len().min(request.budget)).into_iter().map(|c| c.change).collect();
    let mut tasks = Vec::new();
    for c in &all {
        let (_, path) = jobs.write(&c.layout)?;
        tasks.push(jobs.task(&path, &c.change));
    }
    let compiled = compiler.compile(&tasks, &options.workers(), request.timeout)?;
    let mut diagnosis = Diagnosis { base, suggestions: vec![], no_gain: vec![], rejected: vec![], not_compiled };
    for (candidate, compiled) in all.iter().zip(compiled) {
        match compiled.report() {
            None => diagnosis.rejected.push((candidate.change.clone(), no_figures(compiled.error))),
            Some(f) if !f.fits() => {
                diagnosis.rejected.push((candidate.change.clone(), "does not fit the devices".into()))
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
    let rank = |a: &Suggestion| (a.trade_off, -a.gain() / a.families as f64);
    diagnosis.suggestions.sort_by(|a, b| rank(a).0.cmp(&rank(b).0).then(rank(a).1.total_cmp(&rank(b).1)));
    name_as_asked(&mut diagnosis.base, &asked, &source);
    diagnosis.base.layout = config.layout;
    Ok(diagnosis)
}

/// A candidate with what the compiler made of it.
fn suggestion(candidate: &Candidate, base: &CompileReport, f: &CompileReport) -> Suggestion {
    let difference = difference(base, f);
    Suggestion {
        change: candidate.change.clone(),
        trade_off: trade_off(base, f, &difference),
        families: candidate.families,
        cost: [base.cost(), f.cost()],
        block_bytes: [base.collectives.per_layer_bytes, f.collectives.per_layer_bytes],
        difference,
        collectives: candidate.collectives.iter().map(|n| n + 1).collect(),
        layout: candidate.layout.to_yaml(&[]),
    }
}

/// What a change asks for: a kind of exchange that grows by more than the least gain of all exchanges, or memory.
fn trade_off(base: &CompileReport, f: &CompileReport, difference: &Difference) -> TradeOff {
    let least = MIN_GAIN * base.collectives.per_step_bytes;
    let grown = difference.by_kind().into_iter().any(|(_, bytes)| bytes > least);
    match (grown, f.needed.bytes as f64 > base.needed.bytes as f64 * (1.0 + MIN_GAIN)) {
        (true, _) => TradeOff::OtherCollectives,
        (false, true) => TradeOff::Memory,
        (false, false) => TradeOff::None,
    }
}

/// Puts the places of the file that was asked about where those of its copy stand.
fn name_as_asked(base: &mut CompileReport, asked: &LayoutSource, copy: &LayoutSource) {
    let places = |s: &LayoutSource| -> Vec<String> {
        let all = s.rules.iter().chain(&s.storage).chain(s.exceptions.iter().flat_map(|e| &e.rules));
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
        command.extend([q.target.clone(), "--program".into(), q.program.flag()]);
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
