//! Element types of GGUF files: blocks of values with shared scales, as ggml defines them.

use std::sync::Arc;

use super::view::decoder::{NumberDecoder, half_to_f32};
use crate::error::WeightsError;
use ltx2_stablehlo::DType;

/// Converts whole blocks to f32.
type Decode = fn(&[u8], &mut [f32]);

/// An element type.
#[derive(Debug)]
pub(super) struct GgufType {
    id: u32,
    /// Name in lower case.
    pub(super) name: &'static str,
    /// Number of values per block.
    pub(super) block: usize,
    /// Number of bytes per block.
    pub(super) bytes: usize,
    /// Element type of the stored values. `None`: the values need a decoder.
    pub(super) plain: Option<DType>,
    decode: Decode,
}

impl GgufType {
    pub(super) fn decoder(&'static self) -> Option<Arc<dyn NumberDecoder>> {
        self.plain.is_none().then(|| Arc::new(GgufBlocks(self)) as Arc<dyn NumberDecoder>)
    }
}

const fn plain(id: u32, name: &'static str, dtype: DType) -> GgufType {
    GgufType { id, name, block: 1, bytes: dtype.size(), plain: Some(dtype), decode: |_, _| {} }
}

const fn blocks(id: u32, name: &'static str, block: usize, bytes: usize, decode: Decode) -> GgufType {
    GgufType { id, name, block, bytes, plain: None, decode }
}

static KINDS: [GgufType; 18] = [
    plain(0, "f32", DType::F32),
    plain(1, "f16", DType::F16),
    plain(30, "bf16", DType::BF16),
    plain(28, "f64", DType::F64),
    plain(24, "i8", DType::I8),
    plain(26, "i32", DType::I32),
    blocks(8, "q8_0", 32, 34, |codes, values| each(codes, values, q8_0)),
    blocks(2, "q4_0", 32, 18, |codes, values| each(codes, values, q4_0)),
    blocks(3, "q4_1", 32, 20, |codes, values| each(codes, values, q4_1)),
    blocks(6, "q5_0", 32, 22, |codes, values| each(codes, values, q5_0)),
    blocks(7, "q5_1", 32, 24, |codes, values| each(codes, values, q5_1)),
    blocks(10, "q2_k", 256, 84, |codes, values| each(codes, values, q2_k)),
    blocks(11, "q3_k", 256, 110, |codes, values| each(codes, values, q3_k)),
    blocks(12, "q4_k", 256, 144, |codes, values| each(codes, values, q4_k)),
    blocks(13, "q5_k", 256, 176, |codes, values| each(codes, values, q5_k)),
    blocks(14, "q6_k", 256, 210, |codes, values| each(codes, values, q6_k)),
    blocks(20, "iq4_nl", 32, 18, |codes, values| each(codes, values, iq4_nl)),
    blocks(23, "iq4_xs", 256, 136, |codes, values| each(codes, values, iq4_xs)),
];

/// Names of types that are not supported.
const OTHERS: [(u32, &str); 12] = [
    (9, "q8_1"),
    (15, "q8_k"),
    (16, "iq2_xxs"),
    (17, "iq2_xs"),
    (18, "iq3_xxs"),
    (19, "iq1_s"),
    (21, "iq3_s"),
    (22, "iq2_s"),
    (29, "iq1_m"),
    (34, "tq1_0"),
    (35, "tq2_0"),
    (39, "mxfp4"),
];

/// Returns the type with the number `id` in the header. The error is the name of an unsupported type.
pub(super) fn find(id: u32) -> Result<&'static GgufType, String> {
    let name =
        || OTHERS.iter().find(|(other, _)| *other == id).map_or_else(|| id.to_string(), |(_, name)| (*name).into());
    KINDS.iter().find(|kind| kind.id == id).ok_or_else(name)
}

/// Lists the supported types.
pub(super) fn names() -> String {
    KINDS
        .iter()
        .filter(|kind| kind.plain.is_none_or(DType::is_float))
        .map(|kind| kind.name)
        .collect::<Vec<_>>()
        .join(", ")
}

#[derive(Debug)]
struct GgufBlocks(&'static GgufType);

impl NumberDecoder for GgufBlocks {
    fn unit(&self) -> (usize, usize) {
        (self.0.block, self.0.bytes)
    }

    fn decode(&self, _: usize, codes: &[u8], values: &mut [f32]) -> Result<(), WeightsError> {
        (self.0.decode)(codes, values);
        Ok(())
    }
}

fn each<const BYTES: usize, const N: usize>(
    codes: &[u8],
    values: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; N]),
) {
    codes.as_chunks().0.iter().zip(values.as_chunks_mut().0).for_each(|(codes, values)| decode(codes, values));
}

/// Returns the f16 at a byte offset.
fn half(codes: &[u8], at: usize) -> f32 {
    half_to_f32(u16::from_le_bytes([codes[at], codes[at + 1]]))
}

fn q8_0(codes: &[u8; 34], values: &mut [f32; 32]) {
    let scale = half(codes, 0);
    values.iter_mut().zip(&codes[2..]).for_each(|(value, code)| *value = scale * f32::from(code.cast_signed()));
}

/// Decodes nibbles: the low nibbles of all bytes, then the high nibbles. `value` gets the index and the nibble.
fn nibbles(codes: &[u8], values: &mut [f32], value: impl Fn(usize, u8) -> f32) {
    let (low, high) = values.split_at_mut(codes.len());
    for (i, ((low, high), code)) in low.iter_mut().zip(high).zip(codes).enumerate() {
        *low = value(i, code & 15);
        *high = value(i + codes.len(), code >> 4);
    }
}

fn q4_0(codes: &[u8; 18], values: &mut [f32; 32]) {
    let scale = half(codes, 0);
    nibbles(&codes[2..], values, |_, code| scale * f32::from(code.cast_signed() - 8));
}

fn q4_1(codes: &[u8; 20], values: &mut [f32; 32]) {
    let (scale, least) = (half(codes, 0), half(codes, 2));
    nibbles(&codes[4..], values, |_, code| scale * f32::from(code) + least);
}

/// Returns bit `i` of `bits`, shifted to the position of a code's fifth bit.
fn fifth(bits: u32, i: usize) -> u8 {
    ((bits >> i & 1) << 4) as u8
}

fn q5_0(codes: &[u8; 22], values: &mut [f32; 32]) {
    let (scale, bits) = (half(codes, 0), u32::from_le_bytes([codes[2], codes[3], codes[4], codes[5]]));
    nibbles(&codes[6..], values, |i, code| scale * f32::from((code | fifth(bits, i)).cast_signed() - 16));
}

fn q5_1(codes: &[u8; 24], values: &mut [f32; 32]) {
    let (scale, least) = (half(codes, 0), half(codes, 2));
    let bits = u32::from_le_bytes([codes[4], codes[5], codes[6], codes[7]]);
    nibbles(&codes[8..], values, |i, code| scale * f32::from(code | fifth(bits, i)) + least);
}

fn q2_k(codes: &[u8; 84], values: &mut [f32; 256]) {
    let (scale, least) = (half(codes, 80), half(codes, 82));
    for (i, part) in values.chunks_exact_mut(16).enumerate() {
        let (scale, least) = (scale * f32::from(codes[i] & 15), least * f32::from(codes[i] >> 4));
        let (from, shift) = (16 + i / 8 * 32 + i % 2 * 16, i / 2 % 4 * 2);
        let codes = &codes[from..from + 16];
        part.iter_mut().zip(codes).for_each(|(value, code)| *value = scale * f32::from(code >> shift & 3) - least);
    }
}

fn q3_k(codes: &[u8; 110], values: &mut [f32; 256]) {
    let scale = half(codes, 108);
    for (i, part) in values.chunks_exact_mut(16).enumerate() {
        let low = codes[96 + i % 8] >> (i / 8 * 4) & 15;
        let high = codes[104 + i % 4] >> (i / 4 * 2) & 3;
        let scale = scale * f32::from((low | high << 4).cast_signed() - 32);
        let (from, shift, bit) = (32 + i / 8 * 32 + i % 2 * 16, i / 2 % 4 * 2, i / 2);
        let bits = &codes[i % 2 * 16..][..16];
        for ((value, code), bits) in part.iter_mut().zip(&codes[from..from + 16]).zip(bits) {
            let offset = (!bits >> bit & 1) << 2;
            *value = scale * f32::from((code >> shift & 3).cast_signed() - offset.cast_signed());
        }
    }
}

/// Returns pair `i` of the 8 pairs of scale and minimum, 6 bits each, that are packed in 12 bytes.
fn pair(codes: &[u8], i: usize) -> (u8, u8) {
    if i < 4 {
        return (codes[i] & 63, codes[4 + i] & 63);
    }
    let low = codes[4 + i];
    (low & 15 | codes[i - 4] >> 2 & 48, low >> 4 | codes[i] >> 2 & 48)
}

fn q4_k(codes: &[u8; 144], values: &mut [f32; 256]) {
    let (scale, least) = (half(codes, 0), half(codes, 2));
    for (i, part) in values.chunks_exact_mut(32).enumerate() {
        let (factor, minimum) = pair(&codes[4..16], i);
        let (scale, least, shift) = (scale * f32::from(factor), least * f32::from(minimum), i % 2 * 4);
        let codes = &codes[16 + i / 2 * 32..][..32];
        part.iter_mut().zip(codes).for_each(|(value, code)| *value = scale * f32::from(code >> shift & 15) - least);
    }
}

fn q5_k(codes: &[u8; 176], values: &mut [f32; 256]) {
    let (scale, least) = (half(codes, 0), half(codes, 2));
    let (bits, nibbles) = codes[16..].split_at(32);
    for (i, part) in values.chunks_exact_mut(32).enumerate() {
        let (factor, minimum) = pair(&codes[4..16], i);
        let (scale, least, shift) = (scale * f32::from(factor), least * f32::from(minimum), i % 2 * 4);
        for ((value, code), bits) in part.iter_mut().zip(&nibbles[i / 2 * 32..]).zip(bits) {
            *value = scale * f32::from(code >> shift & 15 | (bits >> i & 1) << 4) - least;
        }
    }
}

fn q6_k(codes: &[u8; 210], values: &mut [f32; 256]) {
    let scale = half(codes, 208);
    for (i, part) in values.chunks_exact_mut(16).enumerate() {
        let scale = scale * f32::from(codes[192 + i].cast_signed());
        let (half, row, at) = (i / 8, i / 2 % 4, i % 2 * 16);
        let low = &codes[half * 64 + row % 2 * 32 + at..][..16];
        let high = &codes[128 + half * 32 + at..][..16];
        let (shift, place) = (row / 2 * 4, row * 2);
        for ((value, low), high) in part.iter_mut().zip(low).zip(high) {
            let code = low >> shift & 15 | (high >> place & 3) << 4;
            *value = scale * f32::from(code.cast_signed() - 32);
        }
    }
}

/// Values of the 4-bit codes of `iq4_nl` and `iq4_xs`.
const IQ4: [f32; 16] =
    [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

fn iq4_nl(codes: &[u8; 18], values: &mut [f32; 32]) {
    let scale = half(codes, 0);
    nibbles(&codes[2..], values, |_, code| scale * IQ4[usize::from(code)]);
}

fn iq4_xs(codes: &[u8; 136], values: &mut [f32; 256]) {
    let (scale, high) = (half(codes, 0), u16::from_le_bytes([codes[2], codes[3]]));
    for (i, part) in values.chunks_exact_mut(32).enumerate() {
        let factor = codes[4 + i / 2] >> (i % 2 * 4) & 15 | ((high >> (2 * i) & 3) << 4) as u8;
        let scale = scale * f32::from(factor.cast_signed() - 32);
        nibbles(&codes[8 + 16 * i..][..16], part, |_, code| scale * IQ4[usize::from(code)]);
    }
}
