"""Writes sampling (sigmas, noise, guidance, Euler) and text-to-video requests."""

import json
import math
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift, rescale_noise_cfg
from torch.nn.attention import SDPBackend, sdpa_kernel

import models
from cases_decoders import STRIDES, thin
from cases_text import NEGATIVE, POSITIVE, tokenize
from common import as_list, generator, randn, relative_l2, show, write_case


def official_sigmas(steps, tokens=4096, base=0.95, largest=2.05, terminal=0.1):
    """Returns the official schedule: `steps + 1` values, shifted for 4096 tokens, ending with 0.1 and 0."""
    shift = math.exp(base + (largest - base) / (4096 - 1024) * (tokens - 1024))
    sigmas = torch.linspace(1.0, 0.0, steps + 1)
    sigmas = torch.where(sigmas != 0, shift / (shift + (1 / sigmas - 1)), torch.zeros(()))
    rest = 1 - sigmas[:-1]
    sigmas[:-1] = 1 - rest / (rest[-1] / (1 - terminal))
    return sigmas


def verbatim_scheduler():
    """Returns a scheduler that does not change its sigmas."""
    return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=False, shift=1.0, shift_terminal=None)


def _scheduler_sigmas(scheduler, steps, tokens):
    config = scheduler.config
    mu = calculate_shift(tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
    scheduler.set_timesteps(steps, sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return scheduler.sigmas.clone(), scheduler.timesteps.clone()


def sigmas():
    """Writes schedules of both conventions."""
    for name in ("tiny_a", "tiny_b"):
        scheduler = FlowMatchEulerDiscreteScheduler(**models.SCHEDULER[name])
        for steps, tokens in ((2, 6), (3, 12), (8, 6144), (30, 15360), (40, 4096)):
            values, timesteps = _scheduler_sigmas(scheduler, steps, tokens)
            write_case(
                "sigmas", f"diffusers_{name}_{steps}_{tokens}", {}, {"sigmas": values, "timesteps": timesteps},
                script=__file__, model=name, seed=0, scalars={"steps": steps, "tokens": tokens, "sigma_shift": "diffusers"},
            )
    for steps, tokens in ((2, 4096), (3, 4096), (8, 4096), (30, 4096), (40, 4096), (15, 8160)):
        write_case(
            "sigmas", f"official_{steps}_{tokens}", {}, {"sigmas": official_sigmas(steps, tokens)}, script=__file__,
            model="none", seed=0, scalars={"steps": steps, "tokens": tokens, "sigma_shift": "official"},
        )
    print("sigmas: 16 schedules")


def noise():
    """Writes consecutive draws of one generator; sizes select different algorithms."""
    shapes = [(1,), (5,), (15,), (16,), (17,), (31, 3), (1, 8, 2, 2, 3), (1, 2, 9, 2), (7,), (1, 6, 3, 2, 4), (333,)]
    for seed in (0, 10, 2**40 + 3):
        source = torch.Generator("cpu").manual_seed(seed)
        outputs = {f"draw{index}": torch.randn(shape, generator=source) for index, shape in enumerate(shapes)}
        write_case(
            "noise", f"seed_{seed}", {}, outputs, script=__file__, model="none", seed=seed,
            scalars={"shapes": shapes, "seed": seed},
        )
    print(f"noise: {len(shapes)} draws of 3 seeds")


def guide(latents, sigma, cond, uncond, perturbed, isolated, scales):
    """Applies guidance to x0 like the pipeline; returns the guided x0 and the velocity."""
    x0 = {k: latents - v * sigma for k, v in dict(c=cond, u=uncond, p=perturbed, m=isolated).items()}
    guided = x0["c"] + (scales["cfg"] - 1) * (x0["c"] - x0["u"])
    guided = guided + scales["stg"] * (x0["c"] - x0["p"]) + (scales["modality"] - 1) * (x0["c"] - x0["m"])
    if scales["rescale"] > 0:
        guided = rescale_noise_cfg(guided, x0["c"], guidance_rescale=scales["rescale"])
    return guided, (latents - guided) / sigma


def guidance():
    """Writes guided Euler steps. Rescaling is per sample."""
    table = {
        "cfg": dict(cfg=4.0, stg=0.0, modality=1.0, rescale=0.0),
        "cfg_rescale": dict(cfg=3.0, stg=0.0, modality=1.0, rescale=0.7),
        "full": dict(cfg=7.0, stg=1.0, modality=3.0, rescale=0.7),
        "neutral": dict(cfg=1.0, stg=0.0, modality=1.0, rescale=0.0),
    }
    scheduler = verbatim_scheduler()
    scheduler.set_timesteps(3, sigmas=official_sigmas(3)[:-1].numpy())
    for seed, (case, scales) in enumerate(table.items()):
        shape, step = (2, 11, 5), 1
        names = ("latents", "cond", "uncond", "perturbed", "isolated")
        inputs = {key: randn(seed, key, *shape, scale=1.0 + 0.3 * i) for i, key in enumerate(names)}
        inputs["sigma"], inputs["sigma_next"] = scheduler.sigmas[step], scheduler.sigmas[step + 1]
        x0, velocity = guide(
            inputs["latents"], inputs["sigma"], *(inputs[k] for k in names[1:]), scales
        )
        scheduler.set_begin_index(step)
        scheduler._step_index = None
        following = scheduler.step(velocity, scheduler.timesteps[step], inputs["latents"], return_dict=False)[0]
        write_case(
            "guidance", case, inputs, {"x0": x0, "velocity": velocity, "latents": following}, script=__file__, model="none",
            seed=seed, scalars=scales,
        )
    print(f"guidance: {', '.join(table)}")


def noise_shapes(pipeline, request):
    """Returns the latent shapes of video and audio."""
    frames = (request["num_frames"] - 1) // pipeline.vae_temporal_compression_ratio + 1
    ratio = pipeline.vae_spatial_compression_ratio
    video = (1, pipeline.transformer.config.in_channels, frames, request["height"] // ratio, request["width"] // ratio)
    rate = pipeline.audio_sampling_rate / pipeline.audio_hop_length / pipeline.audio_vae_temporal_compression_ratio
    length = round(request["num_frames"] / request["frame_rate"] * rate)
    config = pipeline.audio_vae.config
    return video, (1, config.latent_channels, length, config.mel_bins // pipeline.audio_vae_mel_compression_ratio)


def draw_noise(pipeline, request):
    """Returns the noise that the pipeline will draw: video, then audio, float32."""
    source = torch.Generator("cpu").manual_seed(request["seed"])
    video, audio = noise_shapes(pipeline, request)
    return torch.randn(video, generator=source), torch.randn(audio, generator=source)


def run_pipeline(pipeline, request, **more):
    """Runs the pipeline twice: for latents, and for frames and samples."""
    guidance_values = request["guidance"]
    arguments = dict(
        prompt=request["prompt"], negative_prompt=request["negative_prompt"], width=request["width"],
        height=request["height"], num_frames=request["num_frames"], frame_rate=request["frame_rate"],
        num_inference_steps=request["steps"], max_sequence_length=request["max_sequence_length"], return_dict=False,
        spatio_temporal_guidance_blocks=request.get("stg_blocks") or None, **more,
    )
    for prefix, stream in (("", "video"), ("audio_", "audio")):
        scales = guidance_values[stream]
        arguments[f"{prefix}guidance_scale"] = scales["cfg"]
        arguments[f"{prefix}stg_scale"] = scales["stg"]
        arguments[f"{prefix}modality_scale"] = scales["modality"]
        arguments[f"{prefix}guidance_rescale"] = scales["rescale"]
    if request["sigma_shift"] == "official":
        pipeline.scheduler = verbatim_scheduler()
        arguments["sigmas"] = as_list(official_sigmas(request["steps"])[:-1])

    def call(kind):
        source = torch.Generator("cpu").manual_seed(request["seed"])
        return pipeline(generator=source, output_type=kind, **arguments)

    latents, audio_latents = call("latent")
    used = pipeline.scheduler.sigmas.clone()
    video, audio = call("pt")
    return {
        "latents.video": latents.float(), "latents.audio": audio_latents.float(), "video": video.float(),
        "audio": audio.float(), "sigmas": used,
    }


def _neutral(cfg=1.0, **more):
    return dict(dict(cfg=cfg, stg=0.0, modality=1.0, rescale=0.0), **more)


def _request(**more):
    request = dict(
        prompt=POSITIVE, negative_prompt=NEGATIVE, frame_rate=24.0, seed=10, max_sequence_length=64,
        guidance={"video": _neutral(4.0), "audio": _neutral(4.0)}, sigma_shift="official",
    )
    request.update(more)
    return request


_NAMES = ("latents.video", "latents.audio", "video", "audio")
_PLAIN = {"video": _neutral(), "audio": _neutral()}
_CASES = {
    "tiny_a_cfg": (
        "tiny_a",
        _request(width=96, height=64, num_frames=9, steps=3, guidance={"video": _neutral(4.0), "audio": _neutral(3.0)}),
    ),
    "tiny_a_plain": ("tiny_a", _request(width=64, height=96, num_frames=1, steps=2, frame_rate=4.0, seed=3, guidance=_PLAIN)),
    "tiny_a_diffusers": ("tiny_a", _request(width=64, height=96, num_frames=17, steps=2, sigma_shift="diffusers")),
    "tiny_a_guided": (
        "tiny_a",
        _request(
            width=96, height=64, num_frames=9, steps=2, seed=5,
            guidance={"video": _neutral(3.0, modality=3.0, rescale=0.7), "audio": _neutral(7.0, modality=2.0, rescale=0.4)},
        ),
    ),
    "tiny_2_3_cfg": ("tiny_2_3", _request(width=96, height=64, num_frames=9, steps=3)),
    "tiny_2_3_guided": (
        "tiny_2_3",
        _request(
            width=64, height=64, num_frames=9, steps=2, seed=5, stg_blocks=[1],
            guidance={
                "video": _neutral(3.0, stg=1.0, modality=3.0, rescale=0.7),
                "audio": _neutral(7.0, stg=1.0, modality=3.0, rescale=0.7),
            },
        ),
    ),
    "tiny_b_cfg": (
        "tiny_b", _request(width=64, height=32, num_frames=5, steps=2, frame_rate=12.0, max_sequence_length=48)
    ),
    "tiny_b_plain": (
        "tiny_b",
        _request(
            width=32, height=64, num_frames=17, steps=3, frame_rate=30.0, seed=2**33 + 1, max_sequence_length=52,
            guidance=_PLAIN, sigma_shift="diffusers",
        ),
    ),
}


# One case per model keeps all rows and columns.
_WHOLE = {
    "tiny_a_plain": {}, "tiny_b_cfg": {"video": (1, 2, 1, 1, 1)},
    "tiny_2_3_guided": {"video": (1, 8, 1, 1, 1), "audio": STRIDES["audio"]},
}
_ROUNDINGS = 6


def shifted(tensor, turn):
    """Changes a tensor by up to a quarter of bfloat16's precision."""
    return tensor * (1 + 2.0**-9 * (torch.rand(tensor.shape, generator=generator(turn, "rounding")) - 0.5))


@contextmanager
def rounded_otherwise(turn):
    """Runs the body with another attention kernel and slightly changed noise, which changes the rounding."""
    draw = torch.randn
    kernel = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)[turn % 2]
    with patch("torch.randn", lambda *shape, **more: shifted(draw(*shape, **more), turn)), sdpa_kernel(kernel):
        yield


def spreads(name, request, outputs, strides):
    """Returns mean and relative maximum of the distances of bfloat16 runs from the float32 run."""
    half, distances = models.load_pipeline(name, torch.bfloat16), {k: [] for k in _NAMES}
    for turn in range(_ROUNDINGS):
        with rounded_otherwise(turn):
            run = run_pipeline(half, request)
        for k, found in distances.items():
            (own,), (wide,) = (thin({k: each[k]}, strides)[0].values() for each in (run, outputs))
            found.append(relative_l2(own, wide))
    means = {k: sum(found) / len(found) for k, found in distances.items()}
    largest = {f"bf16_largest.{k}": f"{max(distances[k]) / mean:.3f}" for k, mean in means.items()}
    return largest | {f"bf16_spread.{k}": f"{mean:.6f}" for k, mean in means.items()}


def pipeline():
    """Writes complete requests with the spread of the reference's bfloat16 runs."""
    for case, (name, request) in _CASES.items():
        whole = models.load_pipeline(name)
        noise_video, noise_audio = draw_noise(whole, request)
        outputs = run_pipeline(whole, request)
        strides = _WHOLE.get(case, STRIDES)
        spread = spreads(name, request, outputs, strides)
        _, mask = tokenize(name, [request["prompt"]], request["max_sequence_length"])
        outputs |= {"noise.video": noise_video, "noise.audio": noise_audio, "attention_mask": mask}
        kept, extra = thin(outputs, strides)
        write_case(
            "pipeline", case, {}, kept, script=__file__, model=name, seed=request["seed"], scalars=request,
            extra={**extra, **spread},
        )
        show(f"pipeline/{case} {json.dumps(spread)}", *(outputs[k] for k in _NAMES))


COMPONENTS = {"sigmas": sigmas, "noise": noise, "guidance": guidance, "pipeline": pipeline}
