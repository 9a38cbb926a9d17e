//! H.264 round trip of conditioning images, which the models need because they were trained on frames of compressed
//! videos.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ndarray::{Array4, s};
use rusty_h264_common::YuvFrame;
use rusty_h264_decoder::Decoder;
use rusty_h264_encoder::{Encoder, EncoderConfig, Preset};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bt601;
use super::error::{MediaError, Result, no_encoder, tail};
use super::ffmpeg;
use super::frames::Frames;
use super::yuv::Planes;

/// H.264 encoder for conditioning images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ImageH264 {
    /// ffmpeg if it has libx264; otherwise the built-in encoder, with a warning.
    #[default]
    Auto,
    /// ffmpeg with libx264 and the reference's settings; an error if it is not available.
    Ffmpeg,
    /// The built-in encoder: a similar loss of quality, but different artifacts.
    Builtin,
    /// No round trip: images are used unchanged.
    Off,
}

/// The H.264 encoder that is used on this host for an [`ImageH264`].
#[derive(Clone, Debug)]
pub struct RoundTrip {
    by: H264Encoder,
    threads: Option<usize>,
}

#[derive(Clone, Debug)]
enum H264Encoder {
    /// Program and version line.
    Ffmpeg(PathBuf, String),
    Builtin,
    Nobody,
}

impl std::fmt::Display for RoundTrip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.by {
            // The number of threads determines the slices of a frame and thus its pixels.
            H264Encoder::Ffmpeg(_, version) => {
                let cores = || std::thread::available_parallelism().map_or(1, usize::from);
                write!(f, "{version}: libx264, {} threads", self.threads.unwrap_or_else(cores))
            }
            H264Encoder::Builtin => f.write_str("built in: rusty_h264"),
            H264Encoder::Nobody => f.write_str("none"),
        }
    }
}

impl RoundTrip {
    /// Chooses the encoder; `ffmpeg` is a path or a name that is looked up on PATH.
    ///
    /// # Errors
    /// Returns an error if ffmpeg is requested but is not installed or has no libx264.
    pub fn choose(wanted: ImageH264, ffmpeg: &Path) -> Result<Self> {
        let found = || ffmpeg::probe(ffmpeg, &["libx264"]).map(|version| H264Encoder::Ffmpeg(ffmpeg.into(), version));
        let by = match wanted {
            ImageH264::Off => H264Encoder::Nobody,
            ImageH264::Builtin => H264Encoder::Builtin,
            ImageH264::Ffmpeg => found().map_err(|reason| MediaError::ImageH264 { reason })?,
            ImageH264::Auto => found().unwrap_or_else(|reason| {
                tracing::warn!(
                    "conditioning.h264: {reason}; using the built-in H.264 encoder for images, whose artifacts differ \
                     from the reference's"
                );
                H264Encoder::Builtin
            }),
        };
        Ok(RoundTrip { by, threads: None })
    }

    /// Returns the encoder that was chosen; never [`ImageH264::Auto`].
    pub fn encoder(&self) -> ImageH264 {
        match self.by {
            H264Encoder::Ffmpeg(..) => ImageH264::Ffmpeg,
            H264Encoder::Builtin => ImageH264::Builtin,
            H264Encoder::Nobody => ImageH264::Off,
        }
    }

    /// Sets the number of libx264 threads. The default is one per core, as in the reference implementation.
    #[must_use]
    pub fn with_threads(self, threads: usize) -> Self {
        RoundTrip { threads: Some(threads), ..self }
    }

    /// Encodes a frame as H.264 at quality `crf` and decodes the result. Drops an odd last row or column. Returns the
    /// frame unchanged if the encoder is off, if `crf` is 0, or if the frame has only one row or column.
    ///
    /// # Errors
    /// Returns an error if the encoder fails. Error messages refer to the image as `path`.
    pub fn apply(&self, frame: &Frames, crf: u8, path: &Path) -> Result<Frames> {
        let (height, width) = (frame.height() / 2 * 2, frame.width() / 2 * 2);
        if crf == 0 || height.min(width) == 0 {
            return Ok(frame.clone());
        }
        let rgb: Vec<u8> = frame.data().slice(s![..1, ..height, ..width, ..]).iter().copied().collect();
        let shown = match &self.by {
            H264Encoder::Nobody => return Ok(frame.clone()),
            H264Encoder::Builtin => builtin(&rgb, width, height, crf)?,
            H264Encoder::Ffmpeg(program, _) => self.ffmpeg(program, path, &rgb, [width, height], crf)?,
        };
        let bytes = shown.len();
        let message = format!("the H.264 round trip returned {} bytes for {width}x{height} pixels", bytes);
        let fail = |_| MediaError::Image { path: path.to_path_buf(), message };
        Frames::new(Array4::from_shape_vec((1, height, width, 3), shown).map_err(fail)?)
    }

    /// Runs the round trip in ffmpeg with Lightricks' settings. The frame rate matters because x264 derives the
    /// quantizer from the CRF and the frame duration.
    fn ffmpeg(&self, program: &Path, path: &Path, rgb: &[u8], [w, h]: [usize; 2], crf: u8) -> Result<Vec<u8>> {
        let (size, crf) = (format!("{w}x{h}"), crf.to_string());
        let threads = self.threads.map_or("auto".into(), |n| n.to_string());
        let source =
            ["-f", "rawvideo", "-pixel_format", "rgb24", "-video_size", &size, "-framerate", "1", "-i", "pipe:0"];
        let x264 = ["-sws_flags", "bilinear", "-c:v", "libx264", "-thread_type", "slice", "-threads", &threads];
        let quality = ["-preset", "veryfast", "-crf", &crf, "-pix_fmt", "yuv420p", "-f", "h264", "pipe:1"];
        let encoded = pipe(program, path, &[&source[..], &x264, &quality].concat(), rgb)?;
        let back = ["-f", "h264", "-i", "pipe:0", "-frames:v", "1", "-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"];
        pipe(program, path, &back, &encoded)
    }
}

/// Runs the round trip with the built-in codecs, at an estimate of libx264's quantizer.
fn builtin(rgb: &[u8], width: usize, height: usize, crf: u8) -> Result<Vec<u8>> {
    let failed = |message: String| MediaError::Embedded { codec: "H.264", message };
    let planes = bt601::planes(rgb, width, height);
    let mut config = EncoderConfig::new(width, height);
    config.preset = Preset::Quality;
    config.qp = quantizer(crf, &planes, width);
    config.i_qp_offset = 0;
    config.gop_size = 1;
    config.mbtree = false;
    let Planes { y, u, v } = planes;
    let frame = YuvFrame { width, height, y, u, v };
    let stream = Encoder::new(config).and_then(|e| e.encode_all(&[frame])).map_err(|e| failed(e.to_string()))?.concat();
    let shown = Decoder::new()
        .decode_stream(&stream)
        .map_err(|e| failed(format!("the encoded image cannot be decoded: {e}")))?;
    let YuvFrame { y, u, v, .. } =
        shown.into_iter().next().ok_or_else(|| failed("the encoded image contains no frame".into()))?;
    Ok(bt601::rgb(&Planes { y, u, v }, width))
}

/// Estimates libx264's average quantizer for a CRF at one frame per second with the preset's macroblock tree. The
/// estimate is the sum of the CRF, 5.4 for the macroblock tree (13.5·(1 - qcomp), with qcomp = 0.6), 6·log2 of the
/// duration factor (0.04 s / 1 s)^0.4, and the mean adaptive-quantization offset, which depends on the energy of each
/// block's samples.
fn quantizer(crf: u8, planes: &Planes, width: usize) -> u8 {
    let height = planes.y.len() / width;
    let blocks = (0..height / 16).flat_map(|row| (0..width / 16).map(move |column| (row, column)));
    let offsets: Vec<f64> = blocks
        .map(|(row, column)| {
            let of = |plane: &[u8], size| energy(plane, width * size / 16, [row * size, column * size], size);
            let energy = of(&planes.y, 16) + of(&planes.u, 8) + of(&planes.v, 8);
            // Negative offsets, which smooth blocks have, count as 0: such blocks lose little.
            (1.0397 * (energy.max(1.0).log2() - 14.427)).max(0.0)
        })
        .collect();
    let mean = offsets.iter().sum::<f64>() / offsets.len().max(1) as f64;
    (f64::from(crf) + 5.4 + 6.0 * 0.4 * 0.04f64.log2() + mean).round().clamp(0.0, 51.0) as u8
}

/// Returns the sum of squared deviations of a block's samples from their mean.
fn energy(plane: &[u8], stride: usize, [top, left]: [usize; 2], size: usize) -> f64 {
    let rows = (top..top + size).map(|row| &plane[row * stride + left..][..size]);
    let (sum, squares) = rows.flatten().fold((0.0, 0.0), |(sum, squares), &v| {
        let v = f64::from(v);
        (sum + v, squares + v * v)
    });
    squares - sum * sum / (size * size) as f64
}

/// Runs ffmpeg with `input` on stdin and returns its stdout.
fn pipe(ffmpeg: &Path, path: &Path, arguments: &[&str], input: &[u8]) -> Result<Vec<u8>> {
    let mut command = Command::new(ffmpeg);
    command.args(["-hide_banner", "-loglevel", "error", "-nostdin"]).args(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(no_encoder(path))?;
    let stdin = child.stdin.take();
    let (sent, output) = std::thread::scope(|scope| {
        let sender = scope.spawn(move || stdin.map_or(Ok(()), |mut stdin| stdin.write_all(input)));
        let output = child.wait_with_output();
        (sender.join().unwrap_or(Ok(())), output)
    });
    let output = output.map_err(MediaError::io("wait for ffmpeg on", path))?;
    if !output.status.success() {
        let tail = tail(&String::from_utf8_lossy(&output.stderr));
        return Err(MediaError::Ffmpeg { path: path.to_path_buf(), status: output.status.to_string(), tail });
    }
    sent.map_err(MediaError::io("send an image to ffmpeg for", path))?;
    Ok(output.stdout)
}
