//! Raw audio: planar samples with a sample rate.

use ndarray::{Array2, Axis, s};
use sha2::{Digest, Sha256};

use super::error::{MediaError, Result};
use super::rate::FrameRate;

/// Float samples `[channels, samples]`, nominally in -1..1, and their sample rate.
#[derive(Clone, Debug, PartialEq)]
pub struct Audio {
    samples: Array2<f32>,
    rate: u32,
}

impl Audio {
    /// Creates audio from samples `[channels, samples]` at `rate` Hz.
    ///
    /// # Errors
    /// Returns an error if there are not one or two channels, or if the rate is 0.
    pub fn new(samples: Array2<f32>, rate: u32) -> Result<Self> {
        let channels = samples.nrows();
        if rate == 0 || !(1..=2).contains(&channels) {
            let reason = "expected [channels, samples] with 1 or 2 channels and a rate above 0".to_string();
            return Err(MediaError::Audio { channels, rate, reason });
        }
        let samples = if samples.is_standard_layout() { samples } else { samples.as_standard_layout().into_owned() };
        Ok(Self { samples, rate })
    }

    /// Number of channels: 1 or 2.
    pub fn channels(&self) -> usize {
        self.samples.nrows()
    }

    /// Number of samples per channel.
    pub fn len(&self) -> usize {
        self.samples.ncols()
    }

    /// Returns whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sample rate in Hz.
    pub fn rate(&self) -> u32 {
        self.rate
    }

    /// The samples `[channels, samples]`.
    pub fn samples(&self) -> &Array2<f32> {
        &self.samples
    }

    /// Returns the SHA-256 (hex) of the samples as little-endian f32, channel by channel.
    pub fn sha256(&self) -> String {
        let mut hash = Sha256::new();
        for &v in &self.samples {
            hash.update(v.to_le_bytes());
        }
        hex::encode(hash.finalize())
    }

    /// Returns `len` samples per channel from second `start`, padded with silence at the end.
    pub fn span(&self, start: f64, len: usize) -> Audio {
        let start = ((start * f64::from(self.rate)).round_ties_even() as usize).min(self.len());
        let kept = len.min(self.len() - start);
        let mut samples = Array2::zeros((self.channels(), len));
        samples.slice_mut(s![.., ..kept]).assign(&self.samples.slice(s![.., start..start + kept]));
        Audio { samples, rate: self.rate }
    }

    /// Trims the audio, or pads it with silence, to the duration of `frames` frames at `fps` frames per second.
    ///
    /// # Errors
    /// Returns an error if `fps` is not a valid frame rate.
    pub fn with_frame_duration(&self, frames: usize, fps: f64) -> Result<Audio> {
        Ok(self.span(0.0, FrameRate::from_f64(fps)?.samples(frames, self.rate)))
    }

    /// Prepends `silence` samples of silence to each channel.
    pub fn delayed(&self, silence: usize) -> Audio {
        let silence = Array2::zeros((self.channels(), silence));
        let samples =
            ndarray::concatenate(Axis(1), &[silence.view(), self.samples.view()]).expect("equal channel counts");
        Audio { samples, rate: self.rate }
    }

    /// Converts between mono and stereo. Mono is copied to every channel; stereo becomes mono by averaging.
    pub fn with_channels(&self, channels: usize) -> Audio {
        let samples = match (self.channels(), channels) {
            (2, 1) => self.samples.mean_axis(Axis(0)).expect("two channels").insert_axis(Axis(0)),
            (1, n) => ndarray::concatenate(Axis(0), &vec![self.samples.view(); n]).expect("equal shapes"),
            _ => self.samples.clone(),
        };
        Audio { samples, rate: self.rate }
    }

    /// Prepares the samples for an encoder: trims them, or pads them with silence, to `len` per channel and clamps them
    /// to -1..1. NaN becomes silence.
    pub(super) fn with_length(&self, len: usize) -> Audio {
        let mut samples = Array2::zeros((self.channels(), len));
        let kept = len.min(self.len());
        let limit = |v: f32| if v.is_nan() { 0.0 } else { v.clamp(-1.0, 1.0) };
        samples.slice_mut(s![.., ..kept]).assign(&self.samples.slice(s![.., ..kept]).mapv(limit));
        Audio { samples, rate: self.rate }
    }

    /// Returns the samples of each channel as a slice.
    pub(super) fn planes(&self) -> Vec<&[f32]> {
        self.samples.as_slice().expect("row-major, as constructed").chunks_exact(self.len().max(1)).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn fitted_audio_is_trimmed_padded_and_clamped() {
        let audio = Audio::new(array![[0.5, 2.0, f32::NAN], [-3.0, 0.0, 0.25]], 8000).unwrap();
        assert_eq!(audio.with_length(2).samples(), &array![[0.5, 1.0], [-1.0, 0.0]]);
        assert_eq!(audio.with_length(4).samples(), &array![[0.5, 1.0, 0.0, 0.0], [-1.0, 0.0, 0.25, 0.0]]);
        assert_eq!(audio.with_length(4).planes()[1], [-1.0, 0.0, 0.25, 0.0]);
    }

    #[test]
    fn audio_is_fitted_to_the_duration_of_the_frames() {
        let audio = Audio::new(array![[1.0, 2.0, 3.0]], 8).unwrap();
        assert_eq!(audio.with_frame_duration(12, 24.0).unwrap().samples(), &array![[1.0, 2.0, 3.0, 0.0]]);
        assert_eq!(audio.with_frame_duration(6, 23.976).unwrap().samples(), &array![[1.0, 2.0]]);
        assert!(audio.with_frame_duration(9, 0.0).is_err());
    }

    #[test]
    fn span_of_audio_is_padded_with_silence_and_mono_becomes_stereo() {
        let audio = Audio::new(array![[1.0, 2.0, 3.0, 4.0]], 2).unwrap();
        assert_eq!(audio.span(1.0, 1).samples(), &array![[3.0]]);
        assert_eq!(audio.span(1.0, 3).samples(), &array![[3.0, 4.0, 0.0]]);
        assert_eq!(audio.span(9.0, 2).samples(), &array![[0.0, 0.0]]);
        let stereo = audio.span(0.0, 2).with_channels(2);
        assert_eq!(stereo.samples(), &array![[1.0, 2.0], [1.0, 2.0]]);
        let other = Audio::new(array![[1.0, 2.0], [3.0, 6.0]], 2).unwrap();
        assert_eq!(other.with_channels(1).samples(), &array![[2.0, 4.0]]);
        assert_eq!(other.with_channels(2), other);
    }

    #[test]
    fn hash_is_independent_of_array_layout() {
        let a = Audio::new(array![[1.0f32, 2.0], [3.0, 4.0]], 8000).unwrap();
        let turned = Audio::new(array![[1.0f32, 3.0], [2.0, 4.0]].reversed_axes(), 8000).unwrap();
        assert_eq!(a.sha256(), turned.sha256());
        let bytes: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(a.sha256(), hex::encode(Sha256::digest(&bytes)));
        assert!(Audio::new(Array2::zeros((3, 4)), 8000).is_err());
        assert!(Audio::new(Array2::zeros((1, 4)), 0).is_err());
    }
}
