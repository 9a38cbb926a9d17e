//! RoPE of Gemma-4: of all pairs of a head, or of a share of them while the rest stays.

use serde::Deserialize;

use crate::hlo::{DType, Type, Value};
use crate::models::gemma::COMPONENT;
use crate::models::{ConfigError, require, unsupported};
use crate::nn::Params;

/// The frequencies of one kind of layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rope {
    /// Base of the frequencies.
    pub(crate) theta: f64,
    /// Share of the pairs that are rotated.
    pub(crate) share: f64,
    /// Divisor of the frequencies.
    pub(crate) factor: f64,
}

/// Its keys in `config.json`.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RopeFile {
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
}

impl RopeFile {
    /// All pairs of a head rotate.
    pub(super) fn plain(theta: f64) -> Self {
        RopeFile { rope_theta: Some(theta), ..RopeFile::default() }
    }

    /// A share of the pairs rotates.
    pub(super) fn proportional(theta: f64, share: f64) -> Self {
        let rope_type = Some("proportional".into());
        RopeFile { rope_type, rope_theta: Some(theta), partial_rotary_factor: Some(share), factor: None }
    }

    /// # Errors
    /// A form that no code computes, or no base.
    pub(super) fn read(&self) -> Result<Rope, ConfigError> {
        let kind = self.rope_type.as_deref().unwrap_or("default");
        let proportional = kind == "proportional";
        require(proportional || kind == "default", COMPONENT, "rope_type", kind, "default or proportional")?;
        let given = |value: Option<f64>| value.filter(|_| proportional).unwrap_or(1.0);
        let (share, factor) = (given(self.partial_rotary_factor), given(self.factor));
        let Some(theta) = self.rope_theta else {
            return Err(unsupported(COMPONENT, "rope_theta", self.rope_theta, "a positive number"));
        };
        Ok(Rope { theta, share, factor })
    }
}

impl Rope {
    /// The frequency of each pair of a head of width `dim`; 0 for those that stay. The exponents count the whole head, also
    /// where a share of it rotates. In f32 throughout, as the reference computes it.
    pub(super) fn frequencies(&self, dim: usize) -> Vec<f32> {
        let rotated = (self.share * dim as f64) as usize / 2;
        let frequency = |pair: usize| {
            let exponent = (2 * pair) as f32 / dim as f32;
            (1.0 / (self.theta as f32 as f64).powf(f64::from(exponent)) as f32) / self.factor as f32
        };
        (0..dim / 2).map(|pair| if pair < rotated { frequency(pair) } else { 0.0 }).collect()
    }

    /// Cosines and sines of `tokens` positions, `[1, tokens, 1, dim / 2]`, rounded to the run's element type.
    pub(super) fn tables(&self, p: &Params, tokens: usize, dim: usize) -> [Value; 2] {
        let b = p.builder();
        let frequencies = b.constant(&[dim / 2], &self.frequencies(dim)).reshape(vec![1, 1, 1, dim / 2]);
        let angles = b.iota(Type::new(DType::F32, vec![1, tokens, 1, 1]), 1) * frequencies;
        [angles.cos(), angles.sin()].map(|table| table.round_to(p.dtype()))
    }
}
