//! Unit tests of request fields.

mod files;
mod hdr;
mod refused;
mod regions;
mod taken;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequest, Multipart};
use axum::http::Request;
use serde_json::{Value, json};

use super::{Endpoint, Fields, Generator};
use crate::config::{CliOverrides, Config, load};
use crate::serve::descriptors::Descriptors;
use crate::serve::error::ApiError;
use crate::serve::form::Form;
use crate::serve::id::Ids;
use crate::serve::inputs::InputStore;
use crate::serve::job::AcceptedJob;
use crate::serve::jobs::Caller;

/// A form part: the text after `form-data; ` in its header, and its contents.
type TestPart<'a> = (&'a str, &'a [u8]);

/// Converter for a server's configuration, with a temporary folder for input files.
struct TestConverter {
    fields: Fields,
    ids: Ids,
    folder: tempfile::TempDir,
}

impl TestConverter {
    fn new(file: &str, set: &[&str]) -> Self {
        let set = set.iter().map(|pair| (*pair).to_string()).collect();
        let given = CliOverrides { files: vec![file.into()], set, ..CliOverrides::default() };
        let folder = tempfile::tempdir().expect("a folder");
        let inputs = InputStore::open(folder.path().join("inputs")).expect("a folder").accepting_headers();
        let loaded = load(&given).expect("a configuration");
        let served = loaded.config.served_pipelines().expect("known pipelines");
        let fields = Fields::new(loaded, served, Arc::new(inputs));
        TestConverter { fields, ids: Ids::after(None), folder }
    }

    pub(super) fn accept(&self, form: Form, endpoint: Endpoint) -> Result<AcceptedJob, ApiError> {
        self.fields.accept(form, endpoint, &Caller { name: "me".into(), sees_all: false }, &self.ids)
    }

    /// Converts a request, sent as JSON, into a job.
    fn json(&self, body: &Value) -> Result<AcceptedJob, ApiError> {
        self.accept(Form::json(body.to_string().as_bytes())?, Endpoint::Create)
    }

    /// Converts a request into a job, after encoding it as a multipart form.
    fn form(&self, body: &Value) -> Result<AcceptedJob, ApiError> {
        let mut fields = Vec::new();
        body.as_object().expect("an object").iter().for_each(|(name, value)| flat(name, value, &mut fields));
        let heads: Vec<String> = fields.iter().map(|(name, _)| format!("name=\"{name}\"")).collect();
        let parts: Vec<TestPart> =
            heads.iter().zip(&fields).map(|(head, (_, text))| (head.as_str(), text.as_bytes())).collect();
        self.accept(self.read_form(&parts)?, Endpoint::Create)
    }

    /// Encodes form parts as a multipart body and parses the body.
    fn read_form(&self, parts: &[TestPart]) -> Result<Form, ApiError> {
        let mut body = Vec::new();
        for (head, contents) in parts {
            body.extend_from_slice(format!("--X\r\nContent-Disposition: form-data; {head}\r\n\r\n").as_bytes());
            body.extend_from_slice(contents);
            body.extend_from_slice(b"\r\n");
        }
        body.extend_from_slice(b"--X--\r\n");
        let request = Request::post("/").header("content-type", "multipart/form-data; boundary=X");
        let request = request.body(Body::from(body)).expect("a request");
        let takes_file = |name: &str| self.fields.takes_file(name);
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let body = Multipart::from_request(request, &()).await.expect("a form");
            Form::multipart(body, &std::env::temp_dir(), Descriptors::raise(), &takes_file).await
        })
    }

    /// Converts a request into a job and checks that JSON and a multipart form give the same job.
    fn good(&self, body: &Value) -> AcceptedJob {
        let mut body = body.clone();
        if let Some(body) = body.as_object_mut() {
            body.entry("prompt").or_insert("a".into());
        }
        let json = self.json(&body).unwrap_or_else(|error| panic!("{body}: {error:?}"));
        let form = self.form(&body).unwrap_or_else(|error| panic!("{body} as a form: {error:?}"));
        if body.get("seed").is_some_and(|seed| *seed != -1 && *seed != "-1") {
            assert_eq!((&form.config, &form.fields), (&json.config, &json.fields), "{body}");
            assert_eq!((&form.shape, &form.seconds), (&json.shape, &json.seconds), "{body}");
        }
        assert_eq!(
            (&form.warnings, &form.metadata, &form.user),
            (&json.warnings, &json.metadata, &json.user),
            "{body}"
        );
        json
    }

    /// Returns the status, code and field of the error for a JSON request. Checks that the message is one line without
    /// paths or CLI flags.
    fn bad(&self, body: &Value) -> (u16, &'static str, Option<String>) {
        let mut body = body.clone();
        if let Some(body) = body.as_object_mut() {
            body.entry("prompt").or_insert("a".into());
        }
        let Err(error) = self.json(&body) else { return (200, "", None) };
        assert_eq!(error.message.lines().count(), 1, "{error:?}");
        let place = self.folder.path().display().to_string();
        assert!(!error.message.contains(&place) && !error.message.contains("--"), "{error:?}");
        (error.status, error.code, error.param)
    }
}

trait ParsedConfig {
    /// Returns the configuration of the job.
    fn config(&self) -> Config;
}

impl ParsedConfig for AcceptedJob {
    fn config(&self) -> Config {
        self.config.parse().expect("a configuration")
    }
}

/// Flattens a JSON value into form fields.
fn flat(name: &str, value: &Value, fields: &mut Vec<(String, String)>) {
    match value {
        Value::Null => {}
        Value::String(text) => fields.push((name.into(), text.clone())),
        Value::Array(items) if items.iter().all(|item| !item.is_array() && !item.is_object()) => {
            items.iter().for_each(|item| flat(&format!("{name}[]"), item, fields));
        }
        Value::Array(_) => fields.push((name.into(), value.to_string())),
        Value::Object(map) if name == "ltx2" => fields.push((name.into(), Value::Object(map.clone()).to_string())),
        Value::Object(map) => map.iter().for_each(|(key, value)| flat(&format!("{name}[{key}]"), value, fields)),
        other => fields.push((name.into(), other.to_string())),
    }
}

/// Returns the value of a key in a job's configuration.
fn at(accepted: &AcceptedJob, key: &str) -> Value {
    let config = serde_json::to_value(&accepted.config).expect("a tree");
    key.split('.').fold(config, |tree, key| tree.get(key).cloned().unwrap_or(Value::Null))
}

#[test]
fn fields_set_their_configuration_keys() {
    let server = TestConverter::new("nano", &[]);
    for (body, want) in [
        (
            json!({"seed": 7}),
            json!({"request.seed": 7, "request.prompt": "a", "request.width": 128, "request.num_videos": 1}),
        ),
        (json!({"seed": "7"}), json!({"request.seed": 7})),
        (json!({"seed": u64::MAX}), json!({"request.seed": u64::MAX})),
        (json!({"seed": "18446744073709551615"}), json!({"request.seed": u64::MAX})),
        (json!({"seed": 7, "size": "64x96"}), json!({"request.width": 64, "request.height": 96})),
        (json!({"seed": 7, "size": "auto"}), json!({"request.width": 128, "request.height": 96})),
        (json!({"seed": 7, "width": 64, "height": "32"}), json!({"request.width": 64, "request.height": 32})),
        (json!({"seed": 7, "width": 64, "size": "64x96"}), json!({"request.width": 64, "request.height": 96})),
        (json!({"seed": 7, "width": 64}), json!({"request.width": 64, "request.height": 96})),
        (json!({"seed": 7, "fps": 12}), json!({"request.frame_rate": 12.0, "request.num_frames": 25})),
        (json!({"seed": 7, "frame_rate": "30"}), json!({"request.frame_rate": 30.0})),
        (json!({"seed": 7, "seconds": "2"}), json!({"request.num_frames": 49})),
        (json!({"seed": 7, "seconds": 2, "fps": 12}), json!({"request.num_frames": 25, "request.frame_rate": 12.0})),
        (json!({"seed": 7, "num_frames": 33}), json!({"request.num_frames": 33})),
        (json!({"seed": 7, "num_frames": 33, "seconds": 8}), json!({"request.num_frames": 33})),
        (json!({"seed": 7, "steps": 8}), json!({"sampler.steps": 8, "sampler.sigmas": null})),
        (json!({"seed": 7, "num_inference_steps": "8"}), json!({"sampler.steps": 8})),
        (json!({"seed": 7, "sigmas": [1, 0.5, 0.0]}), json!({"sampler.sigmas": [1.0, 0.5, 0.0], "sampler.steps": 2})),
        (json!({"seed": 7, "guidance_scale": 5}), json!({"guidance.video.cfg": 5.0, "guidance.audio.cfg": 5.0})),
        (
            json!({"seed": 7, "guidance_scale": 5, "audio_cfg_scale": "2.5"}),
            json!({"guidance.video.cfg": 5.0, "guidance.audio.cfg": 2.5}),
        ),
        (
            json!({"seed": 7, "video_stg_scale": 2, "stg_scale": 1, "stg_blocks": [1]}),
            json!({"guidance.video.stg": 2.0, "guidance.audio.stg": 1.0, "guidance.stg_blocks": [1]}),
        ),
        (
            json!({"seed": 7, "extra_params": {"stg_scale": 1.0, "stg_blocks": [1, 2]}}),
            json!({"guidance.video.stg": 1.0, "guidance.audio.stg": 1.0, "guidance.stg_blocks": [1, 2]}),
        ),
        (json!({"seed": 7, "extra_params": "{\"a2v_guidance_scale\": 2}"}), json!({"guidance.video.modality": 2.0})),
        (
            json!({"seed": 7, "guidance_rescale": 0.5}),
            json!({"guidance.video.rescale": 0.5, "guidance.audio.rescale": 0.5}),
        ),
        (
            json!({"seed": 7, "guidance_skip_step": 1, "audio_skip_step": 0}),
            json!({"guidance.video.skip": 1, "guidance.audio.skip": 0}),
        ),
        (json!({"seed": 7, "generate_audio": false}), json!({"output.audio": false})),
        (json!({"seed": 7, "generate_sound": "false"}), json!({"output.audio": false})),
        (json!({"seed": 7, "ltx2": {"sampler": {"kind": "res_2s"}}}), json!({"sampler.kind": "res_2s"})),
        (
            json!({"seed": 7, "ltx2": {"reference": "official"}}),
            json!({"reference": "official", "vocoder.stage1_clamp": "official"}),
        ),
        (
            json!({"seed": 7, "n": 1, "quality": "standard", "response_format": "file", "enhance_prompt": false}),
            json!({}),
        ),
        (json!({"seed": 7, "enhance_prompt": true}), json!({"request.enhance_prompt": true})),
        (json!({"seed": 7, "negative_prompt": "blur"}), json!({"request.negative_prompt": "blur"})),
        (json!({"seed": 7, "max_sequence_length": 64}), json!({"request.max_sequence_length": 64})),
    ] {
        let accepted = server.good(&body);
        for (key, value) in want.as_object().expect("an object") {
            assert_eq!(at(&accepted, key), *value, "{body}: {key}");
        }
    }
}

#[test]
fn missing_seed_is_random_unless_server_fixes_it() {
    let server = TestConverter::new("nano", &[]);
    let seed = |body: &Value| server.good(body).config().request.seed;
    let drawn: Vec<u64> =
        (0..4).map(|_| seed(&json!({}))).chain([seed(&json!({"seed": -1})), seed(&json!({"seed": "-1"}))]).collect();
    assert!(drawn.iter().all(|seed| *seed < 1 << 53));
    assert!(drawn.windows(2).any(|pair| pair[0] != pair[1]));
    // A field overrides a YAML key, even if the field requests a random seed.
    let accepted = server.good(&json!({"seed": -1, "ltx2": {"request": {"seed": 5}}}));
    assert_eq!(accepted.fields["seed"], accepted.config().request.seed);
    assert_eq!(accepted.warnings, ["seed overrides ltx2.request.seed"]);
    let accepted = server.good(&json!({}));
    assert_eq!(accepted.fields["seed"], accepted.config().request.seed);
    let fixed = TestConverter::new("nano", &["serve.seed=fixed", "request.seed=99"]);
    assert_eq!(fixed.good(&json!({})).config().request.seed, 99);
    assert_eq!(server.good(&json!({"ltx2": {"request": {"seed": 5}}})).config().request.seed, 5);
}
