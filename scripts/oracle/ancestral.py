"""Writes tests/fixtures/samplers/ancestral_loops.json: ancestral Euler by both references.

The velocity is 0.3 times the latents. `official`: a generator seeded with the request's seed + 10000 draws video noise before
audio noise, in f32 or bf16, none in the last step. `diffusers`: the request's generator continues."""

import torch
from diffusers import LTXEulerAncestralRFScheduler
from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES
from ltx_core.components.diffusion_steps import EulerAncestralDiffusionStep

from common import FIXTURES, write_json

SIGMAS = [*DISTILLED_SIGMA_VALUES, 0.0]
TOKENS = [[6, 4], [5, 7]]
SEED = 21


def start():
    generator = torch.Generator("cpu").manual_seed(SEED)
    return generator, [torch.randn(1, n, c, generator=generator) for n, c in TOKENS]


def official(eta, dtype):
    _, latents = start()
    generator, sigmas = torch.Generator("cpu").manual_seed(SEED + 10_000), torch.tensor(SIGMAS)
    stepper = EulerAncestralDiffusionStep(eta=eta)
    for i, sigma in enumerate(sigmas[:-1]):
        after = []
        for x in latents:
            clean = x - sigma * (0.3 * x)
            noise = None if sigmas[i + 1] == 0 else torch.randn(x.shape, generator=generator, dtype=dtype)
            after.append(stepper.step(sample=x, denoised_sample=clean, sigmas=sigmas, step_index=i, noise=noise))
        latents = after
    return latents


def diffusers(eta):
    generator, latents = start()
    schedulers = [LTXEulerAncestralRFScheduler(eta=eta) for _ in TOKENS]
    for scheduler in schedulers:
        scheduler.set_timesteps(sigmas=SIGMAS)
    for t in schedulers[0].timesteps[:-1]:
        step = dict(generator=generator, return_dict=False)
        latents = [scheduler.step(0.3 * x, t, x, **step)[0] for scheduler, x in zip(schedulers, latents)]
    return latents


def ancestral():
    loops = []
    for draws, eta in [("official", 1.0), ("official", 0.5), ("official_bf16", 1.0), ("diffusers", 1.0), ("diffusers", 0.5)]:
        dtype = torch.bfloat16 if draws.endswith("bf16") else torch.float32
        latents = diffusers(eta) if draws == "diffusers" else official(eta, dtype)
        streams = {name: x.flatten().tolist() for name, x in zip(("video", "audio"), latents)}
        loops.append({"draws": draws, "eta": eta, "seed": SEED, "sigmas": SIGMAS, "tokens": TOKENS, **streams})
    write_json(FIXTURES / "samplers" / "ancestral_loops.json", loops, ('{"draws"',))
