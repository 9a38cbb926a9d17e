//! To a higher rate, by filters without parameters or with the checkpoint's.

use std::f64::consts::PI;

use crate::hlo::Value;
use crate::nn::conv_transpose1d;

/// Zero crossings of the interpolating function on each side.
const CROSSINGS: f64 = 6.0;
/// Its cutoff, as a part of the lower rate's highest frequency.
const ROLLOFF: f64 = 0.99;

/// Interpolation by a sinc under a Hann window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resampler {
    /// Growth of the rate.
    pub(crate) ratio: usize,
}

impl Resampler {
    /// Samples that the filter reaches to either side.
    fn width(self) -> usize {
        (CROSSINGS / ROLLOFF).ceil() as usize
    }

    /// The filter, at the higher rate.
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

    /// `[b, channels, samples]` to `ratio` times as many samples.
    pub(crate) fn apply(self, x: &Value) -> Value {
        let (width, ratio) = (self.width(), self.ratio);
        let taps = self.taps();
        let kernel = taps.len();
        let taps = x.builder().constant(&[kernel], &taps).reshape(vec![1, 1, kernel]);
        raised(x, &taps, ratio, width, [2 * width * ratio, kernel - ratio])
    }
}

/// `x [b, channels, samples]`, continued by `reach` samples of each end, set `ratio` apart, filtered with
/// `taps [1, 1, kernel]`, and cropped.
pub(super) fn raised(x: &Value, taps: &Value, ratio: usize, reach: usize, [left, right]: [usize; 2]) -> Value {
    let y = each_channel(&x.pad_edge(2, reach, reach), |x| conv_transpose1d(x, taps, ratio, 0));
    y.slice(2, left, y.dim(2).saturating_sub(right)) * ratio as f64
}

/// The same filter on every channel.
pub(super) fn each_channel(x: &Value, filter: impl FnOnce(&Value) -> Value) -> Value {
    let (b, channels) = (x.dim(0), x.dim(1));
    let y = filter(&x.reshape(vec![b * channels, 1, x.dim(2)]));
    y.reshape(vec![b, channels, y.dim(2)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_times_the_rate_takes_43_taps_that_pass_a_constant() {
        let taps = Resampler { ratio: 3 }.taps();
        assert_eq!((taps.len(), taps[21]), (43, 0.33));
        assert!(taps.iter().zip(taps.iter().rev()).all(|(a, b)| (a - b).abs() < 1e-7));
        // Every phase sums to a third: the result is multiplied by the ratio.
        for phase in 0..3 {
            let sum: f32 = taps.iter().skip(phase).step_by(3).sum();
            assert!((3.0 * sum - 1.0).abs() < 2e-3, "{sum}");
        }
    }
}
