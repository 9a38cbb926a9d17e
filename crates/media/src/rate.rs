//! Frame rates as exact fractions.

use super::error::{MediaError, Result};

/// A frame rate in frames per second, as a reduced fraction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameRate {
    /// Numerator: a number of frames.
    pub num: u32,
    /// Denominator: the seconds that these frames take.
    pub den: u32,
}

impl FrameRate {
    /// Converts `fps` to the fraction that it stands for. Integers stay integers; NTSC rates such as 23.976, 29.97 and
    /// 59.94 become n·1000/1001; any other rate becomes the nearest fraction with a denominator of at most 1000.
    ///
    /// # Errors
    /// Returns an error if `fps` is not between 0.01 and 1000.
    pub fn from_f64(fps: f64) -> Result<Self> {
        if !(0.01..=1000.0).contains(&fps) {
            return Err(MediaError::FrameRate(fps));
        }
        if fps.fract() == 0.0 {
            return Ok(Self { num: fps as u32, den: 1 });
        }
        // 23.976 and 29.97 have three and two decimals; a tolerance of 5e-4 covers the rounding of both.
        let nominal = (fps * 1.001).round();
        if nominal >= 1.0 && (nominal * 1000.0 / 1001.0 - fps).abs() < 5e-4 {
            return Ok(Self::reduced(nominal as u64 * 1000, 1001));
        }
        let den = (1..=1000u32)
            .min_by(|&a, &b| {
                let off = |d: u32| ((fps * f64::from(d)).round() / f64::from(d) - fps).abs();
                off(a).total_cmp(&off(b))
            })
            .unwrap_or(1);
        Ok(Self::reduced((fps * f64::from(den)).round().max(1.0) as u64, u64::from(den)))
    }

    fn reduced(num: u64, den: u64) -> Self {
        let (mut a, mut b) = (num, den);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        Self { num: (num / a) as u32, den: (den / a) as u32 }
    }

    /// Returns the number of samples at `sample_rate` Hz that last as long as `frames` frames, rounded to the nearest
    /// integer.
    pub fn samples(self, frames: usize, sample_rate: u32) -> usize {
        let num = u128::from(self.num);
        let ticks = frames as u128 * u128::from(self.den) * u128::from(sample_rate);
        ((ticks + num / 2) / num) as usize
    }

    /// Returns a media time scale (ticks per second) and the exact number of ticks per frame. The time scale is at
    /// least 10000, as players expect.
    pub(super) fn timescale(self) -> (u32, u32) {
        let k = 10_000u32.div_ceil(self.num);
        (self.num * k, self.den * k)
    }
}

impl std::fmt::Display for FrameRate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.den == 1 { write!(f, "{}", self.num) } else { write!(f, "{}/{}", self.num, self.den) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn rates_become_intended_fractions() {
        for (fps, want) in [
            (24.0, "24"),
            (25.0, "25"),
            (23.976, "24000/1001"),
            (24000.0 / 1001.0, "24000/1001"),
            (29.97, "30000/1001"),
            (59.94, "60000/1001"),
            (12.5, "25/2"),
            (0.5, "1/2"),
            (33.333333, "100/3"),
            (14.985, "15000/1001"),
        ] {
            assert_eq!(FrameRate::from_f64(fps).unwrap().to_string(), want, "{fps}");
        }
        for bad in [0.0, -24.0, f64::NAN, f64::INFINITY, 1e9] {
            assert!(FrameRate::from_f64(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sample_counts_and_timescales_are_exact() {
        assert_eq!(FrameRate::from_f64(24.0).unwrap().samples(121, 24000), 121_000);
        assert_eq!(FrameRate::from_f64(23.976).unwrap().samples(24, 48000), 48048);
        let (scale, frame) = FrameRate::from_f64(29.97).unwrap().timescale();
        assert_eq!((scale, frame), (30000, 1001));
        let (scale, frame) = FrameRate::from_f64(24.0).unwrap().timescale();
        assert!(scale >= 10_000 && scale == 24 * frame);
    }
}
