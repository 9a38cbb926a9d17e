//! The owner of a `PJRT_Client`.

use std::fmt;

use super::abi::{self, Struct};
use super::plugin::Plugin;
use super::raw::Raw;

/// Owns a `PJRT_Client`. Every object that the client creates holds a reference to this struct.
pub(super) struct ClientHandle {
    pub plugin: Plugin,
    pub raw: Raw,
}

impl fmt::Debug for ClientHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Client of {:?}", self.plugin)
    }
}

impl Drop for ClientHandle {
    fn drop(&mut self) {
        // SAFETY: every object that the client created holds this struct, so the client is destroyed last.
        unsafe { self.plugin.destroy(abi::ClientDestroyArgs { client: self.raw.0, ..Struct::new() }) };
    }
}
