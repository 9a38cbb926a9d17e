//! Metrics that compare two videos, audio tracks or tensors.

mod audio;
pub mod toy;
mod video;

pub(crate) use audio::{AudioScores, audio};
pub(crate) use video::{VideoScores, video};

use serde::Serialize;

/// Scores of a tensor `a` against a reference `b` of the same shape.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct TensorScores {
    /// Relative L2 error `|a - b| / |b|`; infinite if only `b` is zero.
    pub(crate) relative_l2: f64,
    /// Cosine similarity `a·b / (|a| |b|)`; 1 if both are zero, NaN if only one is.
    pub(crate) cosine: f64,
    /// Largest absolute element of `a - b`.
    pub(crate) max_abs: f64,
}

/// Scores tensor `a` against the reference `b`. Both iterators must yield the elements in the same order.
pub(crate) fn tensors(a: impl Iterator<Item = f32>, b: impl Iterator<Item = f32>) -> TensorScores {
    let (mut aa, mut bb, mut ab, mut dd, mut max) = (0f64, 0f64, 0f64, 0f64, 0f64);
    for (a, b) in a.zip(b).map(|(a, b)| (f64::from(a), f64::from(b))) {
        let d = a - b;
        (aa, bb, ab, dd) = (aa + a * a, bb + b * b, ab + a * b, dd + d * d);
        // `f64::max` ignores NaN, so NaN is propagated explicitly.
        max = if max.is_nan() || d.is_nan() { f64::NAN } else { max.max(d.abs()) };
    }
    TensorScores {
        relative_l2: if dd == 0.0 { 0.0 } else { (dd / bb).sqrt() },
        cosine: if aa == 0.0 && bb == 0.0 { 1.0 } else { ab / (aa * bb).sqrt() },
        max_abs: max,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scores(a: &[f32], b: &[f32]) -> TensorScores {
        tensors(a.iter().copied(), b.iter().copied())
    }

    #[test]
    fn tensor_scores_match_manual_values() {
        let s = scores(&[3.0, 4.0], &[3.0, 0.0]);
        assert_eq!((s.relative_l2, s.max_abs), (4.0 / 3.0, 4.0));
        assert!((s.cosine - 0.6).abs() < 1e-15);
        assert_eq!(scores(&[0.0], &[0.0]), TensorScores { relative_l2: 0.0, cosine: 1.0, max_abs: 0.0 });
        assert_eq!(scores(&[1.0], &[0.0]).relative_l2, f64::INFINITY);
        let broken = scores(&[f32::NAN, 1.0], &[0.0, 0.0]);
        assert!(broken.relative_l2.is_nan() && broken.max_abs.is_nan());
    }
}
