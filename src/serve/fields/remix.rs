//! A remix: the fields of a finished job with others over them. Whatever the remix says holds, however either wrote it.

use serde_json::{Map, Value, json};

use super::given::RequestFields;
use super::table::{FIELDS, Place};
use crate::config::BY_REFERENCE;
use crate::serve::job::Accepted;

/// Names that stand for the same thing: each of these takes the place of all. Behind `ltx2.` stands a key of the YAML.
const SAME: [&[&str]; 6] = [
    &["seconds", "num_frames", "ltx2.request.num_frames"],
    &["num_inference_steps", "sigmas", "ltx2.sampler.steps", "ltx2.sampler.sigmas"],
    &["input_reference", "images"],
    &["seed", "ltx2.request.seed"],
    &["negative_prompt", "ltx2.request.negative_prompt"],
    &["pipeline", "ltx2.pipeline"],
];
/// Names that take the place of others, which do not take theirs.
const INSTEAD: [(&[&str], &[&str]); 2] = [
    (
        &["stg_blocks", "ltx2.guidance.stg_blocks"],
        &["video_stg_blocks", "audio_stg_blocks", "ltx2.guidance.video.stg_blocks", "ltx2.guidance.audio.stg_blocks"],
    ),
    (&["ltx2.request.extend"], &["seconds", "before", "overlap"]),
];
/// Ends of a retake's span: the key, and its other name, which is the field's.
const ENDS: [(&str, &str); 2] = [("from", "start"), ("to", "end")];
/// Pixels, in all ways of saying them.
const SIZE: [&str; 5] = ["size", "width", "height", "ltx2.request.width", "ltx2.request.height"];

impl RequestFields {
    /// Lays these fields over those of a finished job.
    pub(super) fn over(mut self, source: &Accepted) -> Self {
        let mut below = Below::of(source);
        for group in SAME.iter().filter(|group| group.iter().any(|name| self.says(name))) {
            group.iter().for_each(|name| below.cut(name));
        }
        for (_, others) in INSTEAD.iter().filter(|(own, _)| own.iter().any(|name| self.says(name))) {
            others.iter().for_each(|name| below.cut(name));
        }
        if self.says("ltx2.reference") {
            BY_REFERENCE.iter().for_each(|key| below.cut(&format!("ltx2.{key}")));
        }
        self.lay_size(&mut below, source);
        self.lay_span(&mut below);
        self.lay_keys(&mut below);
        let Below { mut fields, tree } = below;
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

    /// Whether a field, or a key of `ltx2`, is given.
    fn says(&self, name: &str) -> bool {
        match name.strip_prefix("ltx2.") {
            None => self.values.contains_key(name),
            Some(key) => self.values.get("ltx2").is_some_and(|tree| at(tree, key).is_some()),
        }
    }

    /// A side that is not said stays that of the source, however that wrote it.
    fn lay_size(&self, below: &mut Below, source: &Accepted) {
        if !SIZE.iter().any(|name| self.says(name)) {
            return;
        }
        SIZE.iter().for_each(|name| below.cut(name));
        let request = &source.config.request;
        for (name, side) in [("width", request.width), ("height", request.height)] {
            if !self.says("size") && !self.says(name) && !self.says(&format!("ltx2.request.{name}")) {
                below.fields.insert(name.into(), side.into());
            }
        }
    }

    /// Ends of a retake's span that are not said stay those of the source, however that wrote them; the field `retake` says all.
    fn lay_span(&self, below: &mut Below) {
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
            if self.says(field) || tree.is_some_and(|tree| tree.get(key).or(tree.get(field)).is_some()) {
                span.shift_remove(key);
            }
        }
        if !span.is_empty() {
            set(&mut below.tree, "request.retake", span.into());
        }
    }

    /// Fields of the source that write a key which is said anew become keys, of which that one goes: one field may write several,
    /// and a field holds before a key.
    fn lay_keys(&self, below: &mut Below) {
        let keys = |spec: &'static super::table::Spec| if let Place::Keys(keys) = spec.place { keys } else { &[] };
        let own: Vec<&str> =
            FIELDS.iter().filter(|spec| self.values.contains_key(spec.name)).flat_map(keys).copied().collect();
        let is_said = |key: &&str| own.contains(key) || self.says(&format!("ltx2.{key}"));
        for spec in FIELDS.iter().filter(|spec| keys(spec).iter().any(is_said)) {
            if let Some(value) = below.fields.shift_remove(spec.name) {
                keys(spec).iter().for_each(|key| set(&mut below.tree, key, value.clone()));
            }
        }
        // A field holds before a key, the source's own fields, too: nothing stands below one.
        let kept = FIELDS.iter().filter(|spec| below.fields.contains_key(spec.name)).flat_map(keys).copied();
        let all: Vec<&str> = own.into_iter().chain(kept).collect();
        all.into_iter().for_each(|key| below.cut(&format!("ltx2.{key}")));
    }
}

/// The source's fields, and its keys apart.
struct Below {
    fields: Map<String, Value>,
    tree: Value,
}

impl Below {
    fn of(source: &Accepted) -> Self {
        let mut fields = source.fields.clone();
        let tree = fields.shift_remove("ltx2").unwrap_or_else(|| json!({}));
        Below { fields, tree }
    }

    /// Takes a field, or a key, out.
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

/// The value at a dotted path.
fn at<'a>(tree: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(tree, |tree, key| tree.get(key))
}

/// Writes a value at a dotted path.
fn set(tree: &mut Value, path: &str, value: Value) {
    merge(tree, path.rsplit('.').fold(value, |inner, key| json!({key: inner})));
}

/// Lays an object over another, key by key.
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
