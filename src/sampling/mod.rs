//! Noise, schedules, guidance and the denoising loop.

pub mod denoise;
mod error;
pub mod guidance;
mod guided;
pub mod latents;
pub mod noise;
pub mod res2s;
mod shape;
pub mod sigmas;

pub use error::SamplingError;
