//! LTX-2 audio-video generation on XLA, driven through the PJRT C interface: CPU, NVIDIA GPUs and Cloud TPUs.
//!
//! ```no_run
//! use ltx2::{Config, Session};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     ltx2::pjrt::quiet_plugins();
//!     // A preset or a YAML file, with overrides of keys from docs/reference/yaml.md.
//!     let config = Config::load("nano", ["request.prompt=a red circle bounces on blue, low beeps"])?;
//!     let mut session = Session::open(&config)?;
//!     for request in session.requests()? {
//!         session.generate(&request)?.write_mp4("out.mp4")?;
//!     }
//!     Ok(())
//! }
//! ```
//!
//! The PJRT plugin is the one installed by `ltx2 plugin install`, or the file in `LTX2_PJRT_PLUGIN`.
//! `examples/generate.rs` is a complete program, `examples/sampler.rs` implements a custom [`sampling::Sampler`], and
//! `docs/guides/library.md` is the guide.
//!
//! # Life of a request
//!
//! [`Config`] is read from YAML and flags. [`Session`] builds the program (StableHLO text) and the parameter tree of
//! each model component, compiles the program, and uploads the parameters from the checkpoint in parallel.
//! [`Session::generate`] runs the text encoder, the connectors, the denoising loop and the decoders; [`media`] writes
//! the MP4. Each module depends only on modules after it in this list: `cli`, `tune`, `serve`, `perf`, [`pipeline`],
//! [`request`], [`config`], [`sampling`], `quality`, and on the crates in `docs/decisions/crates.md`.
//!
//! # Versions
//!
//! [SemVer](https://semver.org) applies to the public items of this crate and of the crates it re-exports: at 0.x, a
//! minor release may change them, but a patch release does not. `CHANGELOG.md` describes the stability of the command
//! line, YAML keys, JSON fields and exit codes.

pub use ltx2_base::threads;
pub(crate) use ltx2_base::{
    atomic_file, catch_panic, destination, failpoint, file_lock, host, interrupts, temporaries, text_file,
};
pub use ltx2_media as media;
pub use ltx2_models as models;
pub use ltx2_models::av;
pub use ltx2_nn as nn;
pub use ltx2_nn::kernels;
pub use ltx2_pjrt as pjrt;
pub use ltx2_runtime as runtime;
pub use ltx2_stablehlo as hlo;
pub use ltx2_weights as weights;
pub use ltx2_weights::tensor;
pub use ltx2_xla_analysis as analysis;
/// The `ndarray` crate, whose arrays appear in public signatures.
pub use ndarray;

pub mod cli;
pub mod config;
pub mod perf;
pub mod pipeline;
pub mod quality;
pub mod request;
pub mod sampling;
pub mod serve;
pub mod tune;

pub use config::Config;
pub use pipeline::{Generated, PipelineError, Result, Session};
pub use request::Request;

/// Compiles the code examples of the library guide as doctests.
#[cfg(doctest)]
#[doc = include_str!("../docs/guides/library.md")]
struct Guide;
