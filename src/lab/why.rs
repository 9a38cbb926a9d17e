//! Where the exchanges of a program come from, and which change of one rule mends them: each change compiled.

use std::path::{Path, PathBuf};

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::candidates::{Candidate, candidates};
use super::compiler::{CompileTask, Compiler};
use super::difference::{Difference, difference};
use super::error::{LabError, Result};
use super::experiment::Options;
use super::figures::Figures;
use crate::config::{Given, LayoutSource, load, read_layout_source};
use crate::pipeline::programs::ProgramKind;
use crate::runtime::Target;

/// What is asked.
#[derive(Clone, Debug)]
pub struct Question {
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
pub const LEAST_GAIN: f64 = 0.01;

/// What a change asks for what it gains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Price {
    /// Nothing: no more memory, no exchange that was not there.
    None,
    /// Memory.
    Memory,
    /// Other exchanges in place of those that end.
    Exchanges,
}

/// A change that was compiled.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// The change, in the words of a layout file.
    pub change: String,
    /// What it asks for.
    pub price: Price,
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

impl Advice {
    /// The part of a step that it gains.
    pub fn gain(&self) -> f64 {
        1.0 - self.cost[1] / self.cost[0]
    }
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The program as it is; rules name the file that was asked about.
    pub base: Figures,
    /// Changes that gain, the best first: without a price before those for memory before those for other exchanges;
    /// among equals by the gain for each family that they reach, so that one change is not several.
    pub advice: Vec<Advice>,
    /// Changes that were compiled and gain too little, with the part of a step that they gain.
    pub useless: Vec<(String, f64)>,
    /// Changes that the layout or the compiler refuses, or that do not fit, with why.
    pub refused: Vec<(String, String)>,
    /// Changes that were left for a larger budget.
    pub left: Vec<String>,
}

/// Answers. Layout files of the changes, modules and results are kept in `options.folder`.
///
/// # Errors
/// What is wrong with configuration or layout; a program that does not compile as it is.
pub fn why(question: &Question, options: &Options) -> Result<Answer> {
    let target: Target = question.target.parse()?;
    let config = load(&question.given)?.config;
    let asked = read_layout_source(&config.layout)?;
    let mut compiler = Compiler::open(options)?;
    let lab = Lab { question, options, target };
    // A copy under the name of its contents, so that equal layouts are compiled once whatever their files are called.
    let (source, path) = lab.write(&asked)?;
    let task = lab.task(&path, &config.layout);
    let compiled = compiler.compile(std::slice::from_ref(&task), &[None], question.timeout)?;
    let no_figures = |error: Option<String>| error.unwrap_or_else(|| "no figures".into());
    let base = compiled.into_iter().next().unwrap_or_default();
    let base = base.figures().ok_or_else(|| LabError::Base(no_figures(base.error)))?;
    let mut all = candidates(&source, &base, LEAST_GAIN);
    if let Some(number) = question.collective {
        if number == 0 || number > base.collectives.list.len() {
            let count = base.collectives.list.len();
            return Err(LabError::Base(format!("--collective {number}: there are 1 to {count}")));
        }
        all.retain(|c| c.exchanges.contains(&(number - 1)));
    }
    let left = all.split_off(all.len().min(question.budget)).into_iter().map(|c| c.change).collect();
    let mut tasks = Vec::new();
    for c in &all {
        let (_, path) = lab.write(&c.layout)?;
        tasks.push(lab.task(&path, &c.change));
    }
    let compiled = compiler.compile(&tasks, &options.workers(), question.timeout)?;
    let mut answer = Answer { base, advice: vec![], useless: vec![], refused: vec![], left };
    for (candidate, compiled) in all.iter().zip(compiled) {
        match compiled.figures() {
            None => answer.refused.push((candidate.change.clone(), no_figures(compiled.error))),
            Some(f) if !f.fits() => answer.refused.push((candidate.change.clone(), "does not fit the devices".into())),
            Some(f) => {
                let advice = advised(candidate, &answer.base, &f);
                match advice.gain() >= LEAST_GAIN {
                    true => answer.advice.push(advice),
                    false => answer.useless.push((candidate.change.clone(), advice.gain())),
                }
            }
        }
    }
    let rank = |a: &Advice| (a.price, -a.gain() / a.families as f64);
    answer.advice.sort_by(|a, b| rank(a).0.cmp(&rank(b).0).then(rank(a).1.total_cmp(&rank(b).1)));
    name_as_asked(&mut answer.base, &asked, &source);
    answer.base.layout = config.layout;
    Ok(answer)
}

/// A candidate with what the compiler made of it.
fn advised(candidate: &Candidate, base: &Figures, f: &Figures) -> Advice {
    let difference = difference(base, f);
    Advice {
        change: candidate.change.clone(),
        price: price(base, f, &difference),
        families: candidate.families,
        cost: [base.cost(), f.cost()],
        block_bytes: [base.collectives.per_layer_bytes, f.collectives.per_layer_bytes],
        difference,
        collectives: candidate.exchanges.iter().map(|n| n + 1).collect(),
        layout: candidate.layout.to_yaml(&[]),
    }
}

/// What a change asks for: a kind of exchange that grows by more than the least gain of all exchanges, or memory.
fn price(base: &Figures, f: &Figures, difference: &Difference) -> Price {
    let least = LEAST_GAIN * base.collectives.per_step_bytes;
    let grown = difference.by_kind().into_iter().any(|(_, bytes)| bytes > least);
    match (grown, f.needed.bytes as f64 > base.needed.bytes as f64 * (1.0 + LEAST_GAIN)) {
        (true, _) => Price::Exchanges,
        (false, true) => Price::Memory,
        (false, false) => Price::None,
    }
}

/// Puts the places of the file that was asked about where those of its copy stand.
fn name_as_asked(base: &mut Figures, asked: &LayoutSource, copy: &LayoutSource) {
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

struct Lab<'a> {
    question: &'a Question,
    options: &'a Options,
    target: Target,
}

impl Lab<'_> {
    /// Writes a layout under a name made of its contents, and reads it back with the lines it has there.
    fn write(&self, layout: &LayoutSource) -> Result<(LayoutSource, PathBuf)> {
        let text = layout.to_yaml(&[]);
        let name: String = Sha256::digest(text.as_bytes()).iter().take(6).map(|b| format!("{b:02x}")).collect();
        let path = self.options.folder.join("layouts").join(format!("{name}.yml"));
        path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(LabError::file(&path))?;
        crate::media::write_atomically(&path, text.as_bytes())?;
        Ok((read_layout_source(&path.to_string_lossy())?, path))
    }

    fn task(&self, layout: &Path, label: &str) -> CompileTask {
        let q = self.question;
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
