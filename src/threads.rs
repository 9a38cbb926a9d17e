//! Work on the rows of one slice, spread over the processor's cores.

use std::num::NonZero;
use std::thread;

/// Values below which a thread costs more than it saves.
const LEAST: usize = 1 << 14;

/// Calls `fill(i, row)` for every row of `width` values, from several threads; each row is one call's alone.
pub fn each_row<T: Send>(values: &mut [T], width: usize, fill: impl Fn(usize, &mut [T]) + Sync) {
    let width = width.max(1);
    let whole = values.len() / width * width;
    each_block(&mut values[..whole], width, 1, fill);
}

/// As [`each_row`] with up to `most` rows in a call, `fill(first row, rows)`.
pub fn each_block<T: Send>(values: &mut [T], width: usize, most: usize, fill: impl Fn(usize, &mut [T]) + Sync) {
    let width = width.max(1);
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let rows = (values.len() / width).div_ceil(threads).max(LEAST.div_ceil(width));
    let fill = &fill;
    thread::scope(|scope| {
        for (i, part) in values.chunks_mut(rows * width).enumerate() {
            let blocks = part.chunks_mut(most.max(1) * width).enumerate();
            scope.spawn(move || blocks.for_each(|(k, block)| fill(i * rows + k * most.max(1), block)));
        }
    });
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

    #[test]
    fn blocks_are_rows_in_order() {
        let mut values = vec![0usize; 3 * (LEAST + 5)];
        each_block(&mut values, 3, 7, |first, block| {
            assert!(block.len().is_multiple_of(3) && block.len() <= 21);
            block.chunks_mut(3).enumerate().for_each(|(k, row)| row.iter_mut().for_each(|v| *v += first + k + 1));
        });
        assert!(values.iter().enumerate().all(|(at, v)| *v == at / 3 + 1));
    }
}
