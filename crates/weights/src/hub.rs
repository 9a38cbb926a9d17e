//! Read-only access to the local Hugging Face cache.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::error::WeightsError;
use super::published::pull_command;
use ltx2_base::text_file;

/// File name extensions of models and LoRAs.
const FILES: [&str; 7] = [".safetensors", ".gguf", ".json", ".flashpack", ".bin", ".pt", ".ckpt"];

/// A cache folder `…/hub`, and the setting that determined it.
#[derive(Clone, Debug)]
pub struct HubCache {
    root: PathBuf,
    origin: &'static str,
}

impl HubCache {
    /// Returns the cache at a path.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        HubCache { root: root.into(), origin: "given" }
    }

    /// Returns the cache that Hugging Face tools use: `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE`, `HF_HOME/hub`,
    /// `XDG_CACHE_HOME/huggingface/hub`, or `~/.cache/huggingface/hub`.
    pub fn from_env() -> Self {
        Self::from_vars(|key| std::env::var_os(key))
    }

    /// Returns the cache like [`HubCache::from_env`], but looks up environment variables with `var`.
    pub(crate) fn from_vars(var: impl Fn(&str) -> Option<OsString>) -> Self {
        let text = |key: &str| var(key)?.into_string().ok().filter(|text| !text.is_empty());
        // As in Hugging Face's tools, `~` and variables in the value are expanded.
        let folder = |key| match text(key) {
            Some(path) => Some(shellexpand::full_with_context_no_errors(&path, || text("HOME"), text).as_ref().into()),
            None => var(key).filter(|path| !path.is_empty()).map(PathBuf::from),
        };
        if let Some(root) = folder("HF_HUB_CACHE") {
            HubCache { root, origin: "from HF_HUB_CACHE" }
        } else if let Some(root) = folder("HUGGINGFACE_HUB_CACHE") {
            HubCache { root, origin: "from HUGGINGFACE_HUB_CACHE" }
        } else if let Some(home) = folder("HF_HOME") {
            HubCache { root: home.join("hub"), origin: "from HF_HOME" }
        } else if let Some(cache) = folder("XDG_CACHE_HOME") {
            HubCache { root: cache.join("huggingface/hub"), origin: "from XDG_CACHE_HOME" }
        } else {
            let home = folder("HOME").unwrap_or_default();
            HubCache { root: home.join(".cache/huggingface/hub"), origin: "the default, HF_HOME is not set" }
        }
    }

    /// Returns the folder of the cache.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns whether a string has the form `org/name` or `org/name/path`.
    pub fn is_name(name: &str) -> bool {
        let part = |p: &str| {
            !p.is_empty() && !p.starts_with('.') && p.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        // The second part must be a repository, not a file.
        let is_file = |p: &str| FILES.iter().any(|end| p.ends_with(end));
        name.contains('/') && name.split('/').all(part) && !name.split('/').nth(1).is_some_and(is_file)
    }

    /// Returns the snapshot folder of `org/name` at revision `main`, or a path in it.
    ///
    /// # Errors
    /// Returns an error if the repository is not in the cache or has no complete snapshot; the message says which paths
    /// were searched.
    pub fn resolve(&self, name: &str) -> Result<PathBuf, WeightsError> {
        let mut parts = name.splitn(3, '/');
        let (org, repo) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let folder = self.root.join(format!("models--{org}--{repo}"));
        let fail = |reason: String, command| WeightsError::NotFound { name: name.into(), reason, command };
        let pull = || Some(pull_command(name, &[]));
        if !folder.is_dir() {
            let absent = format!(
                "there is no such folder, and no {} in the Hugging Face cache ({})",
                folder.display(),
                self.origin
            );
            return Err(match advice(org, repo) {
                Some(advice) => fail(format!("{absent}; {advice}"), None),
                None => fail(absent, pull()),
            });
        }
        let snapshots = folder.join("snapshots");
        let main = folder.join("refs/main");
        let snapshot = match text_file::read(&main) {
            Ok(revision) => snapshots.join(revision.trim()),
            // A download of a specific revision creates no `main`; a single snapshot is unambiguous.
            Err(_) => only_folder(&snapshots).ok_or_else(|| {
                let (main, snapshots) = (main.display(), snapshots.display());
                fail(format!("{main} is missing and {snapshots} does not contain exactly one snapshot"), pull())
            })?,
        };
        let path = parts.next().map_or(snapshot.clone(), |rest| snapshot.join(rest));
        // Files in a snapshot are links into `blobs`; a link without its blob is an unfinished download.
        match path.exists() {
            true => Ok(path),
            false => Err(fail(format!("the cache contains the repository, but not {}", path.display()), pull())),
        }
    }
}

/// Returns advice for a name that is probably a local path. `None`: it may be the name of a repository.
fn advice(org: &str, repo: &str) -> Option<String> {
    Path::new(org).is_dir().then(|| format!("the folder {org} contains no {repo}; correct the path"))
}

fn only_folder(path: &Path) -> Option<PathBuf> {
    let mut entries = fs::read_dir(path).ok()?.filter_map(|e| Some(e.ok()?.path())).filter(|p| p.is_dir());
    entries.next().filter(|_| entries.next().is_none())
}
