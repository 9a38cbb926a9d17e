//! Requests of the presets: what a pipeline makes of a model if nothing but its inputs is given.

use serde_json::{Value, json};

use super::check::typed;
use super::error::{ConfigError, ValueOrigin};
use super::load::{defaults, lay, plain_steps, preset_layers};
use super::pipeline::Pipeline;
use super::schema::{Config, Model};
use super::tree::Tree;
use super::yaml::Node;
use crate::weights::Version;

/// Path of inputs that are no files.
const STAND_IN: &str = "input";

impl Config {
    /// The request that a pipeline's preset makes of a model of generation `version`. Inputs that the pipeline needs are stand-ins,
    /// which are no files: programs can be written for the request, and it cannot run.
    ///
    /// # Errors
    /// None with the presets of this program.
    pub(crate) fn of_preset(pipeline: Pipeline, version: Version, model: Model) -> Result<Config, ConfigError> {
        let mut merged = defaults()?;
        for layer in preset_layers(pipeline.preset(version))? {
            lay(&mut merged, layer)?;
        }
        let frames = merged.leaf("request.num_frames").map_or(Value::Null, |(frames, _)| frames.clone());
        let own = json!({"pipeline": pipeline.name(), "request": inputs(pipeline, &frames)});
        lay(&mut merged, Tree::from_node(&Node::from_value(own), &|_| ValueOrigin::Default))?;
        plain_steps(&mut merged);
        Ok(Config { model, ..typed(&merged)? })
    }
}

/// Inputs that a pipeline needs, of a video of so many frames.
fn inputs(pipeline: Pipeline, frames: &Value) -> Value {
    match pipeline {
        Pipeline::ImageToVideo | Pipeline::Keyframes => json!({"images": [{"path": STAND_IN}]}),
        Pipeline::AudioToVideo => json!({"audio": {"path": STAND_IN}}),
        Pipeline::IcLora => json!({"reference_videos": [{"path": STAND_IN, "frames": frames}]}),
        Pipeline::Retake => json!({"video": STAND_IN, "retake": {"from": 0, "to": 1}}),
        Pipeline::Extend => json!({"video": STAND_IN, "extend": {"seconds": 1}}),
        Pipeline::VideoToAudio => json!({"video": STAND_IN}),
        Pipeline::TextToVideo
        | Pipeline::TwoStage
        | Pipeline::Distilled
        | Pipeline::Hq
        | Pipeline::Dfr
        | Pipeline::TextToAudio => json!({}),
    }
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
                    pipeline.images_fault(r.images.len()),
                    pipeline.audio_fault(r.audio.is_some()),
                    pipeline.references_fault(r.reference_videos.len()),
                ];
                assert_eq!(faults, [None; 3], "{pipeline:?}");
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
