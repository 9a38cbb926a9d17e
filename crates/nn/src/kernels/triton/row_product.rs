//! The kernel that multiplies a single row of activations by weights, for text generation.
//!
//! The products are limited by the speed at which memory delivers the weights. Each program of the launch grid has a single
//! warp and reads whole rows of a weight; it starts many loads before it uses the first one, so that enough reads are in
//! flight. Nothing passes through shared memory: XLA configures multiprocessors that run a Triton kernel with shared
//! memory for the largest amount of it, and the rest is too small for the loads in flight (on an H200, the largest product
//! of Gemma 3 12B then takes 75 us instead of 57). Products and sums are f32.

use super::TritonKernel;
use super::text::{TritonCode, TritonTile};
use crate::Params;
use ltx2_stablehlo::{DType, Type, Value};

/// Name of the kernel in profiles.
const NAME: &str = "row_product";

/// Columns of a tile: each thread of a warp loads 16 bytes.
const COLUMNS: usize = 256;
/// Largest number of tiles of a row that are loaded together.
const TILES: usize = 16;

/// A weight of [`RowProducts`].
#[derive(Clone, Copy)]
pub struct RowWeight<'a> {
    /// Weight `[out…, in]`.
    pub weight: &'a Value,
    /// Number of equally sized results into which the product is split. If greater than 1, the weight is
    /// `[parts, out…, in]`.
    pub parts: usize,
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

/// A row of activations and the weights that it is multiplied with.
pub struct RowProducts<'a> {
    /// Row `[1…, in]`.
    pub x: &'a Value,
    /// Weights.
    pub weights: Vec<RowWeight<'a>>,
    /// Element type of the products.
    pub dtype: DType,
    /// Whether the only weight is a gate and its values, `[2, out…, in]`: the product is `gelu(gate · x) · (values · x)`
    /// with the tanh approximation of GELU.
    pub is_gated: bool,
}

impl<'a> RowProducts<'a> {
    /// Runs the kernel. Returns the products `[1…, out…]`, those of each weight in turn, or `None` if the program does not
    /// use kernels for single rows, or if the kernel does not support the shapes or element types.
    pub fn run(&self, p: &Params) -> Option<Vec<Value>> {
        if !p.has_row_kernels(self.x) || !self.is_supported() {
            return None;
        }
        let inputs = self.x.dim(-1);
        let kernel = TritonKernel {
            name: NAME,
            text: self.text(),
            grid: [self.outputs(), 1, 1],
            warps: 1,
            stages: 1,
            flops: 2 * self.weights.iter().map(|w| w.weight.ty().elements()).sum::<usize>(),
        };
        let flat = |w: &RowWeight| w.weight.reshape(vec![w.weight.ty().elements() / inputs, inputs]);
        let operands: Vec<Value> =
            [self.x.reshape(vec![inputs])].into_iter().chain(self.weights.iter().map(flat)).collect();
        let products = self.products();
        let types: Vec<Type> = products.iter().map(|w| Type::new(self.dtype, [w.outputs()])).collect();
        let results = kernel.call(&operands.iter().collect::<Vec<_>>(), &types);
        let lead = &self.x.dims()[..self.x.rank() - 1];
        Some(results.iter().zip(products).map(|(value, w)| value.reshape([lead, w.dims()].concat())).collect())
    }

    pub(super) fn is_supported(&self) -> bool {
        let (narrow, inputs) = (self.x.dtype(), self.x.dim(-1));
        let is_row = inputs > 0 && self.x.ty().elements() == inputs;
        let is_narrow = [DType::BF16, DType::F16].contains(&narrow) && [narrow, DType::F32].contains(&self.dtype);
        let fits = |w: &RowWeight| {
            let is_split = w.parts == 1 || w.weight.dim(0) == w.parts;
            is_split && w.weight.dim(-1) == inputs && w.weight.dtype() == narrow
        };
        let is_pair = !self.is_gated || matches!(&self.weights[..], [weight] if weight.parts == 2);
        // Larger results have a launch grid that is too long.
        let is_small = i32::try_from(self.outputs()).is_ok();
        is_row && is_narrow && is_small && is_pair && self.weights.iter().all(fits)
    }

    /// Returns the weight of each product.
    fn products(&self) -> Vec<&RowWeight<'a>> {
        let parts = |w: &RowWeight| if self.is_gated { 1 } else { w.parts };
        self.weights.iter().flat_map(|w| std::iter::repeat_n(w, parts(w))).collect()
    }

    fn outputs(&self) -> usize {
        self.products().iter().map(|w| w.outputs()).sum()
    }

    /// Returns the kernel as MLIR text. Its arguments are the row, the weights and the products.
    pub(super) fn text(&self) -> String {
        let operands = vec![self.x.dtype(); 1 + self.weights.len()];
        let arrays = [operands, vec![self.dtype; self.products().len()]].concat();
        TritonCode::module(NAME, &arrays, |code, arrays| self.write(code, arrays))
    }

    fn write(&self, code: &TritonCode, arrays: &[TritonTile]) {
        let inputs = self.x.dim(-1);
        let all = inputs.div_ceil(COLUMNS);
        let rounds = all.div_ceil(TILES);
        let tiles = all.div_ceil(rounds);
        let is_whole = rounds * tiles * COLUMNS == inputs;
        let place = code.place(0);
        let (weight, product) = self.own(&place, &arrays[1..=self.weights.len()], &arrays[1 + self.weights.len()..]);
        let second = self.is_gated.then(|| weight.ahead(&code.wide_int(self.outputs() * inputs)));
        let rows: Vec<TritonTile> = [Some(weight), second, Some(arrays[0].clone())].into_iter().flatten().collect();
        // As a matrix of one row, a tile is reduced along its columns without shared memory.
        let column = code.range(COLUMNS).row();
        let zeros = vec![code.full(0.0, &[1, COLUMNS]); rows.len() - 1];
        let sums = code.repeat_all(rounds, &zeros, |round, sums| {
            let at = round.times(tiles * COLUMNS);
            let load = |row: &TritonTile, tile: usize| {
                let columns = column.plus(&at).plus(tile * COLUMNS);
                let elements = row.ahead(&columns);
                if is_whole { elements.load() } else { elements.load_where(&columns.is_within(inputs)) }
            };
            let loaded: Vec<Vec<TritonTile>> =
                (0..tiles).map(|tile| rows.iter().map(|row| load(row, tile)).collect()).collect();
            loaded.iter().fold(sums.to_vec(), |sums, tile| {
                let (x, weights) = (tile[rows.len() - 1].widened(), tile.iter().zip(&sums));
                weights.map(|(weight, sum)| weight.widened().times_plus(&x, sum)).collect()
            })
        });
        let sums: Vec<TritonTile> = sums.iter().map(TritonTile::row_sum).collect();
        let value = if self.is_gated { gelu_tanh(&sums[0]).times(&sums[1]) } else { sums[0].clone() };
        product.ahead(&code.range(1)).store(&value.narrowed(self.dtype));
    }

    /// Returns the pointers to the row of the weight and to the element of the product of the program at `place`.
    fn own(&self, place: &TritonTile, weights: &[TritonTile], products: &[TritonTile]) -> (TritonTile, TritonTile) {
        let inputs = self.x.dim(-1);
        let mut own: Option<(TritonTile, TritonTile)> = None;
        let (mut before, mut products) = (0, products.iter());
        for (w, weight) in self.weights.iter().zip(weights) {
            let parts = if self.is_gated { 1 } else { w.parts };
            for (part, product) in (0..parts).zip(products.by_ref()) {
                let start = if before == 0 { place.clone() } else { place.minus(before) }.wide();
                let row = if part == 0 { start.clone() } else { start.plus(part * w.outputs()) };
                let pointers = (weight.ahead(&row.times(inputs)), product.ahead(&start));
                own = Some(match own {
                    None => pointers,
                    Some(earlier) => {
                        let is_earlier = place.is_within(before);
                        let select = |a: &TritonTile, b: &TritonTile| is_earlier.select(a, b);
                        (select(&earlier.0, &pointers.0), select(&earlier.1, &pointers.1))
                    }
                });
                before += w.outputs();
            }
        }
        own.unwrap_or_else(|| (place.clone(), place.clone()))
    }
}

/// Returns the tanh approximation of GELU: `x · sigmoid(2 · sqrt(2 / π) · (x + 0.044715 · x³))`, the same function
/// without tanh.
fn gelu_tanh(x: &TritonTile) -> TritonTile {
    let inner = x.times(x).times(0.044_715).times_plus(x, x);
    let scale = -2.0 * std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2 * std::f64::consts::LOG2_E;
    x.over(&inner.times(scale).exp2().plus(1.0))
}
