//! Built-in model configurations, used to create a model with random weights or to compile for a published model
//! without its files. `ltx2`, `ltx2_3` and `ltx2_5` have the values of the published `config.json` files; `nano`,
//! `nano_2_3` and `nano_2_5` have the same topologies with widths small enough for a laptop.

use serde_json::{Map, Value};

/// The configurations of all components of a model, keyed by folder name.
#[derive(Clone, Debug)]
pub struct Preset {
    /// Name of the preset, such as `ltx2_3`; never the published name of the model.
    pub name: &'static str,
    configs: Map<String, Value>,
}

const PRESETS: [(&str, &str); 6] = [
    ("nano", include_str!("nano.json")),
    ("nano_2_3", include_str!("nano_2_3.json")),
    ("nano_2_5", include_str!("nano_2_5.json")),
    ("ltx2", include_str!("ltx2.json")),
    ("ltx2_3", include_str!("ltx2_3.json")),
    ("ltx2_5", include_str!("ltx2_5.json")),
];

/// Published model names and their presets.
const PUBLISHED: [(&str, &str); 5] = [
    ("Lightricks/LTX-2", "ltx2"),
    ("Lightricks/LTX-2.3", "ltx2_3"),
    ("diffusers/LTX-2.3-Diffusers", "ltx2_3"),
    ("Lightricks/LTX-2.5", "ltx2_5"),
    ("Lightricks/LTX-2.5-Diffusers", "ltx2_5"),
];

impl Preset {
    /// Returns the names of all presets, without the published names of their models.
    pub fn names() -> impl Iterator<Item = &'static str> {
        PRESETS.into_iter().map(|(n, _)| n)
    }

    /// Returns a preset by its own name, or by the published name of its model or of a file in the model's repository.
    pub fn named(name: &str) -> Option<Self> {
        let is_of =
            |published: &str| name.strip_prefix(published).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        let name = PUBLISHED.iter().find(|(published, _)| is_of(published)).map_or(name, |(_, preset)| preset);
        let (name, text) = PRESETS.into_iter().find(|(n, _)| *n == name)?;
        let Ok(Value::Object(configs)) = serde_json::from_str(text) else { return None };
        Some(Preset { name, configs })
    }

    /// Returns the `config.json` of the component in `folder`; `None` if the model has no such component.
    pub fn config(&self, folder: &str) -> Option<&Value> {
        self.configs.get(folder)
    }

    /// Replaces the configuration of one component.
    #[must_use]
    pub fn with(mut self, folder: &str, config: Value) -> Self {
        self.configs.insert(folder.into(), config);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_presets_parse_and_have_all_components() {
        for name in Preset::names() {
            let preset = Preset::named(name).expect("valid JSON");
            let parts = ["model_index", "transformer", "connectors", "text_encoder", "vae", "audio_vae", "vocoder"];
            for folder in parts.into_iter().chain(["latent_upsampler", "scheduler"]) {
                assert!(preset.config(folder).is_some_and(Value::is_object), "{name}: {folder}");
            }
        }
        assert_eq!(Preset::named("Lightricks/LTX-2").map(|p| p.name), Some("ltx2"));
        assert_eq!(Preset::named("Lightricks/LTX-2.3").map(|p| p.name), Some("ltx2_3"));
        assert_eq!(Preset::named("Lightricks/LTX-2.3/ltx-2.3-22b-dev.safetensors").map(|p| p.name), Some("ltx2_3"));
        assert_eq!(Preset::named("Lightricks/LTX-2.5-Diffusers").map(|p| p.name), Some("ltx2_5"));
    }
}
