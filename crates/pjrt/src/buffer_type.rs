use std::fmt;

use super::abi::buffer_type as c;

macro_rules! buffer_types {
    ($($(#[$doc:meta])* $variant:ident $constant:ident $bytes:literal $name:literal,)*) => {
        /// Element type of a device buffer (`PJRT_Buffer_Type`). Types smaller than a byte are not supported.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum BufferType {
            $($(#[$doc])* $variant,)*
        }

        impl BufferType {
            /// All element types.
            pub const ALL: &[BufferType] = &[$(BufferType::$variant),*];

            /// Returns the size of one element in host memory, in bytes.
            pub const fn size(self) -> usize {
                match self {
                    $(BufferType::$variant => $bytes,)*
                }
            }

            /// Returns XLA's name of the type: `f32`, `bf16`, `s64`, `pred`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(BufferType::$variant => $name,)*
                }
            }

            pub(crate) const fn to_c(self) -> u32 {
                match self {
                    $(BufferType::$variant => c::$constant,)*
                }
            }
        }
    };
}

buffer_types! {
    /// Boolean, one byte in host memory.
    Pred PRED 1 "pred",
    /// 8-bit signed integer.
    S8 S8 1 "s8",
    /// 16-bit signed integer.
    S16 S16 2 "s16",
    /// 32-bit signed integer.
    S32 S32 4 "s32",
    /// 64-bit signed integer.
    S64 S64 8 "s64",
    /// 8-bit unsigned integer.
    U8 U8 1 "u8",
    /// 16-bit unsigned integer.
    U16 U16 2 "u16",
    /// 32-bit unsigned integer.
    U32 U32 4 "u32",
    /// 64-bit unsigned integer.
    U64 U64 8 "u64",
    /// 8-bit float, 3 exponent bits.
    F8E3M4 F8E3M4 1 "f8e3m4",
    /// 8-bit float, 4 exponent bits, IEEE infinities.
    F8E4M3 F8E4M3 1 "f8e4m3",
    /// 8-bit float, 4 exponent bits, bias 11, no infinities, no negative zero.
    F8E4M3B11Fnuz F8E4M3B11FNUZ 1 "f8e4m3b11fnuz",
    /// 8-bit float, 4 exponent bits, no infinities.
    F8E4M3Fn F8E4M3FN 1 "f8e4m3fn",
    /// 8-bit float, 4 exponent bits, no infinities, no negative zero.
    F8E4M3Fnuz F8E4M3FNUZ 1 "f8e4m3fnuz",
    /// 8-bit float, 5 exponent bits, IEEE infinities.
    F8E5M2 F8E5M2 1 "f8e5m2",
    /// 8-bit float, 5 exponent bits, no infinities, no negative zero.
    F8E5M2Fnuz F8E5M2FNUZ 1 "f8e5m2fnuz",
    /// 8-bit exponent without sign or mantissa: powers of two.
    F8E8M0Fnu F8E8M0FNU 1 "f8e8m0fnu",
    /// IEEE half precision.
    F16 F16 2 "f16",
    /// bfloat16.
    Bf16 BF16 2 "bf16",
    /// IEEE single precision.
    F32 F32 4 "f32",
    /// IEEE double precision.
    F64 F64 8 "f64",
    /// Complex of two `f32`.
    C64 C64 8 "c64",
    /// Complex of two `f64`.
    C128 C128 16 "c128",
}

impl BufferType {
    pub(crate) fn from_c(kind: u32) -> Option<BufferType> {
        BufferType::ALL.iter().copied().find(|ty| ty.to_c() == kind)
    }
}

impl fmt::Display for BufferType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
