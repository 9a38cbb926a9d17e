//! Videos of several clips on their way to their files, which are written while the clips are made.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::chain::{Join, Piece};
use super::clock::PhaseTime;
use super::error::{PipelineError, Result};
use super::executor::Executor;
use super::model::Model;
use super::options::GenerateOptions;
use super::report::RunReport;
use super::text_to_video::Generated;
use super::writer::{Failures, Finished, Outcome, Written, place_of, write_sidecar};
use crate::config::{Config, Job, sidecar_path};
use crate::media::{Frames, LongMp4, Mp4Options, WavFormat, write_png_frames_from};
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
            failures: Failures::default(),
            saves_frames: config.output.save_frames.is_some(),
        });
        Ok(ChainWriter { config, options, videos: videos.collect(), timings: Vec::new(), steps: 0, last: None })
    }

    /// Adds a clip of each video.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(super) fn add(&mut self, clips: Vec<Generated>) -> Result<()> {
        for (video, mut clip) in self.videos.iter_mut().zip(clips) {
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
        let each = self.videos.into_iter().map(|Video { job, path, file, mut failures, .. }| {
            let since = Instant::now();
            let file = file.expect("a chain has clips");
            if let Some(asked) = &config.output.save_audio {
                let written = file.write_wav(&place_of(asked, path, "wav", several), WavFormat::Pcm16);
                failures.add(written.map_err(PipelineError::from));
            }
            let hashes = match file.finish() {
                Ok(hashes) => hashes,
                Err(error) => {
                    failures.add(Err(error.into()));
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
}

impl Video<'_> {
    /// Writes what is whole of the video, as `clip` has rates.
    fn write(&mut self, config: &Config, options: &GenerateOptions, piece: Piece, clip: &Generated) -> Result<()> {
        let Piece { frames, sound } = piece;
        if let Some(asked) = config.output.save_frames.as_ref().filter(|_| self.saves_frames) {
            let folder = place_of(asked, self.path, "", options.has_several());
            let written = write_png_frames_from(&folder, &frames, self.frames);
            self.saves_frames = !self.failures.add(written.map(drop).map_err(PipelineError::from));
        }
        self.frames += frames.count();
        let file = match &mut self.file {
            Some(file) => file,
            None => {
                let encoder = Mp4Options { replace: self.replace, ..Mp4Options::default() };
                let rate = u32::try_from(clip.sample_rate).unwrap_or(u32::MAX);
                let file = LongMp4::start(self.path, &frames, clip.frame_rate, sound.nrows(), rate, &encoder)?;
                self.file.insert(file)
            }
        };
        file.push(frames);
        Ok(file.push_sound(&sound)?)
    }
}
