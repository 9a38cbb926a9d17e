//! Programs that are compiled once and parameters that are uploaded once, for any number of requests.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ahead::{Ahead, OnLoad, Progress};
use super::error::{PipelineError, Result};
use super::files::Files;
use super::loras::{self, Loras};
use super::origin::Weights;
use super::residency::{Keep, work};
use crate::hlo::Program;
use crate::models::Network;
use crate::nn::{Build, Param};
use crate::runtime::{Engine, Executable, Outputs, Parameters, ShardedTensor};
use crate::tensor::Tensor;
use crate::threads;
use crate::weights::{Component, Lora, MergeOrder, lora};

/// An engine with everything it has compiled and loaded.
pub struct Executor {
    engine: Engine,
    weights: Weights,
    loras: Vec<Lora>,
    merge_order: MergeOrder,
    by_pass: Loras,
    /// The pass whose weights are there.
    pass: u8,
    keep: Keep,
    parameters: Parameters,
    /// Parameters on their way.
    ahead: Option<Ahead>,
    /// Told of every load's progress.
    on_load: Option<OnLoad>,
    /// Weights of another pass in the place of some of those.
    parked: BTreeMap<u8, Parameters>,
    programs: HashMap<String, Rc<Executable>>,
    /// Hashes of programs used since figures were last reset.
    used: BTreeSet<String>,
    /// Hashes of programs that the compiler refused with the kernel that it was given.
    refused: HashSet<String>,
    /// Time spent waiting for parameters.
    pub(crate) load_time: Duration,
    /// Time spent until programs were ready; several are made beside each other.
    pub(crate) compile_time: Duration,
    /// Programs made ready since figures were last reset.
    made: Vec<Rc<Executable>>,
}

/// Tensors for one run, by argument name.
#[derive(Default)]
pub struct Inputs<'a> {
    owned: HashMap<String, Rc<ShardedTensor>>,
    borrowed: HashMap<String, &'a ShardedTensor>,
    /// Evaluations of a loop that they are for.
    evaluations: Option<usize>,
}

impl<'a> Inputs<'a> {
    /// Adds a buffer that lives elsewhere.
    pub(crate) fn share(mut self, name: &str, buffer: &'a ShardedTensor) -> Self {
        self.borrowed.insert(name.to_string(), buffer);
        self
    }

    /// Adds a buffer.
    pub(crate) fn give(mut self, name: &str, buffer: impl Into<Rc<ShardedTensor>>) -> Self {
        self.owned.insert(name.to_string(), buffer.into());
        self
    }

    /// The same for so many evaluations of a loop.
    pub(crate) fn for_evaluations(self, count: usize) -> Self {
        Inputs { evaluations: Some(count), ..self }
    }

    /// Evaluations of a loop that they are for, 1 where nothing is said.
    pub(crate) fn evaluations(&self) -> usize {
        self.evaluations.unwrap_or(1)
    }

    /// A buffer by name.
    pub(crate) fn get(&self, name: &str) -> Option<&ShardedTensor> {
        self.owned.get(name).map(Rc::as_ref).or_else(|| self.borrowed.get(name).copied())
    }
}

impl Executor {
    /// Nothing compiled, nothing loaded.
    pub fn new(engine: Engine, weights: impl Into<Weights>) -> Self {
        Executor {
            engine,
            weights: weights.into(),
            loras: Vec::new(),
            merge_order: MergeOrder::default(),
            by_pass: Loras::default(),
            pass: 1,
            keep: Keep::All,
            parameters: Parameters::default(),
            ahead: None,
            on_load: None,
            parked: BTreeMap::new(),
            programs: HashMap::new(),
            used: BTreeSet::new(),
            refused: HashSet::new(),
            load_time: Duration::ZERO,
            compile_time: Duration::ZERO,
            made: Vec::new(),
        }
    }

    /// The same with LoRAs merged in another order of roundings.
    #[must_use]
    pub fn with_merge_order(self, order: MergeOrder) -> Self {
        Executor { merge_order: order, ..self }
    }

    /// From here on, so much of what is loaded stays on the devices.
    pub(crate) fn keep(&mut self, keep: Keep) {
        self.keep = keep;
        self.ahead.iter().for_each(|ahead| ahead.decide(keep == Keep::All));
    }

    /// From here on, `told` hears how far loads are.
    pub(crate) fn on_load(&mut self, told: Option<OnLoad>) {
        self.on_load = told;
    }

    /// Loads the parameters of networks in their order, while this thread goes on: those of the first, and of the others
    /// once it is known that `all` have room, now or by [`Executor::keep`]. Random weights are not loaded.
    pub(crate) fn load_ahead(&mut self, networks: impl Iterator<Item = Arc<Network>>, all: bool) {
        let Some(files) = self.files() else { return };
        let mut seen = HashSet::new();
        let orders: Vec<_> = networks
            .map(|network| {
                let is_new = |p: &&Param| self.parameters.get(&p.name).is_none() && seen.insert(p.name.clone());
                let params: Vec<Param> = network.params.iter().filter(is_new).cloned().collect();
                (network, params)
            })
            .filter(|(_, params)| !params.is_empty())
            .collect();
        let total = orders.iter().flat_map(|(_, params)| params).map(Param::bytes).sum();
        let progress = Progress::new(self.on_load.clone(), total);
        self.ahead = Some(Ahead::start(self.engine.clone(), files, orders, all, progress));
    }

    /// The files that parameters are read from.
    fn files(&self) -> Option<Files> {
        let Weights::Files(source) = &self.weights else { return None };
        Some(Files { source: source.clone(), loras: self.loras.clone(), order: self.merge_order })
    }

    /// Whether everything that is loaded stays.
    pub(crate) fn keeps_all(&self) -> bool {
        self.keep == Keep::All
    }

    /// LoRAs of every pass of a run and how they are merged; `Executor::enter` merges them.
    ///
    /// # Errors
    /// Those of [`Executor::set_loras`], of any pass.
    pub fn keep_loras(&mut self, loras: Loras) -> Result<()> {
        if self.merge_order != loras.order {
            // What the other order made is no weight of this one.
            self.swap_loras(Vec::new())?;
            self.merge_order = loras.order;
        }
        self.by_pass = loras;
        if let Weights::Files(source) = &self.weights {
            self.by_pass.warn_of_unverified(source);
        }
        self.pass = 1;
        [2, 1].into_iter().try_for_each(|pass| self.set_loras(&self.by_pass.of_pass(pass)))
    }

    /// From here on weights are those of a pass, counted from 1. What the pass before had in their place stays on the
    /// devices while there is room.
    ///
    /// # Errors
    /// None that [`Executor::keep_loras`] has not found.
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

    /// Whether some weights of a component differ between the passes.
    pub(crate) fn differs_by_pass(&self, component: &str) -> bool {
        let [first, second] = [1, 2].map(|pass| self.by_pass.of_pass(pass));
        lora::differing(&first, &second).iter().any(|(of, _)| of.folder() == component)
    }

    /// Adds these LoRAs to the weights, instead of those that were added before. Parameters on the devices
    /// that differ are dropped; the next [`Executor::prepare`] loads them anew, and only them.
    ///
    /// # Errors
    /// Random weights; an update of a tensor that the model lacks or has in another shape, with file, key and shapes.
    pub fn set_loras(&mut self, loras: &[Lora]) -> Result<()> {
        loras::check(loras, &self.weights)?;
        self.swap_loras(loras.to_vec())?;
        self.parked.clear();
        Ok(())
    }

    /// Takes out the parameters that these updates make others.
    ///
    /// # Errors
    /// Parameters on their way that cannot be loaded.
    fn swap_loras(&mut self, loras: Vec<Lora>) -> Result<Parameters> {
        if let Some(mut ahead) = self.ahead.take() {
            ahead.take_all(&mut self.parameters)?;
        }
        let differing = lora::differing(&self.loras, &loras);
        let taken = self.parameters.take_reading(|component, key| {
            Component::from_folder(component).is_some_and(|component| differing.contains(&(component, key)))
        });
        self.loras = loras;
        Ok(taken)
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Bytes of the parameters on the device.
    pub fn parameter_bytes(&self) -> usize {
        self.parameters.bytes() + self.parked.values().map(Parameters::bytes).sum::<usize>()
    }

    /// Bytes of the parameters on one device.
    pub(crate) fn parameter_bytes_of_device(&self) -> usize {
        self.parameters.device_bytes() + self.parked.values().map(Parameters::device_bytes).sum::<usize>()
    }

    /// Bytes of the parameters that a program reads, on one device.
    pub(crate) fn parameter_bytes_of(&self, program: &Executable) -> usize {
        program.arguments().iter().filter_map(|a| self.parameters.get(&a.name)).map(ShardedTensor::device_bytes).sum()
    }

    /// A parameter on the devices, once a network that reads it is ready.
    pub fn parameter(&self, name: &str) -> Option<&ShardedTensor> {
        self.parameters.get(name)
    }

    /// Hashes of the programs used since [`Executor::reset_set_up_time`], by name.
    pub(crate) fn program_hashes(&self) -> impl Iterator<Item = (&str, &str)> {
        self.used.iter().filter_map(|hash| self.programs.get(hash)).map(|e| (e.name(), e.hash()))
    }

    /// Hashes of the programs used since [`Executor::reset_set_up_time`].
    pub(crate) fn used(&self) -> &BTreeSet<String> {
        &self.used
    }

    /// Programs that are loaded.
    pub(crate) fn program_count(&self) -> usize {
        self.programs.len()
    }

    /// Drops programs, by their hashes; the next use compiles them anew, or takes them from the compile cache.
    pub(crate) fn drop_programs(&mut self, dropped: &BTreeSet<String>) {
        self.programs.retain(|hash, _| !dropped.contains(hash));
        self.made.retain(|program| !dropped.contains(program.hash()));
    }

    /// Makes a network ready: compiled, its parameters on the device. Both are kept, so that a second request with
    /// the same program costs nothing; of parameters as many as `Executor::keep` says.
    ///
    /// # Errors
    /// Errors of program, files or device.
    pub fn prepare(&mut self, name: &str, network: &Network) -> Result<Rc<Executable>> {
        let compiled = self.compile(name, network)?;
        let start = Instant::now();
        if let Some(ahead) = &mut self.ahead {
            match self.engine.runs_beside_transfers() {
                true => ahead.take(&network.params, &mut self.parameters)?,
                false => ahead.take_all(&mut self.parameters)?,
            }
        }
        self.make_room(network, &compiled);
        self.load(network)?;
        self.load_time += start.elapsed();
        Ok(compiled)
    }

    /// Loads or draws a network's parameters that are not there yet.
    fn load(&mut self, network: &Network) -> Result<()> {
        let files = self.files();
        let (parameters, program, params) = (&mut self.parameters, &network.program, &network.params);
        if let Weights::Random(seed) = self.weights {
            parameters.draw(&self.engine, program, params, seed)?;
        }
        let Some(files) = files else { return Ok(()) };
        let total = parameters.missing(params).into_iter().map(Param::bytes).sum();
        let progress = Progress::new(self.on_load.clone(), total);
        let told = |bytes: usize| {
            progress.add(bytes);
            true
        };
        Ok(parameters.load(&self.engine, program, params, &files, &told)?)
    }

    /// The network that `write` makes for a build; without attention's kernel where the plugin may refuse that and does.
    ///
    /// # Errors
    /// Errors of writing it; of both programs, the first's.
    pub fn accepted(
        &mut self,
        name: &str,
        build: &Build,
        mut write: impl FnMut(&Build) -> Result<Network>,
    ) -> Result<Network> {
        let network = write(build)?;
        let Some(build) = build.without_refused_kernel() else { return Ok(network) };
        let hash = network.program.hash();
        if self.refused.contains(&hash) {
            return write(&build);
        }
        let Err(error) = self.compile(name, &network) else { return Ok(network) };
        let plain = write(&build)?;
        if plain.program.hash() == hash || self.compile(name, &plain).is_err() {
            return Err(error);
        }
        warn_refused(name, &error);
        self.refused.insert(hash);
        Ok(plain)
    }

    /// Compiles a network, once.
    pub(crate) fn compile(&mut self, name: &str, network: &Network) -> Result<Rc<Executable>> {
        let made = self.made.len();
        let compiled = self.compile_program(name, &network.program)?;
        if self.made.len() > made {
            network.notes.iter().for_each(|note| tracing::warn!("{note}"));
        }
        Ok(compiled)
    }

    /// Compiles a program without parameters, once.
    pub(crate) fn compile_program(&mut self, name: &str, program: &Program) -> Result<Rc<Executable>> {
        let hash = program.hash();
        self.used.insert(hash.clone());
        if let Some(known) = self.programs.get(&hash) {
            let alike = known.arguments() == program.arguments && known.results() == program.results;
            return Ok(if alike { known.clone() } else { Rc::new(known.written_as(program)) });
        }
        let start = Instant::now();
        let compiled = self.engine.compile(name, program);
        self.compile_time += start.elapsed();
        Ok(self.add(compiled?))
    }

    /// Compiles networks beside each other, so that [`Executor::compile`] finds them ready: on half the cores, since a compiler
    /// takes some itself. Processes that run together agree on one program at a time.
    ///
    /// # Errors
    /// That of the first which does not compile.
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
        let compiled = threads::in_order(&missing, threads::cores().div_ceil(2), |(name, network)| {
            engine.compile(name, &network.program)
        });
        self.compile_time += start.elapsed();
        for (compiled, (_, network)) in compiled.into_iter().zip(missing) {
            self.add(compiled?);
            network.notes.iter().for_each(|note| tracing::warn!("{note}"));
        }
        Ok(())
    }

    fn add(&mut self, compiled: Executable) -> Rc<Executable> {
        let compiled = Rc::new(compiled);
        self.made.push(compiled.clone());
        self.programs.insert(compiled.hash().to_string(), compiled.clone());
        compiled
    }

    /// Drops parameters that a network does not read, where its own and its work have no room next to them.
    fn make_room(&mut self, network: &Network, compiled: &Executable) {
        let own = |component: &str| network.params.iter().any(|p| p.component == component);
        let held = self.parameters.bytes_of_components();
        let mut others: Vec<_> = held.into_iter().filter(|(component, _)| !own(component)).collect();
        let room = match self.keep {
            Keep::All => return,
            Keep::OneComponent => 0,
            Keep::Most(bytes) => {
                let coming = self.parameters.missing_bytes(&network.program, &network.params);
                bytes.saturating_sub(coming + work(network, compiled).unwrap_or(0))
            }
        };
        // First the other pass', then what is largest.
        others.sort_by_key(|(_, bytes)| *bytes);
        while self.parameter_bytes() > room {
            if self.parked.pop_last().is_some() {
                continue;
            }
            let Some((component, bytes)) = others.pop() else { return };
            self.parameters.take_component(component);
            tracing::debug!("{component} leaves the devices: {} MiB", bytes >> 20);
        }
    }

    /// Runs a prepared network on its inputs.
    ///
    /// # Errors
    /// A missing input, by name; the plugin's message.
    pub fn run<'a>(&'a self, program: &Executable, inputs: &'a Inputs) -> Result<Outputs> {
        self.run_with(program, |name| inputs.get(name))
    }

    /// Runs a prepared network on buffers found by `find`, or among the parameters.
    ///
    /// # Errors
    /// A missing input, by name; the plugin's message.
    pub(crate) fn run_with<'a>(
        &'a self,
        program: &Executable,
        find: impl Fn(&str) -> Option<&'a ShardedTensor>,
    ) -> Result<Outputs> {
        Ok(self.engine.run(program, |name| find(name).or_else(|| self.parameters.get(name)))?)
    }

    /// Programs that were compiled or taken from the cache since [`Executor::reset_set_up_time`].
    pub(crate) fn made(&self) -> &[Rc<Executable>] {
        &self.made
    }

    /// Time spent loading and compiling so far.
    pub(crate) fn set_up_time(&self) -> Duration {
        self.load_time + self.compile_time
    }

    /// Starts counting loading and compiling anew, for the next request's figures.
    pub(crate) fn reset_set_up_time(&mut self) {
        (self.load_time, self.compile_time) = (Duration::ZERO, Duration::ZERO);
        self.engine.timeline().clear();
        self.made.clear();
        self.used.clear();
    }

    /// Copies a host tensor to the devices as the program's argument `name`.
    ///
    /// # Errors
    /// No such argument, another shape; the plugin's message.
    pub(crate) fn upload(&self, program: &Executable, name: &str, tensor: &Tensor) -> Result<ShardedTensor> {
        Ok(self.engine.upload(program, name, tensor)?)
    }

    /// Uploads host tensors under their names, in the element types the program's arguments have.
    ///
    /// # Errors
    /// The plugin's message.
    pub fn give_all<'a>(
        &self,
        program: &Executable,
        mut inputs: Inputs<'a>,
        tensors: impl IntoIterator<Item = (String, Tensor)>,
    ) -> Result<Inputs<'a>> {
        for (name, tensor) in tensors {
            if program.arguments().iter().any(|a| a.name == name) {
                inputs = inputs.give(&name, self.upload(program, &name, &tensor)?);
            }
        }
        Ok(inputs)
    }
}

/// Says in a line that a program runs without attention's kernel.
pub(super) fn warn_refused(program: &str, error: &PipelineError) {
    let said = error.to_string();
    let line = said.lines().next().unwrap_or_default();
    tracing::warn!("{program}: attention runs in XLA's own operations, this libtpu does not take its kernel: {line}");
}
