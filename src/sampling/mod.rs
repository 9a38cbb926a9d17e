//! Noise, schedules, guidance and the denoising loop.

pub mod denoise;
mod error;
pub mod guidance;
pub mod latents;
pub mod noise;
pub mod res2s;
pub mod sigmas;

pub use error::SamplingError;
