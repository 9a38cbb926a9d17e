//! From a request to a file.

mod alone;
pub mod batch;
pub mod bench;
pub mod calls;
mod cause;
pub mod clock;
pub mod compile;
mod denoising;
mod error;
pub mod executor;
pub mod figures;
mod files;
pub mod generate;
pub mod given;
pub mod init;
pub mod loops;
pub mod loras;
pub mod memory;
pub mod micro;
pub mod model;
pub mod options;
pub mod origin;
pub mod processes;
pub mod profile;
pub mod programs;
mod reason;
pub mod report;
pub mod request;
pub mod run;
pub mod saved;
pub mod session;
pub mod tensors;
pub mod text_to_video;
pub mod tiles;

pub use error::{PipelineError, Result, one_line};
