//! A video of several clips: how many, what each starts from, where its frames and its sound lie in the whole. Numbers alone.

use crate::config::Config;
use crate::sampling::latents::AudioGrid;

/// Distance of the seeds of clips, as that of Lightricks' temporal rounds.
const SEEDS: u64 = 1000;

/// A video of several clips of one size, each of which begins with the end of the one before.
#[derive(Clone, Debug, PartialEq)]
pub struct Chain {
    /// Number of frames in all; what the last clip has beyond them is left out.
    pub frames: usize,
    /// Number of frames of a clip.
    pub clip: usize,
    /// Frames of a clip that the one before has too.
    pub overlap: usize,
    /// Prompts of the second clip and those behind it, of which the last holds to the end.
    pub prompts: Vec<String>,
}

impl Chain {
    /// That of a configuration for a video of so many frames; none where they are a clip.
    pub(crate) fn of(config: &Config, frames: usize) -> Option<Self> {
        let chain = config.request.chain.as_ref().filter(|chain| frames > chain.clip)?;
        Some(Chain { frames, clip: chain.clip, overlap: chain.overlap, prompts: chain.prompts.clone() })
    }

    /// Number of clips.
    pub fn clips(&self) -> usize {
        1 + (self.frames - self.clip).div_ceil(self.step())
    }

    /// Frames between the starts of two clips.
    pub fn step(&self) -> usize {
        self.clip - self.overlap
    }

    /// The seed of clip `at`, from 0, of a video of this seed.
    pub fn seed(&self, seed: u64, at: usize) -> u64 {
        seed.wrapping_add(SEEDS * at as u64)
    }

    /// The prompt of clip `at`, where it has one of its own.
    pub fn prompt(&self, at: usize) -> Option<&String> {
        self.prompts.get(at.checked_sub(1)?).or(self.prompts.last())
    }

    /// The audio latent of the whole that clip `at` starts with: the nearest one, so that all of them lie on one grid. The clip's
    /// sound is then half a latent from its frames at most.
    pub(crate) fn audio_start(&self, at: usize, grid: &AudioGrid, frame_rate: f64) -> usize {
        ((at * self.step()) as f64 / frame_rate * grid.per_second()).round_ties_even() as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::tests::config;

    fn chain(frames: usize, clip: usize, overlap: usize) -> Chain {
        Chain { frames, clip, overlap, prompts: Vec::new() }
    }

    #[test]
    fn the_last_clip_reaches_the_end_and_none_is_too_many() {
        for (frames, clip, overlap, clips) in
            [(1441, 121, 25, 15), (33, 25, 9, 2), (41, 25, 9, 2), (49, 25, 9, 3), (1441, 33, 9, 60)]
        {
            let chain = chain(frames, clip, overlap);
            assert_eq!(chain.clips(), clips, "{frames} of {clip} by {overlap}");
            let end = |clips: usize| (clips - 1) * chain.step() + clip;
            assert!(end(clips) >= frames && end(clips - 1) < frames);
        }
        let of = |set: &[&str]| Chain::of(&config(set), 121);
        assert_eq!(of(&["request.chain={}"]), None, "a clip is no chain");
        assert_eq!(of(&["request.chain={clip: 65}"]), Some(chain(121, 65, 25)));
        assert_eq!(of(&[]), None);
    }

    /// At 24 frames a second clips of 121 start at whole seconds; with 33 and 9 at 30, a third of a latent is left.
    #[test]
    fn sound_stays_on_one_grid() {
        let grid = AudioGrid {
            sampling_rate: 16000,
            hop_length: 160,
            temporal_compression: 4,
            mel_bins: 1,
            mel_compression: 1,
        };
        let starts = |chain: &Chain, rate| (0..5).map(|at| chain.audio_start(at, &grid, rate)).collect::<Vec<_>>();
        assert_eq!(starts(&chain(999, 121, 25), 24.0), [0, 100, 200, 300, 400]);
        assert_eq!(starts(&chain(999, 25, 9), 24.0), [0, 17, 33, 50, 67]);
        let (chain, rate) = (chain(9999, 121, 25), 24000.0 / 1001.0);
        let far = chain.audio_start(90, &grid, rate) as f64 / 25.0 - (90 * chain.step()) as f64 / rate;
        assert!(far.abs() <= 0.02, "no drift: {far}");
    }
}
