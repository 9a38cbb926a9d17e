//! Output files of a run: videos, sidecars, checkpoints, dumps and reports.

pub(in crate::pipeline) mod assembly;
pub(in crate::pipeline) mod chain_writer;
pub mod denoise_checkpoint;
pub(crate) mod differences;
pub(in crate::pipeline) mod frame_collector;
pub(in crate::pipeline) mod hashes;
pub(crate) mod hdr_files;
pub(in crate::pipeline) mod partial_results;
pub(in crate::pipeline) mod preview_files;
pub(in crate::pipeline) mod recorded;
pub(crate) mod report;
pub(crate) mod sidecar;
pub mod tensors;
pub(crate) mod writer;
