//! Checks that the components of a model match each other, by comparing their configurations.

use crate::av::Av;
use crate::models::audio_vae;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::programs::configs::ModelConfigs;
use crate::weights::Component;

impl ModelConfigs {
    /// Checks that the latents of the video VAE and of the audio VAE have as many channels as the transformer expects,
    /// and that the diffusion decoder expects as many channels as the video VAE's latents have.
    pub(crate) fn check_fit(&self) -> Result<()> {
        let (c, vae, audio) = (self.transformer()?, self.video_vae()?, self.audio_vae()?);
        let patch = c.patch_size_t * c.patch_size * c.patch_size;
        let bins = audio.bins() / audio_vae::COMPRESSION;
        let of_latents = Av { video: vae.latent_channels * patch, audio: audio.latent_channels * bins };
        let of_transformer = c.streams().map(|stream| stream.in_channels);
        let parts = Av { video: (Component::Vae, "in_channels"), audio: (Component::AudioVae, "audio_in_channels") };
        for (((part, key), own), wanted) in parts.into_iter().zip(of_latents).zip(of_transformer) {
            if own != wanted {
                let (own, wanted) = (format!("the latents have {own} channels per token"), format!("{key} = {wanted}"));
                return Err(self.mismatch_error(part, &own, Component::Transformer, &wanted));
            }
        }
        if self.decodes_by_diffusion()? {
            let (own, wanted) = (self.diffusion_decoder()?.latent_channels, vae.latent_channels);
            if own != wanted {
                let (own, wanted) = (format!("latent_channels is {own}"), format!("latent_channels = {wanted}"));
                return Err(self.mismatch_error(Component::DiffusionDecoder, &own, Component::Vae, &wanted));
            }
        }
        Ok(())
    }

    /// Checks that the duration head expects text contexts as wide as those that the connectors produce.
    pub(crate) fn check_duration_head(&self) -> Result<()> {
        let (own, wanted) = (self.duration_head()?.text, self.connectors()?.widths());
        if own == wanted {
            return Ok(());
        }
        let own = format!("reads text contexts with {} (video) and {} (audio) channels", own.video, own.audio);
        let wanted = format!(
            "connectors that produce text contexts with {} (video) and {} (audio) channels",
            wanted.video, wanted.audio
        );
        Err(self.mismatch_error(Component::DurationHead, &own, Component::Connectors, &wanted))
    }

    fn mismatch_error(&self, part: Component, own: &str, other: Component, wanted: &str) -> PipelineError {
        let [place, other] = [part, other].map(|part| self.origin().config_place(part));
        let (place, other, name) = (place.display(), other.display(), part.folder());
        PipelineError::Input(format!("{place}: {own}, but {other} has {wanted}; use the {name} of the same model"))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::models::presets::Preset;
    use crate::weights::{ModelSource, Overrides};

    const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models");

    fn check_model(model: &str, overrides: Overrides) -> Result<()> {
        let source = ModelSource::open(&format!("{MODELS}/{model}"), &overrides).expect("opens");
        ModelConfigs::from_source(&Arc::new(source)).check_fit()
    }

    #[test]
    fn components_of_same_model_match() {
        for model in ["tiny_a", "tiny_b", "tiny_2_3", "tiny_2_5"] {
            check_model(model, Overrides::default()).expect(model);
        }
        for preset in ["ltx2", "ltx2_3", "ltx2_5", "nano", "nano_2_3", "nano_2_5"] {
            let preset = Preset::named(preset).expect(preset);
            ModelConfigs::of_preset(preset).check_fit().expect("fits");
        }
    }

    #[test]
    fn mismatched_latent_channels_are_rejected() {
        let vae = Overrides { vae: Some(format!("{MODELS}/tiny_2_3/vae")), ..Overrides::default() };
        let error = check_model("tiny_a", vae).expect_err("2 channels").to_string();
        assert!(error.contains("tiny_2_3/vae/config.json: the latents have 2 channels per token, but "), "{error}");
        assert!(
            error.ends_with("tiny_a/transformer/config.json has in_channels = 8; use the vae of the same model"),
            "{error}"
        );
        let audio = Overrides { audio_vae: Some(format!("{MODELS}/tiny_b/audio_vae")), ..Overrides::default() };
        let error = check_model("tiny_a", audio).expect_err("8 channels").to_string();
        assert!(error.contains("audio_in_channels = 4; use the audio_vae of the same model"), "{error}");
    }
}
