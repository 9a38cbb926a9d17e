//! Noise, schedules, guidance and the denoising loop.

pub mod error;
pub mod latents;
pub mod noise;
pub mod sigmas;
