//! Sound to audio tokens.

use std::path::Path;

use ndarray::{Array3, Array4, Axis, s};

use super::error::{PipelineError, Result};
use super::runner::Runner;
use super::tensors::fixed;
use crate::media::{self, Audio};
use crate::models::audio_vae::{log_mel, resample, samples_of};
use crate::request::{Content, Request, Shapes};
use crate::sampling::latents::pack_audio;

/// The sound of a file from second `start` on: as many samples as `seconds` hold, silence behind its end, or behind `duration`
/// seconds of it.
///
/// # Errors
/// A file that cannot be read, that has no sound, or none behind `start`.
pub(super) fn given_sound(path: &Path, start: f64, duration: Option<f64>, seconds: f64) -> Result<Audio> {
    let heard = duration.unwrap_or(f64::INFINITY).min(seconds);
    let fault = |reason: String| PipelineError::File { path: path.into(), reason };
    let part = media::read_sound_from(path, Path::new("ffmpeg"), start, Some(start + heard))?;
    let part = part.filter(|part| part.length > 0.0).ok_or_else(|| fault("has no sound".into()))?;
    let (sound, length) = (part.sound, part.length);
    if start > 0.0 && start >= length {
        return Err(fault(format!("ends after {length:.3} s, before request.audio.start = {start}")));
    }
    if length < start + heard - 0.001 {
        let left = length - start;
        tracing::warn!("{}: {left:.3} s of sound, the video has {seconds:.3} s: silence follows", path.display());
    }
    let samples = |seconds: f64| (seconds * f64::from(sound.rate())).round_ties_even() as usize;
    Ok(sound.span(0.0, samples(heard)).span(0.0, samples(seconds)))
}

/// The sound that is given with a request, as long as its video.
///
/// # Errors
/// A file that cannot be read, that has no sound, or none behind its start.
pub(crate) fn sound_of(request: &Request) -> Result<Option<Audio>> {
    let mut content = request.conditions.audio.iter().map(|condition| &condition.content);
    let read = |content: &Content| match content {
        Content::Sound { path, start, duration } => Some(given_sound(path, *start, *duration, request.seconds())),
        _ => None,
    };
    content.find_map(read).transpose()
}

/// A sound that is given: what goes with the video, and its tokens.
pub(crate) struct GivenSound {
    /// Stereo, as long as the video.
    sound: Audio,
    /// Normalised, `[1, n, c]`.
    pub(crate) tokens: Array3<f32>,
}

impl GivenSound {
    /// Samples `[1, channels, samples]`.
    pub(crate) fn samples(&self) -> Array3<f32> {
        self.sound.samples().clone().insert_axis(Axis(0))
    }

    /// Samples a second.
    pub(crate) fn rate(&self) -> usize {
        self.sound.rate() as usize
    }
}

/// Samples a second of a sound in a file whose codec does not have the sound's own rate.
const OTHER_RATE: u32 = 48000;

impl Runner {
    /// The sound that is given with a request, and its tokens.
    ///
    /// # Errors
    /// A file that cannot be used; what is wrong with program or device.
    pub(crate) fn given(&mut self, request: &Request) -> Result<Option<GivenSound>> {
        let sound = match &request.sound {
            Some(sound) => Some((**sound).clone()),
            None => sound_of(request)?,
        };
        let Some(sound) = sound else { return Ok(None) };
        let count = Shapes::of(&self.model.sizes, request)?.audio.length;
        let tokens = self.encode_audio(&sound, count)?;
        let stereo = sound.with_channels(2);
        let sound = match media::AAC_RATES.contains(&sound.rate()) {
            true => stereo,
            false => Audio::new(resample(stereo.samples().view(), sound.rate(), OTHER_RATE), OTHER_RATE)?,
        };
        Ok(Some(GivenSound { sound, tokens }))
    }

    /// A sound as normalised tokens `[1, count, c]`; silence is put behind it where it is too short.
    ///
    /// # Errors
    /// What is wrong with program or device.
    pub fn encode_audio(&mut self, sound: &Audio, count: usize) -> Result<Array3<f32>> {
        let latents = self.encode_mel(sound, count)?;
        let mut tokens = pack_audio(latents.view());
        self.model.statistics.audio.normalize(&mut tokens, 2)?;
        Ok(tokens)
    }

    /// The same as latents `[1, C, count, M]`, not normalised.
    fn encode_mel(&mut self, sound: &Audio, count: usize) -> Result<Array4<f32>> {
        let c = self.model.configs.audio_vae()?;
        let frames = c.frames_of(count);
        let needed = (samples_of(&c, frames) as u64 * u64::from(sound.rate())).div_ceil(c.sample_rate as u64);
        let sound = sound.with_channels(c.in_channels).span(0.0, sound.len().max(needed as usize));
        let short = || PipelineError::Bug(format!("{} samples of sound make no {frames} frames", sound.len()));
        let mel = log_mel(&c, sound.samples().view(), sound.rate()).filter(|mel| mel.dim().2 >= frames);
        // No latent depends on what is behind the frames that it covers.
        let mel = mel.ok_or_else(short)?.slice(s![.., .., ..frames, ..]).to_owned();
        let encoded = self.audio_encoder(mel)?.run(&self.executor)?;
        let latents: Array4<f32> = fixed(encoded.tensor("latents")?.into_f32())?;
        Ok(latents.slice(s![.., .., ..count, ..]).to_owned())
    }
}
