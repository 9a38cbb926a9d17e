//! Attention: one function, one policy.

use crate::hlo::Value;
use crate::kernels;

/// How queries meet keys that lie on other devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Exchange {
    /// Every device holds the keys and values it needs.
    #[default]
    Local,
}

/// Heads and their width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Number of heads.
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
    /// Queries `[b, q, heads, dim]`.
    pub q: &'a Value,
    /// Keys `[b, k, kv_heads, dim]`; `heads` is a multiple of `kv_heads`.
    pub k: &'a Value,
    /// Values `[b, k, kv_heads, dim]`.
    pub v: &'a Value,
    /// Added to the scaled scores of all heads, `[b or 1, 1, q or 1, k]`, f32.
    pub bias: Option<&'a Value>,
    /// Factor on the scores.
    pub scale: f64,
    /// Where the keys lie.
    pub exchange: Exchange,
}

impl Attention<'_> {
    /// The attended values `[b, q, heads, dim]`, in the queries' element type; scores and softmax in f32.
    pub fn run(&self) -> Value {
        let b = self.q.builder();
        let fits = self.q.rank() == 4 && self.k.dims() == self.v.dims() && self.k.rank() == 4;
        if !fits || !self.q.dim(2).is_multiple_of(self.k.dim(2).max(1)) || self.q.dim(3) != self.k.dim(3) {
            b.reject("attention", format!("queries {}, keys {}, values {}", self.q.ty(), self.k.ty(), self.v.ty()));
            return self.q.clone();
        }
        let _scope = b.scope("sdpa");
        match self.exchange {
            Exchange::Local => kernels::attention(self.q, self.k, self.v, self.bias, self.scale),
        }
    }
}
