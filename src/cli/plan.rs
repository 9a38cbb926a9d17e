//! Plan of `--dry-run`: sizes, tokens, passes, placement, and the error with which the run would fail before compiling.

use std::fmt;

use serde::Serialize;

use super::compile_table::mesh_text;
use super::one_line;
use super::rounds::DfrSummary;
use crate::config::{Config, LoadedConfig, NumFrames, VideoUse, WeightSource, encoded_frames};
use crate::pipeline::enhancement::EnhancedPrompt;
use crate::pipeline::plan::origin::{Origin, download_command};
use crate::pipeline::plan::videos::RunVideos;
use crate::pipeline::programs::configs::ModelConfigs;
use crate::pipeline::stages::duration::smallest_valid_prediction;
use crate::request::{self, ClipChain, coordinate_grids};
use crate::sampling::guidance::Branch;
use crate::sampling::latents::VideoGrid;

#[derive(Debug, Serialize)]
pub(crate) struct PlanSummary {
    preset: &'static str,
    pipeline: &'static str,
    model: String,
    /// Version of the model, if it can be read.
    model_version: Option<String>,
    model_error: Option<String>,
    /// Error that the run would fail with before it compiles a program.
    error: Option<String>,
    weights: WeightSource,
    width: usize,
    height: usize,
    num_frames: NumFrames,
    /// Smallest valid prediction of the number of frames; `None` if every prediction is valid or the number is not
    /// predicted.
    least_frames: Option<usize>,
    frame_rate: f64,
    seconds: Option<f64>,
    /// Number of clips of a chained video, and frames per clip.
    clips: Option<[usize; 2]>,
    /// Latent frames, rows and columns of the video or of a clip.
    video_latents: [usize; 3],
    video_tokens: usize,
    /// Tokens of reference videos, appended to those of the first stage.
    reference_tokens: usize,
    audio_tokens: usize,
    text_tokens: usize,
    steps: usize,
    /// Keyframes and rounds of the pipeline `dfr`.
    #[serde(skip_serializing_if = "Option::is_none")]
    dfr: Option<DfrSummary>,
    /// Guidance branches, each of which is one forward pass per step.
    branches: Vec<&'static str>,
    platform: String,
    dtype: String,
    layout: String,
    mesh: String,
    /// Value of `runtime.layers`.
    layers: &'static str,
    outputs: Vec<String>,
    /// Enhanced prompts; empty if the run does not enhance prompts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) prompts: Vec<EnhancedPrompt>,
}

impl PlanSummary {
    /// Describes the plan of a configuration; `verified` is the result of its validation. Token counts are 0 if the model
    /// does not support the sizes.
    pub(crate) fn new(loaded: &LoadedConfig, videos: &RunVideos, verified: &anyhow::Result<()>) -> Self {
        let config = &loaded.config;
        let r = &config.request;
        let origin = Origin::find(config);
        let version = match &origin {
            Ok(Origin::Files(source)) => source.version().map(|v| v.to_string()).map_err(|e| e.to_string()),
            Ok(_) => {
                let command = download_command(config, &config.model.path);
                Err(format!("it is not on this machine; `{command}` downloads it"))
            }
            Err(error) => Err(error.to_string()),
        };
        let transformer = |origin: Origin| ModelConfigs::from(origin).transformer().ok();
        let transformer = origin.ok().and_then(transformer).unwrap_or_default();
        let (grid, audio) = coordinate_grids(&transformer);
        let count = r.num_frames.count();
        let clip = config.clip_frames();
        let video = clip.and_then(|count| grid.latents(1, 1, r.width, r.height, count).ok());
        let mesh = config.virtual_devices().and_then(|n| config.placement(n)).map(|p| p.mesh.axes);
        PlanSummary {
            preset: loaded.preset(),
            pipeline: config.pipeline.name(),
            model: config.model.path.clone(),
            model_version: version.as_ref().ok().cloned(),
            model_error: version.err(),
            error: verified.as_ref().err().map(one_line),
            weights: config.model.weights,
            width: r.width,
            height: r.height,
            num_frames: r.num_frames,
            least_frames: verified
                .as_ref()
                .ok()
                .and_then(|()| smallest_valid_prediction(config, &videos.jobs).ok().flatten()),
            frame_rate: r.frame_rate,
            seconds: count.map(|count| count as f64 / r.frame_rate),
            video_latents: video.map_or([0; 3], |v| [v.frames, v.height, v.width]),
            video_tokens: video.map_or(0, |v| grid.tokens(&v)),
            reference_tokens: reference_tokens(config, &grid),
            clips: count
                .and_then(|count| ClipChain::from_config(config, count))
                .map(|chain| [chain.clips(), chain.clip]),
            audio_tokens: clip.and_then(|n| audio.latents(1, 1, n, r.frame_rate).ok()).map_or(0, |a| a.length),
            text_tokens: r.max_sequence_length,
            steps: config.sampler.steps,
            dfr: DfrSummary::new(config, &grid),
            branches: request::branches(config).into_iter().map(branch_name).collect(),
            platform: config.runtime.platform.clone(),
            dtype: format!("{:?}", config.runtime.dtype).to_lowercase(),
            layout: config.layout.clone(),
            mesh: mesh.map_or_else(|error| error.to_string(), |axes| mesh_text(axes.iter().map(|(a, n)| (a, n)))),
            layers: config.runtime.layers.name(),
            outputs: videos.outputs.iter().map(|p| p.display().to_string()).collect(),
            prompts: Vec::new(),
        }
    }
}

/// Returns the number of reference video tokens in the first stage.
fn reference_tokens(config: &Config, grid: &VideoGrid) -> usize {
    let [downscale, step] = config.conditioning.reference_scales();
    let before = |side: usize, [times, of]: [usize; 2]| side / times * of;
    let first = |side: usize| config.upsamplings().iter().map(|upsampling| upsampling.rows()).fold(side, before);
    let [width, height] = [config.request.width, config.request.height].map(|side| first(side) / downscale);
    let frames = config.request.reference_videos.iter().map(|video| encoded_frames(video.frames.unwrap_or(1), step));
    let input = config.request.num_frames.count().filter(|_| config.pipeline.spec().video == Some(VideoUse::Reference));
    let frames = frames.chain(input);
    let latents = frames.filter_map(|frames| grid.latents(1, 1, width, height, frames).ok());
    latents.map(|latents| grid.tokens(&latents)).sum()
}

fn branch_name(branch: Branch) -> &'static str {
    match branch {
        Branch::Conditional => "conditional",
        Branch::Negative => "negative",
        Branch::Perturbed => "perturbed",
        Branch::Isolated => "isolated",
    }
}

impl fmt::Display for PlanSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [frames, rows, columns] = self.video_latents;
        writeln!(f, "pipeline   {}, preset {}", self.pipeline, self.preset)?;
        match (&self.model_version, &self.model_error) {
            (Some(version), _) => writeln!(f, "model      {} (LTX-{version})", self.model)?,
            (None, why) => {
                writeln!(f, "model      {} (cannot be read: {})", self.model, why.as_deref().unwrap_or("unknown"))?;
            }
        }
        if self.weights == WeightSource::Random {
            writeln!(f, "weights    random, generated on the device")?;
        }
        write!(f, "video      {}x{}, ", self.width, self.height)?;
        match self.num_frames.count().zip(self.seconds) {
            Some((count, seconds)) => {
                writeln!(f, "{count} frames at {} per second, {seconds:.2} s", self.frame_rate)?;
                if let Some([clips, frames]) = self.clips {
                    writeln!(f, "clips      {clips} of {frames} frames each; token counts are per clip")?;
                }
                writeln!(
                    f,
                    "tokens     {} video ({frames} x {rows} x {columns}), {} audio, {} text",
                    self.video_tokens, self.audio_tokens, self.text_tokens
                )?;
            }
            None => writeln!(f, "number of frames predicted from the prompt, {} frames per second", self.frame_rate)?,
        }
        if let Some(least) = self.least_frames {
            writeln!(f, "           valid only if at least {least} frames are predicted")?;
        }
        if self.reference_tokens > 0 {
            writeln!(f, "references {} tokens, appended to the first stage's video", self.reference_tokens)?;
        }
        writeln!(f, "denoising  {} steps, passes per step: {}", self.steps, self.branches.join(", "))?;
        for line in self.dfr.iter().flat_map(DfrSummary::lines) {
            writeln!(f, "{line}")?;
        }
        writeln!(
            f,
            "device     {}, {}, layout {}, {}, layers {}",
            self.platform, self.dtype, self.layout, self.mesh, self.layers
        )?;
        for output in &self.outputs {
            writeln!(f, "writes     {output}")?;
        }
        Ok(())
    }
}
