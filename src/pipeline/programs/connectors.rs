//! Connectors: map the text encoder's embeddings to the text contexts of the video and audio streams.

use std::rc::Rc;

use ndarray::Array2;

use super::{
    Build, Call, Component, Inputs, ModelConfigs, Network, Phase, PipelineError, ProgramDeclaration, ProgramKind,
    Ready, ReferenceArguments, Result, SingleRun,
};
use crate::models::connectors::{self, Input};
use crate::pipeline::runner::{Runner, UploadedTables};
use crate::tensor::Tensor;

pub(super) const CONNECTORS: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::Connectors,
    name: "connectors",
    help: "Embeddings to the text contexts of both streams",
    component: Component::Connectors,
    phase: Phase::Connectors,
    runs: |run| run.first.text_embeddings.is_none(),
    request: |run| Ok(&run.first),
    network: |spec| {
        let size = [spec.prompts(), spec.request.max_sequence_length];
        network(&spec.run.configs, size, Input::PromptEmbeds, spec.build)
    },
    single_run: Some(SingleRun {
        help: "`prompt_embeds` or `text_encoder_hidden_states`, `attention_mask` to `video`, `audio`",
        scalars: &[],
        inputs: reference_inputs,
        smallest: |configs, build| {
            network(configs, [1, configs.connectors()?.token_multiple()], Input::HiddenStates, build)
        },
    }),
};

fn network(configs: &ModelConfigs, [rows, tokens]: [usize; 2], input: Input, build: &Build) -> Result<Network> {
    let build = configs.component_build(Component::Connectors, build);
    Ok(connectors::program(&configs.connectors()?, rows, tokens, input, &build)?)
}

/// Returns the RoPE tables, which are inputs of the program, by input name.
fn tables(configs: &ModelConfigs, tokens: usize) -> Result<Vec<(String, Tensor)>> {
    Ok(connectors::host_inputs(&configs.connectors()?, tokens))
}

fn reference_inputs(given: &mut ReferenceArguments) -> Result<Ready> {
    let configs = given.configs;
    let (embeds, projected) = match given.optional("prompt_embeds") {
        // The reference implementation also passes the hidden states of all layers under this name.
        Some(t) => {
            let projected = t.shape().last() == Some(&configs.connectors()?.text_width());
            (t, projected)
        }
        None => (given.required("text_encoder_hidden_states")?, false),
    };
    // The reference implementation also accepts the hidden states as [b, t, channels, layers].
    let embeds = match embeds.shape() {
        [_, _, _] => embeds,
        &[b, t, c, l] => Tensor::from(
            embeds
                .to_f32()
                .into_shape_with_order((b, t, c * l))
                .map_err(|e| PipelineError::Input(format!("input 'text_encoder_hidden_states': {e}")))?,
        ),
        other => {
            let message = format!("input 'prompt_embeds' must have 3 dimensions, but has shape {other:?}");
            return Err(PipelineError::Input(message));
        }
    };
    let (rows, tokens) = (embeds.shape()[0], embeds.shape()[1]);
    let mask = match given.optional("attention_mask") {
        Some(mask) => mask,
        None => Tensor::from(Array2::<i32>::ones((rows, tokens))),
    };
    let (input, name) = match projected {
        true => (Input::PromptEmbeds, "prompt_embeds"),
        false => (Input::HiddenStates, "text_encoder_hidden_states"),
    };
    let network = network(configs, [rows, tokens], input, given.build)?;
    let mut inputs = tables(configs, tokens)?;
    inputs.extend([(name.into(), embeds), ("attention_mask".into(), mask)]);
    Ok((network, inputs))
}

impl Runner {
    /// Prepares the connectors, which map embeddings `[prompts, tokens, channels]` to the text contexts of the video
    /// and audio streams.
    pub(crate) fn connectors(&mut self, embeds: Tensor, mask: Tensor) -> Result<Call<'static>> {
        let size = [mask.shape()[0], mask.shape()[1]];
        let network = self.network(ProgramKind::Connectors, size, |model, build| {
            network(&model.configs, size, Input::PromptEmbeds, build)
        })?;
        let tables = self.connector_tables(&network, size[1])?;
        let inputs = tables.iter().fold(Inputs::default(), |inputs, (name, table)| inputs.give(name, table.clone()));
        let given = [("attention_mask".into(), mask), ("prompt_embeds".into(), embeds)];
        self.call(ProgramKind::Connectors, &network, inputs, given)
    }

    /// Returns the connectors' RoPE tables on the devices. They are cached if all parameters stay on the devices,
    /// because computing and uploading the tables takes longer than the program itself.
    fn connector_tables(&mut self, network: &Network, tokens: usize) -> Result<Rc<UploadedTables>> {
        let program = self.executor.prepare(ProgramKind::Connectors.name(), network)?;
        let made_for = (program.hash().to_string(), tokens);
        if let Some(tables) = self.tables.get(&made_for) {
            return Ok(tables.clone());
        }
        let upload = |(name, table): (String, Tensor)| {
            let table = self.executor.engine().upload(&program, &name, &table)?;
            Ok((name, Rc::new(table)))
        };
        let is_read = |(name, _): &(String, Tensor)| program.arguments().iter().any(|a| a.name == *name);
        let tables = tables(&self.model.configs, tokens)?.into_iter().filter(is_read).map(upload);
        let tables = Rc::new(tables.collect::<Result<UploadedTables>>()?);
        if self.executor.keeps_all() {
            tables.iter().try_for_each(|(_, table)| table.wait())?;
            self.tables.insert(made_for, tables.clone());
        }
        Ok(tables)
    }
}
