//! Frames that are given: pictures to tokens of the video that keep what they show.
//!
//! The first frame's tokens stand in the place of the video's own; those of any other frame, and of every frame between
//! keyframes, are appended behind them with the positions of their frame, and dropped at the end. Each has its part of a
//! step's noise, `1 - strength`: its own noise level, from which its clean prediction is formed and then blended with
//! what is given (Lightricks' own semantics).

use std::path::{Path, PathBuf};

use ndarray::{Array2, Array3, Array4, Axis as Dim, s};

use super::calls;
use super::error::{PipelineError, Result};
use super::executor::Executor;
use super::model::{Model, coordinate_grids};
use super::text_to_video::{Request, Shapes};
use crate::media;
use crate::models::transformer::TransformerConfig;
use crate::nn::Build;
use crate::sampling::latents::VideoShape;
use crate::tensor::Tensor;

/// A frame that is given.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageCondition {
    /// The picture.
    pub path: PathBuf,
    /// The frame it stands for.
    pub frame: usize,
    /// How closely it is kept, 0 to 1.
    pub strength: f32,
    /// Quality of the H.264 it goes through first; 0 for none.
    pub crf: u8,
    /// Its tokens stand behind the video's own instead of in their place.
    pub appended: bool,
}

/// The parts of a step's noise that tokens have: all of it first, then one for each other strength.
pub fn levels(given: &[ImageCondition]) -> Vec<f32> {
    let mut levels = vec![1.0];
    for level in given.iter().map(|g| 1.0 - g.strength) {
        if !levels.contains(&level) {
            levels.push(level);
        }
    }
    levels
}

/// What a stage's loop reads of given frames.
pub struct ConditionTokens {
    /// The parts of a step's noise, `[k]`.
    pub levels: Vec<f32>,
    /// Which of them each video token has, `[1, n]`.
    pub level: Array2<i32>,
    /// What is given, zero elsewhere, `[1, n, c]`.
    pub clean: Array3<f32>,
}

impl ConditionTokens {
    /// Encodes the frames of a stage's request at its size; `None` where nothing is given.
    ///
    /// # Errors
    /// A picture that cannot be read; what is wrong with program or device.
    pub fn encode(
        models: &Model,
        executor: &mut Executor,
        request: &Request,
        shapes: &Shapes,
        build: &Build,
    ) -> Result<Option<Self>> {
        if request.given.is_empty() {
            return Ok(None);
        }
        let (total, own) = (shapes.tokens[0], shapes.tokens[0] - shapes.appended);
        let levels = levels(&request.given);
        let mut level = Array2::zeros((1, total));
        let mut clean = Array3::zeros((1, total, models.sizes.transformer.in_channels));
        let mut behind = own;
        for given in &request.given {
            let tokens = tokens_of(models, executor, given, request, build)?;
            let at = if given.appended { behind } else { 0 };
            let to = at + tokens.shape()[1];
            clean.slice_mut(s![.., at..to, ..]).assign(&tokens);
            let class = levels.iter().position(|l| *l == 1.0 - given.strength).unwrap_or_default();
            level.slice_mut(s![.., at..to]).fill(class as i32);
            if given.appended {
                behind = to;
            }
        }
        Ok(Some(ConditionTokens { levels, level, clean }))
    }

    /// The part of a step's noise of each token.
    fn mask(&self, token: usize) -> f32 {
        self.levels[self.level[[0, token]] as usize]
    }

    /// Puts what is given into starting tokens `[b, n, c]`.
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

/// A picture to normalised tokens `[1, h·w, c]` of a stage's size.
fn tokens_of(
    models: &Model,
    executor: &mut Executor,
    given: &ImageCondition,
    request: &Request,
    build: &Build,
) -> Result<Array3<f32>> {
    let frame = media::read_picture(&given.path)?;
    let ffmpeg = Path::new("ffmpeg");
    let frame = match given.crf {
        0 => frame,
        crf => match media::through_h264(&frame, crf, ffmpeg, &given.path) {
            Err(media::Error::FfmpegMissing { reason }) => {
                let picture = given.path.display();
                tracing::warn!(
                    "{picture}: not put through H.264 (crf {crf}), which the model was trained on: ffmpeg {reason}"
                );
                frame
            }
            other => other?,
        },
    };
    let picture = media::covering(&frame, request.height, request.width);
    let encoded = calls::video_encoder(models, executor, picture, build)?.run(executor)?;
    let mut latents =
        encoded.tensor("latents")?.into_f32().into_dimensionality().map_err(|e| PipelineError::Input(e.to_string()))?;
    models.video_statistics.normalize(&mut latents, 1)?;
    Ok(models.sizes.video_grid.pack(latents.view())?)
}

/// Positions of the tokens behind the video's own, `[1, 3, extra, 2]`: the picture's at its frame, which lasts one frame.
pub fn appended_coords(
    c: &TransformerConfig,
    shapes: &Shapes,
    given: &[ImageCondition],
    frame_rate: f64,
) -> Array4<f32> {
    let grid = coordinate_grids(c).0;
    let picture = VideoShape { frames: 1, ..shapes.video };
    let one = grid.coords(&picture, c.vae_scale_factors, c.causal_offset as i64, frame_rate);
    let each: Vec<Array4<f32>> = given
        .iter()
        .filter(|g| g.appended)
        .map(|g| {
            let mut coords = one.clone();
            for (side, mut bounds) in coords.slice_mut(s![0, 0, .., ..]).axis_iter_mut(Dim(1)).enumerate() {
                bounds.fill((g.frame + side) as f32 / frame_rate as f32);
            }
            coords
        })
        .collect();
    let views: Vec<_> = each.iter().map(|c| c.view()).collect();
    ndarray::concatenate(Dim(2), &views).unwrap_or_else(|_| Array4::zeros((1, 3, 0, 2)))
}
