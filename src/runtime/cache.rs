//! Compiled programs on disk: what one run compiled, or `ltx2 compile --save` ahead of it, the next one loads.
//!
//! An entry is one file: a line of JSON that says what it is of, then what the plugin serialized. Its name is the hash of
//! everything the executable depends on, in words that devices which are here and devices which are not both know.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use prost::Message as _;
use serde::{Deserialize, Serialize};

use super::sealed::{self, json, sha256};
use crate::hlo::Program;
use crate::pjrt::{
    Client, CompileOptions, Device, DeviceDescription, Error, Executable, LoadedExecutable, NO_HUGEPAGE_TEXT, Plugin,
    Topology,
};

/// Bytes of a plugin's file that are hashed: its head holds the build's own identity and the addresses of all parts.
const HEAD: u64 = 1 << 20;

/// Errors of storing or loading an entry.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    #[error(transparent)]
    Plugin(#[from] Error),
    /// A file that cannot be read or written, or an entry that is not what its name says.
    #[error("{}: {reason}", path.display())]
    File { path: PathBuf, reason: String },
}

impl CacheError {
    pub(super) fn file(path: &Path, reason: impl ToString) -> Self {
        CacheError::File { path: path.into(), reason: reason.to_string() }
    }

    /// True where the plugin cannot serialize programs at all.
    pub(crate) fn is_unsupported(&self) -> bool {
        matches!(self, CacheError::Plugin(error) if error.is_unsupported())
    }
}

/// Everything that an executable depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    /// Hash of the program's text.
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
struct Header {
    name: String,
    ltx2: String,
    #[serde(flatten)]
    identity: Identity,
}

/// A folder of compiled programs, for the devices of a topology.
#[derive(Debug)]
pub(crate) struct Cache {
    folder: PathBuf,
    platform: String,
    plugin: String,
    device_kind: String,
    devices: Vec<DeviceDescription>,
}

impl Cache {
    /// The folder need not be there yet. `topology` is a client's, or one without hardware.
    ///
    /// # Errors
    /// A plugin whose file cannot be read or that does not state its devices.
    pub(crate) fn new(folder: &Path, platform: &str, topology: &Topology) -> Result<Self, CacheError> {
        let devices = topology.devices()?;
        let device_kind = device_kind(platform, topology, &devices)?;
        let plugin = plugin_identity(topology.plugin())?;
        Ok(Cache { folder: folder.into(), platform: platform.into(), plugin, device_kind, devices })
    }

    /// The place of a program that is compiled with `options`.
    pub(crate) fn entry(&self, name: &str, program: &Program, options: &CompileOptions) -> Entry {
        let ids = options.devices.clone().unwrap_or_default();
        let identity = Identity {
            program: program.hash(),
            options: fingerprint(&self.platform, options),
            plugin: self.plugin.clone(),
            platform: self.platform.clone(),
            device_kind: self.device_kind.clone(),
            devices: ids.iter().map(|id| self.device(*id)).collect(),
        };
        let key = sha256(json(&identity).as_bytes());
        Entry { path: self.folder.join(format!("{key}.pjrt")), name: name.into(), ids, identity }
    }

    /// A device by its id, its process, and on TPUs its place, which programs are routed by.
    fn device(&self, id: i64) -> String {
        let known = self.devices.iter().find(|d| i64::from(d.id) == id);
        let process = known.map_or(0, |d| d.process_index);
        let coords = known.and_then(|d| d.attributes.get("coords")).filter(|_| self.platform == "tpu");
        coords.map_or(format!("{id}@{process}"), |place| format!("{id}@{process} {place}"))
    }
}

/// The kind of a topology's devices, as far as code depends on it. Every CPU has one kind, but code for one need not run
/// on another: its topology lists what it can do.
pub(super) fn device_kind(
    platform: &str,
    topology: &Topology,
    devices: &[DeviceDescription],
) -> Result<String, CacheError> {
    let kind = devices.first().map(|d| d.kind.clone()).unwrap_or_default();
    Ok(match platform {
        "cpu" => format!("{kind} {}", &sha256(&cpu_machine(&topology.serialize()?))[..16]),
        _ => kind,
    })
}

/// The part of a serialized CPU topology that code depends on, its target triple, processor and features: how many virtual
/// devices there are changes no code. All of it where that part is not found.
fn cpu_machine(topology: &[u8]) -> Vec<u8> {
    let machine = TopologyProto::decode(topology).ok().and_then(|t| CpuTopologyProto::decode(&*t.specific?.value).ok());
    machine.and_then(|t| t.machine).unwrap_or_else(|| topology.to_vec())
}

/// `xla.PjRtTopologyDescriptionProto`, as far as it is read.
#[derive(prost::Message)]
struct TopologyProto {
    #[prost(message, optional, tag = "9")]
    specific: Option<AnyProto>,
}

/// `google.protobuf.Any`.
#[derive(prost::Message)]
struct AnyProto {
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// `xla.CpuTopologyProto`, as far as it is read.
#[derive(prost::Message)]
struct CpuTopologyProto {
    #[prost(bytes = "vec", optional, tag = "5")]
    machine: Option<Vec<u8>>,
}

/// A hash of compile options, and of those that a platform's compiler reads from the environment.
pub(super) fn fingerprint(platform: &str, options: &CompileOptions) -> String {
    let mut given = options.to_proto();
    let own = (platform == "tpu").then_some("LIBTPU_INIT_ARGS");
    for variable in std::iter::once("XLA_FLAGS").chain(own) {
        let value = std::env::var_os(variable).unwrap_or_default();
        match value.to_str() {
            Some(text) => given.extend(text.replacen(NO_HUGEPAGE_TEXT, "", 1).into_bytes()),
            None => given.extend(value.as_encoded_bytes()),
        }
    }
    sha256(&given)
}

/// The file of one compiled program, there or not.
#[derive(Debug)]
pub(crate) struct Entry {
    path: PathBuf,
    name: String,
    ids: Vec<i64>,
    identity: Identity,
}

impl Entry {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The program's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Loads the executable onto the client's devices; None where it was never kept.
    ///
    /// # Errors
    /// A damaged file, one of something else, or one that the plugin does not take.
    pub(crate) fn load(&self, client: &Client) -> Result<Option<LoadedExecutable>, CacheError> {
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(CacheError::file(&self.path, e)),
        };
        let serialized = self.serialized(&bytes).map_err(|reason| CacheError::file(&self.path, reason))?;
        let loaded = client.load(serialized)?;
        // Arguments are handed over in the order of the devices, each process's own.
        let own: Vec<i64> = client.devices().iter().map(|device| device.id().into()).collect();
        let ids = loaded.devices().iter().map(Device::id).map(i64::from);
        match ids.eq(self.ids.iter().copied().filter(|id| own.contains(id))) {
            true => Ok(Some(loaded)),
            false => Err(CacheError::file(&self.path, "it is for other devices")),
        }
    }

    /// The payload, if it is complete and of this program.
    fn serialized<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], String> {
        let (header, serialized) = sealed::read::<Header>(bytes)?;
        match header.identity == self.identity {
            true => Ok(serialized),
            false => Err("it is of another program, plugin or device".into()),
        }
    }

    /// Keeps an executable, in place of what the file held; returns the file's size in bytes.
    ///
    /// # Errors
    /// A plugin that cannot serialize, a file that cannot be written.
    pub(crate) fn save(&self, executable: &Executable) -> Result<usize, CacheError> {
        let header =
            Header { name: self.name.clone(), ltx2: env!("CARGO_PKG_VERSION").into(), identity: self.identity.clone() };
        sealed::write(&self.path, &self.name, &header, &executable.serialize()?)
            .map_err(|e| CacheError::file(&self.path, e))
    }
}

/// The plugin's file, told from another build of it without reading all of its hundreds of megabytes. A client's version
/// text would say more of a GPU's driver, but devices that are not here have none.
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

    fn identity(devices: &[&str]) -> Identity {
        Identity {
            program: "p".into(),
            options: "o".into(),
            plugin: "x.so".into(),
            platform: "cuda".into(),
            device_kind: "NVIDIA H200".into(),
            devices: devices.iter().map(|d| (*d).into()).collect(),
        }
    }

    #[test]
    fn an_entry_of_something_else_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("k.pjrt");
        let entry = Entry { path: path.clone(), name: "denoise".into(), ids: vec![0], identity: identity(&["0@0"]) };
        let read = |of: Identity| {
            let header = Header { name: "denoise".into(), ltx2: "0.1.0".into(), identity: of };
            sealed::write(&path, "denoise", &header, b"code").unwrap();
            entry.serialized(&fs::read(&path).unwrap()).map(<[u8]>::to_vec)
        };
        assert_eq!(read(identity(&["0@0"])), Ok(b"code".to_vec()));
        assert_eq!(read(identity(&["1@0"])), Err("it is of another program, plugin or device".into()));
    }

    #[test]
    fn a_cpu_is_its_processor_and_not_its_devices() {
        let topology = |devices: &[u8], machine: &[u8]| {
            // Devices are field 1.
            let devices = devices.iter().flat_map(|id| [0x0a, 2, 0x18, *id]);
            let value = devices.chain(CpuTopologyProto { machine: Some(machine.to_vec()) }.encode_to_vec()).collect();
            TopologyProto { specific: Some(AnyProto { value }) }.encode_to_vec()
        };
        let one = cpu_machine(&topology(&[0], b"znver4"));
        assert_eq!(one, b"znver4");
        assert_eq!(cpu_machine(&topology(&[0, 1], b"znver4")), one);
        assert_ne!(cpu_machine(&topology(&[0], b"skylake")), one);
        for other in [TopologyProto { specific: None }.encode_to_vec(), b"what is this".to_vec()] {
            assert_eq!(cpu_machine(&other), other);
        }
    }
}
