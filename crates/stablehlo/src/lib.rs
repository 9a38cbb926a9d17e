//! A typed builder of StableHLO text with Shardy shardings. No machine learning in it.
//!
//! A [`Value`] carries its element type and shape, and its methods are the operations: each checks its operands,
//! infers its result and writes one line. The first mistake is kept with operation, name scope and shapes, and
//! [`Builder::finish`] returns it, so that model code reads as formulas without `?`.
//!
//! ```
//! use ltx2_stablehlo::{Builder, DType, Type};
//! let b = Builder::new("affine");
//! let x = b.argument("x", Type::new(DType::F32, [2, 3]));
//! let w = b.argument("w", Type::new(DType::F32, [4, 3]));
//! let y = b.einsum("bi,oi->bo", &x, &w, DType::F32) + 1.0;
//! let program = b.finish(&[("y", &y)])?;
//! assert_eq!(program.results[0].ty, Type::new(DType::F32, [2, 4]));
//! # Ok::<(), ltx2_stablehlo::Error>(())
//! ```

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
