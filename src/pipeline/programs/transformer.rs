//! One forward pass of the transformer, on the arguments of the reference implementation.

use ndarray::{Array1, Array4, Axis as Dim, Ix4};

use super::{
    Build, Component, ModelConfigs, NamedInputs, Network, Phase, PipelineError, ProgramDeclaration, ProgramKind, Ready,
    ReferenceArguments, Result, SingleRun,
};
use crate::av::Av;
use crate::hlo::DType;
use crate::models::transformer::{self, CrossModalTimestep, ForwardShape, TransformerConfig, tables};
use crate::request::coordinate_grids;
use crate::sampling::latents::VideoShape;
use crate::tensor::Tensor;

/// Program of a single forward pass, for `ltx2 run`. Other runs denoise with the programs of `denoise.rs` instead.
pub(super) const TRANSFORMER: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::Transformer,
    name: "transformer",
    help: "One forward pass on the reference implementation's arguments",
    component: Component::Transformer,
    phase: Phase::Denoise,
    runs: |_| false,
    request: |run| Ok(&run.first),
    network: |spec| {
        let forward = ForwardShape {
            batch: spec.batch() * spec.shape.branches.len(),
            tokens: spec.shape.tokens,
            text: Av::both(spec.request.max_sequence_length),
            text_channels: spec.shape.text_channels,
            cross: CrossModalTimestep::Own,
            stg_blocks: spec.shape.stg_blocks.clone(),
            keyframes: spec.shape.keyframes,
            ..ForwardShape::default()
        };
        let build = spec.run.configs.component_build(Component::Transformer, spec.build);
        Ok(transformer::program(&spec.run.sizes.transformer, &forward, &build)?)
    },
    single_run: Some(SingleRun {
        help: "`hidden_states`, `encoder_hidden_states`, `timestep` … to `video`, `audio`",
        // The reference implementation's arguments, and `cross_timestep`, which the reference does not have.
        scalars: &[
            "num_frames",
            "height",
            "width",
            "fps",
            "audio_num_frames",
            "use_cross_timestep",
            "cross_timestep",
            "isolate_modalities",
            "stg_blocks",
        ],
        inputs: reference_inputs,
        smallest,
    }),
};

/// Converts the arguments of the reference implementation to inputs of the program.
fn reference_inputs(given: &mut ReferenceArguments) -> Result<Ready> {
    let c = &given.configs.transformer()?;
    let mut take =
        |names: Av<&'static str>| names.try_map(|name| given.ranked(name, 3).map(|tensor| (name.to_string(), tensor)));
    let hidden = take(Av { video: "hidden_states", audio: "audio_hidden_states" })?;
    let text = take(Av { video: "encoder_hidden_states", audio: "audio_encoder_hidden_states" })?;
    let size = |given: &Av<(String, Tensor)>, axis: usize| given.as_ref().map(|(_, tensor)| tensor.shape()[axis]);
    let (batch, tokens) = (size(&hidden, 0).video, size(&hidden, 1));
    let (levels, per_token) = noise_levels(given, batch, tokens)?;
    let masks = Av { video: "encoder_attention_mask", audio: "audio_encoder_attention_mask" };
    let masks = masks.map(|name| (name, given.optional(name)));
    let self_mask = given.optional("video_self_attention_mask");
    let keyframes = keyframes(c, given, batch, tokens.video)?;
    let perturbation = given.optional("perturbation_mask");
    let coords = coords(c, given, tokens)?;
    let stg: Vec<usize> = given.scalar("stg_blocks")?.unwrap_or_default();
    if !stg.is_empty() && !c.perturbed_attn {
        let message = "--set stg_blocks: this model has no perturbed attention (perturbed_attn is false in its config)";
        return Err(PipelineError::Usage(message.into()));
    }
    let shape = ForwardShape {
        batch,
        tokens,
        text: size(&text, 1),
        text_channels: size(&text, 2),
        per_token,
        rope_rows: coords.video.shape()[0],
        text_mask: masks.as_ref().map(|(_, mask)| mask.is_some()),
        self_mask: self_mask.is_some(),
        keyframes: keyframes.is_some(),
        cross: cross_timestep(given)?,
        isolate: given.scalar("isolate_modalities")?.unwrap_or(false),
        stg_blocks: Av::both(stg),
    };
    let mut inputs: NamedInputs = hidden.into_iter().chain(text).chain(levels).collect();
    let others = [
        ("video_self_attention_mask", self_mask),
        ("video_keyframes_mask", keyframes),
        // By default, every sample is perturbed (mask 0).
        ("perturbation_mask", Some(perturbation.unwrap_or_else(|| Array1::<f32>::zeros(batch).into()))),
    ];
    inputs.extend(masks.into_iter().chain(others).filter_map(|(n, t)| t.map(|t| (n.to_string(), t))));
    inputs.extend(tables::host_inputs(c, tables::tables(c, &coords, DType::F32)));
    let build = given.configs.component_build(Component::Transformer, given.build);
    Ok((transformer::program(c, &shape, &build)?, inputs))
}

/// Builds the smallest transformer program that declares all parameters.
fn smallest(configs: &ModelConfigs, build: &Build) -> Result<Network> {
    let c = configs.transformer()?;
    let text_channels = match c.use_prompt_embeddings {
        true => Av::both(c.caption_channels),
        false => Av { video: c.cross_attention_dim, audio: c.audio_cross_attention_dim },
    };
    let keyframes = c.use_keyframes_abs_pos_embedding;
    let shape = ForwardShape { text_channels, keyframes, ..ForwardShape::default() };
    Ok(transformer::program(&c, &shape, build)?)
}

/// Returns a mask of the video tokens that belong to a keyframe, `[batch, tokens]`: 1 where the input is greater than
/// 0. The input can have a last dimension of size 1.
fn keyframes(c: &TransformerConfig, given: &mut ReferenceArguments, batch: usize, n: usize) -> Result<Option<Tensor>> {
    const NAME: &str = "video_keyframes_mask";
    let Some(mask) = given.optional(NAME) else { return Ok(None) };
    if !c.use_keyframes_abs_pos_embedding {
        let why = "not supported by this model, which has no keyframes_abs_pos_embedding";
        return Err(PipelineError::Input(format!("input '{NAME}': {why}")));
    }
    let marked = mask.to_f32().mapv(|v| f32::from(v > 0.0));
    let wrong =
        |_| PipelineError::Input(format!("input '{NAME}' has shape {:?}, but must be [{batch}, {n}]", mask.shape()));
    Ok(Some(marked.into_shape_with_order((batch, n)).map_err(wrong)?.into()))
}

fn cross_timestep(given: &ReferenceArguments) -> Result<CrossModalTimestep> {
    match given.scalar::<String>("cross_timestep")?.as_deref() {
        Some("own") => Ok(CrossModalTimestep::Own),
        Some("cross") => Ok(CrossModalTimestep::Cross),
        Some("gate_only") => Ok(CrossModalTimestep::GateOnly),
        Some(other) => Err(PipelineError::Input(format!("--set cross_timestep={other}: use own, cross or gate_only"))),
        None if given.scalar("use_cross_timestep")?.unwrap_or(false) => Ok(CrossModalTimestep::Cross),
        None => Ok(CrossModalTimestep::Own),
    }
}

/// Returns the timesteps and the noise levels per sample of video and audio, and whether each of the two streams has
/// one timestep per token.
fn noise_levels(given: &mut ReferenceArguments, batch: usize, tokens: Av<usize>) -> Result<(NamedInputs, Av<bool>)> {
    let (video, per_token) = timesteps(given.required("timestep")?, batch, tokens.video, "timestep")?;
    let (audio, audio_per_token) = match given.optional("audio_timestep") {
        Some(t) => timesteps(t, batch, tokens.audio, "audio_timestep")?,
        None if per_token && tokens.video != tokens.audio => {
            let message = "a 'timestep' per video token also needs an input 'audio_timestep'";
            return Err(PipelineError::Input(message.into()));
        }
        None => (video.clone(), per_token),
    };
    // `sigma` defaults to the largest timestep of each sample's video tokens, and `audio_sigma` to `sigma`.
    let sigma = match given.optional("sigma") {
        Some(t) => per_sample(&t, batch, "sigma")?,
        None => largest(&video),
    };
    let audio_sigma = match given.optional("audio_sigma") {
        Some(t) => per_sample(&t, batch, "audio_sigma")?,
        None => sigma.clone(),
    };
    let named = [("timestep", video), ("audio_timestep", audio), ("sigma", sigma), ("audio_sigma", audio_sigma)];
    let per_token = Av { video: per_token, audio: audio_per_token };
    Ok((named.map(|(name, tensor)| (name.to_string(), tensor)).into(), per_token))
}

/// Reshapes the timesteps of `b` samples with `n` tokens from `[b]`, `[b, 1]`, `[b, n]` or `[b, n, 1]` to `[b]` or
/// `[b, n]`. Also returns whether there is one timestep per token.
fn timesteps(t: Tensor, batch: usize, tokens: usize, name: &str) -> Result<(Tensor, bool)> {
    let values = t.to_f32();
    let per_token = values.len() == batch * tokens && values.ndim() > 1;
    let shaped = if per_token {
        values.into_shape_with_order((batch, tokens)).map(Tensor::from)
    } else {
        values.into_shape_with_order(batch).map(Tensor::from)
    };
    let shape = t.shape().to_vec();
    let message = format!("input '{name}' has shape {shape:?}, but must be [{batch}] or [{batch}, {tokens}]");
    Ok((shaped.map_err(|_| PipelineError::Input(message))?, per_token))
}

fn per_sample(t: &Tensor, batch: usize, name: &str) -> Result<Tensor> {
    let message = format!("input '{name}' has shape {:?}, but must be [{batch}]", t.shape());
    t.to_f32().into_shape_with_order(batch).map(Tensor::from).map_err(|_| PipelineError::Input(message))
}

fn largest(t: &Tensor) -> Tensor {
    let values = t.to_f32();
    match values.ndim() {
        1 => Tensor::from(values),
        _ => Tensor::from(values.fold_axis(Dim(1), f32::NEG_INFINITY, |a, b| a.max(*b))),
    }
}

/// Returns the start and end position of each token along each axis, `[b, axes, tokens, 2]`, for video and audio: the
/// inputs, or positions that are computed from the sizes of the latents.
fn coords(c: &TransformerConfig, given: &mut ReferenceArguments, tokens: Av<usize>) -> Result<Av<Array4<f32>>> {
    let grid = |t: Tensor, name: &str| -> Result<Array4<f32>> {
        let message = format!("input '{name}' must be [b, axes, tokens, 2], but has shape {:?}", t.shape());
        t.to_f32().into_dimensionality::<Ix4>().map_err(|_| PipelineError::Input(message))
    };
    let need = |given: &ReferenceArguments, name: &str| -> Result<usize> {
        let message = || format!("no video positions: pass input 'video_coords', or --set {name} (in latent units)");
        given.scalar(name)?.ok_or_else(|| PipelineError::Input(message()))
    };
    let (video_grid, audio_grid) = coordinate_grids(c);
    let video = match given.optional("video_coords") {
        Some(t) => grid(t, "video_coords")?,
        None => {
            let [frames, height, width] = [need(given, "num_frames")?, need(given, "height")?, need(given, "width")?];
            let shape = VideoShape { batch: 1, channels: c.in_channels, frames, height, width };
            let fps = given.scalar("fps")?.unwrap_or(24.0);
            video_grid.coords(&shape, c.vae_scale_factors, c.causal_offset as i64, fps)
        }
    };
    let audio = match given.optional("audio_coords") {
        Some(t) => grid(t, "audio_coords")?,
        None => {
            let length = given.scalar("audio_num_frames")?.unwrap_or(tokens.audio);
            audio_grid.coords(1, length, c.audio_scale_factor, c.audio_patch_size_t, c.causal_offset as i64)
        }
    };
    // Repeat the positions of a stream that has only one sample, so that both streams have equally many.
    let rows = video.shape()[0].max(audio.shape()[0]);
    let broadcast = |a: Array4<f32>, name: &str| -> Result<Array4<f32>> {
        let (own, axes, tokens, bounds) = a.dim();
        let message = || format!("input '{name}' has {own} samples, but the input of the other stream has {rows}");
        let all = a.broadcast((rows, axes, tokens, bounds)).ok_or_else(|| PipelineError::Input(message()))?;
        Ok(all.to_owned())
    };
    Ok(Av { video: broadcast(video, "video_coords")?, audio: broadcast(audio, "audio_coords")? })
}
