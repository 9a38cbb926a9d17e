//! Checkpoints: mapped files, key names, validation.
