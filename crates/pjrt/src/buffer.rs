//! Arrays on a device.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use super::abi::{self, Struct};
use super::attributes::list;
use super::buffer_type::BufferType;
use super::client_handle::ClientHandle;
use super::device::Device;
use super::error::{Error, Result};
use super::event::Event;
use super::layout::{DeviceLayout, RawLayout};
use super::raw::Raw;

/// An array on a device. It may still be computed: reading it waits, and reports what went wrong there.
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
    /// # Safety
    /// `raw` is an owned buffer of `client`.
    pub(super) unsafe fn from_raw(client: &Arc<ClientHandle>, raw: *mut c_void) -> Buffer {
        Buffer { client: client.clone(), raw: Raw(raw) }
    }

    /// The element type.
    pub fn element_type(&self) -> Result<BufferType> {
        // SAFETY: the buffer lives.
        let args =
            unsafe { self.client.plugin.call(abi::BufferElementTypeArgs { buffer: self.raw.0, ..Struct::new() })? };
        let kind = args.kind;
        BufferType::from_c(kind)
            .ok_or_else(|| Error::ElementType { plugin: self.client.plugin.path().to_owned(), kind })
    }

    /// Dimensions on this device.
    pub fn dims(&self) -> Result<Vec<usize>> {
        // SAFETY: the buffer lives and with it the list.
        let dims = unsafe {
            let args = self.client.plugin.call(abi::BufferDimensionsArgs { buffer: self.raw.0, ..Struct::new() })?;
            list(args.dims.cast::<i64>(), args.num_dims)
        };
        Ok(dims.iter().map(|&dim| dim as usize).collect())
    }

    /// Device layout; `None` if the plugin describes it by strides.
    pub fn layout(&self) -> Result<Option<DeviceLayout>> {
        let args = abi::BufferGetMemoryLayoutArgs { buffer: self.raw.0, layout: Struct::new(), ..Struct::new() };
        // SAFETY: the buffer lives and with it the lists of its layout.
        unsafe {
            let args = self.client.plugin.call(args)?;
            Ok(DeviceLayout::read(&args.layout))
        }
    }

    /// Bytes on the device, with padding.
    pub fn on_device_size(&self) -> Result<usize> {
        // SAFETY: the buffer lives.
        let args = unsafe {
            self.client.plugin.call(abi::BufferOnDeviceSizeInBytesArgs { buffer: self.raw.0, ..Struct::new() })?
        };
        Ok(args.on_device_size_in_bytes)
    }

    /// Device of the buffer.
    pub fn device(&self) -> Result<Device> {
        // SAFETY: the buffer lives; its device is one of its client's.
        unsafe {
            let args = self.client.plugin.call(abi::BufferDeviceArgs { buffer: self.raw.0, ..Struct::new() })?;
            Device::from_raw(&self.client, args.device)
        }
    }

    /// Copies it to the host: dense and row-major, whatever the device's layout. Waits for it to be computed.
    pub fn to_host(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0u8; self.dims()?.iter().product::<usize>() * self.element_type()?.size()];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    /// Copies the elements to the host like [`Buffer::to_host`], into memory of exactly their size.
    pub fn read(&self, bytes: &mut [u8]) -> Result<()> {
        let (ty, dims) = (self.element_type()?, self.dims()?);
        let size = dims.iter().product::<usize>() * ty.size();
        if bytes.len() != size {
            let reason = format!("{ty}{dims:?} has {size} bytes, there is room for {}", bytes.len());
            return Err(self.client.plugin.refuse::<abi::BufferToHostBufferArgs>(reason));
        }
        if bytes.is_empty() {
            // A null destination would only ask for the size.
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
        // SAFETY: the layout lives during the call; the destination has `dst_size` bytes and stays until the event,
        // which is ours.
        let event = unsafe {
            let args = self.client.plugin.call(args)?;
            Event::from_raw(&self.client.plugin, args.event)
        };
        event.wait()
    }

    /// A copy of it on another device of the same client.
    pub fn copy_to(&self, device: &Device) -> Result<Buffer> {
        if !device.belongs_to(&self.client) {
            let reason = format!("{device} belongs to another client");
            return Err(self.client.plugin.refuse::<abi::BufferCopyToDeviceArgs>(reason));
        }
        // SAFETY: buffer and device live; the copy is ours.
        unsafe {
            let args = self.client.plugin.call(abi::BufferCopyToDeviceArgs {
                buffer: self.raw.0,
                dst_device: device.raw(),
                ..Struct::new()
            })?;
            Ok(Buffer::from_raw(&self.client, args.dst_buffer))
        }
    }

    /// Frees its memory now (once running programs are done with it); any later use is an error.
    pub fn delete(&self) -> Result<()> {
        // SAFETY: the buffer lives; only its memory goes.
        unsafe { self.client.plugin.call(abi::BufferDeleteArgs { buffer: self.raw.0, ..Struct::new() }).map(drop) }
    }

    /// True once it was deleted or donated to a program.
    pub fn is_deleted(&self) -> Result<bool> {
        // SAFETY: the buffer lives.
        let args =
            unsafe { self.client.plugin.call(abi::BufferIsDeletedArgs { buffer: self.raw.0, ..Struct::new() })? };
        Ok(args.is_deleted)
    }

    /// Event of its completion.
    pub fn ready(&self) -> Result<Event> {
        // SAFETY: the buffer lives; the event is ours.
        unsafe {
            let args = self.client.plugin.call(abi::BufferReadyEventArgs { buffer: self.raw.0, ..Struct::new() })?;
            Ok(Event::from_raw(&self.client.plugin, args.event))
        }
    }

    /// Waits until it is computed; the error is that of the program or transfer that should have filled it.
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
        // SAFETY: the buffer is ours and is not used again.
        unsafe { self.client.plugin.destroy(abi::BufferDestroyArgs { buffer: self.raw.0, ..Struct::new() }) };
    }
}
