//! Errors between raw frames and a file.

use std::path::PathBuf;

/// A failure while writing or reading media.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder could not be created, written, read or renamed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The operation: "create", "write", "read", "rename".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The video tensor has the wrong shape.
    #[error("video of shape {shape:?} is not [frames, 3, height, width] with every dimension at least 1")]
    VideoShape {
        /// The shape given.
        shape: Vec<usize>,
    },
    /// The frames array has the wrong shape.
    #[error("frames of shape {shape:?} are not [frames, height, width, 3] with every dimension at least 1")]
    FramesShape {
        /// The shape given.
        shape: Vec<usize>,
    },
    /// The audio cannot be encoded as it is.
    #[error("audio of {channels} channels at {rate} Hz: {reason}")]
    Audio {
        /// Channels given.
        channels: usize,
        /// Samples a second.
        rate: u32,
        /// The accepted values.
        reason: String,
    },
    /// A frame rate that is no rate.
    #[error("frame rate {0} is not a number of frames a second between 0.01 and 1000")]
    FrameRate(f64),
    /// ffmpeg was asked for and cannot be used.
    #[error("ffmpeg cannot be used: {reason}; install ffmpeg with libx264 or choose the embedded encoder")]
    FfmpegMissing {
        /// Why it does not start.
        reason: String,
    },
    /// A video cannot be read.
    #[error("{}: reading a video needs ffmpeg ({reason}): install ffmpeg, or give PNG folders, WAV files or dumps", path.display())]
    NoDecoder {
        /// Path of the video.
        path: PathBuf,
        /// Why ffmpeg does not start.
        reason: String,
    },
    /// A WAV file cannot be read.
    #[error("WAV {}: {reason}", path.display())]
    Wav {
        /// Path of the file.
        path: PathBuf,
        /// The defect, with the values found.
        reason: String,
    },
    /// ffmpeg stopped with an error.
    #[error("ffmpeg failed on {} ({status}): {tail}", path.display())]
    Ffmpeg {
        /// The file to be written.
        path: PathBuf,
        /// Its exit status.
        status: String,
        /// The end of what it wrote to stderr, on one line.
        tail: String,
    },
    /// One of the embedded encoders refused its input.
    #[error("the embedded {codec} encoder failed: {message}")]
    Embedded {
        /// "H.264" or "AAC".
        codec: &'static str,
        /// The encoder's own words.
        message: String,
    },
    /// A sample table or offset does not fit the MP4 boxes.
    #[error("the MP4 cannot hold this clip: {0}")]
    Container(String),
    /// A conditioning image that cannot be used.
    #[error("image {}: {message}", path.display())]
    Image {
        /// Path of the file.
        path: PathBuf,
        /// The decoder's own message.
        message: String,
    },
    /// A PNG file could not be decoded or encoded.
    #[error("PNG {}: {message}", path.display())]
    Png {
        /// Path of the file.
        path: PathBuf,
        /// The codec's own words.
        message: String,
    },
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
