//! Adapter files: LoRAs, which add `strength · (alpha / rank) · B·A` to weights of a model, DoRAs, LoHas, LoKrs, and
//! stored differences of weights.
//!
//! A tensor's name contains the name of the updated module, as diffusers or Lightricks name it. The module name may
//! have a prefix of diffusers (`transformer.`), of Lightricks and ComfyUI (`diffusion_model.`) or of PEFT
//! (`base_model.model.`), or be written with `_` instead of `.`, as by musubi-tuner (`lora_unet_…`). An alpha is a
//! tensor `<module>.alpha`, or a value in the header (diffusers) or in `adapter_config.json` (PEFT).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use sha2::{Digest, Sha256};

use super::Component;
use super::checkpoint::{Checkpoint, TensorView};
use super::error::WeightsError;
use super::fingerprint;
use super::hub::HubCache;
use super::merge_order::MergeOrder;
use super::source::ModelSource;
use super::unsupported;
use keys::{FlatModules, LoraModule, LoraTensorRole};
use metadata::Metadata;

mod keys;
mod metadata;
mod update;

pub use update::Update;
pub(crate) use update::{Delta, Factor, Norms};

/// An open adapter file.
#[derive(Debug)]
pub struct LoraFile {
    path: PathBuf,
    identity: FileIdentity,
    /// `model_version` in the file's header.
    version: Option<String>,
    updates: BTreeMap<(Component, String), Update>,
    /// Updates of modules whose names have `_` instead of `.`, by module name and parameter (`weight` or `bias`).
    flat: BTreeMap<(String, &'static str), Update>,
    /// The updates in `flat`, by component and tensor name; set by [`LoraFile::check`].
    resolved: OnceLock<BTreeMap<(Component, String), Update>>,
}

/// Path, size and modification time of a file, because the path may refer to another file later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileIdentity {
    path: PathBuf,
    bytes: u64,
    modified: Option<std::time::SystemTime>,
}

impl FileIdentity {
    pub(super) fn of(path: &Path) -> Result<Self, WeightsError> {
        let meta = std::fs::metadata(path).map_err(WeightsError::io(path, "cannot read its size"))?;
        let whole = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        Ok(FileIdentity { path: whole, bytes: meta.len(), modified: meta.modified().ok() })
    }
}

/// A LoRA file with its strength.
#[derive(Clone, Debug)]
pub struct ScaledLora {
    /// The open file, shared by all uses of the LoRA.
    pub file: Arc<LoraFile>,
    /// Factor of the updates; 0 disables the LoRA.
    pub strength: f64,
}

impl LoraFile {
    /// Opens a file or a folder that PEFT saved, or `org/name` or `org/name/file` in the local Hugging Face cache. Reads
    /// only the header, the configuration and the alphas.
    ///
    /// # Errors
    /// Returns an error if the file is missing, or if it contains anything but complete updates.
    pub fn open(name: &str) -> Result<Self, WeightsError> {
        let checkpoint = Checkpoint::open(&locate(name)?)?;
        let path = checkpoint.path().to_path_buf();
        let metadata = Metadata::read(&checkpoint)?;
        let mut found: BTreeMap<LoraModule, (&str, BTreeMap<LoraTensorRole, TensorView>)> = BTreeMap::new();
        for key in checkpoint.names() {
            let (name, role) = keys::split(key).map_err(|why| wrong(&path, key, why))?;
            let (_, parts) = found.entry(keys::module(name)).or_insert_with(|| (name, BTreeMap::new()));
            // Alphas may be integers.
            let view = if role == LoraTensorRole::Alpha { checkpoint.get(key)? } else { checkpoint.get_float(key)? };
            if let Some(other) = parts.insert(role, view) {
                return Err(wrong(&path, key, format!("updates the same weight as `{}`", other.key())));
            }
        }
        let (mut updates, mut flat) = (BTreeMap::new(), BTreeMap::new());
        for (module, (name, parts)) in found {
            let (component, own) = match &module {
                LoraModule::Named(component, own) => (*component, own),
                LoraModule::Flat(own) => (Component::Transformer, own),
            };
            for (tensor, update) in update::assemble(&path, name, parts, metadata.listed(component, [name, own]))? {
                match &module {
                    LoraModule::Named(component, name) => {
                        drop(updates.insert((*component, format!("{name}.{tensor}")), update))
                    }
                    LoraModule::Flat(name) => drop(flat.insert((name.clone(), tensor), update)),
                }
            }
        }
        if updates.is_empty() && flat.is_empty() {
            return Err(wrong(&path, "lora_A", "is missing: the file contains no tensors"));
        }
        let version = checkpoint.metadata(unsupported::VERSION).map(String::from);
        let identity = FileIdentity::of(&path)?;
        Ok(LoraFile { identity, path, version, updates, flat, resolved: OnceLock::new() })
    }

    /// Returns a warning if the merge order ignores alphas that would change the result.
    pub fn unused_alpha(&self, order: MergeOrder) -> Option<String> {
        let unused = |u: &&Update| u.factor(order, 1.0) != u.factor(MergeOrder::Exact, 1.0);
        let first = self.updates.values().find(unused)?;
        let (path, key, alpha, rank) = (self.path.display(), first.key(), first.alpha, first.divisor);
        Some(format!(
            "{path}: `{key}` has alpha {alpha} and rank {rank}; Lightricks' loader ignores alpha, so the LoRA is merged at \
             full strength; set model.lora_merge to diffusers or exact to multiply it by alpha / rank"
        ))
    }

    /// Returns the path of the file; for a name in the Hugging Face cache, the path in the cache.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Iterates over all updated tensors: component and name. Tensors whose names have `_` instead of `.` are missing
    /// before [`LoraFile::check`].
    pub fn targets(&self) -> impl Iterator<Item = (Component, &str)> {
        let all = self.updates.keys().chain(self.resolved.get().into_iter().flat_map(BTreeMap::keys));
        all.map(|(component, name)| (*component, name.as_str()))
    }

    pub(crate) fn get(&self, component: Component, name: &str) -> Option<&Update> {
        let key = (component, name.to_string());
        self.updates.get(&key).or_else(|| self.resolved.get()?.get(&key))
    }

    /// Returns the largest rank of the file's LoRAs; 0 if it has none.
    pub fn largest_rank(&self) -> usize {
        self.updates.values().chain(self.flat.values()).filter_map(Update::rank).max().unwrap_or(0)
    }

    /// Returns a warning if the model is LTX-2.5 and the file does not state the model version that the LoRA was trained on.
    pub fn unverified(&self, model: &ModelSource) -> Option<String> {
        let transformer = model.transformer().filter(|_| self.version.is_none())?;
        transformer.unverified(&self.path, "a LoRA", unsupported::VERSION)
    }

    /// Checks that the model has every updated tensor, in the shape of the update.
    ///
    /// # Errors
    /// Returns an error for the first tensor that does not fit (with file, key and both shapes), or if the file is for
    /// another model version.
    pub fn check(&self, model: &ModelSource) -> Result<(), WeightsError> {
        if let Some(transformer) = model.transformer() {
            let advice = "use a LoRA that was trained on this model version";
            transformer.check_header(&self.path, self.version.as_deref(), "is a LoRA", advice)?;
        }
        let resolved = self.resolve(model)?;
        for ((component, name), update) in self.updates.iter().chain(&resolved) {
            let checkpoint = model.checkpoint(*component)?;
            let shape = update.shape();
            match checkpoint.shape(name) {
                None => {
                    let reason =
                        format!("updates `{name}` of shape {shape:?}, which is not a tensor of the {component}");
                    let near = keys::most_similar(checkpoint.names(), name);
                    return Err(self.mismatch(model, update, reason, near));
                }
                Some(own) if own != shape => {
                    let reason = format!(
                        "{}, giving an update of shape {shape:?}, but `{name}` has shape {own:?} in the {component}",
                        update.shapes()
                    );
                    return Err(self.mismatch(model, update, reason, None));
                }
                Some(_) => {}
            }
        }
        self.resolved.get_or_init(|| resolved);
        Ok(())
    }

    /// Checks that the transformer of a model without weight files has every updated tensor, in the shape of the update.
    /// `shapes`: shapes of the transformer's tensors.
    ///
    /// # Errors
    /// Returns an error for the first tensor that does not fit, or if a name has `_` instead of `.`, because only
    /// weight files resolve them.
    pub fn check_shapes(&self, shapes: &BTreeMap<String, Vec<usize>>) -> Result<(), WeightsError> {
        if let Some(update) = self.flat.values().next() {
            let reason =
                "has `_` instead of `.` in its name, which needs weights from files; set model.weights to file";
            return Err(wrong(&self.path, update.key(), reason));
        }
        for ((component, name), update) in &self.updates {
            let shape = update.shape();
            let own = shapes.get(name).filter(|_| *component == Component::Transformer);
            let reason = match own {
                Some(own) if own == shape => continue,
                Some(own) => format!(
                    "{}, giving an update of shape {shape:?}, but `{name}` has shape {own:?} in the {component}",
                    update.shapes()
                ),
                None => format!("updates `{name}` of shape {shape:?}, which is not a tensor of the transformer"),
            };
            return Err(wrong(&self.path, update.key(), format!("{reason}; is the LoRA for another model version?")));
        }
        Ok(())
    }

    /// Finds the model's tensors for the updates whose names have `_` instead of `.`.
    fn resolve(&self, model: &ModelSource) -> Result<BTreeMap<(Component, String), Update>, WeightsError> {
        let mut resolved = BTreeMap::new();
        if self.flat.is_empty() {
            return Ok(resolved);
        }
        let modules = FlatModules::new(model)?;
        for ((flat, tensor), update) in &self.flat {
            let found: Vec<_> = modules.find(flat).into_iter().collect();
            let [(component, module)] = found[..] else {
                let names = |found: &(Component, String)| format!("{}.{tensor}", found.1);
                let near = modules.most_similar(flat).filter(|_| found.is_empty()).map(names);
                let reason = match &found[..] {
                    [one, other, ..] => format!("may update `{}` or `{}`", names(one), names(other)),
                    _ => format!("updates `{flat}`, which is not a module"),
                };
                return Err(self.mismatch(model, update, reason, near.as_deref()));
            };
            let target = (*component, format!("{module}.{tensor}"));
            let other = self.updates.get(&target).or_else(|| resolved.get(&target)).map(Update::key);
            if let Some(other) = other {
                return Err(wrong(&self.path, update.key(), format!("updates the same weight as `{other}`")));
            }
            resolved.insert(target, update.clone());
        }
        Ok(resolved)
    }

    /// Returns an error for an update that does not fit the model. `near`: the most similar tensor of the model.
    fn mismatch(&self, model: &ModelSource, update: &Update, reason: String, near: Option<&str>) -> WeightsError {
        let version = model.version().map_or_else(|_| String::new(), |v| format!(" (LTX-{v})"));
        let near = near.map_or(String::new(), |near| format!("; the most similar name is `{near}`"));
        let path = model.path().display();
        let reason = format!("{reason} of {path}{version}{near}; is the LoRA for another model version?");
        wrong(&self.path, update.key(), reason)
    }
}

/// Resolves a path, or a name in the local Hugging Face cache. For a folder that PEFT saved, returns the weight file.
pub(super) fn locate(name: &str) -> Result<PathBuf, WeightsError> {
    let path = match Path::new(name).exists() || !HubCache::is_name(name) {
        true => PathBuf::from(name),
        false => HubCache::from_env().resolve(name)?,
    };
    let weights = path.join(metadata::PEFT_WEIGHTS);
    Ok(if weights.is_file() { weights } else { path })
}

/// Returns the fingerprint of a LoRA: a hash of its header's metadata, PEFT's configuration and its tensors. It does not
/// depend on the file's path or modification time.
///
/// # Errors
/// Returns an error if the file is missing or damaged.
pub fn lora_fingerprint(name: &str) -> Result<String, WeightsError> {
    let checkpoint = Checkpoint::open(&locate(name)?)?;
    let mut hash = Sha256::new();
    checkpoint
        .all_metadata()
        .iter()
        .for_each(|(key, value)| fingerprint::add_text(&mut hash, &format!("{key}={value}")));
    if let Some(config) = Metadata::peft_bytes(checkpoint.path())? {
        hash.update(config);
    }
    fingerprint::hash_checkpoint(&checkpoint, &mut hash)?;
    Ok(format!("{}{}", fingerprint::SAMPLED, hex::encode(hash.finalize())))
}

/// Returns an error if the file is a LoRA instead of a model file.
pub(super) fn refuse(checkpoint: &Checkpoint) -> Result<(), WeightsError> {
    // Vocoders have alphas too.
    let is_part = |key: &&str| keys::split(key).is_ok_and(|(_, role)| role != LoraTensorRole::Alpha);
    let Some(key) = checkpoint.names().find(is_part) else { return Ok(()) };
    let reason = "is part of a LoRA, which is not a model; LoRAs are merged when a model is loaded, with --lora";
    Err(wrong(checkpoint.path(), key, reason))
}

fn wrong(path: &Path, key: &str, reason: impl Into<String>) -> WeightsError {
    WeightsError::Lora { path: path.to_path_buf(), key: key.into(), reason: reason.into() }
}

/// Returns the updates that LoRAs with a strength other than 0 make to a tensor, each with its file and strength. Equal
/// lists give equal merged weights.
pub fn updates<'a>(loras: &'a [ScaledLora], component: Component, name: &str) -> Vec<(&'a LoraFile, &'a Update, f64)> {
    let active = loras.iter().filter(|l| l.strength != 0.0);
    active.filter_map(|l| Some((&*l.file, l.file.get(component, name)?, l.strength))).collect()
}

/// Returns all tensors whose merged weights differ between two lists of LoRAs.
pub fn differing<'a>(old: &'a [ScaledLora], new: &'a [ScaledLora]) -> std::collections::BTreeSet<(Component, &'a str)> {
    let targets = old.iter().chain(new).flat_map(|l| l.file.targets());
    targets
        .filter(|(component, name)| {
            let known = |loras: &[ScaledLora]| -> Vec<_> {
                let found = updates(loras, *component, name);
                let identity = |(file, update, strength): &(&LoraFile, &Update, f64)| {
                    (file.identity.clone(), strength.to_bits(), update.factor(MergeOrder::Exact, 1.0).to_bits())
                };
                found.iter().map(identity).collect()
            };
            known(old) != known(new)
        })
        .collect()
}
