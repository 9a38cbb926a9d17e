//! The text encoder trait; each model family implements it in its own module.

use super::chat::ChatFormat;
use super::connectors::ConnectorsConfig;
use super::gemma::GenerationSpec;
use super::tokenizer::TokenizerRules;
use super::{ComponentConfigError, Network};
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

    /// Returns the chat format of the model family.
    fn chat(&self) -> &'static ChatFormat;

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

    /// Returns why the language model cannot generate text; `None` if it can.
    fn generation_error(&self) -> Option<ComponentConfigError>;

    /// Builds the program that generates text after prompts. It reads the parameters of [`TextEncoder::program`], with
    /// the same names and shapes; the embedding table is also the output head.
    ///
    /// Inputs: `input_ids` and `attention_mask`, i32 `[rows, prompt_tokens]`, with padding on the left; `limit`, an i32
    /// scalar, the maximum number of tokens to generate (1 to `new_tokens`). If `spec.stop_tokens` is not 0, also
    /// `stop_tokens`, i32 `[spec.stop_tokens]`, padded with -1. If tokens are drawn, also the scalars `temperature` (f32,
    /// positive), `top_k` (i32; 0: all tokens) and `top_p` (f32; 1: all tokens), and `uniforms`, f32 `[rows,
    /// new_tokens]`, uniform values in [0, 1).
    ///
    /// Outputs: `tokens`, i32 `[rows, new_tokens]`, 0 after the end of a text, and `lengths`, i32 `[rows]`, the numbers
    /// of tokens including the stop token.
    ///
    /// # Errors
    /// Returns the first error recorded while building the graph, with its op, scope and shapes.
    fn generator(&self, spec: &GenerationSpec, build: &Build) -> Result<Network>;
}
