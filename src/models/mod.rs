//! The networks of LTX-2.

pub mod gemma3;
