//! Validation of a tree against the JSON Schema of [`Config`], for files, `--set` and flags.

use std::sync::OnceLock;

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::error::{ConfigError, ConfigErrorKind, Limit, ValueOrigin};
use super::experiment::Experiment;
use super::reference_video;
use super::schema::Config;
use super::yaml::{YamlData, YamlNode};

/// Returns the JSON Schema of a configuration; its `$defs` include the schema of experiments.
pub fn json_schema() -> &'static Value {
    static SCHEMA: OnceLock<Value> = OnceLock::new();
    SCHEMA.get_or_init(|| {
        let mut generator = SchemaSettings::default().into_generator();
        generator.subschema_for::<Experiment>();
        let mut schema = generator.into_root_schema_for::<Config>().to_value();
        reference_video::add_to(&mut schema);
        // The crate of the server does not know the pipelines.
        schema["$defs"]["Serve"]["properties"]["pipelines"]["items"] = json!({"$ref": "#/$defs/Pipeline"});
        schema
    })
}

/// Returns the JSON Schema of an experiment file.
pub fn experiment_schema() -> Value {
    let root = json_schema();
    json!({"$schema": root["$schema"], "$ref": "#/$defs/Experiment", "$defs": root["$defs"]})
}

/// Function that converts a line number to the origin that errors show.
type Locate<'a> = &'a dyn Fn(u64) -> ValueOrigin;

/// Returns a function that converts a line number of a file to the origin that errors show.
pub(super) fn in_file(file: &str) -> impl Fn(u64) -> ValueOrigin {
    move |line| ValueOrigin::File { file: file.into(), line }
}

/// Validates a configuration; `locate` returns the location of a line.
///
/// # Errors
/// Returns an error about an unknown key with the most similar key, or about a wrong type with the accepted values.
pub(super) fn validate(node: &YamlNode, locate: Locate) -> Result<(), ConfigError> {
    if matches!(node.data, YamlData::Scalar(Value::Null)) {
        return Ok(()); // An empty file.
    }
    check(node, json_schema(), "", locate)
}

pub(crate) fn validate_experiment(node: &YamlNode, file: &str) -> Result<(), ConfigError> {
    check(node, &json_schema()["$defs"]["Experiment"], "", &in_file(file))
}

/// Returns whether a key accepts arbitrary text.
pub(crate) fn accepts_text(path: &str) -> bool {
    let found = path.split('.').try_fold(json_schema(), |schema, key| property(schema, key));
    found.is_some_and(|s| alternatives(s).iter().any(|a| types(a).contains(&"string") && values(a).is_empty()))
}

/// Resolves a `$ref` to the definition in the schema.
fn follow(schema: &Value) -> &Value {
    let Some(name) = schema["$ref"].as_str().and_then(|r| r.strip_prefix("#/$defs/")) else { return schema };
    follow(&json_schema()["$defs"][name])
}

/// Returns the alternatives of `anyOf`, or the schema itself.
fn alternatives(schema: &Value) -> Vec<&Value> {
    let schema = follow(schema);
    match schema["anyOf"].as_array() {
        Some(all) => all.iter().flat_map(alternatives).collect(),
        None => vec![schema],
    }
}

fn types(schema: &Value) -> Vec<&str> {
    match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(many) => many.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

/// Returns the enumerated strings of a schema.
fn values(schema: &Value) -> Vec<&str> {
    let listed = schema["enum"].as_array().into_iter().flatten();
    let described = schema["oneOf"].as_array().into_iter().flatten().map(|one| &one["const"]);
    let described = described.chain(schema["oneOf"].as_array().into_iter().flatten().flat_map(|one| {
        // Variants without descriptions are listed in one `enum`.
        one["enum"].as_array().into_iter().flatten()
    }));
    listed.chain(described).chain([&schema["const"]]).filter_map(Value::as_str).collect()
}

fn property<'a>(schema: &'a Value, key: &str) -> Option<&'a Value> {
    alternatives(schema).into_iter().find_map(|s| {
        s["properties"].get(key).or_else(|| s.get("additionalProperties").filter(|more| more.is_object()))
    })
}

fn check(node: &YamlNode, schema: &Value, path: &str, locate: Locate) -> Result<(), ConfigError> {
    let options = alternatives(schema);
    match &node.data {
        YamlData::Map(entries) => {
            let Some(object) = options.iter().find(|s| types(s).contains(&"object")) else {
                return Err(wrong(node, &options, path, locate));
            };
            let known = object["properties"].as_object();
            for (key, child) in entries {
                let Some(inner) = property(object, key) else {
                    return Err(unknown(key, known, path, locate(child.line)));
                };
                check(child, inner, &join(path, key), locate)?;
            }
            // Only list items have required keys; all other keys have defaults.
            let mut required = object["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            match required.find(|r| node.get(r).is_none()) {
                None => Ok(()),
                Some(missing) => {
                    let expected = Limit::Schema(format!("a map with the key '{missing}'"));
                    let found = "a map without this key";
                    let error = ConfigError::value(ConfigErrorKind::WrongType, path.to_string(), found, expected);
                    Err(error.at(locate(node.line)))
                }
            }
        }
        YamlData::List(items) => {
            let Some(list) = options.iter().find(|s| types(s).contains(&"array")) else {
                return Err(wrong(node, &options, path, locate));
            };
            items
                .iter()
                .enumerate()
                .try_for_each(|(i, item)| check(item, &list["items"], &format!("{path}[{i}]"), locate))
        }
        YamlData::Scalar(value) => match options.iter().any(|s| fits(value, s)) {
            true => Ok(()),
            false => Err(wrong(node, &options, path, locate)),
        },
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_string() } else { format!("{path}.{key}") }
}

fn fits(value: &Value, schema: &Value) -> bool {
    let words = values(schema);
    if !words.is_empty() {
        return value.as_str().is_some_and(|v| words.contains(&v));
    }
    let in_range =
        |v: f64| schema["minimum"].as_f64().is_none_or(|m| v >= m) && schema["maximum"].as_f64().is_none_or(|m| v <= m);
    types(schema).iter().any(|t| match *t {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "integer" => (value.is_u64() || value.is_i64()) && value.as_f64().is_some_and(in_range),
        "number" => value.as_f64().is_some_and(in_range),
        _ => false,
    })
}

/// Describes the accepted values of a schema.
fn describe(schema: &Value) -> String {
    let words = values(schema);
    if !words.is_empty() {
        return words.join(", ");
    }
    let bound = |key: &str| schema[key].as_f64().map(|v| v.to_string());
    // Omit the bounds of integer types, such as 2^64 - 1.
    let range = match (bound("minimum"), bound("maximum").filter(|m| m.len() < 8)) {
        (Some(low), Some(high)) => format!(" from {low} to {high}"),
        (Some(low), None) => format!(" of at least {low}"),
        (None, Some(high)) => format!(" of at most {high}"),
        (None, None) => String::new(),
    };
    let name = |t: &&str| match *t {
        "null" => "null".to_string(),
        "boolean" => "true or false".to_string(),
        "string" => "text".to_string(),
        "integer" => format!("a whole number{range}"),
        "number" => format!("a number{range}"),
        "array" => "a list".to_string(),
        _ => "a map of keys".to_string(),
    };
    types(schema).iter().map(name).collect::<Vec<_>>().join(" or ")
}

fn wrong(node: &YamlNode, options: &[&Value], path: &str, locate: Locate) -> ConfigError {
    let mut expected: Vec<String> = options.iter().map(|s| describe(s)).collect();
    // Sort null last.
    expected.sort_by_key(|e| e == "null");
    let found = match &node.data {
        YamlData::List(_) => "a list".to_string(),
        YamlData::Map(_) => "a map of keys".to_string(),
        YamlData::Scalar(Value::String(text)) => format!("the text '{text}'"),
        YamlData::Scalar(value) => value.to_string(),
    };
    let numeric = matches!(&node.data, YamlData::Scalar(v) if v.is_number() || v.is_boolean());
    let quote = if numeric && expected.iter().any(|e| e.starts_with("text")) { " (quote it)" } else { "" };
    let key = if path.is_empty() { "the file" } else { path }.to_string();
    let expected = Limit::Schema(expected.join(" or "));
    ConfigError::value(ConfigErrorKind::WrongType, key, format!("{found}{quote}"), expected).at(locate(node.line))
}

fn unknown(key: &str, known: Option<&Map<String, Value>>, path: &str, origin: ValueOrigin) -> ConfigError {
    if path == "model" && key == "prompt_enhancer" {
        let hint = "the text encoder or enhance.endpoint enhances prompts; set request.enhance_prompt to true".into();
        return ConfigError::key(ConfigErrorKind::UnknownKey, join(path, key), Limit::Schema(hint)).at(origin);
    }
    let names: Vec<&str> = known.into_iter().flat_map(|k| k.keys()).map(String::as_str).collect();
    let near = names.iter().map(|n| (strsim::jaro_winkler(n, key), *n)).max_by(|a, b| a.0.total_cmp(&b.0));
    let hint = match near {
        Some((score, name)) if score > 0.75 => format!("did you mean '{name}'?"),
        // The key belongs to another section.
        _ => match section_of(key) {
            Some(section) => format!("'{key}' belongs under '{section}'"),
            None => {
                format!("the nearest known key is '{}'; known keys are {}", near.map_or("", |n| n.1), names.join(", "))
            }
        },
    };
    ConfigError::key(ConfigErrorKind::UnknownKey, join(path, key), Limit::Schema(hint)).at(origin)
}

fn section_of(key: &str) -> Option<&'static str> {
    let sections = json_schema()["properties"].as_object()?;
    sections.iter().find(|(_, s)| follow(s)["properties"].get(key).is_some()).map(|(name, _)| name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::yaml::parse;

    fn message(text: &str) -> String {
        validate(&parse(text, "x.yml").unwrap(), &in_file("x.yml")).unwrap_err().to_string()
    }

    #[test]
    fn unknown_keys_suggest_the_nearest_key() {
        for (text, want) in [
            ("request:\n  # size\n  widht: 512\n", "3: unknown key 'request.widht'; did you mean 'width'?"),
            (
                "model: {prompt_enhancer: google/gemma-4-E2B-it}\n",
                "1: unknown key 'model.prompt_enhancer'; the text encoder or enhance.endpoint enhances prompts; set \
                 request.enhance_prompt to true",
            ),
            ("\nsampelr: {steps: 3}\n", "2: unknown key 'sampelr'; did you mean 'sampler'?"),
            ("steps: 3\n", "1: unknown key 'steps'; 'steps' belongs under 'sampler'"),
            (
                "model:\n  loras:\n    - {path: a, strenght: 1}\n",
                "3: unknown key 'model.loras[0].strenght'; did you mean 'strength'?",
            ),
            (
                "mesh: {zzz: 1}\n",
                "1: unknown key 'mesh.zzz'; the nearest known key is 'dcn'; known keys are data, cfg, fsdp, context, tensor, dcn",
            ),
        ] {
            assert_eq!(message(text), format!("x.yml:{want}"));
        }
    }

    #[test]
    fn wrong_types_list_accepted_values() {
        for (text, want) in [
            (
                "request: {width: wide}\n",
                "1: 'request.width' must be a whole number of at least 1, not the text 'wide'",
            ),
            ("sampler: {steps: 1.5}\n", "1: 'sampler.steps' must be a whole number from 1 to 256, not 1.5"),
            ("request:\n  seed: -1\n", "2: 'request.seed' must be a whole number of at least 0, not -1"),
            ("request: {prompt: 5}\n", "1: 'request.prompt' must be text or null, not 5 (quote it)"),
            ("guidance: 4\n", "1: 'guidance' must be a map of keys, not 4"),
            ("runtime: {dtype: f16}\n", "1: 'runtime.dtype' must be bf16, f32, not the text 'f16'"),
            (
                "sampler: {progress_every: never}\n",
                "1: 'sampler.progress_every' must be auto or a whole number of at least 1, not the text 'never'",
            ),
            ("sampler: {sigmas: [1, a]}\n", "1: 'sampler.sigmas[1]' must be a number, not the text 'a'"),
            (
                "request: {images: [{frame: 1}]}",
                "1: 'request.images[0]' must be a map with the key 'path', not a map without this key",
            ),
            ("- 1\n", "1: 'the file' must be a map of keys, not a list"),
            ("model: {text_encoder: 3}\n", "1: 'model.text_encoder' must be text or null, not 3 (quote it)"),
        ] {
            assert_eq!(message(text), format!("x.yml:{want}"));
        }
    }

    #[test]
    fn only_string_keys_accept_text() {
        assert!(accepts_text("request.prompt") && accepts_text("model.vae") && accepts_text("runtime.xla_flags.xla_x"));
        assert!(!accepts_text("request.width") && !accepts_text("runtime.dtype") && !accepts_text("request.nope"));
    }
}
