//! Text keys and values of all layers, computed once and read in every denoising step. They are stored in the dimension
//! order that the attention implementation reads, so that the compiler does not transpose an entire stacked tensor.

use super::attention::Heads;
use super::build::StackOrder;
use super::layers::{LayerTensor, PerLayer};
use super::layout::Axis;
use super::params::Params;
use ltx2_stablehlo::{Type, Value};

/// Names, types and axes of the stacked keys and values of the text.
pub struct KvTensors {
    /// Tensors `<name>.k` and `<name>.v` of one layer.
    pub tensors: [LayerTensor; 2],
    orders: [[usize; 4]; 2],
}

/// Stacked keys and values of all layers, as program inputs.
#[derive(Clone)]
pub struct KvStack {
    kv: [PerLayer; 2],
    orders: [[usize; 4]; 2],
}

impl KvTensors {
    /// Describes keys and values `[rows, tokens, heads, dim]` in the element type of the run.
    pub fn new(p: &Params, name: &str, heads: Heads, [rows, tokens]: [usize; 2]) -> Self {
        let sizes = [rows, tokens, heads.count, heads.dim];
        let axes = [Axis::CfgBatch, Axis::TextSequence, Axis::Heads, Axis::HeadDim];
        let orders = p.lowering().text_stacks.orders(heads.dim);
        let tensor = |i: usize| LayerTensor {
            name: format!("{name}.{}", ["k", "v"][i]),
            ty: Type::new(p.dtype(), orders[i].map(|d| sizes[d])),
            axes: orders[i].map(|d| axes[d]).to_vec(),
        };
        KvTensors { tensors: [tensor(0), tensor(1)], orders }
    }

    /// Transposes a layer's keys and values `[rows, tokens, heads, dim]` into the dimension order of the stack.
    pub fn arrange(&self, kv: &[Value; 2]) -> [Value; 2] {
        [0, 1].map(|i| kv[i].transpose(&self.orders[i]))
    }

    /// Declares the stacks of `layers` layers as program inputs.
    pub fn input(&self, p: &Params, layers: usize) -> KvStack {
        KvStack { kv: self.tensors.each_ref().map(|t| p.layer_inputs(t, layers)), orders: self.orders }
    }
}

impl KvStack {
    /// Returns the number of tokens, including padding.
    pub fn tokens(&self) -> usize {
        self.orders[0].iter().zip(self.kv[0].dims()).find(|(d, _)| **d == 1).map_or(0, |(_, n)| *n)
    }

    /// Returns keys and values `[rows, tokens, heads, dim]` of the layer that `p` belongs to.
    pub fn of_layer(&self, p: &Params) -> [Value; 2] {
        [0, 1].map(|i| {
            let mut back = [0; 4];
            for (to, from) in self.orders[i].into_iter().enumerate() {
                back[from] = to;
            }
            p.of_layer(&self.kv[i]).transpose(&back)
        })
    }
}

impl StackOrder {
    /// Returns the dimension orders in which keys and values `[rows, tokens, heads, dim]` are stored.
    fn orders(self, dim: usize) -> [[usize; 4]; 2] {
        const TOKENS_LAST: [usize; 4] = [0, 2, 3, 1];
        const HEADS_FIRST: [usize; 4] = [0, 2, 1, 3];
        let narrow = if dim.is_multiple_of(128) { HEADS_FIRST } else { TOKENS_LAST };
        match self {
            StackOrder::TokensHeads => [[0, 1, 2, 3]; 2],
            StackOrder::HeadsTokens => [HEADS_FIRST; 2],
            StackOrder::ValuesTokensLast => [narrow, TOKENS_LAST],
            StackOrder::NarrowTokensLast => [narrow; 2],
        }
    }
}
