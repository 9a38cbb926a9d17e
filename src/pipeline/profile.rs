//! `profile`: denoising steps as the devices ran them, recorded by the plugin's profiler and summed up.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::Value;

use super::alone::{Alone, Denoising};
use super::error::{PipelineError, Result};
use super::generate::of_job;
use super::models::Models;
use super::options::GenerateOptions;
use super::processes;
use super::programs::ProgramKind;
use super::session::Session;
use super::stages::Stages;
use crate::analysis::{Module, Trace, XSpace};
use crate::config::{Config, Job};
use crate::media::write_atomically;
use crate::pjrt::{Error, ProfileOptions, Profiler};
use crate::runtime::processes::{Group, host};
use crate::runtime::{Executable, RuntimeError, flags};

/// A recording, its file and its summary.
#[derive(Debug, Serialize)]
pub struct Profile {
    /// Of the platform, in lower case.
    pub platform: String,
    /// The plugin's name of a device.
    pub device: String,
    /// Devices the program runs on, of all processes.
    pub devices: usize,
    /// Program, plugin, platform.
    pub versions: Value,
    /// The model, as a sidecar names it.
    pub model: Value,
    /// Everything else that was asked for.
    pub config: Value,
    /// The program that ran, as `ltx2 compile` says it.
    pub hash: String,
    /// XLA options by which it differs from the one that `generate` runs.
    pub flags: Vec<String>,
    /// The recording.
    pub xplane: PathBuf,
    /// Where the time went, on this process's devices.
    pub trace: Trace,
}

/// Records `steps` denoising steps of a configuration's first video after a warm-up, and writes the recording below
/// `folder` where TensorBoard looks for it: `plugins/profile/RUN/HOST.xplane.pb`.
///
/// # Errors
/// A plugin without a profiler, before anything of the model is loaded; more steps than the configuration has; what is
/// wrong with model, request or device; a recording without operations.
pub fn profile(config: &Config, job: &Job, steps: usize, folder: &Path, group: Option<&Arc<Group>>) -> Result<Profile> {
    if let Some(group) = group {
        let options = GenerateOptions { jobs: vec![job.clone()], ..GenerateOptions::default() };
        processes::compare(group, config, &options)?;
    }
    let models = Models::of(config)?;
    let mut session = Session::start_traceable(config, &models, group)?;
    let plugin = session.stages.engine().client().plugin().clone();
    if !plugin.has_profiler() {
        return Err(RuntimeError::from(Error::NoProfiler { plugin: plugin.path().to_owned() }).into());
    }
    let request = of_job(config, &models, job)?;
    if !request.given.is_empty() {
        return Err(PipelineError::Usage(
            "profile records requests without given frames; leave request.images empty".into(),
        ));
    }
    let (first, _) = request.stages();
    let all = first.sigmas.len() - 1;
    if !(1..=all).contains(&steps) {
        return Err(PipelineError::Usage(format!("--steps {steps}: the configuration takes {all}, give 1 to {all}")));
    }
    let file = file(folder, group)?;
    let alone = Alone::new(&models, &request, &session.build)?;
    let stages = &mut session.stages;
    let denoising = alone.denoising(stages, &first, ProgramKind::Denoise)?;
    // What happens at the first run only is over before the recording.
    run(stages, &denoising, steps, || Ok(()))?;
    let mut profiler = None;
    run(stages, &denoising, steps, || {
        tracing::info!("recording {steps} step(s)");
        profiler = Some(Profiler::start(&plugin, ProfileOptions::default()).map_err(RuntimeError::from)?);
        Ok(())
    })?;
    let profiler = profiler.ok_or_else(|| PipelineError::Input("nothing was recorded".into()))?;
    let recorded = profiler.stop().map_err(RuntimeError::from)?;
    let (bytes, space) = with_program(recorded, denoising.program(), &file)?;
    write_atomically(&file, &bytes)?;
    let trace = Trace::of(&space, Some(steps)).map_err(|reason| PipelineError::File { path: file.clone(), reason })?;
    if let Some(group) = group {
        processes::wait_for_all(group)?;
    }
    let platform = session.stages.engine().platform();
    let own =
        flags::for_traces(&platform).into_iter().filter(|(name, _)| !config.runtime.xla_flags.contains_key(*name));
    Ok(Profile {
        flags: own.map(|(name, value)| format!("{name}={value}")).collect(),
        platform,
        device: session.stages.engine().own_device().kind().to_string(),
        devices: session.build.layout.mesh.devices(),
        versions: session.versions,
        model: models.identity()?,
        config: config.effective(&job.prompt, job.seed),
        hash: denoising.program().hash().to_string(),
        xplane: file,
        trace,
    })
}

/// Runs the steps: in one call, as `generate` does, or in a call each where the sampler takes no more. `ready` is called
/// when all that they read is on the devices.
fn run(stages: &Stages, denoising: &Denoising, steps: usize, ready: impl FnOnce() -> Result<()>) -> Result<()> {
    let (calls, in_one) = if denoising.takes_all() { (1, steps) } else { (steps, 1) };
    let range = denoising.steps(stages, in_one)?;
    let mut latents = denoising.start(stages)?;
    ready()?;
    for _ in 0..calls {
        latents = denoising.run(stages, &range, latents)?;
    }
    Ok(())
}

/// The recording with the program that ran, which explains its operations: some plugins leave it out.
fn with_program(mut bytes: Vec<u8>, program: &Executable, file: &Path) -> Result<(Vec<u8>, XSpace)> {
    let read = |bytes: &[u8]| {
        let wrong = |e: prost::DecodeError| format!("the plugin's recording cannot be read: {e}");
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

/// The file of this process's recording. The processes of a run write into one folder.
fn file(folder: &Path, group: Option<&Arc<Group>>) -> Result<PathBuf> {
    let mut run = run_name(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let mut name: String = host().chars().map(plain).collect();
    if let Some(group) = group {
        let named = group.all_gather(&run)?;
        run = named.into_iter().next().unwrap_or(run);
        name = format!("{name}_{}", group.id());
    }
    Ok(folder.join("plugins").join("profile").join(run).join(format!("{name}.xplane.pb")))
}

/// A time as TensorBoard names runs, `2026_01_31_23_59_59`, in UTC.
fn run_name(since_1970: Duration) -> String {
    let seconds = since_1970.as_secs();
    let (days, of_day) = (seconds / 86400, seconds % 86400);
    // Years that begin in March have their leap day at the end; 146 097 days are 400 years.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + next;
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}_{month:02}_{day:02}_{hour:02}_{minute:02}_{second:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_named_by_the_calendar() {
        let name = |seconds| run_name(Duration::from_secs(seconds));
        assert_eq!(name(0), "1970_01_01_00_00_00");
        assert_eq!(name(951_782_400), "2000_02_29_00_00_00");
        assert_eq!(name(1_709_251_199), "2024_02_29_23_59_59");
        assert_eq!(name(1_735_689_599), "2024_12_31_23_59_59");
        assert_eq!(name(4_107_542_400), "2100_03_01_00_00_00", "2100 has no leap day");
    }
}
