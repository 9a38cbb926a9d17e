//! Affine maps and the pointwise functions around them.

use super::layout::Axis;
use super::params::{Init, Params};
use crate::dtype::DType;
use crate::hlo::Value;

/// `x [rows…, in]` times `weight [out…, in]`: `[rows…, out…]`, in `x`'s element type.
pub fn linear_nd(p: &Params, x: &Value, weight: &Value) -> Value {
    linear_into(p, x, weight, x.dtype())
}

/// [`linear_nd`] with a result of another element type.
pub fn linear_into(p: &Params, x: &Value, weight: &Value, dtype: DType) -> Value {
    // Rows of one device, where the platform's bits depend on how many there are: one product each.
    let parts = p.layout().parts(&p.activation("rows"), Axis::Rows);
    let local = if p.lowering().rowwise && x.rank() == 3 { x.dim(0) / parts } else { 1 };
    if local <= 1 || !x.dim(0).is_multiple_of(parts) {
        return product(x, weight, dtype);
    }
    let rest = &x.dims()[1..];
    let spread = x.reshape([&[parts, local], rest].concat());
    let each: Vec<Value> = (0..local).map(|i| product(&spread.at(1, i), weight, dtype).unsqueeze(1)).collect();
    let all = x.builder().concat(&each.iter().collect::<Vec<_>>(), 1);
    all.reshape([&[x.dim(0)], &all.dims()[2..]].concat())
}

fn product(x: &Value, weight: &Value, dtype: DType) -> Value {
    let rows: String = ('a'..'i').take(x.rank().saturating_sub(1)).collect();
    let out: String = ('o'..'y').take(weight.rank().saturating_sub(1)).collect();
    x.builder().einsum(&format!("{rows}z,{out}z->{rows}{out}"), x, weight, dtype)
}

/// The map `in -> out` at `p`, with parameters `weight [out, in]` and, if `bias`, `bias [out]`.
pub fn linear(p: &Params, x: &Value, out: usize, bias: bool, axes: [Axis; 2]) -> Value {
    project(p, x, &[out], bias, &[axes[1]], axes[0])
}

/// The map from the last dimension to several: `weight` stands in the checkpoint as `[product(out), in]`.
pub fn project(p: &Params, x: &Value, out: &[usize], bias: bool, out_axes: &[Axis], in_axis: Axis) -> Value {
    let _scope = p.scope();
    let inner = x.dim(-1);
    let flat: usize = out.iter().product();
    let shape: Vec<usize> = out.iter().copied().chain([inner]).collect();
    let axes: Vec<Axis> = out_axes.iter().copied().chain([in_axis]).collect();
    let deviation = (inner as f32).sqrt().recip();
    let weight = p.get_as("weight", &[flat, inner], &shape, &axes, Init::Normal(deviation));
    let bias = bias.then(|| p.get_as("bias", &[flat], out, out_axes, Init::Normal(0.02)));
    affine(p, x, &weight, bias.as_ref(), out_axes)
}

/// [`linear_nd`] plus a bias `[out…]`.
pub fn affine(p: &Params, x: &Value, weight: &Value, bias: Option<&Value>, out_axes: &[Axis]) -> Value {
    let Some(bias) = bias else { return linear_nd(p, x, weight) };
    // A product takes a vector into its epilogue, not an array. An inner axis that is split stays an axis.
    let whole = out_axes[1..].iter().all(|&axis| p.layout().parts(&p.activation("weight"), axis) == 1);
    if !p.lowering().epilogues || !whole {
        return linear_nd(p, x, weight) + bias;
    }
    let (inner, flat) = (x.dim(-1), bias.dims().iter().product());
    let y = linear_nd(p, x, &weight.reshape(vec![flat, inner])) + bias.reshape(vec![flat]);
    y.reshape([&x.dims()[..x.rank() - 1], bias.dims()].concat())
}

/// `x · sigmoid(x)`, in f32 inside, in the operand's type outside.
pub fn silu(x: &Value) -> Value {
    let f = x.to(crate::dtype::DType::F32);
    (&f * f.logistic()).to(x.dtype())
}

/// The tanh approximation of GELU, in f32 inside, in the operand's type outside.
pub fn gelu_tanh(x: &Value) -> Value {
    let f = x.to(DType::F32);
    let inner = (&f + &f * &f * &f * 0.044715) * SQRT_2_OVER_PI;
    (&f * 0.5 * (inner.tanh() + 1.0)).to(x.dtype())
}

/// [`gelu_tanh`] of an affine map's result.
pub fn gelu_tanh_of_product(p: &Params, x: &Value) -> Value {
    // The compiler takes this very form into the product, which applies it to its f32 sums; but not into one whose rows
    // it has to fill up to eights.
    let rows: usize = x.dims()[..x.rank() - 1].iter().product();
    if !p.lowering().epilogues || x.dtype() != DType::BF16 || !rows.is_multiple_of(8) {
        return gelu_tanh(x);
    }
    x * ((((x + x * (x * x) * 0.044715) * SQRT_2_OVER_PI).tanh() + 1.0) * 0.5)
}

const SQRT_2_OVER_PI: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;

/// GELU by the error function, in f32 inside, in the operand's type outside.
pub fn gelu(x: &Value) -> Value {
    let f = x.to(crate::dtype::DType::F32);
    (&f * 0.5 * ((&f * std::f64::consts::FRAC_1_SQRT_2).erf() + 1.0)).to(x.dtype())
}
