"""Writes guided Euler steps and text-to-video requests."""

from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift, rescale_noise_cfg
from torch.nn.attention import SDPBackend, sdpa_kernel

import models
from cases_text import NEGATIVE, POSITIVE, tokenize
from common import STRIDES, rand, randn, relative_l2, thin, write_case as write


def scales(cfg=1.0, stg=0.0, modality=1.0, rescale=0.0, **more):
    return dict(cfg=cfg, stg=stg, modality=modality, rescale=rescale, **more)


def official_sigmas(steps, tokens=4096):
    """Returns Lightricks' schedule: `steps + 1` values, shifted for the tokens, ending with 0.1 and 0."""
    from ltx_core.components.schedulers import LTX2Scheduler

    return LTX2Scheduler().execute(steps, default_number_of_tokens=tokens)


def verbatim_scheduler():
    """Returns a scheduler that uses the given sigmas unchanged."""
    return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=False, shift=1.0, shift_terminal=None)


def scheduled(scheduler, steps, tokens, given=None):
    """Sets and returns the scheduler's sigmas and timesteps, like the pipeline."""
    lengths = [scheduler.config[key] for key in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")]
    sigmas = np.linspace(1.0, 1 / steps, steps) if given is None else given
    scheduler.set_timesteps(sigmas=sigmas, device="cpu", mu=calculate_shift(tokens, *lengths))
    return scheduler.sigmas, scheduler.timesteps


def guide(latents, sigma, cond, uncond, perturbed, isolated, scales):
    x0 = {k: latents - v * sigma for k, v in dict(c=cond, u=uncond, p=perturbed, m=isolated).items()}
    guided = x0["c"] + (scales["cfg"] - 1) * (x0["c"] - x0["u"])
    guided = guided + scales["stg"] * (x0["c"] - x0["p"]) + (scales["modality"] - 1) * (x0["c"] - x0["m"])
    if scales["rescale"] > 0:
        guided = rescale_noise_cfg(guided, x0["c"], guidance_rescale=scales["rescale"])
    return guided, (latents - guided) / sigma


def guidance():
    """Writes guided Euler steps. Rescaling is per sample."""
    table = {
        "cfg": scales(4.0), "cfg_rescale": scales(3.0, rescale=0.7), "full": scales(7.0, 1.0, 3.0, 0.7), "neutral": scales(),
    }
    scheduler, step = verbatim_scheduler(), 1
    scheduler.set_timesteps(3, sigmas=official_sigmas(3)[:-1].numpy())
    for seed, (case, own) in enumerate(table.items()):
        names = ("latents", "cond", "uncond", "perturbed", "isolated")
        inputs = {key: randn(seed, key, 2, 11, 5, scale=1.0 + 0.3 * i) for i, key in enumerate(names)}
        inputs |= {"sigma": scheduler.sigmas[step], "sigma_next": scheduler.sigmas[step + 1]}
        x0, velocity = guide(inputs["latents"], inputs["sigma"], *(inputs[k] for k in names[1:]), own)
        scheduler.set_begin_index(step)
        scheduler._step_index = None
        following = scheduler.step(velocity, scheduler.timesteps[step], inputs["latents"], return_dict=False)[0]
        write("guidance", case, inputs, {"x0": x0, "velocity": velocity, "latents": following}, seed=seed, scalars=own)


def noise_shapes(pipeline, request):
    frames = (request["num_frames"] - 1) // pipeline.vae_temporal_compression_ratio + 1
    ratio = pipeline.vae_spatial_compression_ratio
    video = (1, pipeline.transformer.config.in_channels, frames, request["height"] // ratio, request["width"] // ratio)
    rate = pipeline.audio_sampling_rate / pipeline.audio_hop_length / pipeline.audio_vae_temporal_compression_ratio
    length, config = round(request["num_frames"] / request["frame_rate"] * rate), pipeline.audio_vae.config
    return video, (1, config.latent_channels, length, config.mel_bins // pipeline.audio_vae_mel_compression_ratio)


def draw_noise(pipeline, request):
    source = torch.Generator("cpu").manual_seed(request["seed"])
    return tuple(torch.randn(shape, generator=source) for shape in noise_shapes(pipeline, request))


def arguments_of(request, **more):
    """Returns a request as arguments of diffusers' pipelines, without size and steps."""
    arguments = {key: request[key] for key in ("prompt", "negative_prompt", "num_frames", "frame_rate", "max_sequence_length")}
    arguments |= dict(spatio_temporal_guidance_blocks=request.get("stg_blocks") or None, return_dict=False)
    for prefix, stream in (("", "video"), ("audio_", "audio")):
        names = dict(guidance_scale="cfg", stg_scale="stg", modality_scale="modality", guidance_rescale="rescale")
        arguments |= {prefix + name: request["guidance"][stream][key] for name, key in names.items()}
    return arguments | more


def run_pipeline(pipeline, request, **more):
    """Runs the pipeline twice: for latents, and for frames and samples."""
    arguments = arguments_of(request, num_inference_steps=request["steps"], **more)
    if request["sigma_shift"] == "official":
        pipeline.scheduler = verbatim_scheduler()
        arguments["sigmas"] = official_sigmas(request["steps"])[:-1].tolist()

    def call(kind):
        arguments["generator"] = torch.Generator("cpu").manual_seed(request["seed"])
        made = pipeline(output_type=kind, width=request["width"], height=request["height"], **arguments)
        return [output.float() for output in made]

    latents, audio_latents = call("latent")
    used = pipeline.scheduler.sigmas.clone()
    video, audio = call("pt")
    return {"latents.video": latents, "latents.audio": audio_latents, "video": video, "audio": audio, "sigmas": used}


def request_of(**more):
    return dict(
        prompt=POSITIVE, negative_prompt=NEGATIVE, frame_rate=24.0, seed=10, max_sequence_length=64, num_frames=9, steps=2,
        guidance={"video": scales(4.0), "audio": scales(4.0)}, sigma_shift="official",
    ) | more


PLAIN = {"video": scales(), "audio": scales()}
RESCALED = {"video": scales(3.0, modality=3.0, rescale=0.7), "audio": scales(7.0, modality=2.0, rescale=0.4)}
FULL = {"video": scales(3.0, 1.0, 3.0, 0.7), "audio": scales(7.0, 1.0, 3.0, 0.7)}
_CASES = {
    "tiny_a_cfg": request_of(width=96, height=64, steps=3, guidance={"video": scales(4.0), "audio": scales(3.0)}),
    "tiny_a_plain": request_of(width=64, height=96, num_frames=1, frame_rate=4.0, seed=3, guidance=PLAIN),
    "tiny_a_diffusers": request_of(width=64, height=96, num_frames=17, sigma_shift="diffusers"),
    "tiny_a_guided": request_of(width=96, height=64, seed=5, guidance=RESCALED),
    "tiny_2_3_cfg": request_of(width=96, height=64, steps=3),
    "tiny_2_3_guided": request_of(width=64, height=64, seed=5, stg_blocks=[1], guidance=FULL),
    "tiny_b_cfg": request_of(width=64, height=32, num_frames=5, frame_rate=12.0, max_sequence_length=48),
    "tiny_b_plain": request_of(
        width=32, height=64, num_frames=17, steps=3, frame_rate=30.0, seed=2**33 + 1, max_sequence_length=52, guidance=PLAIN,
        sigma_shift="diffusers",
    ),
}
# One case per model keeps all rows and columns.
_WHOLE = {
    "tiny_a_plain": {}, "tiny_b_cfg": {"video": (1, 2, 1, 1, 1)},
    "tiny_2_3_guided": {"video": (1, 8, 1, 1, 1), "audio": STRIDES["audio"]},
}
_ROUNDINGS = 6


@contextmanager
def rounded_otherwise(turn):
    """Runs the body with another rounding: another attention kernel, noise changed by up to a quarter of bfloat16's precision."""
    draw, kernel = torch.randn, (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)[turn % 2]

    def changed(*shape, **more):
        noise = draw(*shape, **more)
        return noise * (1 + 2.0**-9 * (rand(turn, "rounding", noise.shape) - 0.5))

    with patch("torch.randn", changed), sdpa_kernel(kernel):
        yield


def pipeline():
    for case, request in _CASES.items():
        name, strides = case.rsplit("_", 1)[0], _WHOLE.get(case, STRIDES)
        whole = models.load_pipeline(name)
        noise, outputs = draw_noise(whole, request), run_pipeline(whole, request)
        half, distances = models.load_pipeline(name, torch.bfloat16), {key: [] for key in outputs if key != "sigmas"}
        for turn in range(_ROUNDINGS):
            with rounded_otherwise(turn):
                run = run_pipeline(half, request)
            for key, found in distances.items():
                (own,), (wide,) = (thin({key: each[key]}, strides)[0].values() for each in (run, outputs))
                found.append(relative_l2(own, wide))
        means = {key: sum(found) / len(found) for key, found in distances.items()}
        extra = {f"bf16_largest.{key}": f"{max(distances[key]) / mean:.3f}" for key, mean in means.items()}
        extra |= {f"bf16_spread.{key}": f"{mean:.6f}" for key, mean in means.items()}
        outputs |= zip(("noise.video", "noise.audio"), noise)
        outputs["attention_mask"] = tokenize(name, [request["prompt"]], request["max_sequence_length"])[1]
        write("pipeline", case, {}, outputs, model=name, seed=request["seed"], scalars=request, extra=extra, strides=strides)
