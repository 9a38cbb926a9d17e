//! Finished videos of the given one and what is made: frames of one and sound of the other, or one behind the other.

use std::borrow::Cow;
use std::ops::Range;

use ndarray::{Array2, Array4, Array5, Axis as Dim, s};

use super::condition_encoder::outside;
use crate::av::Av;
use crate::config::whole_frames;
use crate::media::{Clip, Frames, covering_clip};
use crate::models::audio_vae::resample;
use crate::request::{Assembly, Condition, Placement, Request};

/// Seconds over which one sound becomes the other where two join.
const FADE: f64 = 0.02;

/// Frames and samples `[channels, n]` of `rate` of the whole video, from what was made, whose tokens have these bounds in seconds
/// (`[1, axes, n, 2]`).
pub(super) fn assemble(
    request: &Request,
    clip: &Clip,
    times: &Av<Array4<f32>>,
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
        Assembly::Around => {
            let anew = request.conditions.as_ref().zip(times.as_ref()).map(|(own, times)| made_anew(own, times));
            let source = clip.frames.part(0..new);
            let source = resized(&source, request).into_owned();
            let frames = match anew.video {
                None => source,
                Some(span) => {
                    let [first, end] = [span.start, span.end].map(|at| (at * request.frame_rate).round() as usize);
                    around(source, &made, first..end.min(new))
                }
            };
            let given = given_sound(clip, sound.nrows(), rate);
            let sound = match anew.audio {
                // A video without sound gets all of its sound made.
                _ if clip.sound.is_none() => sound,
                None => crossfade(&given, &given, 0, 0, 0, sound.ncols()),
                Some(span) => {
                    let [first, end] = [span.start, span.end].map(|at| (at * rate as f64).round() as usize);
                    sound_around(&given, sound, first..end, fade)
                }
            };
            (frames, sound)
        }
    }
}

/// Seconds of a stream that a retake makes anew, by the bounds of its tokens; none where all of it is kept.
fn made_anew(conditions: &[Condition], bounds: &Array4<f32>) -> Option<Range<f64>> {
    let span = conditions.iter().find_map(|condition| match condition.placement {
        Placement::Outside { start, end } => Some(start..end),
        _ => None,
    })?;
    let time = bounds.slice(s![0, 0, .., ..]);
    let mut anew = vec![true; time.nrows()];
    outside(bounds, span).flatten().for_each(|kept| anew[kept] = false);
    let spans = time.outer_iter().zip(anew).filter(|(_, anew)| *anew);
    let spans = spans.map(|(bounds, _)| f64::from(bounds[0])..f64::from(bounds[1]));
    spans.reduce(|all, one| all.start.min(one.start)..all.end.max(one.end))
}

/// Frames of `source`, but for those numbers, which are those of `made`.
fn around(source: Frames, made: &Frames, anew: Range<usize>) -> Frames {
    let mut data = source.into_data();
    let place = s![anew, .., .., ..];
    data.slice_mut(place).assign(&made.data().slice(place));
    Frames::new(data).expect("a video has frames")
}

/// Samples of `given`, but for those numbers, which are those of `made`. They turn into each other where both are known.
fn sound_around(given: &Array2<f32>, made: Array2<f32>, anew: Range<usize>, fade: usize) -> Array2<f32> {
    let n = made.ncols();
    let (before, behind) = (fade.min(anew.start), fade.min(n.saturating_sub(anew.end)));
    let made = match before {
        0 => made,
        _ => crossfade(given, &made, 0, anew.start - before, before, n),
    };
    if behind == 0 { made } else { crossfade(&made, given, 0, anew.end, behind, n) }
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
fn resized<'a>(frames: &'a Frames, request: &Request) -> Cow<'a, Frames> {
    if (frames.height(), frames.width()) == (request.height, request.width) {
        return Cow::Borrowed(frames);
    }
    let video: Array5<f32> = covering_clip(frames, request.height, request.width);
    let video = video.index_axis_move(Dim(0), 0).permuted_axes([1, 0, 2, 3]).mapv(|v| v * 0.5 + 0.5);
    Cow::Owned(Frames::from_video(video.view()).expect("frames of a video"))
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

    /// All of what is made anew is heard, and all of the source's but for the joins.
    #[test]
    fn a_span_of_sound_lies_in_the_source_s() {
        let [given, made] = [0.0, 1.0].map(|v| Array2::from_elem((1, 8), v));
        let of = |anew| sound_around(&given, made.clone(), anew, 2).row(0).to_vec();
        assert_eq!(of(3..5), [0.0, 0.25, 0.75, 1.0, 1.0, 0.75, 0.25, 0.0]);
        assert_eq!(of(0..5), [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.25, 0.0]);
        assert_eq!(of(1..9), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
    }

    /// Whole latents, by a span that touches them.
    #[test]
    fn a_span_is_widened_to_what_it_touches() {
        let ends = [0.0, 1.0, 9.0, 17.0, 25.0].map(|frame: f32| frame / 24.0);
        let bounds = Array4::from_shape_fn((1, 1, 4, 2), |(_, _, token, side)| ends[token + side]);
        let anew = |placement| {
            let condition = Condition::given(25, Av::both(placement)).video;
            let span = made_anew(&[condition], &bounds)?;
            Some([span.start, span.end].map(|at| (at * 24.0).round() as usize))
        };
        assert_eq!(anew(Placement::Outside { start: 0.3, end: 0.4 }), Some([1, 17]));
        assert_eq!(anew(Placement::Outside { start: 0.5, end: f64::INFINITY }), Some([9, 25]));
        assert_eq!(anew(Placement::Whole), None);
    }
}
