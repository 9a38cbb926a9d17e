//! Reading optimized programs: loops, collectives, memory.

mod module;
mod proto;

pub use module::{Instruction, Loop, Module};
