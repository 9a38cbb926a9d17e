"""Writes requests of LTX-2.5 in one and two passes."""

from contextlib import nullcontext
from unittest.mock import patch

import torch
from diffusers import (
    LTX2DFRPipeline, LTX2LatentUpsamplePipeline, LTX2VideoDiffusionDecodePipeline, LTXEulerAncestralRFScheduler,
)
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES

import cases_diffusion_decoder
import cases_upsampling
import models
from cases_pipeline import FULL, PLAIN, arguments_of, noise_shapes, official_sigmas, verbatim_scheduler
from cases_text import NEGATIVE, POSITIVE
from common import randomise, write_case
from models import decoded

NAME = "tiny_2_5"


def marked(network):
    """Makes the transformer mark the tokens of the first latent frame, like Lightricks' pipelines."""
    own = network.forward

    def forward(hidden_states, *rest, height, width, **more):
        mask = torch.zeros(*hidden_states.shape[:2], 1)
        mask[:, : height * width] = 1
        return own(hidden_states, *rest, height=height, width=width, video_keyframes_mask=mask, **more)

    return patch.object(network, "forward", forward)


def ancestral(source):
    class Drawn(LTXEulerAncestralRFScheduler):
        def set_timesteps(self, sigmas, device=None, mu=None):
            super().set_timesteps(sigmas=sigmas, device=device)

        def step(self, model_output, timestep, sample, return_dict=True):
            return super().step(model_output, timestep, sample, generator=source, return_dict=return_dict)

    return Drawn(eta=1.0)


def run(pipeline, asked, source, sigmas, divisor=1, **more):
    size = {side: int(asked[side] / divisor) for side in ("width", "height")}
    return pipeline(generator=source, output_type="latent", **size, **arguments_of(asked, sigmas=sigmas, **more))


def _one_pass(pipeline, asked, source, decode=decoded):
    pipeline.scheduler = verbatim_scheduler()
    return decode(pipeline, *run(pipeline, asked, source, official_sigmas(asked["steps"])[:-1].tolist()))


def diffusion_decoder():
    decoder = cases_diffusion_decoder.decoder("diffusion_d")
    decoder.latents_mean.copy_(torch.tensor([0.25, -0.5]))
    decoder.latents_std.copy_(torch.tensor([1.5, 0.75]))
    return decoder


def _by_diffusion(pipeline, asked, source):
    """Runs one pass and decodes by diffusion, whole or in tiles, with noise of the same generator."""
    decoder = diffusion_decoder()
    if tiling := asked.get("tiling"):
        pixels, frames = (tiling["pixels"], tiling["overlap"]), (tiling["frames"], tiling["frame_overlap"])
        sizes = dict(height=pixels, width=pixels, num_frames=frames)
        tiles = {f"tile_sample_min_{axis}": size for axis, (size, _) in sizes.items()}
        tiles |= {f"tile_sample_stride_{axis}": size - overlap for axis, (size, overlap) in sizes.items()}
        decoder.enable_tiling(**tiles)
    return _one_pass(pipeline, asked, source, lambda _, video, __: decode_by_diffusion(pipeline, decoder, video, source))


def _normalised(pipeline, video):
    vae = pipeline.vae
    return pipeline._normalize_latents(video, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)


def decode_by_diffusion(pipeline, decoder, video, source):
    decode = LTX2VideoDiffusionDecodePipeline(diffusion_decoder=decoder, scheduler=pipeline.scheduler)
    frames = decode(_normalised(pipeline, video), generator=source, output_type="pt", return_dict=False)[0]
    return {"latents.video": video, "video": frames}


def upsampled(pipeline, video, network=None):
    upsample = LTX2LatentUpsamplePipeline(pipeline.vae, network or models.load("upsampler_plain", "latent_upsampler"))
    return upsample(latents=video, output_type="latent", return_dict=False)[0]


def _two_passes(pipeline, asked, source):
    """Runs eight ancestral steps at a half or two thirds of the size, then three Euler steps at full size."""
    config, seed = asked.get("upsampler", (None, None))
    network = config and randomise(LTX2LatentUpsamplerModel(**config), seed)
    # Seeded like Lightricks' loop.
    pipeline.scheduler = ancestral(torch.Generator("cpu").manual_seed(asked["seed"] + 10_000))
    video, audio = run(pipeline, asked, source, [*DISTILLED_SIGMA_VALUES, 0.0], 1.5 if network else 2)
    outputs = {"stage_1.latents.video": video, "stage_1.latents.audio": audio}
    level, statistics = asked["refine_sigmas"][0], (pipeline.audio_vae.latents_mean, pipeline.audio_vae.latents_std)
    larger = _normalised(pipeline, upsampled(pipeline, video, network))
    noises = [torch.randn(shape, generator=source) for shape in noise_shapes(pipeline, asked)]
    packed = pipeline._pack_latents(level * noises[0] + (1 - level) * larger)
    sound = pipeline._normalize_audio_latents(pipeline._pack_audio_latents(audio), *statistics)
    sound = level * pipeline._pack_audio_latents(noises[1]) + (1 - level) * sound
    sound = pipeline._denormalize_audio_latents(sound, *statistics)
    pipeline.scheduler = verbatim_scheduler()
    second = run(pipeline, asked, source, asked["refine_sigmas"][:-1], latents=packed, audio_latents=sound)
    return outputs | decoded(pipeline, *second)


def two_passes_by_itself(pipeline, asked, source, sigmas=None, **more):
    """Runs two passes like diffusers' documentation, whose pipeline draws the second pass's noise; without `sigmas` of both
    passes, in plain steps."""
    first, second = sigmas or (DISTILLED_SIGMA_VALUES, asked["refine_sigmas"][:-1])
    video, audio = run(pipeline, asked, source, first, 2, **more)
    outputs = {"stage_1.latents.video": video, "stage_1.latents.audio": audio}
    if not sigmas:
        pipeline.scheduler = verbatim_scheduler()
    given = dict(latents=upsampled(pipeline, video), audio_latents=audio, noise_scale=second[0], **more)
    video, audio = run(pipeline, asked, source, second, **given)
    return outputs | {"latents.video": video, "latents.audio": audio}


def _beside_a_generated_frame(_, asked, source):
    """Runs one pass by `LTX2DFRPipeline`, which generates a keyframe at frame 24."""
    keys = ("prompt", "width", "height", "num_frames", "frame_rate", "max_sequence_length")
    whole = models.load_pipeline(NAME, kind=LTX2DFRPipeline, scheduler=verbatim_scheduler())
    made = whole(**{key: asked[key] for key in keys}, output_type="latent", generator=source)
    assert list(made.keyframe_positions) == [asked["num_frames"] - 1]
    return {"latents.video": made.frames, "latents.audio": made.audio}


_COMMON = dict(
    prompt=POSITIVE, negative_prompt=NEGATIVE, num_frames=9, frame_rate=24.0, max_sequence_length=64, width=64, height=64, seed=7,
    guidance=PLAIN,
)
_GUIDED = dict(_COMMON, steps=3, seed=10, stg_blocks=[1], guidance=FULL)
DISTILLED = dict(_COMMON, width=128, refine_sigmas=[0.909375, 0.725, 0.421875, 0.0])
_X1_5 = dict(DISTILLED, width=96, height=96, upsampler=cases_upsampling.upsampler("tiny_2_3", "spatial_x1_5"))
# Request, how to run it, and whether diffusers marks frames by itself.
_CASES = {
    "guided": (_GUIDED, _one_pass, False),
    "decoded": (_GUIDED, _by_diffusion, False),
    "decoded_tiled": (dict(_GUIDED, tiling=dict(pixels=32, overlap=8, frames=6, frame_overlap=2)), _by_diffusion, False),
    "distilled": (DISTILLED, _two_passes, False),
    "distilled_x1_5": (_X1_5, _two_passes, False),
    "distilled_by_diffusers": (DISTILLED, two_passes_by_itself, True),
    "generated_frame": (dict(_COMMON, num_frames=25), _beside_a_generated_frame, True),
}


def pipeline_2_5():
    for case, (asked, make, marks) in _CASES.items():
        whole, source = models.load_pipeline(NAME), torch.Generator("cpu").manual_seed(asked["seed"])
        with nullcontext() if marks else marked(whole.transformer):
            outputs = {key: value.float() for key, value in make(whole, asked, source).items()}
        strides = {"video": (1, 4, 1, 9, 9), "audio": (1, 1, 53)}
        write_case("pipeline_2_5", case, {}, outputs, model=NAME, seed=asked["seed"], scalars=asked, strides=strides)
