//! Attention with queries and keys on different devices. All functions run on the local shard inside a manual region.

use serde::{Deserialize, Serialize};

use crate::kernels::{self, Kernel, PartialAttention};
use ltx2_stablehlo::{DType, Groups, Value};

/// Communication pattern of self-attention over a sharded sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ContextParallelKind {
    /// Each device gathers all keys and values.
    #[default]
    GatherKv,
    /// An all-to-all exchanges tokens for heads: each device attends over all tokens for its share of the heads.
    Ulysses,
    /// Keys and values are passed around a ring of devices.
    Ring,
    /// Ulysses within groups of neighboring devices; between the groups, the pattern that `outer` selects.
    Hybrid,
}

/// Context parallelism of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ContextParallelPolicy {
    /// Communication pattern.
    pub kind: ContextParallelKind,
    /// `hybrid` only: number of devices per Ulysses group; must divide the number of devices that shard the sequence.
    #[schemars(range(min = 1))]
    pub ulysses: Option<usize>,
    /// `hybrid` only: communication between the groups, `gather_kv` or `ring`.
    pub outer: ContextParallelKind,
}

impl ContextParallelPolicy {
    /// Returns the number of devices in a Ulysses group; 1 without Ulysses.
    pub(crate) fn ulysses_degree(&self, groups: &Groups) -> usize {
        match self.kind {
            ContextParallelKind::GatherKv | ContextParallelKind::Ring => 1,
            ContextParallelKind::Ulysses => groups.size(),
            ContextParallelKind::Hybrid => self.ulysses.unwrap_or(1),
        }
    }
}

/// Operands of attention on one device.
pub(super) struct Local<'a> {
    /// Queries `[b, q, heads, dim]`.
    pub q: &'a Value,
    /// Keys `[b, k, heads, dim]`.
    pub k: &'a Value,
    /// Values, in the shape of `k`.
    pub v: &'a Value,
    /// Additive bias `[b or 1, 1, q or 1, keys]`, f32. It covers the keys of all devices, except in
    /// [`Local::split_kv`].
    pub bias: Option<&'a Value>,
    /// Factor by which the scores are multiplied.
    pub scale: f64,
    pub kernel: Kernel,
    /// Whether to compute each batch entry separately. This is needed where the bits of a dot depend on its number of
    /// rows.
    pub by_row: bool,
}

impl Local<'_> {
    /// Computes attention on a device that has all the keys that its queries attend to.
    pub(crate) fn here(&self) -> Value {
        let rows = self.q.dim(0);
        if !self.by_row || rows <= 1 {
            return kernels::attention(self.kernel, self.q, self.k, self.v, self.bias, self.scale);
        }
        let row = |i: usize| {
            let own = |x: &Value| if x.dim(0) == 1 { x.clone() } else { x.slice(0, i, i + 1) };
            let [q, k, v] = [self.q, self.k, self.v].map(own);
            kernels::attention(self.kernel, &q, &k, &v, self.bias.map(own).as_ref(), self.scale)
        };
        let all: Vec<Value> = (0..rows).map(row).collect();
        self.q.builder().concat(&all.iter().collect::<Vec<_>>(), 0)
    }

    /// Gathers the keys and values of all devices, then computes attention.
    pub(crate) fn gather_kv(&self, groups: &Groups) -> Value {
        let [k, v] = [self.k, self.v].map(|x| x.all_gather(1, groups));
        kernels::attention(self.kernel, self.q, &k, &v, self.bias, self.scale)
    }

    /// Computes attention of replicated queries over sharded keys: each device attends to its own keys, then maxima,
    /// denominators and weighted values are combined.
    pub(crate) fn split_kv(&self, groups: &Groups) -> Value {
        let own = PartialAttention::compute(self.kernel, self.q, self.k, self.v, self.bias, self.scale);
        let scaled = own.rescaled(&own.max.all_reduce_max(groups));
        // A single all-reduce carries the weighted values and, as an extra column, the denominators.
        let all = self.q.builder().concat(&[&scaled.acc, &scaled.denom], 3).all_reduce_sum(groups);
        let d = self.q.dim(3);
        (all.slice(3, 0, d) / all.slice(3, d, d + 1)).to(self.q.dtype())
    }

    /// Exchanges tokens for heads, so that each device has all tokens of the group for its share of the heads, runs
    /// `attend`, and reverses the exchange. If the heads are not divisible by the group size, they are padded with
    /// zeros.
    fn ulysses(&self, groups: &Groups, attend: impl FnOnce(&Local) -> Value) -> Value {
        let heads = self.q.dim(2);
        let extra = heads.next_multiple_of(groups.size()) - heads;
        let [q, k, v] = [self.q, self.k, self.v].map(|x| x.pad(2, 0, extra, 0.0).all_to_all(2, 1, groups));
        let o = attend(&Local { q: &q, k: &k, v: &v, ..*self });
        o.all_to_all(1, 2, groups).slice(2, 0, heads)
    }

    /// Passes keys and values around the group; each device accumulates attention over every block. `position` is the
    /// device's index in the group, an i32 scalar. The next block is transferred while the current one is processed.
    fn ring(&self, groups: &Groups, position: &Value) -> Value {
        let b = self.q.builder();
        let n = groups.size();
        let pairs: Vec<(usize, usize)> =
            groups.0.iter().flat_map(|g| (0..n).map(move |j| (g[j], g[(j + 1) % n]))).collect();
        let pass = |x: &Value| x.collective_permute(&pairs);
        let length = self.k.dim(1);
        // After `step` transfers, each device holds the keys of the device `step` positions before it in the group.
        let attend = |step: &Value, k: &Value, v: &Value| {
            let block = position - step;
            let wrapped =
                block.compare(ltx2_stablehlo::Comparison::Lt, &block.like(0.0)).select(&(&block + n as f64), &block);
            let bias = self.bias.map(|bias| bias.dynamic_slice(3, &(wrapped * length as f64), length));
            PartialAttention::compute(self.kernel, self.q, k, v, bias.as_ref(), self.scale)
        };
        let first = attend(&b.scalar(0.0, DType::I32), self.k, self.v);
        if n == 1 {
            return first.finish(self.q.dtype());
        }
        let mut carried = vec![pass(self.k), pass(self.v)];
        carried.extend(first.into_values());
        let split = |c: &[Value]| PartialAttention::from_values(&c[2..]);
        let (one, last) = (b.scalar(1.0, DType::I32), b.scalar(n as f64 - 1.0, DType::I32));
        let c = b.counted_loop(n - 2, &one, &last, &carried, |step, c| {
            let next = [pass(&c[0]), pass(&c[1])];
            let joined = split(c).join(&attend(step, &c[0], &c[1]));
            next.into_iter().chain(joined.into_values()).collect()
        });
        split(&c).join(&attend(&last, &c[0], &c[1])).finish(self.q.dtype())
    }

    /// Computes attention with the communication pattern of the layout. The sequence is sharded over `groups`;
    /// `position` is the index of the device in its group.
    pub(crate) fn context_parallel(&self, policy: &ContextParallelPolicy, groups: &Groups, position: &Value) -> Value {
        match policy.kind {
            ContextParallelKind::GatherKv => self.gather_kv(groups),
            ContextParallelKind::Ulysses => self.ulysses(groups, |local| local.here()),
            ContextParallelKind::Ring => self.ring(groups, position),
            ContextParallelKind::Hybrid => {
                let inner = policy.ulysses_degree(groups);
                if !groups.size().is_multiple_of(inner) {
                    let message = format!(
                        "context_parallel: the {} devices that shard the sequence are not divisible by ulysses = {inner}",
                        groups.size()
                    );
                    self.q.builder().reject("layout", message);
                    return self.q.clone();
                }
                let (near, far) = groups.nested(inner);
                let outer = position / &position.like(inner as f64);
                // A bias with one row per query covers the queries of all groups; select the rows of this group.
                let queries = self.q.dim(1) * inner;
                let own = self.bias.map(|bias| match bias.dim(2) {
                    1 => bias.clone(),
                    _ => bias.dynamic_slice(2, &(&outer * queries as f64), queries),
                });
                self.ulysses(&near, |local| {
                    let local = Local { bias: own.as_ref(), ..*local };
                    match policy.outer {
                        ContextParallelKind::Ring => local.ring(&far, &outer),
                        _ => local.gather_kv(&far),
                    }
                })
            }
        }
    }
}
