//! Reads `vae/config.json` and derives the structure of the encoder and of the decoder from it, with the blocks in
//! execution order.

use serde::Deserialize;

use super::COMPONENT;
use crate::ranges::{MAX_RATIO, check_at_most};
use crate::{ComponentConfigError, parse_config, require};
use ltx2_base::with_defaults;
use ltx2_nn::Padding;

with_defaults! {
    /// Keys of `config.json`, with the defaults of the diffusers class. The encoder, the decoder and the host code read
    /// these keys.
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

/// Sizes of the video VAE that the host code needs.
#[derive(Clone, Debug)]
pub struct Geometry {
    /// Channels of the latents.
    pub latent_channels: usize,
    /// Factor by which latents are multiplied when they are normalized, and divided when they are un-normalized.
    pub scaling_factor: f32,
    ratios: [usize; 2],
}

impl Geometry {
    /// Creates the geometry from the latent channels and the `[temporal, spatial]` compression ratios in a
    /// transformer's configuration, for pipelines that do not read the video VAE's configuration.
    pub fn from_compression(latent_channels: usize, [temporal, spatial]: [usize; 2]) -> Self {
        Geometry { latent_channels, scaling_factor: 1.0, ratios: [temporal, spatial] }
    }

    /// Returns the number of pixels per latent along height and width.
    pub fn spatial(&self) -> usize {
        self.ratios[1]
    }

    /// Returns the number of frames per latent.
    pub fn temporal(&self) -> usize {
        self.ratios[0]
    }
}

impl VideoVaeConfig {
    /// Reads `vae/config.json`.
    ///
    /// # Errors
    /// Returns an error if a key is unknown or has the wrong type, or if a number is out of range.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, ComponentConfigError> {
        let c: Self = parse_config(COMPONENT, json)?;
        let [frames, rows] = c.geometry().ratios;
        check_at_most(COMPONENT, "temporal_compression_ratio", frames, MAX_RATIO)?;
        check_at_most(COMPONENT, "spatial_compression_ratio", rows, MAX_RATIO)?;
        Ok(c)
    }

    /// Returns whether the VAE has a decoder; models with a diffusion decoder may not have one.
    pub fn has_decoder(&self) -> bool {
        !self.decoder_block_out_channels.is_empty()
    }

    /// Returns the sizes for the host code. Compression ratios that are missing in the file are computed as in the
    /// reference: the patch size doubled once per scaling stage.
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

    fn check_patch(&self) -> Result<(), ComponentConfigError> {
        require(self.patch_size_t == 1, COMPONENT, "patch_size_t", self.patch_size_t, "1")
    }

    /// Returns an error if the compression ratios in the file are not the products of the patch size and the stages'
    /// strides. The host code relies on the ratios in the file.
    fn check_ratios(&self, strides: impl Iterator<Item = [usize; 3]>) -> Result<(), ComponentConfigError> {
        let [frames, rows] = strides.fold([1usize, self.patch_size], |[frames, rows], [t, h, _]| {
            [frames.saturating_mul(t), rows.saturating_mul(h)]
        });
        for (key, given, made) in [
            ("temporal_compression_ratio", self.temporal_compression_ratio, frames),
            ("spatial_compression_ratio", self.spatial_compression_ratio, rows),
        ] {
            let fits = given.is_none_or(|given| given == made);
            require(
                fits,
                COMPONENT,
                key,
                given.unwrap_or(made),
                "the product of the patch size and the stages' strides",
            )?;
            check_at_most(COMPONENT, key, made, MAX_RATIO)?;
        }
        Ok(())
    }
}

const DOWN_BLOCK: &str = "LTX2VideoDownBlock3D";

/// One value for all blocks, or one value per block.
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

/// Structure of the video decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Channels of the latents.
    pub latent_channels: usize,
    /// Channels of the decoded frames.
    pub out_channels: usize,
    pub(crate) mid_channels: usize,
    pub(crate) mid_layers: usize,
    pub(crate) stages: Vec<UpStage>,
    /// Side length of a patch: the last convolution outputs `patch_size²` pixels as channels.
    pub patch_size: usize,
    /// Whether convolutions over time are causal, so that no frame depends on later latents.
    pub causal: bool,
    /// Padding of convolutions along height and width.
    pub padding: Padding,
    /// Whether a timestep embedding modulates every block.
    pub timestep_conditioning: bool,
    /// Epsilon of the norm before a residual block's shortcut convolution.
    pub(crate) shortcut_eps: f64,
}

/// A decoder stage: upsampling, then identical residual blocks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct UpStage {
    /// Whether a residual block before the upsampling changes the number of channels.
    pub(crate) widens: bool,
    pub(crate) upsample: Option<Upsample>,
    pub(crate) channels: usize,
    pub(crate) layers: usize,
}

/// A convolution followed by depth-to-space over time, height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Upsample {
    /// Upsampling factors of time, height and width.
    pub(crate) stride: [usize; 3],
    /// Factor by which the number of channels is divided.
    pub(crate) factor: usize,
    /// Whether depth-to-space of the input is added to the output.
    pub(crate) residual: bool,
}

/// Structure of the video encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderConfig {
    /// Channels of the input frames.
    pub in_channels: usize,
    /// Channels of the latents and of the first convolution's output.
    pub latent_channels: usize,
    pub(crate) stages: Vec<DownStage>,
    pub(crate) mid_layers: usize,
    /// Side length of a patch: the first convolution reads `patch_size²` pixels as channels.
    pub patch_size: usize,
    /// Whether latents do not depend on later frames.
    pub causal: bool,
    /// Padding of convolutions along height and width.
    pub padding: Padding,
    /// Epsilon of the norm before a residual block's shortcut convolution.
    pub(crate) shortcut_eps: f64,
}

/// An encoder stage: identical residual blocks, then downsampling.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DownStage {
    pub(crate) channels: usize,
    pub(crate) layers: usize,
    pub(crate) downsample: Option<Downsample>,
}

/// Downsampling at the end of an encoder stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Downsample {
    /// Convolution with stride 2.
    Strided,
    /// Convolution followed by space-to-depth.
    Folded {
        /// Downsampling factors of time, height and width.
        stride: [usize; 3],
        channels: usize,
    },
}

impl Downsample {
    /// Returns the downsampling factors of time, height and width.
    fn stride(self) -> [usize; 3] {
        match self {
            Downsample::Strided => [2; 3],
            Downsample::Folded { stride, .. } => stride,
        }
    }
}

impl VideoVaeConfig {
    /// Returns the structure of the decoder.
    ///
    /// # Errors
    /// Returns an error if a list is too short, the compression ratios do not match the stages, or a value is
    /// unsupported.
    pub fn decoder(&self) -> Result<DecoderConfig, ComponentConfigError> {
        self.check_patch()?;
        let sizes = &self.decoder_block_out_channels;
        let blocks = sizes.len();
        let per_block = self.decoder_layers_per_block.len();
        let noisy = self.decoder_inject_noise.list(per_block).contains(&true);
        require(!noisy, COMPONENT, "decoder_inject_noise", true, "false (the reference's injected noise has no seed)")?;
        // The file lists the decoder's blocks from output to input, except in `upsample_type`.
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
            require(
                plain,
                COMPONENT,
                "timestep_conditioning",
                true,
                "false if a stage changes the number of channels",
            )?;
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
const UP_FACTORS: &str =
    "factors that match decoder_block_out_channels and, for residual stages, divide the product of the stage's strides";

impl UpStage {
    /// Returns whether the stage converts `width` input channels to `self.channels` channels.
    fn fits(&self, width: usize) -> bool {
        let inner = if self.widens { self.channels } else { width };
        let Some(u) = self.upsample else { return inner == self.channels };
        let volume: usize = u.stride.iter().product();
        let divides = !u.residual || (inner.is_multiple_of(volume) && volume.is_multiple_of(u.factor));
        (!self.widens || u.factor == 1) && inner == self.channels * u.factor && divides
    }
}

impl VideoVaeConfig {
    /// Returns the structure of the encoder.
    ///
    /// # Errors
    /// Returns an error if a list is too short, the compression ratios do not match the stages, or a value is
    /// unsupported.
    pub fn encoder(&self) -> Result<EncoderConfig, ComponentConfigError> {
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
            mid_layers: *self.layers_per_block.last().ok_or_else(|| form("layers_per_block is empty".into()))?,
            patch_size: self.patch_size,
            causal: self.encoder_causal,
            padding: self.encoder_spatial_padding_mode,
            shortcut_eps: self.resnet_norm_eps,
        })
    }
}

impl EncoderConfig {
    /// Returns the number of pixels per latent along height and width.
    pub fn reduction(&self) -> [usize; 2] {
        let strides = self.stages.iter().filter_map(|stage| stage.downsample).map(Downsample::stride);
        strides.fold([self.patch_size; 2], |[rows, columns], [_, h, w]| [rows * h, columns * w])
    }
}

const DOWN_CHANNELS: &str =
    "channel counts that are divisible by the product of the stage's strides and change only at space-to-depth stages";

impl DownStage {
    /// Returns whether the stage outputs `channels` channels.
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

/// Returns the first `n` values of a list. The list may be longer, because the default lists are longer than models
/// with few blocks need.
fn first<'a, T: Clone + 'a>(
    key: &str,
    n: usize,
    values: impl ExactSizeIterator<Item = &'a T>,
) -> Result<Vec<T>, ComponentConfigError> {
    let length = values.len();
    if length < n {
        return Err(form(format!("{key} has only {length} of the {n} entries that the blocks need")));
    }
    Ok(values.take(n).cloned().collect())
}

fn form(message: String) -> ComponentConfigError {
    ComponentConfigError::Form { component: COMPONENT, message }
}
