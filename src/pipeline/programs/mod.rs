//! The programs of a run: how each is built, compiled, loaded and called.

pub(in crate::pipeline) mod background_load;
pub mod build;
pub mod call;
pub(crate) mod calls;
pub mod compile;
pub mod component;
pub(in crate::pipeline) mod component_inputs;
pub mod configs;
pub mod executor;
pub(in crate::pipeline) mod files;
pub mod init;
pub mod parameters;
pub(in crate::pipeline) mod program_spec;
pub(crate) mod program_table;
pub(in crate::pipeline) mod transformer_inputs;
pub mod warm;
