//! The smallest attention kernel: all operands are supported, and XLA's own operations do the work.

use super::plain;
use crate::hlo::{Type, Value};

/// Reason why operands are not supported; none here.
pub(super) fn unsupported_reason(_q: &Value, _k: &Value, _bias: Option<&Value>) -> Option<String> {
    None
}

/// Attention of `q [b, q, h, d]` with `k`, `v` `[b, k, kv, d]`, as [`super::attention`] defines it.
pub(super) fn attention(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64) -> Value {
    let v = &super::values_as_read(v);
    match super::chunk(q, k, bias) {
        None => plain::attention(q, k, v, bias, scale),
        Some(size) => {
            let types: [Type; 1] = [q.ty().clone()];
            plain::chunked(q, size, &types, |part| vec![plain::attention(part, k, v, bias, scale)]).remove(0)
        }
    }
}
