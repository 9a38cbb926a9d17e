//! Computes the step-invariant inputs of a denoising loop: one program for each pass, and one for the temporal rounds.

use super::denoise::PassSpec;
use super::{Call, Component, Inputs, Phase, ProgramDeclaration, ProgramKind, Programs, Result};
use crate::av::Av;
use crate::pipeline::runner::{NetworkSizes, Runner};
use crate::pipeline::stages::denoise_loop::evaluations;
use crate::sampling::denoise;
use crate::tensor::Tensor;

pub(super) const PREPARE: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::Prepare,
    name: "prepare",
    help: "Step-invariant inputs of the denoising loop",
    component: Component::Transformer,
    phase: Phase::Denoise,
    runs: |_| true,
    request: |run| Ok(&run.first),
    network: |spec| {
        let build = spec.run.configs.component_build(Component::Transformer, spec.build);
        Ok(denoise::prepare(&spec.run.sizes.transformer, &spec.shape, &build)?)
    },
    single_run: None,
};

pub(super) const REFINE_PREPARE: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::RefinePrepare,
    name: "refine_prepare",
    help: "Step-invariant inputs of the second pass's loop",
    phase: Phase::Refine,
    runs: |run| run.second.is_some(),
    request: Programs::second_pass,
    ..PREPARE
};

pub(super) const ROUND_PREPARE: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::RoundPrepare,
    name: "round_prepare",
    help: "Step-invariant inputs of a temporal round's loop",
    phase: Phase::Round,
    runs: |run| run.rounds.is_some(),
    request: Programs::largest_tile,
    ..PREPARE
};

impl Runner {
    /// Prepares the program that computes the step-invariant inputs of a pass. `text_contexts`: outputs of the
    /// connectors, `[videos, guidance branches, tokens, channels]` for video and audio.
    pub(crate) fn prepare(
        &mut self,
        program: ProgramKind,
        pass: PassSpec,
        text_contexts: Av<Tensor>,
    ) -> Result<Call<'static>> {
        let network = self.network(program, NetworkSizes::Denoise(pass.shape.clone().into()), |model, build| {
            let build = model.configs.component_build(Component::Transformer, build);
            Ok(denoise::prepare(&model.sizes.transformer, pass.shape, &build)?)
        })?;
        let mut given = Vec::from_iter(Av::NAMES.zip(text_contexts).map(|(name, text)| (format!("text.{name}"), text)));
        given.extend(evaluations(pass.request)?);
        given.extend(pass.conditions.into_iter().flat_map(|tokens| tokens.inputs(pass.shape.batch)));
        self.call(program, &network, Inputs::default(), given)
    }
}
