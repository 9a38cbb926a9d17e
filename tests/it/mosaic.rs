//! The TPU attention kernel, run by an interpreter of its text and compared with the definition of attention. Needs no
//! TPU and no plugin. `jax.rs` tests the interpreter on a kernel written by others.

mod body;
mod grid;
mod jax;
mod program;
mod text;
mod values;

use crate::support::{full, needs};
use ltx2::hlo::DType;
use ltx2::kernels::{Kernel, PartialAttention, Tpu, attention};
use program::{Case, distance};

const V5P: &str = "TPU v5";

/// `[rows, queries, keys, heads, key heads, head dimension]`.
type Shape = [usize; 6];

// Lengths of the published model, long ones sharded over eight devices (6144 and 15360 video tokens, 126 audio tokens,
// 1024 text tokens; 1536 and 3840 in a first stage), and lengths that no block size divides.
const SHAPES: &[Shape] = &[
    [1, 768, 768, 1, 1, 128],
    [1, 1920, 1920, 1, 1, 128],
    [1, 480, 480, 2, 2, 128],
    [1, 192, 1536, 2, 2, 128],
    [2, 192, 192, 2, 2, 128],
    [1, 384, 3840, 1, 1, 128],
    [1, 768, 1024, 1, 1, 128],
    [2, 126, 1024, 2, 2, 64],
    [2, 126, 126, 4, 4, 64],
    [1, 768, 126, 2, 2, 64],
    [1, 126, 768, 2, 2, 64],
    [1, 126, 1920, 2, 2, 64],
    [1, 1920, 126, 2, 2, 64],
    [1, 1024, 1024, 2, 1, 128],
    [1, 300, 200, 4, 2, 128],
    [1, 128, 128, 6, 2, 128],
    [1, 256, 512, 2, 1, 256],
    [2, 77, 77, 2, 2, 256],
    [1, 1, 1, 1, 1, 128],
    [1, 1, 129, 2, 2, 64],
    [1, 7, 5, 2, 2, 64],
    [1, 17, 127, 1, 1, 128],
    [1, 15, 128, 1, 1, 128],
    [1, 16, 130, 1, 1, 128],
    [1, 33, 257, 4, 4, 32],
    [1, 100, 1000, 4, 4, 32],
    [2, 63, 65, 1, 1, 128],
    [3, 31, 97, 2, 2, 64],
    [1, 255, 383, 1, 1, 128],
    [1, 257, 385, 1, 1, 128],
    [1, 511, 513, 2, 2, 64],
    [1, 999, 1001, 1, 1, 128],
    [1, 1025, 64, 2, 2, 64],
    [1, 64, 1025, 2, 2, 64],
    [2, 640, 640, 1, 1, 128],
    [1, 127, 2049, 1, 1, 128],
    [1, 2049, 127, 1, 1, 128],
    [1, 333, 777, 3, 3, 128],
    [1, 121, 121, 8, 8, 64],
    [1, 250, 1024, 2, 2, 128],
    [4, 8, 8, 2, 2, 64],
    [1, 1000, 1000, 2, 2, 64],
];

fn case(dims: Shape, dtype: DType, bias: Option<usize>) -> Case {
    let [rows, queries, keys, heads, kv_heads, dim] = dims;
    Case { rows, queries, keys, heads, kv_heads, dim, dtype, bias }
}

/// A third of the shapes has no bias, a third a bias of one row, and a third a bias for each batch row.
fn cases(dtype: DType) -> impl Iterator<Item = (usize, Case)> {
    let of = move |(n, &dims): (usize, &Shape)| (n, case(dims, dtype, [None, Some(1), Some(dims[0])][n % 3]));
    SHAPES.iter().enumerate().map(of)
}

/// Number of multiplications above which a case takes half a second; larger cases run only in the full test.
const LARGE: usize = 10_000_000;

/// Relative tolerance between the kernel and the definition.
fn allowed(dtype: DType) -> f64 {
    if dtype == DType::F32 { 1e-6 } else { 4e-3 }
}

/// The kernel for a chip with all of its memory, and with so little that it needs many steps.
fn chips() -> [Tpu; 2] {
    [Tpu::from_kind(V5P), Tpu::from_kind(V5P).with_memory(1 << 20)]
}

fn whole_agrees(case: &Case, tpu: Tpu) -> f64 {
    let found = case.run(|q, k, v, bias| vec![attention(Kernel::Mosaic(tpu), q, k, v, bias, case.scale())]).remove(0);
    let (values, _, sums) = case.defined();
    let wanted: Vec<f64> = values.iter().enumerate().map(|(n, v)| v / sums[n / case.dim]).collect();
    distance(&found, &wanted)
}

#[needs(nothing)]
fn attention_kernel_matches_the_definition_of_attention() {
    let mut worst = 0f64;
    for dtype in [DType::F32, DType::BF16] {
        for (n, case) in cases(dtype) {
            if case.products() > LARGE && !full() {
                continue;
            }
            for (m, tpu) in chips().into_iter().enumerate() {
                // Each shape on one chip and in one type, in turn; in the full test on both, in both.
                let turn = [0, 3, 1, 2][n % 4];
                if turn != 2 * m + usize::from(dtype == DType::BF16) && !full() {
                    continue;
                }
                let error = whole_agrees(&case, tpu);
                worst = worst.max(error / allowed(dtype));
                assert!(error <= allowed(dtype), "{case:?} on {tpu:?}: {error:e}");
            }
        }
    }
    eprintln!("{} shapes, the worst at {worst:.2} of what is allowed", SHAPES.len());
}

#[needs(nothing)]
fn partial_attention_kernel_matches_the_definition() {
    for dtype in [DType::F32, DType::BF16] {
        // Every second shape, with both head dimensions.
        for (n, case) in cases(dtype).step_by(2) {
            let is_chosen = (n / 2 % 2 == 0) == (dtype == DType::F32) && case.products() <= LARGE;
            if !is_chosen && !full() {
                continue;
            }
            let tpu = chips()[1];
            let parts = case.run(|q, k, v, bias| {
                PartialAttention::compute(Kernel::Mosaic(tpu), q, k, v, bias, case.scale()).into_values().to_vec()
            });
            let (values, largest, sums) = case.defined();
            let error = distance(&parts[0], &values).max(distance(&parts[2], &sums));
            assert!(error <= allowed(dtype), "{case:?}: {error:e}");
            // Scores are sums of products, rounded once.
            assert!(distance(&parts[1], &largest) <= 1e-6, "{case:?}: largest scores");
        }
    }
}

#[needs(nothing)]
fn extreme_scores_give_finite_results() {
    let tpu = chips()[1];
    for scale in [1e-6, 30.0, 1e4] {
        let case =
            Case { rows: 1, queries: 40, keys: 300, heads: 2, kv_heads: 2, dim: 64, dtype: DType::F32, bias: Some(1) };
        let found = case.run(|q, k, v, bias| vec![attention(Kernel::Mosaic(tpu), q, k, v, bias, scale)]).remove(0);
        assert!(found.iter().all(|x| x.is_finite()), "scale {scale}");
    }
}

#[needs(nothing)]
fn unsupported_shapes_fall_back_to_xla() {
    let refused = [
        // A head dimension that does not fit a register; three heads of 64; grouped queries inside a register.
        case([1, 8, 8, 1, 1, 96], DType::BF16, None),
        case([1, 8, 8, 3, 3, 64], DType::BF16, None),
        case([1, 8, 8, 4, 2, 64], DType::BF16, None),
        case([1, 8, 8, 2, 2, 512], DType::BF16, None),
        case([1, 8, 8, 2, 2, 128], DType::F16, None),
    ];
    for case in refused {
        let kernel = Kernel::Mosaic(Tpu::from_kind(V5P));
        let text = case.program(|q, k, v, bias| vec![attention(kernel, q, k, v, bias, 1.0)]).text;
        assert!(!text.contains("tpu_custom_call"), "{case:?}");
    }
}

#[needs(nothing)]
fn interpreter_rejects_invalid_kernels() {
    let case = case([1, 32, 200, 2, 2, 64], DType::BF16, None);
    let kernel = Kernel::Mosaic(Tpu::from_kind(V5P).with_memory(1 << 18));
    let body = program::body(&case.program(|q, k, v, b| vec![attention(kernel, q, k, v, b, 1.0)]).text);
    let broken = [
        ("math.exp2", "math.log2", "unknown operation"),
        ("window_bounds = array<i64: 1, 128, 128>", "window_bounds = array<i64: 1, 120, 128>", "not aligned"),
        ("vector<128x128xbf16>", "vector<64x128xbf16>", "to [64, 128]"),
        ("[#tpu.dimension_semantics<parallel>, ", "[#tpu.dimension_semantics<arbitrary>, ", "in any order"),
    ];
    for (from, to, expected) in broken {
        assert!(body.contains(from), "{from} in\n{body}");
        let message = case.interpreted(&body.replacen(from, to, 1)).expect_err("an error");
        assert!(message.contains(expected), "{from} to {to}: {message}");
    }
}
