//! What clients send, sent again: OpenAI's own client and the peers' examples, as `make serve-sdk RECORD=1` wrote it down. Each answer
//! has the status, the kind and the shape that the client was answered.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::support::needs;

/// Longest time that a video takes on the scripted device.
const SECONDS: u64 = 30;
const BOUNDARY: &str = "a-boundary-of-a-client";
/// Keys whose values clients act on: equal, not only alike. `scripts/serve/recorded.py` has the same list.
const KEPT: [&str; 5] = ["object", "code", "param", "type", "deleted"];

/// A client's checks: `scripts/serve/recorded.py` says what is in them.
#[derive(Deserialize)]
struct Recorded {
    client: String,
    headers: BTreeMap<String, String>,
    shapes: Map<String, Value>,
    checks: Vec<Check>,
}

#[derive(Deserialize)]
struct Check {
    check: String,
    calls: Vec<Call>,
}

#[derive(Deserialize)]
struct Call {
    method: String,
    path: String,
    headers: Option<BTreeMap<String, String>>,
    /// Name and value; of a file also its name and type.
    form: Option<Vec<Vec<Option<String>>>>,
    body: Option<String>,
    binds: Option<String>,
    status: u16,
    kind: Option<String>,
    answer: Option<Value>,
    until: Option<String>,
}

/// An image that a request may begin with.
fn png() -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image::RgbImage::from_pixel(64, 64, image::Rgb([200, 40, 40])).write_to(&mut bytes, image::ImageFormat::Png).expect("a PNG");
    bytes.into_inner()
}

/// Bytes of a form as clients write them.
fn multipart(form: &[Vec<Option<String>>], named: &dyn Fn(&str) -> String) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in form {
        let text = |at: usize| part.get(at).cloned().flatten();
        let name = text(0).expect("a part's name");
        let file = text(2).map(|name| format!("; filename=\"{name}\"")).unwrap_or_default();
        let kind = text(3).map(|kind| format!("Content-Type: {kind}\r\n")).unwrap_or_default();
        bytes.extend(format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n{kind}\r\n").bytes());
        match text(1).expect("a part's value").as_str() {
            "{png}" => bytes.extend(png()),
            value => bytes.extend(named(value).bytes()),
        }
        bytes.extend(b"\r\n");
    }
    bytes.extend(format!("--{BOUNDARY}--\r\n").bytes());
    bytes
}

/// Where a value has another shape; nothing where it has this one. Null stands for a value that is not there yet.
fn difference(wanted: &Value, got: &Value, at: &str) -> Option<String> {
    let key = at.rsplit('.').next().unwrap_or_default();
    let word = |value: &Value| match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    match (wanted, got) {
        (Value::Object(wanted), Value::Object(got)) => {
            let missing = wanted.keys().find(|key| !got.contains_key(*key)).map(|key| format!("{at}.{key} is missing"));
            let more = got.keys().find(|key| !wanted.contains_key(*key)).map(|key| format!("{at}.{key} is new"));
            missing.or(more).or_else(|| wanted.iter().find_map(|(key, value)| difference(value, &got[key], &format!("{at}.{key}"))))
        }
        (Value::Array(wanted), Value::Array(got)) => {
            let first = wanted.first()?;
            got.iter().find_map(|value| difference(first, value, at))
        }
        (wanted, got) if KEPT.contains(&key) => (wanted != got).then(|| format!("{at} is {got}, not {wanted}")),
        (Value::String(name), Value::Null) if name != "object" => None,
        (Value::String(name), got) if name == "null" || name == word(got) => None,
        (_, Value::Null) => None,
        (wanted, got) => Some(format!("{at} is {got}, not {wanted}")),
    }
}

#[needs(nothing)]
fn shapes_are_told_apart() {
    let shape = serde_json::json!({"object": "video", "id": "string", "error": "null", "data": [{"n": "number"}]});
    let like = serde_json::json!({"object": "video", "id": "video_1", "error": {"code": "x"}, "data": [{"n": 1}, {"n": null}]});
    assert_eq!(difference(&shape, &like, ""), None);
    for (key, value) in [("object", "list".into()), ("id", 1.into()), ("data", serde_json::json!([{"m": 1}]))] {
        let mut other = like.clone();
        other[key] = value;
        assert!(difference(&shape, &other, "").is_some(), "{other}");
    }
    let mut less = like.clone();
    less.as_object_mut().expect("an object").remove("id");
    assert!(difference(&shape, &less, "").is_some());
}
