//! Errors that end a request.

use std::path::PathBuf;

/// An error of a pipeline: one line, naming what to change.
#[derive(Debug, thiserror::Error)]
pub enum PipelineError {
    /// The model's files.
    #[error(transparent)]
    Weights(#[from] crate::weights::WeightsError),
    /// The model's configuration.
    #[error("{}: {source}", place.display())]
    Config {
        /// The file, or the preset, and the component where it holds several.
        place: PathBuf,
        source: crate::models::ConfigError,
    },
    /// The request's own configuration.
    #[error(transparent)]
    Request(#[from] crate::config::ConfigError),
    #[error(transparent)]
    Program(#[from] crate::hlo::Error),
    #[error(transparent)]
    Runtime(#[from] crate::runtime::RuntimeError),
    /// Sizes and schedules.
    #[error(transparent)]
    Sampling(#[from] crate::sampling::SamplingError),
    #[error(transparent)]
    Tokenizer(#[from] crate::models::tokenizer::TokenizerError),
    /// Writing the result.
    #[error(transparent)]
    Media(#[from] crate::media::Error),
    /// No platform.
    #[error(transparent)]
    Platform(#[from] crate::runtime::platform::PlatformError),
    /// The other processes of the run.
    #[error(transparent)]
    Processes(#[from] crate::runtime::processes::GroupError),
    /// Which process this is.
    #[error(transparent)]
    Launch(#[from] crate::runtime::processes::LaunchError),
    /// A file that is given with a request and cannot be used.
    #[error("{source}")]
    Given {
        /// Key of the file.
        key: &'static str,
        source: Box<PipelineError>,
    },
    /// A request that the model cannot serve.
    #[error("{0}")]
    Usage(String),
    /// A file of ours.
    #[error("{}: {reason}", path.display())]
    File { path: PathBuf, reason: String },
    /// Inputs of a component that do not fit it.
    #[error("{0}")]
    Input(String),
    /// A state that no input can cause.
    #[error("{0}; this is a bug, please report it with the command")]
    Bug(String),
    /// A program that the compiler did not survive or refused, in an earlier compilation.
    #[error("{message} (an earlier compilation; remove {} to repeat it)", path.display())]
    Refused {
        /// The compiler's words.
        message: String,
        key: Box<crate::runtime::CompileKey>,
        /// The entry that says so.
        path: PathBuf,
    },
    /// A program without an optimized module.
    #[error("program {} was not compiled for {}", .0.program, .0.target)]
    NotCompiled(Box<crate::runtime::CompileKey>),
    /// A program that is larger than the device.
    #[error("{0}")]
    TooLarge(String),
    /// Not a number in a result.
    #[error("{0} hold values that are not finite; run with --dtype f32, or bisect with --dump")]
    NotFinite(String),
    /// A file that a run would write and cannot.
    #[error("{key}: {source}")]
    Output {
        /// Key or flag that asks for it.
        key: &'static str,
        source: crate::media::Error,
    },
    /// A disk without the room for what a run writes.
    #[error("{0}")]
    NoRoom(String),
    /// A failure after denoising; what was computed is kept in a file.
    #[error("{source}; {what} kept in {}", kept.display())]
    Kept {
        source: Box<PipelineError>,
        /// What the file holds, with a verb: "its latents are".
        what: String,
        kept: PathBuf,
    },
    /// Stopped by the user.
    #[error("interrupted after {0} of {1} steps; no video was written")]
    Interrupted(usize, usize),
}

impl PipelineError {
    /// The failure itself, where an error also says what was kept after it.
    pub(crate) fn cause(&self) -> &PipelineError {
        match self {
            PipelineError::Kept { source, .. } => source.cause(),
            other => other,
        }
    }
}

impl From<crate::request::RequestError> for PipelineError {
    fn from(error: crate::request::RequestError) -> Self {
        match error {
            crate::request::RequestError::Usage(message) => PipelineError::Usage(message),
            crate::request::RequestError::Sampling(error) => PipelineError::Sampling(error),
        }
    }
}

/// An error and its causes on one line; a cause that the error already tells is not told again.
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

/// The result of this layer.
pub type Result<T> = std::result::Result<T, PipelineError>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::Error as Media;

    #[test]
    fn one_line_never_repeats_a_sentence() {
        let wrong = || PipelineError::Config {
            place: "vae/config.json".into(),
            source: crate::models::unsupported("vae", "dims", Some(2.0), "3"),
        };
        let denied = || std::io::Error::other("permission denied");
        let read = crate::config::ConfigError::Read { path: "x.yml".into(), source: denied() };
        let file = Media::Io { action: "write", path: "out.mp4".into(), source: denied() };
        let errors: [(PipelineError, &str); 5] = [
            (wrong(), "vae/config.json: dims = 2.0 is not supported, only 3"),
            (
                PipelineError::Given { key: "model.vae", source: Box::new(wrong()) },
                "vae/config.json: dims = 2.0 is not supported, only 3",
            ),
            (
                PipelineError::Kept {
                    source: Box::new(wrong()),
                    what: "its frames and samples are".into(),
                    kept: "kept".into(),
                },
                "vae/config.json: dims = 2.0 is not supported, only 3; its frames and samples are kept in kept",
            ),
            (read.into(), "cannot read x.yml: permission denied"),
            (PipelineError::Output { key: "-o", source: file }, "-o: cannot write out.mp4: permission denied"),
        ];
        for (error, line) in errors {
            assert_eq!(one_line(&error), line);
        }
    }
}
