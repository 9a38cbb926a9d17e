//! Checks of configurations and programs that the tests of several networks share.

use std::collections::BTreeSet;

use serde_json::Value as Json;

use super::presets::Preset;
use super::{ConfigError, Network};

/// The configuration of a component of a model that this program carries.
pub(crate) fn published(model: &str, component: &str) -> Json {
    Preset::named(model).expect("carried").config(component).expect("a configuration").clone()
}

/// Elements of all parameters.
pub(crate) fn elements(network: &Network) -> usize {
    network.params.iter().map(|p| p.ty.elements()).sum()
}

/// Names of the checkpoint's tensors that the parameters read.
pub(crate) fn tensors(network: &Network) -> BTreeSet<String> {
    network.params.iter().flat_map(|p| p.source.tensors()).map(|(name, _)| name.to_string()).collect()
}

/// The same names, after making sure that each is read once.
pub(crate) fn tensors_once(network: &Network) -> BTreeSet<String> {
    let names = tensors(network);
    assert_eq!(network.params.iter().map(|p| p.source.tensors().len()).sum::<usize>(), names.len());
    names
}

/// A configuration with some keys replaced.
pub(crate) fn changed(mut config: Json, changes: &Json) -> Json {
    let changes = changes.as_object().expect("an object").clone();
    config.as_object_mut().expect("an object").extend(changes);
    config
}

/// Each configuration is refused with an error of the component whose message contains the words and no Rust syntax.
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
