//! MP4 files: how long, and whole or not at all.

use std::path::Path;

use super::audio::Audio;
use super::encoder::{Encoder, choose};
use super::error::{Error, Result};
use super::frames::Frames;
use super::options::Mp4Options;
use super::rate::FrameRate;
use super::stream::EncodedVideo;
use super::{aac, atomic, ffmpeg, h264, isobmff};
use crate::failpoint;

/// Writes `frames` at `fps` frames a second, with `audio` if there is any, as H.264 and AAC; returns who encoded.
///
/// The sound is trimmed or padded with silence to the length of the video. Frames of odd size get their last column or
/// row twice, because 4:2:0 video has none. Parents are created, and on an error nothing is left behind.
pub fn write_mp4(
    path: &Path,
    frames: &Frames,
    fps: f64,
    audio: Option<&Audio>,
    options: &Mp4Options,
) -> Result<Encoder> {
    write_encoded_mp4(path, frames, None, fps, audio, options)
}

/// The same with frames that may have been encoded while they were made.
///
/// # Errors
/// As [`write_mp4`].
pub fn write_encoded_mp4(
    path: &Path,
    frames: &Frames,
    encoded: Option<&EncodedVideo>,
    fps: f64,
    audio: Option<&Audio>,
    options: &Mp4Options,
) -> Result<Encoder> {
    let rate = FrameRate::from_f64(fps)?;
    let audio = audio.map(|a| a.fitted(rate.samples(frames.count(), a.rate())));
    let encoder = if encoded.is_some() { Encoder::Embedded } else { choose(options)? };
    tracing::info!(path = %path.display(), %rate, frames = frames.count(), "encoding with {encoder}");
    let (width, height) = (frames.width(), frames.height());
    if width % 2 + height % 2 > 0 {
        tracing::warn!("frames of {width}x{height} are padded to even sizes: H.264 4:2:0 has no odd ones");
    }
    match &encoder {
        Encoder::Ffmpeg(_) => {
            let target = atomic::beside(path, ".mp4")?;
            failpoint::within("encode", atomic::name(path), || {
                ffmpeg::encode(target.path(), path, frames, rate, audio.as_ref(), options)
            })?;
            atomic::persist(target, path, options.replace)?;
        }
        Encoder::Embedded => {
            let encode = || match encoded {
                Some(_) => Ok(None),
                None => h264::encode(frames, rate, options.crf).map(Some),
            };
            let (video, sound) = rayon::join(
                || failpoint::within("encode", atomic::name(path), encode),
                || audio.as_ref().map(|audio| aac::encode(audio, options.audio_bitrate)).transpose(),
            );
            let (video, sound) = (video?, sound?);
            let tracks: Vec<_> =
                video.as_ref().or(encoded.map(EncodedVideo::track)).into_iter().chain(&sound).collect();
            let mut bytes = Vec::new();
            isobmff::write(&tracks, &mut bytes, Error::io("write", path))?;
            atomic::write_file(path, &bytes, options.replace)?;
        }
    }
    Ok(encoder)
}

/// Writes the video stream of the file `source`, `count` frames at `fps` a second, as it is stored there, with other sound.
/// False where nothing is written: without ffmpeg, and of a codec that an MP4 does not hold.
///
/// # Errors
/// A file that cannot be written; ffmpeg that is asked for and not there.
pub fn write_frames_of(
    path: &Path,
    source: &Path,
    count: usize,
    fps: f64,
    audio: &Audio,
    options: &Mp4Options,
) -> Result<bool> {
    if !source.is_file() || !matches!(choose(options)?, Encoder::Ffmpeg(_)) {
        return Ok(false);
    }
    let audio = audio.fitted(FrameRate::from_f64(fps)?.samples(count, audio.rate()));
    let target = atomic::beside(path, ".mp4")?;
    if let Err(error) = ffmpeg::copy_frames(target.path(), path, source, &audio, options) {
        tracing::warn!("the frames are encoded anew: {error}");
        return Ok(false);
    }
    atomic::persist(target, path, options.replace)?;
    Ok(true)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
