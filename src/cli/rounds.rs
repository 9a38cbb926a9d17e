//! Passes of the pipeline `dfr` after the first, as `--dry-run` and `check` show them.

use serde::Serialize;

use crate::config::Config;
use crate::request::{self, Canvas};
use crate::sampling::latents::VideoGrid;
use crate::sampling::sigmas;

/// Keyframes, detailing and temporal rounds of a request.
#[derive(Debug, Serialize)]
pub(super) struct DfrSummary {
    /// Frames of the padded video that the two stages generate.
    canvas_frames: usize,
    /// Keyframes that each stage also generates.
    keyframes: usize,
    /// Tokens of the first stage's video that the second stage follows; 0 without a detailing LoRA.
    detailing_tokens: usize,
    rounds: Vec<RoundSummary>,
    /// Frames and frame rate of the output video.
    output_frames: usize,
    output_rate: f64,
}

/// A temporal round.
#[derive(Debug, Serialize)]
struct RoundSummary {
    frames: usize,
    frame_rate: f64,
    /// Frames of each tile.
    tiles: Vec<usize>,
    /// Denoising steps of each tile.
    steps: usize,
}

impl DfrSummary {
    /// Returns the passes of a configuration; `None` if its pipeline has no rounds, or if the number of frames is not
    /// known or not valid.
    pub(super) fn new(config: &Config, grid: &VideoGrid) -> Option<Self> {
        let r = &config.request;
        let frames = r.num_frames.count().filter(|_| config.pipeline.spec().has_rounds())?;
        let canvas = Canvas::from_frames(frames, grid.temporal_compression).ok()?;
        let count = config.dfr.temporal_rounds;
        let steps = sigmas::verbatim(&config.dfr.sigmas).map_or(0, |levels| levels.len() - 1);
        let rate = |round: usize| r.frame_rate * (1 << round) as f64;
        let round = |round: request::Round| RoundSummary {
            frames: round.canvas.frames,
            frame_rate: rate(round.number),
            tiles: round.tiles.iter().map(request::TemporalTile::num_frames).collect(),
            steps,
        };
        let half = grid.latents(1, 1, r.width / 2, r.height / 2, canvas.frames).ok();
        Some(DfrSummary {
            canvas_frames: canvas.frames,
            keyframes: canvas.keyframes.len(),
            detailing_tokens: half.filter(|_| config.follows_first_stage()).map_or(0, |half| grid.tokens(&half)),
            rounds: request::rounds(&canvas, count).into_iter().map(round).collect(),
            output_frames: ((frames - 1) << count) + 1,
            output_rate: rate(count),
        })
    }

    /// Returns one line for the keyframes, the detailing and each round.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines =
            vec![format!("keyframes  {} in each stage, {} frames generated", self.keyframes, self.canvas_frames)];
        if self.detailing_tokens > 0 {
            lines.push(format!("detailing  stage 2 follows {} tokens of stage 1", self.detailing_tokens));
        }
        for (at, RoundSummary { frames, frame_rate, tiles, steps }) in self.rounds.iter().enumerate() {
            let sizes: Vec<String> = tiles.iter().map(ToString::to_string).collect();
            lines.push(format!(
                "round {}    {frames} frames at {frame_rate} per second, tiles of {} frames, {steps} steps each",
                at + 1,
                sizes.join(", ")
            ));
        }
        if !self.rounds.is_empty() {
            let (frames, rate) = (self.output_frames, self.output_rate);
            lines.push(format!("output     {frames} frames at {rate} per second"));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::coordinate_grids;

    #[test]
    fn rounds_are_listed_with_their_tiles() {
        let set = [
            "dfr.temporal_rounds=2",
            "dfr.detailing_lora={path: tests/fixtures/lora/ic_tiny_a.safetensors}",
            "request.width=128",
            "request.height=64",
            "request.num_frames=17",
        ];
        let config = Config::load("ltx2_5_dfr", set).expect("valid");
        let grid = coordinate_grids(&Default::default()).0;
        assert_eq!(
            DfrSummary::new(&config, &grid).expect("a plan").lines(),
            [
                "keyframes  1 in each stage, 25 frames generated",
                "detailing  stage 2 follows 8 tokens of stage 1",
                "round 1    49 frames at 48 per second, tiles of 49 frames, 4 steps each",
                "round 2    97 frames at 96 per second, tiles of 49, 97 frames, 4 steps each",
                "output     65 frames at 96 per second",
            ]
        );
        let other = Config::load("ltx2_5_two_stage", ["request.num_frames=17"]).expect("valid");
        assert!(DfrSummary::new(&other, &grid).is_none());
    }
}
