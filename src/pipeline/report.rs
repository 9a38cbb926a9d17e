//! Report of a run: the table of its phases, and the same as JSON.

use super::phase::Phase;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

use super::clock::PhaseTime;
use super::executor::Executor;
use super::text_to_video::Generated;
use crate::runtime::ExecutableOrigin;

/// Times of a run next to those of its phases.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outer {
    /// Writing the files.
    pub(crate) encoding: Duration,
    /// From the start of the request, and of those made with it, to its last file.
    pub(crate) total: Duration,
}

/// The most memory the process held, in bytes; the platform's own figure where there is no device memory to ask.
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

fn rows(generated: &Generated, executor: &Executor, outer: Outer) -> Vec<(String, Duration)> {
    let hits = !executor.made().is_empty() && executor.made().iter().all(|e| e.origin() == ExecutableOrigin::CacheHit);
    let compile = if hits { "cache hit" } else { "compile" };
    let mut rows = vec![("load".to_string(), executor.load_time), (compile.to_string(), executor.compile_time)];
    for took in &generated.timings {
        rows.push((took.phase.label(), took.total));
        if took.phase == Phase::Denoise {
            rows.push(("  a step".to_string(), took.total / u32::try_from(generated.steps.max(1)).unwrap_or(u32::MAX)));
        }
    }
    rows.push(("  on the host".to_string(), generated.timings.iter().map(PhaseTime::host).sum()));
    rows.push(("encoding".to_string(), outer.encoding));
    rows.push(("total".to_string(), outer.total));
    rows
}

/// The table printed after every run.
pub(crate) fn table(generated: &Generated, executor: &Executor, outer: Outer) -> String {
    let mut text = String::new();
    for (name, time) in rows(generated, executor, outer) {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:<16}{:>9.3} s", time.as_secs_f64());
        if matches!(name.as_str(), "compile" | "cache hit") {
            for e in executor.made() {
                let (name, took) = (e.name().replace('_', " "), e.compile_time().as_secs_f64());
                let _ = writeln!(text, "  {name:<14}{took:>9.3} s  {}", e.origin());
            }
        }
    }
    if generated.batch > 1 {
        let _ = writeln!(text, "{:<16}{:>9}", "made together", generated.batch);
    }
    let statistics = executor.engine().statistics();
    let (compiles, hits): (Vec<usize>, Vec<usize>) = statistics.values().map(|s| (s.compiles, s.cache_hits)).unzip();
    let _ = writeln!(text, "{:<16}{:>9}", "compiled", compiles.iter().sum::<usize>());
    let _ = writeln!(text, "{:<16}{:>9}", "cache hits", hits.iter().sum::<usize>());
    let _ = writeln!(text, "{:<16}{:>9.1} MiB", "parameters", executor.parameter_bytes() as f64 / 1048576.0);
    if let Some(peak) = peak_memory(executor) {
        let _ = writeln!(text, "{:<16}{:>9.1} MiB", "peak memory", peak as f64 / 1048576.0);
    }
    text
}

/// The same figures as JSON, with every program's hash, compiles, cache hits and executions.
pub(crate) fn json(generated: &Generated, executor: &Executor, outer: Outer) -> Value {
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
        "encoding": outer.encoding.as_secs_f64(),
        "total": outer.total.as_secs_f64(),
        "videos_together": generated.batch,
        "parameter_bytes": executor.parameter_bytes(),
        "peak_memory_bytes": peak_memory(executor),
        "programs": programs,
        "timeline": executor.engine().timeline().spans(),
    });
    for phase in Phase::phases() {
        report[phase.name()] = json!(took(phase).map(|t| t.total.as_secs_f64()));
    }
    report["denoise"] = json!({"total": denoise, "per_step": denoise.map(|d| d / generated.steps.max(1) as f64), "steps": generated.steps});
    report
}
