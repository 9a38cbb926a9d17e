"""Writes tests/fixtures/sigmas/schedules.json: ltx-core's schedules that depend only on the number of steps, with nine digits."""

from importlib.metadata import version

from ltx_core.components.schedulers import BetaScheduler, LinearQuadraticScheduler

from common import FIXTURES, write_json
from sigmas import digits

STEPS = (1, 2, 3, 7, 8, 20, 40, 256)


def schedules():
    versions = {name: version(name) for name in ("ltx-core", "torch", "scipy")}
    data = {"script": "scripts/oracle/schedules.py", "versions": versions}
    data["linear_quadratic"] = [digits(LinearQuadraticScheduler().execute(n)) for n in STEPS]
    data["beta"] = [digits(BetaScheduler().execute(n)) for n in STEPS]
    others = BetaScheduler()
    others.shift = 1.2
    data["beta_of_others"] = [digits(others.execute(n, alpha=0.9, beta=0.4)) for n in STEPS]
    write_json(FIXTURES / "sigmas" / "schedules.json", data, ('"linear_quadratic"', '"beta"', '"beta_of_others"'))
