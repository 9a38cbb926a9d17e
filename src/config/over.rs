//! Overrides of a server's configuration by the fields of a request.

use serde_json::Value;

use super::error::{ConfigError, ValueOrigin};
use super::load::{Length, LoadedConfig, combine, expand_reference};
use super::reference_video;
use super::tree::{Tree, are_same};
use super::validate::validate;
use super::yaml::YamlNode;

const FRAMES: &str = "request.num_frames";

/// Keys that a request sets, each with the field that set it.
#[derive(Clone, Debug)]
pub(crate) struct RequestLayer {
    tree: Tree,
    /// Keys that the request's field `ltx2` sets; other fields override them.
    keys: Tree,
    length: Option<Length>,
    /// Keys for which the configured value of the server is ignored.
    unwritten: Vec<&'static str>,
}

impl Default for RequestLayer {
    fn default() -> Self {
        RequestLayer { tree: Tree::Map(Vec::new()), keys: Tree::Map(Vec::new()), length: None, unwritten: Vec::new() }
    }
}

impl RequestLayer {
    /// Sets a key.
    ///
    /// # Errors
    /// Returns an error that refers to `field` if the key does not accept the value.
    pub(crate) fn set(&mut self, field: &str, key: &str, value: Value) -> Result<(), ConfigError> {
        let origin = ValueOrigin::Field(field.into());
        self.tree.merge(parse_field_tree(field, Tree::at(key, value, &origin).to_value())?);
        Ok(())
    }

    /// Sets a tree of keys.
    ///
    /// # Errors
    /// Returns an error that refers to `field` if a key is unknown or does not accept its value.
    pub(crate) fn set_tree(&mut self, field: &str, tree: Value) -> Result<(), ConfigError> {
        let own = parse_field_tree(field, tree)?;
        self.keys.merge(own.clone());
        self.tree.merge(own);
        Ok(())
    }

    /// Returns `(field, key)` for each key in the request's field `ltx2` that another field sets to a different value.
    pub(crate) fn overruled(&self) -> Vec<(String, String)> {
        let mut found = Vec::new();
        let mut tree = self.tree.clone();
        if let Some(Length { origin, .. }) = &self.length {
            tree.set(FRAMES, Value::Null, origin);
        }
        overruled(&self.keys, &tree, String::new(), &mut found);
        found
    }

    /// Sets the duration, from which the number of frames is derived.
    pub(crate) fn set_seconds(&mut self, field: &str, seconds: f64) {
        self.length = Some(Length { seconds, origin: ValueOrigin::Field(field.into()) });
    }

    /// Ignores the configured value of a key for this request.
    pub(crate) fn forget(&mut self, key: &'static str) {
        self.unwritten.push(key);
    }
}

/// Validates a tree and converts its keys to canonical names.
fn parse_field_tree(field: &str, tree: Value) -> Result<Tree, ConfigError> {
    let (origin, mut node) = (ValueOrigin::Field(field.into()), YamlNode::from_value(tree));
    validate(&node, &|_| ValueOrigin::Field(field.into()))?;
    reference_video::expand(&mut node, |_| origin.clone())?;
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

impl LoadedConfig {
    /// Returns the configuration with the fields of a request applied.
    ///
    /// # Errors
    /// Returns the errors of [`super::load()`].
    pub(crate) fn with_request(&self, layer: &RequestLayer) -> Result<LoadedConfig, ConfigError> {
        let mut layers = self.layers.clone();
        layers.iter_mut().for_each(|below| layer.unwritten.iter().for_each(|key| below.cut(key)));
        let mut top = layer.tree.clone();
        expand_reference(&mut top);
        layers.push(top);
        // A number of frames or a duration in the request replaces the duration of the configuration.
        let says_frames = layer.unwritten.contains(&FRAMES) || layer.tree.leaf(FRAMES).is_some();
        let own = self.length.clone().filter(|_| !says_frames);
        combine(layers, layer.length.clone().or(own), Some(self.version))
    }
}
