//! Platforms, compilation, upload.

pub mod platform;
pub mod plugins;
