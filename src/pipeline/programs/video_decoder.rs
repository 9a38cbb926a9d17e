//! Video decoder: maps latents to frames.

use ndarray::Array5;

use super::{
    Build, Call, Component, Inputs, ModelConfigs, Network, Phase, ProgramDeclaration, ProgramKind, Result, SingleRun,
};
use crate::models::pixels::Pixels;
use crate::models::video_vae::{self, VideoVaeConfig};
use crate::pipeline::runner::{NetworkSizes, Runner};

/// Video decoder program. A run executes it if the video VAE, not the diffusion decoder, decodes the video.
pub(super) const VIDEO_DECODER: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::VideoDecoder,
    name: "video_decoder",
    help: "Latents to frames",
    component: Component::Vae,
    phase: Phase::VideoDecoder,
    runs: |run| run.first.decodes_video() && !run.diffusion,
    request: |run| Ok(&run.output),
    network: |spec| {
        let (grid, v, tiling) = (&spec.run.sizes.video_grid, &spec.shapes.video, spec.request.tiling.as_ref());
        let size = [v.frames, v.height, v.width];
        let [f, h, w] =
            tiling.map_or(size, |tiling| tiling.largest(size, grid.spatial_compression, grid.temporal_compression));
        let pixels = if tiling.is_some() { Pixels::Values } else { spec.pixels() };
        network(&spec.run.configs, [spec.batch(), v.channels, f, h, w], pixels, spec.build)
    },
    single_run: Some(SingleRun {
        help: "`latents` to `video`",
        scalars: &[],
        inputs: |given| {
            let (network, mut inputs) =
                given.only("latents", |configs, dims, build| network(configs, dims, Pixels::Values, build))?;
            if network.program.argument("temb").is_some() {
                inputs.push(("temb".into(), given.required("temb")?));
            }
            Ok((network, inputs))
        },
        smallest: |configs, build| network(configs, [1, 0, 1, 4, 4], Pixels::Values, build),
    }),
};

/// Returns the program for latents `[b, c, f, h, w]`.
fn network(configs: &ModelConfigs, [n, _, f, h, w]: [usize; 5], pixels: Pixels, build: &Build) -> Result<Network> {
    let c = configs.read(Component::Vae, |json| VideoVaeConfig::from_json(json)?.decoder())?;
    let build = configs.decoder_build(build);
    Ok(video_vae::decoder_program(&c, [n, f, h, w], pixels, &build)?)
}

impl Runner {
    /// Prepares the video decoder, which maps latents to `video` in the format `pixels`.
    ///
    /// # Errors
    /// Returns an error if the program cannot be compiled, a parameter cannot be loaded, or the device fails.
    pub fn video_decoder(&mut self, latents: Array5<f32>, pixels: Pixels) -> Result<Call<'static>> {
        let dims: [usize; 5] = latents.dim().into();
        let network = self.network(ProgramKind::VideoDecoder, NetworkSizes::Frames(dims, pixels), |model, build| {
            network(&model.configs, dims, pixels, build)
        })?;
        self.call(ProgramKind::VideoDecoder, &network, Inputs::default(), [("latents".into(), latents.into())])
    }
}
