"""Writes LTX-2.5's DFR by diffusers: two passes that generate keyframes, then temporal rounds, with one noise generator.

`official` has rounds like Lightricks: no attention between the streams, positions at the round's frame rate up to 60.
"""

from contextlib import contextmanager
from unittest import mock

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler, LTX2DFRPipeline, LTX2DFRTemporalRefinePipeline, LTXEulerAncestralRFScheduler,
)
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel, pipeline_ltx2_dfr_temporal_refine
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.utils import STAGE_2_DISTILLED_SIGMA_VALUES, trim_canvas
from PIL import Image

import cases_2_5
import models
from cases_decoders import thin
from cases_text import NEGATIVE, POSITIVE
from common import FIXTURES, MODELS, randomise, show, write_case

# The temporal upsampler, whose weights are drawn by seed.
TEMPORAL = dict(
    in_channels=2, mid_channels=32, num_blocks_per_stage=0, spatial_upsample=False, temporal_upsample=True,
    use_rational_resampler=False,
)
TEMPORAL_NAME = "dfr_temporal"
_PARTS = ("vae", "audio_vae", "text_encoder", "tokenizer", "connectors", "transformer", "vocoder")


def save():
    folder = MODELS / TEMPORAL_NAME / models.TEMPORAL
    LTX2LatentUpsamplerModel(**TEMPORAL).save_config(folder)


@contextmanager
def _rounds_of(form, network):
    """Patches the temporal rounds to match the given reference."""
    if form == "diffusers":
        yield
        return
    own = network.forward
    network.forward = lambda *rest, **more: own(*rest, isolate_modalities=True, **more)
    try:
        with mock.patch.object(pipeline_ltx2_dfr_temporal_refine, "SNAP_CONDITIONING_FPS_ABOVE", 60.0):
            yield
    finally:
        network.forward = own


def _conditions(request):
    """Returns the image conditions; frame f is latent index (f + 7) / 8."""
    of = lambda image: LTX2VideoCondition(
        frames=Image.open(FIXTURES / "images" / image["name"]), index=(image["frame"] + 7) // 8, strength=image["strength"], crf=0
    )
    return [of(image) for image in request.get("images", [])] or None


def _run(request):
    whole = models.load_pipeline(cases_2_5.NAME)
    parts = {name: whole.components[name] for name in _PARTS}
    upsampler = models.load("upsampler_plain", "latent_upsampler")
    temporal = randomise(LTX2LatentUpsamplerModel(**TEMPORAL), TEMPORAL_NAME)
    source = torch.Generator("cpu").manual_seed(request["seed"])
    flow = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=False)
    stage = LTX2DFRPipeline(scheduler=flow, **parts)
    rounds = LTX2DFRTemporalRefinePipeline(
        scheduler=LTXEulerAncestralRFScheduler(eta=0.5), temporal_latent_upsampler=temporal, **parts
    )
    for pipeline in (stage, rounds):
        pipeline.set_progress_bar_config(disable=True)
    width, height, count, rate = (request[key] for key in ("width", "height", "num_frames", "frame_rate"))
    common = dict(
        prompt=request["prompt"], max_sequence_length=request["max_sequence_length"], output_type="latent", generator=source,
        conditions=_conditions(request),
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
    with _rounds_of(request["reference"], whole.transformer):
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
    video = trim_canvas(made.frames, frames, 8)
    shown = whole.vae.decode(video, None, return_dict=False)[0]
    samples = whole.vocoder(whole.audio_vae.decode(one.audio, return_dict=False)[0])
    length = round(frames / (rate * scale) * whole.vocoder.config.output_sampling_rate)
    return out | {
        "latents.video": video, "latents.audio": one.audio, "audio": samples[..., :length],
        "video": whole.video_processor.postprocess_video(shown, output_type="pt"),
    }


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
_STRIDES = {"video": (1, 16, 1, 9, 9), "audio": (1, 1, 211)}


def dfr():
    cases_2_5.save()
    save()
    for case, request in _CASES.items():
        outputs = {name: value.float() for name, value in _run(request).items()}
        kept, extra = thin(outputs, _STRIDES)
        write_case(
            "dfr", case, {}, kept, script=__file__, model=cases_2_5.NAME, seed=request["seed"], scalars=request, extra=extra
        )
        show(f"dfr/{case}", *outputs.values())


COMPONENTS = {"dfr": dfr}
