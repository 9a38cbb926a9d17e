//! Finished videos of the given one and what is made: frames of one and sound of the other, or one behind the other.

use ndarray::{Array2, Array5, Axis as Dim, s};

use crate::config::whole_frames;
use crate::media::{Clip, Frames, covering_clip};
use crate::models::audio_vae::resample;
use crate::request::{Assembly, Request};

/// Seconds over which one sound becomes the other where two join.
const FADE: f64 = 0.02;

/// Frames and samples `[channels, n]` of `rate` of the whole video, from what was made.
pub(super) fn assemble(
    request: &Request,
    clip: &Clip,
    made: Frames,
    sound: Array2<f32>,
    rate: usize,
) -> (Frames, Array2<f32>) {
    let (have, new) = (clip.frames.count(), made.count());
    let samples = |frames: usize| (frames as f64 / request.frame_rate * rate as f64).round_ties_even() as usize;
    let fade = (FADE * rate as f64) as usize;
    match request.assembly {
        Assembly::None => (made, sound),
        Assembly::Frames => (given_frames(request, clip), sound),
        Assembly::Before(overlap) => {
            let given = given_sound(clip, sound.nrows(), rate);
            let frames = joined(&resized(&clip.frames, request), &made, overlap);
            // The overlap's end is known to both.
            let (start, join) = (samples(have - overlap), samples(have).saturating_sub(fade));
            (frames, crossfade(&given, &sound, start, join, fade, samples(have + new - overlap)))
        }
        Assembly::Behind(overlap) => {
            let given = given_sound(clip, sound.nrows(), rate);
            let added = new - overlap;
            let frames = joined(&made.part(0..added), &resized(&clip.frames, request), 0);
            let start = samples(added);
            (frames, crossfade(&sound, &given, start, start, fade, samples(added + have)))
        }
    }
}

/// The given video's frames that get other sound: all where those that make whole latents are asked for, else the first ones.
fn given_frames(request: &Request, clip: &Clip) -> Frames {
    if request.num_frames >= whole_frames(clip.frames.count()) {
        clip.frames.clone()
    } else {
        clip.frames.part(0..request.num_frames)
    }
}

/// The given video's samples, silence where it has none.
fn given_sound(clip: &Clip, channels: usize, rate: usize) -> Array2<f32> {
    match &clip.sound {
        None => Array2::zeros((channels, 0)),
        Some(sound) => resample(sound.with_channels(channels).samples().view(), sound.rate(), rate as u32),
    }
}

/// The source's frames in the size of the made ones; untouched where they have it.
fn resized(frames: &Frames, request: &Request) -> Frames {
    if (frames.height(), frames.width()) == (request.height, request.width) {
        return frames.clone();
    }
    let video: Array5<f32> = covering_clip(frames, request.height, request.width);
    let video = video.index_axis_move(Dim(0), 0).permuted_axes([1, 0, 2, 3]).mapv(|v| v * 0.5 + 0.5);
    Frames::from_video(video.view()).expect("frames of a video")
}

/// Frames of `first`, then those of `second` behind its first `overlap`.
fn joined(first: &Frames, second: &Frames, overlap: usize) -> Frames {
    let second = second.data().slice(s![overlap.., .., .., ..]);
    let data = ndarray::concatenate(Dim(0), &[first.data().view(), second]).expect("frames of one size");
    Frames::new(data).expect("a video has frames")
}

/// Samples `[channels, n]` of `first`, from sample `join` on turning into those of `second`, which starts at sample `start`.
fn crossfade(
    first: &Array2<f32>,
    second: &Array2<f32>,
    start: usize,
    join: usize,
    fade: usize,
    n: usize,
) -> Array2<f32> {
    let of = |all: &Array2<f32>, channel: usize, at: Option<usize>| {
        at.and_then(|at| all.get((channel, at))).copied().unwrap_or_default()
    };
    Array2::from_shape_fn((second.nrows(), n), |(channel, at)| {
        let part = (at as f32 - join as f32 + 0.5) / fade.max(1) as f32;
        let part = part.clamp(0.0, 1.0);
        of(first, channel, Some(at)) * (1.0 - part) + of(second, channel, at.checked_sub(start)) * part
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where both are the same sound, none of the join is heard.
    #[test]
    fn a_join_of_the_same_sound_is_that_sound() {
        let whole = Array2::from_shape_fn((2, 100), |(c, n)| ((n * 7 + c) as f32 * 0.1).sin());
        let (first, second) = (whole.slice(s![.., ..60]).to_owned(), whole.slice(s![.., 40..]).to_owned());
        let made = crossfade(&first, &second, 40, 50, 10, 100);
        assert!(made.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-6));
        let [silence, one] = [0.0, 1.0].map(|v| Array2::from_elem((1, 8), v));
        let made = crossfade(&silence, &one, 0, 2, 4, 8);
        assert_eq!(made.row(0).to_vec(), [0.0, 0.0, 0.125, 0.375, 0.625, 0.875, 1.0, 1.0]);
    }
}
