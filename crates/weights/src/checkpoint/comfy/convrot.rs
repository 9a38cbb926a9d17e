//! int8-convrot: weights whose rows were multiplied, in groups of 256 columns, by a Hadamard matrix before quantization.

use std::sync::Arc;

use crate::checkpoint::TensorView;
use crate::checkpoint::view::decoder::NumberDecoder;
use crate::error::WeightsError;

/// Number of columns in a group; published files use no other size.
pub(super) const GROUP: usize = 256;
const QUARTER: usize = GROUP / 4;
/// Number of columns whose sums are computed together, so that the sums stay in registers.
const LANES: usize = 16;
const PARTS: usize = QUARTER / LANES;

/// The 4x4 Hadamard matrix, which is symmetric. Larger matrices are its normalized Kronecker powers and therefore equal
/// their inverses.
const H4: [[f32; 4]; 4] = [[1.0, 1.0, 1.0, -1.0], [1.0, 1.0, -1.0, 1.0], [1.0, -1.0, 1.0, 1.0], [-1.0, 1.0, 1.0, 1.0]];

/// Decoder that reverses the rotation of the values that an inner decoder returns.
#[derive(Debug)]
pub(super) struct Rotated {
    inner: Arc<dyn NumberDecoder>,
    /// The matrix for a quarter of the columns, scaled by the factor that normalizes the matrix for a group. Stored in
    /// parts of [`LANES`] columns, each with all rows.
    quarter: Vec<[[f32; LANES]; QUARTER]>,
}

impl Rotated {
    /// `inner` must have units of one element, and the number of columns must be divisible by [`GROUP`].
    pub(super) fn new(inner: Arc<dyn NumberDecoder>) -> Self {
        let sign = |row: usize, column: usize| {
            [1, 4, 16].iter().map(|place| H4[row / place % 4][column / place % 4]).product::<f32>()
        };
        let factor = |row, column| sign(row, column) / (GROUP as f32).sqrt();
        let part = |part| std::array::from_fn(|row| std::array::from_fn(|lane| factor(row, part * LANES + lane)));
        Rotated { inner, quarter: (0..PARTS).map(part).collect() }
    }

    /// Multiplies a group by the matrix. The result is bitwise equal to comfy-kitchen's on CPU, where torch sums the
    /// products of each half of the group in order and then adds the two sums. The four quarters of the result are sums
    /// of the same products with different signs, so each product is computed once.
    fn rotate(&self, group: &mut [f32]) {
        let mut result = [[[0f32; LANES]; PARTS]; 4];
        for (half, values) in group.chunks_exact(2 * QUARTER).enumerate() {
            let (first, second) = values.split_at(QUARTER);
            for (part, rows) in self.quarter.iter().enumerate() {
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
}

impl NumberDecoder for Rotated {
    fn unit(&self) -> (usize, usize) {
        (GROUP, GROUP * self.inner.unit().1)
    }

    fn decode(&self, first: usize, codes: &[u8], values: &mut [f32]) -> Result<(), WeightsError> {
        self.inner.decode(first, codes, values)?;
        values.chunks_exact_mut(GROUP).for_each(|group| self.rotate(group));
        Ok(())
    }

    fn operands(&self) -> Vec<&TensorView> {
        self.inner.operands()
    }
}
