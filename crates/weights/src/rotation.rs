//! The regular Hadamard rotation that int8-convrot applies to groups of 256 inputs of a linear layer.

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

/// The upper left `QUARTER` x `QUARTER` block of the rotation matrix, which is scaled by 1 / sqrt([`GROUP`]). The other
/// blocks differ from it only in sign. Stored as `[part][row][lane]`, where column = part * `LANES` + lane.
static MATRIX: LazyLock<Vec<[[f32; LANES]; QUARTER]>> = LazyLock::new(|| {
    let sign = |row: usize, column: usize| {
        [1, 4, 16].iter().map(|place| H4[row / place % 4][column / place % 4]).product::<f32>()
    };
    let factor = |row, column| sign(row, column) / (GROUP as f32).sqrt();
    let part = |part| std::array::from_fn(|row| std::array::from_fn(|lane| factor(row, part * LANES + lane)));
    (0..PARTS).map(part).collect()
});

/// Multiplies each group of [`GROUP`] values by the matrix. Applied twice, it returns the original values up to
/// rounding.
pub(crate) fn rotate(values: &mut [f32]) {
    values.chunks_exact_mut(GROUP).for_each(|group| rotate_group(group, &MATRIX));
}

/// Multiplies a group by the matrix. The result is bitwise equal to comfy-kitchen's on CPU, where torch sums the
/// products of each half of the group in order and then adds the two sums. The four quarters of the result are sums of
/// the same products with different signs, so each product is computed once.
fn rotate_group(group: &mut [f32], matrix: &[[[f32; LANES]; QUARTER]]) {
    let mut result = [[[0f32; LANES]; PARTS]; 4];
    for (half, values) in group.chunks_exact(2 * QUARTER).enumerate() {
        let (first, second) = values.split_at(QUARTER);
        for (part, rows) in matrix.iter().enumerate() {
            let mut plus = [0f32; LANES];
            for (value, row) in first.iter().zip(rows) {
                plus = std::array::from_fn(|lane| plus[lane] + value * row[lane]);
            }
            let mut minus = plus;
            for (value, row) in second.iter().zip(rows) {
                let product: [f32; LANES] = std::array::from_fn(|lane| value * row[lane]);
                plus = std::array::from_fn(|lane| plus[lane] + product[lane]);
                minus = std::array::from_fn(|lane| minus[lane] - product[lane]);
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
