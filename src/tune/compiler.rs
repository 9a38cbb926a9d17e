//! Compiles many cases. Missing modules are compiled by child processes, which add them to the store. Stored modules
//! are analysed here on each run, so that reports always come from this version of the analysis.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::children::{EnvVariable, Task, TaskResult, run_tasks};
use super::compile_report::CompileReport;
use super::error::{Result, TuneError};
use super::options::TuneOptions;
use super::store::{JobKind, LogRecord, Store};
use crate::atomic_file::write_atomically;
use crate::config::{CliOverrides, LayoutSource, load};
use crate::pipeline::programs::build::ProgramKind;
use crate::pipeline::programs::compile::{self, ProgramCompileOptions, analyse};
use crate::pipeline::{PipelineError, one_line};
use crate::pjrt::discover::Platform;
use crate::pjrt::{TPUS_UNPREPARED, prepare_absent_tpus};
use crate::runtime::{CompileKey, CompileOutcome, ModuleStore, OpenTarget, RuntimeError, Target};

#[derive(Clone, Debug)]
pub(super) struct CompileTask {
    pub(crate) label: String,
    pub(crate) given: CliOverrides,
    pub(crate) target: Target,
    pub(crate) program: ProgramKind,
    /// Number of transformer blocks; `None`: all.
    pub(crate) layers: Option<usize>,
    /// Arguments with which a child process compiles the same program.
    pub(crate) command: Vec<String>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct CompileResult {
    /// Key of the module; `None` if the program could not be built.
    pub(crate) key: Option<CompileKey>,
    /// The report. It is also set if the program does not fit into device memory.
    pub(crate) report: Option<CompileReport>,
    /// Message of a failure, or the statement that the program does not fit into device memory.
    pub(crate) error: Option<String>,
}

impl CompileResult {
    fn failed(key: Option<CompileKey>, error: String) -> Self {
        CompileResult { key, report: None, error: Some(error) }
    }
}

/// Stored results, and the programs that must be compiled for the other results.
pub(super) struct CompilePlan {
    /// Result of each task; `None` if its program must be compiled.
    results: Vec<Option<CompileResult>>,
    /// Programs to compile, each with the indices of the tasks that need it.
    open: Vec<(CompileKey, Vec<usize>)>,
    known: usize,
}

impl CompilePlan {
    /// Returns a text with the number of cases, of programs to compile, and of cases whose program cannot be built.
    pub(crate) fn count(&self) -> String {
        let without = self.results.iter().flatten().filter(|compiled| compiled.key.is_none()).count();
        let without =
            if without == 0 { String::new() } else { format!(", cases whose program cannot be built: {without}") };
        format!("cases: {}, programs to compile: {}{without}", self.results.len(), self.open.len())
    }
}

enum Lookup {
    Done(Box<CompileResult>),
    Missing(CompileKey),
}

/// Compiles cases; holds the results, modules and opened targets of one folder.
pub(super) struct CaseCompiler<'a> {
    options: &'a TuneOptions,
    pub(crate) results: Store,
    modules: ModuleStore,
    machines: BTreeMap<String, std::result::Result<Rc<OpenTarget>, String>>,
}

impl<'a> CaseCompiler<'a> {
    /// Opens the results file and the module store of `options`.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be written or another process holds its lock.
    pub(crate) fn open(options: &'a TuneOptions) -> Result<Self> {
        let own = options.folder.join("modules");
        let modules = ModuleStore::new(options.modules.as_deref().unwrap_or(&own));
        Ok(CaseCompiler { options, results: Store::open(&options.folder)?, modules, machines: BTreeMap::new() })
    }

    /// Returns the devices of a target, or why the target cannot be opened. Each target is opened only once.
    pub(crate) fn machine(&mut self, target: &Target) -> std::result::Result<Rc<OpenTarget>, String> {
        let open = || {
            if target.platform() == Platform::Tpu && !prepare_absent_tpus() {
                return Err(TPUS_UNPREPARED.into());
            }
            target.open().map(Rc::new).map_err(|e| one_line(&RuntimeError::from(e)))
        };
        self.machines.entry(target.to_string()).or_insert_with(open).clone()
    }

    /// Returns the compiler of a target with its version; `None` if the target cannot be opened.
    pub(crate) fn version(&mut self, target: &Target) -> Option<String> {
        self.machine(target).ok().map(|machine| machine.toolchain().to_string())
    }

    /// Returns the module store's key of a task's program, or why the program cannot be built.
    ///
    /// # Errors
    /// Returns an error if the configuration cannot be read.
    pub(crate) fn key(&mut self, task: &CompileTask) -> Result<std::result::Result<CompileKey, String>> {
        let config = load(&task.given)?.config;
        let machine = match self.machine(&task.target) {
            Ok(machine) => machine,
            Err(why) => return Ok(Err(why)),
        };
        Ok(compile::key(&config, &options(task, &self.modules), &machine, &self.modules).map_err(|e| one_line(&e)))
    }

    /// Compiles the programs that have no stored module, each once, and returns the results of all tasks in order. A
    /// program that fails to compile is a result, not an error.
    ///
    /// # Errors
    /// Returns an error if a configuration cannot be read or the folder cannot be written to.
    pub(crate) fn compile(
        &mut self,
        tasks: &[CompileTask],
        workers: &[EnvVariable],
        timeout: u64,
    ) -> Result<Vec<CompileResult>> {
        let plan = self.plan(tasks)?;
        self.carry_out(plan, tasks, workers, timeout)
    }

    /// Analyses the stored modules and determines which are missing.
    ///
    /// # Errors
    /// Returns an error if a configuration cannot be read or the folder cannot be written to.
    pub(crate) fn plan(&mut self, tasks: &[CompileTask]) -> Result<CompilePlan> {
        let mut results: Vec<Option<CompileResult>> = vec![None; tasks.len()];
        let mut known = 0;
        let mut open: Vec<(CompileKey, Vec<usize>)> = Vec::new();
        for (n, task) in tasks.iter().enumerate() {
            match self.look(task, self.options.retry)? {
                Lookup::Done(compiled) => {
                    // A program that cannot be built was already known if the log contains the same result.
                    let new = self.log(task, &compiled, 0.0)?;
                    known += usize::from(compiled.key.is_some() || !new);
                    results[n] = Some(*compiled);
                }
                Lookup::Missing(key) => match open.iter_mut().find(|(other, _)| *other == key) {
                    Some((_, same)) => same.push(n),
                    None => open.push((key, vec![n])),
                },
            }
        }
        Ok(CompilePlan { results, open, known })
    }

    /// Compiles the programs of `plan` whose modules are missing. `tasks` must be those of [`CaseCompiler::plan`].
    ///
    /// # Errors
    /// Fails for the same reasons as [`CaseCompiler::compile`].
    pub(crate) fn carry_out(
        &mut self,
        plan: CompilePlan,
        tasks: &[CompileTask],
        workers: &[EnvVariable],
        timeout: u64,
    ) -> Result<Vec<CompileResult>> {
        let CompilePlan { results: mut all, open, known } = plan;
        if known > 0 {
            tracing::info!("{known} of {} results are already stored", tasks.len());
        }
        let (count, mut ended) = (open.len(), 0);
        let (binary, limit) = (&self.options.binary, Duration::from_secs(timeout));
        let children = open.iter().map(|(key, same)| self.child(key, &tasks[same[0]])).collect();
        run_tasks(binary, children, workers, limit, |child, done| {
            ended += 1;
            for &n in open.iter().filter(|(key, _)| key.hash() == child.key).flat_map(|(_, same)| same) {
                let compiled = self.left(&tasks[n], &done)?;
                tracing::info!("{ended} of {count}: {}: {}", tasks[n].label, said(&compiled, done.seconds));
                self.log(&tasks[n], &compiled, done.seconds)?;
                all[n] = Some(compiled);
            }
            Ok(())
        })?;
        Ok(all.into_iter().map(|compiled| compiled.expect("every task has a result")).collect())
    }

    fn child(&self, key: &CompileKey, task: &CompileTask) -> Task {
        let modules = self.modules.folder().display().to_string();
        let command = [task.command.clone(), vec!["--modules".into(), modules]].concat();
        Task { key: key.hash(), label: task.label.clone(), command }
    }

    /// Returns the result of a compilation in a child process. If the child crashed, stores the crash as a failure of
    /// the compiler; stores no errors that occur outside of the compiler.
    fn left(&mut self, task: &CompileTask, done: &TaskResult) -> Result<CompileResult> {
        let words = || done.error.clone().unwrap_or_else(|| "the compiler stored no module".into());
        let missing = match self.look(task, false)? {
            Lookup::Done(compiled) => return Ok(*compiled),
            Lookup::Missing(key) => key,
        };
        if done.crashed {
            self.modules.put(&missing, &CompileOutcome::Failure(words())).map_err(TuneError::Modules)?;
        }
        Ok(CompileResult::failed(Some(missing), words()))
    }

    /// Analyses the stored result of a program. If `forget` is true, first deletes stored compiler failures.
    fn look(&mut self, task: &CompileTask, forget: bool) -> Result<Lookup> {
        let config = load(&task.given)?.config;
        let machine = match self.machine(&task.target) {
            Ok(machine) => machine,
            Err(why) => return Ok(Lookup::Done(CompileResult::failed(None, why).into())),
        };
        let options = options(task, &self.modules);
        let mut analysed = analyse(&config, &options, &machine);
        while forget && let Err(PipelineError::Refused { path, .. }) = &analysed {
            std::fs::remove_file(path).map_err(TuneError::file(path))?;
            analysed = analyse(&config, &options, &machine);
        }
        let compiled = match analysed {
            Ok(done) => {
                let error = done.shortage.as_ref().map(ToString::to_string);
                let key = done.key.clone();
                CompileResult { key, report: Some(CompileReport::from_compilation(done, &task.target)), error }
            }
            Err(PipelineError::NotCompiled(key)) => return Ok(Lookup::Missing(*key)),
            Err(PipelineError::Refused { key, message, .. }) => CompileResult::failed(Some(*key), short(&message)),
            Err(e) => CompileResult::failed(None, short(&one_line(&e))),
        };
        Ok(Lookup::Done(compiled.into()))
    }

    /// Adds a line to the log unless the last line for the same case and program is equal. Returns whether it added a
    /// line.
    fn log(&mut self, task: &CompileTask, compiled: &CompileResult, seconds: f64) -> Result<bool> {
        let key = digest(&json!([task.command, compiled.key]));
        // Parse the serialized text again, as the log is parsed, so that the two results compare equal.
        let text = compiled
            .report
            .as_ref()
            .map(|report| serde_json::to_string(report).expect("the report serializes to JSON"));
        let result = text.and_then(|text| serde_json::from_str(&text).ok());
        let (identity, error) = (compiled.key.clone(), compiled.error.clone());
        if self.results.get(&key).is_some_and(|r| r.result == result && r.error == error) {
            return Ok(false);
        }
        let (label, command) = (task.label.clone(), task.command.clone());
        self.results.add(LogRecord {
            key,
            kind: JobKind::Compile,
            label,
            command,
            seconds,
            identity,
            result,
            error,
        })?;
        Ok(true)
    }
}

fn options<'a>(task: &CompileTask, modules: &'a ModuleStore) -> ProgramCompileOptions<'a> {
    let (target, kind, layers) = (task.target.clone(), task.program, task.layers);
    ProgramCompileOptions { target, kind, layers, dump: None, save: None, modules: Some(modules) }
}

/// Writes a layout to a file in a subfolder of `folder`. The file name is a hash of the contents, so that equal layouts
/// are compiled once.
///
/// # Errors
/// Returns an error if the folder cannot be written to.
pub(super) fn write_layout(folder: &Path, layout: &LayoutSource) -> Result<PathBuf> {
    let text = layout.to_yaml(&[]);
    let name = hex::encode(&Sha256::digest(&text)[..6]);
    let path = folder.join("layouts").join(format!("{name}.yml"));
    path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(TuneError::file(&path))?;
    write_atomically(&path, text.as_bytes())?;
    Ok(path)
}

/// Returns the key of a log line: a hash of the values that determine the result.
pub(super) fn digest(of: &Value) -> String {
    hex::encode(Sha256::digest(of.to_string().as_bytes()))
}

/// Returns the first line of a compiler's message, truncated.
fn short(message: &str) -> String {
    const LONGEST: usize = 500;
    let line =
        message.lines().map(str::trim).find(|l| !l.is_empty()).unwrap_or("the compiler failed without a message");
    line.chars().take(LONGEST).collect()
}

fn said(compiled: &CompileResult, seconds: f64) -> String {
    let seconds = format!("{seconds:.0} s");
    match (&compiled.error, &compiled.report) {
        (Some(error), _) => format!("{error} ({seconds})"),
        (None, Some(report)) => {
            let mb = report.collectives.per_layer_bytes / 1e6;
            let step = report.all_blocks().map_or(String::new(), |p| format!("{:.2} ms per step, ", p.step));
            format!("{step}{mb:.1} MB of collectives per block ({seconds})")
        }
        (None, None) => seconds,
    }
}
