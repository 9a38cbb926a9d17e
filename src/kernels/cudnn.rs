//! Fused attention of cuDNN, as a custom call that XLA's CUDA plugin knows. A device's own operation: no partitioner
//! splits it.

use serde::Serialize;

use crate::hlo::{CustomCall, DType, Type, Value};

/// Widest head that cuDNN takes on Hopper.
const WIDEST: usize = 256;

/// Reason why cuDNN cannot take these operands, if there is one.
pub(super) fn unsupported_reason(q: &Value, k: &Value, bias: Option<&Value>) -> Option<String> {
    let (dtype, dim) = (q.dtype(), q.dim(3));
    if ![DType::BF16, DType::F16].contains(&dtype) {
        return Some(format!("elements are {}", dtype.name()));
    }
    if !dim.is_multiple_of(8) || dim > WIDEST {
        return Some(format!("heads are {dim} wide"));
    }
    if k.dtype() != dtype {
        return Some(format!("queries are {}, keys {}", dtype.name(), k.dtype().name()));
    }
    // The kernel reads a bias in rows of vectors.
    bias.filter(|b| !b.dim(3).is_multiple_of(8)).map(|b| format!("a bias of {} keys", b.dim(3)))
}

/// Attention of `q [b, q, h, d]` with `k`, `v` `[b, k, kv, d]` and a bias `[b or 1, 1, q or 1, k]`; the result is
/// `[b, q, h, d]`.
pub(super) fn attention(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64) -> Value {
    let b = q.builder();
    let [rows, queries, heads, dim] = [0, 1, 2, 3].map(|axis| q.dim(axis));
    let scores = [rows, heads, queries, k.dim(1)];
    let bias = bias.map(|bias| bias.to(q.dtype()).broadcast_to(&[bias.dim(0), 1, queries, k.dim(1)]));
    let config = BackendConfig::new(scores, scale);
    let natural = vec![3, 2, 1, 0];
    let operands: Vec<&Value> = [q, k, v].into_iter().chain(bias.as_ref()).collect();
    let call = CustomCall {
        target: if bias.is_some() { "__cudnn$fmhaScaleBiasSoftmax" } else { "__cudnn$fmhaSoftmax" }.into(),
        api_version: 2,
        backend_config: serde_json::to_string(&config).expect("structs of texts and numbers have a JSON form"),
        operand_layouts: vec![natural; operands.len()],
        // Named [b, h, q, d], stored as the queries are; then the workspace.
        result_layouts: vec![vec![3, 1, 2, 0], vec![0]],
        ..CustomCall::default()
    };
    let results = [Type::new(q.dtype(), [rows, heads, queries, dim]), Type::new(DType::U8, [0])];
    b.custom_call(&call, &operands, &results)[0].transpose(&[0, 2, 1, 3])
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
