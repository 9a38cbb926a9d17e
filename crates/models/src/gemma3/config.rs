//! Reads `text_encoder/config.json` of Gemma 3, with the keys of older and newer transformers versions.

use serde::Deserialize;
use serde_json::Value;

use crate::config_keys::refuse_unread;
use crate::gemma::{COMPONENT, LayerKind, every, is_tied, listed};
use crate::ranges::check_heads;
use crate::{ComponentConfigError, parse_config, require, unsupported};
use ltx2_base::with_defaults;
use ltx2_nn::Heads;

/// RoPE parameters of one kind of layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RopeBase {
    /// Base of the frequencies.
    pub(crate) theta: f64,
    /// Divisor of the frequencies.
    pub(crate) factor: f64,
}

/// Configuration of the Gemma 3 language model.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma3Config {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) num_key_value_heads: usize,
    pub(crate) rms_norm_eps: f64,
    pub(crate) query_pre_attn_scalar: f64,
    pub(crate) sliding_window: usize,
    pub(crate) attention_bias: bool,
    pub(crate) heads: Heads,
    pub(crate) layers: Vec<LayerKind>,
    pub(crate) local: RopeBase,
    pub(crate) global: RopeBase,
    /// Bound of the output head's logits, which text generation does not support.
    pub(crate) final_logit_softcapping: Option<f64>,
    /// Whether the embedding table is also the output head.
    pub(crate) is_tied: bool,
}

with_defaults! {
    /// Keys of `config.json`, with the defaults of the transformers class.
    #[derive(Deserialize)]
    #[serde(default)]
    pub(super) struct Gemma3ConfigFile {
        vocab_size: usize = 262_208,
        hidden_size: usize = 2304,
        intermediate_size: usize = 9216,
        num_hidden_layers: usize = 26,
        num_attention_heads: usize = 8,
        num_key_value_heads: usize = 4,
        head_dim: usize = 256,
        hidden_activation: String = "gelu_pytorch_tanh".into(),
        rms_norm_eps: f64 = 1e-6,
        query_pre_attn_scalar: f64 = 256.0,
        sliding_window: Option<usize> = Some(4096),
        attention_bias: bool = false,
        attn_logit_softcapping: Option<f64> = None,
        final_logit_softcapping: Option<f64> = None,
        tie_word_embeddings: bool = true,
        use_bidirectional_attention: Option<bool> = None,
        layer_types: Option<Vec<LayerKind>> = None,
        sliding_window_pattern: Option<usize> = None,
        _sliding_window_pattern: Option<usize> = None,
        rope_theta: f64 = 1e6,
        rope_local_base_freq: f64 = 1e4,
        rope_scaling: Option<Scaling> = None,
        rope_parameters: Option<RopeByLayerKind> = None,
    }
}

/// RoPE scaling. `type` is the older name of `rope_type`; some versions of the transformers library wrote both.
#[derive(Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Scaling {
    rope_type: Option<String>,
    r#type: Option<String>,
    factor: Option<f64>,
    rope_theta: Option<f64>,
}

/// RoPE parameters by kind of layer, in the format of newer transformers versions.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RopeByLayerKind {
    full_attention: Option<Scaling>,
    sliding_attention: Option<Scaling>,
}

impl Scaling {
    /// Returns the keys of `self`; missing keys are taken from `other`.
    fn or(&self, other: &Scaling) -> Scaling {
        let kind = |s: &Scaling| s.rope_type.clone().or(s.r#type.clone());
        Scaling {
            rope_type: kind(self).or(kind(other)),
            r#type: None,
            factor: self.factor.or(other.factor),
            rope_theta: self.rope_theta.or(other.rope_theta),
        }
    }

    fn base(&self, theta: f64) -> Result<RopeBase, ComponentConfigError> {
        let kind = self.rope_type.as_deref().unwrap_or("default");
        require(matches!(kind, "default" | "linear"), COMPONENT, "rope_type", kind, "default or linear")?;
        let factor = if kind == "linear" { self.factor } else { Some(1.0) };
        let Some(factor) = factor else {
            let supported = "a positive number if rope_type is linear";
            return Err(unsupported(COMPONENT, "factor", self.factor, supported));
        };
        Ok(RopeBase { theta: self.rope_theta.unwrap_or(theta), factor })
    }
}

impl Gemma3ConfigFile {
    /// Returns the RoPE parameters of sliding-window layers and of full-attention layers. The older key `rope_scaling`
    /// applies only to full-attention layers, even if newer keys are present.
    fn rope(&self) -> Result<[RopeBase; 2], ComponentConfigError> {
        let silent = Scaling::default();
        let newer =
            |s: fn(&RopeByLayerKind) -> Option<&Scaling>| self.rope_parameters.as_ref().and_then(s).unwrap_or(&silent);
        let local = newer(|p| p.sliding_attention.as_ref()).or(&silent);
        let global = self.rope_scaling.as_ref().unwrap_or(&silent).or(newer(|p| p.full_attention.as_ref()));
        Ok([local.base(self.rope_local_base_freq)?, global.base(self.rope_theta)?])
    }

    /// Returns the kind of every layer, from the list or from the pattern length.
    fn layers(&self) -> Result<Vec<LayerKind>, ComponentConfigError> {
        let pattern = self.sliding_window_pattern.or(self._sliding_window_pattern).unwrap_or(6);
        match &self.layer_types {
            Some(kinds) => listed(kinds, self.num_hidden_layers),
            None => Ok(every(pattern, self.num_hidden_layers)),
        }
    }
}

impl Gemma3Config {
    /// Reads and checks `config.json`. The file may describe the complete multimodal model or only its text part.
    ///
    /// # Errors
    /// Returns an error if a key has the wrong type or its value is out of range or unsupported.
    pub fn from_json(json: &Value) -> Result<Self, ComponentConfigError> {
        let f: Gemma3ConfigFile = match json.get("text_config") {
            Some(text) => {
                refuse_unread(COMPONENT, json, |key| key == "text_config")?;
                parse_config(COMPONENT, text)?
            }
            None => parse_config(COMPONENT, json)?,
        };
        let activation = f.hidden_activation.as_str();
        require(activation == "gelu_pytorch_tanh", COMPONENT, "hidden_activation", activation, "gelu_pytorch_tanh")?;
        require(
            f.attn_logit_softcapping.is_none(),
            COMPONENT,
            "attn_logit_softcapping",
            f.attn_logit_softcapping,
            "null",
        )?;
        let bidirectional = f.use_bidirectional_attention.unwrap_or(false);
        require(!bidirectional, COMPONENT, "use_bidirectional_attention", bidirectional, "false")?;
        let divides = f.num_attention_heads.is_multiple_of(f.num_key_value_heads);
        require(divides, COMPONENT, "num_key_value_heads", f.num_key_value_heads, "a divisor of num_attention_heads")?;
        require(f.head_dim.is_multiple_of(2), COMPONENT, "head_dim", f.head_dim, "an even number")?;
        let heads = Heads { count: f.num_attention_heads, dim: f.head_dim };
        check_heads(COMPONENT, ["num_attention_heads", "head_dim"], heads)?;
        let layers = f.layers()?;
        let [local, global] = f.rope()?;
        Ok(Gemma3Config {
            vocab_size: f.vocab_size,
            hidden_size: f.hidden_size,
            intermediate_size: f.intermediate_size,
            num_key_value_heads: f.num_key_value_heads,
            rms_norm_eps: f.rms_norm_eps,
            query_pre_attn_scalar: f.query_pre_attn_scalar,
            sliding_window: f.sliding_window.unwrap_or(usize::MAX),
            attention_bias: f.attention_bias,
            heads,
            layers,
            local,
            global,
            final_logit_softcapping: f.final_logit_softcapping,
            is_tied: f.tie_word_embeddings && is_tied(json),
        })
    }

    pub(crate) fn kv_heads(&self) -> Heads {
        Heads { count: self.num_key_value_heads, dim: self.heads.dim }
    }
}
