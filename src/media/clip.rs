//! Videos to go on from: a file, by an installed ffmpeg, or a folder of PNG frames.
//!
//! Frames are those that ffmpeg decodes of the default video track: in the order in which they are shown, none dropped or repeated,
//! turned as the container says.

use std::path::Path;

use ndarray::{Array5, Axis};
use rayon::prelude::*;

use super::audio::Audio;
use super::decode::{decoded_with_words, pixmaps};
use super::error::{Error, Result, unusable};
use super::frame_times::{ClipInfo, listed, rate_of};
use super::frames::Frames;
use super::image_file::covering;
use super::png::{png_size, read_first_png_frames};
use super::sound::read_part;
use super::sound_part::Wanted;
use super::tables::{self, Tables};
use super::track_times::video_start;
use super::video_track::{Timing, VideoTrack};
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
        let (frames, track) = read_frames(path, ffmpeg, wanted.frames, most_bytes())?;
        let sound = match track.filter(|_| wanted.seconds != Some(0.0)) {
            Some(track) => sound_of_frames(path, ffmpeg, track, wanted.seconds)?,
            None => None,
        };
        Ok(Clip { frames, sound: sound.filter(|sound| !sound.is_empty()) })
    }
}

/// The sound of a video from the first frame of a track on, to `seconds` at most.
fn sound_of_frames(path: &Path, ffmpeg: &Path, track: usize, seconds: Option<f64>) -> Result<Option<Audio>> {
    let zero = video_start(path, ffmpeg, track);
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

/// Tables of an MP4; none of a folder, and of a file that has to be decoded for them.
fn told(path: &Path) -> Result<Option<Tables>> {
    if path.is_dir() {
        return Ok(None);
    }
    tables::of_file(path).map_err(Error::io("read", path))
}

/// Size, frames and rate of a video file or of a folder of PNG frames. Those of a plain MP4 are in its header; other files are decoded
/// by `ffmpeg`, a path or a name to be found on PATH.
///
/// # Errors
/// No such file; no ffmpeg; a damaged file, with ffmpeg's words; frames at no constant rate; pixels that are not square, or HDR.
pub fn probe_clip(path: &Path, ffmpeg: &Path) -> Result<ClipInfo> {
    if path.is_dir() {
        let (frames, width, height) = png_size(path)?;
        return Ok(ClipInfo { width, height, frames, frame_rate: None });
    }
    match told(path)? {
        Some(Tables { width, height, times, timescale }) => {
            let frame_rate = Some(rate_of(path, &times, [1, timescale], &Timing::default())?);
            Ok(ClipInfo { width, height, frames: times.len(), frame_rate })
        }
        None => decode_list(path, ffmpeg, &BEFORE),
    }
}

/// The same of a stranger's file that is decoded whole, whatever its header says. ffmpeg opens no other file for it, and decodes no
/// frame of more than `most_pixels`.
///
/// # Errors
/// As [`probe_clip`]; a file that is cut short, or whose container names other files.
pub(crate) fn decode_upload(path: &Path, ffmpeg: &Path, most_pixels: u64) -> Result<ClipInfo> {
    let pixels = most_pixels.to_string();
    let info = decode_list(path, ffmpeg, &[&BEFORE[..], &SELF_CONTAINED, &["-max_pixels", &pixels]].concat())?;
    if let Some(told) = told(path)? {
        check_header(path, &told, usize::MAX, [info.width, info.height, info.frames])?;
    }
    Ok(info)
}

/// Refuses an MP4 of which other frames are decoded than the first `most` of its header: width, height and number.
fn check_header(path: &Path, told: &Tables, most: usize, decoded: [usize; 3]) -> Result<()> {
    let all = told.times.len().min(most);
    if decoded == [told.width, told.height, all] {
        return Ok(());
    }
    let [width, height, count] = decoded;
    let why = format!(
        "its header tells of {all} frames of {}x{}, {count} of {width}x{height} are decoded: if it is whole, convert it first, \
         e.g. ffmpeg -i IN OUT.mp4",
        told.width, told.height
    );
    Err(unusable(path, &why))
}

/// Size, frames and rate by decoding all frames; `before` are ffmpeg's arguments before the file.
fn decode_list(path: &Path, ffmpeg: &Path, before: &[&str]) -> Result<ClipInfo> {
    std::fs::metadata(path).map_err(Error::io("read", path))?;
    let track = track_of(path, ffmpeg, before)?;
    let map = format!("0:{}", track.index);
    let list = decoded(path, ffmpeg, before, &[&frames_of(&map)[..], &LIST].concat(), u64::MAX)?;
    listed(path, &String::from_utf8_lossy(&list), &track.timing)
}

/// The track that is read.
///
/// # Errors
/// No ffmpeg; a file without one; one that is not read as it is.
fn track_of(path: &Path, ffmpeg: &Path, before: &[&str]) -> Result<VideoTrack> {
    let track = VideoTrack::of_file(path, ffmpeg, before)?.ok_or_else(|| unusable(path, NO_VIDEO))?;
    track.fault().map_or(Ok(track), |why| Err(unusable(path, &why)))
}

/// What ffmpeg decodes of a file, no more than so many bytes.
///
/// # Errors
/// As [`decoded_with_words`]; a file whose end is missing.
fn decoded(path: &Path, ffmpeg: &Path, before: &[&str], how: &[&str], most: u64) -> Result<Vec<u8>> {
    const CUT: [&str; 3] = ["File ended prematurely", "partial file", "corrupt input packet"];
    let is_cut = |words: &str| CUT.iter().any(|sign| words.contains(sign));
    let why =
        "it is cut short or damaged; if what ffmpeg reads of it will do, copy that first, e.g. ffmpeg -i IN OUT.mp4";
    match decoded_with_words(path, ffmpeg, before, how, most) {
        Err(Error::Ffmpeg { tail, .. }) if is_cut(&tail) => Err(unusable(path, why)),
        Ok(Some((_, words))) if is_cut(&words) => Err(unusable(path, why)),
        output => Ok(output?.ok_or_else(|| unusable(path, NO_VIDEO))?.0),
    }
}

/// Pixels along each side that ffmpeg's decoders need beside a frame's own: MPEG-4's ask for 192x280 of a frame of 64x48.
const BESIDE: usize = 512;
const NO_VIDEO: &str = "it has no video that ffmpeg can decode";
/// Arguments before a file: a damaged packet ends the run.
const BEFORE: [&str; 1] = ["-xerror"];
/// Arguments that keep ffmpeg from playlists, which name other files, and from the network.
const SELF_CONTAINED: [&str; 4] = [
    "-protocol_whitelist",
    "file,pipe",
    "-format_whitelist",
    "mov,matroska,webm,avi,mpegts,mpeg,flv,ogg,mxf,asf,gif,apng,nut,ivf,rm,dv,m4v,h264,hevc,mpegvideo,obu,yuv4mpegpipe",
];
/// Arguments of a list of frames, with times in ticks that are finer than what containers round to.
const LIST: [&str; 4] = ["-enc_time_base", "1/90000", "-f", "framecrc"];

/// Arguments behind a file: every frame of a track.
fn frames_of(map: &str) -> [&str; 4] {
    ["-map", map, "-fps_mode", "passthrough"]
}

/// The frames of a video file or of a folder of PNG frames.
///
/// # Errors
/// As [`probe_clip`]; more frames than this host has memory for.
pub fn read_clip(path: &Path, ffmpeg: &Path) -> Result<Frames> {
    Ok(read_frames(path, ffmpeg, None, most_bytes())?.0)
}

/// The first frames of a video file or of a folder of PNG frames: `most`, or all where it has fewer.
///
/// # Errors
/// As [`read_clip`].
pub fn read_first_frames(path: &Path, ffmpeg: &Path, most: usize) -> Result<Frames> {
    Ok(read_frames(path, ffmpeg, Some(most), most_bytes())?.0)
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

/// Frames, no more than `most` and of no more than so many bytes, and the number of the file's track that has them. Of an MP4 that is
/// cut short ffmpeg gives what is there: its header tells what there should be.
fn read_frames(path: &Path, ffmpeg: &Path, most: Option<usize>, bytes: u64) -> Result<(Frames, Option<usize>)> {
    let most_frames = most.unwrap_or(usize::MAX);
    if path.is_dir() {
        let (frames, width, height) = png_size(path)?;
        check_size(path, frames.min(most_frames), width, height, bytes)?;
        return Ok((read_first_png_frames(path, most_frames)?, None));
    }
    std::fs::metadata(path).map_err(Error::io("read", path))?;
    let limit = most.map(|most| ["-frames:v".to_string(), most.to_string()]);
    let limit: Vec<&str> = limit.iter().flatten().map(String::as_str).collect();
    let format = ["-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24"];
    // What is decoded may be larger than the header tells: memory goes by the header.
    let told = told(path)?;
    if let Some(told) = &told {
        check_size(path, told.times.len().min(most_frames), told.width, told.height, bytes)?;
    }
    let track = track_of(path, ffmpeg, &BEFORE)?;
    let pixels = told.as_ref().map(|told| ((told.width + BESIDE) * (told.height + BESIDE)).to_string());
    let before: Vec<&str> = pixels.iter().flat_map(|pixels| ["-max_pixels", pixels]).chain(BEFORE).collect();
    let map = format!("0:{}", track.index);
    let pixels = decoded(path, ffmpeg, &before, &[&frames_of(&map)[..], &limit, &format].concat(), bytes)?;
    let frames = pixmaps(&pixels).ok_or_else(|| unusable(path, "it has no frames of one size"))?;
    if let Some(told) = told {
        check_header(path, &told, most_frames, [frames.width(), frames.height(), frames.count()])?;
    }
    if let Some(warning) = track.warning() {
        tracing::warn!("{}: {warning}", path.display());
    }
    Ok((frames, Some(track.index)))
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

    #[test]
    fn a_folder_of_frames_is_a_video() {
        let folder = tempfile::tempdir().unwrap();
        let frames =
            Frames::new(Array4::from_shape_fn((3, 4, 6, 3), |(f, y, x, c)| (f * 60 + y + x + c) as u8)).unwrap();
        write_png_frames(folder.path(), &frames).unwrap();
        let info = probe_clip(folder.path(), Path::new("/nowhere/ffmpeg")).unwrap();
        assert_eq!(info, ClipInfo { width: 6, height: 4, frames: 3, frame_rate: None });
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
        assert_eq!(read_frames(&images, none, Some(8), 8 * each).unwrap().0.count(), 8);
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
        let list = "echo '  Stream #0:0: Video: h264, yuv420p, 96x64, 24 fps, 24 tbr, 1k tbn' >&2; exit 1";
        let script = format!("#!/bin/sh\ncase \"$*\" in *pipe:1) exec cat /dev/zero;; *) {list};; esac\n");
        std::fs::write(&decoder, script).unwrap();
        std::fs::set_permissions(&decoder, std::fs::Permissions::from_mode(0o755)).unwrap();
        let error = read_frames(&file, &decoder, None, 1 << 20).unwrap_err().to_string();
        assert!(error.contains("a.mkv") && error.contains("more frames than this host has room for"), "{error}");
    }

    #[test]
    fn without_ffmpeg_the_message_names_a_folder_of_frames() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = probe_clip(file.path(), Path::new("/nowhere/ffmpeg")).unwrap_err().to_string();
        assert!(error.contains("install ffmpeg") && error.contains("PNG"), "{error}");
    }
}
