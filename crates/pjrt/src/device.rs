//! Devices of a client, and descriptions of devices, including devices that are not attached.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use super::abi::{self, Struct};
use super::attributes::{self, Attributes, list, text};
use super::client_handle::ClientHandle;
use super::error::Result;
use super::plugin::Plugin;
use super::raw::Raw;

/// Properties of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceDescription {
    /// Id, unique among the devices of all processes.
    pub id: i32,
    /// Index of the process that owns the device.
    pub process_index: i32,
    /// Device kind as the plugin reports it: `cpu`, `NVIDIA H200`, `TPU v5p` …
    pub kind: String,
    /// The plugin's one-line debug string.
    pub debug: String,
    /// Plugin-specific attributes, such as `coords` on TPU.
    pub attributes: Attributes,
}

impl DeviceDescription {
    /// Reads a `PJRT_DeviceDescription`.
    ///
    /// # Safety
    /// `raw` is a live `PJRT_DeviceDescription` of `plugin`.
    pub(super) unsafe fn read(plugin: &Plugin, raw: *mut c_void) -> Result<DeviceDescription> {
        // SAFETY: guaranteed by the caller; strings and attributes are copied while the description is alive.
        unsafe {
            let id = plugin.call(abi::DeviceDescriptionIdArgs { device_description: raw, ..Struct::new() })?;
            let process =
                plugin.call(abi::DeviceDescriptionProcessIndexArgs { device_description: raw, ..Struct::new() })?;
            let kind = plugin.call(abi::DeviceDescriptionKindArgs { device_description: raw, ..Struct::new() })?;
            let debug =
                plugin.call(abi::DeviceDescriptionDebugStringArgs { device_description: raw, ..Struct::new() })?;
            let stated =
                plugin.call(abi::DeviceDescriptionAttributesArgs { device_description: raw, ..Struct::new() })?;
            Ok(DeviceDescription {
                id: id.id,
                process_index: process.process_index,
                kind: text(kind.device_kind, kind.device_kind_size),
                debug: text(debug.debug_string, debug.debug_string_size),
                attributes: attributes::read(stated.attributes, stated.num_attributes),
            })
        }
    }
}

/// Memory statistics of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Allocated bytes.
    pub in_use: i64,
    /// Largest number of allocated bytes so far. `None`: not reported.
    pub peak: Option<i64>,
    /// Bytes that the allocator may use. `None`: not reported.
    pub limit: Option<i64>,
}

/// A device of a client.
#[derive(Clone)]
pub struct Device {
    client: Arc<ClientHandle>,
    raw: Raw,
    description: Arc<DeviceDescription>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({self})")
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind(), self.id())
    }
}

impl Device {
    /// Wraps a device of a client.
    ///
    /// # Safety
    /// `raw` is a `PJRT_Device` of `client`.
    pub(super) unsafe fn from_raw(client: &Arc<ClientHandle>, raw: *mut c_void) -> Result<Device> {
        // SAFETY: guaranteed by the caller; the description lives as long as the device.
        let description = unsafe {
            let args = client.plugin.call(abi::DeviceGetDescriptionArgs { device: raw, ..Struct::new() })?;
            DeviceDescription::read(&client.plugin, args.device_description)?
        };
        Ok(Device { client: client.clone(), raw: Raw(raw), description: Arc::new(description) })
    }

    /// Returns the properties of the device.
    pub fn description(&self) -> &DeviceDescription {
        &self.description
    }

    /// Returns the id, unique among the devices of all processes.
    pub fn id(&self) -> i32 {
        self.description.id
    }

    /// Returns the device kind as the plugin reports it.
    pub fn kind(&self) -> &str {
        &self.description.kind
    }

    /// Returns whether this process can use the device.
    pub fn is_addressable(&self) -> Result<bool> {
        // SAFETY: the device lives as long as its client.
        let args =
            unsafe { self.client.plugin.call(abi::DeviceIsAddressableArgs { device: self.raw.0, ..Struct::new() })? };
        Ok(args.is_addressable)
    }

    /// Returns the current memory use. The CPU plugin does not support this and returns an error.
    pub fn memory(&self) -> Result<DeviceMemory> {
        // SAFETY: the device lives as long as its client.
        let args =
            unsafe { self.client.plugin.call(abi::DeviceMemoryStatsArgs { device: self.raw.0, ..Struct::new() })? };
        Ok(DeviceMemory {
            in_use: args.bytes_in_use,
            peak: args.peak_bytes_in_use_is_set.then_some(args.peak_bytes_in_use),
            limit: args.bytes_limit_is_set.then_some(args.bytes_limit),
        })
    }

    /// Returns the device's memory of a kind (`device`, `pinned_host` …). `None`: the memory in which the device
    /// allocates buffers by default.
    pub(super) fn memory_of_kind(&self, kind: Option<&str>) -> Result<*mut c_void> {
        type Memories = abi::DeviceAddressableMemoriesArgs;
        let (plugin, device) = (&self.client.plugin, self.raw.0);
        let Some(kind) = kind else {
            // SAFETY: the device lives as long as its client, and so does its memory.
            let args = unsafe { plugin.call(abi::DeviceDefaultMemoryArgs { device, ..Struct::new() })? };
            return Ok(args.memory);
        };
        // SAFETY: the device lives as long as its client, and so do its memories and the list of them.
        let memories: &[*mut c_void] = unsafe {
            let args = plugin.call(Memories { device, ..Struct::new() })?;
            list(args.memories.cast(), args.num_memories)
        };
        let mut kinds = Vec::new();
        for &memory in memories {
            // SAFETY: the memory is alive; the string is copied.
            let own = unsafe {
                let args = plugin.call(abi::MemoryKindArgs { memory, ..Struct::new() })?;
                text(args.kind, args.kind_size)
            };
            if own == kind {
                return Ok(memory);
            }
            kinds.push(own);
        }
        let kinds = kinds.join(", ");
        Err(plugin.refuse::<Memories>(format!("device {self} has no memory of kind {kind}, only {kinds}")))
    }

    pub(super) fn raw(&self) -> *mut c_void {
        self.raw.0
    }

    pub(super) fn belongs_to(&self, client: &Arc<ClientHandle>) -> bool {
        Arc::ptr_eq(&self.client, client)
    }
}
