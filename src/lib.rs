//! LTX-2 audio-video generation on XLA, driven through the PJRT C interface: CPU, NVIDIA GPUs and Cloud TPUs.
//!
//! ```no_run
//! use ltx2::{Config, Session};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     ltx2::pjrt::quiet_plugins();
//!     // A preset or a YAML file, with keys of docs/reference/yaml.md over it.
//!     let keys = ["model.path=assets/nano", "request.prompt=a red circle bounces on blue, low beeps"];
//!     let config = Config::load("nano", keys)?;
//!     let mut session = Session::open(&config)?;
//!     for request in session.requests()? {
//!         session.generate(&request)?.write_mp4("out.mp4")?;
//!     }
//!     Ok(())
//! }
//! ```
//!
//! A plugin is found as `ltx2 plugin install` leaves it, or by `LTX2_PJRT_PLUGIN`. `examples/generate.rs` is a whole program,
//! `examples/sampler.rs` has a [`sampling::Sampler`] of its own, `docs/guides/library.md` is the guide.
//!
//! # Life of a request
//!
//! [`Config`] is read from YAML and flags. [`Session`] asks each model for its program (StableHLO text) and its parameter
//! tree, compiles the program and uploads the parameters from the checkpoint beside that. [`Session::generate`] runs the text
//! encoder, the connectors, the denoising loop and the decoders; [`media`] writes the MP4. Modules only use those below
//! them: `cli`, `tune`, `perf`, [`pipeline`], [`request`], [`config`], [`sampling`], [`models`], [`weights`] and [`runtime`],
//! [`nn`], `kernels`; below all are [`hlo`], [`pjrt`] and [`analysis`], crates of their own.
//!
//! # Versions
//!
//! [SemVer](https://semver.org), for the public items of this crate and of the three below it: at 0.x a minor release may
//! change them, a patch release does not. The command line, YAML keys, JSON fields and exit codes follow `CHANGELOG.md`.

pub use ltx2_pjrt as pjrt;
pub use ltx2_stablehlo as hlo;
pub use ltx2_xla_analysis as analysis;
/// Host arrays, as public items take and return them.
pub use ndarray;

pub mod av;
mod contained;
mod defaults;
pub(crate) mod destination;
pub(crate) mod failpoint;
mod foreign;
mod host;
pub(crate) mod interrupts;
pub(crate) mod temporaries;
pub mod tensor;
pub(crate) mod text_file;
pub mod threads;

pub mod cli;
pub mod config;
pub mod kernels;
pub mod media;
pub mod models;
pub mod nn;
pub mod perf;
pub mod pipeline;
pub mod quality;
pub mod request;
pub mod runtime;
pub mod sampling;
pub mod serve;
pub mod tune;
pub mod weights;

pub use config::Config;
pub use pipeline::{Generated, PipelineError, Result, Session};
pub use request::Request;

/// The guide's programs compile.
#[cfg(doctest)]
#[doc = include_str!("../docs/guides/library.md")]
struct Guide;
