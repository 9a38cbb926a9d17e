//! Converts errors of configurations, requests and input files into errors about request fields.

use std::borrow::Cow;

use super::request_fields::{RequestFields, plain};
use super::table::{FIELDS, FieldEffect};
use crate::config::{ConfigError, ConfigErrorKind, Setting, ValueOrigin};
use crate::media;
use crate::request::RequestError;
use crate::serve::error::ApiError;

/// Configuration keys that fields with [`FieldEffect::Own`] set. Each key is paired with the field that errors about it
/// mention.
const OWN: [(&str, &str); 17] = [
    ("request.width", "size"),
    ("request.height", "size"),
    ("request.num_frames", "num_frames"),
    ("request.seed", "seed"),
    ("request.negative_prompt", "negative_prompt"),
    ("request.images", "images"),
    ("request.audio", "input_audio"),
    ("request.video", "input_video"),
    ("request.mask", "mask"),
    ("request.reference_videos", "reference_videos"),
    ("request.retake", "retake"),
    ("request.extend", "seconds"),
    ("request.extend.overlap", "overlap"),
    ("model.loras", "lora"),
    ("model.ic_lora", "ic_lora"),
    ("pipeline", "pipeline"),
    ("request.audio.duration", "input_audio"),
];

/// Returns the name of the request field for a setting that an error mentions. If no field sets the setting, returns
/// its configuration key, which clients set in the field `ltx2`.
fn field_name(setting: Setting, given: &RequestFields) -> Cow<'static, str> {
    Cow::Borrowed(match setting {
        Setting::Key(key) => {
            // Prefer the field of one stream to the field of both.
            let exact = FIELDS.iter().find(|spec| matches!(spec.place, FieldEffect::Keys([only]) if *only == key));
            let field = exact.map(|spec| given.name(spec.name)).or_else(|| field_of(key, given));
            return field.map_or(Cow::Borrowed(key), Cow::Owned);
        }
        Setting::This => "this field",
        Setting::Pipeline => "pipeline",
        Setting::Images => "input_reference or images",
        Setting::Audio => "input_audio",
        Setting::Video => "input_video",
        Setting::ReferenceVideos => "reference_videos",
        Setting::Mask => "mask, region or keep",
        Setting::Span => "start and end, or retake",
        Setting::SpanStart => "start",
        Setting::SpanEnd => "end",
        Setting::Extension | Setting::Seconds => "seconds",
        Setting::ExtensionAtStart => "before: true",
        Setting::NumFrames => "num_frames",
    })
}

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
    let by_row = FIELDS.iter().find(|spec| matches!(spec.place, FieldEffect::Keys(keys) if keys.contains(&key)));
    let own = || OWN.iter().find(|(own, _)| *own == key).map(|(_, field)| *field);
    by_row.map(|spec| spec.name).or_else(own).map(|field| given.name(field))
}

fn code(key: &str) -> &'static str {
    match key {
        "request.width" | "request.height" => "invalid_size",
        _ => "invalid_value",
    }
}

/// Converts a configuration error into an error about the field that caused it.
pub(super) fn config_error(error: ConfigError, given: &RequestFields) -> ApiError {
    let ConfigError { kind, key, value, origin, limit } = error;
    let limit = || limit.message().with_names(|setting| field_name(setting, given));
    match kind {
        ConfigErrorKind::OutOfRange
        | ConfigErrorKind::NotOneOf
        | ConfigErrorKind::Conflict
        | ConfigErrorKind::Missing
        | ConfigErrorKind::Unsupported
        | ConfigErrorKind::NoEffect => {
            let field = match &origin {
                Some(ValueOrigin::Field(name)) if name == "ltx2" => Some(format!("ltx2.{key}")),
                Some(ValueOrigin::Field(name)) => Some(name.clone()),
                Some(ValueOrigin::Lora(_)) => {
                    ["lora", "ic_lora"].into_iter().find(|f| given.get(f).is_some()).map(|f| given.name(f))
                }
                _ => field_of(&key, given),
            };
            let whose = match origin {
                None | Some(ValueOrigin::Field(_) | ValueOrigin::Reference(_)) => "",
                Some(ValueOrigin::Video(_)) => " (from the input video)",
                Some(ValueOrigin::Lora(_)) => " (from the LoRA)",
                Some(_) => " (from the server's configuration)",
            };
            let is_file = [
                "request.video",
                "request.mask",
                "request.images",
                "request.audio",
                "request.reference_videos",
                "model.loras",
            ];
            let value = value.filter(|value| !value.is_empty() && !is_file.contains(&&*key));
            let set = value.map_or(String::new(), |value| format!(" = {value}{whose}"));
            let message = format!("{}{set}: {}", field.as_deref().unwrap_or(&key), limit());
            ApiError { param: field, ..ApiError::new(400, code(&key), message) }
        }
        ConfigErrorKind::UnknownKey => {
            let is_in_tree = matches!(origin, Some(ValueOrigin::Field(name)) if name == "ltx2");
            let field = if is_in_tree { format!("ltx2.{}", plain(&key)) } else { plain(&key) };
            ApiError::field("unknown_field", field.clone(), format!("{field}: unknown key; {}", limit()))
        }
        ConfigErrorKind::WrongType => {
            let field = match origin {
                Some(ValueOrigin::Field(name)) if name != "ltx2" => name,
                _ => format!("ltx2.{}", plain(&key)),
            };
            let found: String = value.iter().flat_map(|v| v.chars()).take(80).filter(|c| !c.is_control()).collect();
            ApiError::field(code(&key), field.clone(), format!("{field}: must be {}, not {found}", limit()))
        }
        ConfigErrorKind::Exclusive => {
            let first = field_of(&key, given).unwrap_or_else(|| key.into());
            let message = format!("{first} and {} are mutually exclusive; remove one", limit());
            ApiError::field("invalid_value", first, message)
        }
        ConfigErrorKind::Video(error) => media_error(&error, &given.name("input_video")),
        ConfigErrorKind::Unreadable(_)
        | ConfigErrorKind::Syntax
        | ConfigErrorKind::Cycle
        | ConfigErrorKind::Argument
        | ConfigErrorKind::Lora(_) => {
            ApiError::new(400, "invalid_value", "the fields conflict with the server's configuration")
        }
    }
}

/// Converts an error about an input file, without revealing the file's path.
pub(super) fn media_error(error: &media::MediaError, field: &str) -> ApiError {
    let why = match error {
        media::MediaError::Clip { reason, .. } | media::MediaError::Sound { reason, .. } => reason.clone(),
        media::MediaError::FrameRate(rate) => {
            format!("the frame rate {rate} is not between 0.01 and 1000 frames per second")
        }
        _ => "the file cannot be read".into(),
    };
    ApiError::field("invalid_value", field, format!("{field}: {why}"))
}

/// Converts the error of a request that the model cannot run.
pub(super) fn request_error(error: RequestError, given: &RequestFields) -> ApiError {
    match error {
        RequestError::Config(error) => config_error(error, given),
        RequestError::Sampling(error) => ApiError::new(400, "invalid_value", error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::ValueEnum;
    use serde_json::json;

    use super::*;
    use crate::config::{self, CliOverrides, Config, Pipeline, load};
    use crate::weights::Version;

    #[test]
    fn config_errors_use_request_field_names() {
        let given = RequestFields::default();
        let from = "(from the server's configuration)";
        for (pair, want) in [
            (
                "pipeline=image_to_video",
                format!("pipeline = image_to_video {from}: needs an image: input_reference or images"),
            ),
            ("pipeline=audio_to_video", format!("pipeline = audio_to_video {from}: needs input audio: input_audio")),
            ("pipeline=in_context", format!("pipeline = in_context {from}: needs a reference video: reference_videos")),
            ("pipeline=retake", format!("pipeline = retake {from}: needs a video: input_video")),
            (
                r#"request.images=[{"path":"a.png"}] pipeline=text_to_video"#,
                format!(
                    "pipeline = text_to_video {from}: images need pipeline image_to_video, keyframes, or a two-stage \
                     pipeline"
                ),
            ),
            (
                "conditioning.generated_keyframes=1",
                format!(
                    "conditioning.generated_keyframes = 1 {from}: only the pipeline distilled uses this field (dfr \
                     generates its own keyframes); remove this field"
                ),
            ),
        ] {
            let overrides =
                CliOverrides { set: pair.split(' ').map(String::from).collect(), ..CliOverrides::default() };
            let error = load(&overrides).expect_err(pair);
            assert_eq!(config_error(error, &given).message, want);
        }
        let kind = ConfigErrorKind::OutOfRange;
        let error = config_error(ConfigError::value(kind, "request.max_sequence_length", 5, "must be 8"), &given);
        assert_eq!(error.message, "max_sequence_length = 5: must be 8");
        assert_eq!(error.param.as_deref(), Some("max_sequence_length"));
    }
    /// For every pipeline, the reasons why settings have no effect contain request fields instead of configuration
    /// keys.
    #[test]
    fn reasons_for_no_effect_use_request_field_names() {
        let fields = RequestFields::default();
        let of_rows = FIELDS.iter().filter_map(|spec| match spec.place {
            FieldEffect::Keys(keys) => Some(keys),
            _ => None,
        });
        let keys: Vec<&str> =
            of_rows.flatten().copied().chain(OWN.map(|(key, _)| key)).filter(|k| k.contains('.')).collect();
        let is_key = |word: &&str| keys.contains(&word.trim_matches(|c: char| !c.is_ascii_alphanumeric()));
        let mut seen = BTreeSet::new();
        for pipeline in Pipeline::value_variants() {
            for set in [&[][..], &["reference=diffusers"], &["sampler.kind=euler_ancestral", "sampler.eta=0"]] {
                let mut config = Config::load("ltx2", set.iter().copied()).expect("legal");
                config.pipeline = *pipeline;
                for given in [json!([null, null]), json!([{"path": "a.wav"}, {"from": 0.5, "video": false}])] {
                    (config.request.audio, config.request.retake) = serde_json::from_value(given).expect("legal");
                    for version in [Version::V2_0, Version::V2_3, Version::V2_5] {
                        let reasons = config::reasons(&config, version);
                        seen.extend(reasons.iter().map(|why| why.with_names(|setting| field_name(setting, &fields))));
                    }
                }
            }
        }
        assert!(seen.len() > 40, "{} reasons", seen.len());
        let wrong: Vec<_> = seen.iter().filter(|why| why.split_whitespace().any(|word| is_key(&word))).collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}
