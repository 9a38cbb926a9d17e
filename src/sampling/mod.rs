//! Noise, schedules, guidance and the denoising loop.

pub mod denoise;
mod error;
mod euler;
pub mod guidance;
mod guided;
pub mod latents;
pub mod noise;
mod res2s;
mod sampler;
mod samplers;
mod shape;
pub mod sigmas;

pub use error::SamplingError;
pub use euler::Euler;
pub use res2s::Res2s;
pub use sampler::{AnySampler, Evaluation, Sampler, Schedule, StepNoise, StreamState};
pub use samplers::{SamplerKind, SamplerOptions};
