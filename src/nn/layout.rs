//! Logical axes and how a layout maps them to mesh axes. Models speak only of logical axes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::hlo::{Mesh, Sharding, Type};

/// What a dimension of a parameter or activation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Videos of one run.
    Batch,
    /// Guidance branches: conditional, negative, …
    Branch,
    /// Guidance branches times videos, branches outermost: placed as `branch`, then `batch`.
    Rows,
    /// Video tokens.
    VideoSequence,
    /// Audio tokens.
    AudioSequence,
    /// Text tokens.
    TextSequence,
    /// The residual stream's width.
    Embed,
    /// Attention heads.
    Heads,
    /// Heads that share keys and values.
    KvHeads,
    /// Width of a head.
    HeadDim,
    /// Inner width of a feed-forward layer.
    Mlp,
    /// Stacked layers of a loop.
    Layers,
    /// Rows of an embedding table.
    Vocab,
    /// Video frames.
    Frames,
    /// Rows of a picture, or mel time.
    Height,
    /// Columns of a picture, or mel bins.
    Width,
    /// Channels of a convolution.
    Channels,
    /// Samples of a waveform.
    Samples,
    /// A dimension that is never split.
    Whole,
}

/// Why a layout does not fit a tensor.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum LayoutError {
    /// A rule names an axis that the mesh lacks.
    #[error("rule for '{axis:?}' names mesh axis '{mesh_axis}', the mesh has {mesh}")]
    UnknownMeshAxis {
        /// Logical axis.
        axis: Axis,
        /// Missing mesh axis.
        mesh_axis: String,
        /// The mesh.
        mesh: String,
    },
    /// One mesh axis would split two dimensions.
    #[error("tensor '{tensor}' {ty} would be split twice by mesh axis '{mesh_axis}'")]
    Twice {
        /// Tensor.
        tensor: String,
        /// Its type.
        ty: String,
        /// Mesh axis.
        mesh_axis: String,
    },
    /// A size does not divide.
    #[error("tensor '{tensor}': {why}")]
    Indivisible {
        /// Tensor.
        tensor: String,
        /// Dimension, sizes and mesh axis.
        why: String,
    },
}

/// A mesh and the rules that place logical axes on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// The devices.
    pub mesh: Mesh,
    /// For each logical axis the mesh axes that split it, outer first.
    pub rules: BTreeMap<Axis, Vec<String>>,
}

impl Default for Layout {
    /// One device.
    fn default() -> Self {
        Layout { mesh: Mesh { axes: Vec::new() }, rules: BTreeMap::new() }
    }
}

impl Layout {
    /// Checks that every rule names existing mesh axes.
    ///
    /// # Errors
    /// [`LayoutError::UnknownMeshAxis`].
    pub fn new(mesh: Mesh, rules: BTreeMap<Axis, Vec<String>>) -> Result<Self, LayoutError> {
        for (&axis, mesh_axes) in &rules {
            if let Some(bad) = mesh_axes.iter().find(|a| mesh.size(a).is_none()) {
                let mesh = mesh.to_string();
                return Err(LayoutError::UnknownMeshAxis { axis, mesh_axis: bad.clone(), mesh });
            }
        }
        Ok(Layout { mesh, rules })
    }

    /// True when there is nothing to place.
    pub fn is_single(&self) -> bool {
        self.mesh.devices() == 1
    }

    fn mesh_axes(&self, axis: Axis) -> Vec<String> {
        let rule = |a: Axis| self.rules.get(&a).cloned().unwrap_or_default();
        match axis {
            Axis::Whole => Vec::new(),
            Axis::Rows => [rule(Axis::Branch), rule(Axis::Batch)].concat(),
            other => rule(other),
        }
    }

    /// The placement of a tensor, or `None` on one device.
    ///
    /// # Errors
    /// A mesh axis used twice, or a dimension that does not divide: with tensor, sizes and axis.
    pub fn sharding(&self, tensor: &str, ty: &Type, axes: &[Axis]) -> Result<Option<Sharding>, LayoutError> {
        if self.is_single() {
            return Ok(None);
        }
        let sharding = Sharding(axes.iter().map(|&a| self.mesh_axes(a)).collect());
        let mut seen: Vec<&String> = Vec::new();
        for a in sharding.0.iter().flatten() {
            if seen.contains(&a) {
                return Err(LayoutError::Twice { tensor: tensor.into(), ty: ty.to_string(), mesh_axis: a.clone() });
            }
            seen.push(a);
        }
        sharding.local(ty, &self.mesh).map_err(|why| LayoutError::Indivisible { tensor: tensor.into(), why })?;
        Ok(Some(sharding))
    }
}
