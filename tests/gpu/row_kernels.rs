//! The kernels of text generation, which compute a single row: as close to f32 operations as the element type allows.

use ltx2::hlo::{DType, Value};
use ltx2::models::{Network, transformer};
use ltx2::nn::kernels::{RowAttention, RowNorm, RowRope, RowScale};
use ltx2::nn::rope::{Pairing, rotate};
use ltx2::nn::{
    Axis, Build, Init, Params, RoundingPoints, Weight, gelu_tanh, linear_into, rms, row_gated_gelu, row_products,
};
use ltx2::pipeline::plan::origin::Weights;
use ltx2::pipeline::programs::executor::{Executor, Inputs};
use ltx2::runtime::Engine;

use crate::support::{lowering_of, needs, quick, relative_l2};
use crate::windows::gpus;

/// Largest relative error of a bf16 result: half the distance of two neighboring numbers.
const BF16: f64 = 1.0 / 256.0;
/// Largest relative error of an f32 sum of a few thousand products, which is computed in another order.
const F32: f64 = 1e-5;

/// A result of a kernel and of f32 operations.
struct Pair {
    name: &'static str,
    kernel: Value,
    plain: Value,
    error: f64,
}

fn pair(name: &'static str, kernel: &Value, plain: &Value, error: f64) -> Pair {
    Pair { name, kernel: kernel.to(DType::F32), plain: plain.to(DType::F32), error }
}

fn drawn(p: &Params, name: &str, dims: &[usize], std: f32) -> Value {
    p.get(name, dims, &vec![Axis::Replicated; dims.len()], Init::normal(std))
}

/// Runs a program with random parameters and compares its results. The first argument of `pairs` generates text, the
/// second computes in f32. The program calls `kernels` kernels.
fn compare(kernels: usize, pairs: impl FnOnce(&Params, &Params) -> Vec<Pair>) {
    let plain = Params::new(
        "row_kernels",
        transformer::COMPONENT,
        &Build { lowering: lowering_of("cuda"), ..Build::new(DType::BF16) },
    );
    let p = plain.generating();
    let pairs = pairs(&p, &plain);
    let output =
        |name: String, value: &Value| p.output(&name, value, &vec![Axis::Replicated; value.rank()], value.dims());
    let both = |pair: &Pair| {
        [("kernel", &pair.kernel), ("plain", &pair.plain)]
            .map(|(form, value)| output(format!("{} {form}", pair.name), value))
    };
    let network = Network::finish(&p, pairs.iter().flat_map(both).collect()).expect("builds");
    assert_eq!(network.program.text.matches("__gpu$xla.gpu.triton").count(), kernels);
    let mut executor = Executor::new(Engine::new(gpus(), quick()), Weights::Random(7));
    let program = executor.prepare("row_kernels", &network).expect("compiles");
    let inputs = executor.give_all(&program, Inputs::default(), []).expect("uploads");
    let results = executor.run(&program, &inputs).expect("runs");
    for Pair { name, error, .. } in pairs {
        let [kernel, plain] =
            ["kernel", "plain"].map(|form| results.tensor(&format!("{name} {form}")).expect("a result"));
        let apart = relative_l2(&kernel, &plain);
        eprintln!("{name}: relative error {apart:e}");
        assert!(apart <= error, "{name}: {apart} of {error}");
    }
}

/// Multiplies in f32.
fn product(plain: &Params, x: &Value, weight: &Value) -> Value {
    linear_into(plain, x, weight, DType::F32)
}

#[needs(gpu)]
fn row_products_equal_a_dot() {
    compare(4, |p, plain| {
        let x = drawn(p, "x", &[1, 1, 3840], 1.0);
        let table = drawn(p, "table", &[262_208, 3840], 0.016);
        let odd = drawn(p, "odd", &[4098, 3840], 0.016);
        let q = drawn(p, "q", &[16, 256, 3840], 0.016);
        let kv = drawn(p, "kv", &[2, 8, 256, 3840], 0.016);
        let mlp = drawn(p, "mlp", &[2, 15360, 3840], 0.016);
        let inner = drawn(p, "inner", &[1, 1, 15360], 1.0);
        let down = drawn(p, "down", &[3840, 15360], 0.008);
        let all = row_products(p, &x, &Weight::Plain(q.clone()), &Weight::Plain(kv.clone())).expect("supported");
        let kv = product(plain, &x, &kv);
        let gated = row_gated_gelu(p, &x, &Weight::Plain(mlp.clone())).expect("supported");
        let both = product(plain, &x, &mlp);
        let expected = gelu_tanh(&both.at(2, 0)) * both.at(2, 1);
        vec![
            pair("logits", &linear_into(p, &x, &table, DType::F32), &product(plain, &x, &table), F32),
            // Not a multiple of the kernel's rows: computed as a sum.
            pair("odd", &linear_into(p, &x, &odd, DType::F32), &product(plain, &x, &odd), F32),
            pair("queries", &all[0], &product(plain, &x, &q), BF16),
            pair("keys", &all[1], &kv.at(2, 0), BF16),
            pair("values", &all[2], &kv.at(2, 1), BF16),
            pair("gated", &gated, &expected, BF16),
            pair("down", &linear_into(p, &inner, &down, DType::BF16), &product(plain, &inner, &down), BF16),
        ]
    });
}

#[needs(gpu)]
fn row_norms_and_rope_equal_xla_operations() {
    compare(3, |p, plain| {
        let eps = 1e-6;
        let row = |name: &str| drawn(p, name, &[1, 1, 3840], 1.0);
        let scale = |name: &str, n: usize| RowScale { weight: drawn(p, name, &[n], 0.1), offset: 1.0 };
        let normalized = |x: &Value, scale: &RowScale| {
            let y = rms(x, eps) * (scale.weight.to(DType::F32) + 1.0);
            y.to(DType::BF16)
        };
        let (x, h, first, second) = (row("x"), row("h"), scale("first", 3840), scale("second", 3840));
        let norm = RowNorm { x: &x, eps, scale: first.clone(), residual: None, next: None }.run(p).expect("supported");
        let joined = RowNorm { x: &x, eps, scale: first.clone(), residual: Some(&h), next: Some(second.clone()) };
        let joined = joined.run(p).expect("supported");
        let sum = &h + normalized(&x, &first);
        let (q, k) = (drawn(p, "q", &[1, 1, 16, 256], 1.0), drawn(p, "k", &[1, 1, 8, 256], 1.0));
        let (q_scale, k_scale) = (scale("q_scale", 256), scale("k_scale", 256));
        let angles = drawn(p, "angles", &[1, 1, 1, 128], 2.0).to(DType::F32);
        let (cos, sin) = (angles.cos(), angles.sin());
        let rope =
            RowRope { q: &q, k: &k, eps, q_scale: q_scale.clone(), k_scale: k_scale.clone(), cos: &cos, sin: &sin };
        let rotated = rope.run(p).expect("supported");
        let expected = |x: &Value, scale: &RowScale| {
            rotate(plain, &normalized(x, scale), &cos, &sin, Pairing::Split, RoundingPoints::Default)
        };
        vec![
            pair("norm", &norm[0], &normalized(&x, &first), BF16),
            pair("sum", &joined[0], &sum, BF16),
            pair("next norm", &joined[1], &normalized(&sum, &second), BF16),
            pair("queries", &rotated[0], &expected(&q, &q_scale), BF16),
            pair("keys", &rotated[1], &expected(&k, &k_scale), BF16),
        ]
    });
}

#[needs(gpu)]
fn row_attention_equals_xla_operations() {
    // The token is in the last visible block; the blocks after it and the first tokens are masked.
    const AT: usize = 700;
    compare(2, |p, _| {
        let b = p.builder();
        let [heads, kv_heads, tokens, dim] = [16, 8, 832, 256];
        let q = drawn(p, "q", &[1, 1, heads, dim], 1.0);
        let [k, v] = ["k", "v"].map(|name| drawn(p, name, &[1, 1, kv_heads, dim], 1.0));
        let [keys, values] = ["keys", "values"].map(|name| drawn(p, name, &[1, kv_heads, tokens, dim], 1.0));
        let at = b.scalar(AT as f64, DType::I32);
        let visible: Vec<f32> = (0..tokens).map(|t| if (70..=AT).contains(&t) { 0.0 } else { -1e30 }).collect();
        let bias = b.constant(&[1, tokens], &visible);
        let scale = 1.0 / 16.0;
        let (q_, k_, v_) = (&q, &k, &v);
        let attention = RowAttention { q: q_, k: k_, v: v_, keys: &keys, values: &values, at: &at, bias: &bias, scale };
        let done = attention.run(p).expect("supported");
        let [all_keys, all_values] =
            [(&keys, &k), (&values, &v)].map(|(all, new)| all.dynamic_update(2, &at, &new.transpose(&[0, 2, 1, 3])));
        let grouped = q.reshape(vec![1, kv_heads, heads / kv_heads, dim]);
        let scores = b.einsum("bkgd,bksd->bkgs", &grouped, &all_keys, DType::F32) * scale;
        let scores = scores + bias.reshape(vec![1, 1, 1, tokens]);
        let weights = (&scores - scores.max_keep(&[-1])).exp();
        let weights = &weights / weights.sum_keep(&[-1]);
        let wide = all_values.to(DType::F32);
        let expected = b.einsum("bkgs,bksd->bkgd", &weights, &wide, DType::F32).reshape(q.dims().to_vec());
        vec![
            pair("attention", &done.attended, &expected, BF16),
            pair("keys", &done.keys, &all_keys, 0.0),
            pair("values", &done.values, &all_values, 0.0),
        ]
    });
}
