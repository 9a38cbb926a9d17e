#!/usr/bin/env python3
"""Runs the server's load and fault tests one at a time and writes their figures next to the goals: `make serve-load`.

    load.py -o benchmarks/serving.md [--figures-only]

Figures come from tests/serve/figures.rs. Exit code 1 if a test fails or a goal is missed.
"""

import argparse
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
# Faults by test name prefix.
FAULTS = json.loads((Path(__file__).parent / "faults.json").read_text())


# Tests that stop a process at a moment of its work, which only development builds can: all others run as the server is installed.
STOPPED = ("nano::", "crash::", "command::")

# Measurements in the output of tests.
MEASURED = re.compile(r"^measured: |: p50 .*p99 | are there after ")


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run(filters, folder):
    """Runs tests in full, one at a time; returns figures, results and messages."""
    figures, log = folder / "figures", folder / "log"
    command = ["cargo", "test", "--locked", "--test", "serve"]
    env = os.environ | {"LTX2_TEST_FULL": "1", "LTX2_SERVE_FIGURES": str(figures), "LTX2_TEST_LOG": str(log)}
    said = {}
    for name in filters:
        done = subprocess.run(
            [*command, *([] if name.startswith(STOPPED) else ["--release"]), "--", name, "--test-threads", "1"],
            cwd=REPOSITORY,
            env=env,
            check=False,
            text=True,
            stderr=subprocess.PIPE,
        )
        sys.stderr.write(done.stderr)
        said[name] = [line.removeprefix("measured: ") for line in done.stderr.splitlines() if MEASURED.search(line)]
    return lines(figures), lines(log), said


def processor():
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.machine()}"


def table(rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def page(figures, log, said):
    word = lambda met: "yes" if met else "**no**"  # noqa: E731
    goals = [("measured", "goal", "figure", "met"), ("---", "---", "---", "---")]
    goals += [(row["what"], row["goal"], row["figure"], word(row["met"])) for row in figures]
    faults = [("fault", "test", "measured", "seconds", "passed"), ("---",) * 5]
    for name, what in FAULTS.items():
        ran = [row for row in log if row["test"].startswith(name) and row["outcome"] != "ignored"]
        good = bool(ran) and all(row["outcome"] == "passed" for row in ran)
        seconds = f"{sum(row['seconds'] for row in ran):.1f}" if ran else "not run"
        faults.append((what, f"`serve {name}`", "; ".join(said.get(name, [])), seconds, word(good)))
    return f"""# The server under load

`make serve-load`, {date.today().isoformat()}, {processor()}, release build, one test at a time. ({", ".join(f"`{name}`" for name in STOPPED)} use a
development build, in which a test can stop the process at a given point.) Client and server share one process and talk over
loopback. A scripted device replaces the model, so the figures are the server's overhead. The state folder is on a RAM disk; on
other disks, each create and each change of status also waits for a sync. Memory is that of the test process, which limits its
heaps like `ltx2 serve`; `cargo test --test serve memory::` measures the server with the toy model.

## Goals

Times are the median and the 99th percentile.

{table(goals)}

## Faults

{table(faults)}

Run one test with `LTX2_TEST_FULL=1 cargo test --test serve NAME`.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--figures-only", action="store_true", help="without the faults; nothing is written")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures, log, said = run(["figures::", *([] if arguments.figures_only else FAULTS)], Path(folder))
    text = page(figures, log, said)
    print(text)
    if not arguments.figures_only:
        Path(arguments.output).write_text(text)
    failed = [row["test"] for row in log if row["outcome"] == "failed"]
    missed = [row["what"] for row in figures if not row["met"]]
    for name in failed:
        print(f"load.py: {name} failed")
    for what in missed:
        print(f"load.py: missed: {what}")
    return 1 if failed or missed or not figures else 0


if __name__ == "__main__":
    sys.exit(main())
