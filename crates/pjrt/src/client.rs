//! The client: devices, compilation and uploads.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

use super::abi::{self, Struct, host_buffer_semantics as semantics};
use super::attributes::{self, AttributeValue, Attributes, list, text};
use super::buffer::Buffer;
use super::client_handle::{ClientHandle, Released};
use super::compile_log;
use super::device::Device;
use super::error::Result;
use super::event::Event;
use super::executable::LoadedExecutable;
use super::host::{HostBuffer, HostUse, SharedHostBuffer};
use super::kv::{self, ProcessNode};
use super::layout::{RawLayout, pointer};
use super::options::CompileOptions;
use super::plugin::Plugin;
use super::raw::Raw;

/// Options of the CPU plugin. A field that is `None` has the plugin's default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CpuOptions {
    /// Number of virtual devices (the plugin's default is 4).
    pub devices: Option<usize>,
    /// Whether programs run asynchronously.
    pub asynchronous: Option<bool>,
}

/// Options of a GPU plugin. A field that is `None` has the plugin's default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuOptions {
    /// Fraction of the device memory that the allocator may use, 0 to 1.
    pub memory_fraction: Option<f32>,
    /// Whether to allocate the memory of `memory_fraction` when the client starts.
    pub preallocate: Option<bool>,
    /// Allocator: `default`, `bfc`, `cuda_async`, `platform` or `vmm`.
    pub allocator: Option<String>,
    /// Ordinals of the devices that this process uses.
    pub visible_devices: Option<Vec<i64>>,
}

impl CpuOptions {
    /// Returns the options by the names that the plugin uses.
    pub fn to_attributes(&self) -> Attributes {
        named([
            ("cpu_device_count", self.devices.map(|n| AttributeValue::Int(n as i64))),
            ("asynchronous", self.asynchronous.map(AttributeValue::Bool)),
        ])
    }
}

impl GpuOptions {
    /// Returns the options by the names that the plugin uses. `node`: identity of this process in a multi-process run.
    pub fn to_attributes(&self, node: Option<&ProcessNode>) -> Attributes {
        let number = |n: fn(&ProcessNode) -> usize| node.map(|node| AttributeValue::Int(n(node) as i64));
        named([
            ("memory_fraction", self.memory_fraction.map(AttributeValue::Float)),
            ("preallocate", self.preallocate.map(AttributeValue::Bool)),
            ("allocator", self.allocator.clone().map(AttributeValue::Text)),
            ("visible_devices", self.visible_devices.clone().map(AttributeValue::Ints)),
            ("node_id", number(|node| node.id)),
            ("num_nodes", number(|node| node.count)),
        ])
    }
}

fn named<const N: usize>(options: [(&str, Option<AttributeValue>); N]) -> Attributes {
    options.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// A PJRT client. Clones share the same client.
#[derive(Clone, Debug)]
pub struct Client {
    inner: Arc<ClientHandle>,
    said: Arc<ClientProperties>,
}

/// Properties of a client, queried once when it starts, so that accessors cannot fail later.
#[derive(Debug)]
struct ClientProperties {
    platform_name: String,
    platform_version: String,
    /// Devices that this process can use. `all_devices` also contains the devices of other processes.
    devices: Vec<Device>,
    all_devices: Vec<Device>,
}

impl ClientProperties {
    fn by(inner: &Arc<ClientHandle>) -> Result<ClientProperties> {
        let (client, plugin) = (inner.raw.0, &inner.plugin);
        // SAFETY: the client is alive and owns the device lists and the devices in them; strings are copied.
        unsafe {
            let own = plugin.call(abi::ClientAddressableDevicesArgs { client, ..Struct::new() })?;
            let all = plugin.call(abi::ClientDevicesArgs { client, ..Struct::new() })?;
            let name = plugin.call(abi::ClientPlatformNameArgs { client, ..Struct::new() })?;
            let version = plugin.call(abi::ClientPlatformVersionArgs { client, ..Struct::new() })?;
            let devices =
                |raw: &[*mut c_void]| raw.iter().map(|&raw| Device::from_raw(inner, raw)).collect::<Result<_>>();
            Ok(ClientProperties {
                platform_name: text(name.platform_name, name.platform_name_size),
                platform_version: text(version.platform_version, version.platform_version_size),
                devices: devices(list(own.addressable_devices.cast(), own.num_addressable_devices))?,
                all_devices: devices(list(all.devices.cast(), all.num_devices))?,
            })
        }
    }
}

impl Client {
    /// Creates a client with options by the names that the plugin uses; plugins reject unknown options. On CPU, creates
    /// virtual devices; on GPU and TPU, acquires the hardware.
    pub fn new(plugin: &Plugin, options: &Attributes) -> Result<Client> {
        Client::among(plugin, options, None)
    }

    /// Creates the client of one of several processes. On CUDA, waits for the other processes; on TPU, libtpu connects
    /// the processes itself. Without `node`, there is only one process.
    pub fn among(plugin: &Plugin, options: &Attributes, node: Option<&ProcessNode>) -> Result<Client> {
        let values = attributes::write(options);
        let mut args =
            abi::ClientCreateArgs { create_options: pointer(&values), num_options: values.len(), ..Struct::new() };
        if let Some(node) = node {
            kv::set_store_callbacks(&node.store, &mut args);
        }
        // SAFETY: the options outlive the call; the callbacks and their user data are never freed.
        let args = unsafe { plugin.call(args)? };
        let inner =
            Arc::new(ClientHandle { plugin: plugin.clone(), raw: Raw(args.client), released: Released::default() });
        Ok(Client { said: Arc::new(ClientProperties::by(&inner)?), inner })
    }

    /// Returns the plugin that created the client.
    pub fn plugin(&self) -> &Plugin {
        &self.inner.plugin
    }

    /// Returns the devices that this process can use, in the plugin's order.
    pub fn devices(&self) -> &[Device] {
        &self.said.devices
    }

    /// Returns the devices of all processes.
    pub fn all_devices(&self) -> &[Device] {
        &self.said.all_devices
    }

    /// Returns the platform name: `cpu`, `cuda`, `tpu` …
    pub fn platform_name(&self) -> &str {
        &self.said.platform_name
    }

    /// Returns the versions of the compiler and the driver, as the plugin reports them.
    pub fn platform_version(&self) -> &str {
        &self.said.platform_version
    }

    /// Returns the index of this process among the processes of a multi-process run; 0 in a single process.
    pub fn process_index(&self) -> Result<i32> {
        // SAFETY: the client is alive.
        let args =
            unsafe { self.plugin().call(abi::ClientProcessIndexArgs { client: self.inner.raw.0, ..Struct::new() })? };
        Ok(args.process_index)
    }

    /// Compiles StableHLO text and loads the executable onto the devices.
    pub fn compile(&self, mlir: &str, options: &CompileOptions) -> Result<LoadedExecutable> {
        let program = program(mlir);
        let options = options.to_proto();
        let args = abi::ClientCompileArgs {
            client: self.inner.raw.0,
            program: (&raw const program).cast_mut().cast(),
            compile_options: pointer(&options),
            compile_options_size: options.len(),
            ..Struct::new()
        };
        let started = Instant::now();
        // SAFETY: program and options outlive the call; we own the executable.
        let compiled = unsafe {
            let args = self.plugin().call(args)?;
            LoadedExecutable::from_raw(&self.inner, args.executable)
        };
        compile_log::compiled(self.plugin().path(), mlir, &options, started);
        compiled
    }

    /// Loads an executable that [`super::Executable::serialize`] returned on the same platform and plugin version.
    pub fn load(&self, serialized: &[u8]) -> Result<LoadedExecutable> {
        let args = abi::ExecutableDeserializeAndLoadArgs {
            client: self.inner.raw.0,
            serialized_executable: pointer(serialized),
            serialized_executable_size: serialized.len(),
            ..Struct::new()
        };
        // SAFETY: the bytes outlive the call; we own the executable.
        unsafe {
            let args = self.plugin().call(args)?;
            LoadedExecutable::from_raw(&self.inner, args.loaded_executable)
        }
    }

    /// Copies a host array to a device. The caller may reuse the host memory as soon as this function returns.
    pub fn upload(&self, device: &Device, host: HostBuffer<'_>) -> Result<Buffer> {
        let (buffer, event) = self.send(device, &host, semantics::IMMUTABLE_ONLY_DURING_CALL)?;
        event.wait()?;
        Ok(buffer)
    }

    /// Uploads a host array in the background. Keeps the owner of the host memory alive until the device no longer
    /// needs the memory.
    pub fn upload_shared(&self, device: &Device, host: &SharedHostBuffer, usage: HostUse) -> Result<Buffer> {
        let kind = match usage {
            HostUse::UntilTransferred => semantics::IMMUTABLE_UNTIL_TRANSFER_COMPLETES,
            HostUse::ZeroCopy => semantics::IMMUTABLE_ZERO_COPY,
        };
        let view = HostBuffer {
            bytes: host.bytes.bytes(),
            ty: host.ty,
            dims: &host.dims,
            byte_strides: host.byte_strides.as_deref(),
            layout: host.layout.as_ref(),
            memory: None,
        };
        let (buffer, event) = self.send(device, &view, kind)?;
        event.keep_until_ready(Box::new(host.bytes.clone()))?;
        Ok(buffer)
    }

    /// Starts an upload. The event fires when the device no longer needs the host memory.
    fn send(&self, device: &Device, host: &HostBuffer<'_>, semantics: u32) -> Result<(Buffer, Event)> {
        let plugin = self.plugin();
        host.check().map_err(|reason| plugin.refuse::<abi::ClientBufferFromHostBufferArgs>(reason))?;
        self.owns::<abi::ClientBufferFromHostBufferArgs>(device)?;
        let dims = to_i64(host.dims);
        let layout = host.layout.map(RawLayout::new);
        let mut args = abi::ClientBufferFromHostBufferArgs {
            client: self.inner.raw.0,
            data: pointer(host.bytes),
            kind: host.ty.to_c(),
            dims: pointer(&dims),
            num_dims: dims.len(),
            host_buffer_semantics: semantics,
            device: device.raw(),
            memory: host.memory.map_or(Ok(std::ptr::null_mut()), |kind| device.memory_of_kind(Some(kind)))?,
            device_layout: layout.as_ref().map_or(std::ptr::null_mut(), |l| (&raw const l.raw).cast_mut().cast()),
            ..Struct::new()
        };
        if let Some(strides) = host.byte_strides {
            args.byte_strides = pointer(strides);
            args.num_byte_strides = strides.len();
        }
        // SAFETY: dimensions, strides and layout outlive the call; `check` verified that the memory covers the array;
        // the callers keep the memory until the event fires. We own the buffer and the event.
        unsafe {
            let args = plugin.call(args)?;
            Ok((Buffer::from_raw(&self.inner, args.buffer), Event::from_raw(plugin, args.done_with_host_buffer)))
        }
    }

    /// Returns an error if the device belongs to another client. The plugin cannot detect such a device and would treat
    /// its pointer as a device of this client.
    pub(super) fn owns<A: abi::ArgumentStruct>(&self, device: &Device) -> Result<()> {
        if device.belongs_to(&self.inner) {
            return Ok(());
        }
        Err(self.plugin().refuse::<A>(format!("device {device} belongs to another client")))
    }

    pub(super) fn inner(&self) -> &Arc<ClientHandle> {
        &self.inner
    }
}

/// Wraps StableHLO text in a `PJRT_Program`, which borrows the text.
pub(super) fn program(mlir: &str) -> abi::Program {
    const FORMAT: &[u8] = b"mlir";
    abi::Program {
        code: pointer(mlir.as_bytes()),
        code_size: mlir.len(),
        format: pointer(FORMAT),
        format_size: FORMAT.len(),
        ..Struct::new()
    }
}

/// Converts dimensions to `i64`. Callers have checked that each dimension is at most `isize::MAX`.
pub(super) fn to_i64(dims: &[usize]) -> Vec<i64> {
    dims.iter().map(|&dim| dim as i64).collect()
}
