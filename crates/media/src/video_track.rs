//! Reads the video track to use and its header data from the reports of an installed ffmpeg.

use std::path::Path;
use std::process::{Command, Stdio};

use super::decode::{as_file, plain};
use super::error::{MediaError, Result, no_decoder, tail};

/// Prefix of the lines in ffmpeg's report that describe tracks.
const TRACK: &str = "Stream #0:";
/// Relative tolerance for square pixels. Encoders round frame sizes and record the difference as a pixel aspect ratio.
const SQUARE: f64 = 0.01;
/// ffmpeg's names of HDR transfer functions, each with the common name.
const HDR: [(&str, &str); 2] = [("smpte2084", "PQ"), ("arib-std-b67", "HLG")];

/// The default video track of a file, or else its first video track. Cover images and thumbnails are not video tracks.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct VideoTrack {
    /// Stream index in the file.
    pub(super) index: usize,
    is_default: bool,
    /// Width and height of a pixel. `None`: not stated, treated as square.
    pixel: Option<[f64; 2]>,
    /// Common name of the HDR transfer function. `None`: the track is SDR.
    hdr: Option<&'static str>,
    is_interlaced: bool,
    /// Rotation in degrees that a player applies.
    turned: f64,
    /// Whether the file has an audio track.
    pub(super) has_sound: bool,
    pub(super) timing: Timing,
}

/// Frame timing from a file's header. The rates are estimates, rounded to two decimals.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Timing {
    /// Frame rates: the average, and ffmpeg's guess from the first timestamps.
    pub(super) rates: Vec<f64>,
    /// Tick length of the container in seconds.
    pub(super) tick: Option<f64>,
}

impl VideoTrack {
    /// Finds the video track to read. `None`: the file has no video track. `before`: ffmpeg arguments that precede the
    /// input.
    ///
    /// # Errors
    /// Returns an error if ffmpeg is not installed or cannot read the file; the error contains ffmpeg's message.
    pub(super) fn of_file(path: &Path, ffmpeg: &Path, before: &[&str]) -> Result<Option<Self>> {
        let mut command = Command::new(ffmpeg);
        command
            .arg("-hide_banner")
            .args(before)
            .arg("-i")
            .arg(as_file(path))
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        // Without an output file, ffmpeg prints the list and exits with an error.
        let output = command.output();
        let output = output.map_err(no_decoder(path))?;
        let list = String::from_utf8_lossy(&output.stderr);
        if list.lines().any(|line| line.trim_start().starts_with(TRACK)) {
            return Ok(Self::choose(&list));
        }
        Err(MediaError::Ffmpeg {
            path: path.to_path_buf(),
            status: output.status.to_string(),
            tail: tail(&plain(&list, path, false)),
        })
    }

    /// Selects the track to read from ffmpeg's report.
    fn choose(list: &str) -> Option<Self> {
        let mut tracks: Vec<VideoTrack> = Vec::new();
        let (mut is_own, mut has_sound) = (false, false);
        for line in list.lines().map(str::trim_start) {
            if line.starts_with(TRACK) {
                let track = VideoTrack::parse(line);
                is_own = track.is_some();
                has_sound |= line.split_once(": ").is_some_and(|(_, form)| form.starts_with("Audio: "));
                tracks.extend(track);
            } else if let (true, Some(angle), Some(track)) = (is_own, rotation(line), tracks.last_mut()) {
                track.turned = angle;
            }
        }
        let chosen = tracks.iter().find(|track| track.is_default).or(tracks.first())?;
        Some(VideoTrack { has_sound, ..chosen.clone() })
    }

    /// Parses a line such as `Stream #0:0[0x1](und): Video: h264 (High) (avc1 / 0x31637661), yuv420p(tv, bt709,
    /// progressive), 96x64 [SAR 4:3 DAR 2:1], 71 kb/s, 24 fps, 24 tbr, 12288 tbn (default)`. `None`: the track is not a
    /// video, or ffmpeg cannot decode it.
    fn parse(line: &str) -> Option<Self> {
        let (track, form) = line.strip_prefix(TRACK)?.split_once(": Video: ")?;
        if form.starts_with("none") || form.contains("(attached pic)") || form.contains("(timed thumbnails)") {
            return None;
        }
        let digits = track.find(|c: char| !c.is_ascii_digit()).unwrap_or(track.len());
        // The container's aspect ratio follows that of the codec in the line, and overrides it.
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
            has_sound: false,
            timing: Timing {
                rates: [" fps", " tbr"].iter().filter_map(|unit| number(unit)).collect(),
                tick: number(" tbn").map(f64::recip),
            },
        })
    }

    /// Returns the reason why the models cannot use a video that ffmpeg can decode, and the command that converts it.
    pub(super) fn fault(&self) -> Option<String> {
        if let Some(fault) = self.pixel.and_then(|sides| pixel_fault(sides, "video", "OUT.mp4")) {
            return Some(fault);
        }
        if let Some(name) = self.hdr {
            return Some(format!("the video is HDR ({name}), but the models use SDR; {SDR_ADVICE}"));
        }
        let turns = self.turned / 90.0;
        ((turns - turns.round()).abs() > 0.01).then(|| {
            format!(
                "the video is rotated by {} degrees, not by a multiple of 90; convert it first, e.g. ffmpeg -i IN OUT.mp4",
                self.turned
            )
        })
    }

    /// Returns the reason why the models cannot use an image that ffmpeg can decode, and a remedy.
    pub(super) fn image_fault(&self) -> Option<String> {
        let pixel = self.pixel.and_then(|sides| pixel_fault(sides, "image", "OUT.png"));
        pixel.or(self.hdr.map(|_| HDR_IMAGE.into()))
    }

    /// Returns a warning if the video is interlaced, because each pair of fields is used as one frame.
    pub(super) fn warning(&self) -> Option<&'static str> {
        self.is_interlaced.then_some(
            "is interlaced, and each pair of fields is used as one image; to deinterlace it: ffmpeg -i IN -vf bwdif=0 OUT.mp4",
        )
    }
}

/// Returns an error message if the pixels of a video or an image are not square. `width` and `height` are the side
/// lengths of a pixel.
pub(super) fn pixel_fault([width, height]: [f64; 2], what: &str, output: &str) -> Option<String> {
    ((width / height - 1.0).abs() > SQUARE).then(|| {
        format!(
            "the pixels are not square but {width}:{height}; scale the {what} first, e.g. ffmpeg -i IN -vf \
             \"scale=trunc(iw*sar/2)*2:ih,setsar=1\" {output}"
        )
    })
}

/// Parses the line of a display matrix: `displaymatrix: rotation of -90.00 degrees` in ffmpeg 5, `Display Matrix: …` in
/// later versions.
fn rotation(line: &str) -> Option<f64> {
    let line = line.to_ascii_lowercase();
    let angle = ["displaymatrix", "display matrix"].iter().find_map(|name| line.strip_prefix(name))?;
    angle.strip_prefix(": rotation of ")?.split_whitespace().next()?.parse().ok()
}

/// Error message for an HDR image.
pub(super) const HDR_IMAGE: &str = "the image is HDR, but the models use SDR; export it as SDR, e.g. to PNG";
const SDR_ADVICE: &str = "convert it first, e.g. ffmpeg -i IN -vf zscale=t=linear:npl=100,format=gbrpf32le,zscale=p=bt709,\
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
            ("mpeg4, yuv420p, 96x64 [SAR 1:1 DAR 3:2], SAR 4:3 DAR 2:1, 24 fps", "4:3; scale the video first"),
            ("hevc (Main 10), yuv420p10le(tv, bt2020nc/bt2020/smpte2084), 96x64, 24 fps", "HDR (PQ)"),
            ("hevc (Main 10), yuv420p10le(tv, bt2020nc/bt2020/arib-std-b67), 96x64, 24 fps", "HDR (HLG)"),
            (
                "h264, yuv420p, 96x64\n    Side data:\n      displaymatrix: rotation of -28.65 degrees",
                "rotated by -28.65",
            ),
            (
                "h264, yuv420p, 96x64\n      Side data:\n        Display Matrix: rotation of 45.00 degrees",
                "rotated by 45",
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
    fn default_video_track_is_chosen_and_cover_images_are_ignored() {
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
        let sounds = |kind: &str| {
            let title = "      title           : Stream #0:7: Audio: x";
            VideoTrack::choose(&format!(
                "  Stream #0:0(eng): Video: h264, 96x64\n{title}\n  Stream #0:1[0x2]: {kind}: x\n"
            ))
        };
        assert_eq!(["Audio", "Data"].map(|kind| sounds(kind).unwrap().has_sound), [true, false]);
        assert_eq!(VideoTrack::choose("a.txt: Invalid data found when processing input"), None);
        assert_eq!(VideoTrack::choose("  Stream #0:0: Video: none, 96x64, 24 fps"), None);
    }

    #[test]
    fn rotation_of_other_tracks_is_ignored() {
        let list = "  Stream #0:0: Video: h264, 96x64\n  Stream #0:1: Audio: aac\n      displaymatrix: rotation of 45.00 degrees\n";
        assert_eq!(VideoTrack::choose(list).unwrap().turned, 0.0);
    }
}
