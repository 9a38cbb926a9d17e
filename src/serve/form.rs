//! The body of a request as one tree, whether it came as JSON or as a form.

mod brackets;
mod json;
mod multipart;
#[cfg(test)]
pub(in crate::serve) mod tests;

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::error::ApiError;

pub(crate) use json::parse as parse_json;

/// Fields of a body.
pub const MAX_FIELDS: usize = 128;
/// File parts of a form.
pub const MAX_PARTS: usize = 64;
/// Bytes of a field's name.
pub const MAX_NAME: usize = 64;
/// Brackets of a field's name.
pub const MAX_DEPTH: usize = 8;
/// Bytes of all fields of a form that are text: images as text count, too.
const MAX_TEXT: u64 = 48 << 20;

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

impl Form {
    /// Whether it carries files, as parts or in its fields, which take time to decode.
    pub fn has_files(&self) -> bool {
        /// Texts above this many bytes are no prompts.
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

/// A file of a form, on disk.
#[derive(Debug)]
pub struct FilePart {
    /// Name of its field, without brackets.
    pub field: String,
    /// The client's name of the file, without folders; empty where it gave none.
    pub name: String,
    /// Temporary file, closed; it is removed with this.
    pub file: tempfile::TempPath,
    pub bytes: u64,
}

impl FilePart {
    /// An error of the file, with the client's name of it.
    pub fn named(&self, error: ApiError) -> ApiError {
        let field = error.param.as_deref().unwrap_or(&self.field);
        if self.name.is_empty() || error.status != 400 {
            return error;
        }
        let why = error.message.strip_prefix(field).and_then(|why| why.strip_prefix(':')).unwrap_or(&error.message);
        let message = format!("{field} ({}): {}", self.name, why.trim_start());
        ApiError { message, ..error }
    }

    /// Where it is.
    pub fn path(&self) -> PathBuf {
        self.file.to_path_buf()
    }
}

/// A field whose value cannot be used.
fn invalid(field: &str, why: impl Into<String>) -> ApiError {
    ApiError::field("invalid_value", field, why)
}

/// A body with more fields than are read.
fn too_many(what: &str, most: usize) -> ApiError {
    ApiError::new(400, "invalid_value", format!("the request has more than {most} {what}"))
}

/// A name as errors show it: cut, and without what is no plain text.
fn shown(name: &str) -> String {
    let plain = |c: char| if c.is_control() || c == '\'' { '?' } else { c };
    name.chars().take(MAX_NAME).map(plain).collect()
}

/// Refuses names that are too long, or not of plain text.
fn check_name(name: &str) -> Result<(), ApiError> {
    if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
        let why = format!("field '{}': a name has 1 to {MAX_NAME} bytes, none a control character", shown(name));
        return Err(invalid(&shown(name), why));
    }
    Ok(())
}

/// Refuses text that holds a NUL, at any depth.
fn check_text(field: &str, value: &Value) -> Result<(), ApiError> {
    match value {
        Value::String(text) if text.contains('\0') => Err(invalid(field, format!("field '{field}' holds a NUL"))),
        Value::Array(items) => items.iter().try_for_each(|item| check_text(field, item)),
        Value::Object(map) => map.iter().try_for_each(|(key, item)| {
            if key.contains('\0') {
                Err(invalid(field, format!("field '{field}' holds a NUL")))
            } else {
                check_text(field, item)
            }
        }),
        _ => Ok(()),
    }
}
