//! A configuration's devices, with everything compiled and loaded so far.

use serde_json::{Value, json};

use super::error::{PipelineError, Result};
use super::loras::Loras;
use super::models::Models;
use super::programs::Programs;
use super::request;
use super::stages::Stages;
use crate::config::Config;
use crate::nn::Build;
use crate::runtime::{Engine, platform};

/// Devices that are ready for the requests of one configuration.
pub struct Session {
    /// The configuration, with what it left to the devices decided.
    pub config: Config,
    /// Programs and parameters.
    pub stages: Stages,
    /// How networks become programs here.
    pub build: Build,
    /// This program, the plugin and the platform, as a sidecar names them.
    pub versions: Value,
}

impl Session {
    /// Starts the platform of a configuration, and writes every program of a run once, so that a layout that does not
    /// fit is found now.
    ///
    /// # Errors
    /// No such platform; what is wrong with the layout.
    pub fn start(config: &Config, models: &Models) -> Result<Self> {
        let choice = config.platform().map_err(PipelineError::Input)?;
        let (plugin, client) = platform::open_with(&choice, &request::platform_options(config)?)?;
        let versions = json!({
            "ltx2": env!("CARGO_PKG_VERSION"),
            "plugin": plugin.path().display().to_string(),
            "pjrt": format!("{}.{}", plugin.version().0, plugin.version().1),
            "platform": client.platform_version().unwrap_or_default(),
        });
        let mut stages = Stages::new(Engine::new(client, request::engine_options(config)), models.weights.clone());
        stages.keep_loras(Loras::open(&config.model.loras)?)?;
        let devices = stages.engine().devices();
        let (platform, count) = (stages.engine().platform(), devices.len());
        let config = request::settled(config, &platform, count);
        let build = request::build(&config, count, &platform, devices[0].kind())?;
        Programs::of(&config, None)?.check(&build)?;
        request::log_weights(config.runtime.weights, &models.weights)?;
        Ok(Session { config, stages, build, versions })
    }
}
