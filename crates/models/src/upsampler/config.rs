//! Reads `config.json` of the spatial (`latent_upsampler`) and of the temporal latent upsampler.

use serde::Deserialize;

use super::{COMPONENT, TEMPORAL};
use crate::{ComponentConfigError, parse_config, require, unsupported};
use ltx2_base::with_defaults;

/// Number of groups of each group norm.
pub(super) const GROUPS: usize = 32;

with_defaults! {
    /// Keys of `config.json`, with the defaults of the diffusers class.
    #[derive(Deserialize)]
    #[serde(default)]
    pub(in crate) struct UpsamplerConfigFile {
        in_channels: usize = 128,
        mid_channels: usize = 1024,
        num_blocks_per_stage: usize = 4,
        dims: usize = 3,
        spatial_upsample: bool = true,
        temporal_upsample: bool = false,
        rational_spatial_scale: f64 = 2.0,
        use_rational_resampler: bool = true,
    }
}

/// Upsampling layer in the middle of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpsampleLayer {
    /// Pixel shuffle of rows and columns by `up`, then a blur with stride `down`.
    Rational { up: usize, down: usize },
    /// Pixel shuffle of frames, rows and columns by these factors. If frames are doubled, the first resulting frame is
    /// dropped: a video's first latent frame covers a single frame.
    Shuffle([usize; 3]),
}

/// Scales of the rational resampler with their numerators and denominators.
const SCALES: [(f64, usize, usize); 4] = [(0.75, 3, 4), (1.5, 3, 2), (2.0, 2, 1), (4.0, 4, 1)];

/// Configuration of a latent upsampler.
#[derive(Clone, Debug, PartialEq)]
pub struct UpsamplerConfig {
    /// Folder of the upsampler in a model.
    pub component: &'static str,
    /// Channels of the latents.
    pub(crate) in_channels: usize,
    /// Channels of the hidden layers.
    pub mid_channels: usize,
    /// Number of residual blocks before the resampler, and again after it.
    pub blocks: usize,
    /// Whether each frame is processed independently (2D convolutions).
    pub each_frame: bool,
    pub(crate) resampler: UpsampleLayer,
}

impl UpsamplerConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// Returns an error if a key has the wrong type or its value is out of range or unsupported.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, ComponentConfigError> {
        let f: UpsamplerConfigFile = parse_config(COMPONENT, json)?;
        let divides = f.mid_channels.is_multiple_of(GROUPS);
        require(divides, COMPONENT, "mid_channels", f.mid_channels, "multiples of 32")?;
        require(matches!(f.dims, 2 | 3), COMPONENT, "dims", f.dims, "2 and 3")?;
        require(f.dims == 3 || !f.temporal_upsample, COMPONENT, "temporal_upsample", true, "false if dims is 2")?;
        let resampler = match (f.spatial_upsample, f.temporal_upsample) {
            (true, true) => UpsampleLayer::Shuffle([2; 3]),
            (false, true) => UpsampleLayer::Shuffle([2, 1, 1]),
            (true, false) if !f.use_rational_resampler => UpsampleLayer::Shuffle([1, 2, 2]),
            (true, false) => {
                let (key, scale) = ("rational_spatial_scale", f.rational_spatial_scale);
                let Some((_, up, down)) = SCALES.into_iter().find(|(s, ..)| *s == scale) else {
                    return Err(unsupported(COMPONENT, key, scale, "0.75, 1.5, 2 and 4"));
                };
                UpsampleLayer::Rational { up, down }
            }
            (false, false) => {
                let supported = "true if temporal_upsample is false";
                return Err(unsupported(COMPONENT, "spatial_upsample", false, supported));
            }
        };
        Ok(UpsamplerConfig {
            component: COMPONENT,
            in_channels: f.in_channels,
            mid_channels: f.mid_channels,
            blocks: f.num_blocks_per_stage,
            each_frame: f.dims == 2,
            resampler,
        })
    }

    /// Converts the configuration to that of the temporal upsampler, whose weights are in a different folder. Returns
    /// an error if the upsampler also changes the height and width.
    pub fn in_time(self) -> Result<Self, ComponentConfigError> {
        let fits = self.resampler == UpsampleLayer::Shuffle([2, 1, 1]);
        require(fits, TEMPORAL, "spatial_upsample", true, "false: a temporal upsampler doubles only the frames")?;
        Ok(UpsamplerConfig { component: TEMPORAL, ..self })
    }

    /// Returns the number of frames, rows and columns of the output for an input size.
    pub fn size(&self, [f, h, w]: [usize; 3]) -> [usize; 3] {
        match self.resampler {
            UpsampleLayer::Rational { up, down } => [f, (h * up).div_ceil(down), (w * up).div_ceil(down)],
            UpsampleLayer::Shuffle([st, sh, sw]) => [f * st + 1 - st, h * sh, w * sw],
        }
    }

    /// Returns a human-readable scale: `x2`, `x1.5`, `x2 in time`.
    pub fn describe(&self) -> String {
        match self.resampler {
            UpsampleLayer::Rational { up, down } => format!("x{}", up as f64 / down as f64),
            UpsampleLayer::Shuffle([1, s, _]) => format!("x{s}"),
            UpsampleLayer::Shuffle([t, 1, _]) => format!("x{t} in time"),
            UpsampleLayer::Shuffle([t, s, _]) => format!("x{s} and x{t} in time"),
        }
    }

    /// Checks that the upsampler converts latents of shape `from` to shape `to`, both `[channels, frames, rows,
    /// columns]`. The error is one line with the expected and the actual shape.
    pub fn check_fit(&self, from: [usize; 4], to: [usize; 4]) -> Result<(), String> {
        let [channels, size @ ..] = from;
        if channels != self.in_channels || to[0] != self.in_channels {
            let width = if channels == self.in_channels { to[0] } else { channels };
            return Err(format!(
                "the latent upsampler takes latents with {} channels, but those of the video VAE have {width}; use the latent \
                 upsampler of the same model version",
                self.in_channels
            ));
        }
        let made = self.size(size);
        if made != to[1..] {
            return Err(format!(
                "the latent upsampler ({}) upsamples {size:?} latent frames, rows and columns to {made:?}, but the \
                 second stage needs {:?}",
                self.describe(),
                &to[1..]
            ));
        }
        Ok(())
    }
}
