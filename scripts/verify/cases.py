"""The cases that a model's files support, with the settings of both sides."""

from dataclasses import dataclass, field

PROMPT = "A lighthouse over a quiet sea at dawn, gulls calling; a woman in a red coat says: good morning."
NEGATIVE = "worst quality, blurry, static noise"
_NEUTRAL = dict(cfg=1.0, stg=0.0, modality=1.0, rescale=0.0)
# Published defaults: steps, one-pass guidance, and the block that STG perturbs.
_DEFAULTS = {
    "2.0": (40, {s: dict(_NEUTRAL, cfg=4.0) for s in ("video", "audio")}, []),
    "2.3": (30, {s: dict(cfg=cfg, stg=1.0, modality=3.0, rescale=0.7) for s, cfg in (("video", 3.0), ("audio", 7.0))}, [28]),
}
_DEFAULTS["2.5"] = _DEFAULTS["2.3"]
_HQ = {
    "video": dict(cfg=3.0, stg=0.0, modality=3.0, rescale=0.45), "audio": dict(cfg=7.0, stg=0.0, modality=3.0, rescale=1.0)
}


@dataclass
class Case:
    pipeline: str
    width: int
    height: int
    frames: int
    request: dict = field(default_factory=dict)

    @property
    def name(self):
        return f"{self.pipeline}-{self.width}x{self.height}x{self.frames}"


def pipelines(found):
    """Returns the pipelines that the files support, and a message for each other pipeline."""
    can, cannot = [], []
    if found.distilled:
        cannot.append("text_to_video, image_to_video, two_stage, hq, keyframes: not of a distilled model")
        if found.upsampler:
            can.append("distilled")
        else:
            cannot.append("distilled: no upsampler beside the model (--upsampler)")
        return can, cannot
    can += ["text_to_video", "image_to_video"]
    if found.upsampler:
        can += ["two_stage", "keyframes"]
    else:
        cannot.append("two_stage, keyframes, hq: no upsampler beside the model (--upsampler)")
    if found.upsampler and found.lora:
        can.append("hq")
    elif found.upsampler:
        cannot.append("hq: no distilled LoRA beside the model (--lora)")
    cannot.append("distilled: of a distilled model")
    return can, cannot


def package(found, options):
    """Returns whether Lightricks' package is the reference: for its own file format, but not in bf16, where it rounds more."""
    return found.is_file() and options.dtype == "f32"


def settings(found, pipeline, options):
    steps, guidance, blocks = _DEFAULTS[found.generation]
    if pipeline == "hq":
        steps, guidance, blocks = 15, _HQ, []
    if pipeline == "distilled":
        steps, guidance, blocks = 8, {s: dict(_NEUTRAL) for s in ("video", "audio")}, []
    layers = options.layers
    blocks = [min(b, layers - 1) for b in blocks]
    reference = "diffusers" if pipeline == "text_to_video" else "official_1_0" if package(found, options) else "official"
    sampler = "res_2s" if pipeline == "hq" else "euler"
    if pipeline == "distilled" and found.generation == "2.5":
        sampler = "euler_ancestral"
    lora = {"hq": [(0.25, [1]), (0.5, [2])], "two_stage": [(1.0, [2])], "keyframes": [(1.0, [2])]}
    return dict(
        pipeline=pipeline, prompt=PROMPT, negative_prompt=NEGATIVE, frame_rate=24.0, seed=options.seed,
        steps=options.steps or steps, guidance=guidance, stg_blocks={"video": blocks, "audio": blocks},
        sampler=sampler, eta=1.0 if sampler == "euler_ancestral" else None, max_sequence_length=options.max_sequence_length,
        reference=reference, sigma_shift="official", cross_timestep=None, clamp=reference != "diffusers",
        # Since 1.2.0 two pipelines keep the sound of the first pass.
        keeps="stage_1" if reference == "official" and pipeline in ("two_stage", "hq") else "stage_2",
        dtype=options.dtype, stored="bf16",
        loras=[dict(strength=s, stages=stages) for s, stages in lora.get(pipeline, []) if found.lora],
    )


def images(pipeline, frames):
    if pipeline == "image_to_video":
        return [dict(frame=0, strength=1.0)]
    if pipeline == "keyframes":
        return [dict(frame=0, strength=1.0), dict(frame=frames - 1, strength=1.0)]
    return []


def plan(found, options):
    """Returns all cases, and messages for unsupported pipelines."""
    can, cannot = pipelines(found)
    if options.pipelines:
        cannot += [f"{name}: not asked for" for name in can if name not in options.pipelines]
        can = [name for name in can if name in options.pipelines]
    cases = []
    for pipeline in can:
        for width, height, frames in options.sizes:
            request = settings(found, pipeline, options)
            if pipeline == "keyframes" and frames == 1:
                continue
            request |= dict(width=width, height=height, num_frames=frames, images=images(pipeline, frames))
            cases.append(Case(pipeline, width, height, frames, request))
    return cases, cannot


def configuration(found, case, image, platform):
    """Returns the configuration for `ltx2 generate -c`."""
    r = case.request
    two_stages = r["pipeline"] not in ("text_to_video", "image_to_video")
    perturbs = any(r["guidance"][stream]["stg"] for stream in ("video", "audio"))
    guidance = {stream: dict(r["guidance"][stream]) for stream in ("video", "audio")}
    override = {"text_encoder": found.text_encoder, "upsampler": found.upsampler if found.upsampler else None}
    return {
        "pipeline": r["pipeline"], "reference": r["reference"],
        "model": {
            "path": str(found.given), **{key: str(path) for key, path in override.items() if path},
            "loras": [{"path": str(found.lora), **lora} for lora in r["loras"]],
            # The reference decodes by the VAE.
            **({"decoder": "conv"} if found.generation == "2.5" else {}),
        },
        "request": {
            **{key: r[key] for key in ("prompt", "negative_prompt", "width", "height", "num_frames", "frame_rate", "seed")},
            "max_sequence_length": r["max_sequence_length"],
            "images": [{"path": str(image), "crf": 0, **condition} for condition in r["images"]],
        },
        "sampler": {
            "kind": r["sampler"], "sigma_shift": r["sigma_shift"],
            **({"sigmas": DISTILLED} if r["pipeline"] == "distilled" else {"steps": r["steps"]}),
        },
        "guidance": {**guidance, **({"stg_blocks": r["stg_blocks"]["video"]} if perturbs else {})},
        **({"two_stage": {"audio": r["keeps"]}} if two_stages else {}),
        **({"vocoder": {"stage1_clamp": "official" if r["clamp"] else "diffusers"}} if found.generation != "2.0" else {}),
        # One device like the reference; `auto` uses all GPUs.
        "layout": "replicated",
        "runtime": {"platform": platform, "dtype": r["dtype"]},
    }


DISTILLED = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0]
