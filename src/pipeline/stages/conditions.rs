//! Conditions as inputs of the denoising loop.
//!
//! The tokens of a condition either replace tokens of the stream, or are appended to them with separate positions and
//! dropped after the pass. A condition with a given strength has the noise level `(1 - strength) · sigma`, where
//! `sigma` is the noise level of the step. In each step, the clean prediction of the condition's tokens is computed at
//! that noise level and then blended with the condition, as in Lightricks' code.

use ndarray::{Array1, Array2, Array3, Array4, ArrayView2, Axis as Dim, s};

use crate::av::Av;
use crate::models::transformer::TransformerConfig;
use crate::nn::MASK_VALUE;
use crate::pipeline::error::{PipelineError, Result};
use crate::request::{Condition, PositionSpan, ReferenceGrid, Shapes, coordinate_grids};
use crate::sampling::latents::VideoShape;
use crate::tensor::Tensor;

/// Encoded conditions of a pass.
pub(crate) struct ConditionTokens {
    /// Distinct noise levels of the tokens, as fractions of the step's noise level, `[levels]`.
    pub(crate) levels: Vec<f32>,
    /// Condition tokens of each stream.
    pub(crate) streams: Av<StreamTokens>,
    /// Tokens `[1, tokens, channels]` of a stream that is kept unchanged; `None` for other streams.
    pub(crate) given: Av<Option<Array3<f32>>>,
    /// Attention weights (0..1) between the video's tokens, including appended ones, `[n, n]`. `None`: all are 1.
    pub(crate) attention: Option<Array2<f32>>,
}

/// Condition tokens of a stream.
pub(crate) struct StreamTokens {
    /// Index of each token's noise level in [`ConditionTokens::levels`], `[1, n]`.
    pub(crate) level: Array2<i32>,
    /// Clean tokens of the conditions, `[b or 1, n, c]`; zero where a token has no condition.
    pub(crate) clean: Array3<f32>,
}

impl StreamTokens {
    /// Creates the tokens of a stream, initially without conditions.
    pub(crate) fn new(videos: usize, tokens: usize, channels: usize) -> Self {
        StreamTokens { level: Array2::zeros((1, tokens)), clean: Array3::zeros((videos, tokens, channels)) }
    }

    /// Returns the clean tokens for `batch` videos, `[b, n, c]`.
    pub(crate) fn clean_of(&self, batch: usize) -> Array3<f32> {
        let clean = if self.clean.dim().0 == 1 { vec![self.clean.view(); batch] } else { vec![self.clean.view()] };
        ndarray::concatenate(Dim(0), &clean).expect("copies have one shape")
    }

    /// Returns the clean values of token `n`, `[b or 1, c]`.
    fn clean_token(&self, n: usize) -> ArrayView2<'_, f32> {
        self.clean.index_axis(Dim(1), n)
    }
}

impl ConditionTokens {
    /// Sets the starting tokens of each stream that is kept unchanged to [`ConditionTokens::given`], repeated for
    /// `batch` videos.
    pub(crate) fn give(&self, start: Av<&mut Array3<f32>>, batch: usize) {
        for (start, given) in start.zip(self.given.as_ref()) {
            if let Some(given) = given {
                *start = ndarray::concatenate(Dim(0), &vec![given.view(); batch]).expect("copies have one shape");
            }
        }
    }

    /// Appends the clean tokens of the conditions to the starting tokens `[b, n, c]` of streams that are kept unchanged,
    /// for `batch` videos.
    ///
    /// # Errors
    /// Returns an error if the numbers of videos or channels differ.
    pub(crate) fn append(&self, start: Av<&mut Array3<f32>>, batch: usize) -> Result<()> {
        for (start, own) in start.zip(self.streams.as_ref()) {
            let (known, all) = (start.dim().1, own.clean.dim().1);
            if known < all {
                let clean = own.clean_of(batch);
                let both = ndarray::concatenate(Dim(1), &[start.view(), clean.slice(s![.., known.., ..])]);
                *start = both.map_err(|e| PipelineError::Input(e.to_string()))?;
            }
        }
        Ok(())
    }

    /// Writes the clean tokens of the conditions into the tokens `[b, n, c]` of both streams, regardless of their
    /// strength.
    pub(crate) fn place(&self, tokens: Av<&mut Array3<f32>>) {
        for (tokens, own) in tokens.zip(self.streams.as_ref()) {
            for (n, mut column) in tokens.axis_iter_mut(Dim(1)).enumerate().filter(|(n, _)| own.level[[0, *n]] != 0) {
                column.assign(&own.clean_token(n));
            }
        }
    }

    /// Blends the clean tokens of the conditions into the starting tokens `[b, n, c]` of both streams, weighted by
    /// noise level.
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

    /// Returns the denoising loop's inputs for `batch` videos.
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

/// Converts attention weights `[n, n]` to the bias that is added to the attention scores: the logarithm of each weight.
fn score_bias(weights: &Array2<f32>) -> Array2<f32> {
    weights.mapv(|weight| if weight > 0.0 { weight.ln() } else { MASK_VALUE as f32 })
}

/// Builds the matrix of attention weights between a video's tokens, one condition at a time.
pub(crate) struct AttentionWeights {
    /// Number of the video's own tokens.
    own: usize,
    /// Number of own and appended tokens so far.
    tokens: usize,
    /// Attention weights between these tokens, `[n, n]`. `None`: all weights are 1 so far.
    weights: Option<Array2<f32>>,
}

impl AttentionWeights {
    /// Creates the matrix of a video with `own` tokens and no appended tokens; all weights are 1.
    pub(crate) fn new(own: usize) -> Self {
        AttentionWeights { own, tokens: own, weights: None }
    }

    /// Adds a condition with `tokens` appended tokens. `weights`: attention weight between each appended token and the
    /// video's own tokens; `None`: 1. From the first condition with weights on, the appended tokens of a condition
    /// attend only to the video's own tokens and to each other, not to other conditions.
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

    /// Returns the matrix of weights. `None`: all weights are 1.
    pub(crate) fn finish(self) -> Option<Array2<f32>> {
        self.weights
    }
}

/// Returns the positions of the appended tokens: start and end along time, rows and columns, `[1, 3, tokens, 2]`. An
/// image has the positions of the frame at which it is placed. A reference video has the positions of a video that
/// covers the same area and duration as the generated video.
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
    let of_image = |(frame, span): (usize, PositionSpan)| {
        let mut coords = one.clone();
        let frames = if span == PositionSpan::Frame { 1 } else { c.vae_scale_factors[0] };
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
            // Shift the reference frames so that the last one ends together with the generated video.
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
    let none = Array4::zeros((1, 3, 0, 2));
    let views: Vec<_> = [none.view()].into_iter().chain(each.iter().map(|c| c.view())).collect();
    ndarray::concatenate(Dim(2), &views).expect("positions of one video along three axes")
}

/// Time between the end of the reference sound and the start of the video, in seconds.
const REFERENCE_SOUND_GAP: f32 = 0.04;

/// Returns the positions of `tokens` appended audio tokens: start and end in seconds, `[1, 1, tokens, 2]`. The last one
/// ends [`REFERENCE_SOUND_GAP`] before the video starts, so all times are negative.
pub(crate) fn appended_sound_coords(c: &TransformerConfig, tokens: usize) -> Array4<f32> {
    let grid = coordinate_grids(c).1;
    let mut coords = grid.coords(1, tokens, c.audio_scale_factor, c.audio_patch_size_t, c.causal_offset as i64);
    let end = coords.iter().copied().fold(0.0, f32::max);
    coords.mapv_inplace(|seconds| seconds - end - REFERENCE_SOUND_GAP);
    coords
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::MaskChannel;
    use crate::media::FrameFilter;
    use crate::request::{Content, Placement};
    use crate::sampling::latents::AudioShape;
    use crate::weights::Checkpoint;

    /// Returns an expected tensor, computed by the reference implementation (scripts/oracle/cases_references.py) for 9
    /// frames of 64 x 64 pixels.
    fn state(name: &str) -> ndarray::ArrayD<f32> {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/cases/reference_states/states.safetensors");
        let checkpoint = Checkpoint::open(file.as_ref()).expect("a file");
        checkpoint.get(&format!("out.{name}")).and_then(|view| view.to_tensor()).expect("a tensor").into_f32()
    }

    fn shapes() -> Shapes {
        let video = VideoShape { batch: 1, channels: 2, frames: 2, height: 2, width: 2 };
        let audio = AudioShape { batch: 1, channels: 1, length: 1, mel_bins: 1 };
        let (tokens, roles) = (Av { video: 8, audio: 1 }, Av::default());
        Shapes { video, audio, tokens, appended: Av::default(), roles, drawn: Av::both(true) }
    }

    /// Returns a condition on a reference video of `latents` latent frames, with the given spatial and temporal scale.
    fn reference(latents: usize, [downscale, step]: [usize; 2], strength: f32, attention: f32) -> Condition {
        let grid = ReferenceGrid { frames: (latents - 1) * 8 + 1, downscale, step, attention };
        let content = Content::Reference {
            path: "a.mp4".into(),
            mask: None,
            channel: MaskChannel::default(),
            filter: FrameFilter::None,
        };
        Condition { content, placement: Placement::AppendedReference(grid), strength }
    }

    #[test]
    fn appended_tokens_match_reference_bit_for_bit() {
        let (shapes, c) = (shapes(), TransformerConfig::default());
        let image = Condition {
            content: Content::Image { path: "a.png".into(), crf: 0 },
            placement: Placement::Appended { frame: 8, span: PositionSpan::Frame },
            strength: 0.5,
        };
        let by_token = [0.125, 0.5, 0.75];
        let weighed = vec![
            (image, None),
            (reference(2, [2, 1], 1.0, 0.5), Some(vec![0.5; 2])),
            (reference(1, [2, 1], 1.0, 1.0), None),
            (reference(3, [2, 1], 0.25, 1.0), Some(by_token.to_vec())),
            (reference(1, [2, 1], 1.0, 0.0), Some(vec![0.0])),
        ];
        let plain = vec![(reference(2, [1, 1], 0.75, 1.0), None), (reference(3, [2, 1], 1.0, 1.0), None)];
        let slow = vec![(reference(2, [2, 2], 1.0, 1.0), None), (reference(3, [1, 4], 1.0, 1.0), None)];
        for (name, items) in [("plain", plain), ("weighed", weighed), ("slow", slow)] {
            let conditions: Vec<Condition> = items.iter().map(|(condition, _)| condition.clone()).collect();
            let coords = appended_coords(&c, &shapes, &conditions, 24.0);
            assert_eq!(coords.index_axis(Dim(0), 0).into_dyn(), state(&format!("{name}.positions")), "{name}");
            let mut attention = AttentionWeights::new(8);
            let mut levels = vec![1.0; 8];
            for (condition, weights) in &items {
                let latents = condition.appended(&shapes.video, 8).expect("appended tokens");
                let n = latents.frames * latents.height * latents.width;
                levels.extend(vec![condition.noise_level(); n]);
                attention.append(n, weights.as_deref());
            }
            assert_eq!(Array1::from(levels).into_dyn(), state(&format!("{name}.levels")), "{name}");
            match attention.finish() {
                Some(weights) => assert_eq!(weights.into_dyn(), state("weighed.attention"), "{name}"),
                None => assert_ne!(name, "weighed"),
            }
        }
    }

    #[test]
    fn attention_weight_becomes_logarithmic_bias() {
        let bias = score_bias(&ndarray::arr2(&[[1.0, 0.5], [0.0, 0.25]]));
        assert_eq!(bias, ndarray::arr2(&[[0.0, 0.5_f32.ln()], [-1e30, 0.25_f32.ln()]]));
    }
}
