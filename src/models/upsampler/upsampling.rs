//! Kinds of upsampling between two passes, by the names that requests have for them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::config::{Resampler, UpsamplerConfig};

/// Upsampling of latents between two passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Upsampling {
    /// Twice the rows and columns.
    SpatialX2,
    /// One and a half times the rows and columns.
    #[serde(rename = "spatial_x1_5")]
    #[value(name = "spatial_x1_5")]
    SpatialX1_5,
    /// Twice the frames but one.
    TemporalX2,
}

impl Upsampling {
    /// Its name in YAML.
    pub fn name(self) -> &'static str {
        match self {
            Upsampling::SpatialX2 => "spatial_x2",
            Upsampling::SpatialX1_5 => "spatial_x1_5",
            Upsampling::TemporalX2 => "temporal_x2",
        }
    }

    /// Key of its file.
    fn key(self) -> &'static str {
        match self {
            Upsampling::SpatialX2 | Upsampling::SpatialX1_5 => "model.upsampler",
            Upsampling::TemporalX2 => "model.temporal_upsampler",
        }
    }

    /// Rows and columns behind it, and those before it that they are made of.
    pub fn rows(self) -> [usize; 2] {
        match self {
            Upsampling::SpatialX2 => [2, 1],
            Upsampling::SpatialX1_5 => [3, 2],
            Upsampling::TemporalX2 => [1, 1],
        }
    }
}

impl UpsamplerConfig {
    /// Its kind, where that has a name.
    pub(crate) fn upsampling(&self) -> Option<Upsampling> {
        match self.resampler {
            Resampler::Rational { up: 2, down: 1 } | Resampler::Shuffle([1, 2, 2]) => Some(Upsampling::SpatialX2),
            Resampler::Rational { up: 3, down: 2 } => Some(Upsampling::SpatialX1_5),
            Resampler::Shuffle([2, 1, 1]) => Some(Upsampling::TemporalX2),
            Resampler::Rational { .. } | Resampler::Shuffle(_) => None,
        }
    }

    /// Whether it is the one that a request asks for.
    ///
    /// # Errors
    /// One line that says what it is, and what to change.
    pub(crate) fn check_is(&self, asked: Upsampling) -> Result<(), String> {
        let found = self.upsampling();
        if found == Some(asked) {
            return Ok(());
        }
        let (key, name) = (asked.key(), asked.name());
        let change = match found {
            Some(other) if other.key() != key => {
                format!("give this file as {}, and one of {name} as {key}", other.key())
            }
            Some(other) => format!("give one of {name} as {key}, or set two_stage.upsample to [{}]", other.name()),
            None => format!("give one of {name} as {key}"),
        };
        Err(format!("this latent upsampler is {}, two_stage.upsample asks for {name}: {change}", self.describe()))
    }
}
