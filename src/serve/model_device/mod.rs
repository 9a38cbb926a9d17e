//! The pipeline as a device of the server: orders become requests, programs of a shape are planned before its first job, and what
//! is made belongs to the finisher's thread.

mod failures;
mod figures;
mod files;
mod made;
mod shapes;
mod thumbnails;
mod together;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::device::{Device, Figures, Made, Moment, Order, RunError, Stop, Watch};
use super::error::Failure;
use super::job::{Accepted, JobPhase};
use crate::config::{Config, Decoder, Job, Lora, NumFrames, Reference, Sidecar};
use crate::media::Mp4Options;
use crate::models::tokenizer::BosRule;
use crate::pipeline::batch::videos_at_once;
use crate::pipeline::configs::bos_rule;
use crate::pipeline::generate::sidecar;
use crate::pipeline::loras::Loras;
use crate::pipeline::model::Model;
use crate::pipeline::options::{KeepPlace, RunOptions};
use crate::pipeline::preflight::{Preflight, check_given, give, inputs};
use crate::pipeline::replaceable::Replaceable;
use crate::pipeline::report::RunReport;
use crate::pipeline::saved::{Every, Saving};
use crate::pipeline::writer::Made as Written;
use crate::pipeline::{Generated, Phase, PipelineError, Session, duration, one_line, setup};
use crate::request::Request;
use crate::runtime::processes::Group;
use crate::weights::MergeOrder;
use figures::Counts;
use files::Inputs;
use made::ModelMade;
use shapes::Shapes;
pub use together::follow;
use together::{Call, Sent, Together};

/// A call of the device lasts about so long, so that a cancelled job ends soon.
const CALL: Duration = Duration::from_millis(50);

/// Maker of a configuration's device, on the thread that will own it. `serve.state` has to be given.
pub fn factory(config: Config) -> impl FnOnce() -> Result<Box<dyn Device>, String> + Send {
    factory_together(config, None, None)
}

/// The same with inputs and model compared with those of a sidecar among the configuration's files, and as the first of several
/// processes, whose others [`follow`].
pub fn factory_together(
    config: Config,
    sidecar: Option<Sidecar>,
    group: Option<Arc<Group>>,
) -> impl FnOnce() -> Result<Box<dyn Device>, String> + Send {
    move || {
        let device = ModelDevice::open(&config, sidecar.as_ref(), group.as_ref()).map_err(|error| one_line(&error))?;
        Ok(Box::new(device) as Box<dyn Device>)
    }
}

/// Configurations of a model that differ in these are read in different ways.
type Reading = (bool, BosRule, bool, Decoder);

fn reading(config: &Config) -> Reading {
    let official = config.reference != Reference::Diffusers;
    (official, bos_rule(config), config.vocoder.stage1_clamp != Reference::Diffusers, config.model.decoder)
}

/// A model on its devices.
struct ModelDevice {
    session: Session,
    together: Together,
    inputs: Inputs,
    every: Duration,
    rows: usize,
    /// Frames of a video, of which a prediction may ask for more.
    max_frames: usize,
    shapes: Shapes,
    /// LoRAs that are merged.
    loras: (Vec<Lora>, MergeOrder),
    reading: Reading,
    /// The model, as other configurations read it.
    others: Vec<(Reading, Model)>,
    counts: Counts,
}

/// An order on its way.
struct Prepared {
    configs: Vec<Config>,
    jobs: Vec<Job>,
    requests: Vec<Request>,
    shape: String,
    /// Videos that its programs make at once.
    rows: usize,
    /// Steps of a call.
    chunk: usize,
    started: Instant,
    warnings: Vec<String>,
    /// The model and the input files as the sidecars record them.
    recorded: [Value; 2],
}

impl ModelDevice {
    fn open(config: &Config, sidecar: Option<&Sidecar>, group: Option<&Arc<Group>>) -> Result<Self, PipelineError> {
        let plain = files::startable(config);
        let together = Together::meet(group, &plain)?;
        let model = Preflight::of(&plain, &[], sidecar)?.model;
        // Requests read the components of these too: what is wrong with one is said before the server is ready.
        let served = config.serve.pipelines.iter().map(|pipeline| Config { pipeline: *pipeline, ..config.clone() });
        served.chain([config.clone()]).try_for_each(|config| model.verify(&config))?;
        let session = Session::start(&plain, model, group)?;
        let going_on = || Some("started again with its --state, the server goes on with what it had taken on".into());
        session.runner.executor.engine().watchdog().continues(going_on);
        Ok(ModelDevice {
            inputs: Inputs::of(config)?,
            every: config.serve.checkpoint.duration(),
            rows: config.serve.max_batch.unwrap_or(1),
            max_frames: config.serve.max_frames,
            shapes: Shapes::default(),
            loras: (plain.model.loras.clone(), plain.model.lora_merge),
            reading: reading(&plain),
            others: Vec::new(),
            counts: Counts::default(),
            session,
            together,
        })
    }

    /// An order as the model takes it, with everything compiled and planned that it needs.
    fn prepare(
        &mut self,
        order: &Order,
        tell: &mut dyn FnMut(JobPhase) -> Result<(), PipelineError>,
    ) -> Result<Prepared, PipelineError> {
        let started = Instant::now();
        let own = |accepted: &Accepted| {
            let mut config = self.inputs.named(accepted);
            if self.together.are_several() {
                files::local(&mut config, &self.session.config);
            }
            config.layout.clone_from(&self.session.config.layout);
            config.mesh.clone_from(&self.session.config.mesh);
            config
        };
        let mut configs: Vec<Config> = order.jobs.iter().map(|job| own(job)).collect();
        let Some(first) = order.jobs.first() else { return Err(PipelineError::Input("an order needs a job".into())) };
        let shape = first.shape.clone();
        let jobs: Vec<Job> = order
            .jobs
            .iter()
            .enumerate()
            .map(|(index, accepted)| Job {
                index,
                prompt: accepted.prompt().into(),
                seed: accepted.config.request.seed,
            })
            .collect();
        files::check(&configs[0])?;
        self.read_as(&configs[0])?;
        self.session.runner.model.verify(&configs[0])?;
        if configs[0].model.loras != self.loras.0 || configs[0].model.lora_merge != self.loras.1 {
            tell(JobPhase::Loading)?;
            let since = Instant::now();
            self.session.runner.executor.keep_loras(Loras::open(&configs[0].model)?)?;
            self.counts.lora_switches.push(since.elapsed());
            self.loras = (configs[0].model.loras.clone(), configs[0].model.lora_merge);
        }
        let group = self.together.group().cloned();
        if let Some(round_trip) = setup::round_trip(&mut configs[0], group.as_deref())? {
            let h264 = configs[0].conditioning.h264;
            self.session.versions["h264"] = Value::from(round_trip.to_string());
            (self.session.runner.h264, self.session.runner.round_trip) = (h264, Some(round_trip));
            configs.iter_mut().for_each(|config| config.conditioning.h264 = h264);
        }
        let is_predicted = configs[0].request.num_frames.count().is_none();
        if is_predicted {
            tell(JobPhase::TextEncoder)?;
            let frames = duration::resolve_on(&mut self.session.runner, &configs[0], &jobs)?.request.num_frames;
            configs.iter_mut().for_each(|config| config.request.num_frames = frames);
        }
        let rows = self.rows_of(order);
        let model = &self.session.runner.model;
        let mut requests = jobs.iter().map(|job| model.request(&configs[0], job)).collect::<Result<Vec<_>, _>>()?;
        if let Some(request) = requests.iter().find(|one| is_predicted && one.output_frames() > self.max_frames) {
            let why = format!(
                "{} frames are predicted; the server makes at most {}",
                request.output_frames(),
                self.max_frames
            );
            let source = Box::new(PipelineError::TooLarge(why));
            return Err(PipelineError::Given { key: "request.num_frames", source });
        }
        give(&configs[0], &mut requests)?;
        check_given(&requests)?;
        if !self.shapes.is_planned(&shape, &configs[0], rows) {
            tell(JobPhase::Compiling)?;
        }
        // Before the device works: nothing that fails may cost a video.
        let recorded = [self.session.runner.model.identity(&configs[0])?, inputs(&configs[0])?];
        self.shapes.plan(&shape, &configs[0], rows, &mut self.session.runner, group.as_ref())?;
        Ok(Prepared { configs, jobs, requests, shape, rows, chunk: 1, started, warnings: Vec::new(), recorded })
    }

    /// Has the model read as a configuration says.
    fn read_as(&mut self, config: &Config) -> Result<(), PipelineError> {
        let wanted = reading(config);
        if wanted == self.reading {
            return Ok(());
        }
        let known = self.others.iter().position(|(reading, _)| *reading == wanted);
        let model = match known {
            Some(at) => self.others.swap_remove(at).1,
            None => Model::of(config)?,
        };
        let before = std::mem::replace(&mut self.session.runner.model, model);
        self.others.push((self.reading, before));
        self.reading = wanted;
        self.session.runner.forget_loops();
        Ok(())
    }

    /// Where its steps are kept, and those of an ended run. What cannot be gone on with is begun anew.
    fn saving(&mut self, order: &Order, work: &mut Prepared) -> Result<Option<Saving>, PipelineError> {
        // Processes that run together begin anew.
        let Some(path) = order.steps.as_ref().filter(|_| !self.together.are_several()) else { return Ok(None) };
        let every = Some(Every::Time(self.every));
        let saving = Saving::new(&work.configs[0], &self.session.runner.model, &work.jobs, path, every)?;
        let saving = saving.kept_in(path, &self.counts.checkpoints);
        if !order.resume {
            return Ok(Some(saving));
        }
        Ok(Some(match saving.clone().resumed() {
            Ok(resumed) => {
                self.counts.resumed += u64::from(resumed.found_ends().is_some());
                resumed
            }
            Err(error) => {
                tracing::warn!("{}", one_line(&error));
                work.warnings.push("the steps of an earlier run are of another model or release: begun anew".into());
                saving
            }
        }))
    }

    /// Makes the videos.
    #[allow(clippy::result_large_err)] // One a job.
    fn make(&mut self, order: &Order, work: &mut Prepared, warms: bool, watch: Watch) -> Result<Vec<Generated>, Ended> {
        let saving = self.saving(order, work)?;
        let writes = self.session.first && !warms;
        let run = RunOptions {
            chunk: Some(work.chunk),
            saving: saving.clone(),
            encode: self.session.first.then(Mp4Options::default),
            warms,
            rows: work.rows,
            outputs: if writes { order.jobs.iter().map(|job| self.inputs.video_of(job)).collect() } else { Vec::new() },
            keep: KeepPlace::Beside,
            ..RunOptions::default()
        };
        let mut stopped = None;
        let mut told = |phase: Phase, step: usize, steps: usize| {
            let stage = JobPhase::of(phase);
            match self.together.decide(watch(Moment { stage, step, steps })) {
                ControlFlow::Continue(()) => ControlFlow::Continue(()),
                // Its last programs take less time than its steps would to be made again.
                ControlFlow::Break(Stop::Draining) if is_behind_steps(stage) => ControlFlow::Continue(()),
                ControlFlow::Break(stop) => {
                    stopped = Some(stop);
                    ControlFlow::Break(())
                }
            }
        };
        let made = self.session.runner.generate_batch(&work.requests, &run, &mut told);
        if let (Some(Stop::Cancelled), Some(saving)) = (stopped, &saving) {
            saving.finish();
        }
        made.map_err(|error| Ended { error, stopped })
    }

    /// Videos as the finisher's thread gets them.
    fn finish(&mut self, order: &Order, work: Prepared, videos: Vec<Generated>) -> Vec<Box<dyn Made>> {
        let Session { runner, versions, .. } = &self.session;
        let [model, hashes] = &work.recorded;
        let took = work.started.elapsed();
        let of = |(((config, job), generated), accepted): (((Config, Job), Generated), &Arc<Accepted>)| {
            let mut sidecar = sidecar(&config, &job, model, hashes, runner, versions);
            if let Some(trace) = &accepted.traceparent {
                sidecar["traceparent"] = trace.as_str().into();
            }
            let written = Written {
                path: std::path::PathBuf::new(),
                replaceable: Replaceable::everything(),
                keep: None,
                report: RunReport::of(&generated, &runner.executor, took),
                sidecar: Some(sidecar),
                job,
                generated,
            };
            Box::new(ModelMade::new(written, config, work.warnings.clone())) as Box<dyn Made>
        };
        work.configs.into_iter().zip(work.jobs).zip(videos).zip(&order.jobs).map(of).collect()
    }

    #[allow(clippy::result_large_err)] // One a job.
    fn run_order(&mut self, order: &Order, chunk: usize, watch: Watch) -> Result<Vec<Box<dyn Made>>, Ended> {
        self.counts.begin(&mut self.session.runner.executor);
        let (mut stopped, together) = (None, self.together.clone());
        let mut tell = |stage: JobPhase| match together.decide(watch(Moment { stage, step: 0, steps: 1 })) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(stop) => {
                stopped = Some(stop);
                Err(PipelineError::Interrupted(0, 0))
            }
        };
        let prepared = self.prepare(order, &mut tell);
        let mut work = prepared.map_err(|error| Ended { error, stopped })?;
        work.chunk = chunk;
        let videos = self.make(order, &mut work, false, watch);
        self.shapes.used(&work.shape, self.session.runner.executor.used());
        let videos = videos?;
        self.shapes.took(&work.shape, work.rows, &videos);
        Ok(self.finish(order, work, videos))
    }

    /// Runs an order by calls of so many steps, as all processes do.
    fn run_chunks(&mut self, order: &Order, chunk: usize, watch: Watch) -> Result<Vec<Box<dyn Made>>, RunError> {
        let made = self.run_order(order, chunk, watch).map_err(RunError::from);
        self.agree(made)
    }

    /// The outcome, where it is that of all processes.
    fn agree<T>(&self, made: Result<T, RunError>) -> Result<T, RunError> {
        let outcome = match &made {
            Ok(_) => "made".to_string(),
            Err(RunError::Stopped(_)) => "stopped".into(),
            Err(RunError::Job(failure)) => failure.code.clone(),
            Err(RunError::Device(error)) => error.clone(),
        };
        self.together.agree(&outcome).map_err(|error| RunError::Device(one_line(&error)))?;
        made
    }
}

/// Whether steps of denoising are behind it.
fn is_behind_steps(stage: JobPhase) -> bool {
    matches!(stage, JobPhase::Upsampler | JobPhase::VideoDecoder | JobPhase::AudioDecoder)
}

/// End of an order without videos.
struct Ended {
    error: PipelineError,
    stopped: Option<Stop>,
}

impl From<PipelineError> for Ended {
    fn from(error: PipelineError) -> Self {
        Ended { error, stopped: None }
    }
}

impl From<Ended> for RunError {
    fn from(Ended { error, stopped }: Ended) -> Self {
        match (stopped, error) {
            (Some(stop), PipelineError::Interrupted(..)) => RunError::Stopped(stop),
            (_, error) => failures::of(&error),
        }
    }
}

impl Device for ModelDevice {
    fn warm(&mut self, order: &Order) -> Result<(), RunError> {
        let mut sizes = BTreeSet::from([order.jobs.len(), 1]);
        if order.jobs.len() == 1 && self.rows > 1 {
            sizes.insert(self.rows);
        }
        let Some(first) = order.jobs.first() else { return Ok(()) };
        for size in sizes {
            let one = Order { jobs: vec![first.clone()], steps: None, resume: false };
            self.together.publish(|| Ok(Call::Warm(Sent::of(&one, 1, &self.inputs)?, size))).map_err(Ended::from)?;
            self.warm_one(&one, size)?;
        }
        Ok(())
    }

    fn run(&mut self, order: &Order, watch: Watch) -> Result<Vec<Box<dyn Made>>, RunError> {
        let Some(first) = order.jobs.first() else { return Ok(Vec::new()) };
        let chunk = self.shapes.chunk(&first.shape, self.rows_of(order), CALL);
        self.together.publish(|| Ok(Call::Run(Sent::of(order, chunk, &self.inputs)?))).map_err(Ended::from)?;
        self.run_chunks(order, chunk, watch)
    }

    fn evict(&mut self, shape: &str) {
        // What the others cannot be told of, they end by.
        if self.together.publish(|| Ok(Call::Evict(shape.into()))).is_ok() {
            self.forget(shape);
        }
    }

    fn figures(&mut self) -> Figures {
        self.counts.take(&mut self.session.runner.executor)
    }
}

impl Drop for ModelDevice {
    fn drop(&mut self) {
        self.together.end();
    }
}

impl ModelDevice {
    /// Videos that programs make at once for an order: of each shape there are those of one, and those of the most.
    fn rows_of(&self, order: &Order) -> usize {
        let least = if order.jobs.len() > 1 { self.rows.max(order.jobs.len()) } else { 1 };
        least.next_multiple_of(videos_at_once(&self.session.runner.build.layout))
    }

    fn forget(&mut self, shape: &str) {
        self.shapes.evict(shape, &mut self.session.runner);
    }

    /// Runs an order's first job, so many of it, by one step a pass; twice but on a CPU, since XLA records what a GPU launches
    /// in a program's second run.
    fn warm_one(&mut self, order: &Order, size: usize) -> Result<(), RunError> {
        let Some(first) = order.jobs.first() else { return Ok(()) };
        let order = Order { jobs: vec![first.clone(); size], steps: None, resume: false };
        let runs = if self.session.runner.executor.engine().platform() == "cpu" { 1 } else { 2 };
        let made = (0..runs).try_for_each(|_| self.run_once(&order));
        self.agree(made)
    }

    /// Runs an order by one step a pass, of which nothing is kept.
    fn run_once(&mut self, order: &Order) -> Result<(), RunError> {
        self.counts.begin(&mut self.session.runner.executor);
        let mut work = self.prepare(order, &mut |_| Ok(())).map_err(Ended::from)?;
        match self.make(order, &mut work, true, &mut |_| ControlFlow::Continue(())) {
            // What one step paints may be anything.
            Ok(_) | Err(Ended { error: PipelineError::NotFinite(_), .. }) => {}
            Err(ended) => return Err(ended.into()),
        }
        self.shapes.used(&work.shape, self.session.runner.executor.used());
        Ok(())
    }
}
