//! Replays recorded calls of OpenAI's client and of the example clients of similar servers. `make serve-sdk RECORD=1`
//! records them. Each response must have the recorded status, content type and structure.

use std::collections::BTreeMap;
use std::fs;
use std::io::Cursor;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ltx2::serve::server::{Server, ServerOptions};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::scripted::{self, ScriptedDevice};
use crate::site::{Answer, Client, started};
use crate::support::needs;

/// Maximum time in seconds until a video on the scripted device has ended.
const SECONDS: u64 = 30;
const BOUNDARY: &str = "a-boundary-of-a-client";
/// Keys whose values must equal the recorded ones, because clients act on them. For other keys, only the type must
/// match. `scripts/serve/recorded.py` contains the same list.
const KEPT: [&str; 5] = ["object", "code", "param", "type", "deleted"];

/// Recorded calls of a client. `scripts/serve/recorded.py` describes the format.
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
    /// Form parts: name and value, and for a file also its file name and content type.
    form: Option<Vec<Vec<Option<String>>>>,
    body: Option<String>,
    binds: Option<String>,
    status: u16,
    kind: Option<String>,
    #[serde(default)]
    says: BTreeMap<String, String>,
    answer: Option<Value>,
    until: Option<String>,
}

/// Returns a PNG that the replayed requests use as their image.
fn png() -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image::RgbImage::from_pixel(64, 64, image::Rgb([200, 40, 40]))
        .write_to(&mut bytes, image::ImageFormat::Png)
        .expect("a PNG");
    bytes.into_inner()
}

/// Encodes a multipart form in the same way as the recorded clients.
fn multipart(form: &[Vec<Option<String>>], named: &dyn Fn(&str) -> String) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in form {
        let text = |at: usize| part.get(at).cloned().flatten();
        let name = text(0).expect("a part's name");
        let file = text(2).map(|name| format!("; filename=\"{name}\"")).unwrap_or_default();
        let kind = text(3).map(|kind| format!("Content-Type: {kind}\r\n")).unwrap_or_default();
        bytes.extend(
            format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n{kind}\r\n").bytes(),
        );
        match text(1).expect("a part's value").as_str() {
            "{png}" => bytes.extend(png()),
            value => bytes.extend(named(value).bytes()),
        }
        bytes.extend(b"\r\n");
    }
    bytes.extend(format!("--{BOUNDARY}--\r\n").bytes());
    bytes
}

/// Returns the path at which the structures of two values differ; `None` if they do not. A null matches any value,
/// because it stands for a value that does not exist yet.
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
            missing
                .or(more)
                .or_else(|| wanted.iter().find_map(|(key, value)| difference(value, &got[key], &format!("{at}.{key}"))))
        }
        (Value::Array(wanted), Value::Array(got)) => {
            let first = wanted.first()?;
            got.iter().find_map(|value| difference(first, value, at))
        }
        (wanted, got) if KEPT.contains(&key) => (wanted != got).then(|| format!("{at} is {got}, not {wanted}")),
        (Value::String(name), got) if name == "null" || name == word(got) => None,
        (_, Value::Null) => None,
        (wanted, got) => Some(format!("{at} is {got}, not {wanted}")),
    }
}

#[needs(nothing)]
fn structural_differences_between_responses_are_detected() {
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

/// Returns the status of a video, or of the first video in a list.
fn status_of(body: &Value) -> &str {
    body["status"].as_str().or(body["data"][0]["status"].as_str()).unwrap_or_default()
}

/// Replays the calls of a client to a server, and translates recorded ids into ids of this server.
struct Replay<'a> {
    file: &'a Recorded,
    server: &'a Server,
    names: BTreeMap<String, String>,
}

impl Replay<'_> {
    /// Replaces the recorded ids in a text by the ids of this server.
    fn named(&self, text: &str) -> String {
        self.names.iter().fold(text.to_string(), |text, (name, id)| text.replace(&format!("{{{name}}}"), id))
    }

    /// Sends a call in the same way as the recorded client.
    fn send(&self, call: &Call) -> Answer {
        let mut headers = call.headers.clone().unwrap_or_else(|| self.file.headers.clone());
        let body = match (&call.form, &call.body) {
            (Some(form), _) => {
                headers.insert("content-type".into(), format!("multipart/form-data; boundary={BOUNDARY}"));
                multipart(form, &|text| self.named(text))
            }
            (None, Some(body)) => self.named(body).into_bytes(),
            (None, None) => Vec::new(),
        };
        let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let body = (call.method == "POST").then_some(body.as_slice());
        let mut client = Client::to(self.server.address());
        client.roundtrip(&call.method, &self.named(&call.path), &headers, body).expect("an answer")
    }

    /// Repeats a call until its response has the status for which the recorded client waited.
    fn wait(&self, call: &Call, status: &str) -> Answer {
        let started = Instant::now();
        loop {
            let answer = self.send(call);
            if status_of(&answer.json()) == status || started.elapsed() > Duration::from_secs(SECONDS) {
                return answer;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sends a call and returns how its response differs from the recorded one. Records the id in the response.
    fn wrong(&mut self, call: &Call) -> Option<String> {
        let answer = call.until.as_deref().map_or_else(|| self.send(call), |status| self.wait(call, status));
        if answer.status != call.status {
            return Some(format!("status {}: {}", answer.status, String::from_utf8_lossy(&answer.body)));
        }
        let kind = answer.header("content-type").map(|kind| kind.split(';').next().unwrap_or_default());
        let wanted = call.kind.as_deref().unwrap_or("application/json");
        if kind != Some(wanted) {
            return Some(format!("content-type {kind:?}, not {wanted}"));
        }
        if let Some((name, wanted)) =
            call.says.iter().find(|(name, wanted)| answer.header(name) != Some(wanted.as_str()))
        {
            return Some(format!("{name} is {:?}, not {wanted}", answer.header(name)));
        }
        let Some(shape) = &call.answer else { return None };
        let body = answer.json();
        if let Some(name) = &call.binds {
            let id = body["last_id"].as_str().or(body["id"].as_str()).unwrap_or_default();
            self.names.insert(name.clone(), id.into());
        }
        if let Some(status) = &call.until
            && status_of(&body) != status
        {
            return Some(format!("its status stays {}", status_of(&body)));
        }
        let shape = shape.as_str().map_or(shape, |name| &self.file.shapes[name]);
        difference(shape, &body, "")
    }
}

/// Starts a server on the scripted device with the options with which the client was recorded.
fn start(folder: &Path, with_keys: bool, any_model: bool) -> Server {
    let keys = folder.join("keys");
    let mut set = vec!["served_model_name=[nano]".to_string(), format!("any_model={any_model}")];
    if with_keys {
        fs::write(&keys, "first:first-key-of-the-test\nsecond:second-key-of-the-test\n").expect("written");
        fs::set_permissions(&keys, fs::Permissions::from_mode(0o600)).expect("a mode");
        set.push(format!("api_key_file={}", keys.display()));
    }
    let set: Vec<&str> = set.iter().map(String::as_str).collect();
    started(&folder.join("state"), &set, ServerOptions::default(), ScriptedDevice::new(Arc::default()))
}

/// Replays all recorded checks of a client, each with a new server.
fn replay(name: &str, any_model: bool) {
    let text = fs::read_to_string(format!("tests/fixtures/serve/{name}.json")).expect("a fixture");
    let file: Recorded = serde_json::from_str(&text).expect("as scripts/serve/recorded.py writes it");
    let mut wrong = Vec::new();
    let mut calls = 0;
    for check in &file.checks {
        let folder = scripted::quick_folder();
        let server = start(folder.path(), check.check.contains("keys"), any_model);
        let mut replay = Replay { file: &file, server: &server, names: BTreeMap::new() };
        for call in &check.calls {
            calls += 1;
            let said = replay.wrong(call).map(|said| format!("{}: {} {}: {said}", check.check, call.method, call.path));
            wrong.extend(said);
        }
        assert_eq!(server.end(|| false), 0, "{}", check.check);
    }
    assert!(calls > 20, "{}: {calls} calls", file.client);
    assert!(wrong.is_empty(), "{}:\n{}", file.client, wrong.join("\n"));
}

#[needs(nothing)]
fn server_matches_openai_client_recordings() {
    replay("openai", false);
}

#[needs(nothing)]
fn server_matches_recordings_of_other_servers_clients() {
    replay("peers", true);
}
