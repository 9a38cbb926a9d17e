"""Writes requests with reference videos by Lightricks' `ICLoraPipeline` and diffusers, and states of Lightricks' conditionings.

Videos are patterns. The LoRAs have rank 1; `ic_tiny_a` and `ic_tiny_2_3` have the references' scale 2 in their headers."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import official_pipelines
import torch
from diffusers import LTX2InContextPipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from official_pipelines import call_arguments, ltx
from PIL import Image

import cases_2_5
import models
from cases_by_diffusers import keys_of
from cases_given_video import samples
from cases_official import UPSAMPLERS, Model, image, keys, request
from cases_pipeline import request_of, run_pipeline, scales
from common import FIXTURES, REPOSITORY, pattern, write_case

write_file = partial(write_case, strides={"video": (1, 4, 1, 17, 17), "audio": (1, 1, 101)}, limit=0)
# Frames, height and width of the patterns.
SIZES = {"wide": (17, 48, 80), "tall": (12, 70, 50), "mask": (9, 64, 64), "square": (9, 32, 32)}


def frames(path):
    name = Path(path).name
    return pattern(*SIZES[name], offset=len(name) * 17)


def by_frame(path, frame_cap=None, **_):
    return iter(frames(path)[:frame_cap].split(1))


class InContext(official_pipelines.Run):
    name = "ic_lora"

    def __init__(self, model, asked, path, sizes):
        self.lora = path
        super().__init__(model.path, model.upsampler, {**asked, "pipeline": self.name}, model.contexts, sizes)

    def _arguments(self, upsampler):
        loader = ltx("core.loader")
        own = loader.LoraPathStrengthAndSDOps(str(self.lora), 1.0, loader.LTXV_LORA_COMFY_RENAMING_MAP)
        return {"loras": (own,), "device": torch.device("cpu"), "spatial_upsampler_path": upsampler}

    def __call__(self):
        r, arguments, read = self.request, call_arguments(self.request), {"decode_video_by_frame": by_frame}
        arguments |= dict(conditioning_attention_strength=r["attention"], skip_stage_2=r["skip"], tiling_config=None)
        arguments["video_conditioning"] = [(v["path"], v["strength"]) for v in r["references"]]
        with patch.multiple(ltx("pipelines.iclora_utils"), **read), patch.multiple(self.module, **read):
            if r["mask"]:
                size = dict(height=r["height"] // 2, width=r["width"] // 2, num_frames=r["num_frames"])
                with patch.object(self.module, "get_device", lambda: torch.device("cpu")):
                    arguments["conditioning_attention_mask"] = self.module._load_mask_video(r["mask"], **size)
            self.pipeline(**arguments)
        return self.passes, self.kept


def video(path, strength=1.0):
    return dict(path=path, strength=strength)


def write(case, name, own, videos, outputs, seed, kind="", **extra):
    scalars = {
        "preset": {**official_pipelines.PRESETS, "tiny_2_5": "ltx2_5"}[name] + kind, "common": own, "keys": {"": []},
        "references": videos, "upsampler": UPSAMPLERS.get(name),
    }
    write_file("references", f"{name}_{case}", {}, outputs, model=name, seed=seed, scalars=scalars, extra=extra)


def official(model, case, asked, path):
    asked = request("distilled", **{"attention": 1.0, "mask": None, "skip": False, **asked})
    sizes = model.sizes(asked)[: 1 if asked["skip"] else 2]
    passes, kept = InContext(model, asked, path, sizes)()
    outputs = model.steps(passes, sizes)
    if case == "half":
        outputs |= model.decoded(passes[-1][-1], sizes[-1])
    # The decoder gets the latents of the last step.
    assert torch.equal(kept["video"].flatten(2).transpose(1, 2), passes[-1][-1][0][:, : kept["video"][0, 0].numel()])
    own = keys(asked, "official", ("pipeline", "request.width", "request.height") if asked["skip"] else "pipeline")
    own.append("pipeline=text_to_video" if asked["skip"] else "pipeline=in_context")
    own += [f"request.{side}={asked[side] // 2}" for side in ("width", "height") if asked["skip"]]
    own.append(f"model.loras=[{{path: {path.relative_to(REPOSITORY)}}}]")
    more = {"attention_strength": asked["attention"]} | ({"attention_mask": asked["mask"]} if asked["mask"] else {})
    videos, release = [video | more for video in asked["references"]], {"ltx-pipelines": official_pipelines.release()}
    write(case, model.name, own, videos, outputs, asked["seed"], "_distilled", **release)


def by_lightricks():
    """Writes requests with one and two stages, with reference videos at full and half size, and with attention weights."""
    half = dict(width=128, height=128, num_frames=9, references=[video("wide"), video("tall", 0.75)], skip=True)
    for model in official_pipelines.each_model(Model):
        path = FIXTURES / "lora" / f"ic_{model.name}.safetensors"
        official(model, "half", {**half, "attention": 0.5}, path)
        if model.name == "tiny_2_3":
            official(model, "mask", {**half, "attention": 0.8, "mask": "mask"}, path)
        else:
            whole = dict(width=128, height=64, num_frames=9, references=[video("wide")], images=[image(0)])
            official(model, "whole", whole, path.with_stem("ic_tiny_a_plain"))


def by_diffusers(name, case, attention):
    """Writes a request with attention to the reference on or off. diffusers adds -10000 (1 - m), which is off for any other
    weight. LTX-2.5 gets Lightricks' marker of the first frame."""
    asked = request_of(width=64, height=64, guidance={"video": scales(3.0), "audio": scales(4.0)})
    marks, pipeline = name == cases_2_5.NAME, models.load_pipeline(name, kind=LTX2InContextPipeline)
    own = [*keys_of(asked), "pipeline=text_to_video", "reference=diffusers", "sampler.sigma_shift=official"]
    own += [f"sampler.steps={asked['steps']}", "conditioning.reference_downscale_factor=2"]
    own += ["conditioning.first_frame_marker=official"] if marks else []
    given, seen = [LTX2ReferenceCondition([Image.fromarray(frame.numpy()) for frame in frames("square")])] * 2, []

    def keep(_, step, __, tensors):
        seen.append(tensors["latents"][:, :8].clone())
        return {}

    with cases_2_5.marked(pipeline.transformer) if marks else nullcontext():
        more = dict(callback_on_step_end=keep, conditioning_attention_strength=attention, use_cross_timestep=True)
        outputs = run_pipeline(pipeline, asked, reference_conditions=given, reference_downscale_factor=2, **more)
    mean, std = (tensor.view(1, -1, 1, 1, 1) for tensor in (pipeline.vae.latents_mean, pipeline.vae.latents_std))
    kept = {key: outputs[key] for key in ("latents.video", "latents.audio")}
    for step, tokens in enumerate(seen[: asked["steps"]], 1):
        kept[f"step_{step}.latents.video"] = tokens.transpose(1, 2).reshape(1, -1, 2, 2, 2) * std + mean
    write(case, name, own, [{**video("square"), "attention_strength": attention}] * 2, kept, asked["seed"])


class DubIt(InContext):
    name = "dub_it"

    def _arguments(self, upsampler):
        (lora,) = (arguments := super()._arguments(upsampler)).pop("loras")
        return {**arguments, "ic_lora": lora}

    def __call__(self):
        sound = ltx("core.types").Audio(samples(), 16000)
        shape = ltx("core.types").VideoPixelShape(1, *SIZES["tall"], 24.0)
        arguments = {key: own for key, own in call_arguments(self.request).items() if key not in ("num_frames", "frame_rate")}
        media = dict(get_videostream_metadata=lambda *_: shape, decode_audio_from_file=lambda *_: sound)
        with patch.multiple(self.module, **media), patch.object(ltx("pipelines.iclora_utils"), "decode_video_by_frame", by_frame):
            strength = self.request["strength"]
            self.pipeline(**arguments, reference_video_path="tall", reference_strength=strength, tiling_config=None)
        return self.passes, self.kept


def dub_it():
    """Writes requests of `DubItPipeline`. The video has 12 frames, of which 9 are used, and longer sound."""
    for model in official_pipelines.each_model(Model):
        asked = request("distilled", strength=0.75, images=[image(0)] if model.name == "tiny_a" else [])
        path, sizes = FIXTURES / "lora" / f"ic_{model.name}_plain.safetensors", model.sizes(asked)
        passes, kept = DubIt(model, asked, path, sizes)()
        outputs = model.steps(passes, sizes) | model.unpacked(passes[-1][-1], sizes[-1])
        assert torch.equal(kept["audio"].transpose(1, 2).flatten(2), passes[0][-1][1][:, : sizes[0][1][2]])
        own = keys(asked, "official", ("pipeline", "request.num_frames", "request.frame_rate"))
        own += ["pipeline=dub_it", "request.dub.strength=0.75", f"model.loras=[{{path: {path.relative_to(REPOSITORY)}}}]"]
        scalars = {"preset": official_pipelines.PRESETS[model.name] + "_distilled", "common": own, "upsampler": UPSAMPLERS[model.name]}
        release = {"ltx-pipelines": official_pipelines.release()}
        write_file("dub_it", model.name, {}, outputs, model=model.name, seed=asked["seed"], scalars=scalars, extra=release)


def reference_states():
    """Writes positions, noise levels and attention of Lightricks' conditionings: images before references, weights per token,
    both scales."""
    conditioning, shape = ltx("core.conditioning"), ltx("core.types").VideoLatentShape(1, 2, 2, 2, 2)
    patchifier = ltx("core.components.patchifiers").VideoLatentPatchifier(patch_size=1)
    tools = ltx("core.tools").VideoLatentTools(patchifier, shape, 24.0)
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
        outputs |= {f"{name}.positions": state.positions[0, :, own:].float(), f"{name}.levels": state.denoise_mask[0, :, 0]}
        if state.attention_mask is not None:
            outputs[f"{name}.attention"] = state.attention_mask[0]
    write_file("reference_states", "states", {}, outputs, extra={"ltx-core": official_pipelines.release()})


def references():
    by_diffusers("tiny_2_3", "diffusers", 1.0)
    by_diffusers("tiny_2_3", "diffusers_off", 0.0)
    by_diffusers(cases_2_5.NAME, "diffusers", 1.0)
    by_lightricks()
