"""Writes requests by diffusers' pipelines: strengths below 1, another motion speed, ancestral steps, a tokenizer without BOS."""

import json
import tempfile
from pathlib import Path

import torch
from diffusers import LTX2ConditionPipeline, LTX2ImageToVideoPipeline, LTX2InContextPipeline, LTX2Pipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES, STAGE_2_DISTILLED_SIGMA_VALUES
from PIL import Image
from transformers import AutoTokenizer

import cases_2_5
import models
from cases_decoders import thin
from cases_pipeline import _neutral, _request, run_pipeline, verbatim_scheduler
from common import FIXTURES, show, write_case

_PRESETS = {"tiny_a": "ltx2", "tiny_2_3": "ltx2_3", "tiny_2_5": "ltx2_5_distilled"}
_RESCALED = {"video": _neutral(3.0, modality=3.0, rescale=0.7), "audio": _neutral(7.0, modality=2.0, rescale=0.4)}
_FULL = {stream: _neutral(cfg, stg=1.0, modality=3.0, rescale=0.7) for stream, cfg in (("video", 3.0), ("audio", 7.0))}
_PLAIN = {"video": _neutral(), "audio": _neutral()}
# Name, frame and strength; the second is appended to the video's tokens.
_IMAGES = [("frame.png", 0, 0.8), ("shapes.png", 1, 0.5)]


def _pattern():
    """Returns the pattern `square` of cases_references.py."""
    f, y, x, c = torch.meshgrid(*(torch.arange(n) for n in (9, 32, 32, 3)), indexing="ij")
    pixels = ((f * 11 + y * 5 + x * 3 + c * 40 + len("square") * 17) % 256).to(torch.uint8)
    return [Image.fromarray(frame.numpy()) for frame in pixels]


def _open(name):
    return Image.open(FIXTURES / "images" / name).convert("RGB")


def _conditions(images):
    return [LTX2VideoCondition(_open(name), (frame + 7) // 8, strength, crf=0) for name, frame, strength in images]


def _pipeline(kind, name):
    parts = models.load_pipeline(name).components
    parts.pop("duration_head", None)
    pipeline = kind(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _keys(asked, *more):
    names = ("prompt", "negative_prompt", "seed", "width", "height", "num_frames", "frame_rate", "max_sequence_length")
    keys = [f"request.{key}={asked[key]}" for key in names]
    keys += [f"guidance.{s}.{key}={value}" for s, values in asked["guidance"].items() for key, value in values.items()]
    keys.append(f"guidance.stg_blocks={asked.get('stg_blocks', [])}")
    images = [
        f"{{path: tests/fixtures/images/{name}, frame: {frame}, strength: {strength}, crf: 0}}"
        for name, frame, strength in asked.get("images", [])
    ]
    return [*keys, f"request.images=[{', '.join(images)}]", "reference=diffusers", *more]


def _write(case, name, keys, outputs, seed, references=()):
    scalars = {
        "preset": _PRESETS[name], "common": keys, "keys": {"": []}, "references": list(references),
        "upsampler": "upsampler_plain" if name == "tiny_2_5" else None,
    }
    outputs, extra = thin({k: v.float().contiguous() for k, v in outputs.items()}, {"video": (1, 4, 1, 9, 9)})
    write_case("by_diffusers", f"{name}_{case}", {}, outputs, script=__file__, model=name, seed=seed, scalars=scalars, extra=extra)
    show(f"by_diffusers/{name}_{case}", *outputs.values())


def _one_pass(case, name, kind, asked, *more, references=(), **arguments):
    pipeline = _pipeline(kind, name)
    outputs = run_pipeline(pipeline, asked, use_cross_timestep=True, **arguments)
    kept = {key: outputs[key] for key in ("latents.video", "latents.audio")}
    keys = _keys(asked, "pipeline=image_to_video", f"sampler.steps={asked['steps']}", *more)
    _write(case, name, keys, kept, asked["seed"], references)


def one_pass():
    """Writes cases with rescaled guidance, whose deviation also covers known tokens."""
    asked = _request(width=96, height=64, num_frames=9, steps=2, guidance=_RESCALED, sigma_shift="diffusers")
    first = dict(asked, images=[("frame.png", 0, 1.0)])
    _one_pass("first", "tiny_a", LTX2ImageToVideoPipeline, first, image=_open("frame.png"), image_crf=0)
    both = dict(asked, images=_IMAGES)
    _one_pass("strengths", "tiny_a", LTX2ConditionPipeline, both, conditions=_conditions(_IMAGES))

    full = _request(
        width=64, height=64, num_frames=9, steps=2, guidance=_FULL, stg_blocks=[1], sigma_shift="diffusers", images=_IMAGES,
    )
    given = dict(conditions=_conditions(_IMAGES))
    _one_pass("strengths", "tiny_2_3", LTX2ConditionPipeline, full, **given)
    _one_pass("motion", "tiny_2_3", LTX2ConditionPipeline, full, "request.motion_speed=0.2", motion_speed=0.2, **given)

    images = _IMAGES[:1]
    beside = dict(full, guidance={s: dict(v, stg=0.0, modality=1.0) for s, v in _FULL.items()}, stg_blocks=[], images=images)
    video = dict(path="square", strength=0.6, attention_strength=1.0)
    _one_pass(
        "reference", "tiny_2_3", LTX2InContextPipeline, beside, "conditioning.reference_downscale_factor=2", references=[video],
        conditions=_conditions(images), reference_conditions=[LTX2ReferenceCondition(_pattern(), strength=0.6)],
        reference_downscale_factor=2,
    )


def _arguments(asked, sigmas):
    more = {} if "images" not in asked else dict(conditions=_conditions(asked["images"]))
    return dict(output_type="latent", width=asked["width"], height=asked["height"], **more, **cases_2_5._arguments(asked, sigmas))


def _half(asked):
    return dict(asked, width=asked["width"] // 2, height=asked["height"] // 2)


def two_passes():
    """Writes two passes of eight and three steps, both from images with strength below 1."""
    name, asked = cases_2_5.NAME, dict(cases_2_5._DISTILLED, images=_IMAGES)
    pipeline = _pipeline(LTX2ConditionPipeline, name)
    source = torch.Generator("cpu").manual_seed(asked["seed"])
    video, audio = pipeline(generator=source, **_arguments(_half(asked), DISTILLED_SIGMA_VALUES))
    first = {"stage_1.latents.video": video, "stage_1.latents.audio": audio}
    larger = cases_2_5.upsampled(pipeline, video)
    pipeline.scheduler = verbatim_scheduler()
    video, audio = pipeline(
        generator=source, latents=larger, audio_latents=audio, noise_scale=STAGE_2_DISTILLED_SIGMA_VALUES[0],
        **_arguments(asked, STAGE_2_DISTILLED_SIGMA_VALUES),
    )
    outputs = first | {"latents.video": video, "latents.audio": audio}
    _write("strengths", name, _keys(asked), outputs, asked["seed"])


def ancestral():
    """Writes two ancestral passes and the diffusion decoder. The scheduler gets the call's generator, as in LTX2DFRPipeline."""
    name, asked = cases_2_5.NAME, dict(cases_2_5._DISTILLED, width=64, height=64)
    pipeline = models.load_pipeline(name)
    source = torch.Generator("cpu").manual_seed(asked["seed"])
    pipeline.scheduler = cases_2_5.ancestral(source)
    video, audio = pipeline(generator=source, **_arguments(_half(asked), DISTILLED_SIGMA_VALUES + [0.0]))
    outputs = {"stage_1.latents.video": video, "stage_1.latents.audio": audio}
    video, audio = pipeline(
        generator=source, latents=cases_2_5.upsampled(pipeline, video), audio_latents=audio,
        noise_scale=STAGE_2_DISTILLED_SIGMA_VALUES[0], **_arguments(asked, STAGE_2_DISTILLED_SIGMA_VALUES + [0.0]),
    )
    outputs |= {"latents.audio": audio} | cases_2_5.decode_by_diffusion(pipeline, cases_2_5.diffusion_decoder(), video, source)
    kinds = ["sampler.kind=euler_ancestral", "two_stage.sampler=euler_ancestral", "sampler.sigma_shift=official"]
    _write("ancestral", name, _keys(asked, "model.decoder=diffusion", *kinds), outputs, asked["seed"])


def without_bos():
    """Writes a case whose tokenizer file adds no BOS, which is how transformers 5 saves it."""
    asked = _request(width=96, height=64, num_frames=9, steps=3, sigma_shift="diffusers", negative_prompt="")
    pipeline = _pipeline(LTX2Pipeline, "tiny_a")
    with tempfile.TemporaryDirectory() as folder:
        pipeline.tokenizer.save_pretrained(folder)
        file = Path(folder) / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
        pipeline.tokenizer = AutoTokenizer.from_pretrained(folder)
    assert pipeline.tokenizer("").input_ids == []
    outputs = run_pipeline(pipeline, asked)
    kept = {key: outputs[key] for key in ("latents.video", "latents.audio")}
    _write("no_bos", "tiny_a", _keys(asked, f"sampler.steps={asked['steps']}"), kept, asked["seed"])


def by_diffusers():
    cases_2_5.save()
    without_bos()
    one_pass()
    two_passes()
    ancestral()


COMPONENTS = {"by_diffusers": by_diffusers}
