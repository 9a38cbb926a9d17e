//! Locations of model files: a model folder, a component's folder, or one of Lightricks' files.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::checkpoint::Checkpoint;
use super::component::Component;
use super::error::WeightsError;
use super::keys::SingleFileKeys;
use super::packed::PackedTextEncoder;
use super::version::{KEYFRAMES, Version};
use super::{gguf_model, official, official_keys, unsupported};

/// One of Lightricks' files: a complete model or a single component.
#[derive(Debug)]
pub(super) struct SingleFile {
    pub(super) checkpoint: Checkpoint,
    keys: SingleFileKeys,
    pub(super) config: Value,
    /// Whether the header states the configuration, which otherwise is derived from tensors.
    pub(super) has_config: bool,
}

/// Location of a model or a component.
#[derive(Debug)]
pub(super) enum ModelLocation {
    /// A model folder with a subfolder for each component.
    Model(PathBuf),
    Part(PathBuf),
    /// One of Lightricks' files.
    Single(Box<SingleFile>),
    /// A text encoder file, with text projections and tokenizer.
    TextEncoder(Box<PackedTextEncoder>),
}

impl SingleFile {
    /// Opens a file with a complete model or with the component `part`.
    fn open(path: &Path, part: Option<Component>) -> Result<Self, WeightsError> {
        let checkpoint = Checkpoint::open(path)?;
        unsupported::reject_unrecognized_quantization(&checkpoint)?;
        // The header need not contain the configuration of these components, because it is derived from their tensors.
        let alone = part.filter(|c| {
            use Component::{Connectors, DurationHead, LatentUpsampler, TemporalUpsampler};
            matches!(c, Connectors | LatentUpsampler | TemporalUpsampler | DurationHead)
        });
        let derived = if alone.is_some() { None } else { gguf_model::transformer_config(&checkpoint)? };
        let derived = derived.map(|config| config.to_string());
        let has_config = checkpoint.metadata("config").is_some();
        let text = checkpoint.metadata("config").or(derived.as_deref()).or(alone.map(|_| "{}")).ok_or_else(|| {
            let path = checkpoint.path().to_path_buf();
            if let Some(key) = checkpoint.names().find(|key| is_lora_key(key)) {
                let reason = "is part of a LoRA, which is not a model; specify a model here, and the LoRA with --lora or model.loras";
                return WeightsError::Lora { path, key: key.into(), reason: reason.into() };
            }
            let reason = "is missing in the header's metadata: the file is not one of Lightricks' model files, or has lost its metadata; \
                          use the published file or the diffusers folder";
            WeightsError::Config { path, key: "config".into(), reason: reason.into() }
        })?;
        let config = serde_json::from_str(text).map_err(|e| WeightsError::Config {
            path: checkpoint.path().to_path_buf(),
            key: "config".into(),
            reason: format!("in the header's metadata is not JSON: {e}"),
        })?;
        unsupported::refuse_file(&checkpoint)?;
        match part {
            Some(Component::LatentUpsampler | Component::TemporalUpsampler) => {
                official_keys::reject_unknown_upsampler_keys(checkpoint.path(), &config)?;
            }
            Some(Component::DurationHead) => {}
            _ => official_keys::reject_unknown_keys(checkpoint.path(), &config)?,
        }
        let keys = SingleFileKeys::new(checkpoint.names());
        let single = SingleFile { keys, config, has_config, checkpoint };
        for component in [Component::Transformer, Component::Connectors, Component::Vocoder] {
            let tensors = single.checkpoint.renamed(|key| single.name(component, key))?;
            let described = official::version(path, &single.config, component);
            check_version(component, &tensors, described, Path::new("the file's header"))?;
        }
        Ok(single)
    }

    /// Returns the diffusers name of a key in a component, or `None` if the key belongs to another component.
    pub(super) fn name(&self, component: Component, key: &str) -> Option<String> {
        if !matches!(component, Component::LatentUpsampler | Component::TemporalUpsampler) {
            return self.keys.rename(component, key);
        }
        // Upsampler files use the same tensor names in both layouts.
        let first = key.split_once('.').map_or(key, |(first, _)| first);
        UPSAMPLER_MODULES.contains(&first).then(|| key.to_string())
    }

    /// Returns whether the file contains a component's tensors. The scheduler, which has only a configuration, is in
    /// every file.
    pub(super) fn has(&self, component: Component) -> bool {
        component == Component::Scheduler || self.checkpoint.names().any(|key| self.name(component, key).is_some())
    }

    /// Returns an error for the first tensor of the file that no component reads. `part` is the component for which the
    /// file was specified; `None` if it was specified as the model.
    pub(super) fn refuse_unread(&self, part: Option<Component>) -> Result<(), WeightsError> {
        let unread = |key: &&str| match part {
            Some(c @ (Component::LatentUpsampler | Component::TemporalUpsampler)) => self.name(c, key).is_none(),
            _ => self.keys.map(key).is_none() && !key.contains("per_channel_statistics."),
        };
        let mut keys = self.checkpoint.names().filter(unread);
        let Some(key) = keys.next().map(String::from) else { return Ok(()) };
        Err(WeightsError::Unread { path: self.checkpoint.path().to_path_buf(), key, others: keys.count() })
    }
}

/// Returns whether a tensor name occurs only in LoRA files.
fn is_lora_key(key: &str) -> bool {
    let ends = [".diff", ".diff_b"].iter().any(|end| key.ends_with(end));
    ends || [".lora_", ".lokr_", ".hada_", ".oft_"].iter().any(|part| key.contains(part))
}

/// The modules of a latent upsampler.
const UPSAMPLER_MODULES: [&str; 6] =
    ["initial_conv", "initial_norm", "res_blocks", "upsampler", "post_upsample_res_blocks", "final_conv"];

/// Returns whether a folder contains a component's folder with its configuration.
fn has_folder(path: &Path, component: Component) -> bool {
    path.join(component.folder()).join(component.config_file()).is_file()
}

/// Returns whether a folder has the diffusers layout: a model index, or the transformer's folder. Folders of single
/// files may also contain folders of a text encoder and its tokenizer.
pub(super) fn is_diffusers(path: &Path) -> bool {
    path.join("model_index.json").is_file() || has_folder(path, Component::Transformer)
}

/// Detects the kind of model or component at a path. `part`: the requested component; `None`: a complete model.
pub(super) fn place(path: &Path, part: Option<Component>) -> Result<ModelLocation, WeightsError> {
    if path.is_file() {
        return match part {
            Some(Component::Tokenizer) => Ok(ModelLocation::Part(path.parent().unwrap_or(Path::new("")).to_path_buf())),
            Some(Component::TextEncoder) => {
                PackedTextEncoder::open(path).map(|p| ModelLocation::TextEncoder(Box::new(p)))
            }
            _ => SingleFile::open(path, part).map(|s| ModelLocation::Single(Box::new(s))),
        };
    }
    if let Some(component) = part {
        return Ok(if has_folder(path, component) {
            ModelLocation::Model(path.into())
        } else {
            ModelLocation::Part(path.into())
        });
    }
    if is_diffusers(path) || Component::ALL.into_iter().any(|component| has_folder(path, component)) {
        return Ok(ModelLocation::Model(path.into()));
    }
    // A Lightricks repository may contain only single files; if there are several, `Checkpoint::open` lists them in its
    // error.
    SingleFile::open(path, None).map(|s| ModelLocation::Single(Box::new(s)))
}

/// Detects a component's model version from its tensors; also returns the tensor that identifies the version.
fn tensor_version(component: Component, tensors: &Checkpoint) -> Option<(Version, &'static str)> {
    let telling = match component {
        Component::Transformer => ["caption_projection.linear_1.weight", "prompt_adaln.linear.weight"],
        Component::Connectors => ["text_proj_in.weight", "video_text_proj_in.weight"],
        Component::Vocoder => ["conv_in.weight", "bwe_generator.conv_in.weight"],
        _ => return None,
    };
    if component == Component::Transformer {
        if tensors.contains(KEYFRAMES) {
            return Some((Version::V2_5, KEYFRAMES));
        }
        // LTX-2.5 also differs in the feed-forward layers: those of the video stream have no biases, unlike those of
        // the audio stream.
        let [video, audio] = ["ff", "audio_ff"].map(|ff| format!("transformer_blocks.0.{ff}.net.0.proj"));
        let has = |name: &str, end: &str| tensors.contains(&format!("{name}.{end}"));
        if has(&video, "weight") && !has(&video, "bias") && has(&audio, "bias") && tensors.contains(telling[1]) {
            return Some((Version::V2_5, "transformer_blocks.0.ff.net.0.proj.weight without a bias"));
        }
    }
    [Version::V2_0, Version::V2_3].into_iter().zip(telling).find(|(_, name)| tensors.contains(name))
}

/// Returns an error if a component's tensors and its configuration belong to different model versions.
pub(super) fn check_version(
    component: Component,
    tensors: &Checkpoint,
    configured: Option<Version>,
    config: &Path,
) -> Result<(), WeightsError> {
    match (tensor_version(component, tensors), configured) {
        (Some((has, tensor)), Some(wants)) if has != wants => Err(WeightsError::Generation {
            path: tensors.path().to_path_buf(),
            component,
            tensor,
            has,
            config: config.to_path_buf(),
            wants,
        }),
        _ => Ok(()),
    }
}
