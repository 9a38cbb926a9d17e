//! The kernel that multiplies a weight and a single row of activations, for text generation.
//!
//! The product is limited by the speed at which memory delivers the weight. Each program of the launch grid reads
//! whole rows of the weight; it loads several tiles before it uses the first one, so that enough reads are in flight.
//! Products and sums are f32.

use super::TritonKernel;
use super::text::{TritonCode, TritonTile};
use ltx2_stablehlo::{DType, Type, Value};

/// Name of the kernel in profiles.
const NAME: &str = "row_product";

/// Rows of the weight that each program reads, one per warp.
const ROWS: usize = 4;
/// Columns of a tile: each thread of a warp loads 16 bytes.
const COLUMNS: usize = 256;
/// Largest number of tiles that are loaded together.
const TILES: usize = 16;

/// A row of activations `[1…, in]` and a weight `[out…, in]` that it is multiplied with.
pub(crate) struct RowProduct<'a> {
    x: &'a Value,
    weight: &'a Value,
    /// Element type of the result.
    dtype: DType,
}

impl<'a> RowProduct<'a> {
    /// Creates the product of `x [1…, in]` and `weight [out…, in]`; returns `None` if the kernel does not support the
    /// shapes or element types.
    pub(crate) fn new(x: &'a Value, weight: &'a Value, dtype: DType) -> Option<Self> {
        let (narrow, inputs) = (x.dtype(), x.dim(-1));
        let is_row = inputs > 0 && inputs.is_multiple_of(COLUMNS) && x.ty().elements() == inputs;
        let is_narrow = [DType::BF16, DType::F16].contains(&narrow) && [narrow, DType::F32].contains(&dtype);
        let product = RowProduct { x, weight, dtype };
        let fits = is_row && weight.dim(-1) == inputs && weight.dtype() == narrow;
        // Larger results have a launch grid that is too long.
        let is_supported = fits && is_narrow && i32::try_from(product.outputs()).is_ok();
        (is_supported && product.outputs().is_multiple_of(ROWS)).then_some(product)
    }

    /// Returns the result, `[out…]`.
    pub(crate) fn value(&self) -> Value {
        let (inputs, outputs) = (self.x.dim(-1), self.outputs());
        let kernel = TritonKernel {
            name: NAME,
            text: self.text(),
            grid: [outputs / ROWS, 1, 1],
            warps: ROWS,
            stages: 1,
            flops: 2 * self.weight.ty().elements(),
        };
        let operands = [self.x.reshape(vec![inputs]), self.weight.reshape(vec![outputs, inputs])];
        let value = kernel.call(&operands.each_ref(), &[Type::new(self.dtype, [outputs])]).remove(0);
        value.reshape(self.weight.dims()[..self.weight.rank() - 1].to_vec())
    }

    fn outputs(&self) -> usize {
        self.weight.dims()[..self.weight.rank() - 1].iter().product()
    }

    /// Returns the kernel as MLIR text. Its arguments are the row, the weight and the result.
    pub(super) fn text(&self) -> String {
        let narrow = self.x.dtype();
        TritonCode::module(NAME, &[narrow, narrow, self.dtype], |code, arrays| self.write(code, arrays))
    }

    fn write(&self, code: &TritonCode, arrays: &[TritonTile]) {
        let inputs = self.x.dim(-1);
        let all = inputs / COLUMNS;
        let tiles = (1..=TILES).rev().find(|n| all.is_multiple_of(*n)).unwrap_or(1);
        let start = code.place(0).times(ROWS).wide();
        let weight = arrays[1].ahead(&start.times(inputs));
        // As a matrix of one row, tiles of `x` have the layout of the weight's, so no thread waits for another.
        let column = code.range(COLUMNS).row();
        let offsets = code.range(ROWS).times(inputs).column().plus(&column);
        let zero = code.full(0.0, &[ROWS, COLUMNS]);
        let [sum] = code.repeat(all / tiles, [zero], |round, [sum]| {
            let at = round.times(tiles * COLUMNS);
            let (weight, x) = (weight.ahead(&at), arrays[0].ahead(&at));
            let pointers: Vec<[TritonTile; 2]> = (0..tiles)
                .map(|n| [weight.ahead(&offsets.plus(n * COLUMNS)), x.ahead(&column.plus(n * COLUMNS))])
                .collect();
            let loaded: Vec<[TritonTile; 2]> =
                pointers.iter().map(|both| both.each_ref().map(TritonTile::load)).collect();
            let add = |sum: TritonTile, [weight, x]: &[TritonTile; 2]| sum.plus(&weight.widened().times(&x.widened()));
            [loaded.iter().fold(sum.clone(), add)]
        });
        arrays[2].ahead(&start).ahead(&code.range(ROWS)).store(&sum.row_sum().narrowed(self.dtype));
    }
}
