//! How many queries and keys a step of the kernel takes: from lengths, and the chip.

use super::flash::Shape;
use super::text::LANES;
use crate::dtype::DType;

/// What the kernel needs to know of a chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tpu {
    /// Operations a second that it does for each byte a second that its memory gives.
    flops_per_byte: usize,
    /// Scores' products that could be made while one step of the grid begins, in millions of operations.
    step_megaflops: usize,
    /// Bytes of its own memory that a kernel may fill.
    memory: usize,
}

impl Tpu {
    /// For what PJRT calls a kind of device: `TPU v5 lite`, `TPU v5`, `TPU v6 lite`, `TPU7x`.
    pub fn of(kind: &str) -> Self {
        // Peaks and bandwidths of `analysis::chip`; a step of the grid takes about 0.35 microseconds.
        let (teraflops, gigabytes) = match kind {
            "TPU v5 lite" | "TPU v5e" => (197, 819),
            "TPU v6 lite" | "TPU v6e" => (918, 1638),
            "TPU7x" => (1153, 3690),
            _ => (459, 2765),
        };
        Tpu {
            flops_per_byte: teraflops * 1000 / gigabytes,
            step_megaflops: teraflops * 35 / 100,
            // The least that libtpu gives a kernel that asks for nothing, on any of them.
            memory: 16 << 20,
        }
    }

    /// The same chip, whose kernels fill no more than so many bytes of its own memory.
    #[must_use]
    pub fn with_memory(self, memory: usize) -> Self {
        Tpu { memory, ..self }
    }
}

/// Tokens of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    pub queries: usize,
    pub keys: usize,
}

/// Larger steps save little and take long to compile.
const MOST_QUERIES: usize = 2048;
const MOST_KEYS: usize = 2048;

impl Blocks {
    /// What takes the least time: steps begin, keys come from memory, and scores of tokens that only fill up blocks are
    /// computed like others.
    pub fn choose(shape: &Shape, parts: bool, tpu: Tpu) -> Self {
        // Registers are 8 rows of 32 bits.
        let rows = 32 / shape.dtype.size();
        let candidates = |n: usize, unit: usize, most: usize| {
            let all = n.next_multiple_of(unit);
            let of_count = (1..=all.div_ceil(unit)).map(move |count| all.div_ceil(count).next_multiple_of(unit));
            let mut sizes: Vec<usize> = of_count.filter(|&size| size <= most).collect();
            sizes.dedup();
            sizes
        };
        let mut best = Blocks { queries: rows, keys: LANES };
        let mut least = usize::MAX;
        for &queries in &candidates(shape.queries, rows, MOST_QUERIES) {
            for &keys in &candidates(shape.keys, LANES, MOST_KEYS) {
                let blocks = Blocks { queries, keys };
                let cost = blocks.cost(shape, tpu);
                if blocks.memory(shape, parts) <= tpu.memory && cost < least {
                    (best, least) = (blocks, cost);
                }
            }
        }
        best
    }

    /// Steps for one block of heads.
    fn steps(self, shape: &Shape) -> usize {
        shape.queries.div_ceil(self.queries) * shape.keys.div_ceil(self.keys)
    }

    /// Operations for one block of heads, with those that could be done while steps begin or wait.
    fn cost(self, shape: &Shape, tpu: Tpu) -> usize {
        let products = 4 * self.queries * self.keys * shape.lanes() * shape.together();
        let read = 2 * self.keys * shape.lanes() * shape.dtype.size();
        self.steps(shape) * (products.max(read * tpu.flops_per_byte) + tpu.step_megaflops * 1_000_000)
    }

    /// Bytes that a step needs: every window twice, what is kept, and the largest intermediates.
    fn memory(self, shape: &Shape, parts: bool) -> usize {
        let (lanes, size, f32s) = (shape.lanes(), shape.dtype.size(), DType::F32.size());
        let out = if parts { (lanes + 2 * LANES) * f32s } else { lanes * size };
        let windows = 2 * (self.queries * (lanes * size + out) + 2 * self.keys * lanes * size);
        let kept = self.queries * (lanes + 2 * LANES * shape.together()) * f32s;
        // Scores and weights in f32, weights as the product reads them.
        let scores = self.queries * self.keys * (2 * f32s + size);
        windows + kept + scores
    }

    /// The part of the computed scores that are of tokens that only fill up blocks.
    pub fn waste(self, shape: &Shape) -> f64 {
        let computed = self.steps(shape) * self.queries * self.keys;
        1.0 - (shape.queries * shape.keys) as f64 / computed as f64
    }

    /// Scores that are computed for one head.
    pub fn scores(self, shape: &Shape) -> usize {
        self.steps(shape) * self.queries * self.keys
    }
}
