//! Host side of the denoising loop: each call of the loop program runs a range of transformer evaluations.

use std::ops::Range;
use std::rc::Rc;

use ndarray::{Array1, Array2, Array3, ArrayD, Axis};

use crate::av::Av;
use crate::hlo::DType;
use crate::models::Network;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::programs::call::Call;
use crate::pipeline::programs::executor::{Executor, Inputs};
use crate::request::Request;
use crate::runtime::watchdog::with_evaluations;
use crate::runtime::{CompiledProgram, Outputs, ShardedTensor};
use crate::sampling::MAX_STEPS;
use crate::sampling::noise::step_noise;
use crate::sampling::{Sampler, Schedule, TorchRng};
use crate::tensor::Tensor;

/// Returns the noise levels and the coefficients of the request's sampler, padded to [`MAX_STEPS`] + 1 rows.
///
/// # Errors
/// Returns an error if the sampler needs more than [`MAX_STEPS`] evaluations, or if it returns another number of levels
/// or coefficients than it declares.
pub(in crate::pipeline) fn evaluations(request: &Request) -> Result<Vec<(String, Tensor)>> {
    let sampler = &request.sampler;
    let Schedule { mut levels, coefficients } = sampler.schedule(&request.sigmas);
    let (steps, columns) = (request.sigmas.len() - 1, sampler.coefficients());
    let count = sampler.evaluations(steps);
    let fail = |why: String| Err(PipelineError::Usage(format!("{steps} steps take {count} evaluations, {why}")));
    if count > MAX_STEPS {
        return fail(format!("but at most {MAX_STEPS} are supported; use fewer steps"));
    }
    let rows = if columns == 0 { 0 } else { count };
    // The sampler may omit the final noise level, which is 0.
    let right = (count..=count + 1).contains(&levels.len()) && coefficients.len() == rows;
    if !right || coefficients.iter().any(|row| row.len() != columns) {
        let found = format!(
            "but the sampler returned {} noise levels and {} rows of coefficients",
            levels.len(),
            coefficients.len()
        );
        return fail(format!("{found}; expected {} noise levels and {rows} rows of {columns} coefficients", count + 1));
    }
    levels.resize(MAX_STEPS + 1, 0.0);
    let at = |(i, k): (usize, usize)| coefficients.get(i).map_or(0.0, |row| row[k]);
    let coefficients = Array2::from_shape_fn((MAX_STEPS + 1, columns), at);
    Ok(vec![("sigmas".into(), Array1::from(levels).into()), ("coefficients".into(), coefficients.into())])
}

/// Returns the program inputs of the request's step cache; none without a step cache.
pub(in crate::pipeline) fn step_cache_inputs(request: &Request) -> Vec<(String, Tensor)> {
    let Some(cache) = &request.cache else { return Vec::new() };
    let evaluations = request.sampler.evaluations(request.sigmas.len() - 1);
    let mut schedule: Vec<i32> = cache.schedule(evaluations).into_iter().map(i32::from).collect();
    schedule.resize(MAX_STEPS + 1, 0);
    let limits = cache.limits().map(|limits| ("cache_limits".to_string(), Array1::from(limits.to_vec()).into()));
    std::iter::once(("cache_schedule".to_string(), Array1::from(schedule).into())).chain(limits).collect()
}

/// Noise source of one video, like [`StepNoise`](crate::sampling::StepNoise), that can borrow its generator.
type NoiseSource<'a> = Box<dyn FnMut(Av<[usize; 2]>) -> Av<Array3<f32>> + 'a>;

/// Generators of the noise that a sampler adds in each step of a pass, one per video; none if the sampler adds no
/// noise.
pub(crate) struct CallNoise<'a> {
    generators: Vec<NoiseSource<'a>>,
    tokens: Av<[usize; 2]>,
}

impl<'a> CallNoise<'a> {
    /// Creates one generator per seed. `tokens`: token count and channels `[n, c]` of each stream.
    pub(crate) fn new(sampler: &dyn Sampler, seeds: impl Iterator<Item = u64>, tokens: Av<[usize; 2]>) -> Self {
        let seeds = seeds.filter(|_| sampler.noises() > 0);
        CallNoise { generators: seeds.map(|seed| sampler.generator(seed) as NoiseSource).collect(), tokens }
    }

    /// Creates the generators of a pass. They are seeded with `seeds` or, if the sampler continues the request's noise,
    /// draw from `generators`.
    pub(crate) fn of_pass(
        request: &Request,
        seeds: impl Iterator<Item = u64>,
        generators: &'a mut [TorchRng],
        tokens: Av<[usize; 2]>,
    ) -> Self {
        let sampler = &*request.sampler;
        if !sampler.continues_request() {
            return CallNoise::new(sampler, seeds, tokens);
        }
        let (noises, levels) = (sampler.noises(), sampler.schedule(&request.sigmas).levels);
        let of_video = |rng: &'a mut TorchRng| -> NoiseSource<'a> {
            let (levels, mut next) = (levels.clone(), 0);
            Box::new(move |tokens| {
                next += noises;
                match levels.get(next) {
                    Some(level) if *level > 0.0 => step_noise(rng, noises, tokens),
                    // A step that ends at noise level 0 draws no noise.
                    _ => tokens.map(|[n, c]| Array3::zeros((noises, n, c))),
                }
            })
        };
        CallNoise { generators: generators.iter_mut().map(of_video).collect(), tokens }
    }

    /// Draws the noise for the next call of the loop: for each stream, a tensor `[draws per call, b, n, c]`, by input
    /// name.
    pub(crate) fn draw(&mut self) -> Vec<(String, Tensor)> {
        let drawn: Vec<Array3<f32>> = self.generators.iter_mut().flat_map(|next| next(self.tokens)).collect();
        if drawn.is_empty() {
            return Vec::new();
        }
        let all = Av::NAMES.zip(Av::in_turn(&drawn)).map(|(name, videos)| {
            let views: Vec<_> = videos.iter().map(|video| video.view()).collect();
            let stacked = ndarray::stack(Axis(1), &views).expect("videos have one shape");
            (format!("noise.{name}"), Tensor::from(stacked))
        });
        all.into_iter().collect()
    }
}

/// Compiled denoising loop, with its RoPE tables and guidance scales on the devices. Depends on neither prompts nor
/// seeds.
pub(crate) struct DenoiseLoop {
    pub(in crate::pipeline) network: Rc<Network>,
    pub(in crate::pipeline) call: Call<'static>,
    pub(in crate::pipeline) carried: Vec<String>,
}

impl DenoiseLoop {
    /// Reloads the loop's parameters that have been evicted from the devices.
    pub(crate) fn load(&self, executor: &mut Executor, name: &str) -> Result<()> {
        executor.prepare(name, &self.network).map(drop)
    }

    pub(crate) fn program(&self) -> &CompiledProgram {
        self.call.program()
    }

    /// Uploads the starting video and audio tokens, and zeros for all other tensors that the loop carries. Returns the
    /// carried tensors in the order of the loop.
    pub(crate) fn start(&self, executor: &Executor, latents: &Av<Tensor>) -> Result<Vec<ShardedTensor>> {
        let zero = |name: &String| {
            let own = self.program().arguments().iter().find(|argument| argument.name == *name);
            let own = own.ok_or_else(|| PipelineError::Bug(format!("the denoising loop has no input '{name}'")))?;
            Ok(match own.ty.dtype {
                DType::I32 => Tensor::I32(ArrayD::zeros(&own.logical_dims[..])),
                _ => Tensor::F32(ArrayD::zeros(&own.logical_dims[..])),
            })
        };
        let zeros = self.carried.iter().skip(2).map(zero);
        let all: Vec<Tensor> = latents.clone().into_iter().map(Ok).chain(zeros).collect::<Result<_>>()?;
        self.resume(executor, &all)
    }

    /// Uploads the carried tensors of a checkpoint, which are in the order of the loop.
    ///
    /// # Errors
    /// Returns an error if the number of tensors or the shape of one does not match this loop, or if the upload fails.
    pub(crate) fn resume(&self, executor: &Executor, carried: &[Tensor]) -> Result<Vec<ShardedTensor>> {
        let names = &self.carried;
        if names.len() != carried.len() {
            return Err(PipelineError::Input(format!(
                "the checkpoint has {} tensors of denoising state, but the denoising loop needs {}",
                carried.len(),
                names.len()
            )));
        }
        let upload = |(name, tensor): (&String, &Tensor)| Ok(executor.engine().upload(self.program(), name, tensor)?);
        names.iter().zip(carried).map(upload).collect()
    }

    /// Uploads the inputs of one call: the range of evaluations, and the result of [`CallNoise::draw`].
    pub(crate) fn steps(
        &self,
        executor: &Executor,
        range: Range<usize>,
        noise: Vec<(String, Tensor)>,
    ) -> Result<Inputs<'static>> {
        let ends = [("begin", range.start), ("end", range.end)];
        let inputs = Inputs::default().for_evaluations(range.len());
        let range = ends.map(|(name, v)| (name.to_string(), Tensor::from(ndarray::arr0(v as i32))));
        executor.give_all(self.program(), inputs, range.into_iter().chain(noise))
    }

    /// Runs the evaluations of one call (`steps`). `prepared`: outputs of the program that computes the step-invariant
    /// inputs. The `carried` buffers are donated.
    pub(crate) fn run(
        &self,
        executor: &Executor,
        prepared: &Outputs,
        steps: &Inputs,
        carried: Vec<ShardedTensor>,
    ) -> Result<Vec<ShardedTensor>> {
        let names = &self.carried;
        let find = |name: &str| match names.iter().position(|n| n == name) {
            Some(at) => carried.get(at),
            None => steps.get(name).or_else(|| self.call.input(name)).or_else(|| prepared.get(name)),
        };
        let _evaluations = with_evaluations(steps.evaluations());
        let mut outputs = executor.run_with(self.program(), find)?;
        let take = |name: &String| {
            outputs.take(name).ok_or_else(|| PipelineError::Input(format!("the denoising loop returned no '{name}'")))
        };
        names.iter().map(take).collect()
    }
}
