//! A single forward pass as a program, with the reference's arguments.

use super::block::add;
use super::config::{COMPONENT, TransformerConfig};
use super::modulation::{CrossModalTimestep, Levels, modulation};
use super::{
    ForwardInputs, Isolation, Perturbation, StreamForward, StreamInputs, TextContext, forward, project_text, tables,
};
use crate::Network;
use crate::av::Av;
use ltx2_base::with_defaults;
use ltx2_nn::{Axis, Build, Params, padding_mask};
use ltx2_stablehlo::{DType, Result, Type, Value};

with_defaults! {
    /// Sizes and options of a single forward pass. By default, there is one sample with one token per stream, and all
    /// options are off.
    #[derive(Clone, Debug)]
    pub struct ForwardShape {
        /// Number of samples `b`.
        pub batch: usize = 1,
        /// Number of video tokens and of audio tokens of a sample.
        pub tokens: Av<usize> = Av::both(1),
        /// Number of text tokens `t` that each stream attends to.
        pub text: Av<usize> = Av::both(1),
        /// Channels of the text embeddings.
        pub text_channels: Av<usize> = Av::both(1),
        /// Whether each token has its own timestep.
        pub per_token: Av<bool> = Av::both(false),
        /// Batch size of the RoPE tables: 1 or `batch`.
        pub rope_rows: usize = 1,
        /// Whether there is a text mask `[b, t]`: 1 for tokens to attend to.
        pub text_mask: Av<bool> = Av::both(false),
        /// Whether video self-attention has a mask `[b, n, n]` of weights in 0..1.
        pub self_mask: bool = false,
        /// Whether there is a `video_keyframes_mask [b, n]`: 1 for video tokens of single-frame latents.
        pub keyframes: bool = false,
        /// Noise level that modulates cross-modal attention.
        pub cross: CrossModalTimestep = CrossModalTimestep::Own,
        /// Whether to omit cross-modal attention.
        pub isolate: bool = false,
        /// Layers of each stream that are perturbed for samples whose `perturbation_mask` is 0.
        pub stg_blocks: Av<Vec<usize>> = Av::default(),
    }
}

/// Builds the program of a single forward pass. Inputs, all f32: `hidden_states`, `audio_hidden_states`,
/// `encoder_hidden_states`, `audio_encoder_hidden_states`, `timestep`, `audio_timestep` (`[b]` or `[b, n]`), `sigma`,
/// `audio_sigma` (`[b]`), the masks enabled in `shape`, `perturbation_mask` (`[b]`) and the RoPE tables. Outputs, f32:
/// `video`, `audio`.
///
/// # Errors
/// Returns the first error recorded while building the graph, with its op, scope and shapes.
pub fn program(c: &TransformerConfig, shape: &ForwardShape, build: &Build) -> Result<Network> {
    let p = Params::new("transformer", COMPONENT, build);
    let input = |name: &str, dims: &[usize], axes: &[Axis]| p.input(name, Type::new(DType::F32, dims), axes);
    let b = shape.batch;
    let streams = c.streams();

    let tokens = streams.zip(shape.tokens).map(|(s, n)| {
        let axes = [Axis::CfgBatch, s.sequence, Axis::Replicated];
        input(&s.name("hidden_states"), &[b, n, s.in_channels], &axes).to(build.dtype)
    });
    let text_embeds = streams.zip(shape.text.zip(shape.text_channels)).map(|(s, (t, channels))| {
        let axes = [Axis::CfgBatch, Axis::TextSequence, Axis::Replicated];
        input(&s.name("encoder_hidden_states"), &[b, t, channels], &axes).to(build.dtype)
    });
    let context = streams.zip(text_embeds.as_ref()).map(|(s, x)| TextContext::Projected(project_text(&p, c, &s, x)));
    let levels = streams.zip(shape.tokens.zip(shape.per_token)).map(|(s, (n, per_token))| {
        let timestep = match per_token {
            true => input(&s.name("timestep"), &[b, n], &[Axis::CfgBatch, s.sequence]),
            false => input(&s.name("timestep"), &[b], &[Axis::CfgBatch]).unsqueeze(1),
        };
        (timestep, input(&s.name("sigma"), &[b], &[Axis::CfgBatch]).unsqueeze(1))
    });
    let levels = levels.as_ref().map(|(timestep, sigma)| Levels { timestep, sigma });
    let modulation = modulation(&p, c, levels, shape.cross, Av::both(true));

    // A mask value m in 0..1 becomes the bias (1 - m) · -10000, as in the reference.
    let bias = |mask: Value| (mask - 1.0) * 10000.0;
    let text_mask = streams.zip(shape.text.zip(shape.text_mask)).map(|(s, (t, is_masked))| {
        is_masked.then(|| {
            let axes = [Axis::CfgBatch, Axis::TextSequence];
            bias(input(&s.name("encoder_attention_mask"), &[b, t], &axes)).unsqueeze(1).unsqueeze(1)
        })
    });
    let self_mask = shape.self_mask.then(|| {
        let (n, axes) = (shape.tokens.video, [Axis::CfgBatch, Axis::VideoSequence, Axis::Replicated]);
        let mask = bias(input("video_self_attention_mask", &[b, n, n], &axes)).unsqueeze(1);
        mask.pad(3, 0, tokens.video.dim(1) - n, 0.0)
    });
    let keyframes = shape
        .keyframes
        .then(|| input("video_keyframes_mask", &[b, shape.tokens.video], &[Axis::CfgBatch, Axis::VideoSequence]));
    let perturbation = shape.stg_blocks.as_ref().into_iter().any(|own| !own.is_empty()).then(|| Perturbation {
        stg_mask: input("perturbation_mask", &[b], &[Axis::CfgBatch]).unsqueeze(1).unsqueeze(1).unsqueeze(1),
        layers: shape.stg_blocks.clone(),
    });

    let [rope, cross_rope] = tables::inputs(&p, c, shape.rope_rows, shape.tokens.map(Some));
    let masks = text_mask.zip(Av { video: self_mask, audio: None });
    let lengths = text_embeds.zip(shape.text).zip(tokens.as_ref().zip(shape.tokens));
    let inputs = modulation.zip(rope.zip(cross_rope)).zip(masks.zip(lengths));
    let inputs = inputs.map(|((modulation, (rope, cross_rope)), ((text_mask, self_mask), ((text, t), (x, n))))| {
        Some(StreamInputs {
            modulation: modulation?,
            noise_level_index: None,
            rope: rope?,
            cross_rope: cross_rope?,
            text_mask: add(text_mask, padding_mask(p.builder(), text.dim(1), t)),
            self_mask,
            padding_mask: padding_mask(p.builder(), x.dim(1), n),
        })
    });
    let streams = tokens.as_ref().zip(context.as_ref()).zip(inputs.as_ref());
    let forward_inputs = ForwardInputs {
        streams: streams
            .map(|((tokens, context), inputs)| Some(StreamForward { tokens, context, inputs: inputs.as_ref()? })),
        keyframes: keyframes.as_ref(),
        perturbation: perturbation.as_ref(),
        isolation: if shape.isolate { &Isolation::All } else { &Isolation::None },
        updated: Av::both(true),
    };
    let velocity = forward(&p, c, &forward_inputs);
    let results = Av::NAMES.zip(c.streams()).zip(velocity.zip(shape.tokens)).map(|((name, s), (x, n))| {
        let axes = [Axis::CfgBatch, s.sequence, Axis::Replicated];
        Some(p.output(name, &x?.to(DType::F32), &axes, &[b, n, s.out_channels]))
    });
    Network::finish(&p, results.into_iter().flatten().collect())
}
