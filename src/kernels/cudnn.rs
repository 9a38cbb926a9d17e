//! Fused attention of cuDNN, as a custom call that XLA's CUDA plugin knows. A device's own operation: no partitioner
//! splits it.

use serde::Serialize;

use crate::hlo::{CustomCall, DType, Type, Value};

/// Widest head that cuDNN takes on Hopper.
const WIDEST: usize = 256;

/// Least bias of a part of the keys. A part may hold nothing but hidden keys for some query: with a bias as low as theirs
/// its scores differ from their largest by rounding alone, yet by more than an exponential can hold. A part of this bias
/// vanishes beside any other all the same.
const LEAST_BIAS: f64 = -32768.0;

/// Reason why cuDNN cannot take these operands, if there is one.
pub(super) fn unsupported_reason(q: &Value, k: &Value, bias: Option<&Value>) -> Option<String> {
    let (dtype, dim) = (q.dtype(), q.dim(3));
    if ![DType::BF16, DType::F16].contains(&dtype) {
        return Some(format!("{} elements", dtype.name()));
    }
    if !dim.is_multiple_of(8) || dim > WIDEST {
        return Some(format!("heads {dim} wide, only multiples of 8 up to {WIDEST}"));
    }
    if k.dtype() != dtype {
        return Some(format!("{} queries with {} keys", dtype.name(), k.dtype().name()));
    }
    // The kernel reads a bias in rows of vectors.
    bias.filter(|b| !b.dim(3).is_multiple_of(8)).map(|b| format!("a mask of {} keys, only multiples of 8", b.dim(3)))
}

/// Reason why it cannot attend to a part of the keys and return the sums, if there is one.
pub(super) fn partial_unsupported_reason(q: &Value, k: &Value, bias: Option<&Value>) -> Option<String> {
    let odd = || bias.filter(|_| !q.dim(1).is_multiple_of(2));
    unsupported_reason(q, k, bias)
        .or_else(|| odd().map(|_| format!("a mask of {} queries, only even numbers beside the sums", q.dim(1))))
}

/// Attention of `q [b, q, h, d]` with `k`, `v` `[b, k, kv, d]` and a bias `[b or 1, 1, q or 1, k]`; the result is
/// `[b, q, h, d]`.
pub(super) fn attention(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64) -> Value {
    let results = call(q, k, v, bias, scale, &[]);
    results[0].transpose(&[0, 2, 1, 3])
}

/// Attention over a part of the keys: the attended values `[b, q, h, d]`, and the natural logarithm of the sum of the
/// exponentials of each query's scaled and biased scores, `[b, q, h, 1]`, f32. It is the kernel's form for training, whose
/// backward pass reads those sums.
pub(super) fn partial(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64) -> [Value; 2] {
    let bias = bias.map(|bias| bias.maximum(&bias.like(LEAST_BIAS)));
    let sums = Type::new(DType::F32, [q.dim(0), q.dim(2), q.dim(1)]);
    let results = call(q, k, v, bias.as_ref(), scale, &[sums]);
    [results[0].transpose(&[0, 2, 1, 3]), results[1].transpose(&[0, 2, 1]).unsqueeze(3)]
}

/// The kernel's call; its results are the attended values `[b, h, q, d]`, `more`, and a workspace.
fn call(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64, more: &[Type]) -> Vec<Value> {
    let b = q.builder();
    let [rows, queries, heads, dim] = [0, 1, 2, 3].map(|axis| q.dim(axis));
    let scores = [rows, heads, queries, k.dim(1)];
    let bias = bias.map(|bias| bias.to(q.dtype()).broadcast_to(&[bias.dim(0), 1, queries, k.dim(1)]));
    let config = BackendConfig::new(scores, scale);
    let natural = |rank: usize| (0..rank).rev().collect::<Vec<_>>();
    let operands: Vec<&Value> = [q, k, v].into_iter().chain(bias.as_ref()).collect();
    // Named [b, h, q, d], stored as the queries are.
    let values = (Type::new(q.dtype(), [rows, heads, queries, dim]), vec![3, 1, 2, 0]);
    // The plugin writes the workspace's size.
    let workspace = Type::new(DType::U8, [0]);
    let others = more.iter().cloned().chain([workspace]).map(|ty| (ty.clone(), natural(ty.rank())));
    let (results, result_layouts): (Vec<Type>, _) = [values].into_iter().chain(others).unzip();
    let call = CustomCall {
        target: if bias.is_some() { "__cudnn$fmhaScaleBiasSoftmax" } else { "__cudnn$fmhaSoftmax" }.into(),
        api_version: 2,
        backend_config: serde_json::to_string(&config).expect("structs of texts and numbers have a JSON form"),
        operand_layouts: vec![natural(4); operands.len()],
        result_layouts,
        ..CustomCall::default()
    };
    b.custom_call(&call, &operands, &results)
}

/// The plugin's `GpuBackendConfig`, as much of it as attention needs. 64-bit numbers are text, as protobuf's JSON has them.
#[derive(Serialize)]
struct BackendConfig {
    operation_queue_id: &'static str,
    cudnn_fmha_backend_config: Fmha,
}

#[derive(Serialize)]
struct Fmha {
    algorithm: Algorithm,
    fmha_scale: f64,
    intermediate_tensor_shape: Shape,
    is_flash_attention: bool,
    mask_type: &'static str,
    bmm1_dot_dimension_numbers: Dot,
    bmm2_dot_dimension_numbers: Dot,
    dropout_rate: f64,
    seed: u32,
    sliding_window_length: u32,
    max_seg_per_batch: u32,
    is_paged_attention: bool,
}

#[derive(Serialize)]
struct Algorithm {
    algo_id: &'static str,
    math_type: &'static str,
    tuning_knobs: std::collections::BTreeMap<&'static str, &'static str>,
    is_cudnn_frontend: bool,
    workspace_size: &'static str,
}

/// The scores that never stand anywhere.
#[derive(Serialize)]
struct Shape {
    element_type: &'static str,
    dimensions: [String; 4],
    tuple_shapes: [(); 0],
    layout: Layout,
    is_dynamic_dimension: [bool; 4],
}

#[derive(Serialize)]
struct Layout {
    minor_to_major: [&'static str; 4],
}

#[derive(Serialize)]
struct Dot {
    lhs_contracting_dimensions: [&'static str; 1],
    rhs_contracting_dimensions: [&'static str; 1],
    lhs_batch_dimensions: [&'static str; 2],
    rhs_batch_dimensions: [&'static str; 2],
}

impl BackendConfig {
    /// For scores `[b, h, q, k]`.
    fn new(scores: [usize; 4], scale: f64) -> Self {
        BackendConfig {
            operation_queue_id: "0",
            cudnn_fmha_backend_config: Fmha {
                algorithm: Algorithm {
                    algo_id: "0",
                    math_type: "TENSOR_OP_MATH",
                    tuning_knobs: [("17", "1"), ("24", "0")].into(),
                    is_cudnn_frontend: true,
                    workspace_size: "0",
                },
                fmha_scale: scale,
                intermediate_tensor_shape: Shape {
                    element_type: "BF16",
                    dimensions: scores.map(|n| n.to_string()),
                    tuple_shapes: [],
                    layout: Layout { minor_to_major: ["3", "2", "1", "0"] },
                    is_dynamic_dimension: [false; 4],
                },
                is_flash_attention: true,
                mask_type: "NO_MASK",
                // Queries [b, q, h, d] with keys [b, k, h, d]; weights [b, h, q, k] with values [b, k, h, d].
                bmm1_dot_dimension_numbers: Dot {
                    lhs_contracting_dimensions: ["3"],
                    rhs_contracting_dimensions: ["3"],
                    lhs_batch_dimensions: ["0", "2"],
                    rhs_batch_dimensions: ["0", "2"],
                },
                bmm2_dot_dimension_numbers: Dot {
                    lhs_contracting_dimensions: ["3"],
                    rhs_contracting_dimensions: ["1"],
                    lhs_batch_dimensions: ["0", "1"],
                    rhs_batch_dimensions: ["0", "2"],
                },
                dropout_rate: 0.0,
                seed: 42,
                sliding_window_length: 0,
                max_seg_per_batch: 1,
                is_paged_attention: false,
            },
        }
    }
}
