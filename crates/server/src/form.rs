//! Parses a request body, which is JSON or a multipart form, into a tree of fields.

mod brackets;
mod json;
mod multipart;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::error::ApiError;

pub use json::parse as parse_json;

/// Maximum number of fields in a body.
pub const MAX_FIELDS: usize = 128;
/// Maximum number of file parts in a form.
pub const MAX_PARTS: usize = 64;
/// Maximum length of a field name, in bytes.
pub const MAX_NAME: usize = 64;
/// Maximum number of brackets in a field name.
pub const MAX_DEPTH: usize = 8;
/// Maximum total size of a form's text fields, in bytes. Images that are sent as text count too.
const MAX_TEXT: u64 = 48 << 20;

/// A parsed body: its fields and the uploaded files.
#[derive(Debug, Default)]
pub struct Form {
    /// Fields of the body as a tree, with brackets in names expanded. Null values and empty form fields are omitted.
    pub fields: Map<String, Value>,
    /// File parts of a form, in the order in which they were sent.
    pub parts: Vec<FilePart>,
    /// SHA-256 of the fields and files, independent of a form's boundary and file names.
    pub body_sha256: String,
}

impl Form {
    /// Returns whether the body contains files, as form parts or as text. Files take time to decode.
    pub fn has_files(&self) -> bool {
        /// Text longer than this many bytes is assumed to be the contents of a file, not a prompt.
        const LONG: usize = 16 << 10;
        fn holds(value: &Value) -> bool {
            match value {
                Value::String(text) => text.len() > LONG || text.starts_with("data:"),
                Value::Array(all) => all.iter().any(holds),
                Value::Object(all) => all.values().any(holds),
                _ => false,
            }
        }
        !self.parts.is_empty() || self.fields.values().any(holds)
    }
}

/// An uploaded file on disk.
#[derive(Debug)]
pub struct FilePart {
    /// Field name, without brackets.
    pub field: String,
    /// File name that the client sent, without folders; empty if it sent none.
    pub name: String,
    /// Path of the temporary file, which is not held open and is deleted on drop.
    pub file: tempfile::TempPath,
    /// Size of the file, in bytes.
    pub bytes: u64,
}

impl FilePart {
    /// Adds the client's file name to an error about this file.
    pub fn named(&self, error: ApiError) -> ApiError {
        let field = error.param.as_deref().unwrap_or(&self.field);
        if self.name.is_empty() || error.status != 400 {
            return error;
        }
        let why = error.message.strip_prefix(field).and_then(|why| why.strip_prefix(':')).unwrap_or(&error.message);
        let message = format!("{field} ({}): {}", self.name, why.trim_start());
        ApiError { message, ..error }
    }

    /// Returns the path of the temporary file.
    pub fn path(&self) -> PathBuf {
        self.file.to_path_buf()
    }
}

fn invalid(field: &str, why: impl Into<String>) -> ApiError {
    ApiError::field("invalid_value", field, why)
}

fn too_many(what: &str, most: usize) -> ApiError {
    ApiError::new(400, "invalid_value", format!("the request exceeds the limit of {most} {what}"))
}

/// Shortens a name for error messages and replaces control characters and quotes.
fn shown(name: &str) -> String {
    let plain = |c: char| if c.is_control() || c == '\'' { '?' } else { c };
    name.chars().take(MAX_NAME).map(plain).collect()
}

/// Rejects names that are empty, too long, or contain control characters.
fn check_name(name: &str) -> Result<(), ApiError> {
    if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
        let why = format!("field '{}': names must have 1 to {MAX_NAME} bytes and no control characters", shown(name));
        return Err(invalid(&shown(name), why));
    }
    Ok(())
}

/// Rejects values that contain NUL characters, at any depth.
fn check_text(field: &str, value: &Value) -> Result<(), ApiError> {
    match value {
        Value::String(text) if text.contains('\0') => {
            Err(invalid(field, format!("field '{field}' contains a NUL character")))
        }
        Value::Array(items) => items.iter().try_for_each(|item| check_text(field, item)),
        Value::Object(map) => map.iter().try_for_each(|(key, item)| {
            if key.contains('\0') {
                Err(invalid(field, format!("field '{field}' contains a NUL character")))
            } else {
                check_text(field, item)
            }
        }),
        _ => Ok(()),
    }
}
