//! Writes the files of long videos while their clips are generated.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::partial_results::{self, NamedTensors};
use super::report::RunReport;
use super::sidecar::{keep_sidecar, write_sidecar};
use super::writer::{Failures, FinishedVideo, WriteOutcome, WrittenVideo, place_of};
use crate::config::Config;
use crate::media::{
    Audio, Frames, LongHashes, LongMp4, Mp4Options, WavFormat, remove_png_frames, write_new_png_frames,
};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::model::OpenModel;
use crate::pipeline::plan::options::FallbackLocation;
use crate::pipeline::plan::overwrites::Replaceable;
use crate::pipeline::plan::videos::{Job, RunVideos, sidecar_path};
use crate::pipeline::programs::executor::Executor;
use crate::pipeline::stages::chain::{ChainPiece, ClipJoiner};
use crate::pipeline::stages::clock::PhaseTime;
use crate::pipeline::stages::text_to_video::{Generated, SkippedSteps};
use crate::request::Request;
use crate::runtime::{Span, SpanKind};

/// Writes the files of the chained videos of a batch.
pub(in crate::pipeline) struct ChainWriter<'a> {
    config: &'a Config,
    run: &'a RunVideos,
    replaceable: &'a Replaceable,
    videos: Vec<ChainVideo<'a>>,
    /// Time of each phase, summed over all clips so far.
    timings: Vec<PhaseTime>,
    steps: usize,
    computed_steps: usize,
    /// Steps that the step cache skipped, for all clips so far.
    skipped: Vec<SkippedSteps>,
    /// The clip added last, without its frames and sound.
    last: Option<Generated>,
}

struct ChainVideo<'a> {
    job: &'a Job,
    path: &'a Path,
    join: ClipJoiner,
    file: Option<LongMp4>,
    /// Number of frames of the video so far.
    frames: usize,
    /// Latents of all clips so far, named by clip number and dump name.
    latents: NamedTensors,
    clips: usize,
    /// Errors of output files. A file that cannot be written does not prevent the others from being written.
    failures: Failures,
    /// Whether the frames are also written as PNG files.
    saves_frames: bool,
}

impl<'a> ChainWriter<'a> {
    /// Creates a writer for videos whose requests differ from `first` only in prompt and seed.
    ///
    /// # Errors
    /// Returns an error if the request has only one clip.
    pub(in crate::pipeline) fn new(
        config: &'a Config,
        run: &'a RunVideos,
        model: &OpenModel,
        jobs: &'a [Job],
        paths: &'a [PathBuf],
        first: &Request,
        replaceable: &'a Replaceable,
    ) -> Result<Self> {
        let chain = first
            .chain
            .as_ref()
            .ok_or_else(|| PipelineError::Bug("the request has one clip, but a chained video has several".into()))?;
        let videos = jobs.iter().zip(paths).map(|(job, path)| ChainVideo {
            job,
            path,
            join: ClipJoiner::new(chain, model, first.frame_rate),
            file: None,
            frames: 0,
            latents: Vec::new(),
            clips: 0,
            failures: Failures::default(),
            saves_frames: config.output.save_frames.is_some(),
        });
        let videos = videos.collect();
        Ok(ChainWriter {
            config,
            run,
            replaceable,
            videos,
            timings: Vec::new(),
            steps: 0,
            computed_steps: 0,
            skipped: Vec::new(),
            last: None,
        })
    }

    /// Adds the next clip of each video.
    ///
    /// # Errors
    /// Returns an error if a video file cannot be written; the caller then calls [`ChainWriter::keep`], which saves the
    /// results so far. Errors of other files are reported by [`ChainWriter::finish`].
    pub(in crate::pipeline) fn add(&mut self, clips: Vec<Generated>) -> Result<()> {
        for (video, mut clip) in self.videos.iter_mut().zip(clips) {
            // The checkpoint of the next clip replaces the one that this guard would write.
            clip.guard = None;
            let at = video.clips;
            let latents = std::mem::take(&mut clip.latents).into_iter();
            video.latents.extend(latents.map(|(name, latents)| (format!("clip_{at:04}.{name}"), latents)));
            video.clips += 1;
            let (frames, sound) =
                (std::mem::replace(&mut clip.frames, Frames::none()), std::mem::take(&mut clip.audio));
            let piece = video.join.add(frames, sound);
            let (asked, several) = (self.config.output.save_frames.as_ref(), self.run.has_several());
            let folder = asked.map(|asked| place_of(asked, video.path, "", several));
            video.write(folder.as_deref(), self.replaceable, piece, &clip)?;
            self.last = Some(clip);
        }
        if let Some(clip) = &self.last {
            self.steps += clip.steps;
            self.computed_steps += clip.computed_steps;
            self.skipped.extend(clip.skipped.iter().cloned());
            for took in &clip.timings {
                match self.timings.iter_mut().find(|sum| sum.phase == took.phase) {
                    Some(sum) => (sum.total, sum.device) = (sum.total + took.total, sum.device + took.device),
                    None => self.timings.push(*took),
                }
            }
        }
        Ok(())
    }

    /// Finishes the files of all videos. `made`: time from the start of the batch until its videos were generated.
    /// `sidecar`: returns the sidecar of a video without hashes and timings. If a file cannot be written, its contents
    /// are saved in another file, which the error names, and the remaining files are still written.
    pub(in crate::pipeline) fn finish(
        self,
        executor: &Executor,
        made: Duration,
        sidecar: impl Fn(&Job) -> Value,
    ) -> Vec<WriteOutcome> {
        let Some(last) = self.last else { return Vec::new() };
        let Self { timings, steps, computed_steps, skipped, .. } = self;
        let summary = Generated { timings, steps, computed_steps, skipped, ..last };
        let (config, several, replaceable) = (self.config, self.run.has_several(), self.replaceable);
        let each = self.videos.into_iter().map(|mut video| {
            let since = Instant::now();
            let path = video.path;
            let sound = config.output.save_audio.as_ref().map(|asked| place_of(asked, path, "wav", several));
            let (hashes, video_written) = video.finish(sound.as_deref(), replaceable);
            let span = Span::until_now(SpanKind::Write, "mp4", since);
            let (table, figures) = RunReport::new(&summary, executor, made).end(span);
            let Some(hashes) = hashes else { return WriteOutcome { written: None, failed: video.kept(video_written) } };
            let finished = FinishedVideo {
                path: path.into(),
                seed: video.job.seed,
                prompt: video.job.prompt.clone(),
                frames_sha256: hashes.frames,
                samples_sha256: hashes.samples,
                hdr_sha256: None,
            };
            let says = config.output.sidecar.then(|| sidecar(video.job));
            let mut has_sidecar = false;
            // If the video was not written, an existing sidecar at this path may belong to another run, so it is not
            // replaced.
            if let Some(says) = says.as_ref().filter(|_| video_written) {
                let file = sidecar_path(path);
                let written = write_sidecar(says.clone(), &file, &finished, &figures, replaceable.has(&file));
                has_sidecar = !video.failures.add(written);
            }
            let failed = video.kept(video_written);
            if let (Some(error), Some(says), false) = (&failed, says, has_sidecar) {
                keep_sidecar(error, says, &finished, &figures);
            }
            WriteOutcome { written: video_written.then_some(WrittenVideo { video: finished, table, figures }), failed }
        });
        each.collect()
    }

    /// Saves the finished clips of every video after an error that aborts the run. Returns `error`, extended with the
    /// paths of the saved files.
    pub(in crate::pipeline) fn keep(self, error: PipelineError) -> PipelineError {
        self.videos.into_iter().fold(error, |error, mut video| video.keep(error))
    }
}

impl ChainVideo<'_> {
    /// Appends the frames and samples of `piece` to the video file, with the frame rate and sample rate of `clip`. If
    /// `folder` is set, also writes the frames there as PNG files.
    fn write(
        &mut self,
        folder: Option<&Path>,
        replaceable: &Replaceable,
        piece: ChainPiece,
        clip: &Generated,
    ) -> Result<()> {
        let ChainPiece { frames, sound } = piece;
        if let Some(folder) = folder.filter(|_| self.saves_frames) {
            // Removes the frames of an earlier video first, if the run may replace them.
            let removes = self.frames == 0 && replaceable.has(folder);
            let emptied = if removes { remove_png_frames(folder) } else { Ok(()) };
            let written = emptied.and_then(|()| write_new_png_frames(folder, &frames, self.frames));
            self.saves_frames = !self.failures.add(written.map_err(PipelineError::from));
        }
        self.frames += frames.count();
        let file = match &mut self.file {
            Some(file) => file,
            None => {
                let encoder = Mp4Options { replace: replaceable.has(self.path), ..Mp4Options::default() };
                let rate = u32::try_from(clip.sample_rate).unwrap_or(u32::MAX);
                let started = LongMp4::start(self.path, &frames, clip.frame_rate, sound.nrows(), rate, &encoder);
                match started {
                    Ok(file) => self.file.insert(file),
                    Err(error) => {
                        let audio = Audio::new(sound, rate).ok();
                        self.latents =
                            partial_results::named(&frames, audio.as_ref(), &std::mem::take(&mut self.latents));
                        return Err(error.into());
                    }
                }
            }
        };
        // Write the audio first, so that it is complete even if the encoder fails.
        file.push_sound(&sound)?;
        Ok(file.push(frames)?)
    }

    /// Finishes the video and, if requested, writes its audio to a separate file. Returns the hashes (`None` if the
    /// audio cannot be read back) and whether the video was written.
    fn finish(&mut self, sound: Option<&Path>, replaceable: &Replaceable) -> (Option<LongHashes>, bool) {
        let file = self.file.as_mut().expect("a chain has clips");
        if let Some(sound) = sound {
            let written = file.write_wav(sound, WavFormat::Pcm16, replaceable.has(sound));
            self.failures.add(written.map_err(PipelineError::from));
        }
        match file.hashes() {
            Ok(hashes) => (Some(hashes), !self.failures.add(file.finish().map_err(PipelineError::from))),
            Err(error) => {
                self.failures.add(Err(error.into()));
                (None, false)
            }
        }
    }

    /// If a file could not be written, saves the results and returns the first error. `video_written`: whether the
    /// video file itself was written, in which case only the latents are saved.
    fn kept(&mut self, video_written: bool) -> Option<PipelineError> {
        let error = std::mem::take(&mut self.failures).first().err()?;
        Some(if video_written { self.keep_latents(error) } else { self.keep(error) })
    }

    /// Saves the results so far of a video that could not be written: an MP4 file of the frames encoded so far, a WAV
    /// file of the audio if some frames could not be encoded, and the latents of all clips.
    fn keep(&mut self, error: PipelineError) -> PipelineError {
        let (mut error, place) = (error, FallbackLocation::Temporary);
        if let Some(file) = self.file.as_mut().filter(|file| file.frames() > 0) {
            if let Err(failed) = file.close() {
                tracing::warn!("{}: {failed}", self.path.display());
            }
            let (all, encoded) = (file.frames(), file.encoded_frames());
            if encoded > 0 {
                let what = format!("the first {encoded} frames with their audio");
                error =
                    partial_results::keep(
                        error,
                        place,
                        &what,
                        self.path,
                        ".mp4",
                        |kept| Ok(file.write_to(kept, true)?),
                    );
            }
            if encoded < all {
                error = partial_results::keep(error, place, "the audio samples", self.path, ".wav", |kept| {
                    Ok(file.write_wav(kept, WavFormat::Float32, true)?)
                });
            }
        }
        self.keep_latents(error)
    }

    /// Saves the latents of all clips, and the last frames if they were passed to the encoder but not encoded.
    fn keep_latents(&self, error: PipelineError) -> PipelineError {
        let frames = self.file.as_ref().and_then(LongMp4::lost_frames);
        let latents = format!("the latents of {} clips", self.clips);
        let what = match (frames, self.latents.is_empty()) {
            (None, true) => return error,
            (None, false) => latents,
            (Some(frames), _) => format!("{latents} and the last {} frames", frames.count()),
        };
        let tensors = partial_results::named(frames.unwrap_or(&Frames::none()), None, &self.latents);
        partial_results::keep_tensors(
            error,
            FallbackLocation::Temporary,
            &what,
            self.path,
            ".clips.safetensors",
            &tensors,
        )
    }
}
