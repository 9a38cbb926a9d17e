//! The orders of roundings in which LoRAs are merged.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where merging LoRAs into a weight rounds; matmuls are summed in f32 in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MergeOrder {
    /// Lightricks' loader: `A`, `B` and `strength * B` to bf16, each LoRA added to the sum of those before it in bf16,
    /// then the weight in bf16, also where it is stored in f32.
    #[default]
    Official,
    /// Lightricks' loader of 1.0.0: `strength * B` and its matmul with `A` in the LoRA's own type, then to bf16, the sum of
    /// all rounded once to bf16, then the weight in bf16.
    #[serde(rename = "official_1_0")]
    Official1,
    /// `fuse_lora` of diffusers: each LoRA's `B*A` times its factor rounded to the weight's type, then its sum with the
    /// weight.
    Diffusers,
    /// Everything in f32, the sum rounded once to the weight's type.
    Exact,
}
