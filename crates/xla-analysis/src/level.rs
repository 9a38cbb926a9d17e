//! The loops of a program: over denoising steps, and over transformer blocks.

/// Loop that an instruction runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum LoopLevel {
    /// Once, before or after the loop over steps.
    #[serde(rename = "call")]
    Outside,
    /// In every step, outside the transformer blocks.
    Step,
    /// In every transformer block.
    #[serde(rename = "layer")]
    Block,
}

/// The name scope of the transformer blocks.
pub(super) const BLOCKS: &str = "blocks";

pub(super) fn in_blocks(scope: &str) -> bool {
    scope.split('/').any(|part| part == BLOCKS)
}
