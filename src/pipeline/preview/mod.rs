//! Previews: small frames of the current prediction of the clean latents, computed on the host while the devices
//! denoise.

pub(in crate::pipeline) mod latent_map;
pub(in crate::pipeline) mod map_file;
pub mod sheet;
pub(in crate::pipeline) mod thread;

use std::fmt::{self, Debug};
use std::path::PathBuf;
use std::sync::Arc;

use crate::media::Frames;
use crate::pipeline::phase::Phase;

/// Preview of a video.
#[derive(Clone, Debug, PartialEq)]
pub struct Preview {
    /// Index of the video in its batch.
    pub video: usize,
    /// Index of the clip of a chained video; `None` if the video is not chained.
    pub clip: Option<usize>,
    /// The pass: [`Phase::Denoise`] or [`Phase::Refine`].
    pub phase: Phase,
    /// Number of finished steps of the pass.
    pub step: usize,
    /// Number of steps of the pass.
    pub steps: usize,
    /// One frame for each latent frame, at one eighth of the pass's size.
    pub frames: Frames,
    /// Frames per second.
    pub frame_rate: f64,
}

/// Callback that receives previews, on a separate thread.
pub type PreviewSink = Arc<dyn Fn(Preview) + Send + Sync>;

/// Options of the previews of a run.
#[derive(Clone)]
pub struct PreviewOptions {
    /// Number of steps between two previews. The last step of a pass always has a preview.
    pub every: usize,
    /// Safetensors file with the linear map from latents to RGB. `None`: the map is fitted to the model's decoder.
    pub decoder: Option<PathBuf>,
    /// Folder in which fitted maps are stored. `None`: they are kept in memory only.
    pub folder: Option<PathBuf>,
    /// Whether the run fits the map further. If not, the map of earlier videos is used.
    pub fits: bool,
    /// Index of the clip of a chained video. `None`: the video is not chained.
    pub clip: Option<usize>,
    /// Receiver of the previews.
    pub sink: PreviewSink,
}

impl Debug for PreviewOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PreviewOptions { every, decoder, folder, fits, clip, sink: _ } = self;
        f.debug_struct("PreviewOptions")
            .field("every", every)
            .field("decoder", decoder)
            .field("folder", folder)
            .field("fits", fits)
            .field("clip", clip)
            .finish_non_exhaustive()
    }
}
