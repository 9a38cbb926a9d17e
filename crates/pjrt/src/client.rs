//! A started plugin: its devices, compilation, uploads.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

use super::abi::{self, Struct, host_buffer_semantics as semantics};
use super::attributes::{self, Attributes, Value, list, text};
use super::buffer::Buffer;
use super::client_handle::ClientHandle;
use super::compile_log;
use super::device::Device;
use super::error::Result;
use super::event::Event;
use super::executable::LoadedExecutable;
use super::host::{HostBuffer, HostUse, SharedHostBuffer};
use super::kv::{self, Node};
use super::layout::{RawLayout, pointer};
use super::options::CompileOptions;
use super::plugin::Plugin;
use super::raw::Raw;

/// Options of a client. Plugins refuse unknown options, so each platform has its own set.
#[derive(Clone, Debug, PartialEq)]
pub enum ClientOptions {
    Cpu(CpuOptions),
    Cuda(CudaOptions),
    /// Any plugin: options by name, none for its defaults (TPU needs none).
    Named(Attributes),
}

/// Options of the CPU plugin; None leaves the plugin's default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CpuOptions {
    /// Virtual devices (the plugin's default is 4).
    pub devices: Option<usize>,
    /// Run programs in the background.
    pub asynchronous: Option<bool>,
}

/// Options of the CUDA plugin; None leaves the plugin's default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CudaOptions {
    /// Fraction of the device memory that the allocator may take, 0 to 1.
    pub memory_fraction: Option<f32>,
    /// Allocate that memory at the start.
    pub preallocate: Option<bool>,
    /// `default`, `bfc`, `cuda_async`, `platform` or `vmm`.
    pub allocator: Option<String>,
    /// Ordinals of the devices this process uses.
    pub visible_devices: Option<Vec<i64>>,
}

impl ClientOptions {
    /// Options by the plugin's names.
    pub fn to_attributes(&self) -> Attributes {
        let pairs = match self {
            ClientOptions::Cpu(cpu) => vec![
                ("cpu_device_count", cpu.devices.map(|n| Value::Int(n as i64))),
                ("asynchronous", cpu.asynchronous.map(Value::Bool)),
            ],
            ClientOptions::Cuda(cuda) => vec![
                ("memory_fraction", cuda.memory_fraction.map(Value::Float)),
                ("preallocate", cuda.preallocate.map(Value::Bool)),
                ("allocator", cuda.allocator.clone().map(Value::Text)),
                ("visible_devices", cuda.visible_devices.clone().map(Value::Ints)),
            ],
            ClientOptions::Named(options) => return options.clone(),
        };
        pairs.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
    }
}

/// A started plugin. Clones share it.
#[derive(Clone, Debug)]
pub struct Client {
    inner: Arc<ClientHandle>,
    said: Arc<Said>,
}

/// Platform and devices, asked for once: a failure ends the start, not the work.
#[derive(Debug)]
struct Said {
    platform_name: String,
    platform_version: String,
    /// Of this process, and of all.
    devices: Vec<Device>,
    all_devices: Vec<Device>,
}

impl Said {
    fn by(inner: &Arc<ClientHandle>) -> Result<Said> {
        let (client, plugin) = (inner.raw.0, &inner.plugin);
        // SAFETY: the client lives; its device lists live as long as it does and hold devices of it; texts are copied.
        unsafe {
            let own = plugin.call(abi::ClientAddressableDevicesArgs { client, ..Struct::new() })?;
            let all = plugin.call(abi::ClientDevicesArgs { client, ..Struct::new() })?;
            let name = plugin.call(abi::ClientPlatformNameArgs { client, ..Struct::new() })?;
            let version = plugin.call(abi::ClientPlatformVersionArgs { client, ..Struct::new() })?;
            let devices =
                |raw: &[*mut c_void]| raw.iter().map(|&raw| Device::from_raw(inner, raw)).collect::<Result<_>>();
            Ok(Said {
                platform_name: text(name.platform_name, name.platform_name_size),
                platform_version: text(version.platform_version, version.platform_version_size),
                devices: devices(list(own.addressable_devices.cast(), own.num_addressable_devices))?,
                all_devices: devices(list(all.devices.cast(), all.num_devices))?,
            })
        }
    }
}

impl Client {
    /// Starts the plugin. On CPU this makes the virtual devices, on GPU and TPU it takes the hardware.
    pub fn new(plugin: &Plugin, options: &ClientOptions) -> Result<Client> {
        Client::among(plugin, options, None)
    }

    /// Starts the plugin for one of several processes. On CUDA this waits for the others; a TPU finds them by itself.
    pub fn among(plugin: &Plugin, options: &ClientOptions, node: Option<&Node>) -> Result<Client> {
        let mut given = options.to_attributes();
        if let (ClientOptions::Cuda(_), Some(node)) = (options, node) {
            let numbers = [("node_id", node.id), ("num_nodes", node.count)];
            given.extend(numbers.map(|(name, n)| (name.to_owned(), Value::Int(n as i64))));
        }
        let values = attributes::write(&given);
        let mut args =
            abi::ClientCreateArgs { create_options: pointer(&values), num_options: values.len(), ..Struct::new() };
        if let Some(node) = node {
            kv::hand_over(&node.store, &mut args);
        }
        // SAFETY: the options live during the call, the callbacks and what they are given for ever.
        let args = unsafe { plugin.call(args)? };
        let inner = Arc::new(ClientHandle { plugin: plugin.clone(), raw: Raw(args.client) });
        Ok(Client { said: Arc::new(Said::by(&inner)?), inner })
    }

    pub fn plugin(&self) -> &Plugin {
        &self.inner.plugin
    }

    /// The devices of this process, in the plugin's order.
    pub fn devices(&self) -> &[Device] {
        &self.said.devices
    }

    /// The devices of all processes.
    pub fn all_devices(&self) -> &[Device] {
        &self.said.all_devices
    }

    /// Platform name: `cpu`, `cuda`, `tpu` …
    pub fn platform_name(&self) -> &str {
        &self.said.platform_name
    }

    /// Versions of compiler and driver, as the plugin states them.
    pub fn platform_version(&self) -> &str {
        &self.said.platform_version
    }

    /// Index of this process among those that share the hardware.
    pub fn process_index(&self) -> Result<i32> {
        // SAFETY: the client lives.
        let args =
            unsafe { self.plugin().call(abi::ClientProcessIndexArgs { client: self.inner.raw.0, ..Struct::new() })? };
        Ok(args.process_index)
    }

    /// Compiles StableHLO text and loads the result onto the devices.
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
        // SAFETY: program and options live during the call; the executable is ours.
        let compiled = unsafe {
            let args = self.plugin().call(args)?;
            LoadedExecutable::from_raw(&self.inner, args.executable)
        };
        compile_log::compiled(self.plugin().path(), mlir, &options, started);
        compiled
    }

    /// Loads an executable of [`super::Executable::serialize`], written on the same platform and plugin version.
    pub fn load(&self, serialized: &[u8]) -> Result<LoadedExecutable> {
        let args = abi::ExecutableDeserializeAndLoadArgs {
            client: self.inner.raw.0,
            serialized_executable: pointer(serialized),
            serialized_executable_size: serialized.len(),
            ..Struct::new()
        };
        // SAFETY: the bytes live during the call; the executable is ours.
        unsafe {
            let args = self.plugin().call(args)?;
            LoadedExecutable::from_raw(&self.inner, args.loaded_executable)
        }
    }

    /// Copies a host array to a device. The host memory is free again when this returns.
    pub fn upload(&self, device: &Device, host: HostBuffer<'_>) -> Result<Buffer> {
        let (buffer, event) = self.send(device, &host, semantics::IMMUTABLE_ONLY_DURING_CALL)?;
        event.wait()?;
        Ok(buffer)
    }

    /// Sends a host array to a device in the background; its owner is released when the device is done with it.
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
        };
        let (buffer, event) = self.send(device, &view, kind)?;
        event.keep_until_ready(Box::new(host.bytes.clone()))?;
        Ok(buffer)
    }

    /// Starts an upload; the event says when the device is done with the host memory.
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
            device_layout: layout.as_ref().map_or(std::ptr::null_mut(), |l| (&raw const l.raw).cast_mut().cast()),
            ..Struct::new()
        };
        if let Some(strides) = host.byte_strides {
            args.byte_strides = pointer(strides);
            args.num_byte_strides = strides.len();
        }
        // SAFETY: dimensions, strides and layout live during the call; `check` made sure that the memory covers the
        // array; the callers keep it until the event. Buffer and event are ours.
        unsafe {
            let args = plugin.call(args)?;
            Ok((Buffer::from_raw(&self.inner, args.buffer), Event::from_raw(plugin, args.done_with_host_buffer)))
        }
    }

    /// Refuses a device of another client: the plugin would read it as one of its own.
    pub(super) fn owns<A: abi::Args>(&self, device: &Device) -> Result<()> {
        if device.belongs_to(&self.inner) {
            return Ok(());
        }
        Err(self.plugin().refuse::<A>(format!("{device} belongs to another client")))
    }

    pub(super) fn inner(&self) -> &Arc<ClientHandle> {
        &self.inner
    }
}

/// StableHLO text as PJRT takes it; borrows the text.
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

/// Dimensions as PJRT takes them. A dimension that checks passed is below `isize::MAX`.
pub(super) fn to_i64(dims: &[usize]) -> Vec<i64> {
    dims.iter().map(|&dim| dim as i64).collect()
}
