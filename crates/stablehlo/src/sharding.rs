//! Meshes, shardings and groups of devices.

use std::fmt;

use super::types::{Type, list};

/// Devices arranged along named axes, outermost axis first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct DeviceMesh {
    /// Name and size of each axis.
    pub axes: Vec<(String, usize)>,
}

impl DeviceMesh {
    /// Creates a mesh from names and sizes of its axes, outermost axis first.
    pub fn new(axes: &[(&str, usize)]) -> Self {
        DeviceMesh { axes: axes.iter().map(|(n, s)| ((*n).to_string(), *s)).collect() }
    }

    /// Returns the number of devices.
    pub fn devices(&self) -> usize {
        self.axes.iter().map(|(_, s)| s).product()
    }

    /// Returns the size of an axis; `None` if there is no such axis.
    pub fn size(&self, axis: &str) -> Option<usize> {
        self.axes.iter().find(|(n, _)| n == axis).map(|(_, s)| *s)
    }

    /// Returns the coordinate of a device along an axis.
    pub fn position(&self, device: usize, axis: &str) -> usize {
        let inner = self.axes.iter().rev().take_while(|(n, _)| n != axis).map(|(_, s)| s).product::<usize>();
        device / inner.max(1) % self.size(axis).unwrap_or(1)
    }

    /// Returns the groups of devices whose coordinates differ only along `axes`. Within a group, the coordinate of the
    /// last axis in `axes` varies fastest.
    pub fn groups(&self, axes: &[&str]) -> Groups {
        let strides: Vec<usize> =
            (0..self.axes.len()).map(|i| self.axes[i + 1..].iter().map(|(_, s)| s).product()).collect();
        let picked: Vec<usize> = axes.iter().filter_map(|a| self.axes.iter().position(|(name, _)| name == a)).collect();
        // Returns the offsets of the devices along these axes; the coordinate of the last axis varies fastest.
        let offsets = |along: &[usize]| {
            along.iter().fold(vec![0], |at, &i| {
                at.iter()
                    .flat_map(|&base| (0..self.axes[i].1).map(move |k| (base, k)))
                    .map(|(b, k)| b + k * strides[i])
                    .collect()
            })
        };
        let rest: Vec<usize> = (0..self.axes.len()).filter(|i| !picked.contains(i)).collect();
        let members: Vec<usize> = offsets(&picked);
        Groups(offsets(&rest).iter().map(|base| members.iter().map(|m| base + m).collect()).collect())
    }
}

impl fmt::Display for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sdy.mesh @mesh = <[{}]>", list(self.axes.iter().map(|(n, s)| format!("\"{n}\"={s}"))))
    }
}

/// The groups of devices that communicate in a collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Groups(pub Vec<Vec<usize>>);

impl Groups {
    /// Returns the number of devices in each group.
    pub fn size(&self) -> usize {
        self.0.first().map_or(1, Vec::len)
    }

    /// Splits each group into chunks of `inner` adjacent devices. Returns the chunks as groups, and groups of the
    /// devices that have the same position in the chunks of one original group.
    pub fn nested(&self, inner: usize) -> (Groups, Groups) {
        let near = self.0.iter().flat_map(|g| g.chunks(inner).map(<[usize]>::to_vec)).collect();
        let far = self.0.iter().flat_map(|g| (0..inner).map(|i| g.iter().skip(i).step_by(inner).copied().collect()));
        (Groups(near), Groups(far.collect()))
    }

    pub(super) fn attribute(&self) -> String {
        let rows = list(self.0.iter().map(|g| format!("[{}]", list(g))));
        format!("replica_groups = dense<[{rows}]> : tensor<{}x{}xi64>", self.0.len(), self.size())
    }
}

/// Mesh axes that shard each dimension, outermost axis first. A dimension without axes is replicated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding(pub Vec<Vec<String>>);

impl Sharding {
    /// Creates a sharding from the mesh axes of each dimension.
    pub fn new(dims: &[&[&str]]) -> Self {
        Sharding(dims.iter().map(|d| d.iter().map(|a| (*a).to_string()).collect()).collect())
    }

    pub(super) fn body(&self) -> String {
        let dims = list(self.0.iter().map(|d| format!("{{{}}}", list(d.iter().map(|a| format!("\"{a}\""))))));
        format!("<@mesh, [{dims}]>")
    }

    /// Returns the MLIR attribute for an argument or result.
    pub(super) fn attribute(&self) -> String {
        format!("#sdy.sharding{}", self.body())
    }

    /// Returns the type of one device's shard of a value of type `ty`.
    ///
    /// # Errors
    /// Returns an error if `ty` and the sharding have different numbers of dimensions, if the mesh lacks an axis of the
    /// sharding, or if a dimension is not divisible by the sizes of its mesh axes.
    pub fn local(&self, ty: &Type, mesh: &DeviceMesh) -> Result<Type, String> {
        if self.0.len() != ty.rank() {
            return Err(format!("{ty} has {} dimensions, but the sharding has {}", ty.rank(), self.0.len()));
        }
        let mut local = ty.clone();
        for (i, axes) in self.0.iter().enumerate() {
            for a in axes {
                let size = mesh.size(a).ok_or_else(|| format!("the mesh has no axis '{a}'"))?;
                if !local.dims[i].is_multiple_of(size) {
                    return Err(format!("dimension {i} of {ty} is not divisible by mesh axis '{a}' of size {size}"));
                }
                local.dims[i] /= size;
            }
        }
        Ok(local)
    }
}
