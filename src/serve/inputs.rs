//! Files that requests give, by the SHA-256 of their contents.

use std::path::{Path, PathBuf};

use super::error::ApiError;

/// Folder of given files, `STATE/inputs`.
pub struct Inputs {
    folder: PathBuf,
}

impl Inputs {
    /// Inputs in a folder, which is made where it is not there.
    ///
    /// # Errors
    /// A folder that cannot be made.
    pub fn open(folder: PathBuf) -> std::io::Result<Self> {
        std::fs::create_dir_all(&folder)?;
        Ok(Inputs { folder })
    }

    /// Checks an image by its contents and keeps it as PNG, upright; its name.
    ///
    /// # Errors
    /// `invalid_image`, `image_too_large`, of the field.
    pub fn keep_image(&self, field: &str, file: &Path) -> Result<String, ApiError> {
        todo!()
    }

    /// The path of a file that is kept.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}
