//! Choice of the next token from the logits: the most probable token, or a token drawn with temperature, top-k and
//! top-p. No step sorts the vocabulary.

use super::generate::GenerationSpec;
use ltx2_nn::{Axis, Params};
use ltx2_stablehlo::{Comparison, DType, Type, Value};

/// Bits of a threshold that one round of the search determines.
const DIGIT_BITS: u32 = 4;

/// Rule that chooses tokens, with its inputs.
pub(crate) struct TokenChoice {
    no_repeat_ngram_size: usize,
    /// `None`: the most probable token is chosen.
    draw: Option<Draw>,
}

/// Inputs of the random choice.
struct Draw {
    /// Scalars.
    temperature: Value,
    top_k: Value,
    top_p: Value,
    /// Uniform values in [0, 1), `[rows, new_tokens]`.
    uniforms: Value,
}

impl TokenChoice {
    pub(crate) fn new(p: &Params, spec: &GenerationSpec) -> Self {
        let scalar = |name: &str, dtype| p.input(name, Type::scalar(dtype), &[]);
        let draw = spec.sampled.then(|| Draw {
            temperature: scalar("temperature", DType::F32),
            top_k: scalar("top_k", DType::I32),
            top_p: scalar("top_p", DType::F32),
            uniforms: p.input(
                "uniforms",
                Type::new(DType::F32, [spec.rows, spec.new_tokens]),
                &[Axis::CfgBatch, Axis::Replicated],
            ),
        });
        TokenChoice { no_repeat_ngram_size: spec.no_repeat_ngram_size, draw }
    }

    /// Chooses a token for each row of `logits [rows, vocabulary]`, f32. Returns i32 `[rows]`. `texts`: the tokens so
    /// far, of which the first `end` are used; `is_token` is false for padding. `step`: number of the new token.
    pub(crate) fn choose(&self, logits: &Value, texts: &Value, is_token: &Value, step: &Value, end: &Value) -> Value {
        let _scope = logits.builder().scope("choice");
        let logits = match self.no_repeat_ngram_size {
            0 => logits.clone(),
            length => {
                let banned = repeated(logits, texts, is_token, end, length);
                banned.select(&logits.like(f64::NEG_INFINITY), logits)
            }
        };
        match &self.draw {
            None => largest(&logits),
            Some(draw) => draw.choose(&logits, step),
        }
    }
}

/// Returns the index of the largest element of each row of `x [rows, n]`, the first one if several are equal.
fn largest(x: &Value) -> Value {
    let index = positions(x, 1);
    let n = x.dim(1) as f64;
    let is_largest = x.compare(Comparison::Eq, &x.max_keep(&[-1]));
    // A row with NaN has no largest element.
    is_largest.select(&index, &index.like(n)).min_keep(&[-1]).minimum(&index.like(n - 1.0)).reshape(vec![x.dim(0)])
}

/// Returns the index of each element along `axis`, i32, with size 1 along the other axes.
fn positions(x: &Value, axis: usize) -> Value {
    let mut dims = vec![1; x.rank()];
    dims[axis] = x.dims()[axis];
    x.builder().iota(Type::new(DType::I32, dims), axis)
}

/// Returns, for each row and token of the vocabulary, whether the token would end a sequence of `length` tokens that
/// the text already contains, `[rows, vocabulary]`.
fn repeated(logits: &Value, texts: &Value, is_token: &Value, end: &Value, length: usize) -> Value {
    let starts = (texts.dim(1) + 1).saturating_sub(length);
    let part = |x: &Value, offset: usize| x.slice(1, offset, offset + starts);
    let last = length - 1;
    let place = positions(texts, 1).slice(1, last, last + starts);
    // The sequence has no padding if its first token is none, because padding is on the left.
    let mut is_repeated = part(is_token, 0).and(&place.compare(Comparison::Lt, end));
    for offset in 0..last {
        let token = texts.dynamic_slice(1, &(end - (last - offset) as f64), 1);
        is_repeated = is_repeated.and(&part(texts, offset).compare(Comparison::Eq, &token));
    }
    let ends = part(texts, last);
    let banned = is_repeated.select(&ends, &ends.like(-1.0)).unsqueeze(2);
    let vocabulary = positions(logits, 1).unsqueeze(1);
    banned.compare(Comparison::Eq, &vocabulary).max_keep(&[1]).reshape(logits.dims().to_vec())
}

impl Draw {
    /// Draws a token for each row of `logits [rows, vocabulary]`, f32. Temperature, top-k and top-p are applied in this
    /// order; tokens of equal probability are kept or removed together.
    fn choose(&self, logits: &Value, step: &Value) -> Value {
        let b = logits.builder();
        let logits = logits / &self.temperature;
        let keys = ordered_bits(&logits);
        let size = b.scalar(logits.dim(1) as f64, DType::I32);
        let is_limited = self.top_k.compare(Comparison::Gt, &self.top_k.like(0.0));
        let count = is_limited.select(&self.top_k, &size).minimum(&size);
        // The largest key that at least `count` keys reach.
        let least = largest_threshold(&keys, |candidates| {
            let reached = keys.unsqueeze(1).compare(Comparison::Ge, candidates);
            reached.to(DType::I32).sum(&[-1]).compare(Comparison::Ge, &count)
        });
        let is_kept = keys.compare(Comparison::Ge, &least);
        let weights = is_kept.select(&(&logits - logits.max_keep(&[-1])).exp(), &logits.like(0.0));
        let removed = (self.top_p.like(1.0) - &self.top_p) * weights.sum_keep(&[-1]);
        // The largest key for which all keys up to it have at most the probability that may be removed.
        let cut = largest_threshold(&keys, |candidates| {
            let below = keys.unsqueeze(1).compare(Comparison::Le, candidates);
            below.select(&weights.unsqueeze(1), &weights.like(0.0)).sum(&[-1]).compare(Comparison::Le, &removed)
        });
        let best = keys.max_keep(&[-1]);
        let is_kept = keys.compare(Comparison::Gt, &cut).or(&keys.compare(Comparison::Eq, &best));
        let weights = is_kept.select(&weights, &weights.like(0.0));
        inverse_cdf(&weights, &self.uniforms.dynamic_slice(1, step, 1))
    }
}

/// Converts f32 values to i32 numbers of the same order.
fn ordered_bits(x: &Value) -> Value {
    let bits = x.bitcast(DType::I32);
    let is_negative = bits.compare(Comparison::Lt, &bits.like(0.0));
    is_negative.select(&bits.xor(&bits.like(f64::from(i32::MAX))), &bits)
}

/// Returns the largest i32 number for which `holds` is true in each row, `[rows, 1]`. `holds` maps candidates `[rows, n,
/// 1]` to booleans `[rows, n]`; if it is true for a number, it is true for all smaller ones.
fn largest_threshold(keys: &Value, holds: impl Fn(&Value) -> Value) -> Value {
    let (b, rows) = (keys.builder(), keys.dim(0));
    let digits = 1usize << DIGIT_BITS;
    let start = [
        b.full(f64::from(i32::MIN), Type::new(DType::I32, [rows, 1])),
        b.scalar(f64::from(1 << (i32::BITS - DIGIT_BITS)), DType::I32),
    ];
    let rounds = (i32::BITS / DIGIT_BITS) as usize;
    let found = b.repeat(rounds, &start, |_, state| {
        let (prefix, unit) = (&state[0], &state[1]);
        let digit = b.iota(Type::new(DType::I32, [1, digits]), 1);
        let candidates = prefix + digit * unit;
        let digit = holds(&candidates.unsqueeze(2)).to(DType::I32).sum_keep(&[-1]) - 1.0;
        // Candidate 0 is the prefix, for which the condition holds.
        let digit = digit.maximum(&digit.like(0.0));
        vec![prefix + digit * unit, unit / digits as f64]
    });
    found[0].clone()
}

/// Returns, for each row, the first index at which the sum of the weights up to it exceeds `uniform [rows, 1]` times
/// the sum of all weights `[rows, n]`. Never returns an index whose weight is 0.
fn inverse_cdf(weights: &Value, uniform: &Value) -> Value {
    let (rows, n) = (weights.dim(0), weights.dim(1));
    // About as many blocks as weights in a block, because the running sums take quadratic time.
    let size = n.isqrt().next_power_of_two();
    let blocks = n.div_ceil(size);
    let blocked = weights.pad(1, 0, blocks * size - n, 0.0).reshape(vec![rows, blocks, size]);
    let sums = running_sums(&blocked.sum(&[-1]));
    let target = uniform * sums.slice(1, blocks - 1, blocks);
    let block = count_up_to(&sums, &target).minimum(&target.like(blocks as f64 - 1.0).to(DType::I32));
    let index = positions(&sums, 1);
    let before = index.compare(Comparison::Lt, &block).select(&sums, &sums.like(0.0)).max_keep(&[-1]);
    let own = blocked.take_along(&block).reshape(vec![rows, size]);
    let place = count_up_to(&running_sums(&own), &(target - before));
    // Sums that are rounded differently must not lead to an index outside of the block or with weight 0.
    let index = positions(&own, 1);
    let is_positive = own.compare(Comparison::Gt, &own.like(0.0));
    let first = is_positive.select(&index, &index.like(size as f64)).min_keep(&[-1]);
    let last = is_positive.select(&index, &index.like(0.0)).max_keep(&[-1]);
    let place = place.maximum(&first).minimum(&last);
    (block * size as f64 + place).reshape(vec![rows])
}

/// Returns the running sums along the last axis of `x [rows, n]`.
fn running_sums(x: &Value) -> Value {
    let (b, n) = (x.builder(), x.dim(1));
    let square = |axis| b.iota(Type::new(DType::I32, [1, n, n]), axis);
    let is_before = square(2).compare(Comparison::Le, &square(1));
    is_before.select(&x.unsqueeze(1), &x.like(0.0)).sum(&[-1])
}

/// Returns, for each row, how many of the `sums [rows, n]` are at most `target [rows, 1]`; i32 `[rows, 1]`.
fn count_up_to(sums: &Value, target: &Value) -> Value {
    sums.compare(Comparison::Le, target).to(DType::I32).sum_keep(&[-1])
}
