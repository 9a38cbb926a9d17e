//! The threads of device and finisher.
