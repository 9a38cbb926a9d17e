//! Options for building programs that do not depend on the model configuration or on tensor sizes.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::layout::Layout;
use super::lora::AddedLoras;
use crate::kernels::Kernel;
use ltx2_base::with_defaults;
use ltx2_stablehlo::DType;

/// Build options shared by all programs of a run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Build {
    /// Element type of weights and activations; with f32, matmuls use full precision.
    pub dtype: DType,
    /// Rounding points of a bf16 forward pass.
    pub numerics: RoundingPoints,
    /// Mesh, and sharding rules of all tensors.
    pub layout: Layout,
    /// Platform-specific choices between equivalent implementations of operations.
    pub lowering: Lowering,
    /// Quantization of the transformer block weights.
    pub quantization: Quantization,
    /// Checkpoint names of linear weights that keep the element type of the run although other weights of their layers
    /// are quantized.
    pub unquantized: Arc<BTreeSet<String>>,
    /// Selection of the weights that are in host memory. `None`: all weights are in device memory.
    pub streaming: Option<Streaming>,
    /// LoRAs that programs add at run time. `None`: linear layers have no LoRA matrices.
    pub added_loras: Option<AddedLoras>,
}

/// Streaming of weights: the large weights of layer loops are in host memory, and programs copy them to the device
/// before each use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Streaming {
    /// Component of which some layers stay in device memory. All layers of other components are streamed.
    pub component: &'static str,
    /// Number of layers of `component` whose weights stay in device memory.
    pub resident: usize,
    /// Size in bytes of the smallest weight of a layer that is streamed. Smaller weights stay in device memory.
    pub min_bytes: usize,
}

/// Element type of the transformer block weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Quantization {
    /// Not quantized: weights have the element type of the run.
    #[default]
    None,
    /// 8-bit floats, for the weights and for the activations that are multiplied with them.
    Fp8,
    /// 8-bit integers.
    Int8 {
        /// Whether the activations that are multiplied with the weights are also quantized.
        activations: bool,
        /// Whether weights and activations are rotated in groups of [`ROTATED_INPUTS`] before they are quantized
        /// (int8-convrot). If so, all blocks of the transformer and of the connectors, and all layers of the text
        /// encoder, are quantized, except for the weights of [`Build::unquantized`].
        rotated: bool,
    },
}

/// Number of inputs of a linear layer that are rotated together.
pub const ROTATED_INPUTS: usize = 256;

impl Quantization {
    /// Returns whether weights and activations are rotated before they are quantized.
    pub fn is_convrot(self) -> bool {
        matches!(self, Quantization::Int8 { rotated: true, .. })
    }
}

/// Points at which a bf16 forward pass rounds, which differ between the reference implementations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum RoundingPoints {
    /// RoPE in f32, rounded once at the end.
    #[default]
    Default,
    /// RoPE with tables rounded to bf16. The product with the cosine is rounded to bf16; an f32 multiply-add then adds
    /// the product with the sine.
    Official,
}

/// Lowering of 3D convolutions (time, height, width).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Conv3dLowering {
    /// One 3D convolution; faster on GPUs.
    #[default]
    Direct,
    /// One 2D convolution per kernel frame, summed in f32. This form is used on TPUs, whose compiler takes minutes for
    /// each 3D convolution.
    Taps,
}

impl Build {
    /// Creates options for one device with default lowerings.
    pub fn new(dtype: DType) -> Self {
        Build {
            dtype,
            numerics: RoundingPoints::Default,
            layout: Layout::default(),
            lowering: Lowering::default(),
            quantization: Quantization::None,
            unquantized: Arc::default(),
            streaming: None,
            added_loras: None,
        }
    }

    /// Returns these options with the element type `dtype`.
    #[must_use]
    pub fn with_dtype(&self, dtype: DType) -> Self {
        Build { dtype, ..self.clone() }
    }

    /// Returns these options with attention in plain XLA operations if the plugin may reject the attention kernel,
    /// otherwise `None`. Programs of both variants are compatible: each can use the results of the other.
    #[must_use]
    pub fn without_attention_kernel(&self) -> Option<Self> {
        let plain = Lowering { attention: Kernel::Plain, windows: WindowForm::Bias, ..self.lowering };
        self.lowering.attention_may_be_rejected.then(|| Build { lowering: plain, ..self.clone() })
    }

    /// Returns these options for a program with `count` guidance branches.
    #[must_use]
    pub fn for_branches(&self, count: usize) -> Self {
        let layout = if count == 1 { self.layout.for_single_branch() } else { self.layout.clone() };
        Build { layout, ..self.clone() }
    }
}

with_defaults! {
    /// Choices between equivalent implementations of operations. A platform's compiler may prefer or support only one
    /// of them.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Lowering {
        /// Lowering of 3D convolutions.
        pub conv3d: Conv3dLowering = Conv3dLowering::Direct,
        /// Whether a dot of bf16 operands may produce f32; otherwise the operands are converted to f32 first.
        pub mixed_precision_dot: bool = true,
        /// Whether dots and attention are computed separately for each row of the CFG batch. This is needed on
        /// platforms where the bits of a dot depend on its number of rows, so that f32 results do not depend on the
        /// sharding of the batch.
        pub batch_invariant: bool = false,
        /// Attention kernel; [`Lowering::with_attention`] replaces it together with the options that depend on it.
        pub attention: Kernel = Kernel::Plain,
        /// Whether the plugin version is untested and may reject the attention kernel. A rejected program is rebuilt
        /// with plain XLA operations.
        pub attention_may_be_rejected: bool = false,
        /// Granularity of padding in tokens per shard, for sequences whose length is not divisible by their number of
        /// shards. The cuDNN attention kernel requires mask lengths that are multiples of 8.
        pub sequence_unit: usize = 1,
        /// Dimension order in which the text keys and values of all layers are stored.
        pub text_stacks: StackOrder = StackOrder::HeadsTokens,
        /// Whether biases and GELU are written in a form that the compiler fuses into the epilogue of the preceding
        /// dot.
        pub fuse_epilogues: bool = false,
        /// Whether dots of 8-bit integers produce i32. If not, they produce the element type of the run.
        pub integer_sums: bool = false,
        /// Minimum number of tokens, over all batch entries, for which activations are quantized to 8-bit integers. A
        /// dot with fewer tokens is bound by reading its weights, not by arithmetic.
        pub min_integer_rows: usize = 0,
        /// Whether a Triton kernel rotates and quantizes the activations of int8-convrot layers, if it supports them and
        /// the program has one device. If not, a matmul rotates them.
        pub rotates_by_kernel: bool = false,
        /// Method by which RoPE obtains, for each feature, the other feature of its pair.
        pub rope: RopeForm = RopeForm::Halves,
        /// Method by which attention excludes keys outside a window if no fused window kernel is used.
        pub windows: WindowForm = WindowForm::Bias,
        /// Whether convolutions that pad by reflection or replication gather the padded elements by index. XLA fuses
        /// the gathers of all dimensions into one pass. Otherwise, slices are concatenated, with one pass per
        /// dimension.
        pub pads_by_index: bool = false,
        /// Whether loops over identical layers are unrolled, with separate arguments for each layer. This avoids
        /// copying slices of stacked weights, at the cost of a longer program.
        pub unroll_layers: bool = false,
        /// Form of the products of a weight and a single row in text generation.
        pub row_products: RowProductForm = RowProductForm::Dot,
        /// Memory tiling of the stacked bf16 weights that layer loops read; `None`: the platform's default.
        pub stack_tiles: Option<&'static str> = None,
    }
}

/// Form of the product of a weight and a single row, whose time is that of reading the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowProductForm {
    /// A dot.
    Dot,
    /// A sum over the last dimension of the weight, multiplied by the row. The compiler fuses both operations.
    Sum,
    /// A Triton kernel, or a sum if the kernel does not support the operands or the program has several devices.
    Kernel,
}

/// Dimension order of stacked text keys or values, after the dimensions for layers and batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StackOrder {
    /// `[tokens, heads, dim]`, the order of fused attention kernels.
    TokensHeads,
    /// `[heads, tokens, dim]`.
    HeadsTokens,
    /// As `HeadsTokens`, except that the order is `[heads, dim, tokens]` for values, and for keys whose head dimension
    /// is not a multiple of 128 (the lanes of a vector register).
    ValuesTokensLast,
    /// As `HeadsTokens`, except that the order is `[heads, dim, tokens]` if the head dimension is not a multiple of
    /// 128.
    NarrowTokensLast,
}

/// Method by which attention excludes keys outside the window of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WindowForm {
    /// Additive bias on the scores of each query.
    Bias,
    /// Extra features appended to queries and keys, for kernels that do not support a bias per query.
    Features,
}

/// Method by which RoPE obtains, for each feature, the other feature of its pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeForm {
    /// Separate computation of the first features and the second features of all pairs, followed by a concatenation.
    Halves,
    /// The operation `reverse`, which loop-fusing compilers fuse with the operation that reads its result, so that
    /// queries, keys and values are processed in a single pass over memory.
    Reversal,
    /// Product with a signed permutation matrix. The TPU compiler fuses this dot with the preceding norm and the
    /// following rounding; slicing vector registers in half would take separate passes in f32.
    Product,
}

impl Lowering {
    /// Returns this lowering with the attention kernel `attention`, and with the values of `text_stacks` and `windows`
    /// that the kernel needs.
    #[must_use]
    pub fn with_attention(self, attention: Kernel) -> Self {
        // On TPUs, plain XLA attention reads values with tokens last and supports any bias.
        let (text_stacks, windows) = match (self.attention, attention) {
            (Kernel::Mosaic(_), Kernel::Plain) => (StackOrder::ValuesTokensLast, WindowForm::Bias),
            _ => (self.text_stacks, self.windows),
        };
        Lowering { attention, text_stacks, windows, ..self }
    }
}
