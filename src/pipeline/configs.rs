//! A model's configurations, and the program that each component becomes.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;

use serde_json::Value;

use super::error::{PipelineError, Result};
use super::origin::Origin;
use crate::av::Av;
use crate::config::{Bos, Config, Decoder, Pipeline, Reference};
use crate::hlo::DType;
use crate::models::connectors::{self, ConnectorsConfig};
use crate::models::diffusion_decoder::{self, DiffusionDecoderConfig, FeatureGrid, FeatureTile};
use crate::models::duration_head::{self, DurationHeadConfig};
use crate::models::families;
use crate::models::pixels::Pixels;
use crate::models::presets::Preset;
use crate::models::text_encoder::TextEncoder;
use crate::models::tokenizer::{BosRule, TokenizerRules};
use crate::models::transformer::TransformerConfig;
use crate::models::upsampler::{self, UpsamplerConfig, Upsampling};
use crate::models::video_vae::VideoVaeConfig;
use crate::models::vocoder::{self, VocoderConfig};
use crate::models::{ConfigError, Network, audio_vae, video_vae};
use crate::nn::Build;
use crate::request::{DiffusionTiles, ModelSizes, Tiling, UpsamplingStep};
use crate::tensor::Tensor;
use crate::weights::{Component, ModelSource};

/// Configurations of a model, each read when it is needed, so that a model of some components runs those.
#[derive(Clone)]
pub struct ModelConfigs {
    origin: Origin,
    /// Blocks left of every transformer, to look at programs.
    layers: Option<usize>,
    /// Whether a vocoder of two stages limits the first.
    vocoder_clamp: bool,
    /// Whether the diffusion decoder is preferred and tiled as in Lightricks' code; otherwise as in diffusers.
    official: bool,
    /// Whether prompts begin with BOS.
    bos: BosRule,
    /// The video's decoder.
    decoder: Decoder,
    /// Whose runs it is read for.
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

/// Each fails by a missing file, a key that is wrong, unknown or not computed; programs also by sizes.
impl ModelConfigs {
    /// Of a model on disk.
    pub fn of(source: &Arc<ModelSource>) -> Self {
        ModelConfigs::from(Origin::Files(source.clone()))
    }

    /// Of a model that this program carries.
    pub fn of_preset(preset: Preset) -> Self {
        ModelConfigs::from(Origin::Preset(preset))
    }

    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    fn read<T>(&self, part: Component, parse: impl Fn(&Value) -> std::result::Result<T, ConfigError>) -> Result<T> {
        parse(&self.origin.json(part)?).map_err(|e| self.wrong(part, e))
    }

    /// A part's configuration is wrong.
    fn wrong(&self, part: Component, source: ConfigError) -> PipelineError {
        let mut place = self.origin.config_place(part);
        if !place.ends_with(part.config_file()) {
            place = format!("{} ({})", place.display(), part.folder()).into();
        }
        PipelineError::Config { place, source }
    }

    /// The same model with the transformer cut to its first `layers` blocks, to look at its programs. Their blocks are
    /// the whole model's.
    #[must_use]
    pub(crate) fn cut(self, layers: usize) -> Self {
        ModelConfigs { layers: Some(layers), ..self }
    }

    /// Number of blocks that the transformer is cut to.
    pub(crate) fn blocks(&self) -> Option<usize> {
        self.layers
    }

    /// The same model with or without a limit of -1..1 between the vocoder's two stages, where it has two. Lightricks'
    /// code has it, diffusers has not; here it is on unless this says otherwise.
    #[must_use]
    pub fn with_vocoder_clamp(self, clamp: bool) -> Self {
        ModelConfigs { vocoder_clamp: clamp, ..self }
    }

    /// The same model as a configuration has it run.
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

    /// The transformer's.
    pub(crate) fn transformer(&self) -> Result<TransformerConfig> {
        let mut c = self.read(Component::Transformer, TransformerConfig::from_json)?;
        // Zeros in its place change no result: nothing is added to frames.
        c.use_keyframes_abs_pos_embedding &= !self.origin.lacks_keyframe_embedding();
        match (self.layers, c.num_layers) {
            (Some(blocks), all) if blocks > all => {
                Err(PipelineError::Usage(format!("model.blocks: {blocks}, this model has 1 to {all}")))
            }
            (blocks, all) => {
                c.num_layers = blocks.unwrap_or(all);
                Ok(c)
            }
        }
    }

    /// The text encoder's.
    pub(crate) fn text_encoder(&self) -> Result<Box<dyn TextEncoder>> {
        self.read(Component::TextEncoder, families::text_encoder)
    }

    /// How prompts become token ids.
    pub(crate) fn tokenizer(&self) -> Result<TokenizerRules> {
        Ok(TokenizerRules { front: self.bos, ..*self.text_encoder()?.tokenizer() })
    }

    /// The connectors'.
    pub(crate) fn connectors(&self) -> Result<ConnectorsConfig> {
        self.read(Component::Connectors, ConnectorsConfig::from_json)
    }

    /// The vocoder's.
    pub fn vocoder(&self) -> Result<VocoderConfig> {
        Ok(self.read(Component::Vocoder, VocoderConfig::from_json)?.with_clamp(self.vocoder_clamp))
    }

    /// The latent upsampler's.
    fn upsampler(&self) -> Result<UpsamplerConfig> {
        self.read(Component::LatentUpsampler, UpsamplerConfig::from_json)
    }

    /// The temporal latent upsampler's.
    fn temporal_upsampler(&self) -> Result<UpsamplerConfig> {
        self.read(Component::TemporalUpsampler, |json| UpsamplerConfig::from_json(json)?.in_time())
    }

    /// The upsampling that a part's file does, where it has a name.
    pub(crate) fn upsampling(&self, part: Component) -> Result<Option<Upsampling>> {
        Ok(self.read(part, UpsamplerConfig::from_json)?.upsampling())
    }

    /// Program of a step of upsampling, of so many videos of latents of `channels` channels.
    ///
    /// # Errors
    /// A file of another upsampling, or latents that it makes others of, in one line naming the file.
    pub(crate) fn upsampling_program(
        &self,
        step: &UpsamplingStep,
        [batch, channels]: [usize; 2],
        b: &Build,
    ) -> Result<Network> {
        self.check_upsampling(step.upsampling)?;
        let part = upsampler_of(step.upsampling);
        let c = if part == Component::TemporalUpsampler { self.temporal_upsampler()? } else { self.upsampler()? };
        let ([f, h, w], [to_f, to_h, to_w]) = (step.from, step.to);
        let fits = c.check_fit([channels, f, h, w], [channels, to_f, to_h, to_w]);
        fits.map_err(|why| self.wrong_upsampler(part, &why))?;
        Ok(upsampler::program(&c, [batch, f, h, w], b)?)
    }

    /// Whether the upsampler of an upsampling is one, where it is here.
    ///
    /// # Errors
    /// A file of another upsampling, in one line.
    pub(crate) fn check_upsampling(&self, asked: Upsampling) -> Result<()> {
        let part = upsampler_of(asked);
        if !self.origin.has(part) {
            return Ok(());
        }
        let c = self.read(part, UpsamplerConfig::from_json)?;
        c.check_is(asked).map_err(|why| self.wrong_upsampler(part, &why))
    }

    fn wrong_upsampler(&self, part: Component, why: &str) -> PipelineError {
        PipelineError::Input(format!("{}: {why}", self.origin.config_place(part).display()))
    }

    /// Components that a run of `config` reads. This is the only place where that is decided: `check`, a dry run and the
    /// run itself verify these components, and the run's fingerprint covers them.
    pub(crate) fn components(&self, config: &Config) -> BTreeSet<Component> {
        let configs = self.clone().for_run(config);
        let pipeline = config.pipeline;
        let is_needed = |part: &Component| !part.is_optional() && (pipeline.has_video() || *part != Component::Vae);
        let mut parts: BTreeSet<Component> = Component::ALL.into_iter().filter(is_needed).collect();
        parts.extend(config.upsamplings().iter().map(|upsampling| upsampler_of(*upsampling)));
        if pipeline == Pipeline::Dfr && config.dfr.temporal_rounds > 0 {
            parts.insert(Component::TemporalUpsampler);
        }
        // diffusers takes a fixed number of frames where the model has no duration head.
        let predicts = config.request.num_frames.count().is_none();
        if predicts && (configs.official || configs.origin.has(Component::DurationHead)) {
            parts.insert(Component::DurationHead);
        }
        if pipeline.makes_frames() && configs.chooses_diffusion() {
            parts.insert(Component::DiffusionDecoder);
        }
        parts
    }

    /// Whether `model.decoder` selects the diffusion decoder. `auto` decides by which decoders are present, not by whether
    /// they are usable: a damaged one is reported, not replaced. A video autoencoder that cannot be read counts as one with a
    /// decoder; its own verification reports it.
    fn chooses_diffusion(&self) -> bool {
        let convolution = || self.has_video_decoder().unwrap_or(true);
        match self.decoder {
            Decoder::Auto => self.official && self.origin.has(Component::DiffusionDecoder) || !convolution(),
            chosen => chosen == Decoder::Diffusion,
        }
    }

    /// Ratios and channels of the video autoencoder. Where only sound is generated they follow from the transformer, and
    /// the autoencoder is not read.
    pub(crate) fn video_vae(&self) -> Result<video_vae::Geometry> {
        if !self.pipeline.has_video() {
            let c = self.transformer()?;
            let [temporal, spatial, ..] = c.vae_scale_factors;
            let channels = c.video().in_channels / (c.patch_size_t * c.patch_size * c.patch_size).max(1);
            return Ok(video_vae::Geometry::told(channels, [temporal, spatial]));
        }
        self.read(Component::Vae, |json| Ok(VideoVaeConfig::from_json(json)?.geometry()))
    }

    /// Whether the video autoencoder has a decoder of its own.
    pub(crate) fn has_video_decoder(&self) -> Result<bool> {
        self.read(Component::Vae, |json| Ok(VideoVaeConfig::from_json(json)?.has_decoder()))
    }

    /// The diffusion decoder's.
    pub(crate) fn diffusion_decoder(&self) -> Result<DiffusionDecoderConfig> {
        self.read(Component::DiffusionDecoder, DiffusionDecoderConfig::from_json)
    }

    /// Choices that fix programs beside the model's own configurations.
    pub(super) fn choices(&self) -> impl Debug {
        (self.layers, self.vocoder_clamp, self.official, self.decoder, self.pipeline)
    }

    /// Whether the video is decoded by diffusion; of a run that makes no frames, none is.
    ///
    /// # Errors
    /// A decoder that is not there, with its file and key.
    pub(crate) fn decodes_by_diffusion(&self) -> Result<bool> {
        if !self.pipeline.makes_frames() {
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
            "{}: model.decoder is {word}, and there is no such decoder: give vae/ltx-2.5-video-vae-{file}bf16.safetensors as \
             model.vae, or set model.decoder to {other}",
            place.display()
        )))
    }

    /// The audio autoencoder's.
    pub(crate) fn audio_vae(&self) -> Result<audio_vae::AudioVaeConfig> {
        self.read(Component::AudioVae, audio_vae::AudioVaeConfig::from_json)
    }

    /// Sizes that requests are checked against.
    ///
    /// # Errors
    /// A missing or unusable component, by name.
    pub(crate) fn sizes(&self) -> Result<ModelSizes> {
        let (vae, audio) = (self.video_vae()?, self.audio_vae()?);
        Ok(ModelSizes::new(self.transformer()?, &self.connectors()?, &vae, &audio))
    }

    /// Prompts `[rows, tokens]` to `prompt_embeds`: projected, or the stack of hidden states.
    pub fn text_encoder_program(&self, rows: usize, tokens: usize, projected: bool, b: &Build) -> Result<Network> {
        let encoder = self.text_encoder()?;
        let connectors = projected.then(|| self.connectors()).transpose()?;
        if let Some(c) = &connectors {
            c.check_states(encoder.hidden_states()).map_err(|e| self.wrong(Component::Connectors, e))?;
        }
        Ok(encoder.program(connectors.as_ref(), rows, tokens, b)?)
    }

    /// Prompt embeddings to the text contexts of both streams.
    pub(crate) fn connectors_program(
        &self,
        rows: usize,
        tokens: usize,
        input: connectors::Input,
        b: &Build,
    ) -> Result<Network> {
        Ok(connectors::program(&self.connectors()?, rows, tokens, input, b)?)
    }

    /// Text contexts of `tokens` tokens to the seconds of each prompt's video.
    pub(crate) fn duration_head_program(&self, rows: usize, tokens: Av<usize>, b: &Build) -> Result<Network> {
        Ok(duration_head::program(&self.duration_head()?, rows, tokens, b)?)
    }

    /// The duration head's.
    pub(crate) fn duration_head(&self) -> Result<DurationHeadConfig> {
        self.read(Component::DurationHead, DurationHeadConfig::from_json)
    }

    /// The connectors' tables, by input name.
    pub(crate) fn connectors_inputs(&self, tokens: usize) -> Result<Vec<(String, Tensor)>> {
        Ok(connectors::host_inputs(&self.connectors()?, tokens))
    }

    /// Latents `[b, c, f, h, w]` to frames, as `pixels` says.
    pub(crate) fn video_decoder_program(&self, dims: [usize; 5], pixels: Pixels, b: &Build) -> Result<Network> {
        let c = self.read(Component::Vae, |json| VideoVaeConfig::from_json(json)?.decoder())?;
        let [n, _, f, h, w] = dims;
        Ok(video_vae::decoder_program(&c, [n, f, h, w], pixels, b)?)
    }

    /// Latents `[b, c, f, h, w]` and noise to frames, as `pixels` says.
    pub(crate) fn diffusion_decoder_program(&self, dims: [usize; 5], pixels: Pixels, b: &Build) -> Result<Network> {
        let [n, _, f, h, w] = dims;
        Ok(diffusion_decoder::program(&self.diffusion_decoder()?, [n, f, h, w], pixels, b)?)
    }

    /// Latents `[b, c, f, h, w]` to the features that the diffusion decoder's tiles are cut from.
    pub(crate) fn diffusion_features_program(&self, [n, _, f, h, w]: [usize; 5], b: &Build) -> Result<Network> {
        Ok(diffusion_decoder::features_program(&self.diffusion_decoder()?, [n, f, h, w], b)?)
    }

    /// A tile of such features, of latents of `[b, f, h, w]`, and noise to frames.
    pub(crate) fn diffusion_tile_program(&self, shape: [usize; 4], tile: &FeatureTile, b: &Build) -> Result<Network> {
        Ok(diffusion_decoder::tile_program(&self.diffusion_decoder()?, shape, tile, b)?)
    }

    /// Tiles that the diffusion decoder decodes in.
    ///
    /// # Errors
    /// A decoder of several steps, whose noise is the whole video's; too little overlap.
    pub(crate) fn diffusion_tiles(&self, tiling: &Tiling, grid: &FeatureGrid) -> Result<DiffusionTiles> {
        if !self.diffusion_decoder()?.is_one_step() {
            let place = self.origin.config_place(Component::DiffusionDecoder);
            return Err(PipelineError::Usage(format!(
                "runtime.tiling: {}: a decoder of one step to clean pixels decodes in tiles; leave tiling out",
                place.display()
            )));
        }
        Ok(match self.official {
            true => DiffusionTiles::official(tiling, grid)?,
            false => DiffusionTiles::diffusers(tiling, grid),
        })
    }

    /// Frames `[b, c, f, h, w]` to latents.
    pub(crate) fn video_encoder_program(&self, dims: [usize; 5], b: &Build) -> Result<Network> {
        let c = self.read(Component::Vae, |json| VideoVaeConfig::from_json(json)?.encoder())?;
        let [n, _, f, h, w] = dims;
        Ok(video_vae::encoder_program(&c, [n, f, h, w], b)?)
    }

    /// A mel spectrogram `[b, channels, frames, bins]` to latents.
    pub(crate) fn audio_encoder_program(&self, dims: [usize; 4], b: &Build) -> Result<Network> {
        let [n, _, frames, bins] = dims;
        Ok(audio_vae::encoder_program(&self.audio_vae()?, [n, frames, bins], b)?)
    }

    /// Latents `[b, c, l, m]` to a mel spectrogram.
    pub(crate) fn audio_decoder_program(&self, dims: [usize; 4], b: &Build) -> Result<Network> {
        let [n, _, l, m] = dims;
        Ok(audio_vae::decoder_program(&self.audio_vae()?, [n, l, m], b)?)
    }

    /// A mel spectrogram `[b, channels, frames, bins]` to samples, always in f32: bf16 is audible here.
    pub fn vocoder_program(&self, dims: [usize; 4], b: &Build) -> Result<Network> {
        Ok(vocoder::vocoder_program(&self.vocoder()?, dims, &b.with_dtype(DType::F32))?)
    }

    /// Un-normalised latents `[b, c, f, h, w]` to latents of more rows and columns, or frames.
    pub(crate) fn upsampler_program(&self, [n, _, f, h, w]: [usize; 5], b: &Build) -> Result<Network> {
        Ok(upsampler::program(&self.upsampler()?, [n, f, h, w], b)?)
    }

    /// Un-normalised latents `[b, c, f, h, w]` to latents of more frames.
    pub(crate) fn temporal_upsampler_program(&self, [n, _, f, h, w]: [usize; 5], b: &Build) -> Result<Network> {
        Ok(upsampler::program(&self.temporal_upsampler()?, [n, f, h, w], b)?)
    }

    /// Channels of a part's latent statistics, which the host reads and no program declares; none where it has none.
    pub(crate) fn statistics_length(&self, part: Component) -> Result<Option<usize>> {
        Ok(match part {
            Component::Vae => Some(self.video_vae()?.latent_channels),
            Component::DiffusionDecoder => Some(self.diffusion_decoder()?.latent_channels),
            Component::AudioVae => Some(self.audio_vae()?.base_channels),
            _ => None,
        })
    }
}

/// Whether prompts begin with BOS, by `text.bos` and `reference`.
pub(crate) fn bos_rule(config: &Config) -> BosRule {
    match (config.text.bos, config.reference) {
        (Bos::Always, _) | (Bos::Auto, Reference::Official) => BosRule::Forced,
        (Bos::Auto, Reference::Official1 | Reference::Diffusers) => BosRule::AsAdded,
    }
}

/// The component that does an upsampling.
fn upsampler_of(upsampling: Upsampling) -> Component {
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
    fn bos_follows_the_reference_unless_always() {
        let rule = |set: &[&str]| {
            let set = set.iter().map(|pair| (*pair).to_string()).collect();
            bos_rule(&load(&CliOverrides { set, ..CliOverrides::default() }).expect("legal").config)
        };
        let rules = ["official", "official_1_0", "diffusers"].map(|name| rule(&[&format!("reference={name}")]));
        assert_eq!(rules, [BosRule::Forced, BosRule::AsAdded, BosRule::AsAdded]);
        assert_eq!(rule(&["reference=diffusers", "text.bos=always"]), BosRule::Forced);
    }
}
