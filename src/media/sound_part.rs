//! The part of a sound that is wanted and read, and why one is not read.

use symphonia::core::errors::Error as Reason;

use super::audio::Audio;

/// Samples a second that a sound may have: what a device records in. Beyond, a header is wrong, or made to cost memory.
pub(super) const RATES: std::ops::RangeInclusive<u32> = 8000..=384_000;
/// Seconds of silence that a file may put in front, where nobody says how much is read.
pub(super) const MOST_SILENCE: f64 = 600.0;
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
    pub(super) fn of_decoder(&self) -> String {
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

/// Part of a sound.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// Second of the container's times from which start and end count; `None`: the start of the file.
    pub(super) zero: Option<f64>,
    pub(super) start: f64,
    pub(super) end: Option<f64>,
}
