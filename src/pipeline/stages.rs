//! Programs that are compiled once and parameters that are uploaded once, for any number of requests.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::error::{PipelineError, Result};
use super::files::Files;
use super::loras::Loras;
use crate::models::Network;
use crate::runtime::{Distributed, Engine, Executable, Outputs, Parameters};
use crate::tensor::Tensor;
use crate::weights::{Component, Lora, ModelSource, lora};

/// An engine with everything it has compiled and loaded.
pub struct Stages {
    engine: Engine,
    weights: Weights,
    loras: Vec<Lora>,
    by_stage: Loras,
    parameters: Parameters,
    programs: HashMap<String, Rc<Executable>>,
    /// Time spent reading and uploading parameters.
    pub load_time: Duration,
    /// Programs made ready since figures were last reset.
    made: Vec<Rc<Executable>>,
}

/// Where parameters come from.
#[derive(Clone)]
pub enum Weights {
    /// A model's files.
    Files(Rc<ModelSource>),
    /// Random numbers made on the devices, drawn from a seed.
    Random(u64),
}

impl From<Rc<ModelSource>> for Weights {
    fn from(source: Rc<ModelSource>) -> Self {
        Weights::Files(source)
    }
}

impl Weights {
    /// What the files hold of the transformer's blocks, and whether their header speaks of quantization.
    ///
    /// # Errors
    /// The transformer's files cannot be read.
    pub fn describe_blocks(&self) -> Result<String> {
        let Weights::Files(source) = self else { return Ok("random numbers".into()) };
        let checkpoint = source.checkpoint(Component::Transformer)?;
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for name in checkpoint.names().filter(|n| n.starts_with("transformer_blocks.") && n.ends_with(".weight")) {
            *counts.entry(checkpoint.dtype_name(name).unwrap_or_default()).or_default() += 1;
        }
        let mut parts: Vec<String> =
            counts.iter().map(|(dtype, count)| format!("{count} tensors of {dtype}")).collect();
        parts.extend(checkpoint.metadata(QUANTIZATION).map(|_| format!("'{QUANTIZATION}' in the header")));
        Ok(parts.join(", "))
    }
}

/// Where a header says which tensors are quantized.
const QUANTIZATION: &str = "_quantization_metadata";

/// Tensors for one run, by argument name.
#[derive(Default)]
pub struct Inputs<'a> {
    owned: HashMap<String, Distributed>,
    borrowed: HashMap<String, &'a Distributed>,
}

impl<'a> Inputs<'a> {
    /// Adds a buffer that lives elsewhere.
    pub fn share(mut self, name: &str, buffer: &'a Distributed) -> Self {
        self.borrowed.insert(name.to_string(), buffer);
        self
    }

    /// Adds a buffer.
    pub fn give(mut self, name: &str, buffer: Distributed) -> Self {
        self.owned.insert(name.to_string(), buffer);
        self
    }

    /// A buffer by name.
    pub fn get(&self, name: &str) -> Option<&Distributed> {
        self.owned.get(name).or_else(|| self.borrowed.get(name).copied())
    }
}

impl Stages {
    /// Nothing compiled, nothing loaded.
    pub fn new(engine: Engine, weights: impl Into<Weights>) -> Self {
        Stages {
            engine,
            weights: weights.into(),
            loras: Vec::new(),
            by_stage: Loras::default(),
            parameters: Parameters::default(),
            programs: HashMap::new(),
            load_time: Duration::ZERO,
            made: Vec::new(),
        }
    }

    /// Keeps the updates of every stage of a run; [`Stages::enter`] merges them.
    ///
    /// # Errors
    /// As [`Stages::set_loras`], of any stage's.
    pub fn keep_loras(&mut self, loras: Loras) -> Result<()> {
        self.by_stage = loras;
        [2, 1].into_iter().try_for_each(|stage| self.enter(stage))
    }

    /// From here on weights are those of a stage, counted from 1.
    ///
    /// # Errors
    /// None that [`Stages::keep_loras`] has not found.
    pub fn enter(&mut self, stage: u8) -> Result<()> {
        if self.by_stage.is_empty() {
            return Ok(());
        }
        self.set_loras(&self.by_stage.of_stage(stage))
    }

    /// Adds these low-rank updates to the weights, instead of those that were added before. Parameters on the devices
    /// that differ are dropped; the next [`Stages::prepare`] loads them anew, and only them.
    ///
    /// # Errors
    /// Random weights; an update of a tensor that the model lacks or has in another shape, with file, key and shapes.
    pub fn set_loras(&mut self, loras: &[Lora]) -> Result<()> {
        match &self.weights {
            Weights::Files(source) => loras.iter().try_for_each(|l| l.file.check(source))?,
            Weights::Random(_) => {
                if let Some(lora) = loras.first() {
                    let file = lora.file.path().display();
                    let message = format!("{file}: a LoRA updates weights of files; model.weights is random");
                    return Err(PipelineError::Input(message));
                }
            }
        }
        let differing = lora::differing(&self.loras, loras);
        self.parameters.drop_reading(|component, key| {
            Component::from_folder(component).is_some_and(|component| differing.contains(&(component, key)))
        });
        self.loras = loras.to_vec();
        Ok(())
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Bytes of the parameters on the device.
    pub fn parameter_bytes(&self) -> usize {
        self.parameters.bytes()
    }

    /// Bytes of the parameters that a program reads, on one device.
    pub fn parameter_bytes_of(&self, program: &Executable) -> usize {
        program.arguments().iter().filter_map(|a| self.parameters.get(&a.name)).map(Distributed::device_bytes).sum()
    }

    /// A parameter on the devices, once a network that reads it is ready.
    pub fn parameter(&self, name: &str) -> Option<&Distributed> {
        self.parameters.get(name)
    }

    /// Hashes of the programs used so far, by name.
    pub fn program_hashes(&self) -> impl Iterator<Item = (&str, &str)> {
        self.programs.values().map(|e| (e.name(), e.hash()))
    }

    /// Makes a network ready: compiled, its parameters on the device. Both are kept, so that a second request with
    /// the same program costs nothing.
    ///
    /// # Errors
    /// What is wrong with program, files or device.
    pub fn prepare(&mut self, name: &str, network: &Network) -> Result<Rc<Executable>> {
        let start = Instant::now();
        let (parameters, program, params) = (&mut self.parameters, &network.program, &network.params);
        match &self.weights {
            Weights::Files(source) => {
                parameters.load(&self.engine, program, params, &Files { source, loras: &self.loras })?
            }
            Weights::Random(seed) => parameters.draw(&self.engine, program, params, *seed)?,
        }
        network.notes.iter().for_each(|note| tracing::warn!("{note}"));
        self.load_time += start.elapsed();
        let hash = network.program.hash();
        if let Some(known) = self.programs.get(&hash) {
            return Ok(known.clone());
        }
        let compiled = Rc::new(self.engine.compile(name, &network.program)?);
        self.made.push(compiled.clone());
        self.programs.insert(hash, compiled.clone());
        Ok(compiled)
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
    pub fn run_with<'a>(
        &'a self,
        program: &Executable,
        find: impl Fn(&str) -> Option<&'a Distributed>,
    ) -> Result<Outputs> {
        Ok(self.engine.run(program, |name| find(name).or_else(|| self.parameters.get(name)))?)
    }

    /// Programs that were compiled or taken from the cache since [`Stages::reset_set_up_time`].
    pub fn made(&self) -> &[Rc<Executable>] {
        &self.made
    }

    /// Time spent making them ready.
    pub fn compile_time(&self) -> Duration {
        self.made.iter().map(|e| e.compile_time()).sum()
    }

    /// Time spent loading and compiling so far.
    pub fn set_up_time(&self) -> Duration {
        self.load_time + self.compile_time()
    }

    /// Starts counting loading and compiling anew, for the next request's figures.
    pub fn reset_set_up_time(&mut self) {
        self.load_time = Duration::ZERO;
        self.made.clear();
    }

    /// Copies a host tensor to the devices as the program's argument `name`.
    ///
    /// # Errors
    /// No such argument, another shape; the plugin's message.
    pub fn upload(&self, program: &Executable, name: &str, tensor: &Tensor) -> Result<Distributed> {
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
