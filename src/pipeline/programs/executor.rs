//! Compiles programs and uploads parameters, and keeps both for later requests.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::ProgramKind;
use super::background_load::{BackgroundLoad, LoadProgress, OnLoad};
use super::files::{AddedMatrices, Files, added_matrix, added_rank};
use crate::hlo::{MemorySpace, Program};
use crate::models::Network;
use crate::nn::{AddedLoras, Build, Param};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::plan::loras::{self, ActiveLoras, Loras};
use crate::pipeline::plan::origin::Weights;
use crate::pipeline::plan::residency::{Keep, work};
use crate::pjrt::PjrtError;
use crate::runtime::{CompiledProgram, Engine, Footprint, LoadedParameters, Outputs, ParameterSource, ShardedTensor};
use crate::tensor::Tensor;
use crate::threads;
use crate::weights::{Component, MergeOrder, ScaledLora, lora};

/// Component and memory of each parameter that the programs of a run read, by name.
pub(crate) type ParameterMemories = HashMap<String, (&'static str, MemorySpace)>;

/// Memory needs of a program, determined by compiling it.
#[derive(Clone, Debug)]
pub(crate) enum MemoryOutcome {
    /// Bytes that the program needs besides its parameters. `None`: the plugin does not report them.
    Compiled(Option<usize>),
    /// The compiler ran out of device memory. `usable`: bytes that were usable at that time; `None`: unknown.
    OutOfMemory { source: PjrtError, usable: Option<usize> },
}

/// Maximum number of programs whose [`MemoryOutcome`] is kept, so that a server does not grow with every new size.
const MAX_OUTCOMES: usize = 4096;

/// An engine with its compiled programs and loaded parameters.
pub struct Executor {
    engine: Engine,
    weights: Weights,
    loras: ActiveLoras,
    merge_order: MergeOrder,
    by_pass: Loras,
    /// Pass (1 or 2) whose weights are loaded.
    pass: u8,
    keep: Keep,
    /// Bytes of host memory that parameters may take for each device. `None`: no limit.
    host_limit: Option<usize>,
    parameters: LoadedParameters,
    /// Parameters that a background thread is loading.
    ahead: Option<BackgroundLoad>,
    /// Progress callback of every load.
    on_load: Option<OnLoad>,
    /// Weights on the devices that differ from those of the current pass, by the pass that uses them.
    parked: BTreeMap<u8, LoadedParameters>,
    programs: HashMap<String, Rc<CompiledProgram>>,
    /// Hashes of the programs used since [`Executor::reset_set_up_time`].
    used: BTreeSet<String>,
    /// Hashes of the programs that the compiler rejected because of their attention kernel.
    refused: HashSet<String>,
    /// Outcomes of compilations, also of dropped programs, by program hash.
    outcomes: HashMap<String, MemoryOutcome>,
    /// Time spent waiting for parameters.
    pub(crate) load_time: Duration,
    /// Time spent waiting for compiled programs, several of which may be compiled in parallel.
    pub(crate) compile_time: Duration,
    /// Programs compiled or read from the cache since [`Executor::reset_set_up_time`].
    made: Vec<Rc<CompiledProgram>>,
}

/// Input tensors of one execution, by argument name.
#[derive(Default)]
pub struct Inputs<'a> {
    owned: HashMap<String, Rc<ShardedTensor>>,
    borrowed: HashMap<String, &'a ShardedTensor>,
    /// Number of evaluations that this execution of the denoising loop runs.
    evaluations: Option<usize>,
}

impl<'a> Inputs<'a> {
    pub(crate) fn share(mut self, name: &str, buffer: &'a ShardedTensor) -> Self {
        self.borrowed.insert(name.to_string(), buffer);
        self
    }

    pub(crate) fn give(mut self, name: &str, buffer: impl Into<Rc<ShardedTensor>>) -> Self {
        self.owned.insert(name.to_string(), buffer.into());
        self
    }

    /// Sets the number of evaluations that this execution of the denoising loop runs.
    pub(crate) fn for_evaluations(self, count: usize) -> Self {
        Inputs { evaluations: Some(count), ..self }
    }

    /// Returns the number of evaluations of the denoising loop; 1 if it was not set.
    pub(crate) fn evaluations(&self) -> usize {
        self.evaluations.unwrap_or(1)
    }

    pub(crate) fn get(&self, name: &str) -> Option<&ShardedTensor> {
        self.owned.get(name).map(Rc::as_ref).or_else(|| self.borrowed.get(name).copied())
    }
}

impl Executor {
    /// Creates an executor without compiled programs or loaded parameters.
    pub fn new(engine: Engine, weights: impl Into<Weights>) -> Self {
        Executor {
            engine,
            weights: weights.into(),
            loras: ActiveLoras::default(),
            merge_order: MergeOrder::default(),
            by_pass: Loras::default(),
            pass: 1,
            keep: Keep::All,
            host_limit: None,
            parameters: LoadedParameters::default(),
            ahead: None,
            on_load: None,
            parked: BTreeMap::new(),
            programs: HashMap::new(),
            used: BTreeSet::new(),
            refused: HashSet::new(),
            outcomes: HashMap::new(),
            load_time: Duration::ZERO,
            compile_time: Duration::ZERO,
            made: Vec::new(),
        }
    }

    /// Sets where values are rounded when LoRAs are merged into the weights.
    #[must_use]
    pub fn with_merge_order(self, order: MergeOrder) -> Self {
        Executor { merge_order: order, ..self }
    }

    /// Sets the residency policy. `host_limit`: maximum bytes of loaded parameters in host memory, per device; `None`:
    /// no limit. `fits_host`: whether all streamed parameters fit in host memory.
    pub(crate) fn keep(&mut self, keep: Keep, host_limit: Option<usize>, fits_host: bool) {
        (self.keep, self.host_limit) = (keep, host_limit);
        self.ahead.iter().for_each(|ahead| ahead.decide(keep == Keep::All && fits_host));
    }

    /// Frees the parameters of the run's components that no program reads, or that a program needs in another memory.
    /// Keeps the parameters of components that the run does not use. `wanted`: component and memory of each parameter
    /// that the run's programs read, by name.
    pub(crate) fn drop_misplaced(&mut self, wanted: &ParameterMemories) {
        let all = std::iter::once(&mut self.parameters).chain(self.parked.values_mut());
        all.for_each(|parameters| parameters.retain_placed(wanted));
    }

    /// Records the outcome of a program's compilation.
    pub(crate) fn remember(&mut self, hash: String, outcome: MemoryOutcome) {
        if self.outcomes.len() >= MAX_OUTCOMES {
            self.outcomes.clear();
        }
        self.outcomes.insert(hash, outcome);
    }

    /// Returns the outcome of a program's compilation. `None`: the program was not compiled.
    pub(crate) fn outcome(&self, hash: &str) -> Option<&MemoryOutcome> {
        self.outcomes.get(hash)
    }

    /// Sets the progress callback of loads.
    pub(crate) fn on_load(&mut self, on_load: Option<OnLoad>) {
        self.on_load = on_load;
    }

    /// Starts to load the parameters of networks on a background thread, in the given order. Without `all`, the thread
    /// pauses after the first network until [`Executor::keep`] decides whether all parameters stay on the devices. Does
    /// nothing for random weights.
    pub(crate) fn load_ahead(&mut self, networks: impl Iterator<Item = Arc<Network>>, all: bool) {
        // Join the thread of an abandoned plan, so that two loads do not overlap.
        self.ahead = None;
        let Some(files) = self.files() else { return };
        let rank = self.loras.in_programs().map(|loras| loras.rank);
        let mut seen = HashSet::new();
        let orders: Vec<_> = networks
            .map(|network| {
                // LoRA matrices of another rank belong to another pass.
                let is_of_pass = |p: &Param| added_rank(p).is_none_or(|own| Some(own) == rank);
                let is_new =
                    |p: &&Param| is_of_pass(p) && self.parameters.get(&p.name).is_none() && seen.insert(p.name.clone());
                let params: Vec<Param> = network.params.iter().filter(is_new).cloned().collect();
                (network, params)
            })
            .filter(|(_, params)| !params.is_empty())
            .collect();
        let total = orders.iter().flat_map(|(_, params)| params).map(Param::bytes).sum();
        let progress = LoadProgress::new(self.on_load.clone(), total);
        self.ahead = Some(BackgroundLoad::start(self.engine.clone(), files, orders, all, progress));
    }

    /// Stops the background load, and drops the parameters that no program has read from it.
    pub(crate) fn stop_load(&mut self) {
        self.ahead = None;
    }

    /// Stops the background load and drops all loaded parameters; programs load them again when they run. Returns
    /// whether there was anything to drop.
    pub(crate) fn unload(&mut self) -> bool {
        let had_any = self.ahead.take().is_some() || self.footprint() != Footprint::default();
        self.parameters = LoadedParameters::default();
        self.parked.clear();
        had_any
    }

    /// Returns the source of the parameters; `None` for random weights.
    fn files(&self) -> Option<Files> {
        let Weights::Files(source) = &self.weights else { return None };
        Some(Files { source: source.clone(), loras: self.loras.clone(), order: self.merge_order })
    }

    /// Returns whether all loaded parameters stay on the devices.
    pub(crate) fn keeps_all(&self) -> bool {
        self.keep == Keep::All
    }

    /// Sets the LoRAs of each pass of a run and how they are merged. Pass 1 becomes the current pass; `Executor::enter`
    /// switches to another.
    ///
    /// # Errors
    /// Returns the errors of [`Executor::set_loras`] for the LoRAs of each pass. LoRAs that do not fit change nothing.
    pub fn keep_loras(&mut self, loras: Loras) -> Result<()> {
        [1, 2].into_iter().try_for_each(|pass| loras::check(&loras.of_pass(pass), &self.weights))?;
        if self.merge_order != loras.order {
            // Weights that were merged in another order must be reloaded.
            self.swap_loras(ActiveLoras::default())?;
            self.merge_order = loras.order;
        }
        self.activate(loras.of_pass(1))?;
        self.by_pass = loras;
        if let Weights::Files(source) = &self.weights {
            self.by_pass.warn_of_unverified(source);
        }
        self.pass = 1;
        Ok(())
    }

    /// Switches to the weights of a pass (1 or 2). If the residency policy allows it, the weights of the previous pass
    /// stay on the devices as long as there is enough memory.
    pub(crate) fn enter(&mut self, pass: u8) -> Result<()> {
        if self.by_pass.is_empty() || pass == self.pass {
            return Ok(());
        }
        let before = self.swap_loras(self.by_pass.of_pass(pass))?;
        if self.keep != Keep::OneComponent {
            self.parked.insert(self.pass, before);
        }
        self.parameters.put_back(self.parked.remove(&pass).unwrap_or_default());
        self.pass = pass;
        Ok(())
    }

    /// Returns the LoRA matrices that a program has; `None` if it has no added LoRAs.
    pub(crate) fn added_loras(&self, program: ProgramKind) -> Option<AddedLoras> {
        let loras = self.by_pass.of_pass(program.pass()).in_programs();
        loras.filter(|loras| program.declaration().component.folder() == loras.component)
    }

    /// Returns whether LoRA matrices of the same size have other values in each pass, so that there are two copies.
    pub(crate) fn has_two_sets_of_added_loras(&self) -> bool {
        let [first, second] = [1, 2].map(|pass| self.by_pass.of_pass(pass));
        let differ = !lora::differing(&first.added, &second.added).is_empty();
        differ && first.in_programs() == second.in_programs()
    }

    /// Returns whether merged LoRAs give the passes different weights of a component.
    pub(crate) fn differs_by_pass(&self, component: &str) -> bool {
        let [first, second] = [1, 2].map(|pass| self.by_pass.of_pass(pass).merged);
        lora::differing(&first, &second).iter().any(|(of, _)| of.folder() == component)
    }

    /// Replaces the LoRAs that are merged into the weights. Removes the affected parameters from the devices; the next
    /// [`Executor::prepare`] reloads only these.
    ///
    /// # Errors
    /// Returns an error if the weights are random, or if a LoRA updates a tensor that the model does not have or has
    /// with another shape. The error quotes file, key and shapes.
    pub fn set_loras(&mut self, loras: &[ScaledLora]) -> Result<()> {
        self.activate(ActiveLoras { merged: loras.to_vec(), added: Vec::new() })
    }

    /// Replaces the LoRAs of the current pass, and drops the parameters of other passes.
    fn activate(&mut self, loras: ActiveLoras) -> Result<()> {
        loras::check(&loras, &self.weights)?;
        self.swap_loras(loras)?;
        self.parked.clear();
        Ok(())
    }

    /// Sets the LoRAs. Removes from the executor the weights for which the merged LoRAs change and the LoRA matrices that
    /// change, and returns them.
    fn swap_loras(&mut self, loras: ActiveLoras) -> Result<LoadedParameters> {
        if let Some(mut ahead) = self.ahead.take() {
            ahead.take_all(&mut self.parameters)?;
        }
        let merged = lora::differing(&self.loras.merged, &loras.merged);
        let added = lora::differing(&self.loras.added, &loras.added);
        let has_other_rank = self.loras.in_programs() != loras.in_programs();
        let taken = self.parameters.take_stale(|component, key| {
            let Some(component) = Component::from_folder(component) else { return false };
            match added_matrix(key) {
                Some((weight, _)) => has_other_rank || added.contains(&(component, weight.as_str())),
                None => merged.contains(&(component, key)),
            }
        });
        self.loras = loras;
        Ok(taken)
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the bytes of all loaded parameters on one device.
    pub fn parameter_bytes(&self) -> usize {
        self.footprint().device
    }

    /// Returns the memory that all loaded parameters take.
    pub(crate) fn footprint(&self) -> Footprint {
        let all = std::iter::once(&self.parameters).chain(self.parked.values());
        all.map(LoadedParameters::footprint).sum()
    }

    /// Returns the bytes, on one device, of the parameters that a program reads.
    pub(crate) fn parameter_bytes_of(&self, program: &CompiledProgram) -> usize {
        program.arguments().iter().filter_map(|a| self.parameters.get(&a.name)).map(ShardedTensor::device_bytes).sum()
    }

    /// Returns a loaded parameter. `None`: no network that reads it has been prepared.
    pub fn parameter(&self, name: &str) -> Option<&ShardedTensor> {
        self.parameters.get(name)
    }

    /// Returns the names of the loaded parameters of the current pass.
    pub fn parameter_names(&self) -> BTreeSet<String> {
        self.parameters.names().map(String::from).collect()
    }

    /// Returns name and hash of each program used since [`Executor::reset_set_up_time`].
    pub(crate) fn program_hashes(&self) -> impl Iterator<Item = (&str, &str)> {
        self.used.iter().filter_map(|hash| self.programs.get(hash)).map(|e| (e.name(), e.hash()))
    }

    /// Returns the hashes of the programs used since [`Executor::reset_set_up_time`].
    pub(crate) fn used(&self) -> &BTreeSet<String> {
        &self.used
    }

    /// Returns whether a program is loaded.
    pub(crate) fn has_program(&self, hash: &str) -> bool {
        self.programs.contains_key(hash)
    }

    /// Returns the number of loaded programs.
    pub fn program_count(&self) -> usize {
        self.programs.len()
    }

    /// Drops the programs with these hashes. Their next use recompiles them or reads them from the compile cache.
    pub(crate) fn drop_programs(&mut self, dropped: &BTreeSet<String>) {
        self.programs.retain(|hash, _| !dropped.contains(hash));
        self.made.retain(|program| !dropped.contains(program.hash()));
    }

    /// Drops programs that the run does not execute.
    pub(crate) fn discard(&mut self, hashes: BTreeSet<String>) {
        self.used.retain(|hash| !hashes.contains(hash));
        self.drop_programs(&hashes);
    }

    /// Compiles a network and loads its parameters. Both are kept for later requests; the residency policy may evict
    /// parameters.
    ///
    /// # Errors
    /// Returns an error if the program cannot be compiled, a file cannot be read, or the device fails.
    pub fn prepare(&mut self, name: &str, network: &Network) -> Result<Rc<CompiledProgram>> {
        let compiled = self.compile(name, network)?;
        let start = Instant::now();
        if let Some(ahead) = &mut self.ahead {
            match self.engine.spec().runs_during_transfers {
                true => ahead.take(&network.params, &mut self.parameters)?,
                false => ahead.take_all(&mut self.parameters)?,
            }
        }
        self.parameters.drop_misplaced(&network.program, &network.params);
        self.make_room(network, &compiled);
        self.load(network)?;
        self.load_time += start.elapsed();
        Ok(compiled)
    }

    /// Loads, or draws from the seed, the parameters of a network that are not on the devices. LoRA matrices are never
    /// drawn.
    fn load(&mut self, network: &Network) -> Result<()> {
        let files = self.files();
        let (parameters, program, params) = (&mut self.parameters, &network.program, &network.params);
        if let Weights::Random(seed) = self.weights {
            let drawn: Vec<Param> = params.iter().filter(|p| added_rank(p).is_none()).cloned().collect();
            parameters.draw(&self.engine, program, &drawn, seed)?;
        }
        let missing = parameters.missing(params);
        if missing.is_empty() {
            return Ok(());
        }
        let source: Box<dyn ParameterSource> = match files {
            Some(files) => Box::new(files),
            None => {
                let tensors = missing.iter().flat_map(|param| param.source.tensors());
                let shapes = tensors.map(|(key, shape)| (key.to_string(), shape.to_vec())).collect();
                Box::new(AddedMatrices { loras: self.loras.clone(), order: self.merge_order, shapes })
            }
        };
        let total = missing.into_iter().map(Param::bytes).sum();
        let progress = LoadProgress::new(self.on_load.clone(), total);
        let on_load = |bytes: usize| {
            progress.add(bytes);
            true
        };
        Ok(parameters.load(&self.engine, program, params, &*source, &on_load)?)
    }

    /// Returns the network that `write` builds with `build`. If the compiler rejects this network, returns one without
    /// the attention kernel.
    ///
    /// # Errors
    /// Returns an error if a network cannot be built. If the compiler rejects both networks, returns its error for the
    /// first.
    pub fn accepted(
        &mut self,
        name: &str,
        build: &Build,
        mut write: impl FnMut(&Build) -> Result<Network>,
    ) -> Result<Network> {
        let network = write(build)?;
        let Some(build) = build.without_attention_kernel() else { return Ok(network) };
        let hash = network.program.hash();
        if self.refused.contains(&hash) {
            return write(&build);
        }
        let Err(error) = self.compile(name, &network) else { return Ok(network) };
        // The memory plan compiles the program again, and chooses another one.
        if error.is_out_of_device_memory() {
            return Ok(network);
        }
        let plain = write(&build)?;
        if plain.program.hash() == hash || self.compile(name, &plain).is_err() {
            return Err(error);
        }
        warn_kernel_rejected(name, &error);
        self.refused.insert(hash);
        Ok(plain)
    }

    /// Compiles a network, or returns its program if it is already compiled.
    pub(crate) fn compile(&mut self, name: &str, network: &Network) -> Result<Rc<CompiledProgram>> {
        let made = self.made.len();
        let is_new = !self.programs.contains_key(&network.program.hash());
        let progress = is_new.then(|| CompileProgress::new(&self.engine, &[(name, network)]));
        let began = progress.as_ref().and_then(|progress| progress.begin(name, network));
        let compiled = self.compile_program(name, &network.program)?;
        progress.iter().for_each(|progress| progress.end(name, began));
        if self.made.len() > made {
            network.notes.iter().for_each(|note| tracing::warn!("{note}"));
        }
        Ok(compiled)
    }

    /// Compiles a program that has no parameters, or returns it if it is already compiled.
    pub(crate) fn compile_program(&mut self, name: &str, program: &Program) -> Result<Rc<CompiledProgram>> {
        let hash = program.hash();
        self.used.insert(hash.clone());
        if let Some(known) = self.programs.get(&hash) {
            let alike = known.arguments() == program.arguments && known.results() == program.results;
            return Ok(if alike { known.clone() } else { Rc::new(known.for_program(program)) });
        }
        let start = Instant::now();
        let compiled = self.engine.compile(name, program);
        self.compile_time += start.elapsed();
        Ok(self.add(compiled?))
    }

    /// Compiles networks in parallel, so that later calls of [`Executor::compile`] return immediately. Uses half of the
    /// cores, because a single compilation is itself multi-threaded. Does nothing in a multi-process run, whose
    /// processes must compile the same program at the same time.
    ///
    /// # Errors
    /// Returns the error of the first network that cannot be compiled.
    pub(crate) fn compile_all<'n>(&mut self, networks: impl Iterator<Item = (&'n str, &'n Network)>) -> Result<()> {
        if self.engine.is_grouped() {
            return Ok(());
        }
        let mut seen = HashSet::new();
        let mut is_new = |network: &Network| {
            let hash = network.program.hash();
            !self.programs.contains_key(&hash) && seen.insert(hash)
        };
        let missing: Vec<_> = networks.filter(|(_, network)| is_new(network)).collect();
        let (start, engine) = (Instant::now(), &self.engine);
        let progress = CompileProgress::new(engine, &missing);
        let compiled = threads::in_order(&missing, threads::cores().div_ceil(2), |(name, network)| {
            let began = progress.begin(name, network);
            let compiled = engine.compile(name, &network.program);
            progress.end(name, began.filter(|_| compiled.is_ok()));
            compiled
        });
        self.compile_time += start.elapsed();
        let mut result = Ok(());
        for (compiled, (_, network)) in compiled.into_iter().zip(missing) {
            match compiled {
                Ok(compiled) => {
                    let hash = self.add(compiled).hash().to_string();
                    self.used.insert(hash);
                    network.notes.iter().for_each(|note| tracing::warn!("{note}"));
                }
                // Keep the programs that were compiled, because the next attempt may use them, too.
                Err(error) => result = result.and(Err(error.into())),
            }
        }
        result
    }

    fn add(&mut self, compiled: CompiledProgram) -> Rc<CompiledProgram> {
        let compiled = Rc::new(compiled);
        self.made.push(compiled.clone());
        self.programs.insert(compiled.hash().to_string(), compiled.clone());
        compiled
    }

    /// Evicts parameters that `network` does not read, until there is room for those that it reads and for its other
    /// buffers, on the devices and in host memory.
    fn make_room(&mut self, network: &Network, compiled: &CompiledProgram) {
        let coming = self.parameters.missing_footprint(&network.program, &network.params);
        let device = match self.keep {
            Keep::All => usize::MAX,
            Keep::OneComponent => 0,
            Keep::Most(bytes) => bytes.saturating_sub(coming.device + work(network, compiled).unwrap_or(0)),
        };
        let host = self.host_limit.map_or(usize::MAX, |bytes| bytes.saturating_sub(coming.host));
        self.evict(network, "the devices", device, |of| of.device);
        self.evict(network, "host memory", host, |of| of.host);
    }

    /// Evicts parameters that `network` does not read, until all take at most `room` bytes of a memory.
    fn evict(&mut self, network: &Network, memory: &str, room: usize, bytes_of: fn(Footprint) -> usize) {
        // Weights of other passes are evicted first.
        while bytes_of(self.footprint()) > room && self.parked.pop_last().is_some() {}
        let own = |component: &str| network.params.iter().any(|p| p.component == component);
        let held = self.parameters.footprints().into_iter().map(|(component, of)| (component, bytes_of(of)));
        for (component, bytes) in evicted(held.collect(), own, room) {
            self.parameters.take_component(component);
            tracing::debug!("{component} is evicted from {memory}: {} MiB", bytes >> 20);
        }
    }

    /// Runs a prepared network.
    ///
    /// # Errors
    /// Returns an error if an input is missing, or if the plugin cannot run the program.
    pub fn run<'a>(&'a self, program: &CompiledProgram, inputs: &'a Inputs) -> Result<Outputs> {
        self.run_with(program, |name| inputs.get(name))
    }

    /// Runs a prepared network. Each argument is the buffer that `find` returns for its name, or else the parameter of
    /// that name.
    ///
    /// # Errors
    /// Returns an error if an input is missing, or if the plugin cannot run the program.
    pub(crate) fn run_with<'a>(
        &'a self,
        program: &CompiledProgram,
        find: impl Fn(&str) -> Option<&'a ShardedTensor>,
    ) -> Result<Outputs> {
        Ok(self.engine.run(program, |name| find(name).or_else(|| self.parameters.get(name)))?)
    }

    /// Returns the programs compiled or read from the cache since [`Executor::reset_set_up_time`].
    pub(crate) fn new_programs(&self) -> &[Rc<CompiledProgram>] {
        &self.made
    }

    /// Returns the time spent on loading and compiling since [`Executor::reset_set_up_time`].
    pub(crate) fn set_up_time(&self) -> Duration {
        self.load_time + self.compile_time
    }

    /// Resets the times and the list of used programs, for the report of the next request.
    pub(crate) fn reset_set_up_time(&mut self) {
        (self.load_time, self.compile_time) = (Duration::ZERO, Duration::ZERO);
        self.engine.timeline().clear();
        self.made.clear();
        self.used.clear();
    }

    /// Uploads the tensors that are arguments of the program, converted to the element types of the arguments, and adds
    /// them to `inputs`. Ignores other tensors.
    ///
    /// # Errors
    /// Returns an error if an upload fails.
    pub fn give_all<'a>(
        &self,
        program: &CompiledProgram,
        mut inputs: Inputs<'a>,
        tensors: impl IntoIterator<Item = (String, Tensor)>,
    ) -> Result<Inputs<'a>> {
        for (name, tensor) in tensors {
            if program.arguments().iter().any(|a| a.name == name) {
                inputs = inputs.give(&name, self.engine.upload(program, &name, &tensor)?);
            }
        }
        Ok(inputs)
    }
}

/// Logs the compilation of each program that the compile cache does not have.
struct CompileProgress {
    /// Hashes of these programs.
    uncached: HashSet<String>,
    begun: AtomicUsize,
}

impl CompileProgress {
    fn new(engine: &Engine, networks: &[(&str, &Network)]) -> Self {
        let uncached = networks.iter().filter(|(name, network)| !engine.is_cached(name, &network.program));
        CompileProgress { uncached: uncached.map(|(_, network)| network.program.hash()).collect(), begun: 0.into() }
    }

    /// Returns when the compilation began; `None` if the program is cached.
    fn begin(&self, name: &str, network: &Network) -> Option<Instant> {
        if !self.uncached.contains(&network.program.hash()) {
            return None;
        }
        let at = self.begun.fetch_add(1, Ordering::Relaxed) + 1;
        let of = if self.uncached.len() > 1 { format!(", {at} of {}", self.uncached.len()) } else { String::new() };
        tracing::info!("compiling {}{of}", name.replace('_', " "));
        Some(Instant::now())
    }

    fn end(&self, name: &str, began: Option<Instant>) {
        if let Some(began) = began {
            tracing::info!("compiled {} in {:.1} s", name.replace('_', " "), began.elapsed().as_secs_f64());
        }
    }
}

/// Returns the components to evict, the largest first, until all take at most `room` bytes of a memory. `held`: bytes of
/// each component in this memory. `is_read`: whether the next program reads a component, so that it stays.
fn evicted(
    mut held: Vec<(&'static str, usize)>,
    is_read: impl Fn(&str) -> bool,
    room: usize,
) -> Vec<(&'static str, usize)> {
    let mut left: usize = held.iter().map(|(_, bytes)| bytes).sum();
    held.retain(|(component, bytes)| !is_read(component) && *bytes > 0);
    held.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let needed = held.iter().take_while(|(_, bytes)| {
        let is_over = left > room;
        left -= bytes;
        is_over
    });
    needed.copied().collect()
}

pub(in crate::pipeline) fn warn_kernel_rejected(program: &str, error: &PipelineError) {
    let said = error.to_string();
    let line = said.lines().next().unwrap_or_default();
    tracing::warn!("{program}: libtpu rejected the attention kernel; falling back to XLA operations: {line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_memory_evicts_its_largest_components() {
        let is_read = |component: &str| component == "vae";
        let on_device = vec![("text_encoder", 5), ("transformer", 50), ("vae", 60)];
        assert_eq!(evicted(on_device.clone(), is_read, 115), []);
        assert_eq!(evicted(on_device.clone(), is_read, 114), [("transformer", 50)]);
        assert_eq!(evicted(on_device, is_read, 0), [("transformer", 50), ("text_encoder", 5)]);
        let in_host = vec![("text_encoder", 60), ("transformer", 40), ("vae", 0)];
        assert_eq!(evicted(in_host, is_read, 50), [("text_encoder", 60)]);
    }
}
