//! Component configurations of a model.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::Value;

use crate::config::{Bos, Config, Decoder, Pipeline, Reference};
use crate::hlo::DType;
use crate::models::connectors::ConnectorsConfig;
use crate::models::diffusion_decoder::{DiffusionDecoderConfig, FeatureGrid};
use crate::models::duration_head::DurationHeadConfig;
use crate::models::families;
use crate::models::presets::Preset;
use crate::models::text_encoder::TextEncoder;
use crate::models::tokenizer::{BosRule, TokenizerRules};
use crate::models::transformer::TransformerConfig;
use crate::models::upsampler::{UpsamplerConfig, Upsampling};
use crate::models::video_vae::VideoVaeConfig;
use crate::models::vocoder::VocoderConfig;
use crate::models::{ComponentConfigError, audio_vae, video_vae};
use crate::nn::Build;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::plan::origin::Origin;
use crate::request::{DiffusionTiles, ModelSizes, TileSizes};
use crate::weights::{Component, ModelSource};

/// Configurations of a model's components. Each configuration is read when it is needed, so that a model that lacks
/// some components can still run the others.
#[derive(Clone)]
pub struct ModelConfigs {
    origin: Origin,
    /// Number of transformer blocks to use. `None`: all.
    layers: Option<usize>,
    /// Whether a two-stage vocoder clamps the output of its first stage.
    pub(in crate::pipeline) vocoder_clamp: bool,
    /// Whether to follow Lightricks' code instead of diffusers. Lightricks' code prefers the diffusion decoder, and
    /// divides videos into different tiles.
    official: bool,
    /// Whether prompts begin with BOS.
    bos: BosRule,
    decoder: Decoder,
    pipeline: Pipeline,
}

impl From<Origin> for ModelConfigs {
    fn from(origin: Origin) -> Self {
        ModelConfigs {
            origin,
            layers: None,
            vocoder_clamp: true,
            official: true,
            bos: BosRule::Forced,
            decoder: Decoder::Auto,
            pipeline: Pipeline::TextToVideo,
        }
    }
}

/// Every method returns an error if a component's configuration is missing, or if one of its keys is unknown, invalid
/// or not supported.
impl ModelConfigs {
    /// Returns the configurations of a model whose files are on this machine.
    pub fn from_source(source: &Arc<ModelSource>) -> Self {
        ModelConfigs::from(Origin::Files(source.clone()))
    }

    /// Returns the configurations of a built-in preset.
    pub fn of_preset(preset: Preset) -> Self {
        ModelConfigs::from(Origin::Preset(preset))
    }

    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    pub(super) fn read<T>(
        &self,
        part: Component,
        parse: impl Fn(&Value) -> std::result::Result<T, ComponentConfigError>,
    ) -> Result<T> {
        parse(&self.origin.json(part)?).map_err(|e| self.wrong(part, e))
    }

    /// Returns an error for a component's invalid configuration, with the file or preset that contains it.
    pub(in crate::pipeline) fn wrong(&self, part: Component, source: ComponentConfigError) -> PipelineError {
        let mut place = self.origin.config_place(part);
        if !place.ends_with(part.config_file()) {
            place = format!("{} ({})", place.display(), part.folder()).into();
        }
        PipelineError::Config { place, source }
    }

    /// Limits the transformer to its first `layers` blocks, to inspect smaller programs.
    #[must_use]
    pub(crate) fn cut(self, layers: usize) -> Self {
        ModelConfigs { layers: Some(layers), ..self }
    }

    /// Returns the number of transformer blocks to use. `None`: all blocks.
    pub(crate) fn blocks(&self) -> Option<usize> {
        self.layers
    }

    /// Sets whether the output of the first stage of a two-stage vocoder is clamped to -1..1. Lightricks' code clamps
    /// it, diffusers does not. Default: clamped.
    #[must_use]
    pub fn with_vocoder_clamp(self, clamp: bool) -> Self {
        ModelConfigs { vocoder_clamp: clamp, ..self }
    }

    /// Applies the settings of a run's configuration.
    #[must_use]
    pub(crate) fn for_run(self, config: &Config) -> Self {
        ModelConfigs {
            official: config.reference != Reference::Diffusers,
            bos: bos_rule(config),
            decoder: config.model.decoder,
            pipeline: config.pipeline,
            layers: config.model.blocks,
            ..self.with_vocoder_clamp(config.vocoder.stage1_clamp != Reference::Diffusers)
        }
    }

    pub(crate) fn transformer(&self) -> Result<TransformerConfig> {
        let mut c = self.read(Component::Transformer, TransformerConfig::from_json)?;
        // A model without this embedding adds nothing to keyframes, which equals an embedding of zeros.
        c.use_keyframes_abs_pos_embedding &= !self.origin.lacks_keyframe_embedding();
        match (self.layers, c.num_layers) {
            (Some(blocks), all) if blocks > all => Err(PipelineError::Usage(format!(
                "model.blocks is {blocks}, but the model has {all} blocks; use 1 to {all}"
            ))),
            (blocks, all) => {
                c.num_layers = blocks.unwrap_or(all);
                Ok(c)
            }
        }
    }

    pub(crate) fn text_encoder(&self) -> Result<Box<dyn TextEncoder>> {
        self.read(Component::TextEncoder, families::text_encoder)
    }

    /// Returns the rules that convert prompts to token ids.
    pub(crate) fn tokenizer(&self) -> Result<TokenizerRules> {
        Ok(TokenizerRules { bos_rule: self.bos, ..*self.text_encoder()?.tokenizer() })
    }

    pub(crate) fn connectors(&self) -> Result<ConnectorsConfig> {
        self.read(Component::Connectors, ConnectorsConfig::from_json)
    }

    pub fn vocoder(&self) -> Result<VocoderConfig> {
        Ok(self.read(Component::Vocoder, VocoderConfig::from_json)?.with_clamp(self.vocoder_clamp))
    }

    /// Returns the configuration of the latent upsampler or of the temporal upsampler.
    pub(super) fn upsampler(&self, part: Component) -> Result<UpsamplerConfig> {
        self.read(part, |json| match part {
            Component::TemporalUpsampler => UpsamplerConfig::from_json(json)?.in_time(),
            _ => UpsamplerConfig::from_json(json),
        })
    }

    /// Returns the kind of upsampling (axes and factor) that an upsampler performs. `None`: it is none of the kinds in
    /// [`Upsampling`].
    pub(crate) fn upsampling(&self, part: Component) -> Result<Option<Upsampling>> {
        Ok(self.read(part, UpsamplerConfig::from_json)?.upsampling())
    }

    /// Checks that the model's upsampler, if any, performs the kind of upsampling `asked`.
    pub(crate) fn check_upsampling(&self, asked: Upsampling) -> Result<()> {
        let part = upsampler_of(asked);
        if !self.origin.has(part) {
            return Ok(());
        }
        let c = self.read(part, UpsamplerConfig::from_json)?;
        c.check_kind(asked).map_err(|why| self.wrong_upsampler(part, &why))
    }

    pub(super) fn wrong_upsampler(&self, part: Component, why: &str) -> PipelineError {
        PipelineError::Input(format!("{}: {why}", self.origin.config_place(part).display()))
    }

    /// Returns the components that a run of `config` reads. `check`, a dry run and the run itself all verify these
    /// components, and the run's fingerprint covers them.
    pub(crate) fn components(&self, config: &Config) -> BTreeSet<Component> {
        let configs = self.clone().for_run(config);
        let pipeline = config.pipeline;
        let is_needed =
            |part: &Component| !part.is_optional() && (pipeline.spec().has_video() || *part != Component::Vae);
        let mut parts: BTreeSet<Component> = Component::ALL.into_iter().filter(is_needed).collect();
        parts.extend(config.upsamplings().iter().map(|upsampling| upsampler_of(*upsampling)));
        if pipeline.spec().has_rounds() && config.dfr.temporal_rounds > 0 {
            parts.insert(Component::TemporalUpsampler);
        }
        // A model without a duration head generates a fixed number of frames in diffusers.
        let predicts = config.request.num_frames.count().is_none();
        if predicts && (configs.official || configs.origin.has(Component::DurationHead)) {
            parts.insert(Component::DurationHead);
        }
        if pipeline.spec().generates_video && configs.chooses_diffusion() {
            parts.insert(Component::DiffusionDecoder);
        }
        parts
    }

    /// Returns whether `model.decoder` selects the diffusion decoder. `auto` considers only whether a decoder is
    /// present, so a damaged decoder is reported and not silently replaced by the other one. If the video VAE's
    /// configuration cannot be read, its decoder counts as present; the verification of the VAE reports the error.
    fn chooses_diffusion(&self) -> bool {
        let convolution = || self.has_video_decoder().unwrap_or(true);
        match self.decoder {
            Decoder::Auto => self.official && self.origin.has(Component::DiffusionDecoder) || !convolution(),
            chosen => chosen == Decoder::Diffusion,
        }
    }

    /// Returns the compression ratios and the channels of the video VAE. For a pipeline without video, they are derived
    /// from the transformer's configuration, and that of the VAE is not read.
    pub(crate) fn video_vae(&self) -> Result<video_vae::Geometry> {
        if !self.pipeline.spec().has_video() {
            let c = self.transformer()?;
            let [temporal, spatial, ..] = c.vae_scale_factors;
            let channels = c.video().in_channels / (c.patch_size_t * c.patch_size * c.patch_size).max(1);
            return Ok(video_vae::Geometry::from_compression(channels, [temporal, spatial]));
        }
        self.read(Component::Vae, |json| Ok(VideoVaeConfig::from_json(json)?.geometry()))
    }

    /// Returns the options for the video decoder's program. Like Lightricks' code, HDR video is decoded in f32.
    pub(super) fn decoder_build(&self, build: &Build) -> Build {
        let dtype = if self.pipeline.spec().hdr { DType::F32 } else { build.dtype };
        Build { dtype, ..build.clone() }
    }

    /// Returns whether the video VAE contains a decoder.
    pub(crate) fn has_video_decoder(&self) -> Result<bool> {
        self.read(Component::Vae, |json| Ok(VideoVaeConfig::from_json(json)?.has_decoder()))
    }

    pub(crate) fn diffusion_decoder(&self) -> Result<DiffusionDecoderConfig> {
        self.read(Component::DiffusionDecoder, DiffusionDecoderConfig::from_json)
    }

    /// Returns whether the diffusion decoder decodes the video; false if the run generates no frames.
    ///
    /// # Errors
    /// Returns an error with file and key if the model lacks the selected decoder.
    pub(crate) fn decodes_by_diffusion(&self) -> Result<bool> {
        if !self.pipeline.spec().generates_video {
            return Ok(false);
        }
        let (convolution, diffusion) = (self.has_video_decoder()?, self.origin.has(Component::DiffusionDecoder));
        let by_diffusion = match self.decoder {
            Decoder::Auto => diffusion && self.chooses_diffusion(),
            chosen => chosen == Decoder::Diffusion,
        };
        let (part, word, other) = match by_diffusion {
            true if !diffusion => (Component::DiffusionDecoder, "diffusion", "conv"),
            false if !convolution => (Component::Vae, "conv", "diffusion"),
            _ => return Ok(by_diffusion),
        };
        let (place, file) = (self.origin.config_place(part), if by_diffusion { "" } else { "conv-" });
        Err(PipelineError::Input(format!(
            "{}: model.decoder selects {word}, but the model has no such decoder; set model.vae to \
             vae/ltx-2.5-video-vae-{file}bf16.safetensors, or model.decoder to {other}",
            place.display()
        )))
    }

    pub(crate) fn audio_vae(&self) -> Result<audio_vae::AudioVaeConfig> {
        self.read(Component::AudioVae, audio_vae::AudioVaeConfig::from_json)
    }

    /// Returns the sizes of the model that requests are checked against.
    pub(crate) fn sizes(&self) -> Result<ModelSizes> {
        let (vae, audio) = (self.video_vae()?, self.audio_vae()?);
        Ok(ModelSizes::new(self.transformer()?, &self.connectors()?, &vae, &audio))
    }

    pub(crate) fn duration_head(&self) -> Result<DurationHeadConfig> {
        self.read(Component::DurationHead, DurationHeadConfig::from_json)
    }

    /// Returns the tiles in which the diffusion decoder decodes a video.
    ///
    /// # Errors
    /// Returns an error if the decoder has several steps (their noise covers the complete video), or if the overlap of
    /// the tiles is too small.
    pub(crate) fn diffusion_tiles(&self, tiling: &TileSizes, grid: &FeatureGrid) -> Result<DiffusionTiles> {
        if !self.diffusion_decoder()?.is_one_step() {
            let place = self.origin.config_place(Component::DiffusionDecoder);
            return Err(PipelineError::Usage(format!(
                "runtime.tiling: the diffusion decoder ({}) takes several steps, so it cannot decode in tiles; remove \
                 runtime.tiling",
                place.display()
            )));
        }
        Ok(match self.official {
            true => DiffusionTiles::official(tiling, grid)?,
            false => DiffusionTiles::diffusers(tiling, grid),
        })
    }

    /// Returns the length of a component's latent statistics, which the host reads and no program declares. `None`: the
    /// component has no statistics.
    pub(crate) fn statistics_length(&self, part: Component) -> Result<Option<usize>> {
        Ok(match part {
            Component::Vae => Some(self.video_vae()?.latent_channels),
            Component::DiffusionDecoder => Some(self.diffusion_decoder()?.latent_channels),
            Component::AudioVae => Some(self.audio_vae()?.base_channels),
            _ => None,
        })
    }
}

/// Returns whether prompts begin with BOS, as set by `text.bos` and `reference`.
pub(crate) fn bos_rule(config: &Config) -> BosRule {
    match (config.text.bos, config.reference) {
        (Bos::Always, _) | (Bos::Auto, Reference::Official) => BosRule::Forced,
        (Bos::Auto, Reference::Official1 | Reference::Diffusers) => BosRule::PostProcessor,
    }
}

/// Returns the component that performs this kind of upsampling.
pub(super) fn upsampler_of(upsampling: Upsampling) -> Component {
    match upsampling {
        Upsampling::TemporalX2 => Component::TemporalUpsampler,
        Upsampling::SpatialX2 | Upsampling::SpatialX1_5 => Component::LatentUpsampler,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{CliOverrides, load};

    #[test]
    fn bos_follows_reference_unless_set_to_always() {
        let rule = |set: &[&str]| {
            let set = set.iter().map(|pair| (*pair).to_string()).collect();
            bos_rule(&load(&CliOverrides { set, ..CliOverrides::default() }).expect("legal").config)
        };
        let rules = ["official", "official_1_0", "diffusers"].map(|name| rule(&[&format!("reference={name}")]));
        assert_eq!(rules, [BosRule::Forced, BosRule::PostProcessor, BosRule::PostProcessor]);
        assert_eq!(rule(&["reference=diffusers", "text.bos=always"]), BosRule::Forced);
    }
}
