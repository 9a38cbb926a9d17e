//! The toy model, which the binary contains.

use crate::weights::{ModelSource, Overrides, WeightsError};

/// Path of the toy model in a checkout. In other folders, the name of the embedded copy.
const NAME: &str = "assets/nano";

/// Opens a model like [`ModelSource::open`]. If the folder `assets/nano` does not exist, this name refers to the
/// embedded toy model.
///
/// # Errors
/// Fails for the same reasons as [`ModelSource::open`], or if the embedded model cannot be unpacked.
pub(crate) fn open_model(model: &str, overrides: &Overrides) -> Result<ModelSource, WeightsError> {
    if model != NAME || std::path::Path::new(NAME).exists() {
        return ModelSource::open(model, overrides);
    }
    let folder =
        embedded::folder().map_err(|reason| WeightsError::NotFound { name: NAME.into(), reason, command: None })?;
    ModelSource::open(&folder, overrides)
}

#[cfg(feature = "toy-model")]
mod embedded {
    use std::env;
    use std::fs;
    use std::path::{Path, PathBuf};
    use std::sync::LazyLock;

    use crate::atomic_file::{FileError, write_atomically};
    use crate::config::paths::user_cache;

    /// Start of the SHA-256 of names, sizes and contents of the files; part of the folder's name, so that versions of
    /// the model do not replace each other.
    const VERSION: &str = "29e7572bd3a9d75d";

    /// Returns the files of the model: path in the model folder, contents.
    fn files() -> impl Iterator<Item = &'static (&'static str, &'static [u8])> {
        ltx2_nano_denoiser::FILES.iter().chain(ltx2_nano_codecs::FILES)
    }

    /// Unpacks the model into the user's cache folder and returns its folder there. Files that are already unpacked are
    /// compared with the embedded ones and replaced if they differ. Does this once per process.
    ///
    /// # Errors
    /// Returns what failed and what to do.
    pub(super) fn folder() -> Result<String, String> {
        static FOLDER: LazyLock<Result<String, String>> = LazyLock::new(|| {
            let cache = user_cache(|name| env::var_os(name).map(PathBuf::from)).ok_or(
                "no folder to unpack the toy model in; set HOME or XDG_CACHE_HOME, or change to a checkout of ltx2",
            )?;
            let folder = cache.join(format!("nano-{VERSION}"));
            unpack(&folder).map_err(|error| {
                format!("cannot unpack the toy model: {error}; set XDG_CACHE_HOME to a folder that can be written")
            })?;
            folder.into_os_string().into_string().map_err(|path| format!("{}: the path is not UTF-8", path.display()))
        });
        FOLDER.clone()
    }

    fn unpack(folder: &Path) -> Result<(), FileError> {
        for (name, bytes) in files() {
            let path = folder.join(name);
            if fs::read(&path).is_ok_and(|found| found == *bytes) {
                continue;
            }
            write_atomically(&path, bytes)?;
        }
        Ok(())
    }

    #[cfg(test)]
    mod tests {
        use std::collections::BTreeMap;

        use sha2::{Digest, Sha256};

        use super::*;

        #[test]
        fn embedded_files_are_those_of_the_repository() {
            let mut wanted = BTreeMap::new();
            let mut folders = vec![PathBuf::from("assets/nano")];
            while let Some(folder) = folders.pop() {
                for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
                    match entry.is_dir() {
                        true => folders.push(entry),
                        false if entry.ends_with("README.md") => {}
                        false => {
                            let name = entry.strip_prefix("assets/nano").expect("in the folder").display().to_string();
                            wanted.insert(name, fs::read(&entry).expect("readable"));
                        }
                    }
                }
            }
            let found: BTreeMap<String, Vec<u8>> =
                files().map(|(name, bytes)| (name.to_string(), bytes.to_vec())).collect();
            assert_eq!(found.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>());
            assert!(found == wanted, "contents differ");
            let mut hash = Sha256::new();
            for (name, bytes) in &found {
                hash.update(name);
                hash.update((bytes.len() as u64).to_le_bytes());
                hash.update(bytes);
            }
            assert_eq!(hex::encode(hash.finalize())[..16], *VERSION, "set VERSION to the left value");
        }

        #[test]
        fn damaged_and_missing_files_are_unpacked_again() {
            let dir = tempfile::tempdir().expect("a folder");
            let folder = dir.path().join("nano");
            unpack(&folder).expect("unpacked");
            let path = |name: &str| folder.join(name);
            let (kept, damaged, missing) = ("vae/config.json", "transformer/config.json", "model_index.json");
            let modified = |name: &str| fs::metadata(path(name)).and_then(|m| m.modified()).expect("a time");
            let before = modified(kept);
            fs::write(path(damaged), "{}").expect("written");
            fs::remove_file(path(missing)).expect("removed");
            unpack(&folder).expect("unpacked again");
            for (name, bytes) in files() {
                assert!(fs::read(path(name)).expect("unpacked") == *bytes, "{name}");
            }
            assert_eq!(modified(kept), before, "an intact file is not written again");
        }
    }
}

#[cfg(not(feature = "toy-model"))]
mod embedded {
    /// Returns the error of a build without the model.
    pub(super) fn folder() -> Result<String, String> {
        Err("this program was built without the toy model (feature `toy-model`); change to a checkout of ltx2, or pass \
             the path of a model"
            .into())
    }
}
