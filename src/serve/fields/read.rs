//! Reads field values. Numbers and booleans may be sent as text, and lists and objects as JSON text.

use serde_json::{Map, Number, Value, json};

use super::table::FieldKind;
use crate::serve::error::ApiError;
use crate::serve::form::parse_json;

/// Returns an `invalid_value` error about a field.
pub(super) fn invalid(field: &str, why: impl AsRef<str>) -> ApiError {
    ApiError::field("invalid_value", field, format!("{field}: {}", why.as_ref()))
}

/// Formats a value for error messages, shortened to one line.
pub(super) fn shown(value: &Value) -> String {
    let text = match value {
        Value::String(text) => format!("the text '{text}'"),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "an object".into(),
        other => other.to_string(),
    };
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    match text.char_indices().nth(60) {
        Some((at, _)) => text[..at].chars().map(plain).collect::<String>() + "…",
        None => text.chars().map(plain).collect(),
    }
}

/// Reads and normalises a value of the type `kind`. Values of types that need more context, such as files and LoRAs,
/// are returned unchanged.
pub(super) fn value(field: &str, kind: FieldKind, given: Value) -> Result<Value, ApiError> {
    match kind {
        FieldKind::Text(most) => text(field, &given, most).map(Value::from),
        FieldKind::Word(most) => word(field, given, most),
        FieldKind::Integer(least, most) => {
            let found = integer(field, &given)?;
            let wrong = || invalid(field, format!("must be an integer from {least} to {most}, not {}", shown(&given)));
            if (i128::from(least)..=i128::from(most)).contains(&found) { Ok(json!(found as u64)) } else { Err(wrong()) }
        }
        FieldKind::Number(least, most) => {
            let found = number(field, &given)?;
            let wrong = || invalid(field, format!("must be a number from {least} to {most}, not {}", shown(&given)));
            if (least..=most).contains(&found) { Ok(json!(found)) } else { Err(wrong()) }
        }
        FieldKind::Flag => flag(field, &given).map(Value::from),
        FieldKind::Seed => seed(field, &given),
        FieldKind::Frames if given == "auto" => Ok(given),
        FieldKind::Frames => value(field, FieldKind::Integer(1, 1_000_000), given),
        FieldKind::Seconds => {
            let found = number(field, &given)?;
            let wrong = || invalid(field, format!("must be a number above 0 and at most 3600, not {}", shown(&given)));
            if found > 0.0 && found <= 3600.0 { Ok(json!(found)) } else { Err(wrong()) }
        }
        FieldKind::Numbers => list(field, given)?.iter().map(|item| number(field, item).map(Value::from)).collect(),
        FieldKind::Integers => {
            let items = list(field, given)?.into_iter();
            items.map(|item| value(field, FieldKind::Integer(0, 1 << 16), item)).collect()
        }
        FieldKind::Rectangle => match value(field, FieldKind::Integers, given)? {
            Value::Array(sides) if sides.len() == 4 => Ok(Value::Array(sides)),
            other => Err(invalid(field, format!("must be [left, top, width, height], not {}", shown(&other)))),
        },
        FieldKind::Metadata => metadata(field, given),
        FieldKind::Retake => span(field, given),
        FieldKind::Tree => object(field, given).map(Value::Object),
        _ => Ok(given),
    }
}

fn text(field: &str, given: &Value, most: usize) -> Result<String, ApiError> {
    let Value::String(text) = given else { return Err(invalid(field, format!("must be text, not {}", shown(given)))) };
    if text.len() > most {
        let code = if field.ends_with("prompt") { "prompt_too_long" } else { "invalid_value" };
        return Err(ApiError::field(
            code,
            field,
            format!("{field}: the text has {} bytes; the maximum is {most}", text.len()),
        ));
    }
    Ok(text.clone())
}

/// Reads a single line of text of at most `most` characters. Numbers and booleans are converted to text.
fn word(field: &str, given: Value, most: usize) -> Result<Value, ApiError> {
    let text = match given {
        Value::Bool(_) | Value::Number(_) => given.to_string(),
        other => text(field, &other, 4 * most)?,
    };
    let fits = text.chars().count() <= most && !text.chars().any(char::is_control);
    fits.then(|| text.into())
        .ok_or_else(|| invalid(field, format!("must be a single line of at most {most} characters")))
}

fn integer(field: &str, given: &Value) -> Result<i128, ApiError> {
    let wrong = || invalid(field, format!("must be an integer, not {}", shown(given)));
    match given {
        Value::Number(n) => {
            let whole = n.as_u64().map(i128::from).or_else(|| n.as_i64().map(i128::from));
            let exact = |v: &f64| v.fract() == 0.0 && v.abs() < 9e15;
            whole.or_else(|| n.as_f64().filter(exact).map(|v| v as i128)).ok_or_else(wrong)
        }
        Value::String(text) => text.trim().parse().map_err(|_| wrong()),
        _ => Err(wrong()),
    }
}

/// Reads a finite number.
pub(super) fn number(field: &str, given: &Value) -> Result<f64, ApiError> {
    let found = match given {
        Value::Number(n) => n.as_f64(),
        // Reject `inf` and `nan`, which Rust parses but which are not JSON numbers.
        Value::String(text) if text.len() < 64 => text.trim().parse().ok().filter(|v: &f64| v.is_finite()),
        _ => None,
    };
    found.ok_or_else(|| invalid(field, format!("must be a number, not {}", shown(given))))
}

/// Reads a boolean, which may be text.
pub(super) fn flag(field: &str, given: &Value) -> Result<bool, ApiError> {
    match given {
        Value::Bool(on) => Ok(*on),
        Value::String(text) if text.eq_ignore_ascii_case("true") || text == "1" => Ok(true),
        Value::String(text) if text.eq_ignore_ascii_case("false") || text == "0" => Ok(false),
        _ => Err(invalid(field, format!("must be true or false, not {}", shown(given)))),
    }
}

/// Reads a seed. The value -1 requests a random seed.
fn seed(field: &str, given: &Value) -> Result<Value, ApiError> {
    let wrong = || {
        invalid(
            field,
            format!("must be an integer from 0 to 18446744073709551615, or -1 for a random seed, not {}", shown(given)),
        )
    };
    match integer(field, given).map_err(|_| wrong())? {
        -1 => Ok(json!(-1)),
        found => u64::try_from(found).map(Value::from).map_err(|_| wrong()),
    }
}

/// Reads a list, which may be JSON text.
pub(super) fn list(field: &str, given: Value) -> Result<Vec<Value>, ApiError> {
    match structure(field, given)? {
        Value::Array(items) if items.len() <= 1024 => Ok(items),
        Value::Array(items) => Err(invalid(field, format!("the list has {} values; the maximum is 1024", items.len()))),
        other => Err(invalid(field, format!("must be a list, not {}", shown(&other)))),
    }
}

/// Reads an object, which may be JSON text.
pub(super) fn object(field: &str, given: Value) -> Result<Map<String, Value>, ApiError> {
    match structure(field, given)? {
        Value::Object(map) => Ok(map),
        other => Err(invalid(field, format!("must be an object, not {}", shown(&other)))),
    }
}

/// Parses text that starts with `{` or `[` as JSON; returns other values unchanged.
pub(super) fn structure(field: &str, given: Value) -> Result<Value, ApiError> {
    match given {
        Value::String(text) if text.trim_start().starts_with(['{', '[']) => {
            let parsed = parse_json(&text).map_err(|why| invalid(field, format!("invalid JSON: {why}")))?;
            let has_nul = |text: &str| text.contains('\0');
            if has_nul_in(&parsed, &has_nul) {
                return Err(invalid(field, "must not contain a NUL character"));
            }
            Ok(parsed)
        }
        other => Ok(other),
    }
}

fn has_nul_in(value: &Value, has_nul: &impl Fn(&str) -> bool) -> bool {
    match value {
        Value::String(text) => has_nul(text),
        Value::Array(items) => items.iter().any(|item| has_nul_in(item, has_nul)),
        Value::Object(map) => map.iter().any(|(key, item)| has_nul(key) || has_nul_in(item, has_nul)),
        _ => false,
    }
}

/// Removes a member of an object and returns it; `None` if the member is absent or `null`.
pub(super) fn take(object: &mut Map<String, Value>, key: &str) -> Option<Value> {
    object.shift_remove(key).filter(|value| !value.is_null())
}

/// Fails if the object still has members, which are unknown because all known members were removed when they were read.
pub(super) fn no_more(field: &str, object: &Map<String, Value>, known: &str) -> Result<(), ApiError> {
    match object.keys().next() {
        None => Ok(()),
        Some(key) => {
            let key: String = key.chars().take(64).filter(|c| !c.is_control()).collect();
            Err(ApiError::field(
                "unknown_field",
                format!("{field}.{key}"),
                format!("{field}: unknown member '{key}'; known members: {known}"),
            ))
        }
    }
}

fn metadata(field: &str, given: Value) -> Result<Value, ApiError> {
    let map = object(field, given)?;
    if map.len() > 16 {
        return Err(invalid(field, format!("{} key-value pairs exceed the limit of 16", map.len())));
    }
    let fits = |key: &str, text: &str| key.chars().count() <= 64 && text.chars().count() <= 512;
    for (key, value) in &map {
        match value {
            Value::String(text) if fits(key, text) => {}
            Value::String(_) => return Err(invalid(field, "keys are limited to 64 characters and values to 512")),
            other => return Err(invalid(field, format!("values must be text, not {}", shown(other)))),
        }
    }
    Ok(Value::Object(map))
}

/// Reads the time span of a retake: `{start, end, video, audio}`.
fn span(field: &str, given: Value) -> Result<Value, ApiError> {
    let mut item = object(field, given)?;
    let mut read = Map::new();
    for (key, kind) in [
        ("start", FieldKind::Number(0.0, 1e6)),
        ("end", FieldKind::Number(0.0, 1e6)),
        ("video", FieldKind::Flag),
        ("audio", FieldKind::Flag),
    ] {
        if let Some(given) = take(&mut item, key) {
            read.insert(key.into(), value(field, kind, given)?);
        }
    }
    no_more(field, &item, "start, end, video, audio")?;
    Ok(Value::Object(read))
}

/// Converts a number to JSON. An integral value becomes an integer.
pub(super) fn plain(value: f64) -> Value {
    let whole = value.fract() == 0.0 && value.abs() < 9e15;
    if whole { json!(value as i64) } else { Number::from_f64(value).map_or(Value::Null, Value::Number) }
}
