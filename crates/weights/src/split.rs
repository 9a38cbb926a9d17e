//! Folders of single files, such as a downloaded repository or ComfyUI's model folder: each component is a separate
//! file. Files are recognized by their tensors, wherever they are in the folder. Names only decide between several
//! files of the same component.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::fs;
use std::path::{self, Path, PathBuf};

use serde_json::Value;

use super::checkpoint::{Checkpoint, is_shard, read_json, variant_parts};
use super::component::Component;
use super::error::WeightsError;
use super::keys::{SingleFileKeys, TRANSFORMER};
use super::packed::GEMMA_CONFIG;
use super::text_encoders::{Family, LANGUAGE_MODEL};
use super::unsupported::VERSION;
use super::version::Version;

/// Names of folders that contain transformers, in lower case.
const TRANSFORMER_FOLDERS: [&str; 3] = ["diffusion_models", "unet", "checkpoints"];

/// Names of folders that contain other components, in lower case.
const PART_FOLDERS: [&str; 7] =
    ["text_encoders", "text_encoder", "clip", "vae", "latent_upscale_models", "model_patches", "split_files"];

/// Maximum number of levels of subfolders that are searched, and of folders between a transformer's file and the folder
/// of single files.
const DEPTH: usize = 3;

/// `mid_channels` of LTX-Video's spatial upsampler; LTX-2's has twice as many.
const LTX_VIDEO_UPSAMPLER_CHANNELS: usize = 512;

/// Training of a transformer that a file name indicates: the full model (`dev`) or the distilled one. Files made for
/// one of them do not fit the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Training {
    Dev,
    Distilled,
}

/// A weight file, or the folder of a text encoder.
#[derive(Debug)]
struct Candidate {
    path: PathBuf,
    /// Path relative to the searched folder, for errors.
    name: String,
    /// Normalized file name, see [`normalized`].
    words: String,
    components: BTreeSet<Component>,
    /// Whether weights are stored in fewer bits than bf16.
    is_quantized: bool,
    /// Whether the file contains a convolutional video decoder.
    has_conv_decoder: bool,
    /// Model versions that the file can belong to. Empty: all.
    versions: Vec<Version>,
    /// Model version in the name of a folder that contains the file, if the file itself states none.
    folder_version: Option<Version>,
    training: Option<Training>,
}

/// A folder of single files with its transformer.
#[derive(Debug)]
pub(super) struct SplitFolder {
    root: PathBuf,
    transformer: PathBuf,
    training: Option<Training>,
    variant: Option<String>,
    /// Files that do not contain a transformer.
    parts: Vec<Candidate>,
}

/// Files of a component in a folder.
#[derive(Debug)]
pub(super) enum Choice {
    None,
    One(PathBuf),
    /// Paths of several files, relative to the folder, none of which is preferred.
    Several(Vec<String>),
}

impl SplitFolder {
    /// Finds the transformer in the folder `path`, or the folder that contains the transformer's file `path`. `None`:
    /// the folder has no transformer, or the file is not a weight file.
    ///
    /// # Errors
    /// Returns an error if there are several transformers, or none that `variant` selects.
    pub(super) fn find(path: &Path, variant: Option<&str>) -> Result<Option<Self>, WeightsError> {
        let (transformer, found) = if path.is_file() {
            if !is_weight_file(path) {
                return Ok(None);
            }
            (path.to_path_buf(), None)
        } else {
            let found = files(path, Searched::All, path);
            let Some(chosen) = choose_transformer(path, &found, variant)? else { return Ok(None) };
            (chosen.path.clone(), Some(found))
        };
        // A relative path may lack its parents.
        let file = path::absolute(&transformer).unwrap_or_else(|_| transformer.clone());
        let own = file.parent().unwrap_or(Path::new(""));
        let is_contained = found.is_some() && !is_transformer_folder(path);
        let (root, mut parts) = match (root_of(&file).filter(|_| !is_contained), found) {
            (Some(root), _) => (root.into(), files(root, Searched::Parts, own)),
            (None, Some(found)) => (path.into(), found),
            (None, None) => (own.into(), files(own, Searched::None, own)),
        };
        parts.retain(|file| !file.components.contains(&Component::Transformer));
        let (training, variant) = (training(&words_of(&transformer)), variant.map(String::from));
        Ok(Some(SplitFolder { root, transformer, training, variant, parts }))
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn transformer(&self) -> &Path {
        &self.transformer
    }

    /// Returns an error if a part of `model.variant` occurs in no file name of this folder, including the transformer's.
    pub(super) fn check_variant(&self) -> Result<(), WeightsError> {
        let Some(variant) = &self.variant else { return Ok(()) };
        let transformer = words_of(&self.transformer);
        let has =
            |word: String| self.parts.iter().any(|file| file.words.contains(&word)) || transformer.contains(&word);
        if words(variant).all(has) {
            return Ok(());
        }
        let files = self.parts.iter().map(|file| file.name.clone()).collect();
        Err(WeightsError::NoVariant { path: self.root.clone(), variant: variant.clone(), files })
    }

    /// Finds the file of a component for a transformer of this version. Prefers, in this order: files that are not in a
    /// folder named after another version, files for the transformer's training (full or distilled), files with the
    /// most words of the variant, unquantized files, video VAEs with a convolutional decoder, and x2 upsamplers. Of
    /// unquantized files whose names differ only in a version number at the end, the latest is used.
    pub(super) fn part(&self, component: Component, version: Option<Version>) -> Choice {
        let fits = |file: &Candidate| {
            file.versions.is_empty() || version.is_none_or(|version| file.versions.contains(&version))
        };
        let is_one = |file: &&Candidate| file.components.contains(&component) && fits(file);
        let mut found: Vec<&Candidate> = self.parts.iter().filter(is_one).collect();
        prefer(&mut found, |file| version.is_none() || file.folder_version.is_none_or(|own| Some(own) == version));
        let other =
            |file: &Candidate| file.training.is_some() && self.training.is_some_and(|own| file.training != Some(own));
        if component == Component::Connectors {
            // Connectors are trained with the transformer.
            found.retain(|file| !other(file));
        }
        prefer(&mut found, |file| file.training.is_some() && file.training == self.training);
        prefer(&mut found, |file| !other(file));
        if let Some(variant) = &self.variant {
            let most = found.iter().map(|file| matches(&file.words, variant)).max();
            found.retain(|file| Some(matches(&file.words, variant)) == most);
        }
        prefer(&mut found, |file| !file.is_quantized);
        if component == Component::Vae {
            prefer(&mut found, |file| file.has_conv_decoder);
        }
        if component == Component::LatentUpsampler {
            prefer(&mut found, |file| file.words.contains("-x2-"));
        }
        let names: BTreeSet<&str> = found.iter().map(|file| &*file.words).collect();
        let is_series = |file: &&Candidate| !file.is_quantized && series(&file.words) == series(&found[0].words);
        // Files of the same name in different folders are equally preferred.
        if names.len() == found.len() && found.iter().all(is_series) {
            found.sort_by(|a, b| by_numbers(&a.words, &b.words));
            found = found.split_off(found.len().saturating_sub(1));
        }
        match &found[..] {
            [] => Choice::None,
            [one] => Choice::One(one.path.clone()),
            several => Choice::Several(several.iter().map(|file| file.name.clone()).collect()),
        }
    }
}

/// Keeps the preferred elements, if there are any.
fn prefer<T>(list: &mut Vec<T>, is_preferred: impl Fn(&T) -> bool) {
    if list.iter().any(&is_preferred) {
        list.retain(is_preferred);
    }
}

/// Selects the transformer in a folder; `None`: the folder contains no transformer. Without a variant, an unquantized
/// file is preferred to quantized files of the same version and training.
fn choose_transformer<'a>(
    root: &Path,
    files: &'a [Candidate],
    variant: Option<&str>,
) -> Result<Option<&'a Candidate>, WeightsError> {
    let names = |files: &[&Candidate]| files.iter().map(|file| file.name.clone()).collect();
    let all: Vec<&Candidate> = files.iter().filter(|file| file.components.contains(&Component::Transformer)).collect();
    let mut found = all.clone();
    if let Some(variant) = variant {
        let count = words(variant).count();
        found.retain(|file| matches(&file.words, variant) == count);
        if found.is_empty() && !all.is_empty() {
            let (path, variant, files) = (root.into(), variant.into(), names(&all));
            return Err(WeightsError::NoVariant { path, variant, files });
        }
        prefer(&mut found, |file| file.path.file_name().is_some_and(|name| name == variant));
    }
    if found.iter().all(|file| (file.training, &file.versions) == (found[0].training, &found[0].versions)) {
        prefer(&mut found, |file| !file.is_quantized);
    }
    match found[..] {
        [] => Ok(None),
        [one] => Ok(Some(one)),
        _ => {
            let (path, component) = (root.into(), Component::Transformer);
            Err(WeightsError::Ambiguous { path, component, files: names(&found) })
        }
    }
}

fn is_transformer_folder(path: &Path) -> bool {
    let path = path::absolute(path).unwrap_or_else(|_| path.into());
    let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase());
    name.is_some_and(|name| TRANSFORMER_FOLDERS.contains(&&*name))
}

/// Subfolders that are searched for components.
#[derive(Clone, Copy)]
enum Searched {
    None,
    /// Only subfolders with a name in [`PART_FOLDERS`].
    Parts,
    All,
}

/// Returns the nearest folder that contains a transformer's file and also folders with names in [`PART_FOLDERS`].
/// `None`: no such folder exists.
fn root_of(file: &Path) -> Option<&Path> {
    let has_parts = |folder: &Path, least: usize| {
        let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().to_lowercase();
        let folders = listed(folder).filter(|entry| entry.path().is_dir());
        folders.map(name).filter(|name| PART_FOLDERS.contains(&&**name)).count() >= least
    };
    (0..=DEPTH).zip(file.ancestors()).find_map(|(level, inner)| {
        let folder = inner.parent()?;
        // One such folder next to the file or to a folder of transformers is enough. For a file in another subfolder,
        // two are required.
        let least = match level {
            0 => 1,
            _ if is_transformer_folder(inner) => 1,
            1 => 2,
            _ => return None,
        };
        has_parts(folder, least).then_some(folder)
    })
}

fn listed(folder: &Path) -> impl Iterator<Item = fs::DirEntry> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    fs::read_dir(folder).into_iter().flatten().flatten()
}

fn is_weight_file(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "safetensors" || extension == "gguf")
}

/// Returns the candidates in a folder and its subfolders, and in the folder `own` of the transformer, sorted by path,
/// each file once.
fn files(root: &Path, searched: Searched, own: &Path) -> Vec<Candidate> {
    let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
    let mut visit = |path: &Path| {
        if seen.insert(fs::canonicalize(path).unwrap_or_else(|_| path.into())) {
            found.extend(Candidate::open(root, path));
        }
    };
    search(root, DEPTH, searched, &mut visit);
    search(own, 0, Searched::None, &mut visit);
    found.sort_by(|a: &Candidate, b| a.path.cmp(&b.path));
    found
}

/// Calls `visit` for each weight file, except for shards, and for each folder of a text encoder.
fn search(folder: &Path, depth: usize, searched: Searched, visit: &mut impl FnMut(&Path)) {
    let mut entries: Vec<PathBuf> = listed(folder).map(|entry| folder.join(entry.file_name())).collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().map_or_else(Default::default, |name| name.to_string_lossy().into_owned());
        let is_entered = match searched {
            Searched::None => false,
            Searched::Parts => PART_FOLDERS.contains(&&*name.to_lowercase()),
            Searched::All => true,
        };
        let is_part = is_entered && text_encoder_folder(&path).is_some();
        let is_visited = is_weight_file(&path) && !is_shard(&name) || is_part;
        match () {
            () if name.starts_with('.') => {}
            () if is_visited => visit(&path),
            () if is_entered && depth > 0 && path.is_dir() => search(&path, depth - 1, Searched::All, visit),
            () => {}
        }
    }
}

impl Candidate {
    /// Reads a file's header. `None`: the file contains no component of LTX-2.
    fn open(root: &Path, path: &Path) -> Option<Self> {
        let words = words_of(path);
        let name = path.strip_prefix(root).unwrap_or(path).display().to_string();
        let training = training(&words);
        let mut candidate = Candidate {
            path: path.into(),
            name,
            components: BTreeSet::new(),
            is_quantized: false,
            has_conv_decoder: false,
            versions: version_in(&words).into_iter().collect(),
            folder_version: None,
            training,
            words,
        };
        if path.is_dir() {
            candidate.versions = text_encoder_folder(path)?;
            candidate.components.insert(Component::TextEncoder);
        } else {
            match Checkpoint::headers_only(path) {
                Ok(file) => candidate.classify(&file),
                // A damaged file is an error if its name is that of a component and no other file is preferred to it.
                Err(_) => {
                    candidate.is_quantized = true;
                    candidate.components.extend(component_in(&candidate.words));
                }
            }
        }
        if candidate.versions.is_empty() {
            let folders = Path::new(&candidate.name).ancestors().skip(1);
            candidate.folder_version = folders.map(words_of).find_map(|folder| version_in(&folder));
        }
        let is_transformer = candidate.components.contains(&Component::Transformer);
        // A name such as `LTX_video_vae` means the video VAE of any LTX model.
        let family = candidate.words.replace("-ltx-video-vae-", "-");
        let is_ltx_video = family.contains("-ltxv-") || family.contains("-ltx-video-");
        let is_foreign = is_ltx_video && candidate.versions.is_empty() && !is_transformer;
        (!candidate.components.is_empty() && !is_foreign).then_some(candidate)
    }

    /// Determines the components of a file from its tensors.
    fn classify(&mut self, file: &Checkpoint) {
        let is_plain = |dtype: &str| matches!(&*dtype.to_lowercase(), "bf16" | "f16" | "f32");
        self.is_quantized = file.headers().any(|(key, dtype, _)| key.ends_with(".weight") && !is_plain(&dtype));
        self.versions = stated_version(file).or(version_in(&self.words)).into_iter().collect();
        let has = |key: &str| file.contains(key) || file.contains(&format!("{TRANSFORMER}{key}"));
        if has("patchify_proj.weight") {
            // Transformers of LTX-Video have no audio.
            self.components.extend(has("audio_patchify_proj.weight").then_some(Component::Transformer));
            return;
        }
        if let Some(versions) = text_encoder_versions(file) {
            self.versions = versions;
            self.components.insert(Component::TextEncoder);
            return;
        }
        if file.contains("initial_conv.weight") {
            let is_temporal = file.shape("upsampler.0.weight").is_some_and(|shape| shape.len() == 5);
            let channels = file.shape("initial_conv.weight").and_then(|shape| shape.first());
            if !is_temporal && self.versions.is_empty() && channels == Some(&LTX_VIDEO_UPSAMPLER_CHANNELS) {
                return;
            }
            let part = if is_temporal { Component::TemporalUpsampler } else { Component::LatentUpsampler };
            self.components.insert(part);
            return;
        }
        let keys = SingleFileKeys::new(file.names());
        let mapped = || file.names().filter_map(|key| keys.map(key));
        self.components.extend(mapped().map(|(component, _)| component));
        self.components.remove(&Component::Transformer);
        // Other models' VAEs have similar names, but no statistics of latents. LTX-Video's VAEs have statistics, but
        // their decoders also have time steps.
        let has = |part: &str| mapped().any(|(component, name)| component == Component::Vae && name.contains(part));
        let has_steps = has("time_embedder.") || has("timestep_scale_multiplier");
        if !has("latents_") || has_steps && self.versions.is_empty() {
            self.components.remove(&Component::Vae);
            self.components.remove(&Component::DiffusionDecoder);
        }
        self.has_conv_decoder =
            mapped().any(|(component, name)| component == Component::Vae && name.starts_with("decoder."));
        if self.components.contains(&Component::Connectors) {
            let is = |part: &str| mapped().any(|(_, name)| name.starts_with(part));
            match () {
                () if is("video_text_proj_in.") => self.versions.retain(|version| *version != Version::V2_0),
                () if is("text_proj_in.") => self.versions = vec![Version::V2_0],
                () => {}
            }
        }
    }
}

/// Returns the model version in a file's header.
fn stated_version(file: &Checkpoint) -> Option<Version> {
    match Version::numbers(file.metadata(VERSION)?) {
        (2, 5) => Some(Version::V2_5),
        (2, 3) => Some(Version::V2_3),
        (2, minor) if minor < 3 => Some(Version::V2_0),
        _ => None,
    }
}

/// Returns the model versions that a text encoder's file can belong to. `None`: the file is not a text encoder of
/// LTX-2.
fn text_encoder_versions(file: &Checkpoint) -> Option<Vec<Version>> {
    if let Some(architecture) = file.architecture() {
        return versions_of(architecture);
    }
    if let Some(config) = file.metadata(GEMMA_CONFIG) {
        let config: Option<Value> = serde_json::from_str(config).ok();
        return match config.as_ref().and_then(|config| config["model_type"].as_str()) {
            Some(model_type) => versions_of(model_type),
            None => Some(vec![Version::V2_5]),
        };
    }
    Family::of_tensors(file, &["model.", LANGUAGE_MODEL]).map(|family| family.versions.to_vec())
}

/// Returns the model versions that the text encoder in a folder can belong to. `None`: the folder does not contain a
/// text encoder of LTX-2.
fn text_encoder_folder(path: &Path) -> Option<Vec<Version>> {
    let config = read_json(&path.join("config.json")).ok()?;
    versions_of(config["model_type"].as_str()?)
}

/// Returns the model versions whose text encoder is of this model type.
fn versions_of(model_type: &str) -> Option<Vec<Version>> {
    Family::of_type(model_type).map(|family| family.versions.to_vec())
}

/// Converts a name to lower case, replaces each sequence of separators by a hyphen, and adds a hyphen at both ends.
fn normalized(name: &str) -> String {
    let parts = name.split(|c: char| !c.is_alphanumeric()).filter(|part| !part.is_empty());
    format!("-{}-", parts.map(str::to_lowercase).collect::<Vec<_>>().join("-"))
}

fn words_of(path: &Path) -> String {
    normalized(&path.file_name().unwrap_or_default().to_string_lossy())
}

/// Iterates over the normalized parts of a variant.
fn words(variant: &str) -> impl Iterator<Item = String> {
    variant_parts(variant).map(normalized)
}

/// Counts the parts of a variant that a normalized name contains.
fn matches(name: &str, variant: &str) -> usize {
    words(variant).filter(|word| name.contains(word)).count()
}

fn training(words: &str) -> Option<Training> {
    match () {
        () if words.contains("-distill") => Some(Training::Distilled),
        () if words.contains("-dev-") => Some(Training::Dev),
        () => None,
    }
}

/// Returns the model version in a normalized name, such as `-ltx-2-3-22b-dev-` or `-ltx23-video-vae-`.
fn version_in(words: &str) -> Option<Version> {
    if words.contains("-ltxv-2b-") {
        // LTX-Video with two billion parameters.
        return None;
    }
    let compact = words.replace('-', "");
    let (_, rest) = compact.split_once("ltxv2").or_else(|| compact.split_once("ltx2"))?;
    Some(match rest.chars().next() {
        Some('3') => Version::V2_3,
        Some('5') => Version::V2_5,
        _ => Version::V2_0,
    })
}

/// Returns the component that a normalized name refers to.
fn component_in(words: &str) -> Option<Component> {
    let names = [
        (Component::Transformer, "transformer"),
        (Component::TextEncoder, "gemma"),
        (Component::AudioVae, "audio-vae"),
        (Component::Vae, "video-vae"),
        (Component::Connectors, "connector"),
        (Component::TemporalUpsampler, "temporal-upscaler"),
        (Component::LatentUpsampler, "spatial-upscaler"),
        (Component::DurationHead, "duration-head"),
    ];
    names.into_iter().find(|(_, name)| words.contains(name)).map(|(component, _)| component)
}

/// Returns a normalized name without its extension and the version number before it.
fn series(words: &str) -> &str {
    let is_number = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_digit());
    let mut stem = words.strip_suffix("-safetensors-").or(words.strip_suffix("-gguf-")).unwrap_or(words);
    while let Some((rest, _)) = stem.rsplit_once('-').filter(|(_, part)| is_number(part)) {
        stem = rest;
    }
    stem
}

/// Compares normalized names part by part, numbers by value.
fn by_numbers(a: &str, b: &str) -> Ordering {
    let key = |part: &str| (part.parse::<u64>().ok(), part.to_string());
    a.split('-').map(key).cmp(b.split('-').map(key))
}
