//! Converts latents to tokens of the denoising loop, and tokens to latents.

use ndarray::{Array3, Array4, Array5};

use crate::av::Av;
use crate::pipeline::error::Result;
use crate::pipeline::model::OpenModel;
use crate::request::{ModelSizes, Shapes};
use crate::sampling::latents::{AudioShape, VideoShape, pack_audio, unpack_audio};

/// Packs latents into tokens of the denoising loop.
///
/// # Errors
/// Returns an error if a shape does not match the model's token grid. The shapes of a valid request always do.
pub fn pack(sizes: &ModelSizes, video: &Array5<f32>, audio: &Array4<f32>) -> Result<Av<Array3<f32>>> {
    Ok(Av { video: sizes.video_grid.pack(video.view())?, audio: pack_audio(audio.view()) })
}

/// Unpacks the tokens of `batch` videos to un-normalised latents: video `[b, C, F, H, W]` and audio `[b, C, L, M]`.
pub(crate) fn unpack(
    model: &OpenModel,
    shapes: &Shapes,
    batch: usize,
    Av { video, mut audio }: Av<Array3<f32>>,
) -> Result<(Array5<f32>, Array4<f32>)> {
    let mut video = model.sizes.video_grid.unpack(video.view(), &VideoShape { batch, ..shapes.video })?;
    model.statistics.video.denormalize(&mut video, 1)?;
    model.statistics.audio.denormalize(&mut audio, 2)?;
    Ok((video, unpack_audio(audio.view(), &AudioShape { batch, ..shapes.audio })?))
}
