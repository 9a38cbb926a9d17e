//! Noise, schedules, guidance and the denoising loop.
