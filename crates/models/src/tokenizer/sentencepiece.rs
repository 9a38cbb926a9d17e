//! Conversion of a SentencePiece model (`tokenizer.model`) of Gemma to `tokenizer.json`.
//!
//! A SentencePiece model does not store BPE merges. They are derived from the vocabulary: each split of a piece into two
//! other pieces is a merge, and merges are sorted by descending score of the merged piece. The result equals that of
//! transformers' converter for Gemma. The normalizer and the pre-tokenizer are fixed, so models with other normalization
//! are rejected.

use std::collections::HashMap;

use serde_json::{Value, json};

/// Type of a control piece, such as BOS.
const CONTROL: u64 = 3;
/// Type of a user-defined piece.
const USER_DEFINED: u64 = 4;
/// Model type of BPE.
const BPE: u64 = 2;

/// Pieces that transformers marks as special although the model defines them as ordinary text.
const SPECIAL: [&str; 2] = ["<start_of_turn>", "<end_of_turn>"];

/// The byte piece that stands for the tab in vocabularies without a tab.
const TAB_BYTE: &str = "<0x09>";

/// Protocol buffer field numbers in the model, its trainer and normalizer settings, and its pieces.
mod field {
    pub(super) const PIECES: u64 = 1;
    pub(super) const TRAINER: u64 = 2;
    pub(super) const NORMALIZER: u64 = 3;
    pub(super) const TEXT: u64 = 1;
    pub(super) const SCORE: u64 = 2;
    pub(super) const KIND: u64 = 3;
    pub(super) const MODEL_TYPE: u64 = 3;
    pub(super) const BYTE_FALLBACK: u64 = 35;
    pub(super) const UNKNOWN_ID: u64 = 40;
    pub(super) const BOS_ID: u64 = 41;
    pub(super) const CHARSMAP: u64 = 2;
    pub(super) const DUMMY_PREFIX: u64 = 3;
    pub(super) const EXTRA_SPACES: u64 = 4;
}

/// A value of a protocol buffer message.
enum Field<'a> {
    Number(u64),
    Float(f32),
    Bytes(&'a [u8]),
    Skipped,
}

impl<'a> Field<'a> {
    fn bytes(&self) -> Option<&'a [u8]> {
        if let Field::Bytes(bytes) = self { Some(bytes) } else { None }
    }

    fn number(&self) -> Option<u64> {
        if let Field::Number(number) = self { Some(*number) } else { None }
    }
}

/// Splits a message into its fields, each with its number. Returns `None` if the message is damaged.
fn fields(mut message: &[u8]) -> Option<Vec<(u64, Field<'_>)>> {
    fn take<'a>(from: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = from.split_at_checked(count)?;
        *from = rest;
        Some(taken)
    }
    fn varint(from: &mut &[u8]) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = *take(from, 1)?.first()?;
            value |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Some(value);
            }
        }
        None
    }
    let mut found = Vec::new();
    while !message.is_empty() {
        let tag = varint(&mut message)?;
        let value = match tag & 7 {
            0 => Field::Number(varint(&mut message)?),
            1 => take(&mut message, 8).map(|_| Field::Skipped)?,
            2 => {
                let size = usize::try_from(varint(&mut message)?).ok()?;
                Field::Bytes(take(&mut message, size)?)
            }
            5 => Field::Float(f32::from_le_bytes(take(&mut message, 4)?.try_into().ok()?)),
            _ => return None,
        };
        found.push((tag >> 3, value));
    }
    Some(found)
}

struct Piece {
    text: String,
    score: f32,
    kind: u64,
}

fn piece(message: &[u8]) -> Option<Piece> {
    // Kind 1 is ordinary text.
    let mut piece = Piece { text: String::new(), score: 0.0, kind: 1 };
    for (number, value) in fields(message)? {
        match (number, value) {
            (field::TEXT, Field::Bytes(text)) => piece.text = String::from_utf8(text.to_vec()).ok()?,
            (field::SCORE, Field::Float(score)) => piece.score = score,
            (field::KIND, Field::Number(kind)) => piece.kind = kind,
            _ => {}
        }
    }
    Some(piece)
}

/// Returns the last integer value of the field with number `key`; `default` if the message has none.
fn number(message: &[(u64, Field<'_>)], key: u64, default: u64) -> u64 {
    message.iter().rev().filter(|(own, _)| *own == key).find_map(|(_, value)| value.number()).unwrap_or(default)
}

/// Converts a model to the contents of `tokenizer.json`, whose post-processor adds BOS.
///
/// # Errors
/// Returns the reason if the model is damaged, or if it differs from Gemma's models, which are BPE models with byte
/// fallback and without text normalization.
pub(super) fn tokenizer_json(model: &[u8]) -> Result<Value, String> {
    let damaged = || "the SentencePiece model is damaged".to_string();
    let model = fields(model).ok_or_else(damaged)?;
    let section = |key: u64| {
        let found = model.iter().rev().find(|(own, _)| *own == key).and_then(|(_, value)| value.bytes());
        fields(found.unwrap_or_default()).ok_or_else(damaged)
    };
    let (trainer, normalizer) = (section(field::TRAINER)?, section(field::NORMALIZER)?);
    let charsmap = normalizer.iter().filter(|(key, _)| *key == field::CHARSMAP).filter_map(|(_, value)| value.bytes());
    for (what, is_gemma) in [
        ("is not of the type BPE", number(&trainer, field::MODEL_TYPE, 1) == BPE),
        ("has no pieces for bytes", number(&trainer, field::BYTE_FALLBACK, 0) == 1),
        ("adds a space before the text", number(&normalizer, field::DUMMY_PREFIX, 1) == 0),
        ("removes spaces", number(&normalizer, field::EXTRA_SPACES, 1) == 0),
        ("normalizes characters", charsmap.into_iter().all(<[u8]>::is_empty)),
    ] {
        if !is_gemma {
            return Err(format!("the SentencePiece model {what}, unlike Gemma's models"));
        }
    }
    let pieces = model.iter().filter(|(key, _)| *key == field::PIECES).filter_map(|(_, value)| value.bytes());
    let mut pieces = pieces.map(piece).collect::<Option<Vec<Piece>>>().ok_or_else(damaged)?;
    let special = |key: u64, default: u64| {
        let id = number(&trainer, key, default);
        let text = usize::try_from(id).ok().and_then(|id| pieces.get(id)).map(|piece| piece.text.clone());
        text.map(|text| (id, text)).ok_or_else(|| format!("the SentencePiece model lacks the special piece {id}"))
    };
    let ((_, unknown), (bos_id, bos)) = (special(field::UNKNOWN_ID, 0)?, special(field::BOS_ID, 1)?);
    let added: Vec<Value> = pieces
        .iter()
        .enumerate()
        .filter(|(_, piece)| matches!(piece.kind, CONTROL | USER_DEFINED))
        .map(|(id, piece)| {
            json!({
                "id": id, "content": piece.text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": piece.kind == CONTROL || SPECIAL.contains(&&*piece.text),
            })
        })
        .collect();
    if !pieces.iter().any(|piece| piece.text == "\t")
        && let Some(tab) = pieces.iter_mut().find(|piece| piece.text == TAB_BYTE)
    {
        (tab.text, tab.score) = ("\t".into(), 0.0);
    }
    let vocabulary: HashMap<&str, usize> = pieces.iter().enumerate().map(|(id, piece)| (&*piece.text, id)).collect();
    let sequence = json!([{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false},
        "post_processor": {
            "type": "TemplateProcessing", "single": sequence, "pair": sequence,
            "special_tokens": {bos.as_str(): {"id": bos, "ids": [bos_id], "tokens": [bos]}},
        },
        "decoder": null,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary, "merges": merges(&pieces, &vocabulary),
        },
    }))
}

/// Returns the pairs of pieces that form another piece, in the order in which they are merged: by descending score of
/// the merged piece, then by descending lengths of the pair, then in the order of the vocabulary.
fn merges<'a>(pieces: &'a [Piece], vocabulary: &HashMap<&str, usize>) -> Vec<[&'a str; 2]> {
    struct Merge<'a> {
        pair: [&'a str; 2],
        lengths: [usize; 2],
        score: f32,
    }
    let mut merges = Vec::new();
    for piece in pieces {
        let length = piece.text.chars().count();
        let cuts = piece.text.char_indices().map(|(at, _)| at).enumerate().skip(1);
        let pair = |(left, at): (usize, usize)| {
            let pair = piece.text.split_at(at);
            let ids = (*vocabulary.get(pair.0)?, *vocabulary.get(pair.1)?);
            Some((ids, Merge { pair: pair.into(), lengths: [left, length - left], score: piece.score }))
        };
        let mut local: Vec<_> = cuts.filter_map(pair).collect();
        local.sort_by_key(|(ids, _)| *ids);
        merges.extend(local.into_iter().map(|(_, merge)| merge));
    }
    // The sort is stable.
    merges.sort_by(|a, b| b.score.total_cmp(&a.score).then_with(|| b.lengths.cmp(&a.lengths)));
    merges.into_iter().map(|merge| merge.pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_unlike_gemma_are_rejected() {
        for (model, why) in [
            // A piece whose length is beyond the end.
            (&b"\x0a\x05\x0a"[..], "damaged"),
            (b"", "is not of the type BPE"),
            (b"\x12\x02\x18\x02", "has no pieces for bytes"),
            (b"\x12\x05\x18\x02\x98\x02\x01", "adds a space before the text"),
            (b"\x12\x05\x18\x02\x98\x02\x01\x1a\x02\x18\0", "removes spaces"),
            (b"\x12\x05\x18\x02\x98\x02\x01\x1a\x07\x12\x01a\x18\0\x20\0", "normalizes characters"),
            (b"\x12\x05\x18\x02\x98\x02\x01\x1a\x04\x18\0\x20\0", "lacks the special piece 0"),
        ] {
            let error = tokenizer_json(model).expect_err(why);
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn merges_follow_scores_then_lengths() {
        let piece = |text: &str, score: f32| Piece { text: text.into(), score, kind: 1 };
        let pieces = [piece("x", -9.0), piece("y", -9.0), piece("xy", -2.0), piece("xyx", -1.0), piece("yx", -3.0)];
        let vocabulary = pieces.iter().enumerate().map(|(id, piece)| (&*piece.text, id)).collect();
        assert_eq!(merges(&pieces, &vocabulary), [["xy", "x"], ["x", "yx"], ["x", "y"], ["y", "x"]]);
    }
}
