//! Videos of several clips on their way to their files, which are written while the clips are made.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::chain::{Join, Piece};
use super::clock::PhaseTime;
use super::error::{PipelineError, Result};
use super::executor::Executor;
use super::kept::{self, Named};
use super::model::Model;
use super::options::GenerateOptions;
use super::report::RunReport;
use super::text_to_video::Generated;
use super::writer::{Failures, Finished, Outcome, Written, place_of, write_sidecar};
use crate::config::{Config, Job, sidecar_path};
use crate::media::{Audio, Frames, LongMp4, Mp4Options, WavFormat, remove_png_frames, write_png_frames_from};
use crate::request::Request;
use crate::runtime::{Span, SpanKind};

/// Videos that are made together.
pub(super) struct ChainWriter<'a> {
    config: &'a Config,
    options: &'a GenerateOptions,
    videos: Vec<Video<'a>>,
    /// Of all clips so far.
    timings: Vec<PhaseTime>,
    steps: usize,
    /// The last clip, without frames and sound.
    last: Option<Generated>,
}

struct Video<'a> {
    job: &'a Job,
    path: &'a Path,
    /// Whether a file of its name is replaced.
    replace: bool,
    join: Join,
    file: Option<LongMp4>,
    /// Frames that are in the file.
    frames: usize,
    /// Latents of all clips so far, by clip and their dump names.
    latents: Named,
    clips: usize,
    /// Of files beside it; none of the others is kept back by one.
    failures: Failures,
    /// Whether frames are written one by one.
    saves_frames: bool,
}

impl<'a> ChainWriter<'a> {
    /// No clip yet of these videos, whose requests differ from the first in prompt and seed only. `replaces` says whether a file that
    /// has a video's name is.
    ///
    /// # Errors
    /// A request of one clip.
    pub(super) fn new(
        config: &'a Config,
        options: &'a GenerateOptions,
        model: &Model,
        jobs: &'a [Job],
        paths: &'a [PathBuf],
        first: &Request,
        replaces: &dyn Fn(&PathBuf) -> bool,
    ) -> Result<Self> {
        let chain = first.chain.as_ref().ok_or_else(|| PipelineError::Bug("the request has one clip".into()))?;
        let videos = jobs.iter().zip(paths).map(|(job, path)| Video {
            job,
            path,
            replace: replaces(path),
            join: Join::new(chain, model, first.frame_rate),
            file: None,
            frames: 0,
            latents: Vec::new(),
            clips: 0,
            failures: Failures::default(),
            saves_frames: config.output.save_frames.is_some(),
        });
        Ok(ChainWriter { config, options, videos: videos.collect(), timings: Vec::new(), steps: 0, last: None })
    }

    /// Adds a clip of each video.
    ///
    /// # Errors
    /// A file that cannot be written; [`ChainWriter::keep`] keeps what is there.
    pub(super) fn add(&mut self, clips: Vec<Generated>) -> Result<()> {
        for (video, mut clip) in self.videos.iter_mut().zip(clips) {
            let at = video.clips;
            let latents = std::mem::take(&mut clip.latents).into_iter();
            video.latents.extend(latents.map(|(name, latents)| (format!("clip_{at:04}.{name}"), latents)));
            video.clips += 1;
            let (frames, sound) =
                (std::mem::replace(&mut clip.frames, Frames::none()), std::mem::take(&mut clip.audio));
            let piece = video.join.add(frames, sound);
            video.write(self.config, self.options, piece, &clip)?;
            self.last = Some(clip);
        }
        if let Some(clip) = &self.last {
            self.steps += clip.steps;
            for took in &clip.timings {
                match self.timings.iter_mut().find(|sum| sum.phase == took.phase) {
                    Some(sum) => (sum.total, sum.device) = (sum.total + took.total, sum.device + took.device),
                    None => self.timings.push(*took),
                }
            }
        }
        Ok(())
    }

    /// Ends the files of the finished videos, `made` after their requests' start; `sidecar` has what theirs says, without hashes and
    /// times.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(super) fn finish(self, executor: &Executor, made: Duration, sidecar: impl Fn(&Job) -> Value) -> Vec<Outcome> {
        let Some(last) = self.last else { return Vec::new() };
        let summary = Generated { timings: self.timings, steps: self.steps, ..last };
        let (config, several) = (self.config, self.options.has_several());
        let each = self.videos.into_iter().map(|mut video| {
            let since = Instant::now();
            let mut failures = std::mem::take(&mut video.failures);
            let (job, path) = (video.job, video.path);
            let file = video.file.as_mut().expect("a chain has clips");
            if let Some(asked) = &config.output.save_audio {
                let written = file.write_wav(&place_of(asked, path, "wav", several), WavFormat::Pcm16);
                failures.add(written.map_err(PipelineError::from));
            }
            let hashes = match file.finish() {
                Ok(hashes) => hashes,
                Err(error) => {
                    failures.add(Err(video.keep(error.into())));
                    return Outcome { written: None, failed: failures.first().err() };
                }
            };
            let span = Span::until_now(SpanKind::Write, "mp4", since);
            let (table, figures) = RunReport::of(&summary, executor, made).end(span);
            let video = Finished {
                path: path.into(),
                seed: job.seed,
                prompt: job.prompt.clone(),
                frames_sha256: hashes.frames,
                samples_sha256: hashes.samples,
            };
            if config.output.sidecar {
                failures.add(write_sidecar(sidecar(job), &sidecar_path(path), &video, &figures));
            }
            Outcome { written: Some(Written { video, table, figures }), failed: failures.first().err() }
        });
        each.collect()
    }

    /// Keeps the clips so far of every video, after an error that ends them; the error then says where.
    pub(super) fn keep(self, error: PipelineError) -> PipelineError {
        self.videos.into_iter().fold(error, |error, mut video| video.keep(error))
    }
}

impl Video<'_> {
    /// Writes what is whole of the video, as `clip` has rates.
    fn write(&mut self, config: &Config, options: &GenerateOptions, piece: Piece, clip: &Generated) -> Result<()> {
        let Piece { frames, sound } = piece;
        if let Some(asked) = config.output.save_frames.as_ref().filter(|_| self.saves_frames) {
            let folder = place_of(asked, self.path, "", options.has_several());
            // Frames of an earlier video go first where the run may replace them.
            let removes = self.frames == 0 && options.replaces();
            let emptied = if removes { remove_png_frames(&folder) } else { Ok(()) };
            let written = emptied.and_then(|()| write_png_frames_from(&folder, &frames, self.frames));
            self.saves_frames = !self.failures.add(written.map(drop).map_err(PipelineError::from));
        }
        self.frames += frames.count();
        let file = match &mut self.file {
            Some(file) => file,
            None => {
                let encoder = Mp4Options { replace: self.replace, ..Mp4Options::default() };
                let rate = u32::try_from(clip.sample_rate).unwrap_or(u32::MAX);
                let started = LongMp4::start(self.path, &frames, clip.frame_rate, sound.nrows(), rate, &encoder);
                match started {
                    Ok(file) => self.file.insert(file),
                    Err(error) => {
                        let audio = Audio::new(sound, rate).ok();
                        self.latents = kept::named(&frames, audio.as_ref(), &std::mem::take(&mut self.latents));
                        return Err(error.into());
                    }
                }
            }
        };
        // The sound first: a failure of the encoder leaves it whole.
        file.push_sound(&sound)?;
        Ok(file.push(frames)?)
    }

    /// Keeps the frames so far as an MP4, or their sound where they cannot be encoded, and the latents of all clips.
    fn keep(&mut self, error: PipelineError) -> PipelineError {
        let mut error = error;
        if let Some(file) = self.file.as_mut().filter(|file| file.frames() > 0) {
            let what = format!("its first {} frames with their sound are", file.frames());
            error = match file.close() {
                Ok(()) => kept::keep(error, &what, self.path, ".mp4", |kept| Ok(file.write_to(kept, true)?)),
                Err(_) => kept::keep(error, "its sound is", self.path, ".wav", |kept| {
                    Ok(file.write_wav(kept, WavFormat::Float32)?)
                }),
            };
        }
        match self.latents.is_empty() {
            true => error,
            false => {
                let what = format!("the latents of {} clips are", self.clips);
                kept::keep_tensors(error, &what, self.path, ".clips.safetensors", &self.latents)
            }
        }
    }
}
