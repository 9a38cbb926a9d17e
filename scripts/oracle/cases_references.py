#!/usr/bin/env python3
"""Writes requests with reference videos by Lightricks' `ICLoraPipeline` and diffusers, and the states of Lightricks' conditionings.

    cases_references.py --official FOLDER     a checkout of Lightricks/LTX-2 at 400fd31

Videos are patterns. The LoRAs have rank 1; some have the references' scale in their headers.
"""

import importlib
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import official_pipelines
import torch
from PIL import Image

import cases_2_5
import models
from cases_decoders import thin
from cases_official import UPSAMPLERS, Model, image, keys, request
from cases_pipeline import _neutral, _request, run_pipeline
from common import FIXTURES, REPOSITORY, randn, show, write_case, write_safetensors

_DISTILLED = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0]
# Frames, height and width of the patterns.
_STRIDES = {"video": (1, 4, 1, 17, 17), "audio": (1, 1, 101)}
SIZES = {"wide": (17, 48, 80), "tall": (12, 70, 50), "mask": (9, 64, 64), "square": (9, 32, 32)}


def frames(name):
    """Returns a pattern of bytes, `[frames, height, width, 3]`."""
    f, y, x, c = torch.meshgrid(*(torch.arange(n) for n in (*SIZES[name], 3)), indexing="ij")
    return ((f * 11 + y * 5 + x * 3 + c * 40 + len(name) * 17) % 256).to(torch.uint8)


def _decoded(path, frame_cap=None, **_):
    return iter(frames(Path(path).name)[:frame_cap].split(1))


def lora(model, scale):
    """Writes a LoRA of rank 1 on two matrices."""
    path = FIXTURES / "lora" / (f"ic_{model}.safetensors" if scale else f"ic_{model}_plain.safetensors")
    weights, tensors = models.load(model, "transformer").state_dict(), {}
    for module in ("transformer_blocks.0.attn1.to_q", "transformer_blocks.1.ff.net.2"):
        rows, columns = weights[f"{module}.weight"].shape
        for matrix, size in (("A", (1, columns)), ("B", (rows, 1))):
            values = randn(5, f"{module}.{matrix}", *size, scale=0.5).to(torch.bfloat16)
            tensors[f"diffusion_model.{module}.lora_{matrix}.weight"] = values
    write_safetensors(path, tensors, {"reference_downscale_factor": scale} if scale else {"format": "pt"})
    return path


class InContext(official_pipelines.Run):
    """A request with reference videos by Lightricks' pipeline."""

    def __init__(self, model, asked, path, sizes):
        self.lora = path
        official_pipelines.PIPELINES["ic_lora"] = ("ic_lora", "ICLoraPipeline")
        super().__init__(model.path, model.upsampler, asked, model.contexts, sizes)

    def _arguments(self, upsampler):
        loader = importlib.import_module("ltx_core.loader")
        own = loader.LoraPathStrengthAndSDOps(str(self.lora), 1.0, loader.LTXV_LORA_COMFY_RENAMING_MAP)
        return {"loras": (own,), "device": torch.device("cpu"), "spatial_upsampler_path": upsampler}

    def __call__(self):
        r, media = self.request, importlib.import_module("ltx_pipelines.iclora_utils")
        images = importlib.import_module("ltx_pipelines.utils.args").ImageConditioningInput
        arguments = {key: r[key] for key in ("prompt", "seed", "height", "width", "num_frames", "frame_rate")}
        arguments["images"] = [images(str(i["path"]), i["frame"], i["strength"], 0) for i in r["images"]]
        arguments["video_conditioning"] = [(v["path"], v["strength"]) for v in r["references"]]
        arguments["conditioning_attention_strength"] = r["attention"]
        with patch.object(media, "decode_video_by_frame", _decoded), patch.object(self.module, "decode_video_by_frame", _decoded):
            if r["mask"]:
                size = dict(height=r["height"] // 2, width=r["width"] // 2, num_frames=r["num_frames"])
                with patch.object(self.module, "get_device", lambda: torch.device("cpu")):
                    arguments["conditioning_attention_mask"] = self.module._load_mask_video(r["mask"], **size)
            self.pipeline(**arguments, tiling_config=None, skip_stage_2=r["skip"])
        return self.steps.passes, self.kept


def references(asked):
    more = {"attention_strength": asked["attention"]} | ({"attention_mask": asked["mask"]} if asked["mask"] else {})
    return [{**video, **more} for video in asked["references"]]


def official(model, case, asked, path):
    asked = request("distilled", **{"attention": 1.0, "mask": None, "skip": False, **asked})
    sizes = model.sizes(asked)[: 1 if asked["skip"] else 2]
    passes, kept = InContext(model, {**asked, "pipeline": "ic_lora"}, path, sizes)()
    outputs = {}
    for prefix, shapes, steps in zip(("", "stage_2."), sizes, passes):
        for step, tokens in enumerate(steps):
            named = model.unpacked(tokens, shapes).items()
            outputs |= {f"{prefix}step_{step}.{name}": value.contiguous() for name, value in named}
    if case == "half":
        outputs |= model.decoded(passes[-1][-1], sizes[-1])
    outputs, kept_of = thin({name: value.contiguous() for name, value in outputs.items()}, _STRIDES, limit=0)
    # The decoder gets the latents of the last step.
    assert torch.equal(kept["video"].flatten(2).transpose(1, 2), passes[-1][-1][0][:, : kept["video"][0, 0].numel()])
    own = [key for key in keys(asked, "official") if not key.startswith("pipeline=")]
    if asked["skip"]:
        own = [key for key in own if not key.startswith(("request.width", "request.height"))]
        own += ["pipeline=text_to_video", f"request.width={asked['width'] // 2}", f"request.height={asked['height'] // 2}"]
    else:
        own.append("pipeline=in_context")
    file = str(path.relative_to(REPOSITORY))
    own.append(f"model.loras=[{{path: {file}}}]")
    write(case, model.name, own, references(asked), outputs, official_pipelines.RELEASE, asked["seed"], kept_of)


def write(case, name, own, videos, outputs, source, seed, more=None):
    scalars = {
        "preset": (official_pipelines.PRESETS | {"tiny_2_5": "ltx2_5"})[name] + ("_distilled" if source else ""), "common": own,
        "keys": {"": []}, "references": videos, "upsampler": UPSAMPLERS.get(name),
    }
    extra = {**({"ltx-pipelines": source} if source else {}), **(more or {})}
    write_case("references", f"{name}_{case}", {}, outputs, script=__file__, model=name, seed=seed, scalars=scalars, extra=extra)
    show(f"references/{name}_{case}: {len(outputs)} tensors", *list(outputs.values())[-2:])


def video(path, strength=1.0):
    return dict(path=path, strength=strength)


def by_lightricks(folder):
    """Writes requests with one and two stages, with reference videos at full and half size, and with attention weights."""
    both = [video("wide"), video("tall", 0.75)]
    half = dict(width=128, height=128, num_frames=9, references=both, skip=True)
    for name in UPSAMPLERS:
        model = Model(name, folder)
        path = lora(name, 2)
        official(model, "half", {**half, "attention": 0.5}, path)
        if name == "tiny_2_3":
            official(model, "mask", {**half, "attention": 0.8, "mask": "mask"}, path)
    model = Model("tiny_a", folder)
    whole = dict(width=128, height=64, num_frames=9, references=[video("wide")], images=[image(0)])
    official(model, "whole", whole, lora("tiny_a", None))


def by_diffusers(name, cases):
    """Writes requests with attention to the reference on and off. diffusers adds -10000 (1 - m), which is off for any other weight.
    LTX-2.5 gets Lightricks' marker of the first frame."""
    from diffusers import LTX2InContextPipeline
    from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition

    guidance = {"video": _neutral(3.0), "audio": _neutral(4.0)}
    asked = _request(width=64, height=64, num_frames=9, steps=2, guidance=guidance)
    parts = models.load_pipeline(name).components
    del parts["duration_head"]
    marks = name == cases_2_5.NAME
    pipeline = LTX2InContextPipeline(**parts)
    pipeline.set_progress_bar_config(disable=True)
    pixels = [Image.fromarray(frame.numpy()) for frame in frames("square")]
    own = [f"request.{key}={asked[key]}" for key in ("prompt", "negative_prompt", "seed", "width", "height", "num_frames")]
    own += [f"request.{key}={asked[key]}" for key in ("frame_rate", "max_sequence_length")]
    own += [f"guidance.{stream}.{key}={value}" for stream, values in guidance.items() for key, value in values.items()]
    own += ["guidance.stg_blocks=[]", "pipeline=text_to_video", "reference=diffusers", "sampler.sigma_shift=official"]
    own += [f"sampler.steps={asked['steps']}", "conditioning.reference_downscale_factor=2"]
    own += ["conditioning.first_frame_marker=official"] if marks else []
    for case, attention in cases.items():
        given = [LTX2ReferenceCondition(pixels), LTX2ReferenceCondition(pixels)]
        seen = []

        def keep(_, step, __, tensors):
            seen.append(tensors["latents"][:, :8].clone())
            return {}

        with cases_2_5.marked(pipeline.transformer) if marks else nullcontext():
            outputs = run_pipeline(
                pipeline, asked, reference_conditions=given, reference_downscale_factor=2, callback_on_step_end=keep,
                conditioning_attention_strength=attention, use_cross_timestep=True,
            )
        vae = pipeline.vae
        step = lambda tokens: tokens.transpose(1, 2).reshape(1, -1, 2, 2, 2) * vae.latents_std.view(1, -1, 1, 1, 1) \
            + vae.latents_mean.view(1, -1, 1, 1, 1)
        kept = {name: outputs[name] for name in ("latents.video", "latents.audio")}
        kept |= {f"step_{at + 1}.latents.video": step(tokens).contiguous() for at, tokens in enumerate(seen[: asked["steps"]])}
        videos = [{**video("square"), "attention_strength": attention}] * 2
        write(case, name, own, videos, kept, None, asked["seed"])


def states():
    """Writes positions, noise levels and attention of Lightricks' conditionings: images before references, weights per token, both
    scales."""
    of = lambda name: importlib.import_module(f"ltx_core.{name}")
    conditioning, shapes = of("conditioning"), of("types")
    shape = shapes.VideoLatentShape(1, 2, 2, 2, 2)
    tools = of("tools").VideoLatentTools(of("components.patchifiers").VideoLatentPatchifier(patch_size=1), shape, 24.0)
    make, weigh = conditioning.VideoConditionByReferenceLatent, conditioning.ConditioningItemAttentionStrengthWrapper
    latents = lambda *size: torch.zeros(1, 2, *size)
    half, by_token = dict(downscale_factor=2), torch.tensor([[0.125, 0.5, 0.75]])
    keyframe = conditioning.VideoConditionByKeyframeIndex(latents(1, 2, 2), 8, 0.5)
    cases = {
        "plain": [make(latents(2, 2, 2), strength=0.75), make(latents(3, 1, 1), **half)],
        "weighed": [
            keyframe, weigh(make(latents(2, 1, 1), **half), 0.5), make(latents(1, 1, 1), **half),
            weigh(make(latents(3, 1, 1), strength=0.25, **half), by_token), weigh(make(latents(1, 1, 1), **half), 0.0),
        ],
        "slow": [make(latents(2, 1, 1), temporal_scale_factor=2, **half), make(latents(3, 2, 2), temporal_scale_factor=4)],
    }
    outputs = {}
    for name, items in cases.items():
        state = tools.create_initial_state("cpu", torch.float32)
        for item in items:
            state = item.apply_to(state, tools)
        own = shape.token_count()
        outputs[f"{name}.positions"] = state.positions[0, :, own:].float().contiguous()
        outputs[f"{name}.levels"] = state.denoise_mask[0, :, 0].contiguous()
        if state.attention_mask is not None:
            outputs[f"{name}.attention"] = state.attention_mask[0].contiguous()
    write_case(
        "reference_states", "states", {}, outputs, script=__file__, model="none", seed=0, extra={"ltx-core": official_pipelines.RELEASE}
    )
    print(f"reference_states: {len(outputs)} tensors")


if __name__ == "__main__":
    official_pipelines.prepare(__doc__, required=True)
    official_pipelines.clear("references", "reference_states")
    with torch.no_grad():
        states()
        by_diffusers("tiny_2_3", {"diffusers": 1.0, "diffusers_off": 0.0})
        by_diffusers(cases_2_5.NAME, {"diffusers": 1.0})
        with tempfile.TemporaryDirectory() as scratch:
            by_lightricks(Path(scratch))
