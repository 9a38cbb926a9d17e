//! Videos on their way to files: a thread writes those that are made while the next ones are.

use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Instant;

use serde_json::{Value, json};

use super::error::{PipelineError, Result};
use super::options::GenerateOptions;
use super::report::RunReport;
use super::saved::Saving;
use super::text_to_video::Generated;
use crate::config::{Config, Job, sidecar_path};
use crate::media::{self, Audio, EncodedVideo, Frames, Mp4Options, WavFormat};
use crate::runtime::{Span, SpanKind};
use crate::tensor::Tensor;

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
    /// Whether a file of its name is replaced.
    pub(crate) replace: bool,
    /// Whether the frames of a video that cannot be written are kept elsewhere.
    pub(crate) keeps: bool,
    pub(crate) report: RunReport,
    /// The sidecar, where there is to be one, without hashes and times.
    pub(crate) sidecar: Option<Value>,
    pub(crate) generated: Generated,
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
    batch: Option<ScopedJoinHandle<'scope, Result<Vec<Written>>>>,
}

impl<'scope, 'env> Writer<'scope, 'env> {
    pub(super) fn new(
        scope: &'scope Scope<'scope, 'env>,
        config: &'env Config,
        options: &'env GenerateOptions,
    ) -> Self {
        Writer { scope, config, options, batch: None }
    }

    /// Begins to write videos that were made together; then their steps are needed no more. The batch before was waited for.
    pub(super) fn start(&mut self, batch: Vec<Made>, saving: Option<Saving>) {
        let (config, options) = (self.config, self.options);
        self.batch = Some(self.scope.spawn(move || {
            let write = |mut made: Made| made.write(config, options);
            let written = batch.into_iter().map(write).collect::<Result<Vec<_>>>()?;
            saving.iter().for_each(Saving::finish);
            Ok(written)
        }));
    }

    /// Videos that are written, if the thread has ended.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(super) fn ended(&mut self) -> Result<Vec<Written>> {
        if self.batch.as_ref().is_some_and(ScopedJoinHandle::is_finished) { self.wait() } else { Ok(Vec::new()) }
    }

    /// Waits until all is written.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(super) fn wait(&mut self) -> Result<Vec<Written>> {
        let Some(batch) = self.batch.take() else { return Ok(Vec::new()) };
        batch.join().unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl Made {
    /// Writes the video and what is asked for beside it. It may be called again after a failure.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(crate) fn write(&mut self, config: &Config, options: &GenerateOptions) -> Result<Written> {
        let since = Instant::now();
        let video = write_files(config, options, self)?;
        let span = Span::until_now(SpanKind::Write, "mp4", since);
        let (table, figures) = self.report.end(span);
        if let Some(sidecar) = &self.sidecar {
            write_sidecar(sidecar.clone(), &video, &figures)?;
        }
        Ok(Written { video, table, figures })
    }
}

/// Writes the sidecar of a video, with its hashes and times.
pub(super) fn write_sidecar(mut sidecar: Value, video: &Finished, figures: &Value) -> Result<()> {
    sidecar["sha256"] = json!({"frames": video.frames_sha256, "samples": video.samples_sha256});
    sidecar["timings"] = figures.clone();
    write_json(&sidecar_path(&video.path), &sidecar)
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

fn write_files(config: &Config, options: &GenerateOptions, made: &mut Made) -> Result<Finished> {
    // What an encoder fails at, it fails at again where the file is written: frames that cannot be encoded are kept there.
    let encoded = made.generated.stream.take().and_then(|stream| stream.finish().ok());
    let Made { job, path, generated, keeps, .. } = &*made;
    let several = options.jobs.len() > 1;
    let frames = &generated.frames;
    let audio = generated.sound()?;
    let encoder = Mp4Options { replace: made.replace, ..Mp4Options::default() };
    // The hashes are taken beside the encoder.
    let (written, (frames_sha256, samples_sha256)) = thread::scope(|scope| {
        let hashes = scope.spawn(|| (frames.sha256(), audio.sha256()));
        let written = write_video(config, path, generated, encoded.as_ref(), &audio, &encoder);
        (written, hashes.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    if let Err(error) = written {
        return Err(if *keeps { keep(error, path, frames, &audio) } else { error });
    }
    if let Some(folder) = config.output.save_frames.as_ref().filter(|_| frames.count() > 0) {
        media::write_png_frames(&place_of(folder, path, "", several), frames)?;
    }
    if let Some(file) = &config.output.save_audio {
        media::write_wav(&place_of(file, path, "wav", several), &audio, WavFormat::Pcm16)?;
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
    let (path, prompt) = (path.clone(), job.prompt.clone());
    Ok(Finished { path, seed: job.seed, prompt, frames_sha256, samples_sha256 })
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
        media::write_wav(path, audio, WavFormat::Pcm16)?;
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

/// Writes a JSON file under a temporary name and renames it.
pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    Ok(media::write_atomically(path, format!("{value:#}\n").as_bytes())?)
}
