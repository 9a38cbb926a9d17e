//! Video encoder: maps frames to latents.

use ndarray::Array5;

use super::{
    Build, Call, Component, ModelConfigs, Network, Phase, ProgramDeclaration, ProgramKind, ProgramSpec, Result,
    SingleRun,
};
use crate::models::video_vae::{self, VideoVaeConfig};
use crate::pipeline::runner::Runner;

/// Video encoder program. Runs with conditioning images, an input video or reference videos execute it.
pub(super) const VIDEO_ENCODER: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::VideoEncoder,
    name: "video_encoder",
    help: "Frames to latents",
    component: Component::Vae,
    phase: Phase::Denoise,
    runs: |run| {
        let first = &run.first;
        first.has_images() || first.given_frames().is_some() || first.references().next().is_some()
    },
    // The second pass encodes an appended input video at twice the size.
    request: |run| Ok(run.second.as_ref().filter(|pass| pass.given_frames().is_some()).unwrap_or(&run.first)),
    network: |spec| network(&spec.run.configs, dims(spec), spec.build),
    single_run: Some(SingleRun {
        help: "`video` to `latents`",
        scalars: &[],
        inputs: |given| given.only("video", network),
        smallest: |configs, build| {
            let v = configs.video_vae()?;
            network(configs, [1, 0, 1 + v.temporal(), 4 * v.spatial(), 4 * v.spatial()], build)
        },
    }),
};

/// Returns the program for frames `[b, c, f, h, w]`.
fn network(configs: &ModelConfigs, [n, _, f, h, w]: [usize; 5], build: &Build) -> Result<Network> {
    let c = configs.read(Component::Vae, |json| VideoVaeConfig::from_json(json)?.encoder())?;
    Ok(video_vae::encoder_program(&c, [n, f, h, w], build)?)
}

fn dims(spec: &ProgramSpec) -> [usize; 5] {
    let r = spec.request;
    // Of several reference videos, use the one with the most frames, which needs the most memory.
    if let Some(grid) = r.references().max_by_key(|grid| grid.frames) {
        let size = [r.height, r.width].map(|side| side / grid.downscale);
        return [spec.shapes.video.batch, 3, grid.frames, size[0], size[1]];
    }
    let all = if r.has_images() { 1 } else { r.num_frames };
    [spec.shapes.video.batch, 3, r.given_frames().unwrap_or(all), r.height, r.width]
}

impl Runner {
    /// Prepares the video encoder, which maps frames `[1, 3, frames, height, width]` in -1..1 to `latents`.
    pub(crate) fn video_encoder(&mut self, video: Array5<f32>) -> Result<Call<'static>> {
        self.call_on(ProgramKind::VideoEncoder, "video", video.into(), network)
    }
}
