//! Profiles: traces denoising steps with the plugin's profiler and summarizes the trace.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use super::synthetic::{Denoising, SyntheticInputs, pass_request};
use crate::analysis::{Module, Trace, TraceComparison, XSpace};
use crate::atomic_file::write_atomically;
use crate::config::{Config, Sidecar};
use crate::pipeline::plan::run_plan::RunPlan;
use crate::pipeline::plan::setup;
use crate::pipeline::plan::videos::{Job, RunVideos};
use crate::pipeline::processes;
use crate::pipeline::programs::build::ProgramKind;
use crate::pipeline::programs::executor::Executor;
use crate::pipeline::session::Session;
use crate::pipeline::{PipelineError, Result};
use crate::pjrt::{PjrtError, ProfileOptions, Profiler};
use crate::runtime::processes::{Group, host};
use crate::runtime::{CompiledProgram, RuntimeError, flags};

#[derive(Debug, Serialize)]
pub(crate) struct Profile {
    /// Platform name in lower case.
    pub(crate) platform: String,
    /// Device kind as reported by the plugin.
    pub(crate) device: String,
    pub(crate) devices: usize,
    pub(crate) versions: Value,
    /// Path or preset of the model and fingerprints of its components, as in the sidecar JSON file of a video.
    pub(crate) model: Value,
    pub(crate) config: Value,
    /// Hash of the program, as in `ltx2 compile`.
    pub(crate) hash: String,
    /// XLA options that are set only for tracing. With them, the program differs from that of `generate`.
    pub(crate) flags: Vec<String>,
    pub(crate) xplane: PathBuf,
    pub(crate) trace: Trace,
    /// Comparison of predicted and traced times; `None` if the chip is unknown.
    pub(crate) comparison: Option<TraceComparison>,
}

/// Traces `steps` steps of a denoising loop of a configuration's first video after a warm-up; `kind` is the loop. Writes the trace where TensorBoard
/// looks for it in `folder`: `plugins/profile/RUN/HOST.xplane.pb`. Predicts times for the chip that the configuration
/// sets or, if it sets none, for the device's chip.
///
/// # Errors
/// Returns an error if the plugin has no profiler (before any weights are loaded), if the configuration has fewer than
/// `steps` steps, if the model, request or device fails, or if the trace contains no operations.
pub(crate) fn profile(
    config: &Config,
    job: &Job,
    sidecar: Option<&Sidecar>,
    kind: ProgramKind,
    steps: usize,
    folder: &Path,
    group: Option<&Arc<Group>>,
) -> Result<Profile> {
    let videos = RunVideos::unwritten(vec![job.clone()], sidecar);
    processes::compare(group, config, &videos)?;
    let (mut plan, model) = RunPlan::new(config, &videos)?;
    plan.traceable = true;
    let no_request = || PipelineError::Bug("the run plan contains no request".into());
    let request = plan.requests.first().cloned().ok_or_else(no_request)?;
    let pass = pass_request(&request, kind).ok_or_else(|| {
        let why = format!("--program {}: the pipeline {} runs no such loop", kind.flag(), config.pipeline.name());
        PipelineError::Usage(why)
    })?;
    let mut session = Session::start(plan, model, group)?;
    session.check_memory(group)?;
    let runner = &mut session.runner;
    let plugin = runner.executor.engine().client().plugin().clone();
    if !plugin.has_profiler() {
        return Err(RuntimeError::from(PjrtError::NoProfiler { plugin: plugin.path().to_owned() }).into());
    }
    let all = pass.sigmas.len() - 1;
    if !(1..=all).contains(&steps) {
        return Err(PipelineError::Usage(format!(
            "--steps {steps}: must be 1 to {all}, the number of steps of the loop"
        )));
    }
    let file = file(folder, group)?;
    let synthetic = SyntheticInputs::new(&request, &runner.build.layout);
    runner.executor.enter(kind.pass())?;
    let denoising = synthetic.denoising(runner, &pass, kind)?;
    // Warm up, so that one-time work is not in the trace.
    run(&runner.executor, &denoising, steps, || Ok(()))?;
    let mut profiler = None;
    run(&runner.executor, &denoising, steps, || {
        tracing::info!("tracing {steps} step(s)");
        profiler = Some(Profiler::start(&plugin, ProfileOptions::default()).map_err(RuntimeError::from)?);
        Ok(())
    })?;
    let profiler = profiler.ok_or_else(|| PipelineError::Input("the profiler did not start the trace".into()))?;
    let recorded = profiler.stop().map_err(RuntimeError::from)?;
    let (bytes, space) = with_program(recorded, denoising.program(), &file)?;
    write_atomically(&file, &bytes)?;
    let trace =
        Trace::from_space(&space, Some(steps)).map_err(|reason| PipelineError::File { path: file.clone(), reason })?;
    processes::wait_for_all(group)?;
    let platform = runner.executor.engine().platform().to_owned();
    let mesh = &runner.build.layout.mesh;
    let device = runner.executor.engine().own_device().kind().to_string();
    let comparison = match setup::chip(config, &device) {
        Ok(chip) => TraceComparison::of_space(&space, &trace, &mesh.axes, &chip),
        Err(e) => {
            tracing::warn!("cannot predict times: {e}");
            None
        }
    };
    let own =
        flags::trace_options(&platform).into_iter().filter(|(name, _)| !config.runtime.xla_flags.contains_key(*name));
    Ok(Profile {
        flags: own.map(|(name, value)| format!("{name}={value}")).collect(),
        platform,
        device,
        devices: mesh.devices(),
        versions: session.versions,
        model: runner.model.identity(config)?,
        config: config.effective(&job.prompt, job.seed),
        hash: denoising.program().hash().to_string(),
        xplane: file,
        trace,
        comparison,
    })
}

/// Runs all steps in one call, as `generate` does, or in one call per step if the sampler draws noise. Calls `ready`
/// when all inputs are on the devices.
fn run(executor: &Executor, denoising: &Denoising, steps: usize, ready: impl FnOnce() -> Result<()>) -> Result<()> {
    let (calls, in_one) = if denoising.takes_all() { (1, steps) } else { (steps, 1) };
    let range = denoising.steps(executor, in_one)?;
    let mut latents = denoising.start(executor)?;
    ready()?;
    for _ in 0..calls {
        latents = denoising.run(executor, &range, latents)?;
    }
    Ok(())
}

/// Adds the optimized program, which contains the names of the operations, to the trace if the plugin left it out.
fn with_program(mut bytes: Vec<u8>, program: &CompiledProgram, file: &Path) -> Result<(Vec<u8>, XSpace)> {
    let read = |bytes: &[u8]| {
        let wrong = |e: prost::DecodeError| format!("cannot decode the plugin's trace: {e}");
        XSpace::read(bytes).map_err(|e| PipelineError::File { path: file.to_owned(), reason: wrong(e) })
    };
    let space = read(&bytes)?;
    let Ok(optimized) = program.compiled().optimized_program() else { return Ok((bytes, space)) };
    let name_of = |bytes: &[u8]| Module::decode("hlo_with_config", bytes).map(|m| m.name().to_string()).ok();
    let Some(name) = name_of(&optimized.bytes).filter(|_| optimized.format == "hlo_with_config") else {
        return Ok((bytes, space));
    };
    if space.programs().any(|known| name_of(known).is_some_and(|known| known == name)) {
        return Ok((bytes, space));
    }
    let id = space.program_id(&name).unwrap_or(1);
    bytes.extend(XSpace::of_program(&name, id, &optimized.bytes));
    let space = read(&bytes)?;
    Ok((bytes, space))
}

/// Returns the path of this process's trace. All processes of a run write into one folder.
fn file(folder: &Path, group: Option<&Arc<Group>>) -> Result<PathBuf> {
    // TensorBoard's naming scheme for runs, in UTC.
    let mut run = jiff::Timestamp::now().strftime("%Y_%m_%d_%H_%M_%S").to_string();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let mut name: String = host().chars().map(plain).collect();
    if let Some(group) = group {
        let named = group.all_gather(&run)?;
        run = named.into_iter().next().unwrap_or(run);
        name = format!("{name}_{}", group.id());
    }
    Ok(folder.join("plugins").join("profile").join(run).join(format!("{name}.xplane.pb")))
}
