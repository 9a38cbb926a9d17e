//! Tests of the geometry and the limits of the window attention kernel. GPU tests check its results.

use super::*;
use ltx2_stablehlo::{Builder, Type};

/// The slab of a block contains the windows of all its cells and lies within the local cells, including the halo.
#[test]
fn slabs_contain_their_windows_at_every_border() {
    let sizes = (3..40_usize)
        .flat_map(|n| (1..5_usize).flat_map(move |parts| [1_usize, 2, 3, 4, 7, 11].map(|w| (n, parts, w))));
    for ((length, parts, window), edge) in sizes.flat_map(|size| [4, neighborhood::LONGEST].map(|edge| (size, edge))) {
        let own = length.div_ceil(parts);
        let axis = GridAxis { length, own, reach: 0, window };
        let reach = if own == length { 0 } else { axis.needed_reach() };
        // The halo comes only from direct neighbors.
        if window > length || reach > own {
            continue;
        }
        let axis = GridAxis { reach, ..axis };
        let block = edge.min(own);
        let slab = axis.slab(edge);
        let [length, window, slab_cells, extended] = [length, window, slab, axis.extended()].map(|n| n as i64);
        let begin = |cell: i64, cells: i64| (cell - window / 2).max(0).min(length - cells);
        for (first, start) in (0..parts).flat_map(|part| (0..own.div_ceil(block)).map(move |n| (part * own, n * block)))
        {
            let (first, start) = (first as i64, start.min(own - block) as i64);
            let moved = |cell: i64| cell - first + reach as i64;
            let slab_at = moved(begin(start + first, slab_cells)).max(0).min(extended - slab_cells);
            for cell in (0..block as i64).map(|lane| first + start + lane).filter(|cell| *cell < length) {
                let from = moved(begin(cell, window)) - slab_at;
                let place = format!("{axis:?}: cell {cell} of the device from {first}, slab at {slab_at}");
                assert!(from >= 0 && from + window <= slab_cells, "{place}: window at {from}");
            }
        }
    }
}

#[test]
fn unsupported_operands_have_a_reason() {
    let b = Builder::new("windows");
    let axes = |rows: usize| [121, rows, 480].map(|n| GridAxis { length: n, own: n, reach: 0, window: 11 });
    let reason = |dtype: DType, rows: usize, dim: usize| {
        let q = b.argument("q", Type::new(dtype, [1, 121, rows, 480, 4, dim]));
        unsupported_reason(&q, axes(rows)).unwrap_or_default()
    };
    assert_eq!(reason(DType::BF16, 272, 64), "");
    assert_eq!(reason(DType::F32, 272, 64), "element type f32");
    assert_eq!(reason(DType::BF16, 272, 48), "head dimension 48, which must be one of [16, 32, 64, 128]");
    assert_eq!(
        reason(DType::BF16, 2720, 64),
        "frames of 2720 x 480 cells with 256 channels, which exceed 32-bit offsets"
    );
}
