//! `vae/config.json`, read as the two networks in the order in which they run.

use serde::Deserialize;

use super::COMPONENT;
use crate::defaults::with_defaults;
use crate::models::ranges::{MAX_RATIO, check_at_most};
use crate::models::{ConfigError, parse_config, require};
use crate::nn::Padding;

with_defaults! {
    /// The keys as they stand in the file, which both networks and the host read; defaults are the reference class' own.
    #[derive(Deserialize)]
    #[serde(default)]
    pub struct VideoVaeConfig {
        in_channels: usize = 3,
        out_channels: usize = 3,
        latent_channels: usize = 128,
        block_out_channels: Vec<usize> = vec![256, 512, 1024, 2048],
        down_block_types: Vec<String> = vec![DOWN_BLOCK.into(); 4],
        decoder_block_out_channels: Vec<usize> = vec![256, 512, 1024],
        layers_per_block: Vec<usize> = vec![4, 6, 6, 2, 2],
        decoder_layers_per_block: Vec<usize> = vec![5; 4],
        spatio_temporal_scaling: PerBlock = PerBlock::Each(vec![true; 4]),
        decoder_spatio_temporal_scaling: PerBlock = PerBlock::Each(vec![true; 3]),
        decoder_inject_noise: PerBlock = PerBlock::All(false),
        downsample_type: Vec<Resample> = {
            vec![Resample::Spatial, Resample::Temporal, Resample::Spatiotemporal, Resample::Spatiotemporal]
        },
        upsample_type: Vec<Resample> = vec![Resample::Spatiotemporal; 3],
        upsample_residual: PerBlock = PerBlock::Each(vec![true; 3]),
        upsample_factor: Vec<usize> = vec![2; 3],
        timestep_conditioning: bool = false,
        patch_size: usize = 4,
        patch_size_t: usize = 1,
        resnet_norm_eps: f64 = 1e-6,
        encoder_causal: bool = true,
        decoder_causal: bool = true,
        encoder_spatial_padding_mode: Padding = Padding::Zeros,
        decoder_spatial_padding_mode: Padding = Padding::Reflect,
        spatial_compression_ratio: Option<usize> = None,
        temporal_compression_ratio: Option<usize> = None,
        scaling_factor: f32 = 1.0,
    }
}

/// Sizes of the autoencoder as the host needs them.
#[derive(Clone, Debug)]
pub struct Geometry {
    pub latent_channels: usize,
    /// Divides normalized latents.
    pub(crate) scaling_factor: f32,
    ratios: [usize; 2],
}

impl Geometry {
    /// That of the autoencoder that a transformer's configuration tells of, where there is none.
    pub(crate) fn told(latent_channels: usize, [temporal, spatial]: [usize; 2]) -> Self {
        Geometry { latent_channels, scaling_factor: 1.0, ratios: [temporal, spatial] }
    }

    /// Pixels a latent covers along each side.
    pub(crate) fn spatial(&self) -> usize {
        self.ratios[1]
    }

    /// Frames a latent covers.
    pub(crate) fn temporal(&self) -> usize {
        self.ratios[0]
    }
}

impl VideoVaeConfig {
    /// Reads `vae/config.json`.
    ///
    /// # Errors
    /// A key of the wrong type, or that nothing reads, by name.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, ConfigError> {
        let c: Self = parse_config(COMPONENT, json)?;
        let [frames, rows] = c.geometry().ratios;
        check_at_most(COMPONENT, "temporal_compression_ratio", frames, MAX_RATIO)?;
        check_at_most(COMPONENT, "spatial_compression_ratio", rows, MAX_RATIO)?;
        Ok(c)
    }

    /// Whether there is a decoder: beside a diffusion decoder there may be none.
    pub(crate) fn has_decoder(&self) -> bool {
        !self.decoder_block_out_channels.is_empty()
    }

    /// Sizes as the host needs them. A ratio that the file does not give is the reference's formula: a doubling for every
    /// scaling stage.
    pub fn geometry(&self) -> Geometry {
        let scaling = self.spatio_temporal_scaling.list(self.block_out_channels.len());
        let scale = 2usize.saturating_pow(scaling.iter().filter(|s| **s).count() as u32);
        let ratio = |given: Option<usize>, patch: usize| given.unwrap_or(patch.saturating_mul(scale));
        Geometry {
            latent_channels: self.latent_channels,
            scaling_factor: self.scaling_factor,
            ratios: [
                ratio(self.temporal_compression_ratio, self.patch_size_t),
                ratio(self.spatial_compression_ratio, self.patch_size),
            ],
        }
    }

    fn check_patch(&self) -> Result<(), ConfigError> {
        require(self.patch_size_t == 1, COMPONENT, "patch_size_t", self.patch_size_t, "1")
    }

    /// Refuses ratios that are not those of a network whose stages have these strides: the host lays out latents by them.
    fn check_ratios(&self, strides: impl Iterator<Item = [usize; 3]>) -> Result<(), ConfigError> {
        let [frames, rows] = strides.fold([1usize, self.patch_size], |[frames, rows], [t, h, _]| {
            [frames.saturating_mul(t), rows.saturating_mul(h)]
        });
        for (key, given, made) in [
            ("temporal_compression_ratio", self.temporal_compression_ratio, frames),
            ("spatial_compression_ratio", self.spatial_compression_ratio, rows),
        ] {
            let fits = given.is_none_or(|given| given == made);
            require(fits, COMPONENT, key, given.unwrap_or(made), "what the stages scale by")?;
            check_at_most(COMPONENT, key, made, MAX_RATIO)?;
        }
        Ok(())
    }
}

const DOWN_BLOCK: &str = "LTX2VideoDownBlock3D";

/// One value for all blocks, or one a block.
#[derive(Deserialize)]
#[serde(untagged)]
enum PerBlock {
    All(bool),
    Each(Vec<bool>),
}

impl PerBlock {
    fn list(&self, blocks: usize) -> Vec<bool> {
        match self {
            PerBlock::All(value) => vec![*value; blocks],
            PerBlock::Each(values) => values.clone(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Resample {
    Conv,
    Spatial,
    Temporal,
    Spatiotemporal,
}

impl Resample {
    fn stride(self) -> [usize; 3] {
        match self {
            Resample::Spatial => [1, 2, 2],
            Resample::Temporal => [2, 1, 1],
            Resample::Spatiotemporal | Resample::Conv => [2, 2, 2],
        }
    }
}

/// Structure of the decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    pub latent_channels: usize,
    /// Channels of a frame.
    pub(crate) out_channels: usize,
    pub(crate) mid_channels: usize,
    pub(crate) mid_layers: usize,
    pub(crate) stages: Vec<UpStage>,
    /// Side of the square of pixels that the last convolution gives as channels.
    pub(crate) patch_size: usize,
    /// Whether a frame depends on no later latent.
    pub(crate) causal: bool,
    /// Padding of the convolutions in height and width.
    pub(crate) padding: Padding,
    /// Whether a timestep modulates every block.
    pub(crate) timestep_conditioning: bool,
    /// The eps of the norm before a block's shortcut.
    pub(crate) shortcut_eps: f64,
}

/// A stage of the decoder: upsampling, then equal res blocks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct UpStage {
    /// Whether a res block before the upsampling changes the width.
    pub(crate) widens: bool,
    pub(crate) upsample: Option<Upsample>,
    pub(crate) channels: usize,
    pub(crate) layers: usize,
}

/// A convolution whose channels are rearranged to time, height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Upsample {
    /// Growth of time, height and width.
    pub(crate) stride: [usize; 3],
    /// By what the channels shrink.
    pub(crate) factor: usize,
    /// Whether the rearranged input is added.
    pub(crate) residual: bool,
}

/// Structure of the encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderConfig {
    /// Channels of a frame.
    pub(crate) in_channels: usize,
    /// Channels of a latent, also of the first convolution.
    pub latent_channels: usize,
    pub(crate) stages: Vec<DownStage>,
    pub(crate) mid_channels: usize,
    pub(crate) mid_layers: usize,
    /// Side of the square of pixels that the first convolution sees as channels.
    pub(crate) patch_size: usize,
    /// Whether a latent depends on no later frame.
    pub(crate) causal: bool,
    /// Padding of the convolutions in height and width.
    pub(crate) padding: Padding,
    /// The eps of the norm before a block's shortcut.
    pub(crate) shortcut_eps: f64,
}

/// A stage of the encoder: equal res blocks, then downsampling.
#[derive(Clone, Debug, PartialEq)]
pub struct DownStage {
    pub(crate) channels: usize,
    pub(crate) layers: usize,
    pub(crate) downsample: Option<Downsample>,
}

/// Downsampling of a stage of the encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Downsample {
    /// By a convolution with steps of 2.
    Strided,
    /// By space to depth.
    Folded {
        /// Shrinkage of time, height and width.
        stride: [usize; 3],
        channels: usize,
    },
}

impl Downsample {
    /// Shrinkage of time, height and width.
    fn stride(self) -> [usize; 3] {
        match self {
            Downsample::Strided => [2; 3],
            Downsample::Folded { stride, .. } => stride,
        }
    }
}

impl VideoVaeConfig {
    /// Structure of the decoder.
    ///
    /// # Errors
    /// Lists whose lengths do not fit, ratios that are not its own, or a value no code computes.
    pub fn decoder(&self) -> Result<DecoderConfig, ConfigError> {
        self.check_patch()?;
        let sizes = &self.decoder_block_out_channels;
        let blocks = sizes.len();
        let per_block = self.decoder_layers_per_block.len();
        let noisy = self.decoder_inject_noise.list(per_block).contains(&true);
        require(!noisy, COMPONENT, "decoder_inject_noise", true, "false: the reference's noise has no seed")?;
        // The file lists the decoder from its output to its input, except for the kinds of upsampling.
        let channels = first("decoder_block_out_channels", blocks, sizes.iter().rev())?;
        let layers = first("decoder_layers_per_block", blocks + 1, self.decoder_layers_per_block.iter().rev())?;
        let scaling = self.decoder_spatio_temporal_scaling.list(per_block.saturating_sub(1));
        let scaling = first("decoder_spatio_temporal_scaling", blocks, scaling.iter().rev())?;
        let residual = self.upsample_residual.list(per_block.saturating_sub(1));
        let residual = first("upsample_residual", blocks, residual.iter().rev())?;
        let factors = first("upsample_factor", blocks, self.upsample_factor.iter().rev())?;
        let kinds = first("upsample_type", blocks, self.upsample_type.iter())?;
        let Some(&mid_channels) = channels.first() else {
            return Err(form("decoder_block_out_channels is empty".into()));
        };

        let mut stages = Vec::new();
        let mut width = mid_channels;
        for i in 0..blocks {
            let (factor, kind) = (factors[i], kinds[i]);
            let upsample = scaling[i].then(|| Upsample { stride: kind.stride(), factor, residual: residual[i] });
            require(upsample.is_none() || kind != Resample::Conv, COMPONENT, "upsample_type", "conv", UP_TYPES)?;
            let stage = UpStage {
                widens: width / factor != channels[i] / factor,
                upsample,
                channels: channels[i] / factor,
                layers: layers[i + 1],
            };
            require(stage.fits(width), COMPONENT, "upsample_factor", &self.upsample_factor, UP_FACTORS)?;
            let plain = !(stage.widens && self.timestep_conditioning);
            require(plain, COMPONENT, "timestep_conditioning", true, "false where a stage changes the width")?;
            width = stage.channels;
            stages.push(stage);
        }
        self.check_ratios(stages.iter().filter_map(|s| s.upsample).map(|u| u.stride))?;
        Ok(DecoderConfig {
            latent_channels: self.latent_channels,
            out_channels: self.out_channels,
            mid_channels,
            mid_layers: layers[0],
            stages,
            patch_size: self.patch_size,
            causal: self.decoder_causal,
            padding: self.decoder_spatial_padding_mode,
            timestep_conditioning: self.timestep_conditioning,
            shortcut_eps: self.resnet_norm_eps,
        })
    }
}

const UP_TYPES: &str = "spatial, temporal and spatiotemporal";
const UP_FACTORS: &str = "a factor for which each stage's channels meet the next one's and its upsampling divides";

impl UpStage {
    /// Whether an input of `width` channels comes out as `self.channels`.
    fn fits(&self, width: usize) -> bool {
        let inner = if self.widens { self.channels } else { width };
        let Some(u) = self.upsample else { return inner == self.channels };
        let volume: usize = u.stride.iter().product();
        let divides = !u.residual || (inner.is_multiple_of(volume) && volume.is_multiple_of(u.factor));
        (!self.widens || u.factor == 1) && inner == self.channels * u.factor && divides
    }
}

impl VideoVaeConfig {
    /// Structure of the encoder.
    ///
    /// # Errors
    /// Lists whose lengths do not fit, ratios that are not its own, or a value no code computes.
    pub fn encoder(&self) -> Result<EncoderConfig, ConfigError> {
        self.check_patch()?;
        let blocks = self.block_out_channels.len();
        let types = first("down_block_types", blocks, self.down_block_types.iter())?;
        let known = types.iter().all(|t| t == DOWN_BLOCK);
        require(known, COMPONENT, "down_block_types", &types, DOWN_BLOCK)?;
        let layers = first("layers_per_block", blocks + 1, self.layers_per_block.iter())?;
        let scaling = self.spatio_temporal_scaling.list(self.layers_per_block.len().saturating_sub(1));
        let scaling = first("spatio_temporal_scaling", blocks, scaling.iter())?;
        let kinds = first("downsample_type", blocks, self.downsample_type.iter())?;

        let mut stages = Vec::new();
        let mut width = self.latent_channels;
        for (i, &channels) in self.block_out_channels.iter().enumerate() {
            let downsample = scaling[i].then(|| match kinds[i] {
                Resample::Conv => Downsample::Strided,
                kind => Downsample::Folded { stride: kind.stride(), channels },
            });
            let stage = DownStage { channels: width, layers: layers[i], downsample };
            require(stage.fits(channels), COMPONENT, "block_out_channels", &self.block_out_channels, DOWN_CHANNELS)?;
            stages.push(stage);
            width = channels;
        }
        self.check_ratios(stages.iter().filter_map(|s| s.downsample).map(Downsample::stride))?;
        Ok(EncoderConfig {
            in_channels: self.in_channels,
            latent_channels: self.latent_channels,
            stages,
            mid_channels: width,
            mid_layers: *self.layers_per_block.last().ok_or_else(|| form("layers_per_block is empty".into()))?,
            patch_size: self.patch_size,
            causal: self.encoder_causal,
            padding: self.encoder_spatial_padding_mode,
            shortcut_eps: self.resnet_norm_eps,
        })
    }
}

impl EncoderConfig {
    /// Rows and columns of a frame that become one latent.
    pub fn reduction(&self) -> [usize; 2] {
        let strides = self.stages.iter().filter_map(|stage| stage.downsample).map(Downsample::stride);
        strides.fold([self.patch_size; 2], |[rows, columns], [_, h, w]| [rows * h, columns * w])
    }
}

const DOWN_CHANNELS: &str = "channels that each stage's downsampling divides, and that change only where one folds";

impl DownStage {
    /// Whether its result has `channels` channels.
    fn fits(&self, channels: usize) -> bool {
        match self.downsample {
            None | Some(Downsample::Strided) => self.channels == channels,
            Some(Downsample::Folded { stride, .. }) => {
                let volume: usize = stride.iter().product();
                channels.is_multiple_of(volume) && (self.channels * volume).is_multiple_of(channels)
            }
        }
    }
}

/// The first `n` values of a list, which may be longer: the class' defaults are, in models with fewer blocks.
fn first<'a, T: Clone + 'a>(
    key: &str,
    n: usize,
    values: impl ExactSizeIterator<Item = &'a T>,
) -> Result<Vec<T>, ConfigError> {
    let length = values.len();
    if length < n {
        return Err(form(format!("{key} has {length} entries, the blocks need {n}")));
    }
    Ok(values.take(n).cloned().collect())
}

fn form(message: String) -> ConfigError {
    ConfigError::Form { component: COMPONENT, message }
}
