//! A model's parts: their configurations, and the program each becomes.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use ndarray::Array4;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::error::{PipelineError, Result};
use super::origin::{self, Origin};
use super::stages::Weights;
use super::text_to_video::Shapes;
use crate::config::{Config, Reference};
use crate::hlo::{DType, Type};
use crate::models::connectors::{self, ConnectorsConfig};
use crate::models::gemma3::tokenizer::Tokenizer;
use crate::models::gemma3::{self, Gemma3Config};
use crate::models::presets::Preset;
use crate::models::transformer::{self, ForwardShape, TransformerConfig};
use crate::models::upsampler::{self, UpsamplerConfig};
use crate::models::video_vae::Pixels;
use crate::models::vocoder::{self, VocoderConfig};
use crate::models::{ConfigError, Network, audio_vae, parse_config, video_vae};
use crate::nn::{Axis, Build, Init, Param, Source};
use crate::sampling::latents::{AudioGrid, Statistics, VideoGrid};
use crate::sampling::sigmas::FlowMatch;
use crate::tensor::Tensor;
pub use crate::weights::Component;
use crate::weights::{ModelSource, check_finite};

/// What a text-to-video run needs. The text encoder stands before the tokenizer, which its folder often brings.
pub const TEXT_TO_VIDEO: [Component; 8] = [
    Component::TextEncoder,
    Component::Tokenizer,
    Component::Connectors,
    Component::Transformer,
    Component::Scheduler,
    Component::Vae,
    Component::AudioVae,
    Component::Vocoder,
];

/// Mel frames a latent covers: the audio VAE halves time and mel bins twice.
const AUDIO_COMPRESSION: usize = 4;

/// The configurations of a model, each read when it is needed, so that a model of some parts runs those.
#[derive(Clone)]
pub struct Parts {
    origin: Origin,
    /// Blocks left of every transformer, to look at programs.
    layers: Option<usize>,
    /// Whether a vocoder of two stages limits the first.
    vocoder_clamp: bool,
}

impl From<Origin> for Parts {
    fn from(origin: Origin) -> Self {
        Parts { origin, layers: None, vocoder_clamp: true }
    }
}

impl Parts {
    /// Of a model on disk.
    pub fn of(source: &Rc<ModelSource>) -> Self {
        Parts::from(Origin::Files(source.clone()))
    }

    /// Of a model that this program carries.
    pub fn of_preset(preset: Preset) -> Self {
        Parts::from(Origin::Preset(preset))
    }

    /// What they are read from.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    fn read<T>(&self, part: Component, parse: impl Fn(&Value) -> std::result::Result<T, ConfigError>) -> Result<T> {
        Ok(parse(&self.origin.json(part)?)?)
    }

    /// The same model with the transformer cut to its first `layers` blocks, to look at its programs. Their blocks are
    /// the whole model's.
    #[must_use]
    pub fn cut(self, layers: usize) -> Self {
        Parts { layers: Some(layers), ..self }
    }

    /// The same model with or without a limit of -1..1 between the vocoder's two stages, where it has two. Lightricks'
    /// code has it, diffusers has not; here it is on unless this says otherwise.
    #[must_use]
    pub fn with_vocoder_clamp(self, clamp: bool) -> Self {
        Parts { vocoder_clamp: clamp, ..self }
    }

    /// The same model as a configuration has it run.
    #[must_use]
    pub fn for_run(self, config: &Config) -> Self {
        self.with_vocoder_clamp(config.vocoder.stage1_clamp == Reference::Official)
    }

    /// The transformer's.
    ///
    /// # Errors
    /// A missing file, a key that is wrong or not computed; as for the other parts.
    pub fn transformer(&self) -> Result<TransformerConfig> {
        let mut c = self.read(Component::Transformer, TransformerConfig::from_json)?;
        c.num_layers = self.layers.unwrap_or(c.num_layers).min(c.num_layers);
        Ok(c)
    }

    /// The text encoder's.
    ///
    /// # Errors
    /// As [`Parts::transformer`].
    pub fn text_encoder(&self) -> Result<Gemma3Config> {
        self.read(Component::TextEncoder, Gemma3Config::from_json)
    }

    /// The connectors'.
    ///
    /// # Errors
    /// As [`Parts::transformer`].
    pub fn connectors(&self) -> Result<ConnectorsConfig> {
        self.read(Component::Connectors, ConnectorsConfig::from_json)
    }

    /// The vocoder's.
    ///
    /// # Errors
    /// As [`Parts::transformer`].
    pub fn vocoder(&self) -> Result<VocoderConfig> {
        Ok(self.read(Component::Vocoder, VocoderConfig::from_json)?.with_clamp(self.vocoder_clamp))
    }

    /// The latent upsampler's.
    ///
    /// # Errors
    /// As [`Parts::transformer`].
    pub fn upsampler(&self) -> Result<UpsamplerConfig> {
        self.read(Component::LatentUpsampler, UpsamplerConfig::from_json)
    }

    /// The latent upsampler's, where it makes latents `to` of latents `from`, both `[channels, frames, rows, columns]`.
    ///
    /// # Errors
    /// As [`Parts::transformer`]; one line naming file and both sides.
    pub fn upsampler_between(&self, from: [usize; 4], to: [usize; 4]) -> Result<UpsamplerConfig> {
        let c = self.upsampler()?;
        c.check_fit(from, to).map_err(|why| {
            let place = match &self.origin {
                Origin::Files(source) => source.config_path(Component::LatentUpsampler).display().to_string(),
                Origin::Preset(preset) => preset.name.to_string(),
            };
            PipelineError::Input(format!("{place}: {why}"))
        })?;
        Ok(c)
    }

    fn sizes<T: DeserializeOwned>(&self, part: Component) -> Result<T> {
        self.read(part, |json| parse_config(part.folder(), json))
    }

    /// Prompts `[rows, tokens]` to `prompt_embeds`: projected, or the stack of hidden states.
    ///
    /// # Errors
    /// What is wrong with the configuration or the sizes; as for the other programs.
    pub fn text_encoder_program(&self, rows: usize, tokens: usize, projected: bool, b: &Build) -> Result<Network> {
        let connectors = if projected { Some(self.connectors()?) } else { None };
        Ok(gemma3::program(&self.text_encoder()?, connectors.as_ref(), rows, tokens, b)?)
    }

    /// Text to the transformer's contexts.
    ///
    /// # Errors
    /// As [`Parts::text_encoder_program`].
    pub fn connectors_program(
        &self,
        rows: usize,
        tokens: usize,
        input: connectors::Input,
        b: &Build,
    ) -> Result<Network> {
        Ok(connectors::program(&self.connectors()?, rows, tokens, input, b)?)
    }

    /// The connectors' tables, by input name.
    ///
    /// # Errors
    /// What is wrong with the configuration.
    pub fn connectors_inputs(&self, tokens: usize) -> Result<Vec<(String, Tensor)>> {
        Ok(connectors::host_inputs(&self.connectors()?, tokens))
    }

    /// Latents `[b, c, f, h, w]` to pictures, as `pixels` says.
    ///
    /// # Errors
    /// As [`Parts::text_encoder_program`].
    pub fn video_decoder_program(&self, dims: [usize; 5], pixels: Pixels, b: &Build) -> Result<Network> {
        let c = self.read(Component::Vae, video_vae::DecoderConfig::from_json)?;
        let [n, _, f, h, w] = dims;
        Ok(video_vae::decoder_program(&c, [n, f, h, w], pixels, b)?)
    }

    /// Pictures `[b, c, f, h, w]` to latents.
    ///
    /// # Errors
    /// As [`Parts::text_encoder_program`].
    pub fn video_encoder_program(&self, dims: [usize; 5], b: &Build) -> Result<Network> {
        let c = self.read(Component::Vae, video_vae::EncoderConfig::from_json)?;
        let [n, _, f, h, w] = dims;
        Ok(video_vae::encoder_program(&c, [n, f, h, w], b)?)
    }

    /// Latents `[b, c, l, m]` to a mel spectrogram.
    ///
    /// # Errors
    /// As [`Parts::text_encoder_program`].
    pub fn audio_decoder_program(&self, dims: [usize; 4], b: &Build) -> Result<Network> {
        let c = self.read(Component::AudioVae, audio_vae::DecoderConfig::from_json)?;
        let [n, _, l, m] = dims;
        Ok(audio_vae::decoder_program(&c, [n, l, m], b)?)
    }

    /// A mel spectrogram `[b, channels, frames, bins]` to samples, always in f32: bf16 is audible here.
    ///
    /// # Errors
    /// As [`Parts::text_encoder_program`].
    pub fn vocoder_program(&self, dims: [usize; 4], b: &Build) -> Result<Network> {
        Ok(vocoder::vocoder_program(&self.vocoder()?, dims, &b.with_dtype(DType::F32))?)
    }

    /// Un-normalised latents `[b, c, f, h, w]` to latents of more rows and columns, or frames.
    ///
    /// # Errors
    /// As [`Parts::text_encoder_program`].
    pub fn upsampler_program(&self, [n, _, f, h, w]: [usize; 5], b: &Build) -> Result<Network> {
        Ok(upsampler::program(&self.upsampler()?, [n, f, h, w], b)?)
    }

    /// Every parameter that any program of a part declares.
    ///
    /// # Errors
    /// What is wrong with the configuration.
    pub fn parameters(&self, part: Component) -> Result<Vec<Param>> {
        let build = Build::new(DType::F32);
        let networks = match part {
            Component::TextEncoder => vec![self.text_encoder_program(1, 8, false, &build)?],
            Component::Connectors => {
                let tokens = self.connectors()?.token_multiple();
                vec![self.connectors_program(1, tokens, connectors::Input::HiddenStates, &build)?]
            }
            Component::Transformer => {
                let c = self.transformer()?;
                let text_channels = match c.use_prompt_embeddings {
                    true => [c.caption_channels; 2],
                    false => [c.cross_attention_dim, c.audio_cross_attention_dim],
                };
                let shape = ForwardShape { text_channels: text_channels.into(), ..ForwardShape::default() };
                vec![transformer::program(&c, &shape, &build)?]
            }
            Component::Vae => {
                let v: VaeSizes = self.sizes(part)?;
                let (frames, side) = (1 + v.temporal(), 4 * v.spatial());
                vec![
                    self.video_decoder_program([1, 0, 1, 4, 4], Pixels::Values, &build)?,
                    self.video_encoder_program([1, 0, frames, side, side], &build)?,
                ]
            }
            Component::AudioVae => {
                let a: AudioSizes = self.sizes(part)?;
                vec![self.audio_decoder_program([1, 0, 2, a.latent_bins()], &build)?]
            }
            Component::Vocoder => {
                let c = self.vocoder()?;
                // One channel as wide as all: only the product of channels and bins counts.
                vec![self.vocoder_program([1, 1, 8, c.generator.in_channels], &build)?]
            }
            Component::LatentUpsampler => vec![self.upsampler_program([1, 0, 2, 4, 4], &build)?],
            Component::Tokenizer | Component::Scheduler => Vec::new(),
        };
        let component = part.folder();
        let mut params: Vec<Param> =
            networks.into_iter().flat_map(|n| n.params).filter(|p| p.component == component).collect();
        if let Some(length) = self.statistics_length(part)? {
            // Read by the host only; no program declares them.
            let init = [("latents_mean", Init::normal(0.1)), ("latents_std", Init { mean: 1.0, std: 0.05 })];
            params.extend(init.map(|(name, init)| Param {
                component,
                name: format!("{component}.{name}"),
                ty: Type::new(DType::F32, vec![length]),
                axes: vec![Axis::Channels],
                source: Source::Stack { keys: vec![name.into()], shape: vec![length] },
                init,
            }));
        }
        Ok(params)
    }

    fn statistics_length(&self, part: Component) -> Result<Option<usize>> {
        Ok(match part {
            Component::Vae => Some(self.sizes::<VaeSizes>(part)?.latent_channels),
            Component::AudioVae => Some(self.sizes::<AudioSizes>(part)?.base_channels),
            _ => None,
        })
    }
}

/// What the host needs of `vae/config.json`; defaults are the reference class' own.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
struct VaeSizes {
    latent_channels: usize,
    spatial_compression_ratio: Option<usize>,
    temporal_compression_ratio: Option<usize>,
    spatio_temporal_scaling: Vec<bool>,
    patch_size: usize,
    patch_size_t: usize,
    scaling_factor: f32,
}

impl Default for VaeSizes {
    fn default() -> Self {
        VaeSizes {
            latent_channels: 128,
            spatial_compression_ratio: None,
            temporal_compression_ratio: None,
            spatio_temporal_scaling: vec![true; 4],
            patch_size: 4,
            patch_size_t: 1,
            scaling_factor: 1.0,
        }
    }
}

impl VaeSizes {
    /// The ratio that is given, else the reference's formula: a doubling for every scaling stage.
    fn ratio(&self, given: Option<usize>, patch: usize) -> usize {
        let doublings = self.spatio_temporal_scaling.iter().filter(|s| **s).count();
        given.unwrap_or(patch << doublings).max(1)
    }

    fn spatial(&self) -> usize {
        self.ratio(self.spatial_compression_ratio, self.patch_size)
    }

    fn temporal(&self) -> usize {
        self.ratio(self.temporal_compression_ratio, self.patch_size_t)
    }
}

/// What the host needs of `audio_vae/config.json`; defaults are the reference class' own.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
struct AudioSizes {
    base_channels: usize,
    latent_channels: usize,
    sample_rate: usize,
    mel_hop_length: usize,
    mel_bins: Option<usize>,
}

impl Default for AudioSizes {
    fn default() -> Self {
        AudioSizes {
            base_channels: 128,
            latent_channels: 8,
            sample_rate: 16000,
            mel_hop_length: 160,
            mel_bins: Some(64),
        }
    }
}

impl AudioSizes {
    fn bins(&self) -> usize {
        self.mel_bins.unwrap_or(64)
    }

    fn latent_bins(&self) -> usize {
        self.bins() / AUDIO_COMPRESSION
    }
}

/// What a request's programs are written from: a model's configurations alone, no weights.
pub struct Sizes {
    /// Sizes of the transformer.
    pub transformer: TransformerConfig,
    /// Video sizes to latents to tokens.
    pub video_grid: VideoGrid,
    /// Channels of video latents.
    pub video_channels: usize,
    /// Durations to latents.
    pub audio_grid: AudioGrid,
    /// Channels of audio latents.
    pub audio_channels: usize,
    /// Channels of the projected text.
    pub text_width: usize,
    /// Channels of the connectors' two results.
    pub text_channels: [usize; 2],
    /// The smallest prompt length; every legal one is a multiple of it.
    pub token_multiple: usize,
}

impl Sizes {
    /// Reads the configurations.
    ///
    /// # Errors
    /// A missing or unusable part, by name.
    pub fn of(parts: &Parts) -> Result<Self> {
        let transformer = parts.transformer()?;
        let (vae, audio): (VaeSizes, AudioSizes) = (parts.sizes(Component::Vae)?, parts.sizes(Component::AudioVae)?);
        let connectors = parts.connectors()?;
        Ok(Sizes {
            video_grid: VideoGrid {
                spatial_compression: vae.spatial(),
                temporal_compression: vae.temporal(),
                patch_size: transformer.patch_size,
                patch_size_t: transformer.patch_size_t,
            },
            video_channels: vae.latent_channels,
            audio_grid: AudioGrid {
                sampling_rate: audio.sample_rate,
                hop_length: audio.mel_hop_length,
                temporal_compression: AUDIO_COMPRESSION,
                mel_bins: audio.bins(),
                mel_compression: AUDIO_COMPRESSION,
            },
            audio_channels: audio.latent_channels,
            text_width: connectors.text_width(),
            text_channels: connectors.widths(),
            token_multiple: connectors.token_multiple(),
            transformer,
        })
    }
}

/// Everything a text-to-video request reads of a model.
pub struct Models {
    /// The configurations, which become programs.
    pub parts: Parts,
    /// What the programs are written from.
    pub sizes: Sizes,
    /// The model's own schedule.
    pub scheduler: FlowMatch,
    /// Tokenizer.
    pub tokenizer: Tokenizer,
    /// Of the video latents.
    pub video_statistics: Statistics,
    /// Of the audio tokens.
    pub audio_statistics: Statistics,
    /// Samples a second.
    pub sample_rate: usize,
    /// Where the parameters come from.
    pub weights: Weights,
}

/// The grids that token positions come from, by the transformer's configuration alone.
pub fn coordinate_grids(c: &TransformerConfig) -> (VideoGrid, AudioGrid) {
    let video = VideoGrid {
        spatial_compression: c.vae_scale_factors[1],
        temporal_compression: c.vae_scale_factors[0],
        patch_size: c.patch_size,
        patch_size_t: c.patch_size_t,
    };
    let audio = AudioGrid {
        sampling_rate: c.audio_sampling_rate,
        hop_length: c.audio_hop_length,
        temporal_compression: c.audio_scale_factor,
        mel_bins: 1,
        mel_compression: 1,
    };
    (video, audio)
}

impl Models {
    /// The model of a configuration, with weights as it says.
    ///
    /// # Errors
    /// As [`Models::open`] and [`Models::random`].
    pub fn of(config: &Config) -> Result<Self> {
        let models = match origin::of_run(config)? {
            (_, Weights::Files(source)) => Models::open(&source),
            (origin, Weights::Random(seed)) => Models::random(origin, seed),
        }?;
        Ok(Models { parts: models.parts.for_run(config), ..models })
    }

    /// A model of random weights, drawn from `seed`: configurations and tokenizer of its files where they are here.
    ///
    /// # Errors
    /// An unusable configuration or tokenizer, by name.
    pub fn random(origin: Origin, seed: u64) -> Result<Self> {
        let tokenizer = match &origin {
            Origin::Files(source) => source.tokenizer().ok(),
            Origin::Preset(_) => None,
        };
        tracing::warn!(
            "RANDOM WEIGHTS of {} (seed {seed}), made on the device: what they paint is noise. Stand-ins too: latent \
             statistics (mean 0, deviation 1){}",
            origin.name(),
            if tokenizer.is_some() { "" } else { ", tokenizer (bytes)" }
        );
        let tokenizer = match &tokenizer {
            Some(file) => Tokenizer::open(file.parent().unwrap_or(Path::new(".")))?,
            None => Tokenizer::bytes()?,
        };
        let parts = Parts::from(origin);
        let vocabulary = parts.text_encoder()?.vocab_size;
        if tokenizer.vocab_size() > vocabulary {
            let ids = tokenizer.vocab_size();
            let message = format!("the tokenizer has {ids} ids, the text encoder knows {vocabulary}");
            return Err(PipelineError::Input(message));
        }
        let (vae, audio): (VaeSizes, AudioSizes) = (parts.sizes(Component::Vae)?, parts.sizes(Component::AudioVae)?);
        let plain = |length: usize, scaling_factor: f32| Statistics {
            mean: vec![0.0; length],
            std: vec![1.0; length],
            scaling_factor,
        };
        let statistics = [plain(vae.latent_channels, vae.scaling_factor), plain(audio.base_channels, 1.0)];
        Models::with(parts, tokenizer, statistics, Weights::Random(seed))
    }

    /// Reads the configurations, the tokenizer and the latent statistics.
    ///
    /// # Errors
    /// A missing or unusable part, by name.
    pub fn open(source: &Rc<ModelSource>) -> Result<Self> {
        source.require(&TEXT_TO_VIDEO)?;
        let parts = Parts::of(source);
        let (vae, audio): (VaeSizes, AudioSizes) = (parts.sizes(Component::Vae)?, parts.sizes(Component::AudioVae)?);
        // Headers are read now, so that a damaged file is found before anything has run.
        for part in TEXT_TO_VIDEO.into_iter().filter(|p| p.weights_stem().is_some()) {
            source.checkpoint(part)?;
        }
        let statistics = |part: Component, length: usize, scaling_factor: f32| -> Result<Statistics> {
            let checkpoint = source.checkpoint(part)?;
            let read = |name: &str| -> Result<Vec<f32>> {
                let view = checkpoint.get_float(name)?.expect_shape(&[length])?;
                check_finite(&view)?;
                Ok(view.to_tensor()?.to_f32().into_iter().collect())
            };
            Ok(Statistics { mean: read("latents_mean")?, std: read("latents_std")?, scaling_factor })
        };
        let statistics = [
            statistics(Component::Vae, vae.latent_channels, vae.scaling_factor)?,
            statistics(Component::AudioVae, audio.base_channels, 1.0)?,
        ];
        let tokenizer = source.tokenizer()?;
        let tokenizer = Tokenizer::open(tokenizer.parent().unwrap_or(Path::new(".")))?;
        Models::with(parts, tokenizer, statistics, Weights::Files(source.clone()))
    }

    fn with(parts: Parts, tokenizer: Tokenizer, statistics: [Statistics; 2], weights: Weights) -> Result<Self> {
        let scheduler = parts.origin().json(Component::Scheduler)?.to_string();
        let file = match parts.origin() {
            Origin::Files(source) => source.config_path(Component::Scheduler),
            Origin::Preset(preset) => PathBuf::from(preset.name),
        };
        let [video_statistics, audio_statistics] = statistics;
        Ok(Models {
            tokenizer,
            video_statistics,
            audio_statistics,
            sample_rate: parts.vocoder()?.output_sampling_rate,
            scheduler: FlowMatch::from_json(&scheduler, &file)?,
            sizes: Sizes::of(&parts)?,
            parts,
            weights,
        })
    }

    /// What tells this model apart from others, as the sidecar of a run keeps it.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn identity(&self) -> Result<Value> {
        let path = self.parts.origin().name();
        Ok(match &self.weights {
            Weights::Files(source) => json!({"path": path, "fingerprint": source.fingerprint()?}),
            Weights::Random(seed) => json!({
                "path": path,
                "weights": "random",
                "weights_seed": seed,
                "fingerprint": self.parts.origin().random_fingerprint(*seed)?,
            }),
        })
    }

    /// Token bounds of a request, `[1, 3, n, 2]` and `[1, 1, m, 2]`.
    pub fn coords(&self, shapes: &Shapes, frame_rate: f64) -> [Array4<f32>; 2] {
        let c = &self.sizes.transformer;
        let (video, audio) = coordinate_grids(c);
        let offset = c.causal_offset as i64;
        [
            video.coords(&shapes.video, c.vae_scale_factors, offset, frame_rate),
            audio.coords(1, shapes.audio.length, c.audio_scale_factor, c.audio_patch_size_t, offset),
        ]
    }
}
