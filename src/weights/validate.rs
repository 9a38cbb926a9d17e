//! Does a checkpoint hold what a model declares? From headers alone; and whether a tensor's numbers are finite.

use std::collections::BTreeSet;
use std::fmt;

use super::Component;
use super::checkpoint::{Checkpoint, TensorView};
use super::error::{Misscaled, WeightsError};
use super::keys::NOT_TEXT;
use crate::hlo::DType;
use crate::tensor::Tensor;

/// A tensor with another shape than declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misshaped {
    pub(crate) name: String,
    /// The declared shape.
    pub(crate) want: Vec<usize>,
    /// The file's shape.
    pub(crate) got: Vec<usize>,
}

/// Differences between a checkpoint and a declaration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ValidationReport {
    /// Tensors that agree.
    pub(crate) matched: usize,
    /// Bytes of the tensors that agree, as stored.
    pub(crate) bytes: u64,
    /// Declared, not there.
    pub(crate) missing: Vec<String>,
    /// There, with another shape.
    pub(crate) misshaped: Vec<Misshaped>,
    /// Scales of weights that are there, of a shape that is not read.
    pub(crate) misscaled: Vec<Misscaled>,
    /// There, but not floating point: name and element type.
    pub(crate) wrong_dtype: Vec<(String, String)>,
    /// There, not declared, and not known to change no result.
    pub(crate) extra: Vec<String>,
    /// Number of tensors that are there and change no result.
    pub(crate) inert: usize,
}

/// Beginnings of the names of tensors that change no result.
const INERT: [(Component, &[&str]); 5] = [
    // Images and sound, which prompts do not hold, and the language head.
    (Component::TextEncoder, &NOT_TEXT),
    (Component::TextEncoder, &["language_model.lm_head.", "lm_head."]),
    // A filter that whole scales do not apply.
    (Component::LatentUpsampler, &["upsampler.blur_down."]),
    // A preview of the video, which is not made.
    (Component::DiffusionDecoder, &["decoder.coarse_"]),
    // The way back from a spectrogram.
    (Component::Vocoder, &["mel_stft.stft_fn.inverse_basis"]),
];

/// Whether a tensor of a component changes no result.
pub fn is_inert(component: Component, name: &str) -> bool {
    let starts = INERT.iter().filter(|(of, _)| *of == component).flat_map(|(_, starts)| *starts);
    starts.into_iter().any(|start| name.starts_with(start))
}

/// Compares a component's checkpoint with the tensors its model declares.
pub(crate) fn validate<'a>(
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
                    report.bytes += view.size() as u64;
                    report.add_scales(checkpoint, name);
                }
                Err(_) => report.wrong_dtype.extend(checkpoint.dtype_name(name).map(|dtype| (name.into(), dtype))),
            },
        }
    }
    let beside = |name: &str, suffix: &str| {
        name.strip_suffix(suffix).is_some_and(|map| seen.contains(format!("{map}.weight").as_str()))
    };
    // Activations have scales of their own, taken as they come.
    let inert = |n: &str| is_inert(component, n) || beside(n, ".input_scale");
    let unread = checkpoint.names().filter(|n| !seen.contains(n) && !beside(n, ".weight_scale"));
    let (inert, extra): (Vec<_>, Vec<_>) = unread.map(String::from).partition(|n| inert(n));
    ValidationReport { inert: inert.len(), extra, ..report }
}

impl ValidationReport {
    /// Adds what is wrong with the dequantization scales of a weight.
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

    /// True when every declared tensor is there as declared, and no other.
    pub(crate) fn is_ok(&self) -> bool {
        self.missing.is_empty()
            && self.misshaped.is_empty()
            && self.misscaled.is_empty()
            && self.wrong_dtype.is_empty()
            && self.extra.is_empty()
    }

    /// An error that names the first differences, unless [`ValidationReport::is_ok`].
    pub(crate) fn into_result(self, component: Component, checkpoint: &Checkpoint) -> Result<Self, WeightsError> {
        if self.is_ok() {
            return Ok(self);
        }
        let path = checkpoint.path().to_path_buf();
        Err(WeightsError::Mismatch { path, component, summary: self.to_string() })
    }

    /// Every difference, a line each.
    pub(crate) fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.missing.iter().map(|n| format!("missing    {n}")).collect();
        lines.extend(self.misshaped.iter().map(|m| format!("mis-shaped {m}")));
        lines.extend(self.misscaled.iter().map(|m| format!("mis-scaled {m}")));
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

/// One line: counts, and the first three of each kind.
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
        // Each ends with advice, which one is enough for.
        let scales = self.misscaled.iter().take(1).map(ToString::to_string).collect();
        parts.extend(part(self.misscaled.len(), "with scales that are not read", scales));
        let types = self.wrong_dtype.iter().take(3).map(|(n, d)| format!("{n}: {d}")).collect();
        parts.extend(part(self.wrong_dtype.len(), "not floating point", types));
        parts.extend(part(self.extra.len(), "that nothing reads", self.extra.iter().take(3).cloned().collect()));
        match parts.is_empty() {
            true => write!(f, "all {} tensors agree", self.matched),
            false => f.write_str(&parts.join("; ")),
        }
    }
}

/// Position of the first infinity or not-a-number in row-major little-endian bytes; none for integers.
pub(crate) fn first_non_finite(dtype: DType, bytes: &[u8]) -> Option<usize> {
    // All exponent bits set: the bytes that hold them are looked at without converting, and a block at once, so that the
    // processor's vectors take it at memory speed.
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

/// An error that names file, key and index of the first infinity or not-a-number among a tensor's bytes from `offset` on.
pub(crate) fn check_finite(view: &TensorView, offset: usize, bytes: &[u8]) -> Result<(), WeightsError> {
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

/// A tensor's bytes, all of them numbers.
pub(crate) fn read_finite(view: &TensorView) -> Result<Vec<u8>, WeightsError> {
    let bytes = view.read()?;
    check_finite(view, 0, &bytes)?;
    Ok(bytes)
}

/// A tensor, all of it numbers.
pub(crate) fn finite_tensor(view: &TensorView) -> Result<Tensor, WeightsError> {
    view.with_bytes(&read_finite(view)?)
}
