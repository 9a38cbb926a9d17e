//! Errors of schedules, latent shapes and scheduler files.

use std::path::PathBuf;

use super::MAX_STEPS;

/// Error in a schedule, a request size or a tensor shape. Messages are one line.
#[derive(Debug, thiserror::Error)]
pub enum SamplingError {
    /// The step count is outside `1..=MAX_STEPS`.
    #[error("{0} steps requested; the step count must be 1 to {MAX_STEPS}")]
    Steps(usize),
    /// An explicit list of sigmas is not a valid noise schedule.
    #[error("sigmas[{index}] = {value} {why}; sigmas must be in (0, 1] and strictly decreasing")]
    SigmaList {
        /// Index in the list.
        index: usize,
        value: f64,
        why: &'static str,
    },
    /// The shifted schedule overflows single precision.
    #[error(
        "the schedule of {steps} steps for {tokens} tokens has non-finite sigmas (mu = {mu}); use fewer tokens or sampler.sigma_shift: official"
    )]
    NotFinite {
        /// Requested steps.
        steps: usize,
        /// Video tokens.
        tokens: usize,
        /// Time shift computed from the token count.
        mu: f64,
    },
    /// A scheduler file cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    Read { file: PathBuf, source: std::io::Error },
    /// A scheduler file is invalid or unsupported.
    #[error("{}: {why}", file.display())]
    Scheduler { file: PathBuf, why: String },
    /// A width, height or frame count breaks a divisibility rule.
    #[error("{what} {value} is not {rule}; the nearest valid values are {below} and {above}")]
    Size {
        /// Name of the value: `width`, `height`, `num_frames` or `latent frame count`.
        what: &'static str,
        /// Requested value.
        value: usize,
        /// The violated rule, such as `a multiple of 32` or `of the form 8k + 1`.
        rule: String,
        /// Nearest valid value below, or the smallest valid value.
        below: usize,
        /// Next valid value after `below`.
        above: usize,
    },
    /// A frame rate or duration is not a positive finite number.
    #[error("{what} is {value}; it must be a positive number")]
    NotPositive {
        /// Name of the value: `frame_rate` or `seconds`.
        what: &'static str,
        value: f64,
    },
    /// The video is too short for one audio latent.
    #[error("{num_frames} frames at {frame_rate} fps are too short for audio; use more frames or a lower frame rate")]
    NoAudio {
        /// Video frames.
        num_frames: usize,
        /// Frames per second.
        frame_rate: f64,
    },
    /// A tensor has an unexpected shape.
    #[error("the shape of {what} is {got:?}, not {want}")]
    Shape { what: &'static str, got: Vec<usize>, want: String },
}
