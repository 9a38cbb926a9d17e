//! `generate`: every video of a configuration, with programs compiled and weights loaded once.

use super::phase::Phase;
use crate::request::Request;
use std::ops::ControlFlow;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use serde_json::{Value, json};

pub use super::ahead::OnLoad;
use super::batch::videos_at_once;
use super::condition_encoder;
use super::error::{PipelineError, Result};
use super::model::Model;
use super::options::{GenerateOptions, RunOptions};
use super::processes;
use super::report::{self, Outer};
use super::saved::Saving;
use super::session::Session;
use super::text_to_video::Generated;
use crate::config::{Config, Job, sidecar_path};
use crate::media::{self, Audio, Frames, Mp4Options, WavFormat};
use crate::runtime::Work;
use crate::runtime::processes::Group;
use crate::tensor::Tensor;

/// Steps between two looks at an interrupt, where no progress is shown.
const INTERRUPT_EVERY: usize = 8;

/// A finished video.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Finished {
    /// The MP4.
    pub(crate) path: PathBuf,
    /// Random seed.
    pub(crate) seed: u64,
    pub(crate) prompt: String,
    /// SHA-256 of the raw frames.
    pub frames_sha256: String,
    /// SHA-256 of the raw samples.
    pub samples_sha256: String,
}

/// Receiver of a run's progress; the answer to a step says whether to continue.
pub trait Observer {
    /// A phase of videos that are made together moves on.
    fn progress(&mut self, jobs: &[Job], phase: Phase, done: usize, total: usize) -> ControlFlow<()>;
    /// A video is written; the table of its phases.
    fn finished(&mut self, video: &Finished, table: &str);
    /// Receiver of the progress of loading, which other threads tell.
    fn on_load(&mut self) -> Option<OnLoad> {
        None
    }
}

/// Makes every video of `options.jobs`, alone or as one of several processes, of which the first writes them and tells
/// of it.
///
/// # Errors
/// Errors of model, request or device; nothing is half-written.
pub fn generate(
    config: &Config,
    options: &GenerateOptions,
    group: Option<&Arc<Group>>,
    observer: &mut dyn Observer,
) -> Result<Vec<Finished>> {
    if let Some(group) = group {
        processes::compare(group, config, options)?;
    }
    let (outputs, others) = (options.outputs.iter(), options.dump.iter().chain(&options.perf_json));
    for path in outputs.chain(others).filter(|path| path.file_name().is_some()) {
        media::check_writable(path)?;
    }
    // An ended run may have got as far as its video.
    let again: Vec<&PathBuf> = options.outputs.iter().filter(|path| options.resume && path.exists()).collect();
    let model = Model::of(config)?;
    let requests: Vec<Request> =
        options.jobs.iter().map(|job| model.request(config, job)).collect::<Result<Vec<_>>>()?;
    // Files that cannot be used are found before anything is loaded.
    for condition in requests.iter().flat_map(|request| request.conditions.as_ref()).flatten() {
        condition_encoder::check(condition)?;
    }
    let mut started = Instant::now();
    let mut session = Session::start(config, model, group)?;
    session.runner.executor.on_load(observer.on_load());
    session.plan(options.dump.is_some(), group)?;
    let Session { config, mut runner, versions, first } = session;
    let config = &config;
    let chunk = Some(options.progress_every.unwrap_or(INTERRUPT_EVERY));
    let dump_steps = options.dump_steps && options.dump.is_some();
    let mut run = RunOptions { chunk, dump: options.dump.is_some(), dump_steps, saving: None };

    let mut finished = Vec::new();
    let mut perf = Vec::new();
    let size = videos_at_once(&runner.build.layout);
    let batches = options.jobs.chunks(size).zip(requests.chunks(size)).zip(options.outputs.chunks(size));
    for ((jobs, requests), paths) in batches {
        let mut watch = |phase: Phase, done: usize, total: usize| observer.progress(jobs, phase, done, total);
        if options.checkpoint_every.is_some() || options.resume {
            let (every, resume) = (options.checkpoint_every, options.resume);
            run.saving = Some(Saving::new(config, &runner.model, jobs, &paths[0], every, resume)?);
        }
        let videos = runner.generate_batch(requests, &run, &mut watch)?;
        let made = started.elapsed();
        if !first {
            continue;
        }
        for (((job, request), path), generated) in jobs.iter().zip(requests).zip(paths).zip(&videos) {
            let encoding = Instant::now();
            let replace = options.force || again.contains(&path);
            let video = write(config, options, job, request, generated, path, replace)?;
            runner.executor.engine().timeline().add(Work::Write, "mp4", encoding, None);
            let encoding = encoding.elapsed();
            let outer = Outer { encoding, total: made + encoding };
            let figures = report::json(generated, &runner.executor, outer);
            if config.output.sidecar {
                let sidecar = json!({
                    "config": config.effective(&job.prompt, job.seed),
                    "seed": job.seed,
                    "model": runner.model.identity()?,
                    "programs": runner.executor.program_hashes().collect::<std::collections::BTreeMap<_, _>>(),
                    "versions": versions,
                    "sha256": {"frames": video.frames_sha256, "samples": video.samples_sha256},
                    "timings": figures,
                });
                write_json(&sidecar_path(path), &sidecar)?;
            }
            tracing::debug!("{}", runner.executor.engine().timeline());
            observer.finished(&video, &report::table(generated, &runner.executor, outer));
            perf.push(figures);
            finished.push(video);
        }
        if let Some(saving) = &run.saving {
            saving.finish();
        }
        runner.executor.reset_set_up_time();
        started = Instant::now();
    }
    if let Some(path) = options.perf_json.as_ref().filter(|_| first) {
        let all = if perf.len() == 1 { perf.remove(0) } else { json!({"videos": perf}) };
        write_json(path, &all)?;
    }
    if let Some(group) = group {
        processes::wait_for_all(group)?;
    }
    Ok(finished)
}

fn write(
    config: &Config,
    options: &GenerateOptions,
    job: &Job,
    request: &Request,
    generated: &Generated,
    path: &Path,
    replace: bool,
) -> Result<Finished> {
    let several = options.jobs.len() > 1;
    let frames = &generated.frames;
    let audio = generated.sound()?;
    let encoder = Mp4Options { replace, ..Mp4Options::default() };
    // The hashes are taken beside the encoder.
    let (written, (frames_sha256, samples_sha256)) = thread::scope(|scope| {
        let hashes = scope.spawn(|| (frames.sha256(), audio.sha256()));
        let written = media::write_mp4(path, frames, request.frame_rate, Some(&audio), &encoder);
        (written, hashes.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    if let Err(error) = written {
        return Err(keep(error.into(), path, frames, &audio));
    }
    let name = Path::new(path.file_stem().expect("a video is written to a named file"));
    if let Some(folder) = &config.output.save_frames {
        let folder = if several { Path::new(folder).join(name) } else { PathBuf::from(folder) };
        media::write_png_frames(&folder, frames)?;
    }
    if let Some(file) = &config.output.save_audio {
        let file = if several { Path::new(file).join(name.with_extension("wav")) } else { PathBuf::from(file) };
        media::write_wav(&file, &audio, WavFormat::Pcm16)?;
    }
    if let Some(dump) = &options.dump {
        let file = match several {
            true => {
                let stem = dump.file_stem().ok_or_else(|| PipelineError::Usage("--dump names no file".into()))?;
                dump.with_file_name(format!("{}_{:04}.safetensors", stem.to_string_lossy(), job.index))
            }
            false => dump.clone(),
        };
        super::tensors::write(&file, &generated.dump)?;
    }
    let (path, prompt) = (path.to_path_buf(), job.prompt.clone());
    Ok(Finished { path, seed: job.seed, prompt, frames_sha256, samples_sha256 })
}

/// Puts what cannot be written as a video where temporary files go; its error then says so.
fn keep(error: PipelineError, path: &Path, frames: &Frames, audio: &Audio) -> PipelineError {
    let name = path.file_name().expect("a video is written to a named file").to_string_lossy();
    let kept = std::env::temp_dir().join(format!("{name}.{}.safetensors", std::process::id()));
    let tensors = [
        ("frames".to_string(), Tensor::U8(frames.data().clone().into_dyn())),
        ("audio".to_string(), Tensor::from(audio.samples().clone())),
    ];
    match super::tensors::write(&kept, &tensors) {
        Ok(()) => PipelineError::Kept { source: Box::new(error), kept },
        Err(_) => error,
    }
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    Ok(media::write_atomically(path, format!("{value:#}\n").as_bytes())?)
}
