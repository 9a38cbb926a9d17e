//! Tokens whose clean latents are known, as the loop reads them.

use crate::hlo::Value;

/// Tokens of a stream with clean latents of their own.
pub(super) struct ConditionInputs {
    /// Part of the step's noise level that each token has, `[b, n, 1]`, f32.
    pub(crate) denoise_mask: Value,
    /// The tokens where the mask is 0, `[b, n, c]`, f32.
    pub(crate) clean: Value,
    /// Index of the tokens' noise level, `[b, n]`, i32.
    pub(crate) noise_level_index: Value,
}

impl ConditionInputs {
    /// `x` with the clean latents in their place.
    pub(crate) fn apply(&self, x: &Value) -> Value {
        x * &self.denoise_mask + &self.clean * (self.denoise_mask.like(1.0) - &self.denoise_mask)
    }
}
