//! The model side of `ltx2 serve`: [`fields`] converts requests into jobs, and [`model_device`] runs them. The crate
//! `ltx2-server` has the HTTP server.

pub mod fields;
pub mod model_device;

use std::sync::Arc;
use std::time::Duration;

pub use ltx2_server::{
    descriptors, device, error, form, generator, health, id, inputs, job, job_config, jobs, listen, query, server,
    settings, store, worker,
};

use crate::config::{Drain, LoadedConfig, LogFormat, Seconds, Serve};
use fields::Fields;
use server::{Server, ServerOptions, StartError};
use settings::Settings;
use worker::Factory;

/// Starts a server for a configuration; `factory` creates its device.
///
/// # Errors
/// Returns an error if the configuration cannot be served, the state folder is in use, or an address cannot be bound.
pub fn start(loaded: LoadedConfig, options: ServerOptions, factory: Factory) -> Result<Server, StartError> {
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
