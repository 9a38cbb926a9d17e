//! Shardings of values, carried from operands to results as a partitioner does, so that a program knows the part of each
//! matmul that one device runs. A value without a known sharding counts as replicated.

use std::rc::Rc;

use super::sharding::Sharding;

/// Sharding of a value; `None` if nothing splits it.
pub(super) type Known = Option<Rc<Sharding>>;

/// Sharding of dimensions, without a mesh axis that an earlier dimension has.
pub(super) fn known(dims: Vec<Vec<String>>) -> Known {
    let mut taken: Vec<String> = Vec::new();
    let distinct = dims.into_iter().map(|axes| {
        let own: Vec<String> = axes.into_iter().filter(|a| !taken.contains(a)).collect();
        taken.extend(own.iter().cloned());
        own
    });
    let distinct: Vec<Vec<String>> = distinct.collect();
    (!taken.is_empty()).then(|| Rc::new(Sharding(distinct)))
}
