//! From the fields of a request to a job, field by field.

use std::sync::Arc;

use super::error::ApiError;
use super::form::Form;
use super::id::Ids;
use super::inputs::Inputs;
use super::job::Accepted;
use super::jobs::Caller;
use crate::config::Loaded;

/// What requests are read against: the server's configuration and its limits (`config.serve`).
pub struct Fields {
    loaded: Loaded,
    inputs: Arc<Inputs>,
    ids: Ids,
}

/// What kind of request fields are of.
#[derive(Clone, Copy, Debug)]
pub enum Endpoint<'a> {
    /// `POST /v1/videos`, `/sync`.
    Create,
    /// `POST /v1/videos/{id}/remix`, of a finished job.
    Remix(&'a Accepted),
    /// `POST /v1/videos/edits`: a retake; of a finished job's video, or a given one.
    Edit(Option<&'a Accepted>),
    /// `POST /v1/videos/extensions`.
    Extend(Option<&'a Accepted>),
}

impl Fields {
    /// Fields over a server's configuration.
    pub fn new(loaded: Loaded, inputs: Arc<Inputs>, ids: Ids) -> Self {
        Fields { loaded, inputs, ids }
    }

    /// The job of a request. Reads and writes files: not to be called where waiting is forbidden.
    ///
    /// # Errors
    /// What is wrong with a field, by the client's name of it.
    pub fn accept(&self, form: Form, endpoint: Endpoint, caller: &Caller) -> Result<Accepted, ApiError> {
        todo!()
    }
}
