//! Configurations and tensor names of GGUF files. The files usually have no configuration: a transformer's is derived
//! from its tensors, a text encoder's from llama.cpp's metadata. Transformers in safetensors files that lost their
//! configuration are treated in the same way.

use serde_json::{Value, json};

use super::checkpoint::Checkpoint;
use super::derived;
use super::error::WeightsError;
use super::keys;

/// Value of `general.architecture` of LTX's transformers.
const LTX: &str = "ltxv";
const GEMMA_3: &str = "gemma3";
const GEMMA_4: &str = "gemma4";

/// Module names of Gemma 3 in llama.cpp and in transformers.
const MODULES: [(&str, &str); 15] = [
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Returns whether a GGUF file of this architecture may be LTX's transformer.
pub(super) fn is_transformer(architecture: &str) -> bool {
    matches!(architecture, LTX | "")
}

/// Returns whether this architecture is Gemma 3 or 4.
pub(super) fn is_text_encoder(architecture: &str) -> bool {
    matches!(architecture, GEMMA_3 | GEMMA_4)
}

pub(super) fn refused(file: &Checkpoint, architecture: &str, why: &str) -> WeightsError {
    let reason = format!("is {architecture:?} in this GGUF file: {why}");
    WeightsError::Config { path: file.path().to_path_buf(), key: "general.architecture".into(), reason }
}

/// Returns whether a safetensors file contains a transformer of the published size, with or without connectors, and
/// nothing else.
fn is_published_transformer(file: &Checkpoint) -> bool {
    let is = |name: &str, rows: usize| {
        let shape = ["", keys::TRANSFORMER].iter().find_map(|prefix| file.shape(&format!("{prefix}{name}")));
        shape.is_some_and(|shape| shape.first() == Some(&rows))
    };
    let other = |key: &str| ["vae.", "audio_vae.", "vocoder."].iter().any(|start| key.starts_with(start));
    is("patchify_proj.weight", 4096) && is("audio_patchify_proj.weight", 2048) && !file.names().any(other)
}

/// Derives the `config` of a transformer in a GGUF file, or in a safetensors file that lost its configuration and has
/// the size of a published transformer. Returns `None` for other safetensors files.
///
/// # Errors
/// Returns an error if a GGUF file is not LTX's transformer, or if a tensor is missing.
pub(super) fn transformer_config(file: &Checkpoint) -> Result<Option<Value>, WeightsError> {
    let is_derivable = |architecture: Option<&str>| match architecture {
        Some(architecture) => is_transformer(architecture),
        None => file.metadata("config").is_none() && is_published_transformer(file),
    };
    if !is_derivable(file.architecture()) {
        let Some(architecture) = file.architecture() else { return Ok(None) };
        let why = "it is not LTX's transformer (\"ltxv\"); specify a text encoder with `model.text_encoder` or \
                   --text-encoder, and autoencoders as safetensors files with `model.vae` and `model.audio_vae`";
        return Err(refused(file, architecture, why));
    }
    derived::transformer_config(file).map(Some)
}

/// Derives the `config.json` of a Gemma 3 GGUF file from its metadata. Returns `None` for files that are not GGUF
/// files.
///
/// # Errors
/// Returns an error for other architectures, and if metadata is missing.
pub(super) fn text_encoder_config(file: &Checkpoint) -> Result<Option<Value>, WeightsError> {
    let Some(architecture) = file.architecture() else { return Ok(None) };
    if architecture == GEMMA_4 {
        let why = "GGUF files do not state the `gemma_version` that LTX-2.5 needs; use its \
                   text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors, or the int8-convrot file next to it";
        return Err(refused(file, architecture, why));
    }
    if architecture != GEMMA_3 {
        let why = "the text encoder of LTX-2.0 and LTX-2.3 is Gemma 3 12B; use a GGUF file such as \
                   gemma-3-12b-it-Q8_0.gguf, ComfyUI's gemma_3_12B_it.safetensors, or the folder of google/gemma-3-12b-it";
        return Err(refused(file, architecture, why));
    }
    let number = |key: &str| {
        let key = format!("{GEMMA_3}.{key}");
        let number = file.metadata(&key).and_then(|text| text.parse::<f64>().ok());
        let reason = "is missing in the GGUF metadata; use a file that llama.cpp has converted, such as gemma-3-12b-it-Q8_0.gguf".to_string();
        number.ok_or_else(|| WeightsError::Config { path: file.path().to_path_buf(), key, reason })
    };
    let whole = |key: &str| number(key).map(|number| number as u64);
    let embeddings = file.shape("token_embd.weight").and_then(|shape| shape.first()).copied();
    let missing = || WeightsError::MissingTensor { path: file.path().to_path_buf(), key: "token_embd.weight".into() };
    let mut text = json!({
        "model_type": "gemma3_text",
        "vocab_size": embeddings.ok_or_else(missing)?,
        "hidden_size": whole("embedding_length")?,
        "intermediate_size": whole("feed_forward_length")?,
        "num_hidden_layers": whole("block_count")?,
        "num_attention_heads": whole("attention.head_count")?,
        "num_key_value_heads": whole("attention.head_count_kv")?,
        "head_dim": whole("attention.key_length")?,
        // The metadata lacks this value; in the 12B model, it equals `head_dim`.
        "query_pre_attn_scalar": whole("attention.key_length")?,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon")?,
        "sliding_window": whole("attention.sliding_window")?,
        "rope_theta": number("rope.freq_base")?,
    });
    if let Ok(factor) = number("rope.scaling.factor") {
        text["rope_scaling"] = json!({"rope_type": "linear", "factor": factor});
    }
    Ok(Some(json!({"model_type": GEMMA_3, "text_config": text})))
}

/// Converts the name of a Gemma 3 tensor from llama.cpp's to transformers'. `None`: the tensor does not belong to the
/// text model.
fn text_encoder_name(key: &str) -> Option<String> {
    let (module, leaf) = key.rsplit_once('.')?;
    let (layer, module) = match module.strip_prefix("blk.") {
        Some(rest) => {
            let (number, module) = rest.split_once('.')?;
            (format!("model.layers.{number}."), module)
        }
        None => (String::new(), module),
    };
    let is_one = |(own, name): &&(&str, &str)| *own == module && layer.is_empty() == name.starts_with("model.");
    let (_, name) = MODULES.iter().find(is_one)?;
    Some(format!("{layer}{name}.{leaf}"))
}

/// Returns the tensors of a Gemma 3 GGUF file under transformers' names; returns other files unchanged. Subtracts 1
/// from norm weights, because llama.cpp adds 1 to them when it converts a model.
///
/// # Errors
/// Returns an error if two tensors get the same name.
pub(super) fn text_encoder(file: Checkpoint) -> Result<Checkpoint, WeightsError> {
    if file.architecture().is_none() {
        return Ok(file);
    }
    let mut renamed = file.renamed(|key| Some(text_encoder_name(key).unwrap_or_else(|| key.into())))?;
    let norms: Vec<String> = renamed.names().filter(|name| name.ends_with("norm.weight")).map(String::from).collect();
    norms.iter().try_for_each(|name| renamed.add_to_all(name, -1.0))?;
    Ok(renamed)
}
