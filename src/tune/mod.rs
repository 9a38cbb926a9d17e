//! Layout tuning: many programs compiled, measured and compared; layout changes found, compiled and ranked.
//!
//! Each case runs in a child process of this binary (`compile --json -`, `bench --json -`), so a compiler that crashes
//! or hangs costs one case. Optimized modules are stored and never compiled twice; reports are read from them anew each
//! time. Each result is one line of [`Store`].

mod agreement;
mod candidates;
mod case_result;
mod cause;
mod children;
pub(crate) mod compile_json;
mod compile_report;
mod compiler;
mod diagnose;
mod diagnosis_text;
mod difference;
mod error;
mod experiment;
mod html;
mod options;
mod reason;
pub mod search;
mod store;
mod table;

pub use case_result::CaseResult;
pub(crate) use case_result::ranked;
pub(crate) use children::default_jobs;
pub(crate) use diagnose::{DiagnoseRequest, Diagnosis, diagnose};
pub(crate) use diagnosis_text::diagnosis_text;
pub(crate) use error::TuneError;
pub use experiment::experiment;
pub(crate) use experiment::given;
pub(crate) use html::{escaped, page};
pub use options::Options;
pub use store::{Record, Store};
pub(crate) use table::{columns, markdown, table};
