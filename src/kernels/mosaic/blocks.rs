//! Numbers of queries and keys that a step of the kernel takes: from lengths, and the chip.

use super::shape::Shape;
use super::text::LANES;
use crate::hlo::DType;

/// Properties of a chip that the kernel depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tpu {
    /// Operations a second that it does for each byte a second that its memory gives.
    flops_per_byte: usize,
    /// Operations of matmuls that could be done while one step of the grid begins, in millions.
    step_megaflops: usize,
    /// Bytes of its vector memory (VMEM) that a kernel asks for and its steps may fill.
    memory: usize,
}

impl Tpu {
    /// For what PJRT calls a kind of device: `TPU v5 lite`, `TPU v5`, `TPU v6 lite`, `TPU7x`.
    pub fn of(kind: &str) -> Self {
        // Peaks and bandwidths of `analysis::chip`; a step of the grid takes about 0.35 microseconds.
        // Half of a core's vector memory where that is 64 MiB, a quarter of v6e's 128: more gains nothing. On v5e the compiler
        // runs gathers within a kernel, which then has 16 MiB (docs/internals/tpu-attention.md).
        let (teraflops, gigabytes, mebibytes) = match kind {
            "TPU v5 lite" | "TPU v5e" => (197, 819, 16),
            "TPU v6 lite" | "TPU v6e" => (918, 1638, 32),
            "TPU7x" => (1153, 3690, 32),
            _ => (459, 2765, 32),
        };
        Tpu {
            flops_per_byte: teraflops * 1000 / gigabytes,
            step_megaflops: teraflops * 35 / 100,
            memory: mebibytes << 20,
        }
    }

    /// The same chip, whose kernels fill no more than so many bytes of its vector memory.
    #[must_use]
    pub fn with_memory(self, memory: usize) -> Self {
        Tpu { memory, ..self }
    }
}

/// Tokens that a step of a kernel on bf16 takes, for tables and tests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    pub queries: usize,
    pub keys: usize,
    /// The part of the computed scores that are of tokens that only pad blocks.
    pub waste: f64,
}

impl Tpu {
    /// Bytes of vector memory that a kernel asks for.
    pub(super) fn memory(self) -> usize {
        self.memory
    }

    /// The step for so many queries and keys of heads `dim` wide, in bf16.
    pub fn step(self, queries: usize, keys: usize, dim: usize) -> Step {
        let heads = LANES.div_ceil(dim);
        let shape = Shape { rows: 1, queries, keys, heads, kv_heads: heads, dim, dtype: DType::BF16, bias: None };
        let blocks = BlockSizes::choose(&shape, false, self);
        let waste = 1.0 - (queries * keys) as f64 / blocks.scores(&shape) as f64;
        Step { queries: blocks.queries, keys: blocks.keys, waste }
    }
}

/// Tokens of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockSizes {
    pub queries: usize,
    pub keys: usize,
}

/// Larger steps save little and take long to compile.
const MOST_QUERIES: usize = 2048;
const MOST_KEYS: usize = 2048;

impl BlockSizes {
    /// The blocks that take the least time: steps begin, keys come from memory, and scores of tokens that only pad blocks are
    /// computed like others.
    pub(crate) fn choose(shape: &Shape, parts: bool, tpu: Tpu) -> Self {
        // Registers are 8 rows of 32 bits.
        let rows = 32 / shape.dtype.size();
        let candidates = |n: usize, unit: usize, most: usize| {
            let all = n.next_multiple_of(unit);
            let of_count = (1..=all / unit).map(move |count| all.div_ceil(count).next_multiple_of(unit));
            let mut sizes: Vec<usize> = of_count.filter(|&size| size <= most).collect();
            sizes.dedup();
            sizes
        };
        let mut best = BlockSizes { queries: rows, keys: LANES };
        let mut least = usize::MAX;
        for &queries in &candidates(shape.queries, rows, MOST_QUERIES) {
            for &keys in &candidates(shape.keys, LANES, MOST_KEYS) {
                let blocks = BlockSizes { queries, keys };
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

    /// Scores that are computed for one head.
    pub(crate) fn scores(self, shape: &Shape) -> usize {
        self.steps(shape) * self.queries * self.keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [&str; 4] = ["TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"];

    fn shape(queries: usize, keys: usize, dim: usize, dtype: DType) -> Shape {
        let heads = LANES.div_ceil(dim);
        Shape { rows: 2, queries, keys, heads, kv_heads: heads, dim, dtype, bias: None }
    }

    #[test]
    fn the_pipelines_waste_at_most_a_tenth() {
        // Video split over 8 with all heads, or whole with some; text; sound.
        let lengths = [
            (6144, 6144, 128),
            (768, 6144, 128),
            (15360, 15360, 128),
            (1920, 15360, 128),
            (3840, 3840, 128),
            (1536, 1536, 128),
            (192, 1536, 128),
            (480, 1024, 128),
            (768, 1024, 128),
            (1920, 1024, 128),
            (126, 1024, 64),
            (126, 126, 64),
            (768, 126, 64),
            (126, 768, 64),
            (126, 1920, 64),
        ];
        for (queries, keys, dim) in lengths {
            for kind in KINDS {
                let step = Tpu::of(kind).step(queries, keys, dim);
                assert!(step.waste <= 0.1, "{queries} x {keys} x {dim} on {kind}: {step:?}");
            }
        }
    }

    #[test]
    fn every_step_is_whole_registers_and_fits() {
        for kind in KINDS {
            let tpu = Tpu::of(kind);
            for dtype in [DType::BF16, DType::F32] {
                for queries in [1, 7, 126, 1000, 6143, 6144, 15361] {
                    for keys in [1, 127, 128, 129, 1000, 6145, 15360] {
                        for (dim, parts) in [(32, false), (64, true), (128, false), (128, true), (256, false)] {
                            let shape = shape(queries, keys, dim, dtype);
                            let blocks = BlockSizes::choose(&shape, parts, tpu);
                            assert!(blocks.memory(&shape, parts) <= tpu.memory, "{shape:?} {blocks:?}");
                            let rows = 32 / dtype.size();
                            assert!(blocks.queries.is_multiple_of(rows) && blocks.keys.is_multiple_of(LANES));
                            // No block lies beyond the tokens.
                            assert!(blocks.queries < queries + rows && blocks.keys < keys + LANES, "{blocks:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn less_memory_makes_smaller_steps() {
        let tpu = Tpu::of("TPU v5");
        let shape = shape(1024, 1024, 128, DType::BF16);
        let [whole, little] = [tpu, tpu.with_memory(1 << 20)].map(|tpu| BlockSizes::choose(&shape, false, tpu));
        assert!(little.queries * little.keys < whole.queries * whole.keys, "{whole:?} {little:?}");
    }
}
