//! The model side of `ltx2 serve`: [`fields`] converts requests into jobs, and [`model_device`] runs them. The crate
//! `ltx2-server` has the HTTP server.

pub mod fields;
pub mod model_device;

use std::sync::Arc;

pub use ltx2_server::{
    descriptors, device, error, form, generator, health, id, inputs, job, job_config, jobs, listen, query, server,
    settings, store, worker,
};

use crate::config::LoadedConfig;
use fields::Fields;
use server::{Server, ServerOptions, StartError};
use worker::Factory;

/// Starts a server for a configuration; `factory` creates its device.
///
/// # Errors
/// Returns an error if the configuration cannot be served, the state folder is in use, or an address cannot be bound.
pub fn start(loaded: LoadedConfig, options: ServerOptions, factory: Factory) -> Result<Server, StartError> {
    let settings = loaded.config.serve.clone();
    let served = loaded.config.served_pipelines().map_err(|e| StartError::Usage(e.to_string()))?;
    Server::start(settings, options, |inputs| Arc::new(Fields::new(loaded, served, inputs)), factory)
}
