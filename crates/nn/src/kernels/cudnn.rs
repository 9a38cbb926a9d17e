//! Fused cuDNN attention, as a custom call that XLA's CUDA plugin implements. The call operates on local shards,
//! because the SPMD partitioner does not split it.

use serde::Serialize;

use ltx2_stablehlo::{CustomCall, DType, Type, Value};

/// Largest head dimension that cuDNN supports on Hopper.
const WIDEST: usize = 256;

/// Lower bound of the bias in [`partial`], where all keys of a query may be masked. With the full mask value, the
/// rounding error of a score would exceed the range of the exponential. Even with this bound, a fully masked subset has
/// no weight compared with unmasked keys.
const LEAST_BIAS: f64 = -32768.0;

/// Returns why cuDNN does not support these operands, or `None` if it does.
pub(super) fn unsupported_reason(q: &Value, k: &Value, bias: Option<&Value>) -> Option<String> {
    let (dtype, dim) = (q.dtype(), q.dim(3));
    if ![DType::BF16, DType::F16].contains(&dtype) {
        return Some(format!("element type {}", dtype.name()));
    }
    if !dim.is_multiple_of(8) || dim > WIDEST {
        return Some(format!("head dimension {dim}, which must be a multiple of 8 and at most {WIDEST}"));
    }
    if k.dtype() != dtype {
        return Some(format!("{} queries with {} keys (the element types must match)", dtype.name(), k.dtype().name()));
    }
    // The kernel reads the bias of each query in vectors of 8 elements.
    bias.filter(|b| !b.dim(3).is_multiple_of(8))
        .map(|b| format!("a mask whose key count, {}, is not a multiple of 8", b.dim(3)))
}

/// Returns why cuDNN does not support these operands of [`partial`], or `None` if it does. In addition to the limits of
/// [`unsupported_reason`], the number of queries must be even if there is a mask.
pub(super) fn partial_unsupported_reason(q: &Value, k: &Value, bias: Option<&Value>) -> Option<String> {
    let odd = || bias.filter(|_| !q.dim(1).is_multiple_of(2));
    unsupported_reason(q, k, bias)
        .or_else(|| odd().map(|_| format!("partial attention with a mask whose query count, {}, is odd", q.dim(1))))
}

/// Computes attention of queries `q [b, q, h, d]` over keys `k` and values `v`, both `[b, k, kv, d]`, with an additive
/// bias `[b or 1, 1, q or 1, k]`. Returns `[b, q, h, d]`.
pub(super) fn attention(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64) -> Value {
    let results = call(q, k, v, bias, scale, &[]);
    results[0].transpose(&[0, 2, 1, 3])
}

/// Computes attention over a subset of the keys. Returns the normalized values `[b, q, h, d]` and, for each query, the
/// f32 log-sum-exp `[b, q, h, 1]` of its scaled and biased scores. This is the training variant of the kernel, whose
/// backward pass needs the log-sum-exp.
pub(super) fn partial(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64) -> [Value; 2] {
    let bias = bias.map(|bias| bias.maximum(&bias.like(LEAST_BIAS)));
    let sums = Type::new(DType::F32, [q.dim(0), q.dim(2), q.dim(1)]);
    let results = call(q, k, v, bias.as_ref(), scale, &[sums]);
    [results[0].transpose(&[0, 2, 1, 3]), results[1].transpose(&[0, 2, 1]).unsqueeze(3)]
}

/// Calls the kernel. Returns the attended values `[b, h, q, d]`, then results of the types `more`, then a workspace.
fn call(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64, more: &[Type]) -> Vec<Value> {
    let b = q.builder();
    let [rows, queries, heads, dim] = [0, 1, 2, 3].map(|axis| q.dim(axis));
    let scores = [rows, heads, queries, k.dim(1)];
    let bias = bias.map(|bias| bias.to(q.dtype()).broadcast_to(&[bias.dim(0), 1, queries, k.dim(1)]));
    let config = CudnnBackendConfig::new(scores, scale);
    let natural = |rank: usize| (0..rank).rev().collect::<Vec<_>>();
    let operands: Vec<&Value> = [q, k, v].into_iter().chain(bias.as_ref()).collect();
    // Logical shape [b, h, q, d], laid out in memory like the queries.
    let values = (Type::new(q.dtype(), [rows, heads, queries, dim]), vec![3, 1, 2, 0]);
    // The plugin sets the actual size of the workspace.
    let workspace = Type::new(DType::U8, [0]);
    let others = more.iter().cloned().chain([workspace]).map(|ty| (ty.clone(), natural(ty.rank())));
    let (results, result_layouts): (Vec<Type>, _) = [values].into_iter().chain(others).unzip();
    let call = CustomCall {
        target: if bias.is_some() { "__cudnn$fmhaScaleBiasSoftmax" } else { "__cudnn$fmhaSoftmax" }.into(),
        api_version: 2,
        backend_config: serde_json::to_string(&config).expect("the configuration serializes to JSON"),
        operand_layouts: vec![natural(4); operands.len()],
        result_layouts,
        ..CustomCall::default()
    };
    b.custom_call(&call, &operands, &results)
}

/// The fields of XLA's `GpuBackendConfig` that attention needs. 64-bit integers are strings, as in protobuf's JSON
/// format.
#[derive(Serialize)]
struct CudnnBackendConfig {
    operation_queue_id: &'static str,
    cudnn_fmha_backend_config: Fmha,
}

#[derive(Serialize)]
struct Fmha {
    algorithm: Algorithm,
    fmha_scale: f64,
    intermediate_tensor_shape: FmhaShape,
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

/// Shape of the score matrix, which is never materialized.
#[derive(Serialize)]
struct FmhaShape {
    element_type: &'static str,
    dimensions: [String; 4],
    tuple_shapes: [(); 0],
    layout: FmhaLayout,
    is_dynamic_dimension: [bool; 4],
}

#[derive(Serialize)]
struct FmhaLayout {
    minor_to_major: [&'static str; 4],
}

#[derive(Serialize)]
struct Dot {
    lhs_contracting_dimensions: [&'static str; 1],
    rhs_contracting_dimensions: [&'static str; 1],
    lhs_batch_dimensions: [&'static str; 2],
    rhs_batch_dimensions: [&'static str; 2],
}

impl CudnnBackendConfig {
    /// Creates the configuration for score matrices of shape `[b, h, q, k]`.
    fn new(scores: [usize; 4], scale: f64) -> Self {
        CudnnBackendConfig {
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
                intermediate_tensor_shape: FmhaShape {
                    element_type: "BF16",
                    dimensions: scores.map(|n| n.to_string()),
                    tuple_shapes: [],
                    layout: FmhaLayout { minor_to_major: ["3", "2", "1", "0"] },
                    is_dynamic_dimension: [false; 4],
                },
                is_flash_attention: true,
                mask_type: "NO_MASK",
                // bmm1: queries [b, q, h, d] with keys [b, k, h, d]; bmm2: weights [b, h, q, k] with values [b, k, h,
                // d].
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
