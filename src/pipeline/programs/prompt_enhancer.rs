//! Prompt enhancer: generates text with the language model of the text encoder.

use ndarray::Array2;

use super::{
    Build, Call, Component, Inputs, ModelConfigs, Network, Phase, ProgramDeclaration, ProgramKind, Result, SingleRun,
};
use crate::models::gemma::GenerationSpec;
use crate::pipeline::error::PipelineError;
use crate::pipeline::runner::Runner;
use crate::sampling::TorchRng;
use crate::tensor::Tensor;

/// Number of stop tokens that a program accepts; more are rounded up to a multiple of this number.
const STOP_TOKENS: usize = 8;
/// Smallest prompt size. Larger sizes are powers of two, which limits the number of programs to compile.
const SHORTEST_PROMPT: usize = 64;
/// Number of which the generated tokens' size is a multiple.
const NEW_TOKENS_UNIT: usize = 128;

pub(super) const PROMPT_ENHANCER: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::PromptEnhancer,
    name: "prompt_enhancer",
    help: "Text generation by the text encoder's language model",
    component: Component::TextEncoder,
    phase: Phase::PromptEnhancer,
    runs: |run| run.enhances_prompts,
    request: |run| Ok(&run.first),
    network: |spec| spec.run.configs.prompt_enhancer_program(&spec.run.generation, spec.build),
    single_run: Some(SingleRun {
        help: "`input_ids`, `attention_mask` to `tokens`, `lengths`",
        scalars: &["limit", "stop_tokens", "temperature", "top_k", "top_p", "seed", "no_repeat_ngram_size"],
        inputs: |given| {
            let ids = given.ranked("input_ids", 2)?;
            let mask = match given.optional("attention_mask") {
                Some(mask) => mask,
                None => Tensor::from(ids.to_i64().mapv(|v| i32::from(v != 0))),
            };
            let default = TokenSampling::default();
            let sampling = TokenSampling {
                temperature: given.scalar("temperature")?.unwrap_or(default.temperature),
                top_k: given.scalar("top_k")?.unwrap_or(default.top_k),
                top_p: given.scalar("top_p")?.unwrap_or(default.top_p),
                seed: given.scalar("seed")?.unwrap_or(default.seed),
            };
            let stop_tokens: Vec<i32> = given.scalar("stop_tokens")?.unwrap_or_default();
            let limit = given.scalar("limit")?.unwrap_or(64);
            let spec = GenerationSpec {
                rows: ids.shape()[0],
                prompt_tokens: ids.shape()[1],
                new_tokens: limit,
                stop_tokens: stop_tokens.len(),
                sampled: sampling.temperature > 0.0,
                no_repeat_ngram_size: given.scalar("no_repeat_ngram_size")?.unwrap_or(0),
            };
            let network = given.configs.prompt_enhancer_program(&spec, given.build)?;
            let mut inputs = vec![("input_ids".into(), ids), ("attention_mask".into(), mask)];
            inputs.extend(sampling.inputs(&spec, limit, &stop_tokens));
            Ok((network, inputs))
        },
        smallest: |configs, build| {
            let (sampled, no_repeat_ngram_size) = (true, 0);
            let spec = GenerationSpec {
                rows: 1,
                prompt_tokens: 8,
                new_tokens: 1,
                stop_tokens: 0,
                sampled,
                no_repeat_ngram_size,
            };
            configs.prompt_enhancer_program(&spec, build)
        },
    }),
};

/// Method by which the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TokenSampling {
    /// Divisor of the logits; 0 chooses the most probable token (greedy) and ignores the other values.
    pub temperature: f32,
    /// Number of most probable tokens of which one is drawn; 0: all.
    pub top_k: usize,
    /// Probability of the set of most probable tokens of which one is drawn; 1: all tokens.
    pub top_p: f32,
    /// Seed of the draws. The tokens of prompt `i` are drawn with the seed `seed + i`.
    pub seed: u64,
}

/// Text generation by the text encoder's language model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TextGeneration<'a> {
    /// Token ids of each prompt, with the special tokens of the chat template and without padding.
    pub prompts: &'a [Vec<i32>],
    /// Smallest number of tokens to which prompts are padded.
    pub padded_tokens: usize,
    /// Maximum number of tokens to generate for each prompt.
    pub max_new_tokens: usize,
    /// Tokens that end a text.
    pub stop_tokens: &'a [i32],
    pub sampling: TokenSampling,
    /// Length of the token sequences that must not occur twice in a prompt and its text; 0: no restriction.
    pub no_repeat_ngram_size: usize,
}

/// Rounds the sizes of a program up, so that prompts and texts of similar lengths run the same program. Rounding twice
/// changes nothing.
pub(crate) fn round_up(spec: GenerationSpec) -> GenerationSpec {
    GenerationSpec {
        prompt_tokens: spec.prompt_tokens.next_power_of_two().max(SHORTEST_PROMPT),
        new_tokens: spec.new_tokens.next_multiple_of(NEW_TOKENS_UNIT),
        stop_tokens: spec.stop_tokens.next_multiple_of(STOP_TOKENS),
        ..spec
    }
}

impl Default for TokenSampling {
    /// Greedy.
    fn default() -> Self {
        TokenSampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

impl TokenSampling {
    /// Returns the program's inputs other than the prompts.
    fn inputs(&self, spec: &GenerationSpec, limit: usize, stop_tokens: &[i32]) -> Vec<(String, Tensor)> {
        let scalar = |value: f32| Tensor::from(ndarray::arr0(value));
        let whole = |value: usize| Tensor::from(ndarray::arr0(i32::try_from(value).unwrap_or(i32::MAX)));
        let stops: Vec<i32> = stop_tokens.iter().copied().chain(std::iter::repeat(-1)).take(spec.stop_tokens).collect();
        let mut inputs = vec![("limit", whole(limit))];
        if spec.stop_tokens > 0 {
            inputs.push(("stop_tokens", ndarray::Array1::from(stops).into()));
        }
        if spec.sampled {
            let row = |row: usize| TorchRng::new(self.seed.wrapping_add(row as u64)).uniform(spec.new_tokens);
            let draws: Vec<f32> = (0..spec.rows).flat_map(row).collect();
            let draws = Array2::from_shape_vec((spec.rows, spec.new_tokens), draws).expect("a value of each element");
            inputs.extend([
                ("temperature", scalar(self.temperature)),
                ("top_k", whole(self.top_k)),
                ("top_p", scalar(self.top_p)),
                ("uniforms", Tensor::from(draws)),
            ]);
        }
        inputs.into_iter().map(|(name, tensor)| (name.to_string(), tensor)).collect()
    }
}

impl TextGeneration<'_> {
    /// Returns the sizes of the program that runs.
    #[cfg(test)]
    pub(crate) fn spec(&self) -> GenerationSpec {
        self.spec_up_to(self.max_new_tokens)
    }

    /// Returns the sizes of a program that generates up to `most` tokens.
    fn spec_up_to(&self, most: usize) -> GenerationSpec {
        let longest = self.prompts.iter().map(Vec::len).max().unwrap_or(0);
        round_up(GenerationSpec {
            rows: self.prompts.len(),
            prompt_tokens: longest.max(self.padded_tokens),
            new_tokens: most,
            stop_tokens: self.stop_tokens.len(),
            sampled: self.sampling.temperature > 0.0,
            no_repeat_ngram_size: self.no_repeat_ngram_size,
        })
    }

    /// Returns the token ids, padded on the left, and their mask, both `[prompts, tokens]`.
    fn padded(&self, tokens: usize) -> (Tensor, Tensor) {
        let mut ids = Array2::<i32>::zeros((self.prompts.len(), tokens));
        let mut mask = ids.clone();
        for (row, prompt) in self.prompts.iter().enumerate() {
            let padding = tokens - prompt.len();
            for (place, id) in prompt.iter().enumerate() {
                (ids[[row, padding + place]], mask[[row, padding + place]]) = (*id, 1);
            }
        }
        (ids.into(), mask.into())
    }
}

impl ModelConfigs {
    /// Returns the program that generates text with the text encoder's language model, which `TextEncoder::generator`
    /// describes.
    ///
    /// # Errors
    /// Returns an error if the text encoder's configuration is invalid, or if its language model cannot generate text.
    pub(crate) fn prompt_enhancer_program(&self, spec: &GenerationSpec, b: &Build) -> Result<Network> {
        let encoder = self.text_encoder()?;
        if let Some(error) = encoder.generation_error() {
            return Err(self.wrong(Component::TextEncoder, error));
        }
        Ok(encoder.generator(spec, &self.component_build(Component::TextEncoder, b))?)
    }
}

impl Runner {
    /// Returns the generated tokens of each prompt, without the stop token. Compiles one program for each number of
    /// prompts, prompt size (a power of two, at least 64), text size (a multiple of 128) and sampling mode.
    ///
    /// # Errors
    /// Returns an error if a prompt is empty, if the text encoder cannot generate text, or if the device fails.
    pub(crate) fn generate_text(&mut self, generation: &TextGeneration) -> Result<Vec<Vec<i32>>> {
        if generation.prompts.is_empty() || generation.max_new_tokens == 0 {
            return Ok(vec![Vec::new(); generation.prompts.len()]);
        }
        if let Some(row) = generation.prompts.iter().position(Vec::is_empty) {
            return Err(PipelineError::Input(format!("prompt {row} to enhance has no tokens")));
        }
        let call = self.text_generator(generation, generation.max_new_tokens)?;
        let outputs = call.run(&self.executor)?;
        let (tokens, lengths) = (outputs.tensor("tokens")?.to_i64(), outputs.tensor("lengths")?.to_i64());
        let text = |(row, length): (usize, &i64)| {
            let row = tokens.index_axis(ndarray::Axis(0), row);
            let all = row.iter().take(*length as usize).map(|id| *id as i32);
            all.filter(|id| !generation.stop_tokens.contains(id)).collect()
        };
        Ok(lengths.iter().enumerate().map(text).collect())
    }

    /// Prepares the program that generates text of up to `most` tokens, with all of its inputs.
    pub(crate) fn text_generator(&mut self, generation: &TextGeneration, most: usize) -> Result<Call<'static>> {
        let spec = generation.spec_up_to(most);
        let sizes = [
            spec.rows,
            spec.prompt_tokens,
            spec.new_tokens,
            spec.stop_tokens,
            usize::from(spec.sampled),
            spec.no_repeat_ngram_size,
        ];
        let kind = ProgramKind::PromptEnhancer;
        let network = self.network(kind, sizes, |model, build| model.configs.prompt_enhancer_program(&spec, build))?;
        let (ids, mask) = generation.padded(spec.prompt_tokens);
        let mut given = vec![("input_ids".to_string(), ids), ("attention_mask".into(), mask)];
        given.extend(generation.sampling.inputs(&spec, generation.max_new_tokens, generation.stop_tokens));
        self.call(kind, &network, Inputs::default(), given)
    }
}
