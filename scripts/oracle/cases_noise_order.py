"""Writes the initial noise of diffusers' pipelines: of a first pass, and of a second pass from latents."""

import torch
from diffusers import LTX2ConditionPipeline, LTX2ImageToVideoPipeline, LTX2Pipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image

import models
from cases_pipeline import noise_shapes
from common import FIXTURES, float_bits, write_json

# The first pass; the second is twice as large.
REQUEST = dict(num_frames=9, frame_rate=24.0, width=96, height=64)
SEED = 11
KINDS = {"text": LTX2Pipeline, "first": LTX2ImageToVideoPipeline, "later": LTX2ConditionPipeline}


def _pass(pipeline, source, scale, dtype, given):
    request = REQUEST | {side: REQUEST[side] * scale for side in ("width", "height")}
    video_shape, audio_shape = noise_shapes(pipeline, request)
    video = dict(num_channels_latents=video_shape[1], generator=source, **request) | given
    if "frame_rate" not in given:
        del video["frame_rate"]
    audio = dict(
        num_channels_latents=audio_shape[1], audio_latent_length=audio_shape[2], num_mel_bins=pipeline.audio_vae.config.mel_bins,
        generator=source,
    )
    if scale > 1:
        # Latents are irrelevant at noise level 1.
        video |= dict(latents=torch.zeros(video_shape, dtype=dtype), noise_scale=1.0)
        audio |= dict(latents=torch.zeros(audio_shape), noise_scale=1.0)
    drawn = pipeline.prepare_latents(dtype=torch.float32, device="cpu", **video)
    drawn = drawn if isinstance(drawn, torch.Tensor) else drawn[0]
    return {"video": drawn, "audio": pipeline.prepare_audio_latents(dtype=torch.float32, device="cpu", **audio)}


def _case(name, kind, dtype):
    pipeline, size = models.load_pipeline(name, kind=KINDS[kind]), (REQUEST["width"], REQUEST["height"])
    given = {
        "text": {},
        "first": dict(image=torch.zeros(1, 3, *size[::-1])),
        # Strength 0 keeps the noise.
        "later": dict(
            conditions=[LTX2VideoCondition(Image.new("RGB", size), 1, strength=0.0, crf=0)], frame_rate=REQUEST["frame_rate"],
            noise_scale=1.0,
        ),
    }[kind]
    source, passes = torch.Generator("cpu").manual_seed(SEED), []
    for scale in (1, 2):
        drawn, described = _pass(pipeline, source, scale, dtype, given), {}
        if kind == "first":
            # The first frame has no noise.
            drawn["video"] = drawn["video"][:, (size[0] * scale // 32) * (size[1] * scale // 32) :]
        for stream, tokens in drawn.items():
            bits, sha256 = float_bits(tokens)
            described[stream] = dict(shape=list(tokens.shape), sha256=sha256, first=bits.astype("<i4")[:2].tolist())
        passes.append(described)
    return {"model": name, "images": kind, "dtype": str(dtype).split(".")[1], "passes": passes}


def noise_order():
    kinds = [("text", torch.float32), ("text", torch.bfloat16), ("first", torch.float32), ("later", torch.float32)]
    cases = [_case(name, *kind) for name in ("tiny_2_3", "tiny_2_5") for kind in kinds]
    data = dict(script="scripts/oracle/cases_noise_order.py", seed=SEED, **REQUEST, cases=cases)
    write_json(FIXTURES / "noise" / "diffusers.json", data, ('{"model"',))
