//! Programs with inputs of their own, which follow from the request alone (the prompts' tokens; normal numbers in place
//! of embeddings and latents), so that any one can run without those before it.

use ndarray::Array3;

use super::batch::Batch;
use super::calls::{self, Call, Loop};
use super::error::Result;
use super::models::Models;
use super::programs::ProgramKind;
use super::stages::{Inputs, Stages};
use super::text_to_video::{Request, Shapes, fixed, pack};
use crate::nn::Build;
use crate::runtime::{Distributed, Executable, Outputs};
use crate::sampling::denoise::{DenoiseShape, Sampler};
use crate::sampling::noise::TorchRng;
use crate::sampling::res2s::{self, StepNoise};
use crate::tensor::Tensor;

/// A request whose programs run one without the other.
pub(super) struct Alone<'a> {
    models: &'a Models,
    build: Build,
    /// The request as a batch.
    pub batch: Batch<'a>,
}

impl<'a> Alone<'a> {
    pub fn new(models: &'a Models, request: &'a Request, build: &Build) -> Result<Self> {
        let batch = Batch::new(std::slice::from_ref(request), &build.layout)?;
        Ok(Alone { models, build: build.clone(), batch })
    }

    /// Latents and program of a stage.
    pub fn shape(&self, request: &Request) -> Result<(Shapes, DenoiseShape)> {
        let shapes = Shapes::of(&self.models.sizes, request)?;
        let shape = request.denoise_shape(&self.models.sizes, &shapes, self.batch.size());
        Ok((shapes, shape))
    }

    /// Noise of a stage's size as its tokens.
    pub fn noise(&self, stages: &mut Stages, shapes: &Shapes) -> Result<[Array3<f32>; 2]> {
        let drawn = self.batch.noise().draw(stages, shapes, &self.models.sizes)?;
        pack(self.models, &fixed(drawn.video)?, &fixed(drawn.audio)?)
    }

    /// The call that makes what a stage's loop reads.
    pub fn prepare(&self, stages: &mut Stages, request: &Request) -> Result<Call<'static>> {
        let (shapes, s) = self.shape(request)?;
        let channels = [s.text_channels.video, s.text_channels.audio];
        let contexts = [0, 1].map(|i| normal(&[s.batch, s.branches.len(), s.text, channels[i]], 2 + i as u64));
        calls::prepare(self.models, stages, "prepare", (request, &s, &shapes, None), contexts, &self.build)
    }

    /// The loop of a stage with all that it reads.
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

/// A denoising loop that can run any number of times.
pub(super) struct Denoising {
    prepared: Outputs,
    steps: Loop,
    start: [Tensor; 2],
    /// Tokens and channels of video and audio.
    tokens: [[usize; 2]; 2],
    sampler: Sampler,
    videos: usize,
}

impl Denoising {
    /// Whether one call takes several steps: the second-order sampler, whose noise differs from step to step, takes one.
    pub fn takes_all(&self) -> bool {
        self.sampler == Sampler::Euler
    }

    /// The compiled loop.
    pub fn program(&self) -> &Executable {
        self.steps.program()
    }

    /// What a call of the first `steps` steps reads beside the latents; of the first step where it takes no more.
    pub fn steps(&self, stages: &Stages, steps: usize) -> Result<Inputs<'static>> {
        let (noise, evaluations) = match self.sampler {
            Sampler::Euler => (None, steps),
            Sampler::Res2s => (Some(StepNoise::default().step(self.tokens[0], self.tokens[1])), res2s::NOISES),
        };
        self.steps.steps(stages, 0, evaluations, noise, self.videos)
    }

    /// Latents to start from, on the devices.
    pub fn start(&self, stages: &Stages) -> Result<Vec<Distributed>> {
        let latents = self.steps.start(stages, &self.start)?;
        wait(&latents)?;
        Ok(latents)
    }

    /// A call, to its end.
    pub fn run(&self, stages: &Stages, range: &Inputs, latents: Vec<Distributed>) -> Result<Vec<Distributed>> {
        let latents = self.steps.run(stages, &self.prepared, range, latents)?;
        wait(&latents)?;
        Ok(latents)
    }
}

fn wait(latents: &[Distributed]) -> Result<()> {
    Ok(latents.iter().try_for_each(Distributed::wait)?)
}

/// Normal numbers in place of what an earlier program would give.
pub(super) fn normal(shape: &[usize], seed: u64) -> Tensor {
    Tensor::F32(TorchRng::new(seed).normal_array(shape))
}
