//! Locates the components of a model.

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
use super::place::{ModelLocation, SingleFile, check_version, place};
use super::version::{KEYFRAMES, USE_KEYFRAMES, Version};
use super::{Component, fingerprint, keys, official, official_diffusion, quantization, split, unsupported};

/// Components that replace those of the model. Each is a path, or `org/name` in the Hugging Face cache. `None`: the
/// model's own component.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Folder of Gemma-3; for LTX-2.5, the folder or file of its own text encoder.
    pub text_encoder: Option<String>,
    /// A folder with `tokenizer.json`, or that file.
    pub tokenizer: Option<String>,
    /// Folder or file of the video VAE. The file may also contain the diffusion decoder.
    pub vae: Option<String>,
    /// Folder or file of the audio VAE. The file may also contain the vocoder.
    pub audio_vae: Option<String>,
    /// Folder or file of the vocoder.
    pub vocoder: Option<String>,
    /// Folder or file of the spatial latent upsampler, [`Component::LatentUpsampler`].
    pub upsampler: Option<String>,
    /// Folder or file of the temporal latent upsampler (LTX-2.5).
    pub temporal_upsampler: Option<String>,
    /// Folder or file of the duration head (LTX-2.5).
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

/// A model whose components have been located. Weight files are opened on first use and stay open.
#[derive(Debug)]
pub struct ModelSource {
    path: PathBuf,
    main: ModelLocation,
    parts: BTreeMap<Component, ModelLocation>,
    /// Opened checkpoints by component. They are cached because tensors are requested one by one, and a header with
    /// thousands of tensors takes milliseconds to parse.
    opened: [OnceLock<Checkpoint>; Component::ALL.len()],
    /// Cached results of [`ModelSource::fingerprint`], by component.
    fingerprints: [OnceLock<String>; Component::ALL.len()],
}

impl ModelSource {
    /// Finds a model: a diffusers folder, one of Lightricks' files, or `org/name` (or `org/name/file`) in the local
    /// Hugging Face cache. If the model is a transformer in a repository of split files, the other components come from
    /// the same repository.
    ///
    /// # Errors
    /// Returns an error if the model or an override does not exist, or if a header cannot be read. A missing component
    /// is an error only when it is requested.
    pub fn open(model: &str, overrides: &Overrides) -> Result<Self, WeightsError> {
        Self::open_in(model, overrides, &HubCache::from_env())
    }

    /// Like [`ModelSource::open`], with the Hugging Face cache `hub`.
    ///
    /// # Errors
    /// Fails for the same reasons as [`ModelSource::open`].
    pub fn open_in(model: &str, overrides: &Overrides, hub: &HubCache) -> Result<Self, WeightsError> {
        let path = split::transformer(locate(model, hub)?)?;
        let main = place(&path, None)?;
        let mut parts = BTreeMap::new();
        for component in Component::ALL {
            let named = overrides.get(component).map(|name| locate(name, hub)).transpose()?;
            // An explicit video VAE also determines the decoder.
            let decoder_named = component == Component::DiffusionDecoder && overrides.vae.is_some();
            let file = match named {
                None if !decoder_named => split::beside(&path, component)?,
                named => named,
            };
            if let Some(path) = file {
                parts.insert(component, place(&path, Some(component))?);
            }
        }
        let source = ModelSource { path, main, parts, opened: Default::default(), fingerprints: Default::default() };
        source.refuse_newer()?;
        source.check_text_encoder()?;
        Ok(source)
    }

    /// Returns an error for a folder of an unsupported model version; single files are checked when they are opened.
    fn refuse_newer(&self) -> Result<(), WeightsError> {
        if let ModelLocation::Model(folder) = &self.main {
            let index = folder.join("model_index.json");
            if index.is_file() {
                unsupported::refuse_index(&index, &read_json(&index)?)?;
            }
        }
        for component in Component::ALL.into_iter().filter(|c| *c != Component::Tokenizer) {
            let Ok(folder) = self.folder(component) else { continue };
            let path = folder.join(component.config_file());
            // A file that is not JSON is reported where it is read.
            if let Ok(config) = read_json(&path) {
                unsupported::refuse_config(&path, component, &config)?;
            }
        }
        Ok(())
    }

    /// Returns the model's folder or file. For a repository of split files, it is the transformer's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns an error if the transformer was not trained with this text encoder.
    fn check_text_encoder(&self) -> Result<(), WeightsError> {
        // An unreadable configuration is reported where it is read.
        let config = self.has(Component::TextEncoder).then(|| self.config(Component::TextEncoder).ok()).flatten();
        let Some((transformer, config)) = self.transformer().zip(config) else { return Ok(()) };
        let own = !self.parts.contains_key(&Component::TextEncoder);
        transformer.check_text_encoder(&self.config_path(Component::TextEncoder), &config, own)
    }

    /// Returns the transformer; `None` if there is none or its model version is unknown.
    pub(super) fn transformer(&self) -> Option<Transformer> {
        let gemma = match self.place(Component::Transformer) {
            ModelLocation::Single(s) => s.checkpoint.metadata(GEMMA_SOURCE).map(String::from),
            _ => None,
        };
        let version = self.version().ok()?;
        Some(Transformer { path: self.config_path(Component::Transformer), version, gemma })
    }

    /// Returns the location of a component. The audio VAE's file may also contain the vocoder, and the video VAE's the
    /// diffusion decoder.
    fn place(&self, component: Component) -> &ModelLocation {
        let companion = match component {
            Component::Vocoder => Some(Component::AudioVae),
            Component::DiffusionDecoder => Some(Component::Vae),
            _ => None,
        };
        let holds = |place: &&ModelLocation| matches!(place, ModelLocation::Single(s) if s.has(component));
        let beside = || self.parts.get(&companion?).filter(holds);
        let own = self.parts.get(&component);
        own.or_else(|| Some(&self.main).filter(holds)).or_else(beside).unwrap_or(&self.main)
    }

    fn absent(&self, component: Component) -> WeightsError {
        let path = match self.place(component) {
            ModelLocation::Model(p) | ModelLocation::Part(p) => p.clone(),
            ModelLocation::Single(s) => s.checkpoint.path().to_path_buf(),
            ModelLocation::TextEncoder(p) => p.path().to_path_buf(),
        };
        WeightsError::NoComponent { path, component }
    }

    /// Returns a component's folder.
    ///
    /// The tokenizer is also looked for in and next to the text encoder's folder, as in Google's repository.
    ///
    /// # Errors
    /// Returns an error if the component is missing or inside a single file.
    pub fn folder(&self, component: Component) -> Result<PathBuf, WeightsError> {
        let holds = |dir: &Path| match component {
            Component::Tokenizer => dir.join("tokenizer.json").is_file(),
            _ => dir.join(component.config_file()).is_file(),
        };
        let candidates: Vec<PathBuf> = match self.place(component) {
            ModelLocation::Part(dir) => vec![dir.clone()],
            ModelLocation::Model(dir) => vec![dir.join(component.folder())],
            ModelLocation::Single(_) | ModelLocation::TextEncoder(_) => vec![],
        };
        let mut found = candidates.into_iter().find(|d| holds(d));
        if found.is_none() && component == Component::Tokenizer && !self.parts.contains_key(&component) {
            found = match self.place(Component::TextEncoder) {
                ModelLocation::Part(dir) => {
                    let beside = dir.parent().map(|p| p.join(component.folder()));
                    [Some(dir.clone()), beside].into_iter().flatten().find(|d| holds(d))
                }
                ModelLocation::Model(dir) => {
                    [component, Component::TextEncoder].map(|c| dir.join(c.folder())).into_iter().find(|d| holds(d))
                }
                ModelLocation::Single(_) | ModelLocation::TextEncoder(_) => None,
            };
        }
        found.ok_or_else(|| self.absent(component))
    }

    /// Returns the tokenizer's files.
    ///
    /// # Errors
    /// Returns an error if there is no tokenizer.
    pub fn tokenizer(&self) -> Result<TokenizerFiles, WeightsError> {
        let packed = match self.place(Component::TextEncoder) {
            ModelLocation::TextEncoder(p) if !self.parts.contains_key(&Component::Tokenizer) => p.tokenizer()?,
            _ => None,
        };
        packed.map_or_else(|| self.folder(Component::Tokenizer).map(TokenizerFiles::Folder), Ok)
    }

    /// Whether the model has a component, its own or an override. In a folder, only the configuration file must exist
    /// (for the tokenizer, `tokenizer.json`); weight files are not searched for.
    pub fn has(&self, component: Component) -> bool {
        match self.place(component) {
            // A single file never contains the tokenizer, but the text encoder's location may.
            _ if component == Component::Tokenizer => self.tokenizer().is_ok(),
            ModelLocation::Single(s) => s.has(component),
            ModelLocation::TextEncoder(_) => component == Component::TextEncoder,
            ModelLocation::Model(_) | ModelLocation::Part(_) => self.folder(component).is_ok(),
        }
    }

    /// Checks that the model has these components.
    ///
    /// # Errors
    /// Returns an error for the first missing component. The error contains the YAML key and the flag that set the
    /// component.
    pub fn require(&self, components: impl IntoIterator<Item = Component>) -> Result<(), WeightsError> {
        for component in components {
            match component {
                Component::Tokenizer => drop(self.tokenizer()?),
                c if self.has(c) => {}
                c => return Err(self.absent(c)),
            }
        }
        Ok(())
    }

    /// Returns the path of a component's configuration, for error messages.
    pub fn config_path(&self, component: Component) -> PathBuf {
        match self.place(component) {
            ModelLocation::Single(s) => s.checkpoint.path().to_path_buf(),
            ModelLocation::TextEncoder(p) => p.path().to_path_buf(),
            ModelLocation::Model(_) | ModelLocation::Part(_) => match self.folder(component) {
                Ok(dir) => dir.join(component.config_file()),
                Err(_) => self.path.join(component.folder()).join(component.config_file()),
            },
        }
    }

    /// Returns a component's configuration with the keys of the diffusers layout.
    ///
    /// # Errors
    /// Returns an error if the component is missing, if the file is not a JSON object, or if the network is not
    /// supported.
    pub fn config(&self, component: Component) -> Result<Value, WeightsError> {
        if let ModelLocation::Single(s) = self.place(component) {
            if !self.has(component) {
                return Err(self.absent(component));
            }
            let path = s.checkpoint.path();
            return official::component_config(path, &s.config, component, &self.checkpoint_of(s, component)?);
        }
        if let (ModelLocation::TextEncoder(p), Component::TextEncoder) = (self.place(component), component) {
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

    /// Returns a component's tensors under the names that this program uses. The files are opened once.
    ///
    /// # Errors
    /// Returns an error if the component is missing or has no weights, or if its files are damaged.
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
            ModelLocation::Single(s) => return self.checkpoint_of(s, component),
            ModelLocation::TextEncoder(p) => return p.weights(),
            ModelLocation::Model(_) | ModelLocation::Part(_) => {}
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

    /// Adds the text projections to the connectors of a file. In a repository of split files, the projections are in
    /// the text encoder's file.
    fn with_projections(&self, connectors: Checkpoint) -> Result<Checkpoint, WeightsError> {
        if connectors.names().any(|name| name.contains("text_proj_in.")) {
            return Ok(connectors);
        }
        match self.place(Component::TextEncoder) {
            ModelLocation::TextEncoder(p) => {
                let projections = p.projections()?;
                self.check_connectors(&projections)?;
                connectors.joined(&projections)
            }
            _ => Err(WeightsError::Config {
                path: connectors.path().to_path_buf(),
                key: "text_embedding_projection".into(),
                reason:
                    "is not in this file, but in the text encoder's file; set `model.text_encoder` or --text-encoder to \
                         text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors"
                        .into(),
            }),
        }
    }

    /// Returns an error if the connectors' header states a model version that does not fit the transformer.
    fn check_connectors(&self, tensors: &Checkpoint) -> Result<(), WeightsError> {
        let (version, cure) =
            (tensors.metadata(unsupported::VERSION), "use the transformer and connectors of the same model");
        let check = |t: Transformer| t.check_header(tensors.path(), version, "holds connectors", cure);
        self.transformer().map_or(Ok(()), check)
    }

    /// Returns a warning for each component that cannot be verified to belong to LTX-2.5: diffusers folders contain no
    /// `model_version`, and a re-saved text encoder may lack its `gemma_version`. The reference implementations load
    /// these without a check.
    ///
    /// # Errors
    /// Returns an error if the connectors cannot be opened.
    pub fn unverified(&self) -> Result<Vec<String>, WeightsError> {
        let Some(transformer) = self.transformer().filter(|t| t.version == Version::V2_5) else {
            return Ok(Vec::new());
        };
        let config = self.has(Component::TextEncoder).then(|| self.config(Component::TextEncoder)).transpose()?;
        let path = self.config_path(Component::TextEncoder);
        let encoder = config.and_then(|config| transformer.unverified_text_encoder(&path, &config));
        let connectors = self.has(Component::Connectors).then(|| self.checkpoint(Component::Connectors)).transpose()?;
        let unsaid = connectors.filter(|tensors| tensors.metadata(unsupported::VERSION).is_none());
        let connectors =
            unsaid.and_then(|tensors| transformer.unverified(tensors.path(), "connectors", unsupported::VERSION));
        let keyframes = self.lacks_keyframe_embedding().then(|| {
            let path = self.config_path(Component::Transformer);
            format!(
                "{}: `{KEYFRAMES}` is missing, although the configuration requires it; only pipeline dfr and generated \
                 keyframes need it",
                path.display()
            )
        });
        Ok(encoder.into_iter().chain(connectors).chain(keyframes).collect())
    }

    /// Whether the transformer's files lack the embedding of generated keyframes although its configuration requires
    /// it, as in the first files of LTX-2.5. Files that cannot be opened are reported elsewhere.
    pub fn lacks_keyframe_embedding(&self) -> bool {
        let asks = self.config(Component::Transformer).is_ok_and(|config| config[USE_KEYFRAMES] == true);
        asks && self.checkpoint(Component::Transformer).is_ok_and(|tensors| !tensors.contains(KEYFRAMES))
    }

    /// Checks that components read all tensors of the model's single files. The video latents' training statistics
    /// other than mean and deviation are not checked.
    ///
    /// # Errors
    /// Returns an error for the first unread tensor.
    pub fn refuse_unread(&self) -> Result<(), WeightsError> {
        let places = [(None, &self.main)].into_iter().chain(self.parts.iter().map(|(c, place)| (Some(*c), place)));
        for (part, place) in places {
            match place {
                ModelLocation::Single(s) => s.refuse_unread(part)?,
                ModelLocation::TextEncoder(p) => p.refuse_unread()?,
                ModelLocation::Model(_) | ModelLocation::Part(_) => {}
            }
        }
        Ok(())
    }

    /// Returns the model version, from the transformer's configuration.
    ///
    /// # Errors
    /// Returns an error if there is no transformer, or if its keys match no model version.
    pub fn version(&self) -> Result<Version, WeightsError> {
        let config = self.config(Component::Transformer)?;
        Version::of_transformer(&config).ok_or_else(|| {
            let (path, key) = (self.config_path(Component::Transformer), "use_prompt_embeddings".to_string());
            let reason =
                "does not match cross_attn_mod or use_keyframes_abs_pos_embedding: the model is neither LTX-2.0 nor LTX-2.3 \
                          nor LTX-2.5"
                    .into();
            WeightsError::Config { path, key, reason }
        })
    }

    /// Returns the SHA-256 of a component, which is computed once. It covers the configuration and every tensor's name,
    /// element type, shape and sampled bytes; for the tokenizer, it covers `tokenizer.json`. A changed byte between the
    /// samples is not detected.
    ///
    /// # Errors
    /// Returns an error if the component is missing or one of its files cannot be read.
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

/// Resolves the path of a model or component.
fn locate(name: &str, hub: &HubCache) -> Result<PathBuf, WeightsError> {
    let path = Path::new(name);
    if path.exists() {
        return Ok(path.to_path_buf());
    }
    if HubCache::is_name(name) {
        return hub.resolve(name);
    }
    let looked =
        "no such file or folder; a model is a diffusers folder, a .safetensors or .gguf file, or org/name".into();
    Err(WeightsError::NotFound { name: name.into(), looked })
}
