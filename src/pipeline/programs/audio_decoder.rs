//! Audio decoder: maps latents to a mel spectrogram.

use ndarray::Array4;

use super::{
    Build, Call, Component, ModelConfigs, Network, Phase, ProgramDeclaration, ProgramKind, ProgramSpec, Result,
    SingleRun,
};
use crate::models::audio_vae;
use crate::pipeline::runner::Runner;

/// Audio decoder program. Runs that generate audio execute it.
pub(super) const AUDIO_DECODER: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::AudioDecoder,
    name: "audio_decoder",
    help: "Latents to mel spectrogram",
    component: Component::AudioVae,
    phase: Phase::AudioDecoder,
    runs: |run| run.first.decodes_audio(),
    request: |run| Ok(&run.first),
    network: network_of_run,
    single_run: Some(SingleRun {
        help: "`latents` to `mel`",
        scalars: &[],
        inputs: |given| given.only("latents", network),
        smallest: |configs, build| network(configs, [1, 0, 2, configs.audio_vae()?.latent_bins()], build),
    }),
};

/// Returns the program for latents `[batch, channels, length, mel bins]`.
fn network(configs: &ModelConfigs, [n, _, l, m]: [usize; 4], build: &Build) -> Result<Network> {
    Ok(audio_vae::decoder_program(&configs.audio_vae()?, [n, l, m], build)?)
}

pub(super) fn network_of_run(spec: &ProgramSpec) -> Result<Network> {
    let a = &spec.shapes.audio;
    network(&spec.run.configs, [spec.batch(), a.channels, a.length, a.mel_bins], spec.build)
}

impl Runner {
    /// Prepares the audio decoder, which maps latents to `mel`, a log-mel spectrogram.
    pub(crate) fn audio_decoder(&mut self, latents: Array4<f32>) -> Result<Call<'static>> {
        self.call_on(ProgramKind::AudioDecoder, "latents", latents.into(), network)
    }
}
