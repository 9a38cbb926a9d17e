//! Host arrays for uploads: their ownership and shape, and checks that the memory is large enough.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::buffer_type::BufferType;
use super::layout::DeviceLayout;

/// Bytes with a shared owner, such as a vector or a tensor. A background transfer can hold the owner while it reads the
/// bytes.
#[derive(Clone)]
pub struct SharedBytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedBytes {
    /// Returns all bytes of `owner`.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> SharedBytes {
        let range = 0..(*owner).as_ref().len();
        SharedBytes { owner, range }
    }

    /// Returns a subrange with the same owner; `None` if `range` is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> Option<SharedBytes> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let start = self.range.start + range.start;
        Some(SharedBytes { owner: self.owner.clone(), range: start..start + range.len() })
    }

    /// Returns the bytes of the range.
    pub fn bytes(&self) -> &[u8] {
        (*self.owner).as_ref().get(self.range.clone()).expect("the owner's bytes do not change")
    }
}

impl From<Vec<u8>> for SharedBytes {
    fn from(bytes: Vec<u8>) -> Self {
        SharedBytes::new(Arc::new(bytes))
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.range.len())
    }
}

/// A host array in borrowed memory.
#[derive(Clone, Copy, Debug)]
pub struct HostBuffer<'a> {
    /// Memory, starting with element 0.
    pub bytes: &'a [u8],
    /// Element type.
    pub ty: BufferType,
    /// Dimensions, outermost first.
    pub dims: &'a [usize],
    /// Byte stride of each dimension; strides must not be negative. `None`: dense row-major.
    pub byte_strides: Option<&'a [i64]>,
    /// Device layout. `None`: the device's default.
    pub layout: Option<&'a DeviceLayout>,
    /// Kind of the memory that holds the buffer (`device`, `pinned_host` …). `None`: the device's default.
    pub memory: Option<&'a str>,
}

impl<'a> HostBuffer<'a> {
    /// Returns a dense row-major array that gets the device's default layout and memory.
    pub fn dense(bytes: &'a [u8], ty: BufferType, dims: &'a [usize]) -> HostBuffer<'a> {
        HostBuffer { bytes, ty, dims, byte_strides: None, layout: None, memory: None }
    }

    /// Checks that every element is inside `bytes`. The error message contains the shape.
    pub(super) fn check(&self) -> Result<(), String> {
        let (dims, ty) = (self.dims, self.ty);
        if let Some(layout) = self.layout
            && layout.minor_to_major.len() != dims.len()
        {
            return Err(format!("layout {layout} does not match the {} dimensions of {ty}{dims:?}", dims.len()));
        }
        let overflow = || format!("the size of {ty}{dims:?} in bytes is too large");
        let elements = dims.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim)).ok_or_else(overflow)?;
        let Some(strides) = self.byte_strides else {
            let need = elements.checked_mul(ty.size()).ok_or_else(overflow)?;
            return if need == self.bytes.len() {
                Ok(())
            } else {
                Err(format!("{ty}{dims:?} needs {need} bytes, got {}", self.bytes.len()))
            };
        };
        if strides.len() != dims.len() || strides.iter().any(|&stride| stride < 0) {
            return Err(format!(
                "byte strides {strides:?} do not fit {ty}{dims:?}: pass one non-negative stride per dimension"
            ));
        }
        if elements == 0 {
            return Ok(());
        }
        let last = dims.iter().zip(strides).try_fold(0usize, |offset, (&dim, &stride)| {
            (dim - 1).checked_mul(usize::try_from(stride).ok()?)?.checked_add(offset)
        });
        let need = last.and_then(|last| last.checked_add(ty.size())).ok_or_else(overflow)?;
        if need > self.bytes.len() {
            return Err(format!(
                "{ty}{dims:?} with byte strides {strides:?} needs {need} bytes, got {}",
                self.bytes.len()
            ));
        }
        Ok(())
    }
}

/// A host array with a shared owner.
#[derive(Clone, Debug)]
pub struct SharedHostBuffer {
    /// Memory, starting with element 0.
    pub bytes: SharedBytes,
    /// Element type.
    pub ty: BufferType,
    /// Dimensions, outermost first.
    pub dims: Vec<usize>,
    /// Byte stride of each dimension; strides must not be negative. `None`: dense row-major.
    pub byte_strides: Option<Vec<i64>>,
    /// Device layout. `None`: the device's default.
    pub layout: Option<DeviceLayout>,
}

/// Use of shared host memory by a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostUse {
    /// The device reads the memory in the background until the transfer is complete.
    UntilTransferred,
    /// The device uses the memory in place while the buffer is alive, if it can (CPU, memory aligned to 64 bytes);
    /// otherwise like `UntilTransferred`.
    ZeroCopy,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strided(len: usize, dims: &[usize], strides: &[i64]) -> Result<(), String> {
        let bytes = vec![0; len];
        HostBuffer { byte_strides: Some(strides), ..HostBuffer::dense(&bytes, BufferType::F32, dims) }.check()
    }

    #[test]
    fn host_memory_smaller_than_the_array_is_an_error() {
        assert!(HostBuffer::dense(&[0; 24], BufferType::F32, &[2, 3]).check().is_ok());
        let error = HostBuffer::dense(&[0; 20], BufferType::F32, &[2, 3]).check().unwrap_err();
        assert_eq!(error, "f32[2, 3] needs 24 bytes, got 20");
        assert!(HostBuffer::dense(&[], BufferType::F32, &[usize::MAX, 2]).check().is_err());
        // A block of columns of a row-major 4x8 matrix: its last row ends before that of the matrix.
        assert!(strided(3 * 32 + 8, &[4, 2], &[32, 4]).is_ok());
        let error = strided(3 * 32 + 7, &[4, 2], &[32, 4]).unwrap_err();
        assert_eq!(error, "f32[4, 2] with byte strides [32, 4] needs 104 bytes, got 103");
        assert!(strided(1000, &[4, 2], &[-32, 4]).is_err());
        assert!(strided(1000, &[4, 2], &[4]).is_err());
        assert!(strided(0, &[0, 2], &[8, 4]).is_ok());
    }

    #[test]
    fn slice_beyond_its_owner_is_rejected() {
        let bytes = SharedBytes::from(vec![0, 1, 2, 3, 4, 5]);
        let part = bytes.slice(2..5).unwrap();
        assert_eq!(part.bytes(), [2, 3, 4]);
        assert_eq!(part.slice(1..3).unwrap().bytes(), [3, 4]);
        assert!(part.slice(1..4).is_none());
    }
}
