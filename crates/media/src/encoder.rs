//! Choice of the video encoder: ffmpeg if it is installed, otherwise the built-in encoders.

use super::error::{MediaError, Result};
use super::ffmpeg;
use super::options::{EncoderChoice, Mp4Options};

/// The encoder that wrote a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encoder {
    /// ffmpeg, with its version line.
    Ffmpeg(String),
    /// The encoders built into this binary.
    Embedded,
}

impl std::fmt::Display for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Encoder::Ffmpeg(version) => write!(f, "ffmpeg ({version}): libx264 and aac"),
            Encoder::Embedded => f.write_str("embedded: rusty_h264 and syom AAC-LC"),
        }
    }
}

/// Resolves the requested encoder to one that is available on this machine.
pub(super) fn choose(options: &Mp4Options) -> Result<Encoder> {
    if options.encoder == EncoderChoice::Embedded {
        return Ok(Encoder::Embedded);
    }
    match ffmpeg::probe(&options.ffmpeg, &["libx264", "aac"]) {
        Ok(version) => Ok(Encoder::Ffmpeg(version)),
        Err(reason) if options.encoder == EncoderChoice::Ffmpeg => Err(MediaError::FfmpegMissing { reason }),
        Err(reason) => {
            tracing::info!("{reason}; using the embedded encoder");
            Ok(Encoder::Embedded)
        }
    }
}
