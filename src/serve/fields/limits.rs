//! Checks a request against the server's limits.

use serde_json::{Value, json};

use super::read::invalid;
use super::request_fields::RequestFields;
use super::table::MAX_PROMPT;
use super::{Endpoint, Fields, keys, layer};
use crate::config::{Config, LoadedConfig, LoraApply, Model, NumFrames, Pipeline, ValueOrigin, VideoUse};
use crate::serve::error::ApiError;
use crate::serve::form::Form;
use crate::serve::generator::Generator;
use crate::serve::id::Ids;
use crate::serve::job::AcceptedJob;
use crate::serve::jobs::Caller;

/// Minimum number of frames of an extension: an overlap of 9 frames and 8 new frames.
const MIN_EXTENSION_FRAMES: usize = 17;

/// Size, number of frames and pipeline of a video. Programs for the shapes in `serve.warm` are compiled at startup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Shape {
    pub width: usize,
    pub height: usize,
    pub num_frames: usize,
    pub pipeline: Pipeline,
}

impl Shape {
    /// Parses `WxHxF` or `WxHxF@pipeline`. Without a pipeline, the shape has the pipeline `own`.
    ///
    /// # Errors
    /// Returns an error if the text is not a shape, the pipeline is unknown, or an extension is too short.
    pub fn parse(text: &str, own: Pipeline) -> Result<Self, String> {
        let wrong = || format!("serve.warm: '{text}': must be WIDTHxHEIGHTxFRAMES, or WIDTHxHEIGHTxFRAMES@pipeline");
        let (size, pipeline) = match text.split_once('@') {
            None => (text, own),
            Some((size, name)) => {
                let named = serde_json::from_value(name.into());
                (size, named.map_err(|_| format!("serve.warm: '{text}': unknown pipeline '{name}'"))?)
            }
        };
        let (sides, frames) = size.rsplit_once('x').ok_or_else(wrong)?;
        let [width, height] = layer::parse_size(sides).ok_or_else(wrong)?;
        let num_frames = frames.parse().ok().filter(|frames| *frames > 0).ok_or_else(wrong)?;
        if pipeline.spec().video == Some(VideoUse::Overlap) && num_frames < MIN_EXTENSION_FRAMES {
            let why = "an extension has at least 9 frames of overlap and 8 new frames";
            return Err(format!("serve.warm: '{text}': {why}; use at least {MIN_EXTENSION_FRAMES} frames"));
        }
        Ok(Shape { width: width as usize, height: height as usize, num_frames, pipeline })
    }

    /// Returns the width, height, number of frames and pipeline that a configuration sets; `None` if the model predicts
    /// the number of frames.
    pub fn from_config(config: &Config) -> Option<Self> {
        let r = &config.request;
        let num_frames = r.num_frames.count()?;
        Some(Shape { width: r.width, height: r.height, num_frames, pipeline: config.pipeline })
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}x{}@{}", self.width, self.height, self.num_frames, self.pipeline.name())
    }
}

impl Fields {
    /// Returns the shapes that are compiled before the server is ready.
    ///
    /// # Errors
    /// Returns an error if an entry of `serve.warm` is malformed.
    pub fn warm_shapes(&self) -> Result<Vec<Shape>, String> {
        let (config, warm) = (&self.loaded.config, &self.serve().warm);
        match &warm[..] {
            [] => Ok(Shape::from_config(config).into_iter().collect()),
            [one] if one == "none" => Ok(Vec::new()),
            all => all.iter().map(|text| Shape::parse(text, config.pipeline)).collect(),
        }
    }

    /// Returns the LoRAs with which each shape of a pipeline is compiled before the server is ready: no LoRA of
    /// `serve.loras`, and one for each rank of programs that a single added LoRA of `serve.loras` needs.
    pub(super) fn warm_loras(&self, pipeline: Pipeline) -> Vec<Option<&str>> {
        let (mut loras, mut ranks) = (vec![None], vec![self.ranks_with(pipeline, None)]);
        for (name, lora) in &self.serve().loras {
            let rank = (lora.apply == LoraApply::Add).then(|| self.ranks_with(pipeline, Some(name)));
            if let Some(rank) = rank.filter(|rank| !ranks.contains(rank)) {
                loras.push(Some(name.as_str()));
                ranks.push(rank);
            }
        }
        loras
    }

    /// Returns the ranks of the programs for a request that selects at most one LoRA; see [`keys::added_ranks`].
    fn ranks_with(&self, pipeline: Pipeline, lora: Option<&str>) -> Option<Value> {
        let named: Value = lora.iter().map(|name| json!({"name": name, "scale": 1})).collect();
        let loras = self.with_loras(&named).as_array().cloned().unwrap_or_default();
        let loras = loras.into_iter().filter_map(|lora| serde_json::from_value(lora).ok()).collect();
        let own = &self.loaded.config;
        let model = Model { loras, ..own.model.clone() };
        keys::added_ranks(&Config { pipeline, model, ..own.clone() }, &self.ranks)
    }

    /// Returns a warm-up request that runs the programs for a shape, with at most one LoRA of `serve.loras`. If the
    /// pipeline needs input files, synthetic ones are created.
    ///
    /// # Errors
    /// Returns an error if no request can have this shape, or if an input file cannot be written.
    pub fn warm(&self, shape: &Shape, lora: Option<&str>, ids: &Ids) -> Result<AcceptedJob, ApiError> {
        let made_up = |error| ApiError::new(500, "internal", format!("cannot create a warm-up file: {error}"));
        let mut fields = self.warm_fields(shape).map_err(made_up)?;
        fields.insert("seed".into(), 0.into());
        fields.insert("prompt".into(), "warm-up".into());
        fields.insert("pipeline".into(), shape.pipeline.name().into());
        fields.extend(lora.map(|name| ("lora".to_string(), json!({"name": name}))));
        let form = Form { fields, ..Form::default() };
        self.accept(form, Endpoint::Create, &Caller { name: String::new(), sees_all: true }, ids)
    }

    /// Rejects a request without a prompt, or one that exceeds the server's limits.
    pub(super) fn check(&self, loaded: &LoadedConfig, given: &RequestFields) -> Result<(), ApiError> {
        let config = &loaded.config;
        check_prompt(loaded, given)?;
        if loaded.has_sigmas_below() && given.get("num_inference_steps").is_some() && given.get("sigmas").is_none() {
            let field = given.name("num_inference_steps");
            return Err(invalid(&field, "the model's noise levels are fixed; remove this field, or set sigmas"));
        }
        self.check_steps(loaded)?;
        let (tokens, own) = (config.request.max_sequence_length, self.loaded.config.request.max_sequence_length);
        if tokens != own {
            let field = written(loaded, "request.max_sequence_length", "max_sequence_length");
            return Err(invalid(
                &field,
                format!("must be {own}, the server's number of text tokens; remove this field"),
            ));
        }
        self.check_warm(config, given)
    }

    /// Rejects a request that sets more steps in a denoising pass than `serve.max_steps`. The server's own
    /// configuration may set more.
    fn check_steps(&self, loaded: &LoadedConfig) -> Result<(), ApiError> {
        let (config, most) = (&loaded.config, self.serve().max_steps);
        let levels = |sigmas: &[f64]| sigmas.iter().filter(|level| **level != 0.0).count();
        let first = config.sampler.sigmas.as_deref().map_or(config.sampler.steps, levels);
        for (key, steps) in [
            ("sampler.sigmas", first),
            ("sampler.steps", first),
            ("two_stage.sigmas", levels(&config.two_stage.sigmas)),
            ("dfr.sigmas", levels(&config.dfr.sigmas)),
        ] {
            if steps > most && matches!(loaded.origin(key), ValueOrigin::Field(_)) {
                let field = written(loaded, key, key);
                return Err(invalid(
                    &field,
                    format!("{steps} steps exceed the server's limit of {most} (serve.max_steps)"),
                ));
            }
        }
        Ok(())
    }

    /// If `serve.only_warm` is set, rejects shapes and ranks of added LoRAs that are not compiled at startup.
    fn check_warm(&self, config: &Config, given: &RequestFields) -> Result<(), ApiError> {
        if !self.serve().only_warm {
            return Ok(());
        }
        let warm = self.warm_shapes().expect("validated at start");
        if Shape::from_config(config).is_some_and(|own| warm.contains(&own)) {
            return self.check_warm_ranks(config, given);
        }
        let names: Vec<String> = warm.iter().map(Shape::to_string).collect();
        let field = given.name("size");
        let frames = match config.request.num_frames {
            NumFrames::Count(count) => count.to_string(),
            NumFrames::Auto(_) => "auto".into(),
        };
        let r = &config.request;
        let own = format!("{}x{}x{frames}@{}", r.width, r.height, config.pipeline.name());
        Err(ApiError::field(
            "shape_not_warm",
            &field,
            format!("{field}: {own} is not a warmed-up shape; the server accepts only: {}", names.join(", ")),
        ))
    }

    fn check_warm_ranks(&self, config: &Config, given: &RequestFields) -> Result<(), ApiError> {
        let wanted = keys::added_ranks(config, &self.ranks);
        let mut warm = self.warm_loras(config.pipeline).into_iter();
        if warm.any(|lora| self.ranks_with(config.pipeline, lora) == wanted) {
            return Ok(());
        }
        let field = given.name("lora");
        let why = format!("{field}: no programs are warmed up for the total rank of these LoRAs; select only one");
        Err(ApiError::field("shape_not_warm", field, why))
    }
}

/// Returns the request field that set a key of the effective configuration; `or` if no field set it.
fn written(loaded: &LoadedConfig, key: &str, or: &str) -> String {
    match loaded.origin(key) {
        ValueOrigin::Field(name) if name == "ltx2" => format!("ltx2.{key}"),
        ValueOrigin::Field(name) => name,
        _ => or.into(),
    }
}

fn check_prompt(loaded: &LoadedConfig, given: &RequestFields) -> Result<(), ApiError> {
    let r = &loaded.config.request;
    // The request must contain the prompt; a prompt in the server's configuration is not used.
    let own = matches!(loaded.origin("request.prompt"), ValueOrigin::Field(_));
    match r.prompt.as_deref().filter(|prompt| own && !prompt.trim().is_empty()) {
        None => {
            let why = "prompt: missing; describe the video";
            return Err(ApiError::field("missing_prompt", given.name("prompt"), why));
        }
        Some(prompt) if prompt.len() > MAX_PROMPT => {
            let field = written(loaded, "request.prompt", "prompt");
            let why = format!("{field}: the text has {} bytes; the maximum is {MAX_PROMPT}", prompt.len());
            return Err(ApiError::field("prompt_too_long", field, why));
        }
        Some(_) => {}
    }
    let negative_is_own = matches!(loaded.origin("request.negative_prompt"), ValueOrigin::Field(_));
    if negative_is_own && r.negative_prompt.len() > MAX_PROMPT {
        let field = written(loaded, "request.negative_prompt", "negative_prompt");
        let why = format!("{field}: the text has {} bytes; the maximum is {MAX_PROMPT}", r.negative_prompt.len());
        return Err(ApiError::field("prompt_too_long", field, why));
    }
    Ok(())
}
