//! High dynamic range: the curves that HDR LoRAs generate video in, scene-linear frames, and their SDR preview.

use std::sync::{Arc, LazyLock};

use half::f16;
use ndarray::{Array4, ArrayView3, Axis};
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::{MediaError, Result};
use super::frames::Frames;

/// Curve that compresses scene-linear light, from 0 upwards, to the values 0..1 that the video VAE decodes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HdrTransform {
    /// ARRI's LogC3 at exposure index 800, with Rec. 709 primaries.
    #[serde(rename = "logc3")]
    LogC3,
    /// ACEScct (AMPAS S-2016-001), with ACEScg (AP1) primaries.
    #[serde(rename = "acescct")]
    AcesCct,
}

/// Constants of the logarithmic part of LogC3, `c · log10(a · x + b) + d`, and of the linear part below `cut`,
/// `e · x + f`.
mod logc3 {
    pub(super) const A: f32 = 5.555556;
    pub(super) const B: f32 = 0.052272;
    pub(super) const C: f32 = 0.247190;
    pub(super) const D: f32 = 0.385537;
    pub(super) const E: f32 = 5.367655;
    pub(super) const F: f32 = 0.092809;
    pub(super) const CUT: f32 = 0.010591;
    /// Code at the cut. Lightricks computes it in f64.
    pub(super) const CUT_CODE: f32 = (5.367655_f64 * 0.010591_f64 + 0.092809_f64) as f32;
}

/// Constants of ACEScct: `(log2(x) + b) / m` above `cut`, otherwise `slope · x + offset`.
mod acescct {
    pub(super) const SLOPE: f32 = 10.540237;
    pub(super) const OFFSET: f32 = 0.07290553;
    pub(super) const CUT: f32 = 0.0078125;
    pub(super) const CUT_CODE: f32 = 0.15525115;
    pub(super) const M: f32 = 17.52;
    pub(super) const B: f32 = 9.72;
}

/// Linear ACEScg (AP1, D60) to linear Rec. 709 (D65), by rows. These are Lightricks' rounded values.
const ACESCG_TO_REC709: [[f32; 3]; 3] =
    [[1.70505, -0.62179, -0.08326], [-0.13026, 1.1408, -0.01055], [-0.024, -0.12897, 1.15297]];

impl HdrTransform {
    /// All curves.
    pub const ALL: [HdrTransform; 2] = [HdrTransform::LogC3, HdrTransform::AcesCct];

    /// Returns the name in configuration files and in the headers of LoRAs.
    pub fn name(self) -> &'static str {
        match self {
            HdrTransform::LogC3 => "logc3",
            HdrTransform::AcesCct => "acescct",
        }
    }

    /// Returns the curve with this name; `None` if there is none.
    pub fn named(name: &str) -> Option<Self> {
        HdrTransform::ALL.into_iter().find(|transform| transform.name() == name)
    }

    /// Compresses a scene-linear value to a code in 0..1. Negative values become the code of 0.
    pub fn compress(self, linear: f32) -> f32 {
        let x = linear.max(0.0);
        let code = match self {
            HdrTransform::LogC3 if x >= logc3::CUT => logc3::C * log10(logc3::A * x + logc3::B) + logc3::D,
            HdrTransform::LogC3 => logc3::E * x + logc3::F,
            HdrTransform::AcesCct if x > acescct::CUT => (log2(x) + acescct::B) / acescct::M,
            HdrTransform::AcesCct => acescct::SLOPE * x + acescct::OFFSET,
        };
        code.clamp(0.0, 1.0)
    }

    /// Decompresses a code, clamped to 0..1, to a scene-linear value in the primaries of the curve. Codes below that of
    /// black give values below 0.
    pub fn decompress(self, code: f32) -> f32 {
        let code = code.clamp(0.0, 1.0);
        match self {
            HdrTransform::LogC3 if code >= logc3::CUT_CODE => {
                (power(10.0, (code - logc3::D) / logc3::C) - logc3::B) / logc3::A
            }
            HdrTransform::LogC3 => (code - logc3::F) / logc3::E,
            HdrTransform::AcesCct if code > acescct::CUT_CODE => power(2.0, code * acescct::M - acescct::B),
            HdrTransform::AcesCct => (code - acescct::OFFSET) / acescct::SLOPE,
        }
    }

    /// Decompresses the codes of a pixel in place to scene-linear Rec. 709. Values outside of the gamut and below black
    /// become 0.
    fn decompress_pixel(self, red: &mut f32, green: &mut f32, blue: &mut f32) {
        let own = [&*red, &*green, &*blue].map(|code| self.decompress(*code));
        let linear = match self {
            HdrTransform::LogC3 => own,
            HdrTransform::AcesCct => ACESCG_TO_REC709.map(|row| row[0] * own[0] + row[1] * own[1] + row[2] * own[2]),
        };
        [*red, *green, *blue] = linear.map(|value| value.max(0.0));
    }
}

/// Computes a power in f64 and rounds it once, because f32 powers differ between platforms.
fn power(base: f64, exponent: f32) -> f32 {
    base.powf(f64::from(exponent)) as f32
}

fn log10(x: f32) -> f32 {
    f64::from(x).log10() as f32
}

fn log2(x: f32) -> f32 {
    f64::from(x).log2() as f32
}

/// Scene-linear frames `[frames, 3, height, width]` with Rec. 709 primaries; 1 is diffuse white. Clones share the values.
#[derive(Clone, Debug, PartialEq)]
pub struct HdrFrames {
    linear: Arc<Array4<f32>>,
}

impl HdrFrames {
    /// Decompresses a decoded video `[frames, 3, height, width]`, whose values are codes of `transform` in 0..1.
    ///
    /// # Errors
    /// Returns an error if the video is empty or does not have three channels.
    pub fn decompress(codes: Array4<f32>, transform: HdrTransform) -> Result<Self> {
        if codes.is_empty() || codes.dim().1 != 3 {
            return Err(MediaError::VideoShape { shape: codes.shape().to_vec() });
        }
        let mut codes = if codes.is_standard_layout() { codes } else { codes.as_standard_layout().into_owned() };
        codes.axis_iter_mut(Axis(0)).par_bridge().for_each(|mut frame| {
            let [mut red, mut green, mut blue] = {
                let (red, rest) = frame.view_mut().split_at(Axis(0), 1);
                let (green, blue) = rest.split_at(Axis(0), 1);
                [red, green, blue]
            };
            ndarray::Zip::from(&mut red).and(&mut green).and(&mut blue).for_each(|red, green, blue| {
                transform.decompress_pixel(red, green, blue);
            });
        });
        Ok(HdrFrames { linear: codes.into() })
    }

    /// Concatenates consecutive parts of a video. Panics if there is none, or if their sizes differ.
    #[must_use]
    pub fn joined(parts: &[HdrFrames]) -> HdrFrames {
        if let [only] = parts {
            return only.clone();
        }
        let views: Vec<_> = parts.iter().map(|part| part.linear.view()).collect();
        HdrFrames { linear: ndarray::concatenate(Axis(0), &views).expect("frames of one size").into() }
    }

    /// Number of frames.
    pub fn count(&self) -> usize {
        self.linear.dim().0
    }

    /// Height in pixels.
    pub fn height(&self) -> usize {
        self.linear.dim().2
    }

    /// Width in pixels.
    pub fn width(&self) -> usize {
        self.linear.dim().3
    }

    /// Returns the values `[frames, 3, height, width]`.
    pub fn linear(&self) -> &Array4<f32> {
        &self.linear
    }

    /// Returns the values of one frame, `[3, height, width]`. Panics if there is no such frame.
    pub fn frame(&self, index: usize) -> ArrayView3<'_, f32> {
        self.linear.index_axis(Axis(0), index)
    }

    /// Returns SDR frames for previews: values above diffuse white are clipped, and the sRGB transfer function is
    /// applied to the half-precision values of the EXR files, as in Lightricks' preview.
    pub fn preview(&self) -> Frames {
        let (count, _, height, width) = self.linear.dim();
        let mut bytes = Array4::<u8>::zeros((count, height, width, 3));
        bytes.axis_iter_mut(Axis(0)).zip(self.linear.axis_iter(Axis(0))).par_bridge().for_each(|(mut to, from)| {
            ndarray::Zip::from(&mut to).and(from.permuted_axes([1, 2, 0])).for_each(|to, from| {
                *to = SRGB_BYTES[usize::from(f16::from_f32(*from).to_bits())];
            });
        });
        Frames::new(bytes).expect("the constructors reject videos without pixels")
    }

    /// Returns the SHA-256 (hex) of the half-precision values of all frames, `[height, width, 3]` each, little-endian.
    pub fn sha256(&self) -> String {
        let mut hash = Sha256::new();
        let mut bytes = Vec::with_capacity(6 * self.height() * self.width());
        for frame in self.linear.axis_iter(Axis(0)) {
            bytes.clear();
            let pixels = frame.permuted_axes([1, 2, 0]);
            pixels.iter().for_each(|value| bytes.extend(f16::from_f32(*value).to_le_bytes()));
            hash.update(&bytes);
        }
        hex::encode(hash.finalize())
    }
}

/// Byte of each half-precision value by its bits: clipped to 0..1, sRGB transfer function, rounded half up.
static SRGB_BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let byte = |bits: u16| {
        let linear = f16::from_bits(bits).to_f32();
        let linear = if linear.is_nan() { 0.0 } else { linear.clamp(0.0, 1.0) };
        let signal =
            if linear <= 0.0031308 { linear * 12.92 } else { 1.055 * power(f64::from(linear), 1.0 / 2.4) - 0.055 };
        (signal * 255.0 + 0.5) as u8
    };
    (0..=u16::MAX).map(byte).collect()
});

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
