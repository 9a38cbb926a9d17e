//! A configuration's devices, with everything compiled and loaded so far.

use super::setup;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};

use super::error::{PipelineError, Result};
use super::executor::Executor;
use super::layouts;
use super::loras::Loras;
use super::memory;
use super::model::Model;
use super::options::RunOptions;
use super::programs::Programs;
use super::runner::Runner;
use super::text_to_video::Generated;
use crate::config::{AUTO, Config};
use crate::media::RoundTrip;
use crate::nn::Build;
use crate::request::Request;
use crate::runtime::processes::Group;
use crate::runtime::{Engine, EngineOptions, RuntimeError, SpanKind, platform};

/// Devices that are ready for the requests of one configuration.
pub struct Session {
    /// The configuration, with what it left to the devices decided.
    pub config: Config,
    pub runner: Runner,
    /// This program, the plugin, the platform and, with conditioning images, their H.264 encoder, as the JSON file
    /// next to a video names them. Rarely needed.
    pub versions: Value,
    /// Whether this process writes what comes out: it is the only one, or the first. Needed with several processes only.
    pub first: bool,
}

impl Session {
    /// Opens the model of a configuration on the devices of this process, compiles every program of a run, and decides
    /// which weights stay on the devices. The programs are those of the configuration's sampler, sizes and guidance: a
    /// request with others compiles its own at first use.
    ///
    /// # Errors
    /// No such model or platform; what is wrong with the layout; too little memory.
    pub fn open(config: &Config) -> Result<Self> {
        let mut session = Session::start(config, Model::of(config)?, None)?;
        session.plan(false, None)?;
        Ok(session)
    }

    /// The requests of the configuration: one for each prompt and each of its seeds.
    ///
    /// # Errors
    /// Sizes and schedules that the model does not take.
    pub fn requests(&self) -> Result<Vec<Request>> {
        self.config.jobs()?.iter().map(|job| self.runner.model.request(&self.config, job)).collect()
    }

    /// Makes the video of a request; [`Runner::generate`] also tells of progress.
    ///
    /// # Errors
    /// Errors of model, request or device.
    pub fn generate(&mut self, request: &Request) -> Result<Generated> {
        self.runner.generate(request, &RunOptions::default(), &mut |_, _, _| ControlFlow::Continue(()))
    }

    /// Compiles every program of a run and decides which weights stay on the devices. Rarely needed: [`Session::open`] does
    /// it; call it after [`Session::start`].
    ///
    /// # Errors
    /// Too little memory; what is wrong with a program.
    pub fn plan(&mut self, dump: bool, group: Option<&Arc<Group>>) -> Result<()> {
        let programs = Programs::of(&self.config, None)?.dumping(dump);
        let runner = &mut self.runner;
        let planned = memory::plan(&self.config, &programs, &mut runner.executor, &runner.build, group)?;
        runner.follow(planned);
        Ok(())
    }

    /// Starts the platform of a configuration, alone or as one of several processes, and writes every program of a run
    /// once, so that a layout that does not fit is found now. Rarely needed: [`Session::open`] does it, for one process.
    ///
    /// # Errors
    /// No such platform; what is wrong with the layout.
    pub fn start(config: &Config, model: Model, group: Option<&Arc<Group>>) -> Result<Self> {
        Session::start_with(config, model, group, setup::engine_options(config))
    }

    /// The same, with programs whose trace tells their operations apart. Rarely needed: for profiles.
    ///
    /// # Errors
    /// Those of [`Session::start`].
    pub fn start_traceable(config: &Config, model: Model, group: Option<&Arc<Group>>) -> Result<Self> {
        let options = EngineOptions { traceable: true, ..setup::engine_options(config) };
        Session::start_with(config, model, group, options)
    }

    fn start_with(
        config: &Config,
        model: Model,
        group: Option<&Arc<Group>>,
        engine_options: EngineOptions,
    ) -> Result<Self> {
        // Before devices are waited for: a model may have been opened for another run.
        let programs = Programs::of(config, None)?;
        model.verify(config)?;
        let mut config = config.clone();
        let round_trip = setup::round_trip(&mut config, group.map(|group| &**group))?;
        let Devices { config, engine, build, mut versions } = Devices::open(&config, &programs, group, engine_options)?;
        versions["h264"] = json!(round_trip.as_ref().map(RoundTrip::to_string));
        let index = engine.client().process_index().map_err(RuntimeError::from)?;
        let first = group.map_or(index == 0, |group| group.id() == 0);
        let mut executor = Executor::new(engine, model.weights.clone());
        executor.keep_loras(Loras::open(&config.model)?)?;
        setup::log_weights(config.runtime.weights, &model.weights)?;
        let h264 = config.conditioning.h264;
        let runner = Runner { h264, round_trip, ..Runner::new(model, executor, build) };
        Ok(Session { config, runner, versions, first })
    }
}

/// The devices of a configuration, opened.
pub(super) struct Devices {
    /// The configuration, with what it left to the devices decided.
    pub(super) config: Config,
    pub(super) engine: Engine,
    /// How networks become programs there.
    pub(super) build: Build,
    /// This program, the plugin and the platform.
    versions: Value,
}

impl Devices {
    /// Starts the platform, alone or as one of several processes, and writes `programs` once.
    ///
    /// # Errors
    /// No such platform; what is wrong with the layout.
    pub(super) fn open(
        config: &Config,
        programs: &Programs,
        group: Option<&Arc<Group>>,
        engine_options: EngineOptions,
    ) -> Result<Self> {
        let choice = config.platform().map_err(PipelineError::Input)?;
        let options = setup::platform_options(config, group.map(|group| &**group))?;
        let opening = Instant::now();
        engine_options.watchdog.tells_aborts();
        let (plugin, client) = platform::open_with(&choice, &options)?;
        let versions = json!({
            "ltx2": env!("CARGO_PKG_VERSION"),
            "plugin": plugin.path().display().to_string(),
            "pjrt": format!("{}.{}", plugin.version().0, plugin.version().1),
            "platform": client.platform_version(),
        });
        let engine = Engine::among(client, engine_options, group.cloned());
        engine.timeline().add(SpanKind::Open, engine.platform(), opening, None);
        peers(&engine, group)?;
        let count = engine.devices().len();
        let toolchain = engine.toolchain();
        let chip = setup::chip(config, &toolchain.kind);
        let decides = config.layout == AUTO && count > 1 && engine.platform() != "cpu";
        if let (Err(why), true) = (&chip, decides) {
            tracing::warn!("layouts are told apart by their collectives alone: {why}");
        }
        let (chip, capacity) = (chip.ok(), engine.own_device().memory().ok().and_then(|memory| memory.limit));
        let config = layouts::resolve(config, layouts::Devices { toolchain, count, capacity, chip: chip.as_ref() })?;
        let build = setup::build_for(&config, count, engine.toolchain())?;
        whole_mesh(&config, &build, &engine)?;
        programs.check(&build)?;
        Ok(Devices { config, engine, build, versions })
    }
}

/// Compares the processes that the plugin found with those that were started.
fn peers(engine: &Engine, group: Option<&Arc<Group>>) -> Result<()> {
    let found: BTreeSet<i32> = engine.devices().iter().map(|device| device.description().process_index).collect();
    match group {
        Some(_) if platform::rehearses(engine.platform()) => Ok(()),
        Some(group) if found.len() != group.count() => Err(PipelineError::Input(format!(
            "{} processes run together, but the devices that the plugin found belong to {}",
            group.count(),
            found.len()
        ))),
        None if engine.has_peers() => {
            tracing::warn!(
                "{} processes without a --coordinator: their programs are not compared, and a lost one is not noticed",
                found.len()
            );
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Refuses a mesh that leaves a process without a part, or that takes slices for one.
fn whole_mesh(config: &Config, build: &Build, engine: &Engine) -> Result<()> {
    let (used, all) = (build.layout.mesh.devices(), engine.devices().len());
    if engine.has_peers() && used < all {
        let layout = &config.layout;
        return Err(PipelineError::Usage(format!(
            "layout {layout} uses {used} of the {all} devices; with several processes it has to use all: give a --mesh"
        )));
    }
    let (slices, named) = (engine.slices(), config.slices()?);
    if engine.platform() == "tpu" && slices != named {
        return Err(PipelineError::Usage(format!(
            "the devices are {slices} slice(s), the mesh has dcn.data = {named}: give --mesh dcn.data={slices},…"
        )));
    }
    Ok(())
}
