//! Random weights that depend on seed and name alone: not on order, number of threads, or machine.

use half::bf16;
use ndarray::{ArrayD, IxDyn};
use sha2::{Digest, Sha256};

use crate::hlo::DType;
use crate::tensor::{Tensor, TensorError};

/// xoshiro256++ of Blackman and Vigna.
struct Generator([u64; 4]);

impl Generator {
    fn new(seed: u64, name: &str) -> Self {
        let digest = Sha256::new().chain_update(seed.to_le_bytes()).chain_update(name.as_bytes()).finalize();
        let mut state = [0; 4];
        for (word, bytes) in state.iter_mut().zip(digest.chunks_exact(8)) {
            *word = bytes.iter().rev().fold(0, |w, b| w << 8 | u64::from(*b));
        }
        Generator(state)
    }

    fn next(&mut self) -> u64 {
        let s = &mut self.0;
        let out = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }
}

/// A tensor of normally distributed values, `mean + std * z`, rounded to `dtype`.
///
/// The values follow from `seed` and `name`; as many are drawn as the shape has elements, in row-major order.
///
/// # Errors
/// An element type other than `f32` and `bf16`.
pub fn random_tensor(
    seed: u64,
    name: &str,
    shape: &[usize],
    dtype: DType,
    mean: f32,
    std: f32,
) -> Result<Tensor, TensorError> {
    let mut generator = Generator::new(seed, name);
    let mut half = None;
    // Two values a draw.
    let mut draw = || {
        let bits = half.take().unwrap_or_else(|| {
            let word = generator.next();
            half = Some((word >> 32) as u32);
            word as u32
        });
        let z = quantile((f64::from(bits) + 0.5) / 4_294_967_296.0);
        (f64::from(mean) + f64::from(std) * z) as f32
    };
    match dtype {
        DType::F32 => Ok(Tensor::F32(ArrayD::from_shape_simple_fn(IxDyn(shape), draw))),
        DType::BF16 => Ok(Tensor::BF16(ArrayD::from_shape_simple_fn(IxDyn(shape), || bf16::from_f32(draw())))),
        other => Err(TensorError::Unsupported(other)),
    }
}

/// Inverse of the normal distribution function: Acklam's rational approximation, relative error 1.2e-9.
///
/// Only operations that IEEE 754 rounds exactly, so that every machine draws the same bits: the library's `ln` and
/// `cos` (Box and Muller's way) differ between platforms in the last place.
#[allow(clippy::excessive_precision)]
fn quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969683028665376e+01,
        2.209460984245205e+02,
        -2.759285104469687e+02,
        1.383577518672690e+02,
        -3.066479806614716e+01,
        2.506628277459239e+00,
    ];
    const B: [f64; 6] = [
        -5.447609879822406e+01,
        1.615858368580409e+02,
        -1.556989798598866e+02,
        6.680131188771972e+01,
        -1.328068155288572e+01,
        1.0,
    ];
    const C: [f64; 6] = [
        -7.784894002430293e-03,
        -3.223964580411365e-01,
        -2.400758277161838e+00,
        -2.549732539343734e+00,
        4.374664141464968e+00,
        2.938163982698783e+00,
    ];
    const D: [f64; 5] =
        [7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e+00, 3.754408661907416e+00, 1.0];
    let poly = |c: &[f64], x: f64| c.iter().fold(0.0, |sum, k| sum * x + k);
    let tail = |p: f64| {
        let q = (-2.0 * ln(p)).sqrt();
        poly(&C, q) / poly(&D, q)
    };
    if p < 0.02425 {
        tail(p)
    } else if p > 1.0 - 0.02425 {
        -tail(1.0 - p)
    } else {
        let q = p - 0.5;
        let r = q * q;
        q * poly(&A, r) / poly(&B, r)
    }
}

/// Natural logarithm of a positive normal number, from exact operations only (see [`quantile`]).
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let exponent = ((bits >> 52) & 0x7ff) as f64 - 1023.0;
    let mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    // ln m = 2 artanh((m-1)/(m+1)); the argument is at most 1/3, so 16 terms reach 1e-16.
    let t = (mantissa - 1.0) / (mantissa + 1.0);
    let series = (0..16).rev().fold(0.0, |sum, k| sum * (t * t) + 1.0 / f64::from(2 * k + 1));
    exponent * std::f64::consts::LN_2 + 2.0 * t * series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_and_logarithms_are_right() {
        assert!((quantile(0.5)).abs() < 1e-12);
        assert!((quantile(0.975) - 1.959_963_984_540_054).abs() < 1e-8);
        assert!((quantile(0.001) + 3.090_232_306_167_814).abs() < 1e-8);
        for x in [1e-10, 0.02, 0.7, 1.0, 12345.6] {
            assert!((ln(x) - x.ln()).abs() < 1e-14 * x.ln().abs().max(1.0), "{x}");
        }
    }

    #[test]
    fn values_depend_on_seed_and_name_alone() {
        let draw = |seed, name: &str| random_tensor(seed, name, &[40, 500], DType::F32, 0.0, 0.02).expect("f32");
        let a = draw(1, "a.weight");
        assert_eq!(a, draw(1, "a.weight"));
        assert_ne!(a, draw(2, "a.weight"));
        assert_ne!(a, draw(1, "b.weight"));
        let values = a.to_f32();
        let n = values.len() as f32;
        let mean = values.sum() / n;
        let std = (values.mapv(|v| (v - mean).powi(2)).sum() / n).sqrt();
        assert!(mean.abs() < 5e-4 && (std - 0.02).abs() < 4e-4, "mean {mean}, std {std}");
        // Pinned bits: a change here changes every random model.
        let first: Vec<u32> = values.iter().take(3).map(|v| v.to_bits()).collect();
        assert_eq!(first, PINNED);
    }

    #[test]
    fn bf16_is_the_rounded_f32() {
        let wide = random_tensor(3, "w", &[257], DType::F32, 1.0, 0.1).expect("f32");
        let narrow = random_tensor(3, "w", &[257], DType::BF16, 1.0, 0.1).expect("bf16");
        assert_eq!(wide.cast(DType::BF16).expect("bf16"), narrow);
        assert!(random_tensor(3, "w", &[2], DType::I32, 0.0, 1.0).is_err());
    }

    const PINNED: [u32; 3] = [1005782213, 1011750353, 3145498309];
}
