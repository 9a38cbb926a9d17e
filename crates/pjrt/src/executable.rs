//! Executables: execution, and the memory use, cost estimates and HLO that the compiler reports.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::abi::{self, Struct};
use super::attributes::{self, Attributes, list, text};
use super::buffer::Buffer;
use super::buffer_type::BufferType;
use super::client_handle::ClientHandle;
use super::device::Device;
use super::error::{PjrtError, Result};
use super::layout::pointer;
use super::plugin::Plugin;
use super::raw::Raw;

/// Memory use of an executable on one device, in bytes; 0 where the plugin does not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CompiledMemory {
    /// Size of the arguments.
    pub arguments: i64,
    /// Size of the outputs.
    pub outputs: i64,
    /// Size of the outputs that reuse the memory of donated arguments; `outputs` includes them.
    pub aliased: i64,
    /// Size of the temporary buffers.
    pub temporaries: i64,
    /// Size of the machine code. The CPU and CUDA plugins report 0.
    pub generated_code: i64,
    /// Peak memory use that the compiler planned.
    pub peak: i64,
    /// Size of the arguments in host memory.
    pub host_arguments: i64,
    /// Size of the outputs in host memory.
    pub host_outputs: i64,
    /// Size of the temporary buffers in host memory.
    pub host_temporaries: i64,
}

/// The optimized program of an executable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptimizedProgram {
    /// Format of the bytes. Every current plugin returns `hlo_with_config`, an `HloModuleProtoWithConfig`.
    pub format: String,
    /// Serialized program.
    pub bytes: Vec<u8>,
}

/// A compiled program. It may or may not be loaded onto devices.
pub struct Executable {
    plugin: Plugin,
    raw: Raw,
    /// The client or topology that the program was compiled for, which must outlive it.
    _owner: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for Executable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Ok(name) => write!(f, "Executable({name})"),
            Err(error) => write!(f, "Executable({error})"),
        }
    }
}

impl Executable {
    /// Wraps an executable of a plugin and takes ownership of it.
    ///
    /// # Safety
    /// `raw` is an owned `PJRT_Executable` of `plugin`; `owner` keeps alive the client or topology on which it depends.
    pub(super) unsafe fn from_raw(plugin: &Plugin, raw: *mut c_void, owner: Arc<dyn Any + Send + Sync>) -> Executable {
        Executable { plugin: plugin.clone(), raw: Raw(raw), _owner: owner }
    }

    /// Returns the module name.
    pub fn name(&self) -> Result<String> {
        // SAFETY: the executable is alive; the name is copied.
        unsafe {
            let args = self.plugin.call(abi::ExecutableNameArgs { executable: self.raw.0, ..Struct::new() })?;
            Ok(text(args.executable_name, args.executable_name_size))
        }
    }

    /// Returns the number of replicas.
    pub fn num_replicas(&self) -> Result<usize> {
        // SAFETY: the executable is alive.
        let args =
            unsafe { self.plugin.call(abi::ExecutableNumReplicasArgs { executable: self.raw.0, ..Struct::new() })? };
        Ok(args.num_replicas)
    }

    /// Returns the number of devices over which each replica is partitioned.
    pub fn num_partitions(&self) -> Result<usize> {
        // SAFETY: the executable is alive.
        let args =
            unsafe { self.plugin.call(abi::ExecutableNumPartitionsArgs { executable: self.raw.0, ..Struct::new() })? };
        Ok(args.num_partitions)
    }

    /// Returns the number of outputs per device.
    pub fn num_outputs(&self) -> Result<usize> {
        // SAFETY: the executable is alive.
        let args =
            unsafe { self.plugin.call(abi::ExecutableNumOutputsArgs { executable: self.raw.0, ..Struct::new() })? };
        Ok(args.num_outputs)
    }

    /// Returns the element type and dimensions of each output on one device.
    pub fn outputs(&self) -> Result<Vec<(BufferType, Vec<usize>)>> {
        // SAFETY: the executable is alive and owns the lists; the dimensions of all outputs are concatenated.
        let (types, sizes, mut dims) = unsafe {
            let types =
                self.plugin.call(abi::ExecutableOutputElementTypesArgs { executable: self.raw.0, ..Struct::new() })?;
            let shapes =
                self.plugin.call(abi::ExecutableOutputDimensionsArgs { executable: self.raw.0, ..Struct::new() })?;
            let sizes = list(shapes.dim_sizes.cast::<usize>(), shapes.num_outputs);
            let dims = list(shapes.dims.cast::<i64>(), sizes.iter().sum());
            (list(types.output_types.cast::<u32>(), types.num_output_types), sizes, dims)
        };
        let output = |(&kind, &size): (&u32, &usize)| {
            let unknown = || PjrtError::ElementType { plugin: self.plugin.path().to_owned(), kind };
            let dims = dims.split_off(..size).expect("sizes add up");
            Ok((BufferType::from_c(kind).ok_or_else(unknown)?, dims.iter().map(|&dim| dim as usize).collect()))
        };
        types.iter().zip(sizes).map(output).collect()
    }

    /// Returns the memory use on one device.
    pub fn memory(&self) -> Result<CompiledMemory> {
        // SAFETY: the executable is alive.
        let args = unsafe {
            self.plugin.call(abi::ExecutableGetCompiledMemoryStatsArgs { executable: self.raw.0, ..Struct::new() })?
        };
        Ok(CompiledMemory {
            arguments: args.argument_size_in_bytes,
            outputs: args.output_size_in_bytes,
            aliased: args.alias_size_in_bytes,
            temporaries: args.temp_size_in_bytes,
            generated_code: args.generated_code_size_in_bytes,
            peak: args.peak_memory_in_bytes,
            host_arguments: args.host_argument_size_in_bytes,
            host_outputs: args.host_output_size_in_bytes,
            host_temporaries: args.host_temp_size_in_bytes,
        })
    }

    /// Returns the compiler's estimates (`flops`, `bytes accessed` …). Several plugins do not implement this call.
    pub fn cost_analysis(&self) -> Result<Attributes> {
        // SAFETY: the executable is alive and owns the properties, which are copied.
        unsafe {
            let args =
                self.plugin.call(abi::ExecutableGetCostAnalysisArgs { executable: self.raw.0, ..Struct::new() })?;
            Ok(attributes::read(args.properties, args.num_properties))
        }
    }

    /// Returns the program after the compiler's optimizations.
    pub fn optimized_program(&self) -> Result<OptimizedProgram> {
        let mut program = abi::Program::new();
        let args = abi::ExecutableOptimizedProgramArgs {
            executable: self.raw.0,
            program: (&raw mut program).cast(),
            ..Struct::new()
        };
        // SAFETY: without a destination, the call only returns the size and the format, which is a static string.
        let mut args = unsafe { self.plugin.call(args)? };
        let mut bytes = vec![0u8; program.code_size];
        program.code = bytes.as_mut_ptr().cast();
        args.program = (&raw mut program).cast();
        // SAFETY: the destination has `code_size` bytes.
        let format = unsafe {
            self.plugin.call(args)?;
            text(program.format, program.format_size)
        };
        bytes.truncate(program.code_size);
        Ok(OptimizedProgram { format, bytes })
    }

    /// Serializes the executable for [`super::Client::load`] on the same platform and plugin version.
    pub fn serialize(&self) -> Result<Vec<u8>> {
        // SAFETY: the executable is alive; the bytes are copied before the plugin's deleter frees them.
        unsafe {
            let args = self.plugin.call(abi::ExecutableSerializeArgs { executable: self.raw.0, ..Struct::new() })?;
            let bytes = list(args.serialized_bytes.cast::<u8>(), args.serialized_bytes_size).to_vec();
            if let Some(free) = args.serialized_executable_deleter {
                free(args.serialized_executable);
            }
            Ok(bytes)
        }
    }

    /// Returns the compiler's hash of the program. All processes of a run get the same hash.
    pub fn fingerprint(&self) -> Result<String> {
        // SAFETY: the executable is alive; the string is copied.
        unsafe {
            let args = self.plugin.call(abi::ExecutableFingerprintArgs { executable: self.raw.0, ..Struct::new() })?;
            Ok(text(args.executable_fingerprint, args.executable_fingerprint_size))
        }
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: we own the executable and do not use it again.
        unsafe { self.plugin.destroy(abi::ExecutableDestroyArgs { executable: self.raw.0, ..Struct::new() }) };
    }
}

/// Options of an execution.
#[derive(Clone, Debug, Default)]
pub struct ExecuteOptions {
    /// Indices of donated arguments that this execution must not donate.
    pub keep: Vec<usize>,
    /// Id of the execution. It is equal in all processes that take part, and differs between executions.
    pub launch_id: i32,
}

/// An executable that is loaded onto devices. Clones share the same executable. Dereferences to [`Executable`].
#[derive(Clone, Debug)]
pub struct LoadedExecutable(Arc<LoadedInner>);

struct LoadedInner {
    client: Arc<ClientHandle>,
    raw: Raw,
    executable: Executable,
    devices: Vec<Device>,
    num_outputs: usize,
}

impl fmt::Debug for LoadedInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} on {} devices", self.executable, self.devices.len())
    }
}

impl Drop for LoadedInner {
    fn drop(&mut self) {
        destroy(&self.client, self.raw.0);
    }
}

fn destroy(client: &ClientHandle, raw: *mut c_void) {
    // SAFETY: the callers own `raw` and do not use it again.
    unsafe { client.plugin.destroy(abi::LoadedExecutableDestroyArgs { executable: raw, ..Struct::new() }) };
}

impl Deref for LoadedExecutable {
    type Target = Executable;

    fn deref(&self) -> &Executable {
        &self.0.executable
    }
}

impl LoadedExecutable {
    /// Wraps a loaded executable and takes ownership of it. Destroys it on error.
    ///
    /// # Safety
    /// `raw` is an owned `PJRT_LoadedExecutable` of `client`.
    pub(super) unsafe fn from_raw(client: &Arc<ClientHandle>, raw: *mut c_void) -> Result<LoadedExecutable> {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::describe(client, raw) }.inspect_err(|_| destroy(client, raw))
    }

    /// Queries the properties of a loaded executable and takes ownership of it.
    ///
    /// # Safety
    /// As for [`LoadedExecutable::from_raw`]; on error the caller still owns `raw`.
    unsafe fn describe(client: &Arc<ClientHandle>, raw: *mut c_void) -> Result<LoadedExecutable> {
        // SAFETY: the loaded executable is alive and owns its device list; we own the executable.
        let (executable, devices) = unsafe {
            let program = client
                .plugin
                .call(abi::LoadedExecutableGetExecutableArgs { loaded_executable: raw, ..Struct::new() })?;
            let executable = Executable::from_raw(&client.plugin, program.executable, client.clone());
            let devices =
                client.plugin.call(abi::LoadedExecutableAddressableDevicesArgs { executable: raw, ..Struct::new() })?;
            let devices = list(devices.addressable_devices.cast::<*mut c_void>(), devices.num_addressable_devices);
            (executable, devices.iter().map(|&d| Device::from_raw(client, d)).collect::<Result<Vec<_>>>()?)
        };
        let num_outputs = executable.num_outputs()?;
        Ok(LoadedExecutable(Arc::new(LoadedInner {
            client: client.clone(),
            raw: Raw(raw),
            executable,
            devices,
            num_outputs,
        })))
    }

    /// Returns the devices of this process on which the executable runs, in the order of the arguments of
    /// [`LoadedExecutable::execute`].
    pub fn devices(&self) -> &[Device] {
        &self.0.devices
    }

    /// Executes the program asynchronously. `arguments` has one list per device, in the order of
    /// [`LoadedExecutable::devices`]; the result has one list of outputs per device in the same order. Reading an
    /// output waits for it and returns the execution error, if any. Donated arguments are deleted.
    pub fn execute(&self, arguments: &[Vec<&Buffer>]) -> Result<Vec<Vec<Buffer>>> {
        self.execute_with(arguments, &ExecuteOptions::default())
    }

    /// Executes the program like [`LoadedExecutable::execute`], with options.
    pub fn execute_with(&self, arguments: &[Vec<&Buffer>], options: &ExecuteOptions) -> Result<Vec<Vec<Buffer>>> {
        let LoadedInner { client, raw, devices, num_outputs, .. } = &*self.0;
        self.check(arguments).map_err(|e| client.plugin.refuse::<abi::LoadedExecutableExecuteArgs>(e))?;
        let keep: Vec<i64> = options.keep.iter().map(|&index| index as i64).collect();
        let mut execute = abi::ExecuteOptions {
            launch_id: options.launch_id,
            non_donatable_input_indices: pointer(&keep),
            num_non_donatable_input_indices: keep.len(),
            ..Struct::new()
        };
        let inputs: Vec<Vec<*mut c_void>> =
            arguments.iter().map(|list| list.iter().map(|buffer| buffer.raw()).collect()).collect();
        let input_lists: Vec<*const *mut c_void> = inputs.iter().map(|list| list.as_ptr()).collect();
        let mut outputs = vec![vec![std::ptr::null_mut::<c_void>(); *num_outputs]; devices.len()];
        let output_lists: Vec<*mut *mut c_void> = outputs.iter_mut().map(|list| list.as_mut_ptr()).collect();
        let args = abi::LoadedExecutableExecuteArgs {
            executable: raw.0,
            options: (&raw mut execute).cast(),
            argument_lists: pointer(&input_lists),
            num_devices: devices.len(),
            num_args: inputs.first().map_or(0, Vec::len),
            output_lists: pointer(&output_lists),
            ..Struct::new()
        };
        // SAFETY: `check` verified that there is one list per device, of equal lengths, with buffers of this client;
        // the output lists have room for every output; all lists outlive the call.
        unsafe { client.plugin.call(args)? };
        let buffer = |raw| {
            // SAFETY: the call succeeded, so each slot holds a buffer that we own.
            unsafe { Buffer::from_raw(client, raw) }
        };
        Ok(outputs.into_iter().map(|list| list.into_iter().map(buffer).collect()).collect())
    }

    /// Checks the argument lists, because the plugin does not.
    fn check(&self, arguments: &[Vec<&Buffer>]) -> std::result::Result<(), String> {
        let devices = self.0.devices.len();
        if arguments.len() != devices {
            return Err(format!("{:?} requires one argument list per device, got {} lists", self.0, arguments.len()));
        }
        let counts: Vec<usize> = arguments.iter().map(Vec::len).collect();
        if counts.windows(2).any(|pair| pair[0] != pair[1]) {
            return Err(format!("the argument lists of the devices have different lengths: {counts:?}"));
        }
        match arguments.iter().flatten().any(|buffer| !buffer.belongs_to(&self.0.client)) {
            true => Err("an argument belongs to another client".into()),
            false => Ok(()),
        }
    }
}
