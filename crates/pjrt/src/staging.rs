//! Host memory that devices read in place.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::abi::{self, Struct};
use super::client::Client;
use super::client_handle::ClientHandle;
use super::layout::pointer;

/// Alignment that mapping asks for.
const PAGE: usize = 4096;

/// Host memory on its way to devices. Where the plugin maps host memory (CUDA pins it), a transfer reads it without a copy
/// in between; elsewhere it is memory like any other.
#[derive(Debug)]
pub struct Staging {
    client: Arc<ClientHandle>,
    memory: Vec<u8>,
    start: usize,
    size: usize,
    is_mapped: bool,
}

impl Client {
    /// Memory of `size` bytes, mapped for this client's devices where that can be.
    pub fn staging(&self, size: usize) -> Staging {
        let memory = vec![0; size + PAGE];
        let start = memory.as_ptr().align_offset(PAGE);
        let data = pointer(&memory[start..]);
        let args = abi::ClientDmaMapArgs { client: self.inner().raw.0, data, size, ..Struct::new() };
        // SAFETY: the memory stays where it is until `Staging` is dropped, which unmaps it first.
        let is_mapped = unsafe { self.plugin().call(args) }.is_ok();
        Staging { client: self.inner().clone(), memory, start, size, is_mapped }
    }
}

impl Staging {
    /// Whether devices read it in place.
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
            // SAFETY: it was mapped here, and nobody reads it any more: transfers from borrowed memory are waited for.
            if unsafe { self.client.plugin.call(args) }.is_err() {
                // The driver may still use it.
                std::mem::forget(std::mem::take(&mut self.memory));
            }
        }
    }
}
