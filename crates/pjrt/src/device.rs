//! Devices of a client, and descriptions of devices that need not be there.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use super::abi::{self, Struct};
use super::attributes::{self, Attributes, text};
use super::client_handle::ClientHandle;
use super::error::Result;
use super::plugin::Plugin;
use super::raw::Raw;

/// Description of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceDescription {
    /// Id among the devices of all processes.
    pub id: i32,
    /// Index of its process.
    pub process_index: i32,
    /// Device kind, as the plugin names it: `cpu`, `NVIDIA H200`, `TPU v5p` …
    pub kind: String,
    /// One line about it.
    pub debug: String,
    /// Further attributes of the plugin, such as `coords` on TPU.
    pub attributes: Attributes,
}

impl DeviceDescription {
    /// Reads a description of the plugin.
    ///
    /// # Safety
    /// `raw` is a live `PJRT_DeviceDescription` of `plugin`.
    pub(super) unsafe fn read(plugin: &Plugin, raw: *mut c_void) -> Result<DeviceDescription> {
        // SAFETY: the caller's promise; texts and attributes are copied while the description lives.
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

/// Memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    pub in_use: i64,
    pub peak: Option<i64>,
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
    /// # Safety
    /// `raw` is a device of `client`.
    pub(super) unsafe fn from_raw(client: &Arc<ClientHandle>, raw: *mut c_void) -> Result<Device> {
        // SAFETY: the caller's promise; the description lives as long as the device.
        let description = unsafe {
            let args = client.plugin.call(abi::DeviceGetDescriptionArgs { device: raw, ..Struct::new() })?;
            DeviceDescription::read(&client.plugin, args.device_description)?
        };
        Ok(Device { client: client.clone(), raw: Raw(raw), description: Arc::new(description) })
    }

    /// Description of the device.
    pub fn description(&self) -> &DeviceDescription {
        &self.description
    }

    /// Id among the devices of all processes.
    pub fn id(&self) -> i32 {
        self.description.id
    }

    /// Device kind, as the plugin names it.
    pub fn kind(&self) -> &str {
        &self.description.kind
    }

    /// True if this process can use it.
    pub fn is_addressable(&self) -> Result<bool> {
        // SAFETY: the device lives as long as its client.
        let args =
            unsafe { self.client.plugin.call(abi::DeviceIsAddressableArgs { device: self.raw.0, ..Struct::new() })? };
        Ok(args.is_addressable)
    }

    /// Current memory use; unsupported on CPU.
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

    /// The memory that arrays are put into unless told otherwise.
    pub(super) fn default_memory(&self) -> Result<*mut c_void> {
        // SAFETY: the device lives as long as its client, and so does its memory.
        let args =
            unsafe { self.client.plugin.call(abi::DeviceDefaultMemoryArgs { device: self.raw.0, ..Struct::new() })? };
        Ok(args.memory)
    }

    pub(super) fn raw(&self) -> *mut c_void {
        self.raw.0
    }

    pub(super) fn belongs_to(&self, client: &Arc<ClientHandle>) -> bool {
        Arc::ptr_eq(&self.client, client)
    }
}
