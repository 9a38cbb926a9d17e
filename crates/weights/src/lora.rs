//! LoRA files, which add `strength · (alpha / rank) · B·A` to weights of a model.
//!
//! Two naming schemes are supported. diffusers and PEFT: `transformer.<module>.lora_A.weight [rank, in]` and
//! `….lora_B.weight [out, rank]`. Lightricks and ComfyUI: `diffusion_model.<module>…` with the module names of
//! Lightricks' single files. Older trainers write `lora_down` and `lora_up`, and a scalar `<module>.alpha`. diffusers
//! stores alphas in the header.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::Component;
use super::checkpoint::{Checkpoint, TensorView};
use super::error::WeightsError;
use super::fingerprint;
use super::hub::HubCache;
use super::keys::SingleFileKeys;
use super::merge_order::MergeOrder;
use super::source::ModelSource;
use super::unsupported;

/// Metadata key of diffusers' adapter configuration.
const METADATA: &str = "lora_adapter_metadata";

/// A LoRA's update of one weight.
#[derive(Clone, Debug)]
pub struct Update {
    /// `A`: `[rank, in]`.
    pub(super) down: TensorView,
    /// `B`: `[out, rank]`.
    pub(super) up: TensorView,
    rank: usize,
    /// LoRA alpha; equal to the rank if the file contains no alpha.
    alpha: f64,
    /// Whether Lightricks' loader supports the naming scheme of the update's tensors.
    official: bool,
}

impl Update {
    /// Returns the factor of `B·A`. The official merge orders ignore alpha, as Lightricks' loader does, except for
    /// naming schemes that this loader does not support.
    pub(super) fn factor(&self, order: MergeOrder, strength: f64) -> f64 {
        match matches!(order, MergeOrder::Official | MergeOrder::Official1) && self.official {
            true => strength,
            false => strength * self.alpha / self.rank as f64,
        }
    }
}

/// An open LoRA file.
#[derive(Debug)]
pub struct LoraFile {
    path: PathBuf,
    /// Path, size and modification time, because the path may refer to another file later.
    identity: (PathBuf, u64, Option<std::time::SystemTime>),
    /// `model_version` in the file's header.
    version: Option<String>,
    updates: BTreeMap<(Component, String), Update>,
}

/// A LoRA file with its strength.
#[derive(Clone, Debug)]
pub struct Lora {
    /// The open file, shared by all uses of the LoRA.
    pub file: Arc<LoraFile>,
    /// Factor of the updates; 0 disables the LoRA.
    pub strength: f64,
}

/// Role of a tensor in an update, determined by the end of its name.
#[derive(Clone, Copy)]
enum Role {
    Down,
    Up,
    Alpha,
}

const ROLES: [(&str, Role); 5] = [
    (".lora_A.weight", Role::Down),
    (".lora_down.weight", Role::Down),
    (".lora_B.weight", Role::Up),
    (".lora_up.weight", Role::Up),
    (".alpha", Role::Alpha),
];

/// Name parts that identify unsupported adapter types.
const OTHERS: [(&str, &str); 7] = [
    (".lora_magnitude_vector", "a DoRA"),
    (".dora_scale", "a DoRA"),
    (".hada_", "a LoHa"),
    (".lokr_", "a LoKr"),
    (".lora_mid.", "a LoCon"),
    (".oft_", "an OFT"),
    (".lora_B.bias", "a LoRA with a bias"),
];

/// The tensors `A`, `B` and alpha of one weight that were found so far.
type Parts = [Option<TensorView>; 3];

impl LoraFile {
    /// Opens a file, or `org/name` or `org/name/file` in the local Hugging Face cache. Reads only the header and the
    /// alphas.
    ///
    /// # Errors
    /// Returns an error if the file is missing, or if it contains anything but pairs of matrices of matching rank and
    /// alphas.
    pub fn open(name: &str) -> Result<Self, WeightsError> {
        let checkpoint = Checkpoint::open(&locate(name)?)?;
        let path = checkpoint.path().to_path_buf();
        let metadata = Metadata::of(&checkpoint)?;
        let mut found: BTreeMap<(Component, String), Parts> = BTreeMap::new();
        for key in checkpoint.names() {
            let (component, module, role) = place(key).map_err(|why| wrong(&path, key, why))?;
            let part = &mut found.entry((component, module)).or_default()[role as usize];
            if let Some(other) = part.replace(checkpoint.get_float(key)?) {
                return Err(wrong(&path, key, format!("updates the same weight as `{}`", other.key())));
            }
        }
        let mut updates = BTreeMap::new();
        for ((component, module), parts) in found {
            let update = pair(&path, &module, parts, metadata.alpha(component, &module))?;
            updates.insert((component, format!("{module}.weight")), update);
        }
        if updates.is_empty() {
            return Err(wrong(&path, "lora_A", "is missing: the file contains no tensors"));
        }
        let meta = std::fs::metadata(&path).map_err(WeightsError::io(&path, "cannot read its size"))?;
        let whole = std::fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
        let version = checkpoint.metadata(unsupported::VERSION).map(String::from);
        Ok(LoraFile { identity: (whole, meta.len(), meta.modified().ok()), path, version, updates })
    }

    /// Returns a warning if the merge order ignores alphas that would change the result.
    pub fn unused_alpha(&self, order: MergeOrder) -> Option<String> {
        let unused = |u: &&Update| u.factor(order, 1.0) != u.factor(MergeOrder::Exact, 1.0);
        let first = self.updates.values().find(unused)?;
        let (path, key, alpha, rank) = (self.path.display(), first.down.key(), first.alpha, first.rank);
        Some(format!(
            "{path}: `{key}` has alpha {alpha} and rank {rank}; Lightricks' loader ignores alpha, so the LoRA is merged at \
             full strength; set model.lora_merge to diffusers or exact to multiply it by alpha / rank"
        ))
    }

    /// Returns the path of the file; for a name in the Hugging Face cache, the path in the cache.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Iterates over all updated tensors: component and name.
    pub fn targets(&self) -> impl Iterator<Item = (Component, &str)> {
        self.updates.keys().map(|(component, name)| (*component, name.as_str()))
    }

    pub(crate) fn get(&self, component: Component, name: &str) -> Option<&Update> {
        self.updates.get(&(component, name.to_string()))
    }

    /// Returns a warning if the model is LTX-2.5 and the file does not state the model version that it was trained on.
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
            let cure = "use a LoRA that was trained on this model version";
            transformer.check_header(&self.path, self.version.as_deref(), "is a LoRA", cure)?;
        }
        for ((component, name), update) in &self.updates {
            let fail = |view: &TensorView, reason: String| {
                let version = model.version().map_or_else(|_| String::new(), |v| format!(" (LTX-{v})"));
                let reason =
                    format!("{reason} of {}{version}; is the LoRA for another model version?", model.path().display());
                WeightsError::Lora { path: self.path.clone(), key: view.key().into(), reason }
            };
            let checkpoint = model.checkpoint(*component)?;
            let made = [update.up.shape()[0], update.down.shape()[1]];
            match checkpoint.shape(name) {
                None => {
                    let reason =
                        format!("updates `{name}` of shape {made:?}, which is not a tensor of the {component}");
                    return Err(fail(&update.down, reason));
                }
                Some(shape) if shape != made => {
                    let both = format!(
                        "has shape {:?} and `{}` has {:?}",
                        update.down.shape(),
                        update.up.key(),
                        update.up.shape()
                    );
                    let reason = format!(
                        "{both}, which give an update of shape {made:?}, but `{name}` has shape {shape:?} in the {component}"
                    );
                    return Err(fail(&update.down, reason));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }
}

/// Resolves a path, or a name in the local Hugging Face cache.
pub(super) fn locate(name: &str) -> Result<PathBuf, WeightsError> {
    match Path::new(name).exists() || !HubCache::is_name(name) {
        true => Ok(PathBuf::from(name)),
        false => HubCache::from_env().resolve(name),
    }
}

/// Returns the fingerprint of a LoRA: a hash of its header's metadata and its tensors. It does not depend on the file's
/// path or modification time.
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
    fingerprint::hash_checkpoint(&checkpoint, &mut hash)?;
    Ok(format!("{}{}", fingerprint::SAMPLED, hex::encode(hash.finalize())))
}

/// Splits a tensor name into component, module and role.
fn place(key: &str) -> Result<(Component, String, Role), String> {
    let kind = OTHERS.iter().find(|(part, _)| key.contains(part)).map(|(_, kind)| *kind);
    let whole = [".diff", ".diff_b"].iter().any(|end| key.ends_with(end)).then_some("a full weight difference");
    if let Some(kind) = kind.or(whole) {
        return Err(format!("is part of {kind}; only lora_A, lora_B and alpha of a LoRA are supported"));
    }
    let Some((module, role)) = ROLES.iter().find_map(|(end, role)| Some((key.strip_suffix(end)?, *role))) else {
        return Err("is not part of a LoRA; only lora_A, lora_B (lora_down, lora_up) and alpha are supported".into());
    };
    match target(module) {
        Some((component, module)) => Ok((component, module, role)),
        None => {
            Err("does not begin with `transformer.` or `connectors.` (diffusers) or `diffusion_model.` (Lightricks)"
                .into())
        }
    }
}

/// Maps a module name of a file to a component and a module of the model.
fn target(module: &str) -> Option<(Component, String)> {
    if let Some(rest) = module.strip_prefix("transformer.") {
        return Some((Component::Transformer, rest.to_string()));
    }
    if let Some(rest) = module.strip_prefix("connectors.") {
        return Some((Component::Connectors, rest.to_string()));
    }
    let rest = module.strip_prefix("diffusion_model.").unwrap_or(module);
    if rest.starts_with("text_embedding_projection.") {
        return SingleFileKeys::new([]).map(rest);
    }
    let rest = module.strip_prefix("diffusion_model.")?;
    SingleFileKeys::new([]).map(&format!("model.diffusion_model.{rest}"))
}

/// Combines two matrices into an update. Alpha is read from the file's alpha tensor or, if there is none, from the
/// header.
fn pair(path: &Path, module: &str, parts: Parts, listed: Option<f64>) -> Result<Update, WeightsError> {
    let [down, up, own] = parts;
    let (down, up) = match (down, up) {
        (Some(down), Some(up)) => (down, up),
        (Some(one), None) | (None, Some(one)) => {
            return Err(wrong(
                path,
                one.key(),
                "is a LoRA matrix without its counterpart; both lora_A and lora_B are required",
            ));
        }
        (None, None) => return Err(wrong(path, module, "has an alpha but no matrices")),
    };
    let both = format!("has shape {:?} and `{}` has {:?}", down.shape(), up.key(), up.shape());
    let (&[rank, _], &[_, inner]) = (down.shape(), up.shape()) else {
        return Err(wrong(path, down.key(), format!("{both}; both must have two dimensions")));
    };
    if rank != inner || rank == 0 {
        return Err(wrong(path, down.key(), format!("{both}; the ranks must be equal and greater than 0")));
    }
    let alpha = match own {
        Some(view) => view.to_tensor()?.to_f32().iter().next().map(|alpha| f64::from(*alpha)),
        None => listed,
    };
    let official = down.key().ends_with(".lora_A.weight") && !is_diffusers(down.key());
    Ok(Update { down, up, rank, alpha: alpha.unwrap_or(rank as f64), official })
}

fn wrong(path: &Path, key: &str, reason: impl Into<String>) -> WeightsError {
    WeightsError::Lora { path: path.to_path_buf(), key: key.into(), reason: reason.into() }
}

/// Whether a key uses diffusers' naming scheme.
fn is_diffusers(key: &str) -> bool {
    key.starts_with("transformer.") || key.starts_with("connectors.")
}

/// The adapter configuration in diffusers' header.
struct Metadata(Value);

impl Metadata {
    fn of(checkpoint: &Checkpoint) -> Result<Self, WeightsError> {
        let fail = |reason: String| wrong(checkpoint.path(), METADATA, reason);
        let Some(text) = checkpoint.metadata(METADATA) else { return Ok(Metadata(Value::Null)) };
        let metadata = Metadata(serde_json::from_str(text).map_err(|e| fail(format!("is not JSON: {e}")))?);
        for component in [Component::Transformer, Component::Connectors] {
            for key in ["use_rslora", "use_dora", "lora_bias"] {
                if metadata.get(component, key).and_then(Value::as_bool) == Some(true) {
                    return Err(fail(format!("enables {key}, which is not supported")));
                }
            }
            let alphas =
                metadata.patterns(component).map(|(_, alpha)| alpha).chain(metadata.get(component, "lora_alpha"));
            if let Some(alpha) = alphas.into_iter().find(|alpha| !alpha.is_number()) {
                return Err(fail(format!("has the alpha {alpha}, which is not a number")));
            }
            let is_name = |c: char| c.is_alphanumeric() || "._-".contains(c);
            if let Some((pattern, _)) = metadata.patterns(component).find(|(p, _)| !end(p).chars().all(is_name)) {
                return Err(fail(format!(
                    "has the unsupported alpha_pattern `{pattern}`; use the end of a module name"
                )));
            }
        }
        Ok(metadata)
    }

    fn get(&self, component: Component, key: &str) -> Option<&Value> {
        let own = self.0.get(format!("{}.{key}", component.folder()));
        own.or_else(|| self.0.get(key)).filter(|v| !v.is_null())
    }

    fn patterns(&self, component: Component) -> impl Iterator<Item = (&str, &Value)> {
        let listed = self.get(component, "alpha_pattern").and_then(Value::as_object);
        listed.into_iter().flatten().map(|(pattern, alpha)| (&pattern[..], alpha))
    }

    /// Returns a module's alpha: the value of the first pattern that matches the end of the module's name, or else the
    /// default for all modules.
    fn alpha(&self, component: Component, module: &str) -> Option<f64> {
        let fits = |(pattern, _): &(&str, &Value)| {
            let rest = module.strip_suffix(end(pattern));
            rest.is_some_and(|rest| rest.is_empty() || (!pattern.starts_with('^') && rest.ends_with('.')))
        };
        let own = self.patterns(component).find(fits).map(|(_, alpha)| alpha);
        own.or_else(|| self.get(component, "lora_alpha")).and_then(Value::as_f64)
    }
}

/// Returns the name in a pattern; `^` marks a pattern that must match the complete name.
fn end(pattern: &str) -> &str {
    pattern.strip_prefix('^').unwrap_or(pattern)
}

/// Returns the updates that LoRAs with a strength other than 0 make to a tensor, each with its file and strength. Equal
/// lists give equal merged weights.
pub fn updates<'a>(loras: &'a [Lora], component: Component, name: &str) -> Vec<(&'a LoraFile, &'a Update, f64)> {
    let active = loras.iter().filter(|l| l.strength != 0.0);
    active.filter_map(|l| Some((&*l.file, l.file.get(component, name)?, l.strength))).collect()
}

/// Returns all tensors whose merged weights differ between two lists of LoRAs.
pub fn differing<'a>(old: &'a [Lora], new: &'a [Lora]) -> std::collections::BTreeSet<(Component, &'a str)> {
    let targets = old.iter().chain(new).flat_map(|l| l.file.targets());
    targets
        .filter(|(component, name)| {
            let known = |loras: &[Lora]| -> Vec<_> {
                let found = updates(loras, *component, name);
                found.iter().map(|(file, _, strength)| (file.identity.clone(), strength.to_bits())).collect()
            };
            known(old) != known(new)
        })
        .collect()
}
