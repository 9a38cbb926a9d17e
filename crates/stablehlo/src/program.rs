//! Finished programs, and the arguments and results of their `main` function.

use std::collections::HashMap;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::sharding::{DeviceMesh, Sharding};
use super::types::Type;
use super::work::ProgramWork;

/// Memory that holds an argument or a result of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum MemorySpace {
    /// Memory of the device.
    #[default]
    Device,
    /// Memory of the host that the device reads directly.
    PinnedHost,
}

impl MemorySpace {
    /// Returns the name that XLA and PJRT use.
    pub fn name(self) -> &'static str {
        match self {
            MemorySpace::Device => "device",
            MemorySpace::PinnedHost => "pinned_host",
        }
    }
}

/// An argument of a program's `main` function.
#[derive(Clone, Debug, PartialEq)]
pub struct Argument {
    /// Name, unique in the program.
    pub name: String,
    /// Global type: the type of the unsharded value.
    pub ty: Type,
    /// Sharding. `None`: the partitioner chooses.
    pub sharding: Option<Sharding>,
    /// Index of the result to which the memory of this argument is donated.
    pub donated_to: Option<usize>,
    /// Device memory layout in XLA's notation (`{2,1,0:T(16,128)(2,1)}`). `None`: the default.
    pub memory_layout: Option<String>,
    /// Memory from which the program reads the argument.
    pub memory: MemorySpace,
    /// Dimensions without padding. Callers fill this leading part; the rest is padded with zeros.
    pub logical_dims: Vec<usize>,
}

impl Argument {
    /// Creates an argument that is not padded and not donated. The partitioner chooses its sharding.
    pub fn new(name: &str, ty: Type) -> Self {
        let logical_dims = ty.dims.clone();
        Argument {
            name: name.to_string(),
            ty,
            sharding: None,
            donated_to: None,
            memory_layout: None,
            memory: MemorySpace::Device,
            logical_dims,
        }
    }
}

/// A result of a program's `main` function.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramOutput {
    /// Name, unique in the program.
    pub name: String,
    /// Global type: the type of the unsharded value.
    pub ty: Type,
    /// Sharding. `None`: the partitioner chooses.
    pub sharding: Option<Sharding>,
    /// Device memory layout in XLA's notation. `None`: the default.
    pub memory_layout: Option<String>,
    /// Memory to which the program writes the result.
    pub memory: MemorySpace,
    /// Dimensions of the result without padding. Callers get the slice from index 0 to these dimensions.
    pub logical_dims: Vec<usize>,
}

impl ProgramOutput {
    /// Creates a result that is not padded. The partitioner chooses its sharding.
    pub fn new(name: &str, ty: Type) -> Self {
        ProgramOutput {
            name: name.to_string(),
            logical_dims: ty.dims.clone(),
            ty,
            sharding: None,
            memory_layout: None,
            memory: MemorySpace::Device,
        }
    }
}

/// A finished program.
#[derive(Clone, Debug)]
pub struct Program {
    /// The program as StableHLO text.
    pub text: String,
    /// Arguments of `main`, in order.
    pub arguments: Vec<Argument>,
    /// Index of each argument, by name.
    pub(super) argument_indices: Arc<HashMap<String, usize>>,
    /// Results of `main`, in order.
    pub results: Vec<ProgramOutput>,
    /// Mesh over which the program is partitioned; it has no axes if the program runs on one device.
    pub mesh: DeviceMesh,
    /// FLOPs of the matmuls (a multiply-add counts as two), multiplied by loop trip counts where these are known.
    /// Custom calls are not included.
    pub dot_flops: f64,
    /// Work of one device, derived from the shardings of the arguments and from sharding constraints.
    pub work: ProgramWork,
    /// Size in bytes of the smallest collective permute on one device; `None` if the program has no collective permute.
    pub smallest_permute: Option<usize>,
}

impl Program {
    /// Returns the SHA-256 of the program text, in hex.
    pub fn hash(&self) -> String {
        hex::encode(Sha256::digest(self.text.as_bytes()))
    }

    /// Returns the number of devices over which the program is partitioned.
    pub fn devices(&self) -> usize {
        self.mesh.devices()
    }

    /// Returns the argument with this name; `None` if there is no such argument.
    pub fn argument(&self, name: &str) -> Option<&Argument> {
        self.argument_indices.get(name).map(|&i| &self.arguments[i])
    }
}

impl Argument {
    pub(super) fn attributes(&self) -> String {
        let donated = self.donated_to.map(|i| format!("tf.aliasing_output = {i} : i32"));
        attributes(self.memory, &self.memory_layout, &self.sharding, donated)
    }
}

impl ProgramOutput {
    pub(super) fn attributes(&self) -> String {
        attributes(self.memory, &self.memory_layout, &self.sharding, None)
    }
}

fn attributes(
    memory: MemorySpace,
    memory_layout: &Option<String>,
    sharding: &Option<Sharding>,
    more: Option<String>,
) -> String {
    let kind = (memory != MemorySpace::Device).then(|| format!("mhlo.memory_kind = \"{}\"", memory.name()));
    let layout = memory_layout.as_ref().map(|m| format!("mhlo.layout_mode = \"{m}\""));
    let placed = sharding.as_ref().map(|s| format!("sdy.sharding = {}", s.attribute()));
    let parts: Vec<String> = [kind, layout, placed, more].into_iter().flatten().collect();
    if parts.is_empty() { String::new() } else { format!(" {{{}}}", parts.join(", ")) }
}
