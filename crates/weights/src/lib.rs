//! Model files: checkpoints, tensor name mapping, locating a model's components, validation, writing.
//!
//! [`ModelSource`] finds a model (a diffusers folder, Lightricks' files, or a name in the Hugging Face cache) and
//! returns each [`Component`]'s configuration and a [`Checkpoint`] whose tensors have diffusers names. Weights stay on
//! disk until they are read: a [`TensorView`] shares its open file, so it can outlive the checkpoint.

#![warn(missing_docs)]

mod checkpoint;
mod component;
mod convert;
mod derived;
mod error;
pub mod fingerprint;
mod gguf_model;
mod hub;
pub mod keys;
pub mod lora;
pub mod lora_add;
pub mod lora_merge;
mod merge_order;
mod official;
mod official_diffusion;
mod official_keys;
mod official_vae;
mod packed;
mod pairing;
mod place;
pub mod published;
mod quantization;
pub mod quantize;
mod reference_scales;
mod rotation;
mod section;
mod source;
mod split;
pub mod tensor;
mod text_encoders;
mod unsupported;
mod validate;
mod version;
mod write;

pub use checkpoint::{Checkpoint, TensorView};
pub use component::Component;
pub use convert::Conversion;
pub use error::{Misscaled, WeightsError};
pub use hub::HubCache;
pub use lora::{LoraFile, ScaledLora};
pub use merge_order::MergeOrder;
pub use packed::TokenizerFiles;
pub use pairing::VersionFields;
pub use reference_scales::ReferenceScales;
pub use source::{ModelSource, Overrides};
pub use validate::{Misshaped, is_inert};
pub use validate::{ValidationReport, check_finite, finite_tensor, read_finite, validate};
pub use version::Version;
pub use write::{SHARD_BYTES, TensorSpec, write_component, write_json};

#[cfg(test)]
mod tests;
