//! Locates the components of a model.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::checkpoint::{self, Checkpoint, read_json};
use super::error::WeightsError;
use super::hub::HubCache;
use super::packed::TokenizerFiles;
use super::pairing::{GEMMA_SOURCE, Transformer};
use super::place::{ModelLocation, SingleFile, check_version, is_diffusers, place};
use super::published::GEMMA_3;
use super::quantize::QuantizedForm;
use super::split::{Choice, SplitFolder};
use super::version::{KEYFRAMES, USE_KEYFRAMES, Version};
use super::{
    Component, derived, fingerprint, keys, official, official_diffusion, quantization, text_encoders, unsupported,
};

/// Components that replace those of the model, and the variant of its files. A component is a path, or `org/name` in
/// the Hugging Face cache. `None`: the model's own component.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Folder or file of Gemma 3 or, for LTX-2.5, of LTX-2.5's text encoder.
    pub text_encoder: Option<String>,
    /// A folder with `tokenizer.json`, or that file.
    pub tokenizer: Option<String>,
    /// Folder or file of the connectors. The file may lack the blocks or the text projections, which then come from the
    /// transformer's or the text encoder's file.
    pub connectors: Option<String>,
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
    /// Parts of a file name, separated by commas or spaces, such as `fp8` or `distilled, Q4_K_M`. In a folder of single
    /// files, the parts select the transformer whose name has all of them; for other components, files whose names have
    /// more of the parts are preferred. In a diffusers folder, the parts select the variant of the weights. `None`:
    /// unquantized files are preferred.
    pub variant: Option<String>,
}

impl Overrides {
    fn get(&self, component: Component) -> Option<&str> {
        macro_rules! get {
            ($($field:ident $component:ident $flag:literal),*) => {
                match component {
                    $(Component::$component => self.$field.as_deref(),)*
                    _ => None,
                }
            };
        }
        crate::for_each_override!(get)
    }
}

/// A model whose components have been located. Weight files are opened on first use and stay open.
#[derive(Debug)]
pub struct ModelSource {
    path: PathBuf,
    main: ModelLocation,
    parts: BTreeMap<Component, ModelLocation>,
    /// Components for which the model's folder contains several files, and the names of these files.
    ambiguous: BTreeMap<Component, Vec<String>>,
    /// Optional components whose file in the model's folder cannot be opened, and the path of that file.
    damaged: BTreeMap<Component, PathBuf>,
    /// Folder of single files in which the components were searched.
    folder: Option<PathBuf>,
    variant: Option<String>,
    /// Command that downloads the model. `None`: the model is not from the Hugging Face cache.
    pull_command: Option<String>,
    /// Opened checkpoints by component. They are cached because tensors are requested one by one, and a header with
    /// thousands of tensors takes milliseconds to parse.
    opened: [OnceLock<Checkpoint>; Component::ALL.len()],
    /// Cached results of [`ModelSource::fingerprint`], by component.
    fingerprints: [OnceLock<String>; Component::ALL.len()],
}

impl ModelSource {
    /// Finds a model: a diffusers folder, a folder of single files, one of Lightricks' files, or `org/name` (or
    /// `org/name/file`) in the local Hugging Face cache. The components that a transformer's file lacks come from the
    /// folder of single files that contains it; the text encoder of LTX-2.0 and LTX-2.3 also from the cache
    /// ([`GEMMA_3`]).
    ///
    /// # Errors
    /// Returns an error if the model or an override does not exist, if there are several transformers or none of the
    /// requested variant, or if a header cannot be read. A missing component, or a damaged file of
    /// an optional one, is an error only when it is requested.
    pub fn open(model: &str, overrides: &Overrides) -> Result<Self, WeightsError> {
        Self::open_in(model, overrides, &HubCache::from_env())
    }

    /// Sets the command that errors about missing components name.
    pub fn pulled_by(mut self, command: String) -> Self {
        self.pull_command = Some(command);
        self
    }

    /// Opens a model like [`ModelSource::open`], with the Hugging Face cache `hub`.
    ///
    /// # Errors
    /// Fails for the same reasons as [`ModelSource::open`].
    pub fn open_in(model: &str, overrides: &Overrides, hub: &HubCache) -> Result<Self, WeightsError> {
        let (path, variant) = (locate(model, hub)?, overrides.variant.clone());
        let split = if is_diffusers(&path) { None } else { SplitFolder::find(&path, variant.as_deref())? };
        let path = split.as_ref().map_or(path, |split| split.transformer().to_path_buf());
        let main = place(&path, None)?;
        let mut source = ModelSource {
            path,
            main,
            parts: BTreeMap::new(),
            ambiguous: BTreeMap::new(),
            damaged: BTreeMap::new(),
            folder: split.as_ref().map(|split| split.root().to_path_buf()),
            variant,
            pull_command: None,
            opened: Default::default(),
            fingerprints: Default::default(),
        };
        source.check_variant(split.as_ref())?;
        for component in Component::ALL {
            if let Some(name) = overrides.get(component) {
                source.parts.insert(component, place(&locate(name, hub)?, Some(component))?);
            }
        }
        if let Some(split) = split {
            source.add_parts(&split, overrides)?;
        }
        source.add_cached_gemma_3(hub)?;
        source.refuse_newer()?;
        source.check_text_encoder()?;
        Ok(source)
    }

    /// Returns an error if no file has the requested variant.
    fn check_variant(&self, split: Option<&SplitFolder>) -> Result<(), WeightsError> {
        let Some(variant) = &self.variant else { return Ok(()) };
        let folder = match (split, &self.main) {
            (Some(split), _) => return split.check_variant(),
            (None, ModelLocation::Model(folder)) => folder,
            _ => &self.path,
        };
        let folders = Component::ALL.map(|component| folder.join(component.folder()));
        let variants: BTreeSet<String> = folders.iter().flat_map(|folder| checkpoint::variants(folder)).collect();
        if checkpoint::variant_parts(variant).all(|part| variants.contains(part)) {
            return Ok(());
        }
        let files = variants.into_iter().collect();
        Err(WeightsError::NoVariant { path: folder.clone(), variant: variant.clone(), files })
    }

    /// Adds the components from a folder of single files that neither the transformer's file nor an override contains.
    fn add_parts(&mut self, split: &SplitFolder, overrides: &Overrides) -> Result<(), WeightsError> {
        let version = self.version().ok();
        for component in Component::ALL.into_iter().filter(|component| component.weights_stem().is_some()) {
            // An explicit video VAE also determines the decoder, and an audio VAE's file usually includes the vocoder.
            let is_given = self.parts.contains_key(&component)
                || component == Component::DiffusionDecoder && overrides.vae.is_some()
                || component == Component::Vocoder && self.has(Component::Vocoder);
            let is_whole = match (&self.main, component) {
                (ModelLocation::Single(s), Component::Connectors) => {
                    let has = |is_projection: bool| {
                        let names = s.checkpoint.names().filter_map(|key| s.name(component, key));
                        names.into_iter().any(|name| keys::is_projection_name(&name) == is_projection)
                    };
                    has(true) && has(false)
                }
                (ModelLocation::Single(s), component) => s.has(component),
                _ => false,
            };
            if is_given || is_whole {
                continue;
            }
            match split.part(component, version) {
                Choice::None => {}
                Choice::One(file) => match place(&file, Some(component)) {
                    Ok(place) => drop(self.parts.insert(component, place)),
                    Err(_) if component.is_optional() => drop(self.damaged.insert(component, file)),
                    Err(error) => return Err(error),
                },
                Choice::Several(files) => drop(self.ambiguous.insert(component, files)),
            }
        }
        Ok(())
    }

    /// Adds Gemma 3 from the Hugging Face cache if a single file of LTX-2.0 or LTX-2.3 has no text encoder.
    fn add_cached_gemma_3(&mut self, hub: &HubCache) -> Result<(), WeightsError> {
        let is_single = matches!(self.main, ModelLocation::Single(_));
        let is_absent = is_single && !self.has(Component::TextEncoder);
        let needs_gemma_3 = || matches!(self.version(), Ok(Version::V2_0 | Version::V2_3));
        if is_absent
            && self.ambiguity(Component::TextEncoder).is_none()
            && needs_gemma_3()
            && let Ok(folder) = hub.resolve(GEMMA_3)
        {
            self.parts.insert(Component::TextEncoder, place(&folder, Some(Component::TextEncoder))?);
        }
        Ok(())
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

    /// Returns the model's folder or file. For a folder of single files, it is the transformer's file.
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

    /// Returns the transformer; `None` if the model has no transformer or its model version is unknown.
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

    /// Returns an error if the model's folder contains several files of a component, none of which is preferred, or an
    /// optional component's file that cannot be opened. `None`: neither is the case.
    pub fn ambiguity(&self, component: Component) -> Option<WeightsError> {
        if let Some(file) = self.damaged.get(&component) {
            return place(file, Some(component)).err();
        }
        let (files, path) = (self.ambiguous.get(&component)?.clone(), self.folder.clone()?);
        Some(WeightsError::Ambiguous { path, component, files })
    }

    fn absent(&self, component: Component) -> WeightsError {
        if let Some(error) = self.ambiguity(component) {
            return error;
        }
        let path = match self.place(component) {
            ModelLocation::Model(p) | ModelLocation::Part(p) => p.clone(),
            ModelLocation::Single(s) => s.checkpoint.path().to_path_buf(),
            ModelLocation::TextEncoder(p) => p.path().to_path_buf(),
        };
        WeightsError::NoComponent { path, component, command: self.pull_command.clone() }
    }

    /// Returns a component's folder.
    ///
    /// The tokenizer may also be inside the text encoder's folder, as in Google's repository, next to that folder, or
    /// next to the text encoder's file.
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
                ModelLocation::TextEncoder(p) => {
                    let folder = p.path().parent().unwrap_or(Path::new(""));
                    let beside = [Some(folder), folder.parent()].into_iter().flatten();
                    let beside = beside.map(|folder| folder.join(component.folder()));
                    [folder.to_path_buf()].into_iter().chain(beside).find(|d| holds(d))
                }
                ModelLocation::Single(_) => None,
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

    /// Returns whether the model has a component, its own or an override. In a folder, only the configuration file must
    /// exist (for the tokenizer, `tokenizer.json`); weight files are not searched for.
    pub fn has(&self, component: Component) -> bool {
        match self.place(component) {
            // A single file never contains the tokenizer, but the text encoder's location may.
            _ if component == Component::Tokenizer => self.tokenizer().is_ok(),
            // The transformer's file may contain a part of the connectors.
            _ if self.ambiguous.contains_key(&component) || self.damaged.contains_key(&component) => false,
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
            let tensors = self.checkpoint_of(s, component)?;
            let config =
                if component == Component::Connectors { &self.connectors_config(s, &tensors)? } else { &s.config };
            return official::component_config(s.checkpoint.path(), config, component, &tensors);
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

    /// Returns the names of the linear weights of a component's layers that its file stores in another form than
    /// int8-convrot; `None` if it stores none of them as int8-convrot. A file that cannot be opened is reported
    /// elsewhere.
    pub fn non_convrot_weights(&self, component: Component) -> Option<BTreeSet<String>> {
        let tensors = self.checkpoint(component).ok()?;
        let layers = if component == Component::TextEncoder { "layers" } else { "transformer_blocks" };
        let is_linear = |name: &str, shape: &[usize]| {
            name.ends_with(".weight") && shape.len() == 2 && name.split('.').any(|module| module == layers)
        };
        let linear = tensors.headers().filter(|(name, _, shape)| is_linear(name, shape));
        let (rotated, others): (Vec<_>, Vec<_>) =
            linear.partition(|(_, form, _)| *form == QuantizedForm::Int8Convrot.name());
        (!rotated.is_empty()).then(|| others.into_iter().map(|(name, ..)| name.to_string()).collect())
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
        let checkpoint = Checkpoint::open_variant(&folder, self.variant.as_deref())?;
        unsupported::reject_unrecognized_quantization(&checkpoint)?;
        let config = folder.join(component.config_file());
        if config.is_file() {
            check_version(component, &checkpoint, Version::of_config(component, &read_json(&config)?), &config)?;
        }
        match component {
            Component::TextEncoder => return checkpoint.renamed(|key| Some(text_encoders::tensor_name(key))),
            Component::Connectors => self.check_connectors(&checkpoint)?,
            _ => {}
        }
        Ok(checkpoint)
    }

    fn checkpoint_of(&self, single: &SingleFile, component: Component) -> Result<Checkpoint, WeightsError> {
        let checkpoint = single.checkpoint.renamed(|key| single.name(component, key))?;
        match checkpoint.is_empty() && component.weights_stem().is_some() {
            true => Err(self.absent(component)),
            false if component == Component::Connectors => self.connectors(checkpoint),
            false if component == Component::DiffusionDecoder => official_diffusion::tensors(checkpoint),
            false if component == Component::DurationHead => keys::split_attention(checkpoint),
            false => Ok(checkpoint),
        }
    }

    /// Combines the connectors' blocks and text projections, which may be in different files. Each is taken from the
    /// first of these that contains it: `own`, the transformer's file, the text encoder's file.
    fn connectors(&self, own: Checkpoint) -> Result<Checkpoint, WeightsError> {
        let path = own.path().to_path_buf();
        let mut sources = vec![own];
        if let ModelLocation::Single(s) = &self.main {
            sources.push(s.checkpoint.renamed(|key| s.name(Component::Connectors, key))?);
        }
        if let ModelLocation::TextEncoder(p) = self.place(Component::TextEncoder) {
            sources.push(p.projections()?);
        }
        let of_kind = |is_projection: bool| {
            let has = |source: &&Checkpoint| source.names().any(|n| keys::is_projection_name(n) == is_projection);
            let keep = |name: &str| (keys::is_projection_name(name) == is_projection).then(|| name.to_string());
            sources.iter().find(has).map(|source| source.renamed(keep)).transpose()
        };
        let missing = |key: &str, reason: &str| {
            let missing = WeightsError::Config { path: path.clone(), key: key.into(), reason: reason.into() };
            Err(self.ambiguity(Component::Connectors).unwrap_or(missing))
        };
        let projections = match of_kind(true)? {
            Some(projections) => projections,
            None if self.transformer().is_some_and(|t| t.version == Version::V2_5) => {
                return missing(
                    "text_embedding_projection",
                    "is not in this file, but in the text encoder's file; set `model.text_encoder` or --text-encoder to \
                     text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors",
                );
            }
            None => {
                return missing(
                    "text_embedding_projection",
                    "is not in this file; set `model.connectors` or --connectors to a file with it, such as \
                     text_encoders/ltx-2.3_text_projection_bf16.safetensors",
                );
            }
        };
        let Some(blocks) = of_kind(false)? else {
            return missing(
                "video_embeddings_connector",
                "is neither in this file, which contains text projections, nor in the transformer's file; use a \
                 transformer's file with connectors, or a file of connectors with their blocks",
            );
        };
        for part in [&blocks, &projections] {
            self.check_connectors(part)?;
        }
        let connectors = blocks.joined(&projections)?;
        if let Some(transformer) = self.transformer() {
            let version = if transformer.version == Version::V2_0 { Version::V2_0 } else { Version::V2_3 };
            check_version(Component::Connectors, &connectors, Some(version), &transformer.path)?;
        }
        Ok(connectors)
    }

    /// Returns the configuration that describes the connectors, from the header of their file or of the transformer's
    /// file. If neither header has one, it is derived from tensors.
    fn connectors_config(&self, own: &SingleFile, connectors: &Checkpoint) -> Result<Value, WeightsError> {
        let has_section = |s: &SingleFile| s.config["transformer"].is_object();
        let main = match &self.main {
            ModelLocation::Single(main) if has_section(main) => Some(&**main),
            _ => None,
        };
        let described = if has_section(own) { Some(own) } else { main };
        let mut section = described.map_or_else(|| json!({}), |s| s.config["transformer"].clone());
        if !described.is_some_and(|s| s.has_config) {
            derived::add_connector_keys(&mut section, connectors)?;
        }
        Ok(json!({"transformer": section}))
    }

    /// Returns an error if the connectors' header states a model version that does not fit the transformer.
    fn check_connectors(&self, tensors: &Checkpoint) -> Result<(), WeightsError> {
        let (version, advice) =
            (tensors.metadata(unsupported::VERSION), "use the transformer and connectors of the same model");
        let check = |t: Transformer| t.check_header(tensors.path(), version, "holds connectors", advice);
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

    /// Returns whether the transformer's files lack the embedding of generated keyframes although its configuration
    /// requires it, as in the first files of LTX-2.5. Files that cannot be opened are reported elsewhere.
    pub fn lacks_keyframe_embedding(&self) -> bool {
        let asks = self.config(Component::Transformer).is_ok_and(|config| config[USE_KEYFRAMES] == true);
        asks && self.checkpoint(Component::Transformer).is_ok_and(|tensors| !tensors.contains(KEYFRAMES))
    }

    /// Checks that every tensor of the model's single files is read by a component. Unused statistics of latents are
    /// ignored.
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
                TokenizerFiles::Packed { tokenizer: bytes, .. }
                | TokenizerFiles::SentencePiece { model: bytes, .. } => bytes.read()?,
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
    let reason = "no such file or folder; a model is a diffusers folder, a folder of single files, a .safetensors or \
                  .gguf file, or org/name"
        .into();
    Err(WeightsError::NotFound { name: name.into(), reason, command: None })
}
