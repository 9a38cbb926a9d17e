//! Encodes conditions as tokens: images (after an H.264 round trip, like the images that the model was trained on),
//! videos, audio, and latents of earlier runs.

use std::ops::Range;
use std::path::Path;

use ndarray::{Array3, Array4, Array5, Axis, s};

use super::conditions::{AttentionWeights, ConditionTokens, StreamTokens};
use super::inpainting;
use crate::av::Av;
use crate::config::{self, MaskChannel};
use crate::media::{self, Audio, Clip, FrameFilter, Frames, RoundTrip};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::output::tensors::fixed;
use crate::pipeline::runner::Runner;
use crate::request::{Condition, Content, InpaintArea, Placement, ReferenceGrid, Request, Shapes, Shared, VideoPart};
use crate::sampling::denoise::StreamRole;
use crate::sampling::latents::{AudioShape, VideoShape, pack_audio};
use crate::weights::Checkpoint;

/// Tensor name of the audio latents in a dump file.
const AUDIO_LATENTS: &str = "latents.audio";

/// Checks that the file of a condition can be used, by decoding the part of it that the run needs. Does not check the
/// input video and audio, which have already been read.
pub(crate) fn check(condition: &Condition, request: &Request) -> Result<()> {
    match &condition.content {
        Content::Image { path, .. } => Ok(media::read_image(path).map(drop)?),
        Content::AudioLatents { path } => audio_latents(path).map(drop),
        Content::Reference { path, mask, channel, .. } => {
            let grid = condition.reference_grid().ok_or_else(|| no_grid(path))?;
            reference_frames(path, grid)?;
            mask.iter().try_for_each(|path| mask_frames(path, *channel, request).map(drop))
        }
        Content::Video(_) => match &condition.placement {
            Placement::Kept(area) => inpainting::kept_latents(area, request).map(drop),
            _ => Ok(()),
        },
        Content::Sound { .. }
        | Content::Filled { .. }
        | Content::VideoSound { .. }
        | Content::ReferenceSound
        | Content::PreviousSound
        | Content::ReferenceLatents(_)
        | Content::Generated
        | Content::Carried(_)
        | Content::ClipEnd => Ok(()),
    }
}

fn no_grid(path: &Path) -> PipelineError {
    PipelineError::Bug(format!("{}: the condition on this reference video has no latent grid", path.display()))
}

fn too_short(path: &Path, have: usize, needed: usize) -> PipelineError {
    PipelineError::File { path: path.into(), reason: format!("has {have} frames, but {needed} are needed") }
}

/// Reads a reference video and returns the frames that the video encoder needs.
fn reference_frames(path: &Path, grid: &ReferenceGrid) -> Result<Frames> {
    let needed = grid.source_frames();
    let all = media::read_first_frames(path, Path::new("ffmpeg"), needed)?;
    if all.count() < needed {
        return Err(too_short(path, all.count(), needed));
    }
    Ok(all.select((0..grid.frames).map(|i| grid.frame(i))))
}

/// Reads the frames of a reference video's mask.
fn mask_frames(path: &Path, channel: MaskChannel, request: &Request) -> Result<Frames> {
    Ok(match channel {
        MaskChannel::Brightness => media::read_first_frames(path, Path::new("ffmpeg"), request.num_frames)?,
        MaskChannel::Alpha => media::read_first_alphas(path, request.num_frames)?,
    })
}

/// Reads un-normalised audio latents `[1, C, L, M]` from a dump file.
fn audio_latents(path: &Path) -> Result<Array4<f32>> {
    let latents = Checkpoint::open(path)?.get(AUDIO_LATENTS)?.to_tensor()?.into_f32();
    let reason =
        format!("{AUDIO_LATENTS} has shape {:?}, but must be [1, channels, length, mel bins]", latents.shape());
    latents.into_dimensionality().map_err(|_| PipelineError::File { path: path.into(), reason })
}

/// Returns the range of tokens that are entirely within `span` (seconds). `bounds`: start and end of each token along
/// each axis, time first, `[1, axes, tokens, 2]`. `key`: config key of the span, for the error message.
fn within(bounds: &Array4<f32>, span: Range<f64>, key: &str) -> Result<Range<usize>> {
    let time = bounds.slice(s![0, 0, .., ..]);
    let inside = |n: &usize| f64::from(time[[*n, 0]]) >= span.start && f64::from(time[[*n, 1]]) <= span.end;
    let mut kept = (0..time.nrows()).filter(inside);
    let empty = || {
        let Range { start, end } = span;
        PipelineError::Usage(format!("{key}: no audio latent is entirely within {start} to {end} s; use a longer span"))
    };
    let first = kept.next().ok_or_else(empty)?;
    Ok(first..kept.next_back().unwrap_or(first) + 1)
}

/// Returns the config key that sets which time span of the audio is kept.
fn span_key(content: &Content) -> &'static str {
    if matches!(content, Content::VideoSound { .. }) { "request.extend.overlap" } else { "request.audio_latents" }
}

fn clip(request: &Request) -> Result<Shared<Clip>> {
    request
        .clip
        .clone()
        .ok_or_else(|| PipelineError::Usage("this request needs an input video: set request.video".into()))
}

/// Returns audio with the duration of the requested video: silence for `delay` frames, then the input video's audio,
/// beginning `last` frames before its end (`None`: at its start). Returns `None` if the input video has no audio.
fn clip_sound(clip: &Clip, request: &Request, last: Option<usize>, delay: usize) -> Option<Audio> {
    let sound = clip.sound.as_ref()?;
    let seconds = |frames: usize| frames as f64 / request.frame_rate;
    let start = last.map_or(0.0, |last| seconds(clip.frames.count() - last));
    let samples = |frames: usize| (seconds(frames) * f64::from(sound.rate())).round_ties_even() as usize;
    let (length, silence) = (samples(request.num_frames), samples(delay));
    Some(sound.span(start, length - silence).delayed(silence))
}

/// Returns the indices of the tokens that represent no pixels of `area`. `own`: number of tokens of the video.
fn kept_tokens(area: &InpaintArea, request: &Request, own: usize) -> Result<Vec<usize>> {
    let kept = inpainting::kept_latents(area, request)?;
    if kept.len() != own {
        let why = format!("the mask has {} latents, but the video has {own} tokens", kept.len());
        return Err(PipelineError::Bug(why));
    }
    Ok(kept.into_iter().enumerate().filter(|(_, is_kept)| *is_kept).map(|(n, _)| n).collect())
}

/// Returns frames of the input video.
fn input_frames(part: &VideoPart, request: &Request) -> Result<Frames> {
    let given = clip(request)?;
    let have = given.frames.count();
    if have < part.frames {
        return Err(PipelineError::Usage(format!(
            "the input video has {have} frames, but the request needs {}; use a longer video",
            part.frames
        )));
    }
    let from = if part.last { have - part.frames } else { 0 };
    Ok(given.frames.part(from..from + part.frames))
}

/// Returns the sound of the input video, cut to the duration that the request appends.
fn reference_sound(request: &Request) -> Result<Audio> {
    let none =
        || PipelineError::Usage("the input video has no sound; use a video with sound, or set request.audio".into());
    let sound = clip(request)?.sound.clone().ok_or_else(none)?;
    let seconds = request.conditions.audio.iter().find_map(|condition| match condition.placement {
        Placement::AppendedSound { seconds } => seconds,
        _ => None,
    });
    let samples = |seconds: f64| (seconds * f64::from(sound.rate())).round_ties_even() as usize;
    Ok(seconds.map_or_else(|| sound.clone(), |seconds| sound.span(0.0, samples(seconds))))
}

/// Returns the tokens that do not overlap `span` (seconds). `bounds`: start and end of each token along each axis, time
/// first, `[1, axes, tokens, 2]`. These are the tokens that `TemporalRegionMask` of the reference implementation keeps;
/// as there, times are compared in f32.
pub(in crate::pipeline) fn outside(bounds: &Array4<f32>, span: Range<f64>) -> impl Iterator<Item = Range<usize>> {
    let time = bounds.slice(s![0, 0, .., ..]);
    let (start, end) = (span.start as f32, span.end as f32);
    let kept = |n: &usize| !(time[[*n, 1]] > start && time[[*n, 0]] < end);
    (0..time.nrows()).filter(kept).map(|n| n..n + 1).collect::<Vec<_>>().into_iter()
}

/// Returns the attention weight between the video's own tokens and each token of a condition. `None`: all weights are
/// 1.
fn attention_weights(condition: &Condition, latents: &VideoShape, request: &Request) -> Result<Option<Vec<f32>>> {
    let Some(grid) = condition.reference_grid().filter(|_| condition.is_masked()) else { return Ok(None) };
    let Content::Reference { mask: Some(path), channel, .. } = &condition.content else {
        return Ok(Some(vec![grid.attention; latents.frames * latents.height * latents.width]));
    };
    let mask = mask_frames(path, *channel, request)?;
    let group = config::mask_group(mask.count(), latents.frames);
    let group = group.map_err(|reason| PipelineError::File { path: path.clone(), reason })?;
    let weights = weights_by_place(&mask, group, [request.height, request.width], latents);
    Ok(Some(weights.into_iter().map(|weight| weight * grid.attention).collect()))
}

/// Returns the mean brightness (0..1) of a mask over the pixels of each latent, after scaling the mask to `size`
/// (`[height, width]`). The first latent frame covers one frame of the mask; each later one covers `group` frames.
fn weights_by_place(mask: &Frames, group: usize, size: [usize; 2], latents: &VideoShape) -> Vec<f32> {
    let video = media::covering_clip(mask, size[0], size[1]);
    let grey = video.map_axis(Axis(1), |rgb| (rgb.sum() / 3.0 * 0.5 + 0.5).clamp(0.0, 1.0));
    let (rows, columns) = (size[0] / latents.height, size[1] / latents.width);
    let shape = (latents.frames, latents.height, latents.width);
    let weights = Array3::from_shape_fn(shape, |(frame, row, column)| {
        let frames = if frame == 0 { 0..1 } else { 1 + (frame - 1) * group..1 + frame * group };
        let place = s![0, frames, row * rows..(row + 1) * rows, column * columns..(column + 1) * columns];
        grey.slice(place).mean().unwrap_or(0.0)
    });
    weights.into_iter().collect()
}

/// Tokens of conditions that the caller supplies, instead of encoding them from a file: `[1 or videos, tokens,
/// channels]`.
#[derive(Clone, Copy, Default)]
pub(crate) struct PassTokens<'a> {
    /// Tokens of the keyframes that the previous pass generated.
    pub(crate) keyframes: Option<&'a Array3<f32>>,
    /// Tokens of the input audio.
    pub(crate) sound: Option<&'a Array3<f32>>,
    /// Audio tokens of the previous pass.
    pub(crate) previous_sound: Option<&'a Array3<f32>>,
    /// Tokens of the reference videos.
    pub(crate) references: &'a [Array3<f32>],
    /// Final tokens of the previous clip.
    pub(crate) clip_end: Option<&'a Av<Array3<f32>>>,
}

impl Runner {
    /// Encodes the conditions of a pass at the size of the pass. `None`: the pass has no conditions.
    pub(crate) fn encode_conditions(
        &mut self,
        request: &Request,
        shapes: &Shapes,
        given: PassTokens,
    ) -> Result<Option<ConditionTokens>> {
        if request.conditions.as_ref().into_iter().all(Vec::is_empty) {
            return Ok(None);
        }
        let levels = request.noise_levels();
        let c = &self.model.sizes.transformer;
        let channels = c.streams().map(|s| s.in_channels);
        let ends = given.clip_end.map_or(Av::default(), |ends| ends.as_ref().map(Some));
        let rows = |tokens: Option<&Array3<f32>>| tokens.map_or(1, |tokens| tokens.dim().0);
        let videos = Av {
            video: rows(given.keyframes.or(given.references.first()).or(ends.video)),
            audio: rows(given.previous_sound.or(ends.audio)),
        };
        let streams = videos.zip(shapes.tokens.zip(channels));
        let mut streams = streams.map(|(videos, (n, channels))| StreamTokens::new(videos, n, channels));
        let own = shapes.own_tokens();
        let first = Av { video: shapes.frame_tokens(), audio: 1 };
        let mut behind = own;
        let all = streams.as_mut().zip(request.conditions.as_ref()).zip(request.roles.zip(own.zip(first)));
        let times = shapes.coords(&self.model.sizes, request.frame_rate);
        let mut kept = Av::default();
        let mut attention = AttentionWeights::new(own.video);
        let step = self.model.sizes.video_grid.temporal_compression;
        let all = all.zip(times.zip(kept.as_mut())).zip(ends);
        for ((((stream, conditions), (role, (own, first))), (times, kept)), end) in all {
            for condition in conditions {
                let tokens = match &condition.content {
                    Content::ClipEnd => end.cloned(),
                    Content::Generated => Some(Array3::zeros((1, shapes.frame_tokens(), stream.clean.dim().2))),
                    _ => self.known_tokens(condition, request, shapes, given)?,
                };
                let tokens = match tokens {
                    Some(tokens) => tokens,
                    None if role == StreamRole::Denoised => continue,
                    None => return Err(PipelineError::Usage("the input video has no audio to keep".into())),
                };
                let n = tokens.shape()[1];
                if role == StreamRole::Kept {
                    match condition.placement {
                        Placement::AppendedSound { .. } => stream.clean.slice_mut(s![.., own.., ..]).assign(&tokens),
                        _ => *kept = Some(tokens),
                    }
                    continue;
                }
                let level =
                    levels.iter().position(|l| *l == condition.noise_level()).expect("a level of each condition");
                let places: Vec<(Range<usize>, Range<usize>)> = match &condition.placement {
                    Placement::First | Placement::Whole => vec![(0..n, 0..n)],
                    Placement::Last => vec![(0..n, own - n..own)],
                    Placement::AfterFirstLatent => vec![(0..n, first..first + n)],
                    Placement::Appended { .. } | Placement::AppendedReference(_) => {
                        behind.video += n;
                        let latents = condition.appended(&shapes.video, step).unwrap_or(shapes.video);
                        attention.append(n, attention_weights(condition, &latents, request)?.as_deref());
                        vec![(0..n, behind.video - n..behind.video)]
                    }
                    Placement::AppendedSound { .. } => {
                        behind.audio += n;
                        vec![(0..n, behind.audio - n..behind.audio)]
                    }
                    Placement::Kept(area) => {
                        let kept = kept_tokens(area, request, own)?.into_iter();
                        kept.map(|n| (n..n + 1, n..n + 1)).collect()
                    }
                    Placement::Span { start, end } => {
                        let span = within(&times, *start..*end, span_key(&condition.content))?;
                        vec![(span.clone(), span)]
                    }
                    Placement::Outside { start, end } => {
                        outside(&times, *start..*end).map(|kept| (kept.clone(), kept)).collect()
                    }
                };
                for (from, to) in places {
                    stream.clean.slice_mut(s![.., to.clone(), ..]).assign(&tokens.slice(s![.., from, ..]));
                    stream.level.slice_mut(s![.., to]).fill(level as i32);
                }
            }
        }
        Ok(Some(ConditionTokens { levels, streams, given: kept, attention: attention.finish() }))
    }

    /// Returns the clean tokens of a condition, either encoded or taken from `given`. `None`: the condition is the
    /// audio of an input video without audio, or the caller handles its content (generated keyframes, final tokens of
    /// the previous clip).
    fn known_tokens(
        &mut self,
        condition: &Condition,
        request: &Request,
        shapes: &Shapes,
        given: PassTokens,
    ) -> Result<Option<Array3<f32>>> {
        Ok(Some(match &condition.content {
            Content::Image { path, crf } => self.image_tokens(path, *crf, request)?,
            Content::Sound { .. } => {
                given.sound.cloned().ok_or_else(|| PipelineError::Bug("the input audio is not encoded".into()))?
            }
            Content::AudioLatents { path } => self.audio_tokens(path, &shapes.audio)?,
            Content::Video(part) => match &condition.placement {
                Placement::Kept(area) => {
                    let frames = input_frames(part, request)?;
                    self.encode_video(inpainting::canvas(&frames, area, request), part.skipped)?
                }
                _ => self.video_tokens(part, request, condition.reference_grid().map_or(1, |grid| grid.downscale))?,
            },
            Content::Filled { frames, area } => {
                let frames = input_frames(&VideoPart { frames: *frames, last: false, skipped: 0 }, request)?;
                self.encode_video(inpainting::filled(&frames, area, request)?, 0)?
            }
            Content::Reference { path, filter, .. } => self.reference_tokens(path, *filter, condition, request)?,
            Content::VideoSound { last, delay } => match clip_sound(&*clip(request)?, request, *last, *delay) {
                Some(sound) => self.encode_audio(&sound, shapes.audio.length)?,
                None => return Ok(None),
            },
            Content::ReferenceSound => self.encode_audio(&reference_sound(request)?, shapes.appended.audio)?,
            Content::PreviousSound => {
                let missing = || PipelineError::Bug("the audio of the previous pass is missing".into());
                given.previous_sound.cloned().ok_or_else(missing)?
            }
            Content::ReferenceLatents(at) => {
                let none = || PipelineError::Bug(format!("the latents of reference video {at} are missing"));
                given.references.get(*at).ok_or_else(none)?.clone()
            }
            Content::Carried(at) => {
                let frame = shapes.frame_tokens();
                let none = || PipelineError::Bug(format!("keyframe {at} of the previous pass is missing"));
                let all = given.keyframes.filter(|all| all.dim().1 >= (at + 1) * frame).ok_or_else(none)?;
                all.slice(s![.., at * frame..(at + 1) * frame, ..]).to_owned()
            }
            Content::Generated | Content::ClipEnd => return Ok(None),
        }))
    }

    /// Reads audio latents and returns normalised tokens `[1, n, c]`. Fails if the latents do not have the shape
    /// `shape`.
    fn audio_tokens(&self, path: &Path, shape: &AudioShape) -> Result<Array3<f32>> {
        let latents = audio_latents(path)?;
        let want = (1, shape.channels, shape.length, shape.mel_bins);
        if latents.dim() != want {
            let reason = format!(
                "{AUDIO_LATENTS} has shape {:?}, but this request needs {want:?}; use latents of a video with the same duration",
                latents.dim()
            );
            return Err(PipelineError::File { path: path.into(), reason });
        }
        let mut tokens = pack_audio(latents.view());
        self.model.statistics.audio.normalize(&mut tokens, 2)?;
        Ok(tokens)
    }

    /// Encodes frames of the input video at the size of the pass, divided by `downscale`. Returns normalised tokens
    /// `[1, n, c]`.
    fn video_tokens(&mut self, part: &VideoPart, request: &Request, downscale: usize) -> Result<Array3<f32>> {
        let frames = input_frames(part, request)?;
        self.encode_frames(&frames, [request.height, request.width].map(|side| side / downscale), part.skipped)
    }

    /// Converts a reference video and encodes it at the size of the pass, divided by the reference's downscale factor.
    /// Returns normalised tokens `[1, n, c]`.
    pub(super) fn reference_tokens(
        &mut self,
        path: &Path,
        filter: FrameFilter,
        condition: &Condition,
        request: &Request,
    ) -> Result<Array3<f32>> {
        let grid = condition.reference_grid().ok_or_else(|| no_grid(path))?;
        let frames = filter.apply(reference_frames(path, grid)?);
        let [height, width] = [request.height, request.width].map(|side| side / grid.downscale);
        // The HDR pipeline keeps all of the reference.
        let video = match request.hdr {
            Some(_) => media::padded_clip(&frames, height, width),
            None => media::covering_clip(&frames, height, width),
        };
        self.encode_video(video, 0)
    }

    /// Encodes frames at `size` (`[height, width]`). Returns normalised tokens `[1, n, c]`, without those of the first
    /// `skipped` latent frames.
    fn encode_frames(&mut self, frames: &Frames, size: [usize; 2], skipped: usize) -> Result<Array3<f32>> {
        self.encode_video(media::covering_clip(frames, size[0], size[1]), skipped)
    }

    /// Encodes frames `[1, 3, frames, height, width]` in -1..1 like [`Runner::encode_frames`].
    fn encode_video(&mut self, video: Array5<f32>, skipped: usize) -> Result<Array3<f32>> {
        let encoded = self.video_encoder(video)?.run(&self.executor)?;
        let mut latents: Array5<f32> = fixed(encoded.tensor("latents")?.into_f32())?;
        self.model.statistics.video.normalize(&mut latents, 1)?;
        Ok(self.model.sizes.video_grid.pack(latents.slice(s![.., .., skipped.., .., ..]))?)
    }

    /// Encodes an image at the size of the pass. Returns normalised tokens `[1, h·w, c]`.
    fn image_tokens(&mut self, path: &Path, crf: u8, request: &Request) -> Result<Array3<f32>> {
        let frame = media::read_image(path)?;
        if crf > 0 && self.round_trip.is_none() {
            self.round_trip = Some(RoundTrip::choose(self.h264, Path::new("ffmpeg"))?);
        }
        let frame = match &self.round_trip {
            Some(h264) if crf > 0 => h264.apply(&frame, crf, path)?,
            _ => frame,
        };
        let video = media::covering(&frame, request.height, request.width);
        let encoded = self.video_encoder(video)?.run(&self.executor)?;
        let mut latents = fixed(encoded.tensor("latents")?.into_f32())?;
        self.model.statistics.video.normalize(&mut latents, 1)?;
        Ok(self.model.sizes.video_grid.pack(latents.view())?)
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array4;

    use super::{outside, reference_frames, span_key, within};
    use crate::media::{Frames, write_png_frames};
    use crate::request::{Condition, Content, ReferenceGrid};

    /// With a temporal scale of `step`, the first frame, the second frame, and every `step`-th frame after that are
    /// read, with unchanged pixels.
    #[test]
    fn reference_frames_follow_temporal_scale() {
        let folder = tempfile::tempdir().expect("a folder");
        let pixel = |(f, y, x, c): (usize, usize, usize, usize)| (f * 11 + y * 5 + x * 3 + c * 40) as u8;
        let all = Frames::new(Array4::from_shape_fn((40, 8, 12, 3), pixel)).expect("frames");
        write_png_frames(folder.path(), &all).expect("written");
        let read = |frames, step| {
            let grid = ReferenceGrid { frames, downscale: 1, step, attention: 1.0 };
            reference_frames(folder.path(), &grid)
        };
        for (step, numbers) in [(1, [0, 1, 2, 3, 4, 5, 6, 7, 8]), (4, [0, 1, 5, 9, 13, 17, 21, 25, 29])] {
            let read = read(9, step).expect("frames");
            assert_eq!(read.count(), numbers.len());
            for (place, number) in numbers.into_iter().enumerate() {
                let want = Array4::from_shape_fn((1, 8, 12, 3), |(_, y, x, c)| pixel((number, y, x, c)));
                assert_eq!(*read.part(place..place + 1).data(), want, "step {step}: frame {place} is number {number}");
            }
        }
        let short = read(17, 4).expect_err("61 frames").to_string();
        assert!(short.ends_with("has 40 frames, but 62 are needed"), "{short}");
    }

    /// Compares the regenerated tokens with those of the reference's `TemporalRegionMask`, for several regions of a
    /// 25-frame video at 24 fps. Tokens that are entirely before or after the region are kept.
    #[test]
    fn tokens_outside_retake_region_are_kept() {
        let video = [0.0, 1.0, 9.0, 17.0, 25.0].map(|frame: f32| frame / 24.0).to_vec();
        let audio = (0..=26).map(|n| (n as f32 * 4.0 - 3.0).max(0.0) * 160.0 / 16000.0).collect::<Vec<f32>>();
        let none = 0..0;
        let cases = [
            ((0.0, 0.05), 0..2, 0..2),
            ((0.3, 0.4), 1..3, 8..11),
            ((1.0 / 24.0, 9.0 / 24.0), 1..2, 1..11),
            ((0.375, 0.7), 2..3, 10..19),
            ((0.5, 99.0), 2..4, 13..26),
            ((0.0, 0.0417), 0..2, 0..2),
        ];
        for ((start, end), in_video, in_audio) in cases {
            for (ends, generated) in [(&video, in_video), (&audio, in_audio)] {
                let n = ends.len() - 1;
                let bounds = Array4::from_shape_fn((1, 1, n, 2), |(_, _, token, side)| ends[token + side]);
                // The reference implementation stores the bounds of a region as f32.
                let before = within(&bounds, 0.0..f64::from(start as f32), "").unwrap_or(none.clone());
                let behind = within(&bounds, f64::from(end as f32)..f64::INFINITY, "").unwrap_or(n..n);
                assert_eq!(before.end..behind.start, generated, "{start} to {end} of {n}");
                let kept: Vec<usize> = outside(&bounds, start..end).flatten().collect();
                assert_eq!(kept, (0..generated.start).chain(generated.end..n).collect::<Vec<_>>());
            }
        }
        let sound = Condition::suffix(9, 17, 24.0).audio.content;
        for (content, key) in [
            (Content::AudioLatents { path: "a.safetensors".into() }, "request.audio_latents"),
            (sound, "request.extend.overlap"),
        ] {
            let empty = within(&Array4::zeros((1, 1, 3, 2)), 0.5..0.6, span_key(&content)).unwrap_err().to_string();
            assert_eq!(empty, format!("{key}: no audio latent is entirely within 0.5 to 0.6 s; use a longer span"));
        }
    }
}
