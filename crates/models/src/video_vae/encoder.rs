//! Encodes frames to latents.

use super::COMPONENT;
use super::config::{DownStage, Downsample, EncoderConfig};
use super::layers::{Layers, activated};
use crate::Network;
use ltx2_nn::{Build, Params, ShardedVideo, SpatialShards};
use ltx2_stablehlo::{DType, Result, Value};

/// Encodes a video `[b, in_channels, frames, height, width]` with values in -1..1 to the un-normalized mean of the
/// latent distribution, `[b, latent_channels, f, h, w]`, in the weights' element type. If the video is sharded, input
/// and output are per-device shards.
pub(crate) fn encode(p: &Params, c: &EncoderConfig, video: &Value, shards: SpatialShards) -> Value {
    let _scope = p.scope();
    let layers = Layers::new(c.causal, c.padding, c.shortcut_eps, shards);
    let pixels = layers.patchify(&video.to(p.dtype()), c.patch_size);
    let mut x = layers.conv(p, "conv_in", &pixels, c.latent_channels);
    for (i, stage) in c.stages.iter().enumerate() {
        x = down_block(&p.pp(format!("down_blocks.{i}")), &layers, stage, &x);
    }
    let x = {
        let p = p.pp("mid_block");
        let _scope = p.scope();
        layers.res_blocks(&p, c.mid_layers, &x, None)
    };
    // The last channel is a log-variance shared by all others.
    layers.conv(p, "conv_out", &activated(&x, None), c.latent_channels + 1).slice(1, 0, c.latent_channels)
}

fn down_block(p: &Params, layers: &Layers, stage: &DownStage, x: &Value) -> Value {
    let _scope = p.builder().scope("down_block");
    let x = layers.res_blocks(p, stage.layers, x, None);
    let p = p.pp("downsamplers.0");
    match stage.downsample {
        None => x,
        Some(Downsample::Strided) => layers.strided(&p.pp("conv"), &x),
        Some(Downsample::Folded { stride, channels }) => layers.downsample(&p, &x, stride, channels),
    }
}

/// Builds the encoder program. Input: f32 `video [b, in_channels, frames, height, width]` with values in -1..1. Output:
/// f32 `latents [b, latent_channels, f, h, w]`, un-normalized.
///
/// # Errors
/// Returns the first error recorded while building the graph, with its op, scope and shapes; for example if a size is
/// not divisible by the strides.
pub fn encoder_program(c: &EncoderConfig, [b, frames, height, width]: [usize; 4], build: &Build) -> Result<Network> {
    let p = Params::new("video_encoder", COMPONENT, build);
    let sharded = ShardedVideo::new(&p, "video", [b, c.in_channels, frames, height, width], c.reduction());
    let video = sharded.input(&p);
    let latents =
        sharded.run(&p, &video, None, |shards, video, _| encode(&p.pp("encoder"), c, video, shards).to(DType::F32));
    Network::finish(&p, vec![sharded.output(&p, "latents", &latents)])
}
