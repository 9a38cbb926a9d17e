//! Videos on their way to files: a thread writes those that are made while the next ones are.

use std::path::{Path, PathBuf};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Instant;

use serde_json::{Value, json};

use super::error::{PipelineError, Result, one_line};
use super::kept;
use super::options::{GenerateOptions, KeepPlace};
use super::replaceable::Replaceable;
use super::report::RunReport;
use super::saved::Saving;
use super::text_to_video::Generated;
use crate::config::{Config, Job, sidecar_path};
use crate::contained::{caught, panic_message};
use crate::interrupts;
use crate::media::{self, Audio, EncodedVideo, Mp4Options, WavFormat};
use crate::runtime::{Span, SpanKind};

/// Ending of the file in which results are kept.
const KEPT: &str = ".safetensors";

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

/// A video that is made, with what its files say. It needs its devices no more.
pub(crate) struct Made {
    pub(crate) job: Job,
    pub(crate) path: PathBuf,
    /// Files that are replaced.
    pub(crate) replaceable: Replaceable,
    /// Where results are kept that cannot be written; `None`: the caller tries again, or calls [`Made::keep_beside`].
    pub(crate) keep: Option<KeepPlace>,
    pub(crate) report: RunReport,
    /// The sidecar, where there is to be one, without hashes and times.
    pub(crate) sidecar: Option<Value>,
    pub(crate) generated: Generated,
}

/// A video's files after they were written: those that could be are there, whatever else failed.
pub(crate) struct Outcome {
    /// None where the video itself is not.
    pub(super) written: Option<Written>,
    pub(super) failed: Option<PipelineError>,
}

impl Outcome {
    /// No file is written.
    fn lost(error: PipelineError) -> Self {
        Outcome { written: None, failed: Some(error) }
    }

    /// The video, where it is written, and the first file that could not be.
    pub(crate) fn parts(self) -> (Option<Written>, Option<PipelineError>) {
        (self.written, self.failed)
    }
}

/// The videos that are written, and the error of the first that is not; `late` gets those of files beside videos.
pub(super) fn sorted(outcomes: Vec<Outcome>, late: &mut Failures) -> (Vec<Written>, Result<()>) {
    let (mut all, mut failures) = (Vec::new(), Failures::default());
    for Outcome { written, failed } in outcomes {
        let of = if written.is_some() { &mut *late } else { &mut failures };
        of.add(failed.map_or(Ok(()), Err));
        all.extend(written);
    }
    (all, failures.first())
}

/// Errors of files that are written one behind the other: the first is kept, the others are said.
#[derive(Default)]
pub(super) struct Failures(Option<PipelineError>);

impl Failures {
    /// Notes a result; whether it was an error.
    pub(super) fn add(&mut self, result: Result<()>) -> bool {
        let Err(error) = result else { return false };
        match &self.0 {
            Some(_) => tracing::warn!("{}", one_line(&error)),
            None => self.0 = Some(error),
        }
        true
    }

    /// The first of them.
    pub(super) fn first(self) -> Result<()> {
        self.0.map_or(Ok(()), Err)
    }
}

/// A video that is written, the table of its phases, and the same as JSON.
pub(crate) struct Written {
    pub(crate) video: Finished,
    pub(super) table: String,
    pub(crate) figures: Value,
}

/// The thread that writes; it holds one batch of videos, so that memory is bounded.
pub(super) struct Writer<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    config: &'env Config,
    options: &'env GenerateOptions,
    batch: Option<ScopedJoinHandle<'scope, Vec<Outcome>>>,
}

impl<'scope, 'env> Writer<'scope, 'env> {
    pub(super) fn new(
        scope: &'scope Scope<'scope, 'env>,
        config: &'env Config,
        options: &'env GenerateOptions,
    ) -> Self {
        Writer { scope, config, options, batch: None }
    }

    /// Begins to write videos that were made together; when all of their files are, their steps are needed no more. The batch
    /// before was waited for.
    pub(super) fn start(&mut self, batch: Vec<Made>, saving: Option<Saving>) {
        let (config, options) = (self.config, self.options);
        self.batch = Some(self.scope.spawn(move || {
            let write = |mut made: Made| {
                let written = caught(|| Ok(made.write(config, options)), panicked);
                written.unwrap_or_else(|error| Outcome::lost(made.kept(error, None)))
            };
            let outcomes: Vec<Outcome> = batch.into_iter().map(write).collect();
            finish_steps(saving.as_ref(), &outcomes);
            outcomes
        }));
    }

    /// Videos of the batch, if the thread has ended.
    pub(super) fn ended(&mut self) -> Vec<Outcome> {
        if self.batch.as_ref().is_some_and(ScopedJoinHandle::is_finished) { self.wait() } else { Vec::new() }
    }

    /// Videos of the batch, once the thread has ended.
    pub(super) fn wait(&mut self) -> Vec<Outcome> {
        let Some(batch) = self.batch.take() else { return Vec::new() };
        if !batch.is_finished() {
            interrupts::doing("while files were written");
        }
        batch.join().unwrap_or_else(|panic| vec![Outcome::lost(panicked(panic_message(&*panic)))])
    }
}

fn panicked(message: String) -> PipelineError {
    PipelineError::Bug(format!("the thread that writes the video panicked: {message}"))
}

/// Removes the steps and clips that videos were continued from, if every file of these is written; else says how to continue.
pub(super) fn finish_steps(saving: Option<&Saving>, outcomes: &[Outcome]) {
    let Some(saving) = saving else { return };
    if outcomes.iter().all(|outcome| outcome.failed.is_none()) {
        saving.finish();
    } else if let Some(continuation) = saving.continuation() {
        tracing::info!("{continuation}");
    }
}

impl Made {
    /// Writes the video, its sidecar and the other files that are asked for. A file that cannot be written prevents none of the
    /// others; then frames, samples and latents are kept too, and the error says where. May be called again after a failure.
    pub(crate) fn write(&mut self, config: &Config, options: &GenerateOptions) -> Outcome {
        let since = Instant::now();
        // An encoder that fails here fails again where the file is written, which reports it.
        let encoded = self.generated.stream.take().and_then(|stream| stream.finish().ok());
        let audio = match self.generated.sound() {
            Ok(audio) => audio,
            Err(error) => return Outcome::lost(self.kept(error, None)),
        };
        let replace = self.replaceable.has(&self.path);
        let (frames, encoder) = (&self.generated.frames, Mp4Options { replace, ..Mp4Options::default() });
        // The hashes are computed while the video is encoded.
        let (written, hashes) = thread::scope(|scope| {
            let hashes = scope.spawn(|| (frames.sha256(), audio.sha256()));
            let write = || write_video(config, &self.path, &self.generated, encoded.as_ref(), &audio, &encoder);
            (caught(write, panicked), hashes.join())
        });
        let (frames_sha256, samples_sha256) = match hashes {
            Ok(hashes) => hashes,
            Err(panic) => return Outcome::lost(self.kept(panicked(panic_message(&*panic)), Some(&audio))),
        };
        let (path, prompt) = (self.path.clone(), self.job.prompt.clone());
        let video = Finished { path, seed: self.job.seed, prompt, frames_sha256, samples_sha256 };
        let mut failures = Failures::default();
        let is_there = match written {
            Err(error) if self.keep.is_none() => return Outcome::lost(error),
            written => !failures.add(written),
        };
        self.write_others(config, options, &mut failures);
        let (table, figures) = self.report.end(Span::until_now(SpanKind::Write, "mp4", since));
        // Beside a video that is not there may be the sidecar of another run's.
        let mut has_sidecar = false;
        if let Some(says) = self.sidecar.as_ref().filter(|_| is_there) {
            let path = sidecar_path(&self.path);
            let replace = self.replaceable.has(&path);
            has_sidecar = !failures.add(write_sidecar(says.clone(), &path, &video, &figures, replace));
        }
        let failed = failures.first().err().map(|error| self.kept(error, Some(&audio)));
        if let (Some(error), Some(says), false) = (&failed, &self.sidecar, has_sidecar) {
            keep_sidecar(error, says.clone(), &video, &figures);
        }
        Outcome { written: is_there.then_some(Written { video, table, figures }), failed }
    }

    /// Keeps frames, samples and latents of a video of which a file cannot be written, where that is asked for. Without `audio`, the
    /// samples as they were decoded.
    fn kept(&self, error: PipelineError, audio: Option<&Audio>) -> PipelineError {
        let Some(place) = self.keep else { return error };
        kept::keep_tensors(error, place, self.results(), &self.path, KEPT, &self.tensors(audio))
    }

    /// What a file of the results holds, with a verb.
    fn results(&self) -> &'static str {
        let has_frames = self.generated.frames.count() > 0;
        if has_frames { "its frames, samples and latents are" } else { "its samples and latents are" }
    }

    fn tensors(&self, audio: Option<&Audio>) -> kept::Named {
        let Generated { frames, audio: samples, latents, .. } = &self.generated;
        let mut tensors = kept::named(frames, audio, latents);
        if audio.is_none() {
            tensors.push(("audio".into(), samples.clone().into()));
        }
        tensors
    }

    /// Keeps frames, samples and latents beside the video's file, and logs where: nobody tries to write it again.
    pub(crate) fn keep_beside(&self) {
        let write = |kept: &Path| super::tensors::write(kept, &self.tensors(None));
        match kept::store(KeepPlace::Beside, &self.path, KEPT, write) {
            Ok(kept) => tracing::error!("{}: {} kept in {}", self.path.display(), self.results(), kept.display()),
            Err(error) => tracing::error!("{}: {} not kept: {}", self.path.display(), self.results(), one_line(&error)),
        }
    }

    /// Writes the other files that are asked for. Frames of an earlier video are removed first where the run may replace them.
    fn write_others(&self, config: &Config, options: &GenerateOptions, failures: &mut Failures) {
        let (frames, path, several) = (&self.generated.frames, &self.path, options.has_several());
        if let Some(folder) = config.output.save_frames.as_ref().filter(|_| frames.count() > 0) {
            let folder = place_of(folder, path, "", several);
            let emptied = if self.replaceable.has(&folder) { media::remove_png_frames(&folder) } else { Ok(()) };
            let written = emptied.and_then(|()| media::write_new_png_frames(&folder, frames, 0));
            failures.add(written.map_err(PipelineError::from));
        }
        if let Some(file) = &config.output.save_audio {
            let file = place_of(file, path, "wav", several);
            let replace = self.replaceable.has(&file);
            let write = |sound: Audio| Ok(media::write_wav_file(&file, &sound, WavFormat::Pcm16, replace)?);
            failures.add(self.generated.file_sound().and_then(write));
        }
        if let Some(dump) = &options.dump {
            let file = dump_path(dump, &self.job, several);
            let replace = self.replaceable.has(&file);
            failures.add(super::tensors::write_with(&file, &self.generated.dump, None, replace));
        }
    }
}

/// Writes the sidecar of a video to `path`, with its hashes and times.
pub(super) fn write_sidecar(
    mut sidecar: Value,
    path: &Path,
    video: &Finished,
    figures: &Value,
    replace: bool,
) -> Result<()> {
    sidecar["sha256"] = json!({"frames": video.frames_sha256, "samples": video.samples_sha256});
    sidecar["timings"] = figures.clone();
    write_json(path, &sidecar, replace)
}

/// Writes the sidecar of a video beside what an error says is kept of it.
pub(super) fn keep_sidecar(error: &PipelineError, sidecar: Value, video: &Finished, figures: &Value) {
    if let PipelineError::Kept { kept, .. } = error {
        let written = write_sidecar(sidecar, &kept.with_extension("json"), video, figures, false);
        written.unwrap_or_else(|error| tracing::warn!("{}", one_line(&error)));
    }
}

/// Where frames or sound of the video `path` go that were asked for at `asked`: there, or below it where there are several.
pub(super) fn place_of(asked: &str, path: &Path, extension: &str, several: bool) -> PathBuf {
    let mut name = path.file_stem().expect("a video is written to a named file").to_owned();
    if !extension.is_empty() {
        name.push(".");
        name.push(extension);
    }
    if several { Path::new(asked).join(name) } else { asked.into() }
}

/// Where the tensors of a video go that were asked for at `dump`.
pub(super) fn dump_path(dump: &Path, job: &Job, several: bool) -> PathBuf {
    let stem = dump.file_stem().unwrap_or(dump.as_os_str()).to_string_lossy();
    if several { dump.with_file_name(format!("{stem}_{:04}.safetensors", job.index)) } else { dump.into() }
}

/// Writes the MP4, or the WAV of sound alone. Frames of a video that only gets other sound are copied where ffmpeg can.
fn write_video(
    config: &Config,
    path: &Path,
    generated: &Generated,
    encoded: Option<&EncodedVideo>,
    audio: &Audio,
    options: &Mp4Options,
) -> Result<()> {
    let (frames, rate) = (&generated.frames, generated.frame_rate);
    if frames.count() == 0 {
        media::write_wav_file(path, &generated.file_sound()?, WavFormat::Pcm16, options.replace)?;
        return Ok(());
    }
    let kept = config.request.video.as_ref().filter(|_| generated.are_given && config.output.audio);
    if let Some(source) = kept
        && media::write_frames_of(path, Path::new(source), frames.count(), rate, audio, options)?
    {
        return Ok(());
    }
    let sound = config.output.audio.then_some(audio);
    media::write_encoded_mp4(path, frames, encoded, rate, sound, options)?;
    Ok(())
}

/// Writes a JSON file under a temporary name and renames it. Without `replace` a file of that name stays and is an error.
pub(super) fn write_json(path: &Path, value: &Value, replace: bool) -> Result<()> {
    Ok(media::write_file(path, format!("{value:#}\n").as_bytes(), replace)?)
}
