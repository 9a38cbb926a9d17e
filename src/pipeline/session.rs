//! The devices of a configuration, with compiled programs and loaded parameters.

use super::plan::setup;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};

use super::error::{PipelineError, Result};
use super::model::OpenModel;
use super::plan::layouts::RankingDevices;
use super::plan::loras::Loras;
use super::plan::memory::{self, Limits};
use super::plan::options::RunOptions;
use super::plan::run_plan::RunPlan;
use super::plan::stream;
use super::programs::executor::Executor;
use super::runner::Runner;
use super::stages::text_to_video::Generated;
use crate::config::{AUTO, Config, LayerForm};
use crate::media::RoundTrip;
use crate::nn::Build;
use crate::request::{self, Request};
use crate::runtime::processes::Group;
use crate::runtime::{Engine, EngineOptions, Footprint, RuntimeError, SpanKind, platform};

/// A model on its devices, ready to run the requests of one configuration.
pub struct Session {
    /// The plan of the run, in which `layout: auto` is replaced by the layout chosen for the devices.
    pub plan: RunPlan,
    pub runner: Runner,
    /// Versions, as recorded in sidecars: of ltx2, of the plugin, of the platform and, if there are conditioning
    /// images, of the H.264 encoder. Rarely needed by callers.
    pub versions: Value,
    /// Whether this process writes the output files: it is the only process, or the first of several. Needed only in
    /// multi-process runs.
    pub first: bool,
}

impl Session {
    /// Opens the model of a configuration on the devices of this process, compiles every program of a run, and decides
    /// which weights stay on the devices. The programs are compiled for the sampler, the sizes and the guidance of the
    /// configuration; programs for a request with other values are compiled when it first runs.
    ///
    /// # Errors
    /// Returns an error if the model or the platform does not exist, the layout is not suitable, or the run does not
    /// fit in device memory.
    pub fn open(config: &Config) -> Result<Self> {
        let model = OpenModel::from_config(config)?;
        let mut session = Session::start(RunPlan::of_model(config, &model)?, model, None)?;
        session.fit_memory(None)?;
        Ok(session)
    }

    /// Returns the requests of the configuration, one for each combination of prompt and seed.
    ///
    /// # Errors
    /// Returns an error if the model does not support the sizes or the noise schedule, or if the configuration enhances
    /// prompts, which only [`generate`](super::generate::generate) does.
    pub fn requests(&self) -> Result<Vec<Request>> {
        let config = &self.plan.config;
        if config.request.enhance_prompt {
            let why = "Session::requests does not enhance prompts; call pipeline::generate::generate, or set \
                       request.enhance_prompt to false";
            return Err(PipelineError::Usage(why.into()));
        }
        config.jobs()?.iter().map(|job| self.runner.model.request(config, job)).collect()
    }

    /// Generates the video of a request. To observe its progress, use [`Runner::generate`].
    ///
    /// # Errors
    /// Returns an error if the model, the request or a device fails.
    pub fn generate(&mut self, request: &Request) -> Result<Generated> {
        self.runner.generate(request, &RunOptions::default(), &mut |_, _, _| ControlFlow::Continue(()))
    }

    /// Compiles every program of a run, and decides which weights stay on the devices. Needed only after
    /// [`Session::start`]; [`Session::open`] calls it.
    ///
    /// # Errors
    /// Returns an error if a program cannot be compiled or the run does not fit in device memory.
    pub fn fit_memory(&mut self, group: Option<&Arc<Group>>) -> Result<()> {
        let runner = &mut self.runner;
        let planned = memory::plan(&self.plan, &mut runner.executor, &runner.build, group)?;
        runner.follow(planned);
        Ok(())
    }

    /// Checks that all parameters fit in the free memory of a CPU, for commands that keep all of them loaded and do not
    /// call [`Session::fit_memory`].
    pub(crate) fn check_memory(&mut self, group: Option<&Arc<Group>>) -> Result<()> {
        memory::check_on_cpu(&self.plan, &mut self.runner.executor, &self.runner.build, group)
    }

    /// Opens the platform of a plan, alone or as one of several processes. Builds every program of a run once, so that
    /// an unsuitable layout is rejected here. Needed only for several processes; [`Session::open`] calls it for a
    /// single process.
    ///
    /// # Errors
    /// Returns an error if the platform does not exist or the layout is not suitable.
    pub fn start(mut plan: RunPlan, model: OpenModel, group: Option<&Arc<Group>>) -> Result<Self> {
        request::frame_count(&plan.config)?;
        // Verify the model before waiting for the devices: it may have been opened for another run.
        model.verify(&plan.config)?;
        plan.choose_encoder(group.map(|group| &**group))?;
        let options = EngineOptions { traceable: plan.traceable, ..setup::engine_options(&plan.config) };
        let SessionDevices { engine, build, mut versions } = SessionDevices::open(&mut plan, group, options)?;
        versions["h264"] = json!(plan.round_trip.as_ref().map(RoundTrip::to_string));
        let index = engine.client().process_index().map_err(RuntimeError::from)?;
        let first = group.map_or(index == 0, |group| group.id() == 0);
        let mut executor = Executor::new(engine, model.weights.clone());
        executor.keep_loras(Loras::open(&plan.config.model)?)?;
        setup::log_weights(&plan.config.runtime, &model.weights)?;
        let (h264, round_trip) = (plan.config.conditioning.h264, plan.round_trip.clone());
        let runner = Runner { h264, round_trip, ..Runner::new(model, executor, build) };
        Ok(Session { plan, runner, versions, first })
    }
}

/// The opened devices of a plan.
pub(super) struct SessionDevices {
    pub(super) engine: Engine,
    /// Options with which programs are built.
    pub(super) build: Build,
    /// Versions of ltx2, the plugin and the platform.
    versions: Value,
}

impl SessionDevices {
    /// Opens the platform, alone or as one of several processes. Chooses the plan's layout for the devices if it is
    /// `auto`, and builds the programs of the plan once to check the layout.
    pub(super) fn open(plan: &mut RunPlan, group: Option<&Arc<Group>>, engine_options: EngineOptions) -> Result<Self> {
        let config = &plan.config;
        let choice = config.platform().map_err(PipelineError::Input)?;
        let options = setup::platform_options(config, group.map(|group| &**group))?;
        let opening = Instant::now();
        engine_options.watchdog.report_aborts();
        let (plugin, client) = platform::open_with(&choice, &options)?;
        let versions = json!({
            "ltx2": env!("CARGO_PKG_VERSION"),
            "plugin": plugin.path().display().to_string(),
            "pjrt": format!("{}.{}", plugin.version().0, plugin.version().1),
            "platform": client.platform_version(),
        });
        let engine = Engine::among(client, engine_options, group.cloned());
        engine.timeline().add(SpanKind::Open, engine.platform(), opening, None);
        check_process_count(&engine, group)?;
        let count = engine.devices().len();
        let toolchain = engine.toolchain();
        let chip = setup::chip(config, &toolchain.kind);
        let decides = config.layout == AUTO && count > 1 && !engine.spec().is_host;
        if let (Err(why), true) = (&chip, decides) {
            tracing::warn!("layouts are ranked by received bytes instead of predicted time: {why}");
        }
        let (chip, capacity) = (chip.ok(), engine.own_device().memory().ok().and_then(|memory| memory.limit));
        plan.place(RankingDevices { toolchain, count, capacity, chip: chip.as_ref() })?;
        let build_options = |plan: &RunPlan| -> Result<Build> {
            let build = setup::build_for(&plan.config, count, engine.toolchain())?;
            check_mesh_use(&plan.config, &build, &engine)?;
            plan.programs.check(&build)?;
            Ok(Build { streaming: stream::initial(plan, &engine, &build, group)?, ..build })
        };
        let mut build = build_options(plan)?;
        let config = Config::clone(&plan.config);
        let limits = || Limits::new(&config, &engine, Footprint::default(), &build, group);
        let form = plan.choose_layers(chip.as_ref(), &build, limits)?;
        if form != LayerForm::Auto && build.lowering.unroll_layers != (form == LayerForm::Unrolled) {
            build = build_options(plan)?;
        }
        Ok(SessionDevices { engine, build, versions })
    }
}

/// Checks that the number of processes that own the devices is the number of processes of the run.
fn check_process_count(engine: &Engine, group: Option<&Arc<Group>>) -> Result<()> {
    let found: BTreeSet<i32> = engine.devices().iter().map(|device| device.description().process_index).collect();
    match group {
        Some(_) if platform::is_rehearsal(engine.platform()) => Ok(()),
        Some(group) if found.len() != group.count() => Err(PipelineError::Input(format!(
            "the run was started with {} processes, but the devices that the plugin found belong to {} processes",
            group.count(),
            found.len()
        ))),
        None if engine.has_peers() => {
            tracing::warn!(
                "{} processes without a --coordinator: their programs are not compared, and a lost process is not detected",
                found.len()
            );
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Rejects a mesh that does not use all devices of a multi-process run, or that has another number of TPU slices than
/// the devices.
fn check_mesh_use(config: &Config, build: &Build, engine: &Engine) -> Result<()> {
    let (used, all) = (build.layout.mesh.devices(), engine.devices().len());
    if engine.has_peers() && used < all {
        let layout = &config.layout;
        return Err(PipelineError::Usage(format!(
            "layout {layout} uses {used} of {all} devices; a multi-process run uses all: pass a --mesh of {all} devices"
        )));
    }
    let (slices, named) = (engine.slices(), config.slices()?);
    if engine.spec().has_slices && slices != named {
        return Err(PipelineError::Usage(format!(
            "the devices belong to {slices} slice(s), but the mesh has dcn.data = {named}: pass --mesh dcn.data={slices},…"
        )));
    }
    Ok(())
}
