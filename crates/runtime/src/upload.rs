//! Model parameters on the devices, which are loaded from files or initialized there with random numbers.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::iter::Sum;
use std::ops::AddAssign;
use std::time::Instant;

use super::checkpoint_tensor::ParameterSource;
use super::engine::Engine;
use super::error::{MemoryPhase, RuntimeError};
use super::sharded_tensor::{ShardedTensor, shards};
use super::timeline::SpanKind;
use super::{loader, random};
use ltx2_nn::{Param, Source};
use ltx2_stablehlo::{MemorySpace, Program};

/// Parameters on the devices, by argument name.
#[derive(Default)]
pub struct LoadedParameters {
    tensors: HashMap<String, LoadedParameter>,
}

/// A parameter on the devices, with the checkpoint tensors that it was read from.
struct LoadedParameter {
    tensor: ShardedTensor,
    component: &'static str,
    source: Source,
}

impl LoadedParameter {
    fn footprint(&self) -> Footprint {
        Footprint::in_memory(self.tensor.memory(), self.tensor.shard_bytes())
    }
}

impl LoadedParameters {
    /// Returns a parameter by its argument name; `None` if it is not loaded.
    pub fn get(&self, name: &str) -> Option<&ShardedTensor> {
        self.tensors.get(name).map(|loaded| &loaded.tensor)
    }

    /// Returns the argument names of all parameters.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Uploads those of `params` that are not loaded yet. All of `params` are arguments of `program`. Calls
    /// `on_progress` with the byte count of each uploaded piece and stops when it returns `false`.
    ///
    /// # Errors
    /// Returns [`RuntimeError::Stopped`] if `on_progress` returns `false`, an error with file and tensor name if a tensor is
    /// missing, has the wrong shape, is not a float or is not finite, or the plugin's error.
    pub fn load(
        &mut self,
        engine: &Engine,
        program: &Program,
        params: &[Param],
        source: &dyn ParameterSource,
        on_progress: &(dyn Fn(usize) -> bool + Sync),
    ) -> Result<(), RuntimeError> {
        let missing = self.missing(params);
        if missing.is_empty() {
            return Ok(());
        }
        let since = Instant::now();
        let components = components(&missing);
        let tensors = loader::load(engine, program, &missing, source, on_progress);
        let tensors = tensors.map_err(|e| e.during(MemoryPhase::Load, &components))?;
        let bytes: u64 = missing.iter().map(|param| param.bytes() as u64).sum();
        let gigabytes = bytes as f64 / 1e9;
        let rate = gigabytes / since.elapsed().as_secs_f64();
        let buffers = engine.peak_load_memory() >> 20;
        tracing::debug!(
            "loaded {components}: {gigabytes:.2} GB, {rate:.2} GB/s, host buffers of all loads: at most {buffers} MiB"
        );
        engine.timeline().add(SpanKind::Load, &components, since, Some(bytes));
        missing.into_iter().zip(tensors).for_each(|(param, tensor)| self.insert(param, tensor));
        Ok(())
    }

    /// Generates random values, according to [`Init`](ltx2_nn::Init), for those of `params` that are not loaded yet.
    /// All of `params` are arguments of `program`. Values depend only on `seed`, the parameter's name and the element's
    /// indices.
    pub fn draw(
        &mut self,
        engine: &Engine,
        program: &Program,
        params: &[Param],
        seed: u64,
    ) -> Result<(), RuntimeError> {
        let missing = self.missing(params);
        if missing.is_empty() {
            return Ok(());
        }
        let drawn = random::parameters(engine, program, &missing, seed);
        let drawn = drawn.map_err(|e| e.during(MemoryPhase::Load, &components(&missing)))?;
        for (param, tensor) in missing.iter().zip(drawn) {
            self.insert(param, tensor);
        }
        Ok(())
    }

    /// Removes and returns every parameter that reads a tensor `(component, checkpoint name)` for which `stale` returns
    /// `true`.
    pub fn take_stale(&mut self, stale: impl Fn(&'static str, &str) -> bool) -> LoadedParameters {
        let reads =
            |loaded: &LoadedParameter| loaded.source.tensors().iter().any(|(key, _)| stale(loaded.component, key));
        self.remove(reads)
    }

    /// Removes those of `params` that are in another memory than the arguments of `program`.
    pub fn drop_misplaced(&mut self, program: &Program, params: &[Param]) {
        let wanted: HashMap<&str, MemorySpace> =
            params.iter().map(|param| (&*param.name, argument_memory(program, param))).collect();
        self.tensors
            .retain(|name, loaded| wanted.get(name.as_str()).is_none_or(|memory| *memory == loaded.tensor.memory()));
    }

    /// Removes the parameters of a run's components that no program reads, or that a program needs in another memory.
    /// Keeps the parameters of components that the run does not use. `wanted`: component and memory of each parameter
    /// that the run reads, by name.
    pub fn retain_placed(&mut self, wanted: &HashMap<String, (&'static str, MemorySpace)>) {
        let components: HashSet<&str> = wanted.values().map(|(component, _)| *component).collect();
        self.tensors.retain(|name, loaded| match wanted.get(name) {
            Some((_, memory)) => *memory == loaded.tensor.memory(),
            None => !components.contains(loaded.component),
        });
    }

    /// Removes and returns all parameters of a component.
    pub fn take_component(&mut self, component: &str) -> LoadedParameters {
        self.remove(|loaded| loaded.component == component)
    }

    /// Adds parameters that `take_stale` or `take_component` removed.
    pub fn put_back(&mut self, taken: LoadedParameters) {
        self.tensors.extend(taken.tensors);
    }

    /// Returns the memory that each component's parameters take.
    pub fn footprints(&self) -> BTreeMap<&'static str, Footprint> {
        let mut all = BTreeMap::<_, Footprint>::new();
        for loaded in self.tensors.values() {
            *all.entry(loaded.component).or_default() += loaded.footprint();
        }
        all
    }

    /// Returns the memory that all parameters take.
    pub fn footprint(&self) -> Footprint {
        self.tensors.values().map(LoadedParameter::footprint).sum()
    }

    /// Returns the memory that those of `params` will take that are not loaded yet. All of `params` are arguments of
    /// `program`.
    pub fn missing_footprint(&self, program: &Program, params: &[Param]) -> Footprint {
        self.missing(params).into_iter().map(|param| Footprint::of_param(program, param)).sum()
    }

    fn remove(&mut self, which: impl Fn(&LoadedParameter) -> bool) -> LoadedParameters {
        LoadedParameters { tensors: self.tensors.extract_if(|_, loaded| which(loaded)).collect() }
    }

    /// Returns those of `params` that are not loaded yet.
    pub fn missing<'a>(&self, params: &'a [Param]) -> Vec<&'a Param> {
        params.iter().filter(|p| !self.tensors.contains_key(&p.name)).collect()
    }

    fn insert(&mut self, param: &Param, tensor: ShardedTensor) {
        let loaded = LoadedParameter { tensor, component: param.component, source: param.source.clone() };
        self.tensors.insert(param.name.clone(), loaded);
    }
}

/// Memory that parameters take for each device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Memory of the device.
    pub device: usize,
    /// Pinned memory of the host.
    pub host: usize,
}

impl Footprint {
    /// Returns the memory that a shard of a parameter takes, which is an argument of `program`.
    pub fn of_param(program: &Program, param: &Param) -> Self {
        let argument = program.argument(&param.name);
        let shards = shards(&param.ty, &program.mesh, argument.and_then(|a| a.sharding.as_ref()));
        let bytes = shards.first().map_or(0, |p| p.size.iter().product::<usize>() * param.ty.dtype.size());
        Footprint::in_memory(argument_memory(program, param), bytes)
    }

    fn in_memory(memory: MemorySpace, bytes: usize) -> Self {
        match memory {
            MemorySpace::Device => Footprint { device: bytes, host: 0 },
            MemorySpace::PinnedHost => Footprint { device: 0, host: bytes },
        }
    }
}

impl AddAssign for Footprint {
    fn add_assign(&mut self, other: Footprint) {
        self.device += other.device;
        self.host += other.host;
    }
}

impl Sum for Footprint {
    fn sum<I: Iterator<Item = Footprint>>(all: I) -> Footprint {
        all.fold(Footprint::default(), |mut sum, one| {
            sum += one;
            sum
        })
    }
}

/// Returns the memory of a parameter, which is an argument of `program`.
pub(super) fn argument_memory(program: &Program, param: &Param) -> MemorySpace {
    program.argument(&param.name).map(|a| a.memory).unwrap_or_default()
}

/// Returns the bytes of a parameter's shard in the memory of one device: 0 if it is in host memory. The parameter is an
/// argument of `program`.
pub fn device_bytes(program: &Program, param: &Param) -> usize {
    Footprint::of_param(program, param).device
}

/// Returns the names of the parameters' components without duplicates, comma-separated.
fn components(params: &[&Param]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for param in params {
        if !names.contains(&param.component) {
            names.push(param.component);
        }
    }
    names.join(", ")
}
