//! The regular Hadamard rotation that int8-convrot applies to groups of 256 inputs of a linear layer.

use std::array;
use std::sync::LazyLock;

/// Number of columns per group. Published files use no other size.
pub const GROUP: usize = 256;
const QUARTER: usize = GROUP / 4;
/// Number of columns whose sums are computed together; they fit into registers.
const LANES: usize = 16;
const PARTS: usize = QUARTER / LANES;

/// The 4x4 Hadamard matrix, which is symmetric. Larger matrices are its normalized Kronecker powers and therefore equal
/// their inverses.
const H4: [[f32; 4]; 4] = [[1.0, 1.0, 1.0, -1.0], [1.0, 1.0, -1.0, 1.0], [1.0, -1.0, 1.0, 1.0], [-1.0, 1.0, 1.0, 1.0]];

/// The upper left `LANES` x `LANES` block of the rotation matrix, which is scaled by 1 / sqrt([`GROUP`]). The other
/// blocks differ from it only in sign.
static SIGNS: LazyLock<[[f32; LANES]; LANES]> = LazyLock::new(|| {
    let sign = |row: usize, column: usize| H4[row % 4][column % 4] * H4[row / 4][column / 4];
    array::from_fn(|row| array::from_fn(|lane| sign(row, lane) / (GROUP as f32).sqrt()))
});

/// Multiplies each group of [`GROUP`] values by the matrix. Applied twice, it returns the original values up to
/// rounding.
pub(crate) fn rotate(values: &mut [f32]) {
    values.chunks_exact_mut(GROUP).for_each(|group| rotate_group(group, &SIGNS));
}

/// Multiplies a group by the matrix. The result is bitwise equal to comfy-kitchen's on CPU, where torch sums the
/// products of each half of the group in order and then adds the two sums. The four quarters of the result, and the
/// `PARTS` parts of a quarter, are sums of the same products with different signs, so each product is computed once.
fn rotate_group(group: &mut [f32], signs: &[[f32; LANES]; LANES]) {
    let mut result = [[[0f32; LANES]; PARTS]; 4];
    for (half, values) in group.chunks_exact(2 * QUARTER).enumerate() {
        let products: [[f32; LANES]; 2 * QUARTER] =
            array::from_fn(|row| signs[row % LANES].map(|sign| values[row] * sign));
        let (first, second) = products.split_at(QUARTER);
        for part in 0..PARTS {
            let mut plus = [0f32; LANES];
            for (rows, signs) in first.chunks_exact(LANES).zip(&H4) {
                rows.iter().for_each(|row| plus = sum(&plus, row, signs[part]));
            }
            let mut minus = plus;
            for (rows, signs) in second.chunks_exact(LANES).zip(&H4) {
                for row in rows {
                    (plus, minus) = (sum(&plus, row, signs[part]), sum(&minus, row, -signs[part]));
                }
            }
            for (i, result) in result.iter_mut().enumerate() {
                let [first, second] = [2 * half, 2 * half + 1].map(|row| H4[row][i]);
                let sums = if first == second { &plus } else { &minus };
                result[part].iter_mut().zip(sums).for_each(|(result, sum)| *result += first * sum);
            }
        }
    }
    group.copy_from_slice(result.as_flattened().as_flattened());
}

/// Adds `row` to `sums`, or subtracts it if `sign` is negative.
fn sum(sums: &[f32; LANES], row: &[f32; LANES], sign: f32) -> [f32; LANES] {
    match sign > 0.0 {
        true => array::from_fn(|lane| sums[lane] + row[lane]),
        false => array::from_fn(|lane| sums[lane] - row[lane]),
    }
}
