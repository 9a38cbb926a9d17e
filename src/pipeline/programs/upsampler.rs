//! Upsamplers: enlarge latents between two passes, in space or in time, and enlarge generated keyframes in space.

use ndarray::Array5;

use super::configs::{ModelConfigs, upsampler_of};
use super::{
    Build, Call, Component, Inputs, Network, Phase, PipelineError, ProgramDeclaration, ProgramKind, ProgramSpec,
    Result, SingleRun,
};
use crate::models::upsampler::{self, Upsampling};
use crate::pipeline::runner::{NetworkSizes, Runner};
use crate::request::{Shapes, UpsamplingStep, keyframe_step, upsampling_steps};

pub(super) const UPSAMPLER: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::Upsampler,
    name: "upsampler",
    help: "Latents to larger latents, between two passes",
    component: Component::LatentUpsampler,
    phase: Phase::Upsampler,
    runs: |run| run.upsamples(false),
    request: |run| run.upsamples(false).then_some(&run.first).ok_or("two stages with spatial upsampling between them"),
    network: |spec| network_of_run(spec, false),
    single_run: Some(SingleRun {
        help: "`latents` to larger `latents`, both un-normalised",
        scalars: &[],
        inputs: |given| given.only("latents", network),
        smallest: |configs, build| network(configs, [1, 0, 2, 4, 4], build),
    }),
};

pub(super) const FRAME_UPSAMPLER: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::FrameUpsampler,
    name: "frame_upsampler",
    help: "Latents to latents with twice as many frames, between two passes",
    component: Component::TemporalUpsampler,
    runs: |run| run.upsamples(true),
    request: |run| {
        run.upsamples(true)
            .then_some(&run.first)
            .ok_or("two stages with temporal upsampling (temporal_x2) between them")
    },
    network: |spec| network_of_run(spec, true),
    single_run: None,
    ..UPSAMPLER
};

pub(super) const KEYFRAME_UPSAMPLER: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::KeyframeUpsampler,
    name: "keyframe_upsampler",
    help: "Keyframes to larger keyframes, between two passes",
    runs: |run| run.keyframes,
    request: |run| run.keyframes.then_some(&run.first).ok_or("the pipeline dfr"),
    network: |spec| {
        let (from, to) = (&spec.shapes.video, Shapes::from_request(&spec.run.sizes, spec.run.last())?.video);
        let keyframes = spec.shapes.generated(&spec.request.conditions.video).len();
        let step = keyframe_step(keyframes.max(1), from, &to);
        step_network(&spec.run.configs, &step, [spec.batch(), from.channels], spec.build)
    },
    single_run: None,
    ..UPSAMPLER
};

/// Returns the program for un-normalised latents `[b, c, f, h, w]`.
fn network(configs: &ModelConfigs, [n, _, f, h, w]: [usize; 5], build: &Build) -> Result<Network> {
    Ok(upsampler::program(&configs.upsampler(Component::LatentUpsampler)?, [n, f, h, w], build)?)
}

/// Returns the program of the first temporal (if `in_time` is set) or spatial upsampling step between two passes.
fn network_of_run(spec: &ProgramSpec, in_time: bool) -> Result<Network> {
    let (from, to) = (&spec.shapes.video, Shapes::from_request(&spec.run.sizes, spec.run.last())?.video);
    let mut steps = upsampling_steps(&spec.run.upsample, from, &to).into_iter();
    let step = steps.find(|step| (step.upsampling == Upsampling::TemporalX2) == in_time);
    let step = step.ok_or_else(|| PipelineError::Bug("the request has no upsampling step for this program".into()))?;
    step_network(&spec.run.configs, &step, [spec.batch(), from.channels], spec.build)
}

/// Returns the program of an upsampling step, for `batch` videos whose latents have `channels` channels.
///
/// # Errors
/// Returns an error that quotes the upsampler's file if the kind of upsampling (axes and factor) or the output shape of
/// the upsampler is not the one that the step requires.
fn step_network(
    configs: &ModelConfigs,
    step: &UpsamplingStep,
    [batch, channels]: [usize; 2],
    build: &Build,
) -> Result<Network> {
    configs.check_upsampling(step.upsampling)?;
    let part = upsampler_of(step.upsampling);
    let c = configs.upsampler(part)?;
    let ([f, h, w], [to_f, to_h, to_w]) = (step.from, step.to);
    let fits = c.check_fit([channels, f, h, w], [channels, to_f, to_h, to_w]);
    fits.map_err(|why| configs.wrong_upsampler(part, &why))?;
    Ok(upsampler::program(&c, [batch, f, h, w], build)?)
}

impl Runner {
    /// Prepares an upsampling step, which maps un-normalised latents to upsampled `latents`. `program`: the spatial,
    /// temporal or keyframe upsampler. Fails if the model's upsampler does not upsample the axes by the factor that
    /// `step` requires.
    pub(crate) fn upsampler(
        &mut self,
        program: ProgramKind,
        latents: Array5<f32>,
        step: &UpsamplingStep,
    ) -> Result<Call<'static>> {
        let (b, c, ..) = latents.dim();
        let network = self.network(program, NetworkSizes::Upsampling(*step, [b, c]), |model, build| {
            step_network(&model.configs, step, [b, c], build)
        })?;
        self.call(program, &network, Inputs::default(), [("latents".into(), latents.into())])
    }
}
