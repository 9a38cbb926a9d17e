//! Filling device arrays piece by piece: how stacked weights get from files to a device without a host copy of
//! the stack.

use std::sync::Arc;

use super::abi::{self, Struct};
use super::buffer::Buffer;
use super::buffer_type::BufferType;
use super::client::{Client, to_i64};
use super::client_handle::ClientHandle;
use super::device::Device;
use super::error::Result;
use super::event::Event;
use super::host::SharedBytes;
use super::layout::{DeviceLayout, RawLayout, pointer};
use super::raw::Raw;

/// One array of a [`Transfer`].
#[derive(Clone, Debug, PartialEq)]
pub struct TransferShape {
    pub ty: BufferType,
    pub dims: Vec<usize>,
    /// Device layout; `None` for the default. Given for all arrays of a transfer or for none.
    pub layout: Option<DeviceLayout>,
}

/// Arrays of one device that are being filled. Each byte is written once, the last piece of an array says so, and the
/// bytes are those of the device's layout (row-major for a default layout on CPU and CUDA).
#[derive(Debug)]
pub struct Transfer {
    client: Arc<ClientHandle>,
    raw: Raw,
    sizes: Vec<usize>,
}

/// Bytes that [`Transfer::write_all`] writes, as [`Transfer::write`] takes them.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    pub transfer: &'a Transfer,
    pub index: usize,
    pub offset: usize,
    pub bytes: &'a [u8],
    pub last: bool,
}

impl Client {
    /// Makes arrays on `device` to be filled piece by piece.
    pub fn transfer(&self, device: &Device, shapes: &[TransferShape]) -> Result<Transfer> {
        type Create = abi::ClientCreateBuffersForAsyncHostToDeviceArgs;
        self.owns::<Create>(device)?;
        let dims: Vec<Vec<i64>> = shapes.iter().map(|shape| to_i64(&shape.dims)).collect();
        let spec = |(shape, dims): (&TransferShape, &Vec<i64>)| abi::ShapeSpec {
            dims: pointer(dims),
            num_dims: dims.len(),
            element_type: shape.ty.to_c(),
            ..Struct::new()
        };
        let specs: Vec<abi::ShapeSpec> = shapes.iter().zip(&dims).map(spec).collect();
        let layouts: Vec<RawLayout> = shapes.iter().filter_map(|s| s.layout.as_ref()).map(RawLayout::new).collect();
        if !layouts.is_empty() && layouts.len() != shapes.len() {
            let reason = format!("{} of {} arrays have a layout: give all or none", layouts.len(), shapes.len());
            return Err(self.plugin().refuse::<Create>(reason));
        }
        let layouts: Vec<*const abi::BufferMemoryLayout> = layouts.iter().map(|l| &raw const l.raw).collect();
        let args = Create {
            client: self.inner().raw.0,
            shape_specs: pointer(&specs),
            num_shape_specs: specs.len(),
            device_layouts: if layouts.is_empty() { std::ptr::null_mut() } else { pointer(&layouts) },
            num_device_layouts: layouts.len(),
            memory: device.default_memory()?,
            ..Struct::new()
        };
        // SAFETY: shapes and layouts live during the call; the memory lives with the client.
        let args = unsafe { self.plugin().call(args)? };
        let mut transfer =
            Transfer { client: self.inner().clone(), raw: Raw(args.transfer_manager), sizes: Vec::new() };
        for index in 0..shapes.len() {
            transfer.sizes.push(transfer.buffer_size(index)?);
        }
        Ok(transfer)
    }
}

impl Transfer {
    /// Bytes that array `index` takes on the device.
    fn buffer_size(&self, index: usize) -> Result<usize> {
        let args = abi::AsyncHostToDeviceTransferManagerBufferSizeArgs {
            transfer_manager: self.raw.0,
            buffer_index: index as i32,
            ..Struct::new()
        };
        // SAFETY: the manager lives.
        let args = unsafe { self.client.plugin.call(args)? };
        Ok(args.buffer_size)
    }

    /// Bytes of each array on the device.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Writes `bytes` at byte `offset` of array `index` and waits; `last` completes the array.
    pub fn write(&self, index: usize, offset: usize, bytes: &[u8], last: bool) -> Result<()> {
        self.send(index, offset, bytes, last)?.wait()
    }

    /// Writes pieces of several transfers beside each other and waits for all.
    ///
    /// # Errors
    /// The first of a piece that cannot be written; no piece is read any more then.
    pub fn write_all(pieces: &[Piece<'_>]) -> Result<()> {
        let sent: Vec<Result<Event>> =
            pieces.iter().map(|p| p.transfer.send(p.index, p.offset, p.bytes, p.last)).collect();
        let waited: Vec<Result<()>> = sent.into_iter().map(|event| event?.wait()).collect();
        waited.into_iter().collect()
    }

    /// Writes like [`Transfer::write`], in the background; the bytes' owner is released when they have been read.
    pub fn write_shared(&self, index: usize, offset: usize, bytes: &SharedBytes, last: bool) -> Result<()> {
        self.send(index, offset, bytes.bytes(), last)?.keep_until_ready(Box::new(bytes.clone()))
    }

    fn send(&self, index: usize, offset: usize, bytes: &[u8], last: bool) -> Result<Event> {
        type Data = abi::AsyncHostToDeviceTransferManagerTransferDataArgs;
        let plugin = &self.client.plugin;
        let size = self.size_of::<Data>(index)?;
        if offset.checked_add(bytes.len()).is_none_or(|end| end > size) {
            let len = bytes.len();
            return Err(plugin.refuse::<Data>(format!(
                "{len} bytes at byte {offset} reach past the end of array {index} of {size} bytes"
            )));
        }
        let args = Data {
            transfer_manager: self.raw.0,
            buffer_index: index as i32,
            data: pointer(bytes),
            offset: offset as i64,
            transfer_size: bytes.len() as i64,
            is_last_transfer: last,
            ..Struct::new()
        };
        // SAFETY: the range is inside the array; the callers keep the bytes until the event, which is ours.
        unsafe {
            let args = plugin.call(args)?;
            Ok(Event::from_raw(plugin, args.done_with_h2d_transfer))
        }
    }

    /// Array `index`; it may be taken before it is filled and becomes ready when it is. To be taken once.
    pub fn buffer(&self, index: usize) -> Result<Buffer> {
        type Retrieve = abi::AsyncHostToDeviceTransferManagerRetrieveBufferArgs;
        self.size_of::<Retrieve>(index)?;
        let args = Retrieve { transfer_manager: self.raw.0, buffer_index: index as i32, ..Struct::new() };
        // SAFETY: the manager lives; the buffer is ours.
        unsafe {
            let args = self.client.plugin.call(args)?;
            Ok(Buffer::from_raw(&self.client, args.buffer_out))
        }
    }

    fn size_of<A: abi::Args>(&self, index: usize) -> Result<usize> {
        let count = self.sizes.len();
        let size = self.sizes.get(index).copied();
        size.ok_or_else(|| self.client.plugin.refuse::<A>(format!("there is no array {index}, only {count}")))
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // SAFETY: the manager is ours and is not used again.
        unsafe {
            self.client.plugin.destroy(abi::AsyncHostToDeviceTransferManagerDestroyArgs {
                transfer_manager: self.raw.0,
                ..Struct::new()
            })
        };
    }
}
