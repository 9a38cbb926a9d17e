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

use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};

use super::error::ApiError;
use super::form::Form;
use super::id::{Ids, VideoId};
use super::inputs::Inputs;
use super::job::Accepted;
use super::jobs::Caller;
use crate::config::{Config, Loaded, Pipeline, Serve, ServeSeed};
use request_fields::RequestFields;
use resolve::Resolver;

pub use card::{Card, Limits};
pub use limits::Shape;
pub(in crate::serve) use media::takes_file;
pub use schema::request_schema;

/// Converts requests into jobs for a server with this configuration and its limits (`config.serve`).
pub struct Fields {
    loaded: Loaded,
    inputs: Arc<Inputs>,
    ids: Ids,
    resolver: Resolver,
}

/// Finished job whose video an edit or extension uses as input.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    pub accepted: &'a Accepted,
    /// Path of the job's MP4.
    pub video: &'a Path,
}

/// Endpoint to which the fields were sent.
#[derive(Clone, Copy, Debug)]
pub enum Endpoint<'a> {
    /// `POST /v1/videos` and `/v1/videos/sync`.
    Create,
    /// `POST /v1/videos/{id}/remix`, with the finished job that it repeats.
    Remix(&'a Accepted),
    /// `POST /v1/videos/edits`: a retake of the video of a finished job (see [`source_video`]) or of an uploaded video.
    Edit(Option<Source<'a>>),
    /// `POST /v1/videos/extensions`, which extends the video of a finished job or an uploaded video.
    Extend(Option<Source<'a>>),
}

impl Endpoint<'_> {
    fn origin(&self) -> Option<&VideoId> {
        match self {
            Endpoint::Create => None,
            Endpoint::Remix(accepted) => Some(&accepted.id),
            Endpoint::Edit(source) | Endpoint::Extend(source) => source.map(|source| &source.accepted.id),
        }
    }
}

/// Returns the id of the finished job whose video an edit or extension uses; `None` if the request uploads a video. The
/// field `video` or an alias of it contains the id as text or as `{id}`.
///
/// # Errors
/// Returns `video_not_found` if the text starts with `video_` but is not a valid id.
pub fn source_video(form: &Form) -> Result<Option<VideoId>, ApiError> {
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
    /// Returns a converter for a server with the configuration `loaded`.
    pub fn new(loaded: Loaded, inputs: Arc<Inputs>, ids: Ids) -> Self {
        let resolver = Resolver::of(&loaded.config);
        Fields { loaded, inputs, ids, resolver }
    }

    fn serve(&self) -> &Serve {
        &self.loaded.config.serve
    }

    /// Converts a request into a job. Reads and writes files, which blocks: do not call it from async code.
    ///
    /// # Errors
    /// Returns an error that contains the name of the invalid field as the client wrote it.
    pub fn accept(&self, form: Form, endpoint: Endpoint, caller: &Caller) -> Result<Accepted, ApiError> {
        let Form { fields, parts, body_sha256 } = form;
        let mut given = RequestFields::read(fields)?;
        self.keep_files(&mut given, parts, endpoint)?;
        if let Some((name, named)) = given.take("lora") {
            let loras = self.read_loras(&name, named)?;
            given.put("lora", Some(name), loras);
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
        let effect = loaded.check_request_effect(|field| given.uses_name(field));
        effect.map_err(|error| errors::config_error(error, &given))?;
        let (config, inputs) = self.request_config(&loaded.config);
        self.check(&loaded, &given)?;
        let expected = self.resolver.check(&loaded.config, self.serve(), &given)?;
        let id = self.ids.next().map_err(|_| {
            ApiError::new(500, "internal", "cannot create an id: the system's random number generator failed")
        })?;
        let metadata = given.get("metadata").and_then(Value::as_object).cloned().unwrap_or_default();
        let user = given.text("user").map(String::from);
        let mut fields = kept(given.values);
        if !matches!(endpoint, Endpoint::Create) {
            // Record the pipeline that this endpoint implies, because a remix of the job uses another endpoint.
            fields.insert("pipeline".into(), config.pipeline.name().into());
        }
        Ok(Accepted {
            shape: keys::shape(&config),
            batch_key: keys::batch(&config, &id),
            id,
            created_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            owner: caller.name.clone(),
            model,
            config,
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

    /// Returns the names by which clients may refer to the model. The first is the default.
    pub fn model_names(&self) -> Vec<String> {
        if !self.serve().served_model_name.is_empty() {
            return self.serve().served_model_name.clone();
        }
        let path = self.loaded.config.model.path.trim_end_matches('/');
        let last = path.rsplit('/').next().unwrap_or(path);
        let mut names = vec![self.loaded.preset().to_string()];
        names.extend(Some(last.to_string()).filter(|last| !last.is_empty() && *last != names[0]));
        names
    }

    fn model_name(&self, given: &RequestFields) -> Result<String, ApiError> {
        let names = self.model_names();
        match given.text("model") {
            None => Ok(names.into_iter().next().unwrap_or_default()),
            Some(name) if self.serve().any_model || names.iter().any(|own| own == name) => Ok(name.into()),
            Some(_) => {
                let field = given.name("model");
                let why = format!("{field}: no such model; available: {}", names.join(", "));
                Err(ApiError { status: 404, ..ApiError::field("model_not_found", field, why) })
            }
        }
    }

    /// Returns the pipelines that requests may use.
    pub fn pipelines(&self) -> Vec<Pipeline> {
        let mut all = vec![self.loaded.config.pipeline];
        all.extend(&self.serve().pipelines);
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

    /// Returns the configuration to store with a job, and the names of its input files. Server settings are removed,
    /// and paths of input files are replaced by their names in the store.
    fn request_config(&self, effective: &Config) -> (Config, Vec<String>) {
        let mut own = effective.clone();
        own.serve = Serve::default();
        own.extends = None;
        (own.output.path, own.output.save_frames, own.output.save_audio) = (None, None, None);
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

/// Returns the fields that a remix inherits: all except those that are only echoed in responses.
fn kept(mut fields: Map<String, Value>) -> Map<String, Value> {
    fields.retain(|name, _| !matches!(name.as_str(), "user" | "metadata" | "model"));
    fields
}
