//! Host tensors: row-major [`ndarray`] arrays whose element type is known only at run time.

use half::{bf16, f16};
use ndarray::{ArrayD, IxDyn};

use ltx2_stablehlo::{DType, Element, F8};

/// A dense row-major tensor in host memory.
#[derive(Clone, Debug, PartialEq)]
pub enum Tensor {
    /// Booleans, one byte each.
    Bool(ArrayD<bool>),
    /// Unsigned 8-bit integers.
    U8(ArrayD<u8>),
    /// Signed 32-bit integers.
    I32(ArrayD<i32>),
    /// Signed 64-bit integers.
    I64(ArrayD<i64>),
    /// 8-bit floats with 4 exponent and 3 mantissa bits, without infinities.
    F8E4M3FN(ArrayD<F8>),
    /// 16-bit floats with 5 exponent and 10 mantissa bits (IEEE 754 half precision).
    F16(ArrayD<f16>),
    /// 16-bit floats with 8 exponent and 7 mantissa bits.
    BF16(ArrayD<bf16>),
    /// 32-bit floats (IEEE 754 single precision).
    F32(ArrayD<f32>),
    /// 64-bit floats (IEEE 754 double precision).
    F64(ArrayD<f64>),
}

/// Runs `$body` with `$a` bound to the array inside a [`Tensor`].
macro_rules! each {
    ($tensor:expr, $a:ident => $body:expr) => {
        match $tensor {
            Tensor::Bool($a) => $body,
            Tensor::U8($a) => $body,
            Tensor::I32($a) => $body,
            Tensor::I64($a) => $body,
            Tensor::F8E4M3FN($a) => $body,
            Tensor::F16($a) => $body,
            Tensor::BF16($a) => $body,
            Tensor::F32($a) => $body,
            Tensor::F64($a) => $body,
        }
    };
}

/// An error from creating or casting a host tensor.
#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    /// Host tensors do not support this element type.
    #[error("host tensors of {0} are not supported; use bool, u8, i32, i64, f8_e4m3, f16, bf16, f32 or f64")]
    Unsupported(DType),
    /// The byte count does not match the shape.
    #[error("{dtype} tensor of shape {shape:?} needs {want} bytes, got {got}")]
    Size {
        /// Requested element type.
        dtype: DType,
        /// Requested dimensions, outermost first.
        shape: Vec<usize>,
        /// Bytes of a tensor of this type and shape.
        want: usize,
        /// Bytes that were passed.
        got: usize,
    },
}

impl Tensor {
    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        fn element_type<T: Element>(_: &ArrayD<T>) -> DType {
            T::DTYPE
        }
        each!(self, a => element_type(a))
    }

    /// Returns the dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        each!(self, a => a.shape())
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        each!(self, a => a.len())
    }

    /// Returns whether the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Creates a tensor from row-major little-endian bytes of any alignment. Booleans are bytes; non-zero is true.
    ///
    /// # Errors
    /// Returns an error if the byte count does not match the shape or host tensors do not support `dtype`.
    pub fn from_bytes(dtype: DType, shape: &[usize], bytes: &[u8]) -> Result<Self, TensorError> {
        let want = shape.iter().product::<usize>() * dtype.size();
        if want != bytes.len() {
            return Err(TensorError::Size { dtype, shape: shape.to_vec(), want, got: bytes.len() });
        }
        Tensor::filled(dtype, shape, |memory| {
            memory.copy_from_slice(bytes);
            Ok(())
        })
    }

    /// Creates a tensor. `fill` writes its row-major little-endian bytes into a buffer of zeros.
    ///
    /// # Errors
    /// Returns the error of `fill`, or an error if host tensors do not support `dtype`.
    pub fn filled<E: From<TensorError>>(
        dtype: DType,
        shape: &[usize],
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Self, E> {
        fn array<T: bytemuck::Pod, E>(
            shape: &[usize],
            fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
        ) -> Result<ArrayD<T>, E> {
            let mut a = ArrayD::from_elem(IxDyn(shape), T::zeroed());
            fill(bytemuck::cast_slice_mut(a.as_slice_mut().expect("created in row-major order")))?;
            Ok(a)
        }
        Ok(match dtype {
            DType::Bool => Tensor::Bool(array::<u8, E>(shape, fill)?.mapv(|b| b != 0)),
            DType::U8 => Tensor::U8(array(shape, fill)?),
            DType::I32 => Tensor::I32(array(shape, fill)?),
            DType::I64 => Tensor::I64(array(shape, fill)?),
            DType::F8E4M3FN => Tensor::F8E4M3FN(array(shape, fill)?),
            DType::F16 => Tensor::F16(array(shape, fill)?),
            DType::BF16 => Tensor::BF16(array(shape, fill)?),
            DType::F32 => Tensor::F32(array(shape, fill)?),
            DType::F64 => Tensor::F64(array(shape, fill)?),
            other => return Err(TensorError::Unsupported(other).into()),
        })
    }

    /// Returns the row-major bytes: borrowed if the array is contiguous in row-major order, as in every tensor that
    /// this type's functions create, otherwise copied.
    pub fn bytes(&self) -> std::borrow::Cow<'_, [u8]> {
        use std::borrow::Cow;
        fn to_bytes<T: bytemuck::NoUninit>(a: &ArrayD<T>) -> Cow<'_, [u8]> {
            match a.as_slice() {
                Some(s) => Cow::Borrowed(bytemuck::cast_slice(s)),
                None => Cow::Owned(a.iter().flat_map(|v| bytemuck::bytes_of(v).to_vec()).collect()),
            }
        }
        each!(self, a => to_bytes(a))
    }

    /// Converts the values to `f32` (booleans to 0 and 1).
    pub fn to_f32(&self) -> ArrayD<f32> {
        match self {
            Tensor::Bool(a) => a.mapv(|v| f32::from(u8::from(v))),
            Tensor::U8(a) => a.mapv(f32::from),
            Tensor::I32(a) => a.mapv(|v| v as f32),
            Tensor::I64(a) => a.mapv(|v| v as f32),
            Tensor::F8E4M3FN(a) => a.mapv(f32::from),
            Tensor::F16(a) => a.mapv(f32::from),
            Tensor::BF16(a) => a.mapv(f32::from),
            Tensor::F32(a) => a.clone(),
            Tensor::F64(a) => a.mapv(|v| v as f32),
        }
    }

    /// Converts the values to `f32`, without a copy if they already are.
    pub fn into_f32(self) -> ArrayD<f32> {
        match self {
            Tensor::F32(a) => a,
            other => other.to_f32(),
        }
    }

    /// Converts the values to `i64`. Floats are converted to `f32`, then truncated; values out of range saturate.
    pub fn to_i64(&self) -> ArrayD<i64> {
        match self {
            Tensor::Bool(a) => a.mapv(i64::from),
            Tensor::U8(a) => a.mapv(i64::from),
            Tensor::I32(a) => a.mapv(i64::from),
            Tensor::I64(a) => a.clone(),
            other => other.to_f32().mapv(|v| v as i64),
        }
    }

    /// Converts the values to `dtype`: through `f32` if `dtype` is a boolean or float type, through `i64` if it is an
    /// integer type. Narrower floats are rounded to nearest, ties to even; narrower integers keep the low bits.
    ///
    /// # Errors
    /// Returns an error if host tensors do not support `dtype`.
    pub fn cast(&self, dtype: DType) -> Result<Self, TensorError> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        Ok(match dtype {
            DType::Bool => Tensor::Bool(self.to_f32().mapv(|v| v != 0.0)),
            DType::U8 => Tensor::U8(self.to_i64().mapv(|v| v as u8)),
            DType::I32 => Tensor::I32(self.to_i64().mapv(|v| v as i32)),
            DType::I64 => Tensor::I64(self.to_i64()),
            DType::F8E4M3FN => Tensor::F8E4M3FN(self.to_f32().mapv(F8::from_f32)),
            DType::F16 => Tensor::F16(self.to_f32().mapv(f16::from_f32)),
            DType::BF16 => Tensor::BF16(self.to_f32().mapv(bf16::from_f32)),
            DType::F32 => Tensor::F32(self.to_f32()),
            DType::F64 => Tensor::F64(self.to_f32().mapv(f64::from)),
            other => return Err(TensorError::Unsupported(other)),
        })
    }
}

macro_rules! from_arrays {
    ($($t:ty => $v:ident),*) => {
        $(impl<D: ndarray::Dimension> From<ndarray::Array<$t, D>> for Tensor {
            /// Converts without a copy if the array is in row-major order; copies any other array, such as a transposed
            /// one, into that order.
            fn from(a: ndarray::Array<$t, D>) -> Self {
                let a = a.into_dyn();
                Tensor::$v(if a.is_standard_layout() { a } else { a.as_standard_layout().into_owned() })
            }
        })*
    };
}
from_arrays!(bool => Bool, u8 => U8, i32 => I32, i64 => I64, F8 => F8E4M3FN, f16 => F16, bf16 => BF16, f32 => F32, f64 => F64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_round_trip_and_bf16_cast_keeps_exact_values() {
        let t = Tensor::from(ndarray::arr2(&[[1.0f32, -2.5], [3.0, 0.25]]));
        let back = Tensor::from_bytes(DType::F32, &[2, 2], &t.bytes()).expect("sizes fit");
        assert_eq!(t, back);
        let bf = t.cast(DType::BF16).expect("bf16 is a host type");
        assert_eq!(bf.to_f32(), t.to_f32());
        assert!(matches!(
            Tensor::from_bytes(DType::F32, &[3], &[0; 8]),
            Err(TensorError::Size { want: 12, got: 8, .. })
        ));
    }

    #[test]
    fn a_transposed_array_becomes_row_major() {
        let a = ndarray::arr2(&[[1i32, 2, 3], [4, 5, 6]]).reversed_axes();
        assert_eq!(Tensor::from(a).bytes().as_ref(), bytemuck::cast_slice::<i32, u8>(&[1, 4, 2, 5, 3, 6]));
    }
}
