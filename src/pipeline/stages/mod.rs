//! The stages of a request in the order in which they run: text, conditions, denoising, upsampling, decoding.

pub mod batch;
pub mod chain;
pub(in crate::pipeline) mod clip_ends;
pub mod clock;
pub(crate) mod condition_encoder;
pub(crate) mod conditions;
pub(in crate::pipeline) mod decoding;
pub mod denoise_loop;
pub(in crate::pipeline) mod denoising;
pub(in crate::pipeline) mod dfr;
pub(in crate::pipeline) mod diffusion_tiles;
pub(crate) mod duration;
pub mod enhance;
pub(in crate::pipeline) mod inpainting;
pub(in crate::pipeline) mod latent_tiles;
pub mod packing;
pub(in crate::pipeline) mod previews;
pub mod prompts;
pub(in crate::pipeline) mod run;
pub(in crate::pipeline) mod sound_encoder;
pub mod text_to_video;
pub mod tiles;
