//! Audio metrics: relative L2 error, cosine similarity and log-spectral correlation.

use std::f64::consts::PI;

use ndarray::{ArrayView1, ArrayView2};
use rustfft::{FftPlanner, num_complex::Complex};
use serde::Serialize;

use super::tensors;

/// Scores of audio `a` against a reference `b` of the same shape `[channels, samples]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct AudioScores {
    /// Relative L2 error `|a - b| / |b|` over all samples.
    pub(crate) relative_l2: f64,
    /// Cosine similarity `a·b / (|a| |b|)` over all samples.
    pub(crate) cosine: f64,
    /// Pearson correlation of the log spectrograms: 1 if the audio differs only in loudness. Unlike the other scores,
    /// it ignores inaudible phase shifts.
    pub(crate) spectral: f64,
}

/// Window length of the spectrogram, in samples.
const WINDOW: usize = 1024;
/// Hop length of the spectrogram, in samples.
const HOP: usize = 256;
/// Lower bound of the spectral magnitudes, which keeps their logarithms finite.
const FLOOR: f64 = 1e-5;

/// Scores audio `a` against a reference `b` of the same shape `[channels, samples]`.
pub(crate) fn audio(a: ArrayView2<f32>, b: ArrayView2<f32>) -> AudioScores {
    let s = tensors(a.iter().copied(), b.iter().copied());
    let spectra =
        |x: ArrayView2<f32>| -> Vec<f64> { x.outer_iter().flat_map(|channel| log_spectra(channel)).collect() };
    AudioScores { relative_l2: s.relative_l2, cosine: s.cosine, spectral: correlation(&spectra(a), &spectra(b)) }
}

/// Returns the natural logarithms of the magnitudes of a short-time Fourier transform with a Hann window: the spectra
/// of all windows, concatenated. The last window is zero-padded.
fn log_spectra(samples: ArrayView1<f32>) -> Vec<f64> {
    let windows = samples.len().saturating_sub(WINDOW).div_ceil(HOP) + 1;
    let hann = |i: usize| 0.5 - 0.5 * (2.0 * PI * i as f64 / WINDOW as f64).cos();
    let fft = FftPlanner::new().plan_fft_forward(WINDOW);
    let one = |w: usize| {
        let at = |i: usize| samples.get(w * HOP + i).map_or(0.0, |v| f64::from(*v));
        let mut spectrum: Vec<Complex<f64>> = (0..WINDOW).map(|i| (at(i) * hann(i)).into()).collect();
        fft.process(&mut spectrum);
        spectrum.into_iter().take(WINDOW / 2 + 1).map(|z| z.norm().max(FLOOR).ln())
    };
    (0..windows).flat_map(one).collect()
}

/// Pearson correlation; 1 if both inputs are constant, 0 if only one is.
fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
    let (ma, mb) = (mean(a), mean(b));
    let (mut aa, mut bb, mut ab) = (0f64, 0f64, 0f64);
    for (a, b) in a.iter().zip(b).map(|(a, b)| (a - ma, b - mb)) {
        (aa, bb, ab) = (aa + a * a, bb + b * b, ab + a * b);
    }
    match (aa == 0.0, bb == 0.0) {
        (true, true) => 1.0,
        (false, false) => ab / (aa * bb).sqrt(),
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::*;

    fn tone(cycles: f64, phase: f64, loudness: f64) -> Array2<f32> {
        let at = |i: usize| loudness * (2.0 * PI * cycles * i as f64 / WINDOW as f64 + phase).sin();
        Array2::from_shape_fn((1, 2048), |(_, i)| at(i) as f32)
    }

    #[test]
    fn spectrum_of_a_tone_peaks_at_its_frequency() {
        let s = log_spectra(tone(64.0, 0.3, 1.0).row(0));
        let (windows, bins) = ((2048 - WINDOW) / HOP + 1, WINDOW / 2 + 1);
        assert_eq!(s.len(), windows * bins);
        // A Hann window sums to half its length; a sine of amplitude 1 has half of that in its bin.
        assert!((s[64] - 256f64.ln()).abs() < 1e-6 && (s[63] - 128f64.ln()).abs() < 1e-6);
        assert!(s[70] < -8.0, "silence elsewhere: {}", s[70]);
    }

    #[test]
    fn spectral_score_ignores_phase() {
        let (a, b) = (tone(64.0, 0.0, 1.0), tone(64.0, PI / 2.0, 1.0));
        let s = audio(a.view(), b.view());
        assert!(s.cosine.abs() < 1e-6 && (s.relative_l2 - 2f64.sqrt()).abs() < 1e-6);
        assert!(s.spectral > 0.99, "{s:?}");
        let other = audio(a.view(), tone(200.0, 0.0, 1.0).view());
        assert!(other.spectral < 0.5, "{other:?}");
        let same = audio(a.view(), a.view());
        assert!(same.relative_l2 == 0.0 && (same.spectral - 1.0).abs() < 1e-12);
        let louder = audio(tone(64.0, 0.0, 0.5).view(), a.view());
        assert!((louder.relative_l2 - 0.5).abs() < 1e-6 && (louder.cosine - 1.0).abs() < 1e-9);
    }

    #[test]
    fn silence_correlates_only_with_silence() {
        let silent = Array2::<f32>::zeros((2, 100));
        assert_eq!(audio(silent.view(), silent.view()), AudioScores { relative_l2: 0.0, cosine: 1.0, spectral: 1.0 });
        assert_eq!(correlation(&[1.0, 2.0], &[5.0, 5.0]), 0.0);
        assert!((correlation(&[1.0, 2.0, 3.0], &[1.0, 3.0, 2.0]) - 0.5).abs() < 1e-12);
    }
}
