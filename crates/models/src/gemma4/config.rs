//! Reads `text_encoder/config.json` of Gemma 4, with the keys of the publisher's file or of files saved by
//! transformers.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::rope::{RopeFile, RopeSettings};
use crate::config_keys::refuse_unread;
use crate::gemma::{COMPONENT, LayerKind, every, is_tied, listed};
use crate::ranges::check_heads;
use crate::{ComponentConfigError, parse_config, require, unsupported};
use ltx2_base::with_defaults;
use ltx2_nn::Heads;

/// Attention parameters of one kind of layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AttentionConfig {
    pub(crate) heads: Heads,
    pub(crate) kv_heads: Heads,
    /// Whether the key projection also provides the values.
    pub(crate) k_eq_v: bool,
    pub(crate) rope: RopeSettings,
}

/// Configuration of the Gemma 4 language model.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma4Config {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) rms_norm_eps: f64,
    pub(crate) sliding_window: usize,
    pub(crate) attention_bias: bool,
    pub(crate) layers: Vec<LayerKind>,
    pub(crate) sliding: AttentionConfig,
    pub(crate) full: AttentionConfig,
    /// Bound of the output head's logits: they are mapped by `bound · tanh(x / bound)`. `None`: unchanged.
    pub(crate) final_logit_softcapping: Option<f64>,
    /// Whether the embedding table is also the output head.
    pub(crate) is_tied: bool,
}

with_defaults! {
    /// Keys of `config.json`, with the defaults of the transformers class.
    #[derive(Deserialize)]
    #[serde(default)]
    pub(super) struct Gemma4ConfigFile {
        vocab_size: usize = 262_144,
        hidden_size: usize = 2304,
        intermediate_size: usize = 9216,
        num_hidden_layers: usize = 30,
        num_attention_heads: usize = 8,
        num_key_value_heads: usize = 4,
        head_dim: usize = 256,
        global_head_dim: usize = 512,
        num_global_key_value_heads: Option<usize> = None,
        per_layer_config: Option<BTreeMap<String, LayerOverride>> = None,
        hidden_activation: String = "gelu_pytorch_tanh".into(),
        rms_norm_eps: f64 = 1e-6,
        attention_bias: bool = false,
        attention_k_eq_v: bool = false,
        final_logit_softcapping: Option<f64> = None,
        tie_word_embeddings: bool = true,
        sliding_window: usize = 1024,
        layer_types: Option<Vec<LayerKind>> = None,
        rope_parameters: Option<RopeParameters> = None,
        use_bidirectional_attention: Option<String> = Some("vision".into()),
        num_kv_shared_layers: usize = 0,
        use_double_wide_mlp: bool = false,
        enable_moe_block: bool = false,
        hidden_size_per_layer_input: usize = 0,
    }
}

/// Sizes that override the defaults for one layer.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, serde::Serialize)]
#[serde(deny_unknown_fields)]
struct LayerOverride {
    head_dim: Option<usize>,
    num_key_value_heads: Option<usize>,
}

/// RoPE parameters by kind of layer.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RopeParameters {
    sliding_attention: RopeFile,
    full_attention: RopeFile,
}

impl Default for RopeParameters {
    fn default() -> Self {
        RopeParameters { sliding_attention: RopeFile::plain(1e4), full_attention: RopeFile::proportional(1e6, 0.25) }
    }
}

impl Gemma4ConfigFile {
    /// Returns the kind of every layer. The last layer always has full attention, even if the file specifies another
    /// kind.
    fn layers(&self) -> Result<Vec<LayerKind>, ComponentConfigError> {
        let mut kinds = match &self.layer_types {
            Some(kinds) => listed(kinds, self.num_hidden_layers),
            None => Ok(every(6, self.num_hidden_layers)),
        }?;
        if let Some(last) = kinds.last_mut() {
            *last = LayerKind::FullAttention;
        }
        Ok(kinds)
    }

    /// Returns the sizes that differ in full-attention layers. The publisher's file specifies them once; files saved by
    /// transformers specify them for every layer.
    fn full_layers(&self, layers: &[LayerKind]) -> Result<LayerOverride, ComponentConfigError> {
        let Some(by_layer) = &self.per_layer_config else {
            // As in the reference, `num_global_key_value_heads` applies only if keys and values are shared.
            let kv_heads = self.num_global_key_value_heads.filter(|_| self.attention_k_eq_v);
            return Ok(LayerOverride { head_dim: Some(self.global_head_dim), num_key_value_heads: kv_heads });
        };
        let mut full = None;
        for (index, kind) in layers.iter().enumerate() {
            // The layer numbers in the keys are zero-padded.
            let own = by_layer.iter().find(|(number, _)| number.parse() == Ok(index)).map(|(_, own)| *own);
            let own = own.unwrap_or_default();
            let expected = match kind {
                LayerKind::SlidingAttention => LayerOverride::default(),
                LayerKind::FullAttention => *full.get_or_insert(own),
            };
            if own != expected {
                let supported = "the same values for every full_attention layer and none for the others";
                return Err(unsupported(COMPONENT, format!("per_layer_config.{index}"), own, supported));
            }
        }
        let number = |key: &&String| key.parse().is_ok_and(|index: usize| index < layers.len());
        match by_layer.keys().find(|key| !number(key)) {
            Some(key) => Err(unsupported(COMPONENT, "per_layer_config", key, "layer numbers")),
            None => Ok(full.unwrap_or_default()),
        }
    }

    fn attention(
        &self,
        own: LayerOverride,
        k_eq_v: bool,
        rope: &RopeFile,
    ) -> Result<AttentionConfig, ComponentConfigError> {
        let dim = own.head_dim.unwrap_or(self.head_dim);
        let (count, kv_count) = (self.num_attention_heads, own.num_key_value_heads.unwrap_or(self.num_key_value_heads));
        let divides = count.is_multiple_of(kv_count);
        require(divides, COMPONENT, "num_key_value_heads", kv_count, "a divisor of num_attention_heads")?;
        require(dim.is_multiple_of(2), COMPONENT, "head_dim", dim, "an even number")?;
        let [heads, kv_heads] = [count, kv_count].map(|count| Heads { count, dim });
        check_heads(COMPONENT, ["num_attention_heads", "head_dim"], heads)?;
        Ok(AttentionConfig { heads, kv_heads, k_eq_v, rope: rope.read()? })
    }

    /// Returns an error if the file enables a feature of other model sizes or has a value that is not implemented.
    fn check(&self) -> Result<(), ComponentConfigError> {
        let activation = self.hidden_activation.as_str();
        require(activation == "gelu_pytorch_tanh", COMPONENT, "hidden_activation", activation, "gelu_pytorch_tanh")?;
        // "vision" means causal attention for text-only input.
        let bidirectional = self.use_bidirectional_attention.as_deref();
        let causal = matches!(bidirectional, None | Some("vision"));
        require(causal, COMPONENT, "use_bidirectional_attention", bidirectional, "\"vision\" or null")?;
        let shared = self.num_kv_shared_layers;
        require(shared == 0, COMPONENT, "num_kv_shared_layers", shared, "0")?;
        require(!self.use_double_wide_mlp, COMPONENT, "use_double_wide_mlp", true, "false")?;
        require(!self.enable_moe_block, COMPONENT, "enable_moe_block", true, "false")?;
        let inputs = self.hidden_size_per_layer_input;
        require(inputs == 0, COMPONENT, "hidden_size_per_layer_input", inputs, "0")
    }
}

impl Gemma4Config {
    /// Reads and checks `config.json`. The file may describe the complete multimodal model or only its text part.
    ///
    /// # Errors
    /// Returns an error if a key has the wrong type or its value is out of range or unsupported.
    pub fn from_json(json: &Value) -> Result<Self, ComponentConfigError> {
        let mut f: Gemma4ConfigFile = match json.get("text_config") {
            Some(text) => {
                refuse_unread(COMPONENT, json, |key| key == "text_config")?;
                parse_config(COMPONENT, text)?
            }
            None => parse_config(COMPONENT, json)?,
        };
        f.check()?;
        let layers = f.layers()?;
        let full = f.full_layers(&layers)?;
        let rope = f.rope_parameters.take().unwrap_or_default();
        Ok(Gemma4Config {
            vocab_size: f.vocab_size,
            hidden_size: f.hidden_size,
            intermediate_size: f.intermediate_size,
            rms_norm_eps: f.rms_norm_eps,
            sliding_window: f.sliding_window,
            attention_bias: f.attention_bias,
            final_logit_softcapping: f.final_logit_softcapping,
            is_tied: f.tie_word_embeddings && is_tied(json),
            sliding: f.attention(LayerOverride::default(), false, &rope.sliding_attention)?,
            full: f.attention(full, f.attention_k_eq_v, &rope.full_attention)?,
            layers,
        })
    }

    pub(crate) fn attention(&self, kind: LayerKind) -> &AttentionConfig {
        match kind {
            LayerKind::SlidingAttention => &self.sliding,
            LayerKind::FullAttention => &self.full,
        }
    }
}
