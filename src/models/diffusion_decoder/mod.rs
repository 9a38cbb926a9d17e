//! The video decoder of LTX-2.5 by diffusion: four stages of windowed attention make a context of the latents, under which
//! a fifth removes the noise of pixels.

mod blocks;
mod blocks_of_frames;
pub(super) mod config;
mod model;
mod neighborhood;
mod padding;
#[cfg(test)]
mod tests;
mod tiles;
mod window_features;

pub use config::DiffusionDecoderConfig;
pub use model::{noise_shape, program};
pub(crate) use tiles::tile_shape;
pub use tiles::{FeatureGrid, FeatureTile, feature_grid, features_program, tile_program};

/// The model folder's name.
pub(crate) const COMPONENT: &str = "diffusion_decoder";
