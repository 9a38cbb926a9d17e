//! Conditions to tokens: images read, put through H.264 as the model's training data was, encoded.

use std::path::Path;

use ndarray::{Array3, s};

use super::conditions::{ConditionTokens, StreamTokens};
use super::error::Result;
use super::runner::Runner;
use super::tensors::fixed;
use crate::av::Av;
use crate::media;
use crate::request::{Condition, Content, Placement, Request, Shapes, noise_levels};

/// Fails where the file of a condition cannot be used.
///
/// # Errors
/// The file and why.
pub fn check(condition: &Condition) -> Result<()> {
    match &condition.content {
        Content::Image { path, .. } => Ok(media::read_image(path).map(drop)?),
    }
}

impl Runner {
    /// The conditions of a pass at its size; none without such.
    ///
    /// # Errors
    /// A file that cannot be used; what is wrong with program or device.
    pub fn encode_conditions(&mut self, request: &Request, shapes: &Shapes) -> Result<Option<ConditionTokens>> {
        if request.conditions.as_ref().into_iter().all(Vec::is_empty) {
            return Ok(None);
        }
        let levels = noise_levels(&request.conditions);
        let c = &self.model.sizes.transformer;
        let channels = c.streams().map(|s| s.in_channels);
        let mut streams = shapes.tokens.zip(channels).map(|(n, channels)| StreamTokens::new(n, channels));
        let mut behind = shapes.own_tokens();
        let all = Av { video: &mut streams.video, audio: &mut streams.audio }.zip(request.conditions.as_ref());
        for (stream, conditions) in all {
            for condition in conditions {
                let tokens = match &condition.content {
                    Content::Image { path, crf } => self.image_tokens(path, *crf, request)?,
                };
                let level =
                    levels.iter().position(|l| *l == condition.noise_level()).expect("a level of each condition");
                let n = tokens.shape()[1];
                let at = match condition.placement {
                    Placement::First => 0..n,
                    Placement::Appended { .. } => {
                        behind += n;
                        behind - n..behind
                    }
                };
                stream.clean.slice_mut(s![.., at.clone(), ..]).assign(&tokens);
                stream.level.slice_mut(s![.., at]).fill(level as i32);
            }
        }
        Ok(Some(ConditionTokens { levels, streams }))
    }

    /// An image as normalised tokens `[1, h·w, c]` of a pass' size.
    fn image_tokens(&mut self, path: &Path, crf: u8, request: &Request) -> Result<Array3<f32>> {
        let frame = media::read_image(path)?;
        let frame = match crf {
            0 => frame,
            crf => match media::through_h264(&frame, crf, Path::new("ffmpeg"), path) {
                Err(media::Error::FfmpegMissing { reason }) => {
                    let path = path.display();
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
