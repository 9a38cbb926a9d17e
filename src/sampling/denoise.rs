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
    TransformerConfig, all_text_keys_values, forward, modulation, project_text, tables, text_keys_values,
};
use crate::nn::{Axis, Build, Params, hide_padding};
use crate::sampling::guidance::{Branch, Counted, RescaleScope, combine};

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
/// Inputs, f32: `text.video`, `text.audio` `[videos, branches, t, channels]`, `sigmas [257]`. Outputs:
/// `modulation.<stream>.<part>` `[257, …]`, and the text as the loop reads it: `text.<stream>.k`, `.v` in the
/// order of [`TextSource::KeysValues`], or `text.<stream>` `[rows, t, width]` where the noise level changes it. Rows are
/// videos times branches, both filled up to what the mesh divides.
///
/// # Errors
/// The first mistake made while building.
pub fn prepare(c: &TransformerConfig, shape: &DenoiseShape, build: &Build) -> Result<Network> {
    let p = Params::new("prepare", COMPONENT, build);
    let streams = [c.video(), c.audio()];
    let contexts = [0, 1].map(|i| {
        let ty = Type::new(DType::F32, vec![shape.batch, shape.branches.len(), shape.text, shape.text_channels[i]]);
        let axes = [Axis::Batch, Axis::Branch, Axis::TextSequence, Axis::Whole];
        let x = p.input(&format!("text.{}", STREAMS[i]), ty, &axes).to(build.dtype);
        let rows = x.reshape(vec![x.dim(0) * x.dim(1), x.dim(2), x.dim(3)]);
        project_text(&p, c, &streams[i], &p.place("text", &rows, &[Axis::Rows, Axis::TextSequence, Axis::Whole]))
    });
    let sigmas = p.input("sigmas", Type::new(DType::F32, vec![MAX_STEPS + 1]), &[Axis::Whole]);
    // All levels as one row of tokens: the embedding network runs once.
    let timestep = (sigmas * c.timestep_scale_multiplier).unsqueeze(0);
    let levels = Levels { timestep: &timestep, sigma: &timestep };
    let all = modulation(&p, c, &levels, &levels, CrossTimestep::Own);

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
            let table = value.at(0, 0);
            results.push(result(format!("modulation.{}.{name}", STREAMS[i]), &table, &vec![Axis::Whole; table.rank()]));
        }
    }
    if c.prompt_modulation() {
        for (stream, context) in STREAMS.iter().zip(&contexts) {
            let axes = [Axis::Rows, Axis::TextSequence, Axis::Whole];
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
    let streams = [c.video(), c.audio()];
    let content = [0, 1].map(|i| [shape.batch, shape.tokens[i], [c.in_channels, c.audio_in_channels][i]]);
    let latent_axes = [0, 1].map(|i| [Axis::Batch, streams[i].sequence, Axis::Whole]);
    let latents =
        [0, 1].map(|i| p.input(&format!("latents.{}", STREAMS[i]), Type::new(DType::F32, content[i]), &latent_axes[i]));
    let branches = p
        .layout()
        .padded(&p.activation("branches"), &Type::new(DType::F32, [shape.branches.len()]), &[Axis::Branch])
        .dims[0];
    let rows = latents[0].dim(0) * branches;
    let counted = [0, 1].map(|i| Counted::new(&b, &latents[i], content[i]));
    let [rope, audio_rope, cross_video, cross_audio] = tables::inputs(&p, c, 1, shape.tokens);
    let ropes = [(rope, cross_video), (audio_rope, cross_audio)];
    let modulation_tables = [0, 1].map(|i| {
        let parts = modulation_parts(c, &streams[i]).into_iter().map(|(name, dims)| {
            let ty = Type::new(build.dtype, [vec![MAX_STEPS + 1], dims].concat());
            let axes = vec![Axis::Whole; ty.rank()];
            p.input(&format!("modulation.{}.{name}", STREAMS[i]), ty, &axes)
        });
        parts.collect::<Vec<_>>()
    });
    let text = [0, 1].map(|i| text_input(&p, c, shape.text, rows, &streams[i], STREAMS[i]));
    let text_length = text[0].tokens(&p, &streams[0]);
    let (perturbation, isolation) = branch_masks(&p, shape, branches, latents[0].dim(0));

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
                text_mask: hide_padding(&b, text_length, shape.text),
                self_mask: None,
                padding: hide_padding(&b, latents[i].dim(1), shape.tokens[i]),
            }
        });
        let tokens = [0, 1].map(|i| {
            let x = &latents[i];
            let (n, channels) = (x.dim(1), x.dim(2));
            let each = x.to(build.dtype).unsqueeze(1).broadcast_to(&[x.dim(0), branches, n, channels]);
            let each = p.place("branches", &each, &[Axis::Batch, Axis::Branch, streams[i].sequence, Axis::Whole]);
            let x = each.reshape(vec![rows, n, channels]);
            p.place("rows", &x, &[Axis::Rows, streams[i].sequence, Axis::Whole])
        });
        let velocity =
            forward(&p, c, [&tokens[0], &tokens[1]], &text, [&reads[0], &reads[1]], perturbation.as_ref(), &isolation);
        let _scope = b.scope("euler");
        let stepped = [0, 1].map(|i| {
            let x = &latents[i];
            // Each branch's clean prediction is formed where its velocity is, then exchanged without any weight.
            let dims = vec![x.dim(0), branches, x.dim(1), x.dim(2)];
            let placed = |x: &Value, branch: Axis| {
                p.place("predictions", x, &[Axis::Batch, branch, streams[i].sequence, Axis::Whole])
            };
            let velocity = placed(&velocity[i].to(DType::F32).reshape(dims), Axis::Branch);
            let predictions = placed(&(x.unsqueeze(1) - velocity * &sigma), Axis::Branch);
            let everywhere = placed(&predictions, Axis::Whole);
            let predictions: Vec<Value> = (0..shape.branches.len()).map(|k| everywhere.at(1, k)).collect();
            let clean = combine(&shape.branches, &predictions, &scales.at(0, i), shape.rescale, &counted[i]);
            let next = x + (x - clean) / &sigma * (&next - &sigma);
            p.place("latents", &next, &latent_axes[i])
        });
        stepped.to_vec()
    });
    for (i, stream) in STREAMS.iter().enumerate() {
        b.donate(&format!("latents.{stream}"), i);
    }
    let results = [0, 1].map(|i| p.output(&format!("latents.{}", STREAMS[i]), &done[i], &latent_axes[i], &content[i]));
    Network::finish(&p, results.into())
}

fn text_input(p: &Params, c: &TransformerConfig, tokens: usize, rows: usize, s: &Stream, name: &str) -> TextSource {
    if c.prompt_modulation() {
        let width = if c.use_prompt_embeddings { s.width() } else { s.context };
        let ty = Type::new(p.dtype(), vec![rows, tokens, width]);
        let axes = [Axis::Rows, Axis::TextSequence, Axis::Whole];
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
