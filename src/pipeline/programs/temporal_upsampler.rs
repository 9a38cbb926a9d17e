//! Temporal upsampler: doubles the number of latent frames in a temporal round.

use ndarray::Array5;

use super::{Build, Call, Component, ModelConfigs, Network, Phase, ProgramDeclaration, ProgramKind, Result, SingleRun};
use crate::models::upsampler;
use crate::pipeline::runner::Runner;

pub(super) const TEMPORAL_UPSAMPLER: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::TemporalUpsampler,
    name: "temporal_upsampler",
    help: "Latents to latents with twice as many frames, in a temporal round",
    component: Component::TemporalUpsampler,
    phase: Phase::Round,
    runs: |run| run.rounds.is_some(),
    request: |run| Ok(run.rounds.as_ref().map_or(&run.first, |rounds| &rounds.before)),
    network: |spec| {
        let v = &spec.shapes.video;
        network(&spec.run.configs, [spec.batch(), v.channels, v.frames, v.height, v.width], spec.build)
    },
    single_run: Some(SingleRun {
        help: "`latents` to `latents` with more frames, both un-normalised",
        scalars: &[],
        inputs: |given| given.only("latents", network),
        smallest: |configs, build| network(configs, [1, 0, 2, 4, 4], build),
    }),
};

/// Returns the program for un-normalised latents `[b, c, f, h, w]`.
fn network(configs: &ModelConfigs, [n, _, f, h, w]: [usize; 5], build: &Build) -> Result<Network> {
    Ok(upsampler::program(&configs.upsampler(Component::TemporalUpsampler)?, [n, f, h, w], build)?)
}

impl Runner {
    /// Prepares the temporal upsampler, which maps un-normalised latents of `f` frames to `latents` of `2·f - 1`
    /// frames.
    pub(crate) fn temporal_upsampler(&mut self, latents: Array5<f32>) -> Result<Call<'static>> {
        self.call_on(ProgramKind::TemporalUpsampler, "latents", latents.into(), network)
    }
}
