//! The denoising programs. They work for any number of steps.
//!
//! [`prepare`] runs once per request and computes what the transformer needs that does not depend on the latents: text
//! keys and values, and the modulation of every noise level. [`denoise`] is a single `while` loop over the steps. The
//! step range, the noise levels and the guidance scales are inputs, so changing them does not recompile anything, and
//! running the steps in chunks gives bitwise the same result as running them in one call.

use super::MAX_STEPS;
use super::guided::{CachedPredictions, GuidedState, GuidedTransformer};
use super::sampler::{Evaluation, ScheduleTables, StreamState};
use super::shape::Latents;
pub use super::shape::{CleanPrediction, DenoiseShape, StreamRole};
use super::step_cache::{StepCacheInputs, StepCacheKind};
use crate::av::Av;
use crate::hlo::{DType, ProgramOutput, Result, Type, Value};
use crate::models::Network;
use crate::models::transformer::{COMPONENT, Levels, TransformerConfig, context_outputs, modulation, project_text};
use crate::nn::{Axis, Build, Params};

/// Builds the program that runs once per request.
///
/// Inputs, f32 (257 is `MAX_STEPS + 1`): `text.video` and `text.audio` `[videos, branches, t, channels]`, `sigmas
/// [257]`, and, if tokens have several noise levels, `levels [k]`, the noise levels as factors of the step's sigma.
/// Outputs: `modulation.<stream>.<part>` `[257, 1 or k, …]` and the text context in the layout that the loop reads
/// (`context_outputs`). Absent streams have no inputs or outputs. The batch of the transformer is videos times
/// branches, both padded to multiples of the mesh axes.
///
/// # Errors
/// Returns the first error recorded by the builder.
pub fn prepare(c: &TransformerConfig, shape: &DenoiseShape, build: &Build) -> Result<Network> {
    let build = &build.for_branches(shape.branches.len());
    let p = Params::new("prepare", COMPONENT, build);
    let present = shape.present();
    let context = c.streams().zip(Av::NAMES).zip(shape.text_channels.zip(present));
    let context = context.map(|((s, name), (channels, present))| {
        if !present {
            return None;
        }
        let ty = Type::new(DType::F32, [shape.batch, shape.branches.len(), shape.text, channels]);
        let axes = [Axis::Batch, Axis::Branch, Axis::TextSequence, Axis::Replicated];
        let text_embeds = p.input(&format!("text.{name}"), ty, &axes).to(build.dtype);
        let [videos, branches, tokens, channels] = [0, 1, 2, 3].map(|axis| text_embeds.dim(axis));
        let rows = text_embeds.reshape(vec![videos * branches, tokens, channels]);
        let rows = p.place("text", &rows, &[Axis::CfgBatch, Axis::TextSequence, Axis::Replicated]);
        Some(project_text(&p, c, &s, &rows))
    });
    let sigmas = p.input("sigmas", Type::new(DType::F32, vec![MAX_STEPS + 1]), &[Axis::Replicated]);
    // Treat all noise levels as one row of tokens, so that the embedding network runs once.
    let timestep = &sigmas * c.timestep_scale_multiplier;
    let scalar = timestep.unsqueeze(0);
    let own = match shape.levels_input(&p) {
        None => scalar.clone(),
        Some(levels) => {
            let each = (sigmas.unsqueeze(1) * levels.unsqueeze(0)) * c.timestep_scale_multiplier;
            each.reshape(vec![1, each.dim(0) * each.dim(1)])
        }
    };
    let own = shape.conditioned.map(|conditioned| if conditioned { &own } else { &scalar });
    let mut levels = own.map(|timestep| Levels { timestep, sigma: &scalar });
    let denoised = shape.denoised();
    let clean = denoised.into_iter().any(|denoised| !denoised).then(|| &scalar * 0.0);
    if let Some(clean) = &clean {
        let frozen = levels.as_mut().zip(denoised).into_iter().filter(|(_, denoised)| !denoised);
        frozen.for_each(|(level, _)| *level = Levels { timestep: clean, sigma: clean });
    }
    let modulation = modulation(&p, c, levels, shape.cross, present);

    // Outputs use the placement that the loop reads.
    let mut results = Vec::new();
    for (name, modulation) in Av::NAMES.zip(modulation.as_ref()) {
        for (part, value) in modulation.iter().flat_map(|own| own.parts()) {
            let (levels, rest) = (value.dim(1) / (MAX_STEPS + 1), &value.dims()[2..]);
            let table = value.reshape([&[MAX_STEPS + 1, levels], rest].concat());
            let axes = vec![Axis::Replicated; table.rank()];
            results.push(p.output(&format!("modulation.{name}.{part}"), &table, &axes, table.dims()));
        }
    }
    results.extend(context_outputs(&p, c, context.as_ref().map(Option::as_ref)));
    Network::finish(&p, results)
}

/// Builds the denoising loop.
///
/// Inputs (257 is `MAX_STEPS + 1`): `begin` and `end` (i32, evaluation indices), `sigmas [257]` (one per evaluation),
/// `scales [2, 4 + g]` (for video and audio: cfg, stg, modality, rescale and the guider's `g` parameters),
/// `latents.video [b, n, c]` and `latents.audio [b, m, c]` (f32, donated), the RoPE tables and the outputs of
/// [`prepare`]. Outputs: `latents.video` and `latents.audio` after evaluations `begin..end`.
///
/// Additional inputs:
///
/// - Several noise levels: `levels [k]`, and for conditioned streams `level.<stream> [b, n]` (i32) and `clean.<stream>
///   [b, n, c]`. A conditioned token has a fraction of the step's noise. Its clean prediction uses its own noise level
///   or the step's ([`CleanPrediction`]) and is then blended with `clean.<stream>`.
/// - Masked self-attention: `self_mask.video [1, n, n]`, added to the attention scores of the video tokens (queries,
///   keys).
/// - Keyframes: `keyframes.video [1, n]`, 1 for video tokens that represent a single frame.
/// - Guidance that varies by step: `scales [257, 2, 4 + g]`. If steps run different branches, `branch_sets [257]` (i32)
///   is the index of each evaluation's branch set, and the forward pass is a `case` over the sets. If steps reuse a
///   prediction, `prediction.<stream>` is carried like the latents.
/// - Depending on the [`Sampler`](super::Sampler): `coefficients [257, k]`, and `noise.<stream> [noises, b, n, c]` for
///   the evaluations starting at `begin`. The state tensors of the sampler and of the guider, `<state>.<stream>`, are
///   carried like the latents.
/// - [Step cache](super::step_cache): `cache_schedule [257]` (i32) and, for `adaptive`, `cache_limits [2]`. The state of the
///   cache is carried: `cache_velocity.<stream>` and, for `adaptive`, `cache_latents.<stream>`, `cache_ratios [2, b]` and
///   `cache_skips [257]` (i32).
///
/// A stream that is not denoised is treated as clean at every step and returned unchanged. An absent stream has only
/// its carried tensors as inputs; they are returned unchanged.
///
/// # Errors
/// Returns the first error recorded by the builder.
pub fn denoise(c: &TransformerConfig, shape: &DenoiseShape, build: &Build) -> Result<Network> {
    let build = &build.for_branches(shape.branches.len());
    let p = Params::new("denoise", COMPONENT, build);
    let b = p.builder().clone();
    if let Some(why) = shape.step_cache_fault() {
        b.reject("step_cache", format!("{why}; set Request::cache to None"));
    }
    let scalar = |name: &str| p.input(name, Type::scalar(DType::I32), &[]);
    let (begin, end) = (scalar("begin"), scalar("end"));
    let sigmas = p.input("sigmas", Type::new(DType::F32, vec![MAX_STEPS + 1]), &[Axis::Replicated]);
    let scales = shape.scales_input(&p);
    let latents = c.streams().zip(Av::NAMES).zip(shape.tokens).map(|((s, name), tokens)| Latents {
        name,
        content: [shape.batch, tokens, s.in_channels],
        axes: [Axis::Batch, s.sequence, Axis::Replicated],
    });
    let kinds: Vec<&str> = shape.carried().collect();
    let input =
        |kind: &str, l: Latents| p.input(&format!("{kind}.{}", l.name), Type::new(DType::F32, l.content), &l.axes);
    let carried: Vec<Value> = kinds.iter().flat_map(|kind| latents.map(|l| input(kind, l))).collect();
    let of_streams = carried.len();
    let carried: Vec<Value> = carried.into_iter().chain(shared_inputs(&p, shape)).collect();
    let sampler = &shape.sampler;
    let coefficients = (sampler.coefficients() > 0).then(|| {
        let table = Type::new(DType::F32, [MAX_STEPS + 1, sampler.coefficients()]);
        p.input("coefficients", table, &[Axis::Replicated; 2])
    });
    let denoised = shape.denoised();
    let noise = latents.zip(denoised).map(|(l, denoised)| {
        let ty = Type::new(DType::F32, [&[sampler.noises()], &l.content[..]].concat());
        let axes = [&[Axis::Replicated], &l.axes[..]].concat();
        (denoised && sampler.noises() > 0).then(|| p.input(&format!("noise.{}", l.name), ty, &axes))
    });
    let tables = ScheduleTables { levels: sigmas, coefficients };
    let start = Av::in_turn(&carried[..of_streams]).map(|own| own[0]);
    let model = GuidedTransformer::input(&p, c, shape, scales, latents, start);
    let cache = shape.cache.map(|kind| StepCacheInputs::input(&p, kind));
    let guidance = shape.guidance_state().count();

    let done = b.for_loop(&begin, &end, &carried, |step, carried| {
        let sigma = tables.levels.index(step);
        let (carried, shared) = carried.split_at(of_streams);
        let carried = Av::in_turn(carried);
        let states = 1 + sampler.state().len();
        let guided = carried.as_ref().map(|own| GuidedState {
            latents: own[0],
            carried: own[states..states + guidance].to_vec(),
            cache: own[states + guidance..].to_vec(),
        });
        let CachedPredictions { predictions, clean, streams: cached, shared: next_shared } = match &cache {
            Some(cache) => model.predict_or_reuse(cache, step, &sigma, &guided, shared),
            None => model.predict(step, &sigma, &guided).into(),
        };
        let _scope = b.scope("sampler");
        let at = Evaluation::new(step, &sigma, &begin, &tables);
        let streams = model.streams.as_ref().zip(noise.as_ref()).zip(predictions.as_ref().zip(clean.as_ref()));
        let next = streams.zip(latents.zip(denoised)).zip(carried.zip(cached));
        let next = next.map(|((((s, noise), (prediction, clean)), (l, denoised)), (own, cached))| {
            let (Some(s), Some(prediction), Some(clean), true) = (s, prediction, clean, denoised) else {
                return own.into_iter().cloned().collect();
            };
            let (latents, state, condition) = (own[0], own[1..states].to_vec(), s.condition.as_ref());
            let (negative, noise) = (prediction.negative.as_ref(), noise.as_ref());
            let state = StreamState { latents, state, clean, negative, noise, condition };
            let next = sampler.step(&at, &state).into_iter().chain(model.carried(prediction)).chain(cached);
            next.map(|x| p.place("latents", &x, &l.axes)).collect::<Vec<_>>()
        });
        let of_streams = (0..kinds.len()).flat_map(|kind| next.as_ref().map(|next| next[kind].clone()));
        of_streams.chain(next_shared).collect()
    });
    let mut results = Vec::new();
    let names = kinds.iter().flat_map(|kind| latents.map(|l| (l, format!("{kind}.{}", l.name))));
    for ((l, name), x) in names.zip(&done) {
        b.donate(&name, results.len());
        results.push(p.output(&name, x, &l.axes, &l.content));
    }
    add_shared_outputs(&p, shape, &done[of_streams..], &mut results);
    Network::finish(&p, results)
}

/// Declares the inputs of the tensors that the loop carries for both streams together.
fn shared_inputs(p: &Params, shape: &DenoiseShape) -> Vec<Value> {
    let input = |name: &&str| {
        let (ty, axes) = StepCacheKind::shared_type(name, shape.batch);
        p.input(name, ty, &axes)
    };
    shape.shared().iter().map(input).collect()
}

/// Adds the tensors that the loop carries for both streams together to the results.
fn add_shared_outputs(p: &Params, shape: &DenoiseShape, values: &[Value], results: &mut Vec<(ProgramOutput, Value)>) {
    for (name, x) in shape.shared().iter().zip(values) {
        let (ty, axes) = StepCacheKind::shared_type(name, shape.batch);
        p.builder().donate(name, results.len());
        results.push(p.output(name, x, &axes, &ty.dims));
    }
}
