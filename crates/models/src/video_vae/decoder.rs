//! Decodes latents to frames.

use super::COMPONENT;
use super::config::{DecoderConfig, UpStage};
use super::layers::{Layers, activated, embedded, modulation, unpatchify};
use crate::Network;
use crate::pixels::Pixels;
use ltx2_nn::{Axis, Build, Init, Params, ShardedVideo, SpatialShards};
use ltx2_stablehlo::{DType, Result, Type, Value};

/// Decodes un-normalized latents `[b, latent_channels, f, h, w]` to a video `[b, out_channels, frames, height, width]`
/// with values of approximately -1..1, in the weights' element type. `temb [b]`, f32, is the timestep of
/// timestep-conditioned models. If the video is sharded, input and output are per-device shards.
pub fn decode(p: &Params, c: &DecoderConfig, latents: &Value, temb: Option<&Value>, shards: SpatialShards) -> Value {
    let _scope = p.scope();
    if c.timestep_conditioning != temb.is_some() {
        let message = format!(
            "temb must be passed if and only if timestep_conditioning is set (timestep_conditioning: {}, temb passed: {})",
            c.timestep_conditioning,
            temb.is_some()
        );
        p.builder().reject("decode", message);
    }
    let layers = Layers::new(c.causal, c.padding, c.shortcut_eps, shards);
    let temb =
        temb.map(|t| t * p.get("timestep_scale_multiplier", &[], &[], Init { mean: 1000.0, std: 0.0 }).to(DType::F32));

    let x = layers.conv(p, "conv_in", &latents.to(p.dtype()), c.mid_channels);
    let mut x = {
        let p = p.pp("mid_block");
        let _scope = p.scope();
        let temb = temb.as_ref().map(|t| embedded(&p, t, 4 * c.mid_channels));
        layers.res_blocks(&p, c.mid_layers, &x, temb.as_ref())
    };
    for (i, stage) in c.stages.iter().enumerate() {
        x = up_block(&p.pp(format!("up_blocks.{i}")), &layers, stage, &x, temb.as_ref());
    }
    let channels = x.dim(1);
    let rows = temb.as_ref().map(|t| modulation(p, &embedded(p, t, 2 * channels), 2, channels));
    let x = activated(&x, rows.as_ref().map(|r| [&r[0], &r[1]]));
    unpatchify(&layers.conv(p, "conv_out", &x, c.out_channels * c.patch_size.pow(2)), c.patch_size)
}

fn up_block(p: &Params, layers: &Layers, stage: &UpStage, x: &Value, temb: Option<&Value>) -> Value {
    let _scope = p.builder().scope("up_block");
    let temb = temb.map(|t| embedded(p, t, 4 * stage.channels));
    let x = if stage.widens { layers.res_block(&p.pp("conv_in"), x, stage.channels, None) } else { x.clone() };
    let x = match stage.upsample {
        Some(u) => layers.upsample(&p.pp("upsamplers.0"), &x, u.stride, u.factor, u.residual),
        None => x,
    };
    layers.res_blocks(p, stage.layers, &x, temb.as_ref())
}

/// Builds the decoder program. Inputs: f32 `latents [b, latent_channels, f, h, w]` and, for timestep-conditioned
/// models, f32 `temb [b]`. Outputs: see [`Pixels`].
///
/// # Errors
/// Returns the first error recorded while building the graph, with its op, scope and shapes.
pub fn decoder_program(c: &DecoderConfig, [b, f, h, w]: [usize; 4], pixels: Pixels, build: &Build) -> Result<Network> {
    let p = Params::new("video_decoder", COMPONENT, build);
    let sharded = ShardedVideo::new(&p, "latents", [b, c.latent_channels, f, h, w], [1; 2]);
    let latents = sharded.input(&p);
    let temb = c.timestep_conditioning.then(|| p.input("temb", Type::new(DType::F32, [b]), &[Axis::Batch]));
    let video = sharded.run(&p, &latents, temb.as_ref(), |shards, latents, temb| {
        decode(&p.pp("decoder"), c, latents, temb, shards).to(DType::F32)
    });
    let results = pixels.results(&p, &sharded, &video);
    Network::finish(&p, results)
}
