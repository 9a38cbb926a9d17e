//! The upsampler network: residual blocks, a resampler, residual blocks at the new size.

use super::config::{GROUPS, UpsampleLayer, UpsamplerConfig};
use crate::Network;
use ltx2_nn::{
    Axis, Build, Conv3d, Init, Padding, Params, ShardedVideo, SpatialShards, depth_to_space, group_norm, silu,
};
use ltx2_stablehlo::{DType, Result, Value};

const NORM_EPS: f64 = 1e-5;
/// Size of the square blur kernel.
const BLUR: usize = 5;

struct UpsamplerLayers {
    conv: Conv3d,
    each_frame: bool,
    shards: SpatialShards,
}

impl UpsamplerLayers {
    fn conv(&self, p: &Params, x: &Value, out: usize) -> Value {
        match self.each_frame {
            true => self.conv.apply_to_frames(p, x, out, &self.shards),
            false => self.conv.apply(p, x, out, &self.shards),
        }
    }

    /// Applies group norm with the weights at `p`; returns f32.
    fn norm(&self, p: &Params, x: &Value) -> Value {
        group_norm(p, x, GROUPS, NORM_EPS, self.each_frame, &self.shards)
    }

    fn res_blocks(&self, p: &Params, name: &str, count: usize, x: &Value) -> Value {
        match count {
            0 => x.clone(),
            1 => self.res_block(&p.pp(name).pp(0), x),
            _ => {
                let body = |p: &Params, _: &Value, state: &[Value]| vec![self.res_block(p, &state[0])];
                p.each_layer(name, count, std::slice::from_ref(x), body).remove(0)
            }
        }
    }

    /// Returns `silu(x + norm2(conv2(silu(norm1(conv1(x))))))`.
    fn res_block(&self, p: &Params, x: &Value) -> Value {
        let _scope = p.builder().scope("res_block");
        let channels = x.dim(1);
        let h = silu(&self.norm(&p.pp("norm1"), &self.conv(&p.pp("conv1"), x, channels))).to(x.dtype());
        let h = self.norm(&p.pp("norm2"), &self.conv(&p.pp("conv2"), &h, channels));
        silu(&(h + x.to(DType::F32))).to(x.dtype())
    }

    fn resample(&self, p: &Params, x: &Value, resampler: UpsampleLayer) -> Value {
        let _scope = p.scope();
        let (name, stride) = match resampler {
            UpsampleLayer::Rational { up, .. } => ("conv", [1, up, up]),
            UpsampleLayer::Shuffle(stride) => ("0", stride),
        };
        let (p_conv, out) = (p.pp(name), x.dim(1) * stride.iter().product::<usize>());
        let grown = match stride[0] {
            1 => self.conv.apply_to_frames(&p_conv, x, out, &self.shards),
            _ => self.conv.apply(&p_conv, x, out, &self.shards),
        };
        let grown = depth_to_space(&grown, stride);
        match resampler {
            UpsampleLayer::Rational { down, .. } if down > 1 => self.blur(&p.pp("blur_down"), &grown, down),
            _ => grown,
        }
    }

    /// Blurs every frame with the kernel at `p` and stride `step`. The blur is written as a sum of shifted frames,
    /// which compilers fuse into one pass, because single-channel convolutions are slow.
    fn blur(&self, p: &Params, x: &Value, step: usize) -> Value {
        let _scope = p.scope();
        let shape = [1, 1, BLUR, BLUR];
        let even = Init { mean: ((BLUR * BLUR) as f32).recip(), std: 0.0 };
        let kernel = p.get("kernel", &shape, &[Axis::Replicated; 4], even).to(DType::F32);
        let reach = BLUR / 2;
        let extended = self.shards.extend(&x.to(DType::F32), [reach; 2], Padding::Zeros);
        let extended = [3, 4]
            .into_iter()
            .filter(|axis| !self.shards.is_sharded(*axis))
            .fold(extended, |x, axis| x.pad(axis as isize, reach, reach, 0.0));
        let tap = |i: usize, j: usize| {
            let part = [(3, i), (4, j)].into_iter().fold(extended.clone(), |part, (axis, at)| {
                let end = at + x.dim(axis) - 1;
                part.slice_step(axis, at, end + 1, step)
            });
            part * kernel.at(2, i).at(2, j).reshape(vec![1; 5])
        };
        let taps = (0..BLUR * BLUR).map(|t| tap(t / BLUR, t % BLUR));
        taps.reduce(|sum, tap| sum + tap).unwrap_or_else(|| x.clone()).to(x.dtype())
    }
}

/// Upsamples un-normalized latents `[b, in_channels, f, h, w]` to the size given by [`UpsamplerConfig::size`], in the
/// weights' element type. If the video is sharded, input and output are per-device shards.
pub(crate) fn upsample(p: &Params, c: &UpsamplerConfig, latents: &Value, shards: SpatialShards) -> Value {
    let _scope = p.scope();
    let conv = Conv3d {
        kernel: [3; 3],
        stride: [1; 3],
        causal: false,
        padding: Padding::Zeros,
        temporal_padding: Padding::Zeros,
    };
    let layers = UpsamplerLayers { conv, each_frame: c.each_frame, shards };
    let x = layers.conv(&p.pp("initial_conv"), &latents.to(p.dtype()), c.mid_channels);
    let x = silu(&layers.norm(&p.pp("initial_norm"), &x)).to(p.dtype());
    let x = layers.res_blocks(p, "res_blocks", c.blocks, &x);
    let x = layers.resample(&p.pp("upsampler"), &x, c.resampler);
    let x = layers.res_blocks(p, "post_upsample_res_blocks", c.blocks, &x);
    layers.conv(&p.pp("final_conv"), &x, c.in_channels)
}

/// Builds the upsampler program. Input and output: f32 `latents [b, in_channels, f, h, w]`, un-normalized; `[b, f, h,
/// w]` is the shape of the input.
///
/// # Errors
/// Returns the first error recorded while building the graph, with its op, scope and shapes.
pub fn program(c: &UpsamplerConfig, [b, f, h, w]: [usize; 4], build: &Build) -> Result<Network> {
    let p = Params::new("upsampler", c.component, build);
    let unit = match c.resampler {
        UpsampleLayer::Rational { down, .. } => [down; 2],
        UpsampleLayer::Shuffle(_) => [1; 2],
    };
    let sharded = ShardedVideo::new(&p, "latents", [b, c.in_channels, f, h, w], unit);
    let latents = sharded.input(&p);
    let grown = sharded.run(&p, &latents, None, |shards, latents, _| upsample(&p, c, latents, shards).to(DType::F32));
    Network::finish(&p, vec![sharded.output(&p, "latents", &grown)])
}
