//! Weights of the 8-bit float type e5m2, which compiled programs do not use. They are read as bf16, which represents
//! every e5m2 value exactly.

use std::sync::Arc;

use safetensors::Dtype;

use super::{Checkpoint, EightBits, Entry, known};
use ltx2_stablehlo::DType;

impl Checkpoint {
    /// Reads e5m2 as bf16, or as f32 if there are dequantization scales. Scales of an unsupported shape or type are
    /// kept and reported by validation.
    pub(super) fn with_e5m2_weights(mut self) -> Self {
        let is_e5m2 = |(name, entry): (&String, &Entry)| (entry.dtype == Dtype::F8_E5M2).then(|| name.clone());
        let names: Vec<String> = self.tensors.iter().filter_map(is_e5m2).collect();
        for name in names {
            let scales = format!("{name}_scale");
            let is_float = |entry: &Entry| {
                matches!(known(entry.dtype), Some(DType::BF16 | DType::F16 | DType::F32)) && entry.eight_bits.is_none()
            };
            let factors = match self.scales_of(&name) {
                Ok(Some(_)) => self.tensors.get(&scales).filter(|entry| is_float(entry)).cloned(),
                _ => None,
            };
            let tensors = Arc::make_mut(&mut self.tensors);
            if factors.is_some() {
                tensors.remove(&scales);
            }
            if let Some(entry) = tensors.get_mut(&name) {
                entry.dtype = if factors.is_some() { Dtype::F32 } else { Dtype::BF16 };
                entry.factors = factors.map(Box::new);
                entry.eight_bits = Some(EightBits::E5M2);
            }
        }
        self
    }
}
