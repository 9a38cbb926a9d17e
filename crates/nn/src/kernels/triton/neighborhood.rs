//! The window attention kernel. Each program of the launch grid computes attention of a block of query cells over a
//! slab: the cells that the windows of these queries cover together.
//!
//! Each frame of the slab is a plane of rows and columns. The kernel processes `KEYS` keys of the plane at a time and,
//! for each such part, loops over all frames. The bias that masks keys outside the rows and columns of a query's window
//! is therefore computed once per part. For frames outside a query's window, the entire row of the query's scores is
//! masked.
//!
//! If the scores are known to be small, the softmax needs no maximum: the weights are the exponentials themselves. This
//! saves the reduction and the rescaling of the sum in each iteration.

use std::f64::consts::LOG2_E;

use super::text::{TritonCode, TritonTile};
use super::{KernelGrid, NAME};
use ltx2_stablehlo::DType;

/// Number of keys per matmul.
const KEYS: usize = 64;

/// Numbers of warps per program and of pipeline stages: the fastest of the tested values on an H200.
pub(super) const WARPS: usize = 4;
pub(super) const STAGES: usize = 3;

/// Largest edge of a block, in cells.
pub(super) const LONGEST: usize = 8;

/// Score of a masked key. The initial maximum `LEAST` is larger than all masked scores and smaller than all others.
/// Both values are finite, and so is their difference. `LEAST` is a power of two: if a compiler fuses its multiplication
/// by the scale with the subtraction of the rounded product, the result is still 0.
const MASK_VALUE: f64 = -1e30;
const LEAST: f64 = -73_786_976_294_838_206_464.0;

/// Largest bound of the scores, as exponents of two, without a maximum: sums over a window of `2^100` times values below
/// `2^16` are finite, and no weight of an unmasked key is subnormal.
const LARGEST_EXPONENT: f64 = 100.0;

/// Rows and columns of blocks in a group. The programs of a group process all frames before the next group starts, so
/// that the keys of neighboring blocks stay in the L2 cache.
const GROUP: [usize; 2] = [4, 16];

impl KernelGrid {
    /// Returns the numbers of frames, rows and columns of a block of queries. The plane of keys should fill whole
    /// parts: with a window of 11, the 18 x 14 keys of `[2, 8, 4]` queries leave 4 of 256 places free.
    fn block(&self) -> [usize; 3] {
        if self.axes[1].window > 8 { [2, LONGEST, 4] } else { [4, 4, 4] }
    }

    /// Returns the number of blocks along each axis. The last block is shifted inward if it would extend beyond the
    /// shard, so some queries are computed twice.
    fn blocks(&self) -> [usize; 3] {
        [0, 1, 2].map(|axis| self.axes[axis].own.div_ceil(self.block()[axis]))
    }

    /// Returns the launch grid: the number of query blocks, of heads and of videos.
    pub(super) fn programs(&self) -> [usize; 3] {
        [self.blocks().iter().product(), self.heads, self.videos]
    }

    /// Returns the kernel as MLIR text. Its arguments are queries, keys, values, the bound of the scores (f32), the
    /// global indices of the first local row and column (only if the grid is sharded), and the result.
    pub(super) fn text(&self, scale: f64) -> String {
        let mut arrays = vec![self.dtype; 3];
        arrays.push(DType::F32);
        arrays.extend(self.is_sharded().then_some(DType::I32));
        arrays.push(self.dtype);
        TritonCode::module(NAME, &arrays, |code, arrays| self.write(code, arrays, scale))
    }

    fn write(&self, code: &TritonCode, arrays: &[TritonTile], scale: f64) {
        let cells = self.cells(code, &arrays[4..arrays.len() - 1]);
        let features = code.range(self.dim);
        let of_head = code.place(1).times(self.dim);
        let origin = |array: &TritonTile, starts: &[TritonTile; 3], sizes: [usize; 3]| {
            let place = starts
                .iter()
                .zip(sizes)
                .fold(code.place(2).wide(), |at, (start, size)| at.times(size).plus(&start.wide()));
            array.ahead(&place.times(self.channels()).plus(&of_head.wide()))
        };
        // Offsets from the first cell of a block or slab; these fit in 32 bits.
        let offsets = |cells: &TritonTile| cells.times(self.channels()).column().plus(&features.row());
        let [own, extended] = [self.axes.map(|axis| axis.own), self.axes.map(|axis| axis.extended())];
        let [_, rows, columns] = own;
        let [lane_t, lane_h, lane_w] = &cells.lanes;
        let own_offsets = offsets(&lane_t.times(rows * columns).plus(&lane_h.times(columns)).plus(lane_w));
        let q = origin(&arrays[0], &cells.starts, own).ahead(&own_offsets).load();
        let [keys, values] = [1, 2].map(|n| origin(&arrays[n], &cells.slabs, extended));

        let (block, scale) = (self.block(), scale * LOG2_E);
        let queries = block.iter().product();
        let slab = [0, 1, 2].map(|axis| self.axes[axis].slab(block[axis]));
        let parts = code.int((slab[1] * slab[2]).div_ceil(KEYS));
        // Weights of 2^100 overflow f16.
        let is_small = arrays[3].load().is_at_most(if self.dtype == DType::F16 { -1.0 } else { LARGEST_EXPONENT });
        let small_parts = is_small.select(&parts, &code.int(0));
        // Returns the bias of a part's keys and the offsets of the keys in a frame.
        let part_of = |part: &TritonTile| {
            let key = code.range(KEYS).plus(&part.times(KEYS));
            let (row, column) = (key.over(slab[2]), key.modulo(slab[2]));
            let inside = |at: &TritonTile, axis: usize| {
                at.row().minus(&cells.begins[axis].column()).is_within(self.axes[axis].window)
            };
            // In the last part, some rows are beyond the plane and outside every window: clamp them to the last row.
            let shown = inside(&row, 1).and(&inside(&column, 2));
            let bias = shown.select(&code.full(0.0, &[queries, KEYS]), &code.full(MASK_VALUE, &[queries, KEYS]));
            (bias, offsets(&row.at_most(slab[1] - 1).times(extended[2]).plus(&column)))
        };
        // Both load the keys or values of a part in a frame, `ahead` of the first frame. The first keeps the sums of array and
        // offsets, 64-bit pointers, in registers throughout the loop over frames; the second adds 32-bit offsets in each
        // iteration. Mixed as below, XLA's compiler needs 168 registers per thread, so that a multiprocessor of an H100
        // or H200 runs three programs; with pointers alone it needs 180 and runs two.
        let by_pointer =
            |array: &TritonTile, ahead: &TritonTile, offsets: &TritonTile| array.ahead(ahead).ahead(offsets).load();
        let by_offset =
            |array: &TritonTile, ahead: &TritonTile, offsets: &TritonTile| array.ahead(&offsets.plus(ahead)).load();
        let ahead = |frame: &TritonTile| frame.times(extended[1] * extended[2] * self.channels());
        // Returns whether each query's window contains the frame.
        let sees = |frame: &TritonTile| frame.minus(&cells.begins[0]).is_within(self.axes[0].window);
        let start = [code.full(0.0, &[queries, self.dim]), code.full(0.0, &[queries])];
        let [sum, denominator] = code.repeat(&small_parts, start, |part, kept| {
            let (bias, offsets) = part_of(part);
            code.repeat(slab[0], kept.clone(), |frame, [sum, denominator]| {
                let ahead = ahead(frame);
                let (k, v) = (by_offset(&keys, &ahead, &offsets), by_pointer(&values, &ahead, &offsets));
                let scores = q.product(&k.transposed(), &code.full(0.0, &[queries, KEYS]));
                let weights = scores.times_plus(scale, &bias).exp2();
                let sees = sees(frame).column().broadcast(&[queries, KEYS]);
                let weights = sees.select(&weights, &code.full(0.0, &[queries, KEYS]));
                [weights.narrowed(self.dtype).product(&v, sum), denominator.plus(&weights.row_sum())]
            })
        });
        let start = [sum, code.full(LEAST, &[queries]), denominator];
        let [sum, _, denominator] = code.repeat(&parts.minus(&small_parts), start, |part, kept| {
            let (bias, offsets) = part_of(part);
            code.repeat(slab[0], kept.clone(), |frame, [sum, largest, denominator]| {
                let (ahead, sees) = (ahead(frame), sees(frame));
                let [k, v] = [&keys, &values].map(|array| by_offset(array, &ahead, &offsets));
                let scores = q.product(&k.transposed(), &bias);
                let now = largest
                    .max_ignoring_nan(&sees.select(&scores.row_max_ignoring_nan(), &code.full(LEAST, &[queries])));
                let powers = now.times(-scale);
                // For frames outside a query's window, all weights must be 0.
                let subtracted = sees.select(&powers, &code.full(MASK_VALUE, &[queries]));
                let weights = scores.times_plus(scale, &subtracted.column()).exp2();
                let shrink = largest.times(scale).plus(&powers).exp2();
                let kept = sum.times(&shrink.column());
                [
                    weights.narrowed(self.dtype).product(&v, &kept),
                    now,
                    denominator.times_plus(&shrink, &weights.row_sum()),
                ]
            })
        });
        let attended = sum.over(&denominator.column()).narrowed(self.dtype);
        origin(&arrays[arrays.len() - 1], &cells.starts, own).ahead(&own_offsets).store(&attended);
    }

    /// Returns the frame, row and column of the block of this program, in blocks. Programs are ordered by [`GROUP`],
    /// within a group by frame, row and column. The last groups may be smaller.
    fn place(&self, code: &TritonCode) -> [TritonTile; 3] {
        let [frames, rows, columns] = self.blocks();
        let at = code.place(0);
        let per_band = frames * GROUP[0] * columns;
        let (band, at) = (at.over(per_band), at.modulo(per_band));
        // Returns the number of blocks in group `n` of `size` blocks along an axis of `length` blocks.
        let within = |n: &TritonTile, size: usize, length: usize| code.int(length).minus(&n.times(size)).at_most(size);
        let band_rows = within(&band, GROUP[0], rows);
        let per_group = band_rows.times(frames * GROUP[1]);
        let group = at.over(&per_group);
        let at = at.minus(&group.times(&per_group));
        let group_columns = within(&group, GROUP[1], columns);
        let plane = band_rows.times(&group_columns);
        let frame = at.over(&plane);
        let at = at.minus(&frame.times(&plane));
        let row = at.over(&group_columns);
        let column = at.minus(&row.times(&group_columns));
        [frame, row.plus(&band.times(GROUP[0])), column.plus(&group.times(GROUP[1]))]
    }

    /// Returns the indices of the query and key cells of this program. If the grid is sharded, `firsts` points to the
    /// global indices of the first local row and column.
    fn cells(&self, code: &TritonCode, firsts: &[TritonTile]) -> Cells {
        let (block, places) = (self.block(), self.place(code));
        let lane = code.range(block.iter().product());
        let lanes = [lane.over(block[1] * block[2]), lane.over(block[2]).modulo(block[1]), lane.modulo(block[2])];
        let axes = [0, 1, 2].map(|n| {
            let axis = self.axes[n];
            let (size, slab) = (axis.own.min(block[n]), axis.slab(block[n]));
            let start = places[n].times(size).at_most(axis.own - size);
            // If the grid is narrower than a block, the remaining lanes repeat its last cell.
            let lane = lanes[n].at_most(size - 1);
            let first = firsts
                .first()
                .filter(|_| n > 0)
                .map_or_else(|| code.int(0), |firsts| firsts.ahead(&code.int(n - 1)).load());
            let begin = |cell: &TritonTile, length: usize| {
                cell.minus(axis.window / 2).at_least(0).at_most(axis.length - length)
            };
            // Converts a global cell to an index in the local keys, which start with the halo.
            let moved = |cell: &TritonTile| cell.minus(&first).plus(axis.reach);
            let slab_at = moved(&begin(&start.plus(&first), slab));
            // Clamp to the local cells. These contain the windows of all queries within the grid; padding queries
            // beyond the end of the grid have no window and may attend to any keys.
            let slab_at = slab_at.at_least(0).at_most(axis.extended() - slab);
            let begin = moved(&begin(&lane.plus(&start).plus(&first), axis.window)).minus(&slab_at);
            [start, slab_at, lane, begin]
        });
        let of = |which: usize| axes.each_ref().map(|axis| axis[which].clone());
        Cells { starts: of(0), slabs: of(1), lanes: of(2), begins: of(3) }
    }
}

/// Cell indices along the three axes.
struct Cells {
    /// First cell of the block, relative to the local shard.
    starts: [TritonTile; 3],
    /// First cell of the slab, relative to the shard including its halo.
    slabs: [TritonTile; 3],
    /// Cell of each query, relative to the block.
    lanes: [TritonTile; 3],
    /// First cell of each query's window, relative to the slab.
    begins: [TritonTile; 3],
}
