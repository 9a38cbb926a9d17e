//! Linear layers and activation functions.

use super::build::{Quantization, RowProductForm};
use super::kernels::{RowProducts, RowWeight};
use super::layout::Axis;
use super::lora::LoraMatrices;
use super::param::Init;
use super::params::Params;
use super::quantized::{self, Weight};
use ltx2_stablehlo::{DType, Value};

/// Multiplies `x [rows…, in]` by `weight [out…, in]`. Returns `[rows…, out…]` in the element type of `x`.
pub fn linear_nd(p: &Params, x: &Value, weight: &Value) -> Value {
    linear_into(p, x, weight, x.dtype())
}

/// Multiplies like [`linear_nd`], but the result has the element type `dtype`.
pub fn linear_into(p: &Params, x: &Value, weight: &Value, dtype: DType) -> Value {
    let is_row = x.ty().elements() == x.dim(-1) && x.dtype().is_float();
    if is_row && p.row_products() != RowProductForm::Dot {
        return row_product(p, x, weight, dtype);
    }
    if x.rank() == 3 { linear_by_batch(p, x, weight, dtype) } else { product(x, weight, dtype) }
}

/// Multiplies like [`linear_into`], but accepts any `x` whose first dimension is the batch. With `batch_invariant`,
/// multiplies each batch entry separately.
pub(super) fn linear_by_batch(p: &Params, x: &Value, weight: &Value, dtype: DType) -> Value {
    // `local` is the number of batch entries per device, each of which is multiplied separately.
    let parts = p.layout().parts(&p.activation("rows"), Axis::CfgBatch);
    let local = if p.lowering().batch_invariant { x.dim(0) / parts } else { 1 };
    if local <= 1 || !x.dim(0).is_multiple_of(parts) {
        return product(x, weight, dtype);
    }
    let rest = &x.dims()[1..];
    let spread = x.reshape([&[parts, local], rest].concat());
    let each: Vec<Value> = (0..local).map(|i| product(&spread.at(1, i), weight, dtype).unsqueeze(1)).collect();
    let all = x.builder().concat(&each.iter().collect::<Vec<_>>(), 1);
    all.reshape([&[x.dim(0)], &all.dims()[2..]].concat())
}

/// Multiplies a single row `x [1…, in]` by `weight [out…, in]`, with a kernel or as a sum over the last dimension.
fn row_product(p: &Params, x: &Value, weight: &Value, dtype: DType) -> Value {
    let products = RowProducts { x, weights: vec![RowWeight { weight, parts: 1 }], dtype, is_gated: false };
    products.run(p).map_or_else(
        || {
            let row = x.to(DType::F32).reshape([&vec![1; weight.rank() - 1][..], &[x.dim(-1)]].concat());
            let y = (weight.to(DType::F32) * row).sum(&[-1]).to(dtype);
            y.reshape([&x.dims()[..x.rank() - 1], y.dims()].concat())
        },
        |mut products| products.remove(0),
    )
}

fn product(x: &Value, weight: &Value, dtype: DType) -> Value {
    let rows: String = ('a'..'i').take(x.rank().saturating_sub(1)).collect();
    let out: String = ('o'..'y').take(weight.rank().saturating_sub(1)).collect();
    x.builder().einsum(&format!("{rows}z,{out}z->{rows}{out}"), x, weight, dtype)
}

/// Applies a linear layer with the parameters at `p`: `weight [out, in]` and, if `bias` is set, `bias [out]`. `axes`
/// are the logical axes of the input and of the output.
pub fn linear(p: &Params, x: &Value, out: usize, bias: bool, axes: [Axis; 2]) -> Value {
    project(p, x, &[out], bias, &[axes[1]], axes[0])
}

/// Applies a linear layer with several output dimensions. The checkpoint stores `weight` as `[product(out), in]`.
pub fn project(p: &Params, x: &Value, out: &[usize], bias: bool, out_axes: &[Axis], in_axis: Axis) -> Value {
    let _scope = p.scope();
    let weight = p.weight(&["weight"], &[out, &[x.dim(-1)]].concat(), &[out_axes, &[in_axis]].concat());
    let bias = bias.then(|| p.get_as("bias", &[out.iter().product()], out, out_axes, Init::normal(0.02)));
    let lora = LoraMatrices::new(p, &[], x.dim(-1), out, out_axes, in_axis);
    affine_with_lora(p, x, &weight, bias.as_ref(), lora.as_ref(), out_axes)
}

/// Multiplies `x [rows…, in]` by a weight `[out…, in]` and adds a bias `[out…]`. Returns `[rows…, out…]` in the element
/// type of `x`.
pub fn affine(p: &Params, x: &Value, weight: &Weight, bias: Option<&Value>, out_axes: &[Axis]) -> Value {
    affine_with_lora(p, x, weight, bias, None, out_axes)
}

/// Same as [`affine`], with LoRAs applied.
pub(super) fn affine_with_lora(
    p: &Params,
    x: &Value,
    weight: &Weight,
    bias: Option<&Value>,
    lora: Option<&LoraMatrices>,
    out_axes: &[Axis],
) -> Value {
    // XLA fuses only a 1D bias into a dot's epilogue, so flatten the output, unless an inner output axis is sharded.
    let whole = out_axes[1..].iter().all(|&axis| p.layout().parts(&p.activation("weight"), axis) == 1);
    let folded = match (lora, weight) {
        (Some(lora), Weight::Plain(weight)) => lora.folded(p, x, weight).map(Weight::Plain),
        _ => None,
    };
    let added = lora.filter(|_| folded.is_none()).map(|lora| lora.values(p, x));
    let weight = folded.as_ref().unwrap_or(weight);
    let Some(bias) = bias.filter(|_| p.lowering().fuse_epilogues && whole) else {
        return map(p, x, weight, added.as_ref(), bias);
    };
    let rows = &x.dims()[..x.rank() - 1];
    let flat = added.map(|added| added.reshape([rows, &[bias.ty().elements()]].concat()));
    let y = map(p, x, &weight.flat(), flat.as_ref(), Some(&bias.reshape(vec![bias.ty().elements()])));
    y.reshape([rows, bias.dims()].concat())
}

/// Returns the product of `x` and the weight, plus `added` and the bias.
fn map(p: &Params, x: &Value, weight: &Weight, added: Option<&Value>, bias: Option<&Value>) -> Value {
    let plus = |y: Value, term: Option<&Value>| match term {
        Some(term) => y + term,
        None => y,
    };
    match weight {
        // In this order, XLA's CUDA compiler initializes the accumulators of the matrix product with `added`.
        Weight::Plain(weight) => plus(plus(linear_nd(p, x, weight), added), bias),
        Weight::Scaled(weight, channels) if has_wide_activations(p, x) => {
            let y = linear_nd(p, &p.rotated(x).1, &weight.to(x.dtype()));
            plus(quantized::unscaled(&y, None, channels, bias).to(x.dtype()), added)
        }
        Weight::Scaled(weight, channels) => {
            let (narrow, rows) = p.quantized_rows(x, weight.dtype());
            let is_integer = weight.dtype() == DType::I8 && p.lowering().integer_sums;
            // FP8 sums are at most 448² times the input width, well within the range of bf16; I8 sums are at most 127²
            // times the input width, within the range of i32.
            let y = linear_into(p, &narrow, weight, if is_integer { DType::I32 } else { x.dtype() });
            plus(quantized::unscaled(&y, Some(&rows), channels, bias).to(x.dtype()), added)
        }
    }
}

/// Returns whether the activations that are multiplied with a quantized weight keep the element type of the run.
fn has_wide_activations(p: &Params, x: &Value) -> bool {
    let rows: usize = x.dims()[..x.rank() - 1].iter().product();
    match p.quantization {
        Quantization::Int8 { activations, .. } => !activations || rows < p.lowering().min_integer_rows,
        _ => false,
    }
}

/// Returns `x · sigmoid(x)`, computed in f32 and returned in the element type of `x`.
pub fn silu(x: &Value) -> Value {
    let f = x.to(ltx2_stablehlo::DType::F32);
    (&f * f.logistic()).to(x.dtype())
}

/// Applies the tanh approximation of GELU, computed in f32 and returned in the element type of `x`.
pub fn gelu_tanh(x: &Value) -> Value {
    let f = x.to(DType::F32);
    let inner = (&f + &f * &f * &f * 0.044715) * SQRT_2_OVER_PI;
    (&f * 0.5 * (inner.tanh() + 1.0)).to(x.dtype())
}

/// Applies [`gelu_tanh`] to the result of a linear layer, in a form that compilers can fuse with the matmul.
pub fn gelu_tanh_of_product(p: &Params, x: &Value) -> Value {
    // XLA fuses exactly this form into the epilogue of the dot, applied to the f32 accumulators of the dot. XLA does
    // not fuse it if the number of rows must be padded to a multiple of 8 or the accumulators must be scaled first.
    let rows: usize = x.dims()[..x.rank() - 1].iter().product();
    if !p.lowering().fuse_epilogues || p.is_quantized() || x.dtype() != DType::BF16 || !rows.is_multiple_of(8) {
        return gelu_tanh(x);
    }
    x * ((((x + x * (x * x) * 0.044715) * SQRT_2_OVER_PI).tanh() + 1.0) * 0.5)
}

const SQRT_2_OVER_PI: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;

/// Applies the exact GELU (error function), computed in f32 and returned in the element type of `x`.
pub fn gelu(x: &Value) -> Value {
    let f = x.to(ltx2_stablehlo::DType::F32);
    (&f * 0.5 * ((&f * std::f64::consts::FRAC_1_SQRT_2).erf() + 1.0)).to(x.dtype())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Build;
    use ltx2_stablehlo::Type;

    /// Parity with the reference is measured in f32, so f32 matmuls must not use a lower precision.
    #[test]
    fn f32_matmuls_use_highest_precision() {
        for (dtype, precision) in [(DType::F32, "HIGHEST"), (DType::BF16, "DEFAULT")] {
            let p = Params::new("product", "transformer", &Build::new(dtype));
            let x = p.builder().argument("x", Type::new(dtype, [2, 3, 8]));
            let y = linear(&p.pp("proj"), &x, 4, true, [Axis::Replicated, Axis::Embed]);
            let text = p.builder().finish(&[("y", &y)]).expect("builds").text;
            assert!(text.contains(&format!("precision = [{precision}, {precision}]")), "{dtype}: {text}");
        }
    }
}
