//! Loads files and flags into one configuration. Precedence, highest first: flag, `--set`, YAML, preset, default.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};

use super::Serve;
use super::error::{ConfigError, ConfigErrorKind, ValueOrigin};
use super::overrides::CliOverrides;
use super::pipeline::{Pipeline, VideoUse};
use super::presets::{defaults, preset_layers};
use super::reference_video;
use super::schema::{Config, Lora, Mesh, Model};
use super::sidecar::Sidecar;
use super::toy_model::open_model;
use super::tree::Tree;
use super::validate::{accepts_text, in_file, validate};
use super::yaml::{self, YamlData, YamlNode};
use super::{check, ic_lora, layout, legal, paths, presets, references, sidecar, source};
use crate::models::presets::Preset;
use crate::models::upsampler::Upsampling;
use crate::text_file;
use crate::weights::{Overrides, Version};

/// Configuration with the origin of every value.
#[derive(Clone, Debug)]
pub struct LoadedConfig {
    pub config: Config,
    pub(super) tree: Tree,
    /// Configuration without the values that the user wrote: presets and defaults or, for a server request, the
    /// server's configuration.
    pub(super) below: Tree,
    preset: &'static str,
    /// Unmerged layers, lowest precedence first: files, the command line, the fields of a server request.
    pub(super) layers: Vec<Tree>,
    pub(super) duration: Option<RequestedDuration>,
    /// Model generation, which selects the preset.
    pub(super) version: Version,
    /// Whether a layer below the top one sets `sampler.sigmas`.
    has_sigmas: bool,
    /// Loaded sidecar, if any; the last one if there are several.
    sidecar: Option<Sidecar>,
    /// (key, flag) of flags that set an empty section. An empty section has no values and therefore no origin in the
    /// tree.
    pub(super) sections: Vec<(&'static str, &'static str)>,
    /// Shipped configuration, other than those of TPU slices, that the files are or extend. `None`: there is none, or
    /// this is a server request.
    model_config: Option<&'static str>,
}

/// Duration of the video, which determines the number of frames.
#[derive(Clone, Debug)]
pub(super) struct RequestedDuration {
    pub(super) seconds: f64,
    pub(super) origin: ValueOrigin,
}

impl LoadedConfig {
    /// Returns the merged YAML with the origin of each value in a comment.
    pub fn to_yaml(&self) -> String {
        format!("# preset: {}\n{}", self.preset, self.tree.to_yaml())
    }

    /// Returns where the value at `path` (a dotted key) was written.
    pub fn origin(&self, path: &str) -> ValueOrigin {
        self.tree.origin(path)
    }

    /// Returns the loaded sidecar; `None` if no sidecar was loaded.
    pub fn sidecar(&self) -> Option<&Sidecar> {
        self.sidecar.as_ref()
    }

    /// Returns the name of the base preset.
    pub fn preset(&self) -> &'static str {
        self.preset
    }

    /// Returns the name of the shipped configuration that the user chose; by default, that of the base preset.
    pub fn config_name(&self) -> &'static str {
        self.model_config.unwrap_or(self.preset)
    }

    /// Returns whether models of this generation can have a second video decoder.
    pub(crate) fn has_two_decoders(&self) -> bool {
        self.version == Version::V2_5
    }

    /// Returns whether a layer below the top one sets `sampler.sigmas`, which fixes the number of steps.
    pub(crate) fn has_sigmas_below(&self) -> bool {
        self.has_sigmas
    }
}

/// Loads and merges the files and flags of a command line.
///
/// # Errors
/// Returns an error if a file cannot be read, a key is unknown, or a value is invalid.
pub fn load(given: &CliOverrides) -> Result<LoadedConfig, ConfigError> {
    let mut found = ReadFiles::default();
    for file in given.files.iter().rev() {
        read_chain(file, Path::new(file), None, &mut Vec::new(), &mut found)?;
    }
    let ReadFiles { mut layers, sidecar, model_config } = found;
    layers.reverse();
    let mut layer = Tree::Map(Vec::new());
    for pair in &given.set {
        let (path, value) = set_pair(pair)?;
        let mut own = YamlNode::from_value(Tree::at(&path, value, &ValueOrigin::Set).to_value());
        reference_video::expand(&mut own, |_| ValueOrigin::Set)?;
        layer.merge(Tree::from_node(&own, &|_| ValueOrigin::Set));
    }
    let by_set = layer.clone();
    for flag in &given.flags {
        let tree = Tree::at(flag.path, flag.value.clone(), &ValueOrigin::Flag(flag.name));
        validate(&YamlNode::from_value(tree.to_value()), &|_| ValueOrigin::Argument(format!("--{}", flag.name)))?;
        if !(flag.yields && by_set.get(flag.path).is_some()) {
            layer.merge(tree);
        }
    }
    if let Some(mesh) = &given.mesh {
        // The flag replaces the complete mesh: axes that it omits have size 1.
        let mesh: Mesh = layout::parse_mesh(mesh)?;
        layer.set("mesh", json!(mesh), &ValueOrigin::Flag("mesh"));
    }
    expand_reference(&mut layer);
    layers.push(layer);
    if let Some(sidecar) = &sidecar {
        sidecar::restore_prompts(&mut layers, sidecar);
    }
    let duration = given.seconds.map(|seconds| RequestedDuration { seconds, origin: ValueOrigin::Flag("seconds") });
    let loaded = combine(layers, duration, None)?;
    if let Some(warning) = model_config.and_then(|name| generation_warning(name, &loaded)) {
        tracing::warn!("{warning}");
    }
    if given.allow_changed_inputs && sidecar.is_none() {
        let why = "--allow-changed-inputs: no sidecar is loaded; pass one (-c OUT.json), or remove the flag";
        return Err(ConfigError::argument(why));
    }
    let allows_changes = given.allow_changed_inputs;
    let sidecar = sidecar.map(|sidecar| Sidecar { allows_changes, ..sidecar.within(&loaded.tree) });
    let sections = given.flags.iter().filter(|flag| flag.value == json!({})).map(|flag| (flag.path, flag.name));
    let mut loaded = LoadedConfig { sidecar, sections: sections.collect(), model_config, ..loaded };
    loaded.config.runtime.recorded_layers = loaded.sidecar.as_ref().and_then(|sidecar| sidecar.layers.clone());
    Ok(loaded)
}

/// Merges `layers` (lowest precedence first) over the preset that they select. `known` is the model generation; `None`:
/// determined from the model.
pub(super) fn combine(
    mut layers: Vec<Tree>,
    duration: Option<RequestedDuration>,
    known: Option<Version>,
) -> Result<LoadedConfig, ConfigError> {
    // Merge once without a preset: the merged layers select the preset.
    let mut merged = defaults().clone();
    for layer in &layers {
        merge_layer(&mut merged, layer.clone())?;
    }
    let mut typed = check::typed(&merged)?;
    if let Some(top) = layers.last_mut()
        && references::select_pipeline(&merged, &typed, top)
    {
        merge_layer(&mut merged, top.clone())?;
        typed = check::typed(&merged)?;
    }
    let version = known.unwrap_or_else(|| version(&typed.model));
    let preset = typed.pipeline.preset(version);

    let presets = preset_layers(preset)?;
    let not_written = presets.len() + if known.is_some() { layers.len().saturating_sub(1) } else { 0 };
    let (mut merged, mut has_sigmas) = (defaults().clone(), false);
    let (mut below, mut without_top) = (merged.clone(), merged.clone());
    let count = presets.len() + layers.len();
    for (at, layer) in presets.into_iter().chain(layers.iter().cloned()).enumerate() {
        if at == not_written {
            below = merged.clone();
        }
        if at + 1 == count {
            without_top = merged.clone();
        }
        has_sigmas = merged.leaf("sampler.sigmas").is_some();
        merge_layer(&mut merged, layer)?;
    }
    replace_preset_values(&mut merged);
    if let Some(duration) = &duration {
        set_seconds(&mut merged, duration)?;
    }
    if let Some((Value::String(file), origin)) = merged.leaf("request.negative_prompt_file") {
        let (text, origin) = (read(Path::new(file))?, origin.clone());
        merged.set("request.negative_prompt", text.trim().into(), &origin);
        merged.set("request.negative_prompt_file", Value::Null, &origin);
    }
    // Typing a tree is most of the cost of a request to the server: type again only what changed.
    let mut config = check::typed(&merged)?;
    if sidecar::prune(&mut merged, &below, &without_top, &config, version)? {
        config = check::typed(&merged)?;
    }
    for key in &ic_lora::KEYS {
        if ic_lora::take(key, &mut merged, &config, version, &layers)? {
            config = check::typed(&merged)?;
        }
    }
    if references::take_scales(&mut merged, &config)? {
        config = check::typed(&merged)?;
    }
    if source::take(&mut merged, &config, duration.is_some())? {
        config = check::typed(&merged)?;
    }
    if references::take(&mut merged, &config, sidecar::frames(&layers))? {
        config = check::typed(&merged)?;
    }
    check::check(&config, &merged)?;
    Ok(LoadedConfig {
        config,
        tree: merged,
        below,
        preset,
        layers,
        duration,
        version,
        has_sigmas,
        sidecar: None,
        sections: Vec::new(),
        model_config: None,
    })
}

fn read(path: &Path) -> Result<String, ConfigError> {
    text_file::read(path).map_err(|source| ConfigError::unreadable(path, source))
}

/// Returns the generation of a model: read from the model's files if they are available, otherwise from the embedded
/// configuration of the model, otherwise guessed from the model's name.
pub(super) fn version(model: &Model) -> Version {
    let (model, variant) = (&*model.path, model.variant.clone());
    let found = open_model(model, &Overrides { variant, ..Overrides::default() });
    let found = found.and_then(|source| source.version());
    found.unwrap_or_else(|reason| {
        let carried = Preset::named(model).and_then(|p| Version::of_transformer(p.config("transformer")?));
        let version = carried.unwrap_or_else(|| version_of_name(model));
        tracing::debug!(
            "assuming model generation {version} from the model's name, because its files cannot be read: {reason}"
        );
        version
    })
}

/// Guesses the generation of a model from the name of the model or of a preset.
fn version_of_name(name: &str) -> Version {
    let named = [("2.5", "2_5", Version::V2_5), ("2.3", "2_3", Version::V2_3)];
    let named = named.iter().find(|(dot, line, _)| name.contains(dot) || name.contains(line));
    named.map_or(Version::V2_0, |(.., version)| *version)
}

/// Returns a warning if the shipped configuration `name` is for another generation of LTX-2 than the model.
fn generation_warning(name: &str, loaded: &LoadedConfig) -> Option<String> {
    let (wanted, found) = (version_of_name(name), loaded.version);
    if !name.starts_with("ltx2") || wanted == found {
        return None;
    }
    let (path, preset) = (&loaded.config.model.path, loaded.config.pipeline.preset(found));
    Some(format!("the preset {name} is for LTX-{wanted}, but the model {path} is LTX-{found}; use -c {preset}"))
}

/// Contents of the files of a command line.
#[derive(Default)]
struct ReadFiles {
    /// Each file, followed by the files that it extends.
    layers: Vec<Tree>,
    /// First sidecar among the files.
    sidecar: Option<Sidecar>,
    /// First shipped configuration among the files, other than those of TPU slices.
    model_config: Option<&'static str>,
}

/// Reads a file, then the files that it extends, and appends them to `found`. `written`: the path as the user wrote it.
fn read_chain(
    written: &str,
    path: &Path,
    named_by: Option<String>,
    seen: &mut Vec<PathBuf>,
    found: &mut ReadFiles,
) -> Result<(), ConfigError> {
    let place = |error: ConfigError| match &named_by {
        Some(place) if error.origin.is_none() => error.at(ValueOrigin::Argument(format!("{place}: extends"))),
        _ => error,
    };
    let (label, text, folder) = open(written, path).map_err(place)?;
    let identity = path.canonicalize().unwrap_or_else(|_| PathBuf::from(&label));
    if seen.contains(&identity) {
        let chain: Vec<String> = seen.iter().chain([&identity]).map(|p| file_name(p)).collect();
        let error = ConfigError::key(ConfigErrorKind::Cycle, "extends", chain.join(" -> "));
        return Err(error.at(ValueOrigin::Argument(named_by.unwrap_or(label))));
    }
    seen.push(identity);

    let root = yaml::parse(&text, &label)?;
    found.sidecar = found.sidecar.take().or_else(|| Sidecar::from_node(&root, &label));
    found.model_config = found.model_config.or_else(|| presets::model_config(&label, &text));
    let (mut node, is_sidecar) = sidecar::unwrap(root);
    validate(&node, &in_file(&label))?;
    reference_video::expand(&mut node, |line| ValueOrigin::File { file: label.clone(), line })?;
    paths::resolve(&mut node, &folder);
    let parent = match node.get("extends") {
        Some(YamlNode { data: YamlData::Scalar(Value::String(parent)), line }) => Some((parent.clone(), *line)),
        _ => None,
    };
    let file = label.clone();
    let mut layer = Tree::from_node(&node, &move |line| match is_sidecar {
        true => ValueOrigin::Sidecar { file: file.clone(), line },
        false => ValueOrigin::File { file: file.clone(), line },
    });
    if matches!(layer, Tree::Leaf(..)) {
        layer = Tree::Map(Vec::new()); // An empty file.
    }
    layer.remove("extends");
    expand_reference(&mut layer);
    found.layers.push(layer);
    match parent {
        None => Ok(()),
        Some((parent, line)) => {
            let sibling = PathBuf::from(paths::join(&folder, &parent));
            // A name that is not a file next to this one refers to a shipped configuration.
            let shipped = !sibling.exists() && presets::shipped_config(&parent).is_some();
            let target = if shipped { PathBuf::from(&parent) } else { sibling };
            read_chain(&parent, &target, Some(format!("{label}:{line}")), seen, found)
        }
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// Returns the label, text and folder of a file. If the file cannot be read, `path` is looked up as the name of a
/// shipped configuration. `written`: the path as the user wrote it.
fn open(written: &str, path: &Path) -> Result<(String, String, PathBuf), ConfigError> {
    match text_file::read(path) {
        Ok(text) => {
            let folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
            Ok((path.display().to_string(), text, folder))
        }
        Err(source) => match path.to_str().and_then(presets::shipped_config) {
            Some((name, text)) => Ok((format!("configs/{name}.yml"), text.into(), PathBuf::from("configs"))),
            None if source.kind() == ErrorKind::NotFound => {
                Err(presets::not_shipped(&presets::CONFIGS, "presets", written))
            }
            None => Err(ConfigError::unreadable(path, source)),
        },
    }
}

/// Keys that `reference` sets.
pub(crate) const BY_REFERENCE: [&str; 14] = [
    "sampler.sigma_shift",
    "sampler.step_noise",
    "sampler.noise_order",
    "guidance.stg_streams",
    "conditioning.cross_timestep",
    "conditioning.keyframe_span",
    "conditioning.noising",
    "conditioning.clean_prediction",
    "conditioning.given_stream",
    "conditioning.first_frame_marker",
    "two_stage.audio",
    "vocoder.stage1_clamp",
    "runtime.positions",
    "model.lora_merge",
];

/// Replaces values of the preset that `reference` or the pipeline determines. Values that the user set are kept.
pub(super) fn replace_preset_values(merged: &mut Tree) {
    replace_ancestral_sampler(merged);
    let pipeline = merged.leaf("pipeline").and_then(|(name, _)| Pipeline::deserialize(name).ok());
    let Some(spec) = pipeline.map(Pipeline::spec) else { return };
    let is_preset = merged.leaf("two_stage.sigmas").is_none_or(|(_, origin)| presets::is_shipped(origin));
    if let Some(sigmas) = spec.second_sigmas.filter(|_| is_preset) {
        merged.set("two_stage.sigmas", sigmas.into(), &ValueOrigin::Pipeline(spec.name));
    }
}

/// Replaces the preset's `euler_ancestral` by plain `euler` where the reference implementation adds no noise in the
/// steps of distilled models: in every diffusers pipeline (diffusers passes no generator to the sampler) and in
/// Lightricks' in-context pipeline. A sampler that the user set is kept.
fn replace_ancestral_sampler(merged: &mut Tree) {
    let is =
        |key: &str, word: &str| merged.leaf(key).filter(|(value, _)| **value == word).map(|(_, origin)| origin.clone());
    let by_reference = is("reference", "diffusers").map(|origin| ValueOrigin::Reference(Box::new(origin)));
    let pipeline = merged.leaf("pipeline").and_then(|(name, _)| Pipeline::deserialize(name).ok());
    let by_pipeline = pipeline.map(Pipeline::spec).filter(|spec| spec.replaces_ancestral_sampler);
    let Some(by) = by_reference.or(by_pipeline.map(|spec| ValueOrigin::Pipeline(spec.name))) else { return };
    if merged
        .leaf("sampler.kind")
        .is_some_and(|(kind, origin)| kind == "euler_ancestral" && presets::is_shipped(origin))
    {
        merged.set("sampler.kind", "euler".into(), &by);
    }
}

/// Copies the value of `reference` to all keys that it sets, except those that the same layer sets itself.
pub(super) fn expand_reference(layer: &mut Tree) {
    let Some((value, origin)) = layer.leaf("reference") else { return };
    let (value, origin) = (value.clone(), ValueOrigin::Reference(Box::new(origin.clone())));
    for key in BY_REFERENCE {
        if layer.get(key).is_none() {
            layer.set(key, value.clone(), &origin);
        }
    }
}

fn set_pair(pair: &str) -> Result<(String, Value), ConfigError> {
    let Some((path, text)) = pair.split_once('=') else {
        return Err(ConfigError::argument(format!("--set {pair}: expected key=value, e.g. --set sampler.steps=8")));
    };
    let (path, place) = (path.trim(), format!("--set {pair}"));
    if path.contains('[') {
        let list = path.split('[').next().unwrap_or(path);
        return Err(ConfigError::argument(format!(
            "{place}: cannot set an item of a list; set the complete list, e.g. --set {list}='[…]'"
        )));
    }
    if path == "extends" {
        return Err(ConfigError::argument(format!(
            "{place}: 'extends' is only allowed in a file; pass the base file with -c"
        )));
    }
    let quoted = text.trim_start().starts_with(['"', '\'']);
    let parsed = match yaml::parse(text, &place).map(|n| n.to_value()) {
        // Text needs no quotes here, whatever characters it contains.
        Ok(Value::String(_)) if !quoted => Ok(Value::String(text.trim().into())),
        other => other,
    };
    let fits = |value: &Value| {
        let node = YamlNode::from_value(Tree::at(path, value.clone(), &ValueOrigin::Set).to_value());
        validate(&node, &|_| ValueOrigin::Argument(place.clone()))
    };
    match parsed {
        Ok(value) if fits(&value).is_ok() => Ok((path.to_string(), value)),
        // If the key accepts text, a value that parses as a number, a map or broken YAML is text.
        _ if accepts_text(path) => Ok((path.to_string(), text.into())),
        Ok(value) => fits(&value).map(|()| (path.to_string(), value)),
        Err(error) => Err(error),
    }
}

/// Merges a layer over `merged`, in which it first resets the keys that are mutually exclusive with keys of the layer.
pub(super) fn merge_layer(merged: &mut Tree, layer: Tree) -> Result<(), ConfigError> {
    const PAIRS: [(&str, &str); 2] =
        [("request.prompt", "request.prompts"), ("request.negative_prompt", "request.negative_prompt_file")];
    let written = |path: &str| layer.leaf(path).filter(|(v, _)| **v != "").map(|(v, o)| (v.clone(), o.clone()));
    let mut resets = Vec::new();
    for (text, file) in PAIRS {
        match (written(text), written(file)) {
            (Some(_), Some((_, origin))) => {
                return Err(ConfigError::exclusive(origin, text, file));
            }
            (Some((_, origin)), None) => resets.push((file, Value::Null, origin)),
            (None, Some((_, origin))) => resets.push((text, "".into(), origin)),
            (None, None) => {}
        }
    }
    match (written("sampler.steps"), written("sampler.sigmas")) {
        (Some((_, origin)), None) => resets.push(("sampler.sigmas", Value::Null, origin)),
        (Some((steps, origin)), Some((sigmas, _))) if steps != check::steps_of(&sigmas) => {
            return Err(ConfigError::exclusive(origin, "sampler.steps", "sampler.sigmas"));
        }
        (None, Some((sigmas, origin))) => resets.push(("sampler.steps", check::steps_of(&sigmas).into(), origin)),
        _ => {}
    }
    for (path, value, origin) in resets {
        // A key that already has the reset value keeps its origin.
        if merged.leaf(path).is_some_and(|(old, _)| *old != value) {
            merged.set(path, value, &origin);
        }
    }
    merged.merge(layer);
    Ok(())
}

fn set_seconds(merged: &mut Tree, duration: &RequestedDuration) -> Result<(), ConfigError> {
    let RequestedDuration { seconds, origin } = duration;
    let rate = merged.leaf("request.frame_rate").and_then(|(v, _)| v.as_f64());
    let rate =
        rate.ok_or_else(|| ConfigError::argument("--seconds requires request.frame_rate to be a number, e.g. 24"))?;
    if !(seconds.is_finite() && *seconds > 0.0) {
        return Err(ConfigError::argument(format!("--seconds {seconds}: must be a number above 0")));
    }
    if seconds * rate >= 1e9 {
        let why = format!("must be less than {}, which is 1e9 frames at {rate} fps", 1e9 / rate);
        return Err(ConfigError::argument(format!("--seconds {seconds}: {why}")));
    }
    let frames = legal::nearest_frames(seconds * rate, check::typed(merged)?.frame_step());
    let actual = frames as f64 / rate;
    tracing::info!("--seconds {seconds} at {rate} frames per second: {frames} frames, {actual:.2} s");
    merged.set("request.num_frames", frames.into(), origin);
    Ok(())
}

impl Config {
    /// Loads a YAML file, a sidecar or a shipped preset and applies `key=value` overrides, as `ltx2 generate -c FILE
    /// --set KEY=VALUE` does.
    ///
    /// # Errors
    /// Returns the errors of [`load`].
    pub fn load<S: Into<String>>(file: &str, set: impl IntoIterator<Item = S>) -> Result<Config, ConfigError> {
        let set = set.into_iter().map(Into::into).collect();
        Ok(load(&CliOverrides { files: vec![file.into()], set, ..CliOverrides::default() })?.config)
    }

    /// Returns the configuration for a sidecar: every key, with absolute paths. `prompt` and `seed` are those of the
    /// sidecar's video.
    pub fn effective(&self, prompt: &str, seed: u64) -> Value {
        let mut own = self.clone();
        own.request.prompt = Some(prompt.into());
        own.request.prompts = None;
        own.request.num_videos = 1;
        own.request.seed = seed;
        own.serve = Serve::default();
        // A rerun may use different processes.
        let shares = &mut own.runtime.distributed;
        (shares.coordinator, shares.process_id, shares.num_processes) = (None, None, None);
        let mut node = YamlNode::from_value(serde_json::to_value(own).expect("a configuration serializes"));
        if let Ok(folder) = std::env::current_dir() {
            paths::resolve(&mut node, &folder);
        }
        node.to_value()
    }

    /// Returns the number of pixels of which width and height must be multiples.
    pub fn size_multiple(&self) -> usize {
        let rows = self.upsamplings().iter().map(|upsampling| upsampling.rows()[0]);
        let references = if self.follows_references() { self.conditioning.reference_scales()[0] } else { 1 };
        32 * rows.product::<usize>() * references
    }

    /// Returns whether the input video is used as a reference video.
    pub(crate) fn follows_input(&self) -> bool {
        match self.pipeline.spec().video {
            Some(VideoUse::Reference) => true,
            Some(VideoUse::Region) => self.request.inpaint.as_ref().is_some_and(|own| own.reference),
            _ => false,
        }
    }

    /// Returns whether the first stage has tokens of reference videos, or of an input video that is used as one.
    pub(crate) fn follows_references(&self) -> bool {
        !self.request.reference_videos.is_empty() || self.follows_input()
    }

    /// Returns whether the second stage follows the video of the first stage as a reference video.
    pub(crate) fn follows_first_stage(&self) -> bool {
        self.pipeline.spec().has_rounds() && self.dfr.detailing_lora.is_some()
    }

    /// Returns whether loading the configuration adds this LoRA to `model.loras`.
    pub(crate) fn adds_lora(&self, lora: &Lora) -> bool {
        let own = [&self.model.ic_lora, &self.dfr.detailing_lora];
        own.into_iter().flatten().any(|own| own.path == lora.path && lora.stages.len() == 1)
    }

    /// Returns the upsamplings between the two stages; empty for one-stage pipelines.
    pub(crate) fn upsamplings(&self) -> &[Upsampling] {
        if self.pipeline.has_two_stages() { &self.two_stage.upsample } else { &[] }
    }

    /// Returns whether the first stage generates half the frames (`temporal_x2`).
    pub(crate) fn doubles_frames(&self) -> bool {
        self.upsamplings().contains(&Upsampling::TemporalX2)
    }

    /// Returns `n` such that the number of frames must be one more than a multiple of `n`.
    pub(crate) fn frame_step(&self) -> usize {
        if self.doubles_frames() { 2 * legal::FRAME_STEP } else { legal::FRAME_STEP }
    }
}
