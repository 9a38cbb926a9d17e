//! From files and flags to one configuration: flag over `--set` over YAML over preset over default.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::error::{ConfigError, ValueOrigin};
use super::other_names::to_own_names;
use super::overrides::CliOverrides;
use super::pipeline::Pipeline;
use super::schema::{Config, Mesh};
use super::serve::Serve;
use super::sidecar::Sidecar;
use super::tree::Tree;
use super::validate::{Place, accepts_text, validate};
use super::yaml::{self, Data, Node};
use super::{check, layout, legal, paths, presets, references, sidecar, source};
use crate::models::presets::Preset;
use crate::models::upsampler::Upsampling;
use crate::text_file;
use crate::weights::{ModelSource, Overrides, Version};

/// A configuration with the origin of every value.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub config: Config,
    pub(super) tree: Tree,
    /// What holds below the values that were written: preset and defaults, or the server's configuration below a request.
    pub(super) below: Tree,
    preset: &'static str,
    /// Layers as they were written, the lowest first: files, then the command line, then a request.
    pub(super) layers: Vec<Tree>,
    pub(super) length: Option<Length>,
    /// Generation of the model, which decides the preset.
    pub(super) version: Version,
    /// Whether noise levels are written below the uppermost layer.
    has_sigmas: bool,
    /// The sidecar that the run repeats; of several files the last.
    sidecar: Option<Sidecar>,
    /// Flags that write an empty section, which has no origin of its own: the key and the flag.
    pub(super) sections: Vec<(&'static str, &'static str)>,
}

/// A number of frames by a duration.
#[derive(Clone, Debug)]
pub(super) struct Length {
    pub(super) seconds: f64,
    pub(super) origin: ValueOrigin,
}

impl Loaded {
    /// The merged YAML, each value's origin in a comment.
    pub fn to_yaml(&self) -> String {
        format!("# preset: {}\n{}", self.preset, self.tree.to_yaml())
    }

    /// Where a value was written; `path` is its key with dots.
    pub fn origin(&self, path: &str) -> ValueOrigin {
        self.tree.origin(path)
    }

    /// The sidecar that the run repeats; `None`: the configuration is from no sidecar.
    pub fn sidecar(&self) -> Option<&Sidecar> {
        self.sidecar.as_ref()
    }

    /// The preset that lies under the files.
    pub fn preset(&self) -> &'static str {
        self.preset
    }

    /// Whether models of this generation may have a second decoder of the video.
    pub(crate) fn has_two_decoders(&self) -> bool {
        self.version == Version::V2_5
    }

    /// Whether noise levels are written below the uppermost layer, so that its number of steps is another model's.
    pub(crate) fn has_sigmas_below(&self) -> bool {
        self.has_sigmas
    }
}

/// Merges everything that was given.
///
/// # Errors
/// [`ConfigError`]: all of them are the user's to mend.
pub fn load(given: &CliOverrides) -> Result<Loaded, ConfigError> {
    let (mut files, mut sidecar) = (Vec::new(), None);
    for file in given.files.iter().rev() {
        read_chain(Path::new(file), None, &mut Vec::new(), &mut files, &mut sidecar)?;
    }
    files.reverse();
    files.push(command_line(given)?);
    let length = given.seconds.map(|seconds| Length { seconds, origin: ValueOrigin::Flag("seconds") });
    let loaded = combine(files, length, None)?;
    if given.allow_changed_inputs && sidecar.is_none() {
        let why = "--allow-changed-inputs: no sidecar is repeated; give one (-c OUT.json), or remove it";
        return Err(ConfigError::Flag(why.into()));
    }
    let allows_changes = given.allow_changed_inputs;
    let sidecar = sidecar.map(|sidecar| Sidecar { allows_changes, ..sidecar.within(&loaded.tree) });
    let sections = given.flags.iter().filter(|flag| flag.value == json!({})).map(|flag| (flag.path, flag.name));
    Ok(Loaded { sidecar, sections: sections.collect(), ..loaded })
}

/// Merges layers, the lowest first, over the preset that they ask for. The model's generation is looked up where it is not known.
pub(super) fn combine(
    mut layers: Vec<Tree>,
    length: Option<Length>,
    known: Option<Version>,
) -> Result<Loaded, ConfigError> {
    // Which preset lies below depends on what lies above.
    let mut merged = defaults()?;
    for layer in &layers {
        lay(&mut merged, layer.clone())?;
    }
    if let Some(top) = layers.last_mut() {
        references::name_pipeline(&merged, &check::typed(&merged)?, top);
        lay(&mut merged, top.clone())?;
    }
    let typed: Config = check::typed(&merged)?;
    let version = known.unwrap_or_else(|| version(&typed.model.path));
    let preset = typed.pipeline.preset(version);

    let presets = preset_layers(preset)?;
    let not_written = presets.len() + if known.is_some() { layers.len().saturating_sub(1) } else { 0 };
    let (mut merged, mut has_sigmas) = (defaults()?, false);
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
        lay(&mut merged, layer)?;
    }
    plain_steps(&mut merged);
    if let Some(length) = &length {
        set_seconds(&mut merged, length)?;
    }
    if let Some((Value::String(file), origin)) = merged.leaf("request.negative_prompt_file") {
        let (text, origin) = (read(Path::new(file))?, origin.clone());
        merged.set("request.negative_prompt", text.trim().into(), &origin);
        merged.set("request.negative_prompt_file", Value::Null, &origin);
    }
    let written = check::typed(&merged)?;
    sidecar::prune(&mut merged, &below, [&check::typed(&without_top)?, &written], version);
    source::take(&mut merged, length.is_some())?;
    references::take(&mut merged, sidecar::frames(&layers))?;
    let config = check::typed(&merged)?;
    check::check(&config, &merged)?;
    Ok(Loaded {
        config,
        tree: merged,
        below,
        preset,
        layers,
        length,
        version,
        has_sigmas,
        sidecar: None,
        sections: Vec::new(),
    })
}

fn read(path: &Path) -> Result<String, ConfigError> {
    text_file::read(path).map_err(|source| ConfigError::Read { path: path.into(), source })
}

/// The generation of a model, from its files where they are here, else from what this program carries of it, else from
/// its name.
fn version(model: &str) -> Version {
    let found = ModelSource::open(model, &Overrides::default()).and_then(|source| source.version());
    found.unwrap_or_else(|reason| {
        let carried = Preset::named(model).and_then(|p| Version::of_transformer(p.config("transformer")?));
        let named = [("2.5", "2_5", Version::V2_5), ("2.3", "2_3", Version::V2_3)];
        let named = named.iter().find(|(dot, line, _)| model.contains(dot) || model.contains(line));
        let named = named.map_or(Version::V2_0, |(.., version)| *version);
        let version = carried.unwrap_or(named);
        tracing::debug!("model generation {version} taken from its name: {reason}");
        version
    })
}

pub(super) fn defaults() -> Result<Tree, ConfigError> {
    let value = serde_json::to_value(Config::default()).map_err(|e| ConfigError::Flag(e.to_string()))?;
    Ok(Tree::from_node(&Node::from_value(value), &|_| ValueOrigin::Default))
}

/// A preset and what it extends, the lowest first.
pub(super) fn preset_layers(name: &'static str) -> Result<Vec<Tree>, ConfigError> {
    let text = presets::find(&presets::CONFIGS, name).map_or("", |(_, text)| text);
    let node = yaml::parse(text, name)?;
    validate(&node, Place::File(name))?;
    let parent = match node.get("extends") {
        Some(Node { data: Data::Scalar(Value::String(parent)), .. }) => presets::find(&presets::CONFIGS, parent),
        _ => None,
    };
    let mut layers = parent.map_or(Ok(Vec::new()), |(parent, _)| preset_layers(parent))?;
    let mut own = Tree::from_node(&node, &|_| ValueOrigin::Preset(name));
    own.remove("extends");
    layers.push(own);
    Ok(layers)
}

/// Reads a file and what it extends; the file itself comes first in `out`. `found` takes the first sidecar among them.
fn read_chain(
    path: &Path,
    named_by: Option<String>,
    seen: &mut Vec<PathBuf>,
    out: &mut Vec<Tree>,
    found: &mut Option<Sidecar>,
) -> Result<(), ConfigError> {
    let (label, text, folder) = open(path)?;
    let identity = path.canonicalize().unwrap_or_else(|_| PathBuf::from(&label));
    if seen.contains(&identity) {
        let chain: Vec<String> = seen.iter().chain([&identity]).map(|p| file_name(p)).collect();
        return Err(ConfigError::Cycle { place: named_by.unwrap_or(label), chain: chain.join(" -> ") });
    }
    seen.push(identity);

    let root = yaml::parse(&text, &label)?;
    *found = found.take().or_else(|| Sidecar::of(&root, &label));
    let (mut node, is_sidecar) = sidecar::unwrap(root);
    validate(&node, Place::File(&label))?;
    to_own_names(&mut node, |line| Place::File(&label).at(line))?;
    paths::resolve(&mut node, &folder);
    let parent = match node.get("extends") {
        Some(Node { data: Data::Scalar(Value::String(parent)), line }) => Some((parent.clone(), *line)),
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
    out.push(layer);
    match parent {
        None => Ok(()),
        Some((parent, line)) => {
            let beside = PathBuf::from(paths::join(&folder, &parent));
            // A name that is no file beside this one is a shipped configuration.
            let shipped = !beside.exists() && presets::shipped_config(&parent).is_some();
            let target = if shipped { PathBuf::from(parent) } else { beside };
            read_chain(&target, Some(format!("{label}:{line}")), seen, out, found)
        }
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// A file's label, text and folder; a shipped configuration when there is no such file.
fn open(path: &Path) -> Result<(String, String, PathBuf), ConfigError> {
    match read(path) {
        Ok(text) => {
            let folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
            Ok((path.display().to_string(), text, folder))
        }
        Err(error) => match path.to_str().and_then(presets::shipped_config) {
            Some((name, text)) => Ok((format!("configs/{name}.yml"), text.into(), PathBuf::from("configs"))),
            None => Err(error),
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

/// diffusers makes the steps of every distilled model without noise: its pipelines give a sampler that draws no generator. So does
/// Lightricks' in-context pipeline. A sampler that the preset has, and nobody wrote, is plain Euler there.
pub(super) fn plain_steps(merged: &mut Tree) {
    let is =
        |key: &str, word: &str| merged.leaf(key).filter(|(value, _)| **value == word).map(|(_, origin)| origin.clone());
    let by_reference = is("reference", "diffusers").map(|origin| ValueOrigin::Reference(Box::new(origin)));
    let name = Pipeline::IcLora.name();
    let Some(by) = by_reference.or_else(|| is("pipeline", name).map(|_| ValueOrigin::Pipeline(name))) else { return };
    if merged
        .leaf("sampler.kind")
        .is_some_and(|(kind, origin)| kind == "euler_ancestral" && presets::is_shipped(origin))
    {
        merged.set("sampler.kind", "euler".into(), &by);
    }
}

/// `reference` stands for several keys; those that the same layer writes itself stay.
pub(super) fn expand_reference(layer: &mut Tree) {
    let Some((value, origin)) = layer.leaf("reference") else { return };
    let (value, origin) = (value.clone(), ValueOrigin::Reference(Box::new(origin.clone())));
    for key in BY_REFERENCE {
        if layer.get(key).is_none() {
            layer.set(key, value.clone(), &origin);
        }
    }
}

/// `--set` and flags as one layer.
fn command_line(given: &CliOverrides) -> Result<Tree, ConfigError> {
    let mut layer = Tree::Map(Vec::new());
    for pair in &given.set {
        let (path, value) = set_pair(pair)?;
        let mut own = Node::from_value(Tree::at(&path, value, &ValueOrigin::Set).to_value());
        to_own_names(&mut own, |_| "--set".into())?;
        layer.merge(Tree::from_node(&own, &|_| ValueOrigin::Set));
    }
    let by_set = layer.clone();
    for flag in &given.flags {
        let tree = Tree::at(flag.path, flag.value.clone(), &ValueOrigin::Flag(flag.name));
        validate(&Node::from_value(tree.to_value()), Place::Flag(&format!("--{}", flag.name)))?;
        if !(flag.yields && by_set.get(flag.path).is_some()) {
            layer.merge(tree);
        }
    }
    if let Some(mesh) = &given.mesh {
        // The flag says the whole mesh: an axis that it does not name is 1.
        let mesh: Mesh = layout::parse_mesh(mesh)?;
        layer.set("mesh", json!(mesh), &ValueOrigin::Flag("mesh"));
    }
    expand_reference(&mut layer);
    Ok(layer)
}

fn set_pair(pair: &str) -> Result<(String, Value), ConfigError> {
    let Some((path, text)) = pair.split_once('=') else {
        return Err(ConfigError::Flag(format!("--set {pair}: expected key=value, e.g. --set sampler.steps=8")));
    };
    let (path, place) = (path.trim(), format!("--set {pair}"));
    if path.contains('[') {
        let list = path.split('[').next().unwrap_or(path);
        return Err(ConfigError::Flag(format!("{place}: a list is set as a whole, e.g. --set {list}='[…]'")));
    }
    if path == "extends" {
        return Err(ConfigError::Flag(format!("{place}: 'extends' belongs into a file; give that file with -c")));
    }
    let quoted = text.trim_start().starts_with(['"', '\'']);
    let parsed = match yaml::parse(text, &place).map(|n| n.to_value()) {
        // Text needs no quotes here, whatever stands in it.
        Ok(Value::String(_)) if !quoted => Ok(Value::String(text.trim().into())),
        other => other,
    };
    let fits = |value: &Value| {
        validate(&Node::from_value(Tree::at(path, value.clone(), &ValueOrigin::Set).to_value()), Place::Flag(&place))
    };
    match parsed {
        Ok(value) if fits(&value).is_ok() => Ok((path.to_string(), value)),
        // What reads as a number, a map or broken YAML is text where text is wanted.
        _ if accepts_text(path) => Ok((path.to_string(), text.into())),
        Ok(value) => fits(&value).map(|()| (path.to_string(), value)),
        Err(error) => Err(error),
    }
}

/// Lays a layer over what is below, with the keys that exclude each other.
pub(super) fn lay(merged: &mut Tree, layer: Tree) -> Result<(), ConfigError> {
    const PAIRS: [(&str, &str); 2] =
        [("request.prompt", "request.prompts"), ("request.negative_prompt", "request.negative_prompt_file")];
    let written = |path: &str| layer.leaf(path).filter(|(v, _)| **v != "").map(|(v, o)| (v.clone(), o.clone()));
    let mut resets = Vec::new();
    for (text, file) in PAIRS {
        match (written(text), written(file)) {
            (Some(_), Some((_, origin))) => {
                return Err(ConfigError::Both { place: origin.to_string(), first: text, second: file });
            }
            (Some((_, origin)), None) => resets.push((file, Value::Null, origin)),
            (None, Some((_, origin))) => resets.push((text, "".into(), origin)),
            (None, None) => {}
        }
    }
    match (written("sampler.steps"), written("sampler.sigmas")) {
        (Some((_, origin)), None) => resets.push(("sampler.sigmas", Value::Null, origin)),
        (Some((steps, origin)), Some((sigmas, _))) if steps != check::steps_of(&sigmas) => {
            let place = origin.to_string();
            return Err(ConfigError::Both { place, first: "sampler.steps", second: "sampler.sigmas" });
        }
        (None, Some((sigmas, origin))) => resets.push(("sampler.steps", check::steps_of(&sigmas).into(), origin)),
        _ => {}
    }
    for (path, value, origin) in resets {
        // Nothing below was written: its origin stays.
        if merged.leaf(path).is_some_and(|(old, _)| *old != value) {
            merged.set(path, value, &origin);
        }
    }
    merged.merge(layer);
    Ok(())
}

fn set_seconds(merged: &mut Tree, length: &Length) -> Result<(), ConfigError> {
    let Length { seconds, origin } = length;
    let rate = merged.leaf("request.frame_rate").and_then(|(v, _)| v.as_f64());
    let rate = rate.ok_or_else(|| ConfigError::Flag("--seconds: request.frame_rate is not a number".into()))?;
    if !(seconds.is_finite() && *seconds > 0.0 && seconds * rate < 1e9) {
        return Err(ConfigError::Flag(format!("--seconds {seconds}: must be a number above 0")));
    }
    let frames = legal::nearest_frames(seconds * rate, check::typed(merged)?.frame_step());
    let actual = frames as f64 / rate;
    tracing::info!("--seconds {seconds} at {rate} frames a second: {frames} frames, {actual:.2} s");
    merged.set("request.num_frames", frames.into(), origin);
    Ok(())
}

impl Config {
    /// The configuration of a YAML file, a sidecar or a shipped preset, with `key=value` pairs over it:
    /// `ltx2 generate -c FILE --set KEY=VALUE`.
    ///
    /// # Errors
    /// Those of [`load`].
    pub fn load<S: Into<String>>(file: &str, set: impl IntoIterator<Item = S>) -> Result<Config, ConfigError> {
        let set = set.into_iter().map(Into::into).collect();
        Ok(load(&CliOverrides { files: vec![file.into()], set, ..CliOverrides::default() })?.config)
    }

    /// The configuration as a sidecar keeps it: every key, with paths that hold from anywhere. Where several videos
    /// are made, `prompt` and `seed` are those of the sidecar's own video.
    pub fn effective(&self, prompt: &str, seed: u64) -> Value {
        let mut own = self.clone();
        own.request.prompt = Some(prompt.into());
        own.request.prompts = None;
        own.request.num_videos = 1;
        own.request.seed = seed;
        own.serve = Serve::default();
        // Whoever repeats the run starts it in a way of their own.
        let shares = &mut own.runtime.distributed;
        (shares.coordinator, shares.process_id, shares.num_processes) = (None, None, None);
        let mut node = Node::from_value(serde_json::to_value(own).expect("a configuration came from such a value"));
        if let Ok(folder) = std::env::current_dir() {
            paths::resolve(&mut node, &folder);
        }
        node.to_value()
    }

    /// The multiple that width and height must be of.
    pub fn size_multiple(&self) -> usize {
        let rows = self.upsamplings().iter().map(|upsampling| upsampling.rows()[0]);
        let references =
            if self.request.reference_videos.is_empty() { 1 } else { self.conditioning.reference_scales()[0] };
        32 * rows.product::<usize>() * references
    }

    /// Upsampling between two stages; none without a second one.
    pub(crate) fn upsamplings(&self) -> &[Upsampling] {
        if self.pipeline.has_two_stages() { &self.two_stage.upsample } else { &[] }
    }

    /// Whether the first stage has half the frames.
    pub(crate) fn doubles_frames(&self) -> bool {
        self.upsamplings().contains(&Upsampling::TemporalX2)
    }

    /// The multiple that the number of frames is one more than.
    pub(crate) fn frame_step(&self) -> usize {
        if self.doubles_frames() { 2 * legal::FRAME_STEP } else { legal::FRAME_STEP }
    }
}
