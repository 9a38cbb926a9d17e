"""Writes tests/fixtures/noise: draws of torch's CPU generator, and the initial noise of diffusers' pipelines.

A case of `randn.json` and `randn_bf16.json` has the sha256 of consecutive draws and the bits of their first and last values, on
x86-64 with AVX2 or AVX-512. `diffusers.json`: of a first pass, and of a second pass from latents."""

import torch
from diffusers import LTX2ConditionPipeline, LTX2ImageToVideoPipeline, LTX2Pipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image

import models
from cases_pipeline import noise_shapes
from common import FIXTURES, float_bits, write_json

CAPABILITY = torch.backends.cpu.get_cpu_capability()


def case(seed, shapes, dtype=torch.float32):
    generator, draws = torch.Generator("cpu").manual_seed(seed), []
    for shape in shapes:
        bits, sha256 = float_bits(torch.randn(shape, generator=generator, dtype=dtype))
        draws.append({"shape": shape, "sha256": sha256, "first": bits[:2].tolist(), "last": bits[-2:].tolist()})
    return {"seed": seed, "draws": draws}


def write(name, cases):
    versions = {"torch": torch.__version__, "cpu_capability": CAPABILITY}
    write_json(FIXTURES / "noise" / name, {"versions": versions, "cases": cases}, ('{"shape"',))


def randn():
    assert CAPABILITY in ("AVX2", "AVX512"), f"{CAPABILITY}: torch's generic kernels draw other bits"
    cases = [
        case(0, [[n] for n in range(1, 101)]),  # one stream: the short path's waiting value crosses the long draws
        case(10, [[127], [1000], [12345], [3], [5]]),
        case(42, [[(1 << 20) + 3]]),
        case(10, [[1, 128, 16, 16, 24], [1, 8, 126, 16]]),  # the default request: video, then audio
        case(1234, [[1, 4, 3, 5, 7], [1, 2, 5, 2], [1, 2, 3, 1]]),
        *(case(seed, [[33], [7]]) for seed in ((1 << 32) - 1, (1 << 32) + 12345)),
        case((1 << 64) - 1, [[16], [15]]),
        case(0xDEAD_BEEF_CAFE_F00D, [[64], [1]]),
    ]
    write("randn.json", cases)
    narrow = {10_010: [[1, 6144, 8], [1, 126, 8], [40], [9], [17]], 3: [[20]]}
    write("randn_bf16.json", [case(seed, shapes, torch.bfloat16) for seed, shapes in narrow.items()])


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
    audio = dict(num_channels_latents=audio_shape[1], audio_latent_length=audio_shape[2], generator=source)
    audio["num_mel_bins"] = pipeline.audio_vae.config.mel_bins
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
    write_json(FIXTURES / "noise" / "diffusers.json", dict(seed=SEED, **REQUEST, cases=cases), ('{"model"',))
