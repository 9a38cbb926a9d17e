//! Reference videos: their frames as whole latents.

use super::check::FRAME_STEP;

/// Frames of a mask for each latent frame of its reference but the first, which has one.
///
/// # Errors
/// Frames that make no such groups.
pub(crate) fn mask_group(frames: usize, latents: usize) -> Result<usize, String> {
    let (rest, later) = (frames - 1, latents - 1);
    match later {
        0 => Ok(0),
        _ if rest >= later && rest.is_multiple_of(later) => Ok(rest / later),
        _ => Err(format!(
            "a mask of {frames} frames does not fit the reference's {latents} latent frames: it has one for the first, and as \
             many for each other"
        )),
    }
}

/// Frames that are taken of so many: the first, the second, and each `step`-th from there on.
fn taken(frames: usize, step: usize) -> usize {
    1 + (frames.max(1) - 1).div_ceil(step)
}

/// Frames that are encoded of so many: those that are taken, as far as they make whole latents.
pub(crate) fn encoded_frames(frames: usize, step: usize) -> usize {
    (taken(frames, step) - 1) / FRAME_STEP * FRAME_STEP + 1
}
