//! A compiler crash terminates only the child process that compiles.

use std::fs;

use crate::support::{self, needs};
use serde_json::Value;

/// Uses a flag with which the CPU compiler throws an uncaught exception.
#[needs(cpu)]
fn compiler_crash_fails_only_its_experiment_case() {
    let dir = tempfile::tempdir().expect("a folder");
    let (yaml, out) = (dir.path().join("x.yml"), dir.path().join("out"));
    let small = "set: [model.path=nano, request.width=64, request.height=96, request.num_frames=9]\nlayers: 1\n";
    let cases = "layouts: [sequence]\ntargets: ['cpu:2']\n\
                 flags: [{xla_cpu_parallel_codegen_split_count: -1}, {xla_backend_optimization_level: 0}]\n";
    fs::write(&yaml, format!("config: nano_2_0\n{small}{cases}")).expect("writes");
    let ran = support::ltx2().arg("experiment").arg(&yaml).arg("-o").arg(&out).output().expect("runs");
    let (table, said) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{said}");
    let rows: Vec<&str> = table.lines().filter(|l| l.contains("split_count=-1: ")).collect();
    assert!(rows.len() == 1 && rows[0].contains("signal: 6 (SIGABRT)"), "{table}");

    // The other case still completed.
    let results = fs::read_to_string(out.join("results.jsonl")).expect("results");
    let results: Vec<Value> = results.lines().map(|l| serde_json::from_str(l).expect("a whole line")).collect();
    let errors: Vec<Option<&str>> = results.iter().map(|r| r["error"].as_str()).collect();
    assert_eq!(errors.iter().filter(|error| error.is_none()).count(), 1, "{errors:?}");
    assert_eq!(errors.len(), 2, "{errors:?}");
}
