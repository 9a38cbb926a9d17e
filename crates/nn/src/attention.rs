//! Scaled dot-product attention, on one device or sharded.

use super::context_parallel::Local;
use super::layout::Axis;
use super::params::Params;
use ltx2_stablehlo::{Builder, Comparison, DType, Sharding, Type, Value};

/// Number and width of attention heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Number of heads, each with `dim` features.
    pub count: usize,
    /// Width of one head.
    pub dim: usize,
}

impl Heads {
    /// Returns the total width of all heads.
    pub fn width(self) -> usize {
        self.count * self.dim
    }
}

/// Operands of scaled dot-product attention. `rows` is the size of the batch.
pub struct Attention<'a> {
    /// Queries `[rows, q, heads, dim]`.
    pub q: &'a Value,
    /// Keys `[rows, k, kv_heads, dim]`; `heads` is a multiple of `kv_heads`.
    pub k: &'a Value,
    /// Values `[rows, k, kv_heads, dim]`.
    pub v: &'a Value,
    /// Bias that is added to the scaled scores of every head, `[rows or 1, 1, q or 1, k]`, f32.
    pub bias: Option<&'a Value>,
    /// Factor by which the scores are multiplied before the bias is added.
    pub scale: f64,
    /// Sequence axes of queries and keys, which determine the sharding and the communication.
    pub sequence: [Axis; 2],
}

/// Bias of masked keys: far below any score, but finite, so that the result of a query with only masked keys is not
/// NaN.
pub const MASK_VALUE: f64 = -1e30;

/// Returns an additive bias `[1, 1, 1, length]`, f32, that masks all keys after the first `content`. `None` if `length`
/// is not larger than `content`.
pub fn padding_mask(b: &Builder, length: usize, content: usize) -> Option<Value> {
    (length > content).then(|| {
        let position = b.iota(Type::new(DType::F32, [1, 1, 1, length]), 3);
        let padding = position.compare(Comparison::Ge, &position.like(content as f64));
        padding.select(&position.like(MASK_VALUE), &position.like(0.0))
    })
}

/// Communication that attention needs for a given sharding of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Communication {
    /// Keys are replicated.
    Local,
    /// Queries are replicated, keys are sharded.
    SplitKv,
    /// Queries and keys are sharded along different sequence axes.
    GatherKv,
    /// Queries and keys are sharded along the same sequence axis: the layout's context parallelism applies.
    ContextParallel,
}

impl Attention<'_> {
    /// Computes attention. Returns `[rows, q, heads, dim]` in the element type of the queries; scores and softmax are
    /// computed in f32. `p` is the prefix of the attention layer; its name selects the layout rules.
    pub fn run(&self, p: &Params) -> Value {
        let b = self.q.builder();
        let fits = self.q.rank() == 4 && self.k.dims() == self.v.dims() && self.k.rank() == 4;
        if !fits || !self.q.dim(2).is_multiple_of(self.k.dim(2).max(1)) || self.q.dim(3) != self.k.dim(3) {
            b.reject(
                "attention",
                format!(
                    "expected queries [rows, q, heads, dim], and keys and values [rows, k, kv_heads, dim] with heads a multiple of \
                     kv_heads; got {}, {} and {}",
                    self.q.ty(),
                    self.k.ty(),
                    self.v.ty()
                ),
            );
            return self.q.clone();
        }
        let _scope = b.scope("sdpa");
        if p.layout().is_single() { self.here(p) } else { self.split(p) }
    }

    /// Computes attention like [`Attention::run`], but each device uses only its own operands, without communication.
    /// Use this inside a manual region, because manual regions cannot be nested.
    pub fn here(&self, p: &Params) -> Value {
        self.local(p, self.q, self.k, self.v, self.bias).here()
    }

    /// Returns the attention operands of one device.
    fn local<'a>(&self, p: &Params, q: &'a Value, k: &'a Value, v: &'a Value, bias: Option<&'a Value>) -> Local<'a> {
        let (kernel, by_row) = (p.lowering().attention, p.lowering().batch_invariant);
        Local { q, k, v, bias, scale: self.scale, kernel, by_row }
    }

    fn communication(&self, p: &Params) -> Communication {
        let [q, k] = self.sequence.map(|a| p.layout().mesh_axes(&p.activation("attention"), a));
        match (q.is_empty(), k.is_empty()) {
            (_, true) => Communication::Local,
            (true, false) => Communication::SplitKv,
            (false, false) if self.sequence[0] == self.sequence[1] => Communication::ContextParallel,
            (false, false) => Communication::GatherKv,
        }
    }

    /// Computes sharded attention in a manual region, where all communication is explicit instead of chosen by the SPMD
    /// partitioner.
    fn split(&self, p: &Params) -> Value {
        let b = p.builder();
        let layout = p.layout();
        let name = p.activation("attention");
        let [of_q, of_k] = self.sequence;
        let communication = self.communication(p);
        let groups = layout.groups(&name, of_k);
        let place = |x: &Value, axes: &[Axis]| {
            p.placement("attention", x.ty(), axes).unwrap_or_else(|| Sharding(vec![Vec::new(); axes.len()]))
        };
        let q_at = place(self.q, &[Axis::CfgBatch, of_q, Axis::Heads, Axis::HeadDim]);
        let shared = self.k.dim(2) != self.q.dim(2);
        let kv_heads = if shared { Axis::KvHeads } else { Axis::Heads };
        let mut k_at = place(self.k, &[Axis::CfgBatch, of_k, kv_heads, Axis::HeadDim]);
        let [mut k, mut v] = [self.k, self.v].map(Value::clone);
        // Query heads must be on the same device as the key and value heads that they share. If they are not, repeat
        // the keys and values for every query head.
        let degree = if communication == Communication::ContextParallel {
            layout.context_parallel.ulysses_degree(&groups)
        } else {
            1
        };
        let own_heads = k.dim(2) / k_at.0[2].iter().filter_map(|a| layout.mesh.size(a)).product::<usize>();
        if shared && (q_at.0[2] != k_at.0[2] || !own_heads.is_multiple_of(degree)) {
            [k, v] = [&k, &v].map(|x| repeat_heads(x, self.q.dim(2) / self.k.dim(2)));
            k_at = place(&k, &[Axis::CfgBatch, of_k, Axis::Heads, Axis::HeadDim]);
        }
        let mut operands = vec![(self.q, q_at.clone()), (&k, k_at.clone()), (&v, k_at)];
        // Shard index of each device along the axis of the keys. This vector is sharded, so that each device holds its
        // own index.
        let parts = layout.parts(&name, of_k);
        let positions = b.iota(Type::new(DType::I32, [parts]), 0);
        operands.push((&positions, place(&positions, &[of_k])));
        if let Some(bias) = self.bias {
            let rows = if bias.dim(0) == 1 { Axis::Replicated } else { Axis::CfgBatch };
            // With Ulysses, each device needs the bias of all queries; otherwise only that of its own queries. With
            // SplitKv, each device needs only the bias of its own keys; otherwise that of all keys.
            let all_queries = bias.dim(2) == 1 || degree > 1;
            let queries = if all_queries { Axis::Replicated } else { of_q };
            let keys = if communication == Communication::SplitKv { of_k } else { Axis::Replicated };
            operands.push((bias, place(bias, &[rows, Axis::Replicated, queries, keys])));
        }
        let results = b.manual(&operands, &[q_at], |x| {
            let local = self.local(p, &x[0], &x[1], &x[2], x.get(4));
            vec![match communication {
                Communication::Local => local.here(),
                Communication::SplitKv => {
                    // The result is unused, but without this operation the program text, and with it the compile-cache
                    // key, would differ from that of earlier versions.
                    let _ = x[3].reshape(vec![]);
                    local.split_kv(&groups)
                }
                Communication::GatherKv => local.gather_kv(&groups),
                Communication::ContextParallel => {
                    local.context_parallel(&layout.context_parallel, &groups, &x[3].reshape(vec![]))
                }
            }]
        });
        results.into_iter().next().unwrap_or_else(|| self.q.clone())
    }
}

/// Repeats each head `times` times: `[b, n, h, d]` becomes `[b, n, h · times, d]`, with the copies of a head adjacent.
fn repeat_heads(x: &Value, times: usize) -> Value {
    let (b, n, h, d) = (x.dim(0), x.dim(1), x.dim(2), x.dim(3));
    x.unsqueeze(3).broadcast_to(&[b, n, h, times, d]).reshape(vec![b, n, h * times, d])
}
