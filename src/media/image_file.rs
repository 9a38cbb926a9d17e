//! Conditioning images: read, re-encoded as H.264, resized to the video.

use std::io::{Cursor, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use image::ImageReader;
use ndarray::{Array4, Array5, s};

use super::error::{Error, Result};
use super::frames::Frames;

/// Reads a PNG, JPEG or WebP, whatever its name, as one RGB frame; transparency is dropped, 16 bits become 8.
///
/// # Errors
/// No such file; another format; a damaged image.
pub fn read_image(path: &Path) -> Result<Frames> {
    let bad = |message: String| Error::Image { path: path.to_path_buf(), message };
    let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
    let reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format().map_err(Error::io("read", path))?;
    if reader.format().is_none() {
        return Err(bad("it is none of PNG, JPEG, WebP".into()));
    }
    let rgb = reader.decode().map_err(|e| bad(e.to_string()))?.to_rgb8();
    let (w, h) = (rgb.width() as usize, rgb.height() as usize);
    Frames::new(Array4::from_shape_vec((1, h, w, 3), rgb.into_raw()).map_err(|e| bad(e.to_string()))?)
}

/// A frame as H.264 of a quality `crf` shows it: the models were trained on such. An odd last row or column is dropped.
///
/// # Errors
/// ffmpeg is not there or fails; `path` names the image in messages.
pub fn through_h264(frame: &Frames, crf: u8, ffmpeg: &Path, path: &Path) -> Result<Frames> {
    let (h, w) = (frame.height() / 2 * 2, frame.width() / 2 * 2);
    if h == 0 || w == 0 {
        return Err(Error::Image { path: path.to_path_buf(), message: "H.264 needs two rows and columns".into() });
    }
    let raw: Vec<u8> = frame.data().slice(s![..1, ..h, ..w, ..]).iter().copied().collect();
    let size = format!("{w}x{h}");
    let source = ["-f", "rawvideo", "-pixel_format", "rgb24", "-video_size", &size, "-i", "pipe:0"];
    let crf = crf.to_string();
    let x264 = ["-c:v", "libx264", "-preset", "veryfast", "-crf", &crf, "-pix_fmt", "yuv420p", "-f", "h264", "pipe:1"];
    let encoded = pipe(ffmpeg, path, &[&source[..], &x264].concat(), &raw)?;
    let decoded = pipe(
        ffmpeg,
        path,
        &["-f", "h264", "-i", "pipe:0", "-frames:v", "1", "-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"],
        &encoded,
    )?;
    let bytes = decoded.len();
    let fail = |_| Error::Image { path: path.to_path_buf(), message: format!("ffmpeg gave {bytes} bytes for {size}") };
    Frames::new(Array4::from_shape_vec((1, h, w, 3), decoded).map_err(fail)?)
}

/// stdout of ffmpeg for `input` on its stdin.
fn pipe(ffmpeg: &Path, path: &Path, arguments: &[&str], input: &[u8]) -> Result<Vec<u8>> {
    let start = |e: std::io::Error| Error::FfmpegMissing { reason: format!("it does not start: {e}") };
    let mut command = Command::new(ffmpeg);
    command.args(["-hide_banner", "-loglevel", "error", "-nostdin"]).args(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(start)?;
    let stdin = child.stdin.take();
    let (sent, output) = std::thread::scope(|scope| {
        let sender = scope.spawn(move || stdin.map_or(Ok(()), |mut stdin| stdin.write_all(input)));
        let output = child.wait_with_output();
        (sender.join().unwrap_or(Ok(())), output)
    });
    let output = output.map_err(Error::io("wait for ffmpeg on", path))?;
    if !output.status.success() {
        let tail = super::ffmpeg::tail(&String::from_utf8_lossy(&output.stderr));
        return Err(Error::Ffmpeg { path: path.to_path_buf(), status: output.status.to_string(), tail });
    }
    sent.map_err(Error::io("send an image to ffmpeg for", path))?;
    Ok(output.stdout)
}

/// A frame scaled to cover `height` and `width`, what stands over cut off on both sides: `[1, 3, 1, height, width]` in
/// -1..1. Bilinear between pixel centres, without a filter when it shrinks, as the reference does.
pub fn covering(frame: &Frames, height: usize, width: usize) -> Array5<f32> {
    let (h, w) = (frame.height(), frame.width());
    let scale = f64::max(height as f64 / h as f64, width as f64 / w as f64);
    let scaled = |n: usize| (n as f64 * scale).ceil() as usize;
    let rows = taps(h, scaled(h), height);
    let columns = taps(w, scaled(w), width);
    let data = frame.data();
    Array5::from_shape_fn((1, 3, 1, height, width), |(_, c, _, y, x)| {
        let (top, bottom, v) = rows[y];
        let (left, right, u) = columns[x];
        let at = |row: usize, column: usize| f32::from(data[[0, row, column, c]]);
        let upper = at(top, left) * (1.0 - u) + at(top, right) * u;
        let lower = at(bottom, left) * (1.0 - u) + at(bottom, right) * u;
        (upper * (1.0 - v) + lower * v) / 127.5 - 1.0
    })
}

/// For each of the `wanted` middle places of `scaled`: the two neighbours among `size`, and the second one's part.
fn taps(size: usize, scaled: usize, wanted: usize) -> Vec<(usize, usize, f32)> {
    let skipped = (scaled - wanted) / 2;
    let ratio = size as f32 / scaled as f32;
    let place = |i: usize| {
        let at = (((i + skipped) as f32 + 0.5) * ratio - 0.5).max(0.0);
        let first = (at as usize).min(size - 1);
        (first, (first + 1).min(size - 1), at - first as f32)
    };
    (0..wanted).map(place).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn gradient(h: usize, w: usize) -> Frames {
        Frames::new(Array4::from_shape_fn((1, h, w, 3), |(_, y, x, c)| (y * 20 + x * 7 + c * 3) as u8)).unwrap()
    }

    #[test]
    fn the_same_size_is_the_same_image() {
        let frame = gradient(4, 6);
        let got = covering(&frame, 4, 6);
        assert_eq!(got.shape(), [1, 3, 1, 4, 6]);
        assert_eq!(got[[0, 2, 0, 3, 5]], f32::from(frame.data()[[0, 3, 5, 2]]) / 127.5 - 1.0);
    }

    /// 4x6 to 8x8: scaled by 2 to 8x12, two columns cut on each side.
    #[test]
    fn what_stands_over_is_cut_on_both_sides() {
        let got = covering(&gradient(4, 6), 8, 8);
        // Row 1 lies at (1.5 / 2 - 0.5) = 0.25, column 0 at place 2: (2.5 / 2 - 0.5) = 0.75.
        let want = (0.25 * 20.0 + 0.75 * 7.0) / 127.5 - 1.0;
        assert!((got[[0, 0, 0, 1, 0]] - want).abs() < 1e-6, "{}", got[[0, 0, 0, 1, 0]]);
        // Edges repeat.
        assert!((got[[0, 0, 0, 0, 0]] - (0.75 * 7.0 / 127.5 - 1.0)).abs() < 1e-6);
    }

    /// 124 bytes that claim 100,000 rows and columns, 30 GB.
    #[test]
    fn an_image_that_claims_more_than_memory_is_an_error() {
        let error = read_image(Path::new("fuzz/seeds/media/huge.png")).unwrap_err().to_string();
        assert!(error.contains("huge.png") && error.contains("limit"), "{error}");
    }

    #[test]
    fn a_file_of_another_kind_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.png");
        std::fs::write(&path, b"no image at all").unwrap();
        let e = read_image(&path).unwrap_err().to_string();
        assert!(e.contains("image.png") && e.contains("PNG, JPEG, WebP"), "{e}");
        let e = read_image(&dir.path().join("none.png")).unwrap_err().to_string();
        assert!(e.contains("cannot read") && e.contains("none.png"), "{e}");
    }
}
