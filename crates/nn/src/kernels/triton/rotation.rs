//! The kernel that rotates activations in groups of 256 and quantizes their rows to int8, for int8-convrot.
//!
//! Each program of the launch grid keeps whole rows in registers, so every element is read once, as bf16 or f16, and
//! written once, as int8. Each of four tiles holds 64 elements of a group as one of its lines. The rotation is a
//! Kronecker product: a matmul with a 64 x 64 matrix computes the factor within a tile, and additions of the four tiles
//! compute the other factor. Rotated values stay f32 until they are quantized.

use super::TritonKernel;
use super::text::{TritonCode, TritonTile};
use crate::ROTATED_INPUTS;
use ltx2_stablehlo::{DType, Type, Value};

/// Name of the kernel in profiles.
const NAME: &str = "rotate_quantize";

/// Number of elements of a group in each of the four tiles.
const PART: usize = ROTATED_INPUTS / 4;

/// Minimum and maximum number of lines of a tile: the minimum of Hopper's matmul instruction, and the number of lines
/// of a row with 32768 inputs.
const LINES: [usize; 2] = [64, 128];

/// Number of lines per warp, chosen so that each thread holds 128 values.
const LINES_PER_WARP: usize = 16;

/// Activations `[rows…, inputs]` that the kernel rotates and quantizes.
pub(crate) struct RowRotation<'a> {
    x: &'a Value,
    /// The matrix `[256, 256]` of the rotation, in the element type of the activations.
    matrix: &'a Value,
    rows: usize,
    inputs: usize,
}

impl<'a> RowRotation<'a> {
    /// Creates the rotation of `x [rows…, inputs]`; returns `None` if the kernel does not support the shape or the
    /// element type of `x`. `matrix` is the regular Hadamard matrix by which groups of inputs are multiplied.
    pub(crate) fn new(x: &'a Value, matrix: &'a Value) -> Option<Self> {
        let inputs = x.dim(-1);
        let rows = x.ty().elements() / inputs.max(1);
        let this = RowRotation { x, matrix, rows, inputs };
        let fits = rows > 0 && inputs.is_multiple_of(ROTATED_INPUTS) && this.lines() <= LINES[1];
        let dtype = x.dtype();
        (fits && [DType::BF16, DType::F16].contains(&dtype) && matrix.dtype() == dtype).then_some(this)
    }

    /// Returns the rotated activations as int8, `[rows…, inputs]`, with their f32 scales `[rows…, 1]`.
    pub(crate) fn quantized(&self) -> (Value, Value) {
        let (x, leading) = (self.x, &self.x.dims()[..self.x.rank() - 1]);
        let kernel = TritonKernel {
            name: NAME,
            text: self.text(),
            grid: [self.rows.div_ceil(self.rows_of_program()), 1, 1],
            warps: self.rows_of_program() * self.lines() / LINES_PER_WARP,
            stages: 1,
            flops: 2 * PART * x.ty().elements(),
        };
        let types = [Type::new(DType::I8, x.dims()), Type::new(DType::F32, [leading, &[1]].concat())];
        let mut results = kernel.call(&[x, self.matrix], &types);
        let scales = results.remove(1);
        (results.remove(0), scales)
    }

    /// Returns the number of lines of a row in each tile: its number of groups, rounded up to a power of two. The
    /// additional lines repeat the last group.
    fn lines(&self) -> usize {
        (self.inputs / ROTATED_INPUTS).next_power_of_two()
    }

    /// Returns the number of rows that each program processes, a power of two.
    fn rows_of_program(&self) -> usize {
        (LINES[0] / self.lines()).max(1)
    }

    /// Returns the kernel as MLIR text. Its arguments are the activations, the matrix and both results.
    pub(super) fn text(&self) -> String {
        let dtype = self.x.dtype();
        TritonCode::module(NAME, &[dtype, dtype, DType::I8, DType::F32], |code, arrays| self.write(code, arrays))
    }

    fn write(&self, code: &TritonCode, arrays: &[TritonTile]) {
        let (lines, rows) = (self.lines(), self.rows_of_program());
        // The last rows of the last program may be computed twice, so that it has as many rows as the others.
        let own = rows.min(self.rows);
        let start = code.place(0).times(rows).at_most(self.rows - own).wide();
        let line = code.range(rows * lines);
        let group = line.modulo(lines).at_most(self.inputs / ROTATED_INPUTS - 1);
        let offset = line.over(lines).at_most(own - 1).times(self.inputs).plus(&group.times(ROTATED_INPUTS)).column();
        let part = code.range(PART).row();
        let offsets = [0, 1, 2, 3].map(|n| offset.plus(&part.plus(n * PART)));
        let origin = |array: &TritonTile| array.ahead(&start.times(self.inputs));

        // The upper left part of the rotation matrix; the other parts differ from it only in sign.
        let at = code.range(PART).times(ROTATED_INPUTS).column().plus(&part);
        let (matrix, from) = (arrays[1].ahead(&at).load(), origin(&arrays[0]));
        let zeros = code.full(0.0, &[rows * lines, PART]);
        let [a, b, c, d] = offsets.each_ref().map(|at| from.ahead(at).load().product(&matrix, &zeros));
        // Each result is the sum of three tiles minus the fourth.
        let (ab, cd) = (a.plus(&b), c.plus(&d));
        let (a_b, c_d) = (a.minus(&b), c.minus(&d));
        let rotated = [ab.plus(&c_d), ab.minus(&c_d), cd.plus(&a_b), cd.minus(&a_b)];

        let [a, b, c, d] = rotated.each_ref().map(TritonTile::absolute);
        let largest = a
            .max_propagating_nan(&b)
            .max_propagating_nan(&c.max_propagating_nan(&d))
            .row_max_propagating_nan()
            .reshaped(&[rows, lines])
            .row_max_propagating_nan();
        // The lower bound keeps rows of zeros at 0 instead of NaN.
        let largest = largest.max_propagating_nan(1e-30);
        let steps = f64::from(i8::MAX);
        let row = code.range(rows).at_most(own - 1);
        arrays[3].ahead(&start).ahead(&row).store(&largest.over(steps));
        let factor = code.full(steps, &[rows]).over(&largest);
        let factor = factor.column().broadcast(&[rows, lines]).reshaped(&[rows * lines]).column();
        let to = origin(&arrays[2]);
        for (at, values) in offsets.iter().zip(rotated) {
            to.ahead(at).store(&values.times(&factor).rounded_to_i8());
        }
    }
}
