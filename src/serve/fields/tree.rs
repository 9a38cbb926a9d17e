//! Access rules for the configuration keys in a request's `ltx2` field. A key is in exactly one of two lists: keys that
//! requests may set, and keys that they may not set.

use serde_json::Value;

use super::request_fields::plain;
use crate::config::accepts_text;
use crate::serve::error::ApiError;
use crate::serve::form::parse_json;

/// Keys, or entire sections of keys, that a request may set.
pub(super) const ALLOWED: [&str; 38] = [
    "pipeline",
    "reference",
    "request.prompt",
    "request.enhance_prompt",
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
    "request.inpaint",
    "request.dub",
    "text.bos",
    "sampler.kind",
    "sampler.eta",
    "sampler.noise_seed",
    "sampler.gamma",
    "sampler.cache",
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
    "dfr.temporal_rounds",
    "dfr.sigmas",
    "vocoder.stage1_clamp",
    "output.audio",
    "output.preview_every",
];

/// Keys, or entire sections of keys, that a request may not set: keys reserved for the operator, keys that contain
/// paths, and keys that create more than one video.
pub(super) const REFUSED: [&str; 29] = [
    "extends",
    "enhance",
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
    "request.mask",
    "request.reference_video",
    "request.reference_videos",
    "request.audio",
    "request.audio_latents",
    "request.chain",
    "request.text_embeddings",
    "dfr.detailing_lora",
    "sampler.progress_every",
    "output.path",
    "output.save_frames",
    "output.save_audio",
    "output.save_exr",
    "output.hdr_video",
    "output.hdr_codec",
    "output.preview_decoder",
    "output.sidecar",
];

/// Request fields that replace refused keys: pairs of key and field.
const INSTEAD: [(&str, &str); 7] = [
    ("request.images", "images"),
    ("request.audio", "input_audio"),
    ("request.video", "input_video"),
    ("request.mask", "mask"),
    ("request.reference_video", "reference_videos"),
    ("request.reference_videos", "reference_videos"),
    ("model", "lora"),
];

/// Returns whether the list contains `key` or a section that contains it.
fn is_in(list: &[&str], key: &str) -> bool {
    list.iter().any(|own| key == *own || key.strip_prefix(own).is_some_and(|rest| rest.starts_with('.')))
}

/// Returns whether the list contains a key or section that is inside `section`.
fn holds(list: &[&str], section: &str) -> bool {
    list.iter().any(|own| own.strip_prefix(section).is_some_and(|rest| rest.starts_with('.')))
}

/// Rejects keys that a request may not set.
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
            let why = format!("{field}: requests cannot set this key{}", instead.unwrap_or_default());
            return Err(ApiError::field("parameter_not_allowed", field, why));
        }
        // Descend into a section. The configuration parser reports unknown keys later, with the most similar name.
        if holds(&ALLOWED, &path) || holds(&REFUSED, &path) {
            check_below(value, &path)?;
        }
    }
    Ok(())
}

/// Converts text values, as forms send them, into numbers, booleans and lists, unless the key accepts text.
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

    /// Each key must be in one of the lists, because a request could set a key that is in neither.
    #[test]
    fn every_configuration_key_is_allowed_or_refused() {
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
                assert!(allowed != refused, "{key}: add it to ALLOWED or to REFUSED");
                seen += 1;
            }
        }
        assert!(seen > 100, "{seen} keys");
        for own in ALLOWED.iter().chain(&REFUSED) {
            let path = own.split('.').try_fold(schema.clone(), |at, key| {
                let found = follow(&at)["properties"].get(key).cloned()?;
                Some(follow(&found))
            });
            assert!(path.is_some(), "{own} is not a key");
        }
    }

    #[test]
    fn errors_name_refused_keys() {
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
