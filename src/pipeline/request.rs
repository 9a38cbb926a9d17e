//! From a configuration to what is asked of a model: the request, how its programs are built, how they are compiled.

use super::error::{PipelineError, Result};
use super::given::GivenFrame;
use super::models::Sizes;
use super::stages::Weights;
use super::text_to_video::{Refine, Request, Shapes};
use super::tiles::Tiling;
use crate::config::{self, AttentionKernel, Config, Dtype, FlagValue, Job, SamplerKind, WeightType};
use crate::hlo::DType;
use crate::models::transformer::CrossTimestep;
use crate::nn::{Build, Lowering, Numerics, Quantization};
use crate::pjrt::{CudaOptions, OptionValue};
use crate::runtime::plugins::is_pinned_libtpu;
use crate::runtime::processes::Group;
use crate::runtime::{EngineOptions, platform};
use crate::sampling::denoise::Sampler;
use crate::sampling::guidance::{RescaleScope, Scales, branches};
use crate::sampling::sigmas::{self, FlowMatch};

/// How programs are built for a number of devices of a platform (`cpu`, `cuda`, `tpu`), whose plugin calls them `kind`.
///
/// # Errors
/// What is wrong with layout and mesh.
pub fn build(config: &Config, devices: usize, platform: &str, kind: &str) -> Result<Build> {
    let mut lowering = Lowering::of(platform, kind);
    match config.runtime.attention {
        AttentionKernel::Cudnn if platform != "cuda" => return Err(foreign("cudnn is CUDA's", platform)),
        AttentionKernel::Mosaic if platform != "tpu" => return Err(foreign("mosaic is the TPU's", platform)),
        AttentionKernel::Plain => lowering = lowering.with_plain_attention(),
        _ => {}
    }
    Ok(Build {
        dtype: match config.runtime.dtype {
            Dtype::Bf16 => DType::BF16,
            Dtype::F32 => DType::F32,
        },
        numerics: match config.runtime.numerics {
            config::Numerics::Default => Numerics::Default,
            config::Numerics::Official => Numerics::Official,
        },
        layout: config.placement(devices)?,
        quantization: quantization(config.runtime.weights, &lowering, platform)?,
        lowering,
    })
}

fn foreign(kernel: &str, platform: &str) -> PipelineError {
    PipelineError::Usage(format!("runtime.attention: {kernel}, the platform is {platform}"))
}

/// The configuration with what it leaves open decided for the devices that are there: the layout, and attention, whose
/// kernel's text only the libtpu that it was tried with is given. `version` is the plugin's, of itself.
pub fn settled(config: &Config, platform: &str, version: &str, devices: usize) -> Config {
    let [video, audio] = scales(config);
    let mut config = config.settled(platform, devices, branches(video, audio).len());
    let auto = platform == "tpu" && config.runtime.attention == AttentionKernel::Auto;
    if auto && !is_pinned_libtpu(version) {
        config.runtime.attention = AttentionKernel::Plain;
    }
    config
}

/// How strongly each stream follows the prompt, as the denoising program takes it.
pub fn scales(config: &Config) -> [Scales; 2] {
    config.scales().map(|s| Scales {
        cfg: s.cfg as f32,
        stg: s.stg as f32,
        modality: s.modality as f32,
        rescale: s.rescale as f32,
    })
}

/// What a platform is opened with, by one of several processes or alone.
///
/// # Errors
/// No such layout, or a mesh that cannot be meant.
pub fn platform_options(config: &Config, group: Option<&Group>) -> Result<platform::Options> {
    let fraction = config.runtime.memory_fraction;
    let each = config.runtime.distributed.devices_per_process.zip(group);
    let shared =
        each.map(|(n, group)| (group.local_rank() * n..(group.local_rank() + 1) * n).map(|i| i as i64).collect());
    let visible = config.runtime.visible_devices.clone().or(shared);
    Ok(platform::Options {
        node: group.map(Group::node),
        cpu_devices: Some(config.virtual_devices()?),
        cuda: CudaOptions { memory_fraction: fraction, visible_devices: visible, ..CudaOptions::default() },
    })
}

/// How a platform multiplies the transformer's blocks.
///
/// # Errors
/// 8-bit floats on a platform whose layers cannot differ.
pub fn quantization(weights: WeightType, lowering: &Lowering, platform: &str) -> Result<Quantization> {
    match weights {
        WeightType::Bf16 => Ok(Quantization::None),
        WeightType::Fp8 if lowering.unroll_layers => Ok(Quantization::Fp8),
        WeightType::Fp8 => {
            Err(PipelineError::Usage(format!("runtime.weights: fp8 is CUDA's, the platform is {platform}")))
        }
    }
}

/// Says what the transformer's blocks run in, and what the checkpoint has.
///
/// # Errors
/// The transformer's files cannot be read.
pub fn log_weights(weights: WeightType, stored: &Weights) -> Result<()> {
    let weights = match weights {
        WeightType::Bf16 => "bf16",
        WeightType::Fp8 => "fp8",
    };
    tracing::info!("blocks of the transformer: runtime.weights {weights}; the model has {}", stored.describe_blocks()?);
    Ok(())
}

/// How programs are compiled.
pub fn engine_options(config: &Config) -> EngineOptions {
    let flag = |value: &FlagValue| match value {
        FlagValue::Bool(v) => OptionValue::Bool(*v),
        FlagValue::Int(v) => OptionValue::Int(*v),
        FlagValue::Float(v) => OptionValue::Float(*v),
        FlagValue::Text(v) => OptionValue::Text(v.clone()),
    };
    EngineOptions {
        xla_flags: config.runtime.xla_flags.iter().map(|(n, v)| (n.clone(), flag(v))).collect(),
        compile_cache: config.compile_cache(),
        traceable: false,
    }
}

/// The noise levels of a configuration, from the first step's to the final 0.
///
/// # Errors
/// A list or a number of steps that cannot be used.
pub fn sigmas(config: &Config, scheduler: &FlowMatch, video_tokens: usize) -> Result<Vec<f32>> {
    // The official HQ pipeline alone shifts for the first stage's own size.
    let anchor = if config.pipeline == config::Pipeline::Hq { video_tokens } else { sigmas::OFFICIAL_TOKENS };
    let diffusers = config.sampler.sigma_shift == config::Reference::Diffusers;
    Ok(match &config.sampler.sigmas {
        Some(list) if diffusers => scheduler.shifted(list, video_tokens)?,
        Some(list) => sigmas::verbatim(list)?,
        None if diffusers => scheduler.sigmas(config.sampler.steps, video_tokens)?,
        None => sigmas::official(config.sampler.steps, anchor)?,
    })
}

/// A job as the model takes it, still without noise levels: no program depends on them.
///
/// # Errors
/// Sizes that the model does not take, with the nearest that it does.
pub fn of_job(config: &Config, sizes: &Sizes, job: &Job) -> Result<Request> {
    let r = &config.request;
    Shapes::new(sizes, r.width, r.height, r.num_frames, r.frame_rate)?;
    let multiple = sizes.token_multiple;
    if !r.max_sequence_length.is_multiple_of(multiple) {
        let low = (r.max_sequence_length / multiple).max(1) * multiple;
        return Err(PipelineError::Usage(format!(
            "max_sequence_length {} is not a multiple of the connectors' {multiple} registers; the nearest are {low} and {}",
            r.max_sequence_length,
            low + multiple
        )));
    }
    let scales = scales(config);
    let layers = sizes.transformer.num_layers;
    if let Some(bad) = config.guidance.stg_blocks.iter().find(|b| **b >= layers) {
        let message = format!("guidance.stg_blocks: {bad} is not a block of this model, which has {layers}");
        return Err(PipelineError::Usage(message));
    }
    Ok(Request {
        prompt: job.prompt.clone(),
        negative_prompt: r.negative_prompt.clone(),
        width: r.width,
        height: r.height,
        num_frames: r.num_frames,
        frame_rate: r.frame_rate,
        seed: job.seed,
        noise: config.sampler.noise,
        sigmas: Vec::new(),
        scales,
        stg_blocks: config.guidance.stg_blocks.clone(),
        rescale: match config.guidance.rescale_scope {
            config::RescaleScope::PerSample => RescaleScope::PerSample,
            config::RescaleScope::Batch => RescaleScope::Batch,
        },
        max_sequence_length: r.max_sequence_length,
        sampler: match config.sampler.kind {
            SamplerKind::Euler => Sampler::Euler,
            SamplerKind::Res2s => Sampler::Res2s,
        },
        cross: cross_timestep(config),
        given: given(config),
        refine: refine(config)?,
        tiling: config.runtime.tiling.map(|t| Tiling {
            pixels: t.pixels,
            overlap: t.overlap,
            frames: t.frames,
            frame_overlap: t.frame_overlap,
        }),
    })
}

/// The noise level that the attention between the streams sees.
fn cross_timestep(config: &Config) -> CrossTimestep {
    use config::CrossTimestep as Key;
    match config.conditioning.cross_timestep {
        Key::Official | Key::GateOnly => CrossTimestep::GateOnly,
        Key::Diffusers | Key::Cross => CrossTimestep::Cross,
        Key::Own => CrossTimestep::Own,
    }
}

/// The frames that a request gives.
fn given(config: &Config) -> Vec<GivenFrame> {
    let all = config.pipeline == config::Pipeline::Keyframes;
    let frame = |image: &config::Image| GivenFrame {
        path: image.path.clone().into(),
        frame: image.frame,
        strength: image.strength as f32,
        crf: image.crf,
        appended: all || image.frame != 0,
    };
    config.request.images.iter().map(frame).collect()
}

/// What a second stage does, where the pipeline has one.
fn refine(config: &Config) -> Result<Option<Refine>> {
    use config::{Pipeline, StageAudio};
    let two = &config.two_stage;
    if !config.pipeline.has_two_stages() {
        return Ok(None);
    }
    Ok(Some(Refine {
        sigmas: sigmas::verbatim(&two.sigmas)?,
        keeps_audio: match two.audio {
            StageAudio::Official => matches!(config.pipeline, Pipeline::Distilled | Pipeline::Keyframes),
            StageAudio::Stage1 => false,
            StageAudio::Diffusers | StageAudio::Stage2 => true,
        },
        adain: two.adain as f32,
        tone_map: two.tone_map as f32,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Given, load};

    fn config(set: &[&str]) -> Config {
        let set = set.iter().map(|s| (*s).to_string()).collect();
        load(&Given { set, ..Given::default() }).expect("a configuration").config
    }

    #[test]
    fn noise_levels_follow_the_reference_and_the_pipeline() {
        let scheduler = FlowMatch { use_dynamic_shifting: true, shift_terminal: Some(0.1), ..FlowMatch::default() };
        let of = |set: &[&str]| sigmas(&config(set), &scheduler, 1000).expect("a schedule");
        let (steps, list) = ("sampler.steps=6", "sampler.sigmas=[0.9, 0.4]");
        let diffusers = "sampler.sigma_shift=diffusers";
        assert_eq!(of(&[steps]), sigmas::official(6, sigmas::OFFICIAL_TOKENS).expect("a schedule"));
        assert_eq!(of(&[steps, "pipeline=hq"]), sigmas::official(6, 1000).expect("a schedule"));
        assert_eq!(of(&[steps, "pipeline=two_stage"]), of(&[steps]));
        assert_eq!(of(&[steps, diffusers]), scheduler.sigmas(6, 1000).expect("a schedule"));
        assert_eq!(of(&[list]), [0.9, 0.4, 0.0]);
        assert_eq!(of(&[list, diffusers]), scheduler.shifted(&[0.9, 0.4], 1000).expect("a schedule"));
    }

    #[test]
    fn the_stage_whose_sound_is_kept_follows_the_reference_and_the_pipeline() {
        let kept = |set: &[&str]| refine(&config(set)).expect("legal").map(|r| r.keeps_audio);
        assert_eq!(kept(&[]), None);
        for (pipeline, official) in [("two_stage", false), ("hq", false), ("distilled", true)] {
            let pipeline = &*format!("pipeline={pipeline}");
            let with = |audio: &str| kept(&[pipeline, &format!("two_stage.audio={audio}")]);
            let all = ["official", "diffusers", "stage_1", "stage_2"].map(with);
            assert_eq!(all, [Some(official), Some(true), Some(false), Some(true)], "{pipeline}");
        }
    }
}
