//! LTX-2 audio-video generation on XLA, driven through the PJRT C interface.
//!
//! One request runs so: [`cli`] reads YAML and flags into a configuration; [`pipeline`] asks each model for its
//! program (StableHLO text) and its parameter tree; [`runtime`] compiles the program and uploads the parameters from
//! the mapped checkpoint; the text encoder, the connectors, the denoising loop and the decoders run; [`media`] writes
//! the MP4. Arrows point down only: cli -> lab -> pipeline -> {models, sampling, weights, runtime, media} -> nn, kernels ->
//! hlo; runtime -> pjrt.

pub mod dtype;
pub mod failpoint;
pub mod tensor;
pub mod threads;

pub mod analysis;
pub mod cli;
pub mod config;
pub mod hlo;
pub mod kernels;
pub mod lab;
pub mod media;
pub mod metrics;
pub mod models;
pub mod nn;
pub mod pipeline;
pub mod pjrt;
pub mod runtime;
pub mod sampling;
pub mod weights;
