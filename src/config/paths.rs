//! Path resolution: paths in a file are relative to that file, paths on the command line to the working directory.

use std::path::{Component, Path, PathBuf};

use super::ic_loras::is_name;
use super::presets::shipped_layout;
use super::schema::{AUTO, Config};
use super::yaml::{YamlData, YamlNode};
use crate::analysis::Chip;
use crate::models::presets::Preset;
use crate::weights::{Component as ModelComponent, HubCache};

/// Returns the keys of `model` whose value is a path or `org/name`.
pub(crate) fn model_paths() -> impl Iterator<Item = &'static str> {
    ["path"].into_iter().chain(ModelComponent::ALL.into_iter().filter_map(ModelComponent::override_key))
}

/// Rewrites the paths of a configuration file in `folder` to be relative to the working directory.
pub(crate) fn resolve(root: &mut YamlNode, folder: &Path) {
    let YamlData::Map(sections) = &mut root.data else { return };
    for (section, node) in sections {
        match section.as_str() {
            "model" => {
                for key in model_paths() {
                    text(node, key, |t| model(folder, t));
                }
                each(node, "loras", |own| text(own, "path", |t| lora(folder, t)));
                if let Some(own) = child(node, "ic_lora") {
                    text(own, "path", |t| if is_name(t) { t.into() } else { lora(folder, t) });
                }
            }
            "request" => {
                for key in ["negative_prompt_file", "prompts", "text_embeddings", "video", "mask"] {
                    text(node, key, |t| join(folder, t));
                }
                if let Some(sound) = child(node, "audio") {
                    text(sound, "path", |t| join(folder, t));
                }
                // Images and other conditioning inputs.
                lists(node, |item| {
                    ["path", "attention_mask"].iter().for_each(|key| text(item, key, |t| join(folder, t)))
                });
            }
            "dfr" => {
                if let Some(own) = child(node, "detailing_lora") {
                    text(own, "path", |t| if is_name(t) { t.into() } else { lora(folder, t) });
                }
            }
            "enhance" => text(node, "system", |t| join(folder, t)),
            "output" => {
                for key in ["path", "save_frames", "save_audio", "save_exr", "preview_decoder"] {
                    text(node, key, |t| join(folder, t));
                }
            }
            "runtime" => {
                text(
                    node,
                    "platform",
                    |t| if t.contains('/') || t.ends_with(".so") { join(folder, t) } else { t.into() },
                );
                text(node, "chip_file", |t| if Chip::is_file(t) { join(folder, t) } else { t.into() });
                text(node, "compile_cache", |t| if matches!(t, "auto" | "off") { t.into() } else { join(folder, t) });
            }
            "serve" => {
                ["api_key_file", "state"].iter().for_each(|key| text(node, key, |t| join(folder, t)));
                if let Some(YamlData::Map(loras)) = child(node, "loras").map(|loras| &mut loras.data) {
                    loras.iter_mut().for_each(|(_, own)| text(own, "path", |t| lora(folder, t)));
                }
            }
            "layout" => change(node, |t| layout(folder, t)),
            _ => {}
        }
    }
}

/// Joins a path to `folder`. Removes `.` components, and `..` components whose removal cannot change the target.
pub(crate) fn join(folder: &Path, path: &str) -> String {
    let mut out = PathBuf::new();
    for part in folder.join(path).components() {
        match part {
            Component::CurDir => {}
            // If the folder is a symbolic link, `..` is the parent of its target, so keep it.
            Component::ParentDir
                if matches!(out.components().next_back(), Some(Component::Normal(_))) && !out.is_symlink() =>
            {
                out.pop();
            }
            other => out.push(other),
        }
    }
    out.to_string_lossy().into_owned()
}

/// Resolves the name of a model. It is a path if it exists in `folder`, or if it is neither `org/name` nor the name of
/// an embedded model.
fn model(folder: &Path, name: &str) -> String {
    let known = HubCache::is_name(name) || Preset::named(name).is_some();
    if known && !folder.join(name).exists() { name.into() } else { join(folder, name) }
}

/// Resolves the path of a LoRA. `org/name/file` is a name on the hub, unless `folder` has such a file.
fn lora(folder: &Path, path: &str) -> String {
    if HubCache::is_name(path) && !folder.join(path).exists() { path.into() } else { join(folder, path) }
}

/// Resolves the name of a layout. If `folder` has no such file, `NAME` and `shardings/NAME.yml` refer to a shipped
/// layout.
fn layout(folder: &Path, name: &str) -> String {
    let known = name == AUTO || shipped_layout(name).is_some();
    if known && !folder.join(name).exists() { name.into() } else { join(folder, name) }
}

fn change(node: &mut YamlNode, f: impl FnOnce(&str) -> String) {
    if let YamlData::Scalar(serde_json::Value::String(text)) = &mut node.data {
        *text = f(text);
    }
}

fn child<'a>(node: &'a mut YamlNode, key: &str) -> Option<&'a mut YamlNode> {
    match &mut node.data {
        YamlData::Map(entries) => entries.iter_mut().find(|(k, _)| k == key).map(|(_, n)| n),
        _ => None,
    }
}

fn text(node: &mut YamlNode, key: &str, f: impl FnOnce(&str) -> String) {
    if let Some(found) = child(node, key) {
        change(found, f);
    }
}

/// Environment variable that `runtime.compile_cache: auto` reads: `off`, or a folder to use instead of the user's cache
/// folder.
pub(crate) const CACHE_VARIABLE: &str = "LTX2_COMPILE_CACHE";

impl Config {
    /// Returns the folder of the compile cache; `None` if it is off.
    pub(crate) fn compile_cache(&self) -> Option<PathBuf> {
        cache_folder(&self.runtime.compile_cache, |name| std::env::var_os(name).map(PathBuf::from))
    }
}

fn cache_folder(setting: &str, variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let given = |name: &str| variable(name).filter(|v| !v.as_os_str().is_empty());
    let folder = |path: PathBuf| if path == Path::new("off") { None } else { Some(path) };
    if setting != "auto" {
        return folder(setting.into());
    }
    match given(CACHE_VARIABLE) {
        Some(path) => folder(path),
        None => user_cache(variable),
    }
}

/// Returns the user's cache folder for this program: `$XDG_CACHE_HOME/ltx2` or `~/.cache/ltx2`.
pub(super) fn user_cache(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let given = |name: &str| variable(name).filter(|v| !v.as_os_str().is_empty());
    Some(given("XDG_CACHE_HOME").or_else(|| Some(given("HOME")?.join(".cache")))?.join("ltx2"))
}

fn each(node: &mut YamlNode, key: &str, f: impl Fn(&mut YamlNode)) {
    if let Some(YamlNode { data: YamlData::List(items), .. }) = child(node, key) {
        items.iter_mut().for_each(f);
    }
}

/// Applies `f` to every item of every list in a map.
fn lists(node: &mut YamlNode, f: impl Fn(&mut YamlNode)) {
    let YamlData::Map(entries) = &mut node.data else { return };
    for (_, value) in entries {
        if let YamlData::List(items) = &mut value.data {
            items.iter_mut().for_each(&f);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::yaml::parse;

    #[test]
    fn paths_are_relative_to_their_file() {
        let text = "model: {path: ../models/nano, vae: ltx2, text_encoder: google/gemma-3-12b-it, loras: [{path: a.safetensors}, {path: org/name/a.safetensors}], ic_lora: {path: deblur}}\n\
                    layout: shardings/replicated.yml\nruntime: {platform: cpu, compile_cache: cache}\n\
                    output: {path: /abs/x.mp4}\nrequest: {images: [{path: ./i.png}]}\n";
        let mut root = parse(text, "t").unwrap();
        resolve(&mut root, Path::new("no_such_folder"));
        assert_eq!(
            root.to_value(),
            serde_json::json!({
                "model": {"path": "models/nano", "vae": "ltx2", "text_encoder": "google/gemma-3-12b-it",
                          "loras": [{"path": "no_such_folder/a.safetensors"}, {"path": "org/name/a.safetensors"}],
                          "ic_lora": {"path": "deblur"}},
                "layout": "shardings/replicated.yml",
                "runtime": {"platform": "cpu", "compile_cache": "no_such_folder/cache"},
                "output": {"path": "/abs/x.mp4"},
                "request": {"images": [{"path": "no_such_folder/i.png"}]},
            })
        );
        assert_eq!(join(Path::new("a/b"), "../../../x"), "../x");
        assert_eq!(join(Path::new(""), "x/y"), "x/y");
    }

    #[test]
    fn compile_cache_defaults_to_the_user_cache_folder() {
        let folder = |setting: &str, set: &[(&str, &str)]| {
            let found = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, v)| PathBuf::from(v));
            cache_folder(setting, found).map(|p| p.display().to_string())
        };
        let user = [("HOME", "/home/u"), ("XDG_CACHE_HOME", "")];
        assert_eq!(folder("auto", &user).as_deref(), Some("/home/u/.cache/ltx2"));
        assert_eq!(folder("auto", &[("HOME", "/home/u"), ("XDG_CACHE_HOME", "/c")]).as_deref(), Some("/c/ltx2"));
        assert_eq!(folder("auto", &[]), None);
        assert_eq!(folder("auto", &[("HOME", "/home/u"), (CACHE_VARIABLE, "off")]), None);
        assert_eq!(folder("auto", &[(CACHE_VARIABLE, "/d")]).as_deref(), Some("/d"));
        assert_eq!(folder("here", &[(CACHE_VARIABLE, "off")]).as_deref(), Some("here"));
        assert_eq!(folder("off", &user), None);
    }
}
