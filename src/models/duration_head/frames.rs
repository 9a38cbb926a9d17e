//! Seconds to a count of frames that the video autoencoder takes.

/// Shortest and longest duration that is taken from a prediction, in seconds.
const BOUNDS: [f64; 2] = [1.0, 20.0];

/// Where no legal count lies within the bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// The largest within them that is not above the next legal count, legal or not (Lightricks' code).
    Official,
    /// The legal count that is nearest (diffusers).
    Diffusers,
}

/// Frames of a shot of `seconds` at `rate` frames a second: within the bounds, and one more than a multiple of `step`.
pub fn frames(seconds: f64, rate: f64, step: usize, grid: Grid) -> usize {
    let [least, most] = BOUNDS.map(|bound| (bound * rate).round_ties_even());
    let least = least.max(1.0);
    // Python's max(least, min(x, most)): the lower bound wins where they cross.
    let clamped = (seconds * rate).round_ties_even().min(most).max(least) as usize;
    let (least, most) = (least as usize, most as usize);
    let below = (clamped - 1) / step * step + 1;
    let above = below + step;
    match grid {
        _ if below >= least => below,
        _ if above <= most => above,
        Grid::Official => above.min(most),
        Grid::Diffusers if above - clamped < clamped - below => above,
        Grid::Diffusers => below,
    }
}
