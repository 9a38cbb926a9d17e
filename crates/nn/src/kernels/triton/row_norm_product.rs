//! The kernel that normalizes a single row of activations and multiplies it by weights, for text generation.
//!
//! Every program of the grid normalizes the row itself, which is faster than a separate launch. It starts its first loads of
//! the weight before that, so that they overlap. Products and sums are f32.

use super::TritonKernel;
use super::row_norm::RowNorm;
use super::text::{TritonCode, TritonTile};
use crate::Params;
use ltx2_stablehlo::{DType, Type, Value};

/// Name of the kernel in profiles.
const NAME: &str = "row_norm_product";

/// Rows of the weight that a program loads together. A gated product loads as many of both halves.
const ROWS: usize = 4;
/// Number of columns per warp.
const WARP_COLUMNS: usize = 1024;
/// Minimum number of programs of a grid in which each computes more than one group of rows.
const PROGRAMS: usize = 1024;
/// Largest number of groups of rows that a program computes.
const GROUPS: usize = 4;

/// A weight of [`RowNormProduct`].
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

/// A normalized row of activations and the weights that it is multiplied with.
pub struct RowNormProduct<'a> {
    /// Norm whose last result is the row.
    pub norm: RowNorm<'a>,
    /// Weights.
    pub weights: Vec<RowWeight<'a>>,
    /// Element type of the products.
    pub dtype: DType,
    /// Whether the only weight is a gate and its values, `[2, out…, in]`: the product is `gelu(gate · x) · (values · x)`
    /// with the tanh approximation of GELU.
    pub is_gated: bool,
}

/// Results of [`RowNormProduct`].
pub struct RowNormProducts {
    /// Sum of the residual stream and the normalized row; `None` without a residual stream.
    pub sum: Option<Value>,
    /// The products `[1…, out…]`, those of each weight in turn.
    pub products: Vec<Value>,
}

impl<'a> RowNormProduct<'a> {
    /// Runs the kernel. Returns `None` if the program does not use kernels for single rows, or if the kernel does not
    /// support the shapes or element types.
    pub fn run(&self, p: &Params) -> Option<RowNormProducts> {
        if !self.norm.is_supported(p) || !self.is_supported() {
            return None;
        }
        let (x, inputs) = (self.norm.x, self.inputs());
        let kernel = TritonKernel {
            name: NAME,
            text: self.text(),
            grid: [self.outputs() / (ROWS * self.groups()), 1, 1],
            warps: (inputs.next_power_of_two() / WARP_COLUMNS).max(1),
            stages: 1,
            flops: 2 * self.weights.iter().map(|w| w.weight.ty().elements()).sum::<usize>(),
        };
        let rows = self.norm.operands().into_iter().map(|row| row.reshape(vec![inputs]));
        let flat = |w: &RowWeight| w.weight.reshape(vec![w.weight.ty().elements() / inputs, inputs]);
        let operands: Vec<Value> = rows.chain(self.weights.iter().map(flat)).collect();
        let sum = self.has_sum().then(|| Type::new(x.dtype(), [inputs]));
        let products = self.products();
        let types = sum.into_iter().chain(products.iter().map(|w| Type::new(self.dtype, [w.outputs()])));
        let results = kernel.call(&operands.iter().collect::<Vec<_>>(), &types.collect::<Vec<_>>());
        let (sums, values) = results.split_at(usize::from(self.has_sum()));
        let lead = &x.dims()[..x.rank() - 1];
        let products = values.iter().zip(products).map(|(value, w)| value.reshape([lead, w.dims()].concat()));
        Some(RowNormProducts {
            sum: sums.first().map(|sum| sum.reshape(x.dims().to_vec())),
            products: products.collect(),
        })
    }

    fn is_supported(&self) -> bool {
        let (narrow, inputs) = (self.norm.x.dtype(), self.inputs());
        let fits = |w: &RowWeight| {
            let is_split = w.parts == 1 || w.weight.dim(0) == w.parts;
            is_split && w.outputs().is_multiple_of(ROWS) && w.weight.dim(-1) == inputs && w.weight.dtype() == narrow
        };
        let is_pair = !self.is_gated || matches!(&self.weights[..], [weight] if weight.parts == 2);
        // Larger results have a launch grid that is too long.
        let is_small = i32::try_from(self.outputs()).is_ok();
        let is_row = self.norm.residual.is_some() == self.norm.next.is_some();
        let is_narrow = [narrow, DType::F32].contains(&self.dtype);
        is_row && is_narrow && is_small && is_pair && self.weights.iter().all(fits)
    }

    fn inputs(&self) -> usize {
        self.norm.x.dim(-1)
    }

    fn has_sum(&self) -> bool {
        self.norm.residual.is_some()
    }

    /// Returns the weight of each product.
    fn products(&self) -> Vec<&RowWeight<'a>> {
        let parts = |w: &RowWeight| if self.is_gated { 1 } else { w.parts };
        self.weights.iter().flat_map(|w| std::iter::repeat_n(w, parts(w))).collect()
    }

    fn outputs(&self) -> usize {
        self.products().iter().map(|w| w.outputs()).sum()
    }

    /// Returns the number of groups of rows that each program computes. With more groups, fewer
    /// programs repeat the normalization.
    fn groups(&self) -> usize {
        let is_possible = |n: &usize| {
            let outputs = n * ROWS;
            self.outputs() / outputs >= PROGRAMS && self.weights.iter().all(|w| w.outputs().is_multiple_of(outputs))
        };
        // Two halves of a weight leave no registers for the loads of another group.
        let most = if self.is_gated { 1 } else { GROUPS };
        (2..=most).rev().find(is_possible).unwrap_or(1)
    }

    /// Returns the kernel as MLIR text. Its arguments are the operands of the norm, the weights, the sum if the norm has
    /// a residual stream, and the products.
    pub(super) fn text(&self) -> String {
        let narrow = self.norm.x.dtype();
        let rows = self.norm.operands().len() + self.weights.len() + usize::from(self.has_sum());
        let arrays = [vec![narrow; rows], vec![self.dtype; self.products().len()]].concat();
        TritonCode::module(NAME, &arrays, |code, arrays| self.write(code, arrays))
    }

    fn write(&self, code: &TritonCode, arrays: &[TritonTile]) {
        let (inputs, groups, norms) = (self.inputs(), self.groups(), self.norm.operands().len());
        let results = norms + self.weights.len();
        let (place, column) = (code.place(0), code.range(inputs.next_power_of_two()).row());
        let is_inside = column.is_within(inputs);
        let products = &arrays[results + usize::from(self.has_sum())..];
        let (weight, product) = self.own(&place, &arrays[norms..results], products);
        let offsets = code.range(ROWS).times(inputs).column().plus(&column);
        let second = (self.is_gated).then(|| weight.ahead(&code.wide_int(self.outputs() * inputs)));
        let halves: Vec<TritonTile> = [Some(weight), second].into_iter().flatten().collect();
        let load = |group: usize| -> Vec<TritonTile> {
            let at = code.int(group * ROWS * inputs);
            halves.iter().map(|half| half.ahead(&at).ahead(&offsets).load_where(&is_inside)).collect()
        };
        let mut loaded = load(0);
        let mut rows = self.norm.write_rows(&column, &is_inside, arrays);
        let x = rows.remove(rows.len() - 1).widened();
        if let Some(sum) = rows.first() {
            let is_first = place.is_within(1).and(&is_inside);
            arrays[results].ahead(&column).store_where(sum, &is_first);
        }
        for group in 0..groups {
            let next = if group + 1 < groups { load(group + 1) } else { Vec::new() };
            let sums: Vec<TritonTile> = loaded.iter().map(|half| half.widened().times(&x).row_sum()).collect();
            let value = if self.is_gated { gelu_tanh(&sums[0]).times(&sums[1]) } else { sums[0].clone() };
            product.ahead(&code.int(group * ROWS)).ahead(&code.range(ROWS)).store(&value.narrowed(self.dtype));
            loaded = next;
        }
    }

    /// Returns the pointers to the first row of the weight and to the first element of the product of the program at
    /// `place`.
    fn own(&self, place: &TritonTile, weights: &[TritonTile], products: &[TritonTile]) -> (TritonTile, TritonTile) {
        let (inputs, rows) = (self.inputs(), ROWS * self.groups());
        let mut own: Option<(TritonTile, TritonTile)> = None;
        let (mut before, mut products) = (0, products.iter());
        for (w, weight) in self.weights.iter().zip(weights) {
            let parts = if self.is_gated { 1 } else { w.parts };
            for (part, product) in (0..parts).zip(products.by_ref()) {
                let local = if before == 0 { place.clone() } else { place.minus(before / rows) };
                let start = local.times(rows).wide();
                let row = if part == 0 { start.clone() } else { start.plus(part * w.outputs()) };
                let pointers = (weight.ahead(&row.times(inputs)), product.ahead(&start));
                own = Some(match own {
                    None => pointers,
                    Some(earlier) => {
                        let is_earlier = place.is_within(before / rows);
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
    let inner = x.times(x).times(x).times(0.044_715).plus(x);
    let scale = -2.0 * std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2 * std::f64::consts::LOG2_E;
    x.over(&inner.times(scale).exp2().plus(1.0))
}
