//! The clean predictions of a step: the transformer on all branches, then guidance.

use super::MAX_STEPS;
use super::condition::ConditionInputs;
use super::guidance::{Branch, Counted, combine};
use super::shape::{DenoiseShape, Latents};
use crate::av::Av;
use crate::hlo::{DType, Type, Value};
use crate::models::transformer::{
    ForwardInputs, Isolation, Perturbation, StreamForward, StreamInputs, StreamModulation, TextContext,
    TransformerConfig, at_noise_level, forward, tables,
};
use crate::nn::{Axis, Params, Rope, padding_mask};

/// Inputs of the streams' conditions, where they have such.
fn conditions(p: &Params, shape: &DenoiseShape, latents: Av<Latents>) -> Av<Option<ConditionInputs>> {
    let Some(levels) = shape.levels_input(p) else { return Av::default() };
    latents.zip(shape.conditioned).map(|(Latents { name, content, axes }, conditioned)| {
        conditioned.then(|| {
            let index = p.input(&format!("level.{name}"), Type::new(DType::I32, &content[..2]), &axes[..2]);
            let clean = p.input(&format!("clean.{name}"), Type::new(DType::F32, content), &axes);
            let rows = levels.reshape(vec![1, shape.levels, 1]).broadcast_to(&[index.dim(0), shape.levels, 1]);
            ConditionInputs { denoise_mask: at_noise_level(&rows, Some(&index)), clean, noise_level_index: index }
        })
    })
}

/// The transformer under guidance, for every step of the loop.
pub(super) struct GuidedTransformer<'a> {
    p: &'a Params,
    c: &'a TransformerConfig,
    shape: &'a DenoiseShape,
    /// Branches, padding included.
    branches: usize,
    /// Streams that there are.
    pub(crate) streams: Av<Option<GuidedStream>>,
    keyframes: Option<Value>,
    perturbation: Option<Perturbation>,
    isolation: Isolation,
}

/// One stream's step-invariant inputs.
pub(super) struct GuidedStream {
    sequence: Axis,
    /// Latent tokens, padding excluded.
    tokens: usize,
    /// Guidance scales `[2, 4]`, of which this stream's are row `row`.
    scales: Value,
    row: usize,
    pub(crate) condition: Option<ConditionInputs>,
    counted: Counted,
    rope: Rope,
    cross_rope: Rope,
    /// Modulation of every step, behind a leading dimension.
    modulation: StreamModulation,
    context: TextContext,
}

impl<'a> GuidedTransformer<'a> {
    /// Declares the loop's step-invariant inputs; `carried` are the latents.
    pub(crate) fn input(
        p: &'a Params,
        c: &'a TransformerConfig,
        shape: &'a DenoiseShape,
        scales: Value,
        latents: Av<Latents>,
        carried: Av<&Value>,
    ) -> Self {
        let condition = conditions(p, shape, latents);
        let branches = Type::new(DType::F32, [shape.branches.len()]);
        let branches = p.layout().padded(&p.activation("branches"), &branches, &[Axis::Branch]).dims[0];
        let videos = carried.video.dim(0);
        let counted = latents.zip(carried).map(|(l, x)| Counted::new(p.builder(), x, l.content));
        let keyframes = shape.keyframes.then(|| {
            let ty = Type::new(DType::F32, [1, shape.tokens.video]);
            p.input("keyframes.video", ty, &[Axis::Replicated, Axis::VideoSequence])
        });
        let present = shape.present();
        let [rope, cross_rope] =
            tables::inputs(p, c, 1, shape.tokens.zip(present).map(|(n, present)| present.then_some(n)));
        let modulation = c.streams().zip(Av::NAMES).zip(shape.conditioned.zip(present));
        let modulation = modulation.map(|((s, name), (conditioned, present))| {
            let part = || {
                StreamModulation::new(c, &s, |part, dims| {
                    let levels = shape.levels_of(part, conditioned);
                    let ty = Type::new(p.dtype(), [&[MAX_STEPS + 1, levels], dims].concat());
                    let axes = vec![Axis::Replicated; ty.rank()];
                    p.input(&format!("modulation.{name}.{part}"), ty, &axes)
                })
            };
            present.then(part)
        });
        let context = c.streams().zip(Av::NAMES).zip(present);
        let rows = [videos * branches, shape.text];
        let context = context.map(|((s, name), present)| present.then(|| TextContext::input(p, c, &s, name, rows)));
        let (perturbation, isolation) = branch_masks(p, shape, branches, videos);
        let own = latents.zip(Av { video: 0, audio: 1 }).zip(condition.zip(counted));
        let streams = own.zip(rope.zip(cross_rope)).zip(modulation.zip(context));
        let streams = streams.map(|((((l, row), (condition, counted)), (rope, cross_rope)), (modulation, context))| {
            let (sequence, tokens, scales) = (l.axes[1], l.content[1], scales.clone());
            let (rope, cross_rope, modulation, context) = (rope?, cross_rope?, modulation?, context?);
            let own = GuidedStream {
                sequence,
                tokens,
                scales,
                row,
                condition,
                counted,
                rope,
                cross_rope,
                modulation,
                context,
            };
            Some(own)
        });
        GuidedTransformer { p, c, shape, branches, streams, keyframes, perturbation, isolation }
    }

    /// The guided clean predictions at the latents of a step.
    pub(crate) fn predict(&self, step: &Value, sigma: &Value, latents: Av<&Value>) -> Av<Option<Value>> {
        let streams = self.streams.as_ref().map(Option::as_ref).zip(latents);
        let inputs = streams.map(|(s, x)| Some(self.stream_inputs(s?, x, step)));
        let tokens = streams.map(|(s, x)| Some(self.of_rows(&x.to(self.p.dtype()), s?.sequence)));
        let all = streams.zip(tokens.as_ref().zip(inputs.as_ref())).map(|((s, _), (tokens, inputs))| {
            Some(StreamForward { tokens: tokens.as_ref()?, context: &s?.context, inputs: inputs.as_ref()? })
        });
        let inputs = ForwardInputs {
            streams: all,
            keyframes: self.keyframes.as_ref(),
            perturbation: self.perturbation.as_ref(),
            isolation: &self.isolation,
        };
        let velocity = forward(self.p, self.c, &inputs);
        let _scope = self.p.builder().scope("sampler");
        streams.zip(velocity).map(|((s, x), velocity)| Some(self.guided(s?, x, &velocity?, sigma)))
    }

    fn stream_inputs(&self, s: &GuidedStream, latents: &Value, step: &Value) -> StreamInputs {
        let b = self.p.builder();
        StreamInputs {
            modulation: s.modulation.map(|table| table.index(step).unsqueeze(0)),
            noise_level_index: s.condition.as_ref().map(|c| self.of_rows(&c.noise_level_index, s.sequence)),
            rope: s.rope.clone(),
            cross_rope: s.cross_rope.clone(),
            text_mask: padding_mask(b, s.context.tokens(), self.shape.text),
            self_mask: None,
            padding_mask: padding_mask(b, latents.dim(1), s.tokens),
        }
    }

    /// `[b, n, …]` of each video as its branches see it, `[rows, n, …]`.
    fn of_rows(&self, x: &Value, sequence: Axis) -> Value {
        let (videos, rest) = (x.dim(0), &x.dims()[1..]);
        let each = x.unsqueeze(1).broadcast_to(&[&[videos, self.branches], rest].concat());
        let axes = [&[Axis::Batch, Axis::Branch, sequence][..], &vec![Axis::Replicated; rest.len() - 1]].concat();
        let each = self.p.place("branches", &each, &axes);
        let x = each.reshape([&[videos * self.branches], rest].concat());
        self.p.place("rows", &x, &[&[Axis::CfgBatch][..], &axes[2..]].concat())
    }

    /// A stream's guided clean prediction from the branches' velocities.
    fn guided(&self, s: &GuidedStream, x: &Value, velocity: &Value, sigma: &Value) -> Value {
        // Each branch's clean prediction is formed where its velocity is, then gathered without any weight.
        let dims = vec![x.dim(0), self.branches, x.dim(1), x.dim(2)];
        let placed = |x: &Value, branch: Axis| {
            self.p.place("predictions", x, &[Axis::Batch, branch, s.sequence, Axis::Replicated])
        };
        let velocity = placed(&velocity.to(DType::F32).reshape(dims), Axis::Branch);
        let step = match &s.condition {
            None => velocity * sigma,
            Some(condition) => velocity * (&condition.denoise_mask * sigma).unsqueeze(1),
        };
        let predictions = placed(&(x.unsqueeze(1) - step), Axis::Branch);
        let everywhere = placed(&predictions, Axis::Replicated);
        let branches = &self.shape.branches;
        let predictions: Vec<Value> = (0..branches.len()).map(|k| everywhere.at(1, k)).collect();
        let clean = combine(branches, &predictions, &s.scales.at(0, s.row), self.shape.rescale, &s.counted);
        s.condition.as_ref().map_or(clean.clone(), |condition| condition.apply(&clean))
    }
}

/// Masks by row of the branches that differ in more than their text, for `videos` times `branches` rows.
fn branch_masks(p: &Params, shape: &DenoiseShape, branches: usize, videos: usize) -> (Option<Perturbation>, Isolation) {
    let mask = |branch: Branch, dims: &[usize]| {
        let each = (0..branches).map(|i| i32::from(shape.branches.get(i) != Some(&branch)));
        let rows: Vec<i32> = (0..videos).flat_map(|_| each.clone()).collect();
        let dims: Vec<usize> = std::iter::once(rows.len()).chain(dims.iter().copied()).collect();
        p.builder().vector_i32(&rows).to(DType::F32).reshape(dims)
    };
    let perturbation = shape
        .branches
        .contains(&Branch::Perturbed)
        .then(|| Perturbation { stg_mask: mask(Branch::Perturbed, &[1, 1, 1]), layers: shape.stg_blocks.clone() });
    let isolation = match shape.branches.contains(&Branch::Isolated) {
        true => Isolation::Masked(mask(Branch::Isolated, &[1, 1])),
        false => Isolation::None,
    };
    (perturbation, isolation)
}
