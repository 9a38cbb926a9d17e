//! A small byte-level tokenizer in the format of Gemma's tokenizer, for models with random weights.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{CONFIG_FILE, MODEL_FILE, SPECIAL_FILE, TokenizerError};

/// Gemma's special tokens, in ID order.
const SPECIAL: [&str; 4] = ["<pad>", "<eos>", "<bos>", "<unk>"];
/// The transformers library appends this token to a vocabulary that lacks it, so this vocabulary includes it as the
/// last token.
const MASK: &str = "<mask>";

/// Returns the vocabulary in ID order: special tokens, the 256 byte tokens, `▁` for the space, printable ASCII without
/// the space, and `<mask>`.
fn byte_tokens() -> impl Iterator<Item = String> {
    SPECIAL
        .iter()
        .map(|t| (*t).to_owned())
        .chain((0..256).map(|byte| format!("<0x{byte:02X}>")))
        .chain(std::iter::once("▁".to_owned()))
        .chain(('!'..='~').map(String::from))
        .chain(std::iter::once(MASK.to_owned()))
}

/// Returns the contents of `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json`.
pub(super) fn byte_tokenizer() -> [Value; 3] {
    let tokens: Vec<String> = byte_tokens().collect();
    let vocab: Map<String, Value> = tokens.iter().zip(0..).map(|(t, id)| (t.clone(), Value::from(id))).collect();
    let added: Vec<Value> = SPECIAL
        .iter()
        .chain(std::iter::once(&MASK))
        .map(|t| {
            json!({"id": vocab[*t], "content": t, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        })
        .collect();
    let (bos, sequence) = (
        json!({"SpecialToken": {"id": "<bos>", "type_id": 0}}),
        |s: &str, t: u32| json!({"Sequence": {"id": s, "type_id": t}}),
    );
    let model = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, sequence("A", 0)],
            "pair": [bos, sequence("A", 0), {"SpecialToken": {"id": "<bos>", "type_id": 1}}, sequence("B", 1)],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        ]},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    });
    let names = json!({"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>",
        "mask_token": MASK});
    let config = json!({"tokenizer_class": "GemmaTokenizer", "add_bos_token": true, "add_eos_token": false,
        "clean_up_tokenization_spaces": false, "model_max_length": 1024, "padding_side": "left",
        "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": MASK});
    [model, config, names]
}

/// Writes the byte-level tokenizer to `dir` and returns the size of its vocabulary. The tokenizer has no merges, so
/// every character that is neither a space nor printable ASCII becomes its UTF-8 bytes.
pub fn write_byte_tokenizer(dir: &Path) -> Result<usize, TokenizerError> {
    std::fs::create_dir_all(dir).map_err(|source| TokenizerError::Write { file: dir.to_path_buf(), source })?;
    for (name, content) in [MODEL_FILE, CONFIG_FILE, SPECIAL_FILE].into_iter().zip(byte_tokenizer()) {
        let file = dir.join(name);
        std::fs::write(&file, format!("{content:#}\n")).map_err(|source| TokenizerError::Write { file, source })?;
    }
    Ok(byte_tokens().count())
}
