"""Writes tests/fixtures/sigmas: noise schedules with nine digits.

`sigmas.json`, of both conventions: `diffusers` (FlowMatchEulerDiscreteScheduler as the LTX-2 pipeline uses it) and `official`
(`ltx-core`). `schedules.json`: `ltx-core`'s schedules that depend only on the number of steps."""

from importlib.metadata import version

import diffusers
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES, STAGE_2_DISTILLED_SIGMA_VALUES
from ltx_core.components.schedulers import BetaScheduler, LinearQuadraticScheduler

from cases_pipeline import official_sigmas, scheduled
from common import FIXTURES, write_json

MODEL = {
    "use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "max_image_seq_len": 4096,
    "shift_terminal": 0.1, "shift": 1.0, "time_shift_type": "exponential", "num_train_timesteps": 1000,
}
DISTILLED = {**MODEL, "use_dynamic_shifting": False, "shift_terminal": None}


def digits(values):
    return [float(f"{float(v):.9g}") for v in values]


def pipeline(config, steps, tokens, given=None):
    sigmas, timesteps = scheduled(FlowMatchEulerDiscreteScheduler.from_config(config), steps, tokens, given)
    asked = {"config": config, "steps": steps, "tokens": tokens, "given": given}
    return asked | {"sigmas": digits(sigmas), "timesteps": digits(timesteps)}


def sigmas_json():
    cases = [
        pipeline(MODEL, 8, 6144), pipeline(MODEL, 30, 6144), pipeline(MODEL, 40, 6144), pipeline(MODEL, 30, 15360),
        pipeline(MODEL, 2, 4), pipeline(MODEL, 7, 105), pipeline(MODEL, 3, 4096, [1.0, 0.7, 0.2]),
        pipeline({**MODEL, "time_shift_type": "linear"}, 9, 6144), pipeline({**MODEL, "shift_terminal": None}, 1, 512),
        pipeline({**MODEL, "shift_terminal": 0.0}, 5, 512), pipeline(DISTILLED, 8, 6144, DISTILLED_SIGMA_VALUES),
        pipeline(DISTILLED, 3, 24576, STAGE_2_DISTILLED_SIGMA_VALUES),
        pipeline({**DISTILLED, "shift": 3.0, "shift_terminal": 0.05, "num_train_timesteps": 500}, 11, 64),
        pipeline({}, 2, 512),  # the class's own defaults
    ]
    counts = [*((steps, 4096) for steps in (2, 3, 8, 13, 30, 40, 256)), (15, 8160), (6, 105)]
    official = [{"steps": n, "tokens": t, "sigmas": digits(official_sigmas(n, t))} for n, t in counts]
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__, "numpy": np.__version__}
    data = dict(versions=versions, seed=None, official=official, diffusers=cases)
    write_json(FIXTURES / "sigmas" / "sigmas.json", data, ('{"steps"', '{"config"', '"diffusers":['))


def schedules():
    linear, beta, others, steps = LinearQuadraticScheduler(), BetaScheduler(), BetaScheduler(), (1, 2, 3, 7, 8, 20, 40, 256)
    others.shift = 1.2
    data = {
        "versions": {name: version(name) for name in ("ltx-core", "torch", "scipy")},
        "linear_quadratic": [digits(linear.execute(n)) for n in steps], "beta": [digits(beta.execute(n)) for n in steps],
        "beta_of_others": [digits(others.execute(n, alpha=0.9, beta=0.4)) for n in steps],
    }
    write_json(FIXTURES / "sigmas" / "schedules.json", data, ('"linear_quadratic"', '"beta"', '"beta_of_others"'))
