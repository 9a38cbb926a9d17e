//! Where a model's parts lie.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::checkpoint::{Checkpoint, read_json};
use super::error::WeightsError;
use super::hub::HubCache;
use super::keys::{self, SingleFileKeys};
use super::version::Version;
use super::{Component, newer, official, official_keys};

/// Parts taken from elsewhere than the model: paths or `org/name`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Gemma-3's folder.
    pub text_encoder: Option<String>,
    /// A folder with `tokenizer.json`, or that file.
    pub tokenizer: Option<String>,
    pub vae: Option<String>,
    pub audio_vae: Option<String>,
    pub vocoder: Option<String>,
    pub upsampler: Option<String>,
}

impl Overrides {
    fn get(&self, component: Component) -> Option<&str> {
        match component {
            Component::TextEncoder => self.text_encoder.as_deref(),
            Component::Tokenizer => self.tokenizer.as_deref(),
            Component::Vae => self.vae.as_deref(),
            Component::AudioVae => self.audio_vae.as_deref(),
            Component::Vocoder => self.vocoder.as_deref(),
            Component::LatentUpsampler => self.upsampler.as_deref(),
            Component::Connectors | Component::Transformer | Component::Scheduler => None,
        }
    }
}

/// A single file with several components.
#[derive(Debug)]
struct SingleFile {
    checkpoint: Checkpoint,
    keys: SingleFileKeys,
    config: Value,
}

/// Kind of place that a path turned out to be.
#[derive(Debug)]
enum Place {
    /// A folder with a folder for each component.
    Model(PathBuf),
    Part(PathBuf),
    /// One of Lightricks' files.
    Single(Box<SingleFile>),
}

/// A model whose parts have been located. Weights' files are opened when first asked for, and stay so.
#[derive(Debug)]
pub struct ModelSource {
    path: PathBuf,
    main: Place,
    parts: BTreeMap<Component, Place>,
    /// By component: tensors are asked for one by one, and a header of thousands takes milliseconds to read.
    opened: [OnceLock<Checkpoint>; Component::ALL.len()],
}

impl ModelSource {
    /// Finds a model: a diffusers folder, one of Lightricks' files, or `org/name` (or `org/name/file`) in the local
    /// Hugging Face cache.
    ///
    /// # Errors
    /// The model or an override is not there, or its header cannot be read. A part that is merely absent is an error
    /// only when asked for.
    pub fn open(model: &str, overrides: &Overrides) -> Result<Self, WeightsError> {
        Self::open_in(model, overrides, &HubCache::from_env())
    }

    /// [`ModelSource::open`] with another cache.
    pub fn open_in(model: &str, overrides: &Overrides, hub: &HubCache) -> Result<Self, WeightsError> {
        let path = locate(model, hub)?;
        let main = place(&path, None)?;
        let mut parts = BTreeMap::new();
        for component in Component::ALL {
            if let Some(name) = overrides.get(component) {
                parts.insert(component, place(&locate(name, hub)?, Some(component))?);
            }
        }
        let source = ModelSource { path, main, parts, opened: Default::default() };
        source.refuse_newer()?;
        Ok(source)
    }

    /// Refuses folders of a generation that is not run; files are looked at where they are opened.
    fn refuse_newer(&self) -> Result<(), WeightsError> {
        if let Place::Model(folder) = &self.main {
            let index = folder.join("model_index.json");
            if index.is_file() {
                newer::refuse_index(&index, &read_json(&index)?)?;
            }
        }
        for component in Component::ALL.into_iter().filter(|c| *c != Component::Tokenizer) {
            let Ok(folder) = self.folder(component) else { continue };
            let path = folder.join(component.config_file());
            // A file that is no JSON is an error where it is read.
            let config = read_json(&path).unwrap_or_default();
            newer::refuse_config(&path, component, &config)?;
        }
        Ok(())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn place(&self, component: Component) -> &Place {
        self.parts.get(&component).unwrap_or(&self.main)
    }

    fn absent(&self, component: Component) -> WeightsError {
        let path = match self.place(component) {
            Place::Model(p) | Place::Part(p) => p.clone(),
            Place::Single(s) => s.checkpoint.path().to_path_buf(),
        };
        WeightsError::NoComponent { path, component }
    }

    /// A component's folder, when it has one.
    ///
    /// The tokenizer is looked for next to and inside the text encoder too, where Google's repository keeps it.
    ///
    /// # Errors
    /// The component is absent, or inside a single file.
    pub(crate) fn folder(&self, component: Component) -> Result<PathBuf, WeightsError> {
        let holds = |dir: &Path| match component {
            Component::Tokenizer => dir.join("tokenizer.json").is_file(),
            _ => dir.join(component.config_file()).is_file(),
        };
        let candidates: Vec<PathBuf> = match self.place(component) {
            Place::Part(dir) => vec![dir.clone()],
            Place::Model(dir) => vec![dir.join(component.folder())],
            Place::Single(_) => vec![],
        };
        let mut found = candidates.into_iter().find(|d| holds(d));
        if found.is_none() && component == Component::Tokenizer && !self.parts.contains_key(&component) {
            found = match self.place(Component::TextEncoder) {
                Place::Part(dir) => {
                    let beside = dir.parent().map(|p| p.join(component.folder()));
                    [Some(dir.clone()), beside].into_iter().flatten().find(|d| holds(d))
                }
                Place::Model(dir) => {
                    [component, Component::TextEncoder].map(|c| dir.join(c.folder())).into_iter().find(|d| holds(d))
                }
                Place::Single(_) => None,
            };
        }
        found.ok_or_else(|| self.absent(component))
    }

    /// The path of `tokenizer.json`.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn tokenizer(&self) -> Result<PathBuf, WeightsError> {
        Ok(self.folder(Component::Tokenizer)?.join("tokenizer.json"))
    }

    pub fn has(&self, component: Component) -> bool {
        match self.place(component) {
            // A single file never holds the tokenizer; the text encoder's folder may.
            Place::Single(s) if component != Component::Tokenizer => {
                component == Component::Scheduler || s.checkpoint.names().any(|k| s.name(component, k).is_some())
            }
            _ => self.folder(component).is_ok(),
        }
    }

    /// An error for the first of the components that is absent.
    ///
    /// # Errors
    /// As said; the message names the key and the flag that would give it.
    pub(crate) fn require(&self, components: impl IntoIterator<Item = Component>) -> Result<(), WeightsError> {
        for component in components {
            match component {
                Component::Tokenizer => drop(self.folder(Component::Tokenizer)?),
                c if self.has(c) => {}
                c => return Err(self.absent(c)),
            }
        }
        Ok(())
    }

    /// Where a component's configuration is read from, for error messages.
    pub(crate) fn config_path(&self, component: Component) -> PathBuf {
        match self.place(component) {
            Place::Single(s) => s.checkpoint.path().to_path_buf(),
            Place::Model(_) | Place::Part(_) => match self.folder(component) {
                Ok(dir) => dir.join(component.config_file()),
                Err(_) => self.path.join(component.folder()).join(component.config_file()),
            },
        }
    }

    /// A component's configuration in the keys of the diffusers layout.
    ///
    /// # Errors
    /// The component is absent, the file is no JSON object, or describes a network that is not supported.
    pub fn config(&self, component: Component) -> Result<Value, WeightsError> {
        if let Place::Single(s) = self.place(component) {
            if !self.has(component) {
                return Err(self.absent(component));
            }
            let path = s.checkpoint.path();
            return official::component_config(path, &s.config, component, &self.checkpoint_of(s, component)?);
        }
        let path = self.folder(component)?.join(component.config_file());
        let json = read_json(&path)?;
        match json.is_object() {
            true => Ok(json),
            false => Err(WeightsError::Json { path, reason: "not a JSON object".into() }),
        }
    }

    /// A component's tensors under the names this program uses. The files are opened once.
    ///
    /// # Errors
    /// The component is absent or has no weights, or its files are damaged.
    pub fn checkpoint(&self, component: Component) -> Result<Checkpoint, WeightsError> {
        let opened = &self.opened[component as usize];
        match opened.get() {
            Some(checkpoint) => Ok(checkpoint.clone()),
            None => self.open_checkpoint(component).map(|c| opened.get_or_init(|| c).clone()),
        }
    }

    fn open_checkpoint(&self, component: Component) -> Result<Checkpoint, WeightsError> {
        if component.weights_stem().is_none() {
            return Err(self.absent(component));
        }
        if let Place::Single(s) = self.place(component) {
            return self.checkpoint_of(s, component);
        }
        let folder = self.folder(component)?;
        let checkpoint = Checkpoint::open(&folder)?;
        newer::refuse_tensors(component, &checkpoint)?;
        let config = folder.join(component.config_file());
        if config.is_file() {
            check_version(component, &checkpoint, Version::of_config(component, &read_json(&config)?), &config)?;
        }
        match component {
            Component::TextEncoder => checkpoint.renamed(|key| Some(keys::gemma(key))),
            _ => Ok(checkpoint),
        }
    }

    fn checkpoint_of(&self, single: &SingleFile, component: Component) -> Result<Checkpoint, WeightsError> {
        let checkpoint = single.checkpoint.renamed(|key| single.name(component, key))?;
        match checkpoint.is_empty() && component.weights_stem().is_some() {
            true => Err(self.absent(component)),
            false => Ok(checkpoint),
        }
    }

    /// Refuses tensors of single files that no component reads. The video latents' statistics beside mean and deviation are
    /// training's.
    ///
    /// # Errors
    /// The first such tensor.
    pub fn refuse_unread(&self) -> Result<(), WeightsError> {
        let places = [(None, &self.main)].into_iter().chain(self.parts.iter().map(|(c, place)| (Some(*c), place)));
        for (part, place) in places {
            let Place::Single(s) = place else { continue };
            let unread = |key: &&str| match part {
                Some(c @ Component::LatentUpsampler) => s.name(c, key).is_none(),
                _ => s.keys.map(key).is_none() && !key.contains("per_channel_statistics."),
            };
            let mut keys = s.checkpoint.names().filter(unread);
            if let Some(key) = keys.next().map(String::from) {
                return Err(WeightsError::Unread {
                    path: s.checkpoint.path().to_path_buf(),
                    key,
                    others: keys.count(),
                });
            }
        }
        Ok(())
    }

    /// The model's generation, by what the transformer's configuration asks for.
    ///
    /// # Errors
    /// There is no transformer, or its keys belong to neither generation.
    pub(crate) fn version(&self) -> Result<Version, WeightsError> {
        let config = self.config(Component::Transformer)?;
        Version::of_transformer(&config).ok_or_else(|| {
            let (path, key) = (self.config_path(Component::Transformer), "use_prompt_embeddings".to_string());
            let reason = "does not go with cross_attn_mod: neither LTX-2.0 nor LTX-2.3".into();
            WeightsError::Config { path, key, reason }
        })
    }

    /// A sha256 over every component's configuration, tensor names, shapes, element types and file sizes. Reads no
    /// weights: it tells models apart, not a damaged byte.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn fingerprint(&self) -> Result<String, WeightsError> {
        let mut hash = Sha256::new();
        let mut add = |text: String| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        for component in Component::ALL {
            if component == Component::Tokenizer {
                if let Ok(path) = self.tokenizer() {
                    let size = fs::metadata(&path).map_err(WeightsError::io(&path, "cannot read its size"))?.len();
                    add(format!("tokenizer {size}"));
                }
                continue;
            }
            if !self.has(component) {
                continue;
            }
            add(format!("{} {}", component.folder(), self.config(component)?));
            if component.weights_stem().is_none() {
                continue;
            }
            let checkpoint = self.checkpoint(component)?;
            checkpoint.headers().for_each(|(name, dtype, shape)| add(format!("{name} {dtype} {shape:?}")));
            checkpoint.files().for_each(|(_, size)| add(size.to_string()));
        }
        Ok(hex::encode(hash.finalize()))
    }
}

impl SingleFile {
    fn name(&self, component: Component, key: &str) -> Option<String> {
        if component != Component::LatentUpsampler {
            return self.keys.rename(component, key);
        }
        // A file of its own, whose names are the same in both layouts.
        let first = key.split_once('.').map_or(key, |(first, _)| first);
        UPSAMPLER_MODULES.contains(&first).then(|| key.to_string())
    }
}

/// The modules of a latent upsampler.
const UPSAMPLER_MODULES: [&str; 6] =
    ["initial_conv", "initial_norm", "res_blocks", "upsampler", "post_upsample_res_blocks", "final_conv"];

/// The path of a model or part.
fn locate(name: &str, hub: &HubCache) -> Result<PathBuf, WeightsError> {
    let path = Path::new(name);
    if path.exists() {
        return Ok(path.to_path_buf());
    }
    if HubCache::is_name(name) {
        return hub.resolve(name);
    }
    let looked = "no such file or folder; a model is a diffusers folder, a .safetensors file, or org/name".into();
    Err(WeightsError::NotFound { name: name.into(), looked })
}

/// Tells what lies at a path; for a part, which one is asked for.
fn place(path: &Path, part: Option<Component>) -> Result<Place, WeightsError> {
    if path.is_file() {
        return match part {
            Some(Component::Tokenizer) => Ok(Place::Part(path.parent().unwrap_or(Path::new("")).to_path_buf())),
            Some(c @ Component::TextEncoder) => {
                Err(WeightsError::NoComponent { path: path.to_path_buf(), component: c })
            }
            _ => single(path, part).map(|s| Place::Single(Box::new(s))),
        };
    }
    let holds = |c: Component| path.join(c.folder()).join(c.config_file()).is_file();
    if let Some(component) = part {
        return Ok(if holds(component) { Place::Model(path.into()) } else { Place::Part(path.into()) });
    }
    if path.join("model_index.json").is_file() || Component::ALL.into_iter().any(holds) {
        return Ok(Place::Model(path.into()));
    }
    // A repository of Lightricks may hold nothing but single files: Checkpoint::open names them when there are several.
    single(path, None).map(|s| Place::Single(Box::new(s)))
}

fn single(path: &Path, part: Option<Component>) -> Result<SingleFile, WeightsError> {
    let checkpoint = Checkpoint::open(path)?;
    // An upsampler's tensors tell what it is.
    let bare = (part == Some(Component::LatentUpsampler)).then_some("{}");
    let text = checkpoint.metadata("config").or(bare).ok_or_else(|| WeightsError::Config {
        path: checkpoint.path().to_path_buf(),
        key: "config".into(),
        reason: "is missing in the header's metadata: not one of Lightricks' model files, or stripped of it; use the \
                 published file or the diffusers folder"
            .into(),
    })?;
    let config = serde_json::from_str(text).map_err(|e| WeightsError::Config {
        path: checkpoint.path().to_path_buf(),
        key: "config".into(),
        reason: format!("in the header's metadata is not JSON: {e}"),
    })?;
    newer::refuse_file(&checkpoint, &config)?;
    match part {
        Some(Component::LatentUpsampler) => official_keys::refuse_unread_of_upsampler(checkpoint.path(), &config)?,
        _ => official_keys::refuse_unread(checkpoint.path(), &config)?,
    }
    let keys = SingleFileKeys::new(checkpoint.names());
    let single = SingleFile { keys, config, checkpoint };
    for component in [Component::Transformer, Component::Connectors, Component::Vocoder] {
        let tensors = single.checkpoint.renamed(|key| single.name(component, key))?;
        newer::refuse_tensors(component, &tensors)?;
        let described = official::version(path, &single.config, component);
        check_version(component, &tensors, described, Path::new("its header"))?;
    }
    Ok(single)
}

/// A component's tensor that only one generation has, and which.
fn version_of_tensors(component: Component, tensors: &Checkpoint) -> Option<(Version, &'static str)> {
    let telling = match component {
        Component::Transformer => ["caption_projection.linear_1.weight", "prompt_adaln.linear.weight"],
        Component::Connectors => ["text_proj_in.weight", "video_text_proj_in.weight"],
        Component::Vocoder => ["conv_in.weight", "bwe_generator.conv_in.weight"],
        _ => return None,
    };
    [Version::V2_0, Version::V2_3].into_iter().zip(telling).find(|(_, name)| tensors.contains(name))
}

/// Refuses tensors of one generation under a configuration of the other.
///
/// # Errors
/// As said, naming both files.
fn check_version(
    component: Component,
    tensors: &Checkpoint,
    configured: Option<Version>,
    config: &Path,
) -> Result<(), WeightsError> {
    match (version_of_tensors(component, tensors), configured) {
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
