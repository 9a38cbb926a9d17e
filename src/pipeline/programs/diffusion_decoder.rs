//! Diffusion decoder: maps latents and noise to frames. To decode tile by tile, one program maps the latents to
//! features, and the other maps a tile of the features to frames.

use ndarray::Array5;

use super::{
    Build, Call, Component, Inputs, ModelConfigs, Network, Phase, ProgramDeclaration, ProgramKind, Result, SingleRun,
};
use crate::models::diffusion_decoder::{self, FeatureTile, feature_grid};
use crate::models::pixels::Pixels;
use crate::pipeline::runner::{NetworkSizes, Runner};
use crate::runtime::ShardedTensor;
use crate::tensor::Tensor;

pub(super) const DIFFUSION_FEATURES: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::DiffusionFeatures,
    name: "diffusion_features",
    help: "Latents to the features that tiles are decoded from",
    component: Component::DiffusionDecoder,
    phase: Phase::VideoDecoder,
    runs: |run| run.first.decodes_video() && run.diffusion && run.first.tiling.is_some(),
    request: |run| Ok(&run.output),
    network: |spec| {
        let v = &spec.shapes.video;
        features_network(&spec.run.configs, [spec.batch(), v.channels, v.frames, v.height, v.width], spec.build)
    },
    single_run: None,
};

/// Program that returns frames. Without tiling, it decodes the latents of the complete video; with tiling, one tile of
/// the features that [`DIFFUSION_FEATURES`] returns.
pub(super) const DIFFUSION_DECODER: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::DiffusionDecoder,
    name: "diffusion_decoder",
    help: "Latents and noise to frames",
    runs: |run| run.first.decodes_video() && run.diffusion,
    network: |spec| {
        let (configs, v) = (&spec.run.configs, &spec.shapes.video);
        if let Some(tiling) = &spec.request.tiling {
            let grid = feature_grid(&configs.diffusion_decoder()?, [v.frames, v.height, v.width]);
            let tile = configs.diffusion_tiles(tiling, &grid)?.largest(&grid);
            return tile_network(configs, [spec.batch(), v.frames, v.height, v.width], &tile, spec.build);
        }
        let dims = [spec.batch(), v.channels, v.frames, v.height, v.width];
        network(configs, dims, spec.pixels(), spec.build)
    },
    single_run: Some(SingleRun {
        help: "`latents`, un-normalised, and `noise` to `video`",
        scalars: &[],
        inputs: |given| {
            let noise = given.ranked("noise", 5)?;
            let (network, mut inputs) =
                given.only("latents", |configs, dims, build| network(configs, dims, Pixels::Values, build))?;
            inputs.push(("noise".into(), noise));
            Ok((network, inputs))
        },
        smallest: |configs, build| network(configs, [1, 0, 1, 1, 1], Pixels::Values, build),
    }),
    ..DIFFUSION_FEATURES
};

/// Returns the program for latents `[b, c, f, h, w]`.
fn network(configs: &ModelConfigs, [n, _, f, h, w]: [usize; 5], pixels: Pixels, build: &Build) -> Result<Network> {
    Ok(diffusion_decoder::program(&configs.diffusion_decoder()?, [n, f, h, w], pixels, build)?)
}

/// Returns the program that maps latents `[b, c, f, h, w]` to features.
fn features_network(configs: &ModelConfigs, [n, _, f, h, w]: [usize; 5], build: &Build) -> Result<Network> {
    Ok(diffusion_decoder::features_program(&configs.diffusion_decoder()?, [n, f, h, w], build)?)
}

/// Returns the program that maps a tile of the features, and noise, to frames. `shape`: shape of the latents, `[b, f,
/// h, w]`.
fn tile_network(configs: &ModelConfigs, shape: [usize; 4], tile: &FeatureTile, build: &Build) -> Result<Network> {
    Ok(diffusion_decoder::tile_program(&configs.diffusion_decoder()?, shape, tile, build)?)
}

impl Runner {
    /// Prepares the diffusion decoder, which maps latents and noise to `video` in the format `pixels`.
    pub(crate) fn diffusion_decoder(
        &mut self,
        latents: Array5<f32>,
        noise: Tensor,
        pixels: Pixels,
    ) -> Result<Call<'static>> {
        let dims: [usize; 5] = latents.dim().into();
        let sizes = NetworkSizes::Frames(dims, pixels);
        let network = self.network(ProgramKind::DiffusionDecoder, sizes, |model, build| {
            network(&model.configs, dims, pixels, build)
        })?;
        let given = [("latents".into(), latents.into()), ("noise".into(), noise)];
        self.call(ProgramKind::DiffusionDecoder, &network, Inputs::default(), given)
    }

    /// Prepares the first part of the diffusion decoder, which maps latents to `features`; the second part decodes the
    /// features tile by tile.
    pub(crate) fn diffusion_features(&mut self, latents: Array5<f32>) -> Result<Call<'static>> {
        self.call_on(ProgramKind::DiffusionFeatures, "latents", latents.into(), features_network)
    }

    /// Prepares the second part of the diffusion decoder for one tile. The call maps noise and the tile of `features`
    /// that begins at `start` (frame, row, column) to `video`. `shape`: shape of the latents, `[b, f, h, w]`.
    /// `features` are already on the devices and are not copied.
    pub(crate) fn diffusion_tile<'a>(
        &mut self,
        shape: [usize; 4],
        tile: &FeatureTile,
        features: &'a ShardedTensor,
        start: Tensor,
        noise: Tensor,
    ) -> Result<Call<'a>> {
        let sizes = NetworkSizes::Tile(shape, *tile);
        let network = self.network(ProgramKind::DiffusionDecoder, sizes, |model, build| {
            tile_network(&model.configs, shape, tile, build)
        })?;
        let inputs = Inputs::default().share("features", features);
        let given = [("start".into(), start), ("noise".into(), noise)];
        self.call(ProgramKind::DiffusionDecoder, &network, inputs, given)
    }
}
