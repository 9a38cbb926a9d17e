//! Checks the keys of a component's `config.json`: every key must be read or known to have no effect. Any other key is
//! an error, so that a newer model does not silently run as an older one.

use serde::Deserializer;
use serde::de::value::Error;
use serde::de::{DeserializeOwned, Visitor};
use serde_json::Value;

use super::{ComponentConfigError, families};

/// A key that is not read, and a predicate for its allowed values.
pub(crate) type InertKey = (&'static str, fn(&Value) -> bool);

/// Returns an ignored key that may have any value.
pub(crate) const fn inert(key: &'static str) -> InertKey {
    (key, |_| true)
}

/// Returns an ignored key that must be null or false.
pub(crate) const fn off(key: &'static str) -> InertKey {
    (key, |value| value.is_null() || *value == false)
}

/// Ignored keys of each component, except for the text encoder's, which its [families](super::families) list. Keys that
/// start with `_`, which are metadata of the program that saved the file, are ignored for all components. `_class_name`
/// is checked when the model is opened.
const INERT: [(&str, &[InertKey]); 2] = [
    // The connectors' positions are token indices.
    ("connectors", &[off("causal_temporal_positioning")]),
    ("audio_vae", &[("is_causal", |value| *value == true), inert("dropout")]),
];

/// Keys that the transformers library writes for any model: options for text generation, classification and outputs.
const TRANSFORMERS: &str = "add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward \
     cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping \
     encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id \
     forced_eos_token_id id2label is_decoder is_encoder_decoder label2id length_penalty max_length min_length \
     no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states \
     output_scores prefix problem_type pruned_heads remove_invalid_values repetition_penalty return_dict \
     return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss \
     tie_encoder_decoder tokenizer_class top_k top_p torchscript typical_p use_bfloat16";

/// Returns an error for the first unknown key: one for which `read` is false and that is not listed as ignored.
pub(crate) fn refuse_unread(
    component: &'static str,
    json: &Value,
    read: impl Fn(&str) -> bool,
) -> Result<(), ComponentConfigError> {
    let families = families::of(component);
    let own = INERT.iter().filter(|(of, _)| *of == component).flat_map(|(_, keys)| *keys);
    let own = own.chain(families.iter().flat_map(|family| family.ignored_keys));
    let any = |key: &str| !families.is_empty() && TRANSFORMERS.split_whitespace().any(|known| known == key);
    let silent = |key: &str, value: &Value| {
        key.starts_with('_') || any(key) || own.clone().any(|(known, may)| *known == key && may(value))
    };
    let all = json.as_object().into_iter().flatten();
    match all.into_iter().find(|(key, value)| !read(key) && !silent(key, value)) {
        None => Ok(()),
        Some((key, value)) => {
            Err(ComponentConfigError::Unread { component, key: key.clone(), value: value.to_string() })
        }
    }
}

/// Returns the field names that `T` deserializes from.
pub(crate) fn keys<T: DeserializeOwned>() -> &'static [&'static str] {
    struct FieldNames<'a>(&'a mut &'static [&'static str]);
    impl<'de> Deserializer<'de> for FieldNames<'_> {
        type Error = Error;

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            visitor: V,
        ) -> Result<V::Value, Error> {
            *self.0 = fields;
            self.deserialize_any(visitor)
        }

        fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            visitor.visit_unit()
        }

        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }
    let mut fields: &'static [&'static str] = &[];
    // The struct visitor rejects a unit value, but by then its fields are recorded.
    let _ = T::deserialize(FieldNames(&mut fields));
    fields
}
