//! The loops of a program over denoising steps and over transformer blocks.

/// Innermost loop that contains an operation, which determines how often the operation runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum LoopLevel {
    /// Runs once per call of the program, before or after the loop over denoising steps.
    #[serde(rename = "call")]
    Outside,
    /// Runs in every denoising step, outside the loop over transformer blocks.
    Step,
    /// Runs in every transformer block.
    #[serde(rename = "layer")]
    Block,
}

/// Name scope of the transformer blocks.
pub(super) const BLOCKS: &str = "blocks";

pub(super) fn in_blocks(scope: &str) -> bool {
    scope.split('/').any(|part| part == BLOCKS)
}
