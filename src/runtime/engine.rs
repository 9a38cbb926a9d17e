//! Compiling a network's program and running it on named buffers.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::cache::{Cache, CacheError, Entry, fingerprint};
use super::claim::Claim;
use super::compile::{EngineOptions, Refused, compile_options};
use super::devices::Devices;
use super::error::{During, RuntimeError};
use super::executable::{Executable, ExecutableOrigin, Outputs};
use super::flags::Toolchain;
use super::gather;
use super::processes::Group;
use super::sharded_tensor::{Replicate, Shard, ShardedTensor, shards};
use super::timeline::{SpanKind, Timeline};
use super::turn::{Turn, Turns, Writing};
use super::watch::{Pace, Queue, Watch};
use super::watchdog::Watchdog;
use crate::failpoint;
use crate::hlo::{Argument, Mesh, Program, Sharding, Type};
use crate::pjrt::{Client, CompileOptions, Device, DeviceLayout, ExecuteOptions, LoadedExecutable, Staging};
use crate::tensor::Tensor;

/// Compiles and runs of a program so far.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Statistics {
    pub compiles: usize,
    pub(crate) compile_seconds: f64,
    pub cache_hits: usize,
    /// Seconds of loading.
    pub(crate) cache_seconds: f64,
    pub executions: usize,
}

/// A client with the devices of all processes, counting what it does. Clones share it.
#[derive(Clone)]
pub struct Engine {
    client: Client,
    toolchain: Arc<Toolchain>,
    devices: Arc<Devices>,
    options: EngineOptions,
    refused: Refused,
    cache: Option<Arc<Cache>>,
    group: Option<Arc<Group>>,
    statistics: Arc<Mutex<BTreeMap<String, Statistics>>>,
    launches: Arc<AtomicI32>,
    timeline: Timeline,
    saves: Arc<Turns>,
    /// Host memory of loads. Kept: a driver that unmaps memory waits for all work of its devices.
    staging: Arc<Mutex<Vec<Staging>>>,
    /// Executables of [`Engine::compile_once`], by hash.
    compiled: Arc<Mutex<HashMap<String, Arc<Executable>>>>,
    watchdog: Watchdog,
    queue: Arc<Queue>,
}

impl Engine {
    /// Takes over a client. A compile cache that cannot be used is said and left out.
    pub fn new(client: Client, options: EngineOptions) -> Self {
        Engine::among(client, options, None)
    }

    /// Takes over the client of one of several processes, which compares with the others what it compiles.
    pub(crate) fn among(client: Client, options: EngineOptions, group: Option<Arc<Group>>) -> Self {
        let toolchain = Arc::new(Toolchain::of(&client));
        let cache = options.compile_cache.as_deref().and_then(|folder| {
            let opened = client.topology().map_err(CacheError::from);
            opened
                .and_then(|t| Cache::new(folder, &toolchain.platform, &t))
                .inspect_err(|e| warn_uncached("all", e))
                .ok()
        });
        let (devices, cache) = (Arc::new(Devices::of(&client)), cache.map(Arc::new));
        let (statistics, launches, compiled, timeline, saves, staging, queue) = Default::default();
        let watchdog = options.watchdog.clone().with_group(group.as_ref());
        Engine {
            client,
            toolchain,
            devices,
            options,
            refused: Refused::default(),
            cache,
            group,
            statistics,
            launches,
            timeline,
            saves,
            staging,
            compiled,
            watchdog,
            queue,
        }
    }

    /// Work of this process so far.
    pub(crate) fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Watchdog over this engine's executions and transfers.
    pub(crate) fn watchdog(&self) -> &Watchdog {
        &self.watchdog
    }

    /// Host memory of at least `size` bytes that devices read in place: of an earlier load, or new.
    pub(super) fn staging(&self, size: usize) -> Staging {
        let mut all = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        match all.iter().position(|staging| staging.len() >= size) {
            Some(place) => all.swap_remove(place),
            None => {
                drop(all);
                self.client.staging(size)
            }
        }
    }

    /// Keeps host memory for the next load.
    pub(super) fn keep_staging(&self, staging: Staging) {
        self.staging.lock().unwrap_or_else(PoisonError::into_inner).push(staging);
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// The plugin's compiler.
    pub(crate) fn toolchain(&self) -> &Toolchain {
        &self.toolchain
    }

    /// The platform's name, in lower case: `cpu`, `cuda`, `tpu` …
    pub(crate) fn platform(&self) -> &str {
        &self.toolchain.platform
    }

    /// The devices of all processes, in the order in which meshes count them.
    pub(crate) fn devices(&self) -> &[Device] {
        self.devices.all()
    }

    /// Whether programs may run while another thread sends parameters. Not on CUDA: when a program from the compile cache
    /// first runs, cuDNN reads its kernels back in by capturing a stream, and transfers beside that end in errors, hang or crash
    /// (seen with jax-cuda13-pjrt 0.11.2 on an H200).
    pub(crate) fn runs_beside_transfers(&self) -> bool {
        self.platform() != "cuda"
    }

    /// Those of this process.
    pub(crate) fn own_devices(&self) -> &[Device] {
        self.devices.own()
    }

    pub(crate) fn own_device(&self) -> &Device {
        &self.devices.own()[0]
    }

    /// Whether this is one of several processes that compare their programs.
    pub(crate) fn is_grouped(&self) -> bool {
        self.group.is_some()
    }

    pub(crate) fn has_peers(&self) -> bool {
        self.devices.have_peers()
    }

    /// Groups of devices with links of their own: slices of a TPU.
    pub(crate) fn slices(&self) -> usize {
        self.devices.slices()
    }

    /// This process's devices among those of a program over `count`, with their places in its mesh.
    pub(super) fn addressable(&self, count: usize) -> Vec<(usize, &Device)> {
        self.devices.addressable(count)
    }

    /// A program's compile options, and its entry in the compile cache.
    fn entry(&self, name: &str, program: &Program) -> (CompileOptions, Option<Entry>) {
        let ids: Vec<i32> = self.devices.of_program(program.devices()).iter().map(Device::id).collect();
        let options = self.refused.without(compile_options(&self.toolchain, program, &ids, &self.options));
        let entry = self.cache.as_ref().map(|cache| cache.entry(name, program, &options));
        (options, entry)
    }

    /// Whether the compile cache has an entry for a program.
    pub(crate) fn is_cached(&self, name: &str, program: &Program) -> bool {
        program.devices() <= self.devices().len() && self.entry(name, program).1.is_some_and(|e| e.path().exists())
    }

    /// The file of a compiled program in the compile cache, once it is written; none if it was not kept.
    pub(crate) fn cache_file(&self, name: &str, program: &Program) -> Option<PathBuf> {
        let path = self.entry(name, program).1?.path().to_path_buf();
        drop(Turn::at(&path).wait());
        path.exists().then_some(path)
    }

    /// Compiles a program, or takes it from the compile cache.
    ///
    /// # Errors
    /// The plugin's message, or too few devices.
    pub fn compile(&self, name: &str, program: &Program) -> Result<Executable, RuntimeError> {
        if program.devices() > self.devices().len() {
            let have = self.devices().len();
            return Err(RuntimeError::Devices { program: name.into(), want: program.devices(), have });
        }
        loop {
            if let Some(compiled) = self.compile_with_known(name, program)? {
                return Ok(compiled);
            }
        }
    }

    /// The same with the options that the plugin is not known to refuse; none where it refuses one.
    fn compile_with_known(&self, name: &str, program: &Program) -> Result<Option<Executable>, RuntimeError> {
        let (options, mut entry) = self.entry(name, program);
        // Not where processes agree on a program: each waits for all others.
        let turn = entry.as_ref().filter(|_| self.group.is_none()).map(|entry| Turn::at(entry.path()));
        let writing = turn.as_ref().map(Turn::wait);
        let absent = entry.as_ref().filter(|entry| turn.is_some() && !entry.path().exists());
        let behind = self.options.write_behind.unwrap_or(self.platform() != "cpu");
        // Nor where it is written later: two processes could each wait for what the other has yet to run.
        let claim = absent.filter(|_| !behind).and_then(|entry| Claim::wait(name, entry.path()));
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
                let loaded = loop {
                    let compiled = failpoint::within("compile", name, compiled);
                    match compiled.map_err(|e| e.during(During::Compile, name))? {
                        Some(loaded) => break loaded,
                        // It may be cached as it is compiled now. Processes have agreed that all compile.
                        None if self.group.is_none() => return Ok(None),
                        None => entry = self.entry(name, program).1,
                    }
                };
                let took = start.elapsed();
                self.timeline.add(SpanKind::Compile, name, start, None);
                // Where processes share a folder, one entry is enough.
                let first = self.group.as_ref().is_none_or(|group| group.id() == 0);
                if let Some(entry) = entry.filter(|entry| first || !entry.path().exists()) {
                    self.save(entry, &loaded, turn.as_ref().zip(writing).filter(|_| behind));
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
        // Compilers try kernels on the device, with memory of their own.
        let peak = self.own_device().memory().ok().and_then(|memory| memory.peak).map(|bytes| bytes >> 20);
        tracing::debug!(
            program = name,
            seconds = took.as_secs_f64(),
            peak_mib = peak,
            hash = program.hash(),
            "{origin}"
        );
        Ok(Some(Executable {
            name: name.into(),
            loaded,
            arguments: program.arguments.clone(),
            results: program.results.clone(),
            mesh: program.mesh.clone(),
            hash: program.hash(),
            origin,
            compile_time: took,
            turn: turn.clone().filter(|_| origin == ExecutableOrigin::Compiled),
            pace: Arc::new(Pace::of(program, &self.toolchain, self.has_peers())),
        }))
    }

    /// Keeps a program in the compile cache, behind its first run where it is given a turn: a GPU's takes seconds to be serialized.
    fn save(&self, entry: Entry, loaded: &LoadedExecutable, turn: Option<(&Turn, MutexGuard<Writing>)>) {
        let (loaded, timeline) = (loaded.clone(), self.timeline.clone());
        let save = move || {
            let start = Instant::now();
            match entry.save(&loaded) {
                Ok(bytes) => timeline.add(SpanKind::Save, entry.name(), start, Some(bytes as u64)),
                Err(error) => warn_uncached(entry.name(), &error),
            }
        };
        match turn {
            None => save(),
            Some((turn, mut writing)) => {
                *writing = Writing::Due(Box::new(save));
                self.saves.add(turn.clone());
            }
        }
    }

    /// Compiles a program unless this did so before.
    fn compile_once(&self, name: &str, program: &Program) -> Result<Arc<Executable>, RuntimeError> {
        let hash = program.hash();
        let known = self.compiled.lock().unwrap_or_else(PoisonError::into_inner).get(&hash).cloned();
        if let Some(known) = known {
            return Ok(known);
        }
        let executable = Arc::new(self.compile(name, program)?);
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner).insert(hash, executable.clone());
        Ok(executable)
    }

    /// Compares a program with the other processes'; whether all of them have it cached. A compiler may work with its
    /// peers, so that either all compile or none does.
    fn all_cached(&self, name: &str, program: &Program, cached: bool) -> Result<bool, RuntimeError> {
        // A program of one device is each process's own.
        let Some(group) = self.group.as_ref().filter(|_| program.devices() > 1) else { return Ok(cached) };
        // By what is asked for: one process may know of a refusal that another comes to.
        let ids: Vec<i32> = self.devices.of_program(program.devices()).iter().map(Device::id).collect();
        let options = compile_options(&self.toolchain, program, &ids, &self.options);
        Ok(group.ensure_same_program(name, &program.hash(), &fingerprint(self.platform(), &options), cached)?)
    }

    /// Loads a program from the compile cache; an unusable entry is replaced, with a warning.
    fn load_cached(&self, name: &str, entry: &Entry) -> Option<LoadedExecutable> {
        entry.load(&self.client).unwrap_or_else(|error| {
            tracing::warn!("{name} is compiled anew: its entry in the compile cache cannot be used: {error}");
            None
        })
    }

    /// Copies a host tensor to the devices as an argument of a program: each device its shard, in the argument's element
    /// type, zero-padded where the argument is larger than its logical dimensions.
    ///
    /// # Errors
    /// No such argument, another shape than it takes, an element type without a host form; the plugin's message.
    pub fn upload(&self, executable: &Executable, name: &str, tensor: &Tensor) -> Result<ShardedTensor, RuntimeError> {
        let argument = executable.arguments.iter().find(|a| a.name == name).ok_or_else(|| RuntimeError::Missing {
            program: executable.name.to_string(),
            name: name.into(),
            ty: "an argument it does not have".into(),
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
        let watch = Watch::transfer(&self.watchdog, &executable.name, &devices);
        ShardedTensor::upload(&self.client, &devices, tensor, &argument.ty, shards, layout.as_ref(), watch)
            .map_err(|e| e.during(During::Upload, &executable.name))
    }

    /// Runs an executable on tensors found by argument name.
    ///
    /// # Errors
    /// A missing or mistyped argument, by name; the plugin's message.
    pub fn run<'a>(
        &self,
        executable: &Executable,
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
            if *tensor.ty() != a.ty || tensor.shards() != wanted {
                let size = |all: &[Shard]| all.first().map_or(String::new(), |s| format!(" of {:?}", s.size));
                let shape = |all: &[Shard]| format!("{} shards{}", all.len(), size(all));
                let want = format!("{} in {}", a.ty, shape(&wanted));
                let got = format!("{} in {}", tensor.ty(), shape(tensor.shards()));
                return Err(RuntimeError::Mismatch { name: a.name.clone(), want, got });
            }
            for (row, buffer) in arguments.iter_mut().zip(tensor.buffers()) {
                row.push(buffer);
            }
        }
        // Processes that run programs in different orders are noticed by the number.
        let launch_id = if self.has_peers() { self.launches.fetch_add(1, Ordering::SeqCst) + 1 } else { 0 };
        let options = ExecuteOptions { launch_id, ..ExecuteOptions::default() };
        let watch = Watch::execution(&self.watchdog, &executable.name, &devices, &executable.pace, &self.queue);
        let guard = watch.as_ref().map(Watch::over_start);
        let results = executable.loaded.execute_with(&arguments, &options);
        let results = results.map_err(|e| RuntimeError::from(e).during(During::Run, &executable.name))?;
        drop(guard);
        executable.turn.iter().for_each(Turn::write);
        self.count(&executable.name, |s| s.executions += 1);
        let mut each: Vec<_> = results.into_iter().map(Vec::into_iter).collect();
        let named = executable.results.iter().map(|o| {
            let buffers = each.iter_mut().filter_map(Iterator::next).collect();
            let shards = shards(&o.ty, &executable.mesh, o.sharding.as_ref());
            let tensor = ShardedTensor::new(buffers, addressable.clone(), shards, o.ty.clone(), o.logical_dims.clone());
            let replicate = self.has_peers().then(|| self.replicator(&executable.mesh, o.sharding.as_ref()));
            let tensor = tensor.with_replicator(replicate).with_watch(watch.clone());
            (o.name.clone(), tensor.of_program(executable.name.clone()))
        });
        Ok(Outputs { named: named.collect() })
    }

    /// The tensor, a result of a program over `mesh`, replicated on every device. This runs a program of all processes:
    /// each has to call it.
    ///
    /// # Errors
    /// The plugin's message.
    pub fn replicate(
        &self,
        tensor: &ShardedTensor,
        mesh: &Mesh,
        sharding: Option<&Sharding>,
    ) -> Result<ShardedTensor, RuntimeError> {
        let program = gather::program(tensor.ty(), tensor.dims(), mesh, sharding)?;
        let executable = self.compile_once("gather", &program)?;
        let mut outputs = self.run(&executable, |name| (name == gather::TENSOR).then_some(tensor))?;
        outputs.take(gather::TENSOR).ok_or_else(|| RuntimeError::Parameter("nothing was gathered".into()))
    }

    fn replicator(&self, mesh: &Mesh, sharding: Option<&Sharding>) -> Replicate {
        let (engine, mesh, sharding) = (self.clone(), mesh.clone(), sharding.cloned());
        Box::new(move |tensor| engine.replicate(tensor, &mesh, sharding.as_ref()))
    }

    pub fn statistics(&self) -> BTreeMap<String, Statistics> {
        self.statistics.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn count(&self, name: &str, f: impl FnOnce(&mut Statistics)) {
        let mut all = self.statistics.lock().unwrap_or_else(PoisonError::into_inner);
        f(all.entry(name.to_string()).or_default());
    }
}

/// Logs that programs were not cached; a warning, unless the plugin cannot serialize at all.
fn warn_uncached(name: &str, error: &CacheError) {
    match error.is_unsupported() {
        true => tracing::debug!(program = name, "not kept in the compile cache: {error}"),
        false => tracing::warn!(program = name, "not kept in the compile cache: {error}"),
    }
}

/// The layout an argument asks for.
pub(super) fn device_layout(argument: &Argument) -> Result<Option<DeviceLayout>, RuntimeError> {
    let Some(text) = argument.memory_layout.as_deref() else { return Ok(None) };
    // The parser's error quotes the layout.
    let fail = |e| RuntimeError::Parameter(format!("argument '{}': memory {e}", argument.name));
    text.parse().map(Some).map_err(fail)
}
