//! Joins the input video and the generated frames and audio: combines the frames of one with the audio of the other,
//! concatenates the two videos, or replaces a time span.

use std::borrow::Cow;
use std::ops::Range;

use ndarray::{Array2, Array4, Array5, Axis as Dim, s};

use crate::av::Av;
use crate::config::whole_frames;
use crate::media::{Clip, Frames, covering_clip};
use crate::models::audio_vae::resample;
use crate::pipeline::stages::condition_encoder::outside;
use crate::request::{Condition, OutputComposition, Placement, Request};

/// Duration of the crossfade between two audio signals, in seconds.
const FADE: f64 = 0.02;

/// Returns the frames and the audio samples `[channels, n]` of the finished video. `made` and `sound`: generated frames
/// and audio samples. `rate`: sample rate (Hz) of `sound` and of the returned samples. `times`: start and end of each
/// generated token along each axis, time (seconds) first, `[1, axes, tokens, 2]`.
pub(in crate::pipeline) fn assemble(
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
    match request.composition {
        OutputComposition::None => (made, sound),
        OutputComposition::Frames => (given_frames(request, clip), sound),
        OutputComposition::ExtendedAtEnd(overlap) => {
            let given = given_sound(clip, sound.nrows(), rate);
            let frames = joined(&resized(&clip.frames, request), &made, overlap);
            // Both audio signals cover the overlapping frames; the crossfade is at the end of the overlap.
            let (start, join) = (samples(have - overlap), samples(have).saturating_sub(fade));
            (frames, crossfade(&given, &sound, start, join, fade, samples(have + new - overlap)))
        }
        OutputComposition::ExtendedAtStart(overlap) => {
            let given = given_sound(clip, sound.nrows(), rate);
            let added = new - overlap;
            let frames = joined(&made.part(0..added), &resized(&clip.frames, request), 0);
            let start = samples(added);
            (frames, crossfade(&sound, &given, start, start, fade, samples(added + have)))
        }
        OutputComposition::RegeneratedSpan => {
            let regenerated =
                request.conditions.as_ref().zip(times.as_ref()).map(|(own, times)| regenerated_span(own, times));
            let source = clip.frames.part(0..new);
            let source = resized(&source, request).into_owned();
            let frames = match regenerated.video {
                None => source,
                Some(span) => {
                    let [first, end] = [span.start, span.end].map(|at| (at * request.frame_rate).round() as usize);
                    around(source, &made, first..end.min(new))
                }
            };
            let given = given_sound(clip, sound.nrows(), rate);
            let sound = match regenerated.audio {
                // If the input video has no audio, all of the generated audio is used.
                _ if clip.sound.is_none() => sound,
                None => crossfade(&given, &given, 0, 0, 0, sound.ncols()),
                Some(span) => {
                    let [first, end] = [span.start, span.end].map(|at| (at * rate as f64).round() as usize);
                    replace_sound_span(&given, sound, first..end, fade)
                }
            };
            (frames, sound)
        }
    }
}

/// Returns the time span (seconds) of the tokens that a retake regenerates in the video or the audio. `bounds`: start
/// and end of each token along each axis, time first, `[1, axes, tokens, 2]`. `None`: the retake keeps all tokens.
fn regenerated_span(conditions: &[Condition], bounds: &Array4<f32>) -> Option<Range<f64>> {
    let span = conditions.iter().find_map(|condition| match condition.placement {
        Placement::Outside { start, end } => Some(start..end),
        _ => None,
    })?;
    let time = bounds.slice(s![0, 0, .., ..]);
    let mut regenerated = vec![true; time.nrows()];
    outside(bounds, span).flatten().for_each(|kept| regenerated[kept] = false);
    let spans = time.outer_iter().zip(regenerated).filter(|(_, regenerated)| *regenerated);
    let spans = spans.map(|(bounds, _)| f64::from(bounds[0])..f64::from(bounds[1]));
    spans.reduce(|all, one| all.start.min(one.start)..all.end.max(one.end))
}

/// Returns `source` with the frames in the range `regenerated` replaced by those of `made`.
fn around(source: Frames, made: &Frames, regenerated: Range<usize>) -> Frames {
    let mut data = source.into_data();
    let place = s![regenerated, .., .., ..];
    data.slice_mut(place).assign(&made.data().slice(place));
    Frames::new(data).expect("a video has frames")
}

/// Returns `given` with the samples in the range `regenerated` replaced by those of `made`. Crossfades of up to `fade`
/// samples on both sides of the range join the two signals.
fn replace_sound_span(given: &Array2<f32>, made: Array2<f32>, regenerated: Range<usize>, fade: usize) -> Array2<f32> {
    let n = made.ncols();
    let (before, behind) = (fade.min(regenerated.start), fade.min(n.saturating_sub(regenerated.end)));
    let made = match before {
        0 => made,
        _ => crossfade(given, &made, 0, regenerated.start - before, before, n),
    };
    if behind == 0 { made } else { crossfade(&made, given, 0, regenerated.end, behind, n) }
}

/// Returns the frames of the input video for which audio is generated: the first `num_frames` frames or, if the request
/// covers all complete latent frames of the video, all frames, including the last ones that do not fill a latent frame.
fn given_frames(request: &Request, clip: &Clip) -> Frames {
    if request.num_frames >= whole_frames(clip.frames.count()) {
        clip.frames.clone()
    } else {
        clip.frames.part(0..request.num_frames)
    }
}

/// Returns the audio samples of the input video, resampled to `rate` Hz; an empty array if the video has no audio.
fn given_sound(clip: &Clip, channels: usize, rate: usize) -> Array2<f32> {
    match &clip.sound {
        None => Array2::zeros((channels, 0)),
        Some(sound) => resample(sound.with_channels(channels).samples().view(), sound.rate(), rate as u32),
    }
}

/// Scales and crops the frames to the size of the request; borrows them if they already have this size.
fn resized<'a>(frames: &'a Frames, request: &Request) -> Cow<'a, Frames> {
    if (frames.height(), frames.width()) == (request.height, request.width) {
        return Cow::Borrowed(frames);
    }
    let video: Array5<f32> = covering_clip(frames, request.height, request.width);
    let video = video.index_axis_move(Dim(0), 0).permuted_axes([1, 0, 2, 3]).mapv(|v| v * 0.5 + 0.5);
    Cow::Owned(Frames::from_video(video.view()).expect("frames of a video"))
}

/// Returns the frames of `first`, followed by those of `second` without its first `overlap` frames.
fn joined(first: &Frames, second: &Frames, overlap: usize) -> Frames {
    let second = second.data().slice(s![overlap.., .., .., ..]);
    let data = ndarray::concatenate(Dim(0), &[first.data().view(), second]).expect("frames of one size");
    Frames::new(data).expect("a video has frames")
}

/// Joins two audio signals; returns `n` samples per channel. `second` starts at sample `start` of the result. A linear
/// crossfade of `fade` samples, which begins at sample `join`, leads from `first` to `second`.
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

    #[test]
    fn crossfade_of_equal_sounds_changes_nothing() {
        let whole = Array2::from_shape_fn((2, 100), |(c, n)| ((n * 7 + c) as f32 * 0.1).sin());
        let (first, second) = (whole.slice(s![.., ..60]).to_owned(), whole.slice(s![.., 40..]).to_owned());
        let made = crossfade(&first, &second, 40, 50, 10, 100);
        assert!(made.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-6));
        let [silence, one] = [0.0, 1.0].map(|v| Array2::from_elem((1, 8), v));
        let made = crossfade(&silence, &one, 0, 2, 4, 8);
        assert_eq!(made.row(0).to_vec(), [0.0, 0.0, 0.125, 0.375, 0.625, 0.875, 1.0, 1.0]);
    }

    /// The regenerated span contains only generated samples; the crossfades are outside of it.
    #[test]
    fn retaken_sound_is_crossfaded_into_source() {
        let [given, made] = [0.0, 1.0].map(|v| Array2::from_elem((1, 8), v));
        let of = |regenerated| replace_sound_span(&given, made.clone(), regenerated, 2).row(0).to_vec();
        assert_eq!(of(3..5), [0.0, 0.25, 0.75, 1.0, 1.0, 0.75, 0.25, 0.0]);
        assert_eq!(of(0..5), [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.25, 0.0]);
        assert_eq!(of(1..9), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
    }

    /// A retake regenerates complete latent frames: every one that overlaps the requested span.
    #[test]
    fn retake_span_extends_to_overlapping_latents() {
        let ends = [0.0, 1.0, 9.0, 17.0, 25.0].map(|frame: f32| frame / 24.0);
        let bounds = Array4::from_shape_fn((1, 1, 4, 2), |(_, _, token, side)| ends[token + side]);
        let regenerated = |placement| {
            let condition = Condition::keep_input(25, Av::both(placement)).video;
            let span = regenerated_span(&[condition], &bounds)?;
            Some([span.start, span.end].map(|at| (at * 24.0).round() as usize))
        };
        assert_eq!(regenerated(Placement::Outside { start: 0.3, end: 0.4 }), Some([1, 17]));
        assert_eq!(regenerated(Placement::Outside { start: 0.5, end: f64::INFINITY }), Some([9, 25]));
        assert_eq!(regenerated(Placement::Whole), None);
    }
}
