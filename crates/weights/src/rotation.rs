//! The regular Hadamard rotation that int8-convrot applies to groups of 256 inputs of a linear layer.

use std::array;

/// Number of columns per group. Published files use no other size.
pub const GROUP: usize = 256;
const QUARTER: usize = GROUP / 4;
/// Number of rows and columns of a block of the rotation matrix. The blocks differ only in sign.
const BLOCK: usize = 16;
/// Number of blocks in a quarter of a row.
const PARTS: usize = QUARTER / BLOCK;
/// Number of columns whose sums are computed together; their sums fit into registers.
const LANES: usize = 4;

/// The 4x4 Hadamard matrix, which is symmetric. Larger matrices are its normalized Kronecker powers and therefore equal
/// their inverses.
const H4: [[f32; 4]; 4] = [[1.0, 1.0, 1.0, -1.0], [1.0, 1.0, -1.0, 1.0], [1.0, -1.0, 1.0, 1.0], [-1.0, 1.0, 1.0, 1.0]];

/// The upper left block of the rotation matrix, which is scaled by 1 / sqrt([`GROUP`]): for each range of [`LANES`]
/// columns, the entries of each row.
static SIGNS: [[[f32; LANES]; BLOCK]; BLOCK / LANES] = {
    let mut signs = [[[0.0; LANES]; BLOCK]; BLOCK / LANES];
    let mut at = 0;
    while at < BLOCK * BLOCK {
        let (row, column) = (at / BLOCK, at % BLOCK);
        let sign = H4[row % 4][column % 4] * H4[row / 4][column / 4];
        signs[column / LANES][row][column % LANES] = sign / 16.0;
        at += 1;
    }
    signs
};

/// Sums of [`LANES`] columns for each of the [`PARTS`] parts of a quarter.
type Sums = [[f32; LANES]; PARTS];

/// Multiplies each group of [`GROUP`] values by the rotation matrix. A second call restores the original values up to
/// rounding.
pub(crate) fn rotate(values: &mut [f32]) {
    values.as_chunks_mut::<GROUP>().0.iter_mut().for_each(rotate_group);
}

/// Multiplies a group by the matrix. The result is bitwise equal to comfy-kitchen's on CPU, where torch sums the
/// products of each half of the group in order and then adds the two sums. The four quarters of the result, and the
/// `PARTS` parts of a quarter, are sums of the same products with different signs, so each product is computed once.
fn rotate_group(group: &mut [f32; GROUP]) {
    let mut result = [[[0f32; BLOCK]; PARTS]; 4];
    for (half, values) in group.as_chunks::<{ 2 * QUARTER }>().0.iter().enumerate() {
        let blocks = values.as_chunks::<BLOCK>().0;
        for (lanes, signs) in SIGNS.iter().enumerate() {
            // Unrolled by hand, so that the signs of the blocks are constants.
            let mut plus = Sums::default();
            add_block::<0>(&mut plus, &blocks[0], signs);
            add_block::<1>(&mut plus, &blocks[1], signs);
            add_block::<2>(&mut plus, &blocks[2], signs);
            add_block::<3>(&mut plus, &blocks[3], signs);
            let mut minus = plus;
            add_and_subtract_block::<0>(&mut plus, &mut minus, &blocks[4], signs);
            add_and_subtract_block::<1>(&mut plus, &mut minus, &blocks[5], signs);
            add_and_subtract_block::<2>(&mut plus, &mut minus, &blocks[6], signs);
            add_and_subtract_block::<3>(&mut plus, &mut minus, &blocks[7], signs);
            for (i, quarter) in result.iter_mut().enumerate() {
                let [first, second] = [2 * half, 2 * half + 1].map(|row| H4[row][i]);
                let sums = if first == second { &plus } else { &minus };
                for (part, sums) in quarter.iter_mut().zip(sums) {
                    part[lanes * LANES..][..LANES].iter_mut().zip(sums).for_each(|(to, sum)| *to += first * sum);
                }
            }
        }
    }
    group.copy_from_slice(result.as_flattened().as_flattened());
}

/// Adds the products of block `I` of a quarter to the sums of each part, with the part's sign.
#[inline(always)]
fn add_block<const I: usize>(sums: &mut Sums, values: &[f32; BLOCK], signs: &[[f32; LANES]; BLOCK]) {
    for (value, signs) in values.iter().zip(signs) {
        let row = signs.map(|sign| value * sign);
        *sums = array::from_fn(|part| add(&sums[part], &row, H4[I][part]));
    }
}

/// Adds the products of block `I` of a quarter to `plus` as [`add_block`] does, and subtracts them from `minus`.
#[inline(always)]
fn add_and_subtract_block<const I: usize>(
    plus: &mut Sums,
    minus: &mut Sums,
    values: &[f32; BLOCK],
    signs: &[[f32; LANES]; BLOCK],
) {
    for (value, signs) in values.iter().zip(signs) {
        let row = signs.map(|sign| value * sign);
        *plus = array::from_fn(|part| add(&plus[part], &row, H4[I][part]));
        *minus = array::from_fn(|part| add(&minus[part], &row, -H4[I][part]));
    }
}

/// Adds `row` to `sums`, or subtracts it if `sign` is negative.
#[inline(always)]
fn add(sums: &[f32; LANES], row: &[f32; LANES], sign: f32) -> [f32; LANES] {
    match sign > 0.0 {
        true => array::from_fn(|lane| sums[lane] + row[lane]),
        false => array::from_fn(|lane| sums[lane] - row[lane]),
    }
}
