//! Images to conditions: read, put through H.264 as the model's training data was, encoded.

use std::path::Path;

use ndarray::{Array2, Array3, s};

use super::conditions::ConditionTokens;
use super::error::Result;
use super::runner::Runner;
use super::tensors::fixed;
use crate::media;
use crate::request::{ImageCondition, Request, Shapes, noise_levels};

impl Runner {
    /// The image conditions of a pass at its size; none without images.
    ///
    /// # Errors
    /// An image that cannot be read; what is wrong with program or device.
    pub fn encode_conditions(&mut self, request: &Request, shapes: &Shapes) -> Result<Option<ConditionTokens>> {
        if request.images.is_empty() {
            return Ok(None);
        }
        let (total, own) = (shapes.tokens[0], shapes.tokens[0] - shapes.appended);
        let levels = noise_levels(&request.images);
        let mut level = Array2::zeros((1, total));
        let mut clean = Array3::zeros((1, total, self.model.sizes.transformer.in_channels));
        let mut behind = own;
        for image in &request.images {
            let tokens = self.image_tokens(image, request)?;
            let at = if image.appended { behind } else { 0 };
            let to = at + tokens.shape()[1];
            clean.slice_mut(s![.., at..to, ..]).assign(&tokens);
            let index = levels.iter().position(|l| *l == 1.0 - image.strength).expect("a level of each image");
            level.slice_mut(s![.., at..to]).fill(index as i32);
            if image.appended {
                behind = to;
            }
        }
        Ok(Some(ConditionTokens { levels, level, clean }))
    }

    /// An image as normalised tokens `[1, h·w, c]` of a pass' size.
    fn image_tokens(&mut self, image: &ImageCondition, request: &Request) -> Result<Array3<f32>> {
        let frame = media::read_image(&image.path)?;
        let frame = match image.crf {
            0 => frame,
            crf => match media::through_h264(&frame, crf, Path::new("ffmpeg"), &image.path) {
                Err(media::Error::FfmpegMissing { reason }) => {
                    let path = image.path.display();
                    tracing::warn!(
                        "{path}: not put through H.264 (crf {crf}), which the model was trained on: ffmpeg {reason}"
                    );
                    frame
                }
                other => other?,
            },
        };
        let video = media::covering(&frame, request.height, request.width);
        let encoded = self.video_encoder(video)?.run(&self.executor)?;
        let mut latents = fixed(encoded.tensor("latents")?.into_f32())?;
        self.model.video_statistics.normalize(&mut latents, 1)?;
        Ok(self.model.sizes.video_grid.pack(latents.view())?)
    }
}
