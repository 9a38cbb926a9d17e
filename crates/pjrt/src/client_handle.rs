//! The owner of a `PJRT_Client`.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::abi::{self, Struct};
use super::plugin::Plugin;
use super::raw::Raw;
use super::staging::HostMemory;

/// Owner of a `PJRT_Client`. Every object that the client creates holds a reference to this struct.
pub(super) struct ClientHandle {
    pub plugin: Plugin,
    pub raw: Raw,
    pub released: Released,
}

/// Mapped memory of deleted buffers, to be unmapped. The plugin's callbacks only add to it, because a plugin must not be
/// called, or its client destroyed, from its own callbacks.
#[derive(Clone, Default)]
pub(super) struct Released(Arc<Mutex<Vec<HostMemory>>>);

impl Released {
    pub(super) fn add(&self, memory: HostMemory) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
    }

    fn take(&self) -> Vec<HostMemory> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ClientHandle {
    /// Unmaps and frees the memory of deleted buffers.
    pub(super) fn free_released(&self) {
        self.released.take().into_iter().for_each(|memory| self.unmap(memory));
    }

    /// Unmaps and frees memory that is mapped for this client. Leaks the memory if the plugin cannot unmap it, because
    /// the driver may still use it.
    pub(super) fn unmap(&self, memory: HostMemory) {
        let args = abi::ClientDmaUnmapArgs { client: self.raw.0, data: memory.data(), ..Struct::new() };
        // SAFETY: the client is alive, because `self` owns it. `Client::staging` mapped the memory for it. Nothing reads
        // the memory: an upload from borrowed memory waits until the transfer is complete, and the plugin has deleted
        // the buffer that the memory backed.
        if unsafe { self.plugin.call(args) }.is_ok() {
            memory.free();
        }
    }
}

impl fmt::Debug for ClientHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Client of {:?}", self.plugin)
    }
}

impl Drop for ClientHandle {
    /// Unmaps all memory before the client is destroyed. Memory of a buffer that the plugin deletes later is leaked.
    fn drop(&mut self) {
        self.free_released();
        // SAFETY: every object that the client created holds this struct, so the client is destroyed last.
        unsafe { self.plugin.destroy(abi::ClientDestroyArgs { client: self.raw.0, ..Struct::new() }) };
    }
}
