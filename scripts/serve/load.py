"""Runs the server's load and fault tests one at a time and writes their figures next to the goals: `make serve-load`.

The page's table of faults names the tests to run; tests/serve/figures.rs writes the figures. Usage: load.py PAGE. Exit code 1
if a test fails or a goal is missed."""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# Tests that stop a process at a moment of its work, which only development builds can: all others run as the server is installed.
STOPPED = ("nano::", "crash::", "command::")
# Measurements in the output of tests.
MEASURED = re.compile(r"^measured: |: p50 .*p99 | are loaded after ")
# A row of the table of faults: fault, and prefix of the tests' names.
FAULT = re.compile(r"^\| (.*?) \| `serve (\S+)` \|.*", re.M)


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def updated(page, figures, log, said):
    """Returns the page with new date, processor, figures and results."""
    row = lambda *cells: "| " + " | ".join(cells) + " |"  # noqa: E731
    word = lambda met: "yes" if met else "**no**"  # noqa: E731

    def fault(old):
        what, name = old.groups()
        ran = [row for row in log if row["test"].startswith(name) and row["outcome"] != "ignored"]
        good = bool(ran) and all(row["outcome"] == "passed" for row in ran)
        seconds = f"{sum(row['seconds'] for row in ran):.1f}" if ran else "not run"
        return row(what, f"`serve {name}`", "; ".join(said.get(name, [])), seconds, word(good))

    goals = "".join(row(goal["what"], goal["goal"], goal["figure"], word(goal["met"])) + "\n" for goal in figures)
    name = re.search(r"^model name\s*: *(.*)", Path("/proc/cpuinfo").read_text(), re.M)
    machine = f"{date.today().isoformat()}, {os.cpu_count()} cores, {name[1].strip() if name else platform.machine()}"
    page = re.sub(r"(?<=`make serve-load`, ).*(?=, release build)", machine, page, count=1)
    page = re.sub(r"(?<= met \|\n\| --- \| --- \| --- \| --- \|\n)(\|.*\n)*", lambda _: goals, page, count=1)
    return FAULT.sub(fault, page)


if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    sys.exit(__doc__)
file = Path(sys.argv[1])
page, said = file.read_text(), {}
with tempfile.TemporaryDirectory() as folder:
    written = {"LTX2_SERVE_FIGURES": f"{folder}/figures", "LTX2_TEST_LOG": f"{folder}/log"}
    env = os.environ | written | {"LTX2_TEST_FULL": "1", "LTX2_SERVE_VIDEOS": "1000"}
    for name in ["figures::", *(name for _, name in FAULT.findall(page))]:
        release = [] if name.startswith(STOPPED) else ["--release"]
        command = ["cargo", "test", "--locked", "--test", "serve", *release, "--", name, "--test-threads", "1"]
        done = subprocess.run(command, cwd=REPOSITORY, env=env, check=False, text=True, stderr=subprocess.PIPE)
        sys.stderr.write(done.stderr)
        said[name] = [line.removeprefix("measured: ") for line in done.stderr.splitlines() if MEASURED.search(line)]
    figures, log = (lines(Path(path)) for path in written.values())
page = updated(page, figures, log, said)
print(page)
file.write_text(page)
failed = [row["test"] for row in log if row["outcome"] == "failed"]
missed = [row["what"] for row in figures if not row["met"]]
for what in [f"{name} failed" for name in failed] + [f"missed: {what}" for what in missed]:
    print(f"load.py: {what}")
sys.exit(1 if failed or missed or not figures else 0)
