//! Merges the fields of a remix over those of the finished job that it repeats. A new value replaces the old one even
//! if the two requests used different fields or keys for the same setting.

use serde_json::{Map, Value, json};

use super::request_fields::{ENDS, RequestFields};
use super::table::{FIELDS, FieldEffect};
use crate::config::BY_REFERENCE;
use crate::serve::job::AcceptedJob;

/// Groups of names for the same setting. Setting one name removes all others of its group. The prefix `ltx2.` denotes
/// YAML keys.
const SAME: [&[&str]; 8] = [
    &["enhance_prompt", "ltx2.request.enhance_prompt"],
    &["seconds", "num_frames", "ltx2.request.num_frames"],
    &["num_inference_steps", "sigmas", "ltx2.sampler.steps", "ltx2.sampler.sigmas"],
    &["input_reference", "images"],
    &["mask", "region", "keep", "ltx2.request.inpaint.region", "ltx2.request.inpaint.keep"],
    &["seed", "ltx2.request.seed"],
    &["negative_prompt", "ltx2.request.negative_prompt"],
    &["pipeline", "ltx2.pipeline"],
];
/// Pairs of name lists: setting a name of the first list removes all names of the second list, but not vice versa.
const INSTEAD: [(&[&str], &[&str]); 2] = [
    (
        &["stg_blocks", "ltx2.guidance.stg_blocks"],
        &["video_stg_blocks", "audio_stg_blocks", "ltx2.guidance.video.stg_blocks", "ltx2.guidance.audio.stg_blocks"],
    ),
    (&["ltx2.request.extend"], &["seconds", "before", "overlap"]),
];
/// All fields and keys that set the video's size.
const SIZE: [&str; 5] = ["size", "width", "height", "ltx2.request.width", "ltx2.request.height"];

impl RequestFields {
    /// Merges the fields of a remix over those of the finished job `source`.
    pub(super) fn over(mut self, source: &AcceptedJob) -> Self {
        let mut below = SourceFields::from_job(source);
        for group in SAME.iter().filter(|group| group.iter().any(|name| self.says(name))) {
            group.iter().for_each(|name| below.cut(name));
        }
        for (_, others) in INSTEAD.iter().filter(|(own, _)| own.iter().any(|name| self.says(name))) {
            others.iter().for_each(|name| below.cut(name));
        }
        if self.says("ltx2.reference") {
            BY_REFERENCE.iter().for_each(|key| below.cut(&format!("ltx2.{key}")));
        }
        self.apply_size(&mut below, source);
        self.apply_span(&mut below);
        self.apply_keys(&mut below);
        let SourceFields { mut fields, tree } = below;
        let mut tree = tree;
        if let Some(own) = self.values.shift_remove("ltx2") {
            merge(&mut tree, own);
        }
        if tree.as_object().is_some_and(|tree| !tree.is_empty()) {
            fields.insert("ltx2".into(), tree);
        }
        fields.extend(std::mem::take(&mut self.values));
        self.values = fields;
        self
    }

    /// Returns whether the request sets a field or, with the prefix `ltx2.`, a YAML key.
    fn says(&self, name: &str) -> bool {
        match name.strip_prefix("ltx2.") {
            None => self.values.contains_key(name),
            Some(key) => self.values.get("ltx2").is_some_and(|tree| at(tree, key).is_some()),
        }
    }

    /// If the remix sets only the width, keeps the height of the source, and vice versa, regardless of which field set
    /// the size.
    fn apply_size(&self, below: &mut SourceFields, source: &AcceptedJob) {
        if !SIZE.iter().any(|name| self.says(name)) {
            return;
        }
        SIZE.iter().for_each(|name| below.cut(name));
        let request = source.config.summary();
        for (name, side) in [("width", request.width), ("height", request.height)] {
            if !self.says("size") && !self.says(name) && !self.says(&format!("ltx2.request.{name}")) {
                below.fields.insert(name.into(), side.into());
            }
        }
    }

    /// If the remix sets only one end of a retake's time span, keeps the other end of the source, regardless of which
    /// field set it. The field `retake` replaces the entire span.
    fn apply_span(&self, below: &mut SourceFields) {
        let tree = self.values.get("ltx2").and_then(|tree| at(tree, "request.retake"));
        if tree.is_none() && !["start", "end", "retake"].iter().any(|name| self.says(name)) {
            return;
        }
        let mut span = Map::new();
        let mut keep = |name: &str, value: Value| {
            let key = ENDS.iter().find(|(_, field)| *field == name).map_or(name, |(key, _)| key);
            span.insert(key.into(), value);
        };
        let written = [at(&below.tree, "request.retake"), below.fields.get("retake")];
        for (name, value) in written.into_iter().flatten().filter_map(Value::as_object).flatten() {
            keep(name, value.clone());
        }
        for name in ["start", "end"] {
            below.fields.shift_remove(name).into_iter().for_each(|value| keep(name, value));
        }
        below.cut("retake");
        below.cut("ltx2.request.retake");
        if self.says("retake") || tree.is_some_and(|tree| !tree.is_object()) {
            return;
        }
        for (key, field) in ENDS {
            if self.says(field) || tree.is_some_and(|tree| tree.get(key).is_some()) {
                span.shift_remove(key);
            }
        }
        if !span.is_empty() {
            set(&mut below.tree, "request.retake", span.into());
        }
    }

    /// Removes the source's settings for the config keys that the remix sets. A request field of the source may set
    /// several config keys and would override those of the remix, so it is first converted into config keys.
    fn apply_keys(&self, below: &mut SourceFields) {
        let keys =
            |spec: &'static super::table::Spec| if let FieldEffect::Keys(keys) = spec.place { keys } else { &[] };
        let own: Vec<&str> =
            FIELDS.iter().filter(|spec| self.values.contains_key(spec.name)).flat_map(keys).copied().collect();
        let is_said = |key: &&str| own.contains(key) || self.says(&format!("ltx2.{key}"));
        for spec in FIELDS.iter().filter(|spec| keys(spec).iter().any(is_said)) {
            if let Some(value) = below.fields.shift_remove(spec.name) {
                keys(spec).iter().for_each(|key| set(&mut below.tree, key, value.clone()));
            }
        }
        // Fields also override keys within the source, so remove the keys that the remaining fields set.
        let kept = FIELDS.iter().filter(|spec| below.fields.contains_key(spec.name)).flat_map(keys).copied();
        let all: Vec<&str> = own.into_iter().chain(kept).collect();
        all.into_iter().for_each(|key| below.cut(&format!("ltx2.{key}")));
    }
}

/// Fields of the source job; `tree` contains the YAML keys from its field `ltx2`.
struct SourceFields {
    fields: Map<String, Value>,
    tree: Value,
}

impl SourceFields {
    fn from_job(source: &AcceptedJob) -> Self {
        let mut fields = source.fields.clone();
        let tree = fields.shift_remove("ltx2").unwrap_or_else(|| json!({}));
        SourceFields { fields, tree }
    }

    /// Removes a field or, with the prefix `ltx2.`, a YAML key.
    fn cut(&mut self, name: &str) {
        let Some(key) = name.strip_prefix("ltx2.") else {
            self.fields.shift_remove(name);
            return;
        };
        let (section, last) = key.rsplit_once('.').map_or((None, key), |(section, last)| (Some(section), last));
        let section = match section {
            None => Some(&mut self.tree),
            Some(path) => path.split('.').try_fold(&mut self.tree, |tree, key| tree.get_mut(key)),
        };
        if let Some(Value::Object(section)) = section {
            section.shift_remove(last);
        }
    }
}

/// Returns the value at a path of keys separated by dots.
fn at<'a>(tree: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(tree, |tree, key| tree.get(key))
}

/// Sets the value at a path of keys separated by dots.
fn set(tree: &mut Value, path: &str, value: Value) {
    merge(tree, path.rsplit('.').fold(value, |inner, key| json!({key: inner})));
}

/// Merges the object `over` into `below`, recursively.
fn merge(below: &mut Value, over: Value) {
    match (below, over) {
        (Value::Object(below), Value::Object(over)) => {
            for (key, value) in over {
                merge(below.entry(key).or_insert(Value::Null), value);
            }
        }
        (below, over) => *below = over,
    }
}
