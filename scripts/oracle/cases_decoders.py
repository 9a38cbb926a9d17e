"""Writes the video VAE, also in tiles, audio VAE decoder, vocoder, upsamplers, duration head and latent filters."""

from functools import partial

import torch
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplePipeline
from ltx_core.model.video_vae.tiling import DimensionIntervals, create_tiles
from ltx_core.model.video_vae.video_vae import (
    make_mapping_operation, map_spatial_interval_to_pixel, map_temporal_interval_to_frame, split_temporal_latents,
    split_with_symmetric_overlaps,
)

import models
from common import STRIDES, randn, relative_l2, spread, write_case

write = partial(write_case, strides=STRIDES)


def _write_vae(component, case, run, inputs, model, seed):
    run_as = lambda dtype: run(models.load(model, "vae", dtype))
    outputs, extra = run_as(torch.float32), {}
    # Norms over two channels amplify rounding more than in any published model.
    if model == "tiny_2_3":
        extra = spread(run_as(torch.bfloat16), outputs)
        extra |= {f"f32_spread.{k}": f"{relative_l2(outputs[k], v):.2e}" for k, v in run_as(torch.float64).items()}
    write(component, case, inputs, outputs, model=model, seed=seed, extra=extra)


def _write_each(component, cases, first, argument, run):
    """Writes cases with one random input. `run` has model, input and scalars as arguments."""
    part = {"audio-decoder": "audio_vae", "upsampler": "latent_upsampler"}.get(component, component)
    for seed, (case, name, shape, *scalars) in enumerate(cases, first):
        value = randn(seed, argument, *shape)
        outputs = run(models.load(name, part), value, *scalars)
        write(component, case, {argument: value}, outputs, model=name, seed=seed, scalars=scalars[0] if scalars else None)


def video_decoder():
    """Latents, not normalised, to frames `[B, 3, F, H, W]` in -1..1."""
    cases = [
        ("tiny_a", "tiny_a", (1, 8, 2, 2, 3)), ("tiny_a_one_frame", "tiny_a", (1, 8, 1, 3, 2)),
        ("tiny_b", "tiny_b", (1, 6, 2, 1, 3)), ("tiny_b_batch", "tiny_b", (2, 6, 1, 2, 1)),
        ("patch1", "vae_patch1", (2, 4, 3, 3, 2)), ("timestep", "vae_timestep", (2, 4, 2, 3, 2)),
        ("tiny_2_3", "tiny_2_3", (1, 2, 2, 2, 3)), ("tiny_2_3_one_frame", "tiny_2_3", (1, 2, 1, 3, 2)),
    ]
    for seed, (case, name, shape) in enumerate(cases, 100):
        latents = randn(seed, "latents", *shape)
        times = {"temb": torch.tensor([0.05, 0.3])} if name == "vae_timestep" else {}
        decode = lambda vae, z=latents, t=times: {"video": vae.decode(z.to(vae.dtype), **t, return_dict=False)[0]}
        _write_vae("video-decoder", case, decode, {"latents": latents, **times}, name, seed)


def video_encoder():
    """Frames in -1..1 to the mean of the latent distribution, not normalised."""
    cases = [
        ("tiny_a_image", "tiny_a", (1, 3, 1, 64, 32)), ("tiny_b", "tiny_b", (1, 3, 5, 16, 32)),
        ("patch1", "vae_patch1", (1, 3, 5, 6, 4)), ("tiny_2_3", "tiny_2_3", (1, 3, 9, 32, 32)),
        ("tiny_2_3_image", "tiny_2_3", (1, 3, 1, 32, 64)),
    ]
    for seed, (case, name, shape) in enumerate(cases, 200):
        video = randn(seed, "video", *shape).clamp(-1, 1)
        encode = lambda vae, video=video: {"latents": vae.encode(video.to(vae.dtype)).latent_dist.mode()}
        _write_vae("video-encoder", case, encode, {"video": video}, name, seed)


def audio_decoder():
    """Latents `[B, C, L, M]`, not normalised, to log-mel `[B, channels, 4L-3, mel_bins]`."""
    cases = [
        ("tiny_a", "tiny_a", (1, 2, 5, 2)), ("tiny_a_one", "tiny_a", (2, 2, 1, 2)), ("tiny_b", "tiny_b", (2, 2, 6, 4)),
        ("tiny_b_one", "tiny_b", (1, 2, 1, 4)), ("width", "audio_width", (1, 3, 4, 3)),
        ("plain", "audio_plain", (2, 1, 3, 4)), ("tiny_2_3", "tiny_2_3", (1, 2, 5, 2)),
    ]
    decode = lambda vae, latents: {"mel": vae.decode(latents, return_dict=False)[0]}
    _write_each("audio-decoder", cases, 300, "latents", decode)


def vocoder():
    """Log-mel `[B, channels, T, mel_bins]` to samples. `clamp` limits the first of two stages, like Lightricks' code."""
    cases = [
        ("tiny_a", "tiny_a", (1, 2, 5, 8), {}), ("tiny_a_one", "tiny_a", (2, 2, 1, 8), {}),
        ("tiny_b", "tiny_b", (1, 2, 7, 16), {}), ("odd", "vocoder_odd", (2, 2, 4, 3), {}),
        ("tiny_2_3", "tiny_2_3", (2, 2, 5, 8), {"clamp": False}),
        ("tiny_2_3_clamped", "tiny_2_3", (1, 2, 7, 8), {"clamp": True}),
        ("tiny_2_3_one", "tiny_2_3", (1, 2, 1, 8), {"clamp": False}),
        ("bwe_odd", "vocoder_bwe_odd", (2, 2, 7, 3), {"clamp": False}),
    ]

    def run(model, mel, scalars):
        if scalars.get("clamp"):
            model.vocoder.final_act_fn = "clamp"
        return {"audio": model(mel)}

    _write_each("vocoder", cases, 400, "mel", run)


def upsampler():
    cases = [
        ("rational", "upsampler_rational", (1, 8, 3, 2, 3)), ("plain", "upsampler_plain", (2, 2, 2, 3, 2)),
        ("broken", "upsampler_3_2", (1, 4, 2, 3, 5)), ("temporal", "upsampler_temporal", (2, 4, 3, 2, 2)),
        ("frames", "upsampler_frames", (2, 3, 3, 2, 3)),
    ]
    _write_each("upsampler", cases, 500, "latents", lambda network, latents: {"latents": network(latents)})


def duration_head():
    sizes = {"duration_head": (2, 8, 8), "duration_head_queries": (1, 5, 3), "duration_head_narrow": (3, 2, 6)}
    for seed, (name, (batch, *tokens)) in enumerate(sizes.items(), 540):
        config = models.config(name, "duration_head")
        width = lambda stream: config[f"{stream}_cross_attention_dim"]
        streams = zip(("video", "audio"), tokens)
        inputs = {f"{stream}_tokens": randn(seed, stream, batch, count, width(stream)) for stream, count in streams}
        write("duration-head", name, inputs, {"seconds": models.load(name, "duration_head")(**inputs)}, model=name, seed=seed)


def filters():
    """The filters of diffusers' upsampling pipeline; Lightricks' packages have none."""
    pipeline, latents = LTX2LatentUpsamplePipeline, randn(520, "latents", 2, 4, 3, 4, 6, scale=1.7) + 0.4
    reference = randn(520, "reference", 2, 4, 3, 2, 3) - 0.2
    outputs = {f"adain.{factor}": pipeline.adain_filter_latent(None, latents, reference, factor) for factor in (0.3, 1.0)}
    outputs |= {f"tone_map.{c}": pipeline.tone_map_latents(None, latents, c) for c in (0.4, 1.0)}
    write("filters", "filters", {"latents": latents, "reference": reference}, outputs, seed=520)


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
    scalars, strides = dict(pixels=64, overlap=32, frames=24, frame_overlap=8), {"video": (1, 1, 3, 5, 7)}
    more, outputs = dict(model="tiny_a", seed=31, scalars=scalars, strides=strides), {"video": video / weights.clamp(min=1e-8)}
    write("tiled", "space_and_time", {"latents": latents}, outputs, **more)
