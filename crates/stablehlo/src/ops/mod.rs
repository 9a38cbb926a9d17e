//! The operations, one family a file. Every operation checks its operands and infers its result.

mod call;
mod collective;
mod control;
mod conv;
mod custom;
mod dot;
mod elementwise;
mod index;
mod reduce;
mod shape;
mod sharding;

pub use conv::Conv;
pub use custom::{Attribute, CustomCall};
pub use elementwise::Comparison;
