//! Second names of keys and words, of equal standing: files, `--set` and requests may write either. What is merged, printed and
//! kept has the first.

use serde_json::{Value, json};

use super::error::ConfigError;
use super::yaml::{Data, Node};

/// A key with a second name.
struct Key {
    /// Where both are, and the definition of that section in the schema.
    section: &'static str,
    definition: &'static str,
    own: &'static str,
    other: &'static str,
    /// Both in full.
    both: [&'static str; 2],
    /// Whether the second name takes one item of the first one's list, too.
    single: bool,
}

const KEYS: [Key; 3] = [
    Key {
        section: "request.retake",
        definition: "Retake",
        own: "from",
        other: "start",
        both: ["request.retake.from", "request.retake.start"],
        single: false,
    },
    Key {
        section: "request.retake",
        definition: "Retake",
        own: "to",
        other: "end",
        both: ["request.retake.to", "request.retake.end"],
        single: false,
    },
    Key {
        section: "request",
        definition: "Request",
        own: "reference_videos",
        other: "reference_video",
        both: ["request.reference_videos", "request.reference_video"],
        single: true,
    },
];

/// A word with a second name: the keys that take it, their definition in the schema, the word, its other name.
const WORDS: [(&[&str], &str, &str, &str); 3] = [
    (&["pipeline", "serve.pipelines"], "Pipeline", "in_context", "ic_lora"),
    (&["sampler.kind", "two_stage.sampler"], "SamplerKind", "cfg_pp", "euler_ancestral_cfg_pp"),
    (&["sampler.schedule"], "ScheduleKind", "ltx2", "shifted"),
];

/// Puts the first names in the place of the second ones; `place` names a line in errors.
///
/// # Errors
/// A key that is written by both.
pub(super) fn to_own_names(root: &mut Node, place: impl Fn(u64) -> String) -> Result<(), ConfigError> {
    for key in KEYS {
        let Some(Data::Map(entries)) = at(root, key.section).map(|node| &mut node.data) else { continue };
        let Some(found) = entries.iter().position(|(name, _)| name == key.other) else { continue };
        if entries.iter().any(|(name, _)| name == key.own) {
            let [first, second] = key.both;
            return Err(ConfigError::Both { place: place(entries[found].1.line), first, second });
        }
        let (name, node) = &mut entries[found];
        *name = key.own.into();
        if key.single {
            listed(node);
        }
    }
    for (keys, _, own, other) in WORDS {
        for key in keys {
            if let Some(node) = at(root, key) {
                replace(node, own, other);
            }
        }
    }
    Ok(())
}

/// The node at a dotted path.
fn at<'a>(root: &'a mut Node, path: &str) -> Option<&'a mut Node> {
    path.split('.').try_fold(root, |node, key| match &mut node.data {
        Data::Map(entries) => entries.iter_mut().find(|(name, _)| name == key).map(|(_, inner)| inner),
        _ => None,
    })
}

/// A path, or an item, as a list of one.
fn listed(node: &mut Node) {
    let line = node.line;
    let item = match &node.data {
        Data::List(_) => return,
        Data::Scalar(Value::Null) => return node.data = Data::List(Vec::new()),
        Data::Scalar(_) => Data::Map(vec![("path".into(), node.clone())]),
        Data::Map(_) => node.data.clone(),
    };
    node.data = Data::List(vec![Node { line, data: item }]);
}

/// A word, or words of a list, by their first names.
fn replace(node: &mut Node, own: &str, other: &str) {
    match &mut node.data {
        Data::Scalar(word) if *word == other => *word = own.into(),
        Data::List(items) => items.iter_mut().for_each(|item| replace(item, own, other)),
        _ => {}
    }
}

/// Describes the second names in the schema of a run.
pub(super) fn add_to(schema: &mut Value) {
    let definitions = &mut schema["$defs"];
    for Key { definition, own, other, both, single, .. } in KEYS {
        let properties = &mut definitions[definition]["properties"];
        let mut described = properties[own].clone();
        described["description"] = format!("Another name of `{}`.", both[0]).into();
        if single {
            let list = json!({"type": "array", "items": described["items"]});
            described = json!({
                "description": format!("Another name of `{}`: one path, one of its items, or its list.", both[0]),
                "anyOf": [{"type": ["string", "null"]}, list["items"], list],
            });
        }
        properties[other] = described;
    }
    for (_, definition, own, other) in WORDS {
        if let Some(words) = definitions[definition]["oneOf"].as_array_mut() {
            let after = words.iter().position(|word| word["const"] == own).map_or(words.len(), |at| at + 1);
            let about = format!("Another name of `{own}`.");
            words.insert(after, json!({"description": about, "type": "string", "const": other}));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::yaml::parse;

    fn own(text: &str) -> Result<Value, String> {
        let mut node = parse(text, "x.yml").expect("YAML");
        to_own_names(&mut node, |line| format!("x.yml:{line}"))
            .map(|()| node.to_value())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn second_names_become_first_ones() {
        assert_eq!(
            own(
                "pipeline: ic_lora\nserve: {pipelines: [retake, ic_lora]}\nsampler: {kind: euler_ancestral_cfg_pp, steps: 3}\n\
                 request: {retake: {start: 1, end: 2}, reference_video: a.mp4}\n"
            ),
            Ok(json!({
                "pipeline": "in_context",
                "serve": {"pipelines": ["retake", "in_context"]},
                "sampler": {"kind": "cfg_pp", "steps": 3},
                "request": {"retake": {"from": 1, "to": 2}, "reference_videos": [{"path": "a.mp4"}]},
            }))
        );
        let videos =
            |text: &str| own(&format!("request: {{reference_video: {text}}}")).map(|all| all["request"].clone());
        assert_eq!(
            videos("{path: a, strength: 0.5}"),
            Ok(json!({"reference_videos": [{"path": "a", "strength": 0.5}]}))
        );
        assert_eq!(videos("[{path: a}, {path: b}]"), Ok(json!({"reference_videos": [{"path": "a"}, {"path": "b"}]})));
        assert_eq!(videos("null"), Ok(json!({"reference_videos": []})));
    }

    #[test]
    fn both_names_of_a_key_are_one_too_many() {
        assert_eq!(
            own("request:\n  retake:\n    from: 1\n    start: 2\n"),
            Err("x.yml:4: 'request.retake.from' and 'request.retake.start' exclude each other; keep one".into())
        );
    }
}
