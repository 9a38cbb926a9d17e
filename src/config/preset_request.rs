//! Default requests of the pipelines, with placeholder inputs.

use serde_json::{Value, json};

use super::check::typed;
use super::error::{ConfigError, ValueOrigin};
use super::load::{merge_layer, replace_preset_values};
use super::pipeline::{Pipeline, Support, VideoUse};
use super::presets::{defaults, preset_layers};
use super::schema::{Config, Model};
use super::tree::Tree;
use super::yaml::YamlNode;
use crate::weights::Version;

/// Placeholder path of required inputs.
const PLACEHOLDER_PATH: &str = "input";

impl Config {
    /// Returns the configuration of the preset for `pipeline` and `version`. Required inputs are placeholder paths, so
    /// programs can be compiled for the configuration, but it cannot run.
    ///
    /// # Errors
    /// Never fails with the shipped presets.
    pub(crate) fn of_preset(pipeline: Pipeline, version: Version, model: Model) -> Result<Config, ConfigError> {
        let mut merged = defaults().clone();
        for layer in preset_layers(pipeline.preset(version))? {
            merge_layer(&mut merged, layer)?;
        }
        let frames = merged.leaf("request.num_frames").map_or(Value::Null, |(frames, _)| frames.clone());
        let own = json!({"pipeline": pipeline.name(), "request": inputs(pipeline, &frames)});
        merge_layer(&mut merged, Tree::from_node(&YamlNode::from_value(own), &|_| ValueOrigin::Default))?;
        replace_preset_values(&mut merged);
        Ok(Config { model, ..typed(&merged)? })
    }
}

/// Returns placeholder inputs of a pipeline; `frames` is the number of frames of reference videos.
fn inputs(pipeline: Pipeline, frames: &Value) -> Value {
    let spec = pipeline.spec();
    let needed = [
        (spec.images == Support::Required, "images", json!([{"path": PLACEHOLDER_PATH}])),
        (spec.audio == Support::Required, "audio", json!({"path": PLACEHOLDER_PATH})),
        (
            spec.reference_videos == Support::Required,
            "reference_videos",
            json!([{"path": PLACEHOLDER_PATH, "frames": frames}]),
        ),
        (spec.video.is_some(), "video", json!(PLACEHOLDER_PATH)),
        (spec.video == Some(VideoUse::Span), "retake", json!({"from": 0, "to": 1})),
        (spec.video == Some(VideoUse::Overlap), "extend", json!({"seconds": 1})),
        (spec.video == Some(VideoUse::Region), "mask", json!(PLACEHOLDER_PATH)),
    ];
    needed.into_iter().filter(|(is_needed, ..)| *is_needed).map(|(_, key, value)| (key.to_string(), value)).collect()
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn every_pipeline_has_a_request_with_its_inputs() {
        for version in [Version::V2_0, Version::V2_3, Version::V2_5] {
            for pipeline in Pipeline::value_variants() {
                let config = Config::of_preset(*pipeline, version, Model::default()).expect("a preset");
                let r = &config.request;
                assert_eq!(config.pipeline, *pipeline);
                let faults = [
                    pipeline.spec().images_fault(r.images.len()),
                    pipeline.spec().audio_fault(r.audio.is_some()),
                    pipeline.spec().references_fault(r.reference_videos.len()),
                ];
                assert_eq!(faults, [None, None, None], "{pipeline:?}");
                assert_eq!(r.video.is_some(), pipeline.takes_video());
                assert_eq!(
                    (r.retake.is_some(), r.extend.is_some()),
                    (*pipeline == Pipeline::Retake, *pipeline == Pipeline::Extend)
                );
                assert!(config.sampler.steps > 0, "{pipeline:?}");
            }
        }
    }
}
