//! Audio decoding with an installed ffmpeg.

use std::path::Path;

use symphonia::core::errors::Error as Reason;
use symphonia::core::formats::probe::Hint;
use symphonia::core::io::ReadOnlySource;

use super::audio::Audio;
use super::decode::{FfmpegOutput, PLAIN_FILES, run};
use super::edit_list::{Edit, mp4_sound};
use super::error::MediaError;
use super::sound_builtin::{MAX_PRIMING, TimingSource, decode};
use super::sound_part::{SoundFault, SoundPart, SoundRange};
use super::track_times::{FfmpegListing, packet_start, sound_start};
use ltx2_base::catch_panic::catch_silently;

/// Reason why ffmpeg returned no audio.
pub(super) enum FfmpegFailure {
    /// ffmpeg cannot be started.
    Missing,
    /// ffmpeg's message, on one line.
    Decoder(String),
    /// The audio itself is unusable, for the given reason.
    Sound(String),
}

impl FfmpegFailure {
    /// Returns ffmpeg's message, or the reason why the audio is unusable; `None` if ffmpeg cannot be started.
    pub(super) fn message(self) -> Option<String> {
        match self {
            FfmpegFailure::Missing => None,
            FfmpegFailure::Decoder(words) | FfmpegFailure::Sound(words) => Some(words),
        }
    }
}

/// Reads audio with ffmpeg. `None`: the file has no audio.
///
/// # Errors
/// Returns an error if ffmpeg is not installed or cannot read the file.
pub(super) fn read_by_ffmpeg(
    path: &Path,
    ffmpeg: &Path,
    wanted: SoundRange,
) -> Result<Option<SoundPart>, FfmpegFailure> {
    let listing = FfmpegListing::read(path, ffmpeg);
    let zero = wanted.zero.unwrap_or_else(|| listing.zero());
    let first = first_sample(path, ffmpeg, wanted, &listing, zero);
    // ffmpeg's `-t` counts from the first packet, which may decode to no samples. The surplus is trimmed afterwards.
    // Without an end, the built-in reader of ffmpeg's output limits the samples and reports it.
    let limit = wanted.end.map(|end| (end + (zero - first.unwrap_or(zero)).max(0.0) + MAX_PRIMING).to_string());
    let track = listing.sound.map_or("0:a:0".into(), |track| format!("0:{track}"));
    let limit = limit.iter().flat_map(|limit| ["-t", limit]);
    let how: Vec<&str> =
        ["-map", &track].into_iter().chain(limit).chain(["-vn", "-f", "wav", "-c:a", "pcm_f32le"]).collect();
    let timed = SoundRange { zero: Some(0.0), ..wanted };
    let place = TimingSource::Piped(Edit::starting_at(first.unwrap_or(zero) - zero));
    let read = |out| catch_silently(|| decode(Box::new(ReadOnlySource::new(out)), &Hint::new(), place, timed));
    let mut made = None;
    let ran = run(path, ffmpeg, &PLAIN_FILES, &how, |out| made = Some(read(out)));
    if let Some(reason) = made.as_ref().and_then(|made| made.as_ref().err()?.of_sound()) {
        return Err(FfmpegFailure::Sound(reason));
    }
    let said = match ran {
        Ok(Some(FfmpegOutput { said, .. })) => said,
        Ok(None) => return Ok(None),
        Err(MediaError::NoDecoder { .. }) => return Err(FfmpegFailure::Missing),
        Err(MediaError::Ffmpeg { tail, .. }) => return Err(FfmpegFailure::Decoder(first_and_last(&tail))),
        Err(error) => return Err(FfmpegFailure::Decoder(error.to_string())),
    };
    let part = match made {
        Some(Ok(reading)) => reading.part.map(|part| SoundPart { sound: until(part.sound, wanted), ..part }),
        // The output consists of a header without samples.
        None | Some(Err(SoundFault::Decoder(Reason::IoError(_)))) => None,
        Some(Err(fault)) => {
            return Err(FfmpegFailure::Decoder(format!("the output of ffmpeg cannot be parsed: {fault:?}")));
        }
    };
    let damage = (!said.is_empty()).then(|| first_and_last(&said));
    if first.is_none() {
        tracing::warn!("{}: ffmpeg does not report when the sound starts; assuming no delay", path.display());
    }
    match (part, damage) {
        (None, Some(damage)) => Err(FfmpegFailure::Decoder(damage)),
        (part, damage) => Ok(part.map(|part| SoundPart { damage, ..part })),
    }
}

/// Returns the time of the first decoded sample in seconds. `None`: ffmpeg does not report it.
fn first_sample(path: &Path, ffmpeg: &Path, wanted: SoundRange, listing: &FfmpegListing, zero: f64) -> Option<f64> {
    // For files with an `iTunSMPB` tag, ffmpeg drops the priming but adds its duration to the start time.
    if mp4_sound(path).ok().flatten().is_some_and(|sound| sound.is_itunes) {
        return Some(0.0);
    }
    let track = listing.sound?;
    let first = sound_start(path, ffmpeg, track)?;
    // If the sound need not be aligned to a video, the decoder's priming delay is not treated as silence.
    let is_late = first > zero && first - zero < MAX_PRIMING;
    let is_priming = || packet_start(path, ffmpeg, track).is_some_and(|packet| packet <= zero + 0.001);
    Some(if wanted.zero.is_none() && is_late && is_priming() { zero } else { first })
}

/// Trims audio to the requested end.
fn until(sound: Audio, wanted: SoundRange) -> Audio {
    let Some(end) = wanted.end else { return sound };
    let most = ((end - wanted.start).max(0.0) * f64::from(sound.rate())).ceil() as usize;
    if sound.len() > most { sound.span(0.0, most) } else { sound }
}

/// Joins the first and the last of ffmpeg's messages into one line.
fn first_and_last(said: &str) -> String {
    if said.contains("not on whitelist") {
        return "the container may refer to other files, or its format is not allowed; convert the file, e.g. ffmpeg -i IN OUT.flac".into();
    }
    let mut lines = said.lines().flat_map(|line| line.split(" | "));
    let first = lines.next().unwrap_or("no message");
    match lines.last() {
        Some(last) if last != first => format!("{first}; {last}"),
        _ => first.into(),
    }
}
