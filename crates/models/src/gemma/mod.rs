//! The text encoder network shared by Gemma 3 and Gemma 4: converts token ids to hidden states. LTX-2's text projection
//! is computed inside the loop over layers. Each Gemma version provides its own layers and norm.

mod block;
mod generate;
mod keys;
mod layer_kind;
mod mask;
mod program;
mod sampling;

pub use block::keys_values;
pub(crate) use block::{DecoderLayer, GemmaNorm, NormInput, Residual, token_projections};
pub use generate::GenerationSpec;
pub(crate) use generate::{Attend, HeadRope, LanguageModel, LayerAttention, program as generator, with_caches};
pub(crate) use keys::{IGNORED_KEYS, RANGES, is_tied, untied};
pub use layer_kind::LayerKind;
pub use layer_kind::{every, listed};
pub(crate) use mask::{AttentionMasks, bias};
pub(crate) use program::{LayerVisitor, Stack};

pub use crate::families::COMPONENT;

/// Prefix of the names of the language model's tensors in the checkpoint.
pub const ROOT: &str = "language_model.model";
