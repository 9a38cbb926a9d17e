//! Conditions. A condition fixes or appends tokens of a stream, usually tokens whose clean latents are known, such as
//! those of an input image. It has a content, a placement and a strength; its constructors create the conditions of
//! images, keyframes and other inputs.

use std::path::{Path, PathBuf};

use super::{ClipChain, RequestError};
use crate::av::Av;
use crate::config::ConfigErrorKind::OutOfRange;
use crate::config::{self, Config, ConfigError, ExtendAt, MaskChannel, PlacedImage, Reference, VideoUse};
use crate::media::FrameFilter;
use crate::sampling::latents::{AudioGrid, AudioShape, VideoShape};

/// Tokens of a stream whose clean latents are known or, with [`Content::Generated`], that the model generates in
/// addition to the video.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    /// Source of the clean latents.
    pub content: Content,
    /// Tokens that are conditioned.
    pub placement: Placement,
    /// Strength of the conditioning, 0 to 1: the noise level of the tokens is that of the step times `1 - strength`, so
    /// 1 keeps the tokens unchanged.
    pub strength: f32,
}

/// Source of clean latents.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Image file.
    Image {
        /// File in any supported image format.
        path: PathBuf,
        /// CRF of the H.264 round trip before VAE encoding; 0 skips the round trip.
        crf: u8,
    },
    /// Audio file.
    Sound {
        /// File with any sample rate and number of channels.
        path: PathBuf,
        /// Time in the file at which the video starts, in seconds.
        start: f64,
        /// Duration to use, in seconds, followed by silence; `None` uses the file to its end.
        duration: Option<f64>,
    },
    /// Audio latents of a video of the same duration: `latents.audio` in a file that `--dump` wrote.
    AudioLatents {
        /// Safetensors file.
        path: PathBuf,
    },
    /// Frames of the input video.
    Video(VideoPart),
    /// Frames of the input video, from its start, with the pixels of a region in green.
    Filled {
        /// Number of frames to encode.
        frames: usize,
        /// Region.
        area: InpaintArea,
    },
    /// Frames of a reference video, from its start.
    Reference {
        /// Video file, or folder of PNG frames.
        path: PathBuf,
        /// Mask video whose brightness scales the attention to the reference at each location.
        mask: Option<PathBuf>,
        /// Channel of the mask.
        channel: MaskChannel,
        /// Conversion of the frames before they are scaled.
        filter: FrameFilter,
    },
    /// Latents of a reference video, by its index among those that the current pass receives.
    ReferenceLatents(usize),
    /// Sound of the input video; has no effect if the video has no sound.
    VideoSound {
        /// Number of frames at the end of the video whose sound is used; `None` uses the sound from the start.
        last: Option<usize>,
        /// Frames of silence before the sound.
        delay: usize,
    },
    /// Complete sound of the input video.
    ReferenceSound,
    /// Audio of the previous pass.
    PreviousSound,
    /// Keyframe that the model generates; its clean latents are unknown.
    Generated,
    /// Keyframe of the previous pass, by its index among the keyframes that the current pass receives.
    Carried(usize),
    /// Last latents of the previous clip; has no effect in the first clip.
    ClipEnd,
}

/// Part of the input video to encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VideoPart {
    /// Number of frames to encode, which fill complete latent frames.
    pub frames: usize,
    /// Whether to use the last frames of the video instead of the first.
    pub last: bool,
    /// Number of leading latent frames to discard. The first latent frame represents a single video frame and cannot
    /// replace one that represents eight.
    pub skipped: usize,
}

/// Tokens of a stream that a condition applies to.
#[derive(Clone, Debug, PartialEq)]
pub enum Placement {
    /// First tokens of the stream, as many as the content has.
    First,
    /// Last tokens of the stream before appended ones, as many as the content has.
    Last,
    /// Tokens after the first latent of the stream, as many as the content has.
    AfterFirstLatent,
    /// All tokens of the stream, except appended ones.
    Whole,
    /// Tokens of the stream that do not overlap a time span; the content is as long as the stream.
    Outside {
        /// Start in seconds.
        start: f64,
        /// End in seconds.
        end: f64,
    },
    /// Video tokens that represent no pixels of a region to regenerate; the content is as long as the stream.
    Kept(InpaintArea),
    /// Tokens appended to the video, with the positions of a frame; dropped after denoising.
    Appended {
        /// Index of the frame in the video, from 0.
        frame: usize,
        /// Time span that the positions cover.
        span: PositionSpan,
    },
    /// Tokens appended to the video, with the positions of a reference video's grid; dropped after denoising.
    AppendedReference(ReferenceGrid),
    /// Tokens appended to the audio, with the positions of audio that ends shortly before the video starts; dropped
    /// after denoising.
    AppendedSound {
        /// Duration of the content in seconds; `None`: that of the video.
        seconds: Option<f64>,
    },
    /// Tokens of the stream that are completely inside a time span; the content is as long as the stream.
    Span {
        /// Start in seconds.
        start: f64,
        /// End in seconds.
        end: f64,
    },
}

/// Region of the video to regenerate.
#[derive(Clone, Debug, PartialEq)]
pub enum InpaintArea {
    /// The white pixels of an image or a video.
    Mask(PathBuf),
    /// The pixels inside of a rectangle.
    Inside(Rectangle),
    /// The pixels outside of a rectangle, which shows the complete input video.
    Outside(Rectangle),
}

/// Rectangle in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rectangle {
    /// Distance from the left edge of the frame.
    pub left: usize,
    /// Distance from the top edge of the frame.
    pub top: usize,
    pub width: usize,
    pub height: usize,
}

/// Size and attention weight of a reference video, relative to the generated video.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReferenceGrid {
    /// Number of frames to encode, which fill complete latent frames.
    pub frames: usize,
    /// Pixels of the generated video per pixel of the reference, along each side.
    pub downscale: usize,
    /// Frames of the generated video per frame of the reference, after the first.
    pub step: usize,
    /// Weight of the attention between the tokens of the reference and those of the generated video; 1 without a mask
    /// is ordinary attention.
    pub attention: f32,
}

impl ReferenceGrid {
    /// Returns the number of frames to read from the start of the file to get all encoded frames.
    pub fn source_frames(&self) -> usize {
        self.frame(self.frames - 1) + 1
    }

    /// Returns the index, in the file, of encoded frame `i`.
    pub(crate) fn frame(&self, i: usize) -> usize {
        if i == 0 { 0 } else { 1 + (i - 1) * self.step }
    }
}

/// Time span that the positions of an appended frame cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PositionSpan {
    /// One frame.
    Frame,
    /// The frames that one latent frame represents.
    Latent,
}

impl Condition {
    /// Returns a condition on an image, which is encoded after an H.264 round trip at `crf`. The positions of an appended
    /// image cover one frame if it is the first, otherwise `span`.
    pub(crate) fn image(placed: PlacedImage<'_>, crf: u8, span: PositionSpan) -> Self {
        let PlacedImage { image, frame, appended } = placed;
        let span = if frame == 0 { PositionSpan::Frame } else { span };
        Condition {
            content: Content::Image { path: image.path.clone().into(), crf },
            placement: if appended { Placement::Appended { frame, span } } else { Placement::First },
            strength: image.strength as f32,
        }
    }

    /// Returns a condition that appends a keyframe, which the model generates to guide the video and which is dropped
    /// after denoising.
    pub fn generated(frame: usize) -> Self {
        let placement = Placement::Appended { frame, span: PositionSpan::Frame };
        Condition { content: Content::Generated, placement, strength: 0.0 }
    }

    /// Returns a condition that appends a keyframe of the previous pass at frame `frame` of the video. `at`: index of
    /// the keyframe among those that the pass receives.
    pub(crate) fn carried(at: usize, frame: usize, strength: f32) -> Self {
        let placement = Placement::Appended { frame, span: PositionSpan::Frame };
        Condition { content: Content::Carried(at), placement, strength }
    }

    /// Returns a condition that fixes the complete audio stream to an input audio file.
    pub fn sound(given: &config::GivenAudio) -> Self {
        let (path, start, duration) = (given.path.clone().into(), given.start, given.duration);
        Condition { content: Content::Sound { path, start, duration }, placement: Placement::Whole, strength: 1.0 }
    }

    /// Returns a condition that keeps a time span of the audio latents of an earlier run.
    ///
    /// # Errors
    /// Returns an error if the span is empty.
    pub fn audio_span(kept: &config::AudioLatents) -> Result<Self, RequestError> {
        let (start, end) = (kept.start, kept.end.unwrap_or(f64::INFINITY));
        if start >= end {
            let why = format!("the span {start} to {end} s is empty; end must be after start");
            return Err(ConfigError::key(OutOfRange, "request.audio_latents", why).into());
        }
        Ok(Condition {
            content: Content::AudioLatents { path: kept.path.clone().into() },
            placement: Placement::Span { start, end },
            strength: kept.strength as f32,
        })
    }

    /// Returns a condition that appends a reference video. The configuration must already contain the scales and the
    /// number of frames of the reference.
    fn reference(given: &config::ReferenceVideo, config: &Config) -> Result<Self, RequestError> {
        let [downscale, step] = config.conditioning.reference_scales();
        let content = Content::Reference {
            path: given.path.clone().into(),
            mask: given.attention_mask.as_ref().map(PathBuf::from),
            channel: given.attention_mask_channel,
            filter: config.reference_filter(given)?,
        };
        let frames = config::encoded_frames(given.frames.unwrap_or(1), step);
        let grid = ReferenceGrid { frames, downscale, step, attention: given.attention_strength as f32 };
        Ok(Condition { content, placement: Placement::AppendedReference(grid), strength: given.strength as f32 })
    }

    /// Returns conditions that append the input video and its sound, which the generated video follows (pipeline
    /// `dub_it`).
    fn dubbed(config: &Config, frames: usize) -> Av<Self> {
        let own = config.request.dub.clone().unwrap_or_default();
        let [downscale, _] = config.conditioning.reference_scales();
        let grid = ReferenceGrid { frames, downscale, step: 1, attention: 1.0 };
        let video = Condition {
            content: Content::Video(VideoPart { frames, last: false, skipped: 0 }),
            placement: Placement::AppendedReference(grid),
            strength: own.strength as f32,
        };
        let placement = Placement::AppendedSound { seconds: own.sound_seconds };
        Av { video, audio: Condition::kept(Content::ReferenceSound, placement) }
    }

    /// Returns conditions that keep the latents of the input video outside of `area`, and its sound if `keeps_sound`
    /// (pipeline `inpaint`).
    fn inpainted(frames: usize, area: InpaintArea, keeps_sound: bool) -> Av<Option<Self>> {
        let both = Condition::keep_input(frames, Av { video: Placement::Kept(area), audio: Placement::Whole });
        Av { video: Some(both.video), audio: keeps_sound.then_some(both.audio) }
    }

    /// Returns a condition that appends the input video with the pixels of `area` in green.
    fn filled(frames: usize, area: InpaintArea) -> Self {
        let grid = ReferenceGrid { frames, downscale: 1, step: 1, attention: 1.0 };
        Condition::kept(Content::Filled { frames, area }, Placement::AppendedReference(grid))
    }

    /// Returns a condition that appends the audio of the previous pass, in the place of the reference sound.
    pub(super) fn previous_sound() -> Self {
        Condition::kept(Content::PreviousSound, Placement::AppendedSound { seconds: None })
    }

    /// Returns a condition that appends the video of the first pass, which has `frames` frames and half the size, as a
    /// reference video.
    pub(super) fn first_pass_video(frames: usize) -> Self {
        let grid = ReferenceGrid { frames, downscale: 2, step: 1, attention: 1.0 };
        Condition::kept(Content::ReferenceLatents(0), Placement::AppendedReference(grid))
    }

    fn kept(content: Content, placement: Placement) -> Self {
        Condition { content, placement, strength: 1.0 }
    }

    /// Returns conditions that keep the first `frames` frames of the input video, and its sound. `placement` has the
    /// placement of each stream's condition.
    pub fn keep_input(frames: usize, placement: Av<Placement>) -> Av<Self> {
        let video = Content::Video(VideoPart { frames, last: false, skipped: 0 });
        let audio = Content::VideoSound { last: None, delay: 0 };
        Av { video, audio }.zip(placement).map(|(content, placement)| Condition::kept(content, placement))
    }

    /// Returns conditions that keep the last `overlap` frames of the input video, and their sound, at the start of a
    /// clip.
    pub fn prefix(overlap: usize, rate: f64) -> Av<Self> {
        let video = Content::Video(VideoPart { frames: overlap, last: true, skipped: 0 });
        let heard = Placement::Span { start: 0.0, end: overlap as f64 / rate };
        let audio = Content::VideoSound { last: Some(overlap), delay: 0 };
        Av { video: Condition::kept(video, Placement::First), audio: Condition::kept(audio, heard) }
    }

    /// Returns conditions that keep frames 1 to `overlap` - 1 of the input video, and their sound, at the end of a clip
    /// of `frames` frames. Frame 0 is regenerated, because its latent frame represents a single video frame, but the
    /// last latent frames of a clip represent eight each.
    pub fn suffix(overlap: usize, frames: usize, rate: f64) -> Av<Self> {
        let video = Content::Video(VideoPart { frames: overlap, last: false, skipped: 1 });
        let heard = Placement::Span { start: (frames - overlap + 1) as f64 / rate, end: f64::INFINITY };
        let audio = Content::VideoSound { last: None, delay: frames - overlap };
        Av { video: Condition::kept(video, Placement::Last), audio: Condition::kept(audio, heard) }
    }

    /// Returns a condition that keeps the last latents of the previous clip, after the first latent of the stream. The
    /// kept latents represent eight video frames (or four spectrogram frames) each and cannot replace the first latent,
    /// which represents one.
    pub(crate) fn clip_end() -> Self {
        Condition::kept(Content::ClipEnd, Placement::AfterFirstLatent)
    }

    /// Returns the file of the content, if it has one.
    pub fn path(&self) -> Option<&Path> {
        match &self.content {
            Content::Image { path, .. }
            | Content::Sound { path, .. }
            | Content::AudioLatents { path }
            | Content::Reference { path, .. } => Some(path),
            Content::Video(_)
            | Content::Filled { .. }
            | Content::VideoSound { .. }
            | Content::ReferenceSound
            | Content::PreviousSound
            | Content::ReferenceLatents(_)
            | Content::Generated
            | Content::Carried(_)
            | Content::ClipEnd => None,
        }
    }

    /// Returns the frame and the position span of an appended frame; `None` for other placements.
    pub fn appended_at(&self) -> Option<(usize, PositionSpan)> {
        match self.placement {
            Placement::Appended { frame, span } => Some((frame, span)),
            Placement::First
            | Placement::Last
            | Placement::AfterFirstLatent
            | Placement::Whole
            | Placement::Outside { .. }
            | Placement::Kept(_)
            | Placement::AppendedReference(_)
            | Placement::AppendedSound { .. }
            | Placement::Span { .. } => None,
        }
    }

    /// Returns the grid of a reference video; `None` for other placements.
    pub fn reference_grid(&self) -> Option<&ReferenceGrid> {
        match &self.placement {
            Placement::AppendedReference(grid) => Some(grid),
            _ => None,
        }
    }

    /// Returns the shape of the latents that the condition appends to a video with latents of shape `own`, which
    /// represent `step` frames each; `None` if the condition replaces tokens of the video instead.
    pub(crate) fn appended(&self, own: &VideoShape, step: usize) -> Option<VideoShape> {
        match &self.placement {
            Placement::Appended { .. } => Some(VideoShape { frames: 1, ..*own }),
            Placement::AppendedReference(grid) => Some(VideoShape {
                frames: (grid.frames - 1) / step + 1,
                height: own.height / grid.downscale,
                width: own.width / grid.downscale,
                ..*own
            }),
            _ => None,
        }
    }

    /// Returns the number of tokens that the condition appends to audio with latents of shape `own`; `None` if it
    /// appends none.
    pub(crate) fn appended_sound(&self, grid: &AudioGrid, own: &AudioShape) -> Option<usize> {
        match self.placement {
            Placement::AppendedSound { seconds } => Some(seconds.map_or(own.length, |seconds| grid.length(seconds))),
            _ => None,
        }
    }

    /// Returns whether the attention to the condition's tokens is weighted.
    pub fn is_masked(&self) -> bool {
        matches!(&self.content, Content::Reference { mask: Some(_), .. })
            || self.reference_grid().is_some_and(|grid| grid.attention < 1.0)
    }

    /// Returns whether the condition applies only to the first of two passes.
    pub(crate) fn is_first_pass_only(&self) -> bool {
        matches!(self.content, Content::Generated | Content::Reference { .. })
    }

    /// Returns the noise level of the condition's tokens, as a fraction of the noise level of the step.
    pub fn noise_level(&self) -> f32 {
        1.0 - self.strength
    }
}

/// Returns `count` evenly spaced frame indices strictly between the first and the last of `frames` frames.
///
/// # Errors
/// Returns an error if there are too few frames for `count` different indices.
fn generated(count: usize, frames: usize) -> Result<Vec<usize>, RequestError> {
    let last = frames.saturating_sub(1) as f64;
    // Round half to even, as the reference does.
    let at = |i: usize| (last * i as f64 / (count + 1) as f64).round_ties_even() as usize;
    let found: Vec<usize> = (1..=count).map(at).collect();
    if found.first() == Some(&0) || found.windows(2).any(|pair| pair[0] == pair[1]) {
        let most = frames.saturating_sub(2);
        let why = format!(
            "{count} keyframes do not fit between the first and the last of {frames} frames; use at most {most}"
        );
        return Err(ConfigError::key(OutOfRange, "conditioning.generated_keyframes", why).into());
    }
    Ok(found)
}

/// Returns the conditions of a configuration.
///
/// # Errors
/// Returns an error if the span of a condition is empty or generated keyframes do not fit in the video.
pub(crate) fn conditions(config: &Config) -> Result<Av<Vec<Condition>>, RequestError> {
    let span = match config.conditioning.keyframe_span {
        Reference::Official1 => PositionSpan::Latent,
        Reference::Official | Reference::Diffusers => PositionSpan::Frame,
    };
    let images = config.placed_images();
    let images = images.map(|placed| Condition::image(placed, placed.image.crf(&config.conditioning), span));
    let given = config.given_sound().into_iter().map(|given| Ok(Condition::sound(given)));
    let sound = given.chain(config.request.audio_latents.iter().map(Condition::audio_span));
    let frames = config.clip_frames().unwrap_or(1);
    // Generated keyframes belong to the first pass, which has half the frames before temporal upsampling.
    let first = if config.doubles_frames() { (frames - 1) / 2 + 1 } else { frames };
    let slots = generated(config.conditioning.generated_keyframes, first)?.into_iter().map(Condition::generated);
    let references = config.request.reference_videos.iter();
    // Reference videos come last, as in both reference implementations: weighted tokens do not attend to tokens
    // appended earlier.
    let references = references.map(|given| Condition::reference(given, config)).collect::<Result<Vec<_>, _>>()?;
    let kept = given_video(config, frames);
    let dubbed = (config.pipeline.spec().video == Some(VideoUse::Reference)).then(|| Condition::dubbed(config, frames));
    let dubbed = dubbed.map_or(Av::default(), |both| both.map(Some));
    let filled = inpaint_area(config).filter(|_| config.follows_input()).map(|area| Condition::filled(frames, area));
    let chained = config
        .request
        .num_frames
        .count()
        .and_then(|all| ClipChain::from_config(config, all))
        .map(|_| Condition::clip_end());
    Ok(Av {
        video: kept
            .video
            .into_iter()
            .chain(images)
            .chain(slots)
            .chain(chained.clone())
            .chain(references)
            .chain(dubbed.video)
            .chain(filled)
            .collect(),
        audio: kept
            .audio
            .into_iter()
            .chain(chained)
            .chain(dubbed.audio)
            .map(Ok)
            .chain(sound)
            .collect::<Result<_, _>>()?,
    })
}

/// Returns the conditions of pipelines that require an input video.
fn given_video(config: &Config, frames: usize) -> Av<Option<Condition>> {
    let r = &config.request;
    match (config.pipeline.spec().video, &r.retake, &r.extend) {
        (Some(VideoUse::Span), Some(span), _) => {
            let outside = Placement::Outside { start: span.from, end: span.to.unwrap_or(f64::INFINITY) };
            let regenerated = Av { video: span.video, audio: span.audio };
            let placement = regenerated.map(|regenerated| if regenerated { outside.clone() } else { Placement::Whole });
            Condition::keep_input(frames, placement).map(Some)
        }
        (Some(VideoUse::Whole), ..) => {
            Av { video: Some(Condition::keep_input(frames, Av::both(Placement::Whole)).video), audio: None }
        }
        (Some(VideoUse::Region), ..) => {
            let keeps_sound = !r.inpaint.as_ref().is_some_and(|own| own.audio);
            inpaint_area(config).map_or(Av::default(), |area| Condition::inpainted(frames, area, keeps_sound))
        }
        (Some(VideoUse::Overlap), _, Some(extend)) => {
            let (overlap, rate) = (extend.overlap, r.frame_rate);
            let both = match extend.at {
                ExtendAt::Start => Condition::suffix(overlap, frames, rate),
                ExtendAt::End => Condition::prefix(overlap, rate),
            };
            both.map(Some)
        }
        _ => Av::default(),
    }
}

/// Returns the region that the pipeline `inpaint` regenerates; `None` for other pipelines.
fn inpaint_area(config: &Config) -> Option<InpaintArea> {
    let r = &config.request;
    config.pipeline.spec().video.filter(|video_use| *video_use == VideoUse::Region)?;
    let own = r.inpaint.clone().unwrap_or_default();
    let rectangle = |[left, top, width, height]: [usize; 4]| Rectangle { left, top, width, height };
    let mask = r.mask.as_ref().map(|path| InpaintArea::Mask(path.into()));
    let inside = own.region.map(|region| InpaintArea::Inside(rectangle(region)));
    mask.or(inside).or_else(|| own.keep.map(|keep| InpaintArea::Outside(rectangle(keep))))
}

/// Returns the distinct noise levels of tokens, as fractions of the noise level of the step; the first is 1.
pub(super) fn noise_levels<'a>(conditions: impl Iterator<Item = &'a Condition>) -> Vec<f32> {
    let mut levels = vec![1.0];
    for level in conditions.map(Condition::noise_level) {
        if !levels.contains(&level) {
            levels.push(level);
        }
    }
    levels
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reference implementation computes the indices as `round(linspace(0, N - 1, n + 2))[1:-1]`.
    #[test]
    fn generated_keyframe_indices_match_the_reference() {
        let of = |count, frames| generated(count, frames).expect("they fit");
        assert_eq!(of(0, 121), [0; 0]);
        assert_eq!((of(1, 121), of(4, 121)), (vec![60], vec![24, 48, 72, 96]));
        assert_eq!(
            (of(3, 25), of(6, 97), of(15, 25)[..3].to_vec()),
            (vec![6, 12, 18], vec![14, 27, 41, 55, 69, 82], vec![2, 3, 4])
        );
        let why = generated(8, 9).expect_err("too many").to_string();
        assert!(
            why.contains("8 keyframes do not fit between the first and the last of 9 frames; use at most 7"),
            "{why}"
        );
        assert_eq!(of(7, 9), [1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn reference_frames_are_spaced_by_step() {
        let grid = |frames, step| ReferenceGrid { frames, downscale: 1, step, attention: 1.0 };
        assert_eq!([grid(25, 1), grid(25, 4), grid(1, 4)].map(|grid| grid.source_frames()), [25, 94, 1]);
        assert_eq!((0..5).map(|i| grid(5, 4).frame(i)).collect::<Vec<_>>(), [0, 1, 5, 9, 13]);
    }

    #[test]
    fn audio_span_must_not_be_empty() {
        let kept = |start, end| config::AudioLatents { path: "a.safetensors".into(), start, end, strength: 0.25 };
        let condition = Condition::audio_span(&kept(0.5, None)).expect("to the end");
        assert_eq!(condition.placement, Placement::Span { start: 0.5, end: f64::INFINITY });
        assert_eq!((condition.noise_level(), condition.path()), (0.75, Some(Path::new("a.safetensors"))));
        let empty = Condition::audio_span(&kept(0.5, Some(0.5))).expect_err("no duration").to_string();
        assert_eq!(empty, "request.audio_latents: the span 0.5 to 0.5 s is empty; end must be after start");
    }
}
