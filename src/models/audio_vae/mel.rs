//! Samples to the log-mel spectrogram that the encoder reads.

use std::f64::consts::PI;

use ndarray::{Array4, ArrayView1, ArrayView2, Axis};
use rustfft::FftPlanner;
use rustfft::num_complex::Complex;

use super::config::AudioVaeConfig;
use super::resample::resample;

/// Samples of a window, and of its transform.
const WINDOW: usize = 1024;
/// The smallest magnitude: the logarithm's floor.
const FLOOR: f64 = 1e-5;
/// Fewest samples at the model's rate whose reflection fills half a window.
const FEWEST_SAMPLES: usize = WINDOW / 2 + 1;

/// Samples `[channels, n]` at `rate` a second to `[1, channels, 1 + n' / hop, bins]`, `n'` being the samples at the model's rate:
/// the natural logarithm of the magnitude of a short-time Fourier transform in bands of the mel scale. Each frame is centred
/// on its sample, the sound being reflected at its ends. None of a sound below half a window.
///
/// As torchaudio's `MelSpectrogram` (Slaney's scale and areas, power 1), computed in f64.
pub fn log_mel(c: &AudioVaeConfig, samples: ArrayView2<f32>, rate: u32) -> Option<Array4<f32>> {
    let own = resample(samples, rate, u32::try_from(c.sample_rate).ok()?);
    if own.ncols() < FEWEST_SAMPLES {
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

/// Samples at the model's rate that so many mel frames are made of.
pub(crate) fn samples_of(c: &AudioVaeConfig, frames: usize) -> usize {
    (c.mel_hop_length * frames.saturating_sub(1)).max(FEWEST_SAMPLES)
}

/// A sample of a sound that is reflected at both ends.
fn reflected(samples: ArrayView1<f32>, at: isize) -> f64 {
    let last = samples.len() as isize - 1;
    let at = at.abs();
    f64::from(samples[if at > last { 2 * last - at } else { at } as usize])
}

/// A band of the mel scale: weights of the transform's bins from `first` on.
struct Band {
    first: usize,
    weights: Vec<f64>,
}

/// Triangles at equal distances on the mel scale from 0 Hz to half of `rate`, each of the same area.
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

/// Slaney's mel scale: linear to 1 kHz, logarithmic above.
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

    /// A tone and a rising one, 4000 samples at 16 kHz.
    fn sound() -> Array2<f32> {
        Array2::from_shape_fn((2, 4000), |(channel, i)| {
            let t = i as f64;
            let (amplitude, hertz) = if channel == 0 { (0.5, 440.0) } else { (0.25, 200.0 + t / 8.0) };
            (amplitude * (2.0 * PI * hertz * t / 16000.0).sin()) as f32
        })
    }

    /// Golden numbers are those that the reference computes of it, in f32.
    #[test]
    fn the_spectrogram_is_the_reference_s() {
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
    fn a_sound_shorter_than_half_a_window_has_none() {
        let c = AudioVaeConfig::default();
        let of = |n: usize| log_mel(&c, Array2::zeros((1, n)).view(), 16000).map(|mel| mel.dim());
        assert_eq!([of(FEWEST_SAMPLES - 1), of(FEWEST_SAMPLES)], [None, Some((1, 1, 4, 64))]);
        let silence = log_mel(&c, Array2::zeros((1, 1600)).view(), 16000).expect("long enough");
        assert!(silence.iter().all(|v| *v == (FLOOR as f32).ln()));
    }
}
