//! Optimized modules on disk: what a compiler made of a program, for whoever reads it again without compiling it again.
//!
//! An entry is one file (see [`sealed`]): the header says what was compiled and what only the compiler knew besides the
//! module, the payload is the module, compressed. Its name is the hash of everything that the compiler was given. Nothing
//! that is computed *from* a module is stored: whoever wants figures analyses it anew. A program that the compiler refused
//! or crashed on has an entry too, without payload.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use serde::{Deserialize, Serialize};

use super::cache::{CacheError, fingerprint};
use super::compile::EngineOptions;
use super::sealed::{self, json, sha256, sha256_file};
use super::target::OpenTarget;
use crate::hlo::Program;
use crate::pjrt::{CompiledMemory, OptimizedProgram};

/// Everything that an optimized module depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompileKey {
    /// SHA-256 of the program's text.
    pub program: String,
    /// SHA-256 of the compile options, and of those that the compiler reads from the environment.
    pub options: String,
    /// SHA-256 of the plugin's file.
    pub(crate) plugin: String,
    /// Devices, as `--target` names them.
    pub(crate) target: String,
    /// Device kind, as the plugin names it, with further identifying facts.
    pub(crate) device: String,
}

impl CompileKey {
    pub fn hash(&self) -> String {
        sha256(json(self).as_bytes())
    }
}

/// Optimized module of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredModule {
    pub optimized: OptimizedProgram,
    /// Memory of a device.
    pub memory: CompiledMemory,
    /// Seconds the compiler took.
    pub seconds: f64,
}

/// Outcome of compiling a program.
#[derive(Clone, Debug, PartialEq)]
pub enum CompileOutcome {
    Module(StoredModule),
    /// The compiler's last words.
    Failure(String),
}

#[derive(Serialize, Deserialize)]
struct Header {
    ltx2: String,
    #[serde(flatten)]
    key: CompileKey,
    outcome: Outcome,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    /// `length` is the module's before it was compressed.
    Module {
        format: String,
        length: usize,
        seconds: f64,
        memory: CompiledMemory,
    },
    Failure(String),
}

/// A folder of optimized modules.
#[derive(Clone, Debug)]
pub struct ModuleStore {
    folder: PathBuf,
}

impl ModuleStore {
    /// The folder need not be there yet.
    pub fn new(folder: &Path) -> Self {
        ModuleStore { folder: folder.into() }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The key of a program that is compiled for a machine.
    ///
    /// # Errors
    /// A plugin whose file cannot be read or that does not state its devices; a folder that cannot be written.
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

    /// The file of a key, there or not.
    pub fn path(&self, key: &CompileKey) -> PathBuf {
        self.folder.join(format!("{}.module", key.hash()))
    }

    /// Outcome of a key's program; `None` where it was never compiled or, with a warning, where the file is damaged.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn get(&self, key: &CompileKey) -> Result<Option<CompileOutcome>, CacheError> {
        let path = self.path(key);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(CacheError::file(&path, e)),
        };
        let read = outcome(key, &bytes).inspect_err(|reason| {
            tracing::warn!("{}: {reason}; the program is compiled anew", path.display());
        });
        Ok(read.ok())
    }

    /// Writes an entry, in place of what its file held, unless that is a complete module: a compilation that outlived its killed run
    /// must not change the figures that a later one went by.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn put(&self, key: &CompileKey, outcome: &CompileOutcome) -> Result<(), CacheError> {
        let path = self.path(key);
        let is_module = |bytes: Vec<u8>| matches!(self::outcome(key, &bytes), Ok(CompileOutcome::Module(_)));
        if fs::read(&path).is_ok_and(is_module) {
            return Ok(());
        }
        let written = match outcome {
            CompileOutcome::Module(m) => compressed(&m.optimized.bytes).and_then(|payload| {
                let (format, length) = (m.optimized.format.clone(), m.optimized.bytes.len());
                let outcome = Outcome::Module { format, length, seconds: m.seconds, memory: m.memory };
                sealed::write(&path, "module", &header(key, outcome), &payload)
            }),
            CompileOutcome::Failure(message) => {
                sealed::write(&path, "module", &header(key, Outcome::Failure(message.clone())), &[])
            }
        };
        written.map(drop).map_err(|e| CacheError::file(&path, e))
    }

    /// SHA-256 of a plugin's file. Plugins have hundreds of megabytes: it is computed once for a file of one place, size
    /// and time, and stored with the entries.
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
        sealed::replace(&known, "checksum", &[checksum.as_bytes()]).map_err(|e| CacheError::file(&known, e))?;
        Ok(checksum)
    }
}

fn header(key: &CompileKey, outcome: Outcome) -> Header {
    Header { ltx2: env!("CARGO_PKG_VERSION").into(), key: key.clone(), outcome }
}

/// The fastest level: names and shapes shrink to a quarter with any.
fn compressed(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes)?;
    encoder.finish()
}

/// Decodes an entry, if it is complete and of this key.
fn outcome(key: &CompileKey, bytes: &[u8]) -> Result<CompileOutcome, String> {
    let (header, payload) = sealed::read::<Header>(bytes)?;
    if header.key != *key {
        return Err("it is of another program, plugin or target".into());
    }
    let (format, length, seconds, memory) = match header.outcome {
        Outcome::Module { format, length, seconds, memory } => (format, length, seconds, memory),
        Outcome::Failure(message) => return Ok(CompileOutcome::Failure(message)),
    };
    let mut module = Vec::new();
    let limit = length as u64 + 1;
    let read = ZlibDecoder::new(payload).take(limit).read_to_end(&mut module).map_err(|e| e.to_string())?;
    if read != length {
        return Err(format!("its module has {read} bytes or more, not {length}"));
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
    fn an_entry_is_read_back_and_replaced() {
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
        // A module stays.
        store.put(&one, &module(b"of another compilation")).unwrap();
        assert_eq!((store.get(&one).unwrap(), store.get(&two).unwrap()), (Some(large), None));
        assert!(fs::metadata(store.path(&one)).unwrap().len() < 10_000, "it is compressed");
    }

    #[test]
    fn a_damaged_entry_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let store = ModuleStore::new(folder.path());
        let (one, two) = (key("one"), key("two"));
        store.put(&one, &module(b"HloModule")).unwrap();
        let whole = fs::read(store.path(&one)).unwrap();
        let read = |bytes: &[u8]| outcome(&one, bytes).map(|o| o == module(b"HloModule"));
        assert_eq!(read(&whole), Ok(true));
        assert_eq!(outcome(&two, &whole).unwrap_err(), "it is of another program, plugin or target");
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
    fn a_plugin_is_hashed_once_and_again_when_it_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let store = ModuleStore::new(&folder.path().join("modules"));
        let plugin = folder.path().join("plugin.so");
        fs::write(&plugin, b"one").unwrap();
        let first = store.plugin_checksum(&plugin).unwrap();
        assert_eq!(first, sha256(b"one"));
        let remembered = || fs::read_dir(folder.path().join("modules/plugins")).unwrap().count();
        assert_eq!((store.plugin_checksum(&plugin).unwrap(), remembered()), (first, 1));
        // Of the same length.
        fs::write(&plugin, b"two").unwrap();
        assert_eq!((store.plugin_checksum(&plugin).unwrap(), remembered()), (sha256(b"two"), 2));
    }
}
