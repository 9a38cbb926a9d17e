//! The text encoder trait; each model family implements it in its own module.

use super::Network;
use super::connectors::ConnectorsConfig;
use super::tokenizer::TokenizerRules;
use ltx2_nn::Build;
use ltx2_stablehlo::Result;

/// A language model whose hidden states condition the transformer.
pub trait TextEncoder {
    /// Returns the number of tokens in the vocabulary.
    fn vocab_size(&self) -> usize;

    /// Returns the number of layers.
    fn layers(&self) -> usize;

    /// Returns the lengths of the stacked weight tensors: the number of all layers and, if weight shapes depend on the
    /// kind of layer, the number of layers of each kind.
    fn stacks(&self) -> Vec<usize> {
        vec![self.layers()]
    }

    /// Returns the number of hidden states: the embeddings and the output of every layer.
    fn hidden_states(&self) -> usize {
        self.layers() + 1
    }

    /// Returns the default special tokens and the BOS rule of the model family.
    fn tokenizer(&self) -> &'static TokenizerRules;

    /// Builds the program for `batch` prompts of `tokens` tokens. Inputs: `input_ids` and `attention_mask`, both i32
    /// `[batch, tokens]`.
    ///
    /// With connectors, the output `prompt_embeds` is `[batch, tokens, channels]`: each hidden state is normalized and
    /// projected as soon as it is computed, and the projections are summed; separate video and audio projections are
    /// concatenated along the channels. Without connectors, the output consists of all hidden states, stacked as
    /// `[batch, tokens, hidden · states]` with the index of the state varying fastest.
    fn program(
        &self,
        connectors: Option<&ConnectorsConfig>,
        batch: usize,
        tokens: usize,
        build: &Build,
    ) -> Result<Network>;
}
