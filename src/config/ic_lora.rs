//! `model.ic_lora` and `dfr.detailing_lora`: finds the file of a published IC-LoRA, and adds the IC-LoRA to `model.loras`.

use serde_json::{Value, json};

use super::error::{ConfigError, ConfigErrorKind, ValueOrigin};
use super::ic_loras::{IcLoraInput, PublishedIcLora, is_name, names};
use super::load::version;
use super::message::{Setting, message};
use super::schema::{Config, IcLora, Lora, Model, ReferenceVideo};
use super::tree::Tree;
use super::{LoraApply, sidecar};
use crate::media::{FrameFilter, Preprocess};
use crate::weights::{HubCache, ReferenceScales, Version, WeightsError};

pub(super) const KEY: &str = "model.ic_lora";
const DETAILING: &str = "dfr.detailing_lora";
const LORAS: &str = "model.loras";
/// End of the name of a LoRA file.
const SAFETENSORS: &str = ".safetensors";

/// A configuration key that selects an IC-LoRA.
pub(super) struct IcLoraKey {
    key: &'static str,
    flag: &'static str,
    /// Stage that uses the IC-LoRA.
    stage: u8,
}

/// Keys that select an IC-LoRA.
pub(super) const KEYS: [IcLoraKey; 2] = [
    IcLoraKey { key: KEY, flag: "--ic-lora", stage: 1 },
    IcLoraKey { key: DETAILING, flag: "--detailing-lora", stage: 2 },
];

impl IcLoraKey {
    fn value(self: &IcLoraKey, config: &Config) -> Option<IcLora> {
        match self.stage {
            1 => config.model.ic_lora.clone(),
            // Other pipelines reject the key when the configuration is checked.
            _ => config.dfr.detailing_lora.clone().filter(|_| config.pipeline.spec().has_rounds()),
        }
    }
}

/// Replaces the name in `at.key` by the file's path or name on the hub, and a missing strength by the published one, and
/// adds the IC-LoRA to `model.loras`, for one stage (in the pipeline `hdr`, for both). `config` is the typed form of `merged`. Returns whether `merged`
/// changed.
///
/// # Errors
/// Returns an error if the name is unknown, if the IC-LoRA was published for another model generation or needs more than
/// reference videos, if its file is not in the Hugging Face cache, or if the pipeline has no video that the IC-LoRA can
/// follow.
pub(super) fn take(
    at: &IcLoraKey,
    merged: &mut Tree,
    config: &Config,
    generation: Version,
    layers: &[Tree],
) -> Result<bool, ConfigError> {
    let mut loras: Vec<Value> = config.model.loras.iter().map(|lora| json!(lora)).collect();
    let count = loras.len();
    // A sidecar contains the IC-LoRA of its run twice.
    if let Some(recorded) = recorded(at, layers).filter(|_| sidecar::holds(merged, LORAS)) {
        loras.retain(|lora| lora["path"] != recorded);
    }
    let is_removed = loras.len() < count;
    let Some(own) = at.value(config) else {
        if is_removed {
            let origin = merged.origin(at.key);
            merged.set(LORAS, loras.into(), &origin);
        }
        return Ok(is_removed);
    };
    let origin = merged.origin(at.key);
    let fail = |error: ConfigError| error.at(origin.clone());
    let (path, row) = resolve(at, &own, generation).map_err(fail)?;
    let row = row.or_else(|| PublishedIcLora::of_file(&path));
    match at.stage {
        1 => check_references(config, &own, row).map_err(fail)?,
        _ => check_half_size(&path, row).map_err(fail)?,
    }
    let strength = own.strength.or_else(|| row?.strength).unwrap_or(1.0);
    let stages = if config.pipeline.spec().hdr { vec![1, 2] } else { vec![at.stage] };
    loras.push(json!({"path": path, "strength": strength, "stages": stages, "apply": own.apply}));
    merged.set(at.key, json!({"path": path, "strength": strength, "apply": own.apply}), &origin);
    let unchanged = matches!(origin, ValueOrigin::Sidecar { .. }) && merged.leaf(LORAS).is_some();
    let origin = if unchanged { merged.origin(LORAS) } else { origin };
    merged.set(LORAS, loras.into(), &origin);
    Ok(true)
}

/// Returns the path of the IC-LoRA that a sidecar among the layers records.
fn recorded(at: &IcLoraKey, layers: &[Tree]) -> Option<Value> {
    let key = format!("{}.path", at.key);
    let paths = layers.iter().filter_map(|layer| layer.leaf(&key));
    paths.filter(|(_, origin)| matches!(origin, ValueOrigin::Sidecar { .. })).map(|(path, _)| path.clone()).next()
}

fn wrong(own: &IcLora, kind: ConfigErrorKind, why: impl Into<super::Limit>) -> ConfigError {
    ConfigError::value(kind, KEY, &own.path, why)
}

/// Rejects a detailing LoRA whose reference is not half as large as the generated video, as that of the first stage is.
fn check_half_size(path: &str, row: Option<&PublishedIcLora>) -> Result<(), ConfigError> {
    let scales = ReferenceScales::read(path)
        .map_err(|error| ConfigError { key: DETAILING.into(), ..ConfigError::lora(error) })?;
    let (size, time) =
        (scales.downscale.or(row.and_then(|row| row.downscale)).unwrap_or(2), scales.temporal.unwrap_or(1));
    if (size, time) == (2, 1) {
        return Ok(());
    }
    let why = format!(
        "its reference has 1/{size} of the video's size and 1/{time} of its frames, but the first stage has 1/2 of the size \
         and all frames; use an IC-LoRA such as pixel-spatial-upscaler-x2"
    );
    Err(ConfigError::value(ConfigErrorKind::Unsupported, DETAILING, path, why))
}

/// Returns the path of an IC-LoRA and, if it was selected by name, its row.
fn resolve(
    at: &IcLoraKey,
    own: &IcLora,
    generation: Version,
) -> Result<(String, Option<&'static PublishedIcLora>), ConfigError> {
    let (path, flag) = (&own.path, at.flag);
    let wrong = |own: &IcLora, kind, why: String| ConfigError::value(kind, at.key, &own.path, why);
    if !is_name(path) {
        if path.contains('/') || path.ends_with(SAFETENSORS) {
            return Ok((path.clone(), None));
        }
        let why = format!("is neither a file ({SAFETENSORS}) nor a published IC-LoRA; names: {}", names().join(", "));
        return Err(wrong(own, ConfigErrorKind::NotOneOf, why));
    }
    let Some(row) = PublishedIcLora::named(path).find(|row| row.base == generation) else {
        let bases: Vec<String> = PublishedIcLora::named(path).map(|row| format!("LTX-{}", row.base)).collect();
        let why = format!(
            "was published for {}, but the model is LTX-{generation}; use -m with such a model, or {flag} FILE to use \
             the file anyway",
            bases.join(" and ")
        );
        return Err(wrong(own, ConfigErrorKind::Unsupported, why));
    };
    if let IcLoraInput::Other(what) = row.input {
        let why = format!("{what}; {} supports only IC-LoRAs that follow reference videos", at.key);
        return Err(wrong(own, ConfigErrorKind::Unsupported, why));
    }
    let found = hub_file(row).map_err(|error| {
        let pull = format!("run `ltx2 pull {}`, or pass a file: {flag} FILE", row.hub_name());
        wrong(own, ConfigErrorKind::Missing, format!("{error}; {pull}"))
    })?;
    Ok((found, Some(row)))
}

/// Returns the IC-LoRA that an item of `serve.ic_loras` selects for a model, at full strength.
///
/// # Errors
/// Returns an error if the name is unknown, if the IC-LoRA was published for another model generation or needs more than
/// reference videos, or if its file is not in the Hugging Face cache.
pub(crate) fn served_ic_lora(name: &str, model: &Model) -> Result<Lora, ConfigError> {
    let own = IcLora { path: name.into(), strength: None, apply: LoraApply::Merge };
    let not_published = || wrong(&own, ConfigErrorKind::NotOneOf, format!("names: {}", names().join(", ")));
    let found =
        resolve(&KEYS[0], &own, version(model)).and_then(|(path, row)| row.map(|_| path).ok_or_else(not_published));
    let path = found.map_err(|error| ConfigError { key: "serve.ic_loras".into(), ..error })?;
    Ok(Lora { path, strength: 1.0, stages: vec![1], apply: own.apply })
}

/// Returns the file that `model.ic_lora` selects; for a published name, the files of all model generations.
pub(crate) fn ic_lora_files(path: &str) -> Vec<String> {
    match is_name(path) {
        true => PublishedIcLora::named(path).map(PublishedIcLora::hub_name).collect(),
        false => vec![path.into()],
    }
}

/// Returns the name on the hub of a row's file, which must be in the Hugging Face cache.
fn hub_file(row: &PublishedIcLora) -> Result<String, String> {
    let cache = HubCache::from_env();
    let reason = |error: WeightsError| match error {
        WeightsError::NotFound { name, reason, .. } => format!("{name}: {reason}"),
        other => other.to_string(),
    };
    let found = cache.resolve(&row.hub_name()).map_err(reason)?;
    if row.file.is_some() {
        return Ok(row.hub_name());
    }
    let entries = std::fs::read_dir(&found).map_err(|error| format!("cannot read {}: {error}", found.display()))?;
    let files = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let files: Vec<String> = files.filter(|name| name.ends_with(SAFETENSORS)).collect();
    match &files[..] {
        [one] => Ok(format!("{}/{one}", row.repository)),
        _ => Err(format!("{} contains {} safetensors files, not one", found.display(), files.len())),
    }
}

/// Rejects an IC-LoRA without reference videos.
fn check_references(config: &Config, own: &IcLora, row: Option<&PublishedIcLora>) -> Result<(), ConfigError> {
    if !config.request.reference_videos.is_empty() {
        return Ok(());
    }
    let what = row.map_or(String::new(), |row| format!(" ({})", row.reference));
    let why = message![format!("needs a reference video{what}: "), Setting::ReferenceVideos];
    Err(wrong(own, ConfigErrorKind::Missing, why))
}

impl Config {
    /// Returns the conversion of a reference video's frames: its own, otherwise the default of the published IC-LoRA.
    ///
    /// # Errors
    /// Returns an error if the parameters of the conversion are invalid.
    pub(crate) fn reference_filter(&self, video: &ReferenceVideo) -> Result<FrameFilter, ConfigError> {
        let row = self.model.ic_lora.as_ref().and_then(|own| PublishedIcLora::of_file(&own.path));
        let default = || row.map_or_else(Preprocess::default, |row| Preprocess::Kind(row.preprocess));
        let preprocess = video.preprocess.clone().unwrap_or_else(default);
        let key = "request.reference_videos";
        let wrong = |why| {
            let value = format!("preprocess {} of {}", preprocess.kind().name(), video.path);
            ConfigError::value(ConfigErrorKind::OutOfRange, key, value, why)
        };
        preprocess.filter().map_err(wrong)
    }
}
