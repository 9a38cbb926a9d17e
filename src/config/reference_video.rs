//! `request.reference_video`: shorthand for a `request.reference_videos` list of one item.

use serde_json::{Value, json};

use super::error::{ConfigError, ValueOrigin};
use super::yaml::{YamlData, YamlNode};

const LIST: &str = "reference_videos";
const SINGLE: &str = "reference_video";

/// Moves `request.reference_video` into `request.reference_videos`. `origin` returns the origin of a line.
///
/// # Errors
/// Returns an error if both keys are set.
pub(super) fn expand(root: &mut YamlNode, origin: impl Fn(u64) -> ValueOrigin) -> Result<(), ConfigError> {
    let Some(YamlData::Map(request)) = entry(root, "request").map(|node| &mut node.data) else { return Ok(()) };
    let Some(found) = request.iter().position(|(name, _)| name == SINGLE) else { return Ok(()) };
    if request.iter().any(|(name, _)| name == LIST) {
        let origin = origin(request[found].1.line);
        return Err(ConfigError::exclusive(origin, "request.reference_videos", "request.reference_video"));
    }
    let (name, node) = &mut request[found];
    *name = LIST.into();
    let line = node.line;
    let item = match &node.data {
        YamlData::List(_) => return Ok(()),
        YamlData::Scalar(Value::Null) => {
            node.data = YamlData::List(Vec::new());
            return Ok(());
        }
        YamlData::Scalar(_) => YamlData::Map(vec![("path".into(), node.clone())]),
        YamlData::Map(_) => node.data.clone(),
    };
    node.data = YamlData::List(vec![YamlNode { line, data: item }]);
    Ok(())
}

fn entry<'a>(root: &'a mut YamlNode, key: &str) -> Option<&'a mut YamlNode> {
    let YamlData::Map(entries) = &mut root.data else { return None };
    entries.iter_mut().find(|(name, _)| name == key).map(|(_, node)| node)
}

/// Adds the shorthand to the JSON Schema of a run.
pub(super) fn add_to(schema: &mut Value) {
    let properties = &mut schema["$defs"]["Request"]["properties"];
    let items = properties[LIST]["items"].clone();
    let list = json!({"type": "array", "items": items});
    properties[SINGLE] = json!({
        "description": "Shorthand for `request.reference_videos`: a path, one item of the list, or the list.",
        "anyOf": [{"type": ["string", "null"]}, items, list],
    });
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::yaml::parse;

    fn expanded(text: &str) -> Result<Value, String> {
        let mut node = parse(text, "x.yml").expect("YAML");
        let origin = |line| ValueOrigin::File { file: "x.yml".into(), line };
        expand(&mut node, origin).map(|()| node.to_value()).map_err(|error| error.to_string())
    }

    #[test]
    fn reference_video_accepts_a_path_an_item_a_list_or_null() {
        let videos =
            |text: &str| expanded(&format!("request: {{reference_video: {text}}}")).map(|all| all["request"].clone());
        assert_eq!(videos("a.mp4"), Ok(json!({"reference_videos": [{"path": "a.mp4"}]})));
        assert_eq!(
            videos("{path: a, strength: 0.5}"),
            Ok(json!({"reference_videos": [{"path": "a", "strength": 0.5}]}))
        );
        assert_eq!(videos("[{path: a}, {path: b}]"), Ok(json!({"reference_videos": [{"path": "a"}, {"path": "b"}]})));
        assert_eq!(videos("null"), Ok(json!({"reference_videos": []})));
    }

    #[test]
    fn setting_both_keys_is_an_error() {
        assert_eq!(
            expanded("request:\n  reference_videos: [{path: a}]\n  reference_video: b\n"),
            Err("x.yml:3: 'request.reference_videos' and 'request.reference_video' are mutually exclusive; remove one"
                .into())
        );
    }
}
