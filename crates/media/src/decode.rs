//! Decoding of videos with an installed ffmpeg.

use std::ffi::OsString;
use std::io::{self, Read};
use std::panic::resume_unwind;
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};
use std::thread;

use ndarray::Array4;

use super::audio::Audio;
use super::error::{MediaError, Result, no_decoder, tail};
use super::frames::Frames;
use super::wav::parse_wav;

/// ffmpeg arguments before an untrusted input: allow only containers that contain the audio data themselves. This
/// excludes playlists and scripts, which refer to other files and hosts.
pub(super) const PLAIN_FILES: [&str; 4] = [
    "-protocol_whitelist",
    "file,pipe",
    "-format_whitelist",
    "aac,ac3,aiff,amr,amrnb,amrwb,ape,aptx,aptx_hd,asf,au,avi,caf,dsf,dts,dtshd,dv,eac3,flac,flv,g722,gsm,gxf,iff,ircam,live_flv,\
     loas,matroska,mlp,mov,mp3,mpc,mpc8,mpeg,mpegts,mxf,nistsphere,nut,ogg,oma,rm,sbc,sox,spdif,swf,tak,truehd,tta,voc,vqf,w64,wav,\
     wtv,wv,xwma",
];

/// Decodes all frames and the sound of a video file with `ffmpeg`, a path or a name that is looked up on PATH. Returns
/// `None` for a stream that the file does not have.
///
/// # Errors
/// Returns an error if ffmpeg is not installed or cannot read the file; the error contains ffmpeg's message.
pub fn read_video(path: &Path, ffmpeg: &Path) -> Result<(Option<Frames>, Option<Audio>)> {
    std::fs::metadata(path).map_err(MediaError::io("read", path))?;
    // Each PPM image contains its own size, and passthrough keeps the frame count. Without `-pix_fmt`, ffmpeg writes
    // two bytes per value for 10-bit video.
    let as_ppm = ["-an", "-fps_mode", "passthrough", "-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24"];
    let frames =
        decoded(path, ffmpeg, &[], &as_ppm)?.map(|bytes| pixmaps(&bytes).ok_or_else(|| broken(path, "frames")));
    let sound = decoded(path, ffmpeg, &[], &["-vn", "-f", "wav", "-c:a", "pcm_f32le"])?;
    let sound = sound.map(|bytes| parse_wav(&bytes).map_err(|_| broken(path, "samples")));
    Ok((frames.transpose()?, sound.transpose()?))
}

fn broken(path: &Path, what: &str) -> MediaError {
    MediaError::Ffmpeg {
        path: path.to_path_buf(),
        status: "exit code 0".into(),
        tail: format!("cannot parse the {what} that ffmpeg decoded"),
    }
}

/// Returns ffmpeg's stdout for one stream of a file, with ffmpeg arguments `before` the input. `None`: the file has no
/// such stream.
pub(super) fn decoded(path: &Path, ffmpeg: &Path, before: &[&str], how: &[&str]) -> Result<Option<Vec<u8>>> {
    Ok(decode_with_messages(path, ffmpeg, before, how, u64::MAX)?.map(|(bytes, _)| bytes))
}

/// Decodes a stream like [`decoded`], and also returns ffmpeg's messages. If the output has more than `most` bytes,
/// stops ffmpeg and returns an error.
pub(super) fn decode_with_messages(
    path: &Path,
    ffmpeg: &Path,
    before: &[&str],
    how: &[&str],
    most: u64,
) -> Result<Option<(Vec<u8>, String)>> {
    let mut bytes = Vec::new();
    let mut is_long = false;
    let made = run(path, ffmpeg, before, how, |out| {
        let read = out.take(most.saturating_add(1)).read_to_end(&mut bytes);
        is_long = bytes.len() as u64 > most;
        read
    });
    if is_long {
        let reason =
            "the frames do not fit in this host's memory; use a shorter part, e.g. ffmpeg -t SECONDS -i IN OUT.mp4";
        return Err(MediaError::Clip { path: path.to_path_buf(), reason: reason.into() });
    }
    let Some(FfmpegOutput { made, said }) = made? else { return Ok(None) };
    made.map_err(MediaError::io(OUTPUT, path))?;
    Ok(Some((bytes, said)))
}

const OUTPUT: &str = "read the output of ffmpeg for";

/// Output of a successful ffmpeg run.
pub(super) struct FfmpegOutput<T> {
    pub(super) made: T,
    /// Messages about errors that did not stop ffmpeg, one per line; empty if it decoded the complete file.
    pub(super) said: String,
}

/// Runs ffmpeg on a file and passes its stdout to `read`. If `read` returns before the end of the output, ffmpeg is
/// stopped. Returns `None` if the file has no stream of the requested kind.
///
/// # Errors
/// Returns an error if ffmpeg is not installed, cannot read the file, or was stopped.
pub(super) fn run<T>(
    path: &Path,
    ffmpeg: &Path,
    before: &[&str],
    how: &[&str],
    read: impl FnOnce(ChildStdout) -> T,
) -> Result<Option<FfmpegOutput<T>>> {
    let mut command = Command::new(ffmpeg);
    command.args(["-hide_banner", "-loglevel", "error"]).args(before).arg("-i").arg(as_file(path));
    command.args(how).arg("pipe:1").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(no_decoder(path))?;
    let no_pipe = || MediaError::io(OUTPUT, path)(io::ErrorKind::BrokenPipe.into());
    let (out, errors) = (child.stdout.take().ok_or_else(no_pipe)?, child.stderr.take().ok_or_else(no_pipe)?);
    let (made, said) = thread::scope(|scope| {
        let said = scope.spawn(|| read_all(errors));
        // If `read` returns early, the pipe closes and stops ffmpeg.
        let made = read(out);
        (made, said.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    let status = child.wait().map_err(MediaError::io(OUTPUT, path))?;
    let said = said.map_err(MediaError::io(OUTPUT, path))?;
    let said = String::from_utf8_lossy(&said);
    if said.contains("does not contain any stream") || said.contains("matches no streams") {
        return Ok(None);
    }
    let said = plain(&said, path, how.contains(&"-vn"));
    if !status.success() {
        return Err(MediaError::Ffmpeg { path: path.to_path_buf(), status: status.to_string(), tail: tail(&said) });
    }
    Ok(Some(FfmpegOutput { made, said }))
}

/// Formats a path for ffmpeg. Without the `file:` prefix, ffmpeg would read `take:1.mp3` as a URL with the protocol
/// `take`.
pub(super) fn as_file(path: &Path) -> OsString {
    let mut name = OsString::from("file:");
    name.push(path);
    name
}

/// Video decoders whose messages do not concern audio. ffmpeg opens them even if it decodes only the audio of a video.
const VIDEO_DECODERS: [&str; 16] = [
    "av1",
    "dvvideo",
    "flv",
    "h263",
    "h264",
    "hevc",
    "libdav1d",
    "mjpeg",
    "mpeg1video",
    "mpeg2video",
    "mpeg4",
    "theora",
    "vc1",
    "vp8",
    "vp9",
    "wmv3",
];

/// Removes prefixes from ffmpeg's messages: component names with memory addresses, and the file name, which the error
/// already contains. If `is_sound` is true, also removes messages of video decoders.
pub(super) fn plain(said: &str, path: &Path, is_sound: bool) -> String {
    let file = as_file(path);
    let prefix = format!("{}: ", file.to_string_lossy());
    let mut lines: Vec<&str> = Vec::new();
    for line in said.lines() {
        let mut line = line.trim();
        let source = line.strip_prefix('[').and_then(|line| line.split_once(" @ "));
        if is_sound && source.is_some_and(|(source, _)| VIDEO_DECODERS.contains(&source)) {
            continue;
        }
        while let Some((_, rest)) = line.strip_prefix('[').and_then(|line| line.split_once("] ")) {
            line = rest.trim_start();
        }
        let line = line.strip_prefix(&prefix).unwrap_or(line);
        if !line.is_empty() && lines.last() != Some(&line) {
            lines.push(line);
        }
    }
    lines.join("\n")
}

fn read_all(mut from: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Parses concatenated PPM images, which must have the same size.
pub(super) fn pixmaps(mut bytes: &[u8]) -> Option<Frames> {
    let (mut pixels, mut size, mut count) = (Vec::new(), None, 0);
    while !bytes.is_empty() {
        // The header is "P6", width, height and maximum value; the pixel bytes follow.
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
    fn concatenated_ppm_images_are_parsed() {
        let two = b"P6\n2 1\n255\nabc\nefP6\n2 1\n255\n123456";
        let frames = pixmaps(two).unwrap();
        assert_eq!((frames.count(), frames.height(), frames.width()), (2, 1, 2));
        assert_eq!(frames.iter().next().unwrap(), b"abc\nef");
        for bad in [&b""[..], b"P5\n2 1\n255\nabcdef", b"P6\n2 1\n255\nabc", b"P6\n2 1\n65535\nabcdef"] {
            assert!(pixmaps(bad).is_none());
        }
    }

    #[test]
    fn ffmpeg_messages_lose_addresses_and_paths() {
        let said = "[h264 @ 0x1] no frame!\n[mov,mp4 @ 0x5622ff461900] moov atom not found\n[aac @ 0x1] [x @ 0x2] Header missing\n\
                    [aac @ 0x1] Header missing\n\nfile:/tmp/a b.m4a: Invalid data found when processing input\n";
        let of = |is_sound| plain(said, Path::new("/tmp/a b.m4a"), is_sound);
        let sound = "moov atom not found\nHeader missing\nInvalid data found when processing input";
        assert_eq!(of(true), sound);
        assert_eq!(of(false), format!("no frame!\n{sound}"));
    }

    #[test]
    fn missing_ffmpeg_error_suggests_alternatives() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = read_video(file.path(), Path::new("/nowhere/ffmpeg")).unwrap_err().to_string();
        assert!(error.contains("install ffmpeg") && error.contains("PNG"), "{error}");
    }
}
