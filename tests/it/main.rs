//! In-process tests: programs, numerical results and runs on the CPU plugin.

#![allow(clippy::unwrap_used)] // Tests may panic.
#![allow(clippy::disallowed_methods)] // Non-UTF-8 output of a command counts as empty.
#![allow(unreachable_pub)] // A test binary has no public API.

#[path = "../support/mod.rs"]
mod support;

mod audio_to_video;
mod batches;
mod by_diffusers;
mod cache;
mod cfg_bits;
mod chain;
mod conditioned_layouts;
mod conditions;
mod context_parallel;
mod dfr;
mod diffusion_decoder;
mod dub_it;
mod formats;
mod fuzz_regression;
mod fuzz_seeds;
mod gather;
mod gemma4;
mod given_files;
mod given_sounds;
mod given_video;
mod guidance_steps;
mod hdr;
mod images;
mod kernels;
mod keyframes;
mod kv_stores;
mod layer_parity;
mod layout_bytes;
mod layouts;
mod loading;
mod lora;
mod lora_add;
mod lora_merge;
mod lowerings;
mod media;
mod mosaic;
mod newer_layouts;
mod noise;
mod official_cross_timestep;
mod official_guidance;
mod official_steps;
mod parity;
mod pipeline;
mod pipeline_2_5;
mod pjrt;
mod processes;
mod programs;
mod quantized;
mod references;
mod samplers;
mod sound;
mod spatial_sharding;
mod spmd;
mod step_cache;
mod streaming;
mod text_generation;
mod tiles;
mod track_times;
mod upsampling;

fn main() -> std::process::ExitCode {
    support::harness::main()
}
