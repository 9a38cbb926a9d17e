//! The fields of a server's request, laid over its configuration.

use serde_json::Value;

use super::error::{ConfigError, ValueOrigin};
use super::load::{Length, Loaded, combine, expand_reference};
use super::other_names::to_own_names;
use super::tree::{Tree, are_same};
use super::validate::{Place, validate};
use super::yaml::Node;

const FRAMES: &str = "request.num_frames";

/// Keys that a request writes, each with the name of its field.
#[derive(Clone, Debug)]
pub(crate) struct RequestLayer {
    tree: Tree,
    /// Keys that were written as a tree, below single ones.
    keys: Tree,
    length: Option<Length>,
    /// Keys that the configuration below does not say for this request.
    unwritten: Vec<&'static str>,
}

impl Default for RequestLayer {
    fn default() -> Self {
        RequestLayer { tree: Tree::Map(Vec::new()), keys: Tree::Map(Vec::new()), length: None, unwritten: Vec::new() }
    }
}

impl RequestLayer {
    /// Writes a key.
    ///
    /// # Errors
    /// A value that the key does not take, by the field's name.
    pub(crate) fn set(&mut self, field: &str, key: &str, value: Value) -> Result<(), ConfigError> {
        let origin = ValueOrigin::Field(field.into());
        self.tree.merge(own_tree(field, Tree::at(key, value, &origin).to_value())?);
        Ok(())
    }

    /// Writes a tree of keys.
    ///
    /// # Errors
    /// An unknown key, or a value that it does not take, by the field's name.
    pub(crate) fn set_tree(&mut self, field: &str, tree: Value) -> Result<(), ConfigError> {
        let own = own_tree(field, tree)?;
        self.keys.merge(own.clone());
        self.tree.merge(own);
        Ok(())
    }

    /// Keys of the tree in whose place a field wrote something else, each behind that field's name.
    pub(crate) fn overruled(&self) -> Vec<(String, String)> {
        let mut found = Vec::new();
        let mut tree = self.tree.clone();
        if let Some(Length { origin, .. }) = &self.length {
            tree.set(FRAMES, Value::Null, origin);
        }
        overruled(&self.keys, &tree, String::new(), &mut found);
        found
    }

    /// Writes the number of frames by a duration.
    pub(crate) fn set_seconds(&mut self, field: &str, seconds: f64) {
        self.length = Some(Length { seconds, origin: ValueOrigin::Field(field.into()) });
    }

    /// Takes a key as written nowhere below.
    pub(crate) fn forget(&mut self, key: &'static str) {
        self.unwritten.push(key);
    }
}

/// A field's keys by their own names.
fn own_tree(field: &str, tree: Value) -> Result<Tree, ConfigError> {
    let (origin, mut node) = (ValueOrigin::Field(field.into()), Node::from_value(tree));
    let place = origin.to_string();
    validate(&node, Place::Flag(&place))?;
    to_own_names(&mut node, |_| place.clone())?;
    Ok(Tree::from_node(&node, &|_| origin.clone()))
}

fn overruled(keys: &Tree, over: &Tree, path: String, found: &mut Vec<(String, String)>) {
    match (keys, over) {
        (Tree::Map(keys), Tree::Map(_)) => {
            for (key, inner) in keys {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                if let Some(over) = over.get(key) {
                    overruled(inner, over, path, found);
                }
            }
        }
        (Tree::Leaf(before, _), Tree::Leaf(now, ValueOrigin::Field(field))) if !are_same(before, now) => {
            found.push((field.clone(), path));
        }
        _ => {}
    }
}

impl Loaded {
    /// The same with a request's fields over it.
    ///
    /// # Errors
    /// Those of [`super::load()`].
    pub(crate) fn with_request(&self, layer: &RequestLayer) -> Result<Loaded, ConfigError> {
        let mut layers = self.layers.clone();
        layers.iter_mut().for_each(|below| layer.unwritten.iter().for_each(|key| below.cut(key)));
        let mut top = layer.tree.clone();
        expand_reference(&mut top);
        layers.push(top);
        // A duration of the configuration gives way to any length of the request.
        let says_frames = layer.unwritten.contains(&FRAMES) || layer.tree.leaf(FRAMES).is_some();
        let own = self.length.clone().filter(|_| !says_frames);
        combine(layers, layer.length.clone().or(own), Some(self.version))
    }
}
