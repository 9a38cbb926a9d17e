//! Prompt enhancement: before prompts are encoded, the text encoder or a chat server rewrites them into detailed ones.

mod clean;
mod endpoint;
mod enhancer;
mod prompts;
mod system;

pub(crate) use enhancer::{Enhancer, generation_spec};
pub(in crate::pipeline) use prompts::recorded;
pub use prompts::{EnhancedPrompt, Enhancement};
