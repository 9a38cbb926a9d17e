//! Fused attention for TPUs: a Mosaic kernel, written as MLIR text in a custom call that libtpu compiles. The call
//! operates on local shards, because the SPMD partitioner does not split it.

mod blocks;
mod flash;
mod module;
mod shape;
mod text;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;

use blocks::BlockSizes;
pub use blocks::Tpu;
use flash::KernelResults;
use shape::AttentionShape;

use ltx2_stablehlo::{CustomCall, DType, Type, Value};

/// Largest head dimension whose blocks fit in VMEM.
const WIDEST: usize = 256;

/// Returns why the kernel does not support these operands, or `None` if it does.
pub(super) fn unsupported_reason(q: &Value, k: &Value, v: &Value, bias: Option<&Value>) -> Option<String> {
    let (dtype, dim, heads) = (q.dtype(), q.dim(3), q.dim(2));
    if ![DType::BF16, DType::F32].contains(&dtype) {
        return Some(format!("the Mosaic kernel does not support element type {}", dtype.name()));
    }
    if k.dtype() != dtype || v.dtype() != dtype {
        return Some(format!(
            "element types differ: queries {}, keys {}, values {}",
            dtype.name(),
            k.dtype().name(),
            v.dtype().name()
        ));
    }
    let fits = (dim.is_multiple_of(text::LANES) && dim <= WIDEST) || [32, 64].contains(&dim);
    if !fits {
        return Some(format!("the Mosaic kernel does not support head dimension {dim}"));
    }
    let together = text::LANES.div_ceil(dim);
    if !heads.is_multiple_of(together) || (together > 1 && k.dim(2) != heads) {
        return Some(format!(
            "with head dimension {dim}, the Mosaic kernel supports only equal numbers of query and key heads that are multiples \
             of {together}, not {heads} query heads and {} key heads",
            k.dim(2)
        ));
    }
    bias.filter(|b| b.dim(2) != 1)
        .map(|b| format!("the Mosaic kernel does not support a bias with a row for each of {} queries", b.dim(2)))
}

/// Computes attention of queries `q [b, q, h, d]` over keys `k` and values `v`, both `[b, k, kv, d]`, with an additive
/// bias `[b or 1, 1, 1, k]`. Returns `[b, q, h, d]`.
pub(super) fn attention(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64, tpu: Tpu) -> Value {
    let call = KernelCall::new(q, k, bias, KernelResults::Normalized, scale, tpu);
    call.restored(&call.run([q, k, v], bias).remove(0))
}

/// Computes attention like [`attention`], but without normalization. Returns, in f32, the weighted values `[b, q, h,
/// d]`, and the largest score and the sum of weights of each query and head, both `[b, q, h, 1]`.
pub(super) fn partial(q: &Value, k: &Value, v: &Value, bias: Option<&Value>, scale: f64, tpu: Tpu) -> [Value; 3] {
    let call = KernelCall::new(q, k, bias, KernelResults::Partial, scale, tpu);
    let results = call.run([q, k, v], bias);
    let of_heads = |x: &Value| x.slice(2, 0, q.dim(2)).unsqueeze(3);
    [call.restored(&results[0]), of_heads(&results[1]), of_heads(&results[2])]
}

struct KernelCall {
    shape: AttentionShape,
    wanted: KernelResults,
    config: MosaicBackendConfig,
}

impl KernelCall {
    fn new(q: &Value, k: &Value, bias: Option<&Value>, wanted: KernelResults, scale: f64, tpu: Tpu) -> Self {
        let shape = AttentionShape {
            rows: q.dim(0),
            queries: q.dim(1),
            keys: k.dim(1),
            heads: q.dim(2),
            kv_heads: k.dim(2),
            dim: q.dim(3),
            dtype: q.dtype(),
            bias: bias.map(|b| b.dim(0)),
        };
        let blocks = BlockSizes::choose(&shape, wanted == KernelResults::Partial, tpu);
        tracing::debug!(?shape, ?blocks, "attention with the Mosaic kernel");
        let config =
            MosaicBackendConfig::new(&shape, wanted, blocks, tpu, &flash::kernel(&shape, wanted, blocks, scale));
        KernelCall { shape, wanted, config }
    }

    fn run(&self, operands: [&Value; 3], bias: Option<&Value>) -> Vec<Value> {
        let operands = operands.map(|x| self.arranged(x));
        let bias = bias.map(|bias| bias.reshape(vec![bias.dim(0), 1, bias.dim(3)]));
        let operands: Vec<&Value> = operands.iter().chain(bias.as_ref()).collect();
        let mut results = vec![operands[0].ty().clone()];
        if self.wanted == KernelResults::Partial {
            let sums = Type::new(DType::F32, [self.shape.rows, self.shape.queries, text::LANES]);
            results = vec![results[0].with_dtype(DType::F32), sums.clone(), sums];
        }
        let natural = |rank: usize| (0..rank).rev().collect::<Vec<_>>();
        let call = CustomCall {
            target: "tpu_custom_call".into(),
            api_version: 1,
            backend_config: serde_json::to_string(&self.config).expect("the configuration serializes to JSON"),
            operand_layouts: operands.iter().map(|x| natural(x.rank())).collect(),
            result_layouts: results.iter().map(|ty| natural(ty.rank())).collect(),
            ..CustomCall::default()
        };
        operands[0].builder().custom_call(&call, &operands, &results)
    }

    /// Rearranges `[b, n, h, d]` into the dimension order of the kernel.
    fn arranged(&self, x: &Value) -> Value {
        match self.shape.is_heads_first() {
            true => x.transpose(&[0, 2, 1, 3]),
            false => x.reshape(vec![x.dim(0), x.dim(1), x.dim(2) * x.dim(3)]),
        }
    }

    /// Rearranges a result from the dimension order of the kernel to `[b, q, h, d]`.
    fn restored(&self, x: &Value) -> Value {
        match self.shape.is_heads_first() {
            true => x.transpose(&[0, 2, 1, 3]),
            false => x.reshape(vec![x.dim(0), x.dim(1), self.shape.heads, self.shape.dim]),
        }
    }
}

/// Backend configuration of a kernel call, read by libtpu. libtpu interprets the body as MLIR text, because the
/// configuration has no `serialization_format` field.
#[derive(Serialize)]
struct MosaicBackendConfig {
    custom_call_config: CustomCallConfig,
    scoped_memory_configs: [ScopedMemory; 1],
}

#[derive(Serialize)]
struct CustomCallConfig {
    body: String,
    cost_estimate: CostEstimate,
    needs_layout_passes: bool,
}

/// Memory reserved for the kernel while it runs.
#[derive(Serialize)]
struct ScopedMemory {
    memory_space: usize,
    offset: usize,
    size: usize,
}

/// Number of the VMEM memory space.
const VMEM: usize = 1;

/// Cost estimate for one device, including the padding of blocks.
#[derive(Serialize)]
struct CostEstimate {
    flops: usize,
    transcendentals: usize,
    bytes_accessed: usize,
}

impl MosaicBackendConfig {
    fn new(shape: &AttentionShape, wanted: KernelResults, blocks: BlockSizes, tpu: Tpu, text: &str) -> Self {
        let scores = shape.rows * shape.heads * blocks.scores(shape);
        let size = shape.dtype.size();
        let queries = shape.rows * shape.queries * shape.heads * shape.dim;
        // Keys and values are read for every block of queries, unless a single block holds all keys.
        let reads = if blocks.keys >= shape.keys { 1 } else { shape.queries.div_ceil(blocks.queries) };
        let keys = reads * shape.rows * shape.keys * shape.heads * shape.dim;
        let out = match wanted {
            KernelResults::Normalized => queries * size,
            KernelResults::Partial => (queries + 2 * shape.rows * shape.queries * text::LANES) * DType::F32.size(),
        };
        MosaicBackendConfig {
            custom_call_config: CustomCallConfig {
                body: STANDARD.encode(text),
                cost_estimate: CostEstimate {
                    flops: 4 * scores * shape.dim,
                    transcendentals: scores,
                    bytes_accessed: queries * size + 2 * keys * size + out,
                },
                needs_layout_passes: true,
            },
            scoped_memory_configs: [ScopedMemory { memory_space: VMEM, offset: 0, size: tpu.memory() }],
        }
    }
}
