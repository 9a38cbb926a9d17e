//! Rewrites configuration errors so that they refer to request fields.

use super::request_fields::{RequestFields, plain};
use super::table::{FIELDS, Place};
use crate::config::{ConfigError, ValueOrigin};
use crate::media;
use crate::request::RequestError;
use crate::serve::error::ApiError;

/// Configuration keys that fields with [`Place::Own`] set, each with the field to which errors about the key refer.
const OWN: [(&str, &str); 14] = [
    ("request.width", "size"),
    ("request.height", "size"),
    ("request.num_frames", "num_frames"),
    ("request.seed", "seed"),
    ("request.negative_prompt", "negative_prompt"),
    ("request.images", "images"),
    ("request.audio", "input_audio"),
    ("request.video", "input_video"),
    ("request.reference_videos", "reference_videos"),
    ("request.retake", "retake"),
    ("request.extend", "seconds"),
    ("model.loras", "lora"),
    ("pipeline", "pipeline"),
    ("request.audio.duration", "input_audio"),
];

/// Phrases of configuration errors that contain CLI flags or keys, each with its replacement.
const WORDS: [(&str, &str); 17] = [
    ("--image PATH FRAME STRENGTH, or request.images", "input_reference or images"),
    ("--audio PATH, or request.audio", "input_audio"),
    ("--video PATH, or request.video", "input_video"),
    ("--reference-video PATH, or request.reference_videos", "reference_videos"),
    ("--retake FROM TO, or request.retake", "start and end, or retake"),
    ("--extend SECONDS, or request.extend", "seconds"),
    ("use --extend-at start to extend before the start", "use before: true to extend before the start"),
    ("--pipeline ", "pipeline "),
    ("--seconds", "seconds"),
    ("--image", "input_reference"),
    ("request.extend.overlap", "overlap"),
    ("request.extend", "seconds"),
    ("request.images", "images"),
    ("request.num_frames", "num_frames"),
    ("--num-frames", "num_frames"),
    ("to must be after from", "end must be after start"),
    ("this key", "this field"),
];

/// Returns the field that sets a configuration key, under the name that the client used; `None` if no field sets it.
fn field_of(key: &str, given: &RequestFields) -> Option<String> {
    let sides: &[&'static str] = match key {
        "request.width" => &["width", "size"],
        "request.height" => &["height", "size"],
        "request.num_frames" => &["num_frames", "seconds"],
        "request.images" => &["images", "input_reference"],
        _ => &[],
    };
    if let Some(side) = sides.iter().find(|side| given.get(side).is_some()) {
        return Some(given.name(side));
    }
    let by_row = FIELDS.iter().find(|spec| matches!(spec.place, Place::Keys(keys) if keys.contains(&key)));
    let own = || OWN.iter().find(|(own, _)| *own == key).map(|(_, field)| *field);
    by_row.map(|spec| spec.name).or_else(own).map(|field| given.name(field))
}

fn code(key: &str) -> &'static str {
    match key {
        "request.width" | "request.height" => "invalid_size",
        _ => "invalid_value",
    }
}

/// Replaces CLI flags and configuration keys in an error message by field names.
fn reworded(text: &str) -> String {
    WORDS.iter().fold(text.to_string(), |text, (from, to)| text.replace(from, to))
}

/// Converts a configuration error into an error about the field that caused it.
pub(super) fn of_config(error: ConfigError, given: &RequestFields) -> ApiError {
    match error {
        ConfigError::Value { key, value, origin, why } => {
            let field = match &origin {
                ValueOrigin::Field(name) if name == "ltx2" => Some(format!("ltx2.{key}")),
                ValueOrigin::Field(name) => Some(name.clone()),
                _ => field_of(key, given),
            };
            let whose = match origin {
                ValueOrigin::Field(_) | ValueOrigin::Reference(_) => "",
                ValueOrigin::Video(_) => " (from the input video)",
                _ => " (from the server's configuration)",
            };
            let is_file =
                ["request.video", "request.images", "request.audio", "request.reference_videos", "model.loras"];
            let has_value = !value.is_empty() && !is_file.contains(&key);
            let name = field.clone().unwrap_or_else(|| key.into());
            let set = if has_value { format!(" = {value}{whose}") } else { String::new() };
            let message = format!("{name}{set}: {}", reworded(&why)).replace("  ", " ");
            ApiError { param: field, ..ApiError::new(400, code(key), message) }
        }
        ConfigError::UnknownKey { place, key, hint } => {
            let field = if place.contains("'ltx2'") { format!("ltx2.{}", plain(&key)) } else { plain(&key) };
            ApiError::field("unknown_field", field.clone(), format!("{field}: unknown key; {hint}"))
        }
        ConfigError::WrongType { place, key, expected, found } => {
            let named = place.strip_prefix("request field '").and_then(|rest| rest.strip_suffix('\''));
            let field = match named {
                Some(name) if name != "ltx2" => name.to_string(),
                _ => format!("ltx2.{}", plain(&key)),
            };
            let found: String = found.chars().take(80).filter(|c| !c.is_control()).collect();
            ApiError::field(code(&key), field.clone(), format!("{field}: must be {expected}, not {found}"))
        }
        ConfigError::Both { first, second, .. } => {
            let [first, second] = [first, second].map(|key| field_of(key, given).unwrap_or_else(|| key.into()));
            let message = format!("{first} and {second} are mutually exclusive; remove one");
            ApiError::field("invalid_value", first, message)
        }
        ConfigError::Video(error) => of_media(&error, &given.name("input_video")),
        _ => ApiError::new(400, "invalid_value", "the fields conflict with the server's configuration"),
    }
}

/// Converts an error about an input file, without revealing the file's path.
pub(super) fn of_media(error: &media::Error, field: &str) -> ApiError {
    let why = match error {
        media::Error::Clip { reason, .. } | media::Error::Sound { reason, .. } => reworded(reason),
        media::Error::FrameRate(rate) => {
            format!("the frame rate {rate} is not between 0.01 and 1000 frames per second")
        }
        _ => "the file cannot be read".into(),
    };
    ApiError::field("invalid_value", field, format!("{field}: {why}"))
}

/// Converts the error of a request that the model cannot run.
pub(super) fn of_request(error: &RequestError, given: &RequestFields) -> ApiError {
    let text = error.to_string();
    let keys = FIELDS.iter().filter_map(|spec| if let Place::Keys(keys) = spec.place { Some(keys) } else { None });
    let keys = keys.flatten().copied().chain(OWN.iter().map(|(key, _)| *key));
    let named = keys.filter(|key| text.contains(key)).max_by_key(|key| key.len());
    let field = named.and_then(|key| field_of(key, given));
    let message = match (named, &field) {
        (Some(key), Some(field)) => text.replace(key, field),
        _ => text.clone(),
    };
    let code = named.map_or("invalid_value", code);
    ApiError { param: field, ..ApiError::new(400, code, reworded(&message)) }
}
