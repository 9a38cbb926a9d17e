//! The video track of a file that is read and what its header says of it, as an installed ffmpeg lists them.

use std::path::Path;
use std::process::{Command, Stdio};

use super::decode::{as_file, plain};
use super::error::{Error, Result, tail};

/// Start of a track's line in ffmpeg's list.
const TRACK: &str = "Stream #0:";
/// Part by which pixels may differ from squares: encoders round sizes, and note the difference.
const SQUARE: f64 = 0.01;
/// Names that ffmpeg gives to the transfer functions of HDR, and those that people know.
const HDR: [(&str, &str); 2] = [("smpte2084", "PQ"), ("arib-std-b67", "HLG")];

/// The default video track of a file, else its first one. A cover or a thumbnail is no video.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct VideoTrack {
    /// Number among all tracks of the file.
    pub(super) index: usize,
    is_default: bool,
    /// Width and height of a pixel; `None`: not stated, and taken as a square.
    pixel: Option<[f64; 2]>,
    /// Name of the HDR transfer function; `None`: SDR.
    hdr: Option<&'static str>,
    is_interlaced: bool,
    /// Degrees by which frames are shown turned.
    turned: f64,
    pub(super) timing: Timing,
}

/// What a file's header says of the times of its frames: estimates, to two decimals.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Timing {
    /// Frames a second: on average, and as ffmpeg guesses from the first times.
    pub(super) rates: Vec<f64>,
    /// Seconds to which the container rounds times.
    pub(super) tick: Option<f64>,
}

impl VideoTrack {
    /// The video track of a file that is read; `None` if the file has none. `before` are ffmpeg's arguments before the file.
    ///
    /// # Errors
    /// No ffmpeg; a file that it cannot read, with its own words.
    pub(super) fn of_file(path: &Path, ffmpeg: &Path, before: &[&str]) -> Result<Option<Self>> {
        let mut command = Command::new(ffmpeg);
        command
            .arg("-hide_banner")
            .args(before)
            .arg("-i")
            .arg(as_file(path))
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        // Without an output file ffmpeg prints the list and ends with an error.
        let output = command.output();
        let output = output.map_err(|e| Error::NoDecoder { path: path.to_path_buf(), reason: e.to_string() })?;
        let list = String::from_utf8_lossy(&output.stderr);
        if list.lines().any(|line| line.trim_start().starts_with(TRACK)) {
            return Ok(Self::choose(&list));
        }
        Err(Error::Ffmpeg {
            path: path.to_path_buf(),
            status: output.status.to_string(),
            tail: tail(&plain(&list, path, false)),
        })
    }

    /// The track that is read of those in ffmpeg's list.
    fn choose(list: &str) -> Option<Self> {
        let mut tracks: Vec<VideoTrack> = Vec::new();
        let mut is_own = false;
        for line in list.lines().map(str::trim_start) {
            if line.starts_with(TRACK) {
                let track = VideoTrack::parse(line);
                is_own = track.is_some();
                tracks.extend(track);
            } else if let (true, Some(angle)) = (is_own, line.strip_prefix("displaymatrix: rotation of "))
                && let (Some(track), Some(angle)) = (tracks.last_mut(), angle.split_whitespace().next())
            {
                track.turned = angle.parse().unwrap_or(0.0);
            }
        }
        tracks.iter().find(|track| track.is_default).or(tracks.first()).cloned()
    }

    /// A track of a line such as `Stream #0:0[0x1](und): Video: h264 (High) (avc1 / 0x31637661), yuv420p(tv, bt709, progressive),
    /// 96x64 [SAR 4:3 DAR 2:1], 71 kb/s, 24 fps, 24 tbr, 12288 tbn (default)`; `None`: of another kind, or no video that can be
    /// decoded.
    fn parse(line: &str) -> Option<Self> {
        let (track, form) = line.strip_prefix(TRACK)?.split_once(": Video: ")?;
        if form.starts_with("none") || form.contains("(attached pic)") || form.contains("(timed thumbnails)") {
            return None;
        }
        let digits = track.find(|c: char| !c.is_ascii_digit()).unwrap_or(track.len());
        // The container's ratio follows the codec's and overrules it.
        let pixel = form.rsplit_once("SAR ").and_then(|(_, ratio)| {
            let (width, rest) = ratio.split_once(':')?;
            let height = rest.split(|c: char| !c.is_ascii_digit()).next()?;
            Some([width.parse().ok()?, height.parse().ok()?])
        });
        let number = |unit: &str| {
            let text = form.split(", ").find_map(|part| Some(part.split_once(unit)?.0.trim()))?;
            let (digits, scale) = text.strip_suffix('k').map_or((text, 1.0), |digits| (digits, 1000.0));
            digits.parse::<f64>().ok().map(|number| number * scale).filter(|number| *number > 0.0)
        };
        Some(VideoTrack {
            index: track[..digits].parse().ok()?,
            is_default: form.contains("(default)"),
            pixel: pixel.filter(|sides| sides.iter().all(|side| *side > 0.0)),
            hdr: HDR.iter().find(|(own, _)| form.contains(own)).map(|(_, name)| *name),
            is_interlaced: [" first)", " first,", " first (swapped)"].iter().any(|order| form.contains(order)),
            turned: 0.0,
            timing: Timing {
                rates: [" fps", " tbr"].iter().filter_map(|unit| number(unit)).collect(),
                tick: number(" tbn").map(f64::recip),
            },
        })
    }

    /// Why frames of the track are not read although ffmpeg decodes them, with the cure.
    pub(super) fn fault(&self) -> Option<String> {
        if let Some([width, height]) = self.pixel.filter(|[w, h]| (w / h - 1.0).abs() > SQUARE) {
            return Some(format!(
                "its pixels are not square but {width}:{height}: scale it first, e.g. ffmpeg -i IN -vf \
                 \"scale=trunc(iw*sar/2)*2:ih,setsar=1\" OUT.mp4"
            ));
        }
        if let Some(name) = self.hdr {
            return Some(format!("its colours are HDR ({name}), and models know SDR: {SDR_CURE}"));
        }
        let turns = self.turned / 90.0;
        ((turns - turns.round()).abs() > 0.01).then(|| {
            format!(
                "it is shown turned by {} degrees, which is no quarter turn: turn it first, e.g. ffmpeg -i IN OUT.mp4",
                self.turned
            )
        })
    }

    /// A warning about frames that are read as ffmpeg decodes them but may not be as wanted.
    pub(super) fn warning(&self) -> Option<&'static str> {
        self.is_interlaced.then_some(
            "is interlaced, and both fields of a frame are taken as one image; ffmpeg -i IN -vf bwdif=0 OUT.mp4 deinterlaces it",
        )
    }
}

/// What to do about HDR.
const SDR_CURE: &str = "convert it first, e.g. ffmpeg -i IN -vf zscale=t=linear:npl=100,format=gbrpf32le,zscale=p=bt709,\
                        tonemap=hable,zscale=t=bt709:m=bt709:r=tv,format=yuv420p OUT.mp4";

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn track(form: &str) -> VideoTrack {
        VideoTrack::choose(&format!("  Stream #0:0[0x1](und): Video: {form}\n")).unwrap()
    }

    #[test]
    fn header_is_parsed_from_the_track_line() {
        let plain = track(
            "h264 (High) (avc1 / 0x31637661), yuv420p(tv, bt709, progressive), 96x64 [SAR 1:1 DAR 3:2], 71 kb/s, 23.98 fps, 24 tbr, \
             12288 tbn (default)",
        );
        let timing = Timing { rates: vec![23.98, 24.0], tick: Some(1.0 / 12288.0) };
        assert_eq!(plain, VideoTrack { is_default: true, pixel: Some([1.0, 1.0]), timing, ..VideoTrack::default() });
        assert_eq!((plain.fault(), plain.warning()), (None, None));
        assert_eq!(track("vp8, yuv420p, 96x64, 24 fps, 24 tbr, 1k tbn").timing.tick, Some(0.001));
        for (form, why) in [
            ("mpeg4, yuv420p, 96x64 [SAR 1:1 DAR 3:2], SAR 4:3 DAR 2:1, 24 fps", "4:3: scale it first"),
            ("hevc (Main 10), yuv420p10le(tv, bt2020nc/bt2020/smpte2084), 96x64, 24 fps", "HDR (PQ)"),
            ("hevc (Main 10), yuv420p10le(tv, bt2020nc/bt2020/arib-std-b67), 96x64, 24 fps", "HDR (HLG)"),
            (
                "h264, yuv420p, 96x64\n    Side data:\n      displaymatrix: rotation of -28.65 degrees",
                "turned by -28.65",
            ),
        ] {
            let fault = track(form).fault().unwrap();
            assert!(fault.contains(why) && fault.contains("ffmpeg -i IN"), "{fault}");
        }
        for form in [
            "h264, yuv420p, 96x64 [SAR 255:256 DAR 3:2]\n    Side data:\n      displaymatrix: rotation of -90.00 degrees",
            "vp9 (Profile 0), yuv420p(tv, bt2020nc/bt2020/bt709), 96x64, SAR 0:1 DAR 0:1",
        ] {
            assert_eq!(track(form).fault(), None, "{form}");
        }
        for order in ["tv, top first", "bottom first", "tv, bt709, top coded first (swapped)"] {
            assert!(track(&format!("h264 (High), yuv420p({order}), 96x64")).warning().is_some(), "{order}");
        }
    }

    #[test]
    fn default_track_is_read_and_covers_are_not() {
        let chosen = |tracks: &[(&str, &str)]| {
            let lines = tracks.iter().enumerate();
            let lines =
                lines.map(|(n, (kind, end))| format!("  Stream #0:{n}(eng): {kind}: h264, yuv420p, 96x64{end}\n"));
            VideoTrack::choose(&lines.collect::<String>()).map(|track| track.index)
        };
        assert_eq!(chosen(&[("Audio", " (default)"), ("Video", ""), ("Video", "")]), Some(1));
        assert_eq!(chosen(&[("Video", ""), ("Video", " (default)")]), Some(1));
        assert_eq!(chosen(&[("Video", " (default) (attached pic)"), ("Video", "")]), Some(1));
        assert_eq!(chosen(&[("Video", " (attached pic)"), ("Audio", "")]), None);
        assert_eq!(VideoTrack::choose("a.txt: Invalid data found when processing input"), None);
        assert_eq!(VideoTrack::choose("  Stream #0:0: Video: none, 96x64, 24 fps"), None);
    }

    #[test]
    fn rotation_of_another_track_is_not_taken() {
        let list = "  Stream #0:0: Video: h264, 96x64\n  Stream #0:1: Audio: aac\n      displaymatrix: rotation of 45.00 degrees\n";
        assert_eq!(VideoTrack::choose(list).unwrap().turned, 0.0);
    }
}
