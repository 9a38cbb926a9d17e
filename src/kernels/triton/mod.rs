//! Fused attention within windows, for CUDA: a Triton kernel as text, in a custom call that XLA's CUDA plugin compiles. A
//! device's own operation: no partitioner splits it.

mod neighborhood;
#[cfg(test)]
mod tests;
mod text;

use crate::hlo::{Attribute, CustomCall, DType, Value};

/// Of the function, as profiles show it.
const NAME: &str = "neighborhood";

/// Heads whose tiles fit: powers of two.
const DIMS: [usize; 4] = [16, 32, 64, 128];

/// One axis of a grid of cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GridAxis {
    /// Cells of the whole grid.
    pub(crate) length: usize,
    /// Cells that are this device's.
    pub(crate) own: usize,
    /// Neighbours' cells at both ends of keys and values.
    pub(crate) reach: usize,
    /// Cells of a window.
    pub(crate) window: usize,
}

impl GridAxis {
    /// Cells of keys and values.
    fn extended(&self) -> usize {
        self.own + 2 * self.reach
    }

    /// Cells that the windows of a block of queries cover.
    fn slab(&self, block: usize) -> usize {
        (block.min(self.own) + self.window - 1).min(self.length)
    }

    /// Fewest neighbours' cells that the kernel needs of a sharded axis.
    pub(crate) fn needed_reach(self) -> usize {
        window_reach(self.own, self.length.is_multiple_of(self.own), self.window)
    }
}

/// Neighbours' cells that windows of blocks of `cells` see at both ends of a device's part: half a window, or of blocks so small or
/// parts so uneven that a border of the whole grid pushes windows further inward, all of one but a cell.
pub(crate) fn window_reach(cells: usize, is_even: bool, window: usize) -> usize {
    if is_even && cells >= window - window / 2 { window / 2 } else { window - 1 }
}

/// A grid of cells, and what attends there.
struct Grid {
    axes: [GridAxis; 3],
    videos: usize,
    heads: usize,
    dim: usize,
    dtype: DType,
}

impl Grid {
    fn new(q: &Value, axes: [GridAxis; 3]) -> Self {
        Grid { axes, videos: q.dim(0), heads: q.dim(4), dim: q.dim(5), dtype: q.dtype() }
    }

    /// Elements of a cell.
    fn channels(&self) -> usize {
        self.heads * self.dim
    }

    fn is_sharded(&self) -> bool {
        self.axes.iter().any(|axis| axis.own != axis.length)
    }
}

/// Reason why the kernel cannot take queries `[b, frames, rows, columns, heads, dim]` of such a grid, if there is one.
pub(super) fn unsupported_reason(q: &Value, axes: [GridAxis; 3]) -> Option<String> {
    let grid = Grid::new(q, axes);
    if ![DType::BF16, DType::F16].contains(&grid.dtype) {
        return Some(format!("{} elements", grid.dtype.name()));
    }
    if !DIMS.contains(&grid.dim) {
        return Some(format!("heads {} wide, only {DIMS:?}", grid.dim));
    }
    // Within a slab the kernel counts in 32 bits.
    let [_, rows, columns] = axes.map(|axis| axis.extended());
    let slab = axes[0].slab(neighborhood::LONGEST) * rows * columns * grid.channels();
    if i32::try_from(slab).is_err() {
        return Some(format!("{rows} x {columns} cells of {} channels", grid.channels()));
    }
    let [_, heads, videos] = grid.programs();
    (heads.max(videos) > usize::from(u16::MAX)).then(|| format!("{heads} heads of {videos} videos"))
}

/// Attention of a grid's cells `q [b, frames, rows, columns, heads, dim]` within windows of `k` and `v`, which are extended by the
/// axes' reach.
pub(crate) struct WindowAttention<'a> {
    pub(crate) q: &'a Value,
    pub(crate) k: &'a Value,
    pub(crate) v: &'a Value,
    pub(crate) axes: [GridAxis; 3],
    /// This device's first row and column, i32, where the grid is sharded.
    pub(crate) firsts: Option<&'a Value>,
    pub(crate) scale: f64,
}

impl WindowAttention<'_> {
    /// The fused kernel's result, in the shape of the queries.
    pub(crate) fn fused(&self) -> Value {
        let WindowAttention { q, k, v, axes, firsts, scale } = *self;
        let grid = Grid::new(q, axes);
        let [x, y, z] = grid.programs();
        let int = |value: usize| Attribute::I32(i32::try_from(value).unwrap_or(i32::MAX));
        // What counts of the matmuls: a query's with its own window.
        let window: usize = axes.iter().map(|axis| axis.window).product();
        let flops = 4 * q.ty().elements() * window;
        let attributes = [
            ("name", Attribute::Text(NAME.into())),
            ("ir", Attribute::Text(grid.text(scale))),
            ("num_stages", Attribute::I32(neighborhood::STAGES)),
            ("num_warps", Attribute::I32(neighborhood::WARPS)),
            ("grid_x", int(x)),
            ("grid_y", int(y)),
            ("grid_z", int(z)),
            ("debug", Attribute::Bool(false)),
            // The plugin does not read it; who counts operations does.
            ("flops", Attribute::I64(i64::try_from(flops).unwrap_or(i64::MAX))),
        ];
        let operands: Vec<&Value> = [q, k, v].into_iter().chain(firsts.filter(|_| grid.is_sharded())).collect();
        let natural = |rank: usize| (0..rank).rev().collect::<Vec<_>>();
        let call = CustomCall {
            target: "__gpu$xla.gpu.triton".into(),
            api_version: 4,
            attributes: attributes.map(|(key, value)| (key.into(), value)).into(),
            operand_layouts: operands.iter().map(|x| natural(x.rank())).collect(),
            result_layouts: vec![natural(q.rank())],
            ..CustomCall::default()
        };
        q.builder().custom_call(&call, &operands, &[q.ty().clone()]).remove(0)
    }
}
