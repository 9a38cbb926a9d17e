//! Settings of a run that are no part of its configuration.

use std::path::PathBuf;

use super::saved::Saving;
use crate::config::{Job, Sidecar};
use crate::media::Mp4Options;

/// The parts of `ltx2 generate`'s command line that do not change what is generated.
#[derive(Clone, Debug, Default)]
pub struct GenerateOptions {
    /// The videos to make, in order.
    pub jobs: Vec<Job>,
    /// The MP4 of each video. Of several processes only the first's count.
    pub outputs: Vec<PathBuf>,
    /// The videos are those that are left of a run of several: what is beside each has the same name as there.
    pub several: bool,
    /// Existing files are overwritten; without it they are an error before the run.
    pub force: bool,
    /// The sidecar that the run repeats: its inputs and model are compared with those of the run.
    pub sidecar: Option<Sidecar>,
    /// Where embeddings, noise, latents, frames and samples go, as safetensors.
    pub dump: Option<PathBuf>,
    /// Latents after every step go there too: one call of the device a step.
    pub dump_steps: bool,
    /// Where times and memory go, as JSON.
    pub perf_json: Option<PathBuf>,
    /// Steps between two reports of progress; none runs the whole loop at once.
    pub progress_every: Option<usize>,
    /// Steps between two savings of the steps behind a run, in a file beside its first video.
    pub checkpoint_every: Option<usize>,
    /// Goes on from such a file, if there is one.
    pub resume: bool,
    /// Results are printed as JSON instead of as paths.
    pub json: bool,
}

impl GenerateOptions {
    /// Whether frames, sound and dumps of each video need a name of their own.
    pub(super) fn has_several(&self) -> bool {
        self.several || self.jobs.len() > 1
    }
}

/// Where results are kept that cannot be written to their files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeepPlace {
    /// In the folder of temporary files, else beside the video.
    #[default]
    Temporary,
    /// Beside the video, in place of what was kept there before.
    Beside,
}

/// How a batch of requests is run.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Steps run at a time; `None` for all.
    pub chunk: Option<usize>,
    /// Keeps the intermediate tensors.
    pub dump: bool,
    /// Keeps the latents after every step too, which runs one step at a time.
    pub dump_steps: bool,
    /// Keeps the steps behind it in a file, or goes on from such.
    pub saving: Option<Saving>,
    /// The file of each video: where a step after denoising fails, its latents are kept under that name. Empty: they are not kept.
    pub outputs: Vec<PathBuf>,
    /// Where they are kept.
    pub keep: KeepPlace,
    /// Frames are encoded while later ones are decoded, where they are decoded in pieces: `runtime.tiling`.
    pub encode: Option<Mp4Options>,
    /// Runs one call of each pass' steps: all that is compiled and loaded is then there, and what is made is nothing.
    pub warms: bool,
    /// Videos that programs make at once at least: the last one fills the rest, so that fewer run the programs of so many.
    pub rows: usize,
}
