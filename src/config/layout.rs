//! Layout files and meshes: which devices there are, and what is split over them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Once;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::presets;
use super::schema::{AUTO, Config, Mesh};
use super::yaml::{self, Data, Node};
use crate::analysis::Chip;
use crate::hlo;
use crate::nn::{Axis, ContextParallelKind, ContextParallelPolicy, Layout, LayoutError, Override, Rule};
use crate::text_file;

/// A file of `shardings/`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct LayoutFile {
    /// The devices, unless the configuration has a mesh of its own.
    pub(crate) mesh: Mesh,
    /// Placement during computation: for each logical axis the mesh axes that split it, outer
    /// first.
    pub(crate) rules: BTreeMap<Axis, Vec<String>>,
    /// How weights are split further between their uses; each is gathered right before its use.
    pub(crate) storage: BTreeMap<Axis, Vec<String>>,
    /// Rules of single tensors, by patterns over `component.name` in which `*` stands for any text. The first pattern
    /// that matches and has the axis wins.
    pub(crate) tensors: BTreeMap<String, BTreeMap<Axis, Vec<String>>>,
    /// How attention crosses a split sequence.
    #[serde(alias = "exchange")]
    pub(crate) context_parallel: ContextParallelPolicy,
}

/// A layout file with its rules in the order of its lines.
#[derive(Clone, Debug)]
pub struct LayoutSource {
    /// The file without order.
    pub(crate) file: LayoutFile,
    /// Placement during computation.
    pub(crate) rules: Vec<Rule>,
    /// How weights are split further between their uses.
    pub(crate) storage: Vec<Rule>,
    pub(crate) overrides: Vec<Override>,
}

impl LayoutSource {
    /// The rules on a mesh, whose axes have more than one device each; axes that it lacks are left out of the rules.
    ///
    /// # Errors
    /// None where the file was read: its rules name known axes.
    pub fn on(&self, mesh: hlo::Mesh) -> Result<Layout, LayoutError> {
        let split = |rules: &[Rule]| -> Vec<Rule> {
            let present = |axes: &[String]| axes.iter().filter(|a| mesh.size(a).is_some()).cloned().collect();
            rules.iter().map(|r| Rule { mesh_axes: present(&r.mesh_axes), ..r.clone() }).collect()
        };
        let (rules, storage) = (split(&self.rules), split(&self.storage));
        let overrides =
            self.overrides.iter().map(|e| Override { rules: split(&e.rules), ..e.clone() }).collect::<Vec<_>>();
        Layout::new(mesh.clone(), rules, storage, overrides, self.file.context_parallel)
    }

    /// As a layout file, under lines of comment.
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
        let policy = serde_json::to_value(self.file.context_parallel).expect("a policy came from such a value");
        let keys = policy.as_object().into_iter().flatten().filter_map(|(key, value)| {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_string);
            // What stands at its default says nothing.
            (!value.is_null() && (key.as_str(), text.as_str()) != ("outer", "gather_kv"))
                .then(|| format!("{key}: {text}"))
        });
        out += &format!("context_parallel: {{{}}}\n", keys.collect::<Vec<_>>().join(", "));
        out
    }
}

/// Virtual devices that a mesh with an open size is padded to.
const VIRTUAL_DEVICES: usize = 8;

const AXES: [&str; 5] = ["data", "cfg", "fsdp", "context", "tensor"];

fn sizes(mesh: &Mesh) -> [(&'static str, i64); 5] {
    let values = [mesh.data, mesh.cfg, mesh.fsdp, mesh.context, mesh.tensor];
    std::array::from_fn(|i| (AXES[i], values[i]))
}

/// Reads `cfg=2,context=-1`; an axis that is not named is 1.
///
/// # Errors
/// What cannot be read.
pub fn parse_mesh(text: &str) -> Result<Mesh, ConfigError> {
    let fail = |why: String| Err(ConfigError::Flag(format!("--mesh {text}: {why}; e.g. --mesh cfg=2,context=4")));
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
            _ => return fail(format!("'{axis}' is no axis, known are {}", AXES.join(", "))),
        };
        if seen.contains(&axis) {
            return fail(format!("'{axis}' is given twice"));
        }
        seen.push(axis);
        *slot = size;
    }
    match check_mesh(&mesh) {
        Ok(()) => Ok(mesh),
        Err(why) => fail(why),
    }
}

/// As `--mesh` takes it.
pub(crate) fn mesh_text(mesh: &Mesh) -> String {
    let slices = if mesh.dcn.data == 1 { String::new() } else { format!(",dcn.data={}", mesh.dcn.data) };
    sizes(mesh).map(|(axis, size)| format!("{axis}={size}")).join(",") + &slices
}

/// Checks that every size can be meant.
pub(crate) fn check_mesh(mesh: &Mesh) -> Result<(), String> {
    if let Some((axis, size)) = sizes(mesh).into_iter().find(|(_, s)| *s == 0 || *s < -1) {
        return Err(format!("{axis} = {size} must be at least 1, or -1 for the rest"));
    }
    if mesh.dcn.data < 1 {
        return Err(format!("dcn.data = {} must be at least 1", mesh.dcn.data));
    }
    match sizes(mesh).iter().filter(|(_, s)| *s == -1).count() {
        0 | 1 => Ok(()),
        n => Err(format!("{n} axes are -1; only one can be the rest")),
    }
}

/// The axes of more than one device, with the rest filled in for a number of devices.
///
/// # Errors
/// Sizes that do not make up the devices.
pub(crate) fn resolve_mesh(mesh: &Mesh, devices: usize) -> Result<hlo::Mesh, ConfigError> {
    let fail = |why: String| Err(ConfigError::Flag(format!("mesh {}: {why}", mesh_text(mesh))));
    if let Err(why) = check_mesh(mesh) {
        return fail(why);
    }
    let slices = usize::try_from(mesh.dcn.data).unwrap_or(1);
    if !devices.is_multiple_of(slices) {
        return fail(format!("{devices} devices are not {slices} equal slices"));
    }
    let devices = devices / slices;
    let fixed = sizes(mesh).iter().filter(|(_, s)| *s > 0).try_fold(1usize, |n, (_, s)| n.checked_mul(*s as usize));
    let Some(fixed) = fixed else { return fail("no machine has as many devices".into()) };
    let rest = sizes(mesh).iter().any(|(_, s)| *s == -1);
    if rest && !devices.is_multiple_of(fixed) {
        return fail(format!("{devices} devices{} do not divide by {fixed}", of_a_slice(slices)));
    }
    if !rest && fixed > devices {
        return fail(format!("needs {fixed} devices{0}, there are {devices}", of_a_slice(slices)));
    }
    // Slices follow each other in the order of the devices: they are the outer part of the outermost axis.
    let size = |axis: &str, s: i64| {
        let own = if s == -1 { devices / fixed } else { s as usize };
        if axis == "data" { own * slices } else { own }
    };
    let axes = sizes(mesh).into_iter().map(|(a, s)| (a.to_string(), size(a, s))).filter(|(_, s)| *s > 1).collect();
    Ok(hlo::Mesh { axes })
}

fn of_a_slice(slices: usize) -> &'static str {
    if slices > 1 { " of a slice" } else { "" }
}

/// Reads a layout by its path or shipped name, with the order and the lines of its rules.
///
/// # Errors
/// No such file; a key or rule it must not have.
pub fn read_layout_source(name: &str) -> Result<LayoutSource, ConfigError> {
    let name = if name == AUTO { "replicated" } else { name };
    let (label, text) = match (text_file::read(Path::new(name)), presets::shipped_layout(name)) {
        (Ok(text), _) => (name.to_string(), text),
        (Err(_), Some((shipped, text))) => (format!("shardings/{shipped}.yml"), text.to_string()),
        (Err(source), None) => return Err(ConfigError::Read { path: name.into(), source }),
    };
    let node = yaml::parse(&text, &label)?;
    let wrong = |line: u64, message: String| ConfigError::Syntax { place: format!("{label}:{line}"), message };
    let rules = |node: Option<&Node>| -> Result<Vec<Rule>, ConfigError> {
        let Some(Node { data: Data::Map(entries), .. }) = node else { return Ok(Vec::new()) };
        let mut rules = Vec::new();
        for (key, value) in entries {
            let axis: Axis = serde_json::from_value(key.as_str().into()).map_err(|e: serde_json::Error| {
                let known = e.to_string();
                let known = known.split_once("expected ").map_or("", |(_, known)| known);
                wrong(value.line, format!("'{key}' is no axis of a tensor, known are {known}"))
            })?;
            let mesh_axes: Vec<String> = serde_json::from_value(value.to_value()).map_err(|_| {
                wrong(value.line, format!("rule of '{key}' must be a list of mesh axes, such as [context]"))
            })?;
            if matches!(axis, Axis::CfgBatch | Axis::Replicated | Axis::Layers) {
                return Err(wrong(
                    value.line,
                    format!("'{key}' has no rule of its own; rows follow 'batch' and 'branch'"),
                ));
            }
            if let Some(bad) = mesh_axes.iter().find(|m| !AXES.contains(&m.as_str())) {
                let known = AXES.join(", ");
                return Err(wrong(value.line, format!("rule of '{key}' names mesh axis '{bad}', known are {known}")));
            }
            if let Some(twice) = mesh_axes.iter().enumerate().find(|(i, m)| mesh_axes[..*i].contains(m)) {
                return Err(wrong(value.line, format!("rule of '{key}' names mesh axis '{}' twice", twice.1)));
            }
            rules.push(Rule { axis, mesh_axes, place: format!("{label}:{}", value.line) });
        }
        Ok(rules)
    };
    let mut overrides = Vec::new();
    if let Some(Node { data: Data::Map(entries), .. }) = node.get("tensors") {
        for (pattern, node) in entries {
            overrides.push(Override { pattern: pattern.clone(), rules: rules(Some(node))? });
        }
    }
    let (general, storage) = (rules(node.get("rules"))?, rules(node.get("storage"))?);
    let old = node.get("exchange");
    let policy = node.get("context_parallel").or(old);
    if let Some(rope) = policy.and_then(|policy| policy.get("rope")) {
        let now = r#"tensors: {"*.attn1.keys": {video_sequence: [], text_sequence: []}}"#;
        let message = format!("context_parallel has no 'rope'; to gather keys before they are rotated, write {now}");
        return Err(wrong(rope.line, message));
    }
    // After the rules, whose mistakes are said in their own words.
    let file: LayoutFile = serde_path_to_error::deserialize(node.to_value())
        .map_err(|e| wrong(line_of(&node, e.path()), format!("{}: {}", e.path(), e.inner())))?;
    if let Some(old) = old {
        static WARNED: Once = Once::new();
        let line = old.line;
        let now = "'exchange' is now called 'context_parallel'"; // alias
        WARNED.call_once(|| tracing::warn!("{label}:{line}: {now}"));
    }
    let hybrid = file.context_parallel.kind == ContextParallelKind::Hybrid;
    if hybrid != file.context_parallel.ulysses.is_some() {
        let line = policy.map_or(0, |n| n.line);
        let message = "context_parallel: 'ulysses' is the size of a hybrid's groups: give both or neither";
        return Err(wrong(line, message.into()));
    }
    Ok(LayoutSource { file, rules: general, storage, overrides })
}

/// The line of the deepest part of a path that the file has.
fn line_of(mut node: &Node, path: &serde_path_to_error::Path) -> u64 {
    for segment in path {
        let serde_path_to_error::Segment::Map { key } = segment else { break };
        let Some(inner) = node.get(key) else { break };
        node = inner;
    }
    node.line
}

impl Config {
    /// The chip that times are predicted with, where one is named.
    ///
    /// # Errors
    /// An unknown name; a file that cannot be read.
    pub(crate) fn chip(&self) -> Result<Option<Chip>, String> {
        self.runtime.chip_file.as_deref().map(Chip::find).transpose().map_err(|e| e.to_string())
    }

    /// The mesh of the configuration, else that of its layout's file.
    fn named_mesh(&self) -> Result<Mesh, ConfigError> {
        let file = read_layout_source(&self.layout)?.file;
        Ok(self.mesh.unwrap_or(file.mesh))
    }

    /// Number of devices that the mesh names; `None`: one of its axes takes the rest.
    ///
    /// # Errors
    /// No such layout.
    pub(crate) fn named_devices(&self) -> Result<Option<usize>, ConfigError> {
        let has_rest = sizes(&self.named_mesh()?).iter().any(|(_, size)| *size == -1);
        if has_rest { Ok(None) } else { self.virtual_devices().map(Some) }
    }

    /// Devices a platform of virtual devices starts for this configuration: what the mesh names, and where it takes the
    /// rest, as many as make eight.
    ///
    /// # Errors
    /// No such layout, or a mesh that cannot be meant.
    pub(crate) fn virtual_devices(&self) -> Result<usize, ConfigError> {
        let mesh = self.named_mesh()?;
        let named: usize = sizes(&mesh).iter().filter_map(|(_, s)| usize::try_from(*s).ok()).product();
        let rest = sizes(&mesh).iter().any(|(_, s)| *s == -1);
        let slices = usize::try_from(mesh.dcn.data).unwrap_or(1);
        Ok(slices * if rest { named * (VIRTUAL_DEVICES / named.max(1)).max(1) } else { named.max(1) })
    }

    /// Groups of devices that the mesh is spread over, `mesh.dcn`.
    pub(crate) fn slices(&self) -> Result<usize, ConfigError> {
        Ok(usize::try_from(self.named_mesh()?.dcn.data).unwrap_or(1))
    }

    /// The mesh and the rules for a number of devices; axes of one device are left out of both.
    ///
    /// # Errors
    /// No such layout, or a mesh that the devices do not make up.
    pub fn placement(&self, devices: usize) -> Result<Layout, ConfigError> {
        let read = read_layout_source(&self.layout)?;
        let mesh = resolve_mesh(self.mesh.as_ref().unwrap_or(&read.file.mesh), devices)?;
        read.on(mesh).map_err(|e| ConfigError::Flag(format!("layout {}: {e}", self.layout)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meshes_are_read_and_filled() {
        let mesh = parse_mesh("cfg=2,context=-1").unwrap();
        assert_eq!(mesh_text(&mesh), "data=1,cfg=2,fsdp=1,context=-1,tensor=1");
        assert_eq!(resolve_mesh(&mesh, 8).unwrap(), hlo::Mesh::new(&[("cfg", 2), ("context", 4)]));
        assert_eq!(resolve_mesh(&Mesh::default(), 8).unwrap().axes, []);
        let message = |text: &str| parse_mesh(text).unwrap_err().to_string();
        assert_eq!(message("cfg"), "--mesh cfg: 'cfg' is not AXIS=SIZE; e.g. --mesh cfg=2,context=4");
        assert!(message("ctx=2").contains("'ctx' is no axis, known are data, cfg, fsdp, context, tensor"));
        assert!(message("cfg=-1,data=-1").contains("2 axes are -1; only one can be the rest"));
        assert!(message("cfg=0").contains("cfg = 0 must be at least 1, or -1 for the rest"));
        assert!(message("cfg=2,cfg=2").contains("'cfg' is given twice"));
        let slices = parse_mesh("dcn.data=2,context=-1").unwrap();
        assert_eq!(resolve_mesh(&slices, 8).unwrap(), hlo::Mesh::new(&[("data", 2), ("context", 4)]));
        let error = resolve_mesh(&Mesh { context: 3, ..slices }, 4).unwrap_err().to_string();
        assert!(error.ends_with("context=3,tensor=1,dcn.data=2: needs 3 devices of a slice, there are 2"), "{error}");
        assert!(resolve_mesh(&slices, 7).unwrap_err().to_string().ends_with("7 devices are not 2 equal slices"));
        let error = resolve_mesh(&mesh, 7).unwrap_err().to_string();
        assert_eq!(error, "mesh data=1,cfg=2,fsdp=1,context=-1,tensor=1: 7 devices do not divide by 2");
    }

    #[test]
    fn layouts_are_written_as_they_are_read() {
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
    fn the_shipped_layout_is_one_device() {
        for name in ["replicated", "shardings/replicated.yml"] {
            let config = Config { layout: name.into(), ..Config::default() };
            assert!(config.placement(1).unwrap().is_single(), "{name}");
        }
        let config = Config { layout: "nowhere.yml".into(), ..Config::default() };
        assert!(config.placement(1).unwrap_err().to_string().starts_with("cannot read nowhere.yml"));
    }
}
