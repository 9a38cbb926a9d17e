//! Helpers for the unit tests of several networks.

use std::collections::BTreeSet;

use serde_json::Value as Json;

use super::presets::Preset;
use super::{ConfigError, Network};

/// Returns the configuration of one component of a built-in preset.
pub(crate) fn published(model: &str, component: &str) -> Json {
    Preset::named(model).expect("carried").config(component).expect("a configuration").clone()
}

/// Returns the number of elements of all parameters.
pub(crate) fn elements(network: &Network) -> usize {
    network.params.iter().map(|p| p.ty.elements()).sum()
}

/// Returns the names of the checkpoint tensors that the parameters are loaded from.
pub(crate) fn tensors(network: &Network) -> BTreeSet<String> {
    network.params.iter().flat_map(|p| p.source.tensors()).map(|(name, _)| name.to_string()).collect()
}

/// Like [`tensors`], and asserts that each tensor is loaded by exactly one parameter.
pub(crate) fn tensors_once(network: &Network) -> BTreeSet<String> {
    let names = tensors(network);
    assert_eq!(network.params.iter().map(|p| p.source.tensors().len()).sum::<usize>(), names.len());
    names
}

pub(crate) fn changed(mut config: Json, changes: &Json) -> Json {
    let changes = changes.as_object().expect("an object").clone();
    config.as_object_mut().expect("an object").extend(changes);
    config
}

/// Asserts that each configuration is rejected with an error of `component`, and that the message contains the expected
/// words and no Rust debug syntax.
pub(crate) fn assert_refused<T>(
    component: &str,
    read: impl Fn(&Json) -> Result<T, ConfigError>,
    cases: impl IntoIterator<Item = (Json, &'static str)>,
) {
    for (config, words) in cases {
        let error = read(&config).err().expect("refused");
        let (ConfigError::Form { component: own, .. }
        | ConfigError::Unsupported { component: own, .. }
        | ConfigError::Unread { component: own, .. }
        | ConfigError::OutOfRange { component: own, .. }) = &error;
        let message = error.to_string();
        assert!(*own == component && message.contains(words), "{own}: {message}");
        assert!(!["Some(", "None", " { "].iter().any(|rust| message.contains(rust)), "{message}");
    }
}
