//! Layout tuning: compiles, measures and compares many programs, and searches for faster layouts.
//!
//! Each case runs in a child process of this binary (`compile --json -`, `bench --json -`), so that a compiler that
//! crashes or hangs affects only one case. Optimized modules are stored and never compiled twice; reports are derived
//! from them on each run. Each result is one line of the results file, [`Store`].

mod agreement;
mod candidates;
mod case_result;
mod cause;
mod children;
mod compile_report;
mod compiler;
mod diagnose;
mod diagnosis_report;
mod diagnosis_text;
mod difference;
mod error;
mod experiment;
mod experiment_diagnosis;
mod html;
mod options;
mod reason;
pub mod search;
mod store;
mod table;

pub use case_result::CaseResult;
pub(crate) use case_result::{CaseGroup, ranked};
pub(crate) use children::default_jobs;
#[cfg(test)]
pub(crate) use compile_report::tests::{gather as example_collective, report as example_report};
pub use compile_report::{CompileReport, report_schema};
pub(crate) use compile_report::{GIB, name};
pub(crate) use diagnose::{BUDGET, DiagnoseRequest, diagnose};
pub use diagnosis_report::{DiagnosisReport, diagnosis_schema};
pub(crate) use diagnosis_text::diagnosis_text;
pub(crate) use error::TuneError;
pub(crate) use experiment::case_overrides;
pub use experiment::experiment;
pub(crate) use experiment_diagnosis::{diagnose_groups, group_diagnosis_text, suggestions_markdown};
pub(crate) use html::{escaped, page};
pub use options::TuneOptions;
pub(crate) use store::LOG;
pub use store::{LogRecord, Store};
pub(crate) use table::{columns, markdown, table};
