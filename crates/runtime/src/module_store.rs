//! On-disk store of optimized HLO modules, so that they can be analyzed again without compiling.
//!
//! An entry is one file with a header and a payload (see `checksummed_file`). The header contains the compile key, the
//! compile time and the memory use; the payload is the compressed module. If the compiler rejected the program or
//! crashed, the header contains the error message and the payload is empty. The file name is a hash of the compile key.
//! Figures that can be computed from the module are not stored.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use serde::{Deserialize, Serialize};

use super::cache::{CacheError, fingerprint};
use super::checksummed_file::{self, json, sha256, sha256_file};
use super::compile::EngineOptions;
use super::target::OpenTarget;
use ltx2_pjrt::{CompiledMemory, OptimizedProgram};
use ltx2_stablehlo::Program;

/// Everything that an optimized module depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompileKey {
    /// SHA-256 of the program text.
    pub program: String,
    /// SHA-256 of the compile options, including those that the compiler reads from the environment.
    pub options: String,
    /// SHA-256 of the plugin file.
    pub plugin: String,
    /// Devices, in the syntax of `--target`.
    pub target: String,
    /// Device kind and description, from `OpenTarget::device_identity`.
    pub device: String,
}

impl CompileKey {
    /// Returns the SHA-256 of the key as hex digits, which is the name of the entry without `.module`.
    pub fn hash(&self) -> String {
        sha256(json(self).as_bytes())
    }
}

/// Optimized module of a program, with the memory use and time of its compilation.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredModule {
    /// Optimized HLO module of the program.
    pub optimized: OptimizedProgram,
    /// Memory use per device.
    pub memory: CompiledMemory,
    /// Compile time in seconds.
    pub seconds: f64,
}

/// Outcome of compiling a program.
#[derive(Clone, Debug, PartialEq)]
pub enum CompileOutcome {
    /// The compiled module.
    Module(StoredModule),
    /// Error message of a compiler that rejected the program or crashed.
    Failure(String),
}

#[derive(Serialize, Deserialize)]
struct ModuleHeader {
    ltx2: String,
    #[serde(flatten)]
    key: CompileKey,
    outcome: StoredOutcome,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoredOutcome {
    /// An optimized module. `length` is the size of the uncompressed module in bytes.
    Module {
        format: String,
        length: usize,
        seconds: f64,
        memory: CompiledMemory,
    },
    Failure(String),
}

/// A directory of optimized modules.
#[derive(Clone, Debug)]
pub struct ModuleStore {
    folder: PathBuf,
}

impl ModuleStore {
    /// Opens the store in `folder`, which need not exist yet.
    pub fn new(folder: &Path) -> Self {
        ModuleStore { folder: folder.into() }
    }

    /// Returns the directory of the store, which need not exist.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Computes the compile key of a program for a target.
    ///
    /// # Errors
    /// Returns an error if the plugin file cannot be read, if the plugin does not describe its devices, or if the
    /// store's directory is not writable.
    pub fn key(
        &self,
        machine: &OpenTarget,
        program: &Program,
        options: &EngineOptions,
    ) -> Result<CompileKey, CacheError> {
        let platform = machine.target.platform().name();
        Ok(CompileKey {
            program: program.hash(),
            options: fingerprint(platform, &machine.compile_options(program, options)),
            plugin: self.plugin_checksum(&machine.plugin_path()?)?,
            target: machine.target.to_string(),
            device: machine.device_identity()?,
        })
    }

    /// Returns the path of a key's entry, which need not exist.
    pub fn path(&self, key: &CompileKey) -> PathBuf {
        self.folder.join(format!("{}.module", key.hash()))
    }

    /// Returns the stored outcome for a key; `None` if there is no entry or (with a warning) if it is damaged.
    ///
    /// # Errors
    /// Returns an error if an existing entry cannot be read.
    pub fn get(&self, key: &CompileKey) -> Result<Option<CompileOutcome>, CacheError> {
        let path = self.path(key);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(CacheError::file(&path, e)),
        };
        let read = outcome(key, &bytes).inspect_err(|reason| {
            tracing::warn!("{}: {reason}; recompiling the program", path.display());
        });
        Ok(read.ok())
    }

    /// Writes an entry unless a valid module is already stored: a compiler process may outlive its killed run, and must
    /// not replace a module that a later run has already analyzed.
    ///
    /// # Errors
    /// Returns an error if the entry cannot be written.
    pub fn put(&self, key: &CompileKey, outcome: &CompileOutcome) -> Result<(), CacheError> {
        let path = self.path(key);
        let is_module = |bytes: Vec<u8>| matches!(self::outcome(key, &bytes), Ok(CompileOutcome::Module(_)));
        if fs::read(&path).is_ok_and(is_module) {
            return Ok(());
        }
        let written = match outcome {
            CompileOutcome::Module(m) => compressed(&m.optimized.bytes).and_then(|payload| {
                let (format, length) = (m.optimized.format.clone(), m.optimized.bytes.len());
                let outcome = StoredOutcome::Module { format, length, seconds: m.seconds, memory: m.memory };
                checksummed_file::write(&path, "module", &header(key, outcome), &payload)
            }),
            CompileOutcome::Failure(message) => {
                checksummed_file::write(&path, "module", &header(key, StoredOutcome::Failure(message.clone())), &[])
            }
        };
        written.map(drop).map_err(|e| CacheError::file(&path, e))
    }

    /// Returns the SHA-256 of a plugin file. Plugins are hundreds of megabytes, so the checksum is stored with the
    /// entries and reused while the file's path, size and timestamps stay the same.
    fn plugin_checksum(&self, plugin: &Path) -> Result<String, CacheError> {
        let fail = |e: std::io::Error| CacheError::file(plugin, e);
        let m = fs::metadata(plugin).map_err(fail)?;
        let changed = (m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec());
        let place = format!("{} {} {} {} {changed:?}", plugin.display(), m.dev(), m.ino(), m.len());
        let known = self.folder.join("plugins").join(sha256(place.as_bytes()));
        if let Ok(checksum) = fs::read_to_string(&known)
            && checksum.len() == 64
        {
            return Ok(checksum);
        }
        let checksum = sha256_file(plugin).map_err(fail)?;
        checksummed_file::replace(&known, "checksum", &[checksum.as_bytes()])
            .map_err(|e| CacheError::file(&known, e))?;
        Ok(checksum)
    }
}

fn header(key: &CompileKey, outcome: StoredOutcome) -> ModuleHeader {
    ModuleHeader { ltx2: env!("CARGO_PKG_VERSION").into(), key: key.clone(), outcome }
}

/// Compresses a module to about a quarter of its size, at the fastest level; other levels give about the same size.
fn compressed(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes)?;
    encoder.finish()
}

/// Decodes an entry after checking that it is complete and has this key.
fn outcome(key: &CompileKey, bytes: &[u8]) -> Result<CompileOutcome, String> {
    let (header, payload) = checksummed_file::read::<ModuleHeader>(bytes)?;
    if header.key != *key {
        return Err("the entry belongs to another program, plugin or target".into());
    }
    let (format, length, seconds, memory) = match header.outcome {
        StoredOutcome::Module { format, length, seconds, memory } => (format, length, seconds, memory),
        StoredOutcome::Failure(message) => return Ok(CompileOutcome::Failure(message)),
    };
    let mut module = Vec::new();
    let limit = length as u64 + 1;
    let read = ZlibDecoder::new(payload).take(limit).read_to_end(&mut module).map_err(|e| e.to_string())?;
    if read != length {
        return Err(format!("the decompressed module does not have the {length} bytes that its header states"));
    }
    let optimized = OptimizedProgram { format, bytes: module };
    Ok(CompileOutcome::Module(StoredModule { optimized, memory, seconds }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(program: &str) -> CompileKey {
        CompileKey {
            program: program.into(),
            options: "o".into(),
            plugin: "p".into(),
            target: "tpu:v6e:2x4".into(),
            device: "TPU v6 lite".into(),
        }
    }

    fn module(bytes: &[u8]) -> CompileOutcome {
        let optimized = OptimizedProgram { format: "hlo_with_config".into(), bytes: bytes.into() };
        let memory = CompiledMemory { arguments: 5, temporaries: 7, ..CompiledMemory::default() };
        CompileOutcome::Module(StoredModule { optimized, memory, seconds: 0.1 })
    }

    #[test]
    fn failure_is_replaced_but_module_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let store = ModuleStore::new(folder.path());
        let (one, two) = (key("one"), key("two"));
        assert_eq!(store.get(&one).unwrap(), None);
        store.put(&one, &CompileOutcome::Failure("signal: 6: Check failed\nin a pass".into())).unwrap();
        assert_eq!(
            store.get(&one).unwrap(),
            Some(CompileOutcome::Failure("signal: 6: Check failed\nin a pass".into()))
        );
        let large = module(&b"fusion ".repeat(50_000));
        store.put(&one, &large).unwrap();
        // A stored module is not replaced.
        store.put(&one, &module(b"of another compilation")).unwrap();
        assert_eq!((store.get(&one).unwrap(), store.get(&two).unwrap()), (Some(large), None));
        assert!(fs::metadata(store.path(&one)).unwrap().len() < 10_000, "it is compressed");
    }

    #[test]
    fn damaged_entry_counts_as_missing() {
        let folder = tempfile::tempdir().unwrap();
        let store = ModuleStore::new(folder.path());
        let (one, two) = (key("one"), key("two"));
        store.put(&one, &module(b"HloModule")).unwrap();
        let whole = fs::read(store.path(&one)).unwrap();
        let read = |bytes: &[u8]| outcome(&one, bytes).map(|o| o == module(b"HloModule"));
        assert_eq!(read(&whole), Ok(true));
        assert_eq!(outcome(&two, &whole).unwrap_err(), "the entry belongs to another program, plugin or target");
        for at in 0..whole.len() {
            let cut = read(&whole[..at]);
            assert!(cut.is_err(), "cut at {at}: {cut:?}");
            let mut changed = whole.clone();
            changed[at] ^= 1;
            let changed = read(&changed);
            assert_ne!(changed, Ok(false), "changed at {at}");
        }
        fs::write(store.path(&one), &whole[..whole.len() - 1]).unwrap();
        assert_eq!(store.get(&one).unwrap(), None);
    }

    #[test]
    fn plugin_is_rehashed_only_when_it_changes() {
        let folder = tempfile::tempdir().unwrap();
        let store = ModuleStore::new(&folder.path().join("modules"));
        let plugin = folder.path().join("plugin.so");
        fs::write(&plugin, b"one").unwrap();
        let first = store.plugin_checksum(&plugin).unwrap();
        assert_eq!(first, sha256(b"one"));
        let remembered = || fs::read_dir(folder.path().join("modules/plugins")).unwrap().count();
        assert_eq!((store.plugin_checksum(&plugin).unwrap(), remembered()), (first, 1));
        // Different contents of the same length.
        fs::write(&plugin, b"two").unwrap();
        assert_eq!((store.plugin_checksum(&plugin).unwrap(), remembered()), (sha256(b"two"), 2));
    }
}
