//! Converts predicted seconds to a frame count that the video VAE accepts.

/// Bounds that a predicted duration is clamped to, in seconds.
const BOUNDS: [f64; 2] = [1.0, 20.0];

/// Choice of the frame count if no valid count (one more than a multiple of the step) lies within the bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameRounding {
    /// The next larger valid count, limited to the upper bound even if the bound is not a valid count (Lightricks'
    /// code).
    Official,
    /// The nearest valid count (diffusers).
    Diffusers,
}

/// Converts `seconds` at `rate` frames per second to a frame count that is one more than a multiple of `step` and
/// within the bounds. If no such count exists, `grid` determines the result.
pub fn frames(seconds: f64, rate: f64, step: usize, grid: FrameRounding) -> usize {
    let [least, most] = BOUNDS.map(|bound| (bound * rate).round_ties_even());
    let least = least.max(1.0);
    // The order of Python's max(least, min(x, most)): the lower bound wins if it exceeds the upper one.
    let clamped = (seconds * rate).round_ties_even().min(most).max(least) as usize;
    let (least, most) = (least as usize, most as usize);
    let below = (clamped - 1) / step * step + 1;
    let above = below + step;
    match grid {
        _ if below >= least => below,
        _ if above <= most => above,
        FrameRounding::Official => above.min(most),
        FrameRounding::Diffusers if above - clamped < clamped - below => above,
        FrameRounding::Diffusers => below,
    }
}
