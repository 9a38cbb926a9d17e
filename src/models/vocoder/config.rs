//! `vocoder/config.json`.

use serde::Deserialize;

use super::COMPONENT;
use super::activation::AntiAlias;
use crate::models::{ConfigError, parse_config, require};

/// The vocoder's configuration; defaults are the reference class' own.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // The keys are the reference's.
pub struct VocoderConfig {
    #[serde(rename = "_class_name")]
    class_name: String,
    pub in_channels: usize,
    pub hidden_channels: usize,
    pub out_channels: usize,
    pub upsample_kernel_sizes: Vec<usize>,
    pub upsample_factors: Vec<usize>,
    pub resnet_kernel_sizes: Vec<usize>,
    pub resnet_dilations: Vec<Vec<usize>>,
    pub act_fn: Activation,
    pub leaky_relu_negative_slope: f64,
    pub antialias: bool,
    pub antialias_ratio: usize,
    pub antialias_kernel_size: usize,
    pub final_act_fn: Option<FinalActivation>,
    pub final_bias: bool,
    pub output_sampling_rate: usize,
}

impl Default for VocoderConfig {
    fn default() -> Self {
        VocoderConfig {
            class_name: CLASS.into(),
            in_channels: 128,
            hidden_channels: 1024,
            out_channels: 2,
            upsample_kernel_sizes: vec![16, 15, 8, 4, 4],
            upsample_factors: vec![6, 5, 2, 2, 2],
            resnet_kernel_sizes: vec![3, 7, 11],
            resnet_dilations: vec![vec![1, 3, 5]; 3],
            act_fn: Activation::LeakyRelu,
            leaky_relu_negative_slope: 0.1,
            antialias: false,
            antialias_ratio: 2,
            antialias_kernel_size: 12,
            final_act_fn: Some(FinalActivation::Tanh),
            final_bias: true,
            output_sampling_rate: 24000,
        }
    }
}

const CLASS: &str = "LTX2Vocoder";

/// The function between convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x` where positive, a small multiple of it elsewhere.
    LeakyRelu,
    /// `x + sin²(αx) / α` with a learned α for each channel.
    Snake,
    /// `x + sin²(αx) / β` with learned α and β for each channel.
    #[serde(rename = "snakebeta")]
    SnakeBeta,
}

/// The function of the last layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinalActivation {
    /// Hyperbolic tangent.
    Tanh,
    /// Limits to -1..1.
    Clamp,
}

impl VocoderConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// A key of the wrong type, lists whose lengths do not fit, or a value no code computes.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, ConfigError> {
        let c: Self = parse_config(COMPONENT, json)?;
        require(c.class_name == CLASS, COMPONENT, "_class_name", &c.class_name, CLASS)?;
        let (kernels, factors) = (&c.upsample_kernel_sizes, &c.upsample_factors);
        require(!factors.is_empty(), COMPONENT, "upsample_factors", factors, "one entry or more")?;
        let as_many = "as many entries as upsample_kernel_sizes";
        require(factors.len() == kernels.len(), COMPONENT, "upsample_factors", factors, as_many)?;
        let grows = factors.iter().zip(kernels).all(|(&f, &k)| f > 0 && k >= f);
        require(grows, COMPONENT, "upsample_kernel_sizes", kernels, "kernels as long as their factor or longer")?;
        let (sizes, dilations) = (&c.resnet_kernel_sizes, &c.resnet_dilations);
        let positive = !sizes.is_empty() && !sizes.contains(&0);
        require(positive, COMPONENT, "resnet_kernel_sizes", sizes, "one entry or more, all positive")?;
        let positive = !dilations.iter().flatten().any(|&d| d == 0);
        require(positive, COMPONENT, "resnet_dilations", dilations, "positive entries")?;
        let halves = c.hidden_channels.checked_shr(factors.len() as u32).is_some_and(|last| last > 0);
        require(halves, COMPONENT, "hidden_channels", c.hidden_channels, "a width that can be halved in every stage")?;
        let as_many = "as many entries as resnet_kernel_sizes";
        require(dilations.len() == sizes.len(), COMPONENT, "resnet_dilations", dilations, as_many)?;
        if c.act_fn == Activation::LeakyRelu {
            require(!c.antialias, COMPONENT, "antialias", true, "false where act_fn is leaky_relu")?;
        } else {
            let longer = c.antialias_ratio > 0 && c.antialias_kernel_size > c.antialias_ratio;
            let kernel = c.antialias_kernel_size;
            require(longer, COMPONENT, "antialias_kernel_size", kernel, "a kernel longer than antialias_ratio")?;
        }
        Ok(c)
    }

    /// Samples of a spectrogram frame.
    pub fn samples_per_frame(&self) -> usize {
        self.upsample_factors.iter().product()
    }

    /// The filter around an activation.
    pub(super) fn antialias(&self) -> AntiAlias {
        AntiAlias { ratio: self.antialias_ratio, kernel: self.antialias_kernel_size }
    }
}
