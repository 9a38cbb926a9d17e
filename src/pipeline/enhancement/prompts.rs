//! Enhanced prompts of a run, and their records in sidecars and checkpoints.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::system::SystemPrompt;
use crate::config::Config;
use crate::pipeline::output::denoise_checkpoint;
use crate::pipeline::plan::origin::Origin;
use crate::pipeline::plan::videos::{Job, sidecar_path};
use crate::weights::Component;

/// A prompt and the prompt that replaces it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnhancedPrompt {
    /// The prompt as the user wrote it.
    pub prompt: String,
    /// The prompt that is encoded.
    pub enhanced: String,
    /// Random seed of the enhancement.
    pub seed: u64,
}

/// Enhanced prompts of a run, and how they were enhanced.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Enhancement {
    /// The prompts, each with its enhanced form.
    pub prompts: Vec<EnhancedPrompt>,
    /// Text encoder or endpoint, system prompt and sampling.
    pub enhancer: Value,
    /// Configuration keys and identities that determine the enhancement. A resumed run reuses the prompts if they are the
    /// same.
    keys: Value,
    /// Number of leading entries of `prompts` that an earlier run enhanced.
    #[serde(skip)]
    known: usize,
}

/// Returns the configuration keys on which enhanced prompts depend, with the identity of the text encoder that enhances
/// them and whether the message is that of a request with images. The system prompt is its hash, because its file may
/// change.
pub(super) fn keys(config: &Config, system: &SystemPrompt, origin: &Origin) -> Value {
    let mut own = json!(config.enhance);
    if let Value::Object(own) = &mut own {
        own.retain(|key, _| !["key_env", "timeout", "seed", "system"].contains(&key.as_str()));
    }
    own["system_sha256"] = system.sha256().into();
    own["has_images"] = (!config.request.images.is_empty()).into();
    if let (Origin::Files(source), None) = (origin, &config.enhance.endpoint) {
        // If the weights cannot be read, the run reports it.
        own["text_encoder"] = source.fingerprint(Component::TextEncoder).ok().into();
    }
    own
}

impl Enhancement {
    /// Creates the record of a run's prompts. `enhancer`: text encoder or endpoint, system prompt and sampling. `keys`:
    /// the result of [`keys`].
    pub(super) fn new(prompts: Vec<EnhancedPrompt>, enhancer: Value, keys: Value) -> Self {
        Enhancement { prompts, enhancer, keys, known: 0 }
    }

    /// Records that an earlier run has enhanced the first `known` prompts. The run's configuration has their enhanced
    /// forms, which are not replaced again.
    #[must_use]
    pub(crate) fn with_known(self, known: usize) -> Self {
        Enhancement { known, ..self }
    }

    /// Returns the record of a prompt that was enhanced with this seed.
    pub(crate) fn find(&self, prompt: &str, seed: u64) -> Option<&EnhancedPrompt> {
        self.prompts.iter().find(|own| own.prompt == prompt && own.seed == seed)
    }

    /// Returns whether the prompts were enhanced with these keys, which [`keys`] returns.
    pub(super) fn has_keys(&self, keys: &Value) -> bool {
        self.keys == *keys
    }

    /// Replaces a prompt by its enhanced form. `seed`: random seed of its enhancement. A prompt that is not in this
    /// record, or that an earlier run has enhanced, is kept.
    pub(crate) fn replace(&self, prompt: &mut String, seed: u64) {
        let new = &self.prompts[self.known.min(self.prompts.len())..];
        if let Some(own) = new.iter().find(|own| own.prompt == *prompt && own.seed == seed) {
            prompt.clone_from(&own.enhanced);
        }
    }

    /// Returns the record for the sidecar of one video: its own prompt, and the prompts of its later clips.
    pub(in crate::pipeline) fn of_video(&self, config: &Config, prompt: &str) -> Value {
        let clips = config.request.chain.iter().flat_map(|chain| &chain.prompts);
        let used: Vec<&str> = clips.map(String::as_str).chain([prompt]).collect();
        let own = self.prompts.iter().filter(|own| used.contains(&own.enhanced.as_str()));
        json!(Enhancement { prompts: own.cloned().collect(), ..self.clone() })
    }

    /// Returns the record in a sidecar's key `enhancement`; `None` if no prompt of the video was enhanced.
    pub(crate) fn from_sidecar(recorded: &Value) -> Option<Self> {
        serde_json::from_value(recorded.clone()).ok()
    }

    /// Returns whether `prompt` is an enhanced form.
    pub(crate) fn has_enhanced(&self, prompt: &str) -> bool {
        self.prompts.iter().any(|own| own.enhanced == prompt)
    }
}

/// Returns the prompts that an interrupted run with the same keys has enhanced, from the sidecars and checkpoints next
/// to its output files. `None`: there are none.
pub(in crate::pipeline) fn recorded(config: &Config, outputs: &[PathBuf]) -> Option<Enhancement> {
    // If the model or the system prompt cannot be read, the run reports it later.
    let origin = Origin::find(config).ok()?;
    let keys = keys(config, &SystemPrompt::read(config, &origin).ok()?, &origin);
    let in_sidecar = |path: &Path| {
        let sidecar: Value = serde_json::from_slice(&std::fs::read(sidecar_path(path)).ok()?).ok()?;
        Enhancement::from_sidecar(&sidecar["enhancement"])
    };
    let checkpoints = outputs.iter().flat_map(|path| denoise_checkpoint::recorded_enhancements(path));
    let all = outputs.iter().filter_map(|path| in_sidecar(path)).chain(checkpoints);
    merge(all.filter(|own| own.has_keys(&keys)))
}

/// Combines records of the same enhancer.
fn merge(records: impl Iterator<Item = Enhancement>) -> Option<Enhancement> {
    records.reduce(|mut all, own| {
        for prompt in own.prompts {
            if all.find(&prompt.prompt, prompt.seed).is_none() {
                all.prompts.push(prompt);
            }
        }
        all
    })
}

impl Config {
    /// Returns the random seed with which the prompts of this configuration are enhanced.
    pub(crate) fn enhancement_seed(&self) -> u64 {
        self.enhance.seed.unwrap_or(self.request.seed)
    }

    /// Returns the prompts of a run, each once: those of the jobs and of the later clips of chained videos.
    pub(crate) fn distinct_prompts(&self, jobs: &[Job]) -> Vec<String> {
        let clips = self.request.chain.iter().flat_map(|chain| &chain.prompts);
        let mut distinct: Vec<String> = Vec::new();
        for prompt in jobs.iter().map(|job| &job.prompt).chain(clips) {
            if !distinct.contains(prompt) {
                distinct.push(prompt.clone());
            }
        }
        distinct
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enhancement(prompts: &[(&str, &str)]) -> Enhancement {
        enhancement_of(&Config::default(), prompts)
    }

    fn enhancement_of(config: &Config, prompts: &[(&str, &str)]) -> Enhancement {
        let of = |(prompt, enhanced): &(&str, &str)| EnhancedPrompt {
            prompt: (*prompt).into(),
            enhanced: (*enhanced).into(),
            seed: 10,
        };
        let origin = Origin::find(config).expect("a model");
        let keys = keys(config, &SystemPrompt::read(config, &origin).expect("a text"), &origin);
        Enhancement::new(prompts.iter().map(of).collect(), json!({"model": "m"}), keys)
    }

    #[test]
    fn records_of_another_text_encoder_or_without_images_are_not_reused() {
        let folder = tempfile::tempdir().expect("a folder");
        let outputs = [folder.path().join("a.mp4")];
        let model = |name: &str| format!("{}/tests/fixtures/models/{name}", env!("CARGO_MANIFEST_DIR"));
        let mut config = Config::default();
        config.model.path = model("tiny_a");
        let sidecar = json!({"enhancement": enhancement_of(&config, &[("a", "A")]).of_video(&config, "A")});
        std::fs::write(sidecar_path(&outputs[0]), sidecar.to_string()).expect("written");
        assert!(recorded(&config, &outputs).is_some());
        let mut other = config.clone();
        other.model.text_encoder = Some(format!("{}/text_encoder", model("tiny_b")));
        assert_eq!(recorded(&other, &outputs), None);
        let mut with_image = config.clone();
        let image = r#"{"path": "a.png", "frame": 0, "strength": 1.0, "crf": 0}"#;
        with_image.request.images = vec![serde_json::from_str(image).expect("an image")];
        // The same system prompt does not suffice, because the user's message differs.
        let system = folder.path().join("system.txt");
        std::fs::write(&system, "Be brief.").expect("written");
        for config in [&mut config, &mut with_image] {
            config.enhance.system = Some(system.display().to_string());
        }
        let sidecar = json!({"enhancement": enhancement_of(&config, &[("a", "A")]).of_video(&config, "A")});
        std::fs::write(sidecar_path(&outputs[0]), sidecar.to_string()).expect("written");
        assert!(recorded(&config, &outputs).is_some());
        assert_eq!(recorded(&with_image, &outputs), None);
    }

    #[test]
    fn records_of_finished_videos_are_reused_only_with_the_same_keys() {
        let folder = tempfile::tempdir().expect("a folder");
        let outputs = [folder.path().join("a.mp4"), folder.path().join("b.mp4")];
        let write = |path: &Path, own: &Enhancement| {
            let sidecar = json!({"enhancement": own.of_video(&Config::default(), "A")});
            std::fs::write(sidecar_path(path), sidecar.to_string()).expect("written");
        };
        assert_eq!(recorded(&Config::default(), &outputs), None);
        write(&outputs[0], &enhancement(&[("a", "A"), ("b", "B")]));
        write(&outputs[1], &enhancement(&[("a", "A")]));
        // A video's sidecar has only its own prompt.
        assert_eq!(recorded(&Config::default(), &outputs), Some(enhancement(&[("a", "A")])));
        let mut other = Config::default();
        (other.enhance.timeout, other.enhance.key_env) = (3, Some("KEY".into()));
        assert!(recorded(&other, &outputs).is_some());
        other.enhance.model = Some("n".into());
        assert_eq!(recorded(&other, &outputs), None);
    }

    #[test]
    fn enhanced_prompt_is_found_by_prompt_and_seed() {
        let own = enhancement(&[("a", "A")]);
        let replaced = |prompt: &str, seed| {
            let mut text = prompt.to_string();
            own.replace(&mut text, seed);
            text
        };
        assert_eq!([replaced("a", 10), replaced("a", 11), replaced("b", 10)], ["A", "a", "b"]);
        assert!(own.has_enhanced("A") && !own.has_enhanced("a"));
        // An enhanced prompt that is another prompt of the run is not replaced again.
        let resumed = enhancement(&[("a", "b"), ("b", "c"), ("d", "e")]).with_known(2);
        let mut prompts = ["a", "b", "d"].map(String::from);
        prompts.iter_mut().for_each(|prompt| resumed.replace(prompt, 10));
        assert_eq!(prompts, ["a", "b", "e"]);
    }
}
