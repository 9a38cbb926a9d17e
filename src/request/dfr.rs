//! The pipeline `dfr`: both passes also generate keyframes, then temporal rounds double the frame rate of the video.
//! Each round denoises tiles between keyframes. [`DfrReference`] selects the reference implementation.

use super::{Canvas, Condition, Content, KeyframeSource, Noising, Placement, Request, TemporalTile};
use crate::av::Av;
use crate::sampling::denoise::StreamRole;
use crate::sampling::{EulerAncestral, StepDraws};

/// Stochasticity (eta) of a round's sampler.
const ETA: f64 = 0.5;
/// Conditioning strength of the keyframes that a round receives from the previous round.
const ANCHOR_STRENGTH: f32 = 0.95;
/// Maximum frame rate for which positions are computed.
pub(super) const MAX_POSITION_RATE: f64 = 60.0;
/// Frame rate above which diffusers computes positions as for [`MAX_POSITION_RATE`].
const POSITION_RATE_SNAP_THRESHOLD: f64 = 30.0;
/// Difference between the step-noise seeds of consecutive rounds.
const ROUND_SEEDS: u64 = 1000;

/// Generated keyframes and temporal rounds of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct DfrPlan {
    /// Padded frames and keyframes of the video.
    pub canvas: Canvas,
    /// Whether the second pass follows the video of the first pass, for a detailing LoRA.
    pub detailing: bool,
    /// Number of rounds; each doubles the frame rate.
    pub temporal_rounds: usize,
    /// Noise levels of a round, ending with 0.
    pub sigmas: Vec<f32>,
    /// Type and generator of the noise that steps add.
    pub draws: StepDraws,
    pub reference: DfrReference,
}

/// Reference implementation whose rounds a request reproduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DfrReference {
    /// Lightricks: no audio stream; images stay at the frame indices of the request.
    Official,
    /// diffusers: attends to the audio of the first pass; image frame indices are scaled with the frame rate.
    Diffusers,
}

/// A round: its canvas and the tiles to denoise.
pub(crate) struct Round {
    /// Index of the round, from 1.
    pub(crate) number: usize,
    pub(crate) canvas: Canvas,
    pub(crate) tiles: Vec<TemporalTile>,
    /// Source of each keyframe after the round.
    pub(crate) sources: Vec<KeyframeSource>,
}

/// Returns `count` rounds that follow a pass with this canvas, in order.
pub(crate) fn rounds(canvas: &Canvas, count: usize) -> Vec<Round> {
    let mut before = canvas.clone();
    let mut next = |number: usize| {
        let canvas = before.doubled();
        let tiles = canvas.tiles(1 << number);
        let (carried, sources) = canvas.carried(&tiles);
        before = carried;
        Round { number, canvas, tiles, sources }
    };
    (1..=count).map(&mut next).collect()
}

impl DfrReference {
    /// Returns the frame rate for which the two passes compute positions.
    pub(crate) fn pass_rate(self, frame_rate: f64) -> f64 {
        match self {
            DfrReference::Diffusers if frame_rate > POSITION_RATE_SNAP_THRESHOLD => MAX_POSITION_RATE,
            DfrReference::Official | DfrReference::Diffusers => frame_rate,
        }
    }

    /// Returns the frame rate for which a round with output rate `frame_rate` computes positions.
    fn round_rate(self, frame_rate: f64) -> f64 {
        match self {
            DfrReference::Official => frame_rate.min(MAX_POSITION_RATE),
            DfrReference::Diffusers => self.pass_rate(frame_rate),
        }
    }

    /// Returns the condition for an image in a tile of a round; `None` if the image is outside the tile.
    fn image(self, image: &Condition, round: usize, tile: &TemporalTile) -> Option<Condition> {
        let appended = image.appended_at();
        let frame = appended.map_or(0, |(frame, _)| frame);
        let frame = if self == DfrReference::Diffusers { frame << round } else { frame };
        let placement = match (tile.frames.contains(&frame).then(|| tile.local(frame))?, appended) {
            (0, _) | (_, None) => Placement::First,
            (frame, Some((_, span))) => Placement::Appended { frame, span },
        };
        Some(Condition { placement, ..image.clone() })
    }
}

impl DfrPlan {
    /// Returns the conditions of the canvas's generated keyframes.
    pub(crate) fn keyframes(&self) -> impl Iterator<Item = Condition> {
        self.canvas.keyframes.iter().map(|frame| Condition::generated(*frame))
    }

    /// Returns the condition of the second pass on the video of the first pass; `None` without a detailing LoRA.
    pub(crate) fn first_pass_video(&self) -> Option<Condition> {
        self.detailing.then(|| Condition::first_pass_video(self.canvas.frames))
    }

    /// Returns the rounds in order.
    pub(crate) fn rounds(&self) -> Vec<Round> {
        rounds(&self.canvas, self.temporal_rounds)
    }

    /// Returns the request of tile `at` of a round. `second` is the request of the second pass. The conditions of the
    /// tile are the images of `second`, the keyframes of the previous round that are in the tile, and the keyframes to
    /// generate.
    pub(crate) fn tile(&self, second: &Request, round: &Round, at: usize) -> Request {
        let tile = &round.tiles[at];
        let is_image = |condition: &&Condition| matches!(condition.content, Content::Image { .. });
        let images = second.conditions.video.iter().filter(is_image);
        let images = images.filter_map(|image| self.reference.image(image, round.number, tile));
        let anchors = round.canvas.keyframes[tile.anchors.clone()].iter().enumerate();
        let anchors = anchors.map(|(at, frame)| Condition::carried(at, tile.local(*frame), ANCHOR_STRENGTH));
        let slots = tile.slots.iter().map(|frame| Condition::generated(tile.local(*frame)));
        let rate = self.reference.round_rate(second.frame_rate * (1 << round.number) as f64);
        let sampler = EulerAncestral {
            eta: ETA,
            noise_seed: None,
            seed_offset: ROUND_SEEDS * round.number as u64 + at as u64,
            draws: self.draws,
            blends_every_step: self.reference == DfrReference::Diffusers,
        };
        Request {
            num_frames: tile.num_frames(),
            frame_rate: rate,
            position_rate: None,
            sigmas: self.sigmas.clone(),
            sampler: sampler.into(),
            cache: None,
            noising: Noising::Latents,
            conditions: Av { video: images.chain(anchors).chain(slots).collect(), audio: Vec::new() },
            draws_kept: false,
            roles: Av {
                audio: match self.reference {
                    DfrReference::Official => StreamRole::Absent,
                    DfrReference::Diffusers => StreamRole::Kept,
                },
                ..second.roles
            },
            ..second.clone()
        }
    }

    /// Returns the request of the tile with the most frames in the last round; `None` without rounds.
    pub(crate) fn largest_tile(&self, second: &Request) -> Option<Request> {
        let round = self.rounds().pop()?;
        let largest = (0..round.tiles.len()).max_by_key(|at| round.tiles[*at].num_frames())?;
        Some(self.tile(second, &round, largest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::PositionSpan;

    #[test]
    fn frame_rates_of_positions_follow_the_reference() {
        let rates = |reference: DfrReference| {
            [24.0, 30.0, 48.0, 60.0, 96.0].map(|rate| (reference.pass_rate(rate), reference.round_rate(rate)))
        };
        let official = [(24.0, 24.0), (30.0, 30.0), (48.0, 48.0), (60.0, 60.0), (96.0, 60.0)];
        assert_eq!(rates(DfrReference::Official), official);
        assert_eq!(rates(DfrReference::Diffusers), [24.0, 30.0, 60.0, 60.0, 60.0].map(|rate| (rate, rate)));
    }

    /// Lightricks keeps images at the frame indices of the request, diffusers at their time in the video.
    #[test]
    fn tile_images_follow_the_reference_implementation() {
        let canvas = Canvas::from_frames(121, 8).expect("long enough").doubled();
        let tiles = canvas.tiles(2);
        let image = |frame: usize| Condition {
            placement: match frame {
                0 => Placement::First,
                frame => Placement::Appended { frame, span: PositionSpan::Frame },
            },
            ..Condition::carried(0, 0, 1.0)
        };
        let at = |reference: DfrReference, frame: usize| {
            [0, 1].map(|n| {
                reference.image(&image(frame), 1, &tiles[n]).map(|image| image.appended_at().map_or(0, |(f, _)| f))
            })
        };
        assert_eq!(
            [0, 48, 60, 120].map(|frame| at(DfrReference::Official, frame)),
            [[Some(0), None], [Some(48), None], [Some(60), None], [Some(120), Some(24)],]
        );
        assert_eq!(
            [0, 48, 60, 120].map(|frame| at(DfrReference::Diffusers, frame)),
            [[Some(0), None], [Some(96), Some(0)], [Some(120), Some(24)], [None, Some(144)],]
        );
    }
}
