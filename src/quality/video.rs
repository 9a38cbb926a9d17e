//! Video metrics: peak signal-to-noise ratio, structural similarity and mean absolute difference.

use ndarray::{Array2, ArrayView3, ArrayView4, Axis, s};
use serde::Serialize;

/// Scores of a video against a reference of the same shape `[frames, 3, height, width]`, with values in 0..1.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct VideoScores {
    /// PSNR in decibels over all pixels of all frames; infinite (null in JSON) if the videos are equal.
    pub(crate) psnr: f64,
    pub(crate) worst_psnr: f64,
    /// Mean SSIM of the frames' luma.
    pub(crate) ssim: f64,
    pub(crate) worst_ssim: f64,
    /// Mean absolute difference of all values, in units of 1/255.
    pub(crate) mad: f64,
    pub(crate) worst_mad: f64,
    pub(crate) frame_psnr: Vec<f64>,
    pub(crate) frame_ssim: Vec<f64>,
    pub(crate) frame_mad: Vec<f64>,
}

/// Scores a video `a` against a reference `b` of the same shape.
pub(crate) fn video(a: ArrayView4<f32>, b: ArrayView4<f32>) -> VideoScores {
    let errors = |square: bool| -> Vec<f64> {
        let each = a.outer_iter().zip(b.outer_iter()).map(|(a, b)| {
            let sum: f64 =
                a.iter().zip(b).map(|(a, b)| f64::from(a - b)).map(|d| if square { d * d } else { d.abs() }).sum();
            sum / a.len() as f64
        });
        each.collect()
    };
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    // NaN propagates.
    let worst = |values: &[f64], pick: fn(f64, f64) -> f64| {
        values
            .iter()
            .copied()
            .reduce(|a, b| if a.is_nan() || b.is_nan() { f64::NAN } else { pick(a, b) })
            .unwrap_or(f64::NAN)
    };
    let decibels = |mse: f64| -10.0 * mse.log10();
    let squares = errors(true);
    let frame_psnr: Vec<f64> = squares.iter().copied().map(decibels).collect();
    let frame_mad: Vec<f64> = errors(false).into_iter().map(|v| 255.0 * v).collect();
    let frame_ssim: Vec<f64> = a.outer_iter().zip(b.outer_iter()).map(|(a, b)| ssim(&luma(a), &luma(b))).collect();
    VideoScores {
        psnr: decibels(mean(&squares)),
        worst_psnr: worst(&frame_psnr, f64::min),
        ssim: mean(&frame_ssim),
        worst_ssim: worst(&frame_ssim, f64::min),
        mad: mean(&frame_mad),
        worst_mad: worst(&frame_mad, f64::max),
        frame_psnr,
        frame_ssim,
        frame_mad,
    }
}

/// Returns the BT.709 luma `[height, width]` of a frame `[3, height, width]`.
pub(crate) fn luma(frame: ArrayView3<f32>) -> Array2<f64> {
    let channel = |c: usize, k: f64| frame.index_axis(Axis(0), c).mapv(|v| k * f64::from(v));
    channel(0, 0.2126) + channel(1, 0.7152) + channel(2, 0.0722)
}

/// Size of the Gaussian window, in pixels.
const WINDOW: usize = 11;
/// Standard deviation of the Gaussian window, in pixels.
const SIGMA: f64 = 1.5;

/// Returns the mean SSIM of two grayscale images with values in 0..1. The mean is over all windows that lie inside the
/// images (Wang, Bovik, Sheikh and Simoncelli 2004: Gaussian windows of 11x11, constants 0.01 and 0.03). A dimension
/// with fewer than 11 pixels uses the largest odd window that fits.
pub(crate) fn ssim(a: &Array2<f64>, b: &Array2<f64>) -> f64 {
    let fits = |n: usize| WINDOW.min(n - (n + 1) % 2);
    let (rows, columns) = (gaussian(fits(a.nrows())), gaussian(fits(a.ncols())));
    let blur = |x: &Array2<f64>| filtered(&filtered(x, &rows, 0), &columns, 1);
    let [ma, mb] = [blur(a), blur(b)];
    let va = blur(&(a * a)) - &ma * &ma;
    let vb = blur(&(b * b)) - &mb * &mb;
    let ab = blur(&(a * b)) - &ma * &mb;
    let (c1, c2) = (0.01f64.powi(2), 0.03f64.powi(2));
    let top = (2.0 * &ma * &mb + c1) * (2.0 * ab + c2);
    let bottom = (&ma * &ma + &mb * &mb + c1) * (va + vb + c2);
    (top / bottom).mean().unwrap_or(f64::NAN)
}

fn gaussian(size: usize) -> Vec<f64> {
    let middle = (size / 2) as f64;
    let values: Vec<f64> = (0..size).map(|i| (-(i as f64 - middle).powi(2) / (2.0 * SIGMA * SIGMA)).exp()).collect();
    let sum: f64 = values.iter().sum();
    values.into_iter().map(|v| v / sum).collect()
}

/// Convolves along an axis, without padding.
fn filtered(x: &Array2<f64>, weights: &[f64], axis: usize) -> Array2<f64> {
    let length = x.len_of(Axis(axis)) + 1 - weights.len();
    let part = |i: usize| x.slice_axis(Axis(axis), (i..i + length).into());
    let mut sum = Array2::zeros(part(0).raw_dim());
    weights.iter().enumerate().for_each(|(i, w)| sum.scaled_add(*w, &part(i)));
    sum.slice(s![.., ..]).to_owned()
}

#[cfg(test)]
mod tests {
    use ndarray::Array4;

    use super::*;

    #[test]
    fn video_scores_match_manual_values() {
        // The second frame differs by 0.1 everywhere.
        let a = Array4::from_elem((2, 3, 12, 12), 0.5f32);
        let mut b = a.clone();
        b.index_axis_mut(Axis(0), 1).fill(0.6);
        let s = video(a.view(), b.view());
        assert!((s.frame_psnr[1] - 20.0).abs() < 1e-5 && s.frame_psnr[0] == f64::INFINITY);
        // Averaging over two frames halves the mean squared error: 3 dB more.
        assert!((s.psnr - (20.0 + 10.0 * 2f64.log10())).abs() < 1e-5 && s.worst_psnr == s.frame_psnr[1]);
        assert!((s.worst_mad - 25.5).abs() < 1e-4 && (s.mad - 12.75).abs() < 1e-4 && s.frame_mad[0] == 0.0);
        // Constant frames have no structure, so only the mean term of SSIM differs from 1.
        let want = (2.0 * 0.5 * 0.6 + 1e-4) / (0.25 + 0.36 + 1e-4);
        assert!((s.worst_ssim - want).abs() < 1e-6 && (s.ssim - (1.0 + want) / 2.0).abs() < 1e-6);
        assert_eq!(serde_json::to_value(&s).expect("JSON")["frame_psnr"][0], serde_json::Value::Null);
    }

    #[test]
    fn ssim_matches_manual_values() {
        // The weights of a 1x3 window are e, 1 and e, divided by their sum.
        let e = (-1.0f64 / 4.5).exp();
        let w = [e / (1.0 + 2.0 * e), 1.0 / (1.0 + 2.0 * e), e / (1.0 + 2.0 * e)];
        let (a, b) = ([0.0, 0.5, 1.0], [0.2, 0.4, 0.9]);
        let mean = |x: [f64; 3], y: [f64; 3]| (0..3).map(|i| w[i] * x[i] * y[i]).sum::<f64>();
        let one = [1.0; 3];
        let (ma, mb) = (mean(a, one), mean(b, one));
        let (va, vb, ab) = (mean(a, a) - ma * ma, mean(b, b) - mb * mb, mean(a, b) - ma * mb);
        let want = (2.0 * ma * mb + 1e-4) * (2.0 * ab + 9e-4) / ((ma * ma + mb * mb + 1e-4) * (va + vb + 9e-4));
        let row = |x: [f64; 3]| Array2::from_shape_vec((1, 3), x.to_vec()).expect("fits");
        assert!((ssim(&row(a), &row(b)) - want).abs() < 1e-12);
        assert!((ssim(&row(a), &row(a)) - 1.0).abs() < 1e-12);
        // For an even side, the largest odd window that fits is used.
        let even = Array2::from_shape_fn((4, 20), |(y, x)| (y * x) as f64 / 60.0);
        assert!((ssim(&even, &even) - 1.0).abs() < 1e-12);
    }
}
