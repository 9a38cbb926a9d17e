//! Compile cache: serialized executables on disk, written by earlier runs or by `ltx2 compile --save`.
//!
//! An entry is one file: a line of JSON that identifies the executable, then the bytes that the plugin serialized. The
//! file name is a hash of everything that the executable depends on, and can be computed on a machine without the
//! devices.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::checksummed_file::{self, json, sha256};
use super::platforms::spec_by_name;
use ltx2_pjrt::{
    Client, CompileOptions, Device, DeviceDescription, Executable, LoadedExecutable, NO_HUGEPAGE_TEXT, PjrtError,
    Plugin, Topology,
};
use ltx2_stablehlo::Program;

/// Number of leading bytes of a plugin file that are hashed. They contain the build id and the section addresses.
const HEAD: u64 = 1 << 20;

/// An error from reading or writing a cache entry.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The plugin failed to describe its devices, or to serialize or load an executable.
    #[error(transparent)]
    Plugin(#[from] PjrtError),
    /// A file cannot be read or written, or an entry does not match its name.
    #[error("{}: {reason}", path.display())]
    File {
        /// Path of the plugin file, or of a file in the compile cache or the module store.
        path: PathBuf,
        /// Description of the problem, on one line.
        reason: String,
    },
}

impl CacheError {
    pub(super) fn file(path: &Path, reason: impl ToString) -> Self {
        CacheError::File { path: path.into(), reason: reason.to_string() }
    }

    /// Returns whether the error means that the plugin does not support serialization.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, CacheError::Plugin(error) if error.is_unsupported())
    }
}

/// Everything that an executable depends on; its hash is the name of the entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ExecutableIdentity {
    /// Hash of the program text.
    program: String,
    /// Hash of the compile options.
    options: String,
    plugin: String,
    platform: String,
    device_kind: String,
    devices: Vec<String>,
}

/// The first line of an entry.
#[derive(Serialize, Deserialize)]
struct CacheHeader {
    name: String,
    ltx2: String,
    #[serde(flatten)]
    identity: ExecutableIdentity,
}

/// A compile-cache directory, for the devices of one topology.
#[derive(Debug)]
pub struct Cache {
    folder: PathBuf,
    platform: String,
    plugin: String,
    device_kind: String,
    devices: Vec<DeviceDescription>,
}

impl Cache {
    /// Opens the cache in `folder`, which need not exist yet. `topology` describes the devices of a client, or devices
    /// that this machine does not have. Fails if the plugin file cannot be read or the plugin does not describe its
    /// devices.
    pub fn new(folder: &Path, platform: &str, topology: &Topology) -> Result<Self, CacheError> {
        let devices = topology.devices()?;
        let device_kind = device_kind(platform, topology, &devices)?;
        let plugin = plugin_identity(topology.plugin())?;
        Ok(Cache { folder: folder.into(), platform: platform.into(), plugin, device_kind, devices })
    }

    /// Returns the entry for a program and its compile options.
    pub fn entry(&self, name: &str, program: &Program, options: &CompileOptions) -> CacheEntry {
        let ids = options.devices.clone().unwrap_or_default();
        let identity = ExecutableIdentity {
            program: program.hash(),
            options: fingerprint(&self.platform, options),
            plugin: self.plugin.clone(),
            platform: self.platform.clone(),
            device_kind: self.device_kind.clone(),
            devices: ids.iter().map(|id| self.device(*id)).collect(),
        };
        let key = sha256(json(&identity).as_bytes());
        CacheEntry { path: self.folder.join(format!("{key}.pjrt")), name: name.into(), ids, identity }
    }

    /// Returns text that identifies a device: its id, its process and, on TPUs, its coordinates, on which the routing
    /// in a compiled program depends.
    fn device(&self, id: i64) -> String {
        let known = self.devices.iter().find(|d| i64::from(d.id) == id);
        let process = known.map_or(0, |d| d.process_index);
        let coords = known.and_then(|d| d.attributes.get("coords"));
        let coords = coords.filter(|_| spec_by_name(&self.platform).routes_by_coordinates);
        coords.map_or(format!("{id}@{process}"), |place| format!("{id}@{process} {place}"))
    }
}

/// Returns the device kind. On CPUs, adds a hash of the topology's machine description: all CPUs report the same kind,
/// but code that is compiled for one may not run on another.
pub(super) fn device_kind(
    platform: &str,
    topology: &Topology,
    devices: &[DeviceDescription],
) -> Result<String, CacheError> {
    let kind = devices.first().map(|d| d.kind.clone()).unwrap_or_default();
    Ok(match spec_by_name(platform).machine {
        Some(machine) => format!("{kind} {}", &sha256(&machine(&topology.serialize()?))[..16]),
        None => kind,
    })
}

/// Hashes compile options, including those that the platform's compiler reads from the environment.
pub(super) fn fingerprint(platform: &str, options: &CompileOptions) -> String {
    let mut given = options.to_proto();
    for variable in std::iter::once("XLA_FLAGS").chain(spec_by_name(platform).flags_variable) {
        let value = std::env::var_os(variable).unwrap_or_default();
        match value.to_str() {
            Some(text) => given.extend(text.replacen(NO_HUGEPAGE_TEXT, "", 1).into_bytes()),
            None => given.extend(value.as_encoded_bytes()),
        }
    }
    sha256(&given)
}

/// The cache file of one compiled program, whether or not it exists.
#[derive(Debug)]
pub struct CacheEntry {
    path: PathBuf,
    name: String,
    ids: Vec<i64>,
    identity: ExecutableIdentity,
}

impl CacheEntry {
    /// Returns the path of the file, which need not exist: `KEY.pjrt` in the cache's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Loads the executable onto the client's devices; `None` if there is no entry. Fails if the file is damaged, if it
    /// belongs to another program, plugin or device, or if the plugin rejects it.
    pub fn load(&self, client: &Client) -> Result<Option<LoadedExecutable>, CacheError> {
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(CacheError::file(&self.path, e)),
        };
        let serialized = self.serialized(&bytes).map_err(|reason| CacheError::file(&self.path, reason))?;
        let loaded = client.load(serialized)?;
        // Each process passes the arguments in the order of its own devices, so the executable must list these devices
        // in the same order.
        let own: Vec<i64> = client.devices().iter().map(|device| device.id().into()).collect();
        let ids = loaded.devices().iter().map(Device::id).map(i64::from);
        match ids.eq(self.ids.iter().copied().filter(|id| own.contains(id))) {
            true => Ok(Some(loaded)),
            false => Err(CacheError::file(&self.path, "the entry was compiled for other devices")),
        }
    }

    /// Returns the payload after checking that it is complete and belongs to this program.
    fn serialized<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], String> {
        let (header, serialized) = checksummed_file::read::<CacheHeader>(bytes)?;
        match header.identity == self.identity {
            true => Ok(serialized),
            false => Err("the entry belongs to another program, plugin or device".into()),
        }
    }

    /// Writes an executable, replacing any existing entry, and returns the file size in bytes.
    pub fn save(&self, executable: &Executable) -> Result<usize, CacheError> {
        let header = CacheHeader {
            name: self.name.clone(),
            ltx2: env!("CARGO_PKG_VERSION").into(),
            identity: self.identity.clone(),
        };
        checksummed_file::write(&self.path, &self.name, &header, &executable.serialize()?)
            .map_err(|e| CacheError::file(&self.path, e))
    }
}

/// Returns text that identifies a plugin build, without reading the complete file of hundreds of megabytes. The version
/// text of a client would also identify the GPU driver, but creating a client requires the devices.
fn plugin_identity(plugin: &Plugin) -> Result<String, CacheError> {
    let path = plugin.path();
    let read = || -> std::io::Result<(u64, Vec<u8>)> {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        let mut head = Vec::new();
        file.take(HEAD).read_to_end(&mut head)?;
        Ok((size, head))
    };
    let (size, head) = read().map_err(|e| CacheError::file(path, e))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let (major, minor) = plugin.version();
    Ok(format!("{name}, PJRT {major}.{minor}, {size} bytes, {}", &sha256(&head)[..16]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(devices: &[&str]) -> ExecutableIdentity {
        ExecutableIdentity {
            program: "p".into(),
            options: "o".into(),
            plugin: "x.so".into(),
            platform: "cuda".into(),
            device_kind: "NVIDIA H200".into(),
            devices: devices.iter().map(|d| (*d).into()).collect(),
        }
    }

    #[test]
    fn entry_of_another_program_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("k.pjrt");
        let entry =
            CacheEntry { path: path.clone(), name: "denoise".into(), ids: vec![0], identity: identity(&["0@0"]) };
        let read = |of: ExecutableIdentity| {
            let header = CacheHeader { name: "denoise".into(), ltx2: "0.1.0".into(), identity: of };
            checksummed_file::write(&path, "denoise", &header, b"code").unwrap();
            entry.serialized(&fs::read(&path).unwrap()).map(<[u8]>::to_vec)
        };
        assert_eq!(read(identity(&["0@0"])), Ok(b"code".to_vec()));
        assert_eq!(read(identity(&["1@0"])), Err("the entry belongs to another program, plugin or device".into()));
    }
}
