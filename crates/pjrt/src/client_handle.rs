//! The C client, which lives as long as anything made by it.

use std::fmt;

use super::abi::{self, Struct};
use super::plugin::Plugin;
use super::raw::Raw;

/// The C client; what stands on it holds this.
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
        // SAFETY: everything made by the client holds this struct, so the client is the last to go.
        unsafe { self.plugin.destroy(abi::ClientDestroyArgs { client: self.raw.0, ..Struct::new() }) };
    }
}
