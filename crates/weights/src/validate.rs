//! Comparison of a checkpoint's headers with the tensors that a model declares, and checks for non-finite values.

use std::collections::BTreeSet;
use std::fmt;

use super::Component;
use super::checkpoint::{Checkpoint, TensorView};
use super::error::{Misscaled, WeightsError};
use super::text_encoders::NON_TEXT_MODULES;
use crate::tensor::Tensor;
use ltx2_stablehlo::DType;

/// A tensor whose shape differs from its declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misshaped {
    /// The declared name, as in the diffusers layout.
    pub name: String,
    /// The declared shape.
    pub want: Vec<usize>,
    /// The shape in the file.
    pub got: Vec<usize>,
}

/// Differences between a checkpoint and a model's declaration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ValidationReport {
    /// Number of tensors that match.
    pub matched: usize,
    /// Stored bytes of the tensors that match.
    pub bytes: u64,
    /// Declared tensors that the checkpoint lacks.
    pub missing: Vec<String>,
    /// Tensors whose shape differs from their declaration.
    pub misshaped: Vec<Misshaped>,
    /// Dequantization scales with an unsupported shape.
    pub misscaled: Vec<Misscaled>,
    /// Declared tensors that are not floating point: name and element type.
    pub wrong_dtype: Vec<(String, String)>,
    /// Tensors that are neither declared nor known to be unused.
    pub extra: Vec<String>,
    /// Number of tensors in the checkpoint that are known to be unused.
    pub inert: usize,
}

/// Name prefixes of tensors that have no effect on results.
const INERT: [(Component, &[&str]); 5] = [
    // Image and audio modules, which prompts do not use, and the language head.
    (Component::TextEncoder, &NON_TEXT_MODULES),
    (Component::TextEncoder, &["language_model.lm_head.", "lm_head."]),
    // A filter that upsamplers with an integer scale do not use.
    (Component::LatentUpsampler, &["upsampler.blur_down."]),
    // The head for a preview of the video, which this program does not use.
    (Component::DiffusionDecoder, &["decoder.coarse_"]),
    // The inverse transform of the spectrogram.
    (Component::Vocoder, &["mel_stft.stft_fn.inverse_basis"]),
];

/// Returns whether a tensor of a component has no effect on results.
pub fn is_inert(component: Component, name: &str) -> bool {
    let starts = INERT.iter().filter(|(of, _)| *of == component).flat_map(|(_, starts)| *starts);
    starts.into_iter().any(|start| name.starts_with(start))
}

/// Compares a component's checkpoint with the tensors that its model declares.
pub fn validate<'a>(
    checkpoint: &Checkpoint,
    component: Component,
    expected: impl IntoIterator<Item = (&'a str, &'a [usize])>,
) -> ValidationReport {
    let mut report = ValidationReport::default();
    let mut seen = BTreeSet::new();
    for (name, want) in expected {
        if !seen.insert(name) {
            continue;
        }
        match checkpoint.shape(name) {
            None => report.missing.push(name.into()),
            Some(got) if got != want => {
                report.misshaped.push(Misshaped { name: name.into(), want: want.to_vec(), got: got.to_vec() });
            }
            Some(_) => match checkpoint.get_float(name) {
                Ok(view) => {
                    report.matched += 1;
                    report.bytes += view.stored_size() as u64;
                    report.add_scales(checkpoint, name);
                }
                Err(_) => report.wrong_dtype.extend(checkpoint.dtype_name(name).map(|dtype| (name.into(), dtype))),
            },
        }
    }
    let beside = |name: &str, suffix: &str| {
        name.strip_suffix(suffix).is_some_and(|map| seen.contains(format!("{map}.weight").as_str()))
    };
    // Activation scales are not used: activations are not quantized.
    let inert = |n: &str| is_inert(component, n) || beside(n, ".input_scale");
    let unread = checkpoint.names().filter(|n| !seen.contains(n) && !beside(n, ".weight_scale"));
    let (inert, extra): (Vec<_>, Vec<_>) = unread.map(String::from).partition(|n| inert(n));
    ValidationReport { inert: inert.len(), extra, ..report }
}

impl ValidationReport {
    /// Adds problems with a weight's dequantization scales to the report.
    fn add_scales(&mut self, checkpoint: &Checkpoint, name: &str) {
        if !name.ends_with(".weight") {
            return;
        }
        match checkpoint.scales_of(name) {
            Ok(_) => {}
            Err(WeightsError::Scales { scales, .. }) => self.misscaled.push(scales),
            Err(_) => {
                let scales = format!("{name}_scale");
                self.wrong_dtype.extend(checkpoint.dtype_name(&scales).map(|dtype| (scales, dtype)));
            }
        }
    }

    /// Returns whether the checkpoint contains exactly the declared tensors.
    pub fn is_ok(&self) -> bool {
        self.missing.is_empty()
            && self.misshaped.is_empty()
            && self.misscaled.is_empty()
            && self.wrong_dtype.is_empty()
            && self.extra.is_empty()
    }

    /// Returns an error that lists the first differences, unless [`ValidationReport::is_ok`] returns true.
    pub fn into_result(self, component: Component, checkpoint: &Checkpoint) -> Result<Self, WeightsError> {
        if self.is_ok() {
            return Ok(self);
        }
        let path = checkpoint.path().to_path_buf();
        Err(WeightsError::Mismatch { path, component, summary: self.to_string() })
    }

    /// Lists every difference, one per line.
    pub fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.missing.iter().map(|n| format!("missing    {n}")).collect();
        lines.extend(self.misshaped.iter().map(|m| format!("mis-shaped {m}")));
        lines.extend(self.misscaled.iter().map(|m| format!("mis-scaled {}: {m}", m.file.display())));
        lines.extend(self.wrong_dtype.iter().map(|(n, d)| format!("wrong type {n}: {d}, not floating point")));
        lines.extend(self.extra.iter().map(|n| format!("extra      {n}")));
        lines
    }
}

impl fmt::Display for Misshaped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: file {:?}, model {:?}", self.name, self.got, self.want)
    }
}

/// Formats one line with the counts and the first three tensors of each kind of difference.
impl fmt::Display for ValidationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |count: usize, what: &str, firsts: Vec<String>| {
            let more = if count > firsts.len() { ", …" } else { "" };
            (count > 0).then(|| format!("{count} {what} ({}{more})", firsts.join(", ")))
        };
        let mut parts = vec![];
        parts.extend(part(self.missing.len(), "missing", self.missing.iter().take(3).cloned().collect()));
        let shapes = self.misshaped.iter().take(3).map(ToString::to_string).collect();
        parts.extend(part(self.misshaped.len(), "mis-shaped", shapes));
        // Lists only the first, because every message ends with the same advice.
        let scales = self.misscaled.iter().take(1).map(|m| format!("{}: {m}", m.file.display())).collect();
        parts.extend(part(self.misscaled.len(), "with unsupported scales", scales));
        let types = self.wrong_dtype.iter().take(3).map(|(n, d)| format!("{n}: {d}")).collect();
        parts.extend(part(self.wrong_dtype.len(), "not floating point", types));
        parts.extend(part(self.extra.len(), "unknown", self.extra.iter().take(3).cloned().collect()));
        match parts.is_empty() {
            true => write!(f, "all {} tensors agree", self.matched),
            false => f.write_str(&parts.join("; ")),
        }
    }
}

/// Returns the index of the first infinity or NaN in row-major little-endian bytes. `None`: all values are finite, or
/// the type is not a float.
pub(crate) fn first_non_finite(dtype: DType, bytes: &[u8]) -> Option<usize> {
    // Infinity and NaN have all exponent bits set. The bits are tested without conversion and in blocks, so that the
    // compiler vectorizes the loop and it runs at memory speed.
    fn scan<const N: usize>(bytes: &[u8], word: impl Fn([u8; N]) -> bool) -> Option<usize> {
        const BLOCK: usize = 4096;
        let words = bytes.as_chunks::<N>().0;
        let any = |block: &[[u8; N]]| block.iter().fold(false, |any, c| any | word(*c));
        let block = words.chunks(BLOCK).position(any)?;
        words[block * BLOCK..].iter().position(|c| word(*c)).map(|at| block * BLOCK + at)
    }
    match dtype {
        DType::F8E4M3FN => scan(bytes, |[c]| c & 0x7f == 0x7f),
        DType::BF16 => scan(bytes, |c| u16::from_le_bytes(c) & 0x7f80 == 0x7f80),
        DType::F16 => scan(bytes, |c| u16::from_le_bytes(c) & 0x7c00 == 0x7c00),
        DType::F32 => scan(bytes, |c| u32::from_le_bytes(c) & 0x7f80_0000 == 0x7f80_0000),
        DType::F64 => scan(bytes, |c| u64::from_le_bytes(c) & 0x7ff0_0000_0000_0000 == 0x7ff0_0000_0000_0000),
        _ => None,
    }
}

/// Returns an error with file, key and index of the first infinity or NaN; `bytes` are the tensor's bytes from
/// `offset`.
pub fn check_finite(view: &TensorView, offset: usize, bytes: &[u8]) -> Result<(), WeightsError> {
    let Some(first) = first_non_finite(view.dtype(), bytes) else { return Ok(()) };
    let size = view.dtype().size();
    let value = Tensor::from_bytes(view.dtype(), &[1], &bytes[first * size..][..size])
        .map_or(f64::NAN, |t| f64::from(t.to_f32()[[0]]));
    let mut flat = offset / size + first;
    let mut index = vec![0; view.shape().len()];
    for (i, d) in view.shape().iter().enumerate().rev() {
        index[i] = flat % d;
        flat /= d;
    }
    Err(WeightsError::NonFinite { path: view.file().to_path_buf(), key: view.key().into(), index, value })
}

/// Reads a tensor's bytes and checks that all values are finite.
pub fn read_finite(view: &TensorView) -> Result<Vec<u8>, WeightsError> {
    let bytes = view.read()?;
    check_finite(view, 0, &bytes)?;
    Ok(bytes)
}

/// Reads a tensor and checks that all values are finite.
pub fn finite_tensor(view: &TensorView) -> Result<Tensor, WeightsError> {
    view.with_bytes(&read_finite(view)?)
}
