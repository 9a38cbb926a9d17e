//! One forward pass as a program of its own, on the reference's arguments.

use super::block::add;
use super::config::{COMPONENT, TransformerConfig};
use super::modulation::{CrossTimestep, Levels, modulation};
use super::{Isolation, Perturbation, Reads, TextSource, forward, project_text, tables};
use crate::hlo::{DType, Result, Type, Value};
use crate::models::Network;
use crate::nn::{Axis, Build, Params, padding_mask};

/// Sizes and switches of one forward pass.
#[derive(Clone, Debug)]
pub struct ForwardShape {
    /// Samples.
    pub batch: usize,
    /// Video and audio tokens.
    pub tokens: [usize; 2],
    /// Text tokens of each stream.
    pub text: [usize; 2],
    /// Text channels of each stream.
    pub text_channels: [usize; 2],
    /// Whether each stream's timestep is given per token.
    pub per_token: [bool; 2],
    /// Samples of the RoPE tables: 1 or `batch`.
    pub rope_rows: usize,
    /// Whether each stream has a text mask `[b, t]`, 1 for tokens that are attended to.
    pub text_mask: [bool; 2],
    /// Whether video self-attention has a mask `[b, n, n]` of strengths in 0..1.
    pub self_mask: bool,
    /// Noise level of the cross-modal modules.
    pub cross: CrossTimestep,
    /// Leaves out the attention between the streams.
    pub isolate: bool,
    /// Layers perturbed for samples whose `perturbation_mask` is 0.
    pub stg_blocks: Vec<usize>,
}

impl Default for ForwardShape {
    /// One sample of one token each, nothing switched on.
    fn default() -> Self {
        ForwardShape {
            batch: 1,
            tokens: [1; 2],
            text: [1; 2],
            text_channels: [1; 2],
            per_token: [false; 2],
            rope_rows: 1,
            text_mask: [false; 2],
            self_mask: false,
            cross: CrossTimestep::Own,
            isolate: false,
            stg_blocks: Vec::new(),
        }
    }
}

/// The program of one forward pass. Inputs, all f32: `hidden_states`, `audio_hidden_states`, `encoder_hidden_states`,
/// `audio_encoder_hidden_states`, `timestep`, `audio_timestep` (`[b]` or `[b, n]`), `sigma`, `audio_sigma` (`[b]`), the
/// masks that `shape` asks for, `perturbation_mask` (`[b]`) and the RoPE tables. Outputs, f32: `video`, `audio`.
///
/// # Errors
/// The first mistake made while building, with op, scope and shapes.
pub fn program(c: &TransformerConfig, shape: &ForwardShape, build: &Build) -> Result<Network> {
    let p = Params::new("transformer", COMPONENT, build);
    let input = |name: &str, dims: Vec<usize>, axes: &[Axis]| p.input(name, Type::new(DType::F32, dims), axes);
    let (b, n, t) = (shape.batch, shape.tokens, shape.text);
    let streams = [c.video(), c.audio()];
    let sequence = [0, 1].map(|i| streams[i].sequence);
    let channels = [c.in_channels, c.audio_in_channels];
    let of = |i: usize, name: &str| format!("{}{name}", streams[i].prefix);

    let tokens = [0, 1].map(|i| {
        let axes = [Axis::CfgBatch, sequence[i], Axis::Replicated];
        input(&of(i, "hidden_states"), vec![b, n[i], channels[i]], &axes).to(build.dtype)
    });
    let text = [0, 1].map(|i| {
        let axes = [Axis::CfgBatch, Axis::TextSequence, Axis::Replicated];
        input(&of(i, "encoder_hidden_states"), vec![b, t[i], shape.text_channels[i]], &axes).to(build.dtype)
    });
    let contexts = [0, 1].map(|i| TextSource::Context(project_text(&p, c, &streams[i], &text[i])));
    let levels: [[Value; 2]; 2] = [0, 1].map(|i| {
        let timestep = match shape.per_token[i] {
            true => input(&of(i, "timestep"), vec![b, n[i]], &[Axis::CfgBatch, sequence[i]]),
            false => input(&of(i, "timestep"), vec![b], &[Axis::CfgBatch]).unsqueeze(1),
        };
        [timestep, input(&of(i, "sigma"), vec![b], &[Axis::CfgBatch]).unsqueeze(1)]
    });
    let [video, audio] = [0, 1].map(|i| Levels { timestep: &levels[i][0], sigma: &levels[i][1] });
    let modulation = modulation(&p, c, &video, &audio, shape.cross);

    // A mask value m in 0..1 becomes a bias of (1 - m) · -10000, the reference's own form.
    let bias = |mask: Value| (mask - 1.0) * 10000.0;
    let text_mask = [0, 1].map(|i| {
        shape.text_mask[i].then(|| {
            let axes = [Axis::CfgBatch, Axis::TextSequence];
            bias(input(&of(i, "encoder_attention_mask"), vec![b, t[i]], &axes)).unsqueeze(1).unsqueeze(1)
        })
    });
    let self_mask = shape.self_mask.then(|| {
        let axes = [Axis::CfgBatch, Axis::VideoSequence, Axis::Replicated];
        let mask = bias(input("video_self_attention_mask", vec![b, n[0], n[0]], &axes)).unsqueeze(1);
        mask.pad(3, 0, tokens[0].dim(1) - n[0], 0.0)
    });
    let perturbation = (!shape.stg_blocks.is_empty()).then(|| Perturbation {
        keep: input("perturbation_mask", vec![b], &[Axis::CfgBatch]).unsqueeze(1).unsqueeze(1).unsqueeze(1),
        layers: shape.stg_blocks.clone(),
    });

    let [rope, audio_rope, cross_video, cross_audio] = tables::inputs(&p, c, shape.rope_rows, n);
    let ropes = [(rope, cross_video), (audio_rope, cross_audio)];
    let masks = [(text_mask[0].clone(), self_mask), (text_mask[1].clone(), None)];
    let reads = [0, 1].map(|i| Reads {
        modulation: modulation[i].clone(),
        level: None,
        rope: ropes[i].0.clone(),
        cross_rope: ropes[i].1.clone(),
        text_mask: add(masks[i].0.clone(), padding_mask(p.builder(), text[i].dim(1), t[i])),
        self_mask: masks[i].1.clone(),
        padding: padding_mask(p.builder(), tokens[i].dim(1), n[i]),
    });
    let isolation = if shape.isolate { Isolation::All } else { Isolation::None };
    let both = [&reads[0], &reads[1]];
    let out = forward(&p, c, [&tokens[0], &tokens[1]], &contexts, both, perturbation.as_ref(), &isolation);
    let results = [0, 1].map(|i| {
        let content = [b, n[i], streams[i].out_channels];
        p.output(
            ["video", "audio"][i],
            &out[i].to(DType::F32),
            &[Axis::CfgBatch, sequence[i], Axis::Replicated],
            &content,
        )
    });
    Network::finish(&p, results.into())
}
