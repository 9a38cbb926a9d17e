//! Input files of a request, sent as form parts, data URLs or base64 text. The contents of each file are validated and
//! stored under their hash.

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::{Map, Value, json};

use super::read::{invalid, no_more, object, shown, structure, take, value};
use super::request_fields::RequestFields;
use super::table::{self, FieldKind};
use super::{Endpoint, Fields};
use crate::serve::error::ApiError;
use crate::serve::form::FilePart;

/// Base64 decoder that accepts text with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);
/// Names of object members that contain a file or refer to one.
const CONTENTS: [&str; 8] = ["file", "data", "content", "image_url", "audio_url", "video_url", "url", "b64_json"];
/// Part of error messages that says how to send a file.
const FORMS: &str = "send a file part, a data URL or base64";
/// Maximum number of reference videos per request.
const MAX_REFERENCES: usize = 4;

/// Returns whether a form field with this name, which may end with brackets, can contain a file.
pub(super) fn takes_file(name: &str) -> bool {
    let (root, member) = match name.split_once('[') {
        Some((root, rest)) => (root, rest.rsplit('[').next().unwrap_or_default().trim_end_matches(']')),
        None => (name, ""),
    };
    let is_media = table::find(root).is_some_and(|spec| {
        use FieldKind::{Image, Images, Mask, Sound, Video, Videos};
        matches!(spec.kind, Image | Images | Mask | Sound | Video | Videos)
    });
    is_media && (member.bytes().all(|b| b.is_ascii_digit()) || CONTENTS.contains(&member))
}

/// Kind of an input file.
#[derive(Clone, Copy)]
enum MediaKind {
    Image,
    /// Audio that is used from `start` seconds on.
    Sound {
        start: f64,
    },
    Video,
    /// Image or video.
    Mask,
}

/// The file parts of a form, with a record of the parts that fields have used.
struct FormFiles {
    all: Vec<FilePart>,
    used: Vec<bool>,
}

impl FormFiles {
    /// Returns the indices of the unused parts that have one of a field's names, and marks these parts as used.
    fn take_parts(&mut self, spec: &table::Spec) -> Vec<usize> {
        let is_own = |part: &FilePart| table::find(&part.field).is_some_and(|own| own.name == spec.name);
        let found: Vec<usize> = (0..self.all.len()).filter(|at| !self.used[*at] && is_own(&self.all[*at])).collect();
        found.iter().for_each(|at| self.used[*at] = true);
        found
    }

    /// Returns the index of the part with the name `name`, and marks the part as used.
    fn named(&mut self, field: &str, name: &str) -> Result<usize, ApiError> {
        let at = self.all.iter().position(|part| part.field == name);
        let at = at.ok_or_else(|| {
            invalid(field, format!("the form has no file part named '{}'", super::request_fields::plain(name)))
        })?;
        self.used[at] = true;
        Ok(at)
    }
}

impl Fields {
    /// Stores the files of a request and replaces them in the request's fields by the names of the stored files.
    /// Rejects files that are invalid or too large, URLs, and form parts that no field uses.
    pub(super) fn keep_files(
        &self,
        given: &mut RequestFields,
        parts: Vec<FilePart>,
        endpoint: Endpoint,
    ) -> Result<(), ApiError> {
        let mut parts = FormFiles { used: vec![false; parts.len()], all: parts };
        // Process lists first, because a part to which a list refers may have the name of another field.
        self.keep_images(given, &mut parts)?;
        self.keep_references(given, &mut parts)?;
        self.keep_audio(given, &mut parts)?;
        self.keep_video(given, &mut parts, endpoint)?;
        self.keep_mask(given, &mut parts)?;
        let Some(at) = parts.used.iter().position(|used| !used) else { return Ok(()) };
        let name = &parts.all[at].field;
        Err(match table::find(name) {
            Some(_) => invalid(name, "must not be a file; send it as text"),
            None => {
                let why = format!("unknown file field '{name}'; did you mean 'input_reference'?");
                ApiError::field("unknown_field", name, why)
            }
        })
    }

    /// Stores all images and combines the image fields into one list.
    fn keep_images(&self, given: &mut RequestFields, parts: &mut FormFiles) -> Result<(), ApiError> {
        let strength = given.take("image_cond_strength").map(|(_, value)| value);
        let crf = given.take("image_crf").map(|(_, value)| value);
        let mut found = Vec::new();
        let mut names = Vec::new();
        for field in ["input_reference", "images"] {
            let Some((name, value)) = given.take(field) else { continue };
            let items = items(&name, value)?;
            self.check_count(&name, found.len() + items.len())?;
            for item in items {
                found.push(self.keep_image(&name, item, parts)?);
            }
            names.push(name);
        }
        // Add the image parts to which no list refers.
        for field in ["input_reference", "images"] {
            let own = table::find(field).map_or_else(Vec::new, |spec| parts.take_parts(spec));
            let Some(name) = own.first().map(|at| parts.all[*at].field.clone()) else { continue };
            self.check_count(&name, found.len() + own.len())?;
            if own.len() > 1 {
                let why = "for several files, list their frames: images=[{\"file\": \"a\", \"frame\": 0}], with file parts of those names";
                return Err(invalid(&name, why));
            }
            let part = &parts.all[own[0]];
            let kept = self.inputs.keep_image(&name, &part.path()).map_err(|error| part.named(error))?;
            found.push(Map::from_iter([("stored".into(), kept.into()), ("frame".into(), 0.into())]));
            names.push(name);
        }
        if found.is_empty() {
            return Ok(());
        }
        for image in &mut found {
            for (key, default) in [("strength", &strength), ("crf", &crf)] {
                if let (false, Some(default)) = (image.contains_key(key), default) {
                    image.insert(key.into(), default.clone());
                }
            }
        }
        given.put("images", names.into_iter().next(), found.into_iter().map(Value::Object).collect());
        Ok(())
    }

    fn check_count(&self, field: &str, images: usize) -> Result<(), ApiError> {
        let most = self.serve().max_images;
        if images > most {
            return Err(invalid(
                field,
                format!("{images} images exceed the server's limit of {most} (serve.max_images)"),
            ));
        }
        Ok(())
    }

    /// Stores an image and returns its options with the name of the stored file.
    fn keep_image(&self, field: &str, item: Value, parts: &mut FormFiles) -> Result<Map<String, Value>, ApiError> {
        let mut kept = Map::new();
        let contents = match structure(field, item)? {
            Value::Object(mut item) => {
                let contents = contents(field, &mut item)?;
                let frame = take(&mut item, "frame")
                    .map(|frame| value(field, FieldKind::Integer(0, 1_000_000), frame))
                    .transpose()?;
                let role = take(&mut item, "role");
                let frame = match (role.as_ref().map(|role| role.as_str().unwrap_or_default()), frame) {
                    (Some(_), Some(_)) => {
                        return Err(invalid(field, "role and frame are both set; remove one of them"));
                    }
                    (None, frame) => frame.unwrap_or(json!(0)),
                    (Some("first_frame" | "reference"), None) => json!(0),
                    (Some("last_frame"), None) => json!("last"),
                    (Some(_), None) => {
                        let role = role.as_ref().map(shown).unwrap_or_default();
                        let why = format!("role must be first_frame, reference or last_frame, not {role}");
                        return Err(invalid(field, why));
                    }
                };
                kept.insert("frame".into(), frame);
                for (key, kind) in [("strength", FieldKind::Number(0.0, 1.0)), ("crf", FieldKind::Integer(0, 51))] {
                    if let Some(given) = take(&mut item, key) {
                        kept.insert(key.into(), value(field, kind, given)?);
                    }
                }
                // Clients for chat APIs send these members with an image URL.
                ["type", "detail"].into_iter().for_each(|name| drop(take(&mut item, name)));
                no_more(field, &item, "file, data, content, image_url, role, frame, strength, crf")?;
                contents
            }
            other => {
                kept.insert("frame".into(), json!(0));
                other
            }
        };
        let stored = self.keep(field, MediaKind::Image, &contents, parts)?;
        kept.insert("stored".into(), stored.into());
        Ok(kept)
    }

    fn keep_references(&self, given: &mut RequestFields, parts: &mut FormFiles) -> Result<(), ApiError> {
        let Some(spec) = table::find("reference_videos") else { return Ok(()) };
        let taken = given.take(spec.name);
        let name = taken.as_ref().map_or_else(|| spec.name.to_string(), |(name, _)| name.clone());
        let items = taken.map_or(Ok(Vec::new()), |(name, value)| items(&name, value))?;
        let too_many = |count: usize| invalid(&name, format!("{count} videos exceed the limit of {MAX_REFERENCES}"));
        if items.len() > MAX_REFERENCES {
            return Err(too_many(items.len()));
        }
        let mut found = Vec::new();
        for item in items {
            let (item, contents) = match structure(&name, item)? {
                Value::Object(mut item) => {
                    let contents = contents(&name, &mut item)?;
                    (item, contents)
                }
                other => (Map::new(), other),
            };
            found.push(self.keep_reference(&name, item, &contents, parts)?);
        }
        let own = parts.take_parts(spec);
        if found.len() + own.len() > MAX_REFERENCES {
            return Err(too_many(found.len() + own.len()));
        }
        for at in own {
            let part = &parts.all[at];
            let stored = self.inputs.keep_video(&name, &part.path()).map_err(|error| part.named(error))?;
            found.push(json!({"stored": stored}));
        }
        if !found.is_empty() {
            given.put(spec.name, Some(name), found.into());
        }
        Ok(())
    }

    fn keep_reference(
        &self,
        field: &str,
        mut item: Map<String, Value>,
        contents: &Value,
        parts: &mut FormFiles,
    ) -> Result<Value, ApiError> {
        let mut kept = Map::new();
        kept.insert("stored".into(), self.keep(field, MediaKind::Video, contents, parts)?.into());
        let unit = FieldKind::Number(0.0, 1.0);
        for (key, kind) in
            [("strength", unit), ("attention_strength", unit), ("frames", FieldKind::Integer(1, 1_000_000))]
        {
            if let Some(given) = take(&mut item, key) {
                kept.insert(key.into(), value(field, kind, given)?);
            }
        }
        if let Some(preprocess) = take(&mut item, "preprocess") {
            // The configuration parser checks kinds and parameters.
            kept.insert("preprocess".into(), structure(field, preprocess)?);
        }
        if let Some(mask) = take(&mut item, "mask") {
            let mask = match structure(field, mask)? {
                Value::Object(mut mask) => self::contents(field, &mut mask)?,
                // The text is the name of a form part if there is such a part, otherwise the contents of a file.
                Value::String(name) if parts.all.iter().any(|part| part.field == name) => json!({"file": name}),
                other => other,
            };
            kept.insert("mask".into(), self.keep(field, MediaKind::Video, &mask, parts)?.into());
        }
        no_more(field, &item, "file, data, strength, attention_strength, mask, frames, preprocess")?;
        Ok(Value::Object(kept))
    }

    fn keep_audio(&self, given: &mut RequestFields, parts: &mut FormFiles) -> Result<(), ApiError> {
        let Some(spec) = table::find("input_audio") else { return Ok(()) };
        let taken = given.take(spec.name);
        let own = parts.take_parts(spec);
        let name = name_of(spec, taken.as_ref(), own.first().map(|at| &parts.all[*at]));
        if own.len() + usize::from(taken.is_some()) > 1 {
            return Err(invalid(&name, "set twice; remove one of the two"));
        }
        let mut kept = Map::new();
        if let Some(at) = own.first() {
            let part = &parts.all[*at];
            let stored = self.inputs.keep_audio(&name, &part.path(), 0.0).map_err(|error| part.named(error))?;
            kept.insert("stored".into(), stored.into());
        } else if let Some((_, item)) = taken {
            let contents = match structure(&name, item)? {
                Value::Object(mut item) => {
                    let contents = contents(&name, &mut item)?;
                    for key in ["start", "duration"] {
                        if let Some(given) = take(&mut item, key) {
                            kept.insert(key.into(), value(&name, FieldKind::Number(0.0, 1e6), given)?);
                        }
                    }
                    no_more(&name, &item, "file, data, start, duration")?;
                    contents
                }
                other => other,
            };
            let start = kept.get("start").and_then(Value::as_f64).unwrap_or(0.0);
            kept.insert("stored".into(), self.keep(&name, MediaKind::Sound { start }, &contents, parts)?.into());
        }
        if !kept.is_empty() {
            given.put(spec.name, Some(name), Value::Object(kept));
        }
        Ok(())
    }

    fn keep_video(&self, given: &mut RequestFields, parts: &mut FormFiles, endpoint: Endpoint) -> Result<(), ApiError> {
        let Some(spec) = table::find("input_video") else { return Ok(()) };
        let taken = given.take(spec.name);
        let own = parts.take_parts(spec);
        let name = name_of(spec, taken.as_ref(), own.first().map(|at| &parts.all[*at]));
        if own.len() + usize::from(taken.is_some()) > 1 {
            return Err(invalid(&name, "set twice; remove one of the two"));
        }
        let source = match endpoint {
            Endpoint::Edit(source) | Endpoint::Extend(source) => source,
            Endpoint::Create | Endpoint::Remix(_) => None,
        };
        let stored = match (own.first(), taken, source) {
            (Some(at), ..) => {
                let part = &parts.all[*at];
                let stored = self.inputs.keep_video(&name, &part.path()).and_then(|stored| {
                    self.inputs.check_video_audio(&name, &part.path())?;
                    Ok(stored)
                });
                Some(stored.map_err(|error| part.named(error))?)
            }
            (None, Some(_), Some(source)) => Some(self.inputs.keep_video(&name, source.video)?),
            (None, Some((_, item)), None) => {
                let contents = match structure(&name, item)? {
                    Value::Object(mut item) => {
                        let contents = contents(&name, &mut item)?;
                        no_more(&name, &item, "id, file, data")?;
                        contents
                    }
                    other => other,
                };
                let stored = self.keep(&name, MediaKind::Video, &contents, parts)?;
                self.inputs.check_video_audio(&name, &self.inputs.path(&stored))?;
                Some(stored)
            }
            (None, None, _) => None,
        };
        if let Some(stored) = stored {
            given.put(spec.name, Some(name), json!({"stored": stored}));
        }
        Ok(())
    }

    fn keep_mask(&self, given: &mut RequestFields, parts: &mut FormFiles) -> Result<(), ApiError> {
        let Some(spec) = table::find("mask") else { return Ok(()) };
        let taken = given.take(spec.name);
        let own = parts.take_parts(spec);
        let name = name_of(spec, taken.as_ref(), own.first().map(|at| &parts.all[*at]));
        if own.len() + usize::from(taken.is_some()) > 1 {
            return Err(invalid(&name, "set twice; remove one of the two"));
        }
        let contents = match (own.first(), taken) {
            (None, None) => return Ok(()),
            (Some(at), _) => json!({"file": parts.all[*at].field}),
            (None, Some((_, item))) => match structure(&name, item)? {
                Value::Object(mut item) => {
                    let contents = contents(&name, &mut item)?;
                    no_more(&name, &item, "file, data")?;
                    contents
                }
                other => other,
            },
        };
        let stored = self.keep(&name, MediaKind::Mask, &contents, parts)?;
        given.put(spec.name, Some(name), json!({"stored": stored}));
        Ok(())
    }

    /// Stores a file and returns its name in the store. `contents` is a reference to a form part, or base64 text.
    fn keep(&self, field: &str, what: MediaKind, contents: &Value, parts: &mut FormFiles) -> Result<String, ApiError> {
        let keep = |file: &std::path::Path| match what {
            MediaKind::Image => self.inputs.keep_image(field, file),
            MediaKind::Sound { start } => self.inputs.keep_audio(field, file, start),
            MediaKind::Video => self.inputs.keep_video(field, file),
            MediaKind::Mask => self.inputs.keep_mask(field, file),
        };
        match contents {
            Value::Object(file) => {
                let part = file.get("file").and_then(Value::as_str).unwrap_or_default();
                let at = parts.named(field, part)?;
                keep(&parts.all[at].path()).map_err(|error| parts.all[at].named(error))
            }
            Value::String(text) => {
                let bytes = decode(field, what, text)?;
                self.inputs.with_file(&bytes, keep)
            }
            other => Err(invalid(field, format!("{FORMS}, not {}", shown(other)))),
        }
    }
}

/// Returns the name under which the client sent a field as a value or as a form part.
fn name_of(spec: &table::Spec, taken: Option<&(String, Value)>, part: Option<&FilePart>) -> String {
    let of_value = taken.map(|(name, _)| name.clone());
    of_value.or_else(|| part.map(|part| part.field.clone())).unwrap_or_else(|| spec.name.into())
}

/// Returns the items of a list. Any other value is treated as a list of one item.
fn items(field: &str, given: Value) -> Result<Vec<Value>, ApiError> {
    Ok(match structure(field, given)? {
        Value::Array(items) => items,
        one => vec![one],
    })
}

/// Removes the file from an object and returns it: base64 text, a data URL, or `{file}`, which refers to a form part.
fn contents(field: &str, item: &mut Map<String, Value>) -> Result<Value, ApiError> {
    if take(item, "file_id").is_some() {
        return Err(invalid(field, format!("file_id is not supported: the server has no Files API; {FORMS}")));
    }
    let found: Vec<(&str, Value)> = CONTENTS.iter().filter_map(|key| Some((*key, take(item, key)?))).collect();
    let [(key, found)] = <[(&str, Value); 1]>::try_from(found).map_err(|_| invalid(field, FORMS))?;
    match (key, found) {
        ("file", Value::String(name)) => Ok(json!({"file": name})),
        // Clients for chat APIs send `{image_url: {url}}`.
        (_, Value::Object(mut inner)) => {
            let url = take(&mut inner, "url").unwrap_or_default();
            take(&mut inner, "detail");
            no_more(field, &object(field, Value::Object(inner))?, "url")?;
            Ok(url)
        }
        (_, text) => Ok(text),
    }
}

/// Decodes a data URL or base64 text.
fn decode(field: &str, what: MediaKind, text: &str) -> Result<Vec<u8>, ApiError> {
    let code = match what {
        MediaKind::Image => "invalid_image",
        MediaKind::Sound { .. } => "invalid_audio",
        MediaKind::Video => "invalid_video",
        MediaKind::Mask => "invalid_mask",
    };
    let fault = |why: &str| ApiError::field(code, field, format!("{field}: {why}"));
    let text = text.trim();
    let start: String = text.chars().take(8).collect::<String>().to_ascii_lowercase();
    let encoded = if start.starts_with("data:") {
        let (head, data) = text.split_once(',').ok_or_else(|| fault("malformed data URL: it has no comma"))?;
        if !head.to_ascii_lowercase().ends_with(";base64") {
            return Err(fault("a data URL must be base64-encoded: data:TYPE;base64,…"));
        }
        data
    } else if start.contains("://") || ["http:", "https:", "file:", "ftp:"].iter().any(|own| start.starts_with(own)) {
        return Err(fault(&format!("the server does not download URLs; {FORMS}")));
    } else {
        text
    };
    let plain: Vec<u8> = encoded.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    let bytes = BASE64.decode(plain).map_err(|_| fault(&format!("not valid base64; {FORMS}")))?;
    if bytes.is_empty() { Err(fault("the file is empty")) } else { Ok(bytes) }
}
