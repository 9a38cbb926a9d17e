"""Writes LTX-2.5's diffusion decoder. Only configs are stored; tests draw weights and noise by seed.

`diffusion_a` has the published topology. `diffusion_b` has fewer stages, no RoPE in time, even windows, and predicts velocities.
`diffusion_c` predicts clean videos and has windows of more frames. `diffusion_d` has LTX-2's compression ratios, for pipelines."""

import torch
from diffusers import LTX2VideoDiffusionDecoderModel

import models
from common import randn, randomise, write_case


def decoder(name):
    return randomise(LTX2VideoDiffusionDecoderModel(**models.config(name, "diffusion_decoder")), name)


def _padded(latents, least):
    """Pads latents smaller than a window, like Lightricks: repeats the last frame and both edges. Returns the padding before."""
    before = []
    for axis, size in enumerate(least):
        missing = max(0, size - latents.shape[axis + 2])
        low = 0 if axis == 0 else missing // 2
        first, last = latents.narrow(axis + 2, 0, 1), latents.narrow(axis + 2, latents.shape[axis + 2] - 1, 1)
        latents = torch.cat([first] * low + [latents] + [last] * (missing - low), axis + 2)
        before.append(low)
    return latents, before


def diffusion_decoder():
    """Latents, not normalised, to video. Latents smaller than `least` are padded to it."""
    cases = [
        ("diffusion_a", (1, 4, 3, 5, 6), (0, 0, 0)), ("diffusion_a_small", (1, 4, 1, 2, 1), (3, 3, 3)),
        ("diffusion_b", (2, 3, 4, 5, 9), (0, 0, 0)), ("diffusion_c", (1, 5, 5, 5, 4), (0, 0, 0)),
    ]
    for seed, (case, shape, least) in enumerate(cases, 600):
        name = case.removesuffix("_small")
        model, latents = decoder(name), randn(seed, "latents", *shape)
        whole, before = _padded(latents, least)
        video = model.decode(whole, generator=torch.Generator().manual_seed(seed), return_dict=False)[0]
        for axis in (3, 4):
            ratio = model.spatial_compression_ratio
            video = video.narrow(axis, before[axis - 2] * ratio, shape[axis] * ratio)
        video = video[:, :, : (shape[2] - 1) * model.temporal_compression_ratio + 1]
        inputs, strides = {"latents": latents}, {"video": (1, 1, 1, 5, 7)}
        write_case("diffusion-decoder", case, inputs, {"video": video}, model=name, seed=seed, strides=strides, limit=8000)
