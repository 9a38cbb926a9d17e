//! The vocoder: converts a log-mel spectrogram to a waveform by transposed convolutions and residual blocks. The
//! vocoder of LTX-2.3 has a second stage that raises the sampling rate (bandwidth extension).

mod activation;
mod config;
mod extension;
mod generator;
mod resample;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(super) use config::GeneratorConfig;
pub use config::VocoderConfig;

use crate::Network;
use ltx2_nn::{Axis, Build, Params};
use ltx2_stablehlo::{DType, Result, Type};

/// Folder of the vocoder in a model.
pub const COMPONENT: &str = "vocoder";

/// Builds the vocoder program. Input: f32 `mel`, whose shape `[b, channels, frames, bins]` is `shape`. Output: f32
/// `audio [b, out_channels, samples]`.
///
/// # Errors
/// Returns the first error recorded while building the graph, with its op, scope and shapes.
pub fn vocoder_program(c: &VocoderConfig, shape: [usize; 4], build: &Build) -> Result<Network> {
    let p = Params::new("vocoder", COMPONENT, build);
    let axes = [Axis::Batch, Axis::Replicated, Axis::Replicated, Axis::Replicated];
    let mel = p.input("mel", Type::new(DType::F32, shape), &axes);
    let audio = match &c.extension {
        None => generator::generate(&p, &c.generator, &mel),
        Some(e) => extension::extend(&p, e, &generator::generate(&p.pp("vocoder"), &c.generator, &mel)),
    };
    let audio = audio.to(DType::F32);
    let content = [&shape[..1], &audio.dims()[1..]].concat();
    Network::finish(&p, vec![p.output("audio", &audio, &[Axis::Batch, Axis::Replicated, Axis::Replicated], &content)])
}
