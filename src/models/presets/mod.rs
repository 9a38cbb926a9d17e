//! Models whose configuration this program carries: to make a random one, or to compile for the published one without
//! its files. The values of `ltx2`, `ltx2_3` and `ltx2_5` are those of the published `config.json` files; `nano`, `nano_2_3`
//! and `nano_2_5` have the same topologies at widths that run on a laptop.

use serde_json::{Map, Value};

/// The configurations of a whole model, by folder name.
#[derive(Clone, Debug)]
pub struct Preset {
    pub(crate) name: &'static str,
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

/// Published names of models, and the presets that describe them.
const PUBLISHED: [(&str, &str); 5] = [
    ("Lightricks/LTX-2", "ltx2"),
    ("Lightricks/LTX-2.3", "ltx2_3"),
    ("diffusers/LTX-2.3-Diffusers", "ltx2_3"),
    ("Lightricks/LTX-2.5", "ltx2_5"),
    ("Lightricks/LTX-2.5-Diffusers", "ltx2_5"),
];

impl Preset {
    pub(crate) fn names() -> impl Iterator<Item = &'static str> {
        PRESETS.into_iter().map(|(n, _)| n)
    }

    /// A preset by name, or by the published name of the model it describes.
    pub fn named(name: &str) -> Option<Self> {
        let name = PUBLISHED.iter().find(|(published, _)| *published == name).map_or(name, |(_, preset)| preset);
        let (name, text) = PRESETS.into_iter().find(|(n, _)| *n == name)?;
        let Ok(Value::Object(configs)) = serde_json::from_str(text) else { return None };
        Some(Preset { name, configs })
    }

    pub fn config(&self, folder: &str) -> Option<&Value> {
        self.configs.get(folder)
    }

    /// The same model with another configuration of a component.
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
    fn every_preset_reads() {
        for name in Preset::names() {
            let preset = Preset::named(name).expect("valid JSON");
            let parts = ["model_index", "transformer", "connectors", "text_encoder", "vae", "audio_vae", "vocoder"];
            for folder in parts.into_iter().chain(["latent_upsampler", "scheduler"]) {
                assert!(preset.config(folder).is_some_and(Value::is_object), "{name}: {folder}");
            }
        }
        assert_eq!(Preset::named("Lightricks/LTX-2").map(|p| p.name), Some("ltx2"));
        assert_eq!(Preset::named("Lightricks/LTX-2.3").map(|p| p.name), Some("ltx2_3"));
        assert_eq!(Preset::named("Lightricks/LTX-2.5-Diffusers").map(|p| p.name), Some("ltx2_5"));
    }
}
