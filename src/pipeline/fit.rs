//! Whether the components of a model fit each other, by their configurations.

use super::configs::ModelConfigs;
use super::error::{PipelineError, Result};
use crate::av::Av;
use crate::models::audio_vae;
use crate::weights::Component;

impl ModelConfigs {
    /// Compares the channels of latents: those that the transformer denoises, and those of what encodes and decodes them.
    ///
    /// # Errors
    /// A component of other latents than the transformer's, in one line naming both files.
    pub(crate) fn check_fit(&self) -> Result<()> {
        let (c, vae, audio) = (self.transformer()?, self.video_vae()?, self.audio_vae()?);
        let patch = c.patch_size_t * c.patch_size * c.patch_size;
        let bins = audio.bins() / audio_vae::COMPRESSION;
        let of_latents = Av { video: vae.latent_channels * patch, audio: audio.latent_channels * bins };
        let of_transformer = c.streams().map(|stream| stream.in_channels);
        let parts = Av { video: (Component::Vae, "in_channels"), audio: (Component::AudioVae, "audio_in_channels") };
        for (((part, key), own), wanted) in parts.into_iter().zip(of_latents).zip(of_transformer) {
            if own != wanted {
                let (own, wanted) =
                    (format!("a token of its latents has {own} channels"), format!("{key} is {wanted}"));
                return Err(self.unfit(part, &own, Component::Transformer, &wanted));
            }
        }
        if self.decodes_by_diffusion()? {
            let (own, wanted) = (self.diffusion_decoder()?.latent_channels, vae.latent_channels);
            if own != wanted {
                let (own, wanted) = (format!("latent_channels is {own}"), format!("latent_channels is {wanted}"));
                return Err(self.unfit(Component::DiffusionDecoder, &own, Component::Vae, &wanted));
            }
        }
        Ok(())
    }

    /// Compares the widths of text contexts: those that the duration head reads, and those that the connectors make.
    ///
    /// # Errors
    /// A head of other widths, in one line naming both files.
    pub(crate) fn check_duration_head(&self) -> Result<()> {
        let (own, wanted) = (self.duration_head()?.text, self.connectors()?.widths());
        if own == wanted {
            return Ok(());
        }
        let own = format!("it reads text of {} and {} channels", own.video, own.audio);
        let wanted = format!("the connectors make {} and {}", wanted.video, wanted.audio);
        Err(self.unfit(Component::DurationHead, &own, Component::Connectors, &wanted))
    }

    /// Error of a component that does not fit another one.
    fn unfit(&self, part: Component, own: &str, other: Component, wanted: &str) -> PipelineError {
        let [place, other] = [part, other].map(|part| self.origin().config_place(part));
        let (place, other, name) = (place.display(), other.display(), part.folder());
        PipelineError::Input(format!("{place}: {own}, and in {other} {wanted}; give the {name} of the same model"))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::models::presets::Preset;
    use crate::weights::{ModelSource, Overrides};

    const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models");

    fn of(model: &str, overrides: Overrides) -> Result<()> {
        let source = ModelSource::open(&format!("{MODELS}/{model}"), &overrides).expect("opens");
        ModelConfigs::of(&Arc::new(source)).check_fit()
    }

    #[test]
    fn whole_models_fit() {
        for model in ["tiny_a", "tiny_b", "tiny_2_3", "tiny_2_5"] {
            of(model, Overrides::default()).expect(model);
        }
        for preset in ["ltx2", "ltx2_3", "ltx2_5", "nano", "nano_2_3", "nano_2_5"] {
            let preset = Preset::named(preset).expect(preset);
            ModelConfigs::of_preset(preset).check_fit().expect("fits");
        }
    }

    #[test]
    fn autoencoders_of_other_latents_are_refused() {
        let vae = Overrides { vae: Some(format!("{MODELS}/tiny_2_3/vae")), ..Overrides::default() };
        let error = of("tiny_a", vae).expect_err("2 channels").to_string();
        assert!(error.contains("tiny_2_3/vae/config.json: a token of its latents has 2 channels, and in "), "{error}");
        assert!(
            error.ends_with("tiny_a/transformer/config.json in_channels is 8; give the vae of the same model"),
            "{error}"
        );
        let audio = Overrides { audio_vae: Some(format!("{MODELS}/tiny_b/audio_vae")), ..Overrides::default() };
        let error = of("tiny_a", audio).expect_err("8 channels").to_string();
        assert!(error.contains("audio_in_channels is 4; give the audio_vae of the same model"), "{error}");
    }
}
