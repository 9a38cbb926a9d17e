//! Platforms, compilation, upload.
