//! LTX-2 audio-video generation on XLA, driven through the PJRT C interface.
//!
//! One request runs so: [`cli`] reads YAML and flags into a configuration; [`pipeline`] asks each model for its
//! program (StableHLO text) and its parameter tree; [`runtime`] compiles the program and uploads the parameters from
//! the mapped checkpoint; the text encoder, the connectors, the denoising loop and the decoders run; [`media`] writes
//! the MP4. Arrows point down only: cli -> tune -> perf -> pipeline -> {models, sampling, weights, runtime, media} -> nn,
//! kernels -> [`hlo`]; runtime -> [`pjrt`]; tune -> [`analysis`]. These three are crates of their own, under `crates/`.

pub use ltx2_pjrt as pjrt;
pub use ltx2_stablehlo as hlo;
pub use ltx2_xla_analysis as analysis;

pub mod av;
mod defaults;
pub mod failpoint;
pub mod tensor;
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
pub mod tune;
pub mod weights;
