//! Runs the kernel call of a program on numbers, and computes attention by its definition.

use base64::Engine as _;
use half::bf16;
use ltx2::hlo::{Builder, DType, Program, Type, Value};
use ndarray::{Array3, Array4, ArrayView1, Axis, s};

use super::grid;
use super::text::{self, Element};
use super::values::Tensor;

/// An attention test case.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub rows: usize,
    pub queries: usize,
    pub keys: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub dtype: DType,
    /// Rows of the bias on keys.
    pub bias: Option<usize>,
}

/// `‖a - b‖ / ‖b‖`.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "as many numbers");
    let norm = |it: &mut dyn Iterator<Item = f64>| it.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied()).max(f64::MIN_POSITIVE)
}

/// Returns the kernel's text from a program with one kernel call.
pub fn body(program: &str) -> String {
    let (_, rest) = program.split_once("backend_config = \"").expect("a call");
    let (config, _) = rest.split_once('"').expect("an end");
    let config: serde_json::Value = serde_json::from_str(&config.replace("\\22", "\"")).expect("JSON");
    let body = config.pointer("/custom_call_config/body").and_then(|b| b.as_str()).expect("a body");
    let bytes = base64::engine::general_purpose::STANDARD.decode(body).expect("base64");
    String::from_utf8(bytes).expect("text")
}

/// Returns reproducible pseudo-random numbers, approximately normal.
pub fn noise(seed: u64, n: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / f64::from(1 << 24)
    };
    (0..n).map(|_| f64::from(((0..12).map(|_| next()).sum::<f64>() - 6.0) as f32)).collect()
}

impl Case {
    /// Returns the number of multiplications of the scores.
    pub fn products(&self) -> usize {
        self.rows * self.heads * self.queries * self.keys * self.dim
    }

    pub fn scale(&self) -> f64 {
        (self.dim as f64).sqrt().recip()
    }

    /// Builds a program with these operands.
    pub fn program(&self, f: impl Fn(&Value, &Value, &Value, Option<&Value>) -> Vec<Value>) -> Program {
        let b = Builder::new("attention");
        let argument = |name: &str, dims: [usize; 4]| b.argument(name, Type::new(self.dtype, dims));
        let q = argument("q", self.q_dims());
        let [k, v] = ["k", "v"].map(|name| argument(name, self.k_dims()));
        let bias = self.bias.map(|rows| b.argument("bias", Type::new(DType::F32, [rows, 1, 1, self.keys])));
        let results = f(&q, &k, &v, bias.as_ref());
        let names: Vec<String> = (0..results.len()).map(|n| format!("r{n}")).collect();
        let results: Vec<(&str, &Value)> = names.iter().map(String::as_str).zip(&results).collect();
        b.finish(&results).expect("builds")
    }

    fn q_dims(&self) -> [usize; 4] {
        [self.rows, self.queries, self.heads, self.dim]
    }

    fn k_dims(&self) -> [usize; 4] {
        [self.rows, self.keys, self.kv_heads, self.dim]
    }

    /// Returns queries, keys, values and bias, rounded to their types.
    fn operands(&self) -> [Vec<f64>; 4] {
        let round = |x: f64| match self.dtype {
            DType::BF16 => f64::from(bf16::from_f32(x as f32)),
            _ => x,
        };
        let of = |seed: u64, dims: [usize; 4]| -> Vec<f64> {
            noise(seed, dims.iter().product()).into_iter().map(round).collect()
        };
        let bias = noise(4, self.bias.unwrap_or(0) * self.keys);
        [of(1, self.q_dims()), of(2, self.k_dims()), of(3, self.k_dims()), bias]
    }

    /// Runs the program's kernel call and returns its results in order.
    pub fn run(&self, f: impl Fn(&Value, &Value, &Value, Option<&Value>) -> Vec<Value>) -> Vec<Vec<f64>> {
        let text = self.program(f).text;
        self.interpreted(&body(&text)).unwrap_or_else(|e| panic!("{self:?}: {e}"))
    }

    /// Runs a kernel's text. Returns `[rows, queries, heads, dim]` and, for a part of the keys, also `[rows, queries,
    /// heads]` twice.
    pub fn interpreted(&self, body: &str) -> text::Result<Vec<Vec<f64>>> {
        let element = if self.dtype == DType::BF16 { Element::BF16 } else { Element::F32 };
        let [q, k, v, bias] = self.operands();
        let heads_first = self.dim.is_multiple_of(128);
        let arranged = |x: Vec<f64>, [rows, n, heads, dim]: [usize; 4]| match heads_first {
            true => Tensor::new(element, vec![rows, heads, n, dim], swapped(&x, [rows, n, heads, dim])),
            false => Tensor::new(element, vec![rows, n, heads * dim], x),
        };
        let mut arrays = vec![arranged(q, self.q_dims()), arranged(k, self.k_dims()), arranged(v, self.k_dims())];
        if let Some(rows) = self.bias {
            arrays.push(Tensor::new(Element::F32, vec![rows, 1, self.keys], bias));
        }
        let operands = arrays.len();
        let [rows, n, heads, dim] = self.q_dims();
        let result = arranged(vec![0.0; rows * n * heads * dim], self.q_dims());
        let parts = body.matches("transform_indices").count() == operands + 3;
        if parts {
            let sums = Tensor::new(Element::F32, vec![rows, n, 128], vec![0.0; rows * n * 128]);
            arrays.extend([Tensor { element: Element::F32, ..result }, sums.clone(), sums]);
        } else {
            arrays.push(result);
        }
        grid::run(body, &mut arrays, operands)?;
        let values = &arrays[operands].data;
        let values = if heads_first { swapped(values, [rows, heads, n, dim]) } else { values.clone() };
        let of_heads = |x: &Tensor| x.data.chunks(128).flat_map(|lanes| lanes[..heads].to_vec()).collect();
        Ok([vec![values], arrays[operands + 1..].iter().map(of_heads).collect()].concat())
    }

    /// Computes attention by its definition in f64: weighted values `[rows, queries, heads, dim]`, and the maximum
    /// score and the sum of weights of each query and head.
    pub fn defined(&self) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let [q, k, v, bias] = self.operands();
        let of = |dims: [usize; 4], x| Array4::from_shape_vec(dims, x).expect("as many numbers");
        let (q, k, v) = (of(self.q_dims(), q), of(self.k_dims(), k), of(self.k_dims(), v));
        let mut values = Array4::zeros(self.q_dims());
        let [mut largest, mut sums] = [(); 2].map(|()| Array3::zeros([self.rows, self.queries, self.heads]));
        for (row, head) in (0..self.rows).flat_map(|row| (0..self.heads).map(move |head| (row, head))) {
            let kv_head = head / (self.heads / self.kv_heads);
            let keys = k.slice(s![row, .., kv_head, ..]);
            let mut scores = q.slice(s![row, .., head, ..]).dot(&keys.t()) * self.scale();
            if let Some(rows) = self.bias {
                scores += &ArrayView1::from(&bias[(row % rows) * self.keys..][..self.keys]);
            }
            let most = scores.map_axis(Axis(1), |row| row.fold(f64::NEG_INFINITY, |a, b| a.max(*b)));
            let weights = (scores - most.view().insert_axis(Axis(1))).mapv(f64::exp);
            values.slice_mut(s![row, .., head, ..]).assign(&weights.dot(&v.slice(s![row, .., kv_head, ..])));
            sums.slice_mut(s![row, .., head]).assign(&weights.sum_axis(Axis(1)));
            largest.slice_mut(s![row, .., head]).assign(&most);
        }
        let [largest, sums] = [largest, sums].map(|x| x.into_raw_vec_and_offset().0);
        (values.into_raw_vec_and_offset().0, largest, sums)
    }
}

/// Transposes `[a, b, c, d]` to `[a, c, b, d]`.
fn swapped(x: &[f64], [a, b, c, d]: [usize; 4]) -> Vec<f64> {
    let mut out = Vec::with_capacity(x.len());
    for i in 0..a {
        for k in 0..c {
            for j in 0..b {
                out.extend(&x[((i * b + j) * c + k) * d..][..d]);
            }
        }
    }
    out
}
