//! Error messages about configuration values, and the valid sizes and frame counts nearest to an invalid one.

use super::error::{ConfigError, ConfigErrorKind, Limit};
use super::message::{Message, Setting, message};

/// Video frames per latent frame, except the first latent frame, which holds one video frame.
pub(crate) const FRAME_STEP: usize = 8;

/// Returns the largest number of frames, at most `frames`, that fills complete latent frames: one frame for the first
/// latent frame, [`FRAME_STEP`] for each later one.
pub(crate) fn whole_frames(frames: usize) -> usize {
    (frames - 1) / FRAME_STEP * FRAME_STEP + 1
}

/// Returns an error about a value whose origin is not known yet.
pub(super) fn fail(
    kind: ConfigErrorKind,
    key: &'static str,
    value: impl ToString,
    limit: impl Into<Limit>,
) -> Result<(), ConfigError> {
    Err(ConfigError::value(kind, key, value, limit))
}

/// Returns the limit for a key that requires a number of the form `step * n + remainder`; the limit contains the valid
/// numbers nearest to `value`.
pub(super) fn step_limit(value: usize, remainder: usize, step: usize, with: String) -> Limit {
    let (low, high) = nearest_valid(value, remainder, step);
    Limit::Step { step, remainder, with, nearest: [low, high] }
}

/// Returns the text "`why`; remove this key".
pub(super) fn remove(why: impl Into<Message>) -> Message {
    message![why, "; remove ", Setting::This]
}

/// Returns the text "`why`, or remove this key", where `why` ends with another remedy.
pub(super) fn or_remove(why: impl Into<Message>) -> Message {
    message![why, ", or remove ", Setting::This]
}

/// Returns the text "`why`; remove this key or `other`".
pub(super) fn remove_one(why: impl Into<Message>, other: &'static str) -> Message {
    remove(why).then(" or ").then(Setting::Key(other))
}

/// Returns the valid values below and above an invalid one; valid values are positive and of the form `step * n +
/// remainder`.
pub(super) fn nearest_valid(value: usize, remainder: usize, step: usize) -> (usize, usize) {
    let smallest = if remainder == 0 { step } else { remainder };
    let steps = value.saturating_sub(smallest) / step;
    let low = smallest + steps * step;
    (low, low + step)
}

/// Returns the positive number of the form `step * n + 1` nearest to `frames`; a tie rounds up.
pub(crate) fn nearest_frames(frames: f64, step: usize) -> usize {
    let steps = ((frames - 1.0) / step as f64).round().max(0.0);
    steps as usize * step + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_values_are_valid() {
        assert_eq!(
            [nearest_valid(500, 0, 32), nearest_valid(5, 0, 32), nearest_valid(33, 0, 32)],
            [(480, 512), (32, 64), (32, 64)]
        );
        assert_eq!(
            [nearest_valid(120, 1, 8), nearest_valid(8, 1, 8), nearest_valid(2, 1, 8)],
            [(113, 121), (1, 9), (1, 9)]
        );
        let nearest = |step: usize| [0.0, 1.0, 4.9, 5.0, 120.0, 117.0].map(|frames| nearest_frames(frames, step));
        assert_eq!((nearest(8), nearest(16)), ([1, 1, 1, 9, 121, 121], [1, 1, 1, 1, 113, 113]));
    }
}
