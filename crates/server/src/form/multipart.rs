//! Parses `multipart/form-data`. Files are streamed to disk.

use std::path::Path;

use axum::extract::Multipart;
use axum::extract::multipart::{Field, MultipartError};
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;

use super::brackets::{FormNode, root};
use super::{FilePart, Form, MAX_FIELDS, MAX_PARTS, MAX_TEXT, check_text, invalid, shown, too_many};
use crate::descriptors::{Descriptors, busy};
use crate::error::ApiError;
use crate::inputs::unkept;

impl Form {
    /// Parses a form and writes its files to the folder `tmp`. `takes_file` returns whether a field with this name can
    /// contain a file.
    ///
    /// # Errors
    /// Returns `invalid_multipart` if the form is malformed, 413 if it is too long, `invalid_value` if a field is
    /// invalid or a file is empty, and an error if the disk is full or too many files are open.
    pub async fn multipart(
        mut body: Multipart,
        tmp: &Path,
        limit: Descriptors,
        takes_file: &(dyn Fn(&str) -> bool + Sync),
    ) -> Result<Form, ApiError> {
        let (mut tree, mut parts, mut fields, mut files, mut text) = (FormNode::default(), Vec::new(), 0, 0, 0);
        let mut hash = Sha256::new().chain_update(b"form\0");
        while let Some(field) = body.next_field().await.map_err(broken)? {
            let name = field.name().ok_or_else(|| malformed("a part has no name"))?.to_string();
            let own = root(&name)?.to_string();
            let is_file = is_file(&field);
            let (digest, empty) = match is_file {
                true if files == MAX_PARTS => return Err(too_many("files", MAX_PARTS)),
                true => {
                    files += 1;
                    // If no file is selected, browsers send an empty part with an empty file name.
                    let is_chosen = field.file_name().is_none_or(|name| !name.is_empty());
                    let (part, digest) = file(field, own, tmp, limit).await?;
                    let empty = part.bytes == 0;
                    if empty && is_chosen {
                        return Err(no_contents(&part.field));
                    }
                    if !empty {
                        parts.push(part);
                    }
                    (digest, empty)
                }
                false if fields == MAX_FIELDS => return Err(too_many("fields", MAX_FIELDS)),
                false => {
                    fields += 1;
                    let value = read_text(field, &own, &mut text).await?;
                    let digest: [u8; 32] = Sha256::digest(value.as_bytes()).into();
                    let empty = value.is_empty();
                    if empty && takes_file(&name) {
                        return Err(no_contents(&own));
                    }
                    if !empty {
                        check_text(&own, &value.as_str().into())?;
                        tree.add(&name, value)?;
                    }
                    (digest, empty)
                }
            };
            if !empty {
                hash.update([u8::from(is_file), name.len() as u8]);
                hash.update(name.as_bytes());
                hash.update(digest);
            }
        }
        Ok(Form { fields: tree.finish()?, parts, body_sha256: hex::encode(hash.finalize()) })
    }
}

/// Returns whether a form part is a file: it has a file name, or the content type of a file.
fn is_file(field: &Field) -> bool {
    let types = ["image/", "video/", "audio/", "application/octet-stream"];
    field.file_name().is_some()
        || field.content_type().is_some_and(|own| types.iter().any(|t| own.to_ascii_lowercase().starts_with(t)))
}

/// Reads a form part as text and adds its size to `total`.
async fn read_text(mut field: Field<'_>, name: &str, total: &mut u64) -> Result<String, ApiError> {
    let charset =
        field.content_type().and_then(|own| own.to_ascii_lowercase().split_once("charset=").map(|c| c.1.to_string()));
    let charset = charset.map(|own| own.split(';').next().unwrap_or_default().trim_matches(['"', ' ']).to_string());
    if charset.is_some_and(|own| !matches!(own.as_str(), "utf-8" | "utf8" | "us-ascii")) {
        return Err(invalid(name, format!("field '{name}': the charset must be UTF-8")));
    }
    let mut bytes = Vec::new();
    while let Some(chunk) = field.chunk().await.map_err(broken)? {
        *total += chunk.len() as u64;
        if *total > MAX_TEXT {
            return Err(ApiError::new(413, "body_too_large", "the text fields of the form exceed the limit of 48 MiB"));
        }
        bytes.extend_from_slice(&chunk);
    }
    String::from_utf8(bytes).map_err(|_| invalid(name, format!("field '{name}' is not UTF-8")))
}

/// Writes a form part to a temporary file; returns the file and its SHA-256.
async fn file(
    mut field: Field<'_>,
    name: String,
    tmp: &Path,
    limit: Descriptors,
) -> Result<(FilePart, [u8; 32]), ApiError> {
    // Some old browsers send a path instead of a file name.
    let client = field.file_name().and_then(|own| own.rsplit(['/', '\\']).next()).unwrap_or_default();
    let client = shown(client);
    // Each file is closed after it is written, so that a request with many files holds only one file descriptor.
    let (out, file) = tempfile::Builder::new().prefix(".part-").tempfile_in(tmp).map_err(|e| unkept(&e))?.into_parts();
    if limit.is_short(&out) {
        return Err(busy());
    }
    let mut out = tokio::fs::File::from_std(out);
    let (mut bytes, mut hash) = (0, Sha256::new());
    while let Some(chunk) = field.chunk().await.map_err(broken)? {
        bytes += chunk.len() as u64;
        hash.update(&chunk);
        out.write_all(&chunk).await.map_err(|e| unkept(&e))?;
    }
    out.flush().await.map_err(|e| unkept(&e))?;
    Ok((FilePart { field: name, name: client, file, bytes }, hash.finalize().into()))
}

fn no_contents(field: &str) -> ApiError {
    invalid(field, format!("field '{field}': the file is empty"))
}

fn malformed(why: &str) -> ApiError {
    ApiError::new(400, "invalid_multipart", format!("malformed form: {why}"))
}

/// Converts an error of the multipart parser into a response.
fn broken(error: MultipartError) -> ApiError {
    match error.status().as_u16() {
        413 => ApiError::new(413, "body_too_large", "the request body exceeds the limit (serve.body_limit)"),
        _ => malformed(&shown(&error.body_text())),
    }
}
