"""Writes requests by diffusers' pipelines: strengths below 1, another motion speed, ancestral steps, a tokenizer without BOS."""

import json
import tempfile
from pathlib import Path

import torch
from diffusers import LTX2ConditionPipeline, LTX2ImageToVideoPipeline, LTX2InContextPipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES
from PIL import Image
from transformers import AutoTokenizer

import cases_2_5
import models
from cases_pipeline import FULL, RESCALED, request_of, run_pipeline
from common import FIXTURES, pattern, write_case

PRESETS = {"tiny_a": "ltx2", "tiny_2_3": "ltx2_3", "tiny_2_5": "ltx2_5_distilled"}
# Name, frame and strength; the second is appended to the video's tokens.
_IMAGES = [("frame.png", 0, 0.8), ("shapes.png", 1, 0.5)]


def _open(name):
    return Image.open(FIXTURES / "images" / name).convert("RGB")


def conditions(images):
    """Returns conditions of diffusers; frame f is latent index (f + 7) / 8."""
    return [LTX2VideoCondition(_open(name), (frame + 7) // 8, strength, crf=0) for name, frame, strength in images]


def keys_of(asked):
    names = ("prompt", "negative_prompt", "seed", "width", "height", "num_frames", "frame_rate", "max_sequence_length")
    keys = [f"request.{key}={asked[key]}" for key in names]
    keys += [f"guidance.{s}.{key}={value}" for s, values in asked["guidance"].items() for key, value in values.items()]
    return [*keys, f"guidance.stg_blocks={asked.get('stg_blocks', [])}"]


def _write(case, name, asked, outputs, *more, references=()):
    form = "{{path: tests/fixtures/images/{}, frame: {}, strength: {}, crf: 0}}"
    images = [form.format(*image) for image in asked.get("images", [])]
    scalars = {
        "preset": PRESETS[name], "keys": {"": []}, "references": references,
        "common": [*keys_of(asked), f"request.images=[{', '.join(images)}]", "reference=diffusers", *more],
        "upsampler": "upsampler_plain" if name == "tiny_2_5" else None,
    }
    # Frames only of the diffusion decoder.
    outputs = {key: value.float() for key, value in outputs.items() if "latents" in key or name == cases_2_5.NAME}
    strides = {"video": (1, 4, 1, 9, 9)}
    write_case("by_diffusers", f"{name}_{case}", {}, outputs, model=name, seed=asked["seed"], scalars=scalars, strides=strides)


def _one_pass(case, name, kind, asked, *more, references=(), **arguments):
    outputs = run_pipeline(models.load_pipeline(name, kind=kind), asked, use_cross_timestep=True, **arguments)
    keys = ("pipeline=image_to_video", f"sampler.steps={asked['steps']}", *more)
    _write(case, name, asked, outputs, *keys, references=references)


def one_pass():
    """Writes cases with rescaled guidance, whose deviation also covers known tokens."""
    asked = request_of(width=96, height=64, guidance=RESCALED, sigma_shift="diffusers", images=_IMAGES)
    first = dict(asked, images=[("frame.png", 0, 1.0)])
    _one_pass("first", "tiny_a", LTX2ImageToVideoPipeline, first, image=_open("frame.png"), image_crf=0)
    given = dict(conditions=conditions(_IMAGES))
    _one_pass("strengths", "tiny_a", LTX2ConditionPipeline, asked, **given)

    full = request_of(width=64, height=64, guidance=FULL, stg_blocks=[1], sigma_shift="diffusers", images=_IMAGES)
    _one_pass("strengths", "tiny_2_3", LTX2ConditionPipeline, full, **given)
    _one_pass("motion", "tiny_2_3", LTX2ConditionPipeline, full, "request.motion_speed=0.2", motion_speed=0.2, **given)

    beside = dict(full, guidance={s: dict(v, stg=0.0, modality=1.0) for s, v in FULL.items()}, stg_blocks=[], images=_IMAGES[:1])
    # The pattern `square` of cases_references.py.
    video = [Image.fromarray(frame.numpy()) for frame in pattern(9, 32, 32, len("square") * 17)]
    _one_pass(
        "reference", "tiny_2_3", LTX2InContextPipeline, beside, "conditioning.reference_downscale_factor=2",
        references=[dict(path="square", strength=0.6, attention_strength=1.0)], conditions=conditions(_IMAGES[:1]),
        reference_conditions=[LTX2ReferenceCondition(video, strength=0.6)], reference_downscale_factor=2,
    )


def two_passes():
    asked = dict(cases_2_5.DISTILLED, images=_IMAGES)
    pipeline = models.load_pipeline(cases_2_5.NAME, kind=LTX2ConditionPipeline)
    source = torch.Generator().manual_seed(asked["seed"])
    outputs = cases_2_5.two_passes_by_itself(pipeline, asked, source, conditions=conditions(_IMAGES))
    _write("strengths", cases_2_5.NAME, asked, outputs)


def ancestral():
    """Writes two ancestral passes and the diffusion decoder. The scheduler gets the call's generator, as in LTX2DFRPipeline."""
    asked = dict(cases_2_5.DISTILLED, width=64)
    pipeline, source = models.load_pipeline(cases_2_5.NAME), torch.Generator().manual_seed(asked["seed"])
    pipeline.scheduler = cases_2_5.ancestral(source)
    sigmas = [*DISTILLED_SIGMA_VALUES, 0.0], asked["refine_sigmas"]
    outputs = cases_2_5.two_passes_by_itself(pipeline, asked, source, sigmas)
    outputs |= cases_2_5.decode_by_diffusion(pipeline, cases_2_5.diffusion_decoder(), outputs["latents.video"], source)
    kinds = ["sampler.kind=euler_ancestral", "two_stage.sampler=euler_ancestral", "sampler.sigma_shift=official"]
    _write("ancestral", cases_2_5.NAME, asked, outputs, "model.decoder=diffusion", *kinds)


def without_bos():
    """Writes a case whose tokenizer file adds no BOS, which is how transformers 5 saves it."""
    asked = request_of(width=96, height=64, steps=3, sigma_shift="diffusers", negative_prompt="")
    pipeline = models.load_pipeline("tiny_a")
    with tempfile.TemporaryDirectory() as folder:
        pipeline.tokenizer.save_pretrained(folder)
        file = Path(folder) / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
        pipeline.tokenizer = AutoTokenizer.from_pretrained(folder)
    assert pipeline.tokenizer("").input_ids == []
    _write("no_bos", "tiny_a", asked, run_pipeline(pipeline, asked), f"sampler.steps={asked['steps']}")


def by_diffusers():
    for write in (without_bos, one_pass, two_passes, ancestral):
        write()
