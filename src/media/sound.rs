//! Sound files of any rate, number of channels and sample format.
//!
//! The decoders of this binary are a fast path: an installed ffmpeg reads what they do not read, or do not read whole.

use std::fs::File;
use std::path::Path;

use super::audio::Audio;
use super::error::{Error, Result};
use super::sound_builtin::{Doubt, Reading, read_file};
use super::sound_ffmpeg::{Failure, read_by_ffmpeg};
use super::sound_part::{SoundPart, Wanted};
use crate::contained::contained;

/// The sound of a file, to `end` seconds at most, in the file's own rate: mono or stereo as it is, more channels mixed to stereo
/// by ITU-R BS.775. None where the file has no sound.
///
/// WAV, AIFF, CAF, FLAC, MP3, ADTS, MP4, Ogg and Matroska with PCM, ADPCM, FLAC, ALAC, MP1 to 3, AAC-LC or Vorbis are read here;
/// `ffmpeg` (a path, or a name to be found on PATH) reads what is of another kind, and what is not read whole here.
///
/// # Errors
/// A file that is not there, that neither reads, or that needs the ffmpeg that is not there.
pub fn read_sound(path: &Path, ffmpeg: &Path, end: Option<f64>) -> Result<Option<Audio>> {
    Ok(read_sound_from(path, ffmpeg, 0.0, end)?.map(|part| part.sound))
}

/// The same from second `start` on: what is before takes no memory.
///
/// # Errors
/// As [`read_sound`].
pub fn read_sound_from(path: &Path, ffmpeg: &Path, start: f64, end: Option<f64>) -> Result<Option<SoundPart>> {
    read_part(path, ffmpeg, Wanted { zero: None, start, end })
}

/// Part of a file's sound. What is damaged in a file that is read nevertheless is a warning.
///
/// # Errors
/// As [`read_sound`].
pub(super) fn read_part(path: &Path, ffmpeg: &Path, wanted: Wanted) -> Result<Option<SoundPart>> {
    File::open(path).map_err(Error::io("read", path))?;
    let own = contained(|| read_file(path, wanted));
    let unread = |reason: String| Error::Sound { path: path.to_path_buf(), reason };
    let undecoded = |why: String, ffmpeg| Error::Undecoded { path: path.to_path_buf(), why, ffmpeg };
    let (found, why) = match own {
        Ok(Reading { part, doubt: None }) => return Ok(part),
        Ok(Reading { part, doubt: Some(Doubt::Unconfirmed) }) => (Ok(part), None),
        Ok(Reading { part, doubt: Some(Doubt::Contradicted(why)) }) => (Ok(part), Some(why)),
        Err(fault) => match fault.of_sound() {
            Some(reason) => return Err(unread(reason)),
            None => (Err(fault), None),
        },
    };
    let part = match (read_by_ffmpeg(path, ffmpeg, wanted), found) {
        (Err(Failure::Sound(reason)), _) => return Err(unread(reason)),
        (Ok(Some(part)), _) => Some(part),
        (Ok(None), Err(_)) => None,
        (Err(Failure::Missing), Err(fault)) => return Err(undecoded(fault.of_decoder(), None)),
        (Err(Failure::Decoder(words)), Err(fault)) => return Err(undecoded(fault.of_decoder(), Some(words))),
        // What could be read here is all that there is.
        (_, Ok(Some(part))) => Some(SoundPart { damage: why, ..part }),
        (Ok(None), Ok(None)) => None,
        (Err(failure), Ok(None)) => match why {
            Some(why) => return Err(undecoded(format!("damaged: {why}"), failure.words())),
            None => None,
        },
    };
    if let Some(damage) = part.as_ref().and_then(|part| part.damage.as_ref()) {
        tracing::warn!("{}: the sound is damaged, and used as far as it can be decoded: {damage}", path.display());
    }
    Ok(part)
}
