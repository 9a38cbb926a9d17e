//! The denoising loop: one program for any number of steps.
//!
//! [`prepare`] runs once a request: what the transformer needs and no step changes (text keys and values, the
//! modulation of every noise level). [`denoise`] is one `while` over the steps; the step range, the noise levels and
//! the guidance scales are inputs, so that no change of them compiles anything, and a run in chunks gives the same
//! bits as a whole one.

use crate::hlo::{DType, Result, Type, Value};
use crate::models::Network;
use crate::models::transformer::{
    COMPONENT, CrossTimestep, Isolation, Levels, Perturbation, Reads, Stream, StreamModulation, TextSource,
    TransformerConfig, all_text_keys_values, forward, modulation, of_level, project_text, tables, text_keys_values,
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
    /// Video and audio tokens.
    pub tokens: [usize; 2],
    /// Text tokens.
    pub text: usize,
    /// Text channels of each stream.
    pub text_channels: [usize; 2],
    /// Layers that the perturbed branch perturbs.
    pub stg_blocks: Vec<usize>,
    /// Standard deviations of the rescale term.
    pub rescale: RescaleScope,
    /// Parts of a step's noise level that video tokens have: 1 (all of it), and one for each strength of given frames.
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
    /// One video by Euler's steps, nothing perturbed and no frame given.
    pub fn plain(branches: Vec<Branch>, tokens: [usize; 2], text: usize, text_channels: [usize; 2]) -> Self {
        DenoiseShape {
            batch: 1,
            branches,
            tokens,
            text,
            text_channels,
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

const STREAMS: [&str; 2] = ["video", "audio"];

/// Named parts of one stream's modulation, with the shapes they have a noise level.
fn modulation_parts(c: &TransformerConfig, s: &Stream) -> Vec<(&'static str, Vec<usize>)> {
    let w = s.width();
    let mut parts = vec![
        ("main", vec![s.modulation_rows(), w]),
        ("embedded", vec![w]),
        ("cross", vec![4, w]),
        ("gate", vec![1, w]),
    ];
    if c.prompt_modulation() && c.use_prompt_adaln_single {
        parts.push(("prompt", vec![2, w]));
    }
    parts
}

/// The program that runs once a request.
///
/// Inputs, f32: `text.video`, `text.audio` `[videos, branches, t, channels]`, `sigmas [257]`, and `levels [k]` where there
/// are several: the parts of a step's noise level that video tokens have. Outputs:
/// `modulation.<stream>.<part>` `[257, 1 or k, …]`, and the text as the loop reads it: `text.<stream>.k`, `.v` in the
/// order of [`TextSource::KeysValues`], or `text.<stream>` `[rows, t, width]` where the noise level changes it. Rows are
/// videos times branches, both filled up to what the mesh divides.
///
/// # Errors
/// The first mistake made while building.
pub fn prepare(c: &TransformerConfig, shape: &DenoiseShape, build: &Build) -> Result<Network> {
    let build = &build.of_branches(shape.branches.len());
    let p = Params::new("prepare", COMPONENT, build);
    let streams = [c.video(), c.audio()];
    let contexts = [0, 1].map(|i| {
        let ty = Type::new(DType::F32, vec![shape.batch, shape.branches.len(), shape.text, shape.text_channels[i]]);
        let axes = [Axis::Batch, Axis::Branch, Axis::TextSequence, Axis::Replicated];
        let x = p.input(&format!("text.{}", STREAMS[i]), ty, &axes).to(build.dtype);
        let rows = x.reshape(vec![x.dim(0) * x.dim(1), x.dim(2), x.dim(3)]);
        project_text(
            &p,
            c,
            &streams[i],
            &p.place("text", &rows, &[Axis::CfgBatch, Axis::TextSequence, Axis::Replicated]),
        )
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
    let [video, audio] = [&own, &scalar].map(|timestep| Levels { timestep, sigma: &scalar });
    let all = modulation(&p, c, &video, &audio, shape.cross);

    // What the loop takes over lies on the devices already as it will be read.
    let result = |name: String, x: &Value, axes: &[Axis]| p.output(&name, x, axes, x.dims());
    let mut results = Vec::new();
    for (i, m) in all.iter().enumerate() {
        let parts = [
            ("main", Some(&m.main)),
            ("embedded", Some(&m.embedded)),
            ("cross", Some(&m.cross)),
            ("gate", Some(&m.gate)),
            ("prompt", m.prompt.as_ref()),
        ];
        for (name, value) in parts.into_iter().filter_map(|(n, v)| v.map(|v| (n, v))) {
            let (levels, rest) = (value.dim(1) / (MAX_STEPS + 1), &value.dims()[2..]);
            let table = value.reshape([&[MAX_STEPS + 1, levels], rest].concat());
            results.push(result(
                format!("modulation.{}.{name}", STREAMS[i]),
                &table,
                &vec![Axis::Replicated; table.rank()],
            ));
        }
    }
    if c.prompt_modulation() {
        for (stream, context) in STREAMS.iter().zip(&contexts) {
            let axes = [Axis::CfgBatch, Axis::TextSequence, Axis::Replicated];
            results.push(result(format!("text.{stream}"), context, &axes));
        }
    } else {
        let kept =
            [0, 1].map(|i| text_keys_values(&p, &streams[i], STREAMS[i], contexts[i].dim(0), contexts[i].dim(1)));
        let kept = kept.as_flattened();
        let made = all_text_keys_values(&p, c, &contexts, kept);
        results.extend(kept.iter().zip(&made).flat_map(|(tensor, layers)| p.layer_outputs(tensor, layers)));
    }
    Network::finish(&p, results)
}

fn levels_input(p: &Params, shape: &DenoiseShape) -> Option<Value> {
    (shape.levels > 1).then(|| p.input("levels", Type::new(DType::F32, [shape.levels]), &[Axis::Replicated]))
}

/// What a loop needs of frames that are given, `[b, n, 1]` and `[b, n, c]`, f32.
struct Given {
    /// Part of the step's noise that each token has.
    mask: Value,
    /// What the tokens are where it is 0.
    clean: Value,
    /// Which of the levels it is, `[b, n]`, i32.
    level: Value,
}

impl Given {
    fn input(p: &Params, shape: &DenoiseShape, axes: &[Axis; 3], content: [usize; 3]) -> Option<Self> {
        let levels = levels_input(p, shape)?;
        let level = p.input("level.video", Type::new(DType::I32, &content[..2]), &axes[..2]);
        let clean = p.input("clean.video", Type::new(DType::F32, content), axes);
        let rows = levels.reshape(vec![1, shape.levels, 1]).broadcast_to(&[level.dim(0), shape.levels, 1]);
        Some(Given { mask: of_level(&rows, Some(&level)), clean, level })
    }

    /// `x` with what is given in its place.
    fn kept(&self, x: &Value) -> Value {
        x * &self.mask + &self.clean * (self.mask.like(1.0) - &self.mask)
    }
}

/// The denoising loop.
///
/// Inputs: `begin`, `end` (i32, evaluations), `sigmas [257]` (of each evaluation), `scales [2, 4]` (video, audio: cfg, stg,
/// modality, rescale), `latents.video [b, n, c]` and `latents.audio [b, m, c]` (f32, donated), the RoPE tables and
/// [`prepare`]'s outputs. Outputs: `latents.video`, `latents.audio` after the evaluations `begin..end`.
///
/// With several levels: `levels [k]`, `level.video [b, n]` (i32) and `clean.video [b, n, c]`: tokens of given frames,
/// which have a part of the noise and come closer to what is given after each step (official code: the clean prediction
/// of a token is formed with its own noise level, then blended).
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
    let streams = [c.video(), c.audio()];
    let content = [0, 1].map(|i| [shape.batch, shape.tokens[i], [c.in_channels, c.audio_in_channels][i]]);
    let latent_axes = [0, 1].map(|i| [Axis::Batch, streams[i].sequence, Axis::Replicated]);
    let carried: Vec<Value> = shape
        .sampler
        .carried()
        .iter()
        .flat_map(|kind| {
            [0, 1]
                .map(|i| p.input(&format!("{kind}.{}", STREAMS[i]), Type::new(DType::F32, content[i]), &latent_axes[i]))
        })
        .collect();
    let latents = [&carried[0], &carried[1]];
    let second = (shape.sampler == Sampler::Res2s).then(|| Res2s::input(&p, content, latent_axes));
    let given = [Given::input(&p, shape, &latent_axes[0], content[0]), None];
    let branches = p
        .layout()
        .padded(&p.activation("branches"), &Type::new(DType::F32, [shape.branches.len()]), &[Axis::Branch])
        .dims[0];
    let rows = latents[0].dim(0) * branches;
    let counted = [0, 1].map(|i| Counted::new(&b, latents[i], content[i]));
    let [rope, audio_rope, cross_video, cross_audio] = tables::inputs(&p, c, 1, shape.tokens);
    let ropes = [(rope, cross_video), (audio_rope, cross_audio)];
    let modulation_tables = [0, 1].map(|i| {
        let parts = modulation_parts(c, &streams[i]).into_iter().map(|(name, dims)| {
            let levels = if i == 0 { shape.levels_of(name) } else { 1 };
            let ty = Type::new(build.dtype, [vec![MAX_STEPS + 1, levels], dims].concat());
            let axes = vec![Axis::Replicated; ty.rank()];
            p.input(&format!("modulation.{}.{name}", STREAMS[i]), ty, &axes)
        });
        parts.collect::<Vec<_>>()
    });
    let text = [0, 1].map(|i| text_input(&p, c, shape.text, rows, &streams[i], STREAMS[i]));
    let text_length = text[0].tokens(&p, &streams[0]);
    let (perturbation, isolation) = branch_masks(&p, shape, branches, latents[0].dim(0));
    // `[b, n, …]` of each video as its branches see it, `[rows, n, …]`.
    let of_rows = |x: &Value, i: usize| {
        let (videos, rest) = (x.dim(0), &x.dims()[1..]);
        let each = x.unsqueeze(1).broadcast_to(&[&[videos, branches], rest].concat());
        let axes =
            [&[Axis::Batch, Axis::Branch, streams[i].sequence][..], &vec![Axis::Replicated; rest.len() - 1]].concat();
        let each = p.place("branches", &each, &axes);
        let x = each.reshape([&[videos * branches], rest].concat());
        p.place("rows", &x, &[&[Axis::CfgBatch][..], &axes[2..]].concat())
    };

    // The guided clean predictions of both streams at the latents of a step.
    let evaluate = |step: &Value, sigma: &Value, latents: &[Value]| {
        let reads = [0, 1].map(|i| {
            let row: Vec<Value> = modulation_tables[i].iter().map(|t| t.index(step).unsqueeze(0)).collect();
            Reads {
                modulation: StreamModulation {
                    main: row[0].clone(),
                    embedded: row[1].clone(),
                    cross: row[2].clone(),
                    gate: row[3].clone(),
                    prompt: row.get(4).cloned(),
                },
                level: given[i].as_ref().map(|given| of_rows(&given.level, i)),
                rope: ropes[i].0.clone(),
                cross_rope: ropes[i].1.clone(),
                text_mask: padding_mask(&b, text_length, shape.text),
                self_mask: None,
                padding: padding_mask(&b, latents[i].dim(1), shape.tokens[i]),
            }
        });
        let tokens = [0, 1].map(|i| of_rows(&latents[i].to(build.dtype), i));
        let velocity =
            forward(&p, c, [&tokens[0], &tokens[1]], &text, [&reads[0], &reads[1]], perturbation.as_ref(), &isolation);
        let _scope = b.scope("euler");
        [0, 1].map(|i| {
            let x = &latents[i];
            // Each branch's clean prediction is formed where its velocity is, then exchanged without any weight.
            let dims = vec![x.dim(0), branches, x.dim(1), x.dim(2)];
            let placed = |x: &Value, branch: Axis| {
                p.place("predictions", x, &[Axis::Batch, branch, streams[i].sequence, Axis::Replicated])
            };
            let velocity = placed(&velocity[i].to(DType::F32).reshape(dims), Axis::Branch);
            let step = match &given[i] {
                None => velocity * sigma,
                Some(given) => velocity * (&given.mask * sigma).unsqueeze(1),
            };
            let predictions = placed(&(x.unsqueeze(1) - step), Axis::Branch);
            let everywhere = placed(&predictions, Axis::Replicated);
            let predictions: Vec<Value> = (0..shape.branches.len()).map(|k| everywhere.at(1, k)).collect();
            let clean = combine(&shape.branches, &predictions, &scales.at(0, i), shape.rescale, &counted[i]);
            given[i].as_ref().map_or(clean.clone(), |given| given.kept(&clean))
        })
    };
    let done = b.for_loop(&begin, &end, &carried, |step, carried| {
        let sigma = sigmas.index(step);
        let clean = evaluate(step, &sigma, &carried[..2]);
        let _scope = b.scope("euler");
        let placed = |i: usize, x: &Value| p.place("latents", x, &latent_axes[i]);
        let Some(second) = &second else {
            let next = sigmas.index(&(step + 1.0)) - &sigma;
            return [0, 1].map(|i| placed(i, &(&carried[i] + (&carried[i] - &clean[i]) / &sigma * &next))).to_vec();
        };
        let each = [0, 1].map(|i| {
            let of = |kind: usize| &carried[2 * kind + i];
            let kept = |x: &Value| given[i].as_ref().map(|given| given.kept(x));
            second.step(i, step, &begin, [of(0), of(1), of(2)], &clean[i], kept)
        });
        (0..3).flat_map(|kind| [0, 1].map(|i| placed(i, &each[i][kind]))).collect()
    });
    let mut results = Vec::new();
    for (at, kind) in shape.sampler.carried().iter().enumerate() {
        for (i, stream) in STREAMS.iter().enumerate() {
            let name = format!("{kind}.{stream}");
            b.donate(&name, results.len());
            results.push(p.output(&name, &done[2 * at + i], &latent_axes[i], &content[i]));
        }
    }
    Network::finish(&p, results)
}

fn text_input(p: &Params, c: &TransformerConfig, tokens: usize, rows: usize, s: &Stream, name: &str) -> TextSource {
    if c.prompt_modulation() {
        let width = if c.use_prompt_embeddings { s.width() } else { s.context };
        let ty = Type::new(p.dtype(), vec![rows, tokens, width]);
        let axes = [Axis::CfgBatch, Axis::TextSequence, Axis::Replicated];
        return TextSource::Context(p.input(&format!("text.{name}"), ty, &axes));
    }
    let kept = text_keys_values(p, s, name, rows, tokens);
    TextSource::KeysValues(kept.map(|tensor| p.layer_inputs(&tensor, c.num_layers)))
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
        .then(|| Perturbation { keep: mask(Branch::Perturbed, &[1, 1, 1]), layers: shape.stg_blocks.clone() });
    let isolation = match shape.branches.contains(&Branch::Isolated) {
        true => Isolation::Rows(mask(Branch::Isolated, &[1, 1])),
        false => Isolation::None,
    };
    (perturbation, isolation)
}
