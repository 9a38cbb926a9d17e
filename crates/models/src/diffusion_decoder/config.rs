//! Reads `diffusion_decoder/config.json`.

use serde::Deserialize;

use super::COMPONENT;
use crate::ranges::{MAX_RATIO, check_at_most};
use crate::{ComponentConfigError, parse_config, require};
use ltx2_base::with_defaults;

/// Quantity that the network predicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) enum OutputType {
    /// The clean pixels.
    #[serde(rename = "x0")]
    Clean,
    /// The velocity, which points from the clean pixels to the noise.
    #[serde(rename = "v")]
    Velocity,
}

with_defaults! {
    /// Keys of `config.json`, with the defaults of the diffusers class.
    #[derive(Deserialize)]
    #[serde(default)]
    pub(in crate) struct DiffusionDecoderFile {
        out_channels: usize = 3,
        latent_channels: usize = 128,
        patch_size: usize = 4,
        scaling_factor: f32 = 1.0,
        decoder_head_dim: usize = 64,
        decoder_stage_channels: Vec<usize> = vec![2048, 1024, 512, 512, 256],
        decoder_stage_depths: Vec<usize> = vec![4, 6, 4, 2, 8],
        decoder_stage_kernels: Vec<[usize; 3]> = vec![[3, 7, 7], [3, 7, 7], [3, 5, 5], [3, 5, 5]],
        decoder_upsample_strides: Vec<[usize; 3]> = vec![[1, 2, 2], [2, 1, 1], [2, 2, 2], [2, 2, 2]],
        decoder_upsample_channel_reductions: Vec<usize> = vec![2, 2, 1, 2],
        decoder_stage5_kernel: [usize; 3] = [11; 3],
        decoder_t_emb_dim: usize = 384,
        decoder_timestep_scale_multiplier: f64 = 1000.0,
        decoder_model_output_type: OutputType = OutputType::Clean,
        decoder_num_inference_steps: usize = 1,
        spatial_compression_ratio: usize = 32,
        temporal_compression_ratio: usize = 8,
    }
}

/// Structure of the diffusion decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DiffusionDecoderConfig {
    /// Channels of the latents.
    pub latent_channels: usize,
    /// Channels of the decoded frames.
    pub out_channels: usize,
    /// Side length of a patch in the last stage: one token covers `patch_size²` pixels.
    pub patch_size: usize,
    pub(crate) head_dim: usize,
    /// Stages that compute the context.
    pub stages: Vec<Stage>,
    /// Channels of the context and of the denoising stage.
    pub channels: usize,
    /// Number of blocks of the denoising stage.
    pub(crate) depth: usize,
    /// Attention window of the denoising stage: frames, rows, columns.
    pub kernel: [usize; 3],
    pub(crate) t_emb_dim: usize,
    pub(crate) timestep_scale: f64,
    pub(crate) output: OutputType,
    /// Number of denoising steps.
    pub steps: usize,
}

/// A context stage: identical blocks, then upsampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Channels of the blocks, before the upsampling.
    pub channels: usize,
    /// Number of blocks.
    pub depth: usize,
    /// Attention window: frames, rows, columns.
    pub kernel: [usize; 3],
    /// Upsampling factors of frames, rows and columns.
    pub stride: [usize; 3],
    /// Factor by which the upsampling divides the number of channels.
    pub reduction: usize,
}

impl DiffusionDecoderConfig {
    /// Reads and checks `config.json`.
    ///
    /// # Errors
    /// Returns an error if a key is unknown or has the wrong type, or if a value is out of range or unsupported.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, ComponentConfigError> {
        let f: DiffusionDecoderFile = parse_config(COMPONENT, json)?;
        f.check()?;
        let (channels, stages) = (*f.decoder_stage_channels.last().unwrap_or(&0), f.decoder_stage_kernels.len());
        let c = DiffusionDecoderConfig {
            latent_channels: f.latent_channels,
            out_channels: f.out_channels,
            patch_size: f.patch_size,
            head_dim: f.decoder_head_dim,
            stages: (0..stages).map(|i| f.stage(i)).collect(),
            channels,
            depth: *f.decoder_stage_depths.last().unwrap_or(&0),
            kernel: f.decoder_stage5_kernel,
            t_emb_dim: f.decoder_t_emb_dim,
            timestep_scale: f.decoder_timestep_scale_multiplier,
            output: f.decoder_model_output_type,
            steps: f.decoder_num_inference_steps,
        };
        let ([frames, rows, columns], fits) = (c.ratios(), "the product of the patch size and the stages' strides");
        let (time, space) = (f.temporal_compression_ratio, f.spatial_compression_ratio);
        require(time == frames, COMPONENT, "temporal_compression_ratio", time, fits)?;
        require(space == rows && space == columns, COMPONENT, "spatial_compression_ratio", space, fits)?;
        Ok(c)
    }

    /// Returns whether a single evaluation of the network yields the video.
    pub fn is_one_step(&self) -> bool {
        (self.steps, self.output) == (1, OutputType::Clean)
    }

    /// Returns the number of frames, rows and columns of pixels per latent.
    pub fn ratios(&self) -> [usize; 3] {
        let patch = [1, self.patch_size, self.patch_size];
        self.stages.iter().fold(patch, |all, stage| [0, 1, 2].map(|axis| all[axis] * stage.stride[axis]))
    }

    /// Returns the number of copies of the last latent frame that are appended to the input. Attention windows are
    /// shifted inward at the border of the grid; the copies ensure that this does not affect the last frames of the
    /// video.
    pub fn appended_frames(&self) -> usize {
        self.stages.first().map_or(0, |stage| stage.kernel[0] / 2 * 2)
    }

    /// Returns the smallest latent size (frames, rows, columns) with which every attention window fits into the grid of
    /// its stage.
    pub fn min_latents(&self) -> [usize; 3] {
        let all = self.stages.iter().map(|stage| (stage.kernel, stage.stride)).chain([(self.kernel, [1; 3])]);
        let (mut min, mut scale) = ([1; 3], [1; 3]);
        for (kernel, stride) in all {
            for axis in 0..3 {
                min[axis] = min[axis].max(kernel[axis].div_ceil(scale[axis]));
                scale[axis] *= stride[axis];
            }
        }
        min
    }
}

impl DiffusionDecoderFile {
    fn stage(&self, i: usize) -> Stage {
        Stage {
            channels: self.decoder_stage_channels[i],
            depth: self.decoder_stage_depths[i],
            kernel: self.decoder_stage_kernels[i],
            stride: self.decoder_upsample_strides[i],
            reduction: self.decoder_upsample_channel_reductions[i],
        }
    }

    fn check(&self) -> Result<(), ComponentConfigError> {
        let stages = self.decoder_stage_kernels.len();
        for (key, length, want) in [
            ("decoder_stage_channels", self.decoder_stage_channels.len(), stages + 1),
            ("decoder_stage_depths", self.decoder_stage_depths.len(), stages + 1),
            ("decoder_upsample_strides", self.decoder_upsample_strides.len(), stages),
            ("decoder_upsample_channel_reductions", self.decoder_upsample_channel_reductions.len(), stages),
        ] {
            if length != want {
                let message = format!("{key} has {length} entries, but decoder_stage_kernels requires {want}");
                return Err(ComponentConfigError::Form { component: COMPONENT, message });
            }
        }
        require(stages > 0, COMPONENT, "decoder_stage_kernels", stages, "at least one window")?;
        let dim = self.decoder_head_dim;
        require(dim.is_multiple_of(8), COMPONENT, "decoder_head_dim", dim, "a multiple of 8")?;
        let (channels, reductions) = (&self.decoder_stage_channels, &self.decoder_upsample_channel_reductions);
        let heads = channels.iter().all(|c| c.is_multiple_of(dim));
        require(heads, COMPONENT, "decoder_stage_channels", channels, "multiples of decoder_head_dim")?;
        let shrinks = |i: usize| channels[i + 1] == channels[i] / reductions[i];
        let key = "decoder_upsample_channel_reductions";
        require(
            (0..stages).all(shrinks),
            COMPONENT,
            key,
            reductions,
            "the ratios of consecutive decoder_stage_channels",
        )?;
        let strides = &self.decoder_upsample_strides;
        let known = strides.iter().all(|[t, ..]| matches!(t, 1 | 2));
        require(known, COMPONENT, "decoder_upsample_strides", strides, "frame strides of 1 or 2")?;
        for axis in 0..3 {
            let ratio = strides.iter().fold(1, |all: usize, stride| all.saturating_mul(stride[axis]));
            check_at_most(COMPONENT, "decoder_upsample_strides", ratio, MAX_RATIO)?;
        }
        // The pipeline scales latents before they are passed to this decoder.
        require(self.scaling_factor == 1.0, COMPONENT, "scaling_factor", self.scaling_factor, "1")
    }
}
