"""Writes the initial noise of diffusers' pipelines: of a first pass, and of a second pass from latents."""

import hashlib

import torch
from diffusers import LTX2ConditionPipeline, LTX2ImageToVideoPipeline, LTX2Pipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image

import models
from common import FIXTURES, write_json

SEED, FRAMES, RATE = 11, 9, 24.0
# Size of the first pass; the second is twice as large.
WIDTH, HEIGHT = 96, 64


def _pass(pipeline, source, scale, dtype, given):
    """Returns the noise of a pass as packed tokens, at `scale` times the size."""
    width, height = WIDTH * scale, HEIGHT * scale
    frames = (FRAMES - 1) // pipeline.vae_temporal_compression_ratio + 1
    ratio, config = pipeline.vae_spatial_compression_ratio, pipeline.audio_vae.config
    channels = pipeline.transformer.config.in_channels
    rate = pipeline.audio_sampling_rate / pipeline.audio_hop_length / pipeline.audio_vae_temporal_compression_ratio
    length = round(FRAMES / RATE * rate)
    video = dict(num_channels_latents=channels, height=height, width=width, num_frames=FRAMES, generator=source) | given
    audio = dict(
        num_channels_latents=config.latent_channels, audio_latent_length=length, num_mel_bins=config.mel_bins, generator=source
    )
    if scale > 1:
        # Latents are irrelevant at noise level 1.
        shape = (1, channels, frames, height // ratio, width // ratio)
        bins = config.mel_bins // pipeline.audio_vae_mel_compression_ratio
        video |= dict(latents=torch.zeros(shape, dtype=dtype), noise_scale=1.0)
        audio |= dict(latents=torch.zeros(1, config.latent_channels, length, bins), noise_scale=1.0)
    drawn = pipeline.prepare_latents(dtype=torch.float32, device="cpu", **video)
    drawn = drawn if isinstance(drawn, torch.Tensor) else drawn[0]
    return drawn, pipeline.prepare_audio_latents(dtype=torch.float32, device="cpu", **audio)


def _described(tokens):
    bits = tokens.float().contiguous().view(torch.int32).numpy().astype("<i4")
    return {"shape": list(tokens.shape), "sha256": hashlib.sha256(bits.tobytes()).hexdigest(), "first": bits.reshape(-1)[:2].tolist()}


def _case(name, kind, dtype):
    whole = models.load_pipeline(name)
    image, given = Image.new("RGB", (WIDTH, HEIGHT)), {}
    pipeline = {"text": LTX2Pipeline, "first": LTX2ImageToVideoPipeline, "later": LTX2ConditionPipeline}[kind](**whole.components)
    if kind == "first":
        given = dict(image=torch.zeros(1, 3, HEIGHT, WIDTH))
    if kind == "later":
        # Strength 0 keeps the noise.
        given = dict(conditions=[LTX2VideoCondition(image, 1, strength=0.0, crf=0)], frame_rate=RATE, noise_scale=1.0)
    source = torch.Generator("cpu").manual_seed(SEED)
    passes = [_pass(pipeline, source, scale, dtype, given) for scale in (1, 2)]
    if kind == "first":
        # The first frame has no noise.
        tokens = [(HEIGHT * scale // 32) * (WIDTH * scale // 32) for scale in (1, 2)]
        passes = [(video[:, own:], audio) for (video, audio), own in zip(passes, tokens)]
    drawn = [{"video": _described(video), "audio": _described(audio)} for video, audio in passes]
    return {"model": name, "images": kind, "dtype": str(dtype).split(".")[1], "passes": drawn}


def noise_order():
    cases = [
        _case(name, kind, dtype)
        for name in ("tiny_2_3", "tiny_2_5")
        for kind, dtype in (
            ("text", torch.float32), ("text", torch.bfloat16), ("first", torch.float32), ("later", torch.float32),
        )
    ]
    meta = dict(script="scripts/oracle/cases_noise_order.py", seed=SEED, num_frames=FRAMES, frame_rate=RATE, width=WIDTH, height=HEIGHT)
    write_json(FIXTURES / "noise" / "diffusers.json", {**meta, "cases": cases}, ('{"model"',))
    print(f"noise_order: {len(cases)} cases")


COMPONENTS = {"noise_order": noise_order}
