//! Errors between raw frames and a file.

use std::path::PathBuf;

/// A failure while writing or reading media.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("video of shape {shape:?} is not [frames, 3, height, width] with every dimension at least 1")]
    VideoShape { shape: Vec<usize> },
    #[error("frames of shape {shape:?} are not [frames, height, width, 3] with every dimension at least 1")]
    FramesShape { shape: Vec<usize> },
    #[error("audio of {channels} channels at {rate} Hz: {reason}")]
    Audio { channels: usize, rate: u32, reason: String },
    #[error("frame rate {0} is not a number of frames a second between 0.01 and 1000")]
    FrameRate(f64),
    #[error("ffmpeg cannot be used: {reason}; install ffmpeg with libx264 or choose the embedded encoder")]
    FfmpegMissing { reason: String },
    #[error("conditioning.h264: ffmpeg: {reason}; install ffmpeg with libx264, or set it to auto, builtin or off")]
    ImageH264 { reason: String },
    #[error("{}: reading a video needs ffmpeg ({reason}): install ffmpeg, or give PNG folders, WAV files or dumps", path.display())]
    NoDecoder { path: PathBuf, reason: String },
    #[error("video {}: {reason}", path.display())]
    Clip { path: PathBuf, reason: String },
    #[error("sound {}: {reason}", path.display())]
    Sound { path: PathBuf, reason: String },
    #[error("sound {}: {}", path.display(), undecoded(why, ffmpeg.as_deref()))]
    Undecoded {
        path: PathBuf,
        /// Why the decoders of this binary do not read it.
        why: String,
        /// ffmpeg's words; `None`: it is not installed.
        ffmpeg: Option<String>,
    },
    #[error("WAV {}: {reason}", path.display())]
    Wav { path: PathBuf, reason: String },
    #[error("ffmpeg failed on {} ({status}): {tail}", path.display())]
    Ffmpeg { path: PathBuf, status: String, tail: String },
    #[error("the embedded {codec} encoder failed: {message}")]
    Embedded { codec: &'static str, message: String },
    #[error("{work} panicked: {message}; this is a bug, please report it with the command")]
    Panicked { work: &'static str, message: String },
    #[error("the MP4 cannot hold this clip: {0}")]
    Container(String),
    #[error("image {}: {message}", path.display())]
    Image { path: PathBuf, message: String },
    #[error("PNG {}: {message}", path.display())]
    Png { path: PathBuf, message: String },
}

/// What is wrong with a sound that nothing decodes, and what to do.
fn undecoded(why: &str, ffmpeg: Option<&str>) -> String {
    match ffmpeg {
        Some(words) => format!("{why}, and ffmpeg cannot decode it: {words}"),
        None => format!("{why}; install ffmpeg, or give WAV, FLAC, MP3, AAC, ALAC or Vorbis"),
    }
}

/// Result of media input and output.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An [`Error::Io`], as a closure for `map_err`.
    pub(crate) fn io(action: &'static str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Error::Io { action, path, source }
    }
}

/// A given video that is not read, and why.
pub(super) fn unusable(path: &std::path::Path, reason: &str) -> Error {
    Error::Clip { path: path.to_path_buf(), reason: reason.into() }
}

/// The last lines of a program's complaints, on one line.
pub(super) fn tail(said: &str) -> String {
    let lines: Vec<&str> = said.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    match lines.len() {
        0 => "it said nothing".to_string(),
        n => lines[n.saturating_sub(6)..].join(" | "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_is_the_end_on_one_line() {
        assert_eq!(tail(""), "it said nothing");
        assert_eq!(tail("a\n\nb\n c\nd\ne\nf\ng\n"), "b | c | d | e | f | g");
    }
}
