//! Runs the pipeline as a device of the server: converts batches into requests, plans the programs for a shape before
//! its first job, and passes videos to the finisher thread.

mod enhancement;
mod failures;
mod figures;
mod files;
mod previews;
mod process_group;
mod shapes;
mod thumbnails;
mod video_output;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::device::{
    BatchWatch, Figures, GeneratedVideo, JobBatch, JobDevice, Preparer, PreviewSink, RunError, StepProgress, Stop,
};
use super::error::Failure;
use super::job::{AcceptedJob, JobPhase};
use crate::config::{Config, Decoder, Lora, NumFrames, Reference, Sidecar};
use crate::media::Mp4Options;
use crate::models::tokenizer::BosRule;
use crate::pipeline::enhancement::Enhancer;
use crate::pipeline::model::OpenModel;
use crate::pipeline::output::denoise_checkpoint::{CheckpointSettings, Every};
use crate::pipeline::output::hdr_files::check_encoder;
use crate::pipeline::output::report::RunReport;
use crate::pipeline::output::sidecar::sidecar;
use crate::pipeline::output::writer::UnwrittenVideo;
use crate::pipeline::plan::loras::Loras;
use crate::pipeline::plan::options::{FallbackLocation, RunOptions};
use crate::pipeline::plan::overwrites::Replaceable;
use crate::pipeline::plan::preflight::{check_input_files, check_text_embeddings, give, inputs};
use crate::pipeline::plan::resolved::ResolvedConfig;
use crate::pipeline::plan::run_plan::RunPlan;
use crate::pipeline::plan::videos::{Job, RunVideos};
use crate::pipeline::programs::configs::bos_rule;
use crate::pipeline::stages::batch::videos_at_once;
use crate::pipeline::stages::duration;
use crate::pipeline::{Generated, Phase, PipelineError, Session, one_line};
use crate::runtime::processes::Group;
use crate::weights::MergeOrder;
use enhancement::{EarlyAnswers, EndpointPreparer, KeptAnswers};
use figures::Counts;
use files::InputFolder;
pub use process_group::follow;
use process_group::{DeviceCall, SentBatch, ServerProcesses};
use shapes::PreparedShapes;
use video_output::ModelVideo;

/// Target duration of a device call. It is short, so that a cancelled job stops soon.
const CALL: Duration = Duration::from_millis(50);

/// Returns a function that opens a device. Call it on the thread that will own the device. `serve.state` must be set.
pub fn factory(config: Config) -> impl FnOnce() -> Result<Box<dyn JobDevice>, String> + Send {
    factory_together(config, None, None)
}

/// Same as [`factory`], for process 0 of a group whose other processes call [`follow`]. If a sidecar is among the
/// configuration files, the model and the input files are compared with those that the sidecar records.
pub fn factory_together(
    config: Config,
    sidecar: Option<Sidecar>,
    group: Option<Arc<Group>>,
) -> impl FnOnce() -> Result<Box<dyn JobDevice>, String> + Send {
    move || {
        let device = ModelDevice::open(&config, sidecar.as_ref(), group.as_ref()).map_err(|error| one_line(&error))?;
        Ok(Box::new(device) as Box<dyn JobDevice>)
    }
}

/// Settings that affect how a model is read. Configurations with different settings need separate [`OpenModel`]s.
type ModelReadSettings = (bool, BosRule, bool, Decoder);

fn reading(config: &Config) -> ModelReadSettings {
    let official = config.reference != Reference::Diffusers;
    (official, bos_rule(config), config.vocoder.stage1_clamp != Reference::Diffusers, config.model.decoder)
}

struct ModelDevice {
    session: Session,
    process_group: ServerProcesses,
    inputs: InputFolder,
    every: Duration,
    rows: usize,
    /// Maximum number of frames of a video. Predicted numbers of frames are checked against it.
    max_frames: usize,
    shapes: PreparedShapes,
    /// LoRAs that are currently applied, and the order in which they are merged. `None`: a change failed.
    loras: Option<(Vec<Lora>, MergeOrder)>,
    reading: ModelReadSettings,
    /// Models that were read with other settings, kept for later jobs.
    others: Vec<(ModelReadSettings, OpenModel)>,
    counts: Counts,
    /// Enhanced prompts of jobs whose batch failed.
    answers: KeptAnswers,
    /// Answers of the endpoint to queued jobs.
    early_answers: EarlyAnswers,
    /// Receiver of previews. `None`: this process does not serve clients.
    previews: Option<PreviewSink>,
}

/// A batch that is ready to run.
struct PreparedBatch {
    plan: RunPlan,
    jobs: Vec<Job>,
    shape: String,
    /// Batch size of the compiled programs.
    rows: usize,
    /// Number of denoising steps per device call.
    chunk: usize,
    started: Instant,
    warnings: Vec<String>,
    /// Description of the model, for the sidecars.
    model: Value,
}

impl ModelDevice {
    fn open(config: &Config, sidecar: Option<&Sidecar>, group: Option<&Arc<Group>>) -> Result<Self, PipelineError> {
        let plain = files::startup_config(config);
        let process_group = ServerProcesses::meet(group, &plain)?;
        process_group.compare_loras(files::lora_paths(config))?;
        let (plan, model) = RunPlan::new(&plain, &RunVideos::unwritten(Vec::new(), sidecar))?;
        // Check the components for every enabled pipeline, so that errors appear before the server is ready.
        Enhancer::new(config, &model.configs, Some(&*model.tokenizer))?;
        // Only process 0 asks the endpoint.
        if group.is_none_or(|group| group.id() == 0) {
            Enhancer::check_key(&config.enhance)?;
        }
        for pipeline in config.served_pipelines()? {
            let own = Config { pipeline, ..config.clone() };
            model.verify(&own)?;
            check_encoder(&own)?;
            check_text_embeddings(&own, &model.sizes)?;
        }
        let session = Session::start(plan, model, group)?;
        let model = &session.runner.model;
        Loras::open(&files::with_served_loras(config)?)?.check(&model.weights, &model.configs)?;
        let going_on = || Some("after a restart with the same --state, the server resumes its unfinished jobs".into());
        session.runner.executor.engine().watchdog().continues(going_on);
        Ok(ModelDevice {
            inputs: InputFolder::from_config(config)?,
            every: config.serve.checkpoint.duration(),
            rows: config.serve.max_batch.unwrap_or(1),
            max_frames: config.serve.max_frames,
            shapes: PreparedShapes::default(),
            loras: Some((plain.model.loras.clone(), plain.model.lora_merge)),
            reading: reading(&plain),
            others: Vec::new(),
            counts: Counts::default(),
            answers: KeptAnswers::default(),
            early_answers: EarlyAnswers::new(config.serve.queue),
            previews: None,
            session,
            process_group,
        })
    }

    /// Returns the configuration of a job, with the paths, layout and form of layers of this server.
    fn job_config(&self, job: &AcceptedJob) -> Result<Config, PipelineError> {
        let (mut config, placed) = (self.inputs.named(job)?, &self.session.plan.config);
        if self.process_group.are_several() {
            files::local(&mut config, placed);
        }
        (config.layout, config.mesh) = (placed.layout.clone(), placed.mesh);
        config.runtime.layers = placed.runtime.layers;
        config.output.preview_decoder.clone_from(&placed.output.preview_decoder);
        Ok(config)
    }

    /// Converts the jobs of a batch into requests. Merges LoRAs, and compiles and plans the programs that the batch
    /// needs.
    fn prepare(
        &mut self,
        order: &JobBatch,
        is_warm_up: bool,
        watch: &mut StopWatch,
    ) -> Result<PreparedBatch, PipelineError> {
        let started = Instant::now();
        let Some(first) = order.jobs.first() else {
            return Err(PipelineError::Input("a batch needs at least one job".into()));
        };
        // The configurations of a batch differ only in prompt and seed.
        let config = self.job_config(first)?;
        let shape = first.shape.clone();
        let mut jobs: Vec<Job> = order
            .jobs
            .iter()
            .enumerate()
            .map(|(index, accepted)| Job {
                index,
                prompt: accepted.prompt().into(),
                seed: accepted.config.summary().seed,
            })
            .collect();
        files::check(&config)?;
        self.read_as(&config)?;
        self.session.runner.model.verify(&config)?;
        let loras = (config.model.loras.clone(), config.model.lora_merge);
        if self.loras.as_ref() != Some(&loras) {
            watch.check(JobPhase::Loading)?;
            let since = Instant::now();
            // The files may have changed since the server was started.
            self.process_group.compare_loras(Ok(config.model.loras.iter().map(|lora| lora.path.clone()).collect()))?;
            let (opened, model) = (Loras::open(&config.model)?, &self.session.runner.model);
            opened.check(&model.weights, &model.configs)?;
            // A change that fails may leave some weights changed.
            self.loras = None;
            self.session.runner.executor.keep_loras(opened)?;
            self.counts.lora_switches.push(since.elapsed());
            self.loras = Some(loras);
        }
        let group = self.process_group.group().cloned();
        let enhancement = self.enhance(order, &config, &mut jobs, is_warm_up, watch)?;
        let is_predicted = config.request.num_frames.count().is_none();
        if is_predicted {
            watch.check(JobPhase::TextEncoder)?;
        }
        let resolved = duration::resolve_on(&mut self.session.runner, &config, &jobs)?;
        let resolved = match resolved {
            Some(frames) => ResolvedConfig::with_frames(&config, frames)?,
            None => ResolvedConfig::from(&config),
        };
        let mut plan = RunPlan::of_model(&resolved, &self.session.runner.model)?;
        plan.layer_reason.clone_from(&self.session.plan.layer_reason);
        plan.programs = plan.programs.enhancing(enhancement.longest);
        plan.set_enhanced(enhancement.record, &jobs);
        plan.choose_encoder(group.as_deref())?;
        if let Some(round_trip) = plan.round_trip.clone() {
            self.session.versions["h264"] = Value::from(round_trip.to_string());
            let runner = &mut self.session.runner;
            (runner.h264, runner.round_trip) = (plan.config.conditioning.h264, Some(round_trip));
        }
        let rows = self.rows_of(order);
        let model = &self.session.runner.model;
        plan.requests = jobs.iter().map(|job| model.request(&plan.config, job)).collect::<Result<Vec<_>, _>>()?;
        if let Some(request) = plan.requests.iter().find(|one| is_predicted && one.output_frames() > self.max_frames) {
            let why = format!(
                "the model predicted {} frames; the server's maximum is {} (serve.max_frames)",
                request.output_frames(),
                self.max_frames
            );
            let source = Box::new(PipelineError::TooLarge(why));
            return Err(PipelineError::Given { key: "request.num_frames", source });
        }
        give(&plan.config, &mut plan.requests)?;
        check_input_files(&plan.requests, &self.session.runner.model.sizes)?;
        if !self.shapes.is_planned(&shape, &plan, rows) {
            watch.check(JobPhase::Compiling)?;
        }
        // Read these files before the device runs, so that an error wastes no computation.
        let model = self.session.runner.model.identity(&plan.config)?;
        plan.inputs = inputs(&plan.config)?;
        plan.programs = plan.programs.of_rows(rows);
        self.shapes.plan(&shape, &plan, rows, &mut self.session.runner, group.as_ref())?;
        let warnings = plan.enhancement.as_ref().and_then(|_| Enhancer::unseen_inputs(&plan.config));
        let warnings = warnings.into_iter().collect();
        Ok(PreparedBatch { plan, jobs, shape, rows, chunk: 1, started, warnings, model })
    }

    /// Replaces the current model by one that is read with the settings of a configuration, unless the current model
    /// was read with the same settings.
    fn read_as(&mut self, config: &Config) -> Result<(), PipelineError> {
        let wanted = reading(config);
        if wanted == self.reading {
            return Ok(());
        }
        let known = self.others.iter().position(|(reading, _)| *reading == wanted);
        let model = match known {
            Some(at) => self.others.swap_remove(at).1,
            None => OpenModel::from_config(config)?,
        };
        let before = std::mem::replace(&mut self.session.runner.model, model);
        self.others.push((self.reading, before));
        self.reading = wanted;
        self.session.runner.forget_loops();
        Ok(())
    }

    /// Returns where to write step checkpoints, and the checkpoint from which to resume; `None` if no checkpoints are
    /// written. If the checkpoint is unusable, the run starts over.
    fn checkpoint(
        &mut self,
        order: &JobBatch,
        work: &mut PreparedBatch,
    ) -> Result<Option<CheckpointSettings>, PipelineError> {
        // If there are several processes, no checkpoints are written.
        let Some(path) = order.steps.as_ref().filter(|_| !self.process_group.are_several()) else { return Ok(None) };
        let every = Some(Every::Time(self.every));
        let checkpoint =
            CheckpointSettings::new(&work.plan.config, &self.session.runner.model, &work.jobs, path, every)?;
        let checkpoint = checkpoint.in_server_file(path, &self.counts.checkpoints);
        let checkpoint = checkpoint.with_enhancement(work.plan.enhancement.clone());
        if !order.resume {
            return Ok(Some(checkpoint));
        }
        Ok(Some(match checkpoint.clone().resumed() {
            Ok(resumed) => {
                self.counts.resumed += u64::from(resumed.saved_ends().is_some());
                resumed
            }
            Err(error) => {
                tracing::warn!("{}", one_line(&error));
                work.warnings.push(
                    "the checkpoint of an earlier run is unusable (from another model or release); started over".into(),
                );
                checkpoint
            }
        }))
    }

    #[allow(clippy::result_large_err)] // One error per batch.
    fn make(
        &mut self,
        order: &JobBatch,
        work: &mut PreparedBatch,
        is_warm_up: bool,
        watch: BatchWatch,
    ) -> Result<Vec<Generated>, BatchFailure> {
        let checkpoint = self.checkpoint(order, work)?;
        let writes = self.session.first && !is_warm_up;
        let run = RunOptions {
            chunk: Some(work.chunk),
            checkpoint: checkpoint.clone(),
            encode: self.session.first.then(Mp4Options::default),
            previews: previews::options(&work.plan.config, order, self.previews.as_ref()).filter(|_| !is_warm_up),
            is_warm_up,
            rows: work.rows,
            outputs: if writes {
                order.jobs.iter().map(|job| self.inputs.job_video_path(job)).collect()
            } else {
                Vec::new()
            },
            fallback: FallbackLocation::NextToVideo,
            ..RunOptions::default()
        };
        let mut stopped = None;
        let mut client_message = |phase: Phase, step: usize, steps: usize| {
            let stage = job_phase(phase);
            match self.process_group.decide(watch(StepProgress { stage, step, steps })) {
                ControlFlow::Continue(()) => ControlFlow::Continue(()),
                // Finishing such a stage takes less time than repeating the denoising pass before it would.
                ControlFlow::Break(Stop::Draining) if is_after_denoising(stage) => ControlFlow::Continue(()),
                ControlFlow::Break(stop) => {
                    stopped = Some(stop);
                    ControlFlow::Break(())
                }
            }
        };
        let made = self.session.runner.generate_batch(&work.plan.requests, &run, &mut client_message);
        if let (Some(Stop::Cancelled), Some(checkpoint)) = (stopped, &checkpoint) {
            checkpoint.finish();
        }
        made.map_err(|error| BatchFailure { error, stopped })
    }

    /// Combines the generated videos with the data that the finisher thread needs to write them.
    fn finish(
        &mut self,
        order: &JobBatch,
        work: PreparedBatch,
        videos: Vec<Generated>,
    ) -> Vec<Box<dyn GeneratedVideo>> {
        let Session { runner, versions, .. } = &self.session;
        let (plan, model) = (&work.plan, &work.model);
        let took = work.started.elapsed();
        let of = |((job, generated), accepted): ((Job, Generated), &Arc<AcceptedJob>)| {
            let mut sidecar = sidecar(plan, &job, model, runner, versions);
            if let Some(trace) = &accepted.traceparent {
                sidecar["traceparent"] = trace.as_str().into();
            }
            let written = UnwrittenVideo {
                path: std::path::PathBuf::new(),
                replaceable: Replaceable::everything(),
                fallback: None,
                archives_exr: true,
                report: RunReport::new(&generated, &runner.executor, took),
                sidecar: Some(sidecar),
                job,
                generated,
            };
            Box::new(ModelVideo::new(written, Config::clone(&plan.config), work.warnings.clone()))
                as Box<dyn GeneratedVideo>
        };
        work.jobs.into_iter().zip(videos).zip(&order.jobs).map(of).collect()
    }

    #[allow(clippy::result_large_err)] // One error per batch.
    fn run_order(
        &mut self,
        order: &JobBatch,
        chunk: usize,
        watch: BatchWatch,
    ) -> Result<Vec<Box<dyn GeneratedVideo>>, BatchFailure> {
        self.counts.begin(&mut self.session.runner.executor);
        let processes = self.process_group.clone();
        let mut stop = StopWatch { watch: &mut *watch, processes, stopped: None };
        let prepared = self.prepare(order, false, &mut stop);
        let stopped = stop.stopped;
        let mut work = prepared.map_err(|error| BatchFailure { error, stopped })?;
        work.chunk = chunk;
        let videos = self.make(order, &mut work, false, watch);
        self.shapes.used(&work.shape, self.session.runner.executor.used());
        let videos = videos?;
        self.shapes.took(&work.shape, work.rows, &videos);
        self.answers.finish(order);
        self.early_answers.finish(order);
        Ok(self.finish(order, work, videos))
    }

    /// Runs a batch with `chunk` steps per device call. All processes of the group do the same.
    fn run_chunks(
        &mut self,
        order: &JobBatch,
        chunk: usize,
        watch: BatchWatch,
    ) -> Result<Vec<Box<dyn GeneratedVideo>>, RunError> {
        let made = self.run_order(order, chunk, watch).map_err(RunError::from);
        self.agree(made)
    }

    /// Returns the result after checking that all processes have the same outcome.
    fn agree<T>(&self, made: Result<T, RunError>) -> Result<T, RunError> {
        let outcome = match &made {
            Ok(_) => "made".to_string(),
            Err(RunError::Stopped(_)) => "stopped".into(),
            Err(RunError::Job(failure)) => failure.code.clone(),
            Err(RunError::Device(error)) => error.clone(),
        };
        self.process_group.agree(&outcome).map_err(|error| RunError::Device(one_line(&error)))?;
        made
    }
}

/// Checks whether a batch is stopped, before its videos are generated.
struct StopWatch<'a> {
    watch: BatchWatch<'a>,
    processes: ServerProcesses,
    /// Why the batch was stopped.
    stopped: Option<Stop>,
}

impl StopWatch<'_> {
    /// Reports the stage of the batch.
    ///
    /// # Errors
    /// Returns an error in all processes if process 0 stops the batch.
    fn check(&mut self, stage: JobPhase) -> Result<(), PipelineError> {
        let own = self.poll(stage);
        self.follow(self.processes.decide(own))
    }

    /// Reports the stage of the batch, and returns the decision of this process.
    fn poll(&mut self, stage: JobPhase) -> ControlFlow<Stop> {
        (self.watch)(StepProgress { stage, step: 0, steps: 1 })
    }

    /// Turns a decision to stop into an error.
    fn follow(&mut self, decision: ControlFlow<Stop>) -> Result<(), PipelineError> {
        let ControlFlow::Break(stop) = decision else { return Ok(()) };
        self.stopped = Some(stop);
        Err(PipelineError::Interrupted(0, 0))
    }
}

/// Returns the stage that contains a pipeline phase.
fn job_phase(phase: Phase) -> JobPhase {
    match phase {
        Phase::PromptEnhancer | Phase::TextEncoder | Phase::Connectors => JobPhase::TextEncoder,
        Phase::Denoise => JobPhase::Denoise,
        Phase::Upsampler => JobPhase::Upsampler,
        Phase::Refine | Phase::Round => JobPhase::Refine,
        Phase::VideoDecoder => JobPhase::VideoDecoder,
        Phase::AudioDecoder => JobPhase::AudioDecoder,
    }
}

/// Returns whether the stage processes the latents of a finished denoising pass: upsampling or decoding.
fn is_after_denoising(stage: JobPhase) -> bool {
    matches!(stage, JobPhase::Upsampler | JobPhase::VideoDecoder | JobPhase::AudioDecoder)
}

/// Error of a batch that ended without videos.
struct BatchFailure {
    error: PipelineError,
    stopped: Option<Stop>,
}

impl From<PipelineError> for BatchFailure {
    fn from(error: PipelineError) -> Self {
        BatchFailure { error, stopped: None }
    }
}

impl From<BatchFailure> for RunError {
    fn from(BatchFailure { error, stopped }: BatchFailure) -> Self {
        match (stopped, error) {
            (Some(stop), PipelineError::Interrupted(..)) => RunError::Stopped(stop),
            (_, error) => failures::classify(&error),
        }
    }
}

impl JobDevice for ModelDevice {
    fn warm(&mut self, order: &JobBatch) -> Result<(), RunError> {
        let mut sizes = BTreeSet::from([order.jobs.len(), 1]);
        if order.jobs.len() == 1 && self.rows > 1 {
            sizes.insert(self.rows);
        }
        let Some(first) = order.jobs.first() else { return Ok(()) };
        for size in sizes {
            let one = JobBatch { jobs: vec![first.clone()], steps: None, resume: false };
            self.process_group
                .publish(|| Ok(DeviceCall::Warm(SentBatch::from_batch(&one, 1, &self.inputs)?, size)))
                .map_err(BatchFailure::from)?;
            self.warm_one(&one, size)?;
        }
        Ok(())
    }

    fn run(&mut self, order: &JobBatch, watch: BatchWatch) -> Result<Vec<Box<dyn GeneratedVideo>>, RunError> {
        let Some(first) = order.jobs.first() else { return Ok(Vec::new()) };
        let chunk = self.shapes.chunk(&first.shape, self.rows_of(order), CALL);
        self.process_group
            .publish(|| Ok(DeviceCall::Run(SentBatch::from_batch(order, chunk, &self.inputs)?)))
            .map_err(BatchFailure::from)?;
        self.run_chunks(order, chunk, watch)
    }

    fn send_previews(&mut self, sink: PreviewSink) {
        self.previews = Some(sink);
    }

    fn preparer(&mut self) -> Option<Arc<dyn Preparer>> {
        let model = &self.session.runner.model;
        let (configs, tokenizer) = (model.configs.clone(), Arc::clone(&model.tokenizer));
        Some(Arc::new(EndpointPreparer { configs, tokenizer, answers: self.early_answers.clone() }))
    }

    fn evict(&mut self, shape: &str) {
        // If the other processes cannot be reached, they exit on their own.
        if self.process_group.publish(|| Ok(DeviceCall::Evict(shape.into()))).is_ok() {
            self.forget(shape);
        }
    }

    fn figures(&mut self) -> Figures {
        self.counts.take(&mut self.session.runner.executor)
    }
}

impl Drop for ModelDevice {
    fn drop(&mut self) {
        self.process_group.end();
    }
}

impl ModelDevice {
    /// Returns the batch size of the programs that run a batch: 1 for a single job, otherwise the maximum; rounded up
    /// to a multiple that the layout allows.
    fn rows_of(&self, order: &JobBatch) -> usize {
        let least = if order.jobs.len() > 1 { self.rows.max(order.jobs.len()) } else { 1 };
        least.next_multiple_of(videos_at_once(&self.session.runner.build.layout))
    }

    fn forget(&mut self, shape: &str) {
        self.shapes.evict(shape, &mut self.session.runner);
    }

    /// Runs a batch of `size` copies of the first job in `order`, with one step per denoising pass, as
    /// often as the platform needs for full speed.
    fn warm_one(&mut self, order: &JobBatch, size: usize) -> Result<(), RunError> {
        let Some(first) = order.jobs.first() else { return Ok(()) };
        let order = JobBatch { jobs: vec![first.clone(); size], steps: None, resume: false };
        let runs = self.session.runner.executor.engine().spec().warm_up_runs;
        let made = (0..runs).try_for_each(|_| self.run_once(&order));
        self.agree(made)
    }

    /// Runs a batch with one step per denoising pass and discards the results.
    fn run_once(&mut self, order: &JobBatch) -> Result<(), RunError> {
        self.counts.begin(&mut self.session.runner.executor);
        let go_on = &mut |_: StepProgress| ControlFlow::Continue(());
        let mut stop = StopWatch { watch: go_on, processes: ServerProcesses::default(), stopped: None };
        let mut work = self.prepare(order, true, &mut stop).map_err(BatchFailure::from)?;
        match self.make(order, &mut work, true, &mut |_| ControlFlow::Continue(())) {
            // After a single step, the values may contain NaN or infinity.
            Ok(_) | Err(BatchFailure { error: PipelineError::NotFinite(_), .. }) => {}
            Err(ended) => return Err(ended.into()),
        }
        self.shapes.used(&work.shape, self.session.runner.executor.used());
        Ok(())
    }
}
