//! The kernel: a program attends from a block of cells to the slab of cells that their windows cover.
//!
//! A frame of the slab is a plane of rows and columns, taken some keys at a time; for each of these parts of a plane, all
//! frames follow. So the bias that hides what is outside a query's rows and columns is made once a part, and is where the scores'
//! sums begin; which frames a query sees is a matter of whole rows of scores.

use std::f64::consts::LOG2_E;

use super::text::{Code, Tile};
use super::{Grid, NAME};
use crate::hlo::DType;

/// Keys that are scored at once.
const KEYS: usize = 64;

/// Warps of a program, and loads in flight: of what was tried, the fastest on an H100.
pub(super) const WARPS: i32 = 4;
pub(super) const STAGES: i32 = 3;

/// The longest edge of a block.
pub(super) const LONGEST: usize = 8;

/// Score of a key outside a window. Larger scores than this are shown; both are finite, and so are their differences.
const MASK_VALUE: f64 = -1e30;
const LEAST: f64 = -1e20;

impl Grid {
    /// Frames, rows and columns of a block of queries: wide windows are worth more queries for the same keys.
    fn block(&self) -> [usize; 3] {
        if self.axes[1].window > 8 { [4, LONGEST, 4] } else { [4, 4, 4] }
    }

    /// Blocks along each axis. The last one is pushed inward: some queries are computed twice.
    fn blocks(&self) -> [usize; 3] {
        [0, 1, 2].map(|axis| self.axes[axis].own.div_ceil(self.block()[axis]))
    }

    /// Programs along the axes of the launch.
    pub(super) fn programs(&self) -> [usize; 3] {
        [self.blocks().iter().product(), self.heads, self.videos]
    }

    /// The kernel's text: its arrays are queries, keys, values, the first cells where the grid is sharded, and the result.
    pub(super) fn text(&self, scale: f64) -> String {
        let mut arrays = vec![self.dtype; 3];
        arrays.extend(self.is_sharded().then_some(DType::I32));
        arrays.push(self.dtype);
        Code::module(NAME, &arrays, |code, arrays| self.write(code, arrays, scale))
    }

    fn write(&self, code: &Code, arrays: &[Tile], scale: f64) {
        let cells = self.cells(code, &arrays[3..arrays.len() - 1]);
        let features = code.range(self.dim);
        let of_head = code.place(1).times(self.dim);
        let origin = |array: &Tile, starts: &[Tile; 3], sizes: [usize; 3]| {
            let place = starts
                .iter()
                .zip(sizes)
                .fold(code.place(2).wide(), |at, (start, size)| at.times(size).plus(&start.wide()));
            array.ahead(&place.times(self.channels()).plus(&of_head.wide()))
        };
        // Of a block or slab, from its first cell on: fewer elements than 32 bits count.
        let offsets = |cells: &Tile| cells.times(self.channels()).column().plus(&features.row());
        let [own, extended] = [self.axes.map(|axis| axis.own), self.axes.map(|axis| axis.extended())];
        let [_, rows, columns] = own;
        let [lane_t, lane_h, lane_w] = &cells.lanes;
        let own_offsets = offsets(&lane_t.times(rows * columns).plus(&lane_h.times(columns)).plus(lane_w));
        let q = origin(&arrays[0], &cells.starts, own).ahead(&own_offsets).load();
        let [keys, values] = [1, 2].map(|n| origin(&arrays[n], &cells.slabs, extended));

        let (block, scale) = (self.block(), scale * LOG2_E);
        let queries = block.iter().product();
        let slab = [0, 1, 2].map(|axis| self.axes[axis].slab(block[axis]));
        let plane = slab[1] * slab[2];
        let start = [code.full(0.0, &[queries, self.dim]), code.full(LEAST, &[queries]), code.full(0.0, &[queries])];
        let [sum, _, denominator] = code.repeat(plane.div_ceil(KEYS), start, |part, kept| {
            let key = code.range(KEYS).plus(&part.times(KEYS));
            let (row, column) = (key.over(slab[2]), key.modulo(slab[2]));
            let inside =
                |at: &Tile, axis: usize| at.row().minus(&cells.begins[axis].column()).is_within(self.axes[axis].window);
            // The last part reaches beyond the plane, into rows that no window has: they are read as its last one.
            let shown = inside(&row, 1).and(&inside(&column, 2));
            let bias = shown.select(&code.full(0.0, &[queries, KEYS]), &code.full(MASK_VALUE, &[queries, KEYS]));
            let row = row.at_most(slab[1] - 1);
            let offsets = offsets(&row.times(extended[2]).plus(&column));
            code.repeat(slab[0], kept.clone(), |frame, [sum, largest, denominator]| {
                let ahead = frame.times(extended[1] * extended[2] * self.channels());
                let [k, v] = [&keys, &values].map(|array| array.ahead(&ahead).ahead(&offsets).load());
                let scores = q.product(&k.transposed(), &bias);
                let sees = frame.minus(&cells.begins[0]).is_within(self.axes[0].window);
                let now = largest.larger(&sees.select(&scores.row_max(), &code.full(LEAST, &[queries])));
                let powers = now.times(scale);
                // Of a frame that a query does not see, all weights are zero.
                let subtracted = sees.select(&powers, &code.full(-MASK_VALUE, &[queries]));
                let weights = scores.times(scale).minus(&subtracted.column()).exp2();
                let shrink = largest.times(scale).minus(&powers).exp2();
                let kept = sum.times(&shrink.column());
                [
                    weights.narrowed(self.dtype).product(&v, &kept),
                    now,
                    denominator.times(&shrink).plus(&weights.row_sum()),
                ]
            })
        });
        let attended = sum.over(&denominator.column()).narrowed(self.dtype);
        origin(&arrays[arrays.len() - 1], &cells.starts, own).ahead(&own_offsets).store(&attended);
    }

    /// Where the program's queries and keys are; `firsts` points to the first own rows and columns, of a sharded grid.
    fn cells(&self, code: &Code, firsts: &[Tile]) -> Cells {
        let (block, blocks) = (self.block(), self.blocks());
        let place = code.place(0);
        let above = place.over(blocks[2]);
        let places = [above.over(blocks[1]), above.modulo(blocks[1]), place.modulo(blocks[2])];
        let lane = code.range(block.iter().product());
        let lanes = [lane.over(block[1] * block[2]), lane.over(block[2]).modulo(block[1]), lane.modulo(block[2])];
        let axes = [0, 1, 2].map(|n| {
            let axis = self.axes[n];
            let (size, slab) = (axis.own.min(block[n]), axis.slab(block[n]));
            let start = places[n].times(size).at_most(axis.own - size);
            // Lanes beyond a grid that is narrower than a block repeat its last cell.
            let lane = lanes[n].at_most(size - 1);
            let first = firsts
                .first()
                .filter(|_| n > 0)
                .map_or_else(|| code.int(0), |firsts| firsts.ahead(&code.int(n - 1)).load());
            let begin =
                |cell: &Tile, length: usize| cell.minus(axis.window / 2).at_least(0).at_most(axis.length - length);
            // From the first cell of the array of keys on, which has neighbours' cells before its own.
            let moved = |cell: &Tile| cell.minus(&first).plus(axis.reach);
            let slab_at = moved(&begin(&start.plus(&first), slab));
            // No further than there are cells: they hold all windows. Padding behind the grid has none, so any keys do.
            let slab_at = slab_at.at_least(0).at_most(axis.extended() - slab);
            let begin = moved(&begin(&lane.plus(&start).plus(&first), axis.window)).minus(&slab_at);
            [start, slab_at, lane, begin]
        });
        let of = |which: usize| axes.each_ref().map(|axis| axis[which].clone());
        Cells { starts: of(0), slabs: of(1), lanes: of(2), begins: of(3) }
    }
}

/// Places along the three axes.
struct Cells {
    /// The block's first cell, of the own ones.
    starts: [Tile; 3],
    /// The slab's first cell, of the extended ones.
    slabs: [Tile; 3],
    /// Each query's cell, from the block's first on.
    lanes: [Tile; 3],
    /// First cell of each query's window, from the slab's first on.
    begins: [Tile; 3],
}
