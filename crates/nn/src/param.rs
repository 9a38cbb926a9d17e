//! Parameters and placements of a program, used for loading, random initialization, counts and reports.

use serde::{Deserialize, Serialize};

use super::layout::Axis;
use ltx2_stablehlo::{DType, Sharding, Type};

/// Normal distribution of a parameter's values in randomly initialized models.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Init {
    /// Mean of the distribution; the value of every element if `std` is 0.
    pub mean: f32,
    /// Standard deviation of the distribution.
    pub std: f32,
}

impl Init {
    /// Maximum distance of a random value from the mean, in standard deviations.
    pub(crate) const LARGEST_DEVIATION: f32 = 3.4642;

    /// Creates a distribution with mean 0.
    pub const fn normal(std: f32) -> Self {
        Init { mean: 0.0, std }
    }
}

/// Tensors of the checkpoint that a parameter is loaded from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Tensors of equal shape, concatenated in row-major order.
    Stack {
        /// Names of the tensors in the checkpoint, in order.
        keys: Vec<String>,
        /// Shape of each tensor in the checkpoint.
        shape: Vec<usize>,
    },
    /// Weights `[out, in]` of equal shape whose rows are rotated and then quantized to 8-bit integers, concatenated in
    /// row-major order.
    Rotated {
        /// Names of the weights in the checkpoint, in order.
        keys: Vec<String>,
        /// Shape of each weight in the checkpoint.
        shape: [usize; 2],
    },
    /// One tensor with permuted axes: dimension `i` of the parameter has stride `strides[i]` in the tensor.
    View {
        /// Name of the tensor in the checkpoint.
        key: String,
        /// Shape of the tensor in the checkpoint.
        shape: Vec<usize>,
        /// Strides of the parameter's dimensions, in elements.
        strides: Vec<usize>,
    },
    /// Dequantization scales of tensors that are quantized to 8 bits: one scale per row, concatenated over the tensors.
    Scales {
        /// Names of the quantized tensors in the checkpoint, in order.
        keys: Vec<String>,
        /// Shape of each tensor in the checkpoint.
        shape: [usize; 2],
        /// 8-bit element type.
        of: DType,
        /// Whether the rows are rotated before they are quantized.
        rotated: bool,
    },
}

impl Source {
    /// Returns unique names of the sources, in order: tensor names, with `.scale` appended for scales.
    pub fn names(&self) -> Vec<String> {
        match self {
            Source::Stack { keys, .. } | Source::Rotated { keys, .. } => keys.clone(),
            Source::View { key, .. } => vec![key.clone()],
            Source::Scales { keys, .. } => keys.iter().map(|key| format!("{key}.scale")).collect(),
        }
    }

    /// Returns the shape of each tensor in the checkpoint.
    pub fn shape(&self) -> &[usize] {
        match self {
            Source::Stack { shape, .. } | Source::View { shape, .. } => shape,
            Source::Rotated { shape, .. } | Source::Scales { shape, .. } => shape,
        }
    }

    /// Returns every checkpoint tensor that the parameter reads, with its shape.
    pub fn tensors(&self) -> Vec<(&str, &[usize])> {
        match self {
            Source::Stack { keys, .. } | Source::Rotated { keys, .. } | Source::Scales { keys, .. } => {
                keys.iter().map(|k| (k.as_str(), self.shape())).collect()
            }
            Source::View { key, shape, .. } => vec![(key, shape)],
        }
    }
}

/// A parameter of a program: an argument whose value comes from a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// Name of the model component, such as `transformer` or `vae`.
    pub component: &'static str,
    /// Name of the argument: the component, then the checkpoint name. In a stack, `*` or a label replaces the layer
    /// number.
    pub name: String,
    /// Type on the device, including the leading dimension of stacked layers.
    pub ty: Type,
    /// Logical axes of the dimensions of `ty`.
    pub axes: Vec<Axis>,
    /// Checkpoint tensors that hold the values.
    pub source: Source,
    /// Distribution of the values in randomly initialized models.
    pub init: Init,
}

impl Param {
    /// Returns the size of the unsharded parameter in bytes.
    pub fn bytes(&self) -> usize {
        self.ty.elements() * self.ty.dtype.size()
    }
}

/// Placement of a tensor of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct ValuePlacement {
    /// Name scope of the first use.
    pub scope: String,
    /// `component.name` of a parameter or activation, or the name of a program input.
    pub tensor: String,
    /// Global (unsharded) type.
    pub ty: Type,
    /// Logical axes of the dimensions of `ty`.
    pub axes: Vec<Axis>,
    /// Mesh axes of each dimension.
    pub sharding: Sharding,
    /// Rules that shard a dimension, as `file:line: axis: [mesh axes]`.
    pub rules: Vec<String>,
    /// Role of the tensor in its program.
    pub role: Role,
}

/// Role of a tensor in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A parameter that is used with its stored sharding.
    Parameter,
    /// An FSDP-sharded parameter: storage rules shard it further, and it is gathered before its use.
    #[serde(rename = "stored")]
    FsdpSharded,
    /// An input, an output or an intermediate value.
    Activation,
}
