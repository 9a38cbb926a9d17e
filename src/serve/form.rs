//! The body of a request as one tree, whether it came as JSON or as a form.

use std::path::PathBuf;

use serde_json::{Map, Value};

/// A body: fields, and files that came beside them.
#[derive(Debug, Default)]
pub struct Form {
    /// Fields, brackets unfolded. Nulls and empty fields of forms are left out.
    pub fields: Map<String, Value>,
    /// File parts, by the name of their field.
    pub parts: Vec<FilePart>,
    /// SHA-256 of what was sent, independent of a form's boundary.
    pub body_sha256: String,
}

/// A file of a form, on disk.
#[derive(Debug)]
pub struct FilePart {
    /// Name of its field, without brackets.
    pub field: String,
    /// Temporary file; it is removed with this.
    pub file: tempfile::NamedTempFile,
    pub bytes: u64,
}

impl FilePart {
    /// Where it is.
    pub fn path(&self) -> PathBuf {
        self.file.path().into()
    }
}
