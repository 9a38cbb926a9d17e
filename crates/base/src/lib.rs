//! Helpers for processes and files that do not depend on models: interrupt signals, fail points, threads, temporary
//! files, atomic writes and destinations.

#![warn(missing_docs)]

pub mod atomic_file;
pub mod catch_panic;
mod defaults;
pub mod destination;
pub mod failpoint;
pub mod file_kind;
pub mod file_lock;
pub mod host;
pub mod interrupts;
pub mod temporaries;
pub mod text_file;
pub mod threads;
