//! Chunked attention equals attention in one piece.

use crate::support::{self, cpu, needs, quick};
use ltx2::hlo::{Builder, CustomCall, DType, Precision, Program, Type};
use ltx2::kernels;
use ltx2::runtime::Engine;
use ltx2::tensor::Tensor;
use ndarray::{Array4, s};

/// Many heads, so that few bias rows, which are the same for all heads, give many scores.
const HEADS: usize = 16;

fn program(queries: usize, keys: usize) -> Program {
    let b = Builder::new("attention").with_precision(Precision::Highest);
    let argument = |name: &str, n: usize| b.argument(name, Type::new(DType::F32, [1, n, HEADS, 8]));
    let (q, k, v) = (argument("q", queries), argument("k", keys), argument("v", keys));
    let bias = b.argument("bias", Type::new(DType::F32, [1, 1, queries, keys]));
    let out = kernels::attention(kernels::Kernel::Plain, &q, &k, &v, Some(&bias), 0.35);
    b.finish(&[("out", &out)]).expect("builds")
}

#[needs(cpu)]
fn chunked_attention_matches_unchunked_attention() {
    let client = cpu(1);
    let engine = Engine::new(client, quick());
    // More scores than one chunk computes, and not a multiple of the chunk size.
    let n = 2101;
    let long = program(n, n);
    assert!(long.text.contains("stablehlo.while"), "the long program loops over chunks");
    let some = 37;
    let short = program(some, n);
    assert!(!short.text.contains("stablehlo.while"), "the short one does not");

    let values = |phase: f32| {
        Array4::from_shape_fn((1, n, HEADS, 8), |(_, t, h, d)| {
            ((t * 31 + h * 7 + d * 3) as f32 * 0.013 + phase).sin() * 2.0
        })
    };
    let (q, k, v) = (values(0.1), values(0.7), values(1.9));
    // A bias row for each query.
    let bias = Array4::from_shape_fn((1, 1, n, n), |(_, _, q, k)| ((q * 17 + k * 5) as f32 * 0.011).cos());
    let run = |program: &Program, q: Array4<f32>, bias: Array4<f32>| {
        let executable = engine.compile("attention", program).expect("compiles");
        let upload = |n, a: &Array4<f32>| engine.upload(&executable, n, &Tensor::from(a.clone())).expect("uploads");
        let given = [("q", &q), ("k", &k), ("v", &v), ("bias", &bias)];
        let buffers = given.map(|(name, values)| (name, upload(name, values)));
        let find = |name: &str| buffers.iter().find(|(n, _)| *n == name).map(|(_, b)| b);
        engine.run(&executable, find).expect("runs").tensor("out").expect("a result").to_f32()
    };
    let whole = run(&long, q.clone(), bias.clone());
    let (q, bias) = (q.slice(s![.., n - some.., .., ..]), bias.slice(s![.., .., n - some.., ..]));
    let last = run(&short, q.to_owned(), bias.to_owned());
    let rows = whole.slice(s![.., n - some.., .., ..]).to_owned();
    let distance = support::relative_l2(&Tensor::from(rows), &Tensor::from(last));
    assert!(distance <= 1e-6, "{distance:e}");
}

#[needs(cpu)]
fn plugin_parses_custom_calls() {
    let client = cpu(1);
    let b = Builder::new("custom");
    let x = b.argument("x", Type::new(DType::F32, [2, 3]));
    let call = CustomCall {
        target: "no_such_kernel".into(),
        api_version: 2,
        backend_config: "{\"scale\": \"0.5\"}".into(),
        operand_layouts: vec![vec![1, 0]],
        result_layouts: vec![vec![0, 1]],
        ..CustomCall::default()
    };
    let y = b.custom_call(&call, &[&x], &[Type::new(DType::F32, [2, 3])]);
    let program = b.finish(&[("y", &y[0])]).expect("builds");
    assert!(program.text.contains("backend_config = \"{\\22scale\\22: \\220.5\\22}\""), "{}", program.text);
    // Only the missing kernel is reported, so the text was parsed.
    let engine = Engine::new(client, quick());
    let error = engine.compile("custom", &program).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(error.contains("no_such_kernel"), "{error}");
}
