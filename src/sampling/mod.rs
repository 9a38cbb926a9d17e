//! Noise, schedules, guidance and the denoising loop.

mod branch_rows;
mod condition;
pub mod denoise;
mod error;
pub mod guidance;
mod guidance_steps;
mod guided;
pub mod guiders;
pub(crate) mod latents;
mod masked_stats;
pub(crate) mod noise;
mod sampler;
mod samplers;
pub mod schedules;
mod shape;
pub mod sigmas;
pub mod step_cache;
mod step_record;

pub use error::SamplingError;
pub(crate) use guidance_steps::GuidancePlan;
pub use guidance_steps::{BranchSet, GuidanceSteps, SigmaGuidance};
pub use noise::TorchRng;
pub use sampler::{AnySampler, Evaluation, Sampler, Schedule, StepNoise, StreamState};
pub use samplers::*;
pub use step_record::{StepRecord, StepWeights, TokenConditions};

/// Maximum number of steps. The schedule tables of the denoising program have `MAX_STEPS + 1` rows.
pub const MAX_STEPS: usize = 256;
