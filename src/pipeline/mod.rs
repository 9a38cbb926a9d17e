//! From a request to a file.

mod error;
pub mod stages;

pub use error::{PipelineError, Result};
