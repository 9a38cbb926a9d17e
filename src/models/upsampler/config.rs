//! `latent_upsampler/config.json`.

use serde::Deserialize;

use super::{COMPONENT, TEMPORAL};
use crate::defaults::with_defaults;
use crate::models::{ConfigError, parse_config, require, unsupported};

/// Groups of channels that are normalised together.
pub(super) const GROUPS: usize = 32;

with_defaults! {
    /// The keys as they stand in the file; defaults are the reference class' own.
    #[derive(Deserialize)]
    #[serde(default)]
    pub(in crate::models) struct UpsamplerConfigFile {
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

/// Upsampling in the middle of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resampler {
    /// Rows and columns times `up`, then blurred and thinned by `down`.
    Rational { up: usize, down: usize },
    /// Frames, rows and columns times these. Where frames are doubled the first result is dropped: a video's first
    /// latent covers a single frame.
    Shuffle([usize; 3]),
}

/// Scales of the rational resampler, as numerators and denominators.
const SCALES: [(f64, usize, usize); 4] = [(0.75, 3, 4), (1.5, 3, 2), (2.0, 2, 1), (4.0, 4, 1)];

/// The latent upsampler's configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct UpsamplerConfig {
    /// Folder of its parameters.
    pub(crate) component: &'static str,
    pub(crate) in_channels: usize,
    /// Channels between the first convolution and the last.
    pub(crate) mid_channels: usize,
    /// Residual blocks before the resampler, and as many behind it.
    pub(crate) blocks: usize,
    /// Whether every frame is computed by itself.
    pub(crate) each_frame: bool,
    /// Resampler between the two halves of the network.
    pub(crate) resampler: Resampler,
}

impl UpsamplerConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// A key of the wrong type, or a value no code computes.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, ConfigError> {
        let f: UpsamplerConfigFile = parse_config(COMPONENT, json)?;
        let divides = f.mid_channels.is_multiple_of(GROUPS);
        require(divides, COMPONENT, "mid_channels", f.mid_channels, "multiples of 32")?;
        require(matches!(f.dims, 2 | 3), COMPONENT, "dims", f.dims, "2 and 3")?;
        require(f.dims == 3 || !f.temporal_upsample, COMPONENT, "temporal_upsample", true, "false where dims is 2")?;
        let resampler = match (f.spatial_upsample, f.temporal_upsample) {
            (true, true) => Resampler::Shuffle([2; 3]),
            (false, true) => Resampler::Shuffle([2, 1, 1]),
            (true, false) if !f.use_rational_resampler => Resampler::Shuffle([1, 2, 2]),
            (true, false) => {
                let (key, scale) = ("rational_spatial_scale", f.rational_spatial_scale);
                let Some((_, up, down)) = SCALES.into_iter().find(|(s, ..)| *s == scale) else {
                    return Err(unsupported(COMPONENT, key, scale, "0.75, 1.5, 2 and 4"));
                };
                Resampler::Rational { up, down }
            }
            (false, false) => {
                let supported = "true where temporal_upsample is false";
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

    /// The same as the upsampler in time.
    ///
    /// # Errors
    /// It grows rows and columns.
    pub(crate) fn in_time(self) -> Result<Self, ConfigError> {
        let fits = self.resampler == Resampler::Shuffle([2, 1, 1]);
        require(fits, TEMPORAL, "spatial_upsample", true, "false, with temporal_upsample: frames alone are doubled")?;
        Ok(UpsamplerConfig { component: TEMPORAL, ..self })
    }

    /// Frames, rows and columns of the result for those of the input.
    pub(crate) fn size(&self, [f, h, w]: [usize; 3]) -> [usize; 3] {
        match self.resampler {
            Resampler::Rational { up, down } => [f, (h * up).div_ceil(down), (w * up).div_ceil(down)],
            Resampler::Shuffle([st, sh, sw]) => [f * st + 1 - st, h * sh, w * sw],
        }
    }

    /// The scales as readers know them: `x2`, `x1.5`, `x2 in time`.
    pub(crate) fn describe(&self) -> String {
        match self.resampler {
            Resampler::Rational { up, down } => format!("x{}", up as f64 / down as f64),
            Resampler::Shuffle([1, s, _]) => format!("x{s}"),
            Resampler::Shuffle([t, 1, _]) => format!("x{t} in time"),
            Resampler::Shuffle([t, s, _]) => format!("x{s} and x{t} in time"),
        }
    }

    /// Whether it makes latents `to` of latents `from`, both `[channels, frames, rows, columns]`.
    ///
    /// # Errors
    /// One line naming both sides.
    pub(crate) fn check_fit(&self, from: [usize; 4], to: [usize; 4]) -> Result<(), String> {
        let [channels, size @ ..] = from;
        if channels != self.in_channels || to[0] != self.in_channels {
            let width = if channels == self.in_channels { to[0] } else { channels };
            return Err(format!(
                "the latent upsampler takes latents of {} channels, the video VAE has {width}: an upsampler belongs to \
                 the VAE of its own model version",
                self.in_channels
            ));
        }
        let made = self.size(size);
        if made != to[1..] {
            return Err(format!(
                "the latent upsampler ({}) makes {made:?} latent frames, rows and columns of {size:?}, the second stage \
                 has {:?}",
                self.describe(),
                &to[1..]
            ));
        }
        Ok(())
    }
}
