//! Generates a waveform from a log-mel spectrogram.

use super::activation::{leaky_relu, snake};
use super::config::{FinalActivation, GeneratorConfig, VocoderActivation};
use ltx2_nn::{Params, conv_transpose1d_at, conv1d};
use ltx2_stablehlo::{DType, Value};

/// Kernel size of the first and the last convolution, fixed by the architecture.
const OUTER_KERNEL: usize = 7;

/// Slope of the leaky ReLU before the last convolution; not configurable.
const FINAL_SLOPE: f64 = 0.01;

/// Generates samples `[b, out_channels, frames · samples_per_frame]`, in the weights' element type, from a log-mel
/// spectrogram `[b, channels, frames, bins]`; `channels · bins` must equal `in_channels`.
pub(super) fn generate(p: &Params, c: &GeneratorConfig, mel: &Value) -> Value {
    let _scope = p.scope();
    let [b, channels, frames, bins] = [0, 1, 2, 3].map(|a| mel.dim(a));
    if channels * bins != c.in_channels {
        p.builder().reject(
            "vocoder",
            format!(
                "spectrogram {}: the product of channels and bins must be in_channels = {}",
                mel.ty(),
                c.in_channels
            ),
        );
    }
    let x = mel.to(p.dtype()).swap(2, 3).reshape(vec![b, channels * bins, frames]);
    let mut x = conv1d(&p.pp("conv_in"), &x, c.hidden_channels, OUTER_KERNEL, 1, true);
    for (i, (&kernel, &factor)) in c.upsample_kernel_sizes.iter().zip(&c.upsample_factors).enumerate() {
        if c.act_fn == VocoderActivation::LeakyRelu {
            x = leaky_relu(&x, c.leaky_relu_negative_slope);
        }
        let out = x.dim(1) / 2;
        x = conv_transpose1d_at(&p.pp(format!("upsamplers.{i}")), &x, out, kernel, factor, (kernel - factor) / 2);
        x = mean_of_resnets(p, c, i, &x);
    }
    let x = match c.act_fn {
        VocoderActivation::LeakyRelu => leaky_relu(&x, FINAL_SLOPE),
        // The last activation is always anti-aliased and has a separate β, regardless of the blocks' activation.
        VocoderActivation::Snake | VocoderActivation::SnakeBeta => {
            let p = p.pp("act_out");
            c.antialias().around(&p, &x, |x| snake(&p.pp("act"), x, true))
        }
    };
    let audio = conv1d(&p.pp("conv_out"), &x, c.out_channels, OUTER_KERNEL, 1, c.final_bias);
    match c.final_act_fn {
        Some(FinalActivation::Tanh) => audio.tanh(),
        Some(FinalActivation::Clamp) => audio.clamp(-1.0, 1.0),
        None => audio,
    }
}

/// Returns the mean of the outputs of a stage's residual blocks, which all take `x`.
fn mean_of_resnets(p: &Params, c: &GeneratorConfig, stage: usize, x: &Value) -> Value {
    let count = c.resnet_kernel_sizes.len();
    let blocks = c.resnet_kernel_sizes.iter().zip(&c.resnet_dilations).enumerate();
    let outputs = blocks.map(|(j, (&kernel, dilations))| {
        resnet(&p.pp(format!("resnets.{}", stage * count + j)), c, x, kernel, dilations).to(DType::F32)
    });
    let sum = outputs.reduce(|sum, y| sum + y).unwrap_or_else(|| x.to(DType::F32));
    (sum * (count as f64).recip()).to(x.dtype())
}

/// Applies `x + conv2(act(conv1(act(x))))` once per dilation; only `conv1` is dilated.
fn resnet(p: &Params, c: &GeneratorConfig, x: &Value, kernel: usize, dilations: &[usize]) -> Value {
    let _scope = p.builder().scope("resnet");
    let channels = x.dim(1);
    dilations.iter().enumerate().fold(x.clone(), |x, (i, &dilation)| {
        let h = activation(&p.pp(format!("acts1.{i}")), c, &x);
        let h = conv1d(&p.pp(format!("convs1.{i}")), &h, channels, kernel, dilation, true);
        let h = activation(&p.pp(format!("acts2.{i}")), c, &h);
        let h = conv1d(&p.pp(format!("convs2.{i}")), &h, channels, kernel, 1, true);
        x + h
    })
}

fn activation(p: &Params, c: &GeneratorConfig, x: &Value) -> Value {
    let beta = c.act_fn == VocoderActivation::SnakeBeta;
    match c.act_fn {
        VocoderActivation::LeakyRelu => leaky_relu(x, c.leaky_relu_negative_slope),
        _ if c.antialias => c.antialias().around(p, x, |x| snake(&p.pp("act"), x, beta)),
        _ => snake(p, x, beta),
    }
}
