//! The denoising loop: one program for any number of steps.
//!
//! [`prepare`] runs once a request: what the transformer needs and no step changes (text keys and values, the
//! modulation of every noise level). [`denoise`] is one `while` over the steps; the step range, the noise levels and
//! the guidance scales are inputs, so that no change of them compiles anything, and a run in chunks gives the same
//! bits as a whole one.

use crate::dtype::DType;
use crate::hlo::{Result, Type, Value};
use crate::models::Network;
use crate::models::transformer::{
    COMPONENT, CrossTimestep, Isolation, Levels, Perturbation, Reads, Stream, StreamModulation, TextSource,
    TransformerConfig, all_text_keys_values, forward, modulation, project_text, tables,
};
use crate::nn::{Axis, Build, Params};
use crate::sampling::guidance::{Branch, RescaleScope, combine};

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
}

impl DenoiseShape {
    /// Rows of the transformer's batch: branches times videos, branches outermost.
    pub fn rows(&self) -> usize {
        self.batch * self.branches.len()
    }
}

const STREAMS: [&str; 2] = ["video", "audio"];
const SEQUENCE: [Axis; 2] = [Axis::VideoSequence, Axis::AudioSequence];

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
/// Inputs, f32: `text.video`, `text.audio` `[rows, t, channels]`, `sigmas [257]`. Outputs: `modulation.<stream>.<part>`
/// `[257, …]`, and the text as the loop reads it: `text.<stream>.k`, `.v` `[layers, rows, t, heads, dim]`, or
/// `text.<stream>` `[rows, t, width]` where the noise level changes it.
///
/// # Errors
/// The first mistake made while building.
pub fn prepare(c: &TransformerConfig, shape: &DenoiseShape, build: &Build) -> Result<Network> {
    let p = Params::new("prepare", COMPONENT, build);
    let streams = [c.video(), c.audio()];
    let contexts = [0, 1].map(|i| {
        let ty = Type::new(DType::F32, vec![shape.rows(), shape.text, shape.text_channels[i]]);
        let axes = [Axis::Rows, Axis::TextSequence, Axis::Whole];
        let x = p.input(&format!("text.{}", STREAMS[i]), ty, &axes).to(build.dtype);
        project_text(&p, c, &streams[i], &x)
    });
    let sigmas = p.input("sigmas", Type::new(DType::F32, vec![MAX_STEPS + 1]), &[Axis::Whole]);
    // All levels as one row of tokens: the embedding network runs once.
    let timestep = (sigmas * c.timestep_scale_multiplier).unsqueeze(0);
    let levels = Levels { timestep: &timestep, sigma: &timestep };
    let all = modulation(&p, c, &levels, &levels, CrossTimestep::Own);

    let mut results: Vec<(String, Value)> = Vec::new();
    for (i, m) in all.iter().enumerate() {
        let parts = [
            ("main", Some(&m.main)),
            ("embedded", Some(&m.embedded)),
            ("cross", Some(&m.cross)),
            ("gate", Some(&m.gate)),
            ("prompt", m.prompt.as_ref()),
        ];
        for (name, value) in parts.into_iter().filter_map(|(n, v)| v.map(|v| (n, v))) {
            results.push((format!("modulation.{}.{name}", STREAMS[i]), value.at(0, 0)));
        }
    }
    if c.prompt_modulation() {
        results.extend((0..2).map(|i| (format!("text.{}", STREAMS[i]), contexts[i].clone())));
    } else {
        let all = all_text_keys_values(&p, c, &contexts);
        for (stream, kv) in STREAMS.iter().zip(all) {
            results.extend(["k", "v"].into_iter().zip(kv).map(|(n, v)| (format!("text.{stream}.{n}"), v)));
        }
    }
    let named: Vec<(&str, &Value)> = results.iter().map(|(n, v)| (n.as_str(), v)).collect();
    Network::finish(&p, &named)
}

/// The denoising loop.
///
/// Inputs: `begin`, `end` (i32), `sigmas [257]`, `scales [2, 4]` (video, audio: cfg, stg, modality, rescale),
/// `latents.video [b, n, c]` and `latents.audio [b, m, c]` (f32, donated), the RoPE tables and [`prepare`]'s outputs.
/// Outputs: `latents.video`, `latents.audio` after steps `begin..end`.
///
/// # Errors
/// The first mistake made while building.
pub fn denoise(c: &TransformerConfig, shape: &DenoiseShape, build: &Build) -> Result<Network> {
    let p = Params::new("denoise", COMPONENT, build);
    let b = p.builder().clone();
    let scalar = |name: &str| p.input(name, Type::scalar(DType::I32), &[]);
    let (begin, end) = (scalar("begin"), scalar("end"));
    let sigmas = p.input("sigmas", Type::new(DType::F32, vec![MAX_STEPS + 1]), &[Axis::Whole]);
    let scales = p.input("scales", Type::new(DType::F32, vec![2, 4]), &[Axis::Whole; 2]);
    let channels = [c.in_channels, c.audio_in_channels];
    let latents = [0, 1].map(|i| {
        let ty = Type::new(DType::F32, vec![shape.batch, shape.tokens[i], channels[i]]);
        p.input(&format!("latents.{}", STREAMS[i]), ty, &[Axis::Batch, SEQUENCE[i], Axis::Whole])
    });
    let [rope, audio_rope, cross_video, cross_audio] = tables::inputs(&p, c, 1, shape.tokens);
    let ropes = [(rope, cross_video), (audio_rope, cross_audio)];
    let streams = [c.video(), c.audio()];
    let modulation_tables = [0, 1].map(|i| {
        let parts = modulation_parts(c, &streams[i]).into_iter().map(|(name, dims)| {
            let ty = Type::new(build.dtype, [vec![MAX_STEPS + 1], dims].concat());
            let axes = vec![Axis::Whole; ty.rank()];
            p.input(&format!("modulation.{}.{name}", STREAMS[i]), ty, &axes)
        });
        parts.collect::<Vec<_>>()
    });
    let text = [0, 1].map(|i| text_input(&p, c, shape, build.dtype, &streams[i], STREAMS[i]));
    let (perturbation, isolation) = branch_masks(&p, shape);

    let done = b.for_loop(&begin, &end, &latents, |step, latents| {
        let (sigma, next) = (sigmas.index(step), sigmas.index(&(step + 1.0)));
        let reads = [0, 1].map(|i| {
            let row: Vec<Value> =
                modulation_tables[i].iter().map(|t| t.index(step).unsqueeze(0).unsqueeze(0)).collect();
            Reads {
                modulation: StreamModulation {
                    main: row[0].clone(),
                    embedded: row[1].clone(),
                    cross: row[2].clone(),
                    gate: row[3].clone(),
                    prompt: row.get(4).cloned(),
                },
                rope: ropes[i].0.clone(),
                cross_rope: ropes[i].1.clone(),
                text_mask: None,
                self_mask: None,
            }
        });
        let tokens = [0, 1].map(|i| {
            let copies = vec![&latents[i]; shape.branches.len()];
            p.shard(&b.concat(&copies, 0), &[Axis::Rows, SEQUENCE[i], Axis::Whole]).to(build.dtype)
        });
        let velocity =
            forward(&p, c, [&tokens[0], &tokens[1]], &text, [&reads[0], &reads[1]], perturbation.as_ref(), &isolation);
        let _scope = b.scope("euler");
        let stepped = [0, 1].map(|i| {
            let x = &latents[i];
            let predictions: Vec<Value> =
                velocity[i].to(DType::F32).split(0, shape.branches.len()).iter().map(|v| x - v * &sigma).collect();
            let clean = combine(&shape.branches, &predictions, &scales.at(0, i), shape.rescale);
            x + (x - clean) / &sigma * (&next - &sigma)
        });
        stepped.to_vec()
    });
    for (i, stream) in STREAMS.iter().enumerate() {
        b.donate(&format!("latents.{stream}"), i);
    }
    Network::finish(&p, &[("latents.video", &done[0]), ("latents.audio", &done[1])])
}

fn text_input(
    p: &Params,
    c: &TransformerConfig,
    shape: &DenoiseShape,
    dtype: DType,
    s: &Stream,
    name: &str,
) -> TextSource {
    if c.prompt_modulation() {
        let width = if c.use_prompt_embeddings { s.width() } else { s.context };
        let ty = Type::new(dtype, vec![shape.rows(), shape.text, width]);
        return TextSource::Context(p.input(
            &format!("text.{name}"),
            ty,
            &[Axis::Rows, Axis::TextSequence, Axis::Whole],
        ));
    }
    let h = s.attention.heads;
    let ty = Type::new(dtype, vec![c.num_layers, shape.rows(), shape.text, h.count, h.dim]);
    let axes = [Axis::Layers, Axis::Rows, Axis::TextSequence, Axis::Heads, Axis::HeadDim];
    TextSource::KeysValues(["k", "v"].map(|part| p.input(&format!("text.{name}.{part}"), ty.clone(), &axes)))
}

/// Per-row masks of the branches that differ in more than their text.
fn branch_masks(p: &Params, shape: &DenoiseShape) -> (Option<Perturbation>, Isolation) {
    let mask = |branch: Branch, dims: &[usize]| {
        let rows = shape.branches.iter().flat_map(|b| vec![i32::from(*b != branch); shape.batch]);
        let dims: Vec<usize> = std::iter::once(shape.rows()).chain(dims.iter().copied()).collect();
        p.builder().vector_i32(&rows.collect::<Vec<_>>()).to(DType::F32).reshape(dims)
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
