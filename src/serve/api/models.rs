//! The model, and what it can be asked for: clients and the page build their forms from it.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use super::App;
use crate::config::{Config, Pipeline, Serve};
use crate::serve::error::ApiError;

pub(super) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let cards: Vec<Value> = app.names.iter().map(|name| card(&app, name)).collect();
    Json(json!({"object": "list", "data": cards}))
}

pub(super) async fn get(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    let known = app.names.iter().find(|known| **known == name);
    let missing = || ApiError::field("model_not_found", "model", "there is no such model; /v1/models lists the names");
    known.map(|name| Json(card(&app, name))).ok_or_else(|| ApiError { status: 404, ..missing() })
}

fn card(app: &App, name: &str) -> Value {
    let config = &app.loaded.config;
    json!({
        "id": name,
        "object": "model",
        "created": app.created,
        "owned_by": "ltx2",
        "pipelines": pipelines(config).iter().map(|pipeline| pipeline.name()).collect::<Vec<_>>(),
        "shapes": app.serve.warm,
        "defaults": defaults(config),
        "limits": limits(&app.serve, config.pipeline),
        "loras": app.serve.loras.keys().collect::<Vec<_>>(),
        "size_aliases": app.serve.size_aliases,
    })
}

/// Pipelines that requests may name.
fn pipelines(config: &Config) -> Vec<Pipeline> {
    let mut all = vec![config.pipeline];
    if config.pipeline == Pipeline::TextToVideo {
        // The same weights and preset, with images.
        all.push(Pipeline::ImageToVideo);
    }
    all.extend(&config.serve.pipelines);
    let mut seen = Vec::new();
    all.retain(|pipeline| {
        !seen.contains(pipeline) && {
            seen.push(*pipeline);
            true
        }
    });
    all
}

/// What a request takes where it says nothing.
fn defaults(config: &Config) -> Value {
    let request = &config.request;
    json!({
        "pipeline": config.pipeline.name(),
        "size": format!("{}x{}", request.width, request.height),
        "width": request.width,
        "height": request.height,
        "num_frames": request.num_frames,
        "fps": request.frame_rate,
        "seconds": request.num_frames.count().map(|frames| (frames as f64 / request.frame_rate * 1000.0).round() / 1000.0),
        "num_inference_steps": config.sampler.steps,
        "steps_are_fixed": config.sampler.sigmas.is_some(),
        "guidance_scale": config.guidance.video.cfg,
        "guidance": {"video": config.guidance.video, "audio": config.guidance.audio},
        "negative_prompt": request.negative_prompt,
        "max_sequence_length": request.max_sequence_length,
    })
}

fn limits(serve: &Serve, pipeline: Pipeline) -> Value {
    json!({
        "max_tokens": serve.max_tokens,
        "max_frames": serve.max_frames,
        "max_steps": serve.max_steps,
        "max_images": serve.max_images,
        "body_bytes": serve.body_limit.0,
        "prompt_bytes": 16384,
        "queue": serve.queue,
        "queue_per_key": serve.queue_per_key,
        "size_multiple": if pipeline.has_two_stages() { 64 } else { 32 },
        "frames_multiple": 8,
        "fps": [1, 60],
        "only_warm": serve.only_warm,
        "keep_s": serve.keep.0,
    })
}
