//! The keys of Gemma's `config.json`.

use serde_json::Value;

use super::COMPONENT;
use crate::config_keys::{InertKey, inert, off};
use crate::ranges::{EPS, FACTOR, HEAD_DIM, HEADS, LAYERS, Range, Row, THETA, WIDTH};
use crate::{ComponentConfigError, unsupported};

/// Ranges of the numeric keys.
pub(crate) const RANGES: &[Row] = &[
    ("vocab_size", Range::Whole(1, 1 << 21)),
    ("hidden_size", WIDTH),
    ("intermediate_size", Range::Whole(1, 1 << 19)),
    ("num_hidden_layers", LAYERS),
    ("num_kv_shared_layers", Range::Whole(0, 1 << 8)),
    ("num_attention_heads num_key_value_heads num_global_key_value_heads", HEADS),
    ("head_dim global_head_dim", HEAD_DIM),
    ("hidden_size_per_layer_input", Range::Whole(0, 1 << 16)),
    ("sliding_window", Range::Whole(1, 1 << 31)),
    ("sliding_window_pattern _sliding_window_pattern", Range::Whole(1, 1 << 8)),
    ("rms_norm_eps", EPS),
    ("rope_theta rope_local_base_freq", THETA),
    ("query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping factor", FACTOR),
    ("partial_rotary_factor", Range::Real(0.0, 1.0)),
];

/// Keys that are not read.
pub(crate) const IGNORED_KEYS: &[InertKey] = &[
    // Metadata of the program that saved the file, and the element type of the saved weights.
    inert("architectures"),
    inert("model_type"),
    inert("dtype"),
    inert("torch_dtype"),
    inert("transformers_version"),
    // Gemma version; checked against the transformer when the model is opened.
    inert("gemma_version"),
    // Features of other model sizes. Those that have a switch must be off.
    inert("vocab_size_per_layer_input"),
    off("num_experts"),
    off("top_k_experts"),
    off("moe_intermediate_size"),
    // Options for training and text generation.
    inert("attention_dropout"),
    inert("initializer_range"),
    inert("use_cache"),
    inert("cache_implementation"),
    // Only text generation reads these keys, see `TextEncoder::generation_error`.
    inert("tie_word_embeddings"),
    // Special tokens come from the tokenizer's files; prompts are shorter than the position limit.
    inert("bos_token_id"),
    inert("eos_token_id"),
    inert("pad_token_id"),
    inert("max_position_embeddings"),
    // Image, video and audio inputs: prompts contain text only.
    inert("vision_config"),
    inert("audio_config"),
    inert("image_token_id"),
    inert("video_token_id"),
    inert("audio_token_id"),
    inert("boi_token_id"),
    inert("eoi_token_id"),
    inert("boa_token_id"),
    inert("eoa_token_index"),
    inert("vision_soft_tokens_per_image"),
    inert("boi_token_index"),
    inert("eoi_token_index"),
    inert("image_token_index"),
    inert("mm_tokens_per_image"),
];

/// Returns `tie_word_embeddings` at the top level of a `config.json`; true if it is missing.
pub(crate) fn is_tied(json: &Value) -> bool {
    json.get("tie_word_embeddings") != Some(&Value::Bool(false))
}

/// Returns the error for text generation by a model whose output head is not the embedding table.
pub(crate) fn untied() -> ComponentConfigError {
    let supported = "true for text generation, whose output head is the embedding table";
    unsupported(COMPONENT, "tie_word_embeddings", false, supported)
}
