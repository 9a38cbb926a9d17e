//! Overrides of a server's configuration by the fields of a request.

use serde_json::Value;

use super::error::{ConfigError, ValueOrigin};
use super::load::{LoadedConfig, RequestedDuration, combine, expand_reference};
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
    duration: Option<RequestedDuration>,
    /// Keys for which the configured value of the server is ignored.
    ignored_keys: Vec<&'static str>,
}

impl Default for RequestLayer {
    fn default() -> Self {
        RequestLayer {
            tree: Tree::Map(Vec::new()),
            keys: Tree::Map(Vec::new()),
            duration: None,
            ignored_keys: Vec::new(),
        }
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
    pub(crate) fn overridden_fields(&self) -> Vec<(String, String)> {
        let mut found = Vec::new();
        let mut tree = self.tree.clone();
        if let Some(RequestedDuration { origin, .. }) = &self.duration {
            tree.set(FRAMES, Value::Null, origin);
        }
        collect_overridden(&self.keys, &tree, String::new(), &mut found);
        found
    }

    /// Sets the duration, from which the number of frames is derived.
    pub(crate) fn set_seconds(&mut self, field: &str, seconds: f64) {
        self.duration = Some(RequestedDuration { seconds, origin: ValueOrigin::Field(field.into()) });
    }

    /// Ignores the configured value of a key for this request.
    pub(crate) fn ignore_configured(&mut self, key: &'static str) {
        self.ignored_keys.push(key);
    }
}

/// Validates a tree and converts its keys to canonical names.
fn parse_field_tree(field: &str, tree: Value) -> Result<Tree, ConfigError> {
    let (origin, mut node) = (ValueOrigin::Field(field.into()), YamlNode::from_value(tree));
    validate(&node, &|_| ValueOrigin::Field(field.into()))?;
    reference_video::expand(&mut node, |_| origin.clone())?;
    Ok(Tree::from_node(&node, &|_| origin.clone()))
}

fn collect_overridden(keys: &Tree, over: &Tree, path: String, found: &mut Vec<(String, String)>) {
    match (keys, over) {
        (Tree::Map(keys), Tree::Map(_)) => {
            for (key, inner) in keys {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                if let Some(over) = over.get(key) {
                    collect_overridden(inner, over, path, found);
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
        layers.iter_mut().for_each(|below| layer.ignored_keys.iter().for_each(|key| below.cut(key)));
        let mut top = layer.tree.clone();
        expand_reference(&mut top);
        layers.push(top);
        // A number of frames or a duration in the request replaces the duration of the configuration.
        let says_frames = layer.ignored_keys.contains(&FRAMES) || layer.tree.leaf(FRAMES).is_some();
        let own = self.duration.clone().filter(|_| !says_frames);
        combine(layers, layer.duration.clone().or(own), Some(self.version))
    }
}
