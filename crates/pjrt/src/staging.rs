//! Host memory that is mapped for devices if the plugin supports it: uploads from it avoid a copy, and it can back
//! buffers in pinned host memory.

use std::ffi::c_void;
use std::mem::{ManuallyDrop, take};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::abi::{self, Struct};
use super::buffer::Buffer;
use super::buffer_type::BufferType;
use super::client::{Client, to_i64};
use super::client_handle::{ClientHandle, Released};
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
    memory: HostMemory,
    is_mapped: bool,
}

/// Aligned host memory, which is leaked unless it is freed explicitly: a device may still access mapped memory.
#[derive(Debug, Default)]
pub(super) struct HostMemory {
    bytes: ManuallyDrop<Vec<u8>>,
    start: usize,
    size: usize,
}

impl HostMemory {
    fn new(size: usize) -> Self {
        let bytes = vec![0; size + ALIGNMENT];
        let start = bytes.as_ptr().align_offset(ALIGNMENT);
        HostMemory { bytes: ManuallyDrop::new(bytes), start, size }
    }

    pub(super) fn data(&self) -> *mut c_void {
        pointer(&self[..])
    }

    pub(super) fn free(self) {
        drop(ManuallyDrop::into_inner(self.bytes));
    }
}

impl Deref for HostMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..][..self.size]
    }
}

impl DerefMut for HostMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.size]
    }
}

/// Memory of a view (a buffer backed by mapped host memory), and the list that receives the memory when the view is
/// deleted.
struct ViewMemory {
    memory: HostMemory,
    released: Released,
}

impl Client {
    /// Allocates `size` bytes and maps them for this client's devices if the plugin supports it.
    pub fn staging(&self, size: usize) -> Staging {
        // Free the memory of deleted buffers first, so that it can be reused.
        self.inner().free_released();
        let mut memory = HostMemory::new(size);
        let data = memory.data();
        // SAFETY: the range is part of the allocation; the advice does not change its contents.
        unsafe { libc::madvise(data, size, libc::MADV_HUGEPAGE) };
        // The kernel allocates huge pages when they are written; mapping would allocate normal ones, ten times slower.
        memory.iter_mut().step_by(4096).for_each(|byte| *byte = 0);
        let args = abi::ClientDmaMapArgs { client: self.inner().raw.0, data, size, ..Struct::new() };
        // SAFETY: the memory does not move, and is freed only after it is unmapped.
        let is_mapped = unsafe { self.plugin().call(args) }.is_ok();
        Staging { client: self.inner().clone(), memory, is_mapped }
    }

    /// Creates a row-major buffer of `device` backed by mapped host memory, without a copy. `memory`: PJRT memory kind,
    /// such as `pinned_host`. After the plugin has deleted the buffer, the memory is unmapped and freed when a buffer is
    /// dropped, memory is allocated, or the client is dropped.
    ///
    /// # Errors
    /// Returns an error if the memory is not mapped, its size is not that of the array, or the plugin has no such
    /// buffers.
    pub fn view(
        &self,
        device: &Device,
        memory: &str,
        mut staging: Staging,
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
        // The view does not hold the client: the client's drop frees the memory of deleted views, so it must not wait for
        // them.
        staging.is_mapped = false;
        let view = ViewMemory { memory: take(&mut staging.memory), released: self.inner().released.clone() };
        let data = view.memory.data();
        let view = Box::into_raw(Box::new(view));
        let args = View {
            client: self.inner().raw.0,
            device_buffer_ptr: data,
            dims: pointer(&dims),
            num_dims: dims.len(),
            element_type: ty.to_c(),
            device: device.raw(),
            on_delete_callback: Some(release),
            on_delete_callback_arg: view.cast(),
            memory,
            ..Struct::new()
        };
        // SAFETY: the dimensions outlive the call; the memory lives until the plugin calls `release`. We own the buffer.
        unsafe {
            match self.plugin().call(args) {
                Ok(args) => Ok(Buffer::from_raw(self.inner(), args.buffer)),
                Err(error) => {
                    // SAFETY: the plugin created no buffer, so it does not call `release`.
                    self.inner().unmap(Box::from_raw(view).memory);
                    Err(error)
                }
            }
        }
    }
}

/// Adds the memory of a view to the client's released memory, which a later call unmaps. The plugin calls this function
/// when it deletes the buffer.
unsafe extern "C" fn release(_: *mut c_void, view: *mut c_void) {
    // SAFETY: `view` passed this pointer, and the plugin calls this function once.
    let ViewMemory { memory, released } = *unsafe { Box::from_raw(view.cast::<ViewMemory>()) };
    released.add(memory);
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
        &self.memory
    }
}

impl DerefMut for Staging {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let memory = take(&mut self.memory);
        match self.is_mapped {
            true => self.client.unmap(memory),
            false => memory.free(),
        }
    }
}
