//! Conditions: tokens of a stream whose clean latents are known. Each says what they are, where, and how strongly they
//! hold; first frame, keyframes and the like are constructors of it.

use std::path::{Path, PathBuf};

use super::{Chain, RequestError};
use crate::av::Av;
use crate::config::{self, Config, ExtendAt, Pipeline, Reference};
use crate::sampling::latents::VideoShape;

/// Known tokens of a stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    /// Clean latents of the tokens.
    pub content: Content,
    /// Tokens that they are.
    pub placement: Placement,
    /// 1 keeps the tokens; less leaves them `1 - strength` of each step's noise level.
    pub strength: f32,
}

/// Where clean latents come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Frame as an image file.
    Image {
        /// PNG, JPEG or WebP file.
        path: PathBuf,
        /// CRF of the H.264 round trip before it is encoded; 0 for none.
        crf: u8,
    },
    /// Sound as a file.
    Sound {
        /// File of any rate and number of channels.
        path: PathBuf,
        /// Second of it that the video starts at.
        start: f64,
        /// Seconds that are heard, silence behind them; all without.
        duration: Option<f64>,
    },
    /// Audio latents of a video of the same duration: `latents.audio` in what `--dump` wrote.
    AudioLatents {
        /// Safetensors file.
        path: PathBuf,
    },
    /// Frames of the given video.
    Video(VideoPart),
    /// Frames of a video that is given as a reference, from its start.
    Reference {
        /// Video file, or folder of PNG frames.
        path: PathBuf,
        /// Video whose brightness weighs the attention to it by place.
        mask: Option<PathBuf>,
    },
    /// Sound of the given video; nothing is known where it has none.
    VideoSound {
        /// Frames before the video's end at which it is heard from; the start without.
        last: Option<usize>,
        /// Frames of silence before it.
        delay: usize,
    },
    /// A frame that the model makes: known are none of its tokens.
    Generated,
    /// A keyframe of the pass before, by its place among those that it is given.
    Carried(usize),
    /// Latents that the clip before ends with; nothing is known in the first clip.
    ClipEnd,
}

/// Part of the given video as latents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VideoPart {
    /// Number of frames that are encoded: one more than whole latents of them.
    pub frames: usize,
    /// Takes the video's last ones instead of its first.
    pub last: bool,
    /// First latents that are left out: that of a single frame stands for no eight.
    pub skipped: usize,
}

/// Which tokens a condition fixes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Placement {
    /// The stream's first ones.
    First,
    /// The stream's last own ones.
    Last,
    /// Those behind the stream's first latent.
    Second,
    /// All of the stream's own.
    Whole,
    /// Those of the stream's own that touch no part of a time span, of content as long as the stream.
    Outside {
        /// Start in seconds.
        start: f64,
        /// End in seconds.
        end: f64,
    },
    /// Tokens of their own behind the video's, with the positions of a frame; dropped at the end.
    Appended {
        /// Frame of the video, from 0.
        frame: usize,
        /// Time that its positions span.
        span: Span,
    },
    /// Tokens of their own behind the video's, with the positions of a video of its own grid; dropped at the end.
    Beside(ReferenceGrid),
    /// Those of the stream's own that lie wholly within a time span, of content as long as the stream.
    Span {
        /// Start in seconds.
        start: f64,
        /// End in seconds.
        end: f64,
    },
}

/// Sizes of a reference video beside the one that is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReferenceGrid {
    /// Number of frames that are encoded: one more than whole latents of them.
    pub frames: usize,
    /// Pixels of the video that one of the reference's stands for, along each side.
    pub downscale: usize,
    /// Frames of the video that one of the reference's stands for, but for the first.
    pub step: usize,
    /// Weight of the attention between its tokens and the video's own: at 1, and by no mask, it is like any other.
    pub attention: f32,
}

impl ReferenceGrid {
    /// Number of frames of the file that are read, from its start: all that are encoded lie among them.
    pub fn source_frames(&self) -> usize {
        self.frame(self.frames - 1) + 1
    }

    /// Frame of the file that the `i`-th encoded one is.
    pub(crate) fn frame(&self, i: usize) -> usize {
        if i == 0 { 0 } else { 1 + (i - 1) * self.step }
    }
}

/// Time that an appended frame's positions span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// One frame.
    Frame,
    /// As many frames as a latent covers.
    Latent,
}

impl Condition {
    /// A frame that the video shows, through H.264 at `crf` first: in the first one's place, or between keyframes and at any other, appended with the
    /// positions of `span`, the very first always with one frame's.
    pub fn image(image: &config::Image, crf: u8, between_keyframes: bool, span: Span) -> Self {
        let frame = image.frame;
        let span = if frame == 0 { Span::Frame } else { span };
        let appended = between_keyframes || frame != 0;
        Condition {
            content: Content::Image { path: image.path.clone().into(), crf },
            placement: if appended { Placement::Appended { frame, span } } else { Placement::First },
            strength: image.strength as f32,
        }
    }

    /// Frame of the video that is generated beside it, to guide it, and dropped at the end.
    pub fn generated(frame: usize) -> Self {
        let placement = Placement::Appended { frame, span: Span::Frame };
        Condition { content: Content::Generated, placement, strength: 0.0 }
    }

    /// A keyframe of the pass before, the `at`-th of those that are given, at a frame of the video.
    pub(crate) fn carried(at: usize, frame: usize, strength: f32) -> Self {
        let placement = Placement::Appended { frame, span: Span::Frame };
        Condition { content: Content::Carried(at), placement, strength }
    }

    /// A sound that is all of the video's.
    pub fn sound(given: &config::GivenAudio) -> Self {
        let (path, start, duration) = (given.path.clone().into(), given.start, given.duration);
        Condition { content: Content::Sound { path, start, duration }, placement: Placement::Whole, strength: 1.0 }
    }

    /// A time span of sound that the video keeps.
    ///
    /// # Errors
    /// A span without duration.
    pub fn audio_span(kept: &config::AudioLatents) -> Result<Self, RequestError> {
        let (start, end) = (kept.start, kept.end.unwrap_or(f64::INFINITY));
        if start >= end {
            let message =
                format!("request.audio_latents: the span {start} to {end} s is empty; end must be after start");
            return Err(RequestError::Usage(message));
        }
        Ok(Condition {
            content: Content::AudioLatents { path: kept.path.clone().into() },
            placement: Placement::Span { start, end },
            strength: kept.strength as f32,
        })
    }

    /// A video that is given as a reference, by a configuration that says its scales and number of frames.
    fn reference(given: &config::ReferenceVideo, conditioning: &config::Conditioning) -> Self {
        let [downscale, step] = conditioning.reference_scales();
        let content = Content::Reference {
            path: given.path.clone().into(),
            mask: given.attention_mask.as_ref().map(PathBuf::from),
        };
        let frames = config::encoded_frames(given.frames.unwrap_or(1), step);
        let grid = ReferenceGrid { frames, downscale, step, attention: given.attention_strength as f32 };
        Condition { content, placement: Placement::Beside(grid), strength: given.strength as f32 }
    }

    fn kept(content: Content, placement: Placement) -> Self {
        Condition { content, placement, strength: 1.0 }
    }

    /// The first `frames` of the given video and its sound, each kept at its placement.
    pub fn given(frames: usize, placement: Av<Placement>) -> Av<Self> {
        let video = Content::Video(VideoPart { frames, last: false, skipped: 0 });
        let audio = Content::VideoSound { last: None, delay: 0 };
        Av { video, audio }.zip(placement).map(|(content, placement)| Condition::kept(content, placement))
    }

    /// The last `overlap` frames of the given video and their sound, which a clip goes on behind.
    pub fn prefix(overlap: usize, rate: f64) -> Av<Self> {
        let video = Content::Video(VideoPart { frames: overlap, last: true, skipped: 0 });
        let heard = Placement::Span { start: 0.0, end: overlap as f64 / rate };
        let audio = Content::VideoSound { last: Some(overlap), delay: 0 };
        Av { video: Condition::kept(video, Placement::First), audio: Condition::kept(audio, heard) }
    }

    /// The first `overlap` frames of the given video and their sound, which a clip of `frames` leads up to. The very first is made
    /// anew: a clip's last latents are of eight frames each.
    pub fn suffix(overlap: usize, frames: usize, rate: f64) -> Av<Self> {
        let video = Content::Video(VideoPart { frames: overlap, last: false, skipped: 1 });
        let heard = Placement::Span { start: (frames - overlap + 1) as f64 / rate, end: f64::INFINITY };
        let audio = Content::VideoSound { last: None, delay: frames - overlap };
        Av { video: Condition::kept(video, Placement::Last), audio: Condition::kept(audio, heard) }
    }

    /// The end of the clip before. Each latent covers eight frames, or four of the sound's spectrogram, so that none is put
    /// in the first one's place, which covers a single one.
    pub(crate) fn clip_end() -> Self {
        Condition::kept(Content::ClipEnd, Placement::Second)
    }

    /// The file that it comes from, where there is one.
    pub fn path(&self) -> Option<&Path> {
        match &self.content {
            Content::Image { path, .. }
            | Content::Sound { path, .. }
            | Content::AudioLatents { path }
            | Content::Reference { path, .. } => Some(path),
            Content::Video(_)
            | Content::VideoSound { .. }
            | Content::Generated
            | Content::Carried(_)
            | Content::ClipEnd => None,
        }
    }

    /// The frame whose positions its appended tokens have, and the time that these span.
    pub fn appended_at(&self) -> Option<(usize, Span)> {
        match self.placement {
            Placement::Appended { frame, span } => Some((frame, span)),
            Placement::First
            | Placement::Last
            | Placement::Second
            | Placement::Whole
            | Placement::Outside { .. }
            | Placement::Beside(_)
            | Placement::Span { .. } => None,
        }
    }

    /// The grid of a reference video.
    pub fn reference_grid(&self) -> Option<&ReferenceGrid> {
        match &self.placement {
            Placement::Beside(grid) => Some(grid),
            _ => None,
        }
    }

    /// Latents of the tokens that it appends to a video of `own` latents, of `step` frames each; none where it fixes some of
    /// those.
    pub(crate) fn appended(&self, own: &VideoShape, step: usize) -> Option<VideoShape> {
        match &self.placement {
            Placement::Appended { .. } => Some(VideoShape { frames: 1, ..*own }),
            Placement::Beside(grid) => Some(VideoShape {
                frames: (grid.frames - 1) / step + 1,
                height: own.height / grid.downscale,
                width: own.width / grid.downscale,
                ..*own
            }),
            _ => None,
        }
    }

    /// Whether the attention to its tokens is weighed.
    pub fn is_masked(&self) -> bool {
        matches!(&self.content, Content::Reference { mask: Some(_), .. })
            || self.reference_grid().is_some_and(|grid| grid.attention < 1.0)
    }

    /// Whether it guides the first of two passes alone.
    pub(crate) fn is_of_first_pass(&self) -> bool {
        matches!(self.content, Content::Generated | Content::Reference { .. })
    }

    /// Part of a step's noise level that its tokens have.
    pub fn noise_level(&self) -> f32 {
        1.0 - self.strength
    }
}

/// Frames, numbered from 0, that are generated beside a video of `frames`: `count` at equal distances between its ends.
///
/// # Errors
/// Two at the same frame.
fn generated(count: usize, frames: usize) -> Result<Vec<usize>, RequestError> {
    let last = frames.saturating_sub(1) as f64;
    // Half to even, as the reference rounds.
    let at = |i: usize| (last * i as f64 / (count + 1) as f64).round_ties_even() as usize;
    let found: Vec<usize> = (1..=count).map(at).collect();
    if found.first() == Some(&0) || found.windows(2).any(|pair| pair[0] == pair[1]) {
        let most = frames.saturating_sub(2);
        return Err(RequestError::Usage(format!(
            "conditioning.generated_keyframes: {count} do not fit between the ends of {frames} frames: at most {most} do"
        )));
    }
    Ok(found)
}

/// The conditions of a configuration.
///
/// # Errors
/// A condition that no video can meet.
pub(crate) fn conditions(config: &Config) -> Result<Av<Vec<Condition>>, RequestError> {
    let appended = config.pipeline.appends_every_image();
    let span = match config.conditioning.keyframe_span {
        Reference::Official1 => Span::Latent,
        Reference::Official | Reference::Diffusers => Span::Frame,
    };
    let images = config.request.images.iter();
    let images = images.map(|image| Condition::image(image, image.crf(&config.conditioning), appended, span));
    let given = config.given_sound().into_iter().map(|given| Ok(Condition::sound(given)));
    let sound = given.chain(config.request.audio_latents.iter().map(Condition::audio_span));
    let frames = config.clip_frames().unwrap_or(1);
    // They are the first pass' own, which has half the frames before upsampling in time.
    let first = if config.doubles_frames() { (frames - 1) / 2 + 1 } else { frames };
    let slots = generated(config.conditioning.generated_keyframes, first)?.into_iter().map(Condition::generated);
    let references = config.request.reference_videos.iter();
    // The last, as in both references: what is weighed attends to nothing that was appended before.
    let references = references.map(|given| Condition::reference(given, &config.conditioning));
    let kept = given_video(config, frames);
    let chained =
        config.request.num_frames.count().and_then(|all| Chain::of(config, all)).map(|_| Condition::clip_end());
    Ok(Av {
        video: kept.video.into_iter().chain(images).chain(slots).chain(chained.clone()).chain(references).collect(),
        audio: kept.audio.into_iter().chain(chained).map(Ok).chain(sound).collect::<Result<_, _>>()?,
    })
}

/// Conditions of a pipeline that is given a video.
fn given_video(config: &Config, frames: usize) -> Av<Option<Condition>> {
    let r = &config.request;
    match (config.pipeline, &r.retake, &r.extend) {
        (Pipeline::Retake, Some(span), _) => {
            let outside = Placement::Outside { start: span.from, end: span.to.unwrap_or(f64::INFINITY) };
            let anew = Av { video: span.video, audio: span.audio };
            let placement = anew.map(|anew| if anew { outside } else { Placement::Whole });
            Condition::given(frames, placement).map(Some)
        }
        (Pipeline::VideoToAudio, ..) => {
            Av { video: Some(Condition::given(frames, Av::both(Placement::Whole)).video), audio: None }
        }
        (Pipeline::Extend, _, Some(extend)) => {
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

/// Noise levels of tokens as parts of a step's: 1 first, then each other one of the conditions.
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

    /// `round(linspace(0, N - 1, n + 2))[1:-1]`.
    #[test]
    fn generated_frames_are_the_reference_s() {
        let of = |count, frames| generated(count, frames).expect("they fit");
        assert_eq!(of(0, 121), [0; 0]);
        assert_eq!((of(1, 121), of(4, 121)), (vec![60], vec![24, 48, 72, 96]));
        assert_eq!(
            (of(3, 25), of(6, 97), of(15, 25)[..3].to_vec()),
            (vec![6, 12, 18], vec![14, 27, 41, 55, 69, 82], vec![2, 3, 4])
        );
        let why = generated(8, 9).expect_err("too many").to_string();
        assert!(why.contains("8 do not fit between the ends of 9 frames: at most 7 do"), "{why}");
        assert_eq!(of(7, 9), [1, 2, 3, 4, 5, 6, 7]);
    }

    /// The last frame that is read is the last that is encoded.
    #[test]
    fn frames_of_a_reference_are_a_step_apart() {
        let grid = |frames, step| ReferenceGrid { frames, downscale: 1, step, attention: 1.0 };
        assert_eq!([grid(25, 1), grid(25, 4), grid(1, 4)].map(|grid| grid.source_frames()), [25, 94, 1]);
        assert_eq!((0..5).map(|i| grid(5, 4).frame(i)).collect::<Vec<_>>(), [0, 1, 5, 9, 13]);
    }

    #[test]
    fn a_span_of_sound_ends_after_it_starts() {
        let kept = |start, end| config::AudioLatents { path: "a.safetensors".into(), start, end, strength: 0.25 };
        let condition = Condition::audio_span(&kept(0.5, None)).expect("to the end");
        assert_eq!(condition.placement, Placement::Span { start: 0.5, end: f64::INFINITY });
        assert_eq!((condition.noise_level(), condition.path()), (0.75, Some(Path::new("a.safetensors"))));
        let empty = Condition::audio_span(&kept(0.5, Some(0.5))).expect_err("no duration").to_string();
        assert_eq!(empty, "request.audio_latents: the span 0.5 to 0.5 s is empty; end must be after start");
    }
}
