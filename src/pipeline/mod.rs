//! From a request to a file.

pub mod batch;
pub mod calls;
pub mod clock;
pub mod compile;
mod denoising;
mod error;
mod files;
pub mod generate;
pub mod given;
pub mod init;
pub mod loops;
pub mod loras;
pub mod memory;
pub mod models;
pub mod options;
pub mod origin;
pub mod processes;
pub mod programs;
pub mod report;
pub mod request;
pub mod run;
pub mod saved;
pub mod session;
pub mod stages;
pub mod tensors;
pub mod text_to_video;
pub mod tiles;

pub use error::{PipelineError, Result, one_line};
