//! Description of a server's model and limits, returned by `/v1/models`.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::table::MAX_PROMPT;
use super::{Fields, Shape};
use crate::config::{Pipeline, Support, VideoUse};

/// Pipelines, sizes, defaults and limits of a server. Clients and the web page build their input forms from them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ServerCard {
    pub pipelines: Vec<Pipeline>,
    /// Inputs of each pipeline, by its name.
    pub pipeline_inputs: BTreeMap<&'static str, PipelineInputs>,
    /// Shapes that are compiled before the server is ready.
    pub shapes: Vec<Shape>,
    /// Default values of request fields, by field name.
    pub defaults: Map<String, Value>,
    pub limits: RequestLimits,
    /// Names of the available LoRAs.
    pub loras: Vec<String>,
    /// Names of the available published IC-LoRAs.
    pub ic_loras: Vec<String>,
    pub size_aliases: BTreeMap<String, String>,
}

/// Inputs that a pipeline accepts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PipelineInputs {
    /// Whether a second pass at a larger size refines the first. Width and height must then be multiples of 64.
    pub two_stages: bool,
    pub images: Support,
    pub audio: Support,
    pub reference_videos: Support,
    /// Use of the required input video. `None`: the pipeline rejects input videos.
    pub video: Option<VideoUse>,
    /// Whether the video is HDR video, with the variants `hdr_video` and `exr`, and without sound and previews.
    pub hdr: bool,
}

impl PipelineInputs {
    fn of(pipeline: Pipeline) -> Self {
        let spec = pipeline.spec();
        // A request with images runs the variant that accepts them.
        let has_variant = spec.images == Support::Rejected && spec.image_variant.is_some();
        PipelineInputs {
            two_stages: spec.has_two_stages(),
            images: if has_variant { Support::Optional } else { spec.images },
            audio: spec.audio,
            reference_videos: spec.reference_videos,
            video: spec.video,
            hdr: spec.hdr,
        }
    }
}

/// Limits of a request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RequestLimits {
    pub max_tokens: usize,
    pub max_frames: usize,
    pub max_steps: usize,
    pub max_images: usize,
    /// Maximum size of a request body, in bytes.
    pub body_limit: u64,
    /// Maximum length of a prompt, in bytes.
    pub max_prompt: usize,
    /// Width and height must be multiples of this number.
    pub size_multiple: usize,
    /// The number of frames must be one more than a multiple of this number.
    pub frame_step: usize,
    /// Whether the server accepts only the shapes in `shapes`.
    pub only_warm: bool,
}

impl Fields {
    /// Returns the description of the server's model and limits.
    pub fn card(&self) -> ServerCard {
        let (config, serve, pipelines) = (&self.loaded.config, self.serve(), self.pipelines());
        ServerCard {
            pipeline_inputs: pipelines.iter().map(|one| (one.name(), PipelineInputs::of(*one))).collect(),
            pipelines,
            shapes: self.warm_shapes().expect("validated at start"),
            defaults: self.defaults(),
            limits: RequestLimits {
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
            ic_loras: serve.ic_loras.clone(),
            size_aliases: serve.aliases().map(|(name, size)| (name.clone(), size.clone())).collect(),
        }
    }

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
            "enhance_prompt": r.enhance_prompt,
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
