//! YAML schema, presets and their merging.
//!
//! A run is described by one tree of keys ([`Config`]). It is merged from layers, each overriding the next: flags,
//! `--set`, the YAML file and the files it extends, the preset of the model generation and pipeline, the defaults.
//! Every value records its origin, for `--print-config` and error messages.

mod check;
mod check_cache;
mod check_chain;
mod check_source;
mod effect;
mod effect_facts;
mod error;
mod experiment;
mod experiment_file;
mod ic_lora;
pub mod ic_loras;
mod ineffective;
mod layout;
mod legal;
mod load;
mod message;
mod overrides;
mod paths;
mod pipeline;
mod preset_request;
pub mod presets;
mod reference_video;
mod references;
mod request_layer;
mod schema;
mod sidecar;
mod source;
mod toy_model;
mod tree;
mod validate;
mod yaml;

pub(crate) use check_chain::outside;
#[cfg(test)]
pub(crate) use effect::reasons;
pub(crate) use effect_facts::default_temperature;
pub use error::{ConfigError, ConfigErrorKind, Limit, ValueOrigin};
pub(crate) use experiment::{Case, Experiment};
pub use experiment_file::read_experiment;
pub(crate) use ic_lora::{ic_lora_files, missing_lora, served_ic_lora};
pub(crate) use layout::{LayoutFile, LayoutSource, resolve_mesh};
pub use layout::{parse_mesh, read_layout_source};
pub(crate) use legal::{FRAME_STEP, nearest_frames, whole_frames};
pub(crate) use load::BY_REFERENCE;
pub use load::{LoadedConfig, load};
pub use ltx2_server::settings::{Bytes, Drain, LogFormat, LoraApply, NamedLora, Seconds, Serve, ServeSeed};
pub use message::{Message, Setting};
pub use overrides::{CliOverrides, Flag};
pub(crate) use paths::model_paths;
pub(crate) use pipeline::PlacedImage;
pub(crate) use pipeline::pipeline_names;
pub use pipeline::{Passes, Pipeline, PipelineSpec, Support, VideoUse};
pub(crate) use presets::is_shipped_layout;
pub use presets::shipped_layouts;
pub(crate) use references::{encoded_frames, generates_hdr, mask_group};
pub(crate) use request_layer::RequestLayer;
pub use schema::*;
pub(crate) use sidecar::SET_LAYERS;
pub use sidecar::Sidecar;
pub(crate) use source::training_length_warning;
pub(crate) use toy_model::open_model;
pub(crate) use validate::accepts_text;
pub use validate::{experiment_schema, json_schema};

#[cfg(test)]
mod tests;
