//! Parameters and placements of a program, as loading, random initialisation, counts and reports read them.

use serde::{Deserialize, Serialize};

use super::layout::Axis;
use crate::hlo::{DType, Sharding, Type};

/// The normal distribution that a random model draws a parameter from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Init {
    pub mean: f32,
    pub std: f32,
}

impl Init {
    /// No number drawn is further from its mean than this many deviations.
    pub(crate) const LARGEST_DEVIATION: f32 = 3.4642;

    /// The distribution of mean 0.
    pub(crate) const fn normal(std: f32) -> Self {
        Init { mean: 0.0, std }
    }
}

/// Location of a parameter's elements in the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Tensors of equal shape, one after the other in row-major order.
    Stack {
        /// Checkpoint names, in order.
        keys: Vec<String>,
        /// Shape of each in the checkpoint.
        shape: Vec<usize>,
    },
    /// One tensor read with its axes permuted: the parameter's dimension `i` walks the tensor with `strides[i]`.
    View {
        /// Checkpoint name.
        key: String,
        /// Shape in the checkpoint.
        shape: Vec<usize>,
        /// Element strides of the parameter's dimensions.
        strides: Vec<usize>,
    },
    /// Per-row dequantization scales of tensors that are quantized to 8 bits, one after the other.
    Scales {
        /// Checkpoint names of the tensors, in order.
        keys: Vec<String>,
        /// Shape of each in the checkpoint.
        shape: [usize; 2],
        /// The 8-bit type.
        of: DType,
    },
}

impl Source {
    /// Names of the tensors, in order; those of scales differ from what they scale.
    pub fn names(&self) -> Vec<String> {
        match self {
            Source::Stack { keys, .. } => keys.clone(),
            Source::View { key, .. } => vec![key.clone()],
            Source::Scales { keys, .. } => keys.iter().map(|key| format!("{key}.scale")).collect(),
        }
    }

    /// Shape of each tensor in the checkpoint.
    pub(crate) fn shape(&self) -> &[usize] {
        match self {
            Source::Stack { shape, .. } | Source::View { shape, .. } => shape,
            Source::Scales { shape, .. } => shape,
        }
    }

    /// Every checkpoint tensor it reads, with its shape.
    pub fn tensors(&self) -> Vec<(&str, &[usize])> {
        match self {
            Source::Stack { keys, .. } | Source::Scales { keys, .. } => {
                keys.iter().map(|k| (k.as_str(), self.shape())).collect()
            }
            Source::View { key, shape, .. } => vec![(key, shape)],
        }
    }
}

/// A parameter of a program: an argument filled from a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// Model folder: `transformer`, `vae`, …
    pub(crate) component: &'static str,
    /// Argument name: component, then the checkpoint's name with `*` for the layer.
    pub name: String,
    /// Type on the device, the stacking dimension first.
    pub ty: Type,
    pub axes: Vec<Axis>,
    pub source: Source,
    pub init: Init,
}

impl Param {
    /// Bytes of all its elements, however it is sharded.
    pub(crate) fn bytes(&self) -> usize {
        self.ty.elements() * self.ty.dtype.size()
    }
}

/// Placement of a tensor of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// Name scope of the first use.
    pub(crate) scope: String,
    /// `component.name` of a parameter or activation, or a program input's name.
    pub(crate) tensor: String,
    /// Global type.
    pub ty: Type,
    pub axes: Vec<Axis>,
    /// Mesh axes of each dimension.
    pub(crate) sharding: Sharding,
    /// Rules that shard something, as `file:line: axis: [mesh axes]`.
    pub(crate) rules: Vec<String>,
    pub(crate) role: Role,
}

/// Role of a placed tensor in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    /// A parameter that is computed with as it is stored.
    Parameter,
    /// An FSDP-sharded parameter: the storage rules shard it further, and it is gathered before its use.
    Stored,
    /// An input, a result, or a value between.
    Activation,
}
