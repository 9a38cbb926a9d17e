"""Writes LTX-2.5's diffusion decoder. Only configs are stored; tests draw weights and noise by seed."""

import json
import shutil

import torch
from diffusers import LTX2VideoDiffusionDecoderModel

from common import MODELS, keeps, randn, randomise, show, write_case

# `diffusion_a` has the published topology. `diffusion_b` has fewer stages, no RoPE in time, even windows, and predicts
# velocities. `diffusion_c` predicts clean videos and has windows of more frames.
# `diffusion_d` has LTX-2's compression ratios, for pipelines.
CONFIGS = {
    "diffusion_a": dict(
        latent_channels=4, patch_size=2, decoder_head_dim=16, decoder_stage_channels=(64, 32, 16, 16, 16),
        decoder_stage_depths=(1, 2, 1, 1, 2), decoder_stage_kernels=((3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 5, 3)),
        decoder_upsample_strides=((1, 1, 1), (2, 1, 1), (2, 2, 2), (2, 1, 1)), decoder_upsample_channel_reductions=(2, 2, 1, 1),
        decoder_stage5_kernel=(5, 3, 3), decoder_t_emb_dim=16, spatial_compression_ratio=4,
    ),
    "diffusion_b": dict(
        latent_channels=3, patch_size=1, decoder_head_dim=8, decoder_stage_channels=(32, 16, 8), decoder_stage_depths=(1, 1, 1),
        decoder_stage_kernels=((3, 2, 3), (2, 3, 4)), decoder_upsample_strides=((1, 2, 1), (2, 1, 2)),
        decoder_upsample_channel_reductions=(2, 2), decoder_stage5_kernel=(3, 4, 5), decoder_t_emb_dim=12,
        decoder_timestep_scale_multiplier=500.0, decoder_model_output_type="v", decoder_num_inference_steps=3,
        spatial_compression_ratio=2, temporal_compression_ratio=2,
    ),
    "diffusion_c": dict(
        out_channels=2, latent_channels=5, patch_size=4, decoder_head_dim=24, decoder_stage_channels=(48, 48, 24, 24),
        decoder_stage_depths=(1, 1, 1, 1), decoder_stage_kernels=((5, 3, 3), (3, 3, 3), (7, 3, 1)),
        decoder_upsample_strides=((2, 1, 1), (1, 2, 2), (2, 1, 1)), decoder_upsample_channel_reductions=(1, 2, 1),
        decoder_stage5_kernel=(9, 3, 5), decoder_t_emb_dim=8, decoder_num_inference_steps=2, spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    ),
    "diffusion_d": dict(
        latent_channels=2, patch_size=4, decoder_head_dim=8, decoder_stage_channels=(32, 16, 16, 16, 8),
        decoder_stage_depths=(1, 1, 1, 1, 2), decoder_stage_kernels=((2, 2, 2), (2, 3, 3), (3, 3, 3), (3, 3, 3)),
        decoder_upsample_strides=((1, 2, 2), (2, 1, 1), (2, 2, 2), (2, 2, 2)),
        decoder_upsample_channel_reductions=(2, 1, 1, 2), decoder_stage5_kernel=(5, 5, 5), decoder_t_emb_dim=8,
    ),
}
STRIDES = {"video": (1, 1, 1, 5, 7)}


def configuration(name):
    folder = MODELS / name
    if keeps(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    LTX2VideoDiffusionDecoderModel(**CONFIGS[name]).save_config(folder / "diffusion_decoder")


def _padded(latents, least):
    """Pads latents that are smaller than a window, like Lightricks: repeats the last frame and both edges. Returns the padding
    before."""
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
        ("diffusion_a", "diffusion_a", (1, 4, 3, 5, 6), None),
        ("diffusion_a_small", "diffusion_a", (1, 4, 1, 2, 1), (3, 3, 3)),
        ("diffusion_b", "diffusion_b", (2, 3, 4, 5, 9), None),
        ("diffusion_c", "diffusion_c", (1, 5, 5, 5, 4), None),
    ]
    for name in CONFIGS:
        configuration(name)
    for index, (case, name, shape, least) in enumerate(cases):
        seed = 600 + index
        model = randomise(LTX2VideoDiffusionDecoderModel(**CONFIGS[name]), name)
        latents = randn(seed, "latents", *shape)
        whole, before = _padded(latents, least) if least else (latents, (0, 0, 0))
        video = model.decode(whole, generator=torch.Generator().manual_seed(seed), return_dict=False)[0]
        space, time = model.spatial_compression_ratio, model.temporal_compression_ratio
        for axis, ratio in ((3, space), (4, space)):
            video = video.narrow(axis, before[axis - 2] * ratio, shape[axis] * ratio)
        video = video[:, :, : (shape[2] - 1) * time + 1].contiguous()
        kept, extra = {"video": video}, {}
        if video.numel() > 2000:
            steps = STRIDES["video"]
            kept = {"video.strided": video[tuple(slice(None, None, s) for s in steps)].contiguous()}
            extra = {"strides.video": json.dumps(steps), "shape.video": json.dumps(list(video.shape))}
        write_case(
            "diffusion-decoder", case, {"latents": latents}, kept, script=__file__, model=name, seed=seed, extra=extra
        )
        show(f"diffusion-decoder/{case} {list(video.shape)}", video)


COMPONENTS = {"diffusion-decoder": diffusion_decoder}
