//! Audio encoder: maps a mel spectrogram to latents.

use ndarray::Array4;

use super::{Build, Call, Component, ModelConfigs, Network, Phase, ProgramDeclaration, ProgramKind, Result, SingleRun};
use crate::models::audio_vae;
use crate::pipeline::runner::Runner;

/// Audio encoder program. Runs with input audio execute it.
pub(super) const AUDIO_ENCODER: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::AudioEncoder,
    name: "audio_encoder",
    help: "Mel spectrogram to latents",
    component: Component::AudioVae,
    phase: Phase::Denoise,
    runs: |run| run.first.has_sound(),
    request: |run| Ok(&run.first),
    network: |spec| {
        let audio = spec.run.configs.audio_vae()?;
        // A reference sound may be longer than the video.
        let length = if spec.shapes.appended.audio > 0 { spec.shapes.appended.audio } else { spec.shapes.audio.length };
        let dims = [1, audio.in_channels, audio.frames_of(length), audio.bins()];
        network(&spec.run.configs, dims, spec.build)
    },
    single_run: Some(SingleRun {
        help: "`mel` to `latents`",
        scalars: &[],
        inputs: |given| given.only("mel", network),
        smallest: |configs, build| {
            let audio = configs.audio_vae()?;
            network(configs, [1, 0, audio.frames_of(2), audio.bins()], build)
        },
    }),
};

/// Returns the program for a mel spectrogram `[b, channels, frames, bins]`.
fn network(configs: &ModelConfigs, [n, _, frames, bins]: [usize; 4], build: &Build) -> Result<Network> {
    Ok(audio_vae::encoder_program(&configs.audio_vae()?, [n, frames, bins], build)?)
}

impl Runner {
    /// Prepares the audio encoder, which maps a log-mel spectrogram to `latents`.
    pub(crate) fn audio_encoder(&mut self, mel: Array4<f32>) -> Result<Call<'static>> {
        self.call_on(ProgramKind::AudioEncoder, "mel", mel.into(), network)
    }
}
