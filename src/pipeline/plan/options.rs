//! Options of a run that are not part of its configuration.

use std::path::PathBuf;

use crate::config::Sidecar;
use crate::media::Mp4Options;
use crate::pipeline::output::denoise_checkpoint::CheckpointSettings;
use crate::pipeline::preview::PreviewOptions;

/// Arguments of `ltx2 generate` in addition to the configuration.
#[derive(Clone, Debug, Default)]
pub struct GenerateOptions {
    /// Whether to overwrite existing files. Otherwise, a file that exists before the run starts is an error.
    pub force: bool,
    /// Sidecar of a run to repeat. The inputs and the model of this run must match those that it records.
    pub sidecar: Option<Sidecar>,
    /// Safetensors file that receives embeddings, noise, latents, frames and audio samples.
    pub dump: Option<PathBuf>,
    /// Whether the dump includes the latents after every step, which requires one device call per step.
    pub dump_steps: bool,
    /// JSON file that receives timings and memory use.
    pub perf_json: Option<PathBuf>,
    /// Number of steps between two checkpoints of the denoising state, which are written next to the first video of
    /// each batch.
    pub checkpoint_every: Option<usize>,
    /// Whether to resume from the checkpoint of an interrupted run, if there is one.
    pub resume: bool,
}

/// Location of results that cannot be written to their output files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FallbackLocation {
    /// In the temporary directory, or next to the video if that fails. Never overwrites a file.
    #[default]
    Temporary,
    /// Next to the video. Overwrites results that were saved there earlier.
    NextToVideo,
}

/// Options for running a batch of requests.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Number of steps per device call. `None`: one call runs all steps.
    pub chunk: Option<usize>,
    /// Whether to return the intermediate tensors.
    pub dump: bool,
    /// Whether to return the latents after every step, which requires one device call per step.
    pub dump_steps: bool,
    /// Checkpoint to write and to resume from. `None`: no checkpoint.
    pub checkpoint: Option<CheckpointSettings>,
    /// Output file of each video. If decoding fails, the latents are saved under a name derived from it. Empty: the
    /// latents are not saved.
    pub outputs: Vec<PathBuf>,
    /// Location in which the latents are saved if decoding fails.
    pub fallback: FallbackLocation,
    /// MP4 options with which the built-in encoder encodes frames as soon as they are decoded: with `runtime.tiling`
    /// while later frames are decoded, otherwise, for the first video of a batch, while the audio is decoded. `None`:
    /// frames are encoded when the file is written.
    pub encode: Option<Mp4Options>,
    /// Previews of the current predictions. `None`: none are shown.
    pub previews: Option<PreviewOptions>,
    /// Whether this is a warm-up, which runs one device call of each pass so that everything is compiled and loaded.
    /// The resulting videos are meaningless.
    pub is_warm_up: bool,
    /// Minimum number of videos per program call. A smaller batch is padded with copies of its last video, so that it
    /// uses the programs compiled for this number.
    pub rows: usize,
}
