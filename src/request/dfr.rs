//! DFR: both passes generate keyframes beside the video, then rounds double its frame rate, tile by tile between those
//! keyframes. What the two references do differently is [`DfrForm`]'s.

use super::{Canvas, Condition, Content, KeyframeSource, Noising, Placement, Request, TemporalTile};
use crate::av::Av;
use crate::sampling::denoise::StreamRole;
use crate::sampling::{EulerAncestral, StepDraws};

/// Part of a round's steps that is drawn anew.
const ETA: f64 = 0.5;
/// How closely a round keeps the keyframes of the round before.
const ANCHOR_STRENGTH: f32 = 0.95;
/// Most frames a second that positions are computed for.
pub(super) const MOST_FRAMES: f64 = 60.0;
/// Frames a second above which diffusers computes them for the most.
const SNAPS_ABOVE: f64 = 30.0;
/// Distance of the seeds of two rounds' step noise.
const ROUND_SEEDS: u64 = 1000;

/// Generated keyframes and temporal rounds of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Dfr {
    /// The video's frames, padded, and its keyframes.
    pub canvas: Canvas,
    /// Number of rounds that double the frame rate.
    pub temporal_rounds: usize,
    /// Noise levels of a round, to the final 0.
    pub sigmas: Vec<f32>,
    /// Type of the noise that its steps draw.
    pub draws: StepDraws,
    pub form: DfrForm,
}

/// Whose rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DfrForm {
    /// Lightricks': without sound, images at the frames of the request.
    Official,
    /// diffusers': beside the first pass' sound, images at the frames of the round.
    Diffusers,
}

/// A round: its canvas, and the tiles it is denoised in.
pub(crate) struct Round {
    /// From 1.
    pub(crate) number: usize,
    pub(crate) canvas: Canvas,
    pub(crate) tiles: Vec<TemporalTile>,
    /// Origins of the keyframes behind it.
    pub(crate) sources: Vec<KeyframeSource>,
}

impl DfrForm {
    /// Frames a second that the two passes' positions are computed for.
    pub(crate) fn pass_rate(self, frame_rate: f64) -> f64 {
        match self {
            DfrForm::Diffusers if frame_rate > SNAPS_ABOVE => MOST_FRAMES,
            DfrForm::Official | DfrForm::Diffusers => frame_rate,
        }
    }

    /// The same of a round that makes `frame_rate`.
    fn round_rate(self, frame_rate: f64) -> f64 {
        match self {
            DfrForm::Official => frame_rate.min(MOST_FRAMES),
            DfrForm::Diffusers => self.pass_rate(frame_rate),
        }
    }

    /// An image of the request as a tile of a round has it, where it lies within.
    fn image(self, image: &Condition, round: usize, tile: &TemporalTile) -> Option<Condition> {
        let appended = image.appended_at();
        let frame = appended.map_or(0, |(frame, _)| frame);
        let frame = if self == DfrForm::Diffusers { frame << round } else { frame };
        let placement = match (tile.frames.contains(&frame).then(|| tile.local(frame))?, appended) {
            (0, _) | (_, None) => Placement::First,
            (frame, Some((_, span))) => Placement::Appended { frame, span },
        };
        Some(Condition { placement, ..image.clone() })
    }
}

impl Dfr {
    /// The canvas' keyframes, generated from noise or from what is given with a pass.
    pub(crate) fn keyframes(&self) -> impl Iterator<Item = Condition> {
        self.canvas.keyframes.iter().map(|frame| Condition::generated(*frame))
    }

    /// The rounds in turn.
    pub(crate) fn rounds(&self) -> Vec<Round> {
        let mut before = self.canvas.clone();
        let mut next = |number: usize| {
            let canvas = before.doubled();
            let tiles = canvas.tiles(1 << number);
            let (carried, sources) = canvas.carried(&tiles);
            before = carried;
            Round { number, canvas, tiles, sources }
        };
        (1..=self.temporal_rounds).map(&mut next).collect()
    }

    /// The request of a round's tile, behind the second pass: its images, the keyframes of the round before, by their
    /// place among the tile's own, and those it generates.
    pub(crate) fn tile(&self, second: &Request, round: &Round, at: usize) -> Request {
        let tile = &round.tiles[at];
        let is_image = |condition: &&Condition| matches!(condition.content, Content::Image { .. });
        let images = second.conditions.video.iter().filter(is_image);
        let images = images.filter_map(|image| self.form.image(image, round.number, tile));
        let anchors = round.canvas.keyframes[tile.anchors.clone()].iter().enumerate();
        let anchors = anchors.map(|(at, frame)| Condition::carried(at, tile.local(*frame), ANCHOR_STRENGTH));
        let slots = tile.slots.iter().map(|frame| Condition::generated(tile.local(*frame)));
        let rate = self.form.round_rate(second.frame_rate * (1 << round.number) as f64);
        let sampler = EulerAncestral {
            eta: ETA,
            noise_seed: None,
            seed_offset: ROUND_SEEDS * round.number as u64 + at as u64,
            draws: self.draws,
            blends_every_step: self.form == DfrForm::Diffusers,
        };
        Request {
            num_frames: tile.num_frames(),
            frame_rate: rate,
            position_rate: None,
            sigmas: self.sigmas.clone(),
            sampler: sampler.into(),
            noising: Noising::Latents,
            conditions: Av { video: images.chain(anchors).chain(slots).collect(), audio: Vec::new() },
            draws_kept: false,
            roles: Av {
                audio: match self.form {
                    DfrForm::Official => StreamRole::Absent,
                    DfrForm::Diffusers => StreamRole::Kept,
                },
                ..second.roles
            },
            ..second.clone()
        }
    }

    /// The tile of most frames in the last round.
    pub(crate) fn largest_tile(&self, second: &Request) -> Option<Request> {
        let round = self.rounds().pop()?;
        let largest = (0..round.tiles.len()).max_by_key(|at| round.tiles[*at].num_frames())?;
        Some(self.tile(second, &round, largest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Span;

    #[test]
    fn positions_are_computed_for_frame_rates_that_models_know() {
        let rates =
            |form: DfrForm| [24.0, 30.0, 48.0, 60.0, 96.0].map(|rate| (form.pass_rate(rate), form.round_rate(rate)));
        let official = [(24.0, 24.0), (30.0, 30.0), (48.0, 48.0), (60.0, 60.0), (96.0, 60.0)];
        assert_eq!(rates(DfrForm::Official), official);
        assert_eq!(rates(DfrForm::Diffusers), [24.0, 30.0, 60.0, 60.0, 60.0].map(|rate| (rate, rate)));
    }

    /// Lightricks' rounds leave images at the frames that the request says, diffusers' move them to the same time.
    #[test]
    fn images_of_a_tile() {
        let canvas = Canvas::of(121, 8).expect("long enough").doubled();
        let tiles = canvas.tiles(2);
        let image = |frame: usize| Condition {
            placement: match frame {
                0 => Placement::First,
                frame => Placement::Appended { frame, span: Span::Frame },
            },
            ..Condition::carried(0, 0, 1.0)
        };
        let at = |form: DfrForm, frame: usize| {
            [0, 1]
                .map(|n| form.image(&image(frame), 1, &tiles[n]).map(|image| image.appended_at().map_or(0, |(f, _)| f)))
        };
        assert_eq!(
            [0, 48, 60, 120].map(|frame| at(DfrForm::Official, frame)),
            [[Some(0), None], [Some(48), None], [Some(60), None], [Some(120), Some(24)],]
        );
        assert_eq!(
            [0, 48, 60, 120].map(|frame| at(DfrForm::Diffusers, frame)),
            [[Some(0), None], [Some(96), Some(0)], [Some(120), Some(24)], [None, Some(144)],]
        );
    }
}
