//! From the fields of a request to a job, field by field.
//!
//! [`table`] has a row for each field. A body's fields are read by it into one form (`given`), laid over the server's
//! configuration as a layer of YAML is (`layer`), and the result is checked by the same code; its errors come back in the client's
//! words (`faults`).

mod card;
mod faults;
mod given;
mod keys;
mod layer;
mod limits;
mod loras;
mod media;
mod read;
mod remix;
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
use given::RequestFields;
use resolve::Resolver;

pub use card::{Card, Limits};
pub use limits::Shape;
pub(in crate::serve) use media::takes_file;
pub use schema::request_schema;

/// Fields of requests, read against the server's configuration and its limits (`config.serve`).
pub struct Fields {
    loaded: Loaded,
    inputs: Arc<Inputs>,
    ids: Ids,
    resolver: Resolver,
}

/// A finished job that a request starts from.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    pub accepted: &'a Accepted,
    /// Its MP4.
    pub video: &'a Path,
}

/// Kind of request that fields are of.
#[derive(Clone, Copy, Debug)]
pub enum Endpoint<'a> {
    /// `POST /v1/videos`, `/sync`.
    Create,
    /// `POST /v1/videos/{id}/remix`, of a finished job.
    Remix(&'a Accepted),
    /// `POST /v1/videos/edits`: a retake; of a finished job's video ([`source_video`]), or a given one.
    Edit(Option<Source<'a>>),
    /// `POST /v1/videos/extensions`.
    Extend(Option<Source<'a>>),
}

impl Endpoint<'_> {
    /// The job that the request's own is made from.
    fn origin(&self) -> Option<&VideoId> {
        match self {
            Endpoint::Create => None,
            Endpoint::Remix(accepted) => Some(&accepted.id),
            Endpoint::Edit(source) | Endpoint::Extend(source) => source.map(|source| &source.accepted.id),
        }
    }
}

/// The finished job that an edit or an extension names as its video, in `video` or a synonym: an id, or `{id}`.
///
/// # Errors
/// `video_not_found` for text that looks like an id and is none.
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
    /// Fields over a server's configuration.
    pub fn new(loaded: Loaded, inputs: Arc<Inputs>, ids: Ids) -> Self {
        let resolver = Resolver::of(&loaded.config);
        Fields { loaded, inputs, ids, resolver }
    }

    fn serve(&self) -> &Serve {
        &self.loaded.config.serve
    }

    /// The job of a request. Reads and writes files: not to be called where waiting is forbidden.
    ///
    /// # Errors
    /// What is wrong with a field, by the client's name of it.
    pub fn accept(&self, form: Form, endpoint: Endpoint, caller: &Caller) -> Result<Accepted, ApiError> {
        let Form { fields, parts, body_sha256 } = form;
        let mut given = RequestFields::read(fields)?;
        self.keep_files(&mut given, parts, endpoint)?;
        if let Some((name, named)) = given.take("lora") {
            let loras = self.read_loras(&name, named)?;
            given.put("lora", Some(name), loras);
        }
        given.spell_duration()?;
        if let Endpoint::Remix(accepted) = endpoint {
            given = given.over(accepted);
        }
        let model = self.model_name(&given)?;
        let seconds = given.get("seconds").map(|value| read::plain(value.as_f64().unwrap_or_default()).to_string());
        self.draw_seed(&mut given)?;
        let mut warnings = Vec::new();
        self.fill_retake(&mut given, endpoint, &mut warnings)?;
        let loaded = self.laid(&given, endpoint, &mut warnings)?;
        // Fields that a remix takes over are the earlier request's.
        let effect = loaded.check_request_effect(|field| given.has_written(field));
        effect.map_err(|error| faults::of_config(error, &given))?;
        let (config, inputs) = self.own_config(&loaded.config);
        self.check(&loaded, &given)?;
        let expected = self.resolver.check(&loaded.config, self.serve(), &given)?;
        let id = self.ids.next().map_err(|_| ApiError::new(500, "internal", "no random numbers for an id"))?;
        let metadata = given.get("metadata").and_then(Value::as_object).cloned().unwrap_or_default();
        let user = given.text("user").map(String::from);
        let mut fields = kept(given.values);
        if !matches!(endpoint, Endpoint::Create) {
            // A remix of it has no such endpoint to say so.
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

    /// Names that clients may give the model, the first where they give none.
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
                let why = format!("{field}: this server has no such model; it has {}", names.join(", "));
                Err(ApiError { status: 404, ..ApiError::field("model_not_found", field, why) })
            }
        }
    }

    /// Pipelines that requests may have.
    pub fn pipelines(&self) -> Vec<Pipeline> {
        let mut all = vec![self.loaded.config.pipeline];
        all.extend(&self.serve().pipelines);
        // The same weights and preset.
        for (one, other) in
            [(Pipeline::TextToVideo, Pipeline::ImageToVideo), (Pipeline::ImageToVideo, Pipeline::TextToVideo)]
        {
            if all.contains(&one) {
                all.push(other);
            }
        }
        let mut seen = Vec::new();
        all.retain(|pipeline| {
            !seen.contains(pipeline) && {
                seen.push(*pipeline);
                true
            }
        });
        all
    }

    /// Writes the seed that a request leaves open.
    fn draw_seed(&self, given: &mut RequestFields) -> Result<(), ApiError> {
        let by_tree = || given.get("ltx2").and_then(|tree| tree.get("request")?.get("seed")).is_some();
        // A field holds before a key, one that asks for a drawn seed, too.
        if given.get("seed").map_or_else(by_tree, |seed| *seed != -1) {
            return Ok(());
        }
        let seed = match self.serve().seed {
            ServeSeed::Fixed => self.loaded.config.request.seed,
            ServeSeed::Random => {
                let mut bytes = [0; 8];
                getrandom::fill(&mut bytes)
                    .map_err(|_| ApiError::new(500, "internal", "no random numbers for a seed"))?;
                // JavaScript keeps 53 bits of a number.
                u64::from_le_bytes(bytes) >> 11
            }
        };
        given.values.insert("seed".into(), seed.into());
        Ok(())
    }

    /// The run of a request alone, nothing of the server: its files by their names in the store, and those names.
    fn own_config(&self, effective: &Config) -> (Config, Vec<String>) {
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

/// Fields that a remix takes over: none that the answer alone repeats.
fn kept(mut fields: Map<String, Value>) -> Map<String, Value> {
    fields.retain(|name, _| !matches!(name.as_str(), "user" | "metadata" | "model"));
    fields
}
