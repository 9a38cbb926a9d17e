//! Noise, schedules, guidance and the denoising loop.

pub mod denoise;
pub mod guidance;
