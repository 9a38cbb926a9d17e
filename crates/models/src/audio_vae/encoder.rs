//! Encodes a log-mel spectrogram to latents.

use super::COMPONENT;
use super::config::AudioVaeConfig;
use super::layers::{activated, attention, conv, downsample, middle, res_block};
use crate::Network;
use ltx2_nn::{Axis, Build, Params};
use ltx2_stablehlo::{DType, Result, Type, Value};

/// Encodes a log-mel spectrogram `[b, in_channels, frames, bins]` to the un-normalized mean of the latent distribution,
/// in the weights' element type. With the three levels of the published models, the result is `[b, latent_channels,
/// ceil(frames / 4), bins / 4]`.
pub fn encode(p: &Params, c: &AudioVaeConfig, mel: &Value) -> Value {
    let _scope = p.scope();
    let deepest = c.ch_mult.len() - 1;
    let mut x = conv(p, c, "conv_in", &mel.to(p.dtype()), c.base_channels, 3);
    for level in 0..=deepest {
        let p = p.pp(format!("down.{level}"));
        let _scope = p.builder().scope(format!("down.{level}"));
        for i in 0..c.num_res_blocks {
            x = res_block(&p.pp(format!("block.{i}")), c, &x, c.channels(level));
            if c.attends(level) {
                x = attention(&p.pp(format!("attn.{i}")), c, &x);
            }
        }
        if level < deepest {
            x = downsample(&p.pp("downsample"), c, &x);
        }
    }
    x = middle(&p.pp("mid"), c, &x);
    // The second half of the channels is the log-variance.
    let moments = conv(p, c, "conv_out", &activated(p, c, "norm_out", &x), 2 * c.latent_channels, 3);
    moments.slice(1, 0, c.latent_channels)
}

/// Builds the encoder program. Input: f32 `mel [b, in_channels, frames, bins]`. Output: f32 `latents [b,
/// latent_channels, l, m]`, un-normalized.
///
/// # Errors
/// Returns the first error recorded while building the graph, with its op, scope and shapes.
pub fn encoder_program(c: &AudioVaeConfig, [b, frames, bins]: [usize; 3], build: &Build) -> Result<Network> {
    let p = Params::new("audio_encoder", COMPONENT, build);
    // Only the batch is sharded, as in the decoder.
    let axes = [Axis::Batch, Axis::Replicated, Axis::Replicated, Axis::Replicated];
    let mel = p.input("mel", Type::new(DType::F32, [b, c.in_channels, frames, bins]), &axes);
    let latents = encode(&p.pp("encoder"), c, &mel).to(DType::F32);
    let content = [&[b], &latents.dims()[1..]].concat();
    Network::finish(&p, vec![p.output("latents", &latents, &axes, &content)])
}
