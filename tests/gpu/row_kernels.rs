//! The kernels of text generation, which compute a single row: as close to f32 operations as the element type allows.

use ltx2::hlo::{DType, Value};
use ltx2::models::{Network, transformer};
use ltx2::nn::kernels::{RowAttention, RowNorm, RowProducts, RowRope, RowScale, RowWeight};
use ltx2::nn::rope::{Pairing, rotate};
use ltx2::nn::{Axis, Build, Init, Params, RoundingPoints, gelu_tanh, linear_into, rms};
use ltx2::pipeline::plan::origin::Weights;
use ltx2::pipeline::programs::executor::{Executor, Inputs};
use ltx2::runtime::Engine;

use crate::support::{lowering_of, needs, quick, relative_l2};
use crate::windows::gpus;

/// Largest relative error of a bf16 result: half the distance of two neighboring numbers.
const BF16: f64 = 1.0 / 256.0;
/// Largest relative error of an f32 sum of a few thousand products, which is computed in another order.
const F32: f64 = 1e-5;

/// Number that norms add to the mean of the squares.
const EPS: f64 = 1e-6;

/// Maximum relative L2 error of a norm, of which a few values may round to the adjacent bf16 value, and of its f32 products.
const NORM: f64 = BF16 / 4.0;

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

/// Learned scale of a norm over `n` features.
fn scale(p: &Params, name: &str, n: usize) -> RowScale {
    RowScale { weight: drawn(p, name, &[n], 0.1), offset: 1.0 }
}

/// Applies the norm to `x` in f32 and rounds the result.
fn normalized(x: &Value, scale: &RowScale) -> Value {
    (rms(x, EPS) * (scale.weight.to(DType::F32) + 1.0)).to(DType::BF16)
}

#[needs(gpu)]
fn row_products_equal_a_dot() {
    compare(4, |p, plain| {
        let x = drawn(p, "x", &[1, 1, 4096], 1.0);
        let o = drawn(p, "o", &[3840, 4096], 0.016);
        let odd = drawn(p, "odd", &[4097, 4096], 0.016);
        let (short, ragged) = (drawn(p, "short", &[1, 1, 4136], 1.0), drawn(p, "ragged", &[640, 4136], 0.016));
        let inner = drawn(p, "inner", &[1, 1, 15360], 1.0);
        let down = drawn(p, "down", &[3840, 15360], 0.008);
        vec![
            pair("attention", &linear_into(p, &x, &o, DType::F32), &product(plain, &x, &o), F32),
            pair("odd", &linear_into(p, &x, &odd, DType::F32), &product(plain, &x, &odd), F32),
            // Two rounds of loads; the last tile is not full.
            pair("ragged", &linear_into(p, &short, &ragged, DType::F32), &product(plain, &short, &ragged), F32),
            pair("down", &linear_into(p, &inner, &down, DType::BF16), &product(plain, &inner, &down), BF16),
        ]
    });
}

#[needs(gpu)]
fn products_of_a_normalized_row_equal_a_norm_and_a_dot() {
    compare(6, |p, plain| {
        let row = |name: &str| drawn(p, name, &[1, 1, 3840], 1.0);
        let (x, h, first, second) = (row("x"), row("h"), scale(p, "first", 3840), scale(p, "second", 3840));
        let alone = || RowNorm { x: &x, eps: EPS, scale: first.clone(), residual: None, next: None };
        let joined =
            || RowNorm { x: &x, eps: EPS, scale: first.clone(), residual: Some(&h), next: Some(second.clone()) };
        let sum = &h + normalized(&x, &first);
        let [one, next] = [normalized(&x, &first), normalized(&sum, &second)];
        let table = drawn(p, "table", &[262_208, 3840], 0.016);
        let q = drawn(p, "q", &[16, 256, 3840], 0.016);
        let kv = drawn(p, "kv", &[2, 8, 256, 3840], 0.016);
        let mlp = drawn(p, "mlp", &[2, 15360, 3840], 0.016);
        let run = |x: &Value, weights: &[(&Value, usize)], dtype, is_gated| {
            let weights = weights.iter().map(|&(weight, parts)| RowWeight { weight, parts }).collect();
            RowProducts { x, weights, dtype, is_gated }.run(p).expect("supported")
        };
        let norms = joined().run(p).expect("supported");
        let logits = run(&norms[1], &[(&table, 1)], DType::F32, false);
        let heads = run(&norms[1], &[(&q, 1), (&kv, 2)], DType::BF16, false);
        let gated = run(&norms[1], &[(&mlp, 2)], DType::BF16, true);
        let queries = run(&alone().run(p).expect("supported")[0], &[(&q, 1)], DType::BF16, false);
        let (all_kv, both) = (product(plain, &next, &kv), product(plain, &next, &mlp));
        vec![
            pair("sum", &norms[0], &sum, NORM),
            pair("next norm", &norms[1], &next, NORM),
            pair("logits", &logits[0], &product(plain, &next, &table), NORM),
            pair("queries", &heads[0], &product(plain, &next, &q), BF16),
            pair("keys", &heads[1], &all_kv.at(2, 0), BF16),
            pair("values", &heads[2], &all_kv.at(2, 1), BF16),
            pair("gated", &gated[0], &(gelu_tanh(&both.at(2, 0)) * both.at(2, 1)), BF16),
            pair("queries of one norm", &queries[0], &product(plain, &one, &q), BF16),
        ]
    });
}

#[needs(gpu)]
fn row_attention_equals_xla_operations() {
    attention(832, None);
    // Programs compute blocks of 8, 16, 32 and 64 tokens.
    for tokens in [832, 2112, 4160, 8256] {
        attention(tokens, Some(RoundingPoints::Default));
    }
}

/// Compares the attention over `tokens` cached tokens, with norms and RoPE of queries and keys if `rounding` is given.
fn attention(tokens: usize, rounding: Option<RoundingPoints>) {
    // The token is in the last visible block; the blocks after it and the first tokens are masked.
    const AT: usize = 700;
    compare(2, |p, plain| {
        let b = p.builder();
        let [heads, kv_heads, dim] = [16, 8, 256];
        let q = drawn(p, "q", &[1, 1, heads, dim], 1.0);
        let [k, v] = ["k", "v"].map(|name| drawn(p, name, &[1, 1, kv_heads, dim], 1.0));
        let [keys, values] = ["keys", "values"].map(|name| drawn(p, name, &[1, kv_heads, tokens, dim], 1.0));
        let at = b.scalar(AT as f64, DType::I32);
        let visible: Vec<f32> = (0..tokens).map(|t| if (70..=AT).contains(&t) { 0.0 } else { -1e30 }).collect();
        let bias = b.constant(&[1, tokens], &visible);
        let angles = drawn(p, "angles", &[1, 1, 1, dim / 2], 2.0).to(DType::F32);
        let (cos, sin) = (angles.cos(), angles.sin());
        let [q_scale, k_scale] = ["q_scale", "k_scale"].map(|name| scale(p, name, dim));
        let rotated = |x: &Value, scale: &RowScale| match rounding {
            Some(rounding) => rotate(plain, &normalized(x, scale), &cos, &sin, Pairing::Split, rounding),
            None => x.clone(),
        };
        let [raw_q, raw_k] = [q.clone(), k.clone()];
        let (q, k) = (rotated(&q, &q_scale), rotated(&k, &k_scale));
        let rope = rounding.map(|_| RowRope { eps: EPS, q_scale, k_scale, cos: &cos, sin: &sin });
        let score_scale = 1.0 / 16.0;
        let attention = RowAttention {
            q: &raw_q,
            k: &raw_k,
            v: &v,
            keys: &keys,
            values: &values,
            at: &at,
            bias: &bias,
            scale: score_scale,
            rope,
        };
        let done = attention.run(p).expect("supported");
        let [all_keys, all_values] =
            [(&keys, &k), (&values, &v)].map(|(all, new)| all.dynamic_update(2, &at, &new.transpose(&[0, 2, 1, 3])));
        let grouped = q.reshape(vec![1, kv_heads, heads / kv_heads, dim]);
        let scores = b.einsum("bkgd,bksd->bkgs", &grouped, &all_keys, DType::F32) * score_scale;
        let scores = scores + bias.reshape(vec![1, 1, 1, tokens]);
        let weights = (&scores - scores.max_keep(&[-1])).exp();
        let weights = &weights / weights.sum_keep(&[-1]);
        let wide = all_values.to(DType::F32);
        let expected = b.einsum("bkgs,bksd->bkgd", &weights, &wide, DType::F32).reshape(q.dims().to_vec());
        vec![
            pair("attention", &done.attended, &expected, BF16),
            pair("keys", &done.keys, &all_keys, if rounding.is_some() { NORM } else { 0.0 }),
            pair("values", &done.values, &all_values, 0.0),
        ]
    });
}
