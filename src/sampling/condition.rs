//! Conditioning inputs of the denoising loop: tokens with known clean latents.

use crate::hlo::Value;

/// Conditioning inputs of one stream.
pub(super) struct ConditionInputs {
    /// Fraction of the step's noise level that applies to each token, `[b, n, 1]`, f32; 0 keeps the clean latents.
    pub(crate) denoise_mask: Value,
    /// Known clean latents, `[b, n, c]`, f32.
    pub(crate) clean: Value,
    /// Index of each token's noise level, `[b, n]`, i32.
    pub(crate) noise_level_index: Value,
}

impl ConditionInputs {
    /// Blends `x` with the clean latents: `x * mask + clean * (1 - mask)`.
    pub(crate) fn apply(&self, x: &Value) -> Value {
        x * &self.denoise_mask + &self.clean * (self.denoise_mask.like(1.0) - &self.denoise_mask)
    }
}
