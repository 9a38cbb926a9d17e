//! Weights as 8-bit floats of the form e5m2, which no program computes with: they are read as bf16, which holds each of them.

use std::sync::Arc;

use safetensors::Dtype;

use super::{Checkpoint, EightBits, Entry, known};
use crate::hlo::DType;

impl Checkpoint {
    /// Reads e5m2 as bf16, or with dequantization scales as f32. Scales of another shape or type stay, and are refused where the
    /// weights are compared with the model's.
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
