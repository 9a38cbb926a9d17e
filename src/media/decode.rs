//! Videos by an installed ffmpeg.

use std::path::Path;
use std::process::{Command, Stdio};

use ndarray::Array4;

use super::audio::Audio;
use super::error::{Error, Result};
use super::ffmpeg::tail;
use super::frames::Frames;
use super::wav::parse_wav;

/// Every frame of a video file and its sound, where it has them, as `ffmpeg` (a path, or a name to be found on PATH)
/// decodes them.
///
/// # Errors
/// No ffmpeg; a file that it cannot read, with its own words.
pub fn read_video(path: &Path, ffmpeg: &Path) -> Result<(Option<Frames>, Option<Audio>)> {
    std::fs::metadata(path).map_err(Error::io("read", path))?;
    // Each pixmap states its own size, and no scaler changes their number.
    // Without the format, ffmpeg writes two bytes a value of a video that has 10 bits.
    let as_ppm = ["-an", "-fps_mode", "passthrough", "-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24"];
    let frames = decoded(path, ffmpeg, &as_ppm)?.map(|bytes| pixmaps(&bytes).ok_or_else(|| broken(path, "frames")));
    let sound = decoded(path, ffmpeg, &["-vn", "-f", "wav", "-c:a", "pcm_f32le"])?;
    let sound = sound.map(|bytes| parse_wav(&bytes).map_err(|_| broken(path, "samples")));
    Ok((frames.transpose()?, sound.transpose()?))
}

fn broken(path: &Path, what: &str) -> Error {
    Error::Ffmpeg {
        path: path.to_path_buf(),
        status: "exit code 0".into(),
        tail: format!("cannot parse the decoded {what}"),
    }
}

/// stdout of ffmpeg for one stream of a file; none if the file has no such stream.
pub(super) fn decoded(path: &Path, ffmpeg: &Path, how: &[&str]) -> Result<Option<Vec<u8>>> {
    decoded_by(path, ffmpeg, &[], how)
}

/// The same with arguments that hold for the file before those that hold for what becomes of it.
pub(super) fn decoded_by(path: &Path, ffmpeg: &Path, before: &[&str], how: &[&str]) -> Result<Option<Vec<u8>>> {
    let mut command = Command::new(ffmpeg);
    command.args(["-hide_banner", "-loglevel", "error"]).args(before).arg("-i").arg(path);
    command.args(how).arg("pipe:1").stdin(Stdio::null());
    let output = command.output().map_err(|e| Error::NoDecoder { path: path.to_path_buf(), reason: e.to_string() })?;
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("does not contain any stream") || said.contains("matches no streams") {
        return Ok(None);
    }
    if !output.status.success() {
        let (path, status) = (path.to_path_buf(), output.status.to_string());
        return Err(Error::Ffmpeg { path, status, tail: tail(&said) });
    }
    Ok(Some(output.stdout))
}

/// Portable pixmaps, one after the other, all of one size.
pub(super) fn pixmaps(mut bytes: &[u8]) -> Option<Frames> {
    let (mut pixels, mut size, mut count) = (Vec::new(), None, 0);
    while !bytes.is_empty() {
        // "P6", width, height, the largest value, then bytes of any value.
        let mut words = bytes.splitn(5, |b| b.is_ascii_whitespace());
        if words.next()? != b"P6" {
            return None;
        }
        let mut number = || std::str::from_utf8(words.next()?).ok()?.parse::<usize>().ok();
        let (width, height, largest) = (number()?, number()?, number()?);
        if largest != 255 || *size.get_or_insert((width, height)) != (width, height) {
            return None;
        }
        let body = words.next()?;
        let length = 3 * width * height;
        pixels.extend_from_slice(body.get(..length)?);
        bytes = &body[length..];
        count += 1;
    }
    let (width, height) = size?;
    Frames::new(Array4::from_shape_vec((count, height, width, 3), pixels).ok()?).ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn pixmaps_are_frames() {
        let two = b"P6\n2 1\n255\nabc\nefP6\n2 1\n255\n123456";
        let frames = pixmaps(two).unwrap();
        assert_eq!((frames.count(), frames.height(), frames.width()), (2, 1, 2));
        assert_eq!(frames.iter().next().unwrap(), b"abc\nef");
        for bad in [&b""[..], b"P5\n2 1\n255\nabcdef", b"P6\n2 1\n255\nabc", b"P6\n2 1\n65535\nabcdef"] {
            assert!(pixmaps(bad).is_none());
        }
    }

    #[test]
    fn without_ffmpeg_the_message_says_what_can_be_done() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = read_video(file.path(), Path::new("/nowhere/ffmpeg")).unwrap_err().to_string();
        assert!(error.contains("install ffmpeg") && error.contains("PNG"), "{error}");
    }
}
