//! Denoising loop: one program for each pass, and one for the temporal rounds.

use std::rc::Rc;

use half::bf16;

use super::{Component, Inputs, Phase, PipelineError, ProgramDeclaration, ProgramKind, Programs, Result};
use crate::av::Av;
use crate::hlo::DType;
use crate::models::transformer::tables;
use crate::pipeline::runner::{NetworkSizes, Runner, SharedLoop};
use crate::pipeline::stages::conditions::{ConditionTokens, appended_coords, appended_sound_coords};
use crate::pipeline::stages::denoise_loop::{DenoiseLoop, evaluations, step_cache_inputs};
use crate::request::{Request, Shapes};
use crate::sampling::denoise::{self, DenoiseShape};

pub(super) const DENOISE: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::Denoise,
    name: "denoise",
    help: "Denoising loop of the first pass",
    component: Component::Transformer,
    phase: Phase::Denoise,
    runs: |_| true,
    request: |run| Ok(&run.first),
    network: |spec| {
        let build = spec.run.configs.component_build(Component::Transformer, spec.build);
        Ok(denoise::denoise(&spec.run.sizes.transformer, &spec.shape, &build)?)
    },
    single_run: None,
};

pub(super) const REFINE: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::Refine,
    name: "refine",
    help: "Denoising loop of the second pass",
    phase: Phase::Refine,
    runs: |run| run.second.is_some(),
    request: Programs::second_pass,
    ..DENOISE
};

pub(super) const ROUND: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::Round,
    name: "round",
    help: "Denoising loop of a temporal round, for its largest tile",
    phase: Phase::Round,
    runs: |run| run.rounds.is_some(),
    request: Programs::largest_tile,
    ..DENOISE
};

/// A pass (run of the denoising loop) of a request, with the shapes and conditions that its programs depend on.
#[derive(Clone, Copy)]
pub(crate) struct PassSpec<'a> {
    /// The request with the sizes and steps of this pass.
    pub(crate) request: &'a Request,
    /// Shape of the denoising programs.
    pub(crate) shape: &'a DenoiseShape,
    /// Shapes of the latents and tokens.
    pub(crate) shapes: &'a Shapes,
    pub(crate) conditions: Option<&'a ConditionTokens>,
}

impl Runner {
    /// Prepares the denoising loop of a pass, and uploads its constant inputs: RoPE tables, noise levels, conditions
    /// and guidance scales.
    pub(crate) fn new_loop(&mut self, program: ProgramKind, pass: PassSpec) -> Result<DenoiseLoop> {
        let PassSpec { request, shape, shapes, conditions } = pass;
        let network = self.network(program, NetworkSizes::Denoise(shape.clone().into()), |model, build| {
            let build = model.configs.component_build(Component::Transformer, build);
            Ok(denoise::denoise(&model.sizes.transformer, shape, &build)?)
        })?;
        let c = &self.model.sizes.transformer;
        let mut coords = shapes.coords(&self.model.sizes, request.position_rate());
        let mut dtype = request.positions;
        if shapes.appended.audio > 0 {
            let behind = appended_sound_coords(c, shapes.appended.audio);
            coords.audio = ndarray::concatenate(ndarray::Axis(2), &[coords.audio.view(), behind.view()])
                .map_err(|e| PipelineError::Input(e.to_string()))?;
        }
        if shapes.appended.video > 0 {
            // Appended tokens have f32 positions. For bf16, the bounds of the video's own tokens are rounded to bf16;
            // then the tables of all tokens are computed in f32.
            if dtype == DType::BF16 {
                coords.video.mapv_inplace(|x| bf16::from_f32(x).to_f32());
            }
            dtype = DType::F32;
            let behind = appended_coords(c, shapes, &request.conditions.video, request.position_rate());
            coords.video = ndarray::concatenate(ndarray::Axis(2), &[coords.video.view(), behind.view()])
                .map_err(|e| PipelineError::Input(e.to_string()))?;
        }
        let tables = tables::tables(c, &coords, dtype);
        let mut given = tables::host_inputs(c, tables);
        given.extend(evaluations(request)?);
        given.extend(step_cache_inputs(request));
        given.extend(conditions.into_iter().flat_map(|tokens| tokens.inputs(shape.batch)));
        if shape.keyframes {
            given.push((
                "keyframes.video".into(),
                shapes.single_frames(&request.conditions.video, request.first_frame_marker).into(),
            ));
        }
        let guidance = request.guidance_tables();
        given.push(("scales".into(), guidance.scales.into()));
        given.extend(guidance.sets.map(|sets| ("branch_sets".into(), sets.into())));
        let call = self.call(program, &network, Inputs::default(), given)?;
        let carried = shape.carried().flat_map(|kind| Av::NAMES.map(|stream| format!("{kind}.{stream}")));
        let shared = shape.shared().iter().map(|name| (*name).to_string());
        Ok(DenoiseLoop { network, call, carried: carried.chain(shared).collect() })
    }

    /// Returns the denoising loop of a pass. Reuses the loop of an earlier request if the two requests differ only in
    /// prompts and seed, the pass has no conditions, and all parameters stay on the devices.
    pub(crate) fn denoise_loop(&mut self, program: ProgramKind, pass: PassSpec) -> Result<Rc<DenoiseLoop>> {
        // A loop with conditions is not reused: the files of the conditions may have changed.
        let reusable = pass.conditions.is_none() && self.executor.keeps_all();
        let negative = |r: &Request| Request { negative_prompt: String::new(), ..r.clone() };
        let added_loras = self.executor.added_loras(program);
        let alike = |known: &SharedLoop| {
            let is_same_program = known.shape == *pass.shape && known.added_loras == added_loras;
            is_same_program && negative(&known.request).can_batch_with(&negative(pass.request))
        };
        let known = self.loops.get(&program).filter(|known| reusable && alike(known));
        if let Some(steps_loop) = known.map(|known| known.steps_loop.clone()) {
            steps_loop.load(&mut self.executor, program.name())?;
            return Ok(steps_loop);
        }
        let steps_loop = Rc::new(self.new_loop(program, pass)?);
        if reusable {
            let (request, shape) = (pass.request.clone(), pass.shape.clone());
            self.loops.insert(program, SharedLoop { request, shape, added_loras, steps_loop: steps_loop.clone() });
        }
        Ok(steps_loop)
    }
}
