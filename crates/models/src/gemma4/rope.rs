//! RoPE of Gemma 4: rotates all feature pairs of a head, or only the first ones.

use serde::Deserialize;

use crate::gemma::COMPONENT;
use crate::{ComponentConfigError, require, unsupported};
use ltx2_nn::Params;
use ltx2_stablehlo::{Builder, DType, Type, Value};

/// RoPE parameters of one kind of layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RopeSettings {
    /// Base of the frequencies.
    pub(crate) theta: f64,
    /// Fraction of the pairs that are rotated.
    pub(crate) share: f64,
    /// Divisor of the frequencies.
    pub(crate) factor: f64,
}

/// RoPE keys in `config.json`.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RopeFile {
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
}

impl RopeFile {
    /// Returns the configuration of RoPE that rotates all pairs of a head.
    pub(super) fn plain(theta: f64) -> Self {
        RopeFile { rope_theta: Some(theta), ..RopeFile::default() }
    }

    /// Returns the configuration of proportional RoPE, which rotates only the first `share` (a fraction) of the pairs.
    pub(super) fn proportional(theta: f64, share: f64) -> Self {
        let rope_type = Some("proportional".into());
        RopeFile { rope_type, rope_theta: Some(theta), partial_rotary_factor: Some(share), factor: None }
    }

    /// Checks the keys and returns the parameters, or an error if `rope_type` is unsupported or `rope_theta` is
    /// missing.
    pub(super) fn read(&self) -> Result<RopeSettings, ComponentConfigError> {
        let kind = self.rope_type.as_deref().unwrap_or("default");
        let proportional = kind == "proportional";
        require(proportional || kind == "default", COMPONENT, "rope_type", kind, "default or proportional")?;
        let given = |value: Option<f64>| value.filter(|_| proportional).unwrap_or(1.0);
        let (share, factor) = (given(self.partial_rotary_factor), given(self.factor));
        let Some(theta) = self.rope_theta else {
            return Err(unsupported(COMPONENT, "rope_theta", self.rope_theta, "a positive number"));
        };
        Ok(RopeSettings { theta, share, factor })
    }
}

impl RopeSettings {
    /// Returns the frequency of each pair of a head of width `dim`; 0 for pairs that are not rotated. The exponents are
    /// relative to the full width even if only some pairs are rotated. Every operation is rounded to f32, as in the
    /// reference.
    pub(super) fn frequencies(&self, dim: usize) -> Vec<f32> {
        let rotated = (self.share * dim as f64) as usize / 2;
        let frequency = |pair: usize| {
            let exponent = (2 * pair) as f32 / dim as f32;
            (1.0 / (self.theta as f32 as f64).powf(f64::from(exponent)) as f32) / self.factor as f32
        };
        (0..dim / 2).map(|pair| if pair < rotated { frequency(pair) } else { 0.0 }).collect()
    }

    /// Returns cosines and sines for `tokens` positions, `[1, tokens, 1, dim / 2]`, rounded to the model's element
    /// type.
    pub(super) fn tables(&self, p: &Params, tokens: usize, dim: usize) -> [Value; 2] {
        self.rounded(p, dim, |b| b.iota(Type::new(DType::F32, vec![1, tokens, 1, 1]), 1))
    }

    /// Returns cosines and sines for f32 positions `[b, t]`, `[b, t, 1, dim / 2]`, rounded to the model's element type.
    pub(super) fn tables_at(&self, p: &Params, positions: &Value, dim: usize) -> [Value; 2] {
        self.rounded(p, dim, |_| positions.unsqueeze(2).unsqueeze(3))
    }

    fn rounded(&self, p: &Params, dim: usize, positions: impl FnOnce(&Builder) -> Value) -> [Value; 2] {
        let b = p.builder();
        let frequencies = b.constant(&[dim / 2], &self.frequencies(dim)).reshape(vec![1, 1, 1, dim / 2]);
        let angles = positions(b) * frequencies;
        [angles.cos(), angles.sin()].map(|table| table.round_to(p.dtype()))
    }
}
