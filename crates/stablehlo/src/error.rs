//! Errors that occur while programs are built.

/// The first error that occurred while a program was built.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[error("{op} in scope '{scope}' of program '{program}': {message}")]
pub struct BuildError {
    /// The operation, by its StableHLO name without the dialect prefix.
    pub op: &'static str,
    /// The name scope, from outer to inner, joined by `/`.
    pub scope: String,
    /// The name of the program.
    pub program: String,
    /// Description of the problem, including the shapes.
    pub message: String,
}

/// Result of finishing a program.
pub type Result<T> = std::result::Result<T, BuildError>;
