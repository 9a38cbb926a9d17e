//! The configuration of a job's run, which only the generator interprets.

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

/// Configuration of a job's run: JSON text that only the generator interprets, and a summary for the server.
#[derive(Clone, Debug)]
pub struct JobConfig {
    json: Box<RawValue>,
    summary: Summary,
}

/// Values of a configuration that the server shows to clients or uses to order jobs.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "ConfigKeys")]
pub struct Summary {
    /// Name of the pipeline.
    pub pipeline: String,
    /// Prompt; empty if the configuration has none.
    pub prompt: String,
    /// Width of the requested video, in pixels.
    pub width: usize,
    /// Height of the requested video, in pixels.
    pub height: usize,
    /// Number of frames; `None` if the model predicts it.
    pub num_frames: Option<usize>,
    /// Frames per second.
    pub frame_rate: f64,
    /// Seed of the noise.
    pub seed: u64,
    /// Number of steps of the first denoising pass.
    pub steps: usize,
    /// LoRAs that are merged into the weights, as text; jobs with equal texts need the same weights. LoRAs that programs add
    /// are not included, because they are replaced without a merge.
    pub merged_loras: String,
    /// Whether the video has sound.
    pub has_audio: bool,
    /// Whether a chat server enhances the prompt.
    pub asks_endpoint: bool,
}

impl JobConfig {
    /// Stores a configuration as JSON.
    ///
    /// # Errors
    /// Returns an error if the configuration cannot be written as JSON, or lacks a key that [`Summary`] needs.
    pub fn new(config: &impl Serialize) -> serde_json::Result<Self> {
        Self::from_json(serde_json::value::to_raw_value(config)?)
    }

    fn from_json(json: Box<RawValue>) -> serde_json::Result<Self> {
        Ok(JobConfig { summary: serde_json::from_str(json.get())?, json })
    }

    /// Reads the configuration as the generator's type.
    ///
    /// # Errors
    /// Returns an error if the JSON text does not have this type.
    pub fn parse<T: DeserializeOwned>(&self) -> serde_json::Result<T> {
        serde_json::from_str(self.json.get())
    }

    /// Returns the values that the server shows.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }
}

impl PartialEq for JobConfig {
    fn eq(&self, other: &Self) -> bool {
        self.json.get() == other.json.get()
    }
}

impl Serialize for JobConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.json.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for JobConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_json(Deserialize::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

/// Keys of the JSON text from which [`Summary`] is derived.
#[derive(Deserialize)]
struct ConfigKeys {
    pipeline: String,
    request: RequestKeys,
    sampler: SamplerKeys,
    model: ModelKeys,
    output: OutputKeys,
    #[serde(default)]
    enhance: EnhanceKeys,
}

#[derive(Default, Deserialize)]
struct EnhanceKeys {
    #[serde(default)]
    endpoint: Option<String>,
}

#[derive(Deserialize)]
struct RequestKeys {
    prompt: Option<String>,
    width: usize,
    height: usize,
    /// A number, or `auto`.
    num_frames: Value,
    frame_rate: f64,
    seed: u64,
    #[serde(default)]
    enhance_prompt: bool,
}

#[derive(Deserialize)]
struct SamplerKeys {
    steps: usize,
    sigmas: Option<Vec<f64>>,
}

#[derive(Deserialize)]
struct ModelKeys {
    loras: Vec<Value>,
}

#[derive(Deserialize)]
struct OutputKeys {
    audio: bool,
}

impl From<ConfigKeys> for Summary {
    fn from(keys: ConfigKeys) -> Self {
        let ConfigKeys { pipeline, request, sampler, model, output, enhance } = keys;
        let merged = model.loras.iter().filter(|lora| lora["apply"] != "add");
        let given = sampler.sigmas.map(|levels| levels.iter().filter(|level| **level != 0.0).count());
        Summary {
            pipeline,
            prompt: request.prompt.unwrap_or_default(),
            width: request.width,
            height: request.height,
            num_frames: request.num_frames.as_u64().and_then(|count| usize::try_from(count).ok()),
            frame_rate: request.frame_rate,
            seed: request.seed,
            steps: given.unwrap_or(sampler.steps),
            merged_loras: merged.map(Value::to_string).collect::<Vec<_>>().join(" "),
            has_audio: output.audio,
            asks_endpoint: request.enhance_prompt && enhance.endpoint.is_some(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::json;

    use super::*;

    /// Returns a configuration with the given keys of `request`.
    pub(crate) fn job_config(request: &Value) -> JobConfig {
        let mut config = json!({
            "pipeline": "text_to_video",
            "request": {"prompt": null, "width": 64, "height": 64, "num_frames": 9, "frame_rate": 24.0, "seed": 7},
            "sampler": {"steps": 40, "sigmas": null},
            "model": {"loras": []},
            "output": {"audio": true},
        });
        for (key, value) in request.as_object().expect("an object") {
            config["request"][key] = value.clone();
        }
        JobConfig::new(&config).expect("every key")
    }

    #[test]
    fn stored_configuration_is_serialized_unchanged() {
        let text = r#"{"pipeline":"hq","request":{"prompt":"a","width":64,"height":32,"num_frames":"auto",
            "frame_rate":23.976023976023978,"seed":18446744073709551615,"other":1e0,
            "enhance_prompt":true},"enhance":{"endpoint":"http://h/v1"},"sampler":{"steps":4,
            "sigmas":[1.0,0.5,0.0]},"model":{"loras":[{"path":"a"},{"apply":"merge","path":"b"},{"apply":"add","path":"c"}]},"output":{"audio":false}}"#;
        let config: JobConfig = serde_json::from_str(text).expect("a configuration");
        assert_eq!(serde_json::to_string(&config).expect("text"), text);
        let expected = Summary {
            pipeline: "hq".into(),
            prompt: "a".into(),
            width: 64,
            height: 32,
            num_frames: None,
            frame_rate: 23.976_023_976_023_978,
            seed: u64::MAX,
            steps: 2,
            merged_loras: r#"{"path":"a"} {"apply":"merge","path":"b"}"#.into(),
            has_audio: false,
            asks_endpoint: true,
        };
        assert_eq!(config.summary(), &expected);
        assert_eq!(config.parse::<Value>().expect("JSON")["request"]["other"], 1.0);
    }

    #[test]
    fn configuration_without_required_key_is_rejected() {
        let error = JobConfig::new(&json!({"pipeline": "hq"})).expect_err("refused");
        assert!(error.to_string().contains("request"), "{error}");
    }
}
