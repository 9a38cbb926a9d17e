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
use super::packed::TokenizerFiles;
use super::pairing::{GEMMA_SOURCE, Transformer};
use super::place::{KEYFRAMES, Place, SingleFile, check_version, place};
use super::version::{USE_KEYFRAMES, Version};
use super::{Component, fingerprint, keys, newer, official, official_diffusion, quantization, split};

/// Parts taken from elsewhere than the model: paths or `org/name`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Gemma-3's folder; the folder or file of LTX-2.5's own.
    pub text_encoder: Option<String>,
    /// A folder with `tokenizer.json`, or that file.
    pub tokenizer: Option<String>,
    pub vae: Option<String>,
    pub audio_vae: Option<String>,
    pub vocoder: Option<String>,
    pub upsampler: Option<String>,
    pub temporal_upsampler: Option<String>,
    pub duration_head: Option<String>,
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
            Component::TemporalUpsampler => self.temporal_upsampler.as_deref(),
            Component::DurationHead => self.duration_head.as_deref(),
            Component::Connectors | Component::Transformer | Component::Scheduler | Component::DiffusionDecoder => None,
        }
    }
}

/// A model whose parts have been located. Weights' files are opened when first asked for, and stay so.
#[derive(Debug)]
pub struct ModelSource {
    path: PathBuf,
    main: Place,
    parts: BTreeMap<Component, Place>,
    /// By component: tensors are asked for one by one, and a header of thousands takes milliseconds to read.
    opened: [OnceLock<Checkpoint>; Component::ALL.len()],
    /// Answers of [`ModelSource::fingerprint`], by component.
    fingerprints: [OnceLock<String>; Component::ALL.len()],
}

impl ModelSource {
    /// Finds a model: a diffusers folder, one of Lightricks' files, or `org/name` (or `org/name/file`) in the local
    /// Hugging Face cache. Beside a transformer in a repository of split files the other parts are those of the repository.
    ///
    /// # Errors
    /// The model or an override is not there, or its header cannot be read. A part that is merely absent is an error
    /// only when asked for.
    pub fn open(model: &str, overrides: &Overrides) -> Result<Self, WeightsError> {
        Self::open_in(model, overrides, &HubCache::from_env())
    }

    /// [`ModelSource::open`] with another cache.
    pub fn open_in(model: &str, overrides: &Overrides, hub: &HubCache) -> Result<Self, WeightsError> {
        let path = split::transformer(locate(model, hub)?)?;
        let main = place(&path, None)?;
        let mut parts = BTreeMap::new();
        for component in Component::ALL {
            let named = overrides.get(component).map(|name| locate(name, hub)).transpose()?;
            // Who names a video VAE decodes with what it holds.
            let decoder_named = component == Component::DiffusionDecoder && overrides.vae.is_some();
            let beside = || split::beside(&path, component).filter(|_| !decoder_named);
            if let Some(path) = named.or_else(beside) {
                parts.insert(component, place(&path, Some(component))?);
            }
        }
        let source = ModelSource { path, main, parts, opened: Default::default(), fingerprints: Default::default() };
        source.refuse_newer()?;
        source.check_text_encoder()?;
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
            if let Ok(config) = read_json(&path) {
                newer::refuse_config(&path, component, &config)?;
            }
        }
        Ok(())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses a text encoder that the transformer was not trained with.
    fn check_text_encoder(&self) -> Result<(), WeightsError> {
        // What cannot be read is an error where it is.
        let config = self.has(Component::TextEncoder).then(|| self.config(Component::TextEncoder).ok()).flatten();
        let Some((transformer, config)) = self.transformer().zip(config) else { return Ok(()) };
        let own = !self.parts.contains_key(&Component::TextEncoder);
        transformer.check_text_encoder(&self.config_path(Component::TextEncoder), &config, own)
    }

    /// The transformer, where there is one of a generation that is known.
    pub(super) fn transformer(&self) -> Option<Transformer> {
        let gemma = match self.place(Component::Transformer) {
            Place::Single(s) => s.checkpoint.metadata(GEMMA_SOURCE).map(String::from),
            _ => None,
        };
        let version = self.version().ok()?;
        Some(Transformer { path: self.config_path(Component::Transformer), version, gemma })
    }

    /// Where a component is. Sound's file may hold the vocoder too, and the video VAE's the diffusion decoder.
    fn place(&self, component: Component) -> &Place {
        let companion = match component {
            Component::Vocoder => Some(Component::AudioVae),
            Component::DiffusionDecoder => Some(Component::Vae),
            _ => None,
        };
        let holds = |place: &&Place| matches!(place, Place::Single(s) if s.has(component));
        let beside = || self.parts.get(&companion?).filter(holds);
        let own = self.parts.get(&component);
        own.or_else(|| Some(&self.main).filter(holds)).or_else(beside).unwrap_or(&self.main)
    }

    fn absent(&self, component: Component) -> WeightsError {
        let path = match self.place(component) {
            Place::Model(p) | Place::Part(p) => p.clone(),
            Place::Single(s) => s.checkpoint.path().to_path_buf(),
            Place::TextEncoder(p) => p.path().to_path_buf(),
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
            Place::Single(_) | Place::TextEncoder(_) => vec![],
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
                Place::Single(_) | Place::TextEncoder(_) => None,
            };
        }
        found.ok_or_else(|| self.absent(component))
    }

    /// The tokenizer's files.
    ///
    /// # Errors
    /// There are none.
    pub(crate) fn tokenizer(&self) -> Result<TokenizerFiles, WeightsError> {
        let packed = match self.place(Component::TextEncoder) {
            Place::TextEncoder(p) if !self.parts.contains_key(&Component::Tokenizer) => p.tokenizer()?,
            _ => None,
        };
        packed.map_or_else(|| self.folder(Component::Tokenizer).map(TokenizerFiles::Folder), Ok)
    }

    pub fn has(&self, component: Component) -> bool {
        match self.place(component) {
            // A single file never holds the tokenizer; the text encoder's place may.
            _ if component == Component::Tokenizer => self.tokenizer().is_ok(),
            Place::Single(s) => s.has(component),
            Place::TextEncoder(_) => component == Component::TextEncoder,
            Place::Model(_) | Place::Part(_) => self.folder(component).is_ok(),
        }
    }

    /// An error for the first of the components that is absent.
    ///
    /// # Errors
    /// As said; the message names the key and the flag that would give it.
    pub(crate) fn require(&self, components: impl IntoIterator<Item = Component>) -> Result<(), WeightsError> {
        for component in components {
            match component {
                Component::Tokenizer => drop(self.tokenizer()?),
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
            Place::TextEncoder(p) => p.path().to_path_buf(),
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
        if let (Place::TextEncoder(p), Component::TextEncoder) = (self.place(component), component) {
            return Ok(p.config.clone());
        }
        let path = self.folder(component)?.join(component.config_file());
        let mut json = read_json(&path)?;
        quantization::take(&path, &mut json)?;
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
        match self.place(component) {
            Place::Single(s) => return self.checkpoint_of(s, component),
            Place::TextEncoder(p) => return p.weights(),
            Place::Model(_) | Place::Part(_) => {}
        }
        let folder = self.folder(component)?;
        let checkpoint = Checkpoint::open(&folder)?;
        let config = folder.join(component.config_file());
        if config.is_file() {
            check_version(component, &checkpoint, Version::of_config(component, &read_json(&config)?), &config)?;
        }
        match component {
            Component::TextEncoder => return checkpoint.renamed(|key| Some(keys::gemma(key))),
            Component::Connectors => self.check_connectors(&checkpoint)?,
            _ => {}
        }
        Ok(checkpoint)
    }

    fn checkpoint_of(&self, single: &SingleFile, component: Component) -> Result<Checkpoint, WeightsError> {
        let checkpoint = single.checkpoint.renamed(|key| single.name(component, key))?;
        match checkpoint.is_empty() && component.weights_stem().is_some() {
            true => Err(self.absent(component)),
            false if component == Component::Connectors => self.with_projections(checkpoint),
            false if component == Component::DiffusionDecoder => official_diffusion::tensors(checkpoint),
            false if component == Component::DurationHead => keys::split_attention(checkpoint),
            false => Ok(checkpoint),
        }
    }

    /// The connectors of a file with their text projections, which the text encoder's file has where files are split.
    fn with_projections(&self, connectors: Checkpoint) -> Result<Checkpoint, WeightsError> {
        if connectors.names().any(|name| name.contains("text_proj_in.")) {
            return Ok(connectors);
        }
        match self.place(Component::TextEncoder) {
            Place::TextEncoder(p) => {
                let projections = p.projections()?;
                self.check_connectors(&projections)?;
                connectors.joined(&projections)
            }
            _ => Err(WeightsError::Config {
                path: connectors.path().to_path_buf(),
                key: "text_embedding_projection".into(),
                reason: "is not in this file, but in that of the text encoder: give text_encoders/\
                         gemma4-12b-with-proj-ltx-2.5-bf16.safetensors as `model.text_encoder` or by --text-encoder"
                    .into(),
            }),
        }
    }

    /// Refuses connectors whose header says another generation than the transformer's.
    fn check_connectors(&self, tensors: &Checkpoint) -> Result<(), WeightsError> {
        let (version, cure) = (tensors.metadata(newer::VERSION), "take transformer and connectors from one model");
        let check = |t: Transformer| t.check_header(tensors.path(), version, "holds connectors", cure);
        self.transformer().map_or(Ok(()), check)
    }

    /// A line for each part beside LTX-2.5's transformer that nothing tells from another generation's: folders of diffusers
    /// carry no `model_version`, and what saves a text encoder may drop its `gemma_version`. References load such too.
    ///
    /// # Errors
    /// The connectors cannot be opened.
    pub fn unverified(&self) -> Result<Vec<String>, WeightsError> {
        let Some(transformer) = self.transformer().filter(|t| t.version == Version::V2_5) else {
            return Ok(Vec::new());
        };
        let config = self.has(Component::TextEncoder).then(|| self.config(Component::TextEncoder)).transpose()?;
        let path = self.config_path(Component::TextEncoder);
        let encoder = config.and_then(|config| transformer.unverified_text_encoder(&path, &config));
        let connectors = self.has(Component::Connectors).then(|| self.checkpoint(Component::Connectors)).transpose()?;
        let unsaid = connectors.filter(|tensors| tensors.metadata(newer::VERSION).is_none());
        let connectors =
            unsaid.and_then(|tensors| transformer.unverified(tensors.path(), "connectors", newer::VERSION));
        let keyframes = self.lacks_keyframe_embedding().then(|| {
            let path = self.config_path(Component::Transformer);
            format!(
                "{}: no `{KEYFRAMES}`, which its configuration asks for; pipeline dfr and generated keyframes need it, \
                 nothing else does",
                path.display()
            )
        });
        Ok(encoder.into_iter().chain(connectors).chain(keyframes).collect())
    }

    /// Whether the transformer's files lack the embedding of generated keyframes, though its configuration asks for it: the first
    /// files of LTX-2.5 do. Files that cannot be opened are an error elsewhere.
    pub(crate) fn lacks_keyframe_embedding(&self) -> bool {
        let asks = self.config(Component::Transformer).is_ok_and(|config| config[USE_KEYFRAMES] == true);
        asks && self.checkpoint(Component::Transformer).is_ok_and(|tensors| !tensors.contains(KEYFRAMES))
    }

    /// Refuses tensors of single files that no component reads. The video latents' statistics beside mean and deviation are
    /// training's.
    ///
    /// # Errors
    /// The first such tensor.
    pub fn refuse_unread(&self) -> Result<(), WeightsError> {
        let places = [(None, &self.main)].into_iter().chain(self.parts.iter().map(|(c, place)| (Some(*c), place)));
        for (part, place) in places {
            match place {
                Place::Single(s) => s.refuse_unread(part)?,
                Place::TextEncoder(p) => p.refuse_unread()?,
                Place::Model(_) | Place::Part(_) => {}
            }
        }
        Ok(())
    }

    /// The model's generation, by what the transformer's configuration asks for.
    ///
    /// # Errors
    /// There is no transformer, or its keys belong to no generation.
    pub(crate) fn version(&self) -> Result<Version, WeightsError> {
        let config = self.config(Component::Transformer)?;
        Version::of_transformer(&config).ok_or_else(|| {
            let (path, key) = (self.config_path(Component::Transformer), "use_prompt_embeddings".to_string());
            let reason =
                "does not go with cross_attn_mod or use_keyframes_abs_pos_embedding: neither LTX-2.0 nor LTX-2.3 \
                          nor LTX-2.5"
                    .into();
            WeightsError::Config { path, key, reason }
        })
    }

    /// SHA-256 of a component, computed once: its configuration, and of every tensor name, element type, shape and sampled
    /// bytes; of the tokenizer, all of `tokenizer.json`. Components whose weights differ have different fingerprints; a
    /// damaged byte between the samples is not found.
    ///
    /// # Errors
    /// The component is absent, or one of its files cannot be read.
    pub fn fingerprint(&self, component: Component) -> Result<String, WeightsError> {
        let known = &self.fingerprints[component as usize];
        if let Some(hash) = known.get() {
            return Ok(hash.clone());
        }
        let mut hash = Sha256::new();
        match component {
            Component::Tokenizer => hash.update(match self.tokenizer()? {
                TokenizerFiles::Folder(folder) => {
                    let path = folder.join("tokenizer.json");
                    fs::read(&path).map_err(WeightsError::io(&path, "cannot read"))?
                }
                TokenizerFiles::Packed { tokenizer, .. } => tokenizer.read()?,
            }),
            _ => {
                fingerprint::add_text(&mut hash, &self.config(component)?.to_string());
                if component.weights_stem().is_some() {
                    fingerprint::hash_checkpoint(&self.checkpoint(component)?, &mut hash)?;
                }
            }
        }
        Ok(known.get_or_init(|| hex::encode(hash.finalize())).clone())
    }
}

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
