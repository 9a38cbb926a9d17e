//! Element types of programs, device buffers and checkpoints.

mod float8;

use std::fmt;

pub use float8::F8;

impl DType {
    /// Returns whether this is a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F8E4M3FN | DType::F16 | DType::BF16 | DType::F32 | DType::F64)
    }

    /// Returns whether this is an unsigned integer type.
    pub const fn is_unsigned(self) -> bool {
        matches!(self, DType::U8 | DType::U16 | DType::U32 | DType::U64)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type with the host representation of a [`DType`].
pub trait Element: bytemuck::NoUninit + Send + Sync {
    /// The element type.
    const DTYPE: DType;
}

macro_rules! dtypes {
    ($($(#[$about:meta])* $dtype:ident: $rust:ty, $name:literal, $mlir:literal;)*) => {
        /// An element type of a tensor.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum DType {
            $($(#[$about])* $dtype,)*
        }

        impl DType {
            /// Returns the size of one element in host memory, in bytes.
            pub const fn size(self) -> usize {
                match self { $(DType::$dtype => size_of::<$rust>(),)* }
            }

            /// Returns the lower-case name used in messages and YAML: `f32`, `bf16`, `i64`, `bool` …
            pub const fn name(self) -> &'static str {
                match self { $(DType::$dtype => $name,)* }
            }

            /// Returns the type's name in MLIR.
            pub(crate) const fn mlir(self) -> &'static str {
                match self { $(DType::$dtype => $mlir,)* }
            }
        }
        $(impl Element for $rust { const DTYPE: DType = DType::$dtype; })*
    };
}
dtypes! {
    /// Boolean; one byte in host memory, `i1` in a program.
    Bool: bool, "bool", "i1";
    /// Signed integer of 8 bits.
    I8: i8, "i8", "i8";
    /// Signed integer of 16 bits.
    I16: i16, "i16", "i16";
    /// Signed integer of 32 bits.
    I32: i32, "i32", "i32";
    /// Signed integer of 64 bits.
    I64: i64, "i64", "i64";
    /// Unsigned integer of 8 bits.
    U8: u8, "u8", "ui8";
    /// Unsigned integer of 16 bits.
    U16: u16, "u16", "ui16";
    /// Unsigned integer of 32 bits.
    U32: u32, "u32", "ui32";
    /// Unsigned integer of 64 bits.
    U64: u64, "u64", "ui64";
    /// 8-bit float with 4 exponent and 3 mantissa bits, without infinities ([`F8`]).
    F8E4M3FN: F8, "f8_e4m3", "f8E4M3FN";
    /// IEEE half precision.
    F16: half::f16, "f16", "f16";
    /// 16-bit float with the exponent of f32 and 7 mantissa bits.
    BF16: half::bf16, "bf16", "bf16";
    /// IEEE single precision.
    F32: f32, "f32", "f32";
    /// IEEE double precision.
    F64: f64, "f64", "f64";
}
