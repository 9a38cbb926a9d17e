//! Image conditioning as the loop reads it.
//!
//! Tokens of the first frame stand in the place of the video's own; those of any other frame, and of every frame between
//! keyframes, are appended behind them with the positions of their frame, and dropped at the end. Each has its part of a
//! step's noise, `1 - strength`: its own noise level, from which its clean prediction is formed and then blended with
//! the condition (Lightricks' own semantics).

use ndarray::{Array2, Array3, Array4, Axis as Dim, s};

use crate::models::transformer::TransformerConfig;
use crate::request::{ImageCondition, Shapes, coordinate_grids};
use crate::sampling::latents::VideoShape;
use crate::tensor::Tensor;

/// Conditions on the video tokens of a pass.
pub struct ConditionTokens {
    /// Noise levels as parts of a step's, `[k]`.
    pub levels: Vec<f32>,
    /// Index of each video token's noise level, `[1, n]`.
    pub level: Array2<i32>,
    /// Clean tokens of the conditions, zero elsewhere, `[1, n, c]`.
    pub clean: Array3<f32>,
}

impl ConditionTokens {
    /// The part of a step's noise of each token.
    fn mask(&self, token: usize) -> f32 {
        self.levels[self.level[[0, token]] as usize]
    }

    /// Blends the conditions into starting tokens `[b, n, c]`.
    pub fn blend(&self, tokens: &mut Array3<f32>) {
        for (n, mut column) in tokens.axis_iter_mut(Dim(1)).enumerate() {
            let mask = self.mask(n);
            if mask == 1.0 {
                continue;
            }
            let clean = self.clean.index_axis(Dim(1), n);
            for mut row in column.axis_iter_mut(Dim(0)) {
                row.zip_mut_with(&clean.index_axis(Dim(0), 0), |x, c| *x = *x * mask + c * (1.0 - mask));
            }
        }
    }

    /// As the loop's inputs, for `batch` videos.
    pub fn inputs(&self, batch: usize) -> Vec<(String, Tensor)> {
        let rows = |shape: &[usize]| [&[batch], &shape[1..]].concat();
        let level = self.level.broadcast(rows(self.level.shape())).map(|a| a.into_owned()).unwrap_or_default();
        let clean = self.clean.broadcast(rows(self.clean.shape())).map(|a| a.into_owned()).unwrap_or_default();
        vec![
            ("levels".into(), Tensor::from(ndarray::Array1::from(self.levels.clone()))),
            ("level.video".into(), Tensor::from(level)),
            ("clean.video".into(), Tensor::from(clean)),
        ]
    }
}

/// Positions of the tokens behind the video's own, `[1, 3, extra, 2]`: an image's at its frame, which lasts one frame.
pub fn appended_coords(
    c: &TransformerConfig,
    shapes: &Shapes,
    images: &[ImageCondition],
    frame_rate: f64,
) -> Array4<f32> {
    let grid = coordinate_grids(c).0;
    let image = VideoShape { frames: 1, ..shapes.video };
    let one = grid.coords(&image, c.vae_scale_factors, c.causal_offset as i64, frame_rate);
    let each: Vec<Array4<f32>> = images
        .iter()
        .filter(|image| image.appended)
        .map(|image| {
            let mut coords = one.clone();
            for (side, mut bounds) in coords.slice_mut(s![0, 0, .., ..]).axis_iter_mut(Dim(1)).enumerate() {
                bounds.fill((image.frame + side) as f32 / frame_rate as f32);
            }
            coords
        })
        .collect();
    let views: Vec<_> = each.iter().map(|c| c.view()).collect();
    ndarray::concatenate(Dim(2), &views).unwrap_or_else(|_| Array4::zeros((1, 3, 0, 2)))
}
