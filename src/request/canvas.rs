//! Canvas (padded frame range) of a video with generated keyframes (DFR), and the temporal tiles that each round
//! denoises. This module only computes frame and latent indices.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

use super::RequestError;
use crate::config::ConfigError;
use crate::config::ConfigErrorKind::OutOfRange;

/// Possible distances between keyframes, in latent frames. The distance that needs less padding is used; on a tie, the
/// larger one.
const SEGMENTS: [usize; 2] = [3, 4];

/// Frame range of a video, padded to complete segments. Each segment ends with a keyframe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Canvas {
    /// Number of frames, including padding.
    pub frames: usize,
    /// Ascending frame indices of the keyframes, from 0. The last frame is a keyframe, frame 0 is not.
    pub keyframes: Vec<usize>,
    /// Frames per latent frame.
    compression: usize,
}

/// Range of the canvas that a temporal round denoises separately.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemporalTile {
    /// Range of latent frames in the canvas.
    pub latents: Range<usize>,
    /// Number of leading latent frames to discard because the previous tile also contains them.
    pub dropped: usize,
    /// Range of frames in the canvas.
    pub frames: RangeInclusive<usize>,
    /// Keyframes of the previous round in this tile, as indices into [`Canvas::keyframes`].
    pub anchors: Range<usize>,
    /// Frames for which the tile generates keyframes: the middle of each segment.
    pub slots: Vec<usize>,
    /// Frames per latent frame.
    compression: usize,
}

impl Canvas {
    /// Returns the canvas of a video with `frames` frames; `compression` is the number of frames per latent frame.
    ///
    /// # Errors
    /// Returns an error if the video is shorter than two latent frames.
    pub fn from_frames(frames: usize, compression: usize) -> Result<Self, RequestError> {
        let content = frames.saturating_sub(1);
        if content < compression {
            let least = compression + 1;
            let why = format!(
                "the pipeline dfr needs at least {least} frames; videos of {least} to {} frames are padded",
                SEGMENTS[0] * compression
            );
            return Err(ConfigError::value(OutOfRange, "request.num_frames", frames, why).into());
        }
        let padding = |segment: usize| content.next_multiple_of(segment) - content;
        let [short, long] = SEGMENTS.map(|latents| latents * compression);
        let segment = if padding(short) < padding(long) { short } else { long };
        let count = content.div_ceil(segment);
        let keyframes = (1..=count).map(|n| n * segment).collect();
        Ok(Canvas { frames: count * segment + 1, keyframes, compression })
    }

    /// Returns the canvas at twice the frame rate.
    #[must_use]
    pub fn doubled(&self) -> Self {
        let keyframes = self.keyframes.iter().map(|frame| 2 * frame).collect();
        Canvas { frames: 2 * (self.frames - 1) + 1, keyframes, compression: self.compression }
    }

    /// Returns the number of latent frames.
    pub fn latents(&self) -> usize {
        (self.frames - 1) / self.compression + 1
    }

    /// Divides the segments among `count` tiles, or among one tile per segment if there are fewer segments. If the
    /// segments cannot be divided evenly, the first tiles get one more. Each tile except the first also contains the
    /// segment before its own, and discards the latent frames that it shares with the previous tile. These include the
    /// tile's first latent frame, which represents a single video frame.
    pub fn tiles(&self, count: usize) -> Vec<TemporalTile> {
        let border = |at: usize| if at == 0 { 0 } else { self.keyframes[at - 1] };
        let segments = self.keyframes.len();
        let count = count.clamp(1, segments.max(1));
        let own = |n: usize| segments / count + usize::from(n < segments % count);
        let mut behind = 0;
        let tile = |n: usize| {
            let (first, end) = (behind, behind + own(n));
            behind = end;
            let start = first.saturating_sub(1);
            let latents = border(start) / self.compression..border(end) / self.compression + 1;
            let lead = border(first) / self.compression - latents.start;
            TemporalTile {
                dropped: if n == 0 { 0 } else { lead + 1 },
                frames: border(start)..=border(end),
                // Frame 0 of the video has no keyframe.
                anchors: start.saturating_sub(1)..end,
                slots: (start..end).map(|at| (border(at) + border(at + 1)) / 2).collect(),
                latents,
                compression: self.compression,
            }
        };
        (0..count).map(tile).collect()
    }

    /// Returns the canvas after a round with these tiles, and the source of each of its keyframes. The round adds a
    /// keyframe in the middle of each segment. If a frame has several keyframes, a generated one takes precedence over
    /// one of the previous round, and one of an earlier tile over one of a later tile.
    pub fn carried(&self, tiles: &[TemporalTile]) -> (Self, Vec<KeyframeSource>) {
        let before = self.keyframes.iter().enumerate().map(|(at, frame)| (*frame, KeyframeSource::Before(at)));
        let slots: Vec<usize> = tiles.iter().flat_map(|tile| tile.slots.iter().copied()).collect();
        let made = slots.iter().enumerate().rev().map(|(at, frame)| (*frame, KeyframeSource::Slot(at)));
        let all: BTreeMap<usize, KeyframeSource> = before.chain(made).collect();
        let (keyframes, sources) = all.into_iter().unzip();
        (Canvas { keyframes, ..*self }, sources)
    }
}

/// Source of a keyframe of the next round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyframeSource {
    /// Keyframe of the previous round, by index.
    Before(usize),
    /// Generated keyframe, by its index among the generated keyframes of all tiles.
    Slot(usize),
}

impl TemporalTile {
    /// Returns the number of frames.
    pub fn num_frames(&self) -> usize {
        self.frames.end() - self.frames.start() + 1
    }

    /// Returns, for each generated keyframe, the index of the nearest latent frame of the tile. The keyframe is
    /// initialized with the latents of this frame.
    pub fn seeds(&self) -> Vec<usize> {
        let last = self.latents.len() - 1;
        let nearest = |frame: &usize| self.local(*frame) as f64 / self.compression as f64;
        self.slots.iter().map(|frame| (nearest(frame).round_ties_even() as usize).min(last)).collect()
    }

    /// Converts a frame of the canvas to a frame of the tile.
    ///
    /// # Panics
    /// Panics if the frame is before the tile.
    pub fn local(&self, frame: usize) -> usize {
        frame.checked_sub(*self.frames.start()).expect("a frame of the tile")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canvas(frames: usize) -> Canvas {
        Canvas::from_frames(frames, 8).expect("long enough")
    }

    #[test]
    fn segment_length_minimizes_padding() {
        let cases = [
            (121, 121, 24),
            (97, 97, 32),
            (65, 65, 32),
            (25, 25, 24),
            (17, 25, 24),
            (129, 129, 32),
            (241, 241, 24),
            (257, 257, 32),
        ];
        for (frames, padded, segment) in cases {
            let canvas = canvas(frames);
            assert_eq!((canvas.frames, canvas.keyframes[0]), (padded, segment), "{frames}");
            assert!(canvas.keyframes.iter().enumerate().all(|(n, frame)| *frame == (n + 1) * segment));
            assert_eq!(canvas.keyframes.last(), Some(&(padded - 1)));
        }
        let short = Canvas::from_frames(1, 8).expect_err("no segment").to_string();
        assert_eq!(
            short,
            "request.num_frames = 1: the pipeline dfr needs at least 9 frames; videos of 9 to 24 frames are padded"
        );
    }

    /// Expected values for two rounds of 121 frames: latent frames, discarded frames, frames and generated keyframes of
    /// each tile.
    #[test]
    fn tiles_of_121_frames_have_expected_ranges() {
        let first = canvas(121).doubled();
        let tiles = first.tiles(2);
        let short = |t: &TemporalTile| (t.latents.clone(), t.dropped, t.frames.clone(), t.slots.clone());
        let want = [(0..19, 0, 0..=144, vec![24, 72, 120]), (12..31, 7, 96..=240, vec![120, 168, 216])];
        assert_eq!(tiles.iter().map(short).collect::<Vec<_>>(), want);
        assert_eq!((tiles[1].num_frames(), tiles[1].local(120), tiles[1].seeds()), (145, 24, vec![3, 9, 15]));

        let (carry, sources) = first.carried(&tiles);
        assert_eq!(carry.keyframes, [24, 48, 72, 96, 120, 144, 168, 192, 216, 240]);
        use KeyframeSource::{Before, Slot};
        // Both tiles generate frame 120; the keyframe of the first tile is used.
        let want = [Slot(0), Before(0), Slot(1), Before(1), Slot(2), Before(2), Slot(4), Before(3), Slot(5), Before(4)];
        assert_eq!(sources, want);

        let second = carry.doubled();
        assert_eq!((second.frames, second.latents()), (481, 61));
        let short = |t: &TemporalTile| (t.latents.clone(), t.dropped, t.frames.clone());
        let tiles: Vec<_> = second.tiles(4).iter().map(short).collect();
        assert_eq!(tiles, [(0..19, 0, 0..=144), (12..37, 7, 96..=288), (30..49, 7, 240..=384), (42..61, 7, 336..=480)]);
    }

    #[test]
    fn generated_keyframe_replaces_existing_keyframe() {
        let canvas = canvas(25).doubled();
        let mut tiles = canvas.tiles(1);
        tiles[0].slots.push(48);
        assert_eq!(canvas.carried(&tiles).1, [KeyframeSource::Slot(0), KeyframeSource::Slot(1)]);
    }

    /// `tests/fixtures/dfr/layout.json` contains the canvases and tiles that diffusers computes for many numbers of
    /// frames. The latent frames that the tiles keep cover the canvas exactly once.
    #[test]
    fn canvases_and_tiles_match_the_reference() {
        type Tile = (usize, usize, usize, usize, usize, Vec<usize>, Vec<usize>);
        type Case = (usize, usize, Vec<usize>, [Vec<Tile>; 2]);
        let cases: Vec<Case> =
            serde_json::from_str(include_str!("../../tests/fixtures/dfr/layout.json")).expect("the fixture parses");
        assert_eq!(cases.len(), 28);
        for (frames, padded, keyframes, rounds) in cases {
            let mut canvas = canvas(frames);
            assert_eq!((canvas.frames, &canvas.keyframes), (padded, &keyframes), "{frames}");
            for (round, want) in rounds.into_iter().enumerate() {
                canvas = canvas.doubled();
                let tiles = canvas.tiles(2 << round);
                let as_written = |t: &TemporalTile| -> Tile {
                    let (start, end) = t.frames.clone().into_inner();
                    let anchors = canvas.keyframes[t.anchors.clone()].to_vec();
                    (t.latents.start, t.latents.end, t.dropped, start, end, anchors, t.slots.clone())
                };
                assert_eq!(tiles.iter().map(as_written).collect::<Vec<_>>(), want, "{frames}, round {}", round + 1);
                let kept = tiles.iter().flat_map(|t| t.latents.start + t.dropped..t.latents.end);
                assert!(kept.eq(0..canvas.latents()), "{frames}");
                canvas = canvas.carried(&tiles).0;
            }
        }
    }
}
