//! Errors of building a program.

/// The first mistake made while a program was built.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[error("{op} in scope '{scope}' of program '{program}': {message}")]
pub struct Error {
    /// The operation, in StableHLO's spelling without the dialect.
    pub op: &'static str,
    /// The name scope, outer to inner, joined by `/`.
    pub scope: String,
    pub program: String,
    /// Mismatch, with the shapes.
    pub message: String,
}

/// Result of finishing a program.
pub type Result<T> = std::result::Result<T, Error>;
