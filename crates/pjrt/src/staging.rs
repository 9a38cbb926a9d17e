//! Host memory that is mapped for devices if the plugin supports it: uploads from it avoid a copy, and it can back
//! buffers in pinned host memory.

use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};

use super::abi::{self, Struct};
use super::buffer::Buffer;
use super::buffer_type::BufferType;
use super::client::{Client, to_i64};
use super::client_handle::ClientHandle;
use super::device::Device;
use super::error::Result;
use super::host::HostBuffer;
use super::layout::pointer;

/// Alignment in bytes: that of a huge page, which the kernel can use only for aligned memory. Mapping requires the
/// alignment of a normal page.
const ALIGNMENT: usize = 2 << 20;

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
        let mut memory = vec![0; size + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        let own = &mut memory[start..][..size];
        let data = pointer(&*own);
        // SAFETY: the range is part of the allocation; the advice does not change its contents.
        unsafe { libc::madvise(data, size, libc::MADV_HUGEPAGE) };
        // The kernel allocates huge pages when they are written; mapping would allocate normal ones, ten times slower.
        own.iter_mut().step_by(4096).for_each(|byte| *byte = 0);
        let args = abi::ClientDmaMapArgs { client: self.inner().raw.0, data, size, ..Struct::new() };
        // SAFETY: the memory does not move until `Staging` is dropped, which unmaps it first.
        let is_mapped = unsafe { self.plugin().call(args) }.is_ok();
        Staging { client: self.inner().clone(), memory, start, size, is_mapped }
    }

    /// Creates a row-major buffer of `device` backed by mapped host memory, without a copy. `memory`: PJRT memory kind,
    /// such as `pinned_host`. The memory is freed when the buffer is deleted.
    ///
    /// # Errors
    /// Returns an error if the memory is not mapped, its size is not that of the array, or the plugin has no such
    /// buffers.
    pub fn view(
        &self,
        device: &Device,
        memory: &str,
        staging: Staging,
        ty: BufferType,
        dims: &[usize],
    ) -> Result<Buffer> {
        type View = abi::ClientCreateViewOfDeviceBufferArgs;
        self.owns::<View>(device)?;
        HostBuffer::dense(&staging, ty, dims).check().map_err(|reason| self.plugin().refuse::<View>(reason))?;
        if !staging.is_mapped {
            return Err(self.plugin().refuse::<View>("the memory is not mapped"));
        }
        let (dims, memory) = (to_i64(dims), device.memory_of_kind(Some(memory))?);
        let data = pointer(&staging[..]);
        let owner = Box::into_raw(Box::new(staging));
        let args = View {
            client: self.inner().raw.0,
            device_buffer_ptr: data,
            dims: pointer(&dims),
            num_dims: dims.len(),
            element_type: ty.to_c(),
            device: device.raw(),
            on_delete_callback: Some(release),
            on_delete_callback_arg: owner.cast(),
            memory,
            ..Struct::new()
        };
        // SAFETY: the dimensions outlive the call; the memory lives until the plugin calls `release`. We own the buffer.
        unsafe {
            match self.plugin().call(args) {
                Ok(args) => Ok(Buffer::from_raw(self.inner(), args.buffer)),
                Err(error) => {
                    // SAFETY: the plugin created no buffer, so it does not call `release`.
                    drop(Box::from_raw(owner));
                    Err(error)
                }
            }
        }
    }
}

/// Frees the memory of a view. The plugin calls it when no program reads the buffer any more. The memory is unmapped on
/// another thread, because a plugin must not be called, or its client destroyed, from its own callbacks.
unsafe extern "C" fn release(_: *mut c_void, owner: *mut c_void) {
    static RELEASED: OnceLock<Sender<Box<Staging>>> = OnceLock::new();
    // SAFETY: `view` passed this pointer, and the plugin calls this function once.
    let staging = unsafe { Box::from_raw(owner.cast::<Staging>()) };
    let released = RELEASED.get_or_init(|| {
        let (sender, all) = channel::<Box<Staging>>();
        // Without the thread, the channel has no receiver, and the memory is freed below.
        let _ = std::thread::Builder::new().name("unmap".into()).spawn(move || all.into_iter().for_each(drop));
        sender
    });
    drop(released.send(staging));
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
            // transfer is complete, and a view is deleted first.
            if unsafe { self.client.plugin.call(args) }.is_err() {
                // Leak the memory if unmapping fails, because the driver may still use it.
                std::mem::forget(std::mem::take(&mut self.memory));
            }
        }
    }
}
