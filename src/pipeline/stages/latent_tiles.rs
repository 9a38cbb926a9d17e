//! Second pass in tiles of latents (pipeline `hdr`): each tile is denoised like a smaller video with its own noise, and
//! the tiles are blended.

use ndarray::{Array3, Array5};

use super::batch::{Batch, BatchNoise};
use super::denoising::{DenoisedTokens, InitialTokens, PassNames};
use super::prompts::TextContexts;
use super::run::Run;
use crate::av::Av;
use crate::pipeline::error::Result;
use crate::request::{Content, LatentTile, LatentTiling, Request, Shapes};
use crate::sampling::latents::VideoShape;

impl Run<'_> {
    /// Denoises the tiles of the second pass. `second`: request of the pass; `shape`: shape of its latents; `before`:
    /// upsampled tokens of the first pass. The seed of a tile is that of the video plus the index of the tile.
    pub(crate) fn refine_tiles(
        &mut self,
        second: &Request,
        tiling: &LatentTiling,
        shape: VideoShape,
        before: InitialTokens,
        text: &TextContexts,
    ) -> Result<DenoisedTokens> {
        let shape = VideoShape { batch: self.batch.size, ..shape };
        let latents = self.unpacked(&before.tokens.video, shape)?;
        let references = self.reference_latents(second, shape)?;
        let tiles = tiling.tiles(&shape);
        let steps = second.sigmas.len() - 1;
        let mut blended = Array5::zeros(latents.raw_dim());
        for (at, tile) in tiles.iter().enumerate() {
            let noise = self.tile_noise(at);
            let whole = std::mem::replace(&mut self.noise, noise);
            let around = [at * steps, (tiles.len() - 1 - at) * steps];
            let made =
                self.refine_tile(second, tile, &latents, &references, PassNames::of_latent_tile(at, around), text);
            self.noise = whole;
            let [frames, height, width] = tile.size;
            let made = self.unpacked(&made?, VideoShape { frames, height, width, ..shape })?;
            tile.add(&made, &mut blended);
        }
        let video = self.runner.model.sizes.video_grid.pack(blended.view())?;
        let generated = Array3::zeros((video.dim().0, 0, video.dim().2));
        Ok(DenoisedTokens { tokens: Av { video, audio: before.tokens.audio }, generated })
    }

    /// Denoises one tile. `latents`: normalised latents of the complete video; `references`: those of the reference
    /// videos. Returns the normalised tokens of the tile.
    fn refine_tile(
        &mut self,
        second: &Request,
        tile: &LatentTile,
        latents: &Array5<f32>,
        references: &[Array5<f32>],
        names: PassNames,
        text: &TextContexts,
    ) -> Result<Array3<f32>> {
        let sizes = &self.runner.model.sizes;
        let request = tile.request(second, &sizes.video_grid);
        let length = Shapes::from_request(sizes, &request)?.audio.length;
        let audio = Array3::zeros((self.batch.size, length, sizes.transformer.audio_in_channels));
        let video = sizes.video_grid.pack(tile.part(latents))?;
        let parts = references.iter().map(|reference| Ok(sizes.video_grid.pack(tile.part(reference))?));
        let references = parts.collect::<Result<_>>()?;
        let start = InitialTokens { tokens: Av { video, audio }, generated: None, carried: None, references };
        let pass = self.begin(&request, Some(start), names)?;
        Ok(self.denoise(pass, text, None)?.tokens.video)
    }

    /// Encodes the reference videos of a pass. `shape`: shape of the latents of the pass.
    fn reference_latents(&mut self, request: &Request, shape: VideoShape) -> Result<Vec<Array5<f32>>> {
        let temporal = self.runner.model.sizes.video_grid.temporal_compression;
        let conditions = request.conditions.video.iter();
        let encode = conditions.filter_map(|condition| match &condition.content {
            Content::Reference { path, filter, .. } => Some((path, *filter, condition)),
            _ => None,
        });
        let mut all = Vec::new();
        for (path, filter, condition) in encode {
            let tokens = self.runner.reference_tokens(path, filter, condition, request)?;
            let own = condition.appended(&VideoShape { batch: 1, ..shape }, temporal).unwrap_or(shape);
            all.push(self.unpacked(&tokens, own)?);
        }
        Ok(all)
    }

    /// Returns the noise generators of a tile.
    fn tile_noise(&self, tile: usize) -> BatchNoise {
        let seeded = |request: &Request| Request { seed: request.seed.wrapping_add(tile as u64), ..request.clone() };
        let asked: Vec<Request> = self.batch.asked.iter().map(seeded).collect();
        Batch { asked: &asked, size: self.batch.size }.noise()
    }
}
