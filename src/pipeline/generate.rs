//! Implements `generate`: generates all videos of a configuration. Compiles the programs and loads the weights only
//! once.

use super::phase::Phase;
use crate::request::Request;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::error::{PipelineError, Result, one_line};
use super::model::OpenModel;
use super::output::chain_writer::ChainWriter;
use super::output::denoise_checkpoint::{CheckpointSettings, Every};
use super::output::preview_files;
use super::output::recorded::warn_of_versions;
use super::output::report::RunReport;
use super::output::sidecar::{sidecar, sidecar_model};
pub use super::output::writer::FinishedVideo;
use super::output::writer::{
    self, Failures, UnwrittenVideo, VideoWriter, WriteOutcome, WrittenVideo, finish_steps, write_json,
};
use super::plan::options::{FallbackLocation, GenerateOptions, RunOptions};
use super::plan::outputs;
use super::plan::overwrites::Replaceable;
use super::plan::resolved::ResolvedConfig;
use super::plan::run_plan::RunPlan;
use super::plan::videos::{Job, RunVideos};
use super::preview::PreviewOptions;
use super::processes;
pub use super::programs::background_load::OnLoad;
use super::runner::Runner;
use super::session::Session;
use super::stages::batch::videos_per_batch;
use super::stages::duration;
use super::stages::enhance::{self, enhance_all};
use super::stages::text_to_video::Generated;
use crate::config::Config;
use crate::destination::Destination;
use crate::interrupts;
use crate::media::Mp4Options;
use crate::runtime::processes::Group;

/// Number of denoising steps per device call if no progress is reported. An interrupt takes effect between two calls.
const INTERRUPT_EVERY: usize = 8;

/// Receiver of the progress of a run.
pub trait Observer {
    /// Called once with the videos that the run generates, before a device is opened.
    fn planned(&mut self, _jobs: &[Job]) {}
    /// Called while a batch of videos is generated, when `done` of `total` steps of `phase` are finished. `Break` stops
    /// the run. `jobs` is empty while the prompts of all videos are enhanced; a step is then a prompt.
    fn progress(&mut self, jobs: &[Job], phase: Phase, done: usize, total: usize) -> ControlFlow<()>;
    /// Called before the files of generated videos are written, with the path of each video.
    fn writing(&mut self, _paths: &[PathBuf]) {}
    /// Called when a video has been written. `table`: text that lists the time of each phase.
    fn finished(&mut self, video: &FinishedVideo, table: &str);
    /// Returns a callback for the progress of loading, which is called on other threads. `None`: this progress is not
    /// reported.
    fn on_load(&mut self) -> Option<OnLoad> {
        None
    }
}

/// Warns if the run repeats the run of a sidecar that was written with another plugin or platform. The plan has already
/// compared the ltx2 version.
fn warn_of_plugin(session: &Session, videos: &RunVideos) {
    if let Some(sidecar) = videos.sidecar.as_ref().filter(|_| session.first) {
        let plugin = json!({"pjrt": session.versions["pjrt"], "platform": session.versions["platform"]});
        warn_of_versions(sidecar, &plugin);
    }
}

/// Generates the videos of a configuration. `group`: processes of a multi-process run, of which only the first
/// writes and reports videos; `None`: this process runs alone.
///
/// # Errors
/// Returns an error if the model, a request or a device fails. No partially written file remains.
pub fn generate(
    config: &Config,
    options: GenerateOptions,
    group: Option<&Arc<Group>>,
    observer: &mut dyn Observer,
) -> Result<Vec<FinishedVideo>> {
    let mut videos = RunVideos::new(config, options, group.map(|group| &**group))?;
    if videos.jobs.is_empty() {
        return Ok(Vec::new());
    }
    processes::compare(group, config, &videos)?;
    processes::compare_loras(group, config.model.loras.iter().map(|lora| lora.path.as_str()))?;
    let replaceable = outputs::replaceable(config, &videos);
    let planned = plan_run(config, &mut videos, group, observer)?;
    observer.planned(&videos.jobs);
    let (session, mut started) = start_session(planned, &mut videos, group, observer)?;
    let videos = &videos;
    let Session { mut plan, mut runner, versions, first } = session;
    let requests = std::mem::take(&mut plan.requests);
    let mut run = run_options(videos, first);
    let mut results = Results::default();
    let size = videos_per_batch(&requests, &runner.build.layout);
    let batches = videos.jobs.chunks(size).zip(requests.chunks(size)).zip(videos.outputs.chunks(size));
    let ended = thread::scope(|scope| -> Result<()> {
        let mut writer = VideoWriter::new(scope, &plan.config, videos);
        for ((jobs, requests), paths) in batches {
            let together = VideoBatch { plan: &plan, versions: &versions, jobs, requests, paths };
            let checkpoint = checkpoint(&plan, videos, &runner.model, jobs, &paths[0], group.is_none());
            let files = batch_files(&plan.config, videos, checkpoint, paths, &replaceable);
            (run.checkpoint, run.previews) = match files {
                Ok(files) => files,
                // The previous batch is still written if this batch cannot be resumed.
                Err(error) => return results.add(writer.wait(), observer).and(Err(error)),
            };
            run.outputs = paths.to_vec();
            let kept = run.checkpoint.clone();
            runner
                .executor
                .engine()
                .watchdog()
                .continues(move || kept.as_ref().and_then(CheckpointSettings::continuation));
            if requests[0].chain.is_some() {
                let writes = first.then_some(&replaceable);
                results.add(chained(&mut runner, videos, &run, &together, started, writes, observer)?, observer)?;
                runner.executor.reset_set_up_time();
                started = Instant::now();
                continue;
            }
            let mut failed = None;
            let mut watch = |phase: Phase, done: usize, total: usize| {
                if let Err(error) = results.add(writer.ended(), observer) {
                    // Stop this batch, because the previous one could not be written.
                    failed = Some(error);
                    return ControlFlow::Break(());
                }
                observer.progress(jobs, phase, done, total)
            };
            let mut made = runner.generate_clips(requests, None, &run, &mut watch);
            let took = started.elapsed();
            let before = failed.map_or(Ok(()), Err).and(results.add(writer.wait(), observer));
            if let (Ok(made), true) = (&mut made, first) {
                observer.writing(paths);
                let pending = pending_videos(&runner, &together, std::mem::take(made), took, &replaceable);
                writer.start(pending, run.checkpoint.take());
            }
            if before.is_err() {
                // Write or keep the results of this batch before returning the error of the previous batch.
                let own = made.map(drop).and(results.add(writer.wait(), observer));
                own.unwrap_or_else(|error| tracing::error!("{}", one_line(&error)));
                return before;
            }
            made?;
            runner.executor.reset_set_up_time();
            started = Instant::now();
        }
        results.add(writer.wait(), observer)
    });
    let Results { finished, perf, mut late } = results;
    late.add(write_times(videos.perf_json.as_ref().filter(|_| first), perf, &replaceable));
    ended.and(late.first())?;
    processes::wait_for_all(group)?;
    Ok(finished)
}

/// Starts the session of a run, and enhances its prompts if they are not enhanced yet. Returns the session and the start
/// time of the run.
fn start_session(
    planned: PlannedRun,
    videos: &mut RunVideos,
    group: Option<&Arc<Group>>,
    observer: &mut dyn Observer,
) -> Result<(Session, Instant)> {
    let PlannedRun { plan, model, enhancing } = planned;
    let started = Instant::now();
    // The time of the run includes that of the enhancement, which the table lists.
    let started = started.checked_sub(enhancing).unwrap_or(started);
    let mut session = Session::start(plan, model, group)?;
    warn_of_plugin(&session, videos);
    session.runner.executor.on_load(observer.on_load());
    check_steps(&session, videos)?;
    session.fit_memory(group)?;
    if !enhancing.is_zero() {
        session.runner.add_enhancement_time(enhancing);
    }
    enhance_with_text_encoder(&mut session, videos, group, observer)?;
    Ok((session, started))
}

/// The plan of a run, and its model.
struct PlannedRun {
    plan: RunPlan,
    model: OpenModel,
    /// Time that the enhancement of the prompts took; zero if they are not enhanced yet.
    enhancing: Duration,
}

/// Returns the callback for the progress of prompt enhancement. If there are several processes, it does not stop the run,
/// because all of them must make the same calls.
fn enhancement_watch(
    observer: &mut dyn Observer,
    group: Option<&Arc<Group>>,
) -> impl FnMut(Phase, usize, usize) -> ControlFlow<()> {
    let is_alone = group.is_none();
    move |phase, done, total| match observer.progress(&[], phase, done, total) {
        ControlFlow::Break(()) if is_alone => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    }
}

/// Plans a run. Enhances its prompts if an endpoint enhances them, and predicts the number of frames if it is `auto`.
fn plan_run(
    config: &Config,
    videos: &mut RunVideos,
    group: Option<&Arc<Group>>,
    observer: &mut dyn Observer,
) -> Result<PlannedRun> {
    let mut watch = enhancement_watch(observer, group);
    let mut enhancing = Duration::ZERO;
    let mut config = videos.resolved(config);
    let (mut plan, mut model) = RunPlan::new(&config, videos)?;
    let enhancer = plan.enhancer.clone();
    if let (Some(enhancer), Some(group)) = (&enhancer, group) {
        let differ = |name: &str, _: &str, _: &str| {
            format!("{name} and process 0 have different system prompts or sampling options for request.enhance_prompt")
        };
        group.ensure_equal(&enhancer.fingerprint(), differ)?;
    }
    let known = videos.enhancement.take();
    let mut enhanced = None;
    if let Some(enhancer) = enhancer.as_ref().filter(|enhancer| !enhancer.needs_devices()) {
        let ask = |prompt: &str, seed| enhance::ask(enhancer, prompt, seed, group);
        let since = Instant::now();
        enhanced = Some(enhance_all(enhancer, &config, known.as_ref(), &mut videos.jobs, &mut watch, ask)?);
        enhancing = since.elapsed();
        plan.set_enhanced(enhanced.clone(), &videos.jobs);
        config.set_prompts_enhanced();
    }
    let mut jobs = videos.jobs.clone();
    let frames = duration::resolve(&config, &videos.jobs, group, |runner, job| {
        if let Some(enhancer) = enhancer.as_ref().filter(|enhancer| enhancer.needs_devices()) {
            let generate = |prompt: &str, seed| enhancer.generate(runner, prompt, seed);
            enhanced = Some(enhance_all(enhancer, &config, known.as_ref(), &mut jobs, &mut watch, generate)?);
            enhancing = runner.enhancing.take().map_or(Duration::ZERO, |took| took.total);
        }
        Ok(jobs.first().unwrap_or(job).clone())
    })?;
    videos.jobs = jobs;
    if let Some(frames) = frames {
        let mut resolved = ResolvedConfig::with_frames(&config, frames)?;
        if enhanced.is_some() {
            resolved.set_prompts_enhanced();
        }
        (plan, model) = RunPlan::new(&resolved, videos)?;
        plan.set_enhanced(enhanced, &videos.jobs);
    }
    videos.enhancement = known;
    plan.command_videos = frames.is_none().then_some(videos.total);
    Ok(PlannedRun { plan, model, enhancing })
}

/// Enhances the prompts of a run with the text encoder, if they are not enhanced yet.
fn enhance_with_text_encoder(
    session: &mut Session,
    videos: &mut RunVideos,
    group: Option<&Arc<Group>>,
    observer: &mut dyn Observer,
) -> Result<()> {
    let Session { plan, runner, .. } = session;
    let Some(enhancer) = plan.enhancer.take() else { return Ok(()) };
    let generate = |prompt: &str, seed| enhancer.generate(runner, prompt, seed);
    let known = videos.enhancement.as_ref();
    let mut watch = enhancement_watch(observer, group);
    let enhanced = enhance_all(&enhancer, &plan.config, known, &mut videos.jobs, &mut watch, generate)?;
    plan.set_enhanced(Some(enhanced), &videos.jobs);
    Ok(())
}

/// Returns the options of a batch. `first`: whether this process writes the videos.
fn run_options(videos: &RunVideos, first: bool) -> RunOptions {
    let dump = videos.dump.is_some();
    RunOptions {
        chunk: Some(videos.progress_every.unwrap_or(INTERRUPT_EVERY)),
        dump,
        dump_steps: videos.dump_steps && dump,
        encode: first.then(Mp4Options::default),
        ..RunOptions::default()
    }
}

/// Results of the videos written so far.
#[derive(Default)]
struct Results {
    finished: Vec<FinishedVideo>,
    perf: Vec<Value>,
    /// Errors of files other than videos; reported after all videos are written.
    late: Failures,
}

impl Results {
    /// Adds written videos and reports them to the observer.
    ///
    /// # Errors
    /// Returns an error if a video could not be written; of several errors, the first.
    fn add(&mut self, outcomes: Vec<WriteOutcome>, observer: &mut dyn Observer) -> Result<()> {
        let (written, failed) = writer::sorted(outcomes, &mut self.late);
        for WrittenVideo { video, table, figures } in written {
            observer.finished(&video, &table);
            self.finished.push(video);
            self.perf.push(figures);
        }
        failed
    }
}

/// Writes the timings of all videos to a JSON file: the timings of a single video, or an object whose key `videos`
/// lists those of several videos. Does nothing without a path or without videos.
fn write_times(path: Option<&PathBuf>, mut figures: Vec<Value>, replaceable: &Replaceable) -> Result<()> {
    let Some(path) = path.filter(|_| !figures.is_empty()) else { return Ok(()) };
    let all = if figures.len() == 1 { figures.remove(0) } else { json!({"videos": figures}) };
    write_json(path, &all, replaceable.has(path))
}

/// Returns the checkpoint settings of a batch; the checkpoint is next to the batch's first video. Without
/// `--checkpoint-every` and `--resume`, a checkpoint is written only if the run is interrupted after a finished pass.
/// `None`: no checkpoint is written.
fn checkpoint(
    plan: &RunPlan,
    videos: &RunVideos,
    model: &OpenModel,
    jobs: &[Job],
    output: &Path,
    is_alone: bool,
) -> Result<Option<CheckpointSettings>> {
    let (config, every) = (&plan.config, videos.checkpoint_every.map(Every::Steps));
    let new = || {
        let own = CheckpointSettings::new(config, model, jobs, output, every)?;
        Ok::<_, PipelineError>(own.writing(outputs::files(config, videos)).with_enhancement(plan.enhancement.clone()))
    };
    if videos.checkpoint_every.is_some() || videos.resume {
        return new().map(Some);
    }
    let is_kept = is_alone && output.file_name().is_some() && !Destination::is_stream(output);
    // A chained video can only be resumed if its earlier clips were saved, which requires --checkpoint-every.
    if !is_kept || config.request.chain.is_some() {
        return Ok(None);
    }
    let how = match config.output.path {
        None if !videos.has_several() => format!("--resume -o {}", output.display()),
        _ => "--resume".to_string(),
    };
    Ok(new().ok().map(|checkpoint| checkpoint.only_on_interrupt(how)))
}

/// Returns the checkpoint that a batch resumes from or writes, and the options of its previews.
///
/// # Errors
/// Returns the error of `checkpoint`, or an error if the batch cannot be resumed or an earlier preview cannot be removed.
fn batch_files(
    config: &Config,
    videos: &RunVideos,
    checkpoint: Result<Option<CheckpointSettings>>,
    paths: &[PathBuf],
    replaceable: &Replaceable,
) -> Result<(Option<CheckpointSettings>, Option<PreviewOptions>)> {
    let resumed = |new: CheckpointSettings| if videos.resume { new.resumed() } else { Ok(new) };
    let checkpoint = checkpoint?.map(resumed).transpose()?;
    Ok((checkpoint, preview_files::options(config, paths, replaceable, videos.resume)?))
}

/// Checks the checkpoints that the run resumes from, before any program is compiled.
///
/// # Errors
/// Returns an error if a checkpoint is damaged or belongs to another request, model or release.
fn check_steps(session: &Session, videos: &RunVideos) -> Result<()> {
    if !videos.resume {
        return Ok(());
    }
    let size = videos_per_batch(&session.plan.requests, &session.runner.build.layout);
    let mut batches = videos.jobs.chunks(size).zip(videos.outputs.chunks(size));
    batches.try_for_each(|(jobs, paths)| {
        let checkpoint = checkpoint(&session.plan, videos, &session.runner.model, jobs, &paths[0], true)?;
        checkpoint.as_ref().map_or(Ok(()), CheckpointSettings::check)
    })
}

/// A batch: videos that are generated together.
struct VideoBatch<'a> {
    plan: &'a RunPlan,
    /// Versions of ltx2, the plugin and the platform.
    versions: &'a Value,
    jobs: &'a [Job],
    requests: &'a [Request],
    paths: &'a [PathBuf],
}

/// Combines generated videos with their reports and sidecars, for the writer.
fn pending_videos(
    runner: &Runner,
    together: &VideoBatch,
    videos: Vec<Generated>,
    made: Duration,
    replaceable: &Replaceable,
) -> Vec<UnwrittenVideo> {
    let VideoBatch { plan, versions, .. } = together;
    let config = &plan.config;
    let model = sidecar_model(config, runner);
    let of = |((job, path), generated): ((&Job, &PathBuf), Generated)| UnwrittenVideo {
        job: job.clone(),
        path: path.clone(),
        replaceable: replaceable.clone(),
        fallback: Some(FallbackLocation::Temporary),
        archives_exr: false,
        report: RunReport::new(&generated, &runner.executor, made),
        sidecar: config.output.sidecar.then(|| sidecar(plan, job, &model, runner, versions)),
        generated,
    };
    together.jobs.iter().zip(together.paths).zip(videos).map(of).collect()
}

/// Generates the chained videos of a batch and writes each clip when it is finished. `started`: start time of the
/// batch. `writes`: files that may be replaced; `None`: another process writes the files.
fn chained(
    runner: &mut Runner,
    videos: &RunVideos,
    run: &RunOptions,
    together: &VideoBatch,
    started: Instant,
    writes: Option<&Replaceable>,
    observer: &mut dyn Observer,
) -> Result<Vec<WriteOutcome>> {
    let VideoBatch { plan, versions, jobs, requests, paths } = together;
    let config = &plan.config;
    let files = writes.map(|own| ChainWriter::new(config, videos, &runner.model, jobs, paths, &requests[0], own));
    let mut files = files.transpose()?;
    let mut watch = |phase: Phase, done: usize, total: usize| observer.progress(jobs, phase, done, total);
    // After the first clip, delay interrupts until the finished clips are saved.
    let mut hold = None;
    let mut each = |clips| {
        hold.get_or_insert_with(|| interrupts::hold("the current steps"));
        files.as_mut().map_or(Ok(()), |files| files.add(clips))
    };
    let made = runner.generate_chain(requests, run, &mut watch, &mut each);
    if let Err(error) = made {
        return Err(match (files, run.checkpoint.as_ref().and_then(CheckpointSettings::continuation)) {
            // The interrupt has already logged where the clips are saved.
            (_, Some(_)) if matches!(error, PipelineError::Interrupted(..)) => error,
            (_, Some(continuation)) => {
                tracing::info!("{continuation}");
                error
            }
            (Some(files), None) => files.keep(error),
            (None, None) => error,
        });
    }
    let Some(files) = files else { return Ok(Vec::new()) };
    let model = sidecar_model(config, runner);
    let sidecar = |job: &Job| sidecar(plan, job, &model, runner, versions);
    interrupts::doing("while files were written");
    observer.writing(paths);
    let outcomes = files.finish(&runner.executor, started.elapsed(), sidecar);
    interrupts::doing("after the files were written");
    finish_steps(run.checkpoint.as_ref(), &outcomes);
    Ok(outcomes)
}
