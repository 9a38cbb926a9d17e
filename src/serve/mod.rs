//! The HTTP server of `ltx2 serve`. Videos are generated as jobs; the API follows OpenAI's `/v1/videos`.
//!
//! ```text
//! HTTP (tokio) -> Jobs (index in memory) -> device thread -> finisher thread -> store
//!    polls, SSE, files    durable transitions     owns the model    MP4, JPEG, sidecar
//! ```
//!
//! HTTP handlers do not depend on the pipeline, and devices do not depend on HTTP. [`fields`] converts a request into
//! an [`Accepted`](job::Accepted) job, [`Jobs`](jobs::Jobs) holds every job and its state, [`worker`] runs jobs on a
//! [`Device`](device::Device) in the order that [`schedule`] chooses, and [`store`] persists them.

mod access;
mod api;
pub mod auth;
mod body;
mod connection;
pub mod descriptors;
pub mod device;
pub mod error;
pub mod fields;
pub mod form;
pub mod generator;
pub mod health;
pub mod id;
pub mod inputs;
pub mod job;
pub mod job_config;
pub mod jobs;
pub mod listen;
pub mod metrics; // alias: of a server, the field's word
pub mod model_device;
pub mod objects;
pub mod query;
pub mod schedule;
pub mod server;
pub mod settings;
pub mod store;
mod streams;
mod traffic;
pub mod worker;

use std::sync::Arc;
use std::time::Duration;

use crate::config::{Drain, Loaded, LogFormat, Seconds, Serve};
use fields::Fields;
use server::{Options, Server, StartError};
use settings::Settings;
use worker::Factory;

/// Starts a server for a configuration; `factory` creates its device.
///
/// # Errors
/// Returns an error if the configuration cannot be served, the state folder is in use, or an address cannot be bound.
pub fn start(loaded: Loaded, options: Options, factory: Factory) -> Result<Server, StartError> {
    let settings = Settings::from(&loaded.config.serve);
    Server::start(settings, options, |inputs| Arc::new(Fields::new(loaded, inputs)), factory)
}

impl From<&Serve> for Settings {
    fn from(serve: &Serve) -> Self {
        // A duration that is too long for this type has no end.
        let duration = |seconds: Seconds| Duration::try_from_secs_f64(seconds.0).unwrap_or(Duration::MAX);
        Settings {
            listen: serve.listen.clone(),
            metrics_listen: serve.metrics_listen.clone(),
            insecure: serve.insecure,
            api_key_file: serve.api_key_file.clone(),
            state: serve.state.clone(),
            allow_host: serve.allow_host.clone(),
            cors_origin: serve.cors_origin.clone(),
            json_log: serve.log_format == LogFormat::Json,
            log_prompts: serve.log_prompts,
            body_limit: serve.body_limit.0,
            min_upload_rate: serve.min_upload_rate.0,
            sync_timeout: duration(serve.sync_timeout),
            queue: serve.queue,
            queue_per_key: serve.queue_per_key,
            max_batch: serve.max_batch.unwrap_or(1),
            max_shapes: serve.max_shapes,
            keep: duration(serve.keep),
            disk: serve.disk.0,
            min_free: serve.min_free.0,
            finish_at_shutdown: serve.drain == Drain::Finish,
            drain_timeout: duration(serve.drain_timeout),
        }
    }
}
