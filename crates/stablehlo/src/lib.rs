#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

mod builder;
mod counting;
mod dtype;
mod error;
mod ops;
mod program;
mod propagation;
mod sharding;
#[cfg(test)]
mod tests;
mod types;
mod work;

pub use builder::{Builder, Precision, Scope, Value};
pub use dtype::{DType, Element, F8};
pub use error::{BuildError, Result};
pub use ops::{Attribute, Comparison, Conv, CustomCall, ResultAlias};
pub use program::{Argument, MemorySpace, Program, ProgramOutput};
pub use sharding::{DeviceMesh, Groups, Sharding};
pub use types::Type;
pub use work::{CollectiveTransfer, FusedAttention, Matmul, Pattern, ProgramWork};
