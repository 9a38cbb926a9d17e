//! Writes videos to files on a separate thread while the next videos are generated.

use std::path::{Path, PathBuf};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Instant;

use serde_json::Value;

use super::denoise_checkpoint::CheckpointSettings;
use super::hdr_files;
use super::partial_results;
use super::report::RunReport;
use super::sidecar::{keep_sidecar, write_sidecar};
use crate::atomic_file;
use crate::catch_panic::{catch_panics, panic_message};
use crate::config::Config;
use crate::interrupts;
use crate::media::{self, Audio, HdrFrames, Mp4Options, VideoStream, WavFormat};
use crate::pipeline::error::{PipelineError, Result, one_line};
use crate::pipeline::plan::options::FallbackLocation;
use crate::pipeline::plan::overwrites::Replaceable;
use crate::pipeline::plan::videos::{Job, RunVideos, sidecar_path};
use crate::pipeline::stages::text_to_video::Generated;
use crate::runtime::{Span, SpanKind};

/// Extension of files that contain results that could not be written to the output files.
const KEPT: &str = ".safetensors";

/// A video that has been written.
#[derive(Clone, Debug, serde::Serialize)]
pub struct FinishedVideo {
    /// Output file: MP4, or WAV for an audio-only result.
    pub(crate) path: PathBuf,
    pub(crate) seed: u64,
    pub(crate) prompt: String,
    /// SHA-256 of the raw frames.
    pub frames_sha256: String,
    /// SHA-256 of the raw audio samples.
    pub samples_sha256: String,
    /// SHA-256 of the half-precision values of the EXR files. `None`: the video is SDR.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hdr_sha256: Option<String>,
}

/// A generated video with everything that is needed to write its files. Holds no device memory.
pub(crate) struct UnwrittenVideo {
    pub(crate) job: Job,
    pub(crate) path: PathBuf,
    pub(crate) replaceable: Replaceable,
    /// Location in which the results are saved if a file cannot be written. `None`: they are not saved; the caller
    /// retries or calls [`UnwrittenVideo::save_next_to_video`].
    pub(crate) fallback: Option<FallbackLocation>,
    /// Whether the EXR frames of HDR video are written to one ZIP file next to the video, instead of a folder.
    pub(crate) archives_exr: bool,
    pub(crate) report: RunReport,
    /// The sidecar (JSON file next to the video), without output hashes and timings. `None`: no sidecar is written.
    pub(crate) sidecar: Option<Value>,
    pub(crate) generated: Generated,
}

/// Result of writing the files of a video. If a file cannot be written, the others are still written.
pub(crate) struct WriteOutcome {
    /// The video. `None`: the video file itself could not be written.
    pub(in crate::pipeline) written: Option<WrittenVideo>,
    pub(in crate::pipeline) failed: Option<PipelineError>,
}

impl WriteOutcome {
    /// Creates the result for a video of which no file was written.
    fn nothing_written(error: PipelineError) -> Self {
        WriteOutcome { written: None, failed: Some(error) }
    }

    /// Returns the video, if it was written, and the error of the first file that could not be written, if any.
    pub(crate) fn parts(self) -> (Option<WrittenVideo>, Option<PipelineError>) {
        (self.written, self.failed)
    }
}

/// Splits results into the videos that were written and, if any video could not be written, the first error. Adds the
/// errors of other files to `late`.
pub(in crate::pipeline) fn sorted(outcomes: Vec<WriteOutcome>, late: &mut Failures) -> (Vec<WrittenVideo>, Result<()>) {
    let (mut all, mut failures) = (Vec::new(), Failures::default());
    for WriteOutcome { written, failed } in outcomes {
        let of = if written.is_some() { &mut *late } else { &mut failures };
        of.add(failed.map_or(Ok(()), Err));
        all.extend(written);
    }
    (all, failures.first())
}

/// Collects the errors of several files: keeps the first error, and logs the others as warnings.
#[derive(Default)]
pub(in crate::pipeline) struct Failures(Option<PipelineError>);

impl Failures {
    /// Records a result. Returns whether it was an error.
    pub(in crate::pipeline) fn add(&mut self, result: Result<()>) -> bool {
        let Err(error) = result else { return false };
        match &self.0 {
            Some(_) => tracing::warn!("{}", one_line(&error)),
            None => self.0 = Some(error),
        }
        true
    }

    /// Returns the first error, if any.
    pub(in crate::pipeline) fn first(self) -> Result<()> {
        self.0.map_or(Ok(()), Err)
    }
}

/// A video that has been written, the printable table of its phases, and the same figures as JSON.
pub(crate) struct WrittenVideo {
    pub(crate) video: FinishedVideo,
    pub(in crate::pipeline) table: String,
    pub(crate) figures: Value,
}

/// Thread that writes videos. It holds at most one batch, so that memory use is bounded.
pub(in crate::pipeline) struct VideoWriter<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    config: &'env Config,
    videos: &'env RunVideos,
    batch: Option<ScopedJoinHandle<'scope, Vec<WriteOutcome>>>,
}

impl<'scope, 'env> VideoWriter<'scope, 'env> {
    pub(in crate::pipeline) fn new(
        scope: &'scope Scope<'scope, 'env>,
        config: &'env Config,
        videos: &'env RunVideos,
    ) -> Self {
        VideoWriter { scope, config, videos, batch: None }
    }

    /// Starts to write a batch, and removes the checkpoint of the batch when all files are written. The caller must
    /// have waited for the previous batch.
    pub(in crate::pipeline) fn start(&mut self, batch: Vec<UnwrittenVideo>, checkpoint: Option<CheckpointSettings>) {
        let (config, videos) = (self.config, self.videos);
        self.batch = Some(self.scope.spawn(move || {
            let write = |mut made: UnwrittenVideo| {
                let written = catch_panics(|| Ok(made.write(config, videos)), panicked);
                written.unwrap_or_else(|error| WriteOutcome::nothing_written(made.kept(error, None)))
            };
            let outcomes: Vec<WriteOutcome> = batch.into_iter().map(write).collect();
            finish_steps(checkpoint.as_ref(), &outcomes);
            outcomes
        }));
    }

    /// Returns the results of the batch if the thread has finished, otherwise an empty list. Does not wait.
    pub(in crate::pipeline) fn ended(&mut self) -> Vec<WriteOutcome> {
        if self.batch.as_ref().is_some_and(ScopedJoinHandle::is_finished) { self.wait() } else { Vec::new() }
    }

    /// Waits until the thread has finished, and returns the results of the batch.
    pub(in crate::pipeline) fn wait(&mut self) -> Vec<WriteOutcome> {
        let Some(batch) = self.batch.take() else { return Vec::new() };
        if !batch.is_finished() {
            interrupts::doing("while files were written");
        }
        batch.join().unwrap_or_else(|panic| vec![WriteOutcome::nothing_written(panicked(panic_message(&*panic)))])
    }
}

fn panicked(message: String) -> PipelineError {
    PipelineError::Bug(format!("the thread that writes the video panicked: {message}"))
}

/// Removes the checkpoint of a batch if all files were written. Otherwise, logs how to resume.
pub(in crate::pipeline) fn finish_steps(checkpoint: Option<&CheckpointSettings>, outcomes: &[WriteOutcome]) {
    let Some(checkpoint) = checkpoint else { return };
    if outcomes.iter().all(|outcome| outcome.failed.is_none()) {
        checkpoint.finish();
    } else if let Some(continuation) = checkpoint.continuation() {
        tracing::info!("{continuation}");
    }
}

impl UnwrittenVideo {
    /// Writes the video, its sidecar and the other requested files. If a file cannot be written, the others are still
    /// written, and frames, samples and latents are saved in another file, which the error names. Can be called again
    /// after a failure.
    pub(crate) fn write(&mut self, config: &Config, videos: &RunVideos) -> WriteOutcome {
        let since = Instant::now();
        let stream = self.generated.stream.take();
        let audio = match self.generated.sound() {
            Ok(audio) => audio,
            Err(error) => return WriteOutcome::nothing_written(self.kept(error, None)),
        };
        let replace = self.replaceable.has(&self.path);
        let (frames, encoder) = (&self.generated.frames, Mp4Options { replace, ..Mp4Options::default() });
        // Compute the hashes while the video is encoded.
        let (written, hashes) = thread::scope(|scope| {
            let hdr = self.generated.hdr.as_ref();
            let (frames, sound) = (frames, &audio);
            let hashes = scope.spawn(move || (frames.sha256(), sound.sha256(), hdr.map(HdrFrames::sha256)));
            let write = || write_video(config, &self.path, &self.generated, stream, &audio, &encoder);
            (catch_panics(write, panicked), hashes.join())
        });
        let (frames_sha256, samples_sha256, hdr_sha256) = match hashes {
            Ok(hashes) => hashes,
            Err(panic) => {
                return WriteOutcome::nothing_written(self.kept(panicked(panic_message(&*panic)), Some(&audio)));
            }
        };
        let (path, prompt) = (self.path.clone(), self.job.prompt.clone());
        let video = FinishedVideo { path, seed: self.job.seed, prompt, frames_sha256, samples_sha256, hdr_sha256 };
        let mut failures = Failures::default();
        let video_written = match written {
            Err(error) if self.fallback.is_none() => return WriteOutcome::nothing_written(error),
            written => !failures.add(written),
        };
        self.write_other_files(config, videos, &mut failures);
        let (table, figures) = self.report.end(Span::until_now(SpanKind::Write, "mp4", since));
        // If the video was not written, an existing sidecar may belong to another run, so it is not replaced. A video whose
        // EXR frames are missing is not finished.
        let is_finished = video_written && (self.generated.hdr.is_none() || failures.0.is_none());
        let mut has_sidecar = false;
        if let Some(says) = self.sidecar.as_ref().filter(|_| is_finished) {
            let path = sidecar_path(&self.path);
            let replace = self.replaceable.has(&path);
            has_sidecar = !failures.add(write_sidecar(says.clone(), &path, &video, &figures, replace));
        }
        let failed = failures.first().err().map(|error| self.kept(error, Some(&audio)));
        if let (Some(error), Some(says), false) = (&failed, &self.sidecar, has_sidecar) {
            keep_sidecar(error, says.clone(), &video, &figures);
        }
        WriteOutcome { written: video_written.then_some(WrittenVideo { video, table, figures }), failed }
    }

    /// Saves frames, samples and latents after a file could not be written, if `keep` is set. Returns the error,
    /// extended with the path of the saved file. If `audio` is `None`, saves the samples as they were decoded.
    fn kept(&self, error: PipelineError, audio: Option<&Audio>) -> PipelineError {
        let Some(place) = self.fallback else { return error };
        partial_results::keep(error, place, self.results(), &self.path, KEPT, |kept| self.write_tensors(kept, audio))
    }

    /// Writes frames, samples and latents to a file that `ltx2 encode` reads.
    fn write_tensors(&self, path: &Path, audio: Option<&Audio>) -> Result<()> {
        super::tensors::write_with(path, &self.tensors(audio), Some(self.generated.rates()), true)
    }

    /// Describes the saved results, as a plural for messages.
    fn results(&self) -> &'static str {
        let has_frames = self.generated.frames.count() > 0;
        if has_frames { "the frames, audio samples and latents" } else { "the audio samples and latents" }
    }

    fn tensors(&self, audio: Option<&Audio>) -> partial_results::NamedTensors {
        let Generated { frames, audio: samples, latents, .. } = &self.generated;
        let mut tensors = partial_results::named(frames, audio, latents);
        if audio.is_none() {
            tensors.push(("audio".into(), samples.clone().into()));
        }
        tensors
    }

    /// Saves frames, samples and latents in a file next to the video, and logs the path of that file. Called when the
    /// video will not be written again.
    pub(crate) fn save_next_to_video(&self) {
        let write = |kept: &Path| self.write_tensors(kept, None);
        match partial_results::store(FallbackLocation::NextToVideo, &self.path, KEPT, write) {
            Ok(kept) => tracing::error!("{}: {} are kept in {}", self.path.display(), self.results(), kept.display()),
            Err(error) => {
                tracing::error!("{}: {} are not kept: {}", self.path.display(), self.results(), one_line(&error));
            }
        }
    }

    /// Writes the requested PNG frames, HDR files, WAV file and tensor dump. Deletes the PNG frames of an earlier video first if
    /// the run may replace the folder. Collects errors in `failures`.
    fn write_other_files(&self, config: &Config, videos: &RunVideos, failures: &mut Failures) {
        let (frames, path, several) = (&self.generated.frames, &self.path, videos.has_several());
        if let Some(folder) = config.output.save_frames.as_ref().filter(|_| frames.count() > 0) {
            let folder = place_of(folder, path, "", several);
            let emptied = if self.replaceable.has(&folder) { media::remove_png_frames(&folder) } else { Ok(()) };
            let written = emptied.and_then(|()| media::write_new_png_frames(&folder, frames, 0));
            failures.add(written.map_err(PipelineError::from));
        }
        if let Some(hdr) = &self.generated.hdr {
            let rate = self.generated.frame_rate;
            failures.add(match self.archives_exr {
                true => hdr_files::write_exr_archive(path, hdr, &self.replaceable),
                false => hdr_files::write_exr(config, path, several, hdr, &self.replaceable),
            });
            failures.add(hdr_files::write_video(config, path, hdr, rate, &self.replaceable));
        }
        if let Some(file) = &config.output.save_audio {
            let file = place_of(file, path, "wav", several);
            let replace = self.replaceable.has(&file);
            let write = |sound: Audio| Ok(media::write_wav_file(&file, &sound, WavFormat::Pcm16, replace)?);
            failures.add(self.generated.file_sound().and_then(write));
        }
        if let Some(dump) = &videos.dump {
            let file = dump_path(dump, &self.job, several);
            let replace = self.replaceable.has(&file);
            failures.add(super::tensors::write_with(
                &file,
                &self.generated.dump,
                Some(self.generated.rates()),
                replace,
            ));
        }
    }
}

/// Returns the path of the folder for frames, or of the audio file, of the video `path`. For a single video, returns
/// `asked`, the path that the user passed; for several videos, a path in the folder `asked` with the video's name.
pub(in crate::pipeline) fn place_of(asked: &str, path: &Path, extension: &str, several: bool) -> PathBuf {
    let mut name = path.file_stem().expect("a video is written to a named file").to_owned();
    if !extension.is_empty() {
        name.push(".");
        name.push(extension);
    }
    if several { Path::new(asked).join(name) } else { asked.into() }
}

/// Returns the path of a job's dump: `dump`, with the job's number added if there are several videos.
pub(in crate::pipeline) fn dump_path(dump: &Path, job: &Job, several: bool) -> PathBuf {
    let stem = dump.file_stem().unwrap_or(dump.as_os_str()).to_string_lossy();
    if several { dump.with_file_name(format!("{stem}_{:04}.safetensors", job.index)) } else { dump.into() }
}

/// Writes an MP4 file, or a WAV file for an audio-only result. If only the audio of an input video changes, its encoded
/// frames are copied, provided that ffmpeg can copy them.
fn write_video(
    config: &Config,
    path: &Path,
    generated: &Generated,
    stream: Option<VideoStream>,
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
        && media::copy_video_with_audio(path, Path::new(source), frames.count(), rate, audio, options)?
    {
        return Ok(());
    }
    let sound = (config.output.audio && generated.hdr.is_none()).then_some(audio);
    media::write_encoded_mp4(path, frames, stream, rate, sound, options)?;
    Ok(())
}

/// Writes a JSON file atomically. Unless `replace` is set, an existing file is an error.
pub(in crate::pipeline) fn write_json(path: &Path, value: &Value, replace: bool) -> Result<()> {
    Ok(atomic_file::write_file(path, format!("{value:#}\n").as_bytes(), replace)?)
}
