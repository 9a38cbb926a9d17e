//! Attention per platform.
