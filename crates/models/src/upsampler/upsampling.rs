//! Kinds of latent upsampling between two denoising passes, and their names in requests.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::config::{UpsampleLayer, UpsamplerConfig};

/// Upsampling of the latents between two passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Upsampling {
    /// Doubles height and width.
    SpatialX2,
    /// Scales height and width by 1.5.
    #[serde(rename = "spatial_x1_5")]
    #[value(name = "spatial_x1_5")]
    SpatialX1_5,
    /// Doubles the latent frames: n become 2n - 1.
    TemporalX2,
}

impl Upsampling {
    /// Returns the name in YAML and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Upsampling::SpatialX2 => "spatial_x2",
            Upsampling::SpatialX1_5 => "spatial_x1_5",
            Upsampling::TemporalX2 => "temporal_x2",
        }
    }

    /// Returns the YAML key that selects the upsampler's file.
    fn key(self) -> &'static str {
        match self {
            Upsampling::SpatialX2 | Upsampling::SpatialX1_5 => "model.upsampler",
            Upsampling::TemporalX2 => "model.temporal_upsampler",
        }
    }

    /// Returns the spatial scale as `[numerator, denominator]`.
    pub fn rows(self) -> [usize; 2] {
        match self {
            Upsampling::SpatialX2 => [2, 1],
            Upsampling::SpatialX1_5 => [3, 2],
            Upsampling::TemporalX2 => [1, 1],
        }
    }
}

impl UpsamplerConfig {
    /// Returns the kind of this upsampler; `None` if no request can select it.
    pub fn upsampling(&self) -> Option<Upsampling> {
        match self.resampler {
            UpsampleLayer::Rational { up: 2, down: 1 } | UpsampleLayer::Shuffle([1, 2, 2]) => {
                Some(Upsampling::SpatialX2)
            }
            UpsampleLayer::Rational { up: 3, down: 2 } => Some(Upsampling::SpatialX1_5),
            UpsampleLayer::Shuffle([2, 1, 1]) => Some(Upsampling::TemporalX2),
            UpsampleLayer::Rational { .. } | UpsampleLayer::Shuffle(_) => None,
        }
    }

    /// Checks that this upsampler is of the requested kind. The error is one line that says what the file is and which
    /// key to change.
    pub fn check_kind(&self, asked: Upsampling) -> Result<(), String> {
        let found = self.upsampling();
        if found == Some(asked) {
            return Ok(());
        }
        let (key, name) = (asked.key(), asked.name());
        let change = match found {
            Some(other) if other.key() != key => {
                format!("set {} to this file and {key} to a {name} upsampler", other.key())
            }
            Some(other) => format!("set {key} to a {name} upsampler, or two_stage.upsample to [{}]", other.name()),
            None => format!("set {key} to a {name} upsampler"),
        };
        Err(format!("this latent upsampler is {}, but two_stage.upsample requests {name}: {change}", self.describe()))
    }
}
