//! Device buffers.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use super::abi::{self, Struct};
use super::attributes::list;
use super::buffer_type::BufferType;
use super::client_handle::ClientHandle;
use super::device::Device;
use super::error::{PjrtError, Result};
use super::event::Event;
use super::layout::{DeviceLayout, RawLayout};
use super::raw::Raw;

/// A device buffer. A program or transfer may still be filling it: reading it waits until it is filled, and returns the
/// error, if any, of that program or transfer.
pub struct Buffer {
    client: Arc<ClientHandle>,
    raw: Raw,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.element_type(), self.dims()) {
            (Ok(ty), Ok(dims)) => write!(f, "Buffer({ty}{dims:?})"),
            _ => f.write_str("Buffer(?)"),
        }
    }
}

impl Buffer {
    /// Wraps a buffer of a plugin and takes ownership of it.
    ///
    /// # Safety
    /// `raw` is a `PJRT_Buffer` of `client` that the caller owns.
    pub(super) unsafe fn from_raw(client: &Arc<ClientHandle>, raw: *mut c_void) -> Buffer {
        Buffer { client: client.clone(), raw: Raw(raw) }
    }

    /// Returns the element type.
    pub fn element_type(&self) -> Result<BufferType> {
        // SAFETY: the buffer is alive.
        let args =
            unsafe { self.client.plugin.call(abi::BufferElementTypeArgs { buffer: self.raw.0, ..Struct::new() })? };
        let kind = args.kind;
        BufferType::from_c(kind)
            .ok_or_else(|| PjrtError::ElementType { plugin: self.client.plugin.path().to_owned(), kind })
    }

    /// Returns the dimensions of the shard on this buffer's device.
    pub fn dims(&self) -> Result<Vec<usize>> {
        // SAFETY: the buffer is alive and owns the list.
        let dims = unsafe {
            let args = self.client.plugin.call(abi::BufferDimensionsArgs { buffer: self.raw.0, ..Struct::new() })?;
            list(args.dims.cast::<i64>(), args.num_dims)
        };
        Ok(dims.iter().map(|&dim| dim as usize).collect())
    }

    /// Returns the device layout; `None` if the plugin describes the layout by strides.
    pub fn layout(&self) -> Result<Option<DeviceLayout>> {
        let args = abi::BufferGetMemoryLayoutArgs { buffer: self.raw.0, layout: Struct::new(), ..Struct::new() };
        // SAFETY: the buffer is alive and owns the lists of its layout.
        unsafe {
            let args = self.client.plugin.call(args)?;
            Ok(DeviceLayout::read(&args.layout))
        }
    }

    /// Returns the size on the device in bytes, including padding.
    pub fn on_device_size(&self) -> Result<usize> {
        // SAFETY: the buffer is alive.
        let args = unsafe {
            self.client.plugin.call(abi::BufferOnDeviceSizeInBytesArgs { buffer: self.raw.0, ..Struct::new() })?
        };
        Ok(args.on_device_size_in_bytes)
    }

    /// Returns the device that holds the buffer.
    pub fn device(&self) -> Result<Device> {
        // SAFETY: the buffer is alive; its device belongs to the same client.
        unsafe {
            let args = self.client.plugin.call(abi::BufferDeviceArgs { buffer: self.raw.0, ..Struct::new() })?;
            Device::from_raw(&self.client, args.device)
        }
    }

    /// Copies the contents to the host. The result is dense and row-major, whatever the device layout. Waits until the
    /// buffer is ready.
    pub fn to_host(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0u8; self.dims()?.iter().product::<usize>() * self.element_type()?.size()];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    /// Copies the contents to `bytes`, like [`Buffer::to_host`]. The length of `bytes` must be the size of the
    /// contents.
    pub fn read(&self, bytes: &mut [u8]) -> Result<()> {
        let (ty, dims) = (self.element_type()?, self.dims()?);
        let size = dims.iter().product::<usize>() * ty.size();
        if bytes.len() != size {
            let reason = format!(
                "a buffer of type {ty}{dims:?} has {size} bytes, but the destination has {} bytes",
                bytes.len()
            );
            return Err(self.client.plugin.refuse::<abi::BufferToHostBufferArgs>(reason));
        }
        if bytes.is_empty() {
            // With a null destination, the plugin would only return the size.
            return self.wait();
        }
        let layout = RawLayout::new(&DeviceLayout::row_major(dims.len()));
        let args = abi::BufferToHostBufferArgs {
            src: self.raw.0,
            host_layout: (&raw const layout.raw).cast_mut().cast(),
            dst: bytes.as_mut_ptr().cast(),
            dst_size: bytes.len(),
            ..Struct::new()
        };
        // SAFETY: the layout outlives the call; the destination has `dst_size` bytes and outlives the event, which we
        // own.
        let event = unsafe {
            let args = self.client.plugin.call(args)?;
            Event::from_raw(&self.client.plugin, args.event)
        };
        event.wait()
    }

    /// Copies the buffer to another device of the same client.
    pub fn copy_to(&self, device: &Device) -> Result<Buffer> {
        if !device.belongs_to(&self.client) {
            let reason = format!("device {device} belongs to another client");
            return Err(self.client.plugin.refuse::<abi::BufferCopyToDeviceArgs>(reason));
        }
        // SAFETY: buffer and device are alive; we own the copy.
        unsafe {
            let args = self.client.plugin.call(abi::BufferCopyToDeviceArgs {
                buffer: self.raw.0,
                dst_device: device.raw(),
                ..Struct::new()
            })?;
            Ok(Buffer::from_raw(&self.client, args.dst_buffer))
        }
    }

    /// Frees the device memory as soon as running programs no longer use it. Any later use of the buffer is an error.
    pub fn delete(&self) -> Result<()> {
        // SAFETY: the buffer is alive; this frees its memory but not the `PJRT_Buffer`.
        unsafe { self.client.plugin.call(abi::BufferDeleteArgs { buffer: self.raw.0, ..Struct::new() }).map(drop) }
    }

    /// Returns whether the buffer was deleted or donated to a program.
    pub fn is_deleted(&self) -> Result<bool> {
        // SAFETY: the buffer is alive.
        let args =
            unsafe { self.client.plugin.call(abi::BufferIsDeletedArgs { buffer: self.raw.0, ..Struct::new() })? };
        Ok(args.is_deleted)
    }

    /// Returns the event that fires when the buffer is ready.
    pub fn ready(&self) -> Result<Event> {
        // SAFETY: the buffer is alive; we own the event.
        unsafe {
            let args = self.client.plugin.call(abi::BufferReadyEventArgs { buffer: self.raw.0, ..Struct::new() })?;
            Ok(Event::from_raw(&self.client.plugin, args.event))
        }
    }

    /// Waits until the buffer is ready. Returns the error of the program or transfer that fills it, if any.
    pub fn wait(&self) -> Result<()> {
        self.ready()?.wait()
    }

    pub(super) fn raw(&self) -> *mut c_void {
        self.raw.0
    }

    pub(super) fn belongs_to(&self, client: &Arc<ClientHandle>) -> bool {
        Arc::ptr_eq(&self.client, client)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: we own the buffer and do not use it again.
        unsafe { self.client.plugin.destroy(abi::BufferDestroyArgs { buffer: self.raw.0, ..Struct::new() }) };
        self.client.free_released();
    }
}
