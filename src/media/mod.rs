//! MP4, WAV and PNG.
