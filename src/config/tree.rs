//! Tree of merged configuration layers that records the origin of each value.

use std::fmt::Write;

use serde_json::Value;

use super::error::ValueOrigin;
use super::yaml::{YamlData, YamlNode};

/// Merged configuration. Maps are merged key by key; a list is a single value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Tree {
    /// Keys, in the order of the first layer that has them.
    Map(Vec<(String, Tree)>),
    /// Value and its origin.
    Leaf(Value, ValueOrigin),
}

impl Tree {
    /// Converts the YAML of one layer; `origin` returns the origin of a line.
    pub(crate) fn from_node(node: &YamlNode, origin: &impl Fn(u64) -> ValueOrigin) -> Tree {
        match &node.data {
            YamlData::Map(entries) => {
                Tree::Map(entries.iter().map(|(k, n)| (k.clone(), Tree::from_node(n, origin))).collect())
            }
            _ => Tree::Leaf(node.to_value(), origin(node.line)),
        }
    }

    /// Returns a tree with one value at a dotted path.
    pub(crate) fn at(path: &str, value: Value, origin: &ValueOrigin) -> Tree {
        let leaf = Tree::from_node(&YamlNode::from_value(value), &|_| origin.clone());
        path.rsplit('.').fold(leaf, |inner, key| Tree::Map(vec![(key.to_string(), inner)]))
    }

    /// Merges `over`, whose values take precedence.
    pub(crate) fn merge(&mut self, over: Tree) {
        match (self, over) {
            (Tree::Map(mine), Tree::Map(theirs)) => {
                for (key, value) in theirs {
                    match mine.iter_mut().find(|(k, _)| *k == key) {
                        Some((_, old)) => old.merge(value),
                        None => mine.push((key, value)),
                    }
                }
            }
            (mine, theirs) => *mine = theirs,
        }
    }

    /// Returns the subtree at a dotted path.
    pub(crate) fn get(&self, path: &str) -> Option<&Tree> {
        path.split('.').try_fold(self, |tree, key| match tree {
            Tree::Map(entries) => entries.iter().find(|(k, _)| k == key).map(|(_, t)| t),
            Tree::Leaf(..) => None,
        })
    }

    /// Returns the value and origin of a leaf; `None` if it is null or missing.
    pub(crate) fn leaf(&self, path: &str) -> Option<(&Value, &ValueOrigin)> {
        match self.get(path)? {
            Tree::Leaf(Value::Null, _) | Tree::Map(_) => None,
            Tree::Leaf(value, origin) => Some((value, origin)),
        }
    }

    /// Returns the origin of the value at a path; for a map, that of its first value.
    pub(crate) fn origin(&self, path: &str) -> ValueOrigin {
        fn first(tree: &Tree) -> Option<&ValueOrigin> {
            match tree {
                Tree::Leaf(_, origin) => Some(origin),
                Tree::Map(entries) => entries.iter().find_map(|(_, t)| first(t)),
            }
        }
        self.get(path).and_then(first).cloned().unwrap_or(ValueOrigin::Default)
    }

    /// Sets the value at a dotted path.
    pub(crate) fn set(&mut self, path: &str, value: Value, origin: &ValueOrigin) {
        self.merge(Tree::at(path, value, origin));
    }

    /// Removes a top-level key.
    pub(crate) fn remove(&mut self, key: &str) {
        if let Tree::Map(entries) = self {
            entries.retain(|(k, _)| k != key);
        }
    }

    /// Removes the subtree at a dotted path.
    pub(crate) fn cut(&mut self, path: &str) {
        let Tree::Map(entries) = self else { return };
        match path.split_once('.') {
            None => entries.retain(|(k, _)| k != path),
            Some((key, rest)) => entries.iter_mut().filter(|(k, _)| k == key).for_each(|(_, inner)| inner.cut(rest)),
        }
    }

    /// Appends the path and origin of every leaf to `out`; `path` is the path of this tree.
    pub(super) fn leaves<'a>(&'a self, path: String, out: &mut Vec<(String, &'a ValueOrigin)>) {
        match self {
            Tree::Leaf(_, origin) => out.push((path, origin)),
            Tree::Map(entries) => {
                for (key, inner) in entries {
                    inner.leaves(if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, out);
                }
            }
        }
    }

    /// Replaces the subtree at a dotted path, if it exists.
    pub(super) fn replace(&mut self, path: &str, with: Tree) {
        let found = path.split('.').try_fold(self, |tree, key| match tree {
            Tree::Map(entries) => entries.iter_mut().find(|(k, _)| k == key).map(|(_, inner)| inner),
            Tree::Leaf(..) => None,
        });
        if let Some(found) = found {
            *found = with;
        }
    }

    /// Returns the values without origins.
    pub(crate) fn to_value(&self) -> Value {
        match self {
            Tree::Leaf(value, _) => value.clone(),
            Tree::Map(entries) => Value::Object(entries.iter().map(|(k, t)| (k.clone(), t.to_value())).collect()),
        }
    }

    /// Returns YAML with the origin of each value in a comment.
    pub(crate) fn to_yaml(&self) -> String {
        let mut out = String::new();
        self.write(&mut out, 0);
        out
    }

    fn write(&self, out: &mut String, depth: usize) {
        let Tree::Map(entries) = self else { return };
        for (key, tree) in entries {
            let indent = "  ".repeat(depth);
            // Writing to a string cannot fail.
            let _ = match tree {
                Tree::Map(inner) if inner.is_empty() => {
                    writeln!(out, "{indent}{key}: {{}}  # {}", ValueOrigin::Default)
                }
                Tree::Map(_) => {
                    let _ = writeln!(out, "{indent}{key}:");
                    tree.write(out, depth + 1);
                    Ok(())
                }
                Tree::Leaf(value, origin) => writeln!(out, "{indent}{key}: {}  # {origin}", scalar(value)),
            };
        }
    }
}

/// Compares two values; numbers by numeric value, so 5 equals 5.0.
pub(super) fn are_same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => one == other || one.as_f64() == other.as_f64(),
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| are_same(one, other))
        }
        _ => one == other,
    }
}

/// Formats a value on one line: as JSON, which is valid YAML, except for plain words without quotes.
fn scalar(value: &Value) -> String {
    let plain = |s: &str| {
        s.starts_with(|c: char| c.is_ascii_alphabetic())
            && s.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c))
            && !matches!(
                s.to_ascii_lowercase().as_str(),
                "true" | "false" | "null" | "yes" | "no" | "on" | "off" | "y" | "n"
            )
    };
    match value {
        Value::String(s) if plain(s) => s.clone(),
        Value::Array(items) => format!("[{}]", items.iter().map(scalar).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::yaml::parse;

    fn tree(text: &str, file: &str) -> Tree {
        Tree::from_node(&parse(text, file).unwrap(), &|line| ValueOrigin::File { file: file.into(), line })
    }

    #[test]
    fn later_layers_override_individual_values() {
        let mut merged = tree("a: {x: 1, y: 2}\nb: [1, 2]\nc: {z: 1}\n", "base.yml");
        merged.merge(tree("a:\n  y: 3\nb: [3]\nc: null\n", "top.yml"));
        merged.merge(Tree::at("a.w", Value::from("it's: so"), &ValueOrigin::Set));
        assert_eq!(
            merged.to_yaml(),
            "a:\n  x: 1  # base.yml:1\n  y: 3  # top.yml:2\n  w: \"it's: so\"  # --set\nb: [3]  # top.yml:3\nc: null  # top.yml:4\n"
        );
        assert_eq!(merged.to_value(), parse(&merged.to_yaml(), "again").unwrap().to_value());
        assert_eq!(merged.origin("a.y").to_string(), "top.yml:2");
        assert_eq!(merged.origin("nowhere"), ValueOrigin::Default);
        assert_eq!(merged.leaf("c"), None);
    }
}
