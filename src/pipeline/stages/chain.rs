//! Long videos generated as several clips: each clip starts from the final latents of the previous clip, and
//! overlapping frames and audio are blended.

use ndarray::{Array2, Array4, Axis as Dim, Slice, s};

use super::clip_ends::ClipEnds;
use super::text_to_video::Generated;
use crate::failpoint;
use crate::media::Frames;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::model::OpenModel;
use crate::pipeline::output::denoise_checkpoint::{CheckpointSettings, SavedClip};
use crate::pipeline::phase::{Phase, Watch};
use crate::pipeline::plan::options::RunOptions;
use crate::pipeline::runner::Runner;
use crate::request::{ClipChain, Request};

/// Duration of the crossfade between the audio of two clips, in seconds.
const FADE: f64 = 0.02;

impl Runner {
    /// Generates the clips of chained videos, one clip after the other, for requests that differ only in prompt and
    /// seed. Reads the clips that an interrupted run has saved instead of generating them again. Calls `each` for every
    /// clip, with one [`Generated`] per video; [`ClipJoiner`] combines the clips of a video.
    ///
    /// # Errors
    /// Returns the errors of [`Runner::generate`] and of `each`, or an error if a request has no [`Request::chain`].
    pub fn generate_chain(
        &mut self,
        requests: &[Request],
        options: &RunOptions,
        watch: Watch,
        each: &mut dyn FnMut(Vec<Generated>) -> Result<()>,
    ) -> Result<()> {
        let one =
            || PipelineError::Input("a chained video needs request.chain, and more frames than fit in one clip".into());
        let first = requests.first().ok_or_else(one)?;
        let chain = first.chain.clone().ok_or_else(one)?;
        let mut ends = ClipEnds::default();
        let clips = chain.clips();
        // Keep the preview threads, so that no clip waits for that of the clip before.
        let mut threads = Vec::new();
        for at in 0..clips {
            let own: Vec<Request> = requests.iter().map(|request| request.of_clip(at)).collect();
            let checkpoint = options.checkpoint.as_ref().map(|checkpoint| checkpoint.of_clip(at));
            ends.enter(&chain, at, &self.model.sizes, first.frame_rate);
            if let Some(kept) = checkpoint.as_ref().and_then(CheckpointSettings::saved_ends) {
                ends.restore(kept.clone());
            }
            if let Some(kept) = checkpoint.as_ref().map(CheckpointSettings::saved_clip).transpose()?.flatten() {
                ends.restore(kept.ends.clone());
                each(self.restored_clips(kept, &own[0]))?;
                continue;
            }
            failpoint::reach("clip", at + 1);
            failpoint::fail("clip", at + 1).map_err(|e| PipelineError::Input(e.to_string()))?;
            // The frames can only be encoded after they are blended with those of the adjacent clips.
            let mut options = RunOptions { encode: None, checkpoint, ..options.clone() };
            options.previews.iter_mut().for_each(|previews| previews.clip = Some(at));
            let mut of_all = |phase: Phase, done, total| watch(phase, at * total + done, clips * total);
            let made = self.generate_clips(&own, Some(&mut ends), &options, &mut of_all)?;
            if let Some(checkpoint) = &options.checkpoint {
                let videos: Vec<_> = made.iter().map(|clip| (&clip.frames, &clip.audio)).collect();
                let cut_tokens: Vec<_> = made.iter().map(|clip| clip.cut_tokens).collect();
                let skipped = made.first().map(|clip| clip.skipped.clone()).unwrap_or_default();
                // A run that otherwise succeeds must not fail because the disk is full.
                let written = checkpoint.write_clip(&videos, &cut_tokens, &ends, &skipped);
                written.unwrap_or_else(|error| tracing::warn!("cannot save the clip: {error}"));
            }
            threads.extend(made.first().and_then(|clip| clip.previews.clone()));
            each(made)?;
        }
        Ok(())
    }

    /// Converts a saved clip to results without timings.
    fn restored_clips(&self, clip: SavedClip, request: &Request) -> Vec<Generated> {
        let SavedClip { frames, sounds, cut_tokens, skipped, .. } = clip;
        let batch = frames.len();
        let each = frames.into_iter().zip(sounds).zip(cut_tokens).map(|((frames, audio), cut_tokens)| Generated {
            hdr: None,
            frames,
            are_given: false,
            stream: None,
            audio,
            sample_rate: self.model.sample_rate,
            frame_rate: request.output_rate(),
            num_frames: request.num_frames,
            timings: Vec::new(),
            steps: request.passes().0.sigmas.len() - 1,
            computed_steps: 0,
            skipped: skipped.clone(),
            batch,
            cut_tokens,
            dump: Vec::new(),
            latents: Vec::new(),
            guard: None,
            previews: None,
        });
        each.collect()
    }
}

/// Frames and samples of a video that later clips do not change.
pub struct ChainPiece {
    pub frames: Frames,
    /// Audio samples `[channels, n]`.
    pub sound: Array2<f32>,
}

/// Joins the clips of a video as they are generated. Holds back the frames and samples that the next clip may change:
/// the frames that overlap it, and the remaining audio of the clip added last.
pub struct ClipJoiner {
    chain: ClipChain,
    /// Index of each clip's first sample in the complete video.
    starts: Vec<usize>,
    /// Number of samples of the complete video.
    samples: usize,
    fade: usize,
    /// Number of clips added so far.
    clips: usize,
    /// Number of frames that [`ClipJoiner::add`] has returned so far.
    shown: usize,
    /// Frames of the clip added last that have not been returned yet.
    frames: Option<Frames>,
    /// Number of samples that [`ClipJoiner::add`] has returned so far.
    heard: usize,
    /// Samples of the clip added last that have not been returned yet.
    sound: Array2<f32>,
}

impl ClipJoiner {
    /// Creates a joiner for the clips of `chain`, without clips.
    pub fn new(chain: &ClipChain, model: &OpenModel, frame_rate: f64) -> Self {
        let (grid, rate) = (&model.sizes.audio_grid, model.sample_rate as f64);
        let sample = |latent: usize| (latent as f64 / grid.per_second() * rate).round() as usize;
        ClipJoiner {
            starts: (0..chain.clips()).map(|at| sample(chain.audio_start(at, grid, frame_rate))).collect(),
            samples: (chain.frames as f64 / frame_rate * rate).round_ties_even() as usize,
            fade: (FADE * rate) as usize,
            chain: chain.clone(),
            clips: 0,
            shown: 0,
            frames: None,
            heard: 0,
            sound: Array2::zeros((0, 0)),
        }
    }

    /// Adds the next clip. Returns the frames and samples that later clips do not change; after the last clip, all that
    /// remain.
    pub fn add(&mut self, frames: Frames, sound: Array2<f32>) -> ChainPiece {
        let at = self.clips;
        self.clips += 1;
        let is_last = self.clips == self.chain.clips();
        let frames = match self.frames.take() {
            None => frames,
            Some(before) => blended(&before, &frames),
        };
        let whole = if is_last { self.chain.frames - self.shown } else { self.chain.step() };
        self.shown += whole;
        if !is_last {
            self.frames = Some(frames.part(whole..frames.count()));
        }
        ChainPiece { frames: frames.part(0..whole), sound: self.add_sound(at, sound, is_last) }
    }

    fn add_sound(&mut self, at: usize, sound: Array2<f32>, is_last: bool) -> Array2<f32> {
        let left = self.samples.saturating_sub(self.heard);
        let channels = sound.nrows();
        let mut whole = vec![Array2::zeros((channels, 0))];
        if at > 0 {
            // The crossfade is in the middle of the overlap, where both clips have context before and after it.
            let (start, end) = (self.starts[at], self.heard + self.sound.ncols());
            let fade = self.fade.min(end.saturating_sub(start));
            let middle = (start + end.saturating_sub(fade)) / 2;
            let before = self.sound.slice(s![.., ..middle - self.heard]);
            let both = self.sound.slice(s![.., middle - self.heard..middle - self.heard + fade]);
            let own = sound.slice(s![.., middle - start..middle - start + fade]);
            let crossed = Array2::from_shape_fn(own.dim(), |(channel, n)| {
                let part = (n as f32 + 0.5) / fade as f32;
                both[[channel, n]] * (1.0 - part) + own[[channel, n]] * part
            });
            whole.extend([before.to_owned(), crossed]);
            self.sound = sound.slice(s![.., middle - start + fade..]).to_owned();
            self.heard = middle + fade;
        } else {
            self.sound = sound;
        }
        if is_last {
            whole.extend([std::mem::take(&mut self.sound), Array2::zeros((channels, left))]);
        }
        let views: Vec<_> = whole.iter().map(|part| part.view()).collect();
        let mut whole = ndarray::concatenate(Dim(1), &views).expect("clips have the same channels");
        if is_last {
            whole.slice_axis_inplace(Dim(1), Slice::from(..left));
        }
        whole
    }
}

/// Blends the first frames of a clip (`own`) linearly with the overlapping frames of the previous clip (`before`). Both
/// are decoded from the same latents, except for the first frame.
fn blended(before: &Frames, own: &Frames) -> Frames {
    let n = before.count();
    let mut all: Array4<u8> = own.data().clone();
    let both = all.slice_mut(s![..n, .., .., ..]);
    ndarray::Zip::indexed(both).and(before.data()).for_each(|(frame, ..), own, before| {
        let sum = usize::from(*before) * (n - frame) + usize::from(*own) * frame;
        *own = ((sum + n / 2) / n) as u8;
    });
    Frames::new(all).expect("a clip has frames")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join(chain: ClipChain, starts: &[usize], samples: usize, fade: usize) -> ClipJoiner {
        let (frames, sound) = (None, Array2::zeros((0, 0)));
        ClipJoiner { chain, starts: starts.into(), samples, fade, clips: 0, shown: 0, frames, heard: 0, sound }
    }

    fn frames(range: std::ops::Range<usize>) -> Frames {
        Frames::new(Array4::from_shape_fn((range.len(), 1, 2, 3), |(f, ..)| (range.start + f) as u8)).expect("frames")
    }

    /// Joining overlapping clips cut from one video reproduces that video. Each `add` returns its piece without waiting
    /// for the next clip.
    #[test]
    fn joined_clips_equal_original_video() {
        let chain = ClipChain { frames: 41, clip: 17, overlap: 9, prompts: Vec::new() };
        assert_eq!((chain.clips(), chain.step()), (4, 8));
        // A clip has 400 samples, and its audio does not start exactly with its first frame.
        let whole = Array2::from_shape_fn((2, 1200), |(c, n)| ((n * 7 + c) as f32 * 0.1).sin());
        let starts = [0, 190, 400, 600];
        let mut join = join(chain, &starts, 1010, 20);
        let (mut count, mut sound) = (Vec::new(), Vec::new());
        for (at, start) in starts.into_iter().enumerate() {
            let piece = join.add(frames(8 * at..8 * at + 17), whole.slice(s![.., start..start + 400]).to_owned());
            let first: usize = count.iter().sum();
            assert_eq!(piece.frames, frames(first..first + piece.frames.count()));
            count.push(piece.frames.count());
            sound.push(piece.sound);
        }
        assert_eq!(count, [8, 8, 8, 17]);
        let views: Vec<_> = sound.iter().map(|s| s.view()).collect();
        let made = ndarray::concatenate(Dim(1), &views).expect("two channels");
        // The last clip ends at sample 1000; the remaining samples are silent.
        assert_eq!(made.dim(), (2, 1010));
        let off = |from: usize, to: usize| {
            let pair = &made.slice(s![.., from..to]) - &whole.slice(s![.., from..to]);
            pair.iter().fold(0.0f32, |most, x| most.max(x.abs()))
        };
        assert!(off(0, 1000) < 1e-6, "{}", off(0, 1000));
        assert!(made.slice(s![.., 1000..]).iter().all(|sample| *sample == 0.0));
    }

    /// Different clips are crossfaded linearly: frames over the complete overlap, audio over the duration `FADE`.
    #[test]
    fn different_clips_are_crossfaded() {
        let chain = ClipChain { frames: 25, clip: 17, overlap: 9, prompts: Vec::new() };
        let mut join = join(chain, &[0, 200], 600, 20);
        let flat = |value: u8| Frames::new(Array4::from_elem((17, 1, 1, 3), value)).expect("frames");
        let first = join.add(flat(0), Array2::from_elem((1, 400), -1.0));
        let second = join.add(flat(90), Array2::from_elem((1, 400), 1.0));
        assert_eq!((first.frames.count(), first.sound.ncols()), (8, 0));
        let shown: Vec<u8> = second.frames.data().slice(s![.., 0, 0, 0]).to_vec();
        assert_eq!(shown[..10], [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]);
        let heard = second.sound.row(0).to_vec();
        assert_eq!((heard.len(), heard[289], heard[310]), (600, -1.0, 1.0));
        assert!(heard.windows(2).all(|pair| (pair[1] - pair[0]).abs() <= 0.1 + 1e-6), "no click");
    }
}
