//! Upsamples waveforms, with a filter that is either computed or loaded from the checkpoint.

use std::f64::consts::PI;

use ltx2_nn::conv_transpose1d;
use ltx2_stablehlo::Value;

/// Zero crossings of the sinc on each side.
const CROSSINGS: f64 = 6.0;
/// Cutoff frequency relative to the lower rate's Nyquist frequency.
const ROLLOFF: f64 = 0.99;

/// Upsampler that interpolates with a Hann-windowed sinc.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resampler {
    /// Ratio of the higher to the lower rate.
    pub ratio: usize,
}

impl Resampler {
    /// Returns the number of samples, at the lower rate, by which the filter extends to each side of an output sample.
    fn width(self) -> usize {
        (CROSSINGS / ROLLOFF).ceil() as usize
    }

    /// Returns the filter taps, spaced at the higher rate.
    pub(crate) fn taps(self) -> Vec<f32> {
        let (ratio, width) = (self.ratio as f64, self.width());
        let tap = |i: usize| {
            let t = (i as f64 / ratio - width as f64) * ROLLOFF;
            let window = (t.clamp(-CROSSINGS, CROSSINGS) * PI / CROSSINGS / 2.0).cos().powi(2);
            let sinc = if t == 0.0 { 1.0 } else { (PI * t).sin() / (PI * t) };
            (sinc * window * ROLLOFF / ratio) as f32
        };
        (0..=2 * width * self.ratio).map(tap).collect()
    }

    /// Upsamples `[b, channels, samples]` by `ratio`.
    pub(crate) fn apply(self, x: &Value) -> Value {
        let (width, ratio) = (self.width(), self.ratio);
        let taps = self.taps();
        let kernel = taps.len();
        let taps = x.builder().constant(&[kernel], &taps).reshape(vec![1, 1, kernel]);
        raised(x, &taps, ratio, width, [2 * width * ratio, kernel - ratio])
    }
}

/// Upsamples `x [b, channels, samples]` by `ratio`: pads each end with `reach` copies of its edge sample, applies `taps
/// [1, 1, kernel]` as a transposed convolution of stride `ratio`, and removes `left` samples at the start and `right`
/// samples at the end.
pub(super) fn raised(x: &Value, taps: &Value, ratio: usize, reach: usize, [left, right]: [usize; 2]) -> Value {
    let y = each_channel(&x.pad_edge(2, reach, reach), |x| conv_transpose1d(x, taps, ratio, 0));
    y.slice(2, left, y.dim(2).saturating_sub(right)) * ratio as f64
}

/// Applies a single-channel filter to every channel.
pub(super) fn each_channel(x: &Value, filter: impl FnOnce(&Value) -> Value) -> Value {
    let (b, channels) = (x.dim(0), x.dim(1));
    let y = filter(&x.reshape(vec![b * channels, 1, x.dim(2)]));
    y.reshape(vec![b, channels, y.dim(2)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upsampling_by_3_has_43_taps_and_preserves_a_constant() {
        let taps = Resampler { ratio: 3 }.taps();
        assert_eq!((taps.len(), taps[21]), (43, 0.33));
        assert!(taps.iter().zip(taps.iter().rev()).all(|(a, b)| (a - b).abs() < 1e-7));
        // Each phase sums to 1/3; `apply` multiplies by the ratio.
        for phase in 0..3 {
            let sum: f32 = taps.iter().skip(phase).step_by(3).sum();
            assert!((3.0 * sum - 1.0).abs() < 2e-3, "{sum}");
        }
    }
}
