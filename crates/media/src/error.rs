//! Errors of media input and output.

use std::path::PathBuf;

/// Error of reading or writing media.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("video of shape {shape:?} is not [frames, 3, height, width] with every dimension at least 1")]
    VideoShape { shape: Vec<usize> },
    #[error("frames of shape {shape:?} are not [frames, height, width, 3] with every dimension at least 1")]
    FramesShape { shape: Vec<usize> },
    #[error("invalid audio with {channels} channels at {rate} Hz: {reason}")]
    Audio { channels: usize, rate: u32, reason: String },
    #[error("frame rate {0} is not between 0.01 and 1000 frames per second")]
    FrameRate(f64),
    #[error("ffmpeg cannot be used: {reason}; install ffmpeg with libx264 or choose the embedded encoder")]
    FfmpegMissing { reason: String },
    #[error(
        "conditioning.h264 is ffmpeg, but {reason}; install ffmpeg with libx264, or set conditioning.h264 to auto, builtin or off"
    )]
    ImageH264 { reason: String },
    #[error("{}: reading a video needs ffmpeg ({reason}): install ffmpeg, or pass a folder of PNG frames, a WAV file or a dump", path.display())]
    NoDecoder { path: PathBuf, reason: String },
    #[error("video {}: {reason}", path.display())]
    Clip { path: PathBuf, reason: String },
    #[error("sound {}: {reason}", path.display())]
    Sound { path: PathBuf, reason: String },
    #[error("sound {}: {}", path.display(), undecoded(why, ffmpeg.as_deref()))]
    Undecoded {
        path: PathBuf,
        /// Why the built-in decoders cannot read the file.
        why: String,
        /// ffmpeg's message. `None`: ffmpeg is not installed.
        ffmpeg: Option<String>,
    },
    #[error("WAV {}: {reason}", path.display())]
    Wav { path: PathBuf, reason: String },
    #[error("ffmpeg failed on {} ({status}): {tail}", path.display())]
    Ffmpeg { path: PathBuf, status: String, tail: String },
    #[error("the embedded {codec} encoder failed: {message}")]
    Embedded { codec: &'static str, message: String },
    #[error("{work} panicked: {message}; this is a bug, please report it together with the command line")]
    Panicked { work: &'static str, message: String },
    #[error("cannot write the MP4: {0}")]
    Container(String),
    #[error("image {}: {message}", path.display())]
    Image { path: PathBuf, message: String },
    #[error("PNG {}: {message}", path.display())]
    Png { path: PathBuf, message: String },
}

/// Formats an [`Error::Undecoded`]: the cause and a remedy.
fn undecoded(why: &str, ffmpeg: Option<&str>) -> String {
    match ffmpeg {
        Some(words) => format!("{why}, and ffmpeg cannot decode the file: {words}"),
        None => format!("{why}; install ffmpeg, or convert the file to WAV, FLAC, MP3, AAC, ALAC or Vorbis"),
    }
}

/// Result of media input and output.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns a closure for `map_err` that creates an [`Error::Io`].
    pub fn io(action: &'static str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Error::Io { action, path, source }
    }
}

/// Returns an [`Error::Clip`] for an input video that cannot be used.
pub(super) fn unusable(path: &std::path::Path, reason: &str) -> Error {
    Error::Clip { path: path.to_path_buf(), reason: reason.into() }
}

/// Joins the last six lines of a program's stderr into one line.
pub(super) fn tail(said: &str) -> String {
    let lines: Vec<&str> = said.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    match lines.len() {
        0 => "no message".to_string(),
        n => lines[n.saturating_sub(6)..].join(" | "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_joins_last_lines() {
        assert_eq!(tail(""), "no message");
        assert_eq!(tail("a\n\nb\n c\nd\ne\nf\ng\n"), "b | c | d | e | f | g");
    }
}
