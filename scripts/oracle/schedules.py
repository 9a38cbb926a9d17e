#!/usr/bin/env python3
"""Writes tests/fixtures/sigmas/schedules.json: ltx-core's schedules that depend on the number of steps alone.

Numbers carry nine digits, which name a float32 exactly.
"""

import json
from importlib.metadata import version
from pathlib import Path

from ltx_core.components.schedulers import BetaScheduler, LinearQuadraticScheduler

from sigmas import digits

OUT = Path(__file__).parents[2] / "tests/fixtures/sigmas/schedules.json"
STEPS = (1, 2, 3, 7, 8, 20, 40, 256)


def main() -> None:
    versions = {name: version(name) for name in ("ltx-core", "torch", "scipy")}
    data = {"script": "scripts/oracle/schedules.py", "versions": versions}
    data["linear_quadratic"] = [digits(LinearQuadraticScheduler().execute(n)) for n in STEPS]
    data["beta"] = [digits(BetaScheduler().execute(n)) for n in STEPS]
    others = BetaScheduler()
    others.shift = 1.2
    data["beta_of_others"] = [digits(others.execute(n, alpha=0.9, beta=0.4)) for n in STEPS]
    text = json.dumps(data, separators=(",", ":"))
    for name in ("linear_quadratic", "beta", "beta_of_others"):
        text = text.replace(f'"{name}"', f'\n"{name}"')
    OUT.write_text(text + "\n")


if __name__ == "__main__":
    main()
