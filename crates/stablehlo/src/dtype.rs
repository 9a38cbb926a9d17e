//! Element types, shared by the program builder, the runtime and the checkpoints.

mod float8;

use std::fmt;

pub use float8::F8;

/// An element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // Named for what they are.
pub enum DType {
    /// Boolean; one byte in host memory, `i1` in a program.
    Bool,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    /// 8-bit float of 4 exponent and 3 mantissa bits, finite numbers and NaN only ([`F8`]).
    F8E4M3FN,
    F16,
    BF16,
    F32,
    F64,
}

impl DType {
    /// Bytes of one element in host memory.
    pub const fn size(self) -> usize {
        match self {
            DType::Bool | DType::I8 | DType::U8 | DType::F8E4M3FN => 1,
            DType::I16 | DType::U16 | DType::F16 | DType::BF16 => 2,
            DType::I32 | DType::U32 | DType::F32 => 4,
            DType::I64 | DType::U64 | DType::F64 => 8,
        }
    }

    /// True for `F8E4M3FN`, `F16`, `BF16`, `F32` and `F64`.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F8E4M3FN | DType::F16 | DType::BF16 | DType::F32 | DType::F64)
    }

    /// True for the unsigned integers.
    pub const fn is_unsigned(self) -> bool {
        matches!(self, DType::U8 | DType::U16 | DType::U32 | DType::U64)
    }

    /// The lower-case name used in messages and YAML: `f32`, `bf16`, `i64`, `bool` …
    pub const fn name(self) -> &'static str {
        match self {
            DType::Bool => "bool",
            DType::I8 => "i8",
            DType::I16 => "i16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
            DType::U16 => "u16",
            DType::U32 => "u32",
            DType::U64 => "u64",
            DType::F8E4M3FN => "f8_e4m3",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that is the host form of a [`DType`].
pub trait Element: bytemuck::NoUninit + Send + Sync {
    /// The element type.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident),* $(,)?) => {
        $(impl Element for $rust { const DTYPE: DType = DType::$dtype; })*
    };
}
elements!(bool => Bool, i8 => I8, i16 => I16, i32 => I32, i64 => I64, u8 => U8, u16 => U16, u32 => U32,
    u64 => U64, F8 => F8E4M3FN, half::f16 => F16, half::bf16 => BF16, f32 => F32, f64 => F64);
