//! Sizes of shapes, and names of element types. Sizes that overflow become `u64::MAX`.

use super::proto::ShapeProto;

/// XLA's element types: number in the protobuf, name, and size in bits. Other types, such as tokens, have size 0.
const TYPES: [(i32, &str, u64); 19] = [
    (1, "pred", 8),
    (2, "s8", 8),
    (3, "s16", 16),
    (4, "s32", 32),
    (5, "s64", 64),
    (6, "u8", 8),
    (7, "u16", 16),
    (8, "u32", 32),
    (9, "u64", 64),
    (10, "f16", 16),
    (11, "f32", 32),
    (12, "f64", 64),
    (15, "c64", 64),
    (16, "bf16", 16),
    (18, "c128", 128),
    (19, "f8e5m2", 8),
    (20, "f8e4m3fn", 8),
    (21, "s4", 4),
    (22, "u4", 4),
];

/// Returns XLA's name of an element type.
pub(super) fn dtype_name(element_type: i32) -> &'static str {
    TYPES.iter().find(|t| t.0 == element_type).map_or("other", |t| t.1)
}

pub(super) fn is_float8(element_type: i32) -> bool {
    dtype_name(element_type).starts_with("f8")
}

pub(super) fn is_int8(element_type: i32) -> bool {
    dtype_name(element_type) == "s8"
}

pub(super) fn is_f32(element_type: i32) -> bool {
    dtype_name(element_type) == "f32"
}

/// Returns the number of elements of an array; for a tuple, the sum over its arrays.
pub(super) fn elements(shape: &ShapeProto) -> u64 {
    match shape.tuple_shapes.is_empty() {
        true => shape.dimensions.iter().fold(1, |all, d| all.saturating_mul(u64::try_from(*d).unwrap_or(0))),
        false => sum(shape.tuple_shapes.iter().map(elements)),
    }
}

/// Returns the dense size in bytes of an array; for a tuple, the sum over its arrays.
pub(super) fn bytes(shape: &ShapeProto) -> u64 {
    match shape.tuple_shapes.is_empty() {
        true => {
            let bits = TYPES.iter().find(|t| t.0 == shape.element_type).map_or(0, |t| t.2);
            elements(shape).saturating_mul(bits).div_ceil(8)
        }
        false => sum(shape.tuple_shapes.iter().map(bytes)),
    }
}

/// Adds sizes; a sum that overflows becomes `u64::MAX`.
pub(super) fn sum(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}

/// Memory space of device memory.
const DEVICE: i64 = 0;

/// Memory space of host memory (`S(5)` in HLO text). On TPUs, all other memory spaces except [`DEVICE`] are on the
/// chip.
const HOST: i64 = 5;

/// Returns the memory space of an array; for a tuple, [`DEVICE`].
fn memory_space(shape: &ShapeProto) -> i64 {
    shape.layout.as_ref().map_or(DEVICE, |l| l.memory_space)
}

/// Returns whether an array is in host memory.
pub(super) fn is_in_host(shape: &ShapeProto) -> bool {
    memory_space(shape) == HOST
}

/// Returns the number of bytes of a shape that are in device memory. `on_chip`: whether the device has on-chip memory
/// spaces.
pub(super) fn bytes_in_device(shape: &ShapeProto, on_chip: bool) -> u64 {
    let is_elsewhere = |s: &ShapeProto| is_in_host(s) || (on_chip && memory_space(s) != DEVICE);
    match shape.tuple_shapes.is_empty() {
        true if is_elsewhere(shape) => 0,
        true => bytes(shape),
        false => sum(shape.tuple_shapes.iter().map(|s| bytes_in_device(s, on_chip))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oversized_shapes_saturate() {
        let array = |dimensions: &[i64]| ShapeProto {
            element_type: 11,
            dimensions: dimensions.to_vec(),
            ..ShapeProto::default()
        };
        assert_eq!((elements(&array(&[3, 5])), bytes(&array(&[3, 5])), bytes(&array(&[]))), (15, 60, 4));
        assert_eq!((elements(&array(&[-1, 5])), elements(&array(&[0, i64::MAX, i64::MAX]))), (0, 0));
        let huge = array(&[1 << 40, 1 << 40]);
        assert_eq!((elements(&huge), bytes(&huge)), (u64::MAX, u64::MAX.div_ceil(8)));
        let pair = ShapeProto { tuple_shapes: vec![huge; 9], ..ShapeProto::default() };
        assert_eq!((elements(&pair), bytes(&pair), bytes_in_device(&pair, true)), (u64::MAX, u64::MAX, u64::MAX));
    }
}
