//! 8-bit floats: 1 sign bit, 4 exponent bits (bias 7), 3 mantissa bits, no infinities (OCP E4M3).

/// An 8-bit float in the E4M3 format. `==` compares the bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct F8(pub u8);

impl F8 {
    /// The largest finite value.
    pub const MAX: f32 = 448.0;

    /// Rounds to the nearest E4M3 value, ties to even. Larger magnitudes become [`F8::MAX`].
    pub fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let (sign, magnitude) = ((bits >> 24) as u8 & 0x80, f32::from_bits(bits & 0x7fff_ffff));
        if magnitude.is_nan() {
            return F8(sign | 0x7f);
        }
        let magnitude = magnitude.min(Self::MAX);
        // E4M3 values below 2^-6 are multiples of 2^-9. The f32 values just above 2^14 have the same spacing, so adding
        // 2^14 rounds the value.
        let small = (magnitude + 16_384.0).to_bits() & 0xff;
        // For larger values, drop 20 of f32's 23 mantissa bits and change the exponent bias from 127 to 7.
        let whole = magnitude.to_bits();
        let rounded = (whole + 0x7_ffff + (whole >> 20 & 1)) >> 20;
        let bits = if magnitude < 1.0 / 64.0 { small } else { rounded.wrapping_sub(120 << 3) };
        F8(sign | bits as u8)
    }
}

/// Value of each of the 256 bit patterns.
static VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = (code as u32 >> 3 & 15, code as u32 & 7);
        let magnitude = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa as f32 / 512.0,
            // The exponent bias is 127 in f32 and 7 here.
            _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
        };
        values[code] = if code < 128 { magnitude } else { -magnitude };
        code += 1;
    }
    values
};

impl From<F8> for f32 {
    fn from(value: F8) -> f32 {
        VALUES[usize::from(value.0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_f32_round_trips_every_f8() {
        for bits in (0..=255u8).filter(|b| b & 0x7f != 0x7f) {
            let value = f32::from(F8(bits));
            assert_eq!(F8::from_f32(value), F8(bits), "{value}");
        }
        assert!(f32::from(F8(0x7f)).is_nan() && f32::from(F8::from_f32(f32::NAN)).is_nan());
        assert_eq!((f32::from(F8(0x7e)), f32::from(F8(1)), f32::from(F8(8))), (448.0, 1.0 / 512.0, 1.0 / 64.0));
    }

    #[test]
    fn f8_conversion_rounds_to_nearest_ties_to_even() {
        let numbers: Vec<f32> = (0..0x7fu8).map(|b| f32::from(F8(b))).collect();
        for (bits, pair) in numbers.windows(2).enumerate() {
            let (low, high, middle) = (bits as u8, bits as u8 + 1, f32::midpoint(pair[0], pair[1]));
            let even = if low % 2 == 0 { low } else { high };
            for sign in [1.0, -1.0] {
                let of = |v: f32| F8::from_f32(sign * v).0 & 0x7f;
                assert_eq!(of(middle), even, "{middle}");
                assert_eq!(of(f32::from_bits(middle.to_bits() - 1)), low, "below {middle}");
                assert_eq!(of(f32::from_bits(middle.to_bits() + 1)), high, "above {middle}");
            }
        }
        assert_eq!([449.0, 1e9, f32::INFINITY].map(|v| f32::from(F8::from_f32(-v))), [-448.0; 3]);
    }
}
