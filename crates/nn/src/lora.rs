//! LoRAs that are added in linear layers: `y = x·Wᵀ + (x·Aᵀ)·Bᵀ` or, for inputs with many rows, `y = x·(W + B·A)ᵀ`.
//! Strength and alpha are factors of `B`.

use super::layout::Axis;
use super::linear::linear_nd;
use super::param::Init;
use super::params::Params;
use ltx2_stablehlo::Value;

/// LoRA matrices in the programs of a component: each linear layer of its layer loops has two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AddedLoras {
    /// Component whose layer loops have the matrices.
    pub component: &'static str,
    /// Total rank of the LoRAs, rounded up; the remaining rows of `A` and columns of `B` are zeros.
    pub rank: usize,
}

/// Name of `A`, `[rank, in]`, next to the weight of a linear layer.
pub const LORA_DOWN: &str = "lora_A.weight";
/// Name of `B`, `[out, rank]`.
pub const LORA_UP: &str = "lora_B.weight";

/// Largest rank for which the matrices `B` of fused layers form one block-diagonal matrix. With larger ranks, the products
/// with its zeros take longer than a copy of the separate products.
const LARGEST_DIAGONAL_RANK: usize = 128;

/// LoRA matrices of one linear layer, or of several that are fused.
pub(super) struct LoraMatrices {
    /// `A`, `[rank, in]`; `[layers, rank, in]` for fused layers.
    down: Value,
    /// `B`, `[out…, rank]`; `[layers, out…, rank]` for fused layers.
    up: Value,
    is_fused: bool,
    /// Number of shards of the layer's weight.
    shards: usize,
}

impl LoraMatrices {
    /// Returns the matrices of the linear layers `names` at `p`, which have the same input and the same output dimensions;
    /// of the layer at `p` itself if `names` is empty. `None`: the layers have no LoRA matrices.
    pub(super) fn new(
        p: &Params,
        names: &[&str],
        inner: usize,
        out: &[usize],
        out_axes: &[Axis],
        in_axis: Axis,
    ) -> Option<Self> {
        let rank = p.lora_rank()?;
        let (down, up) = ([rank, inner], [out, &[rank]].concat());
        let stored = [out.iter().product(), rank];
        let (down_axes, up_axes) = ([Axis::Replicated, in_axis], [out_axes, &[Axis::Replicated]].concat());
        let is_fused = !names.is_empty();
        let (down, up) = if is_fused {
            let (downs, ups) = (full_names(names, LORA_DOWN), full_names(names, LORA_UP));
            let down = p.fused(&refs(&downs), &down, &down, &down_axes, down_init(inner));
            (down, p.fused(&refs(&ups), &up, &stored, &up_axes, UP_INIT))
        } else {
            let down = p.get(LORA_DOWN, &down, &down_axes, down_init(inner));
            (down, p.get_as(LORA_UP, &stored, &up, &up_axes, UP_INIT))
        };
        let axes = out_axes.iter().chain([&in_axis]);
        let shards = axes.map(|&axis| p.layout().parts(&p.activation("weight"), axis)).product();
        Some(LoraMatrices { down, up, is_fused, shards })
    }

    /// Returns `xAᵀBᵀ`, `[rows…, out…]`, for `x [rows…, in]`.
    pub(super) fn values(&self, p: &Params, x: &Value) -> Value {
        let product = linear_nd(p, x, &self.down);
        if !self.is_fused {
            return linear_nd(p, &product, &self.up);
        }
        let (layers, rank) = (self.up.dim(0), self.up.dim(-1));
        let each = (0..layers).map(|i| self.up.at(0, i).unsqueeze(0));
        if rank > LARGEST_DIAGONAL_RANK {
            let each: Vec<Value> = each.enumerate().map(|(i, up)| linear_nd(p, &product.at(-2, i), &up)).collect();
            return p.builder().concat(&each.iter().collect::<Vec<_>>(), x.rank() as isize - 1);
        }
        let total = layers * rank;
        let each = each.enumerate().map(|(i, up)| up.pad(-1, i * rank, total - (i + 1) * rank, 0.0));
        let each: Vec<Value> = each.collect();
        let diagonal = p.builder().concat(&each.iter().collect::<Vec<_>>(), 0);
        linear_nd(p, &product.reshape([&x.dims()[..x.rank() - 1], &[total]].concat()), &diagonal)
    }

    /// Returns the sum of the layer's weight `[out…, in]` and `B·A` if this takes less memory traffic than adding
    /// [`LoraMatrices::values`] to the product of `x` and the weight.
    pub(super) fn folded(&self, p: &Params, x: &Value, weight: &Value) -> Option<Value> {
        let (inner, rows) = (x.dim(-1), x.ty().elements() / x.dim(-1));
        let outer = weight.ty().elements() / inner;
        // The sum reads and writes the weight. The products read the input and write an output-sized result; cuBLAS
        // reads this result as the initial accumulators of a matmul that is limited by compute.
        let (sum, products) = (2 * inner * outer / self.shards, rows * (inner + outer) / p.layout().mesh.devices());
        if sum > products {
            return None;
        }
        let out: String = ('o'..'x').take(self.up.rank() - 1).collect();
        let layer = if self.is_fused { "o" } else { "" };
        let equation = format!("{out}y,{layer}yz->{out}z");
        let update = x.builder().einsum(&equation, &self.up, &self.down, weight.dtype());
        // XLA's CUDA compiler initializes the accumulators of this product with the weight.
        Some(weight + update.reshape(weight.dims().to_vec()))
    }
}

/// Returns the names of a tensor of several layers.
pub(super) fn full_names(layers: &[&str], tensor: &str) -> Vec<String> {
    layers.iter().map(|layer| format!("{layer}.{tensor}")).collect()
}

pub(super) fn refs(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}

fn down_init(inner: usize) -> Init {
    Init::normal((inner as f32).sqrt().recip())
}

const UP_INIT: Init = Init::normal(0.02);

impl Params {
    /// Returns the rank of the LoRA matrices of linear layers under this prefix. `None`: the layers have no LoRA
    /// matrices.
    pub(super) fn lora_rank(&self) -> Option<usize> {
        let is_covered = |loras: &AddedLoras| self.layer.is_some() && self.is_of(loras.component);
        self.added_loras.filter(is_covered).map(|loras| loras.rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Build, Lowering, Quantization, linear};
    use ltx2_stablehlo::{DType, Type};

    /// Returns name, type and dimensions of the parameters of a loop over two quantized layers and one layer outside.
    fn declared(component: &'static str, unroll_layers: bool) -> Vec<(String, DType, Vec<usize>)> {
        let build = Build {
            lowering: Lowering { unroll_layers, ..Lowering::default() },
            quantization: Quantization::Fp8,
            added_loras: Some(AddedLoras { component: "transformer", rank: 16 }),
            ..Build::new(DType::BF16)
        };
        let p = Params::new("layers", component, &build);
        let x = p.builder().argument("x", Type::new(DType::BF16, [1, 2, 8]));
        let layer = |p: &Params, x: &Value| linear(&p.pp("proj"), x, 8, false, [Axis::Embed, Axis::Mlp]);
        let y = p.each_layer_quantized("blocks", 2, |_| true, &[x], |p, _, x| vec![layer(p, &x[0])]);
        p.builder().finish(&[("y", &layer(&p, &y[0]))]).expect("builds");
        p.declared().into_iter().map(|param| (param.name, param.ty.dtype, param.ty.dims)).collect()
    }

    /// Returns the numbers of dots with a result like the weight and with a result of the LoRA's rank, in a program with
    /// one layer.
    fn dots(rows: usize, quantization: Quantization) -> [usize; 2] {
        let added_loras = Some(AddedLoras { component: "transformer", rank: 16 });
        let build = Build { quantization, added_loras, ..Build::new(DType::BF16) };
        let p = Params::new("layers", "transformer", &build);
        let x = p.builder().argument("x", Type::new(DType::BF16, [1, rows, 32]));
        let layer = |p: &Params, x: &Value| linear(&p.pp("proj"), x, 32, false, [Axis::Embed, Axis::Mlp]);
        let y = p.each_layer_quantized("blocks", 1, |_| true, &[x], |p, _, x| vec![layer(p, &x[0])]);
        let text = p.builder().finish(&[("y", &y[0])]).expect("builds").text;
        let count = |result: &str| {
            text.lines().filter(|line| line.contains("dot_general") && line.contains(&format!("-> {result}"))).count()
        };
        [count("tensor<32x32x"), count(&format!("tensor<1x{rows}x16x"))]
    }

    #[test]
    fn only_inputs_with_many_rows_and_plain_weights_use_sums_of_weight_and_lora() {
        assert_eq!(dots(31, Quantization::None), [0, 1]);
        assert_eq!(dots(33, Quantization::None), [1, 0]);
        assert_eq!(dots(33, Quantization::Fp8), [0, 1]);
    }

    #[test]
    fn only_layers_of_the_component_have_matrices_and_their_weights_stay_quantized() {
        let all = declared("transformer", false);
        let want = [
            ("blocks.*.proj.weight", DType::F8E4M3FN, vec![2, 8, 8]),
            ("blocks.*.proj.weight_scale", DType::F32, vec![2, 8]),
            ("blocks.*.proj.lora_A.weight", DType::BF16, vec![2, 16, 8]),
            ("blocks.*.proj.lora_B.weight", DType::BF16, vec![2, 8, 16]),
            ("proj.weight", DType::BF16, vec![8, 8]),
        ];
        assert_eq!(all, want.map(|(name, dtype, dims)| (format!("transformer.{name}"), dtype, dims)));
        assert!(declared("connectors", false).iter().all(|(name, ..)| !name.contains("lora_")));
        let unrolled = declared("transformer", true);
        let matrices: Vec<_> = unrolled.iter().filter(|(name, ..)| name.contains("lora_")).collect();
        assert_eq!(matrices.len(), 4, "{matrices:?}");
        assert!(matrices.iter().all(|(_, dtype, dims)| *dtype == DType::BF16 && dims.len() == 2));
    }
}
