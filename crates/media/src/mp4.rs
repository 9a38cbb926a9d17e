//! Writes complete MP4 files.

use std::path::Path;

use super::audio::Audio;
use super::encoder::{Encoder, choose};
use super::error::{MediaError, Result};
use super::frames::Frames;
use super::options::Mp4Options;
use super::rate::FrameRate;
use super::stream::VideoStream;
use super::{aac, ffmpeg, h264, isobmff};
use ltx2_base::atomic_file;
use ltx2_base::failpoint;

/// Writes `frames` at `fps` frames per second and the optional `audio` as H.264 and AAC. Returns the encoder that was
/// used.
///
/// The sound is trimmed, or padded with silence, to the duration of the video. 4:2:0 video has even sizes, so a frame
/// with an odd size is padded by repeating its last column or row. Missing parent folders are created. If an error
/// occurs, no file is left.
///
/// # Errors
/// Returns an error if the rate or size is invalid, if ffmpeg is requested but not available, or if encoding or writing
/// fails.
pub fn write_mp4(
    path: &Path,
    frames: &Frames,
    fps: f64,
    audio: Option<&Audio>,
    options: &Mp4Options,
) -> Result<Encoder> {
    write_encoded_mp4(path, frames, None, fps, audio, options)
}

/// Writes an MP4 like [`write_mp4`]. If `stream` is set, it must have received all of `frames`; its encoded frames are
/// used, and the sound is encoded while it finishes. If the stream fails, `frames` are encoded again.
///
/// # Errors
/// Fails for the same reasons as [`write_mp4`].
pub fn write_encoded_mp4(
    path: &Path,
    frames: &Frames,
    stream: Option<VideoStream>,
    fps: f64,
    audio: Option<&Audio>,
    options: &Mp4Options,
) -> Result<Encoder> {
    let rate = FrameRate::from_f64(fps)?;
    let audio = audio.map(|a| a.with_length(rate.samples(frames.count(), a.rate())));
    let encoder = if stream.is_some() { Encoder::Embedded } else { choose(options)? };
    tracing::info!(path = %path.display(), %rate, frames = frames.count(), "encoding with {encoder}");
    let (width, height) = (frames.width(), frames.height());
    if width % 2 + height % 2 > 0 {
        tracing::warn!("padding frames of {width}x{height} to even sizes, which H.264 4:2:0 requires");
    }
    match &encoder {
        Encoder::Ffmpeg(_) => {
            let target = atomic_file::temporary_next_to(path, ".mp4")?;
            failpoint::within("encode", atomic_file::name(path), || {
                ffmpeg::encode(target.path(), path, frames, rate, audio.as_ref(), options)
            })?;
            atomic_file::persist(target, path, options.replace)?;
        }
        Encoder::Embedded => {
            let encode = || match stream.and_then(|stream| stream.finish().ok()) {
                Some(encoded) => Ok(encoded.into_track()),
                None => h264::encode(frames, rate, options.crf),
            };
            let (video, sound) = rayon::join(
                || failpoint::within("encode", atomic_file::name(path), encode),
                || audio.as_ref().map(|audio| aac::encode(audio, options.audio_bitrate)).transpose(),
            );
            let (video, sound) = (video?, sound?);
            let tracks: Vec<_> = [&video].into_iter().chain(&sound).collect();
            let mut bytes = Vec::new();
            isobmff::write(&tracks, &mut bytes, MediaError::io("write", path))?;
            atomic_file::write_file(path, &bytes, options.replace)?;
        }
    }
    Ok(encoder)
}

/// Copies the video stream of the file `source` (`count` frames at `fps` frames per second) without re-encoding and
/// replaces its sound. Returns false and writes nothing if ffmpeg is not available or if an MP4 cannot hold the codec.
///
/// # Errors
/// Returns an error if the file cannot be written, or if ffmpeg is requested but not available.
pub fn copy_video_with_audio(
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
    let audio = audio.with_length(FrameRate::from_f64(fps)?.samples(count, audio.rate()));
    let target = atomic_file::temporary_next_to(path, ".mp4")?;
    if let Err(error) = ffmpeg::copy_frames(target.path(), path, source, &audio, options) {
        tracing::warn!("re-encoding the frames, as the video stream cannot be copied: {error}");
        return Ok(false);
    }
    atomic_file::persist(target, path, options.replace)?;
    Ok(true)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
