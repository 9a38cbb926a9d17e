//! Finds PJRT plugin files.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use super::error::PjrtError;

/// Environment variable with the path of the plugin file to use.
pub const PLUGIN_VARIABLE: &str = "LTX2_PJRT_PLUGIN";

/// A platform that this crate supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Platform {
    /// The CPU of the host.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
    /// Google Cloud TPUs.
    Tpu,
}

/// Properties of a platform's plugins.
struct PluginInfo {
    /// Name of the platform.
    platform: &'static str,
    /// Path patterns of the plugin file, relative to Python's site-packages or to a folder that `ltx2 plugin install`
    /// wrote.
    files: &'static [&'static str],
    /// Parts of the names of plugin files and of their package folders that indicate the platform.
    parts: &'static [&'static str],
    /// Whether the plugins have a profiler.
    has_profiler: bool,
}

/// Platforms that this crate recognizes but does not support.
const UNSUPPORTED: [PluginInfo; 1] =
    [PluginInfo { platform: "rocm", files: &["jax_plugins/*rocm*/*plugin*.so"], parts: &["rocm"], has_profiler: true }];

impl Platform {
    /// All platforms, in the order in which `--platform auto` tries them. In the names of plugin files, earlier
    /// platforms take precedence.
    pub const ALL: [Platform; 3] = [Platform::Tpu, Platform::Cuda, Platform::Cpu];

    const fn info(self) -> &'static PluginInfo {
        match self {
            Platform::Cpu => &PluginInfo {
                platform: "cpu",
                files: &["lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so", "jax_plugins/*cpu*/*.so"],
                parts: &["cpu"],
                has_profiler: false,
            },
            Platform::Cuda => &PluginInfo {
                platform: "cuda",
                files: &["jax_plugins/xla_cuda*/xla_cuda_plugin.so", "jax_plugins/*cuda*/*.so"],
                parts: &["cuda", "gpu"],
                has_profiler: true,
            },
            Platform::Tpu => {
                &PluginInfo { platform: "tpu", files: &["libtpu/libtpu.so"], parts: &["tpu"], has_profiler: true }
            }
        }
    }

    /// Returns the name, such as `cuda`.
    pub const fn name(self) -> &'static str {
        self.info().platform
    }

    /// Returns the names of all platforms, `cpu` first, separated by `separator`.
    pub fn names(separator: &str) -> String {
        join(Platform::ALL.into_iter().rev(), separator)
    }

    /// Returns the command that installs a plugin, with the names of all platforms: `ltx2 plugin install cpu|…`.
    pub fn install_command() -> String {
        format!("ltx2 plugin install {}", Platform::names("|"))
    }

    /// Returns the names of the platforms whose plugins have a profiler.
    pub(crate) fn with_profiler() -> String {
        join(Platform::ALL.into_iter().rev().filter(|platform| platform.info().has_profiler), " or ")
    }

    /// Returns the platform with this name.
    pub fn named(name: &str) -> Option<Platform> {
        Platform::ALL.into_iter().find(|platform| platform.name() == name)
    }

    /// Guesses the platform of a plugin from its file name; `None` if unknown or not supported.
    pub fn of_file(path: &Path) -> Option<Platform> {
        match Kind::of_file(path)? {
            Kind::Supported(platform) => Some(platform),
            Kind::Unsupported(_) => None,
        }
    }
}

fn join(platforms: impl Iterator<Item = Platform>, separator: &str) -> String {
    platforms.map(Platform::name).collect::<Vec<_>>().join(separator)
}

/// Platform of a plugin, whether or not this crate supports the platform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A platform that this crate supports.
    Supported(Platform),
    /// Name of an unsupported platform, such as `rocm`.
    Unsupported(&'static str),
}

impl Kind {
    /// Returns all known platforms, unsupported ones first.
    fn known() -> impl Iterator<Item = (Kind, &'static PluginInfo)> {
        let unsupported = UNSUPPORTED.iter().map(|info| (Kind::Unsupported(info.platform), info));
        unsupported.chain(Platform::ALL.into_iter().map(|platform| (Kind::Supported(platform), platform.info())))
    }

    /// Returns the first known platform whose name `has_name` accepts.
    pub(crate) fn find(has_name: impl Fn(&str) -> bool) -> Option<Kind> {
        Kind::known().find_map(|(kind, info)| has_name(info.platform).then_some(kind))
    }

    /// Returns `cpu`, `cuda`, `tpu`, `rocm` …
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Supported(platform) => platform.name(),
            Kind::Unsupported(name) => name,
        }
    }

    /// Guesses the platform of a plugin from the names of its file and of its package folder in `jax_plugins`. `None`:
    /// unknown.
    pub fn of_file(path: &Path) -> Option<Kind> {
        let package =
            path.parent().filter(|folder| folder.parent().is_some_and(|above| above.ends_with("jax_plugins")));
        let names = [Some(path), package].into_iter().flatten().filter_map(Path::file_name);
        let names: Vec<String> = names.map(|name| name.to_string_lossy().to_lowercase()).collect();
        let has = |part: &&str| names.iter().any(|name| name.contains(part));
        Kind::known().find_map(|(kind, info)| info.parts.iter().any(has).then_some(kind))
    }
}

/// Finds plugins for unsupported hardware, in `LTX2_PJRT_PLUGIN` and in Python's site-packages. Returns each plugin
/// with the name of its platform.
pub fn find_unsupported() -> Vec<(&'static str, PluginFile)> {
    let variable = env::var_os(PLUGIN_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
    let named = variable.into_iter().filter(|path| path.is_file()).map(|path| (path, PLUGIN_VARIABLE));
    let patterns = || UNSUPPORTED.iter().flat_map(|info| info.files);
    let packages =
        site_packages().into_iter().flat_map(|folder| patterns().flat_map(move |pattern| matches(&folder, pattern)));
    let all = named.chain(packages.map(|path| (path, "Python site-packages")));
    let unsupported = all.filter_map(|(path, origin)| match Kind::of_file(&path)? {
        Kind::Unsupported(name) => Some((name, PluginFile { path, origin: origin.to_owned() })),
        Kind::Supported(_) => None,
    });
    unsupported.collect()
}

/// A plugin file, and where it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluginFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Place where the file was found, such as `Python site-packages`.
    pub origin: String,
}

/// The result of a search for plugins.
#[derive(Clone, Debug)]
pub struct PluginSearch {
    /// Platform whose plugins were searched.
    pub platform: Platform,
    /// Plugin files, in order of preference.
    pub found: Vec<PluginFile>,
    /// Places that were searched, in order, for the error message: folders, files and the environment variable.
    pub searched: Vec<String>,
}

impl PluginSearch {
    /// Returns the error for a search that found nothing.
    pub fn not_found(&self) -> PjrtError {
        PjrtError::NotFound { platform: self.platform.name(), searched: self.searched.clone() }
    }

    fn add(&mut self, path: PathBuf, origin: &str) {
        if !self.found.iter().any(|found| found.path == path) {
            self.found.push(PluginFile { path, origin: origin.to_owned() });
        }
    }

    fn look(&mut self, folder: &Path, origin: &str) {
        self.searched.push(folder.display().to_string());
        for pattern in self.platform.info().files {
            for path in matches(folder, pattern) {
                self.add(path, origin);
            }
        }
    }
}

/// Searches for plugins of a platform, without loading them and without running Python.
///
/// If `explicit` or `LTX2_PJRT_PLUGIN` names a file, that file is the only candidate; `explicit` takes precedence. The
/// variable is ignored if the file name indicates another platform. If neither applies, searches the plugin folders and
/// then Python's site-packages.
pub fn find(platform: Platform, explicit: Option<&Path>) -> PluginSearch {
    let mut search = PluginSearch { platform, found: Vec::new(), searched: Vec::new() };
    if let Some(path) = explicit {
        search.searched.push(path.display().to_string());
        if path.is_file() {
            search.add(path.to_owned(), "explicit path");
        }
        return search;
    }
    match env::var_os(PLUGIN_VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from) {
        Some(path) if Kind::of_file(&path).is_none_or(|of| of == Kind::Supported(platform)) => {
            search.searched.push(format!("{PLUGIN_VARIABLE}={}", path.display()));
            if path.is_file() {
                search.add(path, PLUGIN_VARIABLE);
            }
            // If the selected plugin fails to start, that is an error, so no other candidates are added.
            return search;
        }
        Some(path) => search.searched.push(format!("{PLUGIN_VARIABLE}={} (not {})", path.display(), platform.name())),
        None => {}
    }
    for folder in plugin_folders() {
        search.look(&folder.join(platform.name()), "plugin folder");
    }
    for folder in site_packages() {
        search.look(&folder, "Python site-packages");
    }
    search
}

/// Returns the plugin file in a folder that `ltx2 plugin install` wrote; `None` if the folder contains no plugin file.
pub fn in_folder(platform: Platform, folder: &Path) -> Option<PathBuf> {
    platform.info().files.iter().find_map(|pattern| matches(folder, pattern).into_iter().next())
}

/// Returns the `plugins/` folders to search: in the working directory, in the executable's folder and up to three
/// levels above it, and in the user's data folder.
pub fn plugin_folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = env::current_dir().map(|dir| dir.join("plugins")).into_iter().collect();
    if let Ok(executable) = env::current_exe() {
        // For an executable in target/debug/deps, the last of the four folders is the checkout. Folders above the
        // checkout do not belong to this project.
        let ancestors = executable.ancestors().skip(1).take(4).map(|dir| dir.join("plugins"));
        folders.extend(ancestors.filter(|folder| folder.is_dir()));
    }
    folders.extend(data_folder());
    unique(folders)
}

/// Returns the user's plugin folder: `$XDG_DATA_HOME/ltx2/plugins`, or `~/.local/share/ltx2/plugins` if the variable is
/// not set. `None`: `HOME` is not set either.
pub fn data_folder() -> Option<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let data = set("XDG_DATA_HOME").or_else(|| Some(set("HOME")?.join(".local/share")))?;
    Some(data.join("ltx2/plugins"))
}

/// Returns the existing site-packages folders of the active virtual environment, the environment that contains this
/// executable, the user, the `python3` on PATH, and the system.
fn site_packages() -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> = env::var_os("VIRTUAL_ENV").into_iter().map(PathBuf::from).collect();
    prefixes.extend(env::current_exe().ok().and_then(|file| Some(file.parent()?.parent()?.to_owned())));
    prefixes.extend(env::var_os("HOME").map(|home| PathBuf::from(home).join(".local")));
    for folder in env::split_paths(&env::var_os("PATH").unwrap_or_default()) {
        let python = folder.join("python3");
        // A virtual environment's python3 is a symlink: packages may be in the environment or in the installation that
        // the link points to.
        if python.is_file() {
            prefixes.extend(folder.parent().map(Path::to_owned));
            let real = python.canonicalize().ok();
            prefixes.extend(real.and_then(|real| Some(real.parent()?.parent()?.to_owned())));
        }
        // pyenv puts wrapper scripts named python3 on PATH; the Python versions are in a sibling folder.
        if folder.ends_with("shims") {
            prefixes.extend(folder.parent().into_iter().flat_map(|root| matches(root, "versions/*")));
        }
    }
    prefixes.extend([PathBuf::from("/usr/local"), PathBuf::from("/usr")]);
    let mut folders = Vec::new();
    for prefix in unique(prefixes) {
        folders.extend(matches(&prefix, "lib/python3*/site-packages"));
        folders.extend(matches(&prefix, "lib/python3*/dist-packages"));
    }
    unique(folders)
}

/// Returns the existing paths in `folder` that match a pattern with `*` wildcards, sorted by name.
fn matches(folder: &Path, pattern: &str) -> Vec<PathBuf> {
    let mut paths = vec![folder.to_owned()];
    for component in pattern.split('/') {
        let step = |path: PathBuf| -> Vec<PathBuf> {
            if !component.contains('*') {
                return vec![path.join(component)];
            }
            let names = fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.file_name());
            let mut names: Vec<_> = names.filter(|name| fits(&name.to_string_lossy(), component)).collect();
            names.sort();
            names.into_iter().map(|name| path.join(name)).collect()
        };
        paths = paths.into_iter().flat_map(step).collect();
    }
    paths.retain(|path| path.exists());
    paths
}

/// Returns whether `name` matches a pattern in which each `*` stands for any text.
fn fits(name: &str, pattern: &str) -> bool {
    match pattern.split_once('*') {
        None => name == pattern,
        Some((head, rest)) => name
            .strip_prefix(head)
            .is_some_and(|name| (0..=name.len()).any(|at| name.get(at..).is_some_and(|tail| fits(tail, rest)))),
    }
}

/// Removes each path that resolves to the same folder as an earlier path (on most systems, `/lib` is `/usr/lib`).
fn unique(paths: Vec<PathBuf>) -> Vec<PathBuf> {
    let mut seen = Vec::new();
    let mut first = |path: &PathBuf| {
        let real = path.canonicalize().unwrap_or_else(|_| path.clone());
        let new = !seen.contains(&real);
        seen.push(real);
        new
    };
    paths.into_iter().filter(|path| first(path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugin_file_matching_two_patterns_is_listed_once() {
        assert!(fits("xla_cuda13", "xla_cuda*") && fits("my_cuda_x", "*cuda*") && !fits("tpu", "*cuda*"));
        let root = tempfile::tempdir().unwrap();
        let cuda = root.path().join("jax_plugins/xla_cuda13");
        fs::create_dir_all(&cuda).unwrap();
        fs::write(cuda.join("xla_cuda_plugin.so"), "").unwrap();
        let mut search = PluginSearch { platform: Platform::Cuda, found: Vec::new(), searched: Vec::new() };
        search.look(root.path(), "test");
        assert_eq!(search.found.len(), 1, "a file that matches two patterns is listed once");
        assert!(search.found[0].path.ends_with("jax_plugins/xla_cuda13/xla_cuda_plugin.so"));
    }

    #[test]
    fn file_names_identify_platforms() {
        let of = |name: &str| Kind::of_file(Path::new(name)).map(Kind::name);
        assert_eq!(of("/a/libtpu.so"), Some("tpu"));
        assert_eq!(of("/cpu/xla_cuda_plugin.so"), Some("cuda"));
        assert_eq!(of("pjrt_c_api_cpu_plugin.so"), Some("cpu"));
        assert_eq!(of("/cpu/plugin.so"), None);
        assert_eq!(of("/site-packages/jax_plugins/xla_rocm7/xla_rocm_plugin.so"), Some("rocm"));
        assert_eq!(of("/site-packages/jax_plugins/xla_rocm7/xla_gpu_plugin.so"), Some("rocm"));
        assert_eq!(of("/site-packages/jax_plugins/xla_rocm7/plugin.so"), Some("rocm"));
        assert_eq!(Platform::of_file(Path::new("xla_rocm_plugin.so")), None);
    }

    #[test]
    fn missing_explicit_plugin_has_no_fallback() {
        let search = find(Platform::Cpu, Some(Path::new("/no/such/cpu.so")));
        assert!(search.found.is_empty());
        assert_eq!(
            search.not_found().to_string(),
            "no cpu plugin found: run `ltx2 plugin install cpu`, or set LTX2_PJRT_PLUGIN to a plugin file; \
             searched /no/such/cpu.so"
        );
    }
}
