//! Host memory that is mapped for devices if the plugin supports it, so that uploads avoid a copy.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::abi::{self, Struct};
use super::client::Client;
use super::client_handle::ClientHandle;
use super::layout::pointer;

/// Alignment that mapping requires, in bytes.
const PAGE: usize = 4096;

/// Host memory for uploads. If the plugin can map host memory for its devices (CUDA pins the memory), uploads read this
/// memory without an intermediate copy. Otherwise, it is ordinary memory.
#[derive(Debug)]
pub struct Staging {
    client: Arc<ClientHandle>,
    memory: Vec<u8>,
    start: usize,
    size: usize,
    is_mapped: bool,
}

impl Client {
    /// Allocates `size` bytes and maps them for this client's devices if the plugin supports it.
    pub fn staging(&self, size: usize) -> Staging {
        let memory = vec![0; size + PAGE];
        let start = memory.as_ptr().align_offset(PAGE);
        let data = pointer(&memory[start..]);
        let args = abi::ClientDmaMapArgs { client: self.inner().raw.0, data, size, ..Struct::new() };
        // SAFETY: the memory does not move until `Staging` is dropped, which unmaps it first.
        let is_mapped = unsafe { self.plugin().call(args) }.is_ok();
        Staging { client: self.inner().clone(), memory, start, size, is_mapped }
    }
}

impl Staging {
    /// Returns whether the memory is mapped, so that devices access it directly.
    pub fn is_mapped(&self) -> bool {
        self.is_mapped
    }
}

impl Deref for Staging {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..][..self.size]
    }
}

impl DerefMut for Staging {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.size]
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.is_mapped {
            let data = pointer(&self.memory[self.start..]);
            let args = abi::ClientDmaUnmapArgs { client: self.client.raw.0, data, ..Struct::new() };
            // SAFETY: `staging` mapped the memory, and nothing reads it: an upload from borrowed memory waits until the
            // transfer is complete.
            if unsafe { self.client.plugin.call(args) }.is_err() {
                // Leak the memory if unmapping fails, because the driver may still use it.
                std::mem::forget(std::mem::take(&mut self.memory));
            }
        }
    }
}
