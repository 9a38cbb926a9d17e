"""Writes LTX-2.5's DFR: two passes that generate keyframes, then temporal rounds, with one noise generator.

`dfr` by diffusers; `dfr_official` by Lightricks' `DFRPipeline`, where `detailing*` have a detailing LoRA.

A line of tests/fixtures/dfr/layout.json has: requested frames, frames of diffusers' canvas, keyframes, and the tiles of two
temporal rounds: first latent frame, end, dropped latent frames, first and last frame, keyframes of the previous round, keyframes
to generate."""

import json
import tempfile
import types
from functools import partial
from pathlib import Path

import official_pipelines
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler, LTX2DFRPipeline, LTX2DFRTemporalRefinePipeline, LTXEulerAncestralRFScheduler,
)
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.dfr_layout import resolve_canvas, temporal_tile_plan
from diffusers.pipelines.ltx2.utils import STAGE_2_DISTILLED_SIGMA_VALUES, trim_canvas

import cases_2_5
import cases_official
import models
import official_file
from cases_by_diffusers import conditions
from cases_text import NEGATIVE, POSITIVE
from common import FIXTURES, REPOSITORY, randomise, write_case
from official_pipelines import call_arguments, ltx


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


def run(request, whole, upsampler, temporal):
    parts = {part: whole.components[part] for part in (*models.PARTS, "text_encoder", "tokenizer")}
    stage = LTX2DFRPipeline(scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=False), **parts)
    ancestral = LTXEulerAncestralRFScheduler(eta=0.5)
    rounds = LTX2DFRTemporalRefinePipeline(scheduler=ancestral, temporal_latent_upsampler=temporal, **parts)
    for pipeline in (stage, rounds):
        pipeline.set_progress_bar_config(disable=True)
    width, height, count, rate = (request[key] for key in ("width", "height", "num_frames", "frame_rate"))
    step = whole.vae_temporal_compression_ratio
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
    canvas = (made.frames.shape[2] - 1) * step + 1
    for number in range(1, request["temporal_rounds"] + 1):
        made = rounds(
            width=width, height=height, latents=made.frames, keyframes_latents=made.keyframes,
            keyframe_positions=made.keyframe_positions, audio_latents=one.audio,
            num_frames=(made.frames.shape[2] - 1) * step + 1, frame_rate=rate * 2 ** (number - 1),
            source_seconds=canvas / rate, condition_num_frames=count, round_index=number, **common,
        )
        out |= {f"round_{number}.latents.video": made.frames, f"round_{number}.keyframes": made.keyframes}
    scale = 2 ** request["temporal_rounds"]
    frames = (count - 1) * scale + 1
    out |= models.decoded(whole, trim_canvas(made.frames, frames, step), one.audio)
    length = round(frames / (rate * scale) * whole.vocoder.config.output_sampling_rate)
    return out | {"audio": out["audio"][..., :length]}


_COMMON = dict(
    prompt=POSITIVE, negative_prompt=NEGATIVE, width=128, height=64, num_frames=41, frame_rate=24.0, max_sequence_length=64,
    temporal_rounds=1, seed=7,
)
_CASES = {
    "diffusers": dict(_COMMON, reference="diffusers"),
    "images": dict(
        _COMMON, reference="diffusers", num_frames=17, frame_rate=32.0, temporal_rounds=2, seed=9,
        images=[dict(name="frame.png", frame=0, strength=0.9), dict(name="shapes.png", frame=9, strength=0.6)],
    ),
}
_LORA = dict(path="tests/fixtures/lora/ic_tiny_2_5.safetensors", strength=0.7)
_OFFICIAL = {
    "official": dict(_COMMON, reference="official", seed=8),
    "detailing": dict(_COMMON, reference="official", seed=11, temporal_rounds=0, detailing_lora=_LORA),
    "detailing_rounds": dict(_CASES["images"], reference="official", seed=10, detailing_lora=_LORA),
}


def dfr():
    whole, upsampler = models.load_pipeline(cases_2_5.NAME), models.load("upsampler_plain", "latent_upsampler")
    config = models.config("dfr_temporal", "temporal_latent_upsampler")
    temporal = randomise(LTX2LatentUpsamplerModel(**config), "dfr_temporal")
    for case, request in _CASES.items():
        outputs = {name: value.float() for name, value in run(request, whole, upsampler, temporal).items()}
        strides = {"video": (1, 16, 1, 9, 9), "audio": (1, 1, 211)}
        write_case("dfr", case, {}, outputs, model=cases_2_5.NAME, seed=request["seed"], scalars=request, strides=strides)


class Dfr(official_pipelines.Run):
    def _arguments(self, upsampler):
        loader, temporal = ltx("core.loader"), Path(upsampler).with_name("temporal.safetensors")
        config = models.config("dfr_temporal", "temporal_latent_upsampler")
        network = randomise(LTX2LatentUpsamplerModel(**config), "dfr_temporal")
        official_file.write(temporal, network.state_dict(), official_file.upsampler_header(config))
        self.stages, self.stitched, self.carried = [], [], []
        loop = ltx("pipelines.utils.samplers").euler_ancestral_denoising_loop
        self.module.euler_ancestral_denoising_loop = partial(loop, model_dtype=torch.float32)

        def keep(owner, name, target):
            call = getattr(owner, name)
            setattr(owner, name, lambda *a, **k: target.append(made := call(*a, **k)) or made)

        keep(ltx("pipelines.utils.blocks").DiffusionStage, "__call__", self.stages)
        keep(self.module, "stitch_tile_latents", self.stitched)
        keep(self.module, "_merge_carry_forward_keyframes", self.carried)
        own, names = self.request.get("detailing_lora"), loader.LTXV_LORA_COMFY_RENAMING_MAP
        lora = [loader.LoraPathStrengthAndSDOps(str(REPOSITORY / own["path"]), own["strength"], names)] if own else []
        files = dict(spatial_upsampler_path=upsampler, temporal_upsampler_path=str(temporal), detailing_lora=lora)
        return dict(files, distilled_lora=[], loras=[], device=torch.device("cpu"))

    def __call__(self):
        """Returns pairs of normalised video and audio latents by pass, with keyframes in the place of the video."""
        silence = ltx("core.types").Audio(torch.zeros(2, 1), 1)
        self.pipeline.audio_decoder = lambda latents: self._keep("audio", latents) or silence
        rounds = self.request["temporal_rounds"]
        self.pipeline(**call_arguments(self.request), temporal_upsample_rounds=rounds, tiling_config=None)
        both = {f"stage_{n}.": (own.latent, own.generated_keyframes) for n, (own, _) in enumerate(self.stages[:2], 1)}
        both |= {f"round_{n}.": (x, own) for n, (x, (_, own)) in enumerate(zip(self.stitched, self.carried, strict=True), 1)}
        made = {f"{name}{kind}": x for name, pair in both.items() for kind, x in zip(("", "keyframes"), pair)}
        return made | {"": self.kept["video"]}, self.kept["audio"]


def dfr_official():
    official_pipelines.Noise = lambda _: types.SimpleNamespace(randn=torch.randn)
    cases_official.UPSAMPLERS[cases_2_5.NAME] = "upsampler_plain"
    with tempfile.TemporaryDirectory() as scratch:
        model = cases_official.Model(cases_2_5.NAME, Path(scratch))
        for case, request in _OFFICIAL.items():
            images = [dict(own, path=FIXTURES / "images" / own["name"]) for own in request.get("images", [])]
            asked, outputs = dict(request, pipeline="dfr", images=images, cross_timestep=None, audio=None), {}
            made, audio = Dfr(model.path, model.upsampler, asked, model.contexts, [])()
            for name, video in made.items():
                tokens = [x.transpose(1, 2).flatten(2) if x is audio else x.flatten(2).transpose(1, 2) for x in (video, audio)]
                own = model.unpacked(tokens, (video.shape, audio.shape))
                outputs[name if name.endswith("keyframes") else f"{name}latents.video"] = own["latents.video"]
            outputs["latents.audio"] = own["latents.audio"]
            extra = {"ltx-pipelines": official_pipelines.release()}
            write_case("dfr", case, {}, outputs, model=cases_2_5.NAME, seed=request["seed"], scalars=request, extra=extra)
