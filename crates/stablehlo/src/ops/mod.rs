//! The operations, one family per file. Each operation checks its operands and infers its result type.

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
pub use custom::{Attribute, CustomCall, ResultAlias};
pub use elementwise::Comparison;
