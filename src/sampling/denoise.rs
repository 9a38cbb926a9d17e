//! The denoising loop: one program for any number of steps.
//!
//! [`prepare`] runs once a request: what the transformer needs and no step changes (text keys and values, the
//! modulation of every noise level). [`denoise`] is one `while` over the steps; the step range, the noise levels and
//! the guidance scales are inputs, so that no change of them compiles anything, and a run in chunks gives the same
//! bits as a whole one.

use crate::av::Av;
use crate::hlo::{DType, Result, Type, Value};
use crate::models::Network;
use crate::models::attention::Rope;
use crate::models::transformer::{
    COMPONENT, CrossTimestep, ForwardInputs, Isolation, Levels, Perturbation, StreamInputs, StreamModulation,
    TextContext, TransformerConfig, at_noise_level, context_outputs, forward, modulation, project_text, tables,
};
use crate::nn::{Axis, Build, Params, padding_mask};
use crate::sampling::guidance::{Branch, Counted, RescaleScope, combine};
use crate::sampling::res2s::Res2s;

/// The most steps a request may have: the rows of the tables.
pub const MAX_STEPS: usize = 256;

/// What fixes the two programs; everything else is their input.
#[derive(Clone, Debug, PartialEq)]
pub struct DenoiseShape {
    /// Videos denoised together.
    pub batch: usize,
    /// Predictions a step, the conditional one first.
    pub branches: Vec<Branch>,
    /// Latent tokens.
    pub tokens: Av<usize>,
    /// Text tokens.
    pub text: usize,
    /// Channels of the text embeddings.
    pub text_channels: Av<usize>,
    /// Layers that the perturbed branch perturbs.
    pub stg_blocks: Vec<usize>,
    /// Standard deviations of the rescale term.
    pub rescale: RescaleScope,
    /// Number of noise levels that video tokens have in a step: the step's own, and one for each strength of a condition.
    pub levels: usize,
    /// Which noise level the attention between the streams sees.
    pub cross: CrossTimestep,
    /// The integrator.
    pub sampler: Sampler,
}

/// How a step is taken from the clean prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Sampler {
    /// First order: one evaluation a step.
    #[default]
    Euler,
    /// [`res2s`](super::res2s): two evaluations a step and a last one.
    Res2s,
}

impl Sampler {
    /// Evaluations of the transformer for a number of steps.
    pub fn evaluations(self, steps: usize) -> usize {
        match self {
            Sampler::Euler => steps,
            Sampler::Res2s => 2 * steps + 1,
        }
    }

    /// What the loop carries of each stream, by name.
    pub fn carried(self) -> &'static [&'static str] {
        match self {
            Sampler::Euler => &["latents"],
            Sampler::Res2s => &["latents", "anchor", "first"],
        }
    }
}

impl DenoiseShape {
    /// One video by Euler's steps, nothing perturbed and nothing conditioned.
    pub fn plain(branches: Vec<Branch>, tokens: [usize; 2], text: usize, text_channels: [usize; 2]) -> Self {
        DenoiseShape {
            batch: 1,
            branches,
            tokens: tokens.into(),
            text,
            text_channels: text_channels.into(),
            stg_blocks: Vec::new(),
            rescale: RescaleScope::PerSample,
            levels: 1,
            cross: CrossTimestep::Own,
            sampler: Sampler::Euler,
        }
    }

    /// Levels that a part of the video's modulation has.
    fn levels_of(&self, part: &str) -> usize {
        let own = match part {
            "cross" => self.cross != CrossTimestep::Cross,
            "gate" => self.cross == CrossTimestep::Own,
            "prompt" => false,
            _ => true,
        };
        if own { self.levels } else { 1 }
    }
}

/// The program that runs once a request.
///
/// Inputs, f32: `text.video`, `text.audio` `[videos, branches, t, channels]`, `sigmas [257]`, and `levels [k]` where there
/// are several: the parts of a step's noise level that video tokens have. Outputs:
/// `modulation.<stream>.<part>` `[257, 1 or k, …]`, and the text context as the loop reads it ([`context_outputs`]). Rows
/// are videos times branches, both padded to what the mesh divides.
///
/// # Errors
/// The first mistake made while building.
pub fn prepare(c: &TransformerConfig, shape: &DenoiseShape, build: &Build) -> Result<Network> {
    let build = &build.of_branches(shape.branches.len());
    let p = Params::new("prepare", COMPONENT, build);
    let context = c.streams().zip(Av::NAMES).zip(shape.text_channels).map(|((s, name), channels)| {
        let ty = Type::new(DType::F32, [shape.batch, shape.branches.len(), shape.text, channels]);
        let axes = [Axis::Batch, Axis::Branch, Axis::TextSequence, Axis::Replicated];
        let text_embeds = p.input(&format!("text.{name}"), ty, &axes).to(build.dtype);
        let [videos, branches, tokens, channels] = [0, 1, 2, 3].map(|axis| text_embeds.dim(axis));
        let rows = text_embeds.reshape(vec![videos * branches, tokens, channels]);
        let rows = p.place("text", &rows, &[Axis::CfgBatch, Axis::TextSequence, Axis::Replicated]);
        project_text(&p, c, &s, &rows)
    });
    let sigmas = p.input("sigmas", Type::new(DType::F32, vec![MAX_STEPS + 1]), &[Axis::Replicated]);
    // All levels as one row of tokens: the embedding network runs once.
    let timestep = &sigmas * c.timestep_scale_multiplier;
    let scalar = timestep.unsqueeze(0);
    let own = match levels_input(&p, shape) {
        None => scalar.clone(),
        Some(levels) => {
            let each = (sigmas.unsqueeze(1) * levels.unsqueeze(0)) * c.timestep_scale_multiplier;
            each.reshape(vec![1, each.dim(0) * each.dim(1)])
        }
    };
    let levels = Av { video: &own, audio: &scalar }.map(|timestep| Levels { timestep, sigma: &scalar });
    let modulation = modulation(&p, c, levels, shape.cross);

    // The loop's inputs are placed as it reads them.
    let mut results = Vec::new();
    for (name, modulation) in Av::NAMES.zip(modulation.as_ref()) {
        for (part, value) in modulation.parts() {
            let (levels, rest) = (value.dim(1) / (MAX_STEPS + 1), &value.dims()[2..]);
            let table = value.reshape([&[MAX_STEPS + 1, levels], rest].concat());
            let axes = vec![Axis::Replicated; table.rank()];
            results.push(p.output(&format!("modulation.{name}.{part}"), &table, &axes, table.dims()));
        }
    }
    results.extend(context_outputs(&p, c, context.as_ref()));
    Network::finish(&p, results)
}

fn levels_input(p: &Params, shape: &DenoiseShape) -> Option<Value> {
    (shape.levels > 1).then(|| p.input("levels", Type::new(DType::F32, [shape.levels]), &[Axis::Replicated]))
}

/// Name, size and axes of a stream's latents `[b, n, c]`.
#[derive(Clone, Copy)]
pub(super) struct Latents {
    pub name: &'static str,
    pub content: [usize; 3],
    pub axes: [Axis; 3],
}

/// Video tokens with clean latents of their own.
struct Condition {
    /// Part of the step's noise level that each token has, `[b, n, 1]`, f32.
    denoise_mask: Value,
    /// The tokens where the mask is 0, `[b, n, c]`, f32.
    clean: Value,
    /// Index of the tokens' noise level, `[b, n]`, i32.
    noise_level_index: Value,
}

impl Condition {
    fn input(p: &Params, shape: &DenoiseShape, latents: &Latents) -> Option<Self> {
        let levels = levels_input(p, shape)?;
        let (content, axes) = (latents.content, &latents.axes);
        let index = p.input("level.video", Type::new(DType::I32, &content[..2]), &axes[..2]);
        let clean = p.input("clean.video", Type::new(DType::F32, content), axes);
        let rows = levels.reshape(vec![1, shape.levels, 1]).broadcast_to(&[index.dim(0), shape.levels, 1]);
        Some(Condition { denoise_mask: at_noise_level(&rows, Some(&index)), clean, noise_level_index: index })
    }

    /// `x` with the clean latents in their place.
    fn apply(&self, x: &Value) -> Value {
        x * &self.denoise_mask + &self.clean * (self.denoise_mask.like(1.0) - &self.denoise_mask)
    }
}

/// The denoising loop.
///
/// Inputs: `begin`, `end` (i32, evaluations), `sigmas [257]` (of each evaluation), `scales [2, 4]` (video, audio: cfg, stg,
/// modality, rescale), `latents.video [b, n, c]` and `latents.audio [b, m, c]` (f32, donated), the RoPE tables and
/// [`prepare`]'s outputs. Outputs: `latents.video`, `latents.audio` after the evaluations `begin..end`.
///
/// With several levels: `levels [k]`, `level.video [b, n]` (i32) and `clean.video [b, n, c]`: conditioned tokens have a
/// part of the noise and come closer to the clean latents after each step (official code: the clean prediction of a token
/// is formed with its own noise level, then blended).
///
/// With [`Sampler::Res2s`]: `coefficients [257, 9]` and `noise.<stream> [NOISES, b, n, c]`
/// ([`res2s`](super::res2s)), the noise of evaluations `begin..`; `anchor.<stream>`, `first.<stream>` are carried as the
/// latents are.
///
/// # Errors
/// The first mistake made while building.
pub fn denoise(c: &TransformerConfig, shape: &DenoiseShape, build: &Build) -> Result<Network> {
    let build = &build.of_branches(shape.branches.len());
    let p = Params::new("denoise", COMPONENT, build);
    let b = p.builder().clone();
    let scalar = |name: &str| p.input(name, Type::scalar(DType::I32), &[]);
    let (begin, end) = (scalar("begin"), scalar("end"));
    let sigmas = p.input("sigmas", Type::new(DType::F32, vec![MAX_STEPS + 1]), &[Axis::Replicated]);
    let scales = p.input("scales", Type::new(DType::F32, vec![2, 4]), &[Axis::Replicated; 2]);
    let latents = c.streams().zip(Av::NAMES).zip(shape.tokens).map(|((s, name), tokens)| Latents {
        name,
        content: [shape.batch, tokens, s.in_channels],
        axes: [Axis::Batch, s.sequence, Axis::Replicated],
    });
    let kinds = shape.sampler.carried();
    let input =
        |kind: &str, l: Latents| p.input(&format!("{kind}.{}", l.name), Type::new(DType::F32, l.content), &l.axes);
    let carried: Vec<Value> = kinds.iter().flat_map(|kind| latents.map(|l| input(kind, l))).collect();
    let res2s = (shape.sampler == Sampler::Res2s).then(|| Res2s::input(&p, latents));
    let model = Model::input(&p, c, shape, scales, latents, [&carried[0], &carried[1]].into());

    let done = b.for_loop(&begin, &end, &carried, |step, carried| {
        let sigma = sigmas.index(step);
        let state = |kind: usize| Av { video: &carried[2 * kind], audio: &carried[2 * kind + 1] };
        let clean = model.predict(step, &sigma, state(0));
        let _scope = b.scope("euler");
        let placed = |l: Latents, x: &Value| p.place("latents", x, &l.axes);
        let streams = latents.zip(clean.as_ref());
        let Some(res2s) = &res2s else {
            let next = sigmas.index(&(step + 1.0)) - &sigma;
            let euler = |((l, clean), x): ((Latents, &Value), &Value)| placed(l, &(x + (x - clean) / &sigma * &next));
            return streams.zip(state(0)).map(euler).into_iter().collect();
        };
        let each = model.streams.as_ref().zip(res2s.noise.as_ref()).zip(clean.as_ref());
        let each = each.zip(state(0).zip(state(1)).zip(state(2))).map(|(((s, noise), clean), ((x, anchor), first))| {
            let conditioned = |x: &Value| s.condition.as_ref().map(|condition| condition.apply(x));
            res2s.step(noise, step, &begin, [x, anchor, first], clean, conditioned)
        });
        (0..kinds.len()).flat_map(|kind| latents.zip(each.as_ref()).map(|(l, next)| placed(l, &next[kind]))).collect()
    });
    let mut results = Vec::new();
    let names = kinds.iter().flat_map(|kind| latents.map(|l| (l, format!("{kind}.{}", l.name))));
    for ((l, name), x) in names.zip(&done) {
        b.donate(&name, results.len());
        results.push(p.output(&name, x, &l.axes, &l.content));
    }
    Network::finish(&p, results)
}

/// The guided transformer in the loop.
struct Model<'a> {
    p: &'a Params,
    c: &'a TransformerConfig,
    shape: &'a DenoiseShape,
    /// Branches, padding included.
    branches: usize,
    streams: Av<ModelStream>,
    perturbation: Option<Perturbation>,
    isolation: Isolation,
}

/// One stream's step-invariant inputs.
struct ModelStream {
    sequence: Axis,
    /// Latent tokens, padding excluded.
    tokens: usize,
    /// Guidance scales of both streams, of which this one's are row `row`.
    scales: Value,
    row: usize,
    condition: Option<Condition>,
    counted: Counted,
    rope: Rope,
    cross_rope: Rope,
    /// Modulation of every step, behind a leading dimension.
    modulation: StreamModulation,
    context: TextContext,
}

impl<'a> Model<'a> {
    fn input(
        p: &'a Params,
        c: &'a TransformerConfig,
        shape: &'a DenoiseShape,
        scales: Value,
        latents: Av<Latents>,
        carried: Av<&Value>,
    ) -> Self {
        let condition = Av { video: Condition::input(p, shape, &latents.video), audio: None };
        let branches = Type::new(DType::F32, [shape.branches.len()]);
        let branches = p.layout().padded(&p.activation("branches"), &branches, &[Axis::Branch]).dims[0];
        let videos = carried.video.dim(0);
        let counted = latents.zip(carried).map(|(l, x)| Counted::new(p.builder(), x, l.content));
        let [rope, cross_rope] = tables::inputs(p, c, 1, shape.tokens);
        let is_video = Av { video: true, audio: false };
        let modulation = c.streams().zip(Av::NAMES).zip(is_video).map(|((s, name), is_video)| {
            StreamModulation::new(c, &s, |part, dims| {
                let levels = if is_video { shape.levels_of(part) } else { 1 };
                let ty = Type::new(p.dtype(), [&[MAX_STEPS + 1, levels], dims].concat());
                let axes = vec![Axis::Replicated; ty.rank()];
                p.input(&format!("modulation.{name}.{part}"), ty, &axes)
            })
        });
        let context = c.streams().zip(Av::NAMES);
        let context = context.map(|(s, name)| TextContext::input(p, c, &s, name, [videos * branches, shape.text]));
        let (perturbation, isolation) = branch_masks(p, shape, branches, videos);
        let own = latents.zip(Av { video: 0, audio: 1 }).zip(condition.zip(counted));
        let streams = own.zip(rope.zip(cross_rope)).zip(modulation.zip(context));
        let streams = streams.map(|((((l, row), (condition, counted)), (rope, cross_rope)), (modulation, context))| {
            let (sequence, tokens, scales) = (l.axes[1], l.content[1], scales.clone());
            ModelStream { sequence, tokens, scales, row, condition, counted, rope, cross_rope, modulation, context }
        });
        Model { p, c, shape, branches, streams, perturbation, isolation }
    }

    /// The guided clean predictions at the latents of a step.
    fn predict(&self, step: &Value, sigma: &Value, latents: Av<&Value>) -> Av<Value> {
        let streams = self.streams.as_ref().zip(latents);
        let inputs = streams.map(|(s, x)| self.stream_inputs(s, x, step));
        let tokens = streams.map(|(s, x)| self.of_rows(&x.to(self.p.dtype()), s.sequence));
        let inputs = ForwardInputs {
            tokens: tokens.as_ref(),
            context: self.streams.as_ref().map(|s| &s.context),
            streams: inputs.as_ref(),
            perturbation: self.perturbation.as_ref(),
            isolation: &self.isolation,
        };
        let velocity = forward(self.p, self.c, &inputs);
        let _scope = self.p.builder().scope("euler");
        streams.zip(velocity).map(|((s, x), velocity)| self.guided(s, x, &velocity, sigma))
    }

    fn stream_inputs(&self, s: &ModelStream, latents: &Value, step: &Value) -> StreamInputs {
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
    fn guided(&self, s: &ModelStream, x: &Value, velocity: &Value, sigma: &Value) -> Value {
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

/// Per-row masks of the branches that differ in more than their text, for `videos` times `branches` rows.
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
        true => Isolation::Rows(mask(Branch::Isolated, &[1, 1])),
        false => Isolation::None,
    };
    (perturbation, isolation)
}
