//! Which layout and mesh: all that can be put together of the shipped layouts' rules, left out by arithmetic where that
//! suffices, compiled where it does not.
//!
//! Layouts are taken in the order of what they promise, the shipped ones first, a few at a time; what cannot be faster
//! than the fastest so far, by what it costs at least ([`bound`]), is left out. Then one rule at a time of the fastest is changed
//! (`lab::candidates`) until no change gains. What is compiled is kept as its module, so that a search that was ended goes
//! on; the order depends on the question alone, so that asked again the answer is the same.

mod bound;
mod space;
mod text;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::candidates::candidates;
use super::compiler::{CompileTask, Compiler};
use super::error::{LabError, Result};
use super::experiment::{Options, Row};
use super::why::LEAST_GAIN;
use crate::analysis::Chip;
use crate::config::presets::LAYOUTS;
use crate::config::{Case, Config, Given, LayoutSource, load, read_layout_source};
use crate::nn::{Build, Layout, Lowering};
use crate::pipeline::compile::needed;
use crate::pipeline::programs::{ProgramKind, Programs};
use crate::pipeline::request;
use crate::runtime::{OpenTarget, Target};
use crate::sampling::guidance;

pub use bound::{Bound, bound};
pub use space::{Extent, Point, composed, mesh_name, meshes, parts, placed};
pub use text::{found, summary};

/// What is asked.
#[derive(Clone, Debug)]
pub struct Quest {
    /// Configuration and `--set`, the shape among them; without layout and mesh.
    pub given: Given,
    /// The command line that gives a child the same.
    pub settings: Vec<String>,
    /// The devices.
    pub target: String,
    /// `WIDTHxHEIGHTxFRAMES`, where one was given.
    pub shape: Option<String>,
    /// Whether what does not fit the devices may not win.
    pub fit: bool,
    /// Blocks that are compiled.
    pub layers: usize,
    /// Programs that are compiled at most.
    pub budget: usize,
    /// Seconds after which none is begun.
    pub seconds: u64,
    /// Seconds for one.
    pub timeout: u64,
    /// Order among equals.
    pub seed: u64,
}

/// Why a layout was not compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Out {
    /// Rules or sizes contradict each other, or do not divide.
    Illegal,
    /// Its parameters are larger than a device.
    Memory,
    /// It is the program of another.
    Same,
    /// It cannot be faster than the fastest.
    Slower,
    /// Budget or time were spent.
    Left,
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// Everything compiled, as rows of an experiment.
    pub rows: Vec<Row>,
    /// The fastest of them.
    pub winner: Option<Winner>,
    /// Layouts that were not compiled, by reason: the words of each, and what it costs at least.
    pub out: BTreeMap<Out, Vec<(String, Option<f64>)>>,
    /// Shipped layouts that could be faster and were left for a larger budget.
    pub undecided: Vec<String>,
    /// Whether costs are milliseconds; else bytes received.
    pub timed: bool,
}

/// The fastest layout.
#[derive(Clone, Debug)]
pub struct Winner {
    /// Its place among the rows.
    pub row: usize,
    /// Its rules and mesh.
    pub source: LayoutSource,
}

/// Programs that are taken together: what is left out depends on what was compiled before, so it may not depend on how
/// many compile at a time.
const WAVE: usize = 4;

/// A point with what is known of it before it is compiled.
struct Open {
    point: Point,
    /// What it costs at least.
    bound: f64,
    /// What it may cost.
    guess: f64,
    order: [u8; 8],
}

/// Searches. Layout files, modules and results are kept in `options.folder`.
///
/// # Errors
/// What is wrong with target, configuration or shape; a memory limit that the target does not have.
pub fn search(quest: &Quest, options: &Options) -> Result<Found> {
    let target: Target = quest.target.parse()?;
    let config = load(&quest.given)?.config;
    if quest.fit && target.chip().is_none() {
        return Err(LabError::Capacity(quest.target.clone()));
    }
    let mut compiler = Compiler::open(options)?;
    let machine = compiler.machine(&target).map_err(LabError::Base)?;
    let mut hunt = Hunt::new(quest, options, &config, &machine, compiler)?;
    let started = Instant::now();
    let limit = Duration::from_secs(quest.seconds);
    let (shipped, others) = hunt.space()?;
    hunt.all(shipped, &|| started.elapsed() < limit)?;
    hunt.all(others, &|| started.elapsed() < limit)?;
    hunt.changes(&|| started.elapsed() < limit)?;
    Ok(hunt.found())
}

struct Hunt<'a> {
    quest: &'a Quest,
    options: &'a Options,
    compiler: Compiler<'a>,
    capacity: Option<i64>,
    chip: Option<Chip>,
    target: Target,
    programs: Programs,
    /// How programs are written, but for the layout.
    build: Build,
    extent: Extent,
    /// Operations of a step's products, of all devices together.
    products: f64,
    /// Programs that were looked at.
    seen: BTreeSet<String>,
    spent: usize,
    rows: Vec<(Row, Point)>,
    out: BTreeMap<Out, Vec<(String, Option<f64>)>>,
    undecided: Vec<String>,
}

impl<'a> Hunt<'a> {
    fn new(
        quest: &'a Quest,
        options: &'a Options,
        config: &Config,
        machine: &OpenTarget,
        compiler: Compiler<'a>,
    ) -> Result<Self> {
        let said = |e: crate::pipeline::PipelineError| LabError::Base(e.to_string());
        let platform = machine.target.platform().name();
        let config = Config { layout: "replicated".into(), mesh: None, ..config.clone() };
        let config = request::settled(&config, platform, &machine.version(), 1);
        let build = request::build(&config, 1, platform, &machine.device_kind).map_err(said)?;
        let programs = Programs::of(&config, None).map_err(said)?;
        // On one device, in forms whose products are all written.
        let plain = Build { lowering: Lowering::default(), layout: Layout::default(), ..build.clone() };
        let alone = programs.network(ProgramKind::Denoise, &plain).map_err(said)?;
        let [video, audio] = request::scales(&config);
        let extent = Extent {
            devices: machine.devices.len(),
            videos: config.request.num_videos,
            branches: guidance::branches(video, audio).len(),
        };
        Ok(Hunt {
            quest,
            options,
            compiler,
            capacity: machine.capacity,
            chip: machine.target.chip(),
            target: machine.target.clone(),
            programs,
            build,
            extent,
            products: alone.program.dot_flops,
            seen: BTreeSet::new(),
            spent: 0,
            rows: Vec::new(),
            out: BTreeMap::new(),
            undecided: Vec::new(),
        })
    }

    /// Shipped layouts on every mesh that they use, and those put together of their rules.
    fn space(&mut self) -> Result<(Vec<Open>, Vec<Open>)> {
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

    /// Those that could win, the most promising first.
    fn opened(&mut self, points: Vec<Point>) -> Vec<Open> {
        let mut open: Vec<Open> = points.into_iter().filter_map(|p| self.open(p)).collect();
        open.sort_by(|a, b| a.guess.total_cmp(&b.guess).then(a.order.cmp(&b.order)));
        open
    }

    fn open(&mut self, point: Point) -> Option<Open> {
        let mut leave = |why: Out, label: &str, bound| {
            self.out.entry(why).or_default().push((label.to_string(), bound));
            None
        };
        let parts = parts(&point);
        // Without a chip's figures nothing says what it costs to do the same on several devices.
        if self.chip.is_none() && parts < self.extent.devices {
            return leave(Out::Illegal, &point.label, None);
        }
        let Ok(layout) = point.source.on(point.mesh.clone()) else { return leave(Out::Illegal, &point.label, None) };
        let build = Build { layout: layout.clone(), ..self.build.clone() };
        let network = match self.programs.network(ProgramKind::Denoise, &build) {
            Ok(network) if network.notes.is_empty() || point.shipped.is_some() => network,
            _ => return leave(Out::Illegal, &point.label, None),
        };
        if self.quest.fit && self.capacity.is_some_and(|capacity| needed(&network) > capacity) {
            return leave(Out::Memory, &point.label, None);
        }
        if !self.seen.insert(network.program.hash()) {
            return leave(Out::Same, &point.label, None);
        }
        let blocks = self.programs.layers();
        let bound = bound(&network, &layout, self.chip.as_ref(), self.products, parts, blocks);
        tracing::debug!("{}: at least {:.3}, perhaps {:.3}", point.label, bound.cost(), bound.guess());
        let words = Sha256::digest(format!("{} {}", self.quest.seed, point.label).as_bytes());
        let order = std::array::from_fn(|i| words[i]);
        Some(Open { point, bound: bound.cost(), guess: bound.guess(), order })
    }

    /// What the fastest costs that may win.
    fn best(&self) -> f64 {
        self.fastest().map_or(f64::INFINITY, |n| self.rows[n].0.cost().unwrap_or(f64::INFINITY))
    }

    fn fastest(&self) -> Option<usize> {
        let may = |row: &Row| row.figures.is_some() && row.error.is_none() && (!self.quest.fit || row.fits());
        let all = self.rows.iter().enumerate().filter(|(_, (row, _))| may(row));
        let cost = |row: &Row| row.cost().unwrap_or(f64::INFINITY);
        all.min_by(|a, b| cost(&a.1.0).total_cmp(&cost(&b.1.0))).map(|(n, _)| n)
    }

    /// Compiles a list in its order, a wave at a time, without what cannot be faster than the fastest so far.
    fn all(&mut self, mut list: Vec<Open>, time: &dyn Fn() -> bool) -> Result<()> {
        loop {
            let best = self.best();
            let (open, slow): (Vec<Open>, Vec<Open>) = list.into_iter().partition(|o| o.bound < best);
            self.leave(Out::Slower, slow);
            if open.is_empty() {
                return Ok(());
            }
            let room = self.quest.budget.saturating_sub(self.spent).min(WAVE);
            if room == 0 || !time() {
                let shipped = open.iter().filter(|o| o.point.shipped.is_some());
                self.undecided.extend(shipped.map(|o| o.point.label.clone()));
                self.leave(Out::Left, open);
                return Ok(());
            }
            let mut open = open.into_iter();
            let wave = open.by_ref().take(room).map(|o| o.point).collect();
            list = open.collect();
            self.compile(wave)?;
        }
    }

    fn leave(&mut self, why: Out, list: Vec<Open>) {
        if !list.is_empty() {
            let all = list.into_iter().map(|o| (o.point.label, Some(o.bound)));
            self.out.entry(why).or_default().extend(all);
        }
    }

    /// Changes of one rule of the fastest, until none gains.
    fn changes(&mut self, time: &dyn Fn() -> bool) -> Result<()> {
        let mut from = None;
        while let Some(best) = self.fastest().filter(|n| from != Some(*n)) {
            from = Some(best);
            let (row, point) = self.rows[best].clone();
            let Some(figures) = &row.figures else { break };
            // Rules are told apart by their places in the file that was compiled.
            let source = match &row.case.layout {
                Some(name) => read_layout_source(name)?,
                None => point.source.clone(),
            };
            let changed = candidates(&source, figures, LEAST_GAIN)
                .into_iter()
                .filter_map(|c| placed(format!("{}, {}", point.label, c.change), None, &c.layout, &point.mesh));
            let changed: Vec<Point> = changed.collect();
            let open = self.opened(changed);
            self.all(open, time)?;
        }
        Ok(())
    }

    /// Compiles points, or takes what is known of them; a row each.
    fn compile(&mut self, points: Vec<Point>) -> Result<()> {
        let mut tasks = Vec::new();
        let mut layouts = Vec::new();
        for point in &points {
            let (task, layout) = self.task(point)?;
            tasks.push(task);
            layouts.push(layout);
        }
        self.spent += tasks.len();
        let all = self.compiler.compile(&tasks, &self.options.workers(), self.quest.timeout)?;
        for ((point, layout), compiled) in points.into_iter().zip(layouts).zip(all) {
            let case = Case {
                layout: Some(layout),
                mesh: Some(mesh_name(&point.mesh)),
                shape: self.quest.shape.clone(),
                target: Some(self.quest.target.clone()),
                flags: None,
            };
            let (figures, error) = (compiled.figures(), compiled.error);
            self.rows.push((Row { case, label: point.label.clone(), figures, measured: None, error }, point));
        }
        Ok(())
    }

    /// The compilation of a point, and the layout's name: a shipped one's, or a file named after its contents.
    fn task(&self, point: &Point) -> Result<(CompileTask, String)> {
        let q = self.quest;
        let layout = match &point.shipped {
            Some(name) => name.clone(),
            None => self.written(&point.source)?.to_string_lossy().into_owned(),
        };
        let mesh = mesh_name(&point.mesh);
        let mut command: Vec<String> = ["-q", "compile", "--json", "-", "--target"].map(str::to_string).into();
        command.extend([q.target.clone(), "--program".into(), "denoise".into()]);
        command.extend(["--layers".to_string(), q.layers.to_string()]);
        command.extend(q.settings.iter().cloned());
        command.extend(["--layout".to_string(), layout.clone(), "--mesh".into(), mesh.clone()]);
        let mut given = q.given.clone();
        given.flag("layout", "layout", Some(layout.clone()));
        given.mesh = Some(mesh);
        let (label, target, program) = (point.label.clone(), self.target.clone(), ProgramKind::Denoise);
        Ok((CompileTask { label, given, target, program, layers: Some(q.layers), command }, layout))
    }

    fn written(&self, source: &LayoutSource) -> Result<PathBuf> {
        let text = source.to_yaml(&[]);
        let name: String = Sha256::digest(text.as_bytes()).iter().take(6).map(|b| format!("{b:02x}")).collect();
        let path = self.options.folder.join("layouts").join(format!("{name}.yml"));
        path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(LabError::file(&path))?;
        crate::media::write_atomically(&path, text.as_bytes())?;
        Ok(path)
    }

    fn found(self) -> Found {
        let winner = self.fastest().map(|row| Winner { row, source: self.rows[row].1.source.clone() });
        let rows = self.rows.into_iter().map(|(row, _)| row).collect();
        Found { rows, winner, out: self.out, undecided: self.undecided, timed: self.chip.is_some() }
    }
}
