//! Sound files of any rate, number of channels and sample format.
//!
//! The decoders of this binary are a fast path: an installed ffmpeg reads what they do not read, or do not read whole.

use std::fs::File;
use std::path::Path;

use symphonia::core::errors::Error as Reason;

use super::audio::Audio;
use super::error::{Error, Result};
use super::sound_builtin::{Doubt, MOST_SILENCE, RATES, Reading, read_file};
use super::sound_ffmpeg::{Failure, read_by_ffmpeg};
use crate::contained::contained;

/// The part of a file's sound from a second on.
#[derive(Clone, Debug, PartialEq)]
pub struct SoundPart {
    /// Samples behind the start; none where the sound ends before.
    pub sound: Audio,
    /// Seconds of the sound as far as it was read, those before the start among them.
    pub length: f64,
    /// What is wrong with a file that could be decoded in part. `None`: all of it was decoded.
    pub damage: Option<String>,
}

/// Why a sound is not read.
#[derive(Debug)]
pub(super) enum Fault {
    Decoder(Reason),
    /// Samples a second.
    Rate(u32),
    Long,
    /// Seconds of silence in front.
    Late(f64),
    NotFinite,
    /// The decoder's words.
    Panic(String),
}

impl From<Reason> for Fault {
    fn from(reason: Reason) -> Self {
        Fault::Decoder(reason)
    }
}

impl From<String> for Fault {
    fn from(words: String) -> Self {
        Fault::Panic(words)
    }
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        Fault::Decoder(error.into())
    }
}

impl Fault {
    /// What is wrong with the sound, whatever decodes it. `None`: another decoder may read it.
    pub(super) fn of_sound(&self) -> Option<String> {
        match self {
            Fault::Decoder(_) | Fault::Panic(_) => None,
            Fault::Rate(rate) => {
                Some(format!("{rate} samples a second; a sound has {} to {}", RATES.start(), RATES.end()))
            }
            Fault::Long => Some("is too long; give a shorter one".into()),
            Fault::Late(seconds) => Some(format!(
                "its sound starts after {seconds:.1} s, and {MOST_SILENCE} s of silence are the most: cut it first, e.g. \
                 ffmpeg -ss SECONDS -i IN OUT.mp4"
            )),
            Fault::NotFinite => Some("damaged: it holds samples that are no numbers".into()),
        }
    }

    /// Why the decoders of this binary do not read it.
    fn of_decoder(&self) -> String {
        match self {
            Fault::Decoder(Reason::Unsupported(what)) => unsupported(what),
            Fault::Decoder(reason) => format!("damaged: {reason}"),
            Fault::Panic(words) => format!("damaged: its decoder panicked: {words}"),
            other => other.of_sound().unwrap_or_else(|| "damaged".into()),
        }
    }
}

/// What is not supported, by the reader's words, which name parts of the reader.
fn unsupported(what: &str) -> String {
    match what {
        _ if what.contains("probe") || what == "container" => "its container is not supported here".into(),
        _ if what.contains("codec") || what.contains("aac") => "its codec is not supported here".into(),
        _ => format!("its container is not supported here, or is damaged: {what}"),
    }
}

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

/// Part of a sound.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// Second of the container's times from which start and end count; `None`: the start of the file.
    pub(super) zero: Option<f64>,
    pub(super) start: f64,
    pub(super) end: Option<f64>,
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
