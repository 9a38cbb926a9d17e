//! Layout files and device meshes.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Once;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::presets;
use super::schema::{AUTO, Config, Mesh};
use super::yaml::{self, YamlData, YamlNode};
use crate::analysis::Chip;
use crate::hlo;
use crate::nn::{Axis, ContextParallelKind, ContextParallelPolicy, Layout, LayoutError, Override, Rule};
use crate::text_file;

/// Layout file (`shardings/`): a device mesh and sharding rules.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct LayoutFile {
    /// Default mesh; `mesh` of the configuration overrides it.
    pub(crate) mesh: Mesh,
    /// Sharding during computation: for each logical axis, the mesh axes that shard it, outermost first.
    pub(crate) rules: BTreeMap<Axis, Vec<String>>,
    /// Additional sharding of weights between uses (FSDP): for each logical axis, the mesh axes that shard it. Weights
    /// are gathered before each use.
    pub(crate) storage: BTreeMap<Axis, Vec<String>>,
    /// Overrides of the rules for individual tensors. Each key is a pattern for `component.name` of a tensor, with `*`
    /// as a wildcard. For each axis, the first matching pattern with a rule for that axis applies.
    pub(crate) tensors: BTreeMap<String, BTreeMap<Axis, Vec<String>>>,
    /// Method that computes attention over a sharded sequence.
    #[serde(alias = "exchange")]
    pub(crate) context_parallel: ContextParallelPolicy,
}

/// Layout file with its rules in file order.
#[derive(Clone, Debug)]
pub struct LayoutSource {
    /// Deserialized file, whose maps are sorted by key.
    pub(crate) file: LayoutFile,
    /// Sharding during computation.
    pub(crate) rules: Vec<Rule>,
    /// Additional sharding of weights between uses.
    pub(crate) storage: Vec<Rule>,
    pub(crate) overrides: Vec<Override>,
}

impl LayoutSource {
    /// Returns the layout for a mesh. Axes that `mesh` does not have are removed from the rules.
    ///
    /// # Errors
    /// Never fails for a file that [`read_layout_source`] accepted.
    pub fn on(&self, mesh: hlo::DeviceMesh) -> Result<Layout, LayoutError> {
        let split = |rules: &[Rule]| -> Vec<Rule> {
            let present = |axes: &[String]| axes.iter().filter(|a| mesh.size(a).is_some()).cloned().collect();
            rules.iter().map(|r| Rule { mesh_axes: present(&r.mesh_axes), ..r.clone() }).collect()
        };
        let (rules, storage) = (split(&self.rules), split(&self.storage));
        let overrides =
            self.overrides.iter().map(|e| Override { rules: split(&e.rules), ..e.clone() }).collect::<Vec<_>>();
        Layout::new(mesh.clone(), rules, storage, overrides, self.file.context_parallel)
    }

    /// Returns the YAML text of the layout, preceded by `comments` as comment lines.
    pub(crate) fn to_yaml(&self, comments: &[String]) -> String {
        let rule = |r: &Rule| format!("{}: [{}]", r.axis.name(), r.mesh_axes.join(", "));
        let mut out: String = comments.iter().map(|c| format!("# {c}\n")).collect();
        let mesh = sizes(&self.file.mesh).into_iter().filter(|(_, s)| *s != 1);
        let mut mesh: Vec<String> = mesh.map(|(axis, s)| format!("{axis}: {s}")).collect();
        if self.file.mesh.dcn.data != 1 {
            mesh.push(format!("dcn: {{data: {}}}", self.file.mesh.dcn.data));
        }
        out += &format!("mesh: {{{}}}\n", mesh.join(", "));
        for (name, rules) in [("rules", &self.rules), ("storage", &self.storage)] {
            if !rules.is_empty() {
                out += &format!("{name}:\n");
                rules.iter().for_each(|r| out += &format!("  {}\n", rule(r)));
            }
        }
        if !self.overrides.is_empty() {
            out += "tensors:\n";
            for e in &self.overrides {
                let rules: Vec<String> = e.rules.iter().map(rule).collect();
                out += &format!("  \"{}\": {{{}}}\n", e.pattern, rules.join(", "));
            }
        }
        let policy = serde_json::to_value(self.file.context_parallel).expect("a policy serializes");
        let keys = policy.as_object().into_iter().flatten().filter_map(|(key, value)| {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_string);
            // Omit the default value.
            (!value.is_null() && (key.as_str(), text.as_str()) != ("outer", "gather_kv"))
                .then(|| format!("{key}: {text}"))
        });
        out += &format!("context_parallel: {{{}}}\n", keys.collect::<Vec<_>>().join(", "));
        out
    }
}

/// Maximum number of virtual devices per slice up to which a mesh axis of -1 is expanded.
const VIRTUAL_DEVICES: usize = 8;

const AXES: [&str; 5] = ["data", "cfg", "fsdp", "context", "tensor"];

fn sizes(mesh: &Mesh) -> [(&'static str, i64); 5] {
    let values = [mesh.data, mesh.cfg, mesh.fsdp, mesh.context, mesh.tensor];
    std::array::from_fn(|i| (AXES[i], values[i]))
}

/// Parses a mesh such as `cfg=2,context=-1`; omitted axes have size 1.
///
/// # Errors
/// Returns an error if the text is not a list of `AXIS=SIZE`, an axis is unknown or repeated, or a size is invalid.
pub fn parse_mesh(text: &str) -> Result<Mesh, ConfigError> {
    let fail = |why: String| Err(ConfigError::argument(format!("--mesh {text}: {why}; e.g. --mesh cfg=2,context=4")));
    let mut mesh = Mesh::default();
    let mut seen = Vec::new();
    for part in text.split(',') {
        let Some((axis, size)) = part.split_once('=') else { return fail(format!("'{part}' is not AXIS=SIZE")) };
        let (axis, Ok(size)) = (axis.trim(), size.trim().parse::<i64>()) else {
            return fail(format!("'{size}' is not a whole number"));
        };
        let slot = match axis {
            "data" => &mut mesh.data,
            "cfg" => &mut mesh.cfg,
            "fsdp" => &mut mesh.fsdp,
            "context" => &mut mesh.context,
            "tensor" => &mut mesh.tensor,
            "dcn.data" => &mut mesh.dcn.data,
            _ => return fail(format!("unknown axis '{axis}'; known axes are {}", AXES.join(", "))),
        };
        if seen.contains(&axis) {
            return fail(format!("the axis '{axis}' is given twice"));
        }
        seen.push(axis);
        *slot = size;
    }
    match check_mesh(&mesh) {
        Ok(()) => Ok(mesh),
        Err(why) => fail(why),
    }
}

/// Formats a mesh as `--mesh` accepts it.
pub(crate) fn mesh_text(mesh: &Mesh) -> String {
    let slices = if mesh.dcn.data == 1 { String::new() } else { format!(",dcn.data={}", mesh.dcn.data) };
    sizes(mesh).map(|(axis, size)| format!("{axis}={size}")).join(",") + &slices
}

/// Checks that sizes are positive, except for at most one -1.
pub(crate) fn check_mesh(mesh: &Mesh) -> Result<(), String> {
    if let Some((axis, size)) = sizes(mesh).into_iter().find(|(_, s)| *s == 0 || *s < -1) {
        return Err(format!("{axis} = {size} must be at least 1, or -1 for the remaining devices"));
    }
    if mesh.dcn.data < 1 {
        return Err(format!("dcn.data = {} must be at least 1", mesh.dcn.data));
    }
    match sizes(mesh).iter().filter(|(_, s)| *s == -1).count() {
        0 | 1 => Ok(()),
        n => Err(format!("{n} axes are -1; only one axis can be -1")),
    }
}

/// Returns the mesh axes that have more than one device, with -1 replaced by the number of remaining devices.
///
/// # Errors
/// Returns an error if the mesh does not match the number of devices.
pub(crate) fn resolve_mesh(mesh: &Mesh, devices: usize) -> Result<hlo::DeviceMesh, ConfigError> {
    let fail = |why: String| Err(ConfigError::argument(format!("mesh {}: {why}", mesh_text(mesh))));
    if let Err(why) = check_mesh(mesh) {
        return fail(why);
    }
    let slices = usize::try_from(mesh.dcn.data).unwrap_or(1);
    if !devices.is_multiple_of(slices) {
        return fail(format!("{devices} devices cannot be divided into {slices} equal slices"));
    }
    let devices = devices / slices;
    let fixed = sizes(mesh).iter().filter(|(_, s)| *s > 0).try_fold(1usize, |n, (_, s)| n.checked_mul(*s as usize));
    let Some(fixed) = fixed else { return fail("the mesh has too many devices".into()) };
    let rest = sizes(mesh).iter().any(|(_, s)| *s == -1);
    if rest && !devices.is_multiple_of(fixed) {
        return fail(format!(
            "{devices} devices{} are not divisible by {fixed}, the product of the other axes",
            per_slice_suffix(slices)
        ));
    }
    if !rest && fixed > devices {
        return fail(format!("needs {fixed} devices{0}, but there are {devices}", per_slice_suffix(slices)));
    }
    // Slices are consecutive in device order, so they are the outer part of the outermost axis.
    let size = |axis: &str, s: i64| {
        let own = if s == -1 { devices / fixed } else { s as usize };
        if axis == "data" { own * slices } else { own }
    };
    let axes = sizes(mesh).into_iter().map(|(a, s)| (a.to_string(), size(a, s))).filter(|(_, s)| *s > 1).collect();
    Ok(hlo::DeviceMesh { axes })
}

fn per_slice_suffix(slices: usize) -> &'static str {
    if slices > 1 { " per slice" } else { "" }
}

/// Axes for which layout files cannot have rules.
const WITHOUT_RULES: [Axis; 3] = [Axis::CfgBatch, Axis::Layers, Axis::Replicated];

/// Reads a layout file, or a shipped layout by its name. `auto` reads `replicated`.
///
/// # Errors
/// Returns an error if the file does not exist, or if a key or rule is invalid.
pub fn read_layout_source(name: &str) -> Result<LayoutSource, ConfigError> {
    let name = if name == AUTO { "replicated" } else { name };
    let (label, text) = match (text_file::read(Path::new(name)), presets::shipped_layout(name)) {
        (Ok(text), _) => (name.to_string(), text),
        (Err(_), Some((shipped, text))) => (format!("shardings/{shipped}.yml"), text.to_string()),
        (Err(source), None) if source.kind() == ErrorKind::NotFound => {
            return Err(presets::not_shipped(&presets::LAYOUTS, "layouts", name));
        }
        (Err(source), None) => return Err(ConfigError::unreadable(Path::new(name), source)),
    };
    let node = yaml::parse(&text, &label)?;
    let wrong = |line: u64, message: String| ConfigError::syntax(format!("{label}:{line}"), message);
    let rules = |node: Option<&YamlNode>| -> Result<Vec<Rule>, ConfigError> {
        let Some(YamlNode { data: YamlData::Map(entries), .. }) = node else { return Ok(Vec::new()) };
        let mut rules = Vec::new();
        for (key, value) in entries {
            let axis: Axis = serde_json::from_value(key.as_str().into()).map_err(|e: serde_json::Error| {
                let known = e.to_string();
                let known = known.split('`').skip(3).step_by(2);
                let known: Vec<&str> = known.filter(|name| !WITHOUT_RULES.iter().any(|a| a.name() == *name)).collect();
                wrong(value.line, format!("unknown tensor axis '{key}'; known axes are {}", known.join(", ")))
            })?;
            let mesh_axes: Vec<String> = serde_json::from_value(value.to_value()).map_err(|_| {
                wrong(value.line, format!("rule for '{key}' must be a list of mesh axes, such as [context]"))
            })?;
            if WITHOUT_RULES.contains(&axis) {
                let why = match axis {
                    Axis::CfgBatch => "it follows the rules for 'batch' and 'branch'",
                    _ => "it is never sharded",
                };
                return Err(wrong(value.line, format!("the axis '{key}' cannot have a rule: {why}")));
            }
            if let Some(bad) = mesh_axes.iter().find(|m| !AXES.contains(&m.as_str())) {
                let known = AXES.join(", ");
                return Err(wrong(
                    value.line,
                    format!("rule for '{key}' has unknown mesh axis '{bad}'; known axes are {known}"),
                ));
            }
            if let Some(twice) = mesh_axes.iter().enumerate().find(|(i, m)| mesh_axes[..*i].contains(m)) {
                return Err(wrong(value.line, format!("rule for '{key}' repeats mesh axis '{}'", twice.1)));
            }
            rules.push(Rule { axis, mesh_axes, place: format!("{label}:{}", value.line) });
        }
        Ok(rules)
    };
    let mut overrides = Vec::new();
    if let Some(YamlNode { data: YamlData::Map(entries), .. }) = node.get("tensors") {
        for (pattern, node) in entries {
            overrides.push(Override { pattern: pattern.clone(), rules: rules(Some(node))? });
        }
    }
    let (general, storage) = (rules(node.get("rules"))?, rules(node.get("storage"))?);
    let old = node.get("exchange");
    let policy = node.get("context_parallel").or(old);
    if let Some(rope) = policy.and_then(|policy| policy.get("rope")) {
        let now = r#"tensors: {"*.attn1.keys": {video_sequence: [], text_sequence: []}}"#;
        let message =
            format!("context_parallel has no key 'rope'; to gather keys before the rotary embedding, write {now}");
        return Err(wrong(rope.line, message));
    }
    // Deserialize after the rules, so that errors in rules get specific messages.
    let file: LayoutFile = serde_path_to_error::deserialize(node.to_value())
        .map_err(|e| wrong(line_of(&node, e.path()), format!("{}: {}", e.path(), e.inner())))?;
    if let Some(old) = old {
        static WARNED: Once = Once::new();
        let line = old.line;
        let now = "'exchange' is deprecated; use 'context_parallel'"; // alias
        WARNED.call_once(|| tracing::warn!("{label}:{line}: {now}"));
    }
    let hybrid = file.context_parallel.kind == ContextParallelKind::Hybrid;
    if hybrid != file.context_parallel.ulysses.is_some() {
        let line = policy.map_or(0, |n| n.line);
        let message =
            "context_parallel: 'kind: hybrid' and 'ulysses' (the group size) require each other; set both or neither";
        return Err(wrong(line, message.into()));
    }
    Ok(LayoutSource { file, rules: general, storage, overrides })
}

/// Returns the line of the deepest existing node on a path.
fn line_of(mut node: &YamlNode, path: &serde_path_to_error::Path) -> u64 {
    for segment in path {
        let serde_path_to_error::Segment::Map { key } = segment else { break };
        let Some(inner) = node.get(key) else { break };
        node = inner;
    }
    node.line
}

impl Config {
    /// Returns the chip that `runtime.chip_file` selects for time predictions; `None` if the key is not set.
    ///
    /// # Errors
    /// Returns an error if the name is unknown or the file cannot be read.
    pub(crate) fn chip(&self) -> Result<Option<Chip>, String> {
        self.runtime.chip_file.as_deref().map(Chip::find).transpose().map_err(|e| e.to_string())
    }

    /// Returns the mesh of the configuration, or the default mesh of its layout if the configuration sets none.
    fn named_mesh(&self) -> Result<Mesh, ConfigError> {
        let file = read_layout_source(&self.layout)?.file;
        Ok(self.mesh.unwrap_or(file.mesh))
    }

    /// Returns the number of devices in the mesh; `None` if an axis is -1.
    ///
    /// # Errors
    /// Returns an error if the layout does not exist.
    pub(crate) fn named_devices(&self) -> Result<Option<usize>, ConfigError> {
        let has_rest = sizes(&self.named_mesh()?).iter().any(|(_, size)| *size == -1);
        if has_rest { Ok(None) } else { self.virtual_devices().map(Some) }
    }

    /// Returns the number of devices to create on a virtual platform: the size of the mesh. An axis of -1 gets the
    /// largest size with at most eight devices per slice, but at least 1.
    ///
    /// # Errors
    /// Returns an error if the layout does not exist or the mesh is invalid.
    pub(crate) fn virtual_devices(&self) -> Result<usize, ConfigError> {
        let mesh = self.named_mesh()?;
        let named: usize = sizes(&mesh).iter().filter_map(|(_, s)| usize::try_from(*s).ok()).product();
        let rest = sizes(&mesh).iter().any(|(_, s)| *s == -1);
        let slices = usize::try_from(mesh.dcn.data).unwrap_or(1);
        Ok(slices * if rest { named * (VIRTUAL_DEVICES / named.max(1)).max(1) } else { named.max(1) })
    }

    /// Returns the number of slices (`mesh.dcn.data`).
    pub(crate) fn slices(&self) -> Result<usize, ConfigError> {
        Ok(usize::try_from(self.named_mesh()?.dcn.data).unwrap_or(1))
    }

    /// Returns the layout for a number of devices; mesh axes with one device are omitted.
    ///
    /// # Errors
    /// Returns an error if the layout does not exist or the mesh does not match the number of devices.
    pub fn placement(&self, devices: usize) -> Result<Layout, ConfigError> {
        let read = read_layout_source(&self.layout)?;
        let mesh = resolve_mesh(self.mesh.as_ref().unwrap_or(&read.file.mesh), devices)?;
        read.on(mesh).map_err(|e| ConfigError::argument(format!("layout {}: {e}", self.layout)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_for_unsupported_or_unknown_axes_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.yml");
        let error = |axis: &str| {
            std::fs::write(&path, format!("rules:\n  {axis}: [data]\n")).unwrap();
            let error = read_layout_source(path.to_str().unwrap()).unwrap_err().to_string();
            error.split_once(":2: ").expect("a line").1.to_string()
        };
        assert_eq!(error("rows"), "the axis 'rows' cannot have a rule: it follows the rules for 'batch' and 'branch'");
        for axis in ["layers", "whole"] {
            assert_eq!(error(axis), format!("the axis '{axis}' cannot have a rule: it is never sharded"));
        }
        assert_eq!(
            error("row"),
            "unknown tensor axis 'row'; known axes are batch, branch, video_sequence, audio_sequence, text_sequence, embed, \
             heads, kv_heads, head_dim, mlp, vocab, frames, height, width, channels, samples"
        );
    }

    #[test]
    fn meshes_are_parsed_and_resolved() {
        let mesh = parse_mesh("cfg=2,context=-1").unwrap();
        assert_eq!(mesh_text(&mesh), "data=1,cfg=2,fsdp=1,context=-1,tensor=1");
        assert_eq!(resolve_mesh(&mesh, 8).unwrap(), hlo::DeviceMesh::new(&[("cfg", 2), ("context", 4)]));
        assert_eq!(resolve_mesh(&Mesh::default(), 8).unwrap().axes, []);
        let message = |text: &str| parse_mesh(text).unwrap_err().to_string();
        assert_eq!(message("cfg"), "--mesh cfg: 'cfg' is not AXIS=SIZE; e.g. --mesh cfg=2,context=4");
        assert!(message("ctx=2").contains("unknown axis 'ctx'; known axes are data, cfg, fsdp, context, tensor"));
        assert!(message("cfg=-1,data=-1").contains("2 axes are -1; only one axis can be -1"));
        assert!(message("cfg=0").contains("cfg = 0 must be at least 1, or -1 for the remaining devices"));
        assert!(message("cfg=2,cfg=2").contains("'cfg' is given twice"));
        let slices = parse_mesh("dcn.data=2,context=-1").unwrap();
        assert_eq!(resolve_mesh(&slices, 8).unwrap(), hlo::DeviceMesh::new(&[("data", 2), ("context", 4)]));
        let error = resolve_mesh(&Mesh { context: 3, ..slices }, 4).unwrap_err().to_string();
        assert!(
            error.ends_with("context=3,tensor=1,dcn.data=2: needs 3 devices per slice, but there are 2"),
            "{error}"
        );
        assert!(
            resolve_mesh(&slices, 7)
                .unwrap_err()
                .to_string()
                .ends_with("7 devices cannot be divided into 2 equal slices")
        );
        let error = resolve_mesh(&mesh, 7).unwrap_err().to_string();
        assert_eq!(
            error,
            "mesh data=1,cfg=2,fsdp=1,context=-1,tensor=1: 7 devices are not divisible by 2, the product of the other axes"
        );
    }

    #[test]
    fn layouts_round_trip_through_yaml() {
        let folder = tempfile::tempdir().unwrap();
        for (name, _) in super::super::presets::LAYOUTS {
            let source = read_layout_source(name).unwrap();
            let path = folder.path().join("again.yml");
            std::fs::write(&path, source.to_yaml(&["a comment".into()])).unwrap();
            let again = read_layout_source(path.to_str().unwrap()).unwrap();
            let plain = |rules: &[Rule]| rules.iter().map(|r| (r.axis, r.mesh_axes.clone())).collect::<Vec<_>>();
            assert_eq!(plain(&source.rules), plain(&again.rules), "{name}");
            assert_eq!(plain(&source.storage), plain(&again.storage), "{name}");
            let patterns =
                |s: &LayoutSource| s.overrides.iter().map(|e| (e.pattern.clone(), plain(&e.rules))).collect::<Vec<_>>();
            assert_eq!(patterns(&source), patterns(&again), "{name}");
            assert_eq!(
                (source.file.mesh, source.file.context_parallel),
                (again.file.mesh, again.file.context_parallel),
                "{name}"
            );
        }
    }

    #[test]
    fn replicated_layout_is_single_device() {
        for name in ["replicated", "shardings/replicated.yml"] {
            let config = Config { layout: name.into(), ..Config::default() };
            assert!(config.placement(1).unwrap().is_single(), "{name}");
        }
        let config = Config { layout: "nowhere.yml".into(), ..Config::default() };
        assert!(config.placement(1).unwrap_err().to_string().starts_with("nowhere.yml: no such file or layout; "));
    }
}
