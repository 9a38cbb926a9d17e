#![doc = include_str!("../README.md")]

mod builder;
mod dtype;
mod error;
mod ops;
mod sharding;
#[cfg(test)]
mod tests;
mod types;

pub use builder::{Argument, Builder, Output, Precision, Program, Scope, Value};
pub use dtype::{DType, Element, F8};
pub use error::{Error, Result};
pub use ops::{Comparison, Conv, CustomCall, Groups};
pub use sharding::{Mesh, Sharding};
pub use types::Type;
