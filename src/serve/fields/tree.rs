//! The keys of the YAML that a request may write, and those that it may not: each is in one of two lists.

use serde_json::Value;

use super::given::plain;
use crate::config::accepts_text;
use crate::serve::error::ApiError;
use crate::serve::form::parse_json;

/// Keys, or whole sections, that `ltx2` may write.
pub(super) const ALLOWED: [&str; 32] = [
    "pipeline",
    "reference",
    "request.prompt",
    "request.negative_prompt",
    "request.width",
    "request.height",
    "request.num_frames",
    "request.frame_rate",
    "request.motion_speed",
    "request.seed",
    "request.max_sequence_length",
    "request.retake",
    "request.extend",
    "text.bos",
    "sampler.kind",
    "sampler.eta",
    "sampler.noise_seed",
    "sampler.gamma",
    "sampler.step_noise",
    "sampler.noise_order",
    "sampler.steps",
    "sampler.schedule",
    "sampler.beta",
    "sampler.sigmas",
    "sampler.sigma_shift",
    "sampler.noise",
    "guidance",
    "conditioning",
    "two_stage",
    "dfr",
    "vocoder.stage1_clamp",
    "output.audio",
];

/// Those that are the operator's, name files, or make more than one video.
pub(super) const REFUSED: [&str; 21] = [
    "extends",
    "model",
    "mesh",
    "layout",
    "runtime",
    "serve",
    "request.prompts",
    "request.negative_prompt_file",
    "request.num_videos",
    "request.images",
    "request.video",
    "request.reference_video",
    "request.reference_videos",
    "request.audio",
    "request.audio_latents",
    "request.chain",
    "sampler.progress_every",
    "output.path",
    "output.save_frames",
    "output.save_audio",
    "output.sidecar",
];

/// Fields that take the place of refused keys.
const INSTEAD: [(&str, &str); 6] = [
    ("request.images", "images"),
    ("request.audio", "input_audio"),
    ("request.video", "input_video"),
    ("request.reference_video", "reference_videos"),
    ("request.reference_videos", "reference_videos"),
    ("model", "lora"),
];

/// Whether a key is a list's own, or in one of its sections.
fn is_in(list: &[&str], key: &str) -> bool {
    list.iter().any(|own| key == *own || key.strip_prefix(own).is_some_and(|rest| rest.starts_with('.')))
}

/// Whether a section holds keys of a list.
fn holds(list: &[&str], section: &str) -> bool {
    list.iter().any(|own| own.strip_prefix(section).is_some_and(|rest| rest.starts_with('.')))
}

/// Refuses keys that are not a request's to write.
pub(super) fn check(tree: &Value) -> Result<(), ApiError> {
    check_below(tree, "")
}

fn check_below(tree: &Value, path: &str) -> Result<(), ApiError> {
    let Value::Object(map) = tree else { return Ok(()) };
    for (key, value) in map {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        if is_in(&ALLOWED, &path) {
            continue;
        }
        if is_in(&REFUSED, &path) {
            let field = format!("ltx2.{}", plain(&path));
            let instead =
                INSTEAD.iter().find(|(own, _)| *own == path).map(|(_, field)| format!("; use the field {field}"));
            let why = format!("{field}: is the server's to say{}", instead.unwrap_or_default());
            return Err(ApiError::field("parameter_not_allowed", field, why));
        }
        // A section of several keys; what is no key at all is told with the nearest one.
        if holds(&ALLOWED, &path) || holds(&REFUSED, &path) {
            check_below(value, &path)?;
        }
    }
    Ok(())
}

/// The tree of a form, whose leaves are text: numbers, switches and lists where keys take such.
pub(super) fn typed(tree: Value) -> Value {
    typed_below(tree, "")
}

fn typed_below(tree: Value, path: &str) -> Value {
    match tree {
        Value::Object(map) => map
            .into_iter()
            .map(|(key, value)| {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                let value = typed_below(value, &path);
                (key, value)
            })
            .collect(),
        Value::Array(items) => items.into_iter().map(|item| typed_below(item, path)).collect(),
        Value::String(text) if !accepts_text(path) => parse_json(&text).unwrap_or(Value::String(text)),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A key that is in neither list could become settable by accident, or stay useless.
    #[test]
    fn every_key_is_allowed_or_refused() {
        let schema = crate::config::json_schema();
        let follow = |schema: &Value| match schema["$ref"].as_str().and_then(|r| r.strip_prefix("#/$defs/")) {
            Some(name) => crate::config::json_schema()["$defs"][name].clone(),
            None => schema.clone(),
        };
        let mut seen = 0;
        for (section, inner) in schema["properties"].as_object().expect("sections") {
            let keys = follow(inner)["properties"].as_object().cloned().unwrap_or_default();
            let keys = keys.keys().map(|key| format!("{section}.{key}"));
            let keys: Vec<String> =
                keys.chain([section.clone()].into_iter().filter(|_| follow(inner)["properties"].is_null())).collect();
            for key in keys {
                let (allowed, refused) = (is_in(&ALLOWED, &key), is_in(&REFUSED, &key));
                assert!(allowed != refused, "{key}: put it into ALLOWED or into REFUSED");
                seen += 1;
            }
        }
        assert!(seen > 100, "{seen} keys");
        for own in ALLOWED.iter().chain(&REFUSED) {
            let path = own.split('.').try_fold(schema.clone(), |at, key| {
                let found = follow(&at)["properties"].get(key).cloned()?;
                Some(follow(&found))
            });
            assert!(path.is_some(), "{own} is no key");
        }
    }

    #[test]
    fn refused_keys_are_named() {
        for (tree, param) in [
            (json!({"model": {"path": "x"}}), "ltx2.model"),
            (json!({"request": {"prompts": "f"}}), "ltx2.request.prompts"),
            (json!({"output": {"audio": false, "path": "x"}}), "ltx2.output.path"),
            (json!({"sampler": {"progress_every": 1}}), "ltx2.sampler.progress_every"),
            (json!({"serve": {}}), "ltx2.serve"),
        ] {
            let error = check(&tree).expect_err("refused");
            assert_eq!((error.code, error.param.as_deref()), ("parameter_not_allowed", Some(param)));
        }
        assert!(check(&json!({"sampler": {"kind": "res_2s"}, "guidance": {"video": {"cfg": 1}}})).is_ok());
    }
}
