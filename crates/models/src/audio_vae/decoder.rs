//! Decodes latents to a log-mel spectrogram.

use super::COMPONENT;
use super::config::AudioVaeConfig;
use super::layers::{activated, attention, conv, middle, res_block, upsample};
use crate::Network;
use ltx2_nn::{Axis, Build, Params};
use ltx2_stablehlo::{DType, Result, Type, Value};

/// Spectrogram frames per latent; the first latent yields only one.
const FRAMES_PER_LATENT: usize = 4;

/// Decodes un-normalized latents `[b, latent_channels, l, m]` to the log-mel spectrogram `[b, output_channels, 4l - 3,
/// bins]`, in the weights' element type. `bins` is `mel_bins`, or `m` if the configuration has none.
///
/// The blocks of a level are unrolled, because the first one has a different width and 2D convolutions compile quickly.
pub fn decode(p: &Params, c: &AudioVaeConfig, latents: &Value) -> Value {
    let _scope = p.scope();
    let deepest = c.ch_mult.len() - 1;
    let mut x = conv(p, c, "conv_in", &latents.to(p.dtype()), c.channels(deepest), 3);
    x = middle(&p.pp("mid"), c, &x);
    for level in (0..=deepest).rev() {
        let p = p.pp(format!("up.{level}"));
        let _scope = p.builder().scope(format!("up.{level}"));
        for i in 0..=c.num_res_blocks {
            x = res_block(&p.pp(format!("block.{i}")), c, &x, c.channels(level));
            if c.attends(level) {
                x = attention(&p.pp(format!("attn.{i}")), c, &x);
            }
        }
        if level > 0 {
            x = upsample(&p.pp("upsample"), c, &x);
        }
    }
    let mel = conv(p, c, "conv_out", &activated(p, c, "norm_out", &x), c.output_channels, 3);
    let frames = (FRAMES_PER_LATENT * latents.dim(2)).saturating_sub(FRAMES_PER_LATENT - 1).max(1);
    resized(&resized(&mel, 2, frames), 3, c.mel_bins.unwrap_or(latents.dim(3)))
}

/// Truncates or zero-pads an axis to `size` elements.
fn resized(x: &Value, axis: isize, size: usize) -> Value {
    let now = x.dim(axis);
    x.slice(axis, 0, now.min(size)).pad(axis, 0, size.saturating_sub(now), 0.0)
}

/// Builds the decoder program. Input: f32 `latents [b, latent_channels, l, m]`, un-normalized. Output: f32 `mel [b,
/// output_channels, 4l - 3, mel_bins]`.
///
/// # Errors
/// Returns the first error recorded while building the graph, with its op, scope and shapes.
pub fn decoder_program(c: &AudioVaeConfig, [b, l, m]: [usize; 3], build: &Build) -> Result<Network> {
    let p = Params::new("audio_decoder", COMPONENT, build);
    // Only the batch is sharded: audio is small, and its odd lengths are not divisible by any mesh axis.
    let axes = [Axis::Batch, Axis::Replicated, Axis::Replicated, Axis::Replicated];
    let latents = p.input("latents", Type::new(DType::F32, [b, c.latent_channels, l, m]), &axes);
    let mel = decode(&p.pp("decoder"), c, &latents);
    let mel = mel.to(DType::F32);
    let content = [&[b], &mel.dims()[1..]].concat();
    Network::finish(&p, vec![p.output("mel", &mel, &axes, &content)])
}
