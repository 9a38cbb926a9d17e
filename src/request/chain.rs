//! Chained clips: number, seeds and prompts of the clips, and their positions in the complete video.

use crate::config::Config;
use crate::sampling::latents::AudioGrid;

/// Difference between the seeds of consecutive clips, as in Lightricks' temporal rounds.
const SEEDS: u64 = 1000;

/// Video that is generated as several clips of equal length, each of which starts with the last frames of the previous
/// clip.
#[derive(Clone, Debug, PartialEq)]
pub struct ClipChain {
    /// Total number of frames; any further frames of the last clip are dropped.
    pub frames: usize,
    /// Frames per clip.
    pub clip: usize,
    /// Frames that a clip shares with the previous clip.
    pub overlap: usize,
    /// Prompts of the second and later clips; the last one also applies to all remaining clips.
    pub prompts: Vec<String>,
}

impl ClipChain {
    /// Returns the chain for a video of `frames` frames; `None` if the video fits in one clip.
    pub(crate) fn from_config(config: &Config, frames: usize) -> Option<Self> {
        let chain = config.request.chain.as_ref().filter(|chain| frames > chain.clip)?;
        Some(ClipChain { frames, clip: chain.clip, overlap: chain.overlap, prompts: chain.prompts.clone() })
    }

    /// Returns the number of clips.
    pub fn clips(&self) -> usize {
        1 + (self.frames - self.clip).div_ceil(self.step())
    }

    /// Returns the number of frames between the starts of consecutive clips.
    pub fn step(&self) -> usize {
        self.clip - self.overlap
    }

    /// Returns the seed of clip `at` (from 0), given the seed of the video.
    pub fn seed(&self, seed: u64, at: usize) -> u64 {
        seed.wrapping_add(SEEDS * at as u64)
    }

    /// Returns the prompt of clip `at`; `None` if the prompt of the request applies.
    pub fn prompt(&self, at: usize) -> Option<&String> {
        self.prompts.get(at.checked_sub(1)?).or(self.prompts.last())
    }

    /// Returns the index of the first audio latent of clip `at` in the complete video. The index is rounded to a whole
    /// latent, so the audio is offset from the frames by at most half a latent.
    pub(crate) fn audio_start(&self, at: usize, grid: &AudioGrid, frame_rate: f64) -> usize {
        ((at * self.step()) as f64 / frame_rate * grid.per_second()).round_ties_even() as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::tests::config;

    fn chain(frames: usize, clip: usize, overlap: usize) -> ClipChain {
        ClipChain { frames, clip, overlap, prompts: Vec::new() }
    }

    #[test]
    fn clip_count_is_minimal_and_covers_all_frames() {
        for (frames, clip, overlap, clips) in
            [(1441, 121, 25, 15), (33, 25, 9, 2), (41, 25, 9, 2), (49, 25, 9, 3), (1441, 33, 9, 60)]
        {
            let chain = chain(frames, clip, overlap);
            assert_eq!(chain.clips(), clips, "{frames} of {clip} by {overlap}");
            let end = |clips: usize| (clips - 1) * chain.step() + clip;
            assert!(end(clips) >= frames && end(clips - 1) < frames);
        }
        let of = |set: &[&str]| ClipChain::from_config(&config(set), 121);
        assert_eq!(of(&["request.chain={}"]), None, "a clip is no chain");
        assert_eq!(of(&["request.chain={clip: 65}"]), Some(chain(121, 65, 25)));
        assert_eq!(of(&[]), None);
    }

    /// At 24 frames per second, clips of 121 frames start at whole seconds. The starts of other clips fall between
    /// audio latents and are rounded.
    #[test]
    fn clip_audio_starts_at_whole_audio_latents() {
        let grid = AudioGrid {
            sampling_rate: 16000,
            hop_length: 160,
            temporal_compression: 4,
            mel_bins: 1,
            mel_compression: 1,
        };
        let starts = |chain: &ClipChain, rate| (0..5).map(|at| chain.audio_start(at, &grid, rate)).collect::<Vec<_>>();
        assert_eq!(starts(&chain(999, 121, 25), 24.0), [0, 100, 200, 300, 400]);
        assert_eq!(starts(&chain(999, 25, 9), 24.0), [0, 17, 33, 50, 67]);
        let (chain, rate) = (chain(9999, 121, 25), 24000.0 / 1001.0);
        let far = chain.audio_start(90, &grid, rate) as f64 / 25.0 - (90 * chain.step()) as f64 / rate;
        assert!(far.abs() <= 0.02, "no drift: {far}");
    }
}
