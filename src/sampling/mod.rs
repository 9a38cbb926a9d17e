//! Noise, schedules, guidance and the denoising loop.

pub mod denoise;
pub mod error;
pub mod guidance;
pub mod latents;
pub mod noise;
pub mod sigmas;
