//! The kernel that multiplies weights and a single row of activations, for text generation.
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
const TILES: usize = 8;

/// A row of activations and the weights that it is multiplied with.
pub(crate) struct RowProduct<'a> {
    x: &'a Value,
    weights: Vec<RowWeight<'a>>,
    /// Element type of the results.
    dtype: DType,
    /// Whether the weight is a gate and its values, `[2, out…, in]`: the result is `gelu(gate · x) · (values · x)`.
    is_gated: bool,
}

/// A weight of [`RowProduct`].
#[derive(Clone, Copy)]
pub(crate) struct RowWeight<'a> {
    /// Weight `[out…, in]`.
    pub(crate) weight: &'a Value,
    /// Number of equally sized results into which the product is split. If greater than 1, the weight is
    /// `[parts, out…, in]`.
    pub(crate) parts: usize,
}

impl RowWeight<'_> {
    /// Returns the number of elements of each result.
    fn outputs(&self) -> usize {
        self.weight.dims()[..self.weight.rank() - 1].iter().product::<usize>() / self.parts.max(1)
    }

    /// Returns the dimensions of each result.
    fn dims(&self) -> &[usize] {
        &self.weight.dims()[usize::from(self.parts > 1)..self.weight.rank() - 1]
    }
}

impl<'a> RowProduct<'a> {
    /// Creates the product of `x [1…, in]` and `weight [out…, in]`; returns `None` if the kernel does not support the
    /// shapes or element types.
    pub(crate) fn new(x: &'a Value, weight: &'a Value, dtype: DType) -> Option<Self> {
        let weights = vec![RowWeight { weight, parts: 1 }];
        RowProduct { x, weights, dtype, is_gated: false }.supported()
    }

    /// Creates the products of `x [1…, in]` and several weights, in the element type of `x`.
    pub(crate) fn several(x: &'a Value, weights: Vec<RowWeight<'a>>) -> Option<Self> {
        RowProduct { x, weights, dtype: x.dtype(), is_gated: false }.supported()
    }

    /// Creates the product of `x [1…, in]` and `weight [2, out…, in]`, of which the first half passes through the tanh
    /// approximation of GELU and multiplies the second half, in the element type of `x`.
    pub(crate) fn gated(x: &'a Value, weight: &'a Value) -> Option<Self> {
        let weights = vec![RowWeight { weight, parts: weight.dim(0) }];
        RowProduct { x, weights, dtype: x.dtype(), is_gated: true }.supported().filter(|_| weight.dim(0) == 2)
    }

    fn supported(self) -> Option<Self> {
        let (narrow, inputs) = (self.x.dtype(), self.x.dim(-1));
        let is_row = inputs > 0 && inputs.is_multiple_of(COLUMNS) && self.x.ty().elements() == inputs;
        let fits = |w: &RowWeight| {
            let is_split = w.parts == 1 || w.weight.dim(0) == w.parts;
            is_split && w.outputs().is_multiple_of(ROWS) && w.weight.dim(-1) == inputs && w.weight.dtype() == narrow
        };
        let is_narrow = [DType::BF16, DType::F16].contains(&narrow) && [narrow, DType::F32].contains(&self.dtype);
        // Larger results have a launch grid that is too long.
        let is_small = i32::try_from(self.outputs()).is_ok();
        (is_narrow && is_row && is_small && self.weights.iter().all(fits)).then_some(self)
    }

    /// Returns the results, those of each weight in turn.
    pub(crate) fn values(&self) -> Vec<Value> {
        let inputs = self.x.dim(-1);
        let kernel = TritonKernel {
            name: NAME,
            text: self.text(),
            grid: [self.outputs() / ROWS, 1, 1],
            warps: ROWS,
            stages: 1,
            flops: 2 * self.weights.iter().map(|w| w.weight.ty().elements()).sum::<usize>(),
        };
        let flat = |w: &RowWeight| w.weight.reshape(vec![w.weight.ty().elements() / inputs, inputs]);
        let operands: Vec<Value> =
            [self.x.reshape(vec![inputs])].into_iter().chain(self.weights.iter().map(flat)).collect();
        let results = self.results();
        let types: Vec<Type> = results.iter().map(|w| Type::new(self.dtype, [w.outputs()])).collect();
        let values = kernel.call(&operands.iter().collect::<Vec<_>>(), &types);
        values.iter().zip(results).map(|(value, w)| value.reshape(w.dims().to_vec())).collect()
    }

    /// Returns the weight of each result.
    fn results(&self) -> Vec<&RowWeight<'a>> {
        let parts = |w: &RowWeight| if self.is_gated { 1 } else { w.parts };
        self.weights.iter().flat_map(|w| std::iter::repeat_n(w, parts(w))).collect()
    }

    fn outputs(&self) -> usize {
        self.results().iter().map(|w| w.outputs()).sum()
    }

    /// Returns the kernel as MLIR text. Its arguments are the row, the weights and the results.
    pub(super) fn text(&self) -> String {
        let narrow = self.x.dtype();
        let arrays = [vec![narrow; 1 + self.weights.len()], vec![self.dtype; self.results().len()]].concat();
        TritonCode::module(NAME, &arrays, |code, arrays| self.write(code, arrays))
    }

    fn write(&self, code: &TritonCode, arrays: &[TritonTile]) {
        let inputs = self.x.dim(-1);
        let all = inputs / COLUMNS;
        let halves = if self.is_gated { 2 } else { 1 };
        let tiles = (1..=TILES).rev().find(|n| all.is_multiple_of(*n)).unwrap_or(1);
        let place = code.place(0);
        let (weight, result) = self.own(&place, arrays);
        let column = code.range(COLUMNS);
        let offsets = code.range(ROWS).times(inputs).column().plus(&column.row());
        let second = (self.is_gated).then(|| weight.ahead(&code.wide_int(self.outputs() * inputs)));
        let weights: Vec<TritonTile> = [Some(weight), second].into_iter().flatten().collect();
        let sums = |_| code.full(0.0, &[ROWS, COLUMNS]);
        let zeros: Vec<TritonTile> = (0..halves).map(sums).collect();
        let sums = code.repeat_all(all / tiles, &zeros, |round, sums| {
            let at = round.times(tiles * COLUMNS);
            let weights: Vec<TritonTile> = weights.iter().map(|weight| weight.ahead(&at)).collect();
            let x = arrays[0].ahead(&at);
            let loaded: Vec<Vec<TritonTile>> = (0..tiles)
                .map(|n| {
                    let tile = |weight: &TritonTile| weight.ahead(&offsets.plus(n * COLUMNS));
                    let pointers = weights.iter().map(tile).chain([x.ahead(&column.plus(n * COLUMNS))]);
                    let pointers: Vec<TritonTile> = pointers.collect();
                    pointers.iter().map(TritonTile::load).collect()
                })
                .collect();
            let sum = |half: usize, sum: &TritonTile| {
                loaded.iter().fold(sum.clone(), |sum, tiles| {
                    sum.plus(&tiles[half].widened().times(&tiles[halves].widened().row()))
                })
            };
            sums.iter().enumerate().map(|(half, own)| sum(half, own)).collect()
        });
        let sums: Vec<TritonTile> = sums.iter().map(TritonTile::row_sum).collect();
        let value = if self.is_gated { gelu_tanh(&sums[0]).times(&sums[1]) } else { sums[0].clone() };
        result.ahead(&code.range(ROWS)).store(&value.narrowed(self.dtype));
    }

    /// Returns the pointers to the first row of the weight and to the first element of the result of the program at
    /// `place`.
    fn own(&self, place: &TritonTile, arrays: &[TritonTile]) -> (TritonTile, TritonTile) {
        let (inputs, first_result) = (self.x.dim(-1), 1 + self.weights.len());
        let mut own: Option<(TritonTile, TritonTile)> = None;
        let (mut before, mut result) = (0, first_result);
        for (n, w) in self.weights.iter().enumerate() {
            let parts = if self.is_gated { 1 } else { w.parts };
            for part in 0..parts {
                let local = if before == 0 { place.clone() } else { place.minus(before / ROWS) };
                let start = local.times(ROWS).wide();
                let row = if part == 0 { start.clone() } else { start.plus(part * w.outputs()) };
                let pointers = (arrays[1 + n].ahead(&row.times(inputs)), arrays[result].ahead(&start));
                own = Some(match own {
                    None => pointers,
                    Some(earlier) => {
                        let is_earlier = place.is_within(before / ROWS);
                        let select = |a: &TritonTile, b: &TritonTile| is_earlier.select(a, b);
                        (select(&earlier.0, &pointers.0), select(&earlier.1, &pointers.1))
                    }
                });
                before += w.outputs();
                result += 1;
            }
        }
        own.unwrap_or_else(|| (arrays[0].clone(), arrays[0].clone()))
    }
}

/// Returns the tanh approximation of GELU: `x · sigmoid(2 · sqrt(2 / π) · (x + 0.044715 · x³))`, the same function
/// without tanh.
fn gelu_tanh(x: &TritonTile) -> TritonTile {
    let inner = x.times(x).times(x).times(0.044_715).plus(x);
    let scale = -2.0 * std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2 * std::f64::consts::LOG2_E;
    x.over(&inner.times(scale).exp2().plus(1.0))
}
