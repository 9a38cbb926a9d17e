//! Compiles programs, uploads their inputs and executes them.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::cache::{Cache, CacheEntry, CacheError, fingerprint};
use super::compile::{EngineOptions, RejectedOptions, compile_options};
use super::devices::Devices;
use super::error::{MemoryPhase, RuntimeError};
use super::executable::{CompiledProgram, ExecutableOrigin, Outputs};
use super::flags::Toolchain;
use super::gather;
use super::loader::LoadLimits;
use super::platforms::PlatformSpec;
use super::process_locks::ProcessLock;
use super::processes::Group;
use super::sharded_tensor::{Replicate, Shard, ShardedTensor, shards};
use super::thread_locks::{EntryLock, EntryLocks, PendingWrite};
use super::timeline::{SpanKind, Timeline};
use super::watch::{ExecutionTimes, Queue, WaitDescription};
use super::watchdog::DeviceWatchdog;
use ltx2_base::failpoint;
use ltx2_pjrt::{
    Client, Code, CompileOptions, Device, DeviceLayout, ExecuteOptions, LoadedExecutable, PjrtError, Staging,
};
use ltx2_stablehlo::{Argument, DeviceMesh, Program, Sharding, Type};
use ltx2_weights::tensor::Tensor;

/// Counts and times of one program's compiles, cache hits and executions.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct ProgramStatistics {
    /// Number of compiles; cache hits are not counted.
    pub compiles: usize,
    /// Seconds spent compiling.
    pub compile_seconds: f64,
    /// Number of loads from the compile cache.
    pub cache_hits: usize,
    /// Seconds spent loading from the compile cache.
    pub cache_seconds: f64,
    /// Number of executions that this process started.
    pub executions: usize,
}

/// A PJRT client and the devices of all processes: compiles and runs programs, and collects statistics. Clones share
/// all state.
#[derive(Clone)]
pub struct Engine {
    client: Client,
    toolchain: Arc<Toolchain>,
    devices: Arc<Devices>,
    options: EngineOptions,
    refused: RejectedOptions,
    cache: Option<Arc<Cache>>,
    group: Option<Arc<Group>>,
    statistics: Arc<Mutex<BTreeMap<String, ProgramStatistics>>>,
    launches: Arc<AtomicI32>,
    timeline: Timeline,
    saves: Arc<EntryLocks>,
    /// Host staging memory. It is reused between loads, because freeing it makes the driver wait for all work on the
    /// devices.
    staging: Arc<Mutex<Vec<Staging>>>,
    /// Peak host memory of a load's buffers, in bytes.
    load_memory: Arc<AtomicUsize>,
    load_limits: LoadLimits,
    /// Executables of [`Engine::compile_once`], by program hash.
    compiled: Arc<Mutex<HashMap<String, Arc<CompiledProgram>>>>,
    watchdog: DeviceWatchdog,
    queue: Arc<Queue>,
}

impl Engine {
    /// Creates an engine from a client. If the compile cache is unusable, logs a warning and continues without it.
    pub fn new(client: Client, options: EngineOptions) -> Self {
        Engine::among(client, options, None)
    }

    /// Creates an engine for one process of `group`; the processes check that they compile the same programs.
    pub fn among(client: Client, options: EngineOptions, group: Option<Arc<Group>>) -> Self {
        let toolchain = Arc::new(Toolchain::from_client(&client));
        let cache = options.compile_cache.as_deref().and_then(|folder| {
            let opened = client.topology().map_err(CacheError::from);
            opened
                .and_then(|t| Cache::new(folder, &toolchain.platform, &t))
                .inspect_err(|e| warn_uncached("all", e))
                .ok()
        });
        let (devices, cache) = (Arc::new(Devices::from_client(&client)), cache.map(Arc::new));
        let (statistics, launches, compiled, timeline, saves, staging, load_memory, queue) = Default::default();
        let watchdog = options.watchdog.clone().with_group(group.as_ref());
        Engine {
            client,
            toolchain,
            devices,
            options,
            refused: RejectedOptions::default(),
            cache,
            group,
            statistics,
            launches,
            timeline,
            saves,
            staging,
            load_memory,
            load_limits: LoadLimits::default(),
            compiled,
            watchdog,
            queue,
        }
    }

    /// Returns the timeline of this process, which all clones of the engine share.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Returns the watchdog of executions and transfers, from [`EngineOptions::watchdog`].
    pub fn watchdog(&self) -> &DeviceWatchdog {
        &self.watchdog
    }

    /// Returns at least `size` bytes of host memory that devices can read directly, reusing the memory of an earlier
    /// load if possible.
    pub(super) fn staging(&self, size: usize) -> Staging {
        let mut all = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        match all.iter().position(|staging| staging.len() >= size) {
            Some(place) => all.swap_remove(place),
            None => {
                // Replace a smaller buffer, so that there are never more buffers than loading threads.
                let smaller = all.pop();
                drop(all);
                drop(smaller);
                self.client.staging(size)
            }
        }
    }

    /// Keeps staging memory for reuse by the next load.
    pub(super) fn keep_staging(&self, staging: Staging) {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner).push(staging);
    }

    /// Sets the limits of host memory for loads.
    #[must_use]
    pub fn with_load_limits(self, load_limits: LoadLimits) -> Self {
        Engine { load_limits, ..self }
    }

    pub(super) fn load_limits(&self) -> LoadLimits {
        self.load_limits
    }

    /// Records the host memory that a finished load took: the staging memory and `conversions` bytes.
    pub(super) fn record_load_memory(&self, conversions: usize) {
        let all = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let staging: usize = all.iter().map(|staging| staging.len()).sum();
        self.load_memory.fetch_max(staging + conversions, Ordering::Relaxed);
    }

    /// Returns the peak host memory of a load's buffers, in bytes: staging memory and tensors that were converted.
    pub fn peak_load_memory(&self) -> usize {
        self.load_memory.load(Ordering::Relaxed)
    }

    /// Returns the PJRT client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the platform, the device kind and the plugin's version, which determine the default compile options.
    pub fn toolchain(&self) -> &Toolchain {
        &self.toolchain
    }

    /// Returns the platform name in lower case, for example `cpu`, `cuda` or `tpu`.
    pub fn platform(&self) -> &str {
        &self.toolchain.platform
    }

    /// Returns the devices of all processes in mesh order.
    pub fn devices(&self) -> &[Device] {
        self.devices.all()
    }

    /// Returns the properties of the platform.
    pub fn spec(&self) -> PlatformSpec {
        self.toolchain.spec()
    }

    /// Returns the devices of this process.
    pub fn own_devices(&self) -> &[Device] {
        self.devices.own()
    }

    /// Returns the first device of this process.
    pub fn own_device(&self) -> &Device {
        &self.devices.own()[0]
    }

    /// Returns whether this is one of several processes that check that they compile the same programs.
    pub fn is_grouped(&self) -> bool {
        self.group.is_some()
    }

    /// Returns whether some devices belong to other processes.
    pub fn has_peers(&self) -> bool {
        self.devices.have_peers()
    }

    /// Returns the number of device groups with fast interconnects, such as TPU slices.
    pub fn slices(&self) -> usize {
        self.devices.slices()
    }

    /// Returns the devices of this process that a program over `count` devices uses, with their mesh indices.
    pub(super) fn addressable(&self, count: usize) -> Vec<(usize, &Device)> {
        self.devices.addressable(count)
    }

    /// Returns the number of devices of this process that a program over `count` devices uses.
    pub fn local_devices(&self, count: usize) -> usize {
        self.addressable(count).len()
    }

    /// Returns a program's compile options and its compile-cache entry.
    fn entry(&self, name: &str, program: &Program) -> (CompileOptions, Option<CacheEntry>) {
        let ids: Vec<i32> = self.devices.of_program(program.devices()).iter().map(Device::id).collect();
        let options = self.refused.without(compile_options(&self.toolchain, program, &ids, &self.options));
        let entry = self.cache.as_ref().map(|cache| cache.entry(name, program, &options));
        (options, entry)
    }

    /// Returns whether the compile cache has an entry for a program.
    pub fn is_cached(&self, name: &str, program: &Program) -> bool {
        program.devices() <= self.devices().len() && self.entry(name, program).1.is_some_and(|e| e.path().exists())
    }

    /// Waits for a pending write of a program's compile-cache entry and returns the path of the entry; `None` if there
    /// is no entry.
    pub fn cache_file(&self, name: &str, program: &Program) -> Option<PathBuf> {
        let path = self.entry(name, program).1?.path().to_path_buf();
        drop(EntryLock::at(&path).wait());
        path.exists().then_some(path)
    }

    /// Compiles a program, or loads it from the compile cache.
    ///
    /// # Errors
    /// Returns the plugin's error, or an error if the program needs more devices than the platform has.
    pub fn compile(&self, name: &str, program: &Program) -> Result<CompiledProgram, RuntimeError> {
        if program.devices() > self.devices().len() {
            let have = self.devices().len();
            return Err(RuntimeError::Devices { program: name.into(), want: program.devices(), have });
        }
        loop {
            if let Some(compiled) = self.try_compile(name, program)? {
                return Ok(compiled);
            }
        }
    }

    /// Compiles a program once, without the default options that the plugin has rejected so far. Returns `None` if the
    /// plugin rejects a further default option; the caller then tries again without that option.
    fn try_compile(&self, name: &str, program: &Program) -> Result<Option<CompiledProgram>, RuntimeError> {
        let (options, mut entry) = self.entry(name, program);
        // The processes of a group take no lock, because `all_cached` makes each of them wait for the others.
        let entry_lock = entry.as_ref().filter(|_| self.group.is_none()).map(|entry| EntryLock::at(entry.path()));
        let writing = entry_lock.as_ref().map(EntryLock::wait);
        let absent = entry.as_ref().filter(|entry| entry_lock.is_some() && !entry.path().exists());
        let behind = self.options.write_behind.unwrap_or(self.spec().writes_cache_in_background);
        // If the entry is written only after the first run, processes do not lock each other out: each could wait for
        // the other's run.
        let claim = absent.filter(|_| !behind).and_then(|entry| ProcessLock::wait(name, entry.path()));
        let start = Instant::now();
        let cached = entry.as_ref().and_then(|entry| self.load_cached(name, entry));
        let cached = if self.all_cached(name, program, cached.is_some())? { cached } else { None };
        let (loaded, origin, took) = match cached {
            Some(loaded) => {
                self.timeline.add(SpanKind::Cache, name, start, None);
                (loaded, ExecutableOrigin::CacheHit, start.elapsed())
            }
            None => {
                let start = Instant::now();
                let compile = |o: &CompileOptions| self.client.compile(&program.text, o);
                let compiled = || self.refused.compile(&self.toolchain, &options, &self.options, compile);
                let compiled = loop {
                    match failpoint::within("compile", name, compiled) {
                        Ok(Some(loaded)) => break Ok(loaded),
                        // Retry from the start, because the program may be cached under the remaining options. In a
                        // group, all processes have agreed to compile, so only the options change.
                        Ok(None) if self.group.is_none() => return Ok(None),
                        Ok(None) => entry = self.entry(name, program).1,
                        Err(error) => break Err(error),
                    }
                };
                let agreed = match self.peers_of(program) {
                    Some(group) => first_error(group, self.client.plugin().path(), compiled),
                    None => compiled,
                };
                let loaded = agreed.map_err(|e| e.during(MemoryPhase::Compile, name))?;
                let took = start.elapsed();
                self.timeline.add(SpanKind::Compile, name, start, None);
                // Only the first process writes to a shared cache directory.
                let first = self.group.as_ref().is_none_or(|group| group.id() == 0);
                if let Some(entry) = entry.filter(|entry| first || !entry.path().exists()) {
                    self.save(entry, &loaded, entry_lock.as_ref().zip(writing).filter(|_| behind));
                }
                drop(claim);
                (loaded, ExecutableOrigin::Compiled, took)
            }
        };
        let ids = |devices: &mut dyn Iterator<Item = &Device>| devices.map(Device::id).collect::<Vec<i32>>();
        let wanted = ids(&mut self.addressable(program.devices()).into_iter().map(|(_, device)| device));
        let got = ids(&mut loaded.devices().iter());
        if got != wanted {
            return Err(RuntimeError::Placed { program: name.into(), wanted, got });
        }
        self.count(name, |s| match origin {
            ExecutableOrigin::Compiled => {
                s.compiles += 1;
                s.compile_seconds += took.as_secs_f64();
            }
            ExecutableOrigin::CacheHit => {
                s.cache_hits += 1;
                s.cache_seconds += took.as_secs_f64();
            }
        });
        // The peak includes the memory that the compiler used for autotuning on the device.
        let peak = self.own_device().memory().ok().and_then(|memory| memory.peak).map(|bytes| bytes >> 20);
        tracing::debug!(
            program = name,
            seconds = took.as_secs_f64(),
            peak_mib = peak,
            hash = program.hash(),
            "{origin}"
        );
        Ok(Some(CompiledProgram {
            name: name.into(),
            loaded,
            arguments: program.arguments.clone(),
            results: program.results.clone(),
            mesh: program.mesh.clone(),
            hash: program.hash(),
            origin,
            compile_time: took,
            entry_lock: entry_lock.clone().filter(|_| origin == ExecutableOrigin::Compiled),
            execution_times: Arc::new(ExecutionTimes::predict(program, &self.toolchain, self.has_peers())),
        }))
    }

    /// Writes an executable to the compile cache. If `entry_lock` holds the entry's lock, defers the write until after
    /// the first run, because serializing a GPU executable takes seconds; otherwise writes immediately.
    fn save(
        &self,
        entry: CacheEntry,
        loaded: &LoadedExecutable,
        entry_lock: Option<(&EntryLock, MutexGuard<PendingWrite>)>,
    ) {
        let (loaded, timeline) = (loaded.clone(), self.timeline.clone());
        let save = move || {
            let start = Instant::now();
            match entry.save(&loaded) {
                Ok(bytes) => timeline.add(SpanKind::Save, entry.name(), start, Some(bytes as u64)),
                Err(error) => warn_uncached(entry.name(), &error),
            }
        };
        match entry_lock {
            None => save(),
            Some((entry_lock, mut writing)) => {
                *writing = PendingWrite::Due(Box::new(save));
                self.saves.add(entry_lock.clone());
            }
        }
    }

    /// Returns the executable of an earlier call for the same program, or compiles the program.
    fn compile_once(&self, name: &str, program: &Program) -> Result<Arc<CompiledProgram>, RuntimeError> {
        let hash = program.hash();
        let known = self.compiled.lock().unwrap_or_else(PoisonError::into_inner).get(&hash).cloned();
        if let Some(known) = known {
            return Ok(known);
        }
        let executable = Arc::new(self.compile(name, program)?);
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner).insert(hash, executable.clone());
        Ok(executable)
    }

    /// Returns the group whose processes compile a program together. `None`: each process compiles it independently,
    /// because it is alone or the program runs on one device.
    fn peers_of(&self, program: &Program) -> Option<&Group> {
        self.group.as_deref().filter(|_| program.devices() > 1)
    }

    /// Checks that all processes compile the same program, and returns whether all have it cached. Compilers of several
    /// processes may cooperate, so either all compile or none does.
    fn all_cached(&self, name: &str, program: &Program, cached: bool) -> Result<bool, RuntimeError> {
        let Some(group) = self.peers_of(program) else { return Ok(cached) };
        // Compares the requested options: processes may learn of rejected options at different times.
        let ids: Vec<i32> = self.devices.of_program(program.devices()).iter().map(Device::id).collect();
        let options = compile_options(&self.toolchain, program, &ids, &self.options);
        Ok(group.ensure_same_program(name, &program.hash(), &fingerprint(self.platform(), &options), cached)?)
    }

    /// Loads a program from the compile cache; if the entry is unusable, logs a warning and returns `None`.
    fn load_cached(&self, name: &str, entry: &CacheEntry) -> Option<LoadedExecutable> {
        entry.load(&self.client).unwrap_or_else(|error| {
            tracing::warn!("recompiling {name}: its compile-cache entry is unusable: {error}");
            None
        })
    }

    /// Copies a host tensor to the devices as an argument of a program. Each device gets its shard, converted to the
    /// argument's element type and zero-padded if the argument is larger than its logical dimensions.
    ///
    /// # Errors
    /// Returns an error if there is no such argument, if the tensor's shape differs from the argument's, if the host
    /// does not support the element type, or if the plugin fails.
    pub fn upload(
        &self,
        executable: &CompiledProgram,
        name: &str,
        tensor: &Tensor,
    ) -> Result<ShardedTensor, RuntimeError> {
        let argument = executable.arguments.iter().find(|a| a.name == name).ok_or_else(|| RuntimeError::Missing {
            program: executable.name.to_string(),
            name: name.into(),
            ty: "no such argument".into(),
        })?;
        let mesh = &executable.mesh;
        if tensor.shape() != argument.logical_dims {
            let got = Type::new(tensor.dtype(), tensor.shape()).to_string();
            let want = Type::new(argument.ty.dtype, argument.logical_dims.clone()).to_string();
            return Err(RuntimeError::Mismatch { name: argument.name.clone(), want, got });
        }
        let shards = shards(&argument.ty, mesh, argument.sharding.as_ref());
        let layout = device_layout(argument)?;
        let devices = self.addressable(mesh.devices());
        let watch = WaitDescription::transfer(&self.watchdog, &executable.name, &devices);
        ShardedTensor::upload(&self.client, &devices, tensor, &argument.ty, shards, layout.as_ref(), watch)
            .map_err(|e| e.during(MemoryPhase::Upload, &executable.name))
    }

    /// Runs an executable; `find` returns the tensor for each argument name.
    ///
    /// # Errors
    /// Returns an error that names the argument if it is missing or has the wrong type or sharding, or the plugin's
    /// error.
    pub fn run<'a>(
        &self,
        executable: &CompiledProgram,
        find: impl Fn(&str) -> Option<&'a ShardedTensor>,
    ) -> Result<Outputs, RuntimeError> {
        let devices = self.addressable(executable.mesh.devices());
        let addressable: Vec<usize> = devices.iter().map(|(place, _)| *place).collect();
        let mut arguments = vec![Vec::with_capacity(executable.arguments.len()); addressable.len()];
        for a in &executable.arguments {
            let tensor = find(&a.name).ok_or_else(|| RuntimeError::Missing {
                program: executable.name.to_string(),
                name: a.name.clone(),
                ty: a.ty.to_string(),
            })?;
            let wanted = shards(&a.ty, &executable.mesh, a.sharding.as_ref());
            if *tensor.ty() != a.ty || tensor.shards() != wanted || tensor.memory() != a.memory {
                let size = |all: &[Shard]| all.first().map_or(String::new(), |s| format!(" of {:?}", s.size));
                let shape = |all: &[Shard]| format!("{} shards{}", all.len(), size(all));
                let want = format!("{} in {} in {} memory", a.ty, shape(&wanted), a.memory.name());
                let got = format!("{} in {} in {} memory", tensor.ty(), shape(tensor.shards()), tensor.memory().name());
                return Err(RuntimeError::Mismatch { name: a.name.clone(), want, got });
            }
            for (row, buffer) in arguments.iter_mut().zip(tensor.buffers()) {
                row.push(buffer);
            }
        }
        // The plugin uses the launch id to detect processes that run programs in different orders.
        let launch_id = if self.has_peers() { self.launches.fetch_add(1, Ordering::SeqCst) + 1 } else { 0 };
        let options = ExecuteOptions { launch_id, ..ExecuteOptions::default() };
        let watch = WaitDescription::execution(
            &self.watchdog,
            &executable.name,
            &devices,
            &executable.execution_times,
            &self.queue,
        );
        let guard = watch.as_ref().map(WaitDescription::guard_start);
        let results = executable.loaded.execute_with(&arguments, &options);
        let results = results.map_err(|e| RuntimeError::from(e).during(MemoryPhase::Run, &executable.name))?;
        drop(guard);
        executable.entry_lock.iter().for_each(EntryLock::write);
        self.count(&executable.name, |s| s.executions += 1);
        let mut each: Vec<_> = results.into_iter().map(Vec::into_iter).collect();
        let named = executable.results.iter().map(|o| {
            let buffers = each.iter_mut().filter_map(Iterator::next).collect();
            let shards = shards(&o.ty, &executable.mesh, o.sharding.as_ref());
            let tensor = ShardedTensor::new(buffers, addressable.clone(), shards, o.ty.clone(), o.logical_dims.clone());
            let replicate = self.has_peers().then(|| self.replicator(&executable.mesh, o.sharding.as_ref()));
            let tensor = tensor.in_memory(o.memory).with_replicator(replicate).with_watch(watch.clone());
            (o.name.clone(), tensor.of_program(executable.name.clone()))
        });
        Ok(Outputs { named: named.collect() })
    }

    /// Copies a result of a program over `mesh` in full to every device. This runs a program across all processes, so
    /// each process must call it.
    ///
    /// # Errors
    /// Returns the plugin's error.
    pub fn replicate(
        &self,
        tensor: &ShardedTensor,
        mesh: &DeviceMesh,
        sharding: Option<&Sharding>,
    ) -> Result<ShardedTensor, RuntimeError> {
        let program = gather::program(tensor.ty(), tensor.dims(), mesh, sharding)?;
        let executable = self.compile_once("gather", &program)?;
        let mut outputs = self.run(&executable, |name| (name == gather::TENSOR).then_some(tensor))?;
        outputs
            .take(gather::TENSOR)
            .ok_or_else(|| RuntimeError::Parameter("the gather program returned no tensor".into()))
    }

    fn replicator(&self, mesh: &DeviceMesh, sharding: Option<&Sharding>) -> Replicate {
        let (engine, mesh, sharding) = (self.clone(), mesh.clone(), sharding.cloned());
        Box::new(move |tensor| engine.replicate(tensor, &mesh, sharding.as_ref()))
    }

    /// Returns the statistics of every compiled or executed program, by program name.
    pub fn statistics(&self) -> BTreeMap<String, ProgramStatistics> {
        self.statistics.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn count(&self, name: &str, f: impl FnOnce(&mut ProgramStatistics)) {
        let mut all = self.statistics.lock().unwrap_or_else(PoisonError::into_inner);
        f(all.entry(name.to_string()).or_default());
    }
}

/// Returns the result of compiling a program, or the error of the first process that could not compile it: if only some
/// processes failed, they would go on to compile different programs. `plugin`: path of the plugin, for the error.
fn first_error<T>(group: &Group, plugin: &Path, own: Result<T, RuntimeError>) -> Result<T, RuntimeError> {
    let code = |error: &RuntimeError| match error {
        RuntimeError::Plugin(source) => source.code(),
        _ => None,
    };
    let text = own.as_ref().err().map_or(String::new(), |e| format!("{} {e}", code(e).unwrap_or(Code::UNKNOWN).0));
    let texts = group.all_gather(&text)?;
    match texts.iter().position(|text| !text.is_empty()) {
        Some(first) if first != group.id() => {
            let (code, message) = texts[first].split_once(' ').unwrap_or_default();
            let code = Code(code.parse().unwrap_or(Code::UNKNOWN.0));
            let message = format!("{}: {message}", group.name(first));
            Err(PjrtError::Call { plugin: plugin.into(), call: "PJRT_Client_Compile", code, message }.into())
        }
        _ => own,
    }
}

/// Logs that a program was not cached: a warning, or a debug message if the plugin does not support serialization.
fn warn_uncached(name: &str, error: &CacheError) {
    match error.is_unsupported() {
        true => tracing::debug!(program = name, "not written to the compile cache: {error}"),
        false => tracing::warn!(program = name, "not written to the compile cache: {error}"),
    }
}

/// Parses the memory layout that an argument requests.
pub(super) fn device_layout(argument: &Argument) -> Result<Option<DeviceLayout>, RuntimeError> {
    let Some(text) = argument.memory_layout.as_deref() else { return Ok(None) };
    // The parser's error quotes the layout text.
    let fail = |e| RuntimeError::Parameter(format!("invalid memory layout of argument '{}': {e}", argument.name));
    text.parse().map(Some).map_err(fail)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use super::*;
    use crate::processes::{Launch, Timeouts};

    /// Calls `run` in two processes of a group, which are simulated by threads, and returns both results.
    fn pair<T: Send>(run: impl Fn(&Group) -> T + Sync) -> [T; 2] {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port();
        let member = |id| {
            let launch = Launch { id, count: 2, coordinator: format!("127.0.0.1:{port}"), how: "test".into() };
            let timeouts = Timeouts { start: Duration::from_secs(60), lost: Duration::from_secs(60) };
            let group = Group::join(&launch, timeouts, Box::new(|_| ())).expect("joins");
            let result = run(&group);
            group.finish();
            result
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| member(1));
            [member(0), other.join().expect("ends")]
        })
    }

    #[test]
    fn processes_agree_on_failed_compilations() {
        let results = pair(|group| {
            let call = "PJRT_Client_Compile";
            let error = |code, message: &str| {
                Err(PjrtError::Call { plugin: "p.so".into(), call, code, message: message.into() }.into())
            };
            let exhausted = match group.id() {
                0 => Ok(7),
                _ => error(Code::RESOURCE_EXHAUSTED, "no room"),
            };
            let first = match group.id() {
                0 => error(Code::UNKNOWN, "rejected"),
                _ => error(Code::RESOURCE_EXHAUSTED, "no room"),
            };
            [exhausted, first, Ok(7)].map(|own| {
                let agreed =
                    first_error(group, Path::new("p.so"), own).map_err(|e| e.during(MemoryPhase::Compile, "x"));
                let is_out_of_memory = matches!(agreed, Err(RuntimeError::OutOfMemory { is_host: false, .. }));
                (is_out_of_memory, agreed.map_err(|error| error.to_string()))
            })
        });
        for [exhausted, first, both] in results {
            assert!(exhausted.0 && exhausted.1.as_ref().is_err_and(|e| e.contains("no room")), "{exhausted:?}");
            assert!(!first.0 && first.1.as_ref().is_err_and(|e| e.contains("rejected")), "{first:?}");
            assert_eq!(both, (false, Ok(7)));
        }
    }
}
