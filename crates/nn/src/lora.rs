//! LoRAs that are added beside the weights of linear layers: `y = x·W + (x·A)·B`. Strength and alpha are factors of `B`.

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

/// The product of an input and the matrices `A` of one linear layer, or of several that are fused.
pub(super) struct LoraInput {
    /// `x·A`, `[rows…, rank]`; `[rows…, layers, rank]` for fused layers.
    product: Value,
    up: Value,
}

impl LoraInput {
    /// Multiplies `x [rows…, in]` by the matrix `A` of the linear layer at `p`. `None`: the layer has no LoRA matrices.
    pub(super) fn of_layer(p: &Params, x: &Value, out: &[usize], out_axes: &[Axis], in_axis: Axis) -> Option<Self> {
        let rank = p.lora_rank()?;
        let inner = x.dim(-1);
        let down = p.get(LORA_DOWN, &[rank, inner], &[Axis::Replicated, in_axis], down_init(inner));
        let stored = [out.iter().product(), rank];
        let (shape, axes) = ([out, &[rank]].concat(), [out_axes, &[Axis::Replicated]].concat());
        let up = p.get_as(LORA_UP, &stored, &shape, &axes, UP_INIT);
        Some(LoraInput { product: linear_nd(p, x, &down), up })
    }

    /// Multiplies `x` by the matrices `A` of the linear layers `names` with a single dot. The layers have the same
    /// input and the same output dimensions.
    pub(super) fn of_fused(
        p: &Params,
        names: &[&str],
        x: &Value,
        out: &[usize],
        out_axes: &[Axis],
        in_axis: Axis,
    ) -> Option<Self> {
        let rank = p.lora_rank()?;
        let inner = x.dim(-1);
        let (downs, ups) = (full_names(names, LORA_DOWN), full_names(names, LORA_UP));
        let shape = [rank, inner];
        let down = p.fused(&refs(&downs), &shape, &shape, &[Axis::Replicated, in_axis], down_init(inner));
        let stored = [out.iter().product(), rank];
        let (shape, axes) = ([out, &[rank]].concat(), [out_axes, &[Axis::Replicated]].concat());
        let up = p.fused(&refs(&ups), &shape, &stored, &axes, UP_INIT);
        Some(LoraInput { product: linear_nd(p, x, &down), up })
    }

    /// Adds the LoRAs to the result `y [rows…, out…]` of the layer.
    pub(super) fn add_to(&self, p: &Params, y: &Value) -> Value {
        y + linear_nd(p, &self.product, &self.up)
    }

    /// Adds the LoRAs of the fused layer `i` to its result `y [b, n, out…]`.
    pub(super) fn add_fused(&self, p: &Params, y: &Value, i: usize) -> Value {
        y + linear_nd(p, &self.product.at(2, i), &self.up.at(0, i))
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
