//! Helpers for unit tests of networks, in this crate and in crates that use the networks.

use std::collections::BTreeSet;

use serde::de::DeserializeOwned;
use serde_json::{Value as Json, json};

use crate::config_keys::keys;
use crate::presets::Preset;
use crate::ranges::has_range;
use crate::{ComponentConfigError, Network};

/// Returns the configuration of one component of a built-in preset.
pub fn published(model: &str, component: &str) -> Json {
    Preset::named(model).expect("carried").config(component).expect("a configuration").clone()
}

/// Returns the number of elements of all parameters.
pub fn elements(network: &Network) -> usize {
    network.params.iter().map(|p| p.ty.elements()).sum()
}

/// Returns the names of the checkpoint tensors that the parameters are loaded from.
pub fn tensors(network: &Network) -> BTreeSet<String> {
    network.params.iter().flat_map(|p| p.source.tensors()).map(|(name, _)| name.to_string()).collect()
}

/// Returns the same names as [`tensors`], and asserts that each tensor is loaded by exactly one parameter.
pub fn tensors_once(network: &Network) -> BTreeSet<String> {
    let names = tensors(network);
    assert_eq!(network.params.iter().map(|p| p.source.tensors().len()).sum::<usize>(), names.len());
    names
}

/// Returns a configuration with some keys replaced.
pub fn changed(mut config: Json, changes: &Json) -> Json {
    let changes = changes.as_object().expect("an object").clone();
    config.as_object_mut().expect("an object").extend(changes);
    config
}

/// Asserts that each configuration is rejected with an error of `component`, and that the message contains the expected
/// words and no Rust debug syntax.
pub fn assert_refused<T>(
    component: &str,
    read: impl Fn(&Json) -> Result<T, ComponentConfigError>,
    cases: impl IntoIterator<Item = (Json, &'static str)>,
) {
    for (config, words) in cases {
        let error = read(&config).err().expect("refused");
        let (ComponentConfigError::Form { component: own, .. }
        | ComponentConfigError::Unsupported { component: own, .. }
        | ComponentConfigError::Unread { component: own, .. }
        | ComponentConfigError::OutOfRange { component: own, .. }) = &error;
        let message = error.to_string();
        assert!(*own == component && message.contains(words), "{own}: {message}");
        assert!(!["Some(", "None", " { "].iter().any(|rust| message.contains(rust)), "{message}");
    }
}

/// Asserts that every field of `T` that accepts a number or a list of numbers has a range.
pub fn assert_covers<T: DeserializeOwned>(component: &str) {
    let takes = |key: &str, value: Json| serde_json::from_value::<T>(json!({key: value})).is_ok();
    let mut numbers = 0;
    for key in keys::<T>() {
        let probes = [json!(3), json!(0.5), json!([3]), json!([3, 3, 3]), json!([[3]]), json!([[3, 3, 3]])];
        if probes.into_iter().any(|probe| takes(key, probe)) && !takes(key, json!("3")) {
            numbers += 1;
            assert!(has_range(component, key), "{component}: {key} has no range");
        }
    }
    assert!(numbers > 2, "{component}: {numbers} numbers");
}
