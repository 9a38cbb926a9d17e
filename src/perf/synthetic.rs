//! Synthetic inputs of programs (tokens of the prompts; normal numbers in place of embeddings and latents), so that each
//! program runs without those before it.

use ndarray::Array3;

use crate::nn::Build;
use crate::pipeline::Result;
use crate::pipeline::batch::Batch;
use crate::pipeline::calls::{self, Call, Loop};
use crate::pipeline::models::Models;
use crate::pipeline::programs::ProgramKind;
use crate::pipeline::stages::{Inputs, Stages};
use crate::pipeline::text_to_video::{Request, Shapes, fixed, pack};
use crate::runtime::{Distributed, Executable, Outputs};
use crate::sampling::denoise::{DenoiseShape, Sampler};
use crate::sampling::noise::TorchRng;
use crate::sampling::res2s::{self, StepNoise};
use crate::tensor::Tensor;

/// Synthetic inputs of a request's programs.
pub(super) struct SyntheticInputs<'a> {
    models: &'a Models,
    build: Build,
    /// Batch of the request.
    pub batch: Batch<'a>,
}

impl<'a> SyntheticInputs<'a> {
    pub fn new(models: &'a Models, request: &'a Request, build: &Build) -> Result<Self> {
        let batch = Batch::new(std::slice::from_ref(request), &build.layout)?;
        Ok(SyntheticInputs { models, build: build.clone(), batch })
    }

    /// Shapes of a stage's latents and of its program.
    pub fn shape(&self, request: &Request) -> Result<(Shapes, DenoiseShape)> {
        let shapes = Shapes::of(&self.models.sizes, request)?;
        let shape = request.denoise_shape(&self.models.sizes, &shapes, self.batch.size());
        Ok((shapes, shape))
    }

    /// Packed noise of a stage's shapes.
    pub fn noise(&self, stages: &mut Stages, shapes: &Shapes) -> Result<[Array3<f32>; 2]> {
        let drawn = self.batch.noise().draw(stages, shapes, &self.models.sizes)?;
        pack(self.models, &fixed(drawn.video)?, &fixed(drawn.audio)?)
    }

    /// Call of the program that computes the loop's step-invariant inputs.
    pub fn prepare(&self, stages: &mut Stages, request: &Request) -> Result<Call<'static>> {
        let (shapes, s) = self.shape(request)?;
        let contexts = [0, 1].map(|i| normal(&[s.batch, s.branches.len(), s.text, s.text_channels[i]], 2 + i as u64));
        calls::prepare(self.models, stages, "prepare", (request, &s, &shapes, None), contexts, &self.build)
    }

    /// Denoising loop of a stage with its inputs.
    pub fn denoising(&self, stages: &mut Stages, request: &Request, kind: ProgramKind) -> Result<Denoising> {
        let prepared = self.prepare(stages, request)?.run(stages)?;
        let (shapes, shape) = self.shape(request)?;
        let of_stage = (request, &shape, &shapes, None);
        let steps = Loop::new(self.models, stages, kind.name(), of_stage, &self.build)?;
        let start = self.noise(stages, &shapes)?;
        let tokens = [0, 1].map(|i| [start[i].dim().1, start[i].dim().2]);
        let (start, videos) = (start.map(Tensor::from), self.batch.size());
        Ok(Denoising { prepared, steps, start, tokens, sampler: shape.sampler, videos })
    }
}

/// Denoising loop that can run any number of times.
pub(super) struct Denoising {
    prepared: Outputs,
    steps: Loop,
    start: [Tensor; 2],
    /// Token and channel counts of video and audio.
    tokens: [[usize; 2]; 2],
    sampler: Sampler,
    videos: usize,
}

impl Denoising {
    /// Whether one call takes several steps: the second-order sampler, whose noise differs by step, takes one.
    pub fn takes_all(&self) -> bool {
        self.sampler == Sampler::Euler
    }

    /// Executable of the loop.
    pub fn program(&self) -> &Executable {
        self.steps.program()
    }

    /// Inputs, beside the latents, of a call of the first `steps` steps, or of the first where a call takes one.
    pub fn steps(&self, stages: &Stages, steps: usize) -> Result<Inputs<'static>> {
        let (noise, evaluations) = match self.sampler {
            Sampler::Euler => (None, steps),
            Sampler::Res2s => (Some(StepNoise::default().step(self.tokens[0], self.tokens[1])), res2s::NOISES),
        };
        self.steps.steps(stages, 0, evaluations, noise, self.videos)
    }

    /// Initial latents on the devices.
    pub fn start(&self, stages: &Stages) -> Result<Vec<Distributed>> {
        let latents = self.steps.start(stages, &self.start)?;
        wait(&latents)?;
        Ok(latents)
    }

    /// Runs a call to its end.
    pub fn run(&self, stages: &Stages, range: &Inputs, latents: Vec<Distributed>) -> Result<Vec<Distributed>> {
        let latents = self.steps.run(stages, &self.prepared, range, latents)?;
        wait(&latents)?;
        Ok(latents)
    }
}

fn wait(latents: &[Distributed]) -> Result<()> {
    Ok(latents.iter().try_for_each(Distributed::wait)?)
}

/// Normal numbers in place of an earlier program's result.
pub(super) fn normal(shape: &[usize], seed: u64) -> Tensor {
    Tensor::F32(TorchRng::new(seed).normal_array(shape))
}
