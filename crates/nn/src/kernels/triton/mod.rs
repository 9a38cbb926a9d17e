//! Triton kernels for CUDA, written as MLIR text in custom calls that XLA's CUDA plugin compiles: window attention, the
//! rotation of int8-convrot, and the operations of text generation on a single row. The calls operate on local shards,
//! because the SPMD partitioner does not split them.

mod neighborhood;
mod rotation;
mod row_attention;
mod row_norm;
mod row_product;
#[cfg(test)]
mod tests;
mod text;

pub(crate) use rotation::RowRotation;
pub use row_attention::{RowAttended, RowAttention, RowRope};
pub use row_norm::{RowNorm, RowScale};
pub use row_product::{RowProducts, RowWeight};

use std::f64::consts::LOG2_E;

use ltx2_stablehlo::{Attribute, CustomCall, DType, ResultAlias, Type, Value};

/// Name of the window attention kernel in profiles.
const NAME: &str = "neighborhood";

/// A Triton kernel and its launch parameters.
struct TritonKernel {
    /// Name of the function, also in profiles.
    name: &'static str,
    /// Module with the function, as MLIR text.
    text: String,
    grid: [usize; 3],
    warps: usize,
    stages: usize,
    /// Floating-point operations of the kernel's matmuls.
    flops: usize,
}

impl TritonKernel {
    /// Calls the kernel and returns its results, whose types are `results`.
    fn call(self, operands: &[&Value], results: &[Type]) -> Vec<Value> {
        self.call_in_place(operands, results, Vec::new())
    }

    /// Calls the kernel like [`Self::call`]; the results in `aliases` are written into the memory of operands.
    fn call_in_place(self, operands: &[&Value], results: &[Type], aliases: Vec<ResultAlias>) -> Vec<Value> {
        let int = |value: usize| Attribute::I32(i32::try_from(value).unwrap_or(i32::MAX));
        let [x, y, z] = self.grid;
        let attributes = [
            ("name", Attribute::Text(self.name.into())),
            ("ir", Attribute::Text(self.text)),
            ("num_stages", int(self.stages)),
            ("num_warps", int(self.warps)),
            ("grid_x", int(x)),
            ("grid_y", int(y)),
            ("grid_z", int(z)),
            ("debug", Attribute::Bool(false)),
            // The plugin ignores this attribute; the cost analysis reads it.
            ("flops", Attribute::I64(i64::try_from(self.flops).unwrap_or(i64::MAX))),
        ];
        let natural = |rank: usize| (0..rank).rev().collect::<Vec<_>>();
        let call = CustomCall {
            target: "__gpu$xla.gpu.triton".into(),
            api_version: 4,
            attributes: attributes.map(|(key, value)| (key.into(), value)).into(),
            operand_layouts: operands.iter().map(|x| natural(x.rank())).collect(),
            result_layouts: results.iter().map(|ty| natural(ty.rank())).collect(),
            aliases,
            ..CustomCall::default()
        };
        operands[0].builder().custom_call(&call, operands, results)
    }
}

/// Supported head dimensions: powers of two, up to the largest whose tiles fit in shared memory.
const DIMS: [usize; 4] = [16, 32, 64, 128];

/// One axis (frames, rows or columns) of a grid of cells. A cell is one position of the video, with one query, key and
/// value per head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GridAxis {
    /// Number of cells of the global (unsharded) grid.
    pub length: usize,
    /// Number of cells of the local shard.
    pub own: usize,
    /// Number of halo cells of keys and values at each end.
    pub reach: usize,
    /// Number of cells of a window.
    pub window: usize,
}

impl GridAxis {
    /// Returns the number of local key and value cells, including the halo.
    fn extended(&self) -> usize {
        self.own + 2 * self.reach
    }

    /// Returns the size of the slab along this axis: the number of cells that the windows of `block` adjacent queries
    /// cover together.
    fn slab(&self, block: usize) -> usize {
        (block.min(self.own) + self.window - 1).min(self.length)
    }

    /// Returns the number of halo cells that the kernel needs at each end if this axis is sharded.
    pub fn needed_reach(self) -> usize {
        window_reach(self.own, self.length.is_multiple_of(self.own), self.window)
    }
}

/// Returns the number of halo cells that a shard of `cells` cells needs at each end: half a window, or `window - 1` if
/// the shards are uneven or so small that windows shifted inward at the border of the grid extend further into the
/// neighboring shard.
pub fn window_reach(cells: usize, is_even: bool, window: usize) -> usize {
    if is_even && cells >= window - window / 2 { window / 2 } else { window - 1 }
}

/// The grid of cells, and the sizes of the queries.
struct KernelGrid {
    axes: [GridAxis; 3],
    videos: usize,
    heads: usize,
    dim: usize,
    dtype: DType,
}

impl KernelGrid {
    fn new(q: &Value, axes: [GridAxis; 3]) -> Self {
        KernelGrid { axes, videos: q.dim(0), heads: q.dim(4), dim: q.dim(5), dtype: q.dtype() }
    }

    /// Returns the number of elements per cell.
    fn channels(&self) -> usize {
        self.heads * self.dim
    }

    fn is_sharded(&self) -> bool {
        self.axes.iter().any(|axis| axis.own != axis.length)
    }
}

/// Returns why the kernel does not support queries `[b, frames, rows, columns, heads, dim]` on a grid with these axes,
/// or `None` if it does.
pub(super) fn unsupported_reason(q: &Value, axes: [GridAxis; 3]) -> Option<String> {
    let grid = KernelGrid::new(q, axes);
    if ![DType::BF16, DType::F16].contains(&grid.dtype) {
        return Some(format!("element type {}", grid.dtype.name()));
    }
    if !DIMS.contains(&grid.dim) {
        return Some(format!("head dimension {}, which must be one of {DIMS:?}", grid.dim));
    }
    // The kernel uses 32-bit offsets within a slab.
    let [_, rows, columns] = axes.map(|axis| axis.extended());
    let slab = axes[0].slab(neighborhood::LONGEST) * rows * columns * grid.channels();
    if i32::try_from(slab).is_err() {
        return Some(format!(
            "frames of {rows} x {columns} cells with {} channels, which exceed 32-bit offsets",
            grid.channels()
        ));
    }
    let [blocks, heads, videos] = grid.programs();
    if i32::try_from(blocks).is_err() {
        return Some(format!("{blocks} blocks of queries (at most {})", i32::MAX));
    }
    (heads.max(videos) > usize::from(u16::MAX))
        .then(|| format!("{heads} heads and {videos} videos (at most 65535 of each)"))
}

/// Operands of window attention. Queries `q` are `[b, frames, rows, columns, heads, dim]`; keys `k` and values `v` also
/// include the halo cells of each axis.
pub struct WindowAttention<'a> {
    /// Queries `[b, frames, rows, columns, heads, dim]` of the local shard.
    pub q: &'a Value,
    /// Keys; same shape as `q`, extended by the halo cells.
    pub k: &'a Value,
    /// Values; same shape as `k`.
    pub v: &'a Value,
    /// Grid axes: frames, rows and columns.
    pub axes: [GridAxis; 3],
    /// Global indices of the first local row and column, i32; `None` if the grid is not sharded.
    pub firsts: Option<&'a Value>,
    /// Factor by which the scores are multiplied before the softmax.
    pub scale: f64,
    /// Upper bound of the absolute values of `q · k`, f32 `[1]`. Small scores need no maximum in the softmax.
    pub bound: &'a Value,
}

impl WindowAttention<'_> {
    /// Calls the fused kernel; the result has the shape of the queries.
    pub fn fused(&self) -> Value {
        let WindowAttention { q, k, v, axes, firsts, scale, bound } = *self;
        let grid = KernelGrid::new(q, axes);
        // Without the operations for masked keys: each query attends only to its own window.
        let window: usize = axes.iter().map(|axis| axis.window).product();
        let bound = bound * (scale * LOG2_E);
        let operands: Vec<&Value> = [q, k, v, &bound].into_iter().chain(firsts.filter(|_| grid.is_sharded())).collect();
        let kernel = TritonKernel {
            name: NAME,
            text: grid.text(scale),
            grid: grid.programs(),
            warps: neighborhood::WARPS,
            stages: neighborhood::STAGES,
            flops: 4 * q.ty().elements() * window,
        };
        kernel.call(&operands, &[q.ty().clone()]).remove(0)
    }
}
