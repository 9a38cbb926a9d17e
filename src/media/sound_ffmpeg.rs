//! Sound by an installed ffmpeg.

use std::path::Path;

use symphonia::core::errors::Error as Reason;
use symphonia::core::formats::probe::Hint;
use symphonia::core::io::ReadOnlySource;

use super::audio::Audio;
use super::decode::{Output, PLAIN_FILES, run};
use super::edit_list::{Edit, mp4_sound};
use super::error::Error;
use super::sound_builtin::{MOST_PRIMING, Place, decode};
use super::sound_part::{Fault, SoundPart, Wanted};
use super::track_times::{Listing, packet_start, sound_start};
use crate::contained::contained;

/// Seconds that ffmpeg decodes where nobody says how much is read.
const MOST_SECONDS: f64 = 3600.0;

/// Why ffmpeg gives no sound.
pub(super) enum Failure {
    /// It does not start.
    Missing,
    /// Its words, on one line.
    Decoder(String),
    /// What is wrong with the sound itself.
    Sound(String),
}

impl Failure {
    /// Its words; `None`: it does not start.
    pub(super) fn words(self) -> Option<String> {
        match self {
            Failure::Missing => None,
            Failure::Decoder(words) | Failure::Sound(words) => Some(words),
        }
    }
}

/// Reads a sound by ffmpeg; `None` where the file has none.
///
/// # Errors
/// No ffmpeg; a file that it does not read.
pub(super) fn read_by_ffmpeg(path: &Path, ffmpeg: &Path, wanted: Wanted) -> Result<Option<SoundPart>, Failure> {
    let listing = Listing::read(path, ffmpeg);
    let zero = wanted.zero.unwrap_or_else(|| listing.zero());
    let first = first_sample(path, ffmpeg, wanted, &listing, zero);
    // ffmpeg counts from the first packet, from which a decoder may make no sample; what is more is left out behind.
    let limit = wanted.end.unwrap_or(MOST_SECONDS) + (zero - first.unwrap_or(zero)).max(0.0) + MOST_PRIMING;
    let limit = limit.to_string();
    let track = listing.sound.map_or("0:a:0".into(), |track| format!("0:{track}"));
    let how = ["-map", &track, "-t", &limit, "-vn", "-f", "wav", "-c:a", "pcm_f32le"];
    let timed = Wanted { zero: Some(0.0), ..wanted };
    let place = Place::Piped(Edit::starting_at(first.unwrap_or(zero) - zero));
    let read = |out| contained(|| decode(Box::new(ReadOnlySource::new(out)), &Hint::new(), place, timed));
    let mut made = None;
    let ran = run(path, ffmpeg, &PLAIN_FILES, &how, |out| made = Some(read(out)));
    if let Some(reason) = made.as_ref().and_then(|made| made.as_ref().err()?.of_sound()) {
        return Err(Failure::Sound(reason));
    }
    let said = match ran {
        Ok(Some(Output { said, .. })) => said,
        Ok(None) => return Ok(None),
        Err(Error::NoDecoder { .. }) => return Err(Failure::Missing),
        Err(Error::Ffmpeg { tail, .. }) => return Err(Failure::Decoder(first_and_last(&tail))),
        Err(error) => return Err(Failure::Decoder(error.to_string())),
    };
    let part = match made {
        Some(Ok(reading)) => reading.part.map(|part| SoundPart { sound: until(part.sound, wanted), ..part }),
        // A header alone.
        None | Some(Err(Fault::Decoder(Reason::IoError(_)))) => None,
        Some(Err(fault)) => return Err(Failure::Decoder(format!("its output cannot be read: {fault:?}"))),
    };
    let damage = (!said.is_empty()).then(|| first_and_last(&said));
    if first.is_none() {
        tracing::warn!("{}: ffmpeg does not say when its sound starts: it is taken to start at once", path.display());
    }
    match (part, damage) {
        (None, Some(damage)) => Err(Failure::Decoder(damage)),
        (part, damage) => Ok(part.map(|part| SoundPart { damage, ..part })),
    }
}

/// Second of the first decoded sample; `None` where ffmpeg does not say.
fn first_sample(path: &Path, ffmpeg: &Path, wanted: Wanted, listing: &Listing, zero: f64) -> Option<f64> {
    // ffmpeg counts the priming of such a file, which it leaves out, as time in front.
    if mp4_sound(path).ok().flatten().is_some_and(|sound| sound.is_itunes) {
        return Some(0.0);
    }
    let track = listing.sound?;
    let first = sound_start(path, ffmpeg, track)?;
    // Time that a decoder takes to start is no silence, where nothing else is shown beside the sound.
    let is_late = first > zero && first - zero < MOST_PRIMING;
    let is_priming = || packet_start(path, ffmpeg, track).is_some_and(|packet| packet <= zero + 0.001);
    Some(if wanted.zero.is_none() && is_late && is_priming() { zero } else { first })
}

/// A sound as far as it is wanted.
fn until(sound: Audio, wanted: Wanted) -> Audio {
    let Some(end) = wanted.end else { return sound };
    let most = ((end - wanted.start).max(0.0) * f64::from(sound.rate())).ceil() as usize;
    if sound.len() > most { sound.span(0.0, most) } else { sound }
}

/// The first and the last line of what ffmpeg says, on one line.
fn first_and_last(said: &str) -> String {
    if said.contains("not on whitelist") {
        return "its container may name other files, or is not among those that are given to ffmpeg; convert it, e.g. ffmpeg -i IN OUT.flac".into();
    }
    let mut lines = said.lines().flat_map(|line| line.split(" | "));
    let first = lines.next().unwrap_or("it said nothing");
    match lines.last() {
        Some(last) if last != first => format!("{first}; {last}"),
        _ => first.into(),
    }
}
