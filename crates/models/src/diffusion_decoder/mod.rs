//! The diffusion-based video decoder of LTX-2.5: four stages of windowed attention compute a context from the latents,
//! and a fifth stage denoises pixels conditioned on it.

mod blocks;
pub(super) mod config;
mod model;
mod neighborhood;
mod padding;
mod sharding_limit;
#[cfg(test)]
mod tests;
mod tiles;
mod window_features;

pub use config::DiffusionDecoderConfig;
pub use model::{noise_shape, program};
pub use tiles::tile_shape;
pub use tiles::{FeatureGrid, FeatureTile, feature_grid, features_program, tile_program};

/// Folder of the diffusion decoder in a model.
pub const COMPONENT: &str = "diffusion_decoder";
