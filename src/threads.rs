//! Work on the rows of one slice, spread over the processor's cores.

use rayon::prelude::*;

/// Values below which a thread costs more than it saves.
const LEAST: usize = 1 << 14;

/// Calls `fill(i, row)` for every row of `width` values, from several threads; each row is one call's alone.
pub(crate) fn each_row<T: Send>(values: &mut [T], width: usize, fill: impl Fn(usize, &mut [T]) + Sync) {
    let width = width.max(1);
    let rows = values.par_chunks_exact_mut(width).with_min_len(LEAST.div_ceil(width));
    rows.enumerate().for_each(|(i, row)| fill(i, row));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_filled_once_and_the_rest_left() {
        let mut values = vec![0usize; 3 * LEAST + 2];
        each_row(&mut values, 3, |i, row| row.iter_mut().for_each(|v| *v += i + 1));
        assert!(values[..3 * LEAST].iter().enumerate().all(|(at, v)| *v == at / 3 + 1));
        assert_eq!(values[3 * LEAST..], [0, 0]);
        each_row(&mut values[..0], 0, |_, _| {});
    }
}
