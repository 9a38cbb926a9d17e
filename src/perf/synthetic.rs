//! Synthetic inputs of programs: real prompt tokens, and normally distributed values in place of embeddings and
//! latents. With them, each program runs without the programs that precede it in a request.

use ndarray::{Array3, s};

use crate::av::Av;
use crate::nn::Layout;
use crate::pipeline::Result;
use crate::pipeline::programs::build::ProgramKind;
use crate::pipeline::programs::call::Call;
use crate::pipeline::programs::denoise::PassSpec;
use crate::pipeline::programs::executor::{Executor, Inputs};
use crate::pipeline::runner::Runner;
use crate::pipeline::stages::batch::{Batch, DrawOrder, videos_at_once};
use crate::pipeline::stages::condition_encoder::PassTokens;
use crate::pipeline::stages::conditions::ConditionTokens;
use crate::pipeline::stages::denoise_loop::{CallNoise, DenoiseLoop};
use crate::request::{Condition, Content, ModelSizes, Request, Shapes};
use crate::runtime::{CompiledProgram, Outputs, ShardedTensor};
use crate::sampling::AnySampler;
use crate::sampling::denoise::DenoiseShape;
use crate::sampling::latents::VideoShape;
use crate::sampling::noise::TorchRng;
use crate::tensor::Tensor;

/// Returns the request of the pass that a denoising loop runs: for the temporal rounds, of their largest tile. `None`:
/// the request has no such pass.
pub(super) fn pass_request(request: &Request, kind: ProgramKind) -> Option<Request> {
    let (first, second) = request.passes();
    match kind {
        ProgramKind::Denoise => Some(first),
        ProgramKind::Refine => second,
        ProgramKind::Round => request.dfr.as_ref()?.largest_tile(&second?),
        _ => None,
    }
}

pub(super) struct SyntheticInputs<'a> {
    pub(crate) batch: Batch<'a>,
}

impl<'a> SyntheticInputs<'a> {
    pub(crate) fn new(request: &'a Request, layout: &Layout) -> Self {
        SyntheticInputs { batch: Batch { asked: std::slice::from_ref(request), size: videos_at_once(layout) } }
    }

    /// Returns the latent shapes of a pass and the shape of its denoising program.
    pub(crate) fn shape(&self, sizes: &ModelSizes, request: &Request) -> Result<(Shapes, DenoiseShape)> {
        let shapes = Shapes::from_request(sizes, request)?;
        let shape = request.denoise_shape(sizes, &shapes, self.batch.size);
        Ok((shapes, shape))
    }

    /// Returns the packed noise of a pass, including the tokens appended for conditions. If the pass has no video or no
    /// audio, that stream is zeros.
    fn start(&self, runner: &mut Runner, shapes: &Shapes) -> Result<Av<Array3<f32>>> {
        let sizes = &runner.model.sizes;
        let drawn = self.batch.noise().draw(&mut runner.executor, shapes, sizes, DrawOrder::default())?;
        drawn.start(shapes, sizes, self.batch.size)
    }

    /// Returns the packed noise of a pass without appended tokens.
    pub(crate) fn noise(&self, runner: &mut Runner, shapes: &Shapes) -> Result<Av<Array3<f32>>> {
        let mut start = self.start(runner, shapes)?;
        start.video = start.video.slice(s![.., ..shapes.own_tokens().video, ..]).to_owned();
        Ok(start)
    }

    /// Returns the encoded conditions of a pass. Latents of an earlier pass are zeros.
    fn conditions(&self, runner: &mut Runner, request: &Request, shapes: &Shapes) -> Result<Option<ConditionTokens>> {
        let sound = runner.input_sound(request)?;
        let (grid, channels) = (&runner.model.sizes.video_grid, runner.model.sizes.transformer.in_channels);
        let appended = |condition: &Condition| {
            let own = condition.appended(&shapes.video, grid.temporal_compression);
            Array3::zeros((1, own.map_or(0, |own| grid.tokens(&VideoShape { batch: 1, ..own })), channels))
        };
        let all = &request.conditions.video;
        let carried = all.iter().filter(|condition| matches!(condition.content, Content::Carried(_))).count();
        let keyframes = (carried > 0).then(|| Array3::zeros((1, carried * shapes.frame_tokens(), channels)));
        let follows = |condition: &&Condition| matches!(condition.content, Content::ReferenceLatents(_));
        let references: Vec<_> = all.iter().filter(follows).map(appended).collect();
        let tokens = PassTokens {
            sound: sound.as_ref().map(|sound| &sound.tokens),
            keyframes: keyframes.as_ref(),
            references: &references,
            ..PassTokens::default()
        };
        runner.encode_conditions(request, shapes, tokens)
    }

    /// Prepares a call of the program that computes the step-invariant inputs of the denoising loop.
    pub(crate) fn prepare(&self, runner: &mut Runner, request: &Request) -> Result<Call<'static>> {
        let (shapes, s) = self.shape(&runner.model.sizes, request)?;
        let seeded = s.text_channels.zip(Av { video: 2, audio: 3 });
        let text_contexts = seeded.map(|(channels, seed)| normal(&[s.batch, s.branches.len(), s.text, channels], seed));
        let conditions = self.conditions(runner, request, &shapes)?;
        let pass = PassSpec { request, shape: &s, shapes: &shapes, conditions: conditions.as_ref() };
        runner.prepare(ProgramKind::Prepare, pass, text_contexts)
    }

    /// Returns the denoising loop of a pass with its inputs.
    pub(crate) fn denoising(&self, runner: &mut Runner, request: &Request, kind: ProgramKind) -> Result<Denoising> {
        let prepared = self.prepare(runner, request)?.run(&runner.executor)?;
        let (shapes, shape) = self.shape(&runner.model.sizes, request)?;
        let conditions = self.conditions(runner, request, &shapes)?;
        let pass = PassSpec { request, shape: &shape, shapes: &shapes, conditions: conditions.as_ref() };
        let steps = runner.new_loop(kind, pass)?;
        let mut start = self.start(runner, &shapes)?;
        if let Some(conditions) = &conditions {
            conditions.give(start.as_mut(), self.batch.size);
            conditions.blend(start.as_mut());
        }
        let tokens = start.as_ref().map(|x| [x.dim().1, x.dim().2]);
        let seeds = self.batch.rows().map(|request| request.seed).collect();
        Ok(Denoising { prepared, steps, start: start.map(Tensor::from), tokens, sampler: shape.sampler, seeds })
    }
}

/// A denoising loop with its inputs; it can run any number of times.
pub(super) struct Denoising {
    prepared: Outputs,
    steps: DenoiseLoop,
    start: Av<Tensor>,
    tokens: Av<[usize; 2]>,
    sampler: AnySampler,
    seeds: Vec<u64>,
}

impl Denoising {
    /// Returns whether one call can run several steps. If the sampler draws noise, a call runs only one step.
    pub(crate) fn takes_all(&self) -> bool {
        self.sampler.noises() == 0
    }

    pub(crate) fn program(&self) -> &CompiledProgram {
        self.steps.program()
    }

    /// Returns the inputs, except for the latents, of a call that runs the first `steps` steps. If the sampler draws
    /// noise, the call runs only the first step.
    pub(crate) fn steps(&self, executor: &Executor, steps: usize) -> Result<Inputs<'static>> {
        let evaluations = if self.takes_all() { steps } else { self.sampler.noises() };
        let mut noise = CallNoise::new(&*self.sampler, self.seeds.iter().copied(), self.tokens);
        self.steps.steps(executor, 0..evaluations, noise.draw())
    }

    pub(crate) fn start(&self, executor: &Executor) -> Result<Vec<ShardedTensor>> {
        let latents = self.steps.start(executor, &self.start)?;
        wait(&latents)?;
        Ok(latents)
    }

    pub(crate) fn run(
        &self,
        executor: &Executor,
        range: &Inputs,
        latents: Vec<ShardedTensor>,
    ) -> Result<Vec<ShardedTensor>> {
        let latents = self.steps.run(executor, &self.prepared, range, latents)?;
        wait(&latents)?;
        Ok(latents)
    }
}

fn wait(latents: &[ShardedTensor]) -> Result<()> {
    Ok(latents.iter().try_for_each(ShardedTensor::wait)?)
}

/// Returns normally distributed values, which replace the result of an earlier program.
pub(super) fn normal(shape: &[usize], seed: u64) -> Tensor {
    Tensor::F32(TorchRng::new(seed).normal_array(shape))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::tests::request_with;

    #[test]
    fn loops_of_dfr_run_both_stages_and_the_largest_tile() {
        let set = ["pipeline=dfr", "request.width=128", "request.height=64", "request.num_frames=17"];
        let frames = |more: &[&str], kind: ProgramKind| {
            let request = request_with(&[&set[..], more].concat().into_iter().map(String::from).collect::<Vec<_>>());
            pass_request(&request, kind).map(|own| (own.num_frames, own.width))
        };
        let (rounds, all) =
            (["dfr.temporal_rounds=2"], [ProgramKind::Denoise, ProgramKind::Refine, ProgramKind::Round]);
        assert_eq!(all.map(|kind| frames(&rounds, kind)), [Some((25, 64)), Some((25, 128)), Some((97, 128))]);
        assert_eq!(all.map(|kind| frames(&[], kind)), [Some((25, 64)), Some((25, 128)), None]);
        assert_eq!(frames(&rounds, ProgramKind::Vocoder), None);
    }
}
