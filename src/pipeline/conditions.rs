//! Conditions as the loop reads them.
//!
//! Known tokens take the place of the stream's own, or are appended behind them with positions of their own, and dropped
//! at the end. Each has its part of a step's noise, `1 - strength`: its own noise level, from which its clean prediction
//! is formed and then blended with the condition (Lightricks' own semantics).

use ndarray::{Array1, Array2, Array3, Array4, ArrayView2, Axis as Dim, s};

use crate::av::Av;
use crate::models::transformer::TransformerConfig;
use crate::request::{Condition, Shapes, Span, coordinate_grids};
use crate::sampling::latents::VideoShape;
use crate::tensor::Tensor;

/// The conditions of a pass.
pub(crate) struct ConditionTokens {
    /// Noise levels as parts of a step's, `[k]`.
    pub(crate) levels: Vec<f32>,
    /// Tokens of each stream.
    pub(crate) streams: Av<StreamTokens>,
}

/// Tokens of a stream that has conditions.
pub(crate) struct StreamTokens {
    /// Index of each token's noise level, `[1, n]`.
    pub(crate) level: Array2<i32>,
    /// Clean tokens of the conditions, zero elsewhere, `[b or 1, n, c]`.
    pub(crate) clean: Array3<f32>,
}

impl StreamTokens {
    /// Tokens without a condition yet.
    pub(crate) fn new(videos: usize, tokens: usize, channels: usize) -> Self {
        StreamTokens { level: Array2::zeros((1, tokens)), clean: Array3::zeros((videos, tokens, channels)) }
    }

    /// Clean tokens of `batch` videos, `[b, n, c]`.
    pub(crate) fn clean_of(&self, batch: usize) -> Array3<f32> {
        let clean = if self.clean.dim().0 == 1 { vec![self.clean.view(); batch] } else { vec![self.clean.view()] };
        ndarray::concatenate(Dim(0), &clean).expect("copies have one shape")
    }

    /// A token's clean values, `[b or 1, c]`.
    fn clean_token(&self, n: usize) -> ArrayView2<'_, f32> {
        self.clean.index_axis(Dim(1), n)
    }
}

impl ConditionTokens {
    /// Puts the conditions into tokens `[b, n, c]` of both streams, whatever their strength.
    pub(crate) fn place(&self, tokens: Av<&mut Array3<f32>>) {
        for (tokens, own) in tokens.zip(self.streams.as_ref()) {
            for (n, mut column) in tokens.axis_iter_mut(Dim(1)).enumerate().filter(|(n, _)| own.level[[0, *n]] != 0) {
                column.assign(&own.clean_token(n));
            }
        }
    }

    /// Blends the conditions into starting tokens `[b, n, c]` of both streams.
    pub(crate) fn blend(&self, tokens: Av<&mut Array3<f32>>) {
        for (tokens, own) in tokens.zip(self.streams.as_ref()) {
            for (n, mut column) in tokens.axis_iter_mut(Dim(1)).enumerate() {
                let mask = self.levels[own.level[[0, n]] as usize];
                if mask == 1.0 {
                    continue;
                }
                column.zip_mut_with(&own.clean_token(n), |x, c| *x = *x * mask + c * (1.0 - mask));
            }
        }
    }

    /// As the loop's inputs, for `batch` videos.
    pub(crate) fn inputs(&self, batch: usize) -> Vec<(String, Tensor)> {
        let mut inputs = vec![("levels".to_string(), Tensor::from(Array1::from(self.levels.clone())))];
        for (name, own) in Av::NAMES.zip(self.streams.as_ref()) {
            let level = vec![own.level.view(); batch];
            let level = ndarray::concatenate(Dim(0), &level).expect("copies have one shape");
            let clean = own.clean_of(batch);
            inputs.extend([(format!("level.{name}"), level.into()), (format!("clean.{name}"), clean.into())]);
        }
        inputs
    }
}

/// Positions of the tokens behind the video's own, `[1, 3, extra, 2]`: an image's at its frames.
pub(crate) fn appended_coords(
    c: &TransformerConfig,
    shapes: &Shapes,
    conditions: &[Condition],
    frame_rate: f64,
) -> Array4<f32> {
    let grid = coordinate_grids(c).0;
    let image = VideoShape { frames: 1, ..shapes.video };
    let one = grid.coords(&image, c.vae_scale_factors, c.causal_offset as i64, frame_rate);
    let each: Vec<Array4<f32>> = conditions
        .iter()
        .filter_map(Condition::appended_at)
        .map(|(frame, span)| {
            let mut coords = one.clone();
            let frames = if span == Span::Frame { 1 } else { c.vae_scale_factors[0] };
            let mut sides = coords.slice_mut(s![0, 0, .., ..]);
            for (bound, mut bounds) in [frame, frame + frames].into_iter().zip(sides.axis_iter_mut(Dim(1))) {
                bounds.fill(bound as f32 / frame_rate as f32);
            }
            coords
        })
        .collect();
    let views: Vec<_> = each.iter().map(|c| c.view()).collect();
    ndarray::concatenate(Dim(2), &views).unwrap_or_else(|_| Array4::zeros((1, 3, 0, 2)))
}
