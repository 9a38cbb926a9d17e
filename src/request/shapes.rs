//! Latent shapes and token counts of a request.

use std::ops::Range;

use ndarray::{Array2, Array4, s};

use super::{Condition, Content, ModelSizes, Request, coordinate_grids};
use crate::av::Av;
use crate::sampling::SamplingError;
use crate::sampling::denoise::StreamRole;
use crate::sampling::latents::{AudioShape, VideoShape};

/// Latent shapes of a pass.
pub struct Shapes {
    pub(crate) video: VideoShape,
    pub(crate) audio: AudioShape,
    /// Number of tokens of each stream, including appended ones.
    pub tokens: Av<usize>,
    /// Number of tokens that conditions append to each stream.
    pub appended: Av<usize>,
    /// Role of each stream.
    pub(crate) roles: Av<StreamRole>,
    /// Streams for which initial noise is drawn.
    pub(crate) drawn: Av<bool>,
}

impl Shapes {
    /// Returns the shapes for a video size, without appended tokens.
    ///
    /// # Errors
    /// Returns an error with the two nearest valid sizes if the size is invalid.
    pub fn new(
        sizes: &ModelSizes,
        width: usize,
        height: usize,
        num_frames: usize,
        frame_rate: f64,
    ) -> Result<Self, SamplingError> {
        let video = sizes.video_grid.latents(1, sizes.video_channels, width, height, num_frames)?;
        let audio = sizes.audio_grid.latents(1, sizes.audio_channels, num_frames, frame_rate)?;
        let tokens = Av { video: sizes.video_grid.tokens(&video), audio: audio.length };
        Ok(Shapes { video, audio, tokens, appended: Av::default(), roles: Av::default(), drawn: Av::both(true) })
    }

    /// Returns the shapes of a pass, including appended tokens.
    ///
    /// # Errors
    /// Returns the errors of [`Shapes::new`].
    pub fn from_request(sizes: &ModelSizes, r: &Request) -> Result<Self, SamplingError> {
        let mut shapes = Shapes::new(sizes, r.width, r.height, r.num_frames, r.frame_rate)?;
        if let Some((frames, rate)) = r.sound_frames {
            shapes.audio = sizes.audio_grid.latents(1, sizes.audio_channels, frames, rate)?;
            shapes.tokens.audio = shapes.audio.length;
        }
        let (grid, conditions) = (&sizes.video_grid, &r.conditions);
        let each = conditions.video.iter().filter_map(|c| c.appended(&shapes.video, grid.temporal_compression));
        let sound = conditions.audio.iter().filter_map(|c| c.appended_sound(&sizes.audio_grid, &shapes.audio));
        let appended = Av { video: each.map(|latents| grid.tokens(&latents)).sum(), audio: sound.sum() };
        let tokens = shapes.tokens.zip(appended).map(|(own, appended)| own + appended);
        let drawn = r.roles.map(|role| role == StreamRole::Denoised || role == StreamRole::Kept && r.draws_kept);
        Ok(Shapes { tokens, appended, roles: r.roles, drawn, ..shapes })
    }

    pub(crate) fn denoised(&self) -> Av<bool> {
        self.roles.map(|role| role == StreamRole::Denoised)
    }

    /// Returns the number of tokens of each stream without appended ones.
    pub fn own_tokens(&self) -> Av<usize> {
        self.tokens.zip(self.appended).map(|(all, appended)| all - appended)
    }

    /// Returns the shape `[tokens, channels]` of the noise that steps add to each stream; 0 tokens for streams that are
    /// not denoised.
    pub(crate) fn step_tokens(&self, sizes: &ModelSizes) -> Av<[usize; 2]> {
        let channels = sizes.transformer.streams().map(|stream| stream.in_channels);
        let all = self.tokens.zip(channels).zip(self.denoised());
        all.map(|((n, c), denoised)| [if denoised { n } else { 0 }, c])
    }

    pub(crate) fn frame_tokens(&self) -> usize {
        self.own_tokens().video / self.video.frames
    }

    /// Returns a mask `[1, n]` of the video tokens that represent a single video frame: 1 for generated keyframes and,
    /// if `first` is true, for the first latent frame.
    pub(crate) fn single_frames(&self, conditions: &[Condition], first: bool) -> Array2<f32> {
        let mut mask = Array2::zeros((1, self.tokens.video));
        let frame = self.frame_tokens();
        mask.slice_mut(s![.., ..frame]).fill(f32::from(first));
        for tokens in self.generated(conditions) {
            mask.slice_mut(s![.., tokens]).fill(1.0);
        }
        mask
    }

    /// Returns the token ranges of generated keyframes.
    pub(crate) fn generated(&self, conditions: &[Condition]) -> Vec<Range<usize>> {
        let frame = self.frame_tokens();
        let appended = conditions.iter().filter(|condition| condition.appended_at().is_some());
        let generated = appended.enumerate().filter(|(_, condition)| condition.content == Content::Generated);
        let start = |(at, _): (usize, &Condition)| self.own_tokens().video + at * frame;
        generated.map(start).map(|start| start..start + frame).collect()
    }

    /// Returns the position bounds of the tokens of each stream, without appended tokens: `[1, 3, n, 2]` (time, height,
    /// width) for video and `[1, 1, m, 2]` (time) for audio.
    pub(crate) fn coords(&self, sizes: &ModelSizes, frame_rate: f64) -> Av<Array4<f32>> {
        let c = &sizes.transformer;
        let (video, audio) = coordinate_grids(c);
        let offset = c.causal_offset as i64;
        Av {
            video: video.coords(&self.video, c.vae_scale_factors, offset, frame_rate),
            audio: audio.coords(1, self.audio.length, c.audio_scale_factor, c.audio_patch_size_t, offset),
        }
    }
}
