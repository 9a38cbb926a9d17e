//! Fields as a layer of the configuration.

use serde_json::{Value, json};

use super::faults::of_config;
use super::given::Given;
use super::read::invalid;
use super::table::{FIELDS, Place};
use super::{Endpoint, Fields, tree};
use crate::config::{Loaded, Pipeline, RequestLayer};
use crate::serve::error::ApiError;

const PIPELINE: &str = "pipeline";

impl Fields {
    /// The server's configuration with a request's fields over it.
    pub(super) fn laid(
        &self,
        given: &Given,
        endpoint: Endpoint,
        warnings: &mut Vec<String>,
    ) -> Result<Loaded, ApiError> {
        let fault = |error| of_config(error, given);
        let mut layer = RequestLayer::default();
        if let Some(tree) = given.get("ltx2") {
            tree::check(tree)?;
            layer.set_tree("ltx2", tree.clone()).map_err(fault)?;
        }
        layer.set("n", "request.num_videos", json!(1)).map_err(fault)?;
        let pipeline = self.pipeline(given, endpoint)?;
        layer.set(&given.name(PIPELINE), PIPELINE, pipeline.name().into()).map_err(fault)?;
        for spec in &FIELDS {
            let (Some(value), Place::Keys(keys)) = (given.get(spec.name), spec.place) else { continue };
            for key in keys {
                layer.set(&given.name(spec.name), key, value.clone()).map_err(fault)?;
            }
        }
        if let Some(text) = given.get("negative_prompt") {
            let name = given.name("negative_prompt");
            layer.set(&name, "request.negative_prompt", text.clone()).map_err(fault)?;
            layer.set(&name, "request.negative_prompt_file", Value::Null).map_err(fault)?;
        }
        if let Some(seed) = given.get("seed") {
            layer.set(&given.name("seed"), "request.seed", seed.clone()).map_err(fault)?;
        }
        self.lay_size(given, &mut layer, warnings)?;
        self.lay_length(given, pipeline, &mut layer, warnings)?;
        self.loaded.with_request(&layer).map_err(fault)
    }

    /// The pipeline of a request.
    fn pipeline(&self, given: &Given, endpoint: Endpoint) -> Result<Pipeline, ApiError> {
        let in_tree = given.get("ltx2").and_then(|tree| tree.get(PIPELINE)).and_then(Value::as_str);
        let (field, named) = match (given.text(PIPELINE), in_tree) {
            (Some(name), _) => (given.name(PIPELINE), Some(name)),
            (None, name) => ("ltx2.pipeline".into(), name),
        };
        let own = self.loaded.config.pipeline;
        let chosen = match (named, endpoint) {
            (Some(name), _) => {
                let known: Option<Pipeline> = serde_json::from_value(name.into()).ok();
                known.ok_or_else(|| {
                    invalid(&field, format!("there is no pipeline '{}'; {}", super::given::plain(name), self.served()))
                })?
            }
            (None, Endpoint::Edit(_)) => Pipeline::Retake,
            (None, Endpoint::Extend(_)) => Pipeline::Extend,
            (None, _) => own,
        };
        if chosen == Pipeline::TextToAudio {
            return Err(invalid(&field, "text_to_audio makes no video, and the server serves videos"));
        }
        if self.pipelines().contains(&chosen) {
            return Ok(chosen);
        }
        let name = chosen.name();
        Err(invalid(&field, format!("the server was not started for {name} (serve.pipelines); {}", self.served())))
    }

    fn served(&self) -> String {
        let names: Vec<&str> = self.pipelines().into_iter().map(Pipeline::name).collect();
        format!("it serves {}", names.join(", "))
    }

    /// Width and height, by either way of writing them.
    fn lay_size(&self, given: &Given, layer: &mut RequestLayer, warnings: &mut Vec<String>) -> Result<(), ApiError> {
        let fault = |error| of_config(error, given);
        let mut sides = [None, None];
        if let Some(size) = given.get("size") {
            let field = given.name("size");
            let Value::String(size) = size else { return Err(wrong_size(&field)) };
            if let Some(target) = self.loaded.config.serve.size_aliases.get(size) {
                warnings.push(format!("size {size} is an alias of {target}"));
                sides = parse_size(target).ok_or_else(|| wrong_size(&field))?.map(Some);
            } else if !matches!(size.as_str(), "" | "auto") {
                sides = parse_size(size).ok_or_else(|| wrong_size(&field))?.map(Some);
            }
        }
        for ((name, key), of_size) in [("width", "request.width"), ("height", "request.height")].into_iter().zip(sides)
        {
            let own = given.get(name).and_then(Value::as_u64);
            let side = match (own, of_size) {
                (Some(own), Some(of_size)) if own != of_size => {
                    let size = given.name("size");
                    return Err(invalid(&given.name(name), format!("says {own}, and {size} says {of_size}; keep one")));
                }
                (Some(own), _) => Some((given.name(name), own)),
                (None, of_size) => of_size.map(|side| (given.name("size"), side)),
            };
            if let Some((field, side)) = side {
                layer.set(&field, key, side.into()).map_err(fault)?;
            }
        }
        Ok(())
    }

    /// The number of frames, given or by a duration.
    fn lay_length(
        &self,
        given: &Given,
        pipeline: Pipeline,
        layer: &mut RequestLayer,
        warnings: &mut Vec<String>,
    ) -> Result<(), ApiError> {
        let seconds = given.get("seconds").and_then(Value::as_f64);
        if pipeline == Pipeline::Extend {
            return Ok(());
        }
        if let Some(frames) = given.get("num_frames") {
            if seconds.is_some() {
                let (frames, seconds) = (given.name("num_frames"), given.name("seconds"));
                warnings.push(format!("{frames} was taken, {seconds} was not"));
            }
            let set = layer.set(&given.name("num_frames"), "request.num_frames", frames.clone());
            return set.map_err(|error| of_config(error, given));
        }
        if let Some(seconds) = seconds {
            layer.set_seconds(&given.name("seconds"), seconds);
        }
        Ok(())
    }
}

fn wrong_size(field: &str) -> ApiError {
    ApiError::field("invalid_size", field, format!("{field}: write WIDTHxHEIGHT in pixels, e.g. 768x512, or auto"))
}

/// `WxH`.
pub(super) fn parse_size(text: &str) -> Option<[u64; 2]> {
    let side = |text: &str| {
        let digits = (2..=5).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
        text.parse().ok().filter(|side: &u64| digits && *side > 0)
    };
    let (width, height) = text.split_once('x')?;
    Some([side(width)?, side(height)?])
}
