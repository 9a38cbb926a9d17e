//! Choices by which a network becomes a program, beside its configuration and its sizes.

use super::layout::Layout;
use crate::defaults::with_defaults;
use crate::hlo::DType;
use crate::kernels::{Kernel, Tpu};

/// The choices every program of a run shares.
#[derive(Clone, Debug, PartialEq)]
pub struct Build {
    /// Weights and activations; f32 computes matmuls at full precision.
    pub dtype: DType,
    pub numerics: Numerics,
    pub layout: Layout,
    /// Forms that the platform's compiler takes well.
    pub lowering: Lowering,
    /// Weights of the transformer's blocks.
    pub quantization: Quantization,
}

/// Element type of the weights of the transformer's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Quantization {
    /// In the run's element type.
    #[default]
    None,
    /// In 8-bit floats, and so the activations that they are multiplied with.
    Fp8,
    /// In 8-bit integers.
    Int8 {
        /// Whether the activations that they are multiplied with are too; else they are in the run's element type.
        activations: bool,
    },
}

/// Rounding order of the bf16 forward pass, where the references differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Numerics {
    /// RoPE in f32, rounded once.
    #[default]
    Default,
    /// RoPE with bf16 tables: the product with the cosine is rounded, then one f32 multiply-add.
    Official,
}

/// Form of a convolution over time, height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Conv3dLowering {
    /// One three-dimensional convolution: the faster program on GPUs.
    #[default]
    Direct,
    /// A two-dimensional convolution for each kernel frame, summed in f32: the TPU compiler needs minutes for each
    /// three-dimensional one.
    Taps,
}

impl Build {
    /// One device, the platform's default forms.
    pub fn new(dtype: DType) -> Self {
        Build {
            dtype,
            numerics: Numerics::Default,
            layout: Layout::default(),
            lowering: Lowering::default(),
            quantization: Quantization::None,
        }
    }

    /// The same choices with another element type.
    #[must_use]
    pub(crate) fn with_dtype(&self, dtype: DType) -> Self {
        Build { dtype, ..self.clone() }
    }

    /// The same choices with attention in XLA's own operations, where the plugin may refuse the kernel. Programs of both
    /// read each other's results.
    #[must_use]
    pub(crate) fn without_refused_kernel(&self) -> Option<Self> {
        let plain = Lowering { attention: Kernel::Plain, windows: WindowForm::Bias, ..self.lowering };
        self.lowering.attention_may_be_refused.then(|| Build { lowering: plain, ..self.clone() })
    }

    /// The same choices for a program of so many guidance branches.
    #[must_use]
    pub(crate) fn of_branches(&self, count: usize) -> Self {
        let layout = if count == 1 { self.layout.of_one_branch() } else { self.layout.clone() };
        Build { layout, ..self.clone() }
    }
}

with_defaults! {
    /// Forms of equal value, of which a platform's compiler prefers or only knows one.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Lowering {
        /// Form of convolutions over time, height and width.
        pub conv3d: Conv3dLowering = Conv3dLowering::Direct,
        /// Whether a dot of bf16 operands may give an f32 result; else the operands are widened first.
        pub mixed_precision_dot: bool = true,
        /// Whether a dot, and attention, is written row by row of the CFG batch, because its bits depend on how many rows it has:
        /// f32 runs then give one result however the batch is sharded.
        pub batch_invariant: bool = false,
        pub attention: Kernel = Kernel::Plain,
        /// Whether the plugin is one that attention's kernel was never tried with: a program that it refuses is written
        /// anew in XLA's own operations.
        pub attention_may_be_refused: bool = false,
        /// Tokens on a device are a multiple of this where a sequence is padded to divide: a fused kernel takes no mask of
        /// another number of keys.
        pub sequence_unit: usize = 1,
        /// Order of stacks of text keys and values, as attention reads them.
        pub text_stacks: StackOrder = StackOrder::HeadsTokens,
        /// Whether biases and GELU are written so that the compiler fuses them into the dot before them.
        pub fuse_epilogues: bool = false,
        /// Whether a product of 8-bit integers is written with an i32 result, before it is rounded; else with the result
        /// that its scales are multiplied with.
        pub integer_sums: bool = false,
        /// Fewest rows of activations in 8-bit integers: a product of fewer waits for its weights, not for the units.
        pub least_integer_rows: usize = 0,
        pub rope: RopeForm = RopeForm::Halves,
        pub windows: WindowForm = WindowForm::Bias,
        /// Whether padding at the edge of a frame is a gather by computed positions, all directions in one pass; else
        /// pieces are concatenated.
        pub pads_by_index: bool = false,
        /// Whether loops over equal layers are unrolled, each layer with arguments of its own: no slice of a stack is
        /// copied, for a program that is so many times longer.
        pub unroll_layers: bool = false,
        /// The tiles in which loops over layers read bf16 stacks, where they are not the platform's default.
        pub stack_tiles: Option<&'static str> = None,
    }
}

/// The order of a stack of text keys or values behind `[layers, rows]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StackOrder {
    /// `[tokens, heads, dim]`, as fused kernels read them.
    TokensHeads,
    /// `[heads, tokens, dim]`.
    HeadsTokens,
    /// As `HeadsTokens`, but `[heads, dim, tokens]` for values, and for keys of heads narrower than a vector register's
    /// 128 lanes.
    ValuesTokensLast,
    /// As `HeadsTokens`, but `[heads, dim, tokens]` for heads narrower than 128 lanes.
    NarrowTokensLast,
}

/// Form in which attention leaves out what is outside of a query's window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowForm {
    /// A bias on the scores of each query.
    Bias,
    /// Features of queries and keys behind those of a head, for kernels that take no such bias.
    Features,
}

/// Form in which RoPE reads the other feature of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeForm {
    /// Both halves are computed apart and joined.
    Halves,
    /// By a reversal, which compilers of loops fuse into what they read: queries, keys and values in one pass.
    Reversal,
    /// By a product with a matrix of ones, which a compiler of matrix units fuses with the norm before and the rounding
    /// after it: halves of a register would be cut out in f32 and joined again, each in a pass of its own.
    Product,
}

impl Lowering {
    /// The forms for a PJRT platform name (`cpu`, `cuda`, `tpu` …) and kind of device (`TPU v6 lite` …).
    pub fn of(platform: &str, kind: &str) -> Self {
        match platform {
            // The CPU runtime has no product of bf16 into f32 beyond a certain size.
            "cpu" => Lowering { mixed_precision_dot: false, batch_invariant: true, ..Lowering::default() },
            // A conv3d costs the TPU compiler minutes each.
            "tpu" => Lowering {
                conv3d: Conv3dLowering::Taps,
                attention: Kernel::Mosaic(Tpu::of(kind)),
                least_integer_rows: 1024,
                rope: RopeForm::Product,
                windows: WindowForm::Features,
                text_stacks: StackOrder::NarrowTokensLast,
                // Stacks in the default tiles of 8 rows would be copied whole before every run.
                stack_tiles: (kind == "TPU7x").then_some("T(16,128)(2,1)"),
                ..Lowering::default()
            },
            "cuda" => Lowering {
                attention: Kernel::Cudnn { required: false },
                sequence_unit: 8,
                text_stacks: StackOrder::TokensHeads,
                fuse_epilogues: true,
                integer_sums: true,
                rope: RopeForm::Reversal,
                pads_by_index: true,
                unroll_layers: true,
                ..Lowering::default()
            },
            _ => Lowering::default(),
        }
    }

    /// The same with another attention kernel.
    #[must_use]
    pub(crate) fn with_attention(self, attention: Kernel) -> Self {
        // On TPUs the matmuls of XLA's own operations read values with the tokens last, and take any bias.
        let (text_stacks, windows) = match (self.attention, attention) {
            (Kernel::Mosaic(_), Kernel::Plain) => (StackOrder::ValuesTokensLast, WindowForm::Bias),
            _ => (self.text_stacks, self.windows),
        };
        Lowering { attention, text_stacks, windows, ..self }
    }
}
