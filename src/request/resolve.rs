//! From a configuration to a request.

use super::{ModelSizes, RefinePass, Request, RequestError, Shapes, Tiling, conditions};
use crate::av::Av;
use crate::config::{self, Config, Job};
use crate::models::transformer::CrossTimestep;
use crate::sampling::SamplingError;
use crate::sampling::guidance::{RescaleScope, Scales};
use crate::sampling::sigmas::{self, FlowMatch};

/// Guidance scales of video and audio.
pub(crate) fn scales(config: &Config) -> Av<Scales> {
    config.scales().map(|s| Scales {
        cfg: s.cfg as f32,
        stg: s.stg as f32,
        modality: s.modality as f32,
        rescale: s.rescale as f32,
    })
}

/// Noise levels of a configuration, from the first step's to the final 0.
///
/// # Errors
/// A list or a number of steps that cannot be used.
pub(crate) fn sigmas(config: &Config, scheduler: &FlowMatch, video_tokens: usize) -> Result<Vec<f32>, SamplingError> {
    let anchor = if config.pipeline.shifts_for_own_size() { video_tokens } else { sigmas::OFFICIAL_TOKENS };
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
/// ModelSizes that the model does not take, with the nearest that it does.
pub(crate) fn of_job(config: &Config, sizes: &ModelSizes, job: &Job) -> Result<Request, RequestError> {
    let r = &config.request;
    Shapes::new(sizes, r.width, r.height, r.num_frames, r.frame_rate)?;
    let multiple = sizes.token_multiple;
    if !r.max_sequence_length.is_multiple_of(multiple) {
        let low = (r.max_sequence_length / multiple).max(1) * multiple;
        return Err(RequestError::Usage(format!(
            "max_sequence_length {} is not a multiple of the connectors' {multiple} registers; the nearest are {low} and {}",
            r.max_sequence_length,
            low + multiple
        )));
    }
    let scales = scales(config);
    let layers = sizes.transformer.num_layers;
    if let Some(bad) = config.guidance.stg_blocks.iter().find(|b| **b >= layers) {
        let message = format!("guidance.stg_blocks: {bad} is not a block of this model, which has {layers}");
        return Err(RequestError::Usage(message));
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
        sampler: config.sampler.kind.sampler(config.sampler.options()).map_err(|(key, value)| {
            RequestError::Usage(format!("{key} = {value}: this sampler takes no such setting"))
        })?,
        cross: cross_timestep(config),
        conditions: conditions(config)?,
        refine: refine(config)?,
        tiling: config.runtime.tiling.map(|t| Tiling {
            pixels: t.pixels,
            overlap: t.overlap,
            frames: t.frames,
            frame_overlap: t.frame_overlap,
        }),
    })
}

/// Noise level that the attention between the streams sees.
fn cross_timestep(config: &Config) -> CrossTimestep {
    use config::CrossTimestep as Key;
    match config.conditioning.cross_timestep {
        Key::Official | Key::GateOnly => CrossTimestep::GateOnly,
        Key::Diffusers | Key::Cross => CrossTimestep::Cross,
        Key::Own => CrossTimestep::Own,
    }
}

/// The second pass, where the pipeline has one.
fn refine(config: &Config) -> Result<Option<RefinePass>, SamplingError> {
    use config::StageAudio;
    let two = &config.two_stage;
    if !config.pipeline.has_two_stages() {
        return Ok(None);
    }
    Ok(Some(RefinePass {
        sigmas: sigmas::verbatim(&two.sigmas)?,
        keeps_audio: match two.audio {
            StageAudio::Official => config.pipeline.keeps_refined_audio(),
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
    use crate::config::{CliOverrides, load};

    fn config(set: &[&str]) -> Config {
        let set = set.iter().map(|s| (*s).to_string()).collect();
        load(&CliOverrides { set, ..CliOverrides::default() }).expect("a configuration").config
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
