//! Report of a run: a table of its phases for the terminal, and the same figures as JSON.

use crate::pipeline::phase::Phase;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

use crate::pipeline::programs::executor::Executor;
use crate::pipeline::stages::clock::PhaseTime;
use crate::pipeline::stages::text_to_video::{Generated, SkippedSteps};
use crate::runtime::{ExecutableOrigin, Span, Timeline};

/// Returns the peak memory use in bytes: that of the device or, if the device does not report it, of this process.
pub(crate) fn peak_memory(executor: &Executor) -> Option<u64> {
    if let Ok(memory) = executor.engine().own_device().memory()
        && let Some(peak) = memory.peak
    {
        return u64::try_from(peak).ok();
    }
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Timings, counts and memory use of a generated video, except for the time to write its files.
pub(crate) struct RunReport {
    rows: Vec<(String, Duration)>,
    /// Name, compile or load time, and origin of each program that was compiled or read from the cache.
    programs: Vec<(String, Duration, ExecutableOrigin)>,
    /// Lines with counts and memory use that are printed after the timings.
    memory: String,
    figures: Value,
    timeline: Timeline,
    /// Time from the start of the batch until its videos were generated.
    made: Duration,
}

impl RunReport {
    /// Creates the report of a video. `made`: time from the start of the batch until its videos were generated.
    pub(crate) fn new(generated: &Generated, executor: &Executor, made: Duration) -> Self {
        let programs =
            executor.new_programs().iter().map(|e| (e.name().replace('_', " "), e.compile_time(), e.origin()));
        RunReport {
            rows: rows(generated, executor),
            programs: programs.collect(),
            memory: memory(generated, executor),
            figures: figures(generated, executor),
            timeline: executor.engine().timeline().copy(),
            made,
        }
    }

    /// Returns the table to print after a run, and the same figures as JSON. `written`: time span in which the files
    /// were written. Logs the timeline at debug level.
    pub(crate) fn end(&self, written: Span) -> (String, Value) {
        let encoding = Duration::from_secs_f64((written.to - written.from).max(0.0));
        let timeline = self.timeline.copy();
        timeline.push(written);
        tracing::debug!("{timeline}");
        let total = self.made + encoding;
        let mut figures = self.figures.clone();
        figures["encoding"] = json!(encoding.as_secs_f64());
        figures["total"] = json!(total.as_secs_f64());
        figures["timeline"] = json!(timeline.spans());
        let ends = [("encoding".to_string(), encoding), ("total".to_string(), total)];
        let mut text = String::new();
        for (name, time) in self.rows.iter().chain(&ends) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{name:<16}{:>9.3} s", time.as_secs_f64());
            if matches!(name.as_str(), "compile" | "cache hit") {
                for (name, took, origin) in &self.programs {
                    let _ = writeln!(text, "  {name:<14}{:>9.3} s  {origin}", took.as_secs_f64());
                }
            }
        }
        (text + &self.memory, figures)
    }
}

fn rows(generated: &Generated, executor: &Executor) -> Vec<(String, Duration)> {
    let hits = !executor.new_programs().is_empty()
        && executor.new_programs().iter().all(|e| e.origin() == ExecutableOrigin::CacheHit);
    let compile = if hits { "cache hit" } else { "compile" };
    let mut rows = vec![("load".to_string(), executor.load_time), (compile.to_string(), executor.compile_time)];
    for took in &generated.timings {
        rows.push((took.phase.label(), took.total));
        if took.phase == Phase::Denoise {
            rows.push((
                "  per step".to_string(),
                took.total / u32::try_from(generated.steps.max(1)).unwrap_or(u32::MAX),
            ));
        }
    }
    rows.push(("  on the host".to_string(), generated.timings.iter().map(PhaseTime::host).sum()));
    rows
}

fn memory(generated: &Generated, executor: &Executor) -> String {
    let mut text = String::new();
    if generated.batch > 1 {
        let _ = writeln!(text, "{:<16}{:>9}", "batch size", generated.batch);
    }
    for SkippedSteps { pass, steps, total } in &generated.skipped {
        let _ = writeln!(text, "{:<16}{:>9} of {total} ({})", "skipped steps", steps.len(), pass.label());
    }
    let statistics = executor.engine().statistics();
    let (compiles, hits): (Vec<usize>, Vec<usize>) = statistics.values().map(|s| (s.compiles, s.cache_hits)).unzip();
    let _ = writeln!(text, "{:<16}{:>9}", "compiled", compiles.iter().sum::<usize>());
    let _ = writeln!(text, "{:<16}{:>9}", "cache hits", hits.iter().sum::<usize>());
    let parameters = executor.footprint();
    let _ = writeln!(text, "{:<16}{:>9.1} MiB", "parameters", parameters.device as f64 / 1048576.0);
    if parameters.host > 0 {
        let _ = writeln!(text, "{:<16}{:>9.1} MiB", "in host memory", parameters.host as f64 / 1048576.0);
    }
    if let Some(peak) = peak_memory(executor) {
        let _ = writeln!(text, "{:<16}{:>9.1} MiB", "peak memory", peak as f64 / 1048576.0);
    }
    text
}

/// Returns the figures as JSON, including hash, compilations, cache hits and executions of every program.
fn figures(generated: &Generated, executor: &Executor) -> Value {
    let took = |s: Phase| generated.timings.iter().find(|t| t.phase == s);
    let host = generated.timings.iter().map(PhaseTime::host).sum::<Duration>();
    let hashes: std::collections::BTreeMap<&str, &str> = executor.program_hashes().collect();
    let programs: serde_json::Map<String, Value> = executor
        .engine()
        .statistics()
        .into_iter()
        .map(|(name, s)| {
            let hash = hashes.get(name.as_str());
            let origin = if s.compiles > 0 { ExecutableOrigin::Compiled } else { ExecutableOrigin::CacheHit };
            let figures = json!({
                "hash": hash,
                "origin": origin.to_string(),
                "compiles": s.compiles,
                "compile_seconds": s.compile_seconds,
                "cache_hits": s.cache_hits,
                "cache_seconds": s.cache_seconds,
                "executions": s.executions,
            });
            (name, figures)
        })
        .collect();
    let denoise = took(Phase::Denoise).map(|t| t.total.as_secs_f64());
    let mut report = json!({
        "load": executor.load_time.as_secs_f64(),
        "compile": executor.compile_time.as_secs_f64(),
        "host": host.as_secs_f64(),
        "videos_together": generated.batch,
        "parameter_bytes": executor.footprint().device,
        "host_parameter_bytes": executor.footprint().host,
        "peak_memory_bytes": peak_memory(executor),
        "programs": programs,
    });
    for phase in Phase::ALL {
        report[phase.name()] = json!(took(phase).map(|t| t.total.as_secs_f64()));
    }
    report["denoise"] = json!({
        "total": denoise,
        "per_step": generated.step_time().map(|step| step.as_secs_f64()),
        "steps": generated.steps,
        "computed_steps": generated.computed_steps,
    });
    if !generated.skipped.is_empty() {
        report["skipped_steps"] = json!(generated.skipped);
    }
    report
}
