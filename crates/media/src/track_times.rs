//! Reads a file's tracks and their start times from the reports of an installed ffmpeg.

use std::path::Path;
use std::process::{Command, Stdio};

use super::decode::{PLAIN_FILES, as_file, decoded};
use super::edit_list::zero_of;
use super::error::Result;

/// Containers whose times count from the start time of the first stream. In some, times have no fixed origin; in
/// others, writers shift all times by the B-frame delay; for MP3, ffmpeg adds the priming to the times.
const RELATIVE_TIME_FORMATS: [&str; 6] = ["flv", "live_flv", "mp3", "mpeg", "mpegts", "mpegtsraw"];

/// ffmpeg's report about a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct FfmpegListing {
    /// ffmpeg's names for the container, separated by commas.
    format: String,
    /// Start time in seconds of the earliest track.
    pub(super) start: f64,
    /// Stream index of the audio track to decode: the first default one, or else the first.
    pub(super) sound: Option<usize>,
}

impl FfmpegListing {
    /// Lists the tracks of a file. The list is empty if ffmpeg cannot read the file.
    pub(super) fn read(path: &Path, ffmpeg: &Path) -> Self {
        let mut command = Command::new(ffmpeg);
        command.arg("-hide_banner").args(PLAIN_FILES).arg("-i").arg(as_file(path)).stdin(Stdio::null());
        // Without an output file, ffmpeg prints the list and exits with an error.
        command
            .output()
            .map(|output| Self::parse(&String::from_utf8_lossy(&output.stderr)))
            .unwrap_or_else(|_| Self::default())
    }

    fn parse(text: &str) -> Self {
        let mut listing = FfmpegListing::default();
        let mut sounds: Vec<(usize, bool)> = Vec::new();
        for line in text.lines() {
            if let Some(format) = line.strip_prefix("Input #0, ").and_then(|line| line.split_once(", from ")) {
                listing.format = format.0.into();
            }
            let start = line.strip_prefix("  Duration: ").and_then(|line| line.split(", start: ").nth(1));
            if let Some(start) = start.and_then(|start| start.split(',').next()?.trim().parse().ok()) {
                listing.start = start;
            }
            sounds.extend(sound_track(line));
        }
        sounds.sort_unstable();
        let default = sounds.iter().find(|(_, is_default)| *is_default);
        listing.sound = default.or(sounds.first()).map(|(track, _)| *track);
        listing
    }

    /// Returns the start of the file in seconds, on the timeline of its tracks. It is negative if a track starts before
    /// second 0, so that the samples before second 0 are kept.
    pub(super) fn zero(&self) -> f64 {
        let counts_from_first = self.format.split(',').any(|name| RELATIVE_TIME_FORMATS.contains(&name));
        if counts_from_first || self.start < 0.0 { self.start } else { zero_of(self.start) }
    }
}

/// Parses a line such as `  Stream #0:1[0x101](eng): Audio: aac (LC), 48000 Hz, stereo, fltp (default)`. Returns the
/// stream index of an audio track that ffmpeg can decode, and whether it is the default track.
fn sound_track(line: &str) -> Option<(usize, bool)> {
    let line = line.trim_start().strip_prefix("Stream #0:")?;
    let (track, form) = line.split_once(": Audio: ")?;
    let digits = track.find(|c: char| !c.is_ascii_digit()).unwrap_or(track.len());
    let is_known = !form.starts_with("none");
    is_known.then_some((track[..digits].parse().ok()?, form.contains("(default)")))
}

/// Returns the time in seconds of the first frame of a video track. `None`: ffmpeg does not report it.
pub(super) fn video_start(path: &Path, ffmpeg: &Path, track: usize) -> Option<f64> {
    // Frames keep their own times, in ticks that are much shorter than a frame.
    let track = format!("0:{track}");
    let how = ["-map", &track, "-frames:v", "1", "-fps_mode", "passthrough", "-enc_time_base", "1/90000"];
    first_time(decoded(path, ffmpeg, &["-copyts"], &[&how[..], &["-f", "framecrc"]].concat()))
}

/// Returns the time in seconds of the first decoded sample of a track. `None`: ffmpeg does not report it.
pub(super) fn sound_start(path: &Path, ffmpeg: &Path, track: usize) -> Option<f64> {
    start_of(path, ffmpeg, track, "pcm_f32le")
}

/// Returns the time in seconds of a track's first packet, which may decode to no samples. `None`: ffmpeg does not
/// report it.
pub(super) fn packet_start(path: &Path, ffmpeg: &Path, track: usize) -> Option<f64> {
    start_of(path, ffmpeg, track, "copy")
}

fn start_of(path: &Path, ffmpeg: &Path, track: usize, codec: &str) -> Option<f64> {
    let track = format!("0:{track}");
    let how = ["-map", &track, "-frames:a", "1", "-c:a", codec, "-f", "framecrc"];
    first_time(decoded(path, ffmpeg, &[&PLAIN_FILES[..], &["-copyts"]].concat(), &how))
}

/// Parses the time of the first row of a `framecrc` list. The third column has the time in ticks; the line `#tb 0:
/// 1/90000` states the length of a tick in seconds.
fn first_time(list: Result<Option<Vec<u8>>>) -> Option<f64> {
    let list = String::from_utf8(list.ok()??).ok()?;
    let base = list.lines().find_map(|line| line.strip_prefix("#tb 0:")).and_then(|base| base.trim().split_once('/'));
    let (num, den): (f64, f64) = base.and_then(|(num, den)| Some((num.parse().ok()?, den.parse().ok()?)))?;
    let ticks = list.lines().find(|line| !line.starts_with('#'))?.split(',').nth(2)?.trim().parse::<f64>().ok()?;
    let seconds = ticks * num / den;
    seconds.is_finite().then_some(seconds)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn default_audio_track_is_preferred_to_first() {
        let of = |format: &str, flags: [&str; 2]| {
            FfmpegListing::parse(&format!(
                "Input #0, {format}, from 'a, from b.mkv':\n  Duration: 00:00:02.00, start: 1.400000, bitrate: 9 kb/s\n\
                 \x20 Stream #0:0[0x1](und): Video: h264 (High), yuv420p, 64x64, 24 fps (default)\n\
                 \x20 Stream #0:3(eng): Audio: aac (LC) (mp4a / 0x6134706D), 48000 Hz, stereo, fltp{}\n    Metadata:\n\
                 \x20     title           : Stream #0:7: Audio: x (default)\n\
                 \x20 Stream #0:1(ger): Audio: aac (LC), 48000 Hz, 5.1, fltp{}\n\
                 \x20 Stream #0:4: Audio: none, 48000 Hz (default)\n",
                flags[0], flags[1]
            ))
        };
        assert_eq!(of("matroska,webm", ["", ""]).sound, Some(1));
        assert_eq!(of("matroska,webm", [" (default)", ""]).sound, Some(3));
        assert_eq!(of("matroska,webm", [" (default)", " (default)"]).sound, Some(1));
        assert_eq!([of("mpegts", ["", ""]), of("matroska,webm", ["", ""])].map(|list| list.zero()), [1.4, 0.0]);
        assert_eq!(FfmpegListing::parse("a.txt: Invalid data found when processing input"), FfmpegListing::default());
    }

    #[test]
    fn first_time_uses_tick_length_of_list() {
        let list =
            |rows: &str| Ok(Some(format!("#software: x\n#tb 0: 1/90000\n#media_type 0: video\n{rows}").into_bytes()));
        assert_eq!(
            first_time(list("0,  133500,  133500, 3750, 12288, 0xc5\n0, 1, 1, 1, 1, 0\n")),
            Some(133_500.0 / 90_000.0)
        );
        assert_eq!(first_time(list("0,  -900,  -900, 3750, 12288, 0xc5\n")), Some(-0.01));
        assert_eq!((first_time(list("")), first_time(Ok(None))), (None, None));
    }
}
