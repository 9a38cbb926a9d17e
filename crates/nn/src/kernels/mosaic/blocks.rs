//! Block sizes of the Mosaic kernel: the numbers of queries and keys per grid step, chosen by sequence lengths and TPU
//! chip.

use super::shape::AttentionShape;
use super::text::LANES;
use ltx2_stablehlo::DType;

/// Properties of a TPU chip that determine block sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tpu {
    /// Peak FLOP/s divided by memory bandwidth in byte/s.
    flops_per_byte: usize,
    /// Floating-point operations of matmuls, in millions, that the chip could execute during the overhead of one grid
    /// step.
    step_megaflops: usize,
    /// Bytes of vector memory (VMEM) that a kernel requests: an upper bound on the memory of a grid step.
    memory: usize,
}

impl Tpu {
    /// Returns the properties of the chip with this PJRT device kind: `TPU v5 lite`, `TPU v5`, `TPU v6 lite` or
    /// `TPU7x`. Other kinds have the properties of `TPU v5`.
    pub fn from_kind(kind: &str) -> Self {
        // Peak and bandwidth from the chip files of `crates/xla-analysis`; the overhead of a grid step is about 0.35
        // microseconds. The memory is half of a core's 64 MiB of VMEM, or a quarter of v6e's 128 MiB; more does not
        // help. On v5e it is 16 MiB, because the compiler fuses all-gathers with the kernel
        // (docs/internals/tpu-attention.md).
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

    /// Returns the chip with kernels limited to `memory` bytes of VMEM.
    #[must_use]
    pub fn with_memory(self, memory: usize) -> Self {
        Tpu { memory, ..self }
    }
}

/// Block sizes of a kernel with bf16 operands, for documentation tables and tests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    pub queries: usize,
    pub keys: usize,
    /// Fraction of the computed scores that belongs to padding.
    pub waste: f64,
}

impl Tpu {
    /// Returns the bytes of VMEM that a kernel requests.
    pub(super) fn memory(self) -> usize {
        self.memory
    }

    /// Returns the block sizes for bf16 attention of `queries` queries over `keys` keys with head dimension `dim`.
    pub fn step(self, queries: usize, keys: usize, dim: usize) -> Step {
        let heads = LANES.div_ceil(dim);
        let shape =
            AttentionShape { rows: 1, queries, keys, heads, kv_heads: heads, dim, dtype: DType::BF16, bias: None };
        let blocks = BlockSizes::choose(&shape, false, self);
        let waste = 1.0 - (queries * keys) as f64 / blocks.scores(&shape) as f64;
        Step { queries: blocks.queries, keys: blocks.keys, waste }
    }
}

/// Number of queries and keys per grid step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockSizes {
    pub queries: usize,
    pub keys: usize,
}

/// Maximum block sizes: larger blocks save little time and take long to compile.
const MOST_QUERIES: usize = 2048;
const MOST_KEYS: usize = 2048;

impl BlockSizes {
    /// Chooses the block sizes with the lowest estimated time that fit in VMEM. The estimate includes the overhead of
    /// grid steps, reading keys from memory, and computing the scores of padding.
    pub(crate) fn choose(shape: &AttentionShape, parts: bool, tpu: Tpu) -> Self {
        // A vector register has 8 rows of 32-bit elements; narrower elements are packed into more rows.
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

    /// Returns the number of grid steps for one block of heads.
    fn steps(self, shape: &AttentionShape) -> usize {
        shape.queries.div_ceil(self.queries) * shape.keys.div_ceil(self.keys)
    }

    /// Returns the estimated time of one block of heads, as the number of floating-point operations that the chip could
    /// execute in matmuls in that time.
    fn cost(self, shape: &AttentionShape, tpu: Tpu) -> usize {
        let products = 4 * self.queries * self.keys * shape.lanes() * shape.together();
        let read = 2 * self.keys * shape.lanes() * shape.dtype.size();
        self.steps(shape) * (products.max(read * tpu.flops_per_byte) + tpu.step_megaflops * 1_000_000)
    }

    /// Returns the bytes of VMEM that a grid step needs for the double-buffered operand and result blocks, the scratch
    /// arrays, and the largest intermediate values.
    fn memory(self, shape: &AttentionShape, parts: bool) -> usize {
        let (lanes, size, f32s) = (shape.lanes(), shape.dtype.size(), DType::F32.size());
        let out = if parts { (lanes + 2 * LANES) * f32s } else { lanes * size };
        let windows = 2 * (self.queries * (lanes * size + out) + 2 * self.keys * lanes * size);
        let kept = self.queries * (lanes + 2 * LANES * shape.together()) * f32s;
        // Scores and weights in f32, and weights in the operand type of the matmul.
        let scores = self.queries * self.keys * (2 * f32s + size);
        windows + kept + scores
    }

    /// Returns the number of scores computed per head, including those of padding.
    pub(crate) fn scores(self, shape: &AttentionShape) -> usize {
        self.steps(shape) * self.queries * self.keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [&str; 4] = ["TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"];

    fn shape(queries: usize, keys: usize, dim: usize, dtype: DType) -> AttentionShape {
        let heads = LANES.div_ceil(dim);
        AttentionShape { rows: 2, queries, keys, heads, kv_heads: heads, dim, dtype, bias: None }
    }

    #[test]
    fn padding_wastes_at_most_ten_percent_of_scores() {
        // Video sharded over 8 devices with all heads, or unsharded with some of the heads; then text; then audio.
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
                let step = Tpu::from_kind(kind).step(queries, keys, dim);
                assert!(step.waste <= 0.1, "{queries} x {keys} x {dim} on {kind}: {step:?}");
            }
        }
    }

    #[test]
    fn blocks_are_register_multiples_and_fit_in_vmem() {
        for kind in KINDS {
            let tpu = Tpu::from_kind(kind);
            for dtype in [DType::BF16, DType::F32] {
                for queries in [1, 7, 126, 1000, 6143, 6144, 15361] {
                    for keys in [1, 127, 128, 129, 1000, 6145, 15360] {
                        for (dim, parts) in [(32, false), (64, true), (128, false), (128, true), (256, false)] {
                            let shape = shape(queries, keys, dim, dtype);
                            let blocks = BlockSizes::choose(&shape, parts, tpu);
                            assert!(blocks.memory(&shape, parts) <= tpu.memory, "{shape:?} {blocks:?}");
                            let rows = 32 / dtype.size();
                            assert!(blocks.queries.is_multiple_of(rows) && blocks.keys.is_multiple_of(LANES));
                            // Blocks are not larger than the padded sequence.
                            assert!(blocks.queries < queries + rows && blocks.keys < keys + LANES, "{blocks:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn less_memory_gives_smaller_blocks() {
        let tpu = Tpu::from_kind("TPU v5");
        let shape = shape(1024, 1024, 128, DType::BF16);
        let [whole, little] = [tpu, tpu.with_memory(1 << 20)].map(|tpu| BlockSizes::choose(&shape, false, tpu));
        assert!(little.queries * little.keys < whole.queries * whole.keys, "{whole:?} {little:?}");
    }
}
