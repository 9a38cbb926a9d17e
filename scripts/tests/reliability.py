"""Runs the tests of docs/internals/reliability.md in full, one by one; prints per failure mode: pass, FAIL or not run.

A row passes if all its tests pass. Exit code 1 unless all rows pass."""

import functools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/internals/reliability.md"


@functools.cache
def run(test):
    binary, path = test.split(" ", 1)
    crate = "ltx2" if binary == "lib" else f"ltx2-{binary}" if (ROOT / "crates" / binary).is_dir() else None
    where = ["-p", crate, "--lib"] if crate else ["--test", binary]
    command = ["cargo", "test", "--quiet", "--locked", *where, "--", "--exact", path]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"LTX2_TEST_FULL": "1"}, capture_output=True, text=True)
    return "FAIL" if done.returncode else "pass" if " 1 passed; 0 failed" in done.stdout else "not run"


counts, lines = Counter(), PAGE.read_text().splitlines()
for line, following in zip(lines, [*lines[1:], ""]):
    if line.startswith("## "):
        print(f"\n{line}\n")
    if not line.startswith("|") or line.startswith("|-") or following.startswith("|-"):
        continue
    fault, *_, tests = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")))
    states = {test: run(test) for test in re.findall(r"`([^`]+)`", tests)}
    row = next((state for state in ("FAIL", "not run") if state in states.values()), "pass")
    counts[row] += 1
    others = "; ".join(test for test, state in states.items() if state == row != "pass")
    print(f"{row:8} {fault}{f' ({others})' if others else ''}", flush=True)
print(f"\n{counts.total()} rows: {counts['pass']} pass, {counts['FAIL']} fail, {counts['not run']} not run")
sys.exit(counts["pass"] != counts.total())
