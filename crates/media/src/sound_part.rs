//! The requested part of a file's audio, the decoded part, and the reasons for failures.

use symphonia::core::errors::Error as Reason;

use super::audio::Audio;

/// Accepted sample rates in Hz: the range of recording devices. A header with a rate outside this range is wrong, or
/// was crafted to exhaust memory.
pub(super) const RATES: std::ops::RangeInclusive<u32> = 8000..=384_000;
/// Maximum duration in seconds of the silence at the start of a file. It applies only if the caller requests no end.
pub(super) const MAX_SILENCE: f64 = 600.0;

/// A decoded part of a file's audio.
#[derive(Clone, Debug, PartialEq)]
pub struct SoundPart {
    /// Samples from the requested start; empty if the audio ends earlier.
    pub sound: Audio,
    /// Duration in seconds of the audio that was decoded, including the audio before the requested start.
    pub length: f64,
    /// Reason why a damaged file could be decoded only in part. `None`: everything was decoded.
    pub damage: Option<String>,
}

/// Reason why audio cannot be read.
#[derive(Debug)]
pub(super) enum SoundFault {
    Decoder(Reason),
    /// Sample rate in Hz.
    Rate(u32),
    TooLong,
    /// Duration in seconds of the silence before the first sample.
    LateStart(f64),
    NotFinite,
    /// The decoder's panic message.
    Panic(String),
}

impl From<Reason> for SoundFault {
    fn from(reason: Reason) -> Self {
        SoundFault::Decoder(reason)
    }
}

impl From<String> for SoundFault {
    fn from(words: String) -> Self {
        SoundFault::Panic(words)
    }
}

impl From<std::io::Error> for SoundFault {
    fn from(error: std::io::Error) -> Self {
        SoundFault::Decoder(error.into())
    }
}

impl SoundFault {
    /// Returns the reason if the audio itself is unusable. `None`: another decoder may be able to read the audio.
    pub(super) fn of_sound(&self) -> Option<String> {
        match self {
            SoundFault::Decoder(_) | SoundFault::Panic(_) => None,
            SoundFault::Rate(rate) => Some(format!(
                "the sample rate of {rate} Hz is not supported; convert the sound to a rate from {} to {} Hz",
                RATES.start(),
                RATES.end()
            )),
            SoundFault::TooLong => Some("the sound is too long; use a shorter file".into()),
            SoundFault::LateStart(seconds) => Some(format!(
                "the sound starts after {seconds:.1} s, but at most {MAX_SILENCE} s of silence are accepted; trim the file first, e.g. \
                 ffmpeg -ss SECONDS -i IN OUT.mp4"
            )),
            SoundFault::NotFinite => Some("the file is damaged: some samples are NaN or infinite (non-finite)".into()),
        }
    }

    /// Returns the reason why the built-in decoders cannot read the file.
    pub(super) fn of_decoder(&self) -> String {
        match self {
            SoundFault::Decoder(Reason::Unsupported(what)) => unsupported(what),
            SoundFault::Decoder(reason) => format!("the file is damaged: {reason}"),
            SoundFault::Panic(words) => format!("the file is damaged: the built-in decoder panicked: {words}"),
            other => other.of_sound().unwrap_or_else(|| "the file is damaged".into()),
        }
    }
}

/// Rewrites symphonia's message about an unsupported file, which refers to symphonia's internals.
fn unsupported(what: &str) -> String {
    match what {
        _ if what.contains("probe") || what == "container" => {
            "the built-in decoders do not support the container".into()
        }
        _ if what.contains("codec") || what.contains("aac") => "the built-in decoders do not support the codec".into(),
        _ => format!("the built-in decoders do not support the container, or the file is damaged: {what}"),
    }
}

/// The part of a file's audio that the caller requests, in seconds.
#[derive(Clone, Copy)]
pub(super) struct SoundRange {
    /// Time on the container's timeline from which `start` and `end` count. `None`: the start of the file.
    pub(super) zero: Option<f64>,
    pub(super) start: f64,
    pub(super) end: Option<f64>,
}
