//! Topologies: descriptions of devices for which programs can be compiled although the devices are not attached.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::abi::{self, Struct};
use super::attributes::{self, Attributes, list, text};
use super::client::{self, Client};
use super::compile_log;
use super::device::DeviceDescription;
use super::error::Result;
use super::executable::Executable;
use super::layout::pointer;
use super::options::CompileOptions;
use super::plugin::Plugin;
use super::raw::Raw;

/// A set of devices for which programs can be compiled. Clones share the same topology.
#[derive(Clone, Debug)]
pub struct Topology(Arc<TopologyInner>);

struct TopologyInner {
    plugin: Plugin,
    raw: Raw,
    /// The client that owns the topology. `None`: the topology was created by name, and this struct owns it.
    client: Option<Client>,
}

impl fmt::Debug for TopologyInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Topology of {:?}", self.plugin)
    }
}

impl Drop for TopologyInner {
    fn drop(&mut self) {
        if self.client.is_some() {
            return;
        }
        // SAFETY: we own the topology, and executables compiled for it hold this struct.
        unsafe { self.plugin.destroy(abi::TopologyDescriptionDestroyArgs { topology: self.raw.0, ..Struct::new() }) };
    }
}

impl Client {
    /// Returns the topology of this client's devices.
    pub fn topology(&self) -> Result<Topology> {
        // SAFETY: the client is alive and still owns the topology; the result holds the client.
        let args = unsafe {
            self.plugin().call(abi::ClientTopologyDescriptionArgs { client: self.inner().raw.0, ..Struct::new() })?
        };
        let (plugin, client) = (self.plugin().clone(), Some(self.clone()));
        Ok(Topology(Arc::new(TopologyInner { plugin, raw: Raw(args.topology), client })))
    }
}

impl Topology {
    /// Creates a topology by name. On TPU, the name is a slice such as `v5p:2x2x2`. On CUDA, any name is valid, and the
    /// options `target_config` and `topology` (`partitions x hosts x devices`) describe the devices.
    pub fn new(plugin: &Plugin, name: &str, options: &Attributes) -> Result<Topology> {
        let values = attributes::write(options);
        let args = abi::TopologyDescriptionCreateArgs {
            topology_name: pointer(name.as_bytes()),
            topology_name_size: name.len(),
            create_options: pointer(&values),
            num_options: values.len(),
            ..Struct::new()
        };
        // SAFETY: name and options outlive the call; we own the topology.
        let args = unsafe { plugin.call(args)? };
        Ok(Topology(Arc::new(TopologyInner { plugin: plugin.clone(), raw: Raw(args.topology), client: None })))
    }

    /// Returns the plugin that compiles for the topology.
    pub fn plugin(&self) -> &Plugin {
        &self.0.plugin
    }

    /// Returns the platform name: `cpu`, `cuda`, `tpu` …
    pub fn platform_name(&self) -> Result<String> {
        // SAFETY: the topology is alive; the string is copied.
        unsafe {
            let args = self
                .plugin()
                .call(abi::TopologyDescriptionPlatformNameArgs { topology: self.0.raw.0, ..Struct::new() })?;
            Ok(text(args.platform_name, args.platform_name_size))
        }
    }

    /// Returns the version of the compiler, as the plugin reports it.
    pub fn platform_version(&self) -> Result<String> {
        // SAFETY: the topology is alive; the string is copied.
        unsafe {
            let args = self
                .plugin()
                .call(abi::TopologyDescriptionPlatformVersionArgs { topology: self.0.raw.0, ..Struct::new() })?;
            Ok(text(args.platform_version, args.platform_version_size))
        }
    }

    /// Returns the topology's attributes, as the plugin reports them.
    pub fn attributes(&self) -> Result<Attributes> {
        // SAFETY: the topology is alive and owns the attributes, which are copied.
        unsafe {
            let args = self
                .plugin()
                .call(abi::TopologyDescriptionAttributesArgs { topology: self.0.raw.0, ..Struct::new() })?;
            Ok(attributes::read(args.attributes, args.num_attributes))
        }
    }

    /// Returns the devices of the topology, in the plugin's order.
    pub fn devices(&self) -> Result<Vec<DeviceDescription>> {
        // SAFETY: the topology is alive and owns the descriptions.
        unsafe {
            let args = self
                .plugin()
                .call(abi::TopologyDescriptionGetDeviceDescriptionsArgs { topology: self.0.raw.0, ..Struct::new() })?;
            let raw = list(args.descriptions.cast::<*mut c_void>(), args.num_descriptions);
            raw.iter().map(|&raw| DeviceDescription::read(&self.0.plugin, raw)).collect()
        }
    }

    /// Serializes the topology, so that another process can read it.
    pub fn serialize(&self) -> Result<Vec<u8>> {
        // SAFETY: the topology is alive; the bytes are copied before the plugin's deleter frees them.
        unsafe {
            let args = self
                .plugin()
                .call(abi::TopologyDescriptionSerializeArgs { topology: self.0.raw.0, ..Struct::new() })?;
            let bytes = list(args.serialized_bytes.cast::<u8>(), args.serialized_bytes_size).to_vec();
            if let Some(free) = args.serialized_topology_deleter {
                free(args.serialized_topology);
            }
            Ok(bytes)
        }
    }

    /// Compiles StableHLO text for the topology, without a device. The result can be inspected and serialized, but not
    /// executed.
    pub fn compile(&self, mlir: &str, options: &CompileOptions) -> Result<Executable> {
        let program = client::program(mlir);
        let options = options.to_proto();
        let args = abi::CompileArgs {
            topology: self.0.raw.0,
            program: (&raw const program).cast_mut().cast(),
            compile_options: pointer(&options),
            compile_options_size: options.len(),
            client: self.0.client.as_ref().map_or(std::ptr::null_mut(), |client| client.inner().raw.0),
            ..Struct::new()
        };
        let started = Instant::now();
        // SAFETY: program and options outlive the call; we own the executable, which holds the topology.
        let compiled = unsafe {
            let args = self.plugin().call(args)?;
            Executable::from_raw(&self.0.plugin, args.executable, self.0.clone())
        };
        compile_log::compiled(self.0.plugin.path(), mlir, &options, started);
        Ok(compiled)
    }
}
