//! Limits of what the server takes, of what a model could make.

use super::given::RequestFields;
use super::read::invalid;
use super::table::MAX_PROMPT;
use super::{Endpoint, Fields, layer};
use crate::config::{Config, Loaded, NumFrames, Pipeline, ValueOrigin};
use crate::serve::error::ApiError;
use crate::serve::form::Form;
use crate::serve::job::Accepted;
use crate::serve::jobs::Caller;

/// Frames of the shortest extension, those beside which it is made among them.
const LEAST_EXTENDED: usize = 17;

/// A size that is compiled before the server is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Shape {
    pub width: usize,
    pub height: usize,
    pub num_frames: usize,
    pub pipeline: Pipeline,
}

impl Shape {
    /// `WxHxF` or `WxHxF@pipeline`, of a server's own pipeline where none is named.
    ///
    /// # Errors
    /// Text that is no size, or no pipeline.
    pub fn parse(text: &str, own: Pipeline) -> Result<Self, String> {
        let wrong = || format!("serve.warm: {text}: write WIDTHxHEIGHTxFRAMES, or WIDTHxHEIGHTxFRAMES@pipeline");
        let (size, pipeline) = match text.split_once('@') {
            None => (text, own),
            Some((size, name)) => {
                let named = serde_json::from_value(name.into());
                (size, named.map_err(|_| format!("serve.warm: {text}: there is no pipeline '{name}'"))?)
            }
        };
        let (sides, frames) = size.rsplit_once('x').ok_or_else(wrong)?;
        let [width, height] = layer::parse_size(sides).ok_or_else(wrong)?;
        let num_frames = frames.parse().ok().filter(|frames| *frames > 0).ok_or_else(wrong)?;
        if pipeline == Pipeline::Extend && num_frames < LEAST_EXTENDED {
            let why = "an extension has 9 frames of the given video and 8 of its own";
            return Err(format!("serve.warm: {text}: {why}; give {LEAST_EXTENDED} frames or more"));
        }
        Ok(Shape { width: width as usize, height: height as usize, num_frames, pipeline })
    }

    /// Of a configuration; none of frames that are predicted.
    pub fn of(config: &Config) -> Option<Self> {
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
    /// Sizes that are compiled before the server is ready.
    ///
    /// # Errors
    /// Text of `serve.warm` that cannot be read.
    pub fn warm_shapes(&self) -> Result<Vec<Shape>, String> {
        let (config, warm) = (&self.loaded.config, &self.serve().warm);
        match &warm[..] {
            [] => Ok(Shape::of(config).into_iter().collect()),
            [one] if one == "none" => Ok(Vec::new()),
            all => all.iter().map(|text| Shape::parse(text, config.pipeline)).collect(),
        }
    }

    /// The request that runs a warm shape's programs, of no caller's: from made-up files where its pipeline starts from such.
    ///
    /// # Errors
    /// A shape that requests could not ask for.
    pub fn warm(&self, shape: &Shape) -> Result<Accepted, ApiError> {
        let made_up = |error| ApiError::new(500, "internal", format!("no file for the warm-up: {error}"));
        let mut fields = self.warm_fields(shape).map_err(made_up)?;
        fields.insert("seed".into(), 0.into());
        fields.insert("prompt".into(), "warm-up".into());
        fields.insert("pipeline".into(), shape.pipeline.name().into());
        let form = Form { fields, ..Form::default() };
        self.accept(form, Endpoint::Create, &Caller { name: String::new(), sees_all: true })
    }

    /// Refuses what the server does not take.
    pub(super) fn check(&self, loaded: &Loaded, given: &RequestFields) -> Result<(), ApiError> {
        let config = &loaded.config;
        check_prompt(loaded, given)?;
        if loaded.has_sigmas_below() && given.get("num_inference_steps").is_some() && given.get("sigmas").is_none() {
            let field = given.name("num_inference_steps");
            return Err(invalid(&field, "this model fixes its noise levels; leave it out, or give sigmas"));
        }
        self.check_steps(loaded)?;
        let (tokens, own) = (config.request.max_sequence_length, self.loaded.config.request.max_sequence_length);
        if tokens != own {
            let field = written(loaded, "request.max_sequence_length", "max_sequence_length");
            return Err(invalid(&field, format!("the server reads {own} text tokens; leave it out")));
        }
        self.check_warm(config, given)
    }

    /// Refuses more steps of a pass than the server makes; the configuration's own are nobody's to refuse.
    fn check_steps(&self, loaded: &Loaded) -> Result<(), ApiError> {
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
                return Err(invalid(&field, format!("{steps} steps; the server makes at most {most}")));
            }
        }
        Ok(())
    }

    /// Refuses a size that is not warm, where the server takes no other.
    fn check_warm(&self, config: &Config, given: &RequestFields) -> Result<(), ApiError> {
        if !self.serve().only_warm {
            return Ok(());
        }
        let warm = self.warm_shapes().expect("the server started with them");
        if Shape::of(config).is_some_and(|own| warm.contains(&own)) {
            return Ok(());
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
            format!("{field}: {own} is not compiled here; take one of {}", names.join(", ")),
        ))
    }
}

/// The field that a key of the effective configuration comes from.
fn written(loaded: &Loaded, key: &str, or: &str) -> String {
    match loaded.origin(key) {
        ValueOrigin::Field(name) if name == "ltx2" => format!("ltx2.{key}"),
        ValueOrigin::Field(name) => name,
        _ => or.into(),
    }
}

fn check_prompt(loaded: &Loaded, given: &RequestFields) -> Result<(), ApiError> {
    let r = &loaded.config.request;
    // That of the configuration is nobody's request.
    let own = matches!(loaded.origin("request.prompt"), ValueOrigin::Field(_));
    match r.prompt.as_deref().filter(|prompt| own && !prompt.trim().is_empty()) {
        None => {
            let why = "prompt: is missing; say what the video shows";
            return Err(ApiError::field("missing_prompt", given.name("prompt"), why));
        }
        Some(prompt) if prompt.len() > MAX_PROMPT => {
            let field = written(loaded, "request.prompt", "prompt");
            let why = format!("{field}: {} bytes; at most {MAX_PROMPT}", prompt.len());
            return Err(ApiError::field("prompt_too_long", field, why));
        }
        Some(_) => {}
    }
    let negative_is_own = matches!(loaded.origin("request.negative_prompt"), ValueOrigin::Field(_));
    if negative_is_own && r.negative_prompt.len() > MAX_PROMPT {
        let field = written(loaded, "request.negative_prompt", "negative_prompt");
        let why = format!("{field}: {} bytes; at most {MAX_PROMPT}", r.negative_prompt.len());
        return Err(ApiError::field("prompt_too_long", field, why));
    }
    Ok(())
}
