//! Converts the fields of a request into a job.
//!
//! [`table`] has a row for each field. The module `request_fields` reads and normalises the fields of a body according
//! to this table, `layer` merges them as a YAML layer over the server's configuration, which is then validated like any
//! other configuration, and `errors` maps validation errors back to the client's field names.

mod card;
mod errors;
mod keys;
mod layer;
mod limits;
mod loras;
mod media;
mod read;
mod remix;
mod request_fields;
mod resolve;
mod schema;
mod span;
pub mod table;
#[cfg(test)]
mod tests;
mod tree;
mod warm;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::device::JobBatch;
use super::error::ApiError;
use super::form::Form;
use super::generator::{Endpoint, Generator, ModelInfo};
use super::id::{Ids, VideoId};
use super::inputs::InputStore;
use super::job::AcceptedJob;
use super::job_config::JobConfig;
use super::jobs::Caller;
use crate::config::{Config, LoadedConfig, Pipeline, Serve, ServeSeed};
use crate::weights::lora_add::LoraRanks;
use request_fields::RequestFields;
use resolve::Resolver;

pub use card::{RequestLimits, ServerCard};
pub use limits::Shape;

/// Converts requests into jobs for a server with this configuration and its limits (`config.serve`).
pub struct Fields {
    loaded: LoadedConfig,
    /// The configured pipeline, then those of `serve.pipelines`.
    served: Vec<Pipeline>,
    inputs: Arc<InputStore>,
    resolver: Resolver,
    /// Ranks of the LoRAs that programs add.
    ranks: LoraRanks,
}

/// Returns the id of the finished job whose video an edit or extension uses; `None` if the request uploads a video. The
/// field `video` or an alias of it contains the id as text or as `{id}`.
///
/// # Errors
/// Returns `video_not_found` if the text starts with `video_` but is not a valid id.
fn source_video(form: &Form) -> Result<Option<VideoId>, ApiError> {
    let spec = table::find("input_video").map_or(&[][..], |spec| spec.aliases);
    let Some(value) = spec.iter().chain([&"input_video"]).find_map(|name| form.fields.get(*name)) else {
        return Ok(None);
    };
    let value = read::structure("video", value.clone())?;
    let text = match &value {
        Value::Object(map) => map.get("id").and_then(Value::as_str),
        other => other.as_str(),
    };
    match text.filter(|text| text.starts_with("video_")) {
        None => Ok(None),
        Some(text) => VideoId::parse(text).map(Some).ok_or_else(ApiError::video_not_found),
    }
}

impl Fields {
    /// Returns a converter for a server with the configuration `loaded` that runs the pipelines `served`.
    pub fn new(loaded: LoadedConfig, served: Vec<Pipeline>, inputs: Arc<InputStore>) -> Self {
        let resolver = Resolver::from_config(&loaded.config);
        Fields { loaded, served, inputs, resolver, ranks: LoraRanks::default() }
    }

    fn serve(&self) -> &Serve {
        &self.loaded.config.serve
    }

    /// Returns the names by which clients may refer to the model. The first is the default.
    pub fn model_names(&self) -> Vec<String> {
        if !self.serve().served_model_name.is_empty() {
            return self.serve().served_model_name.clone();
        }
        let path = self.loaded.config.model.path.trim_end_matches('/');
        let last = path.rsplit('/').next().unwrap_or(path);
        let mut names = vec![self.loaded.config_name().to_string()];
        names.extend(Some(last.to_string()).filter(|last| !last.is_empty() && *last != names[0]));
        names
    }

    fn model_name(&self, given: &RequestFields) -> Result<String, ApiError> {
        let names = self.model_names();
        match given.text("model") {
            None => Ok(names.into_iter().next().unwrap_or_default()),
            Some(name) if self.serve().any_model || names.iter().any(|own| own == name) => Ok(name.into()),
            Some(name) => {
                let field = given.name("model");
                let name = request_fields::plain(name);
                let why = format!(
                    "{field}: unknown model '{name}'; available: {}; other names need the server's setting serve.any_model or \
                     serve.served_model_name",
                    names.join(", ")
                );
                Err(ApiError { status: 404, ..ApiError::field("model_not_found", field, why) })
            }
        }
    }

    /// Returns the pipelines that requests may use.
    pub fn pipelines(&self) -> Vec<Pipeline> {
        let mut all = self.served.clone();
        // Variants share weights and preset, so a server that enables one of them also accepts the other.
        let variants: Vec<Pipeline> = all.iter().filter_map(|pipeline| pipeline.spec().image_variant).collect();
        all.extend(variants);
        let mut seen = Vec::new();
        all.retain(|pipeline| {
            !seen.contains(pipeline) && {
                seen.push(*pipeline);
                true
            }
        });
        all
    }

    /// Chooses a random seed if the request has none.
    fn draw_seed(&self, given: &mut RequestFields) -> Result<(), ApiError> {
        let by_tree = || given.get("ltx2").and_then(|tree| tree.get("request")?.get("seed")).is_some();
        // A field overrides a YAML key, even if the field requests a random seed.
        if given.get("seed").map_or_else(by_tree, |seed| *seed != -1) {
            return Ok(());
        }
        let seed = match self.serve().seed {
            ServeSeed::Fixed => self.loaded.config.request.seed,
            ServeSeed::Random => {
                let mut bytes = [0; 8];
                getrandom::fill(&mut bytes).map_err(|_| {
                    ApiError::new(500, "internal", "cannot draw a seed: the system's random number generator failed")
                })?;
                // Seeds have 53 bits, so that clients that store numbers as JavaScript does can represent them exactly.
                u64::from_le_bytes(bytes) >> 11
            }
        };
        given.values.insert("seed".into(), seed.into());
        Ok(())
    }

    /// Returns whether the operator's text embeddings replace the prompt, which then only names the video.
    fn has_text_embeddings(&self, effective: &Config) -> bool {
        effective.pipeline.spec().hdr && effective.request.text_embeddings.is_some()
    }

    /// Returns the configuration to store with a job, and the names of its input files. Server settings are removed,
    /// and paths of input files are replaced by their names in the store.
    fn request_config(&self, effective: &Config) -> (Config, Vec<String>) {
        let mut own = effective.clone();
        own.serve = Serve::default();
        own.extends = None;
        (own.output.path, own.output.save_frames, own.output.save_audio) = (None, None, None);
        (own.output.save_exr, own.output.preview_decoder) = (None, None);
        if own.pipeline.spec().hdr {
            own.output.audio = false;
        } else {
            own.request.text_embeddings = None;
        }
        let mut names: Vec<String> = Vec::new();
        for path in own.request.files_mut() {
            let Some(name) = self.inputs.name(path).map(String::from) else { continue };
            if !names.contains(&name) {
                names.push(name.clone());
            }
            *path = name;
        }
        (own, names)
    }
}

impl Generator for Fields {
    fn model(&self) -> ModelInfo {
        let config = &self.loaded.config;
        let platform = &config.runtime.platform;
        ModelInfo {
            names: self.model_names(),
            preset: self.loaded.preset().into(),
            pipeline: config.pipeline.name().into(),
            // A path of a plugin is hidden from clients.
            platform: if platform.contains('/') { "plugin".into() } else { platform.clone() },
            loras: config.serve.loras.keys().cloned().collect(),
        }
    }

    fn card(&self) -> Value {
        json!(Fields::card(self))
    }

    fn request_schema(&self) -> Value {
        schema::request_schema()
    }

    fn takes_file(&self, name: &str) -> bool {
        media::takes_file(name)
    }

    fn source_video(&self, form: &Form) -> Result<Option<VideoId>, ApiError> {
        source_video(form)
    }

    fn accept(&self, form: Form, endpoint: Endpoint, caller: &Caller, ids: &Ids) -> Result<AcceptedJob, ApiError> {
        let Form { fields, parts, body_sha256 } = form;
        let mut given = RequestFields::read(fields)?;
        self.keep_files(&mut given, parts, endpoint)?;
        if let Some((name, named)) = given.take("lora") {
            let loras = self.read_loras(&name, named)?;
            given.put("lora", Some(name), loras);
        }
        if let Some((name, named)) = given.take("ic_lora") {
            let own = self.read_ic_lora(&name, named)?;
            given.put("ic_lora", Some(name), own);
        }
        given.expand_auto_duration()?;
        if let Endpoint::Remix(accepted) = endpoint {
            given = given.over(accepted);
        }
        let model = self.model_name(&given)?;
        let seconds = given.get("seconds").map(|value| read::plain(value.as_f64().unwrap_or_default()).to_string());
        self.draw_seed(&mut given)?;
        let mut warnings = Vec::new();
        self.fill_retake(&mut given, endpoint, &mut warnings)?;
        let loaded = self.laid(&given, endpoint, &mut warnings)?;
        // Only fields of this request are checked, not the fields that a remix inherits.
        let is_label = self.has_text_embeddings(&loaded.config);
        if is_label {
            warnings.push("the prompt has no effect: the server's text embeddings for HDR video replace it".into());
        }
        let prompt = given.name("prompt");
        let effect = loaded.check_request_effect(|field| given.uses_name(field) && !(is_label && field == prompt));
        effect.map_err(|error| errors::config_error(error, &given))?;
        let (config, inputs) = self.request_config(&loaded.config);
        self.check(&loaded, &given)?;
        let expected = self.resolver.check(&loaded.config, self.serve(), &given)?;
        let id = ids.next().map_err(|_| {
            ApiError::new(500, "internal", "cannot create an id: the system's random number generator failed")
        })?;
        let metadata = given.get("metadata").and_then(Value::as_object).cloned().unwrap_or_default();
        let user = given.text("user").map(String::from);
        let mut fields = kept(given.values);
        if !matches!(endpoint, Endpoint::Create) {
            // Record the pipeline that this endpoint implies, because a remix of the job uses another endpoint.
            fields.insert("pipeline".into(), config.pipeline.name().into());
        }
        Ok(AcceptedJob {
            shape: keys::shape(&config, &self.ranks),
            batch_key: keys::batch(&config, &id),
            id,
            created_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            owner: caller.name.clone(),
            model,
            config: JobConfig::new(&config).map_err(unwritten)?,
            expected,
            fields,
            seconds,
            user,
            metadata,
            warnings,
            remixed_from: endpoint.origin().cloned(),
            inputs,
            body_sha256,
            idempotency_key: None,
            traceparent: None,
        })
    }

    fn warm_up(&self, ids: &Ids) -> Result<Vec<JobBatch>, String> {
        let mut batches = Vec::new();
        for shape in self.warm_shapes()? {
            for lora in self.warm_loras(shape.pipeline) {
                let accepted = self.warm(&shape, lora, ids).map_err(|error| match lora {
                    Some(lora) => format!("--warm {shape} with the LoRA {lora}: {error}"),
                    None => format!("--warm {shape}: {error}"),
                })?;
                batches.push(JobBatch { jobs: vec![Arc::new(accepted)], steps: None, resume: false });
            }
        }
        Ok(batches)
    }
}

/// Returns the fields that a remix inherits: all except those that are only echoed in responses.
fn kept(mut fields: Map<String, Value>) -> Map<String, Value> {
    fields.retain(|name, _| !matches!(name.as_str(), "user" | "metadata" | "model"));
    fields
}

fn unwritten(error: serde_json::Error) -> ApiError {
    ApiError::new(500, "internal", format!("cannot store the job's configuration: {error}"))
}
