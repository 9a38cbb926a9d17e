"""Writes LTX-2.5's DFR by diffusers: two passes that generate keyframes, then temporal rounds, with one noise generator.

`official` has rounds like Lightricks: no attention between the streams, positions at the round's frame rate up to 60.

A line of tests/fixtures/dfr/layout.json has: requested frames, frames of diffusers' canvas, keyframes, and the tiles of two
temporal rounds: first latent frame, end, dropped latent frames, first and last frame, keyframes of the previous round, keyframes
to generate."""

import json
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler, LTX2DFRPipeline, LTX2DFRTemporalRefinePipeline, LTXEulerAncestralRFScheduler,
)
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel, pipeline_ltx2_dfr_temporal_refine
from diffusers.pipelines.ltx2.dfr_layout import resolve_canvas, temporal_tile_plan
from diffusers.pipelines.ltx2.utils import STAGE_2_DISTILLED_SIGMA_VALUES, trim_canvas

import cases_2_5
import models
from cases_by_diffusers import conditions
from cases_text import NEGATIVE, POSITIVE
from common import FIXTURES, randomise, write_case


def dfr_layout():
    cases = []
    for frames in [*range(9, 202, 8), 241, 257, 481]:
        canvas, _, keyframes = resolve_canvas(frames)
        rounds, size, seams = [], canvas, keyframes
        for number in (1, 2):
            size, seams = 2 * (size - 1) + 1, [2 * seam for seam in seams]
            tiles = temporal_tile_plan(seams, size, 2**number)
            described = lambda t, i: [i.start, i.end, i.left_ramp, t.pixel_start, t.pixel_end, list(t.anchors), list(t.slots)]
            rounds.append([described(tile, tile.interval) for tile in tiles])
            seams = sorted({*seams, *(slot for t in tiles for slot in t.slots)})
        cases.append([frames, canvas, keyframes, rounds])
    text = json.dumps(cases, separators=(",", ":")).replace("]],[", "]],\n[")
    (FIXTURES / "dfr" / "layout.json").write_text(text + "\n")


def _run(request):
    whole, upsampler = models.load_pipeline(cases_2_5.NAME), models.load("upsampler_plain", "latent_upsampler")
    parts = {part: whole.components[part] for part in (*models.PARTS, "text_encoder", "tokenizer")}
    stage = LTX2DFRPipeline(scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=False), **parts)
    config = models.config("dfr_temporal", "temporal_latent_upsampler")
    temporal = randomise(LTX2LatentUpsamplerModel(**config), "dfr_temporal")
    ancestral = LTXEulerAncestralRFScheduler(eta=0.5)
    rounds = LTX2DFRTemporalRefinePipeline(scheduler=ancestral, temporal_latent_upsampler=temporal, **parts)
    for pipeline in (stage, rounds):
        pipeline.set_progress_bar_config(disable=True)
    width, height, count, rate = (request[key] for key in ("width", "height", "num_frames", "frame_rate"))
    images = [tuple(image[key] for key in ("name", "frame", "strength")) for image in request.get("images", [])]
    common = dict(
        prompt=request["prompt"], max_sequence_length=request["max_sequence_length"], output_type="latent",
        generator=torch.Generator("cpu").manual_seed(request["seed"]), conditions=conditions(images) or None,
    )
    of_stage = dict(common, num_frames=count, frame_rate=rate)
    one = stage(width=width // 2, height=height // 2, **of_stage)
    out = {"stage_1.latents.video": one.frames, "stage_1.latents.audio": one.audio, "stage_1.keyframes": one.keyframes}
    made = stage(
        width=width, height=height, latents=upsampler(one.frames), keyframes_latents=upsampler(one.keyframes),
        audio_latents=one.audio, sigmas=STAGE_2_DISTILLED_SIGMA_VALUES, **of_stage,
    )
    out |= {"stage_2.latents.video": made.frames, "stage_2.keyframes": made.keyframes}
    canvas = (made.frames.shape[2] - 1) * 8 + 1
    with ExitStack() as stack:
        if request["reference"] == "official":
            network = whole.transformer
            stack.enter_context(patch.object(network, "forward", partial(network.forward, isolate_modalities=True)))
            stack.enter_context(patch.object(pipeline_ltx2_dfr_temporal_refine, "SNAP_CONDITIONING_FPS_ABOVE", 60.0))
        for number in range(1, request["temporal_rounds"] + 1):
            made = rounds(
                width=width, height=height, latents=made.frames, keyframes_latents=made.keyframes,
                keyframe_positions=made.keyframe_positions, audio_latents=one.audio,
                num_frames=(made.frames.shape[2] - 1) * 8 + 1, frame_rate=rate * 2 ** (number - 1),
                source_seconds=canvas / rate, condition_num_frames=count, round_index=number, **common,
            )
            out |= {f"round_{number}.latents.video": made.frames, f"round_{number}.keyframes": made.keyframes}
    scale = 2 ** request["temporal_rounds"]
    frames = (count - 1) * scale + 1
    out |= cases_2_5.decoded(whole, trim_canvas(made.frames, frames, 8), one.audio)
    length = round(frames / (rate * scale) * whole.vocoder.config.output_sampling_rate)
    return out | {"audio": out["audio"][..., :length]}


_COMMON = dict(
    prompt=POSITIVE, negative_prompt=NEGATIVE, width=128, height=64, num_frames=41, frame_rate=24.0, max_sequence_length=64,
    temporal_rounds=1, seed=7,
)
_CASES = {
    "diffusers": dict(_COMMON, reference="diffusers"),
    "official": dict(_COMMON, reference="official", seed=8),
    "images": dict(
        _COMMON, reference="diffusers", num_frames=17, frame_rate=32.0, temporal_rounds=2, seed=9,
        images=[dict(name="frame.png", frame=0, strength=0.9), dict(name="shapes.png", frame=9, strength=0.6)],
    ),
}


def dfr():
    for case, request in _CASES.items():
        outputs = {name: value.float() for name, value in _run(request).items()}
        strides = {"video": (1, 16, 1, 9, 9), "audio": (1, 1, 211)}
        write_case("dfr", case, {}, outputs, model=cases_2_5.NAME, seed=request["seed"], scalars=request, strides=strides)
