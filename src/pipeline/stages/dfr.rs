//! Temporal rounds of the pipeline `dfr`, which follow its two passes. In each round, the temporal upsampler doubles
//! the number of frames of the canvas (the video, padded so that its last frame is a keyframe), and each tile is
//! denoised between the keyframes of the previous round.

use std::ops::Range;

use ndarray::{Array3, Array5, ArrayView5, Axis as Dim, s};

use super::denoising::{DenoisedTokens, InitialTokens, PassNames};
use super::prompts::TextContexts;
use super::run::Run;
use crate::av::Av;
use crate::models::transformer::TransformerConfig;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::output::tensors::fixed;
use crate::pipeline::phase::Phase;
use crate::request::{DfrPlan, KeyframeSource, Request, Round, Shapes};
use crate::sampling::denoise::StreamRole;
use crate::sampling::latents::VideoShape;

impl Run<'_> {
    /// Runs the temporal rounds of a request. `made`: tokens of the second pass, whose latents have the shapes
    /// `shapes`. Trims the canvas to the frames of the requested video, and updates `shapes` accordingly.
    pub(crate) fn run_temporal_rounds(
        &mut self,
        dfr: &DfrPlan,
        request: &Request,
        second: &Request,
        shapes: &mut Shapes,
        made: DenoisedTokens,
        text: &TextContexts,
    ) -> Result<Av<Array3<f32>>> {
        let kept = [("stage_2.latents.video", &made.tokens.video), ("stage_2.keyframes", &made.generated)];
        let is_wanted = self.dump.is_wanted();
        for (name, tokens) in kept.into_iter().filter(|_| is_wanted) {
            let latents = self.unpacked(tokens, shapes.video)?;
            self.keep_latents(name, &latents)?;
        }
        let frame = shapes.frame_tokens();
        let audio = made.tokens.audio.clone();
        let video = match dfr.temporal_rounds {
            0 => made.tokens.video,
            _ => {
                self.runner.executor.enter(1)?;
                let video = self.rounds(dfr, second, shapes.video, made, text)?;
                self.ends(Phase::Round);
                video
            }
        };
        let compression = self.runner.model.sizes.video_grid.temporal_compression;
        shapes.video.frames = (request.output_frames() - 1) / compression + 1;
        Ok(Av { video: video.slice(s![.., ..shapes.video.frames * frame, ..]).to_owned(), audio })
    }

    /// Runs all rounds. `before`: tokens of the second pass, whose latents have the shape `shape`. Returns the
    /// normalised video tokens of the last round's canvas; the rounds do not change the audio.
    fn rounds(
        &mut self,
        dfr: &DfrPlan,
        second: &Request,
        shape: VideoShape,
        before: DenoisedTokens,
        text: &TextContexts,
    ) -> Result<Array3<f32>> {
        let shape = VideoShape { batch: self.batch.size, ..shape };
        let rounds = dfr.rounds();
        let of_tile = dfr.sigmas.len() - 1;
        let mut ahead = of_tile * rounds.iter().map(|round| round.tiles.len()).sum::<usize>();
        let mut behind = 0;
        let mut video = self.unpacked(&before.tokens.video, shape)?;
        let mut keyframes = self.unpacked(&before.generated, shape)?;
        for round in &rounds {
            video = self.doubled(video, round)?;
            let (mut kept, mut slots) = (Vec::new(), Vec::new());
            for (at, tile) in round.tiles.iter().enumerate() {
                let request = dfr.tile(second, round, at);
                let own = frames(&video, tile.latents.clone());
                let seeds = tile.seeds();
                let start = InitialTokens {
                    tokens: Av {
                        video: self.packed(own)?,
                        audio: self.tile_sound(dfr, second, &request, round, at, &before.tokens.audio)?,
                    },
                    generated: Some(self.packed(own.select(Dim(2), &seeds).view())?),
                    carried: Some(self.packed(frames(&keyframes, tile.anchors.clone()))?),
                    references: Vec::new(),
                };
                ahead -= of_tile;
                let names = PassNames::of_tile(round.number, at, [behind, ahead]);
                behind += of_tile;
                let pass = self.begin(&request, Some(start), names)?;
                let made = self.denoise(pass, text, None)?;
                let made_video = self.unpacked(&made.tokens.video, shape)?;
                kept.push(made_video.slice(s![.., .., tile.dropped.., .., ..]).to_owned());
                slots.push(self.unpacked(&made.generated, shape)?);
            }
            video = concatenated(&kept)?;
            keyframes = carried(&keyframes, &concatenated(&slots)?, &round.sources)?;
            self.keep_latents(&format!("round_{}.latents.video", round.number), &video)?;
            self.keep_latents(&format!("round_{}.keyframes", round.number), &keyframes)?;
        }
        self.packed(video.view())
    }

    /// Doubles the frame rate of normalised latents: `f` frames become `2·f - 1`.
    fn doubled(&mut self, mut video: Array5<f32>, round: &Round) -> Result<Array5<f32>> {
        self.runner.model.statistics.video.denormalize(&mut video, 1)?;
        let upsampled = self.runner.temporal_upsampler(video)?.run(&self.runner.executor)?;
        self.clock.wait(&upsampled)?;
        let mut video: Array5<f32> = fixed(upsampled.tensor("latents")?.into_f32())?;
        let (made, want) = (video.dim().2, round.canvas.latents());
        if made != want {
            let why = format!("the temporal upsampler returned {made} latent frames, but the round needs {want}");
            return Err(PipelineError::Input(why));
        }
        self.runner.model.statistics.video.normalize(&mut video, 1)?;
        Ok(video)
    }

    /// Returns the normalised audio tokens for the time span of a tile, resampled to the number of tokens that the tile
    /// needs; zeros if the tile has no audio stream.
    fn tile_sound(
        &self,
        dfr: &DfrPlan,
        second: &Request,
        request: &Request,
        round: &Round,
        at: usize,
        sound: &Array3<f32>,
    ) -> Result<Array3<f32>> {
        let count = Shapes::from_request(&self.runner.model.sizes, request)?.audio.length;
        if request.roles.audio == StreamRole::Absent {
            let TransformerConfig { audio_in_channels, .. } = self.runner.model.sizes.transformer;
            return Ok(Array3::zeros((self.batch.size, count, audio_in_channels)));
        }
        let tile = &round.tiles[at];
        let seconds = |frames: usize, rate: f64| frames as f64 / rate;
        let rate = second.frame_rate * (1 << round.number) as f64;
        let whole = seconds(dfr.canvas.frames, second.frame_rate);
        let part = |frames: usize| seconds(frames, rate) / whole * sound.dim().1 as f64;
        Ok(resampled(sound, part(*tile.frames.start()), part(tile.num_frames()), count))
    }

    /// Unpacks tokens to normalised latents. The number of frames is derived from the number of tokens; the other sizes
    /// are those of `shape`.
    pub(crate) fn unpacked(&self, tokens: &Array3<f32>, shape: VideoShape) -> Result<Array5<f32>> {
        let grid = &self.runner.model.sizes.video_grid;
        let frame = grid.tokens(&VideoShape { frames: 1, ..shape });
        let (batch, tokens_in_all, _) = tokens.dim();
        Ok(grid.unpack(tokens.view(), &VideoShape { batch, frames: tokens_in_all / frame, ..shape })?)
    }

    fn packed(&self, latents: ArrayView5<f32>) -> Result<Array3<f32>> {
        Ok(self.runner.model.sizes.video_grid.pack(latents)?)
    }

    /// Dumps normalised latents after denormalising them, if a dump is requested.
    pub(crate) fn keep_latents(&mut self, name: &str, latents: &Array5<f32>) -> Result<()> {
        if self.dump.is_wanted() {
            let mut latents = latents.clone();
            self.runner.model.statistics.video.denormalize(&mut latents, 1)?;
            self.dump.keep_row(name, &latents, 1, 0);
        }
        Ok(())
    }
}

fn frames(latents: &Array5<f32>, range: Range<usize>) -> ArrayView5<'_, f32> {
    latents.slice(s![.., .., range, .., ..])
}

fn concatenated(parts: &[Array5<f32>]) -> Result<Array5<f32>> {
    let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
    ndarray::concatenate(Dim(2), &views).map_err(|e| PipelineError::Bug(e.to_string()))
}

/// Returns the latents of the keyframes that the next round uses. `sources` says whether each of them comes from
/// `before` (keyframes of the previous round) or `slots` (keyframes generated in this round).
fn carried(before: &Array5<f32>, slots: &Array5<f32>, sources: &[KeyframeSource]) -> Result<Array5<f32>> {
    let one = |source: &KeyframeSource| match source {
        KeyframeSource::Before(at) => frames(before, *at..at + 1),
        KeyframeSource::Slot(at) => frames(slots, *at..at + 1),
    };
    let all: Vec<_> = sources.iter().map(one).collect();
    ndarray::concatenate(Dim(2), &all).map_err(|e| PipelineError::Bug(e.to_string()))
}

/// Resamples the tokens `[b, n, c]` between the (fractional) indices `start` and `start + span` to `count` equally
/// spaced tokens, by linear interpolation. Indices after the last token return the last token.
fn resampled(tokens: &Array3<f32>, start: f64, span: f64, count: usize) -> Array3<f32> {
    let (b, n, c) = tokens.dim();
    let last = n - 1;
    let (start, distance) = (start as f32, (span / count as f64) as f32);
    let mut out = Array3::zeros((b, count, c));
    for (i, mut token) in out.axis_iter_mut(Dim(1)).enumerate() {
        let at = (start + distance * i as f32).clamp(0.0, last as f32);
        let low = at as usize;
        let part = at - low as f32;
        let [low, high] = [low, (low + 1).min(last)].map(|at| tokens.index_axis(Dim(1), at));
        token.assign(&(&low * (1.0 - part) + &high * part));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resampled_tile_sound_interpolates_tokens() {
        let tokens = Array3::from_shape_fn((1, 4, 2), |(_, n, c)| (10 * n + c) as f32);
        let got = resampled(&tokens, 1.0, 3.0, 6);
        assert_eq!(got.slice(s![0, .., 0]).to_vec(), [10.0, 15.0, 20.0, 25.0, 30.0, 30.0]);
        assert_eq!(got.slice(s![0, .., 1]).to_vec(), [11.0, 16.0, 21.0, 26.0, 31.0, 31.0]);
    }
}
