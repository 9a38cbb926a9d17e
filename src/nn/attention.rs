//! Attention: one function, one policy.

use super::context_parallel::Local;
use super::layout::Axis;
use super::params::Params;
use crate::hlo::{Builder, Comparison, DType, Sharding, Type, Value};

/// Heads and their width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    pub count: usize,
    /// Width of one.
    pub dim: usize,
}

impl Heads {
    /// Width of all.
    pub fn width(self) -> usize {
        self.count * self.dim
    }
}

/// Scaled dot-product attention.
pub struct Attention<'a> {
    /// Queries `[rows, q, heads, dim]`.
    pub q: &'a Value,
    /// Keys `[rows, k, kv_heads, dim]`; `heads` is a multiple of `kv_heads`.
    pub k: &'a Value,
    /// Values `[rows, k, kv_heads, dim]`.
    pub v: &'a Value,
    /// Added to the scaled scores of all heads, `[rows or 1, 1, q or 1, k]`, f32.
    pub bias: Option<&'a Value>,
    pub scale: f64,
    pub sequence: [Axis; 2],
}

/// Added to the score of a key that no query may see: no finite score reaches it, and a row of nothing else stays
/// finite.
pub(crate) const MASK_VALUE: f64 = -1e30;

/// Bias that masks the keys behind the first `content` of `length`: added to scores, `[1, 1, 1, length]`, f32.
pub fn padding_mask(b: &Builder, length: usize, content: usize) -> Option<Value> {
    (length > content).then(|| {
        let position = b.iota(Type::new(DType::F32, [1, 1, 1, length]), 3);
        let padding = position.compare(Comparison::Ge, &position.like(content as f64));
        padding.select(&position.like(MASK_VALUE), &position.like(0.0))
    })
}

/// Communication that attention needs, by where queries and keys are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Communication {
    /// Keys are replicated, or there is one device.
    Local,
    /// Queries are replicated, keys are sharded.
    SplitKv,
    /// Both are sharded, as two sequences.
    GatherKv,
    /// Both are one sharded sequence: the layout chooses.
    ContextParallel,
}

impl Attention<'_> {
    /// The attended values `[rows, q, heads, dim]`, in the queries' element type; scores and softmax in f32. `p` is the
    /// attention layer's place: its name decides what the layout says about it.
    pub fn run(&self, p: &Params) -> Value {
        let b = self.q.builder();
        let fits = self.q.rank() == 4 && self.k.dims() == self.v.dims() && self.k.rank() == 4;
        if !fits || !self.q.dim(2).is_multiple_of(self.k.dim(2).max(1)) || self.q.dim(3) != self.k.dim(3) {
            b.reject("attention", format!("queries {}, keys {}, values {}", self.q.ty(), self.k.ty(), self.v.ty()));
            return self.q.clone();
        }
        let _scope = b.scope("sdpa");
        if p.layout().is_single() { self.here(p) } else { self.split(p) }
    }

    /// The same where all of it is one device's: a manual region is no place for another.
    pub(crate) fn here(&self, p: &Params) -> Value {
        self.local(p, self.q, self.k, self.v, self.bias).here()
    }

    /// Operands on one device.
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

    /// Each device on its part, in a manual region: nothing inside is left to the partitioner.
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
        // Query heads that share keys stay with them, or else the keys are repeated for each.
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
        // The device's place along the keys' axis: element `i` of this vector lies on device `i`.
        let parts = layout.parts(&name, of_k);
        let positions = b.iota(Type::new(DType::I32, [parts]), 0);
        operands.push((&positions, place(&positions, &[of_k])));
        if let Some(bias) = self.bias {
            let rows = if bias.dim(0) == 1 { Axis::Replicated } else { Axis::CfgBatch };
            // Ulysses sees all queries; the others see the columns of all keys, unless each device keeps to its own.
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
                    // Nobody reads the place here: it keeps the text by whose hash compiled programs are found again.
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

/// `[b, k, kv, d]` with every head `times` times in a row.
fn repeat_heads(x: &Value, times: usize) -> Value {
    let (b, n, h, d) = (x.dim(0), x.dim(1), x.dim(2), x.dim(3));
    x.unsqueeze(3).broadcast_to(&[b, n, h, times, d]).reshape(vec![b, n, h * times, d])
}
