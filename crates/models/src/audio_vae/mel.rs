//! Converts audio samples to the log-mel spectrogram that the encoder takes.

use std::f64::consts::PI;

use ndarray::{Array4, ArrayView1, ArrayView2, Axis};
use rustfft::FftPlanner;
use rustfft::num_complex::Complex;

use super::config::AudioVaeConfig;
use super::resample::resample;

/// Length of the window and of the Fourier transform, in samples.
const WINDOW: usize = 1024;
/// Lower bound of the magnitudes, before the logarithm.
const FLOOR: f64 = 1e-5;
/// Minimum number of samples, at the model's rate, for which reflection can pad half a window.
const MIN_SAMPLES: usize = WINDOW / 2 + 1;

/// Computes the log-mel spectrogram `[1, channels, 1 + n' / hop, bins]` of samples `[channels, n]` at `rate` Hz; `n'`
/// is the number of samples after resampling to the model's rate. Values are natural logarithms of the short-time
/// Fourier magnitudes in mel bands. Frame `i` is centred on sample `i · hop`; the audio is reflected at both ends.
/// Returns `None` if the audio has at most half a window of samples.
///
/// Equals torchaudio's `MelSpectrogram` (Slaney scale and norm, power 1), but is computed in f64.
pub fn log_mel(c: &AudioVaeConfig, samples: ArrayView2<f32>, rate: u32) -> Option<Array4<f32>> {
    let own = resample(samples, rate, u32::try_from(c.sample_rate).ok()?);
    if own.ncols() < MIN_SAMPLES {
        return None;
    }
    let bands = bands(c.bins(), c.sample_rate as f64);
    let frames = 1 + own.ncols() / c.mel_hop_length;
    let mut mel = Array4::zeros((1, own.nrows(), frames, c.bins()));
    let fft = FftPlanner::new().plan_fft_forward(WINDOW);
    let hann: Vec<f64> = (0..WINDOW).map(|i| 0.5 - 0.5 * (2.0 * PI * i as f64 / WINDOW as f64).cos()).collect();
    let mut spectrum = vec![Complex::default(); WINDOW];
    for (channel, mut mel) in own.rows().into_iter().zip(mel.index_axis_mut(Axis(0), 0).outer_iter_mut()) {
        for (frame, mut mel) in mel.outer_iter_mut().enumerate() {
            let start = (frame * c.mel_hop_length) as isize - (WINDOW / 2) as isize;
            for (i, (value, hann)) in spectrum.iter_mut().zip(&hann).enumerate() {
                *value = (hann * reflected(channel, start + i as isize)).into();
            }
            fft.process(&mut spectrum);
            for (mel, band) in mel.iter_mut().zip(&bands) {
                let weighted = band.weights.iter().zip(&spectrum[band.first..]);
                *mel = weighted.map(|(weight, z)| weight * z.norm()).sum::<f64>().max(FLOOR).ln() as f32;
            }
        }
    }
    Some(mel)
}

/// Returns the smallest number of samples, at the model's rate, for which [`log_mel`] returns at least `frames` frames.
pub fn samples_for_frames(c: &AudioVaeConfig, frames: usize) -> usize {
    (c.mel_hop_length * frames.saturating_sub(1)).max(MIN_SAMPLES)
}

/// Returns the sample at index `at`, which may be negative or beyond the end: the audio is reflected at both ends.
fn reflected(samples: ArrayView1<f32>, at: isize) -> f64 {
    let last = samples.len() as isize - 1;
    let at = at.abs();
    f64::from(samples[if at > last { 2 * last - at } else { at } as usize])
}

/// A mel band: weights of consecutive Fourier bins, starting at `first`.
struct Band {
    first: usize,
    weights: Vec<f64>,
}

/// Returns triangular bands spaced evenly on the mel scale from 0 Hz to `rate / 2`, all with the same area.
fn bands(count: usize, rate: f64) -> Vec<Band> {
    let highest = mel(rate / 2.0);
    let corners: Vec<f64> = (0..count + 2).map(|i| hertz(highest * i as f64 / (count + 1) as f64)).collect();
    let bins: Vec<f64> = (0..=WINDOW / 2).map(|i| i as f64 * rate / WINDOW as f64).collect();
    let band = |corner: &[f64]| {
        let (low, centre, high) = (corner[0], corner[1], corner[2]);
        let weight =
            |f: f64| ((f - low) / (centre - low)).min((high - f) / (high - centre)).max(0.0) * 2.0 / (high - low);
        let first = bins.partition_point(|f| *f <= low);
        let end = bins.partition_point(|f| *f < high).max(first);
        Band { first, weights: bins[first..end].iter().map(|f| weight(*f)).collect() }
    };
    corners.windows(3).map(band).collect()
}

/// Converts a frequency to Slaney's mel scale, which is linear below 1 kHz and logarithmic above.
fn mel(hertz: f64) -> f64 {
    if hertz < 1000.0 { 3.0 * hertz / 200.0 } else { 15.0 + 27.0 * (hertz / 1000.0).ln() / 6.4f64.ln() }
}

fn hertz(mel: f64) -> f64 {
    if mel < 15.0 { 200.0 * mel / 3.0 } else { 1000.0 * ((mel - 15.0) * 6.4f64.ln() / 27.0).exp() }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, s};

    use super::*;

    /// Returns two channels of 4000 samples at 16 kHz: a tone of constant pitch and a tone of rising pitch.
    fn sound() -> Array2<f32> {
        Array2::from_shape_fn((2, 4000), |(channel, i)| {
            let t = i as f64;
            let (amplitude, hertz) = if channel == 0 { (0.5, 440.0) } else { (0.25, 200.0 + t / 8.0) };
            (amplitude * (2.0 * PI * hertz * t / 16000.0).sin()) as f32
        })
    }

    /// The reference implementation computed the expected values in f32.
    #[test]
    fn log_mel_matches_the_reference() {
        let c = AudioVaeConfig::default();
        let mel = log_mel(&c, sound().view(), 16000).expect("long enough");
        assert_eq!(mel.dim(), (1, 2, 26, 64));
        let near = |got: ArrayView1<f32>, want: &[f32]| {
            got.iter().zip(want).all(|(got, want)| (got - want).abs() <= 1e-5 * want.abs().max(1.0))
        };
        let [a, b, c] = [mel.slice(s![0, 0, 0, ..6]), mel.slice(s![0, 0, 10, 10..16]), mel.slice(s![0, 1, 25, ..4])];
        assert!(near(a, &[-0.982099, -0.947004, -0.886063, -0.793394, -0.660275, -0.466700]), "{a}");
        assert!(near(b, &[-3.5017, -5.602083, -6.709138, -7.496579, -8.111759, -8.617478]), "{b}");
        assert!(near(c, &[-2.822019, -2.817438, -2.809706, -2.798843]), "{c}");
        let mean = mel.mean().expect("values");
        assert!((mean + 8.26629).abs() < 2e-4, "{mean}");
    }

    #[test]
    fn audio_of_at_most_half_a_window_returns_none() {
        let c = AudioVaeConfig::default();
        let of = |n: usize| log_mel(&c, Array2::zeros((1, n)).view(), 16000).map(|mel| mel.dim());
        assert_eq!([of(MIN_SAMPLES - 1), of(MIN_SAMPLES)], [None, Some((1, 1, 4, 64))]);
        let silence = log_mel(&c, Array2::zeros((1, 1600)).view(), 16000).expect("long enough");
        assert!(silence.iter().all(|v| *v == (FLOOR as f32).ln()));
    }
}
