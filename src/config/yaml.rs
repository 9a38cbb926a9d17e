//! YAML tree with line numbers. JSON is read by the same parser.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_saphyr::Spanned;

use super::error::ConfigError;

/// Value with the line of its key, or its own line in a list.
#[derive(Clone, Debug)]
pub(crate) struct YamlNode {
    /// Line, from 1; 0 if the tree was not parsed from text.
    pub(crate) line: u64,
    pub(crate) data: YamlData,
}

/// YAML value.
#[derive(Clone, Debug)]
pub(crate) enum YamlData {
    /// Null, boolean, number or string.
    Scalar(Value),
    List(Vec<YamlNode>),
    /// Entries in file order.
    Map(Vec<(String, YamlNode)>),
}

impl YamlNode {
    /// Returns the value of a key if this is a map that has it.
    pub(crate) fn get(&self, key: &str) -> Option<&YamlNode> {
        match &self.data {
            YamlData::Map(entries) => entries.iter().find(|(k, _)| k == key).map(|(_, n)| n),
            _ => None,
        }
    }

    /// Returns the value without line numbers.
    pub(crate) fn to_value(&self) -> Value {
        match &self.data {
            YamlData::Scalar(v) => v.clone(),
            YamlData::List(items) => items.iter().map(YamlNode::to_value).collect(),
            YamlData::Map(entries) => Value::Object(entries.iter().map(|(k, n)| (k.clone(), n.to_value())).collect()),
        }
    }

    /// Converts a value that was not parsed from text.
    pub(crate) fn from_value(value: Value) -> YamlNode {
        let data = match value {
            Value::Array(items) => YamlData::List(items.into_iter().map(YamlNode::from_value).collect()),
            Value::Object(map) => YamlData::Map(map.into_iter().map(|(k, v)| (k, YamlNode::from_value(v))).collect()),
            scalar => YamlData::Scalar(scalar),
        };
        YamlNode { line: 0, data }
    }
}

/// Parses YAML; `place` is the file name in errors.
///
/// # Errors
/// Returns a syntax error with the line; duplicate keys are an error.
pub(crate) fn parse(text: &str, place: &str) -> Result<YamlNode, ConfigError> {
    // Only `true` and `false` are booleans: `prompt: no` is text.
    let options = serde_saphyr::options! { strict_booleans: true, with_snippet: false };
    match serde_saphyr::from_str_with_options::<Spanned<YamlData>>(text, options) {
        Ok(root) => Ok(node(root)),
        Err(error) => {
            let line = error.location().map_or(String::new(), |l| format!(":{}", l.line()));
            let message = match error.without_snippet() {
                serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. } => {
                    format!("key '{key}' is given twice")
                }
                other => {
                    // Remove the parser's own location; `place` already has the line.
                    let text = other.to_string();
                    text.split(" at line ").next().unwrap_or(&text).to_string()
                }
            };
            Err(ConfigError::syntax(format!("{place}{line}"), message))
        }
    }
}

fn node(spanned: Spanned<YamlData>) -> YamlNode {
    YamlNode { line: spanned.referenced.line(), data: spanned.value }
}

struct DataVisitor;

macro_rules! scalars {
    ($($visit:ident: $type:ty),*) => {
        $(fn $visit<E>(self, value: $type) -> Result<YamlData, E> {
            Ok(YamlData::Scalar(value.into()))
        })*
    };
}

impl<'de> Visitor<'de> for DataVisitor {
    type Value = YamlData;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<YamlData, E> {
        Ok(YamlData::Scalar(Value::Null))
    }

    fn visit_none<E>(self) -> Result<YamlData, E> {
        Ok(YamlData::Scalar(Value::Null))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<YamlData, D::Error> {
        YamlData::deserialize(deserializer)
    }

    // Non-finite numbers become null.
    scalars!(visit_bool: bool, visit_u64: u64, visit_i64: i64, visit_f64: f64, visit_str: &str);

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<YamlData, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element::<Spanned<YamlData>>()? {
            items.push(node(item));
        }
        Ok(YamlData::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<YamlData, A::Error> {
        let mut entries = Vec::new();
        while let Some((key, value)) = map.next_entry::<Spanned<String>, Spanned<YamlData>>()? {
            entries.push((key.value, YamlNode { line: key.referenced.line(), data: value.value }));
        }
        Ok(YamlData::Map(entries))
    }
}

impl<'de> Deserialize<'de> for YamlData {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DataVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_lines_are_the_lines_of_their_keys() {
        let root = parse("a: 1\nb:\n  # c\n  d: [1,\n   x]\n\n  e: {f: 18446744073709551615}\n", "t.yml").unwrap();
        let line = |path: &[&str]| path.iter().try_fold(&root, |n, k| n.get(k)).unwrap().line;
        assert_eq!([line(&["a"]), line(&["b"]), line(&["b", "d"]), line(&["b", "e", "f"])], [1, 2, 4, 7]);
        let YamlData::List(items) = &root.get("b").unwrap().get("d").unwrap().data else { panic!("a list") };
        assert_eq!(items[1].line, 5);
        assert_eq!(root.to_value()["b"]["e"]["f"], u64::MAX);
    }

    #[test]
    fn unquoted_words_are_strings_and_json_is_parsed() {
        let root = parse("{\"a\": \"\\ud83d\\ude00\\/\", \"b\": null,\n\t\"c\": [1.5, true]}", "t.json").unwrap();
        assert_eq!(root.to_value(), serde_json::json!({"a": "😀/", "b": null, "c": [1.5, true]}));
        assert_eq!(parse("a: no\nb: on\n", "t").unwrap().to_value(), serde_json::json!({"a": "no", "b": "on"}));
        assert_eq!(parse("# nothing\n", "t").unwrap().to_value(), Value::Null);
    }

    #[test]
    fn aliases_and_nesting_are_bounded() {
        // Nine levels of nine aliases each: a few hundred bytes that expand to 10^9 items.
        let levels = (1..10).map(|n| format!("a{n}: &a{n} [{}]\n", vec![format!("*a{}", n - 1); 9].join(",")));
        let laughs = format!("a0: &a0 [lol]\n{}", levels.collect::<String>());
        let deep = "[".repeat(100_000);
        for text in [laughs, format!("a: {deep}"), format!("{{a: {deep}")] {
            let error = parse(&text, "x.yml").unwrap_err().to_string();
            assert!(error.starts_with("x.yml"), "{error}");
        }
    }

    #[test]
    fn errors_contain_file_and_line() {
        let message = |text| parse(text, "x.yml").unwrap_err().to_string();
        assert_eq!(message("a: 1\nb: 2\na: 3\n"), "x.yml:3: key 'a' is given twice");
        assert_eq!(message("a: [1\nb: 2"), "x.yml:2: illegal placement of ':' indicator");
        assert!(message("a: 1\n---\nb: 2\n").starts_with("x.yml:3: multiple YAML documents"));
    }
}
