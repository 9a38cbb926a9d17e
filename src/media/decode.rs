//! Videos by an installed ffmpeg.

use std::io::{self, Read};
use std::panic::resume_unwind;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

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
    decoded_up_to(path, ffmpeg, before, how, u64::MAX)
}

/// The same of no more than so many bytes: ffmpeg is stopped there, which is an error.
pub(super) fn decoded_up_to(
    path: &Path,
    ffmpeg: &Path,
    before: &[&str],
    how: &[&str],
    most: u64,
) -> Result<Option<Vec<u8>>> {
    Ok(decoded_with_words(path, ffmpeg, before, how, most)?.map(|(bytes, _)| bytes))
}

/// The same with what ffmpeg says of a file that it decodes.
pub(super) fn decoded_with_words(
    path: &Path,
    ffmpeg: &Path,
    before: &[&str],
    how: &[&str],
    most: u64,
) -> Result<Option<(Vec<u8>, String)>> {
    let mut command = Command::new(ffmpeg);
    command.args(["-hide_banner", "-loglevel", "error"]).args(before).arg("-i").arg(path);
    command.args(how).arg("pipe:1").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let fault = |e: io::Error| Error::NoDecoder { path: path.to_path_buf(), reason: e.to_string() };
    let mut child = command.spawn().map_err(fault)?;
    let (bytes, said) = thread::scope(|scope| {
        let errors = child.stderr.take();
        let said = scope.spawn(|| errors.map_or(Ok(Vec::new()), read_all));
        let mut bytes = Vec::new();
        let read = child.stdout.take().map_or(Ok(0), |out| out.take(most.saturating_add(1)).read_to_end(&mut bytes));
        if read.is_err() || bytes.len() as u64 > most {
            // One that has ended by itself cannot be stopped any more.
            let _ = child.kill();
        }
        (read.map(|_| bytes), said.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    let status = child.wait().map_err(fault)?;
    let (bytes, said) = (bytes.map_err(fault)?, said.map_err(fault)?);
    if bytes.len() as u64 > most {
        let reason = "it has more frames than this host has room for: give a shorter part of it, e.g. ffmpeg -t SECONDS -i IN OUT.mp4";
        return Err(Error::Clip { path: path.to_path_buf(), reason: reason.into() });
    }
    let said = String::from_utf8_lossy(&said);
    if said.contains("does not contain any stream") || said.contains("matches no streams") {
        return Ok(None);
    }
    if !status.success() {
        return Err(Error::Ffmpeg { path: path.to_path_buf(), status: status.to_string(), tail: tail(&said) });
    }
    Ok(Some((bytes, said.into_owned())))
}

fn read_all(mut from: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes)?;
    Ok(bytes)
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
