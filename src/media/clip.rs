//! Videos to go on from: a file, by an installed ffmpeg, or a folder of PNG frames.
//!
//! Frames are taken as they are stored: in stream order, none dropped or repeated, not turned by the container's rotation.

use std::path::Path;

use ndarray::{Array5, Axis};
use rayon::prelude::*;

use super::audio::Audio;
use super::decode::{decoded_by, decoded_up_to, pixmaps};
use super::error::{Error, Result};
use super::frames::Frames;
use super::image_file::covering;
use super::png::{png_size, read_first_png_frames};
use super::rate::FrameRate;
use super::sound::{Wanted, read_part};
use super::tables::{self, Tables};
use super::track_times::video_start;
use crate::host;

/// Frames of a video and its sound, where it has one.
#[derive(Clone, Debug, PartialEq)]
pub struct Clip {
    pub frames: Frames,
    pub sound: Option<Audio>,
}

impl Clip {
    /// Part of a video file, or of a folder of PNG frames, which has no sound. Its sound starts with the first frame: what is
    /// heard before is left out, and silence is in front of sound that starts later.
    ///
    /// # Errors
    /// As [`read_clip`]; sound that cannot be read.
    pub fn read(path: &Path, ffmpeg: &Path, wanted: ClipPart) -> Result<Self> {
        let frames = read_frames(path, ffmpeg, wanted.frames, most_bytes())?;
        let is_heard = !path.is_dir() && wanted.seconds != Some(0.0);
        let sound = if is_heard { sound_of_frames(path, ffmpeg, wanted.seconds)? } else { None };
        Ok(Clip { frames, sound: sound.filter(|sound| !sound.is_empty()) })
    }
}

/// The sound of a video from its first frame on, to `seconds` at most.
fn sound_of_frames(path: &Path, ffmpeg: &Path, seconds: Option<f64>) -> Result<Option<Audio>> {
    let zero = video_start(path, ffmpeg);
    let part = read_part(path, ffmpeg, Wanted { zero, start: 0.0, end: seconds })?;
    if part.is_some() && zero.is_none() {
        let path = path.display();
        tracing::warn!(
            "{path}: ffmpeg does not say when its first frame is shown: its sound is taken from the file's start"
        );
    }
    Ok(part.map(|part| part.sound))
}

/// The part of a video that is wanted of it, from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ClipPart {
    /// Number of frames at most; all without.
    pub frames: Option<usize>,
    /// Seconds of sound at most; all without, none at 0.
    pub seconds: Option<f64>,
}

/// Size and frame rate of a video.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipInfo {
    pub width: usize,
    pub height: usize,
    /// Number of frames.
    pub frames: usize,
    /// Frames a second; none of a folder of frames, which says nothing of it.
    pub frame_rate: Option<f64>,
    /// Degrees clockwise by which the file has its frames turned where they are shown. They are taken as they are stored.
    pub turned: usize,
}

impl ClipInfo {
    /// Warning about frames that are stored sideways, with its cure; none of others.
    pub(crate) fn turned_fault(&self, path: &str) -> Option<String> {
        let ClipInfo { width, height, turned, .. } = self;
        (*turned != 0).then(|| {
            format!(
                "{path}: is shown turned by {turned} degrees, and frames are taken as they are stored, {width}x{height}: turn them \
                 first, e.g. ffmpeg -i IN OUT.mp4"
            )
        })
    }
}

/// Tables of an MP4; none of a folder, and of a file that has to be decoded for them.
fn told(path: &Path) -> Result<Option<Tables>> {
    if path.is_dir() {
        return Ok(None);
    }
    tables::of_file(path).map_err(Error::io("read", path))
}

/// Size, frames and rate of a video file or of a folder of PNG frames. An MP4's are in its header; of other files `ffmpeg`, a path
/// or a name to be found on PATH, decodes them.
///
/// # Errors
/// No such file; no ffmpeg; a damaged file, with ffmpeg's words; frames at no constant rate.
pub fn probe_clip(path: &Path, ffmpeg: &Path) -> Result<ClipInfo> {
    if path.is_dir() {
        let (frames, width, height) = png_size(path)?;
        return Ok(ClipInfo { width, height, frames, frame_rate: None, turned: 0 });
    }
    if let Some(info) = probe_mp4(path)? {
        return Ok(info);
    }
    let turned = tables::turned(path).map_err(Error::io("read", path))?;
    let text = decoded_by(path, ffmpeg, &BEFORE, &[&FRAMES[..], &["-f", "framecrc"]].concat())?;
    let text = text.ok_or_else(|| unusable(path, "it has no video stream"))?;
    Ok(ClipInfo { turned, ..listed(path, &String::from_utf8_lossy(&text))? })
}

/// Size, frames and rate of an MP4 by its header; none of any other file, whatever ffmpeg could make of it.
///
/// # Errors
/// No such file; frames at no constant rate.
pub(crate) fn probe_mp4(path: &Path) -> Result<Option<ClipInfo>> {
    let Some(Tables { width, height, times, timescale }) = told(path)? else { return Ok(None) };
    let frame_rate = Some(rate_of(path, &times, 1, timescale)?);
    let turned = tables::turned(path).map_err(Error::io("read", path))?;
    Ok(Some(ClipInfo { width, height, frames: times.len(), frame_rate, turned }))
}

/// Arguments before a file: a damaged packet ends the run.
const BEFORE: [&str; 2] = ["-xerror", "-noautorotate"];
/// Arguments behind it: every frame of its first video stream.
const FRAMES: [&str; 4] = ["-map", "0:v:0", "-fps_mode", "passthrough"];

/// The frames of a video file or of a folder of PNG frames.
///
/// # Errors
/// As [`probe_clip`]; more frames than this host has memory for.
pub fn read_clip(path: &Path, ffmpeg: &Path) -> Result<Frames> {
    read_frames(path, ffmpeg, None, most_bytes())
}

/// The first frames of a video file or of a folder of PNG frames: `most`, or all where it has fewer.
///
/// # Errors
/// As [`read_clip`].
pub fn read_first_frames(path: &Path, ffmpeg: &Path, most: usize) -> Result<Frames> {
    read_frames(path, ffmpeg, Some(most), most_bytes())
}

/// Bytes of frames that this host can hold: they are there up to four times, given, scaled, made and joined.
fn most_bytes() -> u64 {
    host::free_memory().map_or(u64::MAX, |free| free / 4)
}

/// Refuses frames of more than `limit` bytes.
fn check_size(path: &Path, frames: usize, width: usize, height: usize, limit: u64) -> Result<()> {
    let bytes = [frames, width, height].iter().fold(3u64, |all, n| all.saturating_mul(*n as u64));
    if bytes <= limit {
        return Ok(());
    }
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let why = format!(
        "{frames} frames of {width}x{height} are {:.1} GiB, and this host has room for {:.1}: give a shorter part of it, e.g. \
         ffmpeg -t SECONDS -i IN OUT.mp4",
        gib(bytes),
        gib(limit)
    );
    Err(unusable(path, &why))
}

/// Frames, no more than `most` and of no more than so many bytes. Of an MP4 that is cut short ffmpeg gives what is there: its header
/// tells what there should be.
fn read_frames(path: &Path, ffmpeg: &Path, most: Option<usize>, bytes: u64) -> Result<Frames> {
    let most_frames = most.unwrap_or(usize::MAX);
    if path.is_dir() {
        let (frames, width, height) = png_size(path)?;
        check_size(path, frames.min(most_frames), width, height, bytes)?;
        return read_first_png_frames(path, most_frames);
    }
    std::fs::metadata(path).map_err(Error::io("read", path))?;
    let limit = most.map(|most| ["-frames:v".to_string(), most.to_string()]);
    let limit: Vec<&str> = limit.iter().flatten().map(String::as_str).collect();
    let format = ["-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24"];
    // What is decoded may be larger than the header tells: memory goes by the header, and some blocks at the edges.
    let told = told(path)?;
    if let Some(told) = &told {
        check_size(path, told.times.len().min(most_frames), told.width, told.height, bytes)?;
    }
    let pixels = told.as_ref().map(|told| ((told.width + 64) * (told.height + 64)).to_string());
    let before: Vec<&str> = pixels.iter().flat_map(|pixels| ["-max_pixels", pixels]).chain(BEFORE).collect();
    let pixmap = decoded_up_to(path, ffmpeg, &before, &[&FRAMES[..], &limit, &format].concat(), bytes)?;
    let frames = pixmap.and_then(|bytes| pixmaps(&bytes));
    let frames = frames.ok_or_else(|| unusable(path, "it has no video stream of one frame size"))?;
    let Some(told) = told else { return Ok(frames) };
    let all = told.times.len().min(most_frames);
    let (width, height, count) = (frames.width(), frames.height(), frames.count());
    if (width, height, count) == (told.width, told.height, all) {
        return Ok(frames);
    }
    let why = format!(
        "its header tells of {all} frames of {}x{}, {count} of {width}x{height} are decoded: if it is whole, convert it first, e.g. \
         ffmpeg -i IN OUT.mp4",
        told.width, told.height
    );
    Err(unusable(path, &why))
}

fn unusable(path: &Path, reason: &str) -> Error {
    Error::Clip { path: path.to_path_buf(), reason: reason.into() }
}

/// ffmpeg's list of frames: `#tb 0: 1/24`, `#dimensions 0: 96x64`, then a line a frame whose third number is its time.
fn listed(path: &Path, text: &str) -> Result<ClipInfo> {
    let header = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
    let pair = |text: &str, between: char| {
        let (a, b) = text.split_once(between)?;
        Some((a.trim().parse::<usize>().ok()?, b.trim().parse::<usize>().ok()?))
    };
    let time = |line: &str| line.split(',').nth(2)?.trim().parse::<i64>().ok();
    let times: Option<Vec<i64>> = text.lines().filter(|line| !line.starts_with('#')).map(time).collect();
    let parsed = header("#dimensions 0:").and_then(|text| pair(text, 'x'));
    let base = header("#tb 0:").and_then(|text| pair(text, '/'));
    let (Some((width, height)), Some((num, den)), Some(times)) = (parsed, base, times) else {
        return Err(unusable(path, "ffmpeg's list of its frames cannot be read"));
    };
    let frame_rate = Some(rate_of(path, &times, num, den)?);
    Ok(ClipInfo { width, height, frames: times.len(), frame_rate, turned: 0 })
}

/// Frames a second, of frames at these times in ticks of `num / den` seconds.
///
/// # Errors
/// Fewer than two frames; a rate that varies.
fn rate_of(path: &Path, times: &[i64], num: usize, den: usize) -> Result<f64> {
    let [first, .., last] = *times else {
        return Err(unusable(path, "it has fewer than two frames; give an image to --image instead"));
    };
    let each = (last - first) as f64 / (times.len() - 1) as f64;
    // Containers with ticks that are no part of a frame round times to them, and times that come from another one are whole
    // milliseconds; others hold each frame's exactly. A quarter of a frame is less than one that is missing.
    let millisecond = den as f64 / (num as f64 * 1000.0);
    let rounding = if each < 4.0 { 0.01 } else { millisecond.min(each / 4.0).max(1.0) };
    let off = |(i, time): (usize, &i64)| ((time - first) as f64 - i as f64 * each).abs() > rounding;
    if each <= 0.0 || times.iter().enumerate().any(off) {
        let why = "its frame rate varies, and frames are not resampled: make it constant first, e.g. \
                   ffmpeg -i IN -vf fps=24 OUT.mp4";
        return Err(unusable(path, why));
    }
    let rate = FrameRate::from_f64(den as f64 / (num as f64 * each))?;
    Ok(f64::from(rate.num) / f64::from(rate.den))
}

/// Frames scaled to cover `height` and `width`, what stands over cut off on both sides: `[1, 3, frames, height, width]` in
/// -1..1, as conditioning images are.
pub fn covering_clip(frames: &Frames, height: usize, width: usize) -> Array5<f32> {
    let one = |frame: usize| covering(&frames.part(frame..frame + 1), height, width);
    let each: Vec<Array5<f32>> = (0..frames.count()).into_par_iter().map(one).collect();
    let views: Vec<_> = each.iter().map(|frame| frame.view()).collect();
    ndarray::concatenate(Axis(2), &views).expect("frames of one size")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ndarray::Array4;

    use super::*;
    use crate::media::{EncoderChoice, Mp4Options, write_mp4, write_png_frames};

    fn list(times: &[i64], base: &str) -> String {
        let head = format!("#software: x\n#tb 0: {base}\n#media_type 0: video\n#dimensions 0: 96x64\n#sar 0: 1/1\n");
        let rows = times.iter().map(|t| format!("0, {t:>10}, {t:>10}, 1, 9216, 0x18179d7c\n"));
        head + &rows.collect::<String>()
    }

    #[test]
    fn size_count_and_rate_are_read_from_the_list() {
        let of = |times: &[i64], base: &str| listed(Path::new("a.mp4"), &list(times, base));
        let info = of(&[0, 1, 2, 3], "1001/24000").unwrap();
        assert_eq!((info.width, info.height, info.frames), (96, 64, 4));
        assert_eq!(info.frame_rate, Some(24000.0 / 1001.0));
        // Milliseconds of 24 frames a second, and a start that is not 0.
        assert_eq!(of(&[500, 542, 583, 625, 667, 708, 750], "1/1000").unwrap().frame_rate, Some(24.0));
        let fast: Vec<i64> = (0..241).map(|n| (f64::from(n) * 1000.0 / 120.0).round() as i64).collect();
        assert_eq!(of(&fast, "1/1000").unwrap().frame_rate, Some(120.0));
        let varies = of(&[0, 1, 3, 4, 6, 7, 9, 10], "1/24").unwrap_err().to_string();
        assert!(varies.contains("a.mp4: its frame rate varies") && varies.contains("-vf fps=24"), "{varies}");
        // An MP4 that was made of a Matroska file: whole milliseconds in ticks of 1/16000.
        let remuxed: Vec<i64> = (0..241).map(|n| (f64::from(n) * 1000.0 / 24.0).round() as i64 * 16).collect();
        assert_eq!(of(&remuxed, "1/16000").unwrap().frame_rate, Some(24.0));
        let lacks: Vec<i64> = remuxed.iter().copied().filter(|time| *time != remuxed[120]).collect();
        assert!(of(&lacks, "1/16000").unwrap_err().to_string().contains("its frame rate varies"));
        // A millisecond is a frame there.
        let quick: Vec<i64> = (0..100).filter(|n| *n != 50).map(|n| n * 16).collect();
        assert!(of(&quick, "1/16000").unwrap_err().to_string().contains("its frame rate varies"));
        assert!(of(&[0], "1/24").unwrap_err().to_string().contains("fewer than two frames"));
        assert!(listed(Path::new("a"), "nothing").unwrap_err().to_string().contains("cannot be read"));
    }

    #[test]
    fn a_folder_of_frames_is_a_video() {
        let folder = tempfile::tempdir().unwrap();
        let frames =
            Frames::new(Array4::from_shape_fn((3, 4, 6, 3), |(f, y, x, c)| (f * 60 + y + x + c) as u8)).unwrap();
        write_png_frames(folder.path(), &frames).unwrap();
        let info = probe_clip(folder.path(), Path::new("/nowhere/ffmpeg")).unwrap();
        assert_eq!(info, ClipInfo { width: 6, height: 4, frames: 3, frame_rate: None, turned: 0 });
        assert_eq!(read_clip(folder.path(), Path::new("/nowhere/ffmpeg")).unwrap(), frames);
        let part = |most| ClipPart { frames: Some(most), seconds: None };
        let read = |most| Clip::read(folder.path(), Path::new("/nowhere/ffmpeg"), part(most)).unwrap().frames;
        assert_eq!([read(2), read(9)], [frames.part(0..2), frames.clone()]);
        // Those that are not wanted are not even looked at.
        std::fs::write(folder.path().join("frame_00002.png"), "no image").unwrap();
        assert_eq!(read(2), frames.part(0..2));
        let tensor = covering_clip(&frames, 4, 6);
        assert_eq!(tensor.dim(), (1, 3, 3, 4, 6));
        assert_eq!(tensor[[0, 2, 2, 3, 5]], f32::from(frames.data()[[2, 3, 5, 2]]) / 127.5 - 1.0);
        // A landscape for a portrait: what stands over is cut off.
        assert_eq!(covering_clip(&frames, 8, 4).dim(), (1, 3, 3, 8, 4));
    }

    /// By a header nothing is decoded for it: there is no decoder here.
    #[test]
    fn more_frames_than_there_is_memory_for_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let frames = Frames::new(Array4::zeros((9, 48, 70, 3))).unwrap();
        let (images, file) = (folder.path().join("images"), folder.path().join("long.mp4"));
        write_png_frames(&images, &frames).unwrap();
        let options = Mp4Options { encoder: EncoderChoice::Embedded, ..Mp4Options::default() };
        write_mp4(&file, &frames, 24.0, None, &options).unwrap();
        let (none, each) = (Path::new("/nowhere/ffmpeg"), 48 * 70 * 3);
        for path in [&images, &file] {
            let error = read_frames(path, none, None, 8 * each).unwrap_err().to_string();
            assert!(error.contains("9 frames of 70x48 are 0.0 GiB") && error.contains("-t SECONDS"), "{error}");
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
        assert_eq!(read_frames(&images, none, Some(8), 8 * each).unwrap().count(), 8);
        let fits = read_frames(&file, none, Some(8), 8 * each).unwrap_err();
        assert!(matches!(fits, Error::NoDecoder { .. }), "it goes on to the decoder: {fits}");
    }

    /// Another file says nothing of its frames: its decoder is stopped at the limit.
    #[cfg(unix)]
    #[test]
    fn a_decoder_without_an_end_is_stopped() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (decoder, file) = (folder.path().join("decoder"), folder.path().join("a.mkv"));
        std::fs::write(&file, "a video").unwrap();
        std::fs::write(&decoder, "#!/bin/sh\nexec cat /dev/zero\n").unwrap();
        std::fs::set_permissions(&decoder, std::fs::Permissions::from_mode(0o755)).unwrap();
        let error = read_frames(&file, &decoder, None, 1 << 20).unwrap_err().to_string();
        assert!(error.contains("a.mkv") && error.contains("more frames than this host has room for"), "{error}");
    }

    #[test]
    fn frames_that_are_stored_sideways_are_told_of() {
        let info = ClipInfo { width: 96, height: 64, frames: 9, frame_rate: None, turned: 90 };
        let said = info.turned_fault("phone.mp4").unwrap();
        assert!(said.starts_with("phone.mp4: is shown turned by 90 degrees") && said.contains("96x64"), "{said}");
        assert_eq!(ClipInfo { turned: 0, ..info }.turned_fault("phone.mp4"), None);
    }

    #[test]
    fn without_ffmpeg_the_message_names_a_folder_of_frames() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = probe_clip(file.path(), Path::new("/nowhere/ffmpeg")).unwrap_err().to_string();
        assert!(error.contains("install ffmpeg") && error.contains("PNG"), "{error}");
    }
}
