"""Writes tests/fixtures/sigmas/sigmas.json: noise schedules of both conventions, with nine digits.

`diffusers`: FlowMatchEulerDiscreteScheduler as the LTX-2 pipeline uses it. `official`: the published formula in torch, checked
against `ltx-core`.
"""

import math

import diffusers
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift

from common import FIXTURES, write_json

# Published schedules with six digits.
GOLDEN = {
    (30, 4096): {1: 0.994957, 10: 0.930994, 20: 0.766363, 28: 0.266120, 29: 0.1, 30: 0.0},
    (40, 4096): {1: 0.996449, 10: 0.955593, 20: 0.876908, 38: 0.233936, 39: 0.1},
    (15, 8160): {1: 0.993491, 7: 0.922140, 13: 0.503378, 14: 0.1},
}

MODEL = {
    "use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024,
    "max_image_seq_len": 4096, "shift_terminal": 0.1, "shift": 1.0, "time_shift_type": "exponential",
    "num_train_timesteps": 1000,
}  # fmt: skip
DISTILLED = {**MODEL, "use_dynamic_shifting": False, "shift_terminal": None}


def digits(values) -> list[float]:
    return [float(f"{float(v):.9g}") for v in values]


def official(steps: int, tokens: int) -> dict:
    sigmas = torch.linspace(1.0, 0.0, steps + 1)
    slope = (2.05 - 0.95) / (4096 - 1024)
    weight = math.exp(tokens * slope + (0.95 - slope * 1024))
    sigmas = torch.where(sigmas != 0, weight / (weight + (1 / sigmas - 1)), 0)
    body = 1.0 - sigmas[:-1]
    sigmas[:-1] = 1.0 - body / (body[-1] / (1.0 - 0.1))
    for index, value in GOLDEN.get((steps, tokens), {}).items():
        assert abs(sigmas[index] - value) < 1e-6, (steps, tokens, index, sigmas[index], value)
    try:
        from ltx_core.components.schedulers import LTX2Scheduler
    except ImportError:
        pass
    else:
        assert torch.equal(sigmas, LTX2Scheduler().execute(steps, default_number_of_tokens=tokens)), (steps, tokens)
    return {"steps": steps, "tokens": tokens, "sigmas": digits(sigmas)}


def pipeline(config: dict, steps: int, tokens: int, given: list[float] | None = None) -> dict:
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    lengths = (scheduler.config[k] for k in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"))
    mu = calculate_shift(tokens, *lengths)
    sigmas = np.linspace(1.0, 1 / steps, steps) if given is None else given
    scheduler.set_timesteps(sigmas=sigmas, device="cpu", mu=mu)
    table, timesteps = digits(scheduler.sigmas), digits(scheduler.timesteps)
    return {"config": config, "steps": steps, "tokens": tokens, "given": given, "sigmas": table, "timesteps": timesteps}


def main() -> None:
    stage1 = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875]
    cases = [
        pipeline(MODEL, 8, 6144),
        pipeline(MODEL, 30, 6144),
        pipeline(MODEL, 40, 6144),
        pipeline(MODEL, 30, 15360),
        pipeline(MODEL, 2, 4),
        pipeline(MODEL, 7, 105),
        pipeline(MODEL, 3, 4096, [1.0, 0.7, 0.2]),
        pipeline({**MODEL, "time_shift_type": "linear"}, 9, 6144),
        pipeline({**MODEL, "shift_terminal": None}, 1, 512),
        pipeline({**MODEL, "shift_terminal": 0.0}, 5, 512),
        pipeline(DISTILLED, 8, 6144, stage1),
        pipeline(DISTILLED, 3, 24576, [0.909375, 0.725, 0.421875]),
        pipeline({**DISTILLED, "shift": 3.0, "shift_terminal": 0.05, "num_train_timesteps": 500}, 11, 64),
        pipeline({}, 2, 512),  # the class's own defaults
    ]
    counts = [(2, 4096), (3, 4096), (8, 4096), (13, 4096), (30, 4096), (40, 4096), (256, 4096), (15, 8160), (6, 105)]
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "numpy": np.__version__}
    meta = {"script": "scripts/oracle/sigmas.py", "versions": versions, "seed": None}
    data = {**meta, "official": [official(*c) for c in counts], "diffusers": cases}
    write_json(FIXTURES / "sigmas" / "sigmas.json", data, ('{"steps"', '{"config"', '"diffusers":['))


COMPONENTS = {"sigmas_json": main}
