//! Propagates shardings from operands to results, as a partitioner does, to determine how much of each matmul one
//! device computes. A value whose sharding is unknown counts as replicated.

use std::rc::Rc;

use super::sharding::Sharding;

/// Sharding of a value. `None`: the value counts as replicated.
pub(super) type KnownSharding = Option<Rc<Sharding>>;

/// Returns the sharding with the mesh axes `dims` of each dimension. If several dimensions list the same mesh axis, it
/// shards only the first of them.
pub(super) fn known(dims: Vec<Vec<String>>) -> KnownSharding {
    let mut taken: Vec<String> = Vec::new();
    let distinct = dims.into_iter().map(|axes| {
        let own: Vec<String> = axes.into_iter().filter(|a| !taken.contains(a)).collect();
        taken.extend(own.iter().cloned());
        own
    });
    let distinct: Vec<Vec<String>> = distinct.collect();
    (!taken.is_empty()).then(|| Rc::new(Sharding(distinct)))
}
