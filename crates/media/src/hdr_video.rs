//! 10-bit HDR video by ffmpeg: scene-linear frames with BT.2020 primaries and the transfer function HLG or PQ.

use std::path::Path;
use std::process::Command;

use ndarray::{Array2, ArrayView3, s};
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::{MediaError, Result};
use super::ffmpeg::{self, FrameSink};
use super::hdr::HdrFrames;
use super::rate::FrameRate;
use ltx2_base::{atomic_file, failpoint};

/// Transfer function of HDR video (ITU-R BT.2100).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HdrSignal {
    /// Hybrid log-gamma: diffuse white at 75 % of the signal, highlights compressed towards 100 %.
    Hlg,
    /// Perceptual quantizer (HDR10): diffuse white at 203 nits, values above 10,000 nits clipped.
    Pq,
}

/// Codec of HDR video.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HdrCodec {
    /// HEVC, profile Main 10, by libx265.
    #[default]
    Hevc,
    /// AV1 with 10 bits, by libsvtav1.
    Av1,
}

/// Linear Rec. 709 to linear BT.2020, by rows (ITU-R BT.2087).
const REC709_TO_BT2020: [[f32; 3]; 3] =
    [[0.6274039, 0.32928304, 0.04331307], [0.06909729, 0.9195404, 0.01136232], [0.01639144, 0.08801331, 0.89559525]];

/// Luma weights of BT.2020 for red, green and blue.
const LUMA: [f32; 3] = [0.2627, 0.6780, 0.0593];
/// Divisors of the differences of blue and red to the luma.
const CHROMA: [f32; 2] = [1.8814, 1.4746];

/// Constants of the HLG transfer function (ARIB STD-B67).
mod hlg {
    pub(super) const A: f64 = 0.17883277;
    pub(super) const B: f64 = 0.28466892;
    pub(super) const C: f64 = 0.55991073;
    /// Signal of diffuse white.
    pub(super) const WHITE: f64 = 0.75;
}

/// Constants of the PQ transfer function (SMPTE ST 2084).
mod pq {
    pub(super) const M1: f64 = 2610.0 / 16384.0;
    pub(super) const M2: f64 = 2523.0 / 4096.0 * 128.0;
    pub(super) const C1: f64 = 3424.0 / 4096.0;
    pub(super) const C2: f64 = 2413.0 / 4096.0 * 32.0;
    pub(super) const C3: f64 = 2392.0 / 4096.0 * 32.0;
    /// Luminance of diffuse white in nits (ITU-R BT.2408).
    pub(super) const WHITE: f32 = 203.0;
    /// Luminance of signal 1 in nits.
    pub(super) const PEAK: f32 = 10_000.0;
}

impl HdrSignal {
    /// Returns ffmpeg's name of the transfer function.
    fn transfer(self) -> &'static str {
        match self {
            HdrSignal::Hlg => "arib-std-b67",
            HdrSignal::Pq => "smpte2084",
        }
    }

    /// Returns the signal, 0 to 1, of a scene-linear value of at least 0.
    pub fn encode(self, linear: f32) -> f32 {
        match self {
            HdrSignal::Hlg => hlg_signal(linear),
            HdrSignal::Pq => {
                let light = f64::from((linear * pq::WHITE / pq::PEAK).min(1.0)).powf(pq::M1);
                ((pq::C1 + pq::C2 * light) / (1.0 + pq::C3 * light)).powf(pq::M2) as f32
            }
        }
    }
}

/// Returns the HLG signal of a scene-linear value. As in Lightricks' code, values up to diffuse white are scaled to the
/// light of signal 0.75, and the light of higher values approaches 1 exponentially, with the same slope.
fn hlg_signal(linear: f32) -> f32 {
    let white = (((hlg::WHITE - hlg::C) / hlg::A).exp() + hlg::B) / 12.0;
    let slope = white / (1.0 - white);
    let light = match linear <= 1.0 {
        true => linear * white as f32,
        false => 1.0 - (1.0 - white) as f32 * f64::from(-(slope as f32) * (linear - 1.0)).exp() as f32,
    };
    let signal = match light <= (1.0_f64 / 12.0) as f32 {
        true => (3.0 * light).max(0.0).sqrt(),
        false => hlg::A as f32 * f64::from((12.0 * light - hlg::B as f32).max(1e-12)).ln() as f32 + hlg::C as f32,
    };
    signal.clamp(0.0, 1.0)
}

impl HdrCodec {
    /// Returns ffmpeg's name of the encoder.
    fn encoder(self) -> &'static str {
        match self {
            HdrCodec::Hevc => "libx265",
            HdrCodec::Av1 => "libsvtav1",
        }
    }
}

/// Returns the error of encoding HDR video with this ffmpeg; `None` if it has the encoder.
pub fn hdr_video_fault(program: &Path, codec: HdrCodec) -> Option<MediaError> {
    let encoder = codec.encoder();
    ffmpeg::probe(program, &[encoder]).err().map(|reason| MediaError::HdrEncoder { reason, encoder })
}

/// Encodes scene-linear frames as 10-bit 4:2:0 video with BT.2020 primaries, limited range and the transfer function
/// `signal`, in an MP4 without sound. PQ video also states the maximum and the maximum average light level.
///
/// # Errors
/// Returns an error if the rate is invalid, if a side is odd, if `program` is no ffmpeg with the encoder, or if encoding
/// or writing fails.
pub fn write_hdr_video(
    path: &Path,
    frames: &HdrFrames,
    fps: f64,
    signal: HdrSignal,
    codec: HdrCodec,
    program: &Path,
    replace: bool,
) -> Result<()> {
    let rate = FrameRate::from_f64(fps)?;
    if let Some(fault) = hdr_video_fault(program, codec) {
        return Err(fault);
    }
    let (width, height) = (frames.width(), frames.height());
    if width % 2 + height % 2 > 0 {
        let reason = format!("4:2:0 video needs even sizes, but the frames have {width}x{height} pixels");
        return Err(MediaError::Container(reason));
    }
    let target = atomic_file::temporary_next_to(path, ".mp4")?;
    let mut command = Command::new(program);
    command.args(["-hide_banner", "-loglevel", "error", "-y", "-f", "rawvideo", "-pixel_format", "yuv420p10le"]);
    command.args(["-video_size", &format!("{width}x{height}"), "-framerate", &rate.to_string(), "-i", "pipe:0"]);
    command.args(encoder_arguments(frames, signal, codec));
    command.args(["-movflags", "+faststart", "-f", "mp4"]).arg(target.path());
    let each: Vec<ArrayView3<f32>> = (0..frames.count()).map(|index| frames.frame(index)).collect();
    failpoint::within("encode", atomic_file::name(path), || {
        let mut sink = FrameSink::spawn(command, path)?;
        sink.push_converted(&each, |frame| planes(frame, signal));
        sink.finish()
    })?;
    Ok(atomic_file::persist(target, path, replace)?)
}

/// Returns ffmpeg's arguments for encoder and colour tags.
fn encoder_arguments(frames: &HdrFrames, signal: HdrSignal, codec: HdrCodec) -> Vec<String> {
    let transfer = signal.transfer();
    // The filter only sets color metadata; it does not convert.
    let tags = format!("setparams=range=tv:color_primaries=bt2020:color_trc={transfer}:colorspace=bt2020nc");
    let mut all = vec!["-vf".to_string(), tags, "-c:v".into(), codec.encoder().into()];
    let light = (signal == HdrSignal::Pq).then(|| LightLevels::of(frames));
    let own = match codec {
        HdrCodec::Hevc => {
            let light =
                light.map_or(String::new(), |l| format!(":max-cll={},{}", l.brightest_pixel, l.brightest_frame));
            let tags = format!("colorprim=bt2020:transfer={transfer}:colormatrix=bt2020nc:range=limited");
            let parameters = format!("{tags}:repeat-headers=1:info=0:log-level=error{light}");
            ["-preset", "medium", "-crf", "12", "-tag:v", "hvc1", "-x265-params"]
                .map(String::from)
                .into_iter()
                .chain([parameters])
                .collect::<Vec<_>>()
        }
        HdrCodec::Av1 => {
            let mut own = ["-preset", "8", "-crf", "20"].map(String::from).to_vec();
            if let Some(light) = light {
                let levels = format!("content-light={},{}", light.brightest_pixel, light.brightest_frame);
                own.extend(["-svtav1-params".to_string(), levels]);
            }
            own
        }
    };
    all.extend(own);
    let tags = ["-pix_fmt", "yuv420p10le", "-color_range", "tv", "-color_primaries", "bt2020", "-color_trc", transfer];
    all.extend(tags.into_iter().chain(["-colorspace", "bt2020nc"]).map(String::from));
    all
}

/// Light levels of a video in nits (CTA-861.3), where the light of a pixel is that of its brightest channel.
struct LightLevels {
    /// Light of the brightest pixel (MaxCLL).
    brightest_pixel: u32,
    /// Largest average of a frame (MaxFALL).
    brightest_frame: u32,
}

impl LightLevels {
    fn of(frames: &HdrFrames) -> Self {
        let of_frame = |index: usize| {
            let frame = frames.frame(index);
            let pixels = frame.lanes(ndarray::Axis(0));
            let light = pixels.into_iter().map(|rgb| {
                let brightest = bt2020(rgb[0], rgb[1], rgb[2]).into_iter().fold(0.0, f32::max);
                (brightest * pq::WHITE).min(pq::PEAK)
            });
            light.fold((0.0_f32, 0.0_f64), |(most, sum), light| (most.max(light), sum + f64::from(light)))
        };
        let pixels = (frames.height() * frames.width()) as f64;
        let each: Vec<_> = (0..frames.count()).into_par_iter().map(of_frame).collect();
        LightLevels {
            brightest_pixel: each.iter().map(|(most, _)| *most).fold(0.0, f32::max).ceil() as u32,
            brightest_frame: each.iter().map(|(_, sum)| sum / pixels).fold(0.0, f64::max).ceil() as u32,
        }
    }
}

/// Converts a linear Rec. 709 pixel to linear BT.2020, at least 0.
fn bt2020(red: f32, green: f32, blue: f32) -> [f32; 3] {
    REC709_TO_BT2020.map(|row| (row[0] * red + row[1] * green + row[2] * blue).max(0.0))
}

impl HdrFrames {
    /// Returns the planes Y, U and V of a frame as little-endian 10-bit values. Panics if there is no such frame.
    #[doc(hidden)]
    pub fn planes(&self, index: usize, signal: HdrSignal) -> Vec<u8> {
        planes(&self.frame(index), signal)
    }
}

/// Returns the planes Y, U and V of a frame `[3, height, width]` as little-endian 10-bit values. A chroma value is the
/// mean of four pixels, as in Lightricks' code.
fn planes(frame: &ArrayView3<f32>, signal: HdrSignal) -> Vec<u8> {
    let (_, height, width) = frame.dim();
    let mut luma = Array2::<f32>::zeros((height, width));
    let mut chroma = [Array2::<f32>::zeros((height, width)), Array2::zeros((height, width))];
    for y in 0..height {
        for x in 0..width {
            let linear = bt2020(frame[[0, y, x]], frame[[1, y, x]], frame[[2, y, x]]);
            let [red, green, blue] = linear.map(|value| signal.encode(value));
            luma[[y, x]] = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue;
            chroma[0][[y, x]] = -LUMA[0] / CHROMA[0] * red - LUMA[1] / CHROMA[0] * green + 0.5 * blue;
            chroma[1][[y, x]] = 0.5 * red - LUMA[1] / CHROMA[1] * green - LUMA[2] / CHROMA[1] * blue;
        }
    }
    let mut bytes = Vec::with_capacity(3 * height * width);
    let mut push = |value: f32| bytes.extend((value.round_ties_even().clamp(0.0, 1023.0) as u16).to_le_bytes());
    luma.iter().for_each(|value| push(value * 876.0 + 64.0));
    for plane in &chroma {
        for y in 0..height / 2 {
            for x in 0..width / 2 {
                let mean = plane.slice(s![2 * y..2 * y + 2, 2 * x..2 * x + 2]).sum() / 4.0;
                push(mean * 896.0 + 512.0);
            }
        }
    }
    bytes
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
