//! The text stack that the generations of Gemma share: from token ids to hidden states, with the text projection of LTX-2
//! inside its loop. A generation brings its layers and its norm.

mod block;
mod layer_kind;
mod mask;
mod program;

pub(crate) use block::{Block, keys_values};
pub use layer_kind::LayerKind;
pub(crate) use layer_kind::{every, listed};
pub(crate) use mask::{Visible, bias};
pub(crate) use program::{Stack, Visit};

/// The model folder's name.
pub(crate) const COMPONENT: &str = "text_encoder";

/// Prefix of the text stack in the checkpoint.
pub(crate) const ROOT: &str = "language_model.model";
