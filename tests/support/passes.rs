//! The two programs of a denoising pass on pseudo-random inputs, to compare layouts without text encoder and decoders.

use std::collections::BTreeMap;

use ltx2::av::Av;
use ltx2::models::Network;
use ltx2::models::transformer::TransformerConfig;
use ltx2::nn::Build;
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::programs::executor::{Executor, Inputs};
use ltx2::request::{Condition, Placement, Request, Shapes};
use ltx2::sampling::denoise::{DenoiseShape, denoise, prepare};
use ltx2::sampling::step_cache::StepCache;
use ltx2::tensor::Tensor;
use ltx2::weights::{Component, ModelSource};
use ndarray::{Array1, Array2, ArrayD, arr0};

/// Number of noise levels in a program's table.
const TABLE: usize = 257;

/// Denoising pass of a request, and the inputs of its programs besides weights.
pub struct Pass<'a> {
    config: TransformerConfig,
    request: &'a Request,
    shape: DenoiseShape,
    /// Number of tokens appended to each stream.
    appended: Av<usize>,
}

impl<'a> Pass<'a> {
    pub fn new(source: &ModelSource, model: &OpenModel, request: &'a Request) -> Self {
        Pass::of_batch(source, model, request, 1)
    }

    /// Like [`Pass::new`], for a batch of videos.
    pub fn of_batch(source: &ModelSource, model: &OpenModel, request: &'a Request, batch: usize) -> Self {
        let json = source.config(Component::Transformer).expect("a configuration");
        let shapes = Shapes::from_request(&model.sizes, request).expect("legal sizes");
        Pass {
            config: TransformerConfig::from_json(&json).expect("valid"),
            shape: request.denoise_shape(&model.sizes, &shapes, batch),
            appended: shapes.appended,
            request,
        }
    }

    /// Returns the latents of both streams after all steps, from pseudo-random latents and text contexts.
    pub fn latents(&self, executor: &mut Executor, build: &Build) -> Av<Tensor> {
        let prepared = self.prepared(executor, build);
        self.denoised(executor, build, prepared)
    }

    /// Returns the fraction of a step's noise level that each of `tokens` video tokens has.
    pub fn noise_fractions(&self, tokens: usize) -> Vec<f32> {
        let levels = self.levels();
        self.input("level.video", &[1, tokens]).to_f32().iter().map(|index| levels[*index as usize]).collect()
    }

    /// Returns the results of the program that runs once per request.
    pub fn prepared(&self, executor: &mut Executor, build: &Build) -> BTreeMap<String, Tensor> {
        self.run(executor, "prepare", &prepare(&self.config, &self.shape, build).expect("builds"), BTreeMap::new())
    }

    /// Like [`Pass::latents`], from given results of [`Pass::prepared`].
    pub fn denoised(&self, executor: &mut Executor, build: &Build, prepared: BTreeMap<String, Tensor>) -> Av<Tensor> {
        let mut made = self.evaluated(executor, build, prepared);
        Av::NAMES.map(|stream| made.remove(&format!("latents.{stream}")).expect("latents"))
    }

    /// Runs the denoising loop and returns all its results. `known`: values of inputs, at least the results of
    /// [`Pass::prepared`].
    pub fn evaluated(
        &self,
        executor: &mut Executor,
        build: &Build,
        known: BTreeMap<String, Tensor>,
    ) -> BTreeMap<String, Tensor> {
        let network = denoise(&self.config, &self.shape, build).expect("builds");
        self.run(executor, "denoise", &network, known)
    }

    /// Runs a program on the known values; other inputs except weights come from [`Pass::input`].
    fn run(
        &self,
        executor: &mut Executor,
        name: &str,
        network: &Network,
        mut known: BTreeMap<String, Tensor>,
    ) -> BTreeMap<String, Tensor> {
        let program = executor.prepare(name, network).expect("compiles");
        let weights: Vec<&str> = network.params.iter().map(|p| p.name.as_str()).collect();
        let inputs = program.arguments().iter().filter(|a| !weights.contains(&a.name.as_str()));
        let mut value = |name: &str, dims: &[usize]| known.remove(name).unwrap_or_else(|| self.input(name, dims));
        let given: Vec<_> = inputs.map(|a| (a.name.clone(), value(&a.name, &a.logical_dims))).collect();
        let inputs = executor.give_all(&program, Inputs::default(), given).expect("uploads");
        let outputs = executor.run(&program, &inputs).expect("runs");
        let results = network.program.results.iter();
        results.map(|r| (r.name.clone(), outputs.tensor(&r.name).expect("a result"))).collect()
    }

    fn input(&self, name: &str, dims: &[usize]) -> Tensor {
        let sigmas = &self.request.sigmas;
        match name {
            "begin" => arr0(0).into(),
            "end" => arr0(sigmas.len() as i32 - 1).into(),
            "sigmas" => Array1::from_shape_fn(TABLE, |i| sigmas.get(i).copied().unwrap_or(0.0)).into(),
            "scales" => self.request.guidance_tables().scales.into(),
            "branch_sets" => self.request.guidance_tables().sets.expect("sets of branches").into(),
            "cache_schedule" => {
                let schedule = self.request.cache.as_ref().expect("a step cache").schedule(sigmas.len() - 1);
                Array1::from_shape_fn(TABLE, |i| schedule.get(i).map_or(0, |skip| i32::from(*skip))).into()
            }
            "cache_limits" => {
                Array1::from(self.request.cache.as_ref().and_then(StepCache::limits).expect("limits").to_vec()).into()
            }
            "cache_skips" => Array1::<i32>::zeros(TABLE).into(),
            name if name.starts_with("cache_") => ArrayD::<f32>::zeros(dims).into(),
            "levels" => Array1::from(self.levels()).into(),
            "level.video" | "level.audio" => {
                // The first frame follows an image; without one, a third of the tokens is known. Appended tokens are
                // conditioning tokens.
                let (conditions, appended) = match name {
                    "level.video" => (&self.request.conditions.video, self.appended.video),
                    _ => (&self.request.conditions.audio, self.appended.audio),
                };
                let levels = self.levels();
                let index = |level: f32| levels.iter().position(|l| *l == level).expect("a level") as i32;
                let behind = conditions.iter().filter(|c| {
                    let is_sound = matches!(c.placement, Placement::AppendedSound { .. });
                    is_sound || c.appended_at().is_some() || c.reference_grid().is_some()
                });
                let behind: Vec<i32> = behind.map(|c| index(c.noise_level())).collect();
                let (own, frame) = (dims[1] - appended, appended / behind.len().max(1));
                let known = if behind.is_empty() { own.div_ceil(3) } else { frame };
                let level = |n: usize| match n.checked_sub(own) {
                    Some(n) => behind[(n / frame).min(behind.len() - 1)],
                    None => i32::from(n < known),
                };
                Array2::from_shape_fn((dims[0], dims[1]), |(_, n)| level(n)).into()
            }
            _ => scattered(name, dims),
        }
    }

    /// Returns the fractions of a step's noise level that tokens have: 1, then those of the conditions.
    fn levels(&self) -> Vec<f32> {
        let mut levels = vec![1.0];
        for level in self.request.conditions.as_ref().into_iter().flatten().map(Condition::noise_level) {
            if !levels.contains(&level) {
                levels.push(level);
            }
        }
        levels
    }
}

/// Returns pseudo-random numbers that depend on the name.
pub fn scattered(name: &str, shape: &[usize]) -> Tensor {
    let mut state = name.bytes().map(u64::from).sum::<u64>();
    ArrayD::from_shape_simple_fn(shape, || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 22) as f32 - 2.0
    })
    .into()
}
