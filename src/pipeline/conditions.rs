//! Conditions as the loop reads them.
//!
//! Known tokens take the place of the stream's own, or are appended behind them with positions of their own, and dropped
//! at the end. Each has its part of a step's noise, `1 - strength`: its own noise level, from which its clean prediction
//! is formed and then blended with the condition (Lightricks' own semantics).

use ndarray::{Array1, Array2, Array3, Array4, ArrayView2, Axis as Dim, s};

use crate::av::Av;
use crate::models::transformer::TransformerConfig;
use crate::nn::MASK_VALUE;
use crate::request::{Condition, ReferenceGrid, Shapes, Span, coordinate_grids};
use crate::sampling::latents::VideoShape;
use crate::tensor::Tensor;

/// The conditions of a pass.
pub(crate) struct ConditionTokens {
    /// Noise levels as parts of a step's, `[k]`.
    pub(crate) levels: Vec<f32>,
    /// Tokens of each stream.
    pub(crate) streams: Av<StreamTokens>,
    /// All tokens of streams that are kept, `[1, n, c]`.
    pub(crate) given: Av<Option<Array3<f32>>>,
    /// Weights of the attention among the video's tokens, `[n, n]` in 0..1, where any is less than 1.
    pub(crate) attention: Option<Array2<f32>>,
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
    /// Puts the tokens of streams that are kept in the place of those that start, for `batch` videos.
    pub(crate) fn give(&self, start: Av<&mut Array3<f32>>, batch: usize) {
        for (start, given) in start.zip(self.given.as_ref()) {
            if let Some(given) = given {
                *start = ndarray::concatenate(Dim(0), &vec![given.view(); batch]).expect("copies have one shape");
            }
        }
    }

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
        if let Some(weights) = &self.attention {
            inputs.push(("self_mask.video".to_string(), score_bias(weights).insert_axis(Dim(0)).into()));
        }
        inputs
    }
}

/// What weights of attention add to scores: their logarithms.
fn score_bias(weights: &Array2<f32>) -> Array2<f32> {
    weights.mapv(|weight| if weight > 0.0 { weight.ln() } else { MASK_VALUE as f32 })
}

/// Attention among a video's tokens as appended ones come behind them, each item in turn.
pub(crate) struct AttentionWeights {
    /// Number of tokens of the video itself.
    own: usize,
    /// Number of tokens so far.
    tokens: usize,
    /// Weights among these, `[n, n]`, once an item has weights of its own.
    weights: Option<Array2<f32>>,
}

impl AttentionWeights {
    /// That of a video's own tokens.
    pub(crate) fn new(own: usize) -> Self {
        AttentionWeights { own, tokens: own, weights: None }
    }

    /// Tokens of one more item, with weights of the attention between each and the video's own. Once any item has such, items
    /// do not attend to each other.
    pub(crate) fn append(&mut self, tokens: usize, weights: Option<&[f32]>) {
        let (before, all) = (self.tokens, self.tokens + tokens);
        self.tokens = all;
        if weights.is_none() && self.weights.is_none() {
            return;
        }
        let mut next = Array2::zeros((all, all));
        match &self.weights {
            Some(known) => next.slice_mut(s![..before, ..before]).assign(known),
            None => next.slice_mut(s![..before, ..before]).fill(1.0),
        }
        next.slice_mut(s![before.., before..]).fill(1.0);
        for token in 0..tokens {
            let weight = weights.map_or(1.0, |weights| weights[token]);
            next.slice_mut(s![..self.own, before + token]).fill(weight);
            next.slice_mut(s![before + token, ..self.own]).fill(weight);
        }
        self.weights = Some(next);
    }

    /// The weights, where any item has such.
    pub(crate) fn finish(self) -> Option<Array2<f32>> {
        self.weights
    }
}

/// Positions of the tokens behind the video's own, `[1, 3, extra, 2]`: an image's at its frames, a reference's those of a
/// video that covers the same place and time.
pub(crate) fn appended_coords(
    c: &TransformerConfig,
    shapes: &Shapes,
    conditions: &[Condition],
    frame_rate: f64,
) -> Array4<f32> {
    let grid = coordinate_grids(c).0;
    let coords =
        |latents: &VideoShape, rate: f64| grid.coords(latents, c.vae_scale_factors, c.causal_offset as i64, rate);
    let one = coords(&VideoShape { frames: 1, ..shapes.video }, frame_rate);
    let of_image = |(frame, span): (usize, Span)| {
        let mut coords = one.clone();
        let frames = if span == Span::Frame { 1 } else { c.vae_scale_factors[0] };
        let mut sides = coords.slice_mut(s![0, 0, .., ..]);
        for (bound, mut bounds) in [frame, frame + frames].into_iter().zip(sides.axis_iter_mut(Dim(1))) {
            bounds.fill(bound as f32 / frame_rate as f32);
        }
        coords
    };
    let of_reference = |reference: &ReferenceGrid, latents: &VideoShape| {
        let step = reference.step;
        let mut coords = coords(latents, frame_rate / step as f64);
        if step > 1 {
            // Its last frame ends with the video's.
            let early = (step - 1) as f32 * (1.0 / frame_rate as f32);
            coords.slice_mut(s![.., 0, .., ..]).mapv_inplace(|t| (t - early).max(0.0));
        }
        coords.slice_mut(s![.., 1.., .., ..]).mapv_inplace(|x| x * reference.downscale as f32);
        coords
    };
    let each: Vec<Array4<f32>> = conditions
        .iter()
        .filter_map(|condition| match condition.reference_grid() {
            Some(grid) => Some(of_reference(grid, &condition.appended(&shapes.video, c.vae_scale_factors[0])?)),
            None => condition.appended_at().map(of_image),
        })
        .collect();
    let views: Vec<_> = each.iter().map(|c| c.view()).collect();
    ndarray::concatenate(Dim(2), &views).unwrap_or_else(|_| Array4::zeros((1, 3, 0, 2)))
}
