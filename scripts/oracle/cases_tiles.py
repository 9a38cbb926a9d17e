"""Writes a video decoded in tiles."""

import torch
from ltx_core.model.video_vae.tiling import DimensionIntervals, create_tiles
from ltx_core.model.video_vae.video_vae import (
    make_mapping_operation, map_spatial_interval_to_pixel, map_temporal_interval_to_frame, split_temporal_latents,
    split_with_symmetric_overlaps,
)

import models
from common import randn, write_case


def tiled():
    """Decodes tiles with Lightricks' boundaries and ramps by diffusers."""
    vae = models.load_pipeline("tiny_a").vae
    latents = randn(31, "latents", 1, vae.config.latent_channels, 5, 5, 3)
    spatial = [split_with_symmetric_overlaps(max(2, round(2 * n / 5)), 1) for n in latents.shape[3:]]
    whole = [lambda length: DimensionIntervals([0], [length], [0], [0])] * 2
    pixels = make_mapping_operation(map_spatial_interval_to_pixel, scale=32)
    frames = make_mapping_operation(map_temporal_interval_to_frame, scale=8)
    all_of_it = [lambda _: ([slice(0, None)], [None])] * 2
    tiles = create_tiles(latents.shape, [*whole, split_temporal_latents(3, 1), *spatial], [*all_of_it, frames, pixels, pixels])
    video, weights = torch.zeros(1, 3, 33, 160, 96), torch.zeros(1, 1, 33, 160, 96)
    for tile in tiles:
        place = (slice(None), slice(None), *tile.out_coords[2:])
        video[place] += vae.decode(latents[tile.in_coords], return_dict=False)[0] * tile.blend_mask
        weights[place] += tile.blend_mask
    write_case(
        "tiled", "space_and_time", {"latents": latents}, {"video": video / weights.clamp(min=1e-8)}, model="tiny_a",
        seed=31, scalars=dict(pixels=64, overlap=32, frames=24, frame_overlap=8), strides={"video": (1, 1, 3, 5, 7)},
    )
