//! The laboratory: many programs compiled, timed, compared, and layouts mended by what the compiler says of them.
//!
//! Every case is a child process of this binary (`compile --json -`, `bench --json -`), so that a compiler that crashes
//! or hangs costs one case. Their optimized modules are stored and never compiled twice; figures are read from them anew
//! each time. What came of every case is a line of [`Store`].

mod agreement;
mod candidates;
mod cause;
mod children;
pub mod compile_json;
mod compiler;
mod difference;
mod error;
mod experiment;
mod figures;
mod reason;
mod report;
pub mod search;
mod store;
mod table;
mod why;
mod why_text;

pub use agreement::{Agreement, agreement};
pub use children::{Done, Task, default_jobs, run_tasks};
pub use difference::{Difference, Moved, difference};
pub use error::{LabError, Result};
pub use experiment::{Options, Row, experiment, ranked};
pub use figures::{Exchange, Figures, Needed, Placed, Predicted};
pub use report::page;
pub use store::{Record, Store, Work};
pub use table::table;
pub use why::{Advice, Answer, LEAST_GAIN, Price, Question, why};
pub use why_text::why_text;
