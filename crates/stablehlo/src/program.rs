//! A finished program, with the arguments and results of its `main`.

use sha2::{Digest, Sha256};

use super::sharding::{Mesh, Sharding};
use super::types::Type;
use super::work::Work;

/// An argument of `main`.
#[derive(Clone, Debug, PartialEq)]
pub struct Argument {
    /// Name, unique in the program.
    pub name: String,
    /// Global type.
    pub ty: Type,
    /// Placement; `None` lets the partitioner choose.
    pub sharding: Option<Sharding>,
    /// Index of the result that this argument's memory is donated to.
    pub donated_to: Option<usize>,
    /// Layout in device memory, as XLA writes it (`{2,1,0:T(16,128)(2,1)}`); `None` for the default.
    pub memory_layout: Option<String>,
    /// Dimensions without padding: the leading part that callers fill, zeros behind it.
    pub logical_dims: Vec<usize>,
}

impl Argument {
    /// An argument without padding, placed by the partitioner.
    pub fn new(name: &str, ty: Type) -> Self {
        let logical_dims = ty.dims.clone();
        Argument { name: name.to_string(), ty, sharding: None, donated_to: None, memory_layout: None, logical_dims }
    }
}

/// A result of `main`.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Name, unique in the program.
    pub name: String,
    /// Global type.
    pub ty: Type,
    /// Placement; `None` lets the partitioner choose.
    pub sharding: Option<Sharding>,
    /// Layout in device memory; `None` for the default.
    pub memory_layout: Option<String>,
    /// Dimensions without padding: the leading part that callers see.
    pub logical_dims: Vec<usize>,
}

impl Output {
    /// A result without padding, placed by the partitioner.
    pub fn new(name: &str, ty: Type) -> Self {
        Output { name: name.to_string(), logical_dims: ty.dims.clone(), ty, sharding: None, memory_layout: None }
    }
}

/// A finished program.
#[derive(Clone, Debug)]
pub struct Program {
    pub text: String,
    pub arguments: Vec<Argument>,
    pub results: Vec<Output>,
    /// The devices the program is partitioned over; no axes for one.
    pub mesh: Mesh,
    /// FLOPs of the matmuls, a multiply-add counted as two, times the trip count of loops where it is known. Custom calls
    /// are not included.
    pub dot_flops: f64,
    /// What one device does, by the shardings of arguments and constraints.
    pub work: Work,
    /// Bytes of the smallest value that a device sends in a collective permute; `None` without one.
    pub smallest_permute: Option<usize>,
}

impl Program {
    /// SHA-256 of the text, in hex.
    pub fn hash(&self) -> String {
        hex::encode(Sha256::digest(self.text.as_bytes()))
    }

    /// Devices the program is partitioned over.
    pub fn devices(&self) -> usize {
        self.mesh.devices()
    }

    /// Position of an argument; `None` without such an argument.
    pub fn argument(&self, name: &str) -> Option<usize> {
        self.arguments.iter().position(|a| a.name == name)
    }
}

impl Argument {
    pub(super) fn attributes(&self) -> String {
        let donated = self.donated_to.map(|i| format!("tf.aliasing_output = {i} : i32"));
        attributes(&self.memory_layout, &self.sharding, donated)
    }
}

impl Output {
    pub(super) fn attributes(&self) -> String {
        attributes(&self.memory_layout, &self.sharding, None)
    }
}

fn attributes(memory_layout: &Option<String>, sharding: &Option<Sharding>, more: Option<String>) -> String {
    let memory = memory_layout.as_ref().map(|m| format!("mhlo.layout_mode = \"{m}\""));
    let placed = sharding.as_ref().map(|s| format!("sdy.sharding = {}", s.attribute()));
    let parts: Vec<String> = [memory, placed, more].into_iter().flatten().collect();
    if parts.is_empty() { String::new() } else { format!(" {{{}}}", parts.join(", ")) }
}
