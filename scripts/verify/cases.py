"""The cases that a model's files support, with the settings of both sides."""

from collections import namedtuple
from itertools import product, repeat

from drawn_request import NEUTRAL, write_configuration

PROMPT = "A lighthouse over a quiet sea at dawn, gulls calling; a woman in a red coat says: good morning."
NEGATIVE = "worst quality, blurry, static noise"
STREAMS = ("video", "audio")
_GUIDED = {s: dict(cfg=cfg, stg=1.0, modality=3.0, rescale=0.7) for s, cfg in (("video", 3.0), ("audio", 7.0))}
_HQ = {s: dict(cfg=cfg, stg=0.0, modality=3.0, rescale=r) for s, cfg, r in (("video", 3.0, 0.45), ("audio", 7.0, 1.0))}
# Published defaults of a generation, and of pipelines with their own: steps, one-pass guidance, and the block that STG perturbs.
_DEFAULTS = {
    "2.0": (40, {s: dict(NEUTRAL, cfg=4.0) for s in STREAMS}, []), "2.3": (30, _GUIDED, [28]), "2.5": (30, _GUIDED, [28]),
    "hq": (15, _HQ, []), "distilled": (8, {s: NEUTRAL for s in STREAMS}, []),
}
# Strength and stages of the distilled LoRA.
_LORAS = {"hq": [(0.25, [1]), (0.5, [2])], "two_stage": [(1.0, [2])], "keyframes": [(1.0, [2])]}
Case = namedtuple("Case", "name request")


def pipelines(found):
    """Returns the pipelines that the files support, and a message for each other pipeline."""
    lacking = "no upsampler beside the model (--upsampler)"
    if found.distilled:
        cannot = ["text_to_video, image_to_video, two_stage, hq, keyframes: not of a distilled model"]
        return (["distilled"], cannot) if found.upsampler else ([], [*cannot, f"distilled: {lacking}"])
    can, cannot = ["text_to_video", "image_to_video"], ["distilled: of a distilled model"]
    if not found.upsampler:
        return can, [f"two_stage, keyframes, hq: {lacking}", *cannot]
    if not found.lora:
        return [*can, "two_stage", "keyframes"], ["hq: no distilled LoRA beside the model (--lora)", *cannot]
    return [*can, "two_stage", "keyframes", "hq"], cannot


def package(found, options):
    """Returns whether Lightricks' package is the reference: for its own file format, but not in bf16, where it rounds more."""
    return found.is_file() and options.dtype == "f32"


def settings(found, pipeline, options):
    steps, guidance, blocks = _DEFAULTS[pipeline if pipeline in _DEFAULTS else found.generation]
    blocks = [min(b, options.layers - 1) for b in blocks]
    reference = "diffusers" if pipeline == "text_to_video" else "official_1_0" if package(found, options) else "official"
    ancestral = pipeline == "distilled" and found.generation == "2.5"
    return dict(
        pipeline=pipeline, prompt=PROMPT, negative_prompt=NEGATIVE, frame_rate=24.0, seed=options.seed,
        steps=options.steps or steps, guidance=guidance, stg_blocks={stream: blocks for stream in STREAMS},
        sampler="res_2s" if pipeline == "hq" else "euler_ancestral" if ancestral else "euler", eta=1.0 if ancestral else None,
        max_sequence_length=options.max_sequence_length, reference=reference, sigma_shift="official", cross_timestep=None,
        clamp=reference != "diffusers",
        # Since 1.2.0 two pipelines keep the sound of the first pass.
        keeps="stage_1" if reference == "official" and pipeline in ("two_stage", "hq") else "stage_2",
        dtype=options.dtype, stored="bf16",
        loras=[dict(strength=s, stages=stages) for s, stages in _LORAS.get(pipeline, []) if found.lora],
    )


def plan(found, options):
    can, cannot = pipelines(found)
    asked, cases = options.pipelines or can, []
    cannot += [f"{name}: not asked for" for name in can if name not in asked]
    for pipeline, (width, height, frames) in product([name for name in can if name in asked], options.sizes):
        if pipeline != "keyframes" or frames > 1:
            places = {"image_to_video": [0], "keyframes": [0, frames - 1]}.get(pipeline, [])
            size = dict(width=width, height=height, num_frames=frames, images=[dict(frame=n, strength=1.0) for n in places])
            cases.append(Case(f"{pipeline}-{width}x{height}x{frames}", settings(found, pipeline, options) | size))
    return cases, cannot


def configure(path, found, case, image, platform):
    model = {"path": found.given, "text_encoder": found.text_encoder, "upsampler": found.upsampler}
    if found.generation == "2.5":
        # The reference decodes by the VAE.
        model["decoder"] = "conv"
    # One device like the reference; `auto` uses all GPUs.
    request = case.request | {"layout": "replicated", "mesh": None}
    model = {key: value for key, value in model.items() if value}
    write_configuration(path, request, model, repeat(found.lora), repeat(image), platform)
