//! Reads input audio and encodes it to audio tokens.

use std::path::Path;

use ndarray::{Array3, Array4, Axis, s};

use crate::media::{self, Audio};
use crate::models::audio_vae::{log_mel, resample, samples_for_frames};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::output::tensors::fixed;
use crate::pipeline::runner::Runner;
use crate::request::{Content, Request, Shapes};
use crate::sampling::latents::pack_audio;

/// Reads `seconds` seconds of audio from a file, beginning at second `start`. Pads with silence after the end of the
/// file, or after `duration` seconds.
///
/// # Errors
/// Returns an error if the file cannot be read, has no audio, or ends before `start`.
pub(in crate::pipeline) fn given_sound(path: &Path, start: f64, duration: Option<f64>, seconds: f64) -> Result<Audio> {
    let heard = duration.unwrap_or(f64::INFINITY).min(seconds);
    let fault = |reason: String| PipelineError::File { path: path.into(), reason };
    let part = media::read_sound_from(path, Path::new("ffmpeg"), start, Some(start + heard))?;
    let part = part.filter(|part| part.length > 0.0).ok_or_else(|| fault("has no sound".into()))?;
    let (sound, length) = (part.sound, part.length);
    if start > 0.0 && start >= length {
        return Err(fault(format!("ends after {length:.3} s, before request.audio.start = {start} s")));
    }
    if length < start + heard - 0.001 {
        let left = length - start;
        tracing::warn!(
            "{}: has only {left:.3} s of sound for a video of {seconds:.3} s: silence follows",
            path.display()
        );
    }
    let samples = |seconds: f64| (seconds * f64::from(sound.rate())).round_ties_even() as usize;
    Ok(sound.span(0.0, samples(heard)).span(0.0, samples(seconds)))
}

/// Reads the input audio of a request, padded or cut to the duration of the video. `None`: the request has no input
/// audio.
///
/// # Errors
/// Returns an error if the file cannot be read, has no audio, or ends before the requested start.
pub(crate) fn read_input_audio(request: &Request) -> Result<Option<Audio>> {
    let mut content = request.conditions.audio.iter().map(|condition| &condition.content);
    let read = |content: &Content| match content {
        Content::Sound { path, start, duration } => Some(given_sound(path, *start, *duration, request.seconds())),
        _ => None,
    };
    content.find_map(read).transpose()
}

/// Input audio of a request, as samples and as tokens.
pub(crate) struct GivenSound {
    /// Stereo samples with the duration of the video.
    sound: Audio,
    /// Normalised tokens `[1, n, c]`.
    pub(crate) tokens: Array3<f32>,
}

impl GivenSound {
    /// Returns the samples `[1, channels, samples]`.
    pub(crate) fn samples(&self) -> Array3<f32> {
        self.sound.samples().clone().insert_axis(Axis(0))
    }

    /// Returns the sample rate in Hz.
    pub(crate) fn rate(&self) -> usize {
        self.sound.rate() as usize
    }
}

/// Sample rate (Hz) of the output if AAC does not support the sample rate of the input.
const FALLBACK_RATE: u32 = 48000;

impl Runner {
    /// Reads and encodes the input audio of a request. `None`: the request has no input audio.
    pub(crate) fn input_sound(&mut self, request: &Request) -> Result<Option<GivenSound>> {
        let sound = match &request.sound {
            Some(sound) => Some((**sound).clone()),
            None => read_input_audio(request)?,
        };
        let Some(sound) = sound else { return Ok(None) };
        let count = Shapes::from_request(&self.model.sizes, request)?.audio.length;
        let tokens = self.encode_audio(&sound, count)?;
        let stereo = sound.with_channels(2);
        let sound = match media::AAC_RATES.contains(&sound.rate()) {
            true => stereo,
            false => Audio::new(resample(stereo.samples().view(), sound.rate(), FALLBACK_RATE), FALLBACK_RATE)?,
        };
        Ok(Some(GivenSound { sound, tokens }))
    }

    /// Encodes audio to normalised tokens `[1, count, c]`. Pads the audio with silence if it is too short.
    ///
    /// # Errors
    /// Returns an error if the encoder's program cannot be compiled or run.
    pub fn encode_audio(&mut self, sound: &Audio, count: usize) -> Result<Array3<f32>> {
        let latents = self.encode_mel(sound, count)?;
        let mut tokens = pack_audio(latents.view());
        self.model.statistics.audio.normalize(&mut tokens, 2)?;
        Ok(tokens)
    }

    /// Encodes audio to un-normalised latents `[1, channels, count, mel bins]`.
    fn encode_mel(&mut self, sound: &Audio, count: usize) -> Result<Array4<f32>> {
        let c = self.model.configs.audio_vae()?;
        let frames = c.frames_of(count);
        let needed = (samples_for_frames(&c, frames) as u64 * u64::from(sound.rate())).div_ceil(c.sample_rate as u64);
        let sound = sound.with_channels(c.in_channels).span(0.0, sound.len().max(needed as usize));
        let short = || {
            let samples = sound.len();
            PipelineError::Bug(format!(
                "got {samples} audio samples, too few for {frames} mel frames (expected at least {needed})"
            ))
        };
        let mel = log_mel(&c, sound.samples().view(), sound.rate()).filter(|mel| mel.dim().2 >= frames);
        // Drop the mel frames after those that the latents cover; no latent depends on them.
        let mel = mel.ok_or_else(short)?.slice(s![.., .., ..frames, ..]).to_owned();
        let encoded = self.audio_encoder(mel)?.run(&self.executor)?;
        let latents: Array4<f32> = fixed(encoded.tensor("latents")?.into_f32())?;
        Ok(latents.slice(s![.., .., ..count, ..]).to_owned())
    }
}
