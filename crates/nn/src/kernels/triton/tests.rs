//! Tests of the kernels' MLIR text and of the operands that they support. Tests on GPUs check the kernels' results.

use super::*;
use crate::{Axis, Build, Layout, Lowering, Params, Quantization, RowProductForm, linear};
use ltx2_stablehlo::{Builder, DeviceMesh};

/// The slab of a block contains the windows of all its cells and lies within the local cells, including the halo.
#[test]
fn slabs_contain_their_windows_at_every_border() {
    let sizes = (3..40_usize)
        .flat_map(|n| (1..5_usize).flat_map(move |parts| [1_usize, 2, 3, 4, 7, 11].map(|w| (n, parts, w))));
    for ((length, parts, window), edge) in sizes.flat_map(|size| [4, neighborhood::LONGEST].map(|edge| (size, edge))) {
        let own = length.div_ceil(parts);
        let axis = GridAxis { length, own, reach: 0, window };
        let reach = if own == length { 0 } else { axis.needed_reach() };
        // The halo comes only from direct neighbors.
        if window > length || reach > own {
            continue;
        }
        let axis = GridAxis { reach, ..axis };
        let block = edge.min(own);
        let slab = axis.slab(edge);
        let [length, window, slab_cells, extended] = [length, window, slab, axis.extended()].map(|n| n as i64);
        let begin = |cell: i64, cells: i64| (cell - window / 2).max(0).min(length - cells);
        for (first, start) in (0..parts).flat_map(|part| (0..own.div_ceil(block)).map(move |n| (part * own, n * block)))
        {
            let (first, start) = (first as i64, start.min(own - block) as i64);
            let moved = |cell: i64| cell - first + reach as i64;
            let slab_at = moved(begin(start + first, slab_cells)).max(0).min(extended - slab_cells);
            for cell in (0..block as i64).map(|lane| first + start + lane).filter(|cell| *cell < length) {
                let from = moved(begin(cell, window)) - slab_at;
                let place = format!("{axis:?}: cell {cell} of the device from {first}, slab at {slab_at}");
                assert!(from >= 0 && from + window <= slab_cells, "{place}: window at {from}");
            }
        }
    }
}

#[test]
fn unsupported_operands_have_a_reason() {
    let b = Builder::new("windows");
    let axes = |rows: usize| [121, rows, 480].map(|n| GridAxis { length: n, own: n, reach: 0, window: 11 });
    let reason = |dtype: DType, rows: usize, dim: usize| {
        let q = b.argument("q", Type::new(dtype, [1, 121, rows, 480, 4, dim]));
        unsupported_reason(&q, axes(rows)).unwrap_or_default()
    };
    assert_eq!(reason(DType::BF16, 272, 64), "");
    assert_eq!(reason(DType::F32, 272, 64), "element type f32");
    assert_eq!(reason(DType::BF16, 272, 48), "head dimension 48, which must be one of [16, 32, 64, 128]");
    assert_eq!(
        reason(DType::BF16, 2720, 64),
        "frames of 2720 x 480 cells with 256 channels, which exceed 32-bit offsets"
    );
    // The first dimension of the launch grid, which counts blocks of queries.
    let long = [1 << 36, 16, 16].map(|n| GridAxis { length: n, own: n, reach: 0, window: 11 });
    let q = b.argument("q", Type::new(DType::BF16, [1, 1 << 36, 16, 16, 1, 16]));
    let reason = unsupported_reason(&q, long).expect("too many blocks");
    assert!(reason.ends_with(" blocks of queries (at most 2147483647)"), "{reason}");
}

#[test]
fn rotation_kernel_matches_snapshot() {
    let b = Builder::new("rotation");
    let argument = |name: &str, dims| b.argument(name, Type::new(DType::BF16, dims));
    let (x, matrix) = (argument("x", [3, 768]), argument("matrix", [256, 256]));
    insta::assert_snapshot!(RowRotation::new(&x, &matrix).expect("supported").text());
}

#[test]
fn rotation_supports_whole_groups_that_fit_in_registers() {
    let b = Builder::new("rotation");
    let is_supported = |dtype: DType, rows: usize, inputs: usize| {
        let [x, matrix] = [[rows, inputs], [256, 256]].map(|dims| b.argument("x", Type::new(dtype, dims)));
        RowRotation::new(&x, &matrix).is_some()
    };
    assert!(is_supported(DType::BF16, 1, 256) && is_supported(DType::F16, 6144, 3840));
    assert!(is_supported(DType::BF16, 126, 32768) && !is_supported(DType::BF16, 126, 33024));
    assert!(!is_supported(DType::F32, 126, 4096), "element type");
    assert!(!is_supported(DType::BF16, 126, 4000), "inputs");
    assert!(!is_supported(DType::BF16, 0, 4096), "no rows");
}

/// Returns the number of rotation kernels and of rotation matmuls of a linear layer.
fn rotations(build: Build, activations: bool) -> [usize; 2] {
    let quantization = Quantization::Int8 { activations, rotated: true };
    let p = Params::new("layer", "transformer", &Build { quantization, ..build });
    let x = p.input("x", Type::new(p.dtype(), [1, 24, 512]), &[Axis::CfgBatch, Axis::VideoSequence, Axis::Embed]);
    let axes = [Axis::Embed, Axis::Replicated];
    let y = p.each_layer_quantized(
        "blocks",
        1,
        |_| true,
        &[x],
        |p, _, x| vec![linear(&p.pp("to_out"), &x[0], 512, true, axes)],
    );
    let text = p.builder().finish(&[("y", &y[0])]).expect("builds").text;
    ["__gpu$xla.gpu.triton", "rotation/dot_general"].map(|part| text.matches(part).count())
}

#[test]
fn rotation_kernel_is_used_for_int8_activations_on_one_cuda_device() {
    let lowering = Lowering { integer_sums: true, rotates_by_kernel: true, ..Lowering::default() };
    let cuda = |dtype| Build { lowering, ..Build::new(dtype) };
    assert_eq!(rotations(cuda(DType::BF16), true), [1, 0]);
    assert_eq!(rotations(cuda(DType::BF16), false), [0, 1], "bf16 activations");
    assert_eq!(rotations(cuda(DType::F32), true), [0, 1], "unsupported element type");
    assert_eq!(rotations(Build::new(DType::BF16), true), [0, 1], "other platforms");
    let mesh = DeviceMesh::new(&[("context", 2)]);
    let layout = Layout::new(mesh, vec![], vec![], vec![], crate::ContextParallelPolicy::default()).expect("valid");
    assert_eq!(rotations(Build { layout, ..cuda(DType::BF16) }, true), [0, 1], "several devices");
}

#[test]
fn row_product_kernels_match_snapshots() {
    let lowering = Lowering { row_products: RowProductForm::Kernel, ..Lowering::default() };
    let p = Params::new("rows", "text_encoder", &Build { lowering, ..Build::new(DType::BF16) }).generating();
    let argument = |name: &str, dims: &[usize]| p.builder().argument(name, Type::new(DType::BF16, dims));
    let (x, q, kv) = (argument("x", &[1, 1, 240]), argument("q", &[2, 8, 240]), argument("kv", &[2, 8, 240]));
    let products = |x, weights: &[(_, usize)], is_gated| {
        let weights = weights.iter().map(|&(weight, parts)| RowWeight { weight, parts }).collect();
        RowProducts { x, weights, dtype: DType::BF16, is_gated }
    };
    let several = products(&x, &[(&q, 1), (&kv, 2)], false);
    insta::assert_snapshot!("row_products_of_several_weights", several.text());
    let dims =
        |products: RowProducts| products.run(&p).map(|y| y.iter().map(|y| y.dims().to_vec()).collect::<Vec<_>>());
    assert_eq!(dims(several), Some(vec![vec![1, 1, 2, 8], vec![1, 1, 8], vec![1, 1, 8]]));
    // Several rounds of whole tiles.
    let (long, wide) = (argument("long", &[1, 8192]), argument("wide", &[2, 6, 8192]));
    insta::assert_snapshot!("gated_row_product", products(&long, &[(&wide, 2)], true).text());
    assert_eq!(dims(products(&long, &[(&wide, 2)], true)), Some(vec![vec![1, 6]]));
    let (rows, three) = (argument("rows", &[2, 240]), argument("three", &[3, 8, 240]));
    let exact = x.to(DType::F32);
    let (full, rest) = (q.to(DType::F32), argument("rest", &[8, 320]));
    for unsupported in [
        products(&rows, &[(&q, 1)], false),
        products(&x, &[(&three, 3)], true),
        products(&x, &[(&q, 1), (&kv, 2)], true),
        products(&x, &[(&rest, 1)], false),
        products(&exact, &[(&full, 1)], false),
    ] {
        assert!(!unsupported.is_supported(), "{} and {}", unsupported.x.ty(), unsupported.weights[0].weight.ty());
    }
}

#[test]
fn row_norm_and_attention_kernels_match_snapshots() {
    let b = Builder::new("rows");
    let argument = |name: &str, dims: &[usize]| b.argument(name, Type::new(DType::BF16, dims));
    let scale = |name: &str, n: usize| RowScale { weight: argument(name, &[n]), offset: 1.0 };
    let (x, h) = (argument("x", &[1, 1, 640]), argument("h", &[1, 1, 640]));
    let norm = RowNorm { x: &x, eps: 1e-6, scale: scale("w", 640), residual: Some(&h), next: Some(scale("next", 640)) };
    insta::assert_snapshot!("row_norm", norm.text());
    let (q, k) = (argument("q", &[1, 1, 4, 64]), argument("k", &[1, 1, 2, 64]));
    let table = b.argument("table", Type::new(DType::F32, [1, 1, 1, 32]));
    let (q_scale, k_scale) = (scale("q_scale", 64), scale("k_scale", 64));
    let rope = RowRope { eps: 1e-6, q_scale, k_scale, cos: &table, sin: &table };
    let cache = argument("cache", &[1, 2, 192, 64]);
    let at = b.argument("at", Type::scalar(DType::I32));
    let bias = b.argument("bias", Type::new(DType::F32, [1, 192]));
    let (keys, values, bias) = (&cache, &cache, &bias);
    let attention = RowAttention { q: &q, k: &k, v: &k, keys, values, at: &at, bias, scale: 0.125, rope: Some(rope) };
    insta::assert_snapshot!("row_attention", attention.text());
    insta::assert_snapshot!("row_attention_sum", attention.sum_text());
}
