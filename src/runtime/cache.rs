//! Compiled programs on disk: what one run compiled, or `ltx2 compile --save` ahead of it, the next one loads.
//!
//! An entry is one file: a line of JSON that says what it is of, then what the plugin serialized. Its name is the hash of
//! everything the executable depends on, in words that devices which are here and devices which are not both know.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::failpoint;
use crate::hlo::Program;
use crate::pjrt::{
    Client, CompileOptions, Device, DeviceDescription, Error, Executable, LoadedExecutable, Plugin, Topology,
};

/// Bytes of a plugin's file that are hashed: its head holds the build's own identity and the addresses of all parts.
const HEAD: u64 = 1 << 20;

/// Why an entry was not kept or not used.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The plugin.
    #[error(transparent)]
    Plugin(#[from] Error),
    /// A file that cannot be read or written, or an entry that is not what its name says.
    #[error("{}: {reason}", path.display())]
    File {
        /// File.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl CacheError {
    fn file(path: &Path, reason: impl ToString) -> Self {
        CacheError::File { path: path.into(), reason: reason.to_string() }
    }

    /// True where the plugin cannot serialize programs at all.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, CacheError::Plugin(error) if error.is_unsupported())
    }
}

/// What an executable depends on.
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
    /// Of what follows the line.
    bytes: usize,
    sha256: String,
}

/// A folder of compiled programs, for the devices of a topology.
#[derive(Debug)]
pub struct Cache {
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
    pub fn new(folder: &Path, platform: &str, topology: &Topology) -> Result<Self, CacheError> {
        let devices = topology.devices()?;
        let kind = devices.first().map(|d| d.kind.clone()).unwrap_or_default();
        // Every CPU has one kind, but code for one need not run on another: its topology lists what it can do.
        let device_kind = match platform {
            "cpu" => format!("{kind} {}", &sha256(&topology.serialize()?)[..16]),
            _ => kind,
        };
        let plugin = plugin_identity(topology.plugin())?;
        Ok(Cache { folder: folder.into(), platform: platform.into(), plugin, device_kind, devices })
    }

    /// The place of a program that is compiled with `options`.
    pub fn entry(&self, name: &str, program: &Program, options: &CompileOptions) -> Entry {
        let ids = options.devices.clone().unwrap_or_default();
        let identity = Identity {
            program: program.hash(),
            options: fingerprint(options),
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

/// A hash of compile options, and of those that the compilers read from the environment.
pub(super) fn fingerprint(options: &CompileOptions) -> String {
    let mut given = options.to_proto();
    for variable in ["XLA_FLAGS", "LIBTPU_INIT_ARGS"] {
        given.extend(std::env::var_os(variable).unwrap_or_default().as_encoded_bytes());
    }
    sha256(&given)
}

/// The file of one compiled program, there or not.
#[derive(Debug)]
pub struct Entry {
    path: PathBuf,
    name: String,
    ids: Vec<i64>,
    identity: Identity,
}

impl Entry {
    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Loads the executable onto the client's devices; None where it was never kept.
    ///
    /// # Errors
    /// A damaged file, one of something else, or one that the plugin does not take.
    pub fn load(&self, client: &Client) -> Result<Option<LoadedExecutable>, CacheError> {
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

    /// The part after the header, if it is whole and of this program.
    fn serialized<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], String> {
        let end = bytes.iter().position(|b| *b == b'\n').ok_or("it has no header")?;
        let header: Header = serde_json::from_slice(&bytes[..end]).map_err(|e| format!("its header: {e}"))?;
        let rest = &bytes[end + 1..];
        if header.identity != self.identity {
            return Err("it is of another program, plugin or device".into());
        }
        if header.bytes != rest.len() {
            return Err(format!("it has {} of {} bytes", rest.len(), header.bytes));
        }
        if header.sha256 != sha256(rest) {
            return Err("its bytes are not those that were written".into());
        }
        Ok(rest)
    }

    /// Keeps an executable, in place of what the file held; returns the file's size in bytes.
    ///
    /// # Errors
    /// A plugin that cannot serialize, a file that cannot be written.
    pub fn save(&self, executable: &Executable) -> Result<usize, CacheError> {
        let serialized = executable.serialize()?;
        let header = Header {
            name: self.name.clone(),
            ltx2: env!("CARGO_PKG_VERSION").into(),
            identity: self.identity.clone(),
            bytes: serialized.len(),
            sha256: sha256(&serialized),
        };
        let header = format!("{}\n", json(&header));
        self.write(&[header.as_bytes(), &serialized]).map_err(|e| CacheError::file(&self.path, e))?;
        Ok(header.len() + serialized.len())
    }

    /// Under a temporary name first: another run sees all of it or nothing.
    fn write(&self, parts: &[&[u8]]) -> std::io::Result<()> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        // As any new file, not private as temporary ones: a folder may serve several users.
        let mode = fs::Permissions::from_mode(0o666);
        let mut file = tempfile::Builder::new().prefix(".ltx2-").permissions(mode).tempfile_in(folder)?;
        for part in parts {
            file.write_all(part)?;
            failpoint::reach("cache", &self.name);
        }
        file.persist(&self.path)?;
        Ok(())
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

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Structs of texts and numbers always have a JSON form.
fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
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
    fn damage_is_found() {
        let entry = Entry { path: "k.pjrt".into(), name: "denoise".into(), ids: vec![0], identity: identity(&["0@0"]) };
        let header = |of: &Identity| {
            let (name, ltx2, sha256) = ("denoise".into(), "0.1.0".into(), sha256(b"code"));
            json(&Header { name, ltx2, identity: of.clone(), bytes: 4, sha256 })
        };
        let own = header(&entry.identity);
        let read = |text: String| entry.serialized(text.as_bytes()).map(<[u8]>::to_vec);
        assert_eq!(read(format!("{own}\ncode")), Ok(b"code".to_vec()));
        assert_eq!(read(format!("{own}\ncod")), Err("it has 3 of 4 bytes".into()));
        assert_eq!(read(format!("{own}\ncodf")), Err("its bytes are not those that were written".into()));
        assert_eq!(read(own), Err("it has no header".into()));
        assert!(read("{}\ncode".into()).is_err_and(|e| e.starts_with("its header: missing field")));
        let other = header(&identity(&["1@0"]));
        assert_eq!(read(format!("{other}\ncode")), Err("it is of another program, plugin or device".into()));
    }
}
