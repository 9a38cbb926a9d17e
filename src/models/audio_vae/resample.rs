//! Sound at another rate, by a windowed sinc as the model's training data was resampled (torchaudio's `resample`).

use std::f32::consts::PI;

use ndarray::{Array2, ArrayView2};

/// Zero crossings of the sinc to either side.
const WIDTH: f32 = 6.0;
/// Part of the lower rate's band that passes.
const ROLL_OFF: f32 = 0.99;

/// Samples `[channels, n]` of a rate at another, `[channels, ceil(n · to / from)]`; rates in samples a second, above 0. The same
/// rate leaves every bit alone.
///
/// The kernel is a sinc under a Hann window; silence lies before and behind the sound.
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
            // The sample under the first tap; what lies outside of the sound is silence.
            let start = (at / to * from + first) as isize - reach as isize;
            let skip = start.unsigned_abs().min(phase.len()) * usize::from(start < 0);
            let from = start.max(0) as usize;
            let heard = &own[from.min(n)..];
            *out = phase[skip..].iter().zip(heard).map(|(k, x)| k * x).sum();
        }
    }
    out
}

/// Taps of each output phase, of reduced rates, behind so many that are nothing, and how many stand before the phase's first
/// sample. The reference has a tap for every sample of a period; beyond the window they are 0, and of rates without a common
/// divisor they would be billions.
fn kernel(from: usize, to: usize) -> (Vec<(usize, Vec<f32>)>, usize) {
    // In f32, as the reference has it: a phase of hundreds is rounded to 5e-6 of a sample.
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

    /// Sizes that the reference's kernel has at common rates to 16 kHz, of which only the window is kept.
    #[test]
    fn kernels_are_the_reference_s_within_their_window() {
        for (rate, to, reach, taps) in
            [(44100u32, 160usize, 17, 475), (48000, 1, 19, 41), (24000, 2, 10, 23), (22050, 320, 9, 459)]
        {
            let shared = gcd(rate, 16000);
            let (from, kept) = ((rate / shared) as usize, (16000 / shared) as usize);
            let (phases, before) = kernel(from, kept);
            assert_eq!((phases.len(), before, 2 * before + from), (to, reach, taps), "{rate}");
            // Every tap that is left out is nothing beside the largest, 1.
            let base = f64::from(ROLL_OFF) * from.min(to) as f64;
            for (phase, (first, own)) in phases.iter().enumerate() {
                let outside = (0..taps).filter(|i| !(*first..first + own.len()).contains(i));
                let near =
                    outside.map(|i| ((i as f64 - before as f64) / from as f64 - phase as f64 / to as f64).abs() * base);
                assert!(near.fold(f64::MAX, f64::min) > f64::from(WIDTH) - 1e-3, "{rate}: {phase}");
            }
        }
    }

    /// Rates without a common divisor: as many phases as samples a second.
    #[test]
    fn an_odd_rate_takes_no_gigabytes() {
        for (from, to) in [(383_987, 48_000), (47_999, 16_000), (8009, 48_000)] {
            let (phases, _) = kernel(from, to);
            let taps: usize = phases.iter().map(|(_, taps)| taps.len()).sum();
            assert!(taps < 10_000_000, "{from} to {to}: {taps}");
        }
    }

    #[test]
    fn a_tone_stays_the_tone_and_the_same_rate_changes_nothing() {
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
