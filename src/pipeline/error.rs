//! Errors of a request.

use std::path::PathBuf;

/// Error of a pipeline. The message is one line that says what to change.
#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    /// The model's files cannot be read.
    #[error(transparent)]
    Weights(#[from] crate::weights::WeightsError),
    /// The configuration of a model component is invalid.
    #[error("{}: {source}", place.display())]
    Config {
        /// Path of the configuration file or name of the preset, followed by the component if it contains several.
        place: PathBuf,
        source: crate::models::ComponentConfigError,
    },
    /// The run's configuration is invalid.
    #[error(transparent)]
    Request(#[from] crate::config::ConfigError),
    #[error(transparent)]
    Program(#[from] crate::hlo::BuildError),
    #[error(transparent)]
    Runtime(#[from] crate::runtime::RuntimeError),
    /// The sizes or the noise levels of the request are invalid.
    #[error(transparent)]
    Sampling(#[from] crate::sampling::SamplingError),
    #[error(transparent)]
    Tokenizer(#[from] crate::models::tokenizer::TokenizerError),
    /// A video, image or audio file cannot be read or written.
    #[error(transparent)]
    Media(#[from] crate::media::MediaError),
    /// A file cannot be written.
    #[error(transparent)]
    Write(#[from] crate::atomic_file::FileError),
    /// The platform (PJRT plugin) cannot be opened.
    #[error(transparent)]
    Platform(#[from] crate::runtime::platform::PlatformError),
    /// Communication between the processes of a multi-process run failed.
    #[error(transparent)]
    Processes(#[from] crate::runtime::processes::GroupError),
    /// The launcher's environment does not determine the rank of this process.
    #[error(transparent)]
    Launch(#[from] crate::runtime::processes::LaunchError),
    /// An input file of the request is missing, invalid or unsuitable.
    #[error("{source}")]
    Given {
        /// Config key that sets the path of the file.
        key: &'static str,
        source: Box<PipelineError>,
    },
    /// The language model did not enhance a prompt. Contains no API key.
    #[error("prompt enhancement: {0}")]
    Enhancement(String),
    /// The model or the options do not support the request.
    #[error("{0}")]
    Usage(String),
    /// A file is missing, invalid or unsuitable.
    #[error("{}: {reason}", path.display())]
    File { path: PathBuf, reason: String },
    /// An input does not match a component or the model.
    #[error("{0}")]
    Input(String),
    /// An internal error, which no input should cause.
    #[error("{0}; this is a bug, please report it together with the command line")]
    Bug(String),
    /// The compiler rejected the program, or crashed, in an earlier compilation.
    #[error("{message} (from an earlier compilation; remove {} to compile again)", path.display())]
    Refused {
        /// The compiler's error message.
        message: String,
        key: Box<crate::runtime::CompileKey>,
        /// Entry of the module store that records the failure.
        path: PathBuf,
    },
    /// The module store has no optimized module of the program.
    #[error("the module store has no module of program {} for {}; compile the program first", .0.program, .0.target)]
    NotCompiled(Box<crate::runtime::CompileKey>),
    /// The program does not fit in device memory.
    #[error("{0}")]
    TooLarge(String),
    /// A result contains values that are NaN or infinite.
    #[error("{0} contain NaN or infinite values; run with --dtype f32")]
    NotFinite(String),
    /// An output file cannot be written.
    #[error("{key}: {source}")]
    Output {
        /// Config key or flag that requests the file.
        key: &'static str,
        source: crate::atomic_file::FileError,
    },
    /// The disk has less free space than the run needs.
    #[error("{0}")]
    NoRoom(String),
    /// The run failed after denoising, and its results were saved in a file.
    #[error("{source}; {what} are kept in {}{}", kept.display(), encode_hint(what, kept))]
    ResultsSaved {
        source: Box<PipelineError>,
        /// Contents of the file, as a plural for the message: "the latents".
        what: String,
        kept: PathBuf,
    },
    /// The user stopped the run. The values are the number of finished steps and the total number of steps.
    #[error("interrupted after {0} of {1} steps; no video was written")]
    Interrupted(usize, usize),
}

/// Returns how to write the video of kept results; empty if they do not contain decoded audio or frames and audio.
fn encode_hint(what: &str, kept: &std::path::Path) -> String {
    match what.contains("audio samples") {
        true => format!("; to write the video, run ltx2 encode {} -o FILE", kept.display()),
        false => String::new(),
    }
}

impl PipelineError {
    /// Returns whether device memory ran out.
    pub(crate) fn is_out_of_device_memory(&self) -> bool {
        matches!(self, PipelineError::Runtime(error) if error.is_out_of_device_memory())
    }

    /// Returns the original failure; for [`PipelineError::ResultsSaved`], the error that it wraps.
    pub(crate) fn cause(&self) -> &PipelineError {
        match self {
            PipelineError::ResultsSaved { source, .. } => source.cause(),
            other => other,
        }
    }
}

impl From<crate::request::RequestError> for PipelineError {
    fn from(error: crate::request::RequestError) -> Self {
        match error {
            crate::request::RequestError::Config(error) => PipelineError::Request(error),
            crate::request::RequestError::Sampling(error) => PipelineError::Sampling(error),
        }
    }
}

/// Formats an error and its causes as one line. Skips a cause if the line already contains its message.
pub fn one_line(error: &(dyn std::error::Error + 'static)) -> String {
    let mut line = String::new();
    for cause in std::iter::successors(Some(error), |e| e.source()) {
        let cause = cause.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        if line.is_empty() {
            line = cause;
        } else if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line
}

/// `Result` with a [`PipelineError`].
pub type Result<T> = std::result::Result<T, PipelineError>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::atomic_file::FileError;

    #[test]
    fn one_line_skips_repeated_causes() {
        let wrong = || PipelineError::Config {
            place: "vae/config.json".into(),
            source: crate::models::unsupported("vae", "dims", Some(2.0), "3"),
        };
        let denied = || std::io::Error::other("permission denied");
        let read = crate::config::ConfigError::unreadable(std::path::Path::new("x.yml"), denied());
        let file = FileError { action: "write", path: "out.mp4".into(), source: denied() };
        let errors: [(PipelineError, &str); 5] = [
            (wrong(), "vae/config.json: dims = 2.0 is not supported, only 3"),
            (
                PipelineError::Given { key: "model.vae", source: Box::new(wrong()) },
                "vae/config.json: dims = 2.0 is not supported, only 3",
            ),
            (
                PipelineError::ResultsSaved {
                    source: Box::new(wrong()),
                    what: "the frames and audio samples".into(),
                    kept: "kept".into(),
                },
                "vae/config.json: dims = 2.0 is not supported, only 3; the frames and audio samples are kept in kept; to write the \
                 video, run ltx2 encode kept -o FILE",
            ),
            (read.into(), "cannot read x.yml: permission denied"),
            (PipelineError::Output { key: "-o", source: file }, "-o: cannot write out.mp4: permission denied"),
        ];
        for (error, line) in errors {
            assert_eq!(one_line(&error), line);
        }
    }
}
