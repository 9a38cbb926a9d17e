//! Timing: the programs of a run, small programs, and denoising steps under the plugin's profiler.

mod alone;
pub mod bench;
pub mod micro;
pub mod profile;
