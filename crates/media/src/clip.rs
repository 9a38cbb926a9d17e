//! Input videos: a video file, which an installed ffmpeg decodes, or a folder of PNG frames.
//!
//! The frames of a video file are those that ffmpeg decodes from its default video track: in presentation order,
//! without dropped or repeated frames, rotated as the container specifies.

use std::path::Path;

use ndarray::{Array5, Axis};
use rayon::prelude::*;

use super::audio::Audio;
use super::decode::{decode_with_messages, pixmaps};
use super::error::{MediaError, Result, check_rereadable, unusable};
use super::frame_times::{ClipInfo, listed, rate_of};
use super::frames::Frames;
use super::image_file::{covering, padded};
use super::png::{png_size, read_first_png_alphas, read_first_png_frames};
use super::sound::read_part;
use super::sound_part::SoundRange;
use super::tables::{self, FrameTable};
use super::track_times::video_start;
use super::video_track::{Timing, VideoTrack};
use ltx2_base::host;

/// Frames of a video, and its sound if it has any.
#[derive(Clone, Debug, PartialEq)]
pub struct Clip {
    /// Frames in presentation order, rotated as the container specifies.
    pub frames: Frames,
    /// Sound, aligned to the first frame. `None`: the video has none, or none was requested.
    pub sound: Option<Audio>,
}

impl Clip {
    /// Reads part of a video file or of a folder of PNG frames (which has no sound). Aligns the sound to the first
    /// frame: drops earlier sound, and inserts silence if the sound starts later.
    ///
    /// # Errors
    /// Fails for the same reasons as [`read_clip`], or if the sound cannot be read.
    pub fn read(path: &Path, ffmpeg: &Path, wanted: ClipPart) -> Result<Self> {
        let (frames, track) = read_frames(path, ffmpeg, wanted.frames, frame_memory_limit())?;
        let sound = match track.filter(|track| track.has_sound && wanted.seconds != Some(0.0)) {
            Some(track) => sound_of_frames(path, ffmpeg, track.index, wanted.seconds)?,
            None => None,
        };
        Ok(Clip { frames, sound: sound.filter(|sound| !sound.is_empty()) })
    }
}

/// Reads at most `seconds` seconds of a video's sound, starting at the time of the first frame of video track `track`.
fn sound_of_frames(path: &Path, ffmpeg: &Path, track: usize, seconds: Option<f64>) -> Result<Option<Audio>> {
    let zero = video_start(path, ffmpeg, track);
    let part = read_part(path, ffmpeg, SoundRange { zero, start: 0.0, end: seconds })?;
    if part.is_some() && zero.is_none() {
        let path = path.display();
        tracing::warn!(
            "{path}: ffmpeg does not report the time of the first frame; reading the sound from the start of the file"
        );
    }
    Ok(part.map(|part| part.sound))
}

/// Limits of the part of a video to read. The part begins at the start of the video.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ClipPart {
    /// Maximum number of frames. `None`: all frames.
    pub frames: Option<usize>,
    /// Maximum duration of the sound in seconds. `None`: all of it; 0: no sound.
    pub seconds: Option<f64>,
}

/// Reads the frame tables of an MP4. `None`: `path` is a folder, or the file has to be decoded to count its frames.
fn frame_tables(path: &Path) -> Result<Option<FrameTable>> {
    if path.is_dir() {
        return Ok(None);
    }
    tables::of_file(path).map_err(MediaError::io("read", path))
}

/// Returns the size, frame count and frame rate of a video file or of a folder of PNG frames. If an MP4's header
/// determines them, reads only the header; otherwise decodes the file with `ffmpeg` (a path, or a name that is looked
/// up on PATH).
///
/// # Errors
/// Returns an error if the file is missing or damaged (with ffmpeg's message), if ffmpeg is needed but not installed,
/// if there are fewer than two frames, if the frame rate varies, if the pixels are not square, if the rotation is not a
/// multiple of 90 degrees, or if the video is HDR.
pub fn probe_clip(path: &Path, ffmpeg: &Path) -> Result<ClipInfo> {
    check_rereadable(path)?;
    if path.is_dir() {
        let (frames, width, height) = png_size(path)?;
        return Ok(ClipInfo { width, height, frames, frame_rate: None });
    }
    match frame_tables(path)? {
        Some(FrameTable { width, height, times, timescale }) => {
            let frame_rate = Some(rate_of(path, &times, [1, timescale], &Timing::default())?);
            Ok(ClipInfo { width, height, frames: times.len(), frame_rate })
        }
        None => decode_list(path, ffmpeg, &BEFORE),
    }
}

/// Probes an untrusted file like [`probe_clip`], but always decodes all frames instead of trusting the header.
/// Restricts ffmpeg to this one file and to frames of at most `most_pixels` pixels.
///
/// # Errors
/// Fails for the same reasons as [`probe_clip`], if the file is truncated, or if its container refers to other files.
pub fn decode_upload(path: &Path, ffmpeg: &Path, most_pixels: u64) -> Result<ClipInfo> {
    let pixels = most_pixels.to_string();
    let info = decode_list(path, ffmpeg, &[&BEFORE[..], &SELF_CONTAINED, &["-max_pixels", &pixels]].concat())?;
    if let Some(frame_tables) = frame_tables(path)? {
        check_header(path, &frame_tables, usize::MAX, [info.width, info.height, info.frames])?;
    }
    Ok(info)
}

/// Returns whether an untrusted video has an audio track. ffmpeg opens only this one file.
///
/// # Errors
/// Returns an error if ffmpeg is not installed or cannot read the file.
pub fn has_sound(path: &Path, ffmpeg: &Path) -> Result<bool> {
    let track = VideoTrack::of_file(path, ffmpeg, &[&BEFORE[..], &SELF_CONTAINED].concat())?;
    Ok(track.is_some_and(|track| track.has_sound))
}

/// Returns an error if the decoded width, height or frame count differs from the MP4's header. `most` is the limit on
/// the number of frames that were decoded.
fn check_header(path: &Path, frame_tables: &FrameTable, most: usize, decoded: [usize; 3]) -> Result<()> {
    let all = frame_tables.times.len().min(most);
    if decoded == [frame_tables.width, frame_tables.height, all] {
        return Ok(());
    }
    let [width, height, count] = decoded;
    let why = format!(
        "the header states {all} frames of {}x{}, but ffmpeg decodes {count} of {width}x{height}; if the file is complete, convert \
         it first, e.g. ffmpeg -i IN OUT.mp4",
        frame_tables.width, frame_tables.height
    );
    Err(unusable(path, &why))
}

/// Determines the size, count and rate of the frames by decoding all of them. `before`: ffmpeg arguments that precede
/// the input.
fn decode_list(path: &Path, ffmpeg: &Path, before: &[&str]) -> Result<ClipInfo> {
    std::fs::metadata(path).map_err(MediaError::io("read", path))?;
    let track = track_of(path, ffmpeg, before)?;
    let map = format!("0:{}", track.index);
    let list = decoded(path, ffmpeg, before, &[&frames_of(&map)[..], &LIST].concat(), u64::MAX)?;
    listed(path, &String::from_utf8_lossy(&list), &track.timing)
}

/// Finds the video track to read.
///
/// # Errors
/// Returns an error if ffmpeg is not installed, if the file has no video track, or if the track has to be converted
/// first.
fn track_of(path: &Path, ffmpeg: &Path, before: &[&str]) -> Result<VideoTrack> {
    let track = VideoTrack::of_file(path, ffmpeg, before)?.ok_or_else(|| unusable(path, NO_VIDEO))?;
    track.fault().map_or(Ok(track), |why| Err(unusable(path, &why)))
}

/// Returns ffmpeg's stdout for a file, at most `most` bytes.
///
/// # Errors
/// Fails for the same reasons as [`decode_with_messages`], or if the file is truncated or has no video.
fn decoded(path: &Path, ffmpeg: &Path, before: &[&str], how: &[&str], most: u64) -> Result<Vec<u8>> {
    const CUT: [&str; 3] = ["File ended prematurely", "partial file", "corrupt input packet"];
    let is_cut = |words: &str| CUT.iter().any(|sign| words.contains(sign));
    let why = "the file is truncated or damaged; to use the part that ffmpeg can read, convert the file first, e.g. \
               ffmpeg -i IN OUT.mp4";
    match decode_with_messages(path, ffmpeg, before, how, most) {
        Err(MediaError::Ffmpeg { tail, .. }) if is_cut(&tail) => Err(unusable(path, why)),
        Ok(Some((_, words))) if is_cut(&words) => Err(unusable(path, why)),
        output => Ok(output?.ok_or_else(|| unusable(path, NO_VIDEO))?.0),
    }
}

/// Pixels added to the width and to the height for ffmpeg's `-max_pixels`: decoders allocate more pixels than a frame
/// has. For example, the MPEG-4 decoder allocates 192x280 for a frame of 64x48.
const DECODER_MARGIN: usize = 512;
const NO_VIDEO: &str = "the file has no video that ffmpeg can decode";
/// ffmpeg arguments before the input: stop at the first damaged packet.
const BEFORE: [&str; 1] = ["-xerror"];
/// ffmpeg arguments before the input: exclude network protocols, and playlist formats, which refer to other files.
const SELF_CONTAINED: [&str; 4] = [
    "-protocol_whitelist",
    "file,pipe",
    "-format_whitelist",
    "mov,matroska,webm,avi,mpegts,mpeg,flv,ogg,mxf,asf,gif,apng,nut,ivf,rm,dv,m4v,h264,hevc,mpegvideo,mjpeg,obu,yuv4mpegpipe",
];
/// ffmpeg arguments that list the frames, with ticks finer than those of any container.
const LIST: [&str; 4] = ["-enc_time_base", "1/90000", "-f", "framecrc"];

/// Returns the ffmpeg arguments after the input that select every frame of a track.
fn frames_of(map: &str) -> [&str; 4] {
    ["-map", map, "-fps_mode", "passthrough"]
}

/// Reads all frames of a video file or of a folder of PNG frames.
///
/// # Errors
/// Fails for the same reasons as [`probe_clip`], or if the frames do not fit in this host's memory.
pub fn read_clip(path: &Path, ffmpeg: &Path) -> Result<Frames> {
    Ok(read_frames(path, ffmpeg, None, frame_memory_limit())?.0)
}

/// Reads the first `most` frames of a video file or of a folder of PNG frames, or all frames if there are fewer.
///
/// # Errors
/// Fails for the same reasons as [`read_clip`].
pub fn read_first_frames(path: &Path, ffmpeg: &Path, most: usize) -> Result<Frames> {
    Ok(read_frames(path, ffmpeg, Some(most), frame_memory_limit())?.0)
}

/// Reads the alpha channels of the first `most` frames of a folder of PNG frames as gray frames: white is opaque.
///
/// # Errors
/// Fails for the same reasons as [`read_first_frames`], or if `path` is not a folder, or if a frame has no alpha channel.
pub fn read_first_alphas(path: &Path, most: usize) -> Result<Frames> {
    if !path.is_dir() {
        let why = "alpha is read only from folders of PNG frames; convert it: ffmpeg -i IN -pix_fmt rgba DIR/%05d.png";
        return Err(unusable(path, why));
    }
    let (frames, width, height) = png_size(path)?;
    check_size(path, frames.min(most), width, height, frame_memory_limit())?;
    read_first_png_alphas(path, most)
}

/// Returns the memory budget for frames in bytes. It is a quarter of the free memory, because up to four copies exist
/// at a time (input, scaled, generated, joined).
pub fn frame_memory_limit() -> u64 {
    host::free_memory().map_or(u64::MAX, |free| free / 4)
}

/// Returns an error if the frames take more than `limit` bytes.
fn check_size(path: &Path, frames: usize, width: usize, height: usize, limit: u64) -> Result<()> {
    let bytes = [frames, width, height].iter().fold(3u64, |all, n| all.saturating_mul(*n as u64));
    if bytes <= limit {
        return Ok(());
    }
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let why = format!(
        "{frames} frames of {width}x{height} take {:.1} GiB, but the limit on this host is {:.1} GiB (a quarter of the \
         free memory); use a shorter part, e.g. ffmpeg -t SECONDS -i IN OUT.mp4",
        gib(bytes),
        gib(limit)
    );
    Err(unusable(path, &why))
}

/// Reads at most `most` frames and at most `bytes` bytes. Also returns the video track; `None` for a folder. ffmpeg
/// decodes the readable part of a truncated MP4 without an error, so the result is compared with the header.
fn read_frames(path: &Path, ffmpeg: &Path, most: Option<usize>, bytes: u64) -> Result<(Frames, Option<VideoTrack>)> {
    let most_frames = most.unwrap_or(usize::MAX);
    if path.is_dir() {
        let (frames, width, height) = png_size(path)?;
        check_size(path, frames.min(most_frames), width, height, bytes)?;
        return Ok((read_first_png_frames(path, most_frames)?, None));
    }
    check_rereadable(path)?;
    std::fs::metadata(path).map_err(MediaError::io("read", path))?;
    let limit = most.map(|most| ["-frames:v".to_string(), most.to_string()]);
    let limit: Vec<&str> = limit.iter().flatten().map(String::as_str).collect();
    let format = ["-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24"];
    // Decoded frames may be larger than the header states, so ffmpeg is limited to the header's size.
    let frame_tables = frame_tables(path)?;
    if let Some(frame_tables) = &frame_tables {
        check_size(path, frame_tables.times.len().min(most_frames), frame_tables.width, frame_tables.height, bytes)?;
    }
    let track = track_of(path, ffmpeg, &BEFORE)?;
    let pixels = frame_tables.as_ref().map(|frame_tables| {
        ((frame_tables.width + DECODER_MARGIN) * (frame_tables.height + DECODER_MARGIN)).to_string()
    });
    let before: Vec<&str> = pixels.iter().flat_map(|pixels| ["-max_pixels", pixels]).chain(BEFORE).collect();
    let map = format!("0:{}", track.index);
    let pixels = decoded(path, ffmpeg, &before, &[&frames_of(&map)[..], &limit, &format].concat(), bytes)?;
    let frames =
        pixmaps(&pixels).ok_or_else(|| unusable(path, "ffmpeg's output is not a sequence of equally sized frames"))?;
    if let Some(frame_tables) = frame_tables {
        check_header(path, &frame_tables, most_frames, [frames.width(), frames.height(), frames.count()])?;
    }
    if let Some(warning) = track.warning() {
        tracing::warn!("{}: {warning}", path.display());
    }
    Ok((frames, Some(track)))
}

/// Scales frames until they cover `height` x `width` and center-crops them. Returns `[1, 3, frames, height, width]` in
/// -1..1, as for conditioning images.
pub fn covering_clip(frames: &Frames, height: usize, width: usize) -> Array5<f32> {
    each_frame(frames, |frame| covering(frame, height, width))
}

/// Scales frames down until they fit in `height` x `width`, and fills the rest at the bottom and on the right with their
/// reflection. Returns `[1, 3, frames, height, width]` in -1..1, as for Lightricks' HDR pipeline.
pub fn padded_clip(frames: &Frames, height: usize, width: usize) -> Array5<f32> {
    each_frame(frames, |frame| padded(frame, height, width))
}

/// Converts each frame to `[1, 3, 1, height, width]`, and concatenates them.
fn each_frame(frames: &Frames, convert: impl Fn(&Frames) -> Array5<f32> + Sync) -> Array5<f32> {
    let one = |frame: usize| convert(&frames.part(frame..frame + 1));
    let each: Vec<Array5<f32>> = (0..frames.count()).into_par_iter().map(one).collect();
    let views: Vec<_> = each.iter().map(|frame| frame.view()).collect();
    ndarray::concatenate(Axis(2), &views).expect("frames of one size")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ndarray::Array4;

    use super::*;
    use crate::{EncoderChoice, Mp4Options, write_mp4, write_png_frames};

    #[test]
    fn png_folder_is_read_as_video() {
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
        // Files beyond the maximum number of frames are not read.
        std::fs::write(folder.path().join("frame_00002.png"), "no image").unwrap();
        assert_eq!(read(2), frames.part(0..2));
        let tensor = covering_clip(&frames, 4, 6);
        assert_eq!(tensor.dim(), (1, 3, 3, 4, 6));
        assert_eq!(tensor[[0, 2, 2, 3, 5]], f32::from(frames.data()[[2, 3, 5, 2]]) / 127.5 - 1.0);
        // Landscape frames are cropped for a portrait size.
        assert_eq!(covering_clip(&frames, 8, 4).dim(), (1, 3, 3, 8, 4));
    }

    #[test]
    fn alpha_channels_are_read_as_gray_frames() {
        let folder = tempfile::tempdir().unwrap();
        let alpha = |frame: u32, x: u32, y: u32| (frame * 90 + x * 20 + y) as u8;
        for frame in 0..2 {
            let pixels = image::RgbaImage::from_fn(4, 3, |x, y| image::Rgba([7, 8, 9, alpha(frame, x, y)]));
            pixels.save(folder.path().join(format!("{frame}.png"))).unwrap();
        }
        let read = read_first_alphas(folder.path(), 9).unwrap();
        let wanted = Array4::from_shape_fn((2, 3, 4, 3), |(f, y, x, _)| alpha(f as u32, x as u32, y as u32));
        assert_eq!(*read.data(), wanted);
        assert_eq!(read_first_alphas(folder.path(), 1).unwrap().count(), 1);
        let opaque = Frames::new(Array4::zeros((1, 3, 4, 3))).unwrap();
        write_png_frames(folder.path(), &opaque).unwrap();
        let error = read_first_alphas(folder.path(), 9).unwrap_err().to_string();
        assert!(error.contains("frame_00000.png") && error.contains("has no alpha channel"), "{error}");
        let error = read_first_alphas(Path::new("a.mp4"), 9).unwrap_err().to_string();
        assert!(error.contains("a.mp4") && error.contains("-pix_fmt rgba"), "{error}");
    }

    /// The check needs only the headers, so this test runs without ffmpeg.
    #[test]
    fn frames_exceeding_memory_are_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let frames = Frames::new(Array4::zeros((9, 48, 70, 3))).unwrap();
        let (images, file) = (folder.path().join("images"), folder.path().join("long.mp4"));
        write_png_frames(&images, &frames).unwrap();
        let options = Mp4Options { encoder: EncoderChoice::Embedded, ..Mp4Options::default() };
        write_mp4(&file, &frames, 24.0, None, &options).unwrap();
        let (none, each) = (Path::new("/nowhere/ffmpeg"), 48 * 70 * 3);
        for path in [&images, &file] {
            let error = read_frames(path, none, None, 8 * each).unwrap_err().to_string();
            assert!(error.contains("9 frames of 70x48 take 0.0 GiB") && error.contains("-t SECONDS"), "{error}");
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
        assert_eq!(read_frames(&images, none, Some(8), 8 * each).unwrap().0.count(), 8);
        let fits = read_frames(&file, none, Some(8), 8 * each).unwrap_err();
        assert!(matches!(fits, MediaError::NoDecoder { .. }), "within the limits, the file is decoded: {fits}");
    }

    /// Without header tables, ffmpeg is stopped at the memory limit.
    #[cfg(unix)]
    #[test]
    fn endless_decoder_output_is_stopped_at_the_limit() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (decoder, file) = (folder.path().join("decoder"), folder.path().join("a.mkv"));
        std::fs::write(&file, "a video").unwrap();
        let list = "echo '  Stream #0:0: Video: h264, yuv420p, 96x64, 24 fps, 24 tbr, 1k tbn' >&2; exit 1";
        let script = format!("#!/bin/sh\ncase \"$*\" in *pipe:1) exec cat /dev/zero;; *) {list};; esac\n");
        std::fs::write(&decoder, script).unwrap();
        std::fs::set_permissions(&decoder, std::fs::Permissions::from_mode(0o755)).unwrap();
        let error = read_frames(&file, &decoder, None, 1 << 20).unwrap_err().to_string();
        assert!(error.contains("a.mkv") && error.contains("do not fit in this host's memory"), "{error}");
    }

    #[test]
    fn missing_ffmpeg_error_suggests_png_folder() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = probe_clip(file.path(), Path::new("/nowhere/ffmpeg")).unwrap_err().to_string();
        assert!(error.contains("install ffmpeg") && error.contains("PNG"), "{error}");
    }
}
