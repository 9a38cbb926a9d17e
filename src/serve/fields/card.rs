//! Card of a server: what it makes, as `/v1/models` tells it.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::table::MAX_PROMPT;
use super::{Fields, Shape};
use crate::config::Pipeline;

/// Pipelines, sizes, defaults and limits that clients and the page build their forms from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Card {
    pub pipelines: Vec<Pipeline>,
    /// Sizes that are compiled already.
    pub shapes: Vec<Shape>,
    /// Values of fields that a request leaves out.
    pub defaults: Map<String, Value>,
    pub limits: Limits,
    /// Names of LoRAs.
    pub loras: Vec<String>,
    pub size_aliases: BTreeMap<String, String>,
}

/// The most that a request may ask for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Limits {
    pub max_tokens: usize,
    pub max_frames: usize,
    pub max_steps: usize,
    pub max_images: usize,
    /// Bytes of a body.
    pub body_limit: u64,
    /// Bytes of a prompt.
    pub max_prompt: usize,
    /// Multiple that width and height must be of.
    pub size_multiple: usize,
    /// Multiple that the number of frames is one more than.
    pub frame_step: usize,
    /// Whether other sizes than the warm ones are refused.
    pub only_warm: bool,
}

impl Fields {
    /// Card of what the server makes.
    pub fn card(&self) -> Card {
        let (config, serve) = (&self.loaded.config, self.serve());
        Card {
            pipelines: self.pipelines(),
            shapes: self.warm_shapes().expect("the server started with them"),
            defaults: self.defaults(),
            limits: Limits {
                max_tokens: serve.max_tokens,
                max_frames: serve.max_frames,
                max_steps: serve.max_steps,
                max_images: serve.max_images,
                body_limit: serve.body_limit.0,
                max_prompt: MAX_PROMPT,
                size_multiple: config.size_multiple(),
                frame_step: config.frame_step(),
                only_warm: serve.only_warm,
            },
            loras: serve.loras.keys().cloned().collect(),
            size_aliases: serve.aliases().map(|(name, size)| (name.clone(), size.clone())).collect(),
        }
    }

    /// Values of fields that a request leaves out.
    fn defaults(&self) -> Map<String, Value> {
        let config = &self.loaded.config;
        let (r, scales) = (&config.request, config.scales());
        let seconds = r.num_frames.count().map(|frames| (frames as f64 / r.frame_rate * 1000.0).round() / 1000.0);
        let defaults = json!({
            "pipeline": config.pipeline,
            "size": format!("{}x{}", r.width, r.height),
            "width": r.width,
            "height": r.height,
            "num_frames": r.num_frames,
            "fps": r.frame_rate,
            "seconds": seconds,
            "negative_prompt": r.negative_prompt,
            "num_inference_steps": config.sampler.steps,
            "fixed_steps": config.sampler.sigmas.is_some(),
            "max_sequence_length": r.max_sequence_length,
            "video_cfg_scale": scales.video.cfg,
            "audio_cfg_scale": scales.audio.cfg,
            "video_stg_scale": scales.video.stg,
            "audio_stg_scale": scales.audio.stg,
            "video_modality_scale": scales.video.modality,
            "audio_modality_scale": scales.audio.modality,
            "video_rescale_scale": scales.video.rescale,
            "audio_rescale_scale": scales.audio.rescale,
            "stg_blocks": config.guidance.stg_blocks,
            "generate_audio": config.output.audio,
        });
        match defaults {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }
}
