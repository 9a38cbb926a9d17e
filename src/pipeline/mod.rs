//! Runs requests, from the prompt to the video file.

pub mod enhancement;
mod error;
pub mod generate;
pub mod model;
pub mod output;
pub mod phase;
pub mod plan;
pub mod preview;
pub mod processes;
pub mod programs;
pub mod runner;
pub mod session;
pub mod stages;

pub use error::{PipelineError, Result, one_line};
pub use phase::{Phase, Watch};
pub use plan::options::RunOptions;
pub use runner::Runner;
pub use session::Session;
pub use stages::text_to_video::Generated;
