//! Microbenchmarks of the devices, without a model.

use serde_json::json;

use crate::analysis::{CollectiveKind, Measurements, Provenance};
use crate::config::Config;
use crate::pipeline::Result;
use crate::pipeline::plan::setup;
use crate::runtime::{Engine, micro, platform};

/// Runs each microbenchmark `runs` times on all devices of the platform. If `only` is not empty, runs only collectives
/// of these kinds. `command` is the command line to record in the result.
pub(crate) fn measure(config: &Config, runs: usize, only: &[CollectiveKind], command: &str) -> Result<Measurements> {
    let choice = config.platform().map_err(crate::pipeline::PipelineError::Input)?;
    let (plugin, client) = platform::open_with(&choice, &setup::platform_options(config, None)?)?;
    let versions = json!({
        "ltx2": env!("CARGO_PKG_VERSION"),
        "plugin": plugin.path().file_name().map(|name| name.to_string_lossy()),
        "platform": client.platform_version(),
    });
    let engine = Engine::new(client, setup::engine_options(config));
    let source = Provenance {
        command: command.into(),
        device: engine.own_device().kind().to_string(),
        devices: engine.devices().len(),
        versions,
        date: jiff::Timestamp::now().strftime("%Y-%m-%d").to_string(),
    };
    // `None` without a chip file: the number of multiprocessors that attention leaves idle is then unknown.
    let chip = setup::chip(config, engine.own_device().kind()).ok();
    let (iteration_seconds, samples) = micro::micro(&engine, chip.as_ref(), runs, only)?;
    Ok(Measurements { source, platform: engine.platform().into(), iteration_seconds, samples })
}
