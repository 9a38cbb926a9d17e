//! Latent shapes, packing and positions: what lies between a request (pixels, frames, seconds) and tokens.
//!
//! Nothing here assumes a model: compression ratios, patch sizes and audio rates come from the model's own files.
//! Video latents are `[B, C, F, H, W]`, audio latents `[B, C, L, M]` (time, mel); tokens are `[B, N, features]`.

use ndarray::{Array3, Array4, Array5, ArrayView3, ArrayView4, ArrayView5, Axis, Zip};

use super::SamplingError;

/// The video VAE's compression and the transformer's patches; every field is at least 1 (configs are checked when read).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VideoGrid {
    /// Pixels a latent cell covers in height and width.
    pub(crate) spatial_compression: usize,
    /// Frames a latent frame covers (but the first, which covers one).
    pub(crate) temporal_compression: usize,
    /// Latent cells a token covers in height and width.
    pub(crate) patch_size: usize,
    /// Latent frames a token covers.
    pub(crate) patch_size_t: usize,
}

/// Video latents `[B, C, F, H, W]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VideoShape {
    /// Videos of the batch.
    pub(crate) batch: usize,
    /// Latent channels.
    pub(crate) channels: usize,
    /// Latent frames.
    pub(crate) frames: usize,
    /// Latent rows.
    pub(crate) height: usize,
    /// Latent columns.
    pub(crate) width: usize,
}

impl VideoGrid {
    /// The latents of a request of `width` x `height` pixels and `num_frames` frames.
    ///
    /// # Errors
    /// [`SamplingError::Size`] for a size that the ratios or the patches do not divide.
    pub(crate) fn latents(
        &self,
        batch: usize,
        channels: usize,
        width: usize,
        height: usize,
        num_frames: usize,
    ) -> Result<VideoShape, SamplingError> {
        let multiple = self.spatial_compression * self.patch_size;
        check_multiple("width", width, multiple)?;
        check_multiple("height", height, multiple)?;
        check_frames(num_frames, self.temporal_compression)?;
        let frames = (num_frames - 1) / self.temporal_compression + 1;
        check_multiple("latent frame count", frames, self.patch_size_t)?;
        let (height, width) = (height / self.spatial_compression, width / self.spatial_compression);
        Ok(VideoShape { batch, channels, frames, height, width })
    }

    /// Tokens of one video.
    pub(crate) fn tokens(&self, shape: &VideoShape) -> usize {
        (shape.frames / self.patch_size_t) * (shape.height / self.patch_size) * (shape.width / self.patch_size)
    }

    /// Values of one token.
    pub(crate) fn features(&self, shape: &VideoShape) -> usize {
        shape.channels * self.patch_size_t * self.patch_size * self.patch_size
    }

    /// `[B, C, F, H, W]` to tokens `[B, N, C * pt * p * p]`: frames, rows, columns in turn; a token's features are
    /// channel, frame, row, column.
    ///
    /// # Errors
    /// [`SamplingError::Shape`] where the patches do not divide the latents.
    pub(crate) fn pack(&self, latents: ArrayView5<f32>) -> Result<Array3<f32>, SamplingError> {
        let (b, c, f, h, w) = latents.dim();
        let shape = VideoShape { batch: b, channels: c, frames: f, height: h, width: w };
        let (p, pt) = (self.patch_size, self.patch_size_t);
        let fail = || wrong("video latents", latents.shape(), format!("[B, C, F, H, W] divided by {pt}, {p}, {p}"));
        if (p, pt) == (1, 1) {
            let channels = latents.as_standard_layout().into_shape_with_order((b, c, f * h * w)).map_err(|_| fail())?;
            return Ok(turned(channels.view()));
        }
        let split = latents
            .as_standard_layout()
            .into_shape_with_order(vec![b, c, f / pt, pt, h / p, p, w / p, p])
            .map_err(|_| fail())?;
        let tokens = split.permuted_axes(vec![0, 2, 4, 6, 1, 3, 5, 7]).as_standard_layout().into_owned();
        tokens
            .into_shape_with_order((b, self.tokens(&shape), self.features(&shape)))
            .map_err(|_| wrong("video latents", latents.shape(), "[B, C, F, H, W]".into()))
    }

    /// The inverse of [`Self::pack`].
    ///
    /// # Errors
    /// [`SamplingError::Shape`] when the tokens are not those of `shape`.
    pub(crate) fn unpack(&self, tokens: ArrayView3<f32>, shape: &VideoShape) -> Result<Array5<f32>, SamplingError> {
        let want = (shape.batch, self.tokens(shape), self.features(shape));
        let fail = || wrong("video tokens", tokens.shape(), format!("{want:?}"));
        if tokens.dim() != want {
            return Err(fail());
        }
        let VideoShape { batch: b, channels: c, frames: f, height: h, width: w } = *shape;
        let (p, pt) = (self.patch_size, self.patch_size_t);
        if (p, pt) == (1, 1) {
            return turned(tokens).into_shape_with_order((b, c, f, h, w)).map_err(|_| fail());
        }
        let split = tokens
            .as_standard_layout()
            .into_shape_with_order(vec![b, f / pt, h / p, w / p, c, pt, p, p])
            .map_err(|_| fail())?;
        let latents = split.permuted_axes(vec![0, 4, 1, 5, 2, 6, 3, 7]).as_standard_layout().into_owned();
        latents.into_shape_with_order((b, c, f, h, w)).map_err(|_| fail())
    }

    /// Token bounds `[B, 3, N, 2]` (axis: time in seconds, height and width in pixels; last: start, end).
    ///
    /// `scale_factors` are the transformer's `vae_scale_factors`, `causal_offset` its own; the first latent frame
    /// covers one frame only, so times are moved back by the rest of a latent frame and held at zero. Divisions happen
    /// in single precision, in the reference's order.
    pub(crate) fn coords(
        &self,
        shape: &VideoShape,
        scale_factors: [usize; 3],
        causal_offset: i64,
        fps: f64,
    ) -> Array4<f32> {
        let bounds = |patch: usize, size: usize| (0..size).step_by(patch).map(move |i| [i as f32, (i + patch) as f32]);
        let [ft, fh, fw] = scale_factors.map(|f| f as f32);
        let seconds = |x: f32| (x * ft + causal_offset as f32 - ft).max(0.0) / fps as f32;
        let frames: Vec<_> = bounds(self.patch_size_t, shape.frames).map(|b| b.map(seconds)).collect();
        let rows: Vec<_> = bounds(self.patch_size, shape.height).map(|b| b.map(|x| x * fh)).collect();
        let columns: Vec<_> = bounds(self.patch_size, shape.width).map(|b| b.map(|x| x * fw)).collect();
        let tokens = frames.len() * rows.len() * columns.len();
        Array4::from_shape_fn((shape.batch, 3, tokens, 2), |(_, axis, token, side)| match axis {
            0 => frames[token / (rows.len() * columns.len())][side],
            1 => rows[token / columns.len() % rows.len()][side],
            _ => columns[token % columns.len()][side],
        })
    }
}

/// The audio side of a model: rates, and what one latent covers; every field is at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AudioGrid {
    /// Samples a second, of the audio the mel spectrogram is made from.
    pub(crate) sampling_rate: usize,
    /// Samples between mel frames.
    pub(crate) hop_length: usize,
    /// Mel frames a latent covers.
    pub(crate) temporal_compression: usize,
    /// Mel bins of the spectrogram.
    pub(crate) mel_bins: usize,
    /// Mel bins a latent bin covers.
    pub(crate) mel_compression: usize,
}

/// Audio latents `[B, C, L, M]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AudioShape {
    /// Videos of the batch.
    pub(crate) batch: usize,
    /// Latent channels.
    pub(crate) channels: usize,
    /// Latents in time; tokens.
    pub(crate) length: usize,
    /// Latent mel bins.
    pub(crate) mel_bins: usize,
}

impl AudioGrid {
    /// Latents a second.
    pub(crate) fn per_second(&self) -> f64 {
        self.sampling_rate as f64 / self.hop_length as f64 / self.temporal_compression as f64
    }

    /// The latents that last as long as `num_frames` frames: the nearest count, ties to even (Python's `round`).
    ///
    /// # Errors
    /// [`SamplingError::NotPositive`] for the frame rate, [`SamplingError::NoAudio`] when the count is zero.
    pub(crate) fn latents(
        &self,
        batch: usize,
        channels: usize,
        num_frames: usize,
        frame_rate: f64,
    ) -> Result<AudioShape, SamplingError> {
        check_positive("frame_rate", frame_rate)?;
        let length = (num_frames as f64 / frame_rate * self.per_second()).round_ties_even() as usize;
        if length == 0 {
            return Err(SamplingError::NoAudio { num_frames, frame_rate });
        }
        Ok(AudioShape { batch, channels, length, mel_bins: self.mel_bins / self.mel_compression })
    }

    /// Token bounds in seconds `[B, 1, L, 2]`. `scale_factor`, `patch_size_t` and `causal_offset` are the
    /// transformer's `audio_scale_factor`, `audio_patch_size_t` and `causal_offset`, the rates its `audio_sampling_rate`
    /// and `audio_hop_length`.
    pub(crate) fn coords(
        &self,
        batch: usize,
        length: usize,
        scale_factor: usize,
        patch_size_t: usize,
        causal_offset: i64,
    ) -> Array4<f32> {
        let scale = scale_factor as f32;
        let seconds = |latent: usize| {
            let mel = (latent as f32 * scale + causal_offset as f32 - scale).max(0.0);
            mel * self.hop_length as f32 / self.sampling_rate as f32
        };
        Array4::from_shape_fn((batch, 1, length.div_ceil(patch_size_t), 2), |(_, _, token, side)| {
            seconds((token + side) * patch_size_t)
        })
    }
}

/// `[B, C, L, M]` to tokens `[B, L, C * M]`.
pub(crate) fn pack_audio(latents: ArrayView4<f32>) -> Array3<f32> {
    let (b, c, l, m) = latents.dim();
    Array3::from_shape_fn((b, l, c * m), |(b, l, f)| latents[[b, f / m, l, f % m]])
}

/// The inverse of [`pack_audio`].
///
/// # Errors
/// [`SamplingError::Shape`] when the tokens are not those of `shape`.
pub(crate) fn unpack_audio(tokens: ArrayView3<f32>, shape: &AudioShape) -> Result<Array4<f32>, SamplingError> {
    let AudioShape { batch, channels, length, mel_bins } = *shape;
    if tokens.dim() != (batch, length, channels * mel_bins) {
        return Err(wrong("audio tokens", tokens.shape(), format!("{:?}", [batch, length, channels * mel_bins])));
    }
    Ok(Array4::from_shape_fn((batch, channels, length, mel_bins), |(b, c, l, m)| tokens[[b, l, c * mel_bins + m]]))
}

/// `[B, a, b]` to `[B, b, a]`: what patches of one latent cell are packed by; ndarray turns three dimensions faster than eight.
fn turned(values: ArrayView3<f32>) -> Array3<f32> {
    values.permuted_axes([0, 2, 1]).as_standard_layout().into_owned()
}

/// Mean and deviation of each channel: video latents have them on axis 1 of `[B, C, F, H, W]`, audio on the features
/// of its tokens `[B, L, C * M]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// Means, one a channel.
    pub mean: Vec<f32>,
    /// Standard deviations, one a channel.
    pub std: Vec<f32>,
    /// The VAE's `scaling_factor`; 1 for audio.
    pub(crate) scaling_factor: f32,
}

impl Statistics {
    /// Latents of the VAE to the space the transformer works in: `(x - mean) * scaling_factor / std`, along `axis`.
    ///
    /// # Errors
    /// [`SamplingError::Shape`] when the axis has another length than the statistics.
    pub fn normalize<D>(&self, latents: &mut ndarray::Array<f32, D>, axis: usize) -> Result<(), SamplingError>
    where
        D: ndarray::Dimension + ndarray::RemoveAxis,
    {
        self.apply(latents, axis, |x, mean, std, factor| (x - mean) * factor / std)
    }

    /// The inverse of [`Self::normalize`]: `x * std / scaling_factor + mean`.
    ///
    /// # Errors
    /// [`SamplingError::Shape`] when the axis has another length than the statistics.
    pub(crate) fn denormalize<D>(&self, latents: &mut ndarray::Array<f32, D>, axis: usize) -> Result<(), SamplingError>
    where
        D: ndarray::Dimension + ndarray::RemoveAxis,
    {
        self.apply(latents, axis, |x, mean, std, factor| x * std / factor + mean)
    }

    fn apply<D>(
        &self,
        latents: &mut ndarray::Array<f32, D>,
        axis: usize,
        value: impl Fn(f32, f32, f32, f32) -> f32,
    ) -> Result<(), SamplingError>
    where
        D: ndarray::Dimension + ndarray::RemoveAxis,
    {
        let count = self.mean.len();
        if latents.shape().get(axis) != Some(&count) || self.std.len() != count {
            let want = format!("{count} means and {} deviations on axis {axis}", self.std.len());
            return Err(wrong("latents to normalise", latents.shape(), want));
        }
        Zip::from(latents.axis_iter_mut(Axis(axis)))
            .and(&self.mean[..])
            .and(&self.std[..])
            .for_each(|mut channel, &mean, &std| channel.mapv_inplace(|x| value(x, mean, std, self.scaling_factor)));
        Ok(())
    }
}

/// Refuses a width or height (`what`) that is not a positive multiple, naming the two nearest that are.
pub(crate) fn check_multiple(what: &'static str, value: usize, multiple: usize) -> Result<(), SamplingError> {
    if value > 0 && value.is_multiple_of(multiple) {
        return Ok(());
    }
    let below = (value / multiple).max(1) * multiple;
    Err(SamplingError::Size { what, value, rule: format!("a multiple of {multiple}"), below, above: below + multiple })
}

/// Refuses a frame count that is not `temporal_compression * k + 1`, naming the two nearest that are.
pub(crate) fn check_frames(num_frames: usize, temporal_compression: usize) -> Result<(), SamplingError> {
    if num_frames % temporal_compression == 1 % temporal_compression && num_frames > 0 {
        return Ok(());
    }
    let below = num_frames.saturating_sub(1) / temporal_compression * temporal_compression + 1;
    let above = below + temporal_compression;
    let rule = format!("{temporal_compression}k + 1");
    Err(SamplingError::Size { what: "num_frames", value: num_frames, rule, below, above })
}

fn check_positive(what: &'static str, value: f64) -> Result<(), SamplingError> {
    if value > 0.0 && value.is_finite() { Ok(()) } else { Err(SamplingError::NotPositive { what, value }) }
}

fn wrong(what: &'static str, got: &[usize], want: String) -> SamplingError {
    SamplingError::Shape { what, got: got.to_vec(), want }
}

#[cfg(test)]
mod tests;
