//! Finds differences between JSON trees, for messages.

use serde_json::{Map, Value};

/// Returns the first key in which two trees differ, and the values of both trees. Arrays of equal length are compared
/// item by item.
pub(crate) fn difference(a: &Value, b: &Value, path: &str) -> Option<(String, String, String)> {
    let below = |key: &str| if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
    match (a, b) {
        _ if a == b => None,
        (Value::Object(a), Value::Object(b)) => {
            let keys = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key)));
            keys.into_iter().find_map(|key| {
                let of = |tree: &Map<String, Value>| tree.get(key).cloned().unwrap_or(Value::Null);
                difference(&of(a), &of(b), &below(key))
            })
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            let mut pairs = a.iter().zip(b).enumerate();
            pairs.find_map(|(at, (a, b))| difference(a, b, &format!("{path}[{at}]")))
        }
        _ => Some((path.into(), a.to_string(), b.to_string())),
    }
}

/// Truncates a value to the length that fits in a message.
pub(crate) fn short(value: &str) -> String {
    const MOST: usize = 100;
    match value.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn differing_list_item_is_reported_by_index() {
        let tree = |strength: f64| json!({"images": [{"path": "a"}, {"path": "b", "strength": strength}]});
        let found = difference(&tree(1.0), &tree(0.5), "").expect("a difference");
        assert_eq!(found, ("images[1].strength".into(), "1.0".into(), "0.5".into()));
        let found = difference(&json!([1]), &json!([1, 2]), "list").expect("a difference");
        assert_eq!(found, ("list".into(), "[1]".into(), "[1,2]".into()));
        assert_eq!(short(&"x".repeat(200)).chars().count(), 101);
    }
}
