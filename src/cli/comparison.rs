//! Results to compare, and their scores.

use std::collections::BTreeMap;
use std::path::Path;

use ndarray::{Array2, Array4};
use serde::Serialize;

use super::UsageError;
use crate::media::{self, Frames};
use crate::pipeline::output::tensors;
use crate::quality::{AudioScores, TensorScores, VideoScores};
use crate::tensor::Tensor;

#[derive(Default)]
pub(super) struct ComparedClip {
    /// Frames `[frames, 3, height, width]`, values in 0..1.
    pub(crate) video: Option<Array4<f32>>,
    /// Audio `[channels, samples]`, and its sample rate if known.
    pub(crate) audio: Option<(Array2<f32>, Option<u32>)>,
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

/// Reads a result; the file extension determines its format.
pub(super) fn read(path: &Path) -> Result<ComparedClip, UsageError> {
    let bad = |e: &dyn std::fmt::Display| UsageError(e.to_string());
    let video = |frames: Frames| frames.to_video();
    if path.is_dir() {
        let frames = media::read_png_frames(path).map_err(|e| bad(&e))?;
        return Ok(ComparedClip { video: Some(video(frames)), ..ComparedClip::default() });
    }
    match path.extension().and_then(|e| e.to_str()).map(str::to_lowercase).as_deref() {
        Some("safetensors") => dump(tensors::read(path).map_err(|e| bad(&e))?),
        Some("wav") => {
            let audio = media::read_wav(path).map_err(|e| bad(&e))?;
            Ok(ComparedClip { audio: Some((audio.samples().clone(), Some(audio.rate()))), ..ComparedClip::default() })
        }
        Some("png") => {
            let frames = media::read_png(path).map_err(|e| bad(&e))?;
            Ok(ComparedClip { video: Some(video(frames)), ..ComparedClip::default() })
        }
        _ => {
            let (frames, audio) = media::read_video(path, Path::new("ffmpeg")).map_err(|e| bad(&e))?;
            let audio = audio.map(|a| (a.samples().clone(), Some(a.rate())));
            Ok(ComparedClip { video: frames.map(video), audio, ..ComparedClip::default() })
        }
    }
}

/// Converts the tensors `video [b, f, 3, h, w]` and `audio [b, channels, samples]` of a dump file into frames and
/// audio, if they have these shapes.
fn dump(mut tensors: BTreeMap<String, Tensor>) -> Result<ComparedClip, UsageError> {
    let mut clip = ComparedClip::default();
    if let Some(&[n, f, 3, h, w]) = tensors.get("video").map(Tensor::shape) {
        let values = tensors.remove("video").expect("its shape is known").into_f32();
        clip.video = values.into_shape_with_order((n * f, 3, h, w)).ok();
    }
    if let Some(&[n, c, samples]) = tensors.get("audio").map(Tensor::shape) {
        let values = tensors.remove("audio").expect("its shape is known").into_f32();
        clip.audio = values.into_shape_with_order((n * c, samples)).ok().map(|samples| (samples, None));
    }
    clip.tensors = tensors;
    Ok(clip)
}

#[derive(Default, Serialize)]
pub(super) struct Scores {
    pub(crate) a: String,
    pub(crate) b: String,
    pub(crate) video: Option<VideoScores>,
    pub(crate) audio: Option<AudioScores>,
    pub(crate) tensors: BTreeMap<String, TensorScores>,
    pub(crate) only_in_one: Vec<String>,
}

/// Formats a number with four decimals, or with an exponent if it is small or large.
pub(super) fn number(v: f64) -> String {
    match v.abs() {
        a if a == 0.0 || (1e-3..1e5).contains(&a) => format!("{v:.4}"),
        a if a.is_finite() => format!("{v:.3e}"),
        _ => v.to_string(),
    }
}

/// Returns the rows of the table: metric, value, value of the worst frame.
pub(super) fn rows(scores: &Scores) -> Vec<[String; 3]> {
    let mut rows = Vec::new();
    let mut row = |name: &str, value: f64, worst: Option<f64>| {
        rows.push([name.to_string(), number(value), worst.map(number).unwrap_or_default()]);
    };
    if let Some(v) = &scores.video {
        row("PSNR (dB)", v.psnr, Some(v.worst_psnr));
        row("SSIM", v.ssim, Some(v.worst_ssim));
        row("mean absolute difference (1/255)", v.mad, Some(v.worst_mad));
    }
    if let Some(a) = &scores.audio {
        row("audio relative L2", a.relative_l2, None);
        row("audio cosine", a.cosine, None);
        row("audio spectral similarity", a.spectral, None);
    }
    for (name, t) in &scores.tensors {
        row(&format!("{name} relative L2"), t.relative_l2, None);
        row(&format!("{name} cosine"), t.cosine, None);
        row(&format!("{name} max difference"), t.max_abs, None);
    }
    rows
}
