//! Text encoder: maps prompts to embeddings.

use super::{
    Build, Call, Component, Inputs, ModelConfigs, Network, Phase, ProgramDeclaration, ProgramKind, Result, SingleRun,
};
use crate::nn::Quantization;
use crate::pipeline::runner::Runner;
use crate::tensor::Tensor;

pub(super) const TEXT_ENCODER: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::TextEncoder,
    name: "text_encoder",
    help: "Prompts to embeddings, all prompts in one pass",
    component: Component::TextEncoder,
    phase: Phase::TextEncoder,
    runs: |run| run.first.text_embeddings.is_none(),
    request: |run| Ok(&run.first),
    network: |spec| {
        let tokens = spec.request.max_sequence_length;
        spec.run.configs.text_encoder_program(spec.prompts(), tokens, true, spec.build)
    },
    single_run: Some(SingleRun {
        help: "`input_ids`, `attention_mask` to `prompt_embeds`",
        scalars: &["output_hidden_states"],
        inputs: |given| {
            let ids = given.ranked("input_ids", 2)?;
            let mask = match given.optional("attention_mask") {
                Some(mask) => mask,
                None => Tensor::from(ids.to_i64().mapv(|v| i32::from(v != 0))),
            };
            // A model without connectors has no projection; the result is then the hidden states of all layers.
            let raw = given.scalar::<bool>("output_hidden_states")?.unwrap_or(false)
                || !given.configs.origin().has(Component::Connectors);
            let network = given.configs.text_encoder_program(ids.shape()[0], ids.shape()[1], !raw, given.build)?;
            Ok((network, vec![("input_ids".into(), ids), ("attention_mask".into(), mask)]))
        },
        smallest: |configs, build| configs.text_encoder_program(1, 8, false, build),
    }),
};

impl ModelConfigs {
    /// Returns the program of the text encoder, which maps the token ids of prompts, `[rows, tokens]`, to
    /// `prompt_embeds`: projected embeddings if `projected` is set, otherwise the hidden states of all layers. With
    /// `runtime.weights: int8-convrot`, weights that the file stores in this form keep their 8 bits.
    ///
    /// # Errors
    /// Returns an error if a configuration is missing or invalid, or if a size is not supported.
    pub fn text_encoder_program(&self, rows: usize, tokens: usize, projected: bool, b: &Build) -> Result<Network> {
        let encoder = self.text_encoder()?;
        let connectors = projected.then(|| self.connectors()).transpose()?;
        if let Some(c) = &connectors {
            c.check_states(encoder.hidden_states()).map_err(|e| self.wrong(Component::Connectors, e))?;
        }
        let build = self.component_build(Component::TextEncoder, b);
        Ok(encoder.program(connectors.as_ref(), rows, tokens, &build)?)
    }

    /// Returns the options for a component's programs. With `runtime.weights: int8-convrot` and a file that stores some
    /// weights in this form, the other weights of the component are not quantized. The text encoder is quantized only
    /// in this case.
    pub(super) fn component_build(&self, part: Component, b: &Build) -> Build {
        let others = if b.quantization.is_convrot() { self.origin().non_convrot_weights(part) } else { None };
        match others {
            Some(others) => Build { unquantized: others.into(), ..b.clone() },
            None if part == Component::TextEncoder => Build { quantization: Quantization::None, ..b.clone() },
            None => b.clone(),
        }
    }
}

impl Runner {
    /// Prepares the text encoder, which maps all prompts at once (`ids` and `mask`, `[prompts, tokens]`) to
    /// `prompt_embeds`.
    pub(crate) fn text_encoder(&mut self, ids: Tensor, mask: Tensor) -> Result<Call<'static>> {
        let [rows, tokens] = [mask.shape()[0], mask.shape()[1]];
        let network = self.network(ProgramKind::TextEncoder, [rows, tokens], |model, build| {
            model.configs.text_encoder_program(rows, tokens, true, build)
        })?;
        self.call(
            ProgramKind::TextEncoder,
            &network,
            Inputs::default(),
            [("input_ids".into(), ids), ("attention_mask".into(), mask)],
        )
    }
}
