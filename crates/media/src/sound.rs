//! Reads audio files of any sample rate, channel count and sample format.
//!
//! The built-in decoders are a fast path. An installed ffmpeg reads files that they cannot read, or cannot read
//! completely.

use std::fs::File;
use std::path::Path;

use super::audio::Audio;
use super::error::{MediaError, Result, check_rereadable};
use super::sound_builtin::{BuiltinSound, Incompleteness, read_file};
use super::sound_ffmpeg::{FfmpegFailure, read_by_ffmpeg};
use super::sound_part::{SoundPart, SoundRange};
use ltx2_base::catch_panic::catch_silently;

/// Reads the audio of a file up to second `end` (`None`: to its end), at the file's own sample rate. Mono and stereo
/// are kept; more channels are mixed to stereo (ITU-R BS.775). Returns `None` if the file has no audio.
///
/// Built-in decoders read WAV, AIFF, CAF, FLAC, MP3, ADTS, MP4, Ogg and Matroska with PCM, ADPCM, FLAC, ALAC, MP1 to
/// MP3, AAC-LC or Vorbis. `ffmpeg` (a path, or a name that is looked up on PATH) reads other files, and files that the
/// built-in decoders cannot read completely.
///
/// # Errors
/// Returns an error if the file is missing, if neither decoder can read it, or if it needs ffmpeg and ffmpeg is not
/// installed.
pub fn read_sound(path: &Path, ffmpeg: &Path, end: Option<f64>) -> Result<Option<Audio>> {
    Ok(read_sound_from(path, ffmpeg, 0.0, end)?.map(|part| part.sound))
}

/// Reads audio like [`read_sound`], but from second `start`. Earlier samples are not kept in memory.
///
/// # Errors
/// Fails for the same reasons as [`read_sound`].
pub fn read_sound_from(path: &Path, ffmpeg: &Path, start: f64, end: Option<f64>) -> Result<Option<SoundPart>> {
    read_part(path, ffmpeg, SoundRange { zero: None, start, end })
}

/// Reads part of a file's audio. Logs a warning if only part of a damaged file could be decoded.
///
/// # Errors
/// Fails for the same reasons as [`read_sound`].
pub(super) fn read_part(path: &Path, ffmpeg: &Path, wanted: SoundRange) -> Result<Option<SoundPart>> {
    check_rereadable(path)?;
    File::open(path).map_err(MediaError::io("read", path))?;
    let own = catch_silently(|| read_file(path, wanted));
    let unread = |reason: String| MediaError::Sound { path: path.to_path_buf(), reason };
    let undecoded = |why: String, ffmpeg| MediaError::Undecoded { path: path.to_path_buf(), why, ffmpeg };
    let (found, why, ignored_edits) = match own {
        Ok(BuiltinSound { part, incompleteness: None }) => return Ok(part),
        Ok(BuiltinSound { part, incompleteness: Some(Incompleteness::Unconfirmed) }) => (Ok(part), None, None),
        Ok(BuiltinSound { part, incompleteness: Some(Incompleteness::IgnoredEdits(what)) }) => {
            (Ok(part), None, Some(what))
        }
        Ok(BuiltinSound { part, incompleteness: Some(Incompleteness::Contradicted(why)) }) => {
            (Ok(part), Some(why), None)
        }
        Err(fault) => match fault.of_sound() {
            Some(reason) => return Err(unread(reason)),
            None => (Err(fault), None, None),
        },
    };
    let part = match (read_by_ffmpeg(path, ffmpeg, wanted), found) {
        (Err(FfmpegFailure::Sound(reason)), _) => return Err(unread(reason)),
        (Ok(Some(part)), _) => Some(part),
        (Ok(None), Err(_)) => None,
        (Err(FfmpegFailure::Missing), Err(fault)) => return Err(undecoded(fault.of_decoder(), None)),
        (Err(FfmpegFailure::Decoder(words)), Err(fault)) => return Err(undecoded(fault.of_decoder(), Some(words))),
        // ffmpeg did no better than the built-in decoders, so their result is used.
        (_, Ok(Some(part))) => {
            ignored_edits.iter().for_each(|what| tracing::warn!("{}: {what}", path.display()));
            Some(SoundPart { damage: why, ..part })
        }
        (Ok(None), Ok(None)) => None,
        (Err(failure), Ok(None)) => match why {
            Some(why) => return Err(undecoded(format!("the file is damaged: {why}"), failure.message())),
            None => None,
        },
    };
    if let Some(damage) = part.as_ref().and_then(|part| part.damage.as_ref()) {
        tracing::warn!("{}: the sound is damaged; using the part that can be decoded: {damage}", path.display());
    }
    Ok(part)
}
