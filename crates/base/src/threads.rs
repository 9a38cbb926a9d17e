//! Parallel work on the host: over the rows of a slice, and over tasks that block on files, devices or compilers.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use rayon::prelude::*;

/// Minimum number of values per thread; below this, threading costs more than it saves.
const LEAST: usize = 1 << 14;

/// Calls `fill(i, row)` for every row of `width` values, from several threads. A remainder shorter than a row is left
/// unchanged.
pub fn for_each_complete_row<T: Send>(values: &mut [T], width: usize, fill: impl Fn(usize, &mut [T]) + Sync) {
    let width = width.max(1);
    let rows = values.par_chunks_exact_mut(width).with_min_len(LEAST.div_ceil(width));
    rows.enumerate().for_each(|(i, row)| fill(i, row));
}

/// Returns the number of CPU cores available to this process.
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Runs `work` on each item and returns the results in the order of `items`. Up to `workers` threads start the items in
/// that order, so items that are needed first should come first. `work` may block.
pub fn in_order<T: Sync, R: Send>(items: &[T], workers: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (next, work) = (AtomicUsize::new(0), &work);
    let take = || {
        let mut done = Vec::new();
        while let Some((i, item)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, items.get(i)?))) {
            done.push((i, work(item)));
        }
        done
    };
    let mut all: Vec<(usize, R)> = thread::scope(|scope| {
        let threads: Vec<_> = (0..workers.clamp(1, items.len().max(1))).map(|_| scope.spawn(take)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    all.sort_unstable_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, made)| made).collect()
}

/// Runs fallible work like [`in_order`]. After a failure, no further items start.
///
/// # Errors
/// Returns the error of the failed item that comes first in `items`.
pub fn try_in_order<T: Sync, R: Send, E: Send>(
    items: &[T],
    workers: usize,
    work: impl Fn(&T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let failed = AtomicBool::new(false);
    let begun = in_order(items, workers, |item| {
        let attempt = || work(item).inspect_err(|_| failed.store(true, Ordering::Relaxed));
        (!failed.load(Ordering::Relaxed)).then(attempt)
    });
    begun.into_iter().flatten().collect()
}

/// A memory budget in bytes that threads share. A thread that reserves more than is available waits until other threads
/// release their reservations.
pub struct MemoryBudget {
    total: usize,
    used: Mutex<MemoryUse>,
    returned: Condvar,
}

/// Current and peak number of reserved bytes. A reservation of more than the total counts with its full size.
#[derive(Default)]
struct MemoryUse {
    now: usize,
    peak: usize,
}

/// Bytes reserved from a [`MemoryBudget`]; dropping it returns them.
pub struct Reservation<'a> {
    budget: &'a MemoryBudget,
    bytes: usize,
}

impl MemoryBudget {
    /// Creates a budget of `total` bytes.
    pub fn new(total: usize) -> Self {
        MemoryBudget { total, used: Mutex::default(), returned: Condvar::new() }
    }

    /// Waits until `bytes` bytes are available, and reserves them. A request for more than the total waits until
    /// nothing is reserved; a request for 0 bytes never waits.
    pub fn reserve(&self, bytes: usize) -> Reservation<'_> {
        let limit = self.total.saturating_sub(bytes);
        let used = self.returned.wait_while(self.lock(), |used| bytes > 0 && used.now > limit);
        let mut used = used.unwrap_or_else(PoisonError::into_inner);
        used.now += bytes;
        used.peak = used.peak.max(used.now);
        Reservation { budget: self, bytes }
    }

    /// Returns the largest number of bytes that were reserved at the same time. It exceeds the total only if a single
    /// request did.
    pub fn peak(&self) -> usize {
        self.lock().peak
    }

    fn lock(&self) -> MutexGuard<'_, MemoryUse> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.budget.lock().now -= self.bytes;
        self.budget.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn request_larger_than_the_budget_is_granted_only_alone() {
        let (budget, used, most) = (MemoryBudget::new(10), AtomicUsize::new(0), AtomicUsize::new(0));
        in_order(&[3, 4, 5, 99, 1, 10, 6, 2, 4, 4], 4, |&bytes| {
            let _reserved = budget.reserve(bytes);
            let now = used.fetch_add(bytes, Ordering::SeqCst) + bytes;
            assert!(now <= 10 || now == 99, "{now}");
            most.fetch_max(now, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(2));
            used.fetch_sub(bytes, Ordering::SeqCst);
        });
        assert_eq!((most.into_inner(), budget.peak(), budget.lock().now), (99, 99, 0));
    }

    #[test]
    fn empty_request_does_not_wait_for_a_larger_request() {
        let budget = Arc::new(MemoryBudget::new(10));
        let _larger = budget.reserve(99);
        let (sender, receiver) = channel();
        let empty = budget.clone();
        thread::spawn(move || {
            drop(empty.reserve(0));
            sender.send(()).expect("the test waits");
        });
        receiver.recv_timeout(Duration::from_secs(10)).expect("an empty request waits");
    }

    #[test]
    fn every_complete_row_is_visited_once() {
        let mut values = vec![0usize; 3 * LEAST + 2];
        for_each_complete_row(&mut values, 3, |i, row| row.iter_mut().for_each(|v| *v += i + 1));
        assert!(values[..3 * LEAST].iter().enumerate().all(|(at, v)| *v == at / 3 + 1));
        assert_eq!(values[3 * LEAST..], [0, 0]);
        for_each_complete_row(&mut values[..0], 0, |_, _| {});
    }

    #[test]
    fn items_start_and_return_in_order() {
        let begun = std::sync::Mutex::new(Vec::new());
        let items: Vec<usize> = (0..40).collect();
        for workers in [0, 1, 3, 100] {
            let squares = in_order(&items, workers, |&i| {
                begun.lock().expect("no panic").push(i);
                i * i
            });
            assert_eq!(squares, items.iter().map(|i| i * i).collect::<Vec<_>>());
        }
        // With one worker, items start in order.
        assert_eq!(begun.lock().expect("no panic")[..40], items);
        assert!(in_order(&[0usize; 0], 4, |i| *i).is_empty());
    }

    #[test]
    fn no_item_starts_after_a_failure() {
        let begun = AtomicUsize::new(0);
        let items: Vec<usize> = (0..40).collect();
        let half = |i: &usize| {
            begun.fetch_add(1, Ordering::Relaxed);
            if *i < 7 { Ok(i / 2) } else { Err(*i) }
        };
        assert_eq!(try_in_order(&items, 1, half), Err(7));
        assert_eq!(begun.load(Ordering::Relaxed), 8);
        assert!(try_in_order(&items, 3, half).is_err_and(|i| i >= 7));
        assert_eq!(try_in_order(&items[..7], 3, half), Ok(vec![0, 0, 1, 1, 2, 2, 3]));
    }
}
