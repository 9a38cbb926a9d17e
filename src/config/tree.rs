//! Layers of configuration merged into one tree that remembers where each value came from.

use std::fmt::Write;

use serde_json::Value;

use super::error::ValueOrigin;
use super::yaml::{Data, Node};

/// A merged configuration. Maps merge key by key; a list is one value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Tree {
    /// Keys in the order of the first layer that has them.
    Map(Vec<(String, Tree)>),
    /// A value and where it was written.
    Leaf(Value, ValueOrigin),
}

impl Tree {
    /// A tree of one layer; `origin` gives a line's origin.
    pub(crate) fn from_node(node: &Node, origin: &impl Fn(u64) -> ValueOrigin) -> Tree {
        match &node.data {
            Data::Map(entries) => {
                Tree::Map(entries.iter().map(|(k, n)| (k.clone(), Tree::from_node(n, origin))).collect())
            }
            _ => Tree::Leaf(node.to_value(), origin(node.line)),
        }
    }

    /// A tree of one value at a dotted path.
    pub(crate) fn at(path: &str, value: Value, origin: &ValueOrigin) -> Tree {
        let leaf = Tree::from_node(&Node::from_value(value), &|_| origin.clone());
        path.rsplit('.').fold(leaf, |inner, key| Tree::Map(vec![(key.to_string(), inner)]))
    }

    /// Lays another tree over this one.
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

    /// The tree at a dotted path.
    pub(crate) fn get(&self, path: &str) -> Option<&Tree> {
        path.split('.').try_fold(self, |tree, key| match tree {
            Tree::Map(entries) => entries.iter().find(|(k, _)| k == key).map(|(_, t)| t),
            Tree::Leaf(..) => None,
        })
    }

    /// The value of a leaf that is not null.
    pub(crate) fn leaf(&self, path: &str) -> Option<(&Value, &ValueOrigin)> {
        match self.get(path)? {
            Tree::Leaf(Value::Null, _) | Tree::Map(_) => None,
            Tree::Leaf(value, origin) => Some((value, origin)),
        }
    }

    /// Where the value at a path was written; for a map, its first value's.
    pub(crate) fn origin(&self, path: &str) -> ValueOrigin {
        fn first(tree: &Tree) -> Option<&ValueOrigin> {
            match tree {
                Tree::Leaf(_, origin) => Some(origin),
                Tree::Map(entries) => entries.iter().find_map(|(_, t)| first(t)),
            }
        }
        self.get(path).and_then(first).cloned().unwrap_or(ValueOrigin::Default)
    }

    /// Writes a value at a path.
    pub(crate) fn set(&mut self, path: &str, value: Value, origin: &ValueOrigin) {
        self.merge(Tree::at(path, value, origin));
    }

    /// Takes a key of the top level out.
    pub(crate) fn remove(&mut self, key: &str) {
        if let Tree::Map(entries) = self {
            entries.retain(|(k, _)| k != key);
        }
    }

    /// Takes what is at a dotted path out.
    pub(crate) fn cut(&mut self, path: &str) {
        let Tree::Map(entries) = self else { return };
        match path.split_once('.') {
            None => entries.retain(|(k, _)| k != path),
            Some((key, rest)) => entries.iter_mut().filter(|(k, _)| k == key).for_each(|(_, inner)| inner.cut(rest)),
        }
    }

    /// Adds every value's path and origin; `path` is the tree's own.
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

    /// Puts another tree in the place of the one at a dotted path, where there is one.
    pub(super) fn replace(&mut self, path: &str, with: Tree) {
        let found = path.split('.').try_fold(self, |tree, key| match tree {
            Tree::Map(entries) => entries.iter_mut().find(|(k, _)| k == key).map(|(_, inner)| inner),
            Tree::Leaf(..) => None,
        });
        if let Some(found) = found {
            *found = with;
        }
    }

    /// Without the origins.
    pub(crate) fn to_value(&self) -> Value {
        match self {
            Tree::Leaf(value, _) => value.clone(),
            Tree::Map(entries) => Value::Object(entries.iter().map(|(k, t)| (k.clone(), t.to_value())).collect()),
        }
    }

    /// As YAML, each value's origin in a comment.
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

/// Whether two values are the same; numbers are compared by value, so that 5 is 5.0.
pub(super) fn are_same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => one == other || one.as_f64() == other.as_f64(),
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| are_same(one, other))
        }
        _ => one == other,
    }
}

/// A value on one line: JSON is YAML, and plain words need no quotes.
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
    fn later_layers_win_value_by_value() {
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
