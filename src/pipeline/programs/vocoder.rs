//! Vocoder: maps a mel spectrogram to audio samples.

use super::audio_decoder;
use super::{
    Build, Call, Component, Inputs, ModelConfigs, Network, Phase, PipelineError, ProgramDeclaration, ProgramKind,
    Result, SingleRun,
};
use crate::hlo::DType;
use crate::models::vocoder;
use crate::pipeline::runner::Runner;
use crate::runtime::Outputs;

/// Vocoder program. Runs that generate audio execute it.
pub(super) const VOCODER: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::Vocoder,
    name: "vocoder",
    help: "Mel spectrogram to samples",
    component: Component::Vocoder,
    phase: Phase::AudioDecoder,
    runs: |run| run.first.decodes_audio(),
    request: |run| Ok(&run.first),
    network: |spec| {
        let decoder = audio_decoder::network_of_run(spec)?;
        let mel = decoder.program.results.first().map(|o| &o.logical_dims[..]);
        let dims = mel.and_then(|mel| <[usize; 4]>::try_from(mel).ok());
        let wrong = || {
            PipelineError::Bug(format!(
                "the audio decoder's mel spectrogram must have 4 dimensions, but has shape {mel:?}"
            ))
        };
        let dims = dims.ok_or_else(wrong)?;
        spec.run.configs.vocoder_program(dims, spec.build)
    },
    single_run: Some(SingleRun {
        help: "`mel` to `audio`",
        // Whether the output of the first stage is clamped (LTX-2.3).
        scalars: &["clamp"],
        inputs: |given| {
            let clamp = given.scalar("clamp")?.unwrap_or(true);
            given.only("mel", |configs, dims: [usize; 4], build| {
                configs.clone().with_vocoder_clamp(clamp).vocoder_program(dims, build)
            })
        },
        // The size of the input is the product of channels and bins, so one of them can be fixed.
        smallest: |configs, build| configs.vocoder_program([1, 1, 8, configs.vocoder()?.generator.in_channels], build),
    }),
};

impl ModelConfigs {
    /// Returns the program of the vocoder, which maps a mel spectrogram `[b, channels, frames, bins]` to audio samples.
    /// The vocoder always computes in f32, because the rounding errors of bf16 are audible.
    ///
    /// # Errors
    /// Returns an error if the configuration is missing or invalid, or if a size is not supported.
    pub fn vocoder_program(&self, dims: [usize; 4], b: &Build) -> Result<Network> {
        Ok(vocoder::vocoder_program(&self.vocoder()?, dims, &b.with_dtype(DType::F32))?)
    }
}

impl Runner {
    /// Prepares the vocoder, which maps the audio decoder's output `mel` to `audio`. `mel` is not copied.
    pub(crate) fn vocoder<'a>(&mut self, decoded: &'a Outputs) -> Result<Call<'a>> {
        let mel = decoded
            .get("mel")
            .ok_or_else(|| PipelineError::Input("the audio decoder returned no mel spectrogram".into()))?;
        let dims = <[usize; 4]>::try_from(mel.dims().to_vec()).map_err(|d| {
            PipelineError::Input(format!(
                "the audio decoder returned a mel spectrogram of shape {d:?}; the vocoder needs 4 dimensions"
            ))
        })?;
        let network =
            self.network(ProgramKind::Vocoder, dims, |model, build| model.configs.vocoder_program(dims, build))?;
        self.call(ProgramKind::Vocoder, &network, Inputs::default().share("mel", mel), [])
    }
}
