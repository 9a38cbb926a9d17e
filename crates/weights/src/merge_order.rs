//! Rounding orders of LoRA merging.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Rounding of intermediate results when LoRAs are merged into a weight. Matmuls accumulate in f32 in all orders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MergeOrder {
    /// Lightricks' loader: rounds `A`, `B` and `strength * B` to bf16, adds each LoRA to the previous sum in bf16, then
    /// adds the weight in bf16, even if the weight is stored in f32.
    #[default]
    Official,
    /// Lightricks' loader 1.0.0: computes `strength * B` and its matmul with `A` in the LoRA's own type, rounds the
    /// product to bf16, rounds the sum of all LoRAs once to bf16, then adds the weight in bf16.
    #[serde(rename = "official_1_0")]
    Official1,
    /// `fuse_lora` of diffusers: rounds each LoRA's `B*A` times its factor to the weight's type, then its sum with the
    /// weight.
    Diffusers,
    /// Computes everything in f32 and rounds the result once to the weight's type.
    Exact,
}
