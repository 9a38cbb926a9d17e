//! Resamples audio with a windowed sinc, like torchaudio's `resample`, which also resampled the model's training data.

use std::f32::consts::PI;

use ndarray::{Array2, ArrayView2};

/// Zero crossings of the sinc on each side.
const WIDTH: f32 = 6.0;
/// Cutoff frequency relative to the lower rate's Nyquist frequency.
const ROLL_OFF: f32 = 0.99;

/// Resamples `[channels, n]` from rate `from` to rate `to`, both in Hz and above 0; returns `[channels, ceil(n · to /
/// from)]`. Equal rates return the samples unchanged, bit for bit.
///
/// The kernel is a sinc with a Hann window; the audio is zero-padded at both ends.
pub fn resample(samples: ArrayView2<f32>, from: u32, to: u32) -> Array2<f32> {
    if from == to {
        return samples.to_owned();
    }
    let shared = gcd(from, to);
    let (from, to) = ((from / shared) as usize, (to / shared) as usize);
    let (taps, reach) = kernel(from, to);
    let n = samples.ncols();
    let count = (n * to).div_ceil(from);
    let mut out = Array2::zeros((samples.nrows(), count));
    for (own, mut out) in samples.rows().into_iter().zip(out.rows_mut()) {
        let own: Vec<f32> = own.to_vec();
        for (at, out) in out.iter_mut().enumerate() {
            let (first, phase) = &taps[at % to];
            // Input sample of the first tap; samples outside the audio are zero.
            let start = (at / to * from + first) as isize - reach as isize;
            let skip = start.unsigned_abs().min(phase.len()) * usize::from(start < 0);
            let from = start.max(0) as usize;
            let heard = &own[from.min(n)..];
            *out = phase[skip..].iter().zip(heard).map(|(k, x)| k * x).sum();
        }
    }
    out
}

/// Returns the filter for the coprime rates `from` and `to`. The first value contains, for each output phase, the index
/// of the first tap and the taps. The second value is the number of input samples that the filter reads before an
/// output sample. Taps outside the window are zero; torchaudio stores them, but they are omitted here, because some
/// pairs of rates would need billions of them.
fn kernel(from: usize, to: usize) -> (Vec<(usize, Vec<f32>)>, usize) {
    // Computed in f32, as in torchaudio, although positions are then off by up to 5e-6 samples if there are hundreds of
    // phases.
    let (o, n) = (from as f32, to as f32);
    let base = ROLL_OFF * o.min(n);
    let reach = (WIDTH * o / base).ceil() as usize;
    let tap = |phase: usize, i: usize| {
        let t = (((i as f32 - reach as f32) / o - phase as f32 / n) * base).clamp(-WIDTH, WIDTH);
        let window = (t * PI / WIDTH / 2.0).cos().powi(2);
        let sinc = if t == 0.0 { 1.0 } else { (t * PI).sin() / (t * PI) };
        sinc * (window * (base / o))
    };
    let taps = (0..to).map(|phase| {
        let first = phase * from / to;
        (first, (first..(first + 2 * reach + 2).min(2 * reach + from)).map(|i| tap(phase, i)).collect())
    });
    (taps.collect(), reach)
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::*;

    /// torchaudio's kernel sizes for resampling common rates to 16 kHz. They include the taps outside the window, which
    /// [`kernel`] omits.
    #[test]
    fn kernel_sizes_match_torchaudio() {
        for (rate, to, reach, taps) in
            [(44100u32, 160usize, 17, 475), (48000, 1, 19, 41), (24000, 2, 10, 23), (22050, 320, 9, 459)]
        {
            let shared = gcd(rate, 16000);
            let (from, kept) = ((rate / shared) as usize, (16000 / shared) as usize);
            let (phases, before) = kernel(from, kept);
            assert_eq!((phases.len(), before, 2 * before + from), (to, reach, taps), "{rate}");
            // All omitted taps lie outside the window.
            let base = f64::from(ROLL_OFF) * from.min(to) as f64;
            for (phase, (first, own)) in phases.iter().enumerate() {
                let outside = (0..taps).filter(|i| !(*first..first + own.len()).contains(i));
                let near =
                    outside.map(|i| ((i as f64 - before as f64) / from as f64 - phase as f64 / to as f64).abs() * base);
                assert!(near.fold(f64::MAX, f64::min) > f64::from(WIDTH) - 1e-3, "{rate}: {phase}");
            }
        }
    }

    /// For coprime rates, the number of phases equals the output rate.
    #[test]
    fn coprime_rates_keep_kernels_small() {
        for (from, to) in [(383_987, 48_000), (47_999, 16_000), (8009, 48_000)] {
            let (phases, _) = kernel(from, to);
            let taps: usize = phases.iter().map(|(_, taps)| taps.len()).sum();
            assert!(taps < 10_000_000, "{from} to {to}: {taps}");
        }
    }

    #[test]
    fn resampling_preserves_tones_and_equal_rates_return_the_input() {
        let tone = |rate: f32, n: usize| {
            Array2::from_shape_fn((1, n), |(_, i)| 0.5 * (2.0 * PI * 440.0 * i as f32 / rate).sin())
        };
        let (given, wanted) = (tone(44100.0, 4410), tone(16000.0, 1600));
        let got = resample(given.view(), 44100, 16000);
        assert_eq!(got.dim(), (1, 1600));
        let middle = |a: &Array2<f32>| a.slice(ndarray::s![.., 100..1500]).to_owned();
        let worst = (middle(&got) - middle(&wanted)).iter().fold(0f32, |m, v| m.max(v.abs()));
        assert!(worst < 2e-3, "{worst}");
        assert_eq!(resample(given.view(), 44100, 44100), given);
        assert_eq!(resample(Array2::zeros((2, 0)).view(), 44100, 16000).dim(), (2, 0));
    }
}
