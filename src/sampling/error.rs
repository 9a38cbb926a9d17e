//! Errors of the host-side math of sampling.

use std::path::PathBuf;

use super::MAX_STEPS;

/// An error of schedules, shapes or latents. Every message is one line.
#[derive(Debug, thiserror::Error)]
pub enum SamplingError {
    /// The sigma tables hold [`MAX_STEPS`] steps.
    #[error("{0} steps asked for; the step count must be 1 to {MAX_STEPS}")]
    Steps(usize),
    /// A list of sigmas that is not a noise schedule.
    #[error("sigmas[{index}] = {value} {why}; sigmas fall strictly from at most 1 towards 0")]
    SigmaList {
        /// Position in the list.
        index: usize,
        value: f64,
        why: &'static str,
    },
    /// The shift left the range of single precision.
    #[error(
        "the schedule of {steps} steps for {tokens} tokens is not finite (mu = {mu}); use sigma_shift: official or fewer tokens"
    )]
    NotFinite {
        /// Steps asked for.
        steps: usize,
        /// Video tokens.
        tokens: usize,
        /// The resulting time shift.
        mu: f64,
    },
    /// A scheduler file that cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    Read { file: PathBuf, source: std::io::Error },
    /// A scheduler file that is not understood.
    #[error("{}: {why}", file.display())]
    Scheduler { file: PathBuf, why: String },
    /// A width, height or frame count between two legal values.
    #[error("{what} {value} is not {rule}; the nearest legal values are {below} and {above}")]
    Size {
        /// `width`, `height` or `num_frames`.
        what: &'static str,
        /// The value asked for.
        value: usize,
        /// The rule it breaks: `a multiple of 32`, `8k + 1`.
        rule: String,
        /// The nearest legal value below (or the smallest).
        below: usize,
        /// The next legal value.
        above: usize,
    },
    /// A frame rate or a duration that is not a positive number.
    #[error("{what} is {value}; it must be a positive number")]
    NotPositive {
        /// `frame_rate` or `seconds`.
        what: &'static str,
        /// The value given.
        value: f64,
    },
    /// The request is too short for one audio latent.
    #[error(
        "{num_frames} frames at {frame_rate} fps are too short for audio; ask for more frames or a lower frame rate"
    )]
    NoAudio {
        /// Video frames.
        num_frames: usize,
        /// Frames a second.
        frame_rate: f64,
    },
    /// A tensor whose shape does not fit.
    #[error("{what} has shape {got:?}, want {want}")]
    Shape { what: &'static str, got: Vec<usize>, want: String },
}
