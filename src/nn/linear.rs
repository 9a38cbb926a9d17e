//! Affine maps and the pointwise functions around them.

use super::build::Quantization;
use super::layout::Axis;
use super::param::Init;
use super::params::Params;
use super::quantized::{self, Weight};
use crate::hlo::{DType, Value};

/// `x [rows…, in]` times `weight [out…, in]`: `[rows…, out…]`, in `x`'s element type.
pub(crate) fn linear_nd(p: &Params, x: &Value, weight: &Value) -> Value {
    linear_into(p, x, weight, x.dtype())
}

/// [`linear_nd`] with a result of another element type.
pub(crate) fn linear_into(p: &Params, x: &Value, weight: &Value, dtype: DType) -> Value {
    // Rows of one device, where the platform's bits depend on how many there are: one product each.
    let parts = p.layout().parts(&p.activation("rows"), Axis::CfgBatch);
    let local = if p.lowering().batch_invariant && x.rank() == 3 { x.dim(0) / parts } else { 1 };
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
pub(crate) fn linear(p: &Params, x: &Value, out: usize, bias: bool, axes: [Axis; 2]) -> Value {
    project(p, x, &[out], bias, &[axes[1]], axes[0])
}

/// The map from the last dimension to several: `weight` stands in the checkpoint as `[product(out), in]`.
pub(crate) fn project(p: &Params, x: &Value, out: &[usize], bias: bool, out_axes: &[Axis], in_axis: Axis) -> Value {
    let _scope = p.scope();
    let weight = p.weight(&["weight"], &[out, &[x.dim(-1)]].concat(), &[out_axes, &[in_axis]].concat());
    let bias = bias.then(|| p.get_as("bias", &[out.iter().product()], out, out_axes, Init::normal(0.02)));
    affine(p, x, &weight, bias.as_ref(), out_axes)
}

/// `x [rows…, in]` times a weight `[out…, in]` plus a bias `[out…]`: `[rows…, out…]`, in `x`'s element type.
pub fn affine(p: &Params, x: &Value, weight: &Weight, bias: Option<&Value>, out_axes: &[Axis]) -> Value {
    // A product takes a vector into its epilogue, not an array. An inner axis that is split stays an axis.
    let whole = out_axes[1..].iter().all(|&axis| p.layout().parts(&p.activation("weight"), axis) == 1);
    let Some(bias) = bias.filter(|_| p.lowering().fuse_epilogues && whole) else { return map(p, x, weight, bias) };
    let y = map(p, x, &weight.flat(), Some(&bias.reshape(vec![bias.ty().elements()])));
    y.reshape([&x.dims()[..x.rank() - 1], bias.dims()].concat())
}

fn map(p: &Params, x: &Value, weight: &Weight, bias: Option<&Value>) -> Value {
    match (weight, bias) {
        (Weight::Plain(weight), None) => linear_nd(p, x, weight),
        (Weight::Plain(weight), Some(bias)) => linear_nd(p, x, weight) + bias,
        (Weight::Scaled(weight, channels), _) if has_wide_activations(p, x) => {
            let y = linear_nd(p, x, &weight.to(x.dtype()));
            quantized::unscaled(&y, None, channels, bias).to(x.dtype())
        }
        (Weight::Scaled(weight, channels), _) => {
            let (narrow, rows) = quantized::scaled(x, weight.dtype());
            let is_integer = weight.dtype() == DType::I8 && p.lowering().integer_sums;
            // Sums are at most 448² times the inner width: far inside bf16's range, and 127² times it inside i32's.
            let y = linear_into(p, &narrow, weight, if is_integer { DType::I32 } else { x.dtype() });
            quantized::unscaled(&y, Some(&rows), channels, bias).to(x.dtype())
        }
    }
}

/// Whether what a weight in 8 bits is multiplied with keeps its element type.
fn has_wide_activations(p: &Params, x: &Value) -> bool {
    let rows: usize = x.dims()[..x.rank() - 1].iter().product();
    match p.quantization {
        Quantization::Int8 { activations } => !activations || rows < p.lowering().least_integer_rows,
        _ => false,
    }
}

/// `x · sigmoid(x)`, in f32 inside, in the operand's type outside.
pub(crate) fn silu(x: &Value) -> Value {
    let f = x.to(crate::hlo::DType::F32);
    (&f * f.logistic()).to(x.dtype())
}

/// The tanh approximation of GELU, in f32 inside, in the operand's type outside.
pub(crate) fn gelu_tanh(x: &Value) -> Value {
    let f = x.to(DType::F32);
    let inner = (&f + &f * &f * &f * 0.044715) * SQRT_2_OVER_PI;
    (&f * 0.5 * (inner.tanh() + 1.0)).to(x.dtype())
}

/// [`gelu_tanh`] of an affine map's result.
pub(crate) fn gelu_tanh_of_product(p: &Params, x: &Value) -> Value {
    // The compiler takes this very form into the product, which applies it to its f32 sums; but not into one whose rows
    // it has to pad to eights, nor into one whose sums are still to be scaled.
    let rows: usize = x.dims()[..x.rank() - 1].iter().product();
    if !p.lowering().fuse_epilogues || p.is_quantized() || x.dtype() != DType::BF16 || !rows.is_multiple_of(8) {
        return gelu_tanh(x);
    }
    x * ((((x + x * (x * x) * 0.044715) * SQRT_2_OVER_PI).tanh() + 1.0) * 0.5)
}

const SQRT_2_OVER_PI: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;

/// GELU by the error function, in f32 inside, in the operand's type outside.
pub(crate) fn gelu(x: &Value) -> Value {
    let f = x.to(crate::hlo::DType::F32);
    (&f * 0.5 * ((&f * std::f64::consts::FRAC_1_SQRT_2).erf() + 1.0)).to(x.dtype())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hlo::Type;
    use crate::nn::Build;

    /// Runs in f32 are what parity is judged by: no unit of fewer bits may compute their matmuls.
    #[test]
    fn products_of_f32_keep_all_of_its_bits() {
        for (dtype, precision) in [(DType::F32, "HIGHEST"), (DType::BF16, "DEFAULT")] {
            let p = Params::new("product", "transformer", &Build::new(dtype));
            let x = p.builder().argument("x", Type::new(dtype, [2, 3, 8]));
            let y = linear(&p.pp("proj"), &x, 4, true, [Axis::Replicated, Axis::Embed]);
            let text = p.builder().finish(&[("y", &y)]).expect("builds").text;
            assert!(text.contains(&format!("precision = [{precision}, {precision}]")), "{dtype}: {text}");
        }
    }
}
