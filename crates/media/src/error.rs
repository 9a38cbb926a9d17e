//! Errors of media input and output.

use std::io::ErrorKind;
use std::path::PathBuf;

use ltx2_base::atomic_file::FileError;

/// Error of reading or writing media.
#[derive(Debug, thiserror::Error)]
pub enum MediaError {
    /// A file operation failed, or data could not be passed to ffmpeg.
    #[error(transparent)]
    File(#[from] FileError),
    /// [`Frames::from_video`](crate::Frames::from_video) rejected an array.
    #[error("video of shape {shape:?} is not [frames, 3, height, width] with every dimension at least 1")]
    VideoShape {
        /// Shape of the rejected array.
        shape: Vec<usize>,
    },
    /// [`Frames::new`](crate::Frames::new) rejected an array.
    #[error("frames of shape {shape:?} are not [frames, height, width, 3] with every dimension at least 1")]
    FramesShape {
        /// Shape of the rejected array.
        shape: Vec<usize>,
    },
    /// Samples with an unsupported shape or sample rate, or too many samples for a WAV file.
    #[error("invalid audio with {channels} channels at {rate} Hz: {reason}")]
    Audio {
        /// Number of channels of the rejected samples.
        channels: usize,
        /// Sample rate in Hz.
        rate: u32,
        /// The violated limit.
        reason: String,
    },
    /// A frame rate, in frames per second, outside the supported range.
    #[error("frame rate {0} is not between 0.01 and 1000 frames per second")]
    FrameRate(f64),
    /// ffmpeg is needed to write a file or to encode an image, but cannot be run or lacks an encoder.
    #[error("ffmpeg cannot be used: {reason}; install ffmpeg with libx264 or choose the embedded encoder")]
    FfmpegMissing {
        /// Reason why ffmpeg cannot be used, such as `ffmpeg is not installed`.
        reason: String,
    },
    /// [`ImageH264::Ffmpeg`](crate::ImageH264::Ffmpeg) is requested, but ffmpeg cannot be run or lacks libx264.
    #[error(
        "conditioning.h264 is ffmpeg, but {reason}; install ffmpeg with libx264, or set conditioning.h264 to auto, builtin or off"
    )]
    ImageH264 {
        /// Reason why ffmpeg cannot be used, such as `ffmpeg is not installed`.
        reason: String,
    },
    /// ffmpeg is needed to read a file, but cannot be run.
    #[error("{}: reading a video needs ffmpeg ({reason}); install ffmpeg, or pass a folder of PNG frames, a WAV file or a file written by --dump", path.display())]
    NoDecoder {
        /// Input file.
        path: PathBuf,
        /// I/O error of starting ffmpeg.
        reason: String,
    },
    /// An input video cannot be used, for example because it is damaged or its frame rate varies.
    #[error("video {}: {reason}", path.display())]
    Clip {
        /// Video file, or folder of PNG frames.
        path: PathBuf,
        /// Description of the problem with the video, with a remedy where one exists.
        reason: String,
    },
    /// Audio that can be decoded, but cannot be used, for example because of its sample rate or its length.
    #[error("sound {}: {reason}", path.display())]
    Sound {
        /// Audio or video file.
        path: PathBuf,
        /// Description of the problem with the audio, with a remedy where one exists.
        reason: String,
    },
    /// Neither the built-in decoders nor ffmpeg can decode the audio of a file.
    #[error("sound {}: {}", path.display(), undecoded(why, ffmpeg.as_deref()))]
    Undecoded {
        /// Audio or video file.
        path: PathBuf,
        /// Reason why the built-in decoders cannot read the file.
        why: String,
        /// ffmpeg's message. `None`: ffmpeg is not installed.
        ffmpeg: Option<String>,
    },
    /// [`read_wav`](crate::read_wav) cannot parse a file.
    #[error("WAV {}: {reason}", path.display())]
    Wav {
        /// WAV file.
        path: PathBuf,
        /// Description of the malformed or unsupported part.
        reason: String,
    },
    /// ffmpeg was started, but failed, or its output cannot be parsed.
    #[error("ffmpeg failed on {} ({status}): {tail}", path.display())]
    Ffmpeg {
        /// File that ffmpeg read, or the output file for which it ran.
        path: PathBuf,
        /// Exit status, such as `exit status: 1`.
        status: String,
        /// Last six lines of ffmpeg's messages, joined by ` | `, or a description of the problem with its output.
        tail: String,
    },
    /// A built-in encoder failed, or the image that it encoded cannot be decoded again.
    #[error("the embedded {codec} encoder failed: {message}")]
    Embedded {
        /// `H.264` or `AAC`.
        codec: &'static str,
        /// Message of the codec library, or the check that failed.
        message: String,
    },
    /// A thread that encodes a video panicked.
    #[error("{work} panicked: {message}; this is a bug, please report it together with the command line")]
    Panicked {
        /// Description of the thread, such as `the H.264 encoder`.
        work: &'static str,
        /// The panic message.
        message: String,
    },
    /// The encoded tracks cannot be written as an MP4, for the given reason. For example, they exceed 4 GiB.
    #[error("cannot write the MP4: {0}")]
    Container(String),
    /// An image cannot be decoded or is not supported, or its H.264 round trip failed.
    #[error("image {}: {message}", path.display())]
    Image {
        /// Image file.
        path: PathBuf,
        /// Description of the problem, with a remedy where one exists.
        message: String,
    },
    /// An EXR frame cannot be encoded.
    #[error("EXR {}: {message}", path.display())]
    Exr {
        /// EXR file.
        path: PathBuf,
        /// Message of the encoder.
        message: String,
    },
    /// ffmpeg is needed to encode HDR video, but cannot be run or lacks the encoder.
    #[error(
        "HDR video cannot be encoded: {reason}; install ffmpeg with {encoder}, or set output.hdr_video to none to write only \
         EXR frames and the SDR preview"
    )]
    HdrEncoder {
        /// Reason why ffmpeg cannot be used, such as `ffmpeg is not installed`.
        reason: String,
        /// ffmpeg's name of the encoder.
        encoder: &'static str,
    },
    /// A PNG frame cannot be read or encoded, or a folder has no usable PNG frames.
    #[error("PNG {}: {message}", path.display())]
    Png {
        /// PNG file, or folder of PNG frames.
        path: PathBuf,
        /// Description of the problem with the file or folder.
        message: String,
    },
}

/// Formats a [`MediaError::Undecoded`]: the cause and a remedy.
fn undecoded(why: &str, ffmpeg: Option<&str>) -> String {
    match ffmpeg {
        Some(words) => format!("{why}, and ffmpeg cannot decode the file: {words}"),
        None => format!("{why}; install ffmpeg, or convert the file to WAV, FLAC, MP3, AAC, ALAC or Vorbis"),
    }
}

/// Result of media input and output.
pub type Result<T> = std::result::Result<T, MediaError>;

impl MediaError {
    /// Returns a closure for `map_err` that creates a [`MediaError::File`].
    pub fn io(action: &'static str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self {
        let error = FileError::at(action, path);
        move |source| MediaError::File(error(source))
    }
}

/// Returns the error of starting ffmpeg for a file. Calls `missing` only if ffmpeg cannot be found or executed; other
/// errors, such as too many open files, do not mean that ffmpeg is not installed.
fn not_started(
    error: std::io::Error,
    path: &std::path::Path,
    missing: impl FnOnce(String) -> MediaError,
) -> MediaError {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::PermissionDenied => missing(error.to_string()),
        _ => MediaError::io("start ffmpeg for", path)(error),
    }
}

/// Returns the error of starting ffmpeg to read a file.
pub(super) fn no_decoder(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> MediaError {
    move |error| not_started(error, path, |reason| MediaError::NoDecoder { path: path.to_path_buf(), reason })
}

/// Returns the error of starting ffmpeg to write a file.
pub(super) fn no_encoder(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> MediaError {
    let missing = |reason| MediaError::FfmpegMissing { reason: format!("the process cannot be started: {reason}") };
    move |error| not_started(error, path, missing)
}

/// Returns an error for a pipe or a device, because inputs are read several times. Accepts missing files, for which
/// reading fails later.
pub(super) fn check_rereadable(path: &std::path::Path) -> Result<()> {
    match std::fs::metadata(path) {
        Ok(about) if !about.is_file() && !about.is_dir() => {
            let why = "the path is a pipe or a device, but inputs are read several times; save the data to a file";
            Err(MediaError::io("read", path)(std::io::Error::other(why)))
        }
        _ => Ok(()),
    }
}

/// Returns a [`MediaError::Clip`] for an input video that cannot be used.
pub(super) fn unusable(path: &std::path::Path, reason: &str) -> MediaError {
    MediaError::Clip { path: path.to_path_buf(), reason: reason.into() }
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
    fn reading_a_pipe_or_device_is_an_error() {
        let null = std::path::Path::new("/dev/null");
        let errors = [
            crate::read_image(null).map(drop),
            crate::read_sound(null, null, None).map(drop),
            crate::probe_clip(null, null).map(drop),
            crate::read_clip(null, null).map(drop),
            crate::sha256_of(null).map(drop),
        ];
        for error in errors.map(|read| read.unwrap_err().to_string()) {
            assert!(error.starts_with("cannot read /dev/null: the path is a pipe or a device"), "{error}");
        }
        let folder = std::env::temp_dir();
        assert!(check_rereadable(&folder).is_ok() && check_rereadable(&folder.join("nowhere")).is_ok());
    }

    #[test]
    fn error_suggests_installing_ffmpeg_only_if_it_is_missing() {
        let path = std::path::Path::new("a.mp4");
        let said = |code: i32| {
            let error = || std::io::Error::from_raw_os_error(code);
            [no_decoder(path)(error()), no_encoder(path)(error())].map(|error| error.to_string())
        };
        // ENOENT, EMFILE
        assert!(said(2).iter().all(|said| said.contains("install ffmpeg")), "{:?}", said(2));
        let limit = "cannot start ffmpeg for a.mp4: Too many open files (os error 24)";
        assert_eq!(said(24), [limit, limit]);
    }

    #[test]
    fn last_lines_of_output_are_joined() {
        assert_eq!(tail(""), "no message");
        assert_eq!(tail("a\n\nb\n c\nd\ne\nf\ng\n"), "b | c | d | e | f | g");
    }
}
