//! Latent shapes, packing and token positions: the mapping between a request (pixels, frames, seconds) and tokens.
//!
//! Compression ratios, patch sizes and audio rates come from the model's configuration files. Video latents are `[B, C,
//! F, H, W]`, audio latents `[B, C, L, M]` (time, mel); tokens are `[B, N, features]`.

use ndarray::{Array3, Array4, Array5, ArrayView3, ArrayView4, ArrayView5, Axis, Zip};

use super::SamplingError;

/// Compression ratios of the video VAE and patch sizes of the transformer. Every field is at least 1 (checked when the
/// configuration is read).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VideoGrid {
    /// Pixels per latent, along height and width.
    pub(crate) spatial_compression: usize,
    /// Video frames per latent frame, except the first latent frame, which represents one video frame.
    pub(crate) temporal_compression: usize,
    /// Latents per token, along height and width.
    pub(crate) patch_size: usize,
    /// Latent frames per token.
    pub(crate) patch_size_t: usize,
}

/// Shape of video latents, `[B, C, F, H, W]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VideoShape {
    pub(crate) batch: usize,
    pub(crate) channels: usize,
    pub(crate) frames: usize,
    pub(crate) height: usize,
    pub(crate) width: usize,
}

impl VideoGrid {
    /// Returns the latent shape of a video of `width` x `height` pixels and `num_frames` frames.
    ///
    /// # Errors
    /// Returns [`SamplingError::Size`] if a size is not divisible by the compression ratio and patch size.
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

    /// Returns the number of tokens of one video.
    pub(crate) fn tokens(&self, shape: &VideoShape) -> usize {
        (shape.frames / self.patch_size_t) * (shape.height / self.patch_size) * (shape.width / self.patch_size)
    }

    /// Returns the number of features of a token.
    pub(crate) fn features(&self, shape: &VideoShape) -> usize {
        shape.channels * self.patch_size_t * self.patch_size * self.patch_size
    }

    /// Packs `[B, C, F, H, W]` into tokens `[B, N, C * pt * p * p]`, ordered by frame, row and column. The features of
    /// a token are ordered by channel, frame, row and column.
    ///
    /// # Errors
    /// Returns [`SamplingError::Shape`] if the latents are not divisible into patches.
    pub(crate) fn pack(&self, latents: ArrayView5<f32>) -> Result<Array3<f32>, SamplingError> {
        let (b, c, f, h, w) = latents.dim();
        let shape = VideoShape { batch: b, channels: c, frames: f, height: h, width: w };
        let (p, pt) = (self.patch_size, self.patch_size_t);
        let fail = || {
            wrong(
                "video latents",
                latents.shape(),
                format!("[B, C, F, H, W] with F, H and W divisible by {pt}, {p} and {p}"),
            )
        };
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

    /// Unpacks tokens to latents, the inverse of [`Self::pack`].
    ///
    /// # Errors
    /// Returns [`SamplingError::Shape`] if the tokens do not match `shape`.
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

    /// Returns token bounds `[B, 3, N, 2]` (axis: time in seconds, height and width in pixels; last dimension: start,
    /// end).
    ///
    /// `scale_factors` and `causal_offset` are the transformer's `vae_scale_factors` and `causal_offset`. Because the
    /// first latent frame covers a single frame, times are shifted by `causal_offset` minus the temporal scale factor
    /// and clamped at 0. Divisions are in single precision, in the order of the reference.
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

/// Audio rates and compression ratios of a model. Every field is at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AudioGrid {
    /// Sampling rate in Hz of the audio from which the mel spectrogram is computed.
    pub(crate) sampling_rate: usize,
    /// Samples between consecutive mel frames.
    pub(crate) hop_length: usize,
    /// Mel frames per latent.
    pub(crate) temporal_compression: usize,
    /// Mel bins of the spectrogram.
    pub(crate) mel_bins: usize,
    /// Mel bins per latent bin.
    pub(crate) mel_compression: usize,
}

/// Shape of audio latents, `[B, C, L, M]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AudioShape {
    pub(crate) batch: usize,
    pub(crate) channels: usize,
    /// Number of latents along the time axis; each is one token.
    pub(crate) length: usize,
    /// Latent mel bins.
    pub(crate) mel_bins: usize,
}

impl AudioGrid {
    /// Returns the number of latents per second.
    pub(crate) fn per_second(&self) -> f64 {
        self.sampling_rate as f64 / self.hop_length as f64 / self.temporal_compression as f64
    }

    /// Returns the number of latents that encode `seconds` seconds of audio. The spectrogram has a frame at the start
    /// and one per [`AudioGrid::hop_length`] samples; the last latent may cover fewer frames.
    pub(crate) fn length(&self, seconds: f64) -> usize {
        // A duration that was computed from a sample count may be slightly too long.
        let samples = (seconds * self.sampling_rate as f64 - 1e-3).ceil().max(0.0) as usize;
        (1 + samples / self.hop_length).div_ceil(self.temporal_compression)
    }

    /// Returns the shape of audio latents that match `num_frames` frames in duration: the nearest latent count, ties to
    /// even (Python's `round`).
    ///
    /// # Errors
    /// Returns [`SamplingError::NotPositive`] for an invalid frame rate and [`SamplingError::NoAudio`] if the latent
    /// count rounds to 0.
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

    /// Returns token bounds `[B, 1, L, 2]` in seconds. `scale_factor`, `patch_size_t` and `causal_offset` are the
    /// transformer's `audio_scale_factor`, `audio_patch_size_t` and `causal_offset`; the rates in `self` must be its
    /// `audio_sampling_rate` and `audio_hop_length`.
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

/// Packs `[B, C, L, M]` into tokens `[B, L, C * M]`.
pub(crate) fn pack_audio(latents: ArrayView4<f32>) -> Array3<f32> {
    let (b, c, l, m) = latents.dim();
    Array3::from_shape_fn((b, l, c * m), |(b, l, f)| latents[[b, f / m, l, f % m]])
}

/// Unpacks tokens to latents, the inverse of [`pack_audio`].
///
/// # Errors
/// Returns [`SamplingError::Shape`] if the tokens do not match `shape`.
pub(crate) fn unpack_audio(tokens: ArrayView3<f32>, shape: &AudioShape) -> Result<Array4<f32>, SamplingError> {
    let AudioShape { batch, channels, length, mel_bins } = *shape;
    if tokens.dim() != (batch, length, channels * mel_bins) {
        return Err(wrong("audio tokens", tokens.shape(), format!("{:?}", [batch, length, channels * mel_bins])));
    }
    Ok(Array4::from_shape_fn((batch, channels, length, mel_bins), |(b, c, l, m)| tokens[[b, l, c * mel_bins + m]]))
}

/// Transposes `[B, a, b]` to `[B, b, a]`. Used to pack patches of size 1, because ndarray transposes three dimensions
/// faster than eight.
fn turned(values: ArrayView3<f32>) -> Array3<f32> {
    values.permuted_axes([0, 2, 1]).as_standard_layout().into_owned()
}

/// Mean and standard deviation of each latent channel. The channel axis is axis 1 of video latents `[B, C, F, H, W]`
/// and the feature axis of audio tokens `[B, L, C * M]`.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentStatistics {
    /// Mean of each channel.
    pub mean: Vec<f32>,
    /// Standard deviation of each channel.
    pub std: Vec<f32>,
    /// The VAE's `scaling_factor`; 1 for audio.
    pub(crate) scaling_factor: f32,
}

impl LatentStatistics {
    /// Converts VAE latents into the space of the transformer: `(x - mean) * scaling_factor / std` along `axis`.
    ///
    /// # Errors
    /// Returns [`SamplingError::Shape`] if the length of the axis differs from the number of channels.
    pub fn normalize<D>(&self, latents: &mut ndarray::Array<f32, D>, axis: usize) -> Result<(), SamplingError>
    where
        D: ndarray::Dimension + ndarray::RemoveAxis,
    {
        self.apply(latents, axis, |x, mean, std, factor| (x - mean) * factor / std)
    }

    /// Converts latents to the space of the VAE, the inverse of [`Self::normalize`]: `x * std / scaling_factor + mean`.
    ///
    /// # Errors
    /// Returns [`SamplingError::Shape`] if the length of the axis differs from the number of channels.
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
            let want =
                format!("a shape that matches {count} means and {} standard deviations on axis {axis}", self.std.len());
            return Err(wrong("latents to normalize", latents.shape(), want));
        }
        Zip::from(latents.axis_iter_mut(Axis(axis)))
            .and(&self.mean[..])
            .and(&self.std[..])
            .for_each(|mut channel, &mean, &std| channel.mapv_inplace(|x| value(x, mean, std, self.scaling_factor)));
        Ok(())
    }
}

/// Returns an error with the two nearest valid values if `value` is not a positive multiple of `multiple`. `what`: name
/// of the value in the error.
pub(crate) fn check_multiple(what: &'static str, value: usize, multiple: usize) -> Result<(), SamplingError> {
    if value > 0 && value.is_multiple_of(multiple) {
        return Ok(());
    }
    let below = (value / multiple).max(1) * multiple;
    Err(SamplingError::Size { what, value, rule: format!("a multiple of {multiple}"), below, above: below + multiple })
}

/// Returns an error with the two nearest valid values if `num_frames` is not `temporal_compression * k + 1`.
pub(crate) fn check_frames(num_frames: usize, temporal_compression: usize) -> Result<(), SamplingError> {
    if num_frames % temporal_compression == 1 % temporal_compression && num_frames > 0 {
        return Ok(());
    }
    let below = num_frames.saturating_sub(1) / temporal_compression * temporal_compression + 1;
    let above = below + temporal_compression;
    let rule = format!("of the form {temporal_compression}k + 1");
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
