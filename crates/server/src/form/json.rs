//! Parses JSON and rejects duplicate keys.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::{Form, MAX_FIELDS, check_name, check_text, too_many};
use crate::error::ApiError;

impl Form {
    /// Parses a JSON body.
    ///
    /// # Errors
    /// Returns `invalid_json` if the body is not a JSON object, and `invalid_value` for too many fields or an invalid
    /// name or text.
    pub fn json(bytes: &[u8]) -> Result<Form, ApiError> {
        let fault = |why: String| ApiError::new(400, "invalid_json", why);
        let text = std::str::from_utf8(bytes).map_err(|_| fault("the body is not UTF-8".into()))?;
        let Value::Object(mut fields) = parse(text).map_err(|why| fault(format!("the body is not JSON: {why}")))?
        else {
            return Err(fault("the body must be a JSON object of fields, e.g. {\"prompt\": \"a red ball\"}".into()));
        };
        if fields.len() > MAX_FIELDS {
            return Err(too_many("fields", MAX_FIELDS));
        }
        fields.retain(|_, value| !value.is_null());
        for (name, value) in &fields {
            check_name(name)?;
            check_text(name, value)?;
        }
        let body_sha256 = hex::encode(Sha256::new().chain_update(b"json\0").chain_update(bytes).finalize());
        Ok(Form { fields, parts: Vec::new(), body_sha256 })
    }
}

/// Parses text as JSON. Errors contain line and column; a duplicate key in an object is an error.
pub fn parse(text: &str) -> Result<Value, String> {
    serde_json::from_str::<UniqueKeys>(text).map(|once| once.0).map_err(|error| error.to_string())
}

/// A JSON value in which no object has duplicate keys. JSON parsers differ in which of two duplicates they use.
struct UniqueKeys(Value);

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OnceVisitor).map(UniqueKeys)
    }
}

struct OnceVisitor;

macro_rules! scalars {
    ($($visit:ident: $type:ty),*) => {
        $(fn $visit<E>(self, value: $type) -> Result<Value, E> {
            Ok(value.into())
        })*
    };
}

impl<'de> Visitor<'de> for OnceVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    scalars!(visit_bool: bool, visit_u64: u64, visit_i64: i64, visit_f64: f64, visit_str: &str, visit_string: String);

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(UniqueKeys(item)) = seq.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Map::new();
        while let Some((key, UniqueKeys(value))) = map.next_entry::<String, UniqueKeys>()? {
            if entries.contains_key(&key) {
                let key: String = key.chars().take(64).collect();
                return Err(A::Error::custom(format!("duplicate key '{key}'")));
            }
            entries.insert(key, value);
        }
        Ok(Value::Object(entries))
    }
}
