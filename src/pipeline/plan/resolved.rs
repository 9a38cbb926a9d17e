//! The configuration of a run after the plan has replaced `auto` values by its decisions.

use std::ops::Deref;

use serde::Serialize;

use crate::config::{Config, LayerForm, Mesh, NumFrames, Pipeline, outside};
use crate::media::ImageH264;
use crate::pipeline::enhancement::Enhancement;
use crate::pipeline::error::{PipelineError, Result};

/// A loaded configuration with the decisions of the plan. Only the methods of this type change a loaded value.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct ResolvedConfig(Config);

impl From<&Config> for ResolvedConfig {
    fn from(config: &Config) -> Self {
        ResolvedConfig(config.clone())
    }
}

impl Deref for ResolvedConfig {
    type Target = Config;

    fn deref(&self) -> &Config {
        &self.0
    }
}

impl ResolvedConfig {
    /// Returns the configuration with this number of frames.
    ///
    /// # Errors
    /// Returns an error if a conditioning image belongs to a frame after the last one.
    pub(crate) fn with_frames(config: &Config, frames: usize) -> Result<Self> {
        if let Some(image) = outside(config, frames) {
            let why =
                format!("request.images: frame {image} does not exist: the video has {frames} frames, numbered from 0");
            return Err(PipelineError::Usage(why));
        }
        let mut own = ResolvedConfig::from(config);
        own.0.request.num_frames = NumFrames::Count(frames);
        Ok(own)
    }

    /// Returns the configuration of a text-to-video run with this number of frames. It has no input images and no input
    /// audio, because the duration is predicted from the prompt alone.
    pub(in crate::pipeline) fn text_only(config: &Config, frames: usize) -> Self {
        let mut own = ResolvedConfig::from(config);
        own.0.pipeline = Pipeline::TextToVideo;
        own.0.conditioning.generated_keyframes = 0;
        let request = &mut own.0.request;
        (request.images, request.audio_latents, request.audio) = (Vec::new(), Vec::new(), None);
        request.num_frames = NumFrames::Count(frames);
        own
    }

    /// Replaces the prompts of later clips that `enhancement` has.
    pub(in crate::pipeline) fn set_enhanced_clips(&mut self, enhancement: &Enhancement) {
        let seed = self.enhancement_seed();
        for prompt in self.0.request.chain.iter_mut().flat_map(|chain| &mut chain.prompts) {
            enhancement.replace(prompt, seed);
        }
    }

    /// Records that the prompts are enhanced, so that a rerun uses them unchanged.
    pub(crate) fn set_prompts_enhanced(&mut self) {
        self.0.request.enhance_prompt = false;
    }

    pub(super) fn set_layout(&mut self, layout: String, mesh: Option<Mesh>) {
        (self.0.layout, self.0.mesh) = (layout, mesh);
    }

    /// Sets the form of the loop over layers.
    pub(super) fn set_layers(&mut self, form: LayerForm) {
        self.0.runtime.layers = form;
    }

    /// Sets the H.264 encoder of the conditioning images.
    pub(super) fn set_encoder(&mut self, encoder: ImageH264) {
        self.0.conditioning.h264 = encoder;
    }
}
