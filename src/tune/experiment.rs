//! Experiments: compile cases, measure those whose devices are present, and rank them.

use std::collections::BTreeMap;
use std::time::Duration;

use indexmap::IndexMap;
use serde_json::{Value, json};

use super::case_result::{CaseResult, stem};
use super::children::{EnvVariable, Task, TaskResult, is_timeout, run_tasks};
use super::compile_report::CompileReport;
use super::compiler::{CaseCompiler, CompileTask, digest};
use super::error::Result;
use super::options::TuneOptions;
use super::store::{JobKind, LogRecord, Store};
use crate::config::{
    ActivationType, Case, CliOverrides, Config, ConfigError, Dtype, Experiment, Runtime, WeightType, load,
    read_layout_source,
};
use crate::pipeline::programs::build::ProgramKind;
use crate::pjrt::discover::Platform;
use crate::runtime::platforms::spec;
use crate::runtime::{CompileKey, platform};

/// Returns the label of a case: its layout, mesh and flags. If the case sets no layout and there is a report, the label
/// has the layout and mesh of the report, and the TPU slice in parentheses.
fn name(case: &Case, report: Option<&CompileReport>) -> String {
    let mut parts = match (&case.layout, report) {
        (Some(layout), _) => vec![stem(layout)],
        (None, Some(report)) => vec![stem(&report.layout)],
        (None, None) => vec!["own layout".into()],
    };
    let of_others = report.filter(|_| case.layout.is_none() || case.slice.is_some());
    parts.extend(case.mesh.clone().or_else(|| Some(mesh_name(&of_others?.mesh))).filter(|mesh| !mesh.is_empty()));
    for (name, value) in case.flags.iter().flatten() {
        parts.push(format!("{name}={}", flag_text(value)));
    }
    if case.layout.is_none() && report.is_some() {
        parts.push(format!("({})", case.slice.as_deref().map_or("own".into(), stem)));
    }
    parts.join(" ")
}

/// Returns the element types of a configuration; `None` if they are all bf16.
fn precision(config: &Config) -> Option<String> {
    let Runtime { dtype, weights, activations, .. } = &config.runtime;
    let wide = (*dtype == Dtype::F32).then_some("f32");
    let narrow = match (weights, activations) {
        (WeightType::Bf16, _) => None,
        (WeightType::Fp8, _) => Some("fp8"),
        (WeightType::Int8, ActivationType::Int8) => Some("int8"),
        (WeightType::Int8, ActivationType::Bf16) => Some("int8 weights"),
        (WeightType::Int8Convrot, ActivationType::Int8) => Some("int8-convrot"),
        (WeightType::Int8Convrot, ActivationType::Bf16) => Some("int8-convrot weights"),
    };
    let parts: Vec<&str> = wide.into_iter().chain(narrow).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// Formats the mesh axes with more than one device in the syntax of `--mesh`.
fn mesh_name(mesh: &IndexMap<String, usize>) -> String {
    let axes = mesh.iter().filter(|(_, size)| **size > 1).map(|(axis, size)| format!("{axis}={size}"));
    axes.collect::<Vec<_>>().join(",")
}

/// Returns the label of a case, including the keys in which the cases differ.
fn label(case: &Case, cases: &[Case]) -> String {
    let differing = |key: fn(&Case) -> &Option<String>| {
        key(case).clone().filter(|value| cases.iter().any(|other| key(other).as_ref() != Some(value)))
    };
    let devices = differing(|c| &c.slice).map(|s| stem(&s)).or_else(|| differing(|c| &c.target));
    let keys = [differing(|c| &c.config).map(|c| stem(&c)), differing(|c| &c.shape), devices];
    [Some(name(case, None))].into_iter().chain(keys).flatten().collect::<Vec<_>>().join(" ")
}

fn flag_text(value: &crate::config::FlagValue) -> String {
    let value = serde_json::to_value(value).expect("flag values serialize to JSON");
    value.as_str().map_or_else(|| value.to_string(), str::to_string)
}

/// Returns the arguments that `compile` and `bench` share.
pub(super) fn settings(case: &Case, file: &Experiment) -> Result<Vec<String>> {
    let files = case.config.iter().chain(&case.slice);
    let mut args: Vec<String> = files.flat_map(|name| ["-c".to_string(), name.clone()]).collect();
    let mut set = file.set.clone();
    set.extend(case.size_settings()?);
    set.extend(case.flags.iter().flatten().map(|(n, v)| format!("runtime.xla_flags.{n}={}", flag_text(v))));
    set.into_iter().for_each(|s| args.extend(["--set".to_string(), s]));
    for (flag, value) in [("--layout", &case.layout), ("--mesh", &case.mesh)] {
        args.extend(value.iter().flat_map(|v| [flag.to_string(), v.clone()]));
    }
    Ok(args)
}

/// Returns the configuration of a case, equal to the one that a child process gets from the arguments of [`settings`].
pub(crate) fn case_overrides(case: &Case, file: &Experiment) -> Result<CliOverrides> {
    let settings = settings(case, file)?;
    let after =
        |flag: &str| -> Vec<String> { settings.windows(2).filter(|w| w[0] == flag).map(|w| w[1].clone()).collect() };
    let mut given =
        CliOverrides { files: after("-c"), set: after("--set"), mesh: case.mesh.clone(), ..CliOverrides::default() };
    given.flag("layout", "layout", &case.layout);
    Ok(given)
}

fn compilation(case: &Case, cases: &[Case], file: &Experiment, options: &TuneOptions) -> Result<CompileTask> {
    let target = case.target.clone().expect("files with a case that has no target are rejected");
    let parsed = options.target(&target)?;
    let program = ProgramKind::named(&file.program).map_err(ConfigError::argument)?;
    let mut command = vec!["-q".to_string(), "compile".into(), "--json".into(), "-".into(), "--target".into(), target];
    command.extend(options.chip_arguments());
    command.extend(["--program".to_string(), file.program.clone()]);
    command.extend(file.layers.iter().flat_map(|n| ["--layers".to_string(), n.to_string()]));
    command.extend(settings(case, file)?);
    let given = case_overrides(case, file)?;
    // An invalid layout is an error of the experiment file, not of the case.
    read_layout_source(&load(&given)?.config.layout)?;
    Ok(CompileTask { label: label(case, cases), given, target: parsed, program, layers: file.layers, command })
}

#[derive(Clone)]
struct Measurement {
    /// Key of the program to measure.
    identity: CompileKey,
    device_kind: String,
    /// Benchmarks only the denoising loop, with random weights.
    run: Task,
    /// Compiles the loop and stores it in the compile cache before the benchmark; `None` if there is no cache.
    ahead: Option<Task>,
}

/// Returns the tasks that measure a compiled case on the mesh that it was compiled for; `None` if the complete program
/// cannot be built.
fn measurement(
    compiler: &mut CaseCompiler,
    compiled: &CompileTask,
    case: &Case,
    file: &Experiment,
    mesh: &IndexMap<String, usize>,
) -> Result<Option<Measurement>> {
    let axes: Vec<String> = mesh.iter().map(|(axis, size)| format!("{axis}={size}")).collect();
    let mesh = if axes.is_empty() { "data=1".into() } else { axes.join(",") };
    let case = &Case { mesh: Some(mesh), ..case.clone() };
    let (given, target) = (case_overrides(case, file)?, &compiled.target);
    let config = load(&given)?.config;
    let whole = CompileTask { given, program: ProgramKind::Denoise, layers: None, ..compiled.clone() };
    let identity = match compiler.key(&whole)? {
        Ok(identity) => identity,
        Err(why) => {
            tracing::warn!("cannot measure {}: {why}", compiled.label);
            return Ok(None);
        }
    };
    let measured = ["--weights", "random", "--programs", ProgramKind::Denoise.flag(), "--runs", "3"];
    // Noise levels are inputs of the program, so the key includes the settings that determine how many there are.
    let key = digest(&json!([identity, measured, config.sampler.steps, config.sampler.sigmas]));
    let mut command: Vec<String> = ["-q", "bench", "--json", "-"].map(str::to_string).into();
    command.extend(measured.map(str::to_string));
    command.extend(["--platform".to_string(), target.platform().name().into()]);
    command.extend(settings(case, file)?);
    let ahead = match config.compile_cache() {
        Some(cache) if spec(target.platform()).targets_gpus => {
            let words = ["-q", "compile", "--json", "-", "--program", ProgramKind::Denoise.flag(), "--target"];
            let mut command = Vec::from(words.map(str::to_string));
            command.extend([target.to_string(), "--save".into(), cache.display().to_string()]);
            command.extend(settings(case, file)?);
            Some(Task { key: format!("{key} ahead"), label: format!("{} ahead", compiled.label), command })
        }
        _ => None,
    };
    let run = Task { key, label: format!("{} measured", compiled.label), command };
    let device_kind = match compiler.machine(target) {
        Ok(machine) => machine.device_kind.clone(),
        Err(why) => {
            tracing::warn!("cannot measure {}: {why}", compiled.label);
            return Ok(None);
        }
    };
    Ok(Some(Measurement { identity, device_kind, run, ahead }))
}

/// Returns the value of `CUDA_VISIBLE_DEVICES` for one worker per GPU. Each value begins with another GPU, so that the
/// workers do not all use the same GPU first.
fn gpu_workers() -> Vec<EnvVariable> {
    let gpus = match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(listed) if !listed.is_empty() => listed.split(',').map(str::to_string).collect(),
        _ => (0..platform::cuda_devices().map_or(0, |names| names.len())).map(|n| n.to_string()).collect::<Vec<_>>(),
    };
    let beginning_with = |n: usize| [&gpus[n..], &gpus[..n]].concat().join(",");
    (0..gpus.len()).map(|n| Some(("CUDA_VISIBLE_DEVICES", beginning_with(n)))).collect()
}

/// Checks that the devices of a case are present. GPUs must be of the target's kind, because times measured on another
/// kind would not apply to the target.
fn check_present(platform: Platform, device_kind: &str) -> std::result::Result<(), String> {
    let Some(list) = spec(platform).device_kinds else { return platform::hardware(platform).map(|_| ()) };
    match list()? {
        here if here.iter().all(|name| name == device_kind) => Ok(()),
        here => Err(format!("the target has devices of kind {device_kind}, but this machine has {}", here.join(", "))),
    }
}

/// Compiles and measures the cases that have no stored result, and returns the results of all cases. A case that fails
/// is a result, not an error.
///
/// # Errors
/// Returns an error if a case is invalid or the folder cannot be written to.
pub fn experiment(file: &Experiment, options: &TuneOptions) -> Result<Vec<CaseResult>> {
    let cases = file.cases();
    let tasks = cases.iter().map(|c| compilation(c, &cases, file, options)).collect::<Result<Vec<_>>>()?;
    let mut compiler = CaseCompiler::open(options)?;
    let plan = compiler.plan(&tasks)?;
    tracing::info!("{}", plan.count());
    let all = compiler.carry_out(plan, &tasks, &options.workers(), file.timeout)?;
    let compilers: Vec<Option<String>> = tasks.iter().map(|task| compiler.version(&task.target)).collect();
    let mut measurements = Vec::new();
    for ((case, task), compiled) in cases.iter().zip(&tasks).zip(&all) {
        let report = compiled.report.as_ref().filter(|_| compiled.error.is_none());
        let mesh = report.map(|f| &f.mesh);
        measurements.push(mesh.map(|m| measurement(&mut compiler, task, case, file, m)).transpose()?.flatten());
    }
    let results = &mut compiler.results;
    if options.measure {
        let mut here: Vec<Measurement> = Vec::new();
        for (task, measurement) in tasks.iter().zip(&measurements) {
            let Some(measurement) = measurement else { continue };
            match check_present(task.target.platform(), &measurement.device_kind) {
                Ok(()) => here.push(measurement.clone()),
                Err(why) => tracing::warn!("not measuring {}: {why}", task.label),
            }
        }
        // Compilation is mostly host work, so one task per GPU runs in parallel. A failure is reported by the
        // measurement that follows.
        let open = here.iter().filter(|m| !is_known(results, &m.run, options));
        let ahead: Vec<Task> = open.filter_map(|m| m.ahead.clone()).collect();
        let workers = gpu_workers();
        if workers.len() > 1 && ahead.len() > 1 {
            run_missing(results, JobKind::Ahead, ahead, &[], &workers, file.timeout, options)?;
        }
        // Measure one at a time, because measurements share the devices.
        let (runs, programs): (Vec<Task>, Vec<CompileKey>) = here.into_iter().map(|m| (m.run, m.identity)).unzip();
        run_missing(results, JobKind::Measure, runs, &programs, &[None], file.timeout, options)?;
    }
    // Even without `--measure`, show earlier measurements, including those of other machines.
    let configs = tasks.iter().map(|task| Ok(load(&task.given)?.config)).collect::<Result<Vec<_>>>()?;
    let rows = cases.into_iter().zip(all).zip(measurements).zip(compilers).zip(&configs);
    let rows = rows.map(|((((case, compiled), measurement), compiler), config)| {
        let measured = measurement.and_then(|m| results.get(&m.run.key));
        let seconds = measured.and_then(|r| r.result.as_ref()?.pointer("/programs/denoise_loop/median")?.as_f64());
        let report = compiled.report;
        let error = compiled.error.or_else(|| measured.and_then(|r| r.error.clone()));
        let (label, precision) = (name(&case, report.as_ref()), precision(config));
        CaseResult { label, case, precision, report, measured: seconds, error, compiler, room: None }
    });
    Ok(rows.collect())
}

fn is_known(results: &Store, task: &Task, options: &TuneOptions) -> bool {
    let is_final = |error: &String| !options.retry && !is_timeout(error);
    results.get(&task.key).is_some_and(|r| r.error.as_ref().is_none_or(is_final))
}

/// Runs the tasks that have no stored result. `programs`: keys of the programs that the tasks run; may be empty.
fn run_missing(
    results: &mut Store,
    kind: JobKind,
    tasks: Vec<Task>,
    programs: &[CompileKey],
    workers: &[EnvVariable],
    timeout: u64,
    options: &TuneOptions,
) -> Result<()> {
    let all = tasks.len();
    let mut open: Vec<Task> = Vec::new();
    let mut identities: BTreeMap<String, CompileKey> = BTreeMap::new();
    for (n, task) in tasks.into_iter().enumerate() {
        identities.extend(programs.get(n).map(|p| (task.key.clone(), p.clone())));
        if !is_known(results, &task, options) && !open.iter().any(|t| t.key == task.key) {
            open.push(task);
        }
    }
    if open.len() < all {
        tracing::info!("{} of {all} results are already stored", all - open.len());
    }
    let (count, mut n) = (open.len(), 0);
    run_tasks(&options.binary, open, workers, Duration::from_secs(timeout), |task, done| {
        n += 1;
        tracing::info!("{n} of {count}: {}: {}", task.label, said(&done));
        let Task { key, label, command } = task;
        let identity = identities.get(&key).cloned();
        let ran = done.result.as_ref().and_then(|r| r.pointer("/programs/denoise_loop/program/hash")?.as_str());
        let other = ran.zip(identity.as_ref()).filter(|(ran, meant)| *ran != meant.program);
        let error = done.error.or(other.map(|(ran, meant)| {
            format!("the benchmark ran program {ran} instead of the case's program {}", meant.program)
        }));
        results.add(LogRecord {
            key,
            kind,
            label,
            command,
            seconds: done.seconds,
            identity,
            result: done.result,
            error,
        })
    })
}

fn said(done: &TaskResult) -> String {
    let seconds = format!("{:.0} s", done.seconds);
    let step = |json: &Value| json.pointer("/programs/denoise_loop/median").and_then(Value::as_f64);
    match (&done.error, done.result.as_ref().and_then(step)) {
        (Some(error), _) => format!("{error} ({seconds})"),
        (None, Some(step)) => format!("{:.3} ms per step measured ({seconds})", step * 1e3),
        (None, None) => seconds,
    }
}
