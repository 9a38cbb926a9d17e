//! The interface of text encoders; each family implements it in its own folder.

use super::Network;
use super::connectors::ConnectorsConfig;
use super::tokenizer::TokenizerRules;
use crate::hlo::Result;
use crate::nn::Build;

/// A text encoder, read from its configuration.
pub(crate) trait TextEncoder {
    /// Token ids it has embeddings of.
    fn vocab_size(&self) -> usize;

    fn layers(&self) -> usize;

    /// Lengths of the stacks of weights: of all layers, then of each kind where the shapes of some weights differ by it.
    fn stacks(&self) -> Vec<usize> {
        vec![self.layers()]
    }

    /// Hidden states it gives: the embeddings and every layer's.
    fn hidden_states(&self) -> usize {
        self.layers() + 1
    }

    /// Special tokens of its prompts.
    fn tokenizer(&self) -> &'static TokenizerRules;

    /// The program for `batch` prompts of `tokens` tokens: inputs `input_ids`, `attention_mask` (i32 `[batch, tokens]`).
    ///
    /// With connectors, the output `prompt_embeds` is `[batch, tokens, channels]`: every hidden state normalised and
    /// projected as it appears, and summed; two projections lie side by side. Without, it is the stack of hidden states
    /// `[batch, tokens, hidden · states]`, the state's index fastest.
    ///
    /// # Errors
    /// The first mistake made while building, with op, scope and shapes.
    fn program(
        &self,
        connectors: Option<&ConnectorsConfig>,
        batch: usize,
        tokens: usize,
        build: &Build,
    ) -> Result<Network>;
}
