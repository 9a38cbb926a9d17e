//! Noise, schedules, guidance and the denoising loop.

mod condition;
pub mod denoise;
mod error;
pub mod guidance;
mod guided;
pub(crate) mod latents;
pub(crate) mod noise;
mod sampler;
mod samplers;
mod shape;
pub mod sigmas;

pub use error::SamplingError;
pub use noise::TorchRng;
pub use sampler::{AnySampler, Evaluation, Sampler, Schedule, StepNoise, StreamState};
pub use samplers::*;

/// The most steps a run may have: the size of the tables that the denoising program takes as inputs.
pub const MAX_STEPS: usize = 256;
