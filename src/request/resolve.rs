//! Converts a configuration to a request.

use std::path::PathBuf;

use super::guidance::{all_scales, guidance, guider, roles};
use super::{
    Canvas, ClipChain, DfrPlan, DfrReference, LatentTiling, ModelSizes, NoiseOrder, Noising, OutputComposition,
    RefinePass, Request, RequestError, Shapes, TileSizes, conditions,
};
use crate::av::Av;
use crate::config::ConfigErrorKind::{OutOfRange, Unsupported};
use crate::config::{self, Config, ConfigError, Dtype, ExtendAt, Limit, Reference, RetakeSource, VideoUse};
use crate::hlo::DType;
use crate::models::transformer::{CrossModalTimestep, TransformerConfig};
use crate::sampling::denoise::{CleanPrediction, StreamRole};
use crate::sampling::guidance::{GuidanceScales, RescaleExtent};
use crate::sampling::schedules::{self, ScheduleKind};
use crate::sampling::sigmas::{self, FlowMatch};
use crate::sampling::{AnySampler, SamplingError, StepDraws};

/// Returns the noise levels of the first pass, ending with 0.
///
/// # Errors
/// Returns an error if the list of sigmas or the number of steps is invalid.
pub(crate) fn sigmas(config: &Config, scheduler: &FlowMatch, shapes: &Shapes) -> Result<Vec<f32>, SamplingError> {
    let anchor =
        if config.pipeline.spec().shifts_for_own_size { shapes.own_tokens().video } else { sigmas::OFFICIAL_TOKENS };
    // diffusers also counts appended tokens.
    let video_tokens = shapes.tokens.video;
    let diffusers = config.sampler.sigma_shift == Reference::Diffusers;
    Ok(match &config.sampler.sigmas {
        Some(list) if diffusers => scheduler.shifted(list, video_tokens)?,
        Some(list) => sigmas::verbatim(list)?,
        None if config.sampler.schedule == ScheduleKind::Beta => {
            schedules::beta(config.sampler.steps, &config.sampler.beta)?
        }
        None if config.sampler.schedule == ScheduleKind::LinearQuadratic => {
            schedules::linear_quadratic(config.sampler.steps)?
        }
        None if diffusers => scheduler.sigmas(config.sampler.steps, video_tokens)?,
        None => sigmas::official(config.sampler.steps, anchor)?,
    })
}

/// Returns a warning if the scheduler configuration does not belong to the LTX-2.5 transformer that the configuration
/// seems to use (dev or distilled). The published folder contains both transformers but only the scheduler of the
/// distilled one, which diffusers then uses for both.
pub(crate) fn scheduler_mismatch_warning(config: &Config, scheduler: &FlowMatch) -> Option<&'static str> {
    let diffusers = config.sampler.sigma_shift == Reference::Diffusers;
    match (&config.sampler.sigmas, scheduler.use_dynamic_shifting) {
        (None, false) if diffusers => Some(
            "`use_dynamic_shifting` is false, as for the distilled transformer; for the dev transformer set it to true and \
             `shift_terminal` to 0.1, or use sampler.sigma_shift: official",
        ),
        (Some(_), true) if diffusers => Some(
            "`use_dynamic_shifting` is true, as for the dev transformer, and also shifts sampler.sigmas; for the distilled \
             transformer set it to false and `shift_terminal` to null, or use sampler.sigma_shift: official",
        ),
        _ => None,
    }
}

/// Checks that the model supports the sizes and features of a configuration.
fn check_model(config: &Config, sizes: &ModelSizes, num_frames: usize) -> Result<(), RequestError> {
    let r = &config.request;
    Shapes::new(sizes, r.width, r.height, num_frames, r.frame_rate)?;
    let multiple = sizes.token_multiple;
    if !r.max_sequence_length.is_multiple_of(multiple) {
        let low = (r.max_sequence_length / multiple).max(1) * multiple;
        let with = " (the least common multiple of the connectors' register counts)".into();
        let limit = Limit::Step { step: multiple, remainder: 0, with, nearest: [low, low + multiple] };
        return Err(ConfigError::value(OutOfRange, "request.max_sequence_length", r.max_sequence_length, limit).into());
    }
    let marks = sizes.transformer.use_keyframes_abs_pos_embedding;
    if config.pipeline.spec().has_rounds() && !marks {
        let why = "this transformer has no keyframe embedding (keyframes_abs_pos_embedding); use an LTX-2.5 \
                   transformer with this tensor, or another pipeline";
        return Err(ConfigError::value(Unsupported, "pipeline", config.pipeline.name(), why).into());
    }
    let slots = config.conditioning.generated_keyframes;
    if slots > 0 && !marks {
        let why = "this transformer has no keyframe embedding (keyframes_abs_pos_embedding); use an LTX-2.5 \
                   transformer with this tensor, or set 0";
        return Err(ConfigError::value(Unsupported, "conditioning.generated_keyframes", slots, why).into());
    }
    Ok(())
}

/// Returns the number of frames of a configuration.
///
/// # Errors
/// Returns an error for `auto`.
pub(crate) fn frame_count(config: &Config) -> Result<usize, ConfigError> {
    config.request.num_frames.count().ok_or_else(|| {
        let why = "auto is only supported by `ltx2 generate`; pass a number of frames";
        ConfigError::key(Unsupported, "request.num_frames", why)
    })
}

/// Returns the request of a configuration, without prompt, seed and noise levels: no program depends on them.
///
/// # Errors
/// Returns an error, which says what to change, if the configuration is invalid or the model does not support it.
pub(crate) fn resolve(config: &Config, sizes: &ModelSizes) -> Result<Request, RequestError> {
    let r = &config.request;
    let num_frames = frame_count(config)?;
    let chain = ClipChain::from_config(config, num_frames);
    let num_frames = chain.as_ref().map_or(num_frames, |chain| chain.clip);
    check_model(config, sizes, num_frames)?;
    let roles = roles(config);
    let (scales, guidance_steps) = guidance(config, roles);
    let dfr = dfr(config, num_frames, sizes.video_grid.temporal_compression)?;
    Ok(Request {
        prompt: String::new(),
        negative_prompt: r.negative_prompt.clone(),
        width: r.width,
        height: r.height,
        num_frames,
        frame_rate: r.frame_rate,
        position_rate: dfr.as_ref().map(|dfr| dfr.reference.pass_rate(r.frame_rate)),
        motion_speed: r.motion_speed,
        sound_frames: None,
        seed: 0,
        noise: config.sampler.noise,
        noise_order: match config.sampler.noise_order {
            // In the pipeline `dfr`, both reference implementations draw noise in this order.
            _ if dfr.is_some() => NoiseOrder::Tokens,
            Reference::Official | Reference::Official1 => NoiseOrder::Latents,
            Reference::Diffusers => NoiseOrder::Diffusers,
        },
        sigmas: Vec::new(),
        scales,
        stg_blocks: stg_blocks(config, &sizes.transformer, &perturbing_scales(config, roles))?,
        guidance_steps,
        guider: guider(config)?,
        rescale: match config.guidance.rescale_scope {
            config::RescaleScope::PerSample => RescaleExtent::PerSample,
            config::RescaleScope::Batch => RescaleExtent::Batch,
        },
        // On a server, pipelines without HDR share the configuration that sets this file.
        text_embeddings: r.text_embeddings.as_ref().filter(|_| config.pipeline.spec().hdr).map(PathBuf::from),
        max_sequence_length: r.max_sequence_length,
        sampler: samplers(config)?.0,
        cache: config.sampler.cache.step_cache(),
        cross: cross_timestep(config),
        first_frame_marker: dfr.is_some() || config.conditioning.first_frame_marker != Reference::Diffusers,
        noising: match config.conditioning.noising {
            // In the pipeline `dfr`, both reference implementations start from these latents.
            _ if dfr.is_some() => Noising::Latents,
            Reference::Official => Noising::Latents,
            Reference::Official1 | Reference::Diffusers => Noising::Known,
        },
        clean_prediction: match config.conditioning.clean_prediction {
            // In the pipeline `dfr`, both reference implementations use the token's own noise level.
            _ if dfr.is_some() => CleanPrediction::Token,
            Reference::Official | Reference::Official1 => CleanPrediction::Token,
            Reference::Diffusers => CleanPrediction::Step,
        },
        positions: positions(config),
        roles,
        draws_kept: true,
        clip: None,
        sound: None,
        composition: composition(config),
        chain,
        conditions: conditions(config)?,
        refine: refine(config)?,
        dfr,
        tiling: config.runtime.tiling.map(|t| TileSizes {
            pixels: t.pixels,
            overlap: t.overlap,
            frames: t.frames,
            frame_overlap: t.frame_overlap,
        }),
        hdr: config.hdr_transform(),
    })
}

fn composition(config: &Config) -> OutputComposition {
    match (config.pipeline.spec().video, &config.request.extend) {
        (Some(VideoUse::Whole), _) => OutputComposition::Frames,
        (Some(VideoUse::Span), _)
            if config.request.retake.as_ref().is_some_and(|span| span.kept == RetakeSource::Source) =>
        {
            OutputComposition::RegeneratedSpan
        }
        (Some(VideoUse::Overlap), Some(extend)) if extend.at == ExtendAt::Start => {
            OutputComposition::ExtendedAtStart(extend.overlap)
        }
        (Some(VideoUse::Overlap), Some(extend)) => OutputComposition::ExtendedAtEnd(extend.overlap),
        _ => OutputComposition::None,
    }
}

/// Returns the options of a pipeline with rounds; `None` for other pipelines.
fn dfr(config: &Config, frames: usize, compression: usize) -> Result<Option<DfrPlan>, RequestError> {
    if !config.pipeline.spec().has_rounds() {
        return Ok(None);
    }
    let reference =
        if config.reference == Reference::Diffusers { DfrReference::Diffusers } else { DfrReference::Official };
    Ok(Some(DfrPlan {
        canvas: Canvas::from_frames(frames, compression)?,
        detailing: config.follows_first_stage(),
        temporal_rounds: config.dfr.temporal_rounds,
        sigmas: sigmas::verbatim(&config.dfr.sigmas)?,
        // In both reference implementations, each tile has its own generator.
        draws: match config.sampler.options(config.runtime.dtype).draws {
            StepDraws::Continued => StepDraws::Own,
            own => own,
        },
        reference,
    }))
}

/// Returns the type to which video positions are rounded. Lightricks' version 1.0.0 rounds them to `runtime.dtype`.
fn positions(config: &Config) -> DType {
    match (config.runtime.positions, config.runtime.dtype) {
        (Reference::Official1, Dtype::Bf16) => DType::BF16,
        _ => DType::F32,
    }
}

/// Returns the guidance scales at all noise levels, which determine the streams that STG perturbs. As in Lightricks'
/// code, STG also perturbs a stream that a retake keeps if the STG scale of this stream is not 0. It does not perturb
/// other input streams.
fn perturbing_scales(config: &Config, roles: Av<StreamRole>) -> Av<Vec<GuidanceScales>> {
    let roles = if config.pipeline.spec().video == Some(VideoUse::Span) { Av::default() } else { roles };
    let (scales, steps) = guidance(config, roles);
    all_scales(scales, &steps)
}

/// Returns the indices of the transformer blocks that the perturbed branch perturbs in each stream.
fn stg_blocks(
    config: &Config,
    c: &TransformerConfig,
    scales: &Av<Vec<GuidanceScales>>,
) -> Result<Av<Vec<usize>>, RequestError> {
    let guidance = &config.guidance;
    let own = Av { video: &guidance.video, audio: &guidance.audio };
    let wanted = own.map(|s| s.stg_blocks.as_ref().unwrap_or(&guidance.stg_blocks));
    let own_stg = scales.as_ref().map(|all| all.iter().any(|s| s.stg != 0.0));
    let any = own_stg.into_iter().any(|own| own);
    let perturbed = own_stg.map(|own| match guidance.stg_streams {
        Reference::Official | Reference::Official1 => own,
        Reference::Diffusers => any && c.perturbed_attn,
    });
    let blocks = wanted.zip(perturbed).map(|(blocks, on)| if on { blocks.clone() } else { Vec::new() });
    let layers = c.num_layers;
    if config.model.blocks.is_some() {
        // Clamp the indices to the blocks that are used: the amount of work does not depend on which block is
        // perturbed.
        return Ok(blocks.map(|blocks| {
            let mut blocks: Vec<usize> = blocks.into_iter().map(|b| b.min(layers - 1)).collect();
            blocks.dedup();
            blocks
        }));
    }
    let keys = Av { video: "guidance.video.stg_blocks", audio: "guidance.audio.stg_blocks" };
    for ((key, own), blocks) in keys.zip(own).zip(blocks.as_ref()) {
        if let Some(bad) = blocks.iter().find(|b| **b >= layers) {
            let key = own.stg_blocks.as_ref().map_or("guidance.stg_blocks", |_| key);
            let why = format!(
                "{bad} is not a block of this model, which has {layers} blocks; use blocks from 0 to {}, or disable STG",
                layers - 1
            );
            return Err(ConfigError::key(OutOfRange, key, why).into());
        }
    }
    Ok(blocks)
}

fn cross_timestep(config: &Config) -> CrossModalTimestep {
    use config::CrossTimestep as Key;
    match config.conditioning.cross_timestep {
        Key::Official | Key::GateOnly => CrossModalTimestep::GateOnly,
        Key::Official1 | Key::Diffusers | Key::Cross => CrossModalTimestep::Cross,
        Key::Own => CrossModalTimestep::Own,
    }
}

/// Returns the samplers of both passes.
fn samplers(config: &Config) -> Result<(AnySampler, AnySampler), ConfigError> {
    let fault = |(key, value): (_, String)| {
        ConfigError::value(Unsupported, key, value, "this sampler does not have this option")
    };
    config.samplers().map_err(fault)
}

/// Returns the second pass; `None` for one-stage pipelines.
fn refine(config: &Config) -> Result<Option<RefinePass>, RequestError> {
    use config::StageAudio;
    let two = &config.two_stage;
    if !config.pipeline.has_two_stages() {
        return Ok(None);
    }
    Ok(Some(RefinePass {
        upsample: config.upsamplings().to_vec(),
        sigmas: sigmas::verbatim(&two.sigmas)?,
        sampler: samplers(config)?.1,
        cache: two.cache.step_cache(),
        keeps_audio: match two.audio {
            StageAudio::Official => config.pipeline.spec().keeps_refined_audio,
            StageAudio::Stage1 => false,
            // The diffusers DFR pipeline outputs the audio of the first pass.
            StageAudio::Diffusers if config.pipeline.spec().has_rounds() => false,
            StageAudio::Official1 | StageAudio::Diffusers | StageAudio::Stage2 => true,
        },
        adain: two.adain as f32,
        tone_map: two.tone_map as f32,
        tiles: config.pipeline.spec().hdr.then_some(LatentTiling::HDR),
    }))
}

#[cfg(test)]
mod tests {
    use super::super::guidance::scales;
    use super::super::tests::config;
    use super::*;
    use crate::config::Pipeline;
    use crate::sampling::latents::{AudioShape, VideoShape};

    #[test]
    fn noise_levels_follow_the_reference_and_the_pipeline() {
        let scheduler = FlowMatch { use_dynamic_shifting: true, shift_terminal: Some(0.1), ..FlowMatch::default() };
        let video = VideoShape { batch: 1, channels: 1, frames: 1, height: 25, width: 32 };
        let audio = AudioShape { batch: 1, channels: 1, length: 1, mel_bins: 1 };
        // 200 of the 1000 tokens are appended.
        let tokens = Av { video: 1000, audio: 1 };
        let roles = Av::default();
        let shapes =
            Shapes { video, audio, tokens, appended: Av { video: 200, audio: 0 }, roles, drawn: Av::both(true) };
        let of = |set: &[&str]| sigmas(&config(set), &scheduler, &shapes).expect("a schedule");
        let (steps, list) = ("sampler.steps=6", "sampler.sigmas=[0.9, 0.4]");
        let diffusers = "sampler.sigma_shift=diffusers";
        assert_eq!(of(&[steps]), sigmas::official(6, sigmas::OFFICIAL_TOKENS).expect("a schedule"));
        assert_eq!(of(&[steps, "pipeline=hq"]), sigmas::official(6, 800).expect("a schedule"));
        assert_eq!(of(&[steps, "pipeline=two_stage"]), of(&[steps]));
        assert_eq!(of(&[steps, diffusers]), scheduler.sigmas(6, 1000).expect("a schedule"));
        assert_eq!(of(&[list]), [0.9, 0.4, 0.0]);
        assert_eq!(of(&[list, diffusers]), scheduler.shifted(&[0.9, 0.4], 1000).expect("a schedule"));
    }

    #[test]
    fn scheduler_of_wrong_transformer_gives_a_warning() {
        let dev = FlowMatch { use_dynamic_shifting: true, shift_terminal: Some(0.1), ..FlowMatch::default() };
        let (steps, list) = ("sampler.steps=6", "sampler.sigmas=[0.9, 0.4]");
        let said = |set: &[&str], scheduler: &FlowMatch| scheduler_mismatch_warning(&config(set), scheduler);
        let (distilled, diffusers) = (FlowMatch::default(), "reference=diffusers");
        for (set, scheduler, word) in [(steps, &distilled, "is false"), (list, &dev, "is true")] {
            assert!(said(&[set, diffusers], scheduler).expect("a warning").contains(word));
            assert_eq!(said(&[set], scheduler), None);
        }
        assert_eq!([said(&[steps, diffusers], &dev), said(&[list, diffusers], &distilled)], [None; 2]);
        // The distilled transformer's scheduler uses a list of sigmas unchanged.
        let video = VideoShape { batch: 1, channels: 1, frames: 1, height: 25, width: 32 };
        let audio = AudioShape { batch: 1, channels: 1, length: 1, mel_bins: 1 };
        let tokens = Av { video: 800, audio: 1 };
        let roles = Av::default();
        let shapes = Shapes { video, audio, tokens, appended: Av::default(), roles, drawn: Av::both(true) };
        assert_eq!(sigmas(&config(&[list, diffusers]), &distilled, &shapes).expect("a schedule"), [0.9, 0.4, 0.0]);
    }

    #[test]
    fn position_type_follows_the_reference() {
        let of = |set: &[&str]| positions(&config(set));
        assert_eq!(of(&["reference=official_1_0", "runtime.dtype=bf16"]), DType::BF16);
        assert_eq!(of(&["reference=official_1_0", "runtime.dtype=f32"]), DType::F32);
        assert_eq!(of(&["reference=official", "runtime.dtype=bf16"]), DType::F32);
        assert_eq!(of(&["runtime.positions=official_1_0", "runtime.dtype=bf16"]), DType::BF16);
    }

    #[test]
    fn perturbed_blocks_follow_the_reference() {
        let c = TransformerConfig { num_layers: 4, perturbed_attn: true, ..TransformerConfig::default() };
        let blocks = |c: &TransformerConfig, set: &[&str]| {
            let config = config(&[&["guidance.stg_blocks=[2]"], set].concat());
            stg_blocks(&config, c, &scales(&config).map(|own| vec![own])).map(|own| [own.video, own.audio])
        };
        let none = Vec::<usize>::new;
        let (video, audio) = (["guidance.video.stg=1", "guidance.audio.stg=0"], "guidance.audio.stg_blocks=[0, 3]");
        let official = |set: &[&str]| blocks(&c, set).expect("legal");
        assert_eq!(official(&[]), [none(), none()]);
        assert_eq!(official(&video), [vec![2], none()]);
        assert_eq!(official(&["guidance.audio.stg=1", "guidance.video.stg=0"]), [none(), vec![2]]);
        assert_eq!(official(&["guidance.video.stg=1", "guidance.audio.stg=1", audio]), [vec![2], vec![0, 3]]);
        // diffusers perturbs both streams, or neither if the model has no perturbed attention.
        let diffusers = [&video[..], &["guidance.stg_streams=diffusers"]].concat();
        assert_eq!(blocks(&c, &diffusers).expect("legal"), [vec![2], vec![2]]);
        let plain = TransformerConfig { perturbed_attn: false, ..c.clone() };
        assert_eq!(blocks(&plain, &diffusers).expect("legal"), [none(), none()]);
        assert_eq!(blocks(&plain, &video).expect("legal"), [vec![2], none()]);
        // A block index out of range is accepted if STG is off.
        assert_eq!(official(&["guidance.stg_blocks=[29]"]), [none(), none()]);
        // Input streams: one that a retake keeps is perturbed, a complete input video is not.
        let given = |pipeline, retake| {
            let mut config = config(&["guidance.stg_blocks=[2]", "guidance.video.stg=1", "guidance.audio.stg=1"]);
            (config.pipeline, config.request.retake) = (pipeline, retake);
            let blocks = stg_blocks(&config, &c, &perturbing_scales(&config, roles(&config))).expect("legal");
            [blocks.video, blocks.audio]
        };
        let kept = config::RetakeSource::default();
        let span = config::Retake { from: 0.5, to: None, video: true, audio: false, kept };
        assert_eq!(given(Pipeline::Retake, Some(span)), [vec![2], vec![2]]);
        assert_eq!(given(Pipeline::VideoToAudio, None), [none(), vec![2]]);
        let fault = |set: &[&str]| blocks(&c, set).expect_err("no such block").to_string();
        let wrong = fault(&["guidance.stg_blocks=[29]", "guidance.video.stg=1"]);
        assert_eq!(
            wrong,
            "guidance.stg_blocks: 29 is not a block of this model, which has 4 blocks; use blocks from 0 to 3, or disable STG"
        );
        let wrong = fault(&["guidance.audio.stg_blocks=[4]", "guidance.audio.stg=1"]);
        assert_eq!(
            wrong,
            "guidance.audio.stg_blocks: 4 is not a block of this model, which has 4 blocks; use blocks from 0 to 3, or disable STG"
        );
    }

    #[test]
    fn stage_of_the_output_audio_follows_reference_and_pipeline() {
        let kept = |set: &[&str]| refine(&config(set)).expect("legal").map(|r| r.keeps_audio);
        assert_eq!(kept(&[]), None);
        for (pipeline, official) in [("two_stage", false), ("hq", false), ("distilled", true)] {
            let pipeline = &*format!("pipeline={pipeline}");
            let with = |audio: &str| kept(&[pipeline, &format!("two_stage.audio={audio}")]);
            let all = ["official", "official_1_0", "diffusers", "stage_1", "stage_2"].map(with);
            assert_eq!(all, [Some(official), Some(true), Some(true), Some(false), Some(true)], "{pipeline}");
        }
    }
}
